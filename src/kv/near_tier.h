// The near tier: a fixed arena of block-sized slots in fast memory. Address space for all slots is taken at
// start; the system gives memory when a slot is first written, so what is resident is the most that has been
// in use so far, never above the arena.
//
// A slot is free or in use; take() and give_back() are the only transitions. Owned by the engine thread; the
// attention threads read and write slot contents while the engine thread waits for them.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "kv/geometry.h"

namespace dualdecoder {

class NearTier {
 public:
  static Result<std::unique_ptr<NearTier>> create(const KvGeometry& geometry, std::uint32_t slots);
  ~NearTier();
  NearTier(const NearTier&) = delete;
  NearTier& operator=(const NearTier&) = delete;

  const KvGeometry& geometry() const { return geometry_; }
  std::uint32_t slots() const { return slots_; }
  std::uint32_t slots_free() const { return static_cast<std::uint32_t>(free_.size()); }
  std::size_t bytes_in_use() const { return std::size_t{slots_ - slots_free()} * geometry_.block_bytes(); }
  std::size_t bytes_capacity() const { return std::size_t{slots_} * geometry_.block_bytes(); }

  /// Nothing when all slots are in use. The contents are what the last owner left.
  std::optional<SlotIndex> try_take();
  void give_back(SlotIndex slot);

  f16_bits* k(SlotIndex slot) const {
    return arena_ + std::size_t{slot.value} * 2 * geometry_.half_block_elements();
  }
  f16_bits* v(SlotIndex slot) const { return k(slot) + geometry_.half_block_elements(); }

 private:
  NearTier(const KvGeometry& geometry, std::uint32_t slots) : geometry_(geometry), slots_(slots) {}

  KvGeometry geometry_;
  std::uint32_t slots_;
  f16_bits* arena_ = nullptr;
  std::vector<SlotIndex> free_;  // a stack: the slot given back last is the warmest
  std::vector<bool> in_use_;     // catches a slot given back twice
};

}  // namespace dualdecoder
