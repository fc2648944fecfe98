#include "kv/near_tier.h"

#include <cerrno>

#include <sys/mman.h>

#include "base/check.h"
#include "base/file.h"

namespace dualdecoder {

Result<std::unique_ptr<NearTier>> NearTier::create(const KvGeometry& geometry, std::uint32_t slots) {
  std::unique_ptr<NearTier> tier(new NearTier(geometry, slots));
  const std::size_t bytes = tier->bytes_capacity();
  void* arena =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) {
    return fail(ErrorCode::kOutOfMemory, "cannot take {} bytes for the KV cache: {}; lower the context (-c)",
                bytes, errno_text(errno));
  }
  madvise(arena, bytes, MADV_HUGEPAGE);  // fewer page faults and TLB misses; only a hint
  tier->arena_ = static_cast<f16_bits*>(arena);
  tier->in_use_.assign(slots, false);
  tier->free_.reserve(slots);
  for (std::uint32_t slot = slots; slot > 0; --slot) tier->free_.push_back(SlotIndex(slot - 1));
  return tier;
}

NearTier::~NearTier() {
  if (arena_ != nullptr) munmap(arena_, bytes_capacity());
}

std::optional<SlotIndex> NearTier::try_take() {
  if (free_.empty()) return std::nullopt;
  const SlotIndex slot = free_.back();
  free_.pop_back();
  in_use_[slot.value] = true;
  return slot;
}

void NearTier::give_back(SlotIndex slot) {
  DD_CHECK(slot.value < slots_ && in_use_[slot.value], "slot {} of {}", slot.value, slots_);
  in_use_[slot.value] = false;
  free_.push_back(slot);
}

}  // namespace dualdecoder
