// Which blocks of one sequence are near, layer by layer, in the slots of its share of the near tier.
//
// A slot's states, and every legal transition:
//
//   free    -> held      try_take(kHeld)     new tokens will be written into it
//   free    -> loading   try_take(kLoading)  a read from the far tier is on its way
//   clean   -> held, loading                 the same, in the place of the block wanted longest ago
//   held    -> writing   begin_write         full; its write to the far tier is on its way
//   writing -> clean     end_write           the far tier has it: may be dropped at any time
//   writing -> held      fail_write          exists only here again
//   loading -> clean     end_read
//   loading -> free      fail_read
//   clean   -> held      reopen              tokens were cut off; it will be filled again
//   held, clean -> free  drop
//
// What the next attention needs is kept by `want`: a block wanted in step s gives its slot away only in a
// later step. Readable are held, writing and clean. Without a far tier blocks stay held.
//
// A layer's slots are a pool. Where its selection goes through the ring, selected blocks come into the pool
// of that set of the ring, which other layers use in turn. Owned by the engine thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "kv/near_tier.h"

namespace dualdecoder {

enum class SlotState : std::uint8_t { kFree, kHeld, kWriting, kLoading, kClean };
const char* slot_state_name(SlotState state);

/// Of which pool a block takes a slot. The same one, unless the layer's selection goes through the ring.
enum class PoolKind { kLayer, kSelection };

class Residency {
 public:
  /// `blocks_max`: of the longest context. Takes a share; kOutOfMemory when none is left.
  static Result<std::unique_ptr<Residency>> create(NearTier& near, std::uint32_t blocks_max);
  /// No transfer may be in flight.
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  const KvGeometry& geometry() const { return near_.geometry(); }
  NearTier& near() const { return near_; }

  SlotState state(LayerIndex layer, BlockIndex block) const {
    const std::uint32_t place = place_of(layer, block);
    return place == kNowhere ? SlotState::kFree : slots_[place].state;
  }
  bool near(LayerIndex layer, BlockIndex block) const { return place_of(layer, block) != kNowhere; }
  /// It is near, in a slot of the ring.
  bool in_ring(LayerIndex layer, BlockIndex block) const {
    const std::uint32_t place = place_of(layer, block);
    return place != kNowhere && place >= pool_first_[geometry().layers];
  }
  bool readable(LayerIndex layer, BlockIndex block) const {
    const SlotState s = state(layer, block);
    return s == SlotState::kHeld || s == SlotState::kWriting || s == SlotState::kClean;
  }
  /// Adds the layer's clean blocks in [first, end) to `blocks`, in any order.
  void list_clean(LayerIndex layer, BlockIndex first, BlockIndex end, std::vector<BlockIndex>& blocks) const;
  /// The block is near.
  SlotIndex slot(LayerIndex layer, BlockIndex block) const;

  /// A slot for a block that is not near: a free one, or that of the clean block wanted longest ago, if that
  /// was before `step`. Counts as wanted in `step`. Nothing when there is none.
  std::optional<SlotIndex> try_take(LayerIndex layer, BlockIndex block, SlotState state, std::uint64_t step,
                                    PoolKind kind = PoolKind::kLayer);
  /// How many slots try_take would give out in `step`.
  std::uint32_t takeable(LayerIndex layer, std::uint64_t step, PoolKind kind = PoolKind::kLayer) const;
  /// Drops the clean blocks that the layer has in the ring: its attention is done.
  void leave_ring(LayerIndex layer);
  /// Keeps a block from losing its slot in `step`; returns whether it is near.
  bool want(LayerIndex layer, BlockIndex block, std::uint64_t step);
  /// Takes back that it was wanted in `step`, not before.
  void unwant(LayerIndex layer, BlockIndex block, std::uint64_t step);
  /// As if nothing had been wanted so far.
  void forget_wants();

  void begin_write(LayerIndex layer, BlockIndex block);
  void end_write(LayerIndex layer, BlockIndex block);
  void fail_write(LayerIndex layer, BlockIndex block);
  void end_read(LayerIndex layer, BlockIndex block);
  void fail_read(LayerIndex layer, BlockIndex block);
  void reopen(LayerIndex layer, BlockIndex block);
  /// Does nothing to a block that is not near.
  void drop(LayerIndex layer, BlockIndex block);

  /// A mark for what is read on a guess; gone when taken, and with the slot.
  void mark_predicted(LayerIndex layer, BlockIndex block);
  bool take_predicted_mark(LayerIndex layer, BlockIndex block);
  bool predicted(LayerIndex layer, BlockIndex block) const {
    const std::uint32_t place = place_of(layer, block);
    return place != kNowhere && slots_[place].predicted;
  }
  void forget_predicted_marks();

  /// The transfer that a loading or writing slot waits for, for whoever runs the transfers.
  std::uint32_t transfer(LayerIndex layer, BlockIndex block) const;
  void set_transfer(LayerIndex layer, BlockIndex block, std::uint32_t transfer);
  /// Transfers that have been asked for and have not ended.
  std::uint32_t transfers() const { return transfers_; }
  void note_transfer_begun() { ++transfers_; }
  void note_transfer_ended() { --transfers_; }

  /// The first transfer that failed; the sequence cannot go on.
  const std::optional<Error>& error() const { return error_; }
  void set_error(Error error) {
    if (!error_) error_ = std::move(error);
  }

 private:
  struct Slot {
    LayerIndex layer;
    BlockIndex block;
    std::uint32_t transfer = 0;
    std::uint64_t wanted = 0;  // the last step that did
    SlotState state = SlotState::kFree;
    bool predicted = false;
  };
  static constexpr std::uint32_t kNowhere = UINT32_MAX;

  Residency(NearTier& near, ShareIndex share, std::uint32_t blocks_max);
  std::uint32_t place_of(LayerIndex layer, BlockIndex block) const {
    return places_[std::size_t{layer.value} * blocks_max_ + block.value];
  }
  std::uint32_t pool_of(LayerIndex layer, PoolKind kind) const {
    const std::uint32_t set = kind == PoolKind::kSelection ? near_.ring_of(layer) : kNoRing;
    return set == kNoRing ? layer.value : geometry().layers + set;
  }
  SlotIndex slot_at(LayerIndex layer, std::uint32_t place) const;
  Slot& slot_in(LayerIndex layer, BlockIndex block, SlotState expected);
  void free(std::uint32_t pool, std::uint32_t place);
  void free_block(LayerIndex layer, BlockIndex block);

  NearTier& near_;
  ShareIndex share_;
  std::uint32_t blocks_max_;
  std::vector<Slot> slots_;                       // [pool, index]; pools are layers, then sets of the ring
  std::vector<std::uint32_t> pool_first_;         // of slots_; one more than pools
  std::vector<std::uint32_t> places_;             // [layer, block] -> index of slots_, or kNowhere
  std::vector<std::vector<std::uint32_t>> free_;  // [pool] a stack of indices of slots_
  std::uint32_t transfers_ = 0;
  std::optional<Error> error_;
};

}  // namespace dualdecoder
