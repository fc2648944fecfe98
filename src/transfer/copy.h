// What the ports share about copies: the contract's checks, and moving bytes between memory and memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transfer/port.h"

namespace dualdecoder {

/// The copy's length. Ends the process if the copy breaks the port's contract (alignment, number of
/// segments).
std::uint64_t checked_copy_bytes(const Copy& copy);

inline bool copy_fits(std::uint64_t far_offset, std::uint64_t bytes, std::uint64_t far_bytes) {
  return far_offset <= far_bytes && bytes <= far_bytes - far_offset;
}

/// Moves the first `bytes` of the segments to `far`, or from there to the segments.
void move_segments(CopyKind kind, std::span<const iovec> segments, std::byte* far, std::uint64_t bytes);

}  // namespace dualdecoder
