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
  free_.resize(layers);
  std::uint32_t first = 0;
  for (LayerIndex layer; layer.value < layers; ++layer) {
    layer_first_.push_back(first);
    first += near.layer_slots(layer);
    for (std::uint32_t place = first; place > layer_first_.back(); --place)
      free_[layer.value].push_back(place - 1);
  }
  layer_first_.push_back(first);
  slots_.resize(first);
}

Residency::~Residency() {
  DD_CHECK(transfers_ == 0, "{} transfers in flight", transfers_);
  for (LayerIndex layer; layer.value < geometry().layers; ++layer) {
    for (std::uint32_t place = layer_first_[layer.value]; place < layer_first_[layer.value + 1]; ++place) {
      if (slots_[place].state != SlotState::kFree) near_.note_freed(slot_at(layer, place));
    }
  }
  near_.give_back_share(share_);
}

SlotIndex Residency::slot(LayerIndex layer, BlockIndex block) const {
  const std::uint32_t place = place_of(layer, block);
  DD_CHECK(place != kNowhere, "layer {} block {} is not near", layer.value, block.value);
  return slot_at(layer, place);
}

std::optional<SlotIndex> Residency::try_take(LayerIndex layer, BlockIndex block, SlotState state,
                                             std::uint64_t step) {
  DD_CHECK(!near(layer, block), "layer {} block {} is near", layer.value, block.value);
  DD_CHECK(state == SlotState::kHeld || state == SlotState::kLoading);
  if (free_[layer.value].empty()) {
    std::uint32_t oldest = kNowhere;
    for (std::uint32_t place = layer_first_[layer.value]; place < layer_first_[layer.value + 1]; ++place) {
      const Slot& slot = slots_[place];
      if (slot.state != SlotState::kClean || slot.wanted >= step) continue;
      if (oldest == kNowhere || slot.wanted < slots_[oldest].wanted) oldest = place;
    }
    if (oldest == kNowhere) return std::nullopt;
    free(layer, oldest);
  }
  const std::uint32_t place = free_[layer.value].back();
  free_[layer.value].pop_back();
  slots_[place] = {.block = block, .transfer = 0, .wanted = step, .state = state, .predicted = false};
  places_[std::size_t{layer.value} * blocks_max_ + block.value] = place;
  near_.note_taken();
  return slot_at(layer, place);
}

std::uint32_t Residency::takeable(LayerIndex layer, std::uint64_t step) const {
  auto count = static_cast<std::uint32_t>(free_[layer.value].size());
  for (std::uint32_t place = layer_first_[layer.value]; place < layer_first_[layer.value + 1]; ++place) {
    if (slots_[place].state == SlotState::kClean && slots_[place].wanted < step) ++count;
  }
  return count;
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

void Residency::free(LayerIndex layer, std::uint32_t place) {
  slots_[place].state = SlotState::kFree;
  places_[std::size_t{layer.value} * blocks_max_ + slots_[place].block.value] = kNowhere;
  free_[layer.value].push_back(place);
  near_.note_freed(slot_at(layer, place));
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
  free(layer, place_of(layer, block));
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
  free(layer, place);
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
