#include "kv/near_tier.h"

#include <algorithm>
#include <cerrno>

#include "base/check.h"
#include "base/file.h"

namespace dualdecoder {

// The slots of one index lie together over all layers, so that a page's blocks are neighbours as long as
// every layer keeps them, and little memory is touched for a short sequence.
NearTier::NearTier(const NearTierOptions& options) : options_(options) {
  const std::vector<std::uint32_t>& layer_slots = options_.layer_slots;
  DD_CHECK(layer_slots.size() == options_.geometry.layers);
  std::uint32_t first = 0;
  for (const std::uint32_t count : layer_slots) {
    layer_first_.push_back(first);
    first += count;
  }
  slot_table_.resize(first);
  const std::uint32_t most = *std::max_element(layer_slots.begin(), layer_slots.end());
  for (std::uint32_t index = 0; index < most; ++index) {
    for (std::size_t layer = 0; layer < layer_slots.size(); ++layer) {
      if (index < layer_slots[layer]) slot_table_[layer_first_[layer] + index] = share_slots_++;
    }
  }
  share_slots_ += options_.ring_sets * options_.ring_set_slots;
  for (std::uint32_t share = options_.shares; share > 0; --share)
    free_shares_.push_back(ShareIndex(share - 1));
  share_taken_.assign(options_.shares, false);
}

Result<std::unique_ptr<NearTier>> NearTier::create(const NearTierOptions& options) {
  std::uint64_t slots = options.staging_slots;
  slots += std::uint64_t{options.ring_sets} * options.ring_set_slots * options.shares;
  for (const std::uint32_t count : options.layer_slots) slots += std::uint64_t{count} * options.shares;
  if (slots > UINT32_MAX) {
    return fail(ErrorCode::kInvalidArgument,
                "a near tier of {} blocks is too large; lower the context (-c) or use larger blocks "
                "(--block-size)",
                slots);
  }
  std::unique_ptr<NearTier> tier(new NearTier(options));
  const std::size_t bytes = tier->bytes_capacity();
  if (options.take_memory) {
    auto memory = options.take_memory(bytes);
    if (!memory) return std::unexpected(memory.error());
    tier->memory_ = std::move(*memory);
  } else {
    tier->memory_ = make_host_near_memory(bytes);
  }
  if (tier->memory_ == nullptr) {
    return fail(ErrorCode::kOutOfMemory, "cannot take {} bytes for the KV cache: {}; lower the context (-c)",
                bytes, errno_text(errno));
  }
  if (options.poison) tier->poison(tier->memory_->data(), bytes);
  return tier;
}

// NaN where nobody may read; elsewhere tiles are read whole and weighed with 0, so only something large.
void NearTier::poison(std::byte* from, std::size_t bytes) {
  constexpr std::uint8_t kNaN = 0xff;
  constexpr std::uint8_t kLarge = 0x7b;
  memory_->fill(from, memory_->on_host() ? kNaN : kLarge, bytes);
}

const f16_bits* NearTier::transposed_keys(SlotIndex slot, std::vector<f16_bits>& scratch) const {
  const KvGeometry& shape = geometry();
  if (shape.layout == KvLayout::kTransposedKeys) return k(slot);
  const std::size_t block = 2 * shape.half_block_elements();
  scratch.resize(2 * block);
  f16_bits* const from = scratch.data() + block;
  const NearCopy copy{.near = data(slot),
                      .host = reinterpret_cast<std::byte*>(from),
                      .bytes = shape.block_bytes(),
                      .into_near = false};
  memory_->copy({&copy, 1});
  const std::size_t width = std::size_t{shape.kv_heads} * shape.head_dim;
  for (std::size_t token = 0; token < shape.block_tokens; ++token) {
    for (std::size_t i = 0; i < width; ++i) {
      scratch[i * shape.block_tokens + token] = from[2 * token * width + i];
    }
  }
  return scratch.data();
}

std::optional<ShareIndex> NearTier::try_take_share() {
  if (free_shares_.empty()) return std::nullopt;
  const ShareIndex share = free_shares_.back();
  free_shares_.pop_back();
  share_taken_[share.value] = true;
  return share;
}

void NearTier::give_back_share(ShareIndex share) {
  DD_CHECK(share.value < options_.shares && share_taken_[share.value], "share {} of {}", share.value,
           options_.shares);
  share_taken_[share.value] = false;
  free_shares_.push_back(share);
}

void NearTier::note_freed(SlotIndex slot) {
  DD_CHECK(slots_in_use_ > 0);
  --slots_in_use_;
  if (options_.poison) poison(data(slot), geometry().slot_bytes());
}

}  // namespace dualdecoder
