// The two kinds of file port, for make_file_port() to choose from.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "transfer/file_port.h"

namespace dualdecoder {

/// The longest single wait: what a clock can add to now.
inline constexpr std::chrono::nanoseconds kFileWaitMax = std::chrono::hours(1);

/// Fails (kUnsupported) with the system's reason where io_uring is refused or too old.
Result<std::unique_ptr<Port>> make_uring_port(const FarFile& file, std::span<std::byte> near_memory,
                                              const FilePortOptions& options);
/// `reason`: why not io_uring, for the description; may be empty.
Result<std::unique_ptr<Port>> make_thread_port(const FarFile& file, const FilePortOptions& options,
                                               const std::string& reason);

}  // namespace dualdecoder
