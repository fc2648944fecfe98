// Where the slots of the near tier lie: in this machine's memory, or in that of a device, which the host
// cannot touch. Addresses in the latter are handed around as if they were pointers; only what is declared
// here looks behind them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace dualdecoder {

struct NearCopy {
  std::byte* near = nullptr;
  std::byte* host = nullptr;
  std::size_t bytes = 0;
  bool into_near = true;
};

class NearMemory {
 public:
  virtual ~NearMemory() = default;

  virtual std::byte* data() const = 0;
  /// Whether data() may be read and written through.
  virtual bool on_host() const = 0;
  /// Takes all memory from the system now.
  virtual void populate() const = 0;

  /// All have been carried out on return, in any order. From any thread.
  virtual void copy(std::span<const NearCopy> copies) = 0;
  virtual void copy_within(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void fill(std::byte* to, std::uint8_t value, std::size_t bytes) = 0;
  /// Host memory between which and this one copies are fastest; it lives as long as this. Null when there is
  /// not enough.
  virtual std::byte* take_host_memory(std::size_t bytes) = 0;
};

/// Null when the system refuses; errno says why.
std::unique_ptr<NearMemory> make_host_near_memory(std::size_t bytes);

}  // namespace dualdecoder
