// Copies of a file port that are under way, in a pool that allocates once. Each has its own segments, because
// the system calls read them after submit() has returned and because a short transfer moves their begin.
// Owned by the thread that uses the port; while a copy is with a helper thread, only that thread touches it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "transfer/port.h"

namespace dualdecoder {

struct FileOperation {
  CopyKind kind = CopyKind::kRead;
  std::uint64_t far_offset = 0;  // of what is left
  std::uint64_t bytes_left = 0;
  std::uint64_t tag = 0;
  std::span<iovec> segments;  // what is left
  std::uint32_t retries = 0;  // in a row

  /// Accounts for a system call's result (bytes moved, or -errno). Nothing: the call is to be made again for
  /// what is left. Otherwise the completion's error, 0 when all is moved.
  std::optional<int> account(std::int64_t result);
};

class FileOperations {
 public:
  explicit FileOperations(std::uint32_t depth);

  std::uint32_t in_flight() const { return static_cast<std::uint32_t>(operations_.size() - free_.size()); }
  FileOperation& operator[](std::uint32_t index) { return operations_[index]; }
  /// Takes an operation for a copy of `bytes`; more than depth at once is our mistake.
  std::uint32_t take(const Copy& copy, std::uint64_t bytes);
  void give_back(std::uint32_t index) { free_.push_back(index); }

 private:
  std::vector<FileOperation> operations_;
  std::unique_ptr<iovec[]> segments_;  // [depth, kPortSegmentsMax]; untouched parts take no memory
  std::vector<std::uint32_t> free_;
};

}  // namespace dualdecoder
