#include "transfer/copy.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace dualdecoder {

std::uint64_t checked_copy_bytes(const Copy& copy) {
  DD_CHECK(!copy.segments.empty() && copy.segments.size() <= kPortSegmentsMax, "{} segments",
           copy.segments.size());
  DD_CHECK(copy.far_offset % kPortAlignment == 0, "far offset {}", copy.far_offset);
  std::uint64_t bytes = 0;
  for (const iovec& segment : copy.segments) {
    const auto address = reinterpret_cast<std::uintptr_t>(segment.iov_base);
    DD_CHECK(address % kPortAlignment == 0, "near address {:#x}", address);
    DD_CHECK(segment.iov_len > 0 && segment.iov_len % kPortAlignment == 0, "{} bytes", segment.iov_len);
    bytes += segment.iov_len;
  }
  return bytes;
}

void move_segments(CopyKind kind, std::span<const iovec> segments, std::byte* far, std::uint64_t bytes) {
  for (const iovec& segment : segments) {
    const std::size_t length = std::min<std::uint64_t>(segment.iov_len, bytes);
    if (length == 0) return;
    if (kind == CopyKind::kRead) {
      std::memcpy(segment.iov_base, far, length);
    } else {
      std::memcpy(far, segment.iov_base, length);
    }
    far += length;
    bytes -= length;
  }
}

}  // namespace dualdecoder
