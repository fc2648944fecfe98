#include "kv/residency.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace dualdecoder {

const char* slot_state_name(SlotState state) {
  switch (state) {
    case SlotState::kFree:
      return "free";
    case SlotState::kHeld:
      return "held";
    case SlotState::kWriting:
      return "writing";
    case SlotState::kLoading:
      return "loading";
    case SlotState::kClean:
      return "clean";
  }
  return "";
}

Result<std::unique_ptr<Residency>> Residency::create(NearTier& near, std::uint32_t blocks_max) {
  const auto share = near.try_take_share();
  if (!share) {
    return fail(ErrorCode::kOutOfMemory,
                "every place for a sequence is in use; end one, or start with more (--np)");
  }
  return std::unique_ptr<Residency>(new Residency(near, *share, blocks_max));
}

Residency::Residency(NearTier& near, ShareIndex share, std::uint32_t blocks_max)
    : near_(near), share_(share), blocks_max_(blocks_max) {
  const std::uint32_t layers = geometry().layers;
  places_.assign(std::size_t{layers} * blocks_max, kNowhere);
  free_.resize(layers + near.ring_sets());
  std::uint32_t first = 0;
  for (std::uint32_t pool = 0; pool < free_.size(); ++pool) {
    pool_first_.push_back(first);
    first += pool < layers ? near.layer_slots(LayerIndex(pool)) : near.ring_set_slots();
    for (std::uint32_t place = first; place > pool_first_.back(); --place) free_[pool].push_back(place - 1);
  }
  pool_first_.push_back(first);
  slots_.resize(first);
}

Residency::~Residency() {
  DD_CHECK(transfers_ == 0, "{} transfers in flight", transfers_);
  for (std::uint32_t place = 0; place < slots_.size(); ++place) {
    if (slots_[place].state != SlotState::kFree) near_.note_freed(slot_at(slots_[place].layer, place));
  }
  near_.give_back_share(share_);
}

SlotIndex Residency::slot_at(LayerIndex layer, std::uint32_t place) const {
  const std::uint32_t ring_first = pool_first_[geometry().layers];
  if (place < ring_first) return near_.slot(share_, layer, place - pool_first_[layer.value]);
  const std::uint32_t set = near_.ring_of(layer);
  return near_.ring_slot(share_, set, place - pool_first_[geometry().layers + set]);
}

SlotIndex Residency::slot(LayerIndex layer, BlockIndex block) const {
  const std::uint32_t place = place_of(layer, block);
  DD_CHECK(place != kNowhere, "layer {} block {} is not near", layer.value, block.value);
  return slot_at(layer, place);
}

void Residency::list_clean(LayerIndex layer, BlockIndex first, BlockIndex end,
                           std::vector<BlockIndex>& blocks) const {
  const auto list_pool = [&](std::uint32_t pool) {
    for (std::uint32_t place = pool_first_[pool]; place < pool_first_[pool + 1]; ++place) {
      const Slot& slot = slots_[place];
      if (slot.state == SlotState::kClean && slot.layer == layer && first <= slot.block && slot.block < end)
        blocks.push_back(slot.block);
    }
  };
  const std::uint32_t selection = pool_of(layer, PoolKind::kSelection);
  list_pool(layer.value);
  if (selection != layer.value) list_pool(selection);
}

std::optional<SlotIndex> Residency::try_take(LayerIndex layer, BlockIndex block, SlotState state,
                                             std::uint64_t step, PoolKind kind) {
  DD_CHECK(!near(layer, block), "layer {} block {} is near", layer.value, block.value);
  DD_CHECK(state == SlotState::kHeld || state == SlotState::kLoading);
  const std::uint32_t pool = pool_of(layer, kind);
  if (free_[pool].empty()) {
    std::uint32_t oldest = kNowhere;
    for (std::uint32_t place = pool_first_[pool]; place < pool_first_[pool + 1]; ++place) {
      const Slot& slot = slots_[place];
      if (slot.state != SlotState::kClean || slot.wanted >= step) continue;
      if (oldest == kNowhere || slot.wanted < slots_[oldest].wanted) oldest = place;
    }
    if (oldest == kNowhere) return std::nullopt;
    free(pool, oldest);
  }
  const std::uint32_t place = free_[pool].back();
  free_[pool].pop_back();
  slots_[place] = {
      .layer = layer, .block = block, .transfer = 0, .wanted = step, .state = state, .predicted = false};
  places_[std::size_t{layer.value} * blocks_max_ + block.value] = place;
  near_.note_taken();
  return slot_at(layer, place);
}

std::uint32_t Residency::takeable(LayerIndex layer, std::uint64_t step, PoolKind kind) const {
  const std::uint32_t pool = pool_of(layer, kind);
  auto count = static_cast<std::uint32_t>(free_[pool].size());
  for (std::uint32_t place = pool_first_[pool]; place < pool_first_[pool + 1]; ++place) {
    if (slots_[place].state == SlotState::kClean && slots_[place].wanted < step) ++count;
  }
  return count;
}

void Residency::leave_ring(LayerIndex layer) {
  const std::uint32_t pool = pool_of(layer, PoolKind::kSelection);
  if (pool < geometry().layers) return;
  for (std::uint32_t place = pool_first_[pool]; place < pool_first_[pool + 1]; ++place) {
    if (slots_[place].state == SlotState::kClean && slots_[place].layer == layer) free(pool, place);
  }
}

bool Residency::want(LayerIndex layer, BlockIndex block, std::uint64_t step) {
  const std::uint32_t place = place_of(layer, block);
  if (place == kNowhere) return false;
  slots_[place].wanted = std::max(slots_[place].wanted, step);
  return true;
}

void Residency::unwant(LayerIndex layer, BlockIndex block, std::uint64_t step) {
  const std::uint32_t place = place_of(layer, block);
  if (place != kNowhere && slots_[place].wanted == step) slots_[place].wanted = step - 1;
}

void Residency::mark_predicted(LayerIndex layer, BlockIndex block) {
  const std::uint32_t place = place_of(layer, block);
  DD_CHECK(place != kNowhere, "layer {} block {} is not near", layer.value, block.value);
  slots_[place].predicted = true;
}

bool Residency::take_predicted_mark(LayerIndex layer, BlockIndex block) {
  const std::uint32_t place = place_of(layer, block);
  return place != kNowhere && std::exchange(slots_[place].predicted, false);
}

void Residency::forget_predicted_marks() {
  for (Slot& slot : slots_) slot.predicted = false;
}

void Residency::forget_wants() {
  for (Slot& slot : slots_) slot.wanted = 0;
}

Residency::Slot& Residency::slot_in(LayerIndex layer, BlockIndex block, SlotState expected) {
  const std::uint32_t place = place_of(layer, block);
  DD_CHECK(place != kNowhere, "layer {} block {} is not near", layer.value, block.value);
  DD_CHECK(slots_[place].state == expected, "layer {} block {} is {}, not {}", layer.value, block.value,
           slot_state_name(slots_[place].state), slot_state_name(expected));
  return slots_[place];
}

void Residency::free(std::uint32_t pool, std::uint32_t place) {
  Slot& slot = slots_[place];
  slot.state = SlotState::kFree;
  places_[std::size_t{slot.layer.value} * blocks_max_ + slot.block.value] = kNowhere;
  free_[pool].push_back(place);
  near_.note_freed(slot_at(slot.layer, place));
}

void Residency::free_block(LayerIndex layer, BlockIndex block) {
  const PoolKind kind = in_ring(layer, block) ? PoolKind::kSelection : PoolKind::kLayer;
  free(pool_of(layer, kind), place_of(layer, block));
}

void Residency::begin_write(LayerIndex layer, BlockIndex block) {
  slot_in(layer, block, SlotState::kHeld).state = SlotState::kWriting;
}

void Residency::end_write(LayerIndex layer, BlockIndex block) {
  slot_in(layer, block, SlotState::kWriting).state = SlotState::kClean;
}

void Residency::fail_write(LayerIndex layer, BlockIndex block) {
  slot_in(layer, block, SlotState::kWriting).state = SlotState::kHeld;
}

void Residency::end_read(LayerIndex layer, BlockIndex block) {
  slot_in(layer, block, SlotState::kLoading).state = SlotState::kClean;
}

void Residency::fail_read(LayerIndex layer, BlockIndex block) {
  slot_in(layer, block, SlotState::kLoading);
  free_block(layer, block);
}

void Residency::reopen(LayerIndex layer, BlockIndex block) {
  slot_in(layer, block, SlotState::kClean).state = SlotState::kHeld;
}

void Residency::drop(LayerIndex layer, BlockIndex block) {
  const std::uint32_t place = place_of(layer, block);
  if (place == kNowhere) return;
  const SlotState state = slots_[place].state;
  DD_CHECK(state == SlotState::kHeld || state == SlotState::kClean, "layer {} block {} is {}", layer.value,
           block.value, slot_state_name(state));
  free_block(layer, block);
}

std::uint32_t Residency::transfer(LayerIndex layer, BlockIndex block) const {
  const std::uint32_t place = place_of(layer, block);
  DD_CHECK(place != kNowhere, "layer {} block {} is not near", layer.value, block.value);
  return slots_[place].transfer;
}

void Residency::set_transfer(LayerIndex layer, BlockIndex block, std::uint32_t transfer) {
  const std::uint32_t place = place_of(layer, block);
  DD_CHECK(place != kNowhere, "layer {} block {} is not near", layer.value, block.value);
  slots_[place].transfer = transfer;
}

}  // namespace dualdecoder
