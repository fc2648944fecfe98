// The far tier in host memory beside near memory that the host cannot touch: a thread carries the copies
// out, all that wait together, while the engine goes on.
#pragma once

#include <cstdint>
#include <memory>

#include "base/error.h"
#include "kv/near_memory.h"
#include "transfer/port.h"

namespace dualdecoder {

/// `near` outlives the port. kOutOfMemory when the host has no room for `bytes`.
Result<std::unique_ptr<Port>> make_beside_port(std::uint64_t bytes, NearMemory& near,
                                               std::uint32_t depth = 256);

}  // namespace dualdecoder
