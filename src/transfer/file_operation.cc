#include "transfer/file_operation.h"

#include <algorithm>
#include <cerrno>

#include "base/check.h"

namespace dualdecoder {
namespace {
constexpr std::uint32_t kRetriesMax = 1000;
}

std::optional<int> FileOperation::account(std::int64_t result) {
  if (result == -EINTR || result == -EAGAIN) {
    if (++retries < kRetriesMax) return std::nullopt;
    return static_cast<int>(-result);
  }
  if (result < 0) return static_cast<int>(-result);
  // Only whole units count, so that what is left stays aligned. Less than one is the end of the file.
  std::uint64_t moved = static_cast<std::uint64_t>(result) / kPortAlignment * kPortAlignment;
  if (moved == 0) return EIO;
  DD_CHECK(moved <= bytes_left, "{} of {} bytes", moved, bytes_left);
  retries = 0;
  far_offset += moved;
  bytes_left -= moved;
  while (moved > 0) {
    iovec& first = segments.front();
    const std::size_t step = std::min<std::uint64_t>(moved, first.iov_len);
    first.iov_base = static_cast<std::byte*>(first.iov_base) + step;
    first.iov_len -= step;
    moved -= step;
    if (first.iov_len == 0) segments = segments.subspan(1);
  }
  if (bytes_left > 0) return std::nullopt;
  return 0;
}

FileOperations::FileOperations(std::uint32_t depth)
    : operations_(depth),
      segments_(std::make_unique_for_overwrite<iovec[]>(std::size_t{depth} * kPortSegmentsMax)) {
  DD_CHECK(depth > 0, "no depth");
  for (std::uint32_t i = depth; i > 0; --i) free_.push_back(i - 1);
}

std::uint32_t FileOperations::take(const Copy& copy, std::uint64_t bytes) {
  DD_CHECK(!free_.empty(), "more than {} copies in flight", operations_.size());
  const std::uint32_t index = free_.back();
  free_.pop_back();
  iovec* segments = segments_.get() + std::size_t{index} * kPortSegmentsMax;
  std::copy(copy.segments.begin(), copy.segments.end(), segments);
  operations_[index] = {.kind = copy.kind,
                        .far_offset = copy.far_offset,
                        .bytes_left = bytes,
                        .tag = copy.tag,
                        .segments = {segments, copy.segments.size()}};
  return index;
}

}  // namespace dualdecoder
