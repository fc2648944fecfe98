// The far tier in this machine's memory: for machines whose compute has memory of its own, for tests, and to
// see what a link without latency would give. A copy is done when submit() returns; only its completion waits
// to be taken. What was never written reads as zeros. Used by one thread.
#pragma once

#include <cstdint>
#include <memory>

#include "base/error.h"
#include "transfer/port.h"

namespace dualdecoder {

/// Takes address space for `bytes`; the system gives memory where something is written first. A copy that
/// reaches beyond it completes with EIO.
Result<std::unique_ptr<Port>> make_host_port(std::uint64_t bytes, std::uint32_t depth = 128);

}  // namespace dualdecoder
