// A large piece of memory that the system gives page by page, where it is first written: what is not touched
// takes none. Reads as zeros. Huge pages are asked for, which saves page faults and TLB misses.
#pragma once

#include <cstddef>
#include <utility>

namespace dualdecoder {

class AnonymousMemory {
 public:
  /// Without data when the system refuses; errno says why.
  static AnonymousMemory map(std::size_t bytes);
  AnonymousMemory() = default;
  ~AnonymousMemory();
  AnonymousMemory(AnonymousMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  AnonymousMemory& operator=(AnonymousMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  /// Takes all of it now, so that no first write waits for the system. As far as the system can: the rest
  /// comes as before.
  void populate() const;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace dualdecoder
