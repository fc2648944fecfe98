// The near tier: one fixed arena of block-sized slots in fast memory, 4 KiB-aligned. Most slots belong to
// shares, one share for each sequence: in it every layer has a fixed number of slots, so that no sequence can
// take another's. Layers may have their selected blocks in a ring instead: a few sets of slots, each for
// several layers in turn, so that they take no more for more layers. The rest is staging, through which older
// KV streams.
//
// Address space for all slots is taken at start; the system gives memory when a slot is first written, so
// what is resident is the most that has been in use so far, never above the arena. The arena may be a
// device's memory instead (kv/near_memory.h): addresses of slots are then for its operations and copies
// alone. Which slot holds what is kv/residency.h. Owned by the engine thread; the attention threads and the
// far tier's port read and write slot contents while the engine thread leaves them alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "kv/geometry.h"
#include "kv/near_memory.h"

namespace dualdecoder {

using ShareIndex = StrongInt<struct ShareIndexTag>;
inline constexpr std::uint32_t kNoRing = UINT32_MAX;
/// Takes memory for an arena of that many bytes.
using TakeNearMemory = std::function<Result<std::unique_ptr<NearMemory>>(std::size_t bytes)>;

struct NearTierOptions {
  KvGeometry geometry = {};
  std::vector<std::uint32_t> layer_slots;      // [layer], of one share
  std::vector<std::uint32_t> layer_ring = {};  // [layer] the set of the ring for its selection, or kNoRing
  std::uint32_t ring_sets = 0;
  std::uint32_t ring_set_slots = 0;  // of one set of one share
  std::uint32_t shares = 1;
  std::uint32_t staging_slots = 0;
  /// For tests: what is no longer valid is overwritten with NaN, so that reading it shows.
  bool poison = false;
  TakeNearMemory take_memory = {};  // null: the host's
};

class NearTier {
 public:
  static Result<std::unique_ptr<NearTier>> create(const NearTierOptions& options);
  NearTier(const NearTier&) = delete;
  NearTier& operator=(const NearTier&) = delete;

  const KvGeometry& geometry() const { return options_.geometry; }
  std::uint32_t layer_slots(LayerIndex layer) const { return options_.layer_slots[layer.value]; }
  std::uint32_t ring_of(LayerIndex layer) const {
    return options_.layer_ring.empty() ? kNoRing : options_.layer_ring[layer.value];
  }
  std::uint32_t ring_sets() const { return options_.ring_sets; }
  std::uint32_t ring_set_slots() const { return options_.ring_set_slots; }
  std::uint32_t staging_slots() const { return options_.staging_slots; }

  /// Nothing when every share is taken.
  std::optional<ShareIndex> try_take_share();
  void give_back_share(ShareIndex share);

  /// The index-th slot of a layer, index < layer_slots(layer).
  SlotIndex slot(ShareIndex share, LayerIndex layer, std::uint32_t index) const {
    return SlotIndex(share.value * share_slots_ + slot_table_[layer_first_[layer.value] + index]);
  }
  /// The index-th slot of a set of the ring, index < ring_set_slots().
  SlotIndex ring_slot(ShareIndex share, std::uint32_t set, std::uint32_t index) const {
    return SlotIndex(share.value * share_slots_ + static_cast<std::uint32_t>(slot_table_.size()) +
                     set * options_.ring_set_slots + index);
  }
  SlotIndex staging_slot(std::uint32_t index) const {
    return SlotIndex(options_.shares * share_slots_ + index);
  }
  f16_bits* k(SlotIndex slot) const { return reinterpret_cast<f16_bits*>(data(slot)); }
  f16_bits* v(SlotIndex slot) const { return k(slot) + geometry().half_block_elements(); }
  /// slot_bytes() of the geometry.
  std::byte* data(SlotIndex slot) const {
    return memory_->data() + std::size_t{slot.value} * geometry().slot_bytes();
  }
  NearMemory& memory() const { return *memory_; }
  /// K of a slot in the layout kTransposedKeys, wherever and however it is kept. `scratch` may be written.
  const f16_bits* transposed_keys(SlotIndex slot, std::vector<f16_bits>& scratch) const;
  std::span<std::byte> arena() const { return {memory_->data(), bytes_capacity()}; }

  std::size_t bytes_capacity() const { return std::size_t{slots()} * geometry().slot_bytes(); }
  std::size_t bytes_in_use() const { return std::size_t{slots_in_use_} * geometry().slot_bytes(); }
  std::uint32_t slots() const { return options_.shares * share_slots_ + options_.staging_slots; }

  /// Bookkeeping of kv/residency.h: a slot came into use, or its contents are no longer wanted.
  void note_taken() { ++slots_in_use_; }
  void note_freed(SlotIndex slot);

 private:
  explicit NearTier(const NearTierOptions& options);
  void poison(std::byte* from, std::size_t bytes);

  NearTierOptions options_;
  std::uint32_t share_slots_ = 0;
  std::vector<std::uint32_t> slot_table_;  // [layer, index] -> slot within the share
  std::vector<std::uint32_t> layer_first_;
  std::unique_ptr<NearMemory> memory_;
  std::vector<ShareIndex> free_shares_;  // a stack: the share given back last is the warmest
  std::vector<bool> share_taken_;        // catches a share given back twice
  std::uint32_t slots_in_use_ = 0;
};

}  // namespace dualdecoder
