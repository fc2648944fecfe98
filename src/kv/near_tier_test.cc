#include "kv/near_tier.h"

#include <cstring>
#include <set>

#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

constexpr KvGeometry kGeometry{.layers = 3, .kv_heads = 2, .head_dim = 16, .block_tokens = 16};

std::unique_ptr<NearTier> near_tier(NearTierOptions options) {
  options.geometry = kGeometry;
  auto near = NearTier::create(options);
  EXPECT_TRUE(near);
  return std::move(*near);
}

TEST(KvGeometry, CountsBytesOfBlocksAndTokens) {
  EXPECT_EQ(kGeometry.head_block_elements(), 16U * 16U);
  EXPECT_EQ(kGeometry.half_block_elements(), 2U * 16U * 16U);
  EXPECT_EQ(kGeometry.block_bytes(), 2U * 2U * 16U * 16U * 2U);
  EXPECT_EQ(kGeometry.slot_bytes(), 4096U) << "padded";
  EXPECT_EQ(kGeometry.page_bytes(), 3 * 4096U);
  EXPECT_EQ(kGeometry.token_bytes(), 3U * 2U * 2U * 16U * 2U);
  EXPECT_EQ(kGeometry.blocks_for(0), 0U);
  EXPECT_EQ(kGeometry.blocks_for(1), 1U);
  EXPECT_EQ(kGeometry.blocks_for(16), 1U);
  EXPECT_EQ(kGeometry.blocks_for(17), 2U);
  EXPECT_EQ(kGeometry.blocks_for(UINT32_MAX), 1U << 28) << "no sum that wraps";
}

TEST(NearTier, GivesEveryShareLayerAndIndexASlotOfItsOwn) {
  const auto near = near_tier({.layer_slots = {2, 5, 3}, .shares = 2, .staging_slots = 4});
  std::set<std::uint32_t> slots;
  for (std::uint32_t share = 0; share < 2; ++share) {
    for (LayerIndex layer; layer.value < 3; ++layer) {
      for (std::uint32_t i = 0; i < near->layer_slots(layer); ++i)
        slots.insert(near->slot(ShareIndex(share), layer, i).value);
    }
  }
  for (std::uint32_t i = 0; i < 4; ++i) slots.insert(near->staging_slot(i).value);
  EXPECT_EQ(slots.size(), 24U);
  EXPECT_EQ(*slots.rbegin(), near->slots() - 1);
  EXPECT_EQ(near->bytes_capacity(), 24 * kGeometry.slot_bytes());
}

TEST(NearTier, PutsTheLayersOfOneIndexSideBySide) {
  const auto near = near_tier({.layer_slots = {4, 4, 4}});
  const SlotIndex first = near->slot(ShareIndex(0), LayerIndex(0), 2);
  EXPECT_EQ(near->slot(ShareIndex(0), LayerIndex(1), 2).value, first.value + 1);
  EXPECT_EQ(near->slot(ShareIndex(0), LayerIndex(2), 2).value, first.value + 2);
}

TEST(NearTier, GivesEveryShareOnceAndThenNothing) {
  const auto near = near_tier({.layer_slots = {1, 1, 1}, .shares = 2});
  const auto first = near->try_take_share();
  const auto second = near->try_take_share();
  ASSERT_TRUE(first && second);
  EXPECT_NE(*first, *second);
  EXPECT_FALSE(near->try_take_share());
  near->give_back_share(*first);
  EXPECT_EQ(near->try_take_share(), first);
}

TEST(NearTier, AlignsEverySlotAndPutsVBehindK) {
  const auto near = near_tier({.layer_slots = {3, 3, 3}});
  for (std::uint32_t slot = 0; slot < near->slots(); ++slot) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(near->data(SlotIndex(slot))) % kBlockAlignment, 0U);
  }
  EXPECT_EQ(near->v(SlotIndex(1)) - near->k(SlotIndex(1)),
            static_cast<std::ptrdiff_t>(kGeometry.half_block_elements()));
}

TEST(NearTier, OverwritesWhatIsNoLongerValidWhenAskedTo) {
  const auto near = near_tier({.layer_slots = {1, 1, 1}, .poison = true});
  const SlotIndex slot = near->slot(ShareIndex(0), LayerIndex(1), 0);
  near->note_taken();
  std::memset(near->data(slot), 0, kGeometry.slot_bytes());
  near->note_freed(slot);
  EXPECT_EQ(*near->k(slot), 0xffff);
  EXPECT_EQ(near->bytes_in_use(), 0U);
}

TEST(NearTier, RefusesMoreSlotsThanCanBeCounted) {
  const auto refused =
      NearTier::create({.geometry = kGeometry, .layer_slots = {1 << 30, 1 << 30, 1 << 30}, .shares = 2});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
}

TEST(NearTierDeathTest, AShareGivenBackTwiceIsOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto near = near_tier({.layer_slots = {1, 1, 1}});
  const auto share = near->try_take_share();
  near->give_back_share(*share);
  EXPECT_DEATH(near->give_back_share(*share), "check failed.*share 0 of 1");
}

}  // namespace
}  // namespace dualdecoder
