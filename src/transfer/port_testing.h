// For tests of ports: aligned near memory, and copies one at a time.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>

#include <gtest/gtest.h>

#include "base/check.h"
#include "transfer/port.h"

namespace dualdecoder {

class AlignedMemory {
 public:
  explicit AlignedMemory(std::size_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(kPortAlignment, bytes))), bytes_(bytes) {
    DD_CHECK(data_ != nullptr, "{} bytes", bytes);
    std::fill_n(data_.get(), bytes, std::byte{0});
  }
  std::span<std::byte> span() { return {data_.get(), bytes_}; }
  std::span<std::byte> unit(std::size_t index) {
    return span().subspan(index * kPortAlignment, kPortAlignment);
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t bytes_;
};

inline iovec segment_of(std::span<std::byte> bytes) {
  return {.iov_base = bytes.data(), .iov_len = bytes.size()};
}

inline void fill_random(std::span<std::byte> bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < bytes.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t value = random();
    std::memcpy(bytes.data() + i, &value, std::min(sizeof(value), bytes.size() - i));
  }
}

inline void submit(Port& port, CopyKind kind, std::uint64_t far_offset, std::span<std::byte> near,
                   std::uint64_t tag = 0) {
  const iovec segment = segment_of(near);
  port.submit({.kind = kind, .far_offset = far_offset, .segments = {&segment, 1}, .tag = tag});
}

/// The next completion's error; -1 when none came.
inline int wait_for_one(Port& port) {
  Completion completion;
  if (port.wait({&completion, 1}, std::chrono::seconds(60)) != 1) return -1;
  return completion.error;
}

inline int copy_now(Port& port, CopyKind kind, std::uint64_t far_offset, std::span<std::byte> near) {
  submit(port, kind, far_offset, near);
  return wait_for_one(port);
}

}  // namespace dualdecoder
