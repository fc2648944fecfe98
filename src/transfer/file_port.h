// The port to a far file: io_uring, or a few threads with blocking calls where the system refuses that
// (containers often do).
//
// Copies are held back until flush(), poll() or wait() and then go to the system together. A copy beyond what
// the file has reserved, or beyond its end because somebody truncated it, completes with EIO. The destructor
// waits for what is in flight. Used by one thread, the one that uses the file; the file outlives the port.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/error.h"
#include "transfer/far_file.h"
#include "transfer/port.h"

namespace dualdecoder {

struct FilePortOptions {
  std::uint32_t depth = 128;
  bool allow_uring = true;
  /// Registers near_memory with io_uring, which saves the kernel the page lookups of each copy. All of it
  /// becomes resident and stays so. Where the limit of locked memory forbids it, copies work without.
  bool register_memory = true;
  std::uint32_t threads = 4;  // without io_uring
};

/// `near_memory` is where most copies come from and go to; others work too. May be empty.
Result<std::unique_ptr<Port>> make_file_port(const FarFile& file, std::span<std::byte> near_memory,
                                             const FilePortOptions& options);

}  // namespace dualdecoder
