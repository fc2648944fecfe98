#include "kv/near_tier.h"

#include <cstring>
#include <set>

#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

constexpr KvGeometry kGeometry{.layers = 3, .kv_heads = 2, .head_dim = 16, .block_tokens = 16};

std::unique_ptr<NearTier> near_tier(std::uint32_t slots) {
  auto near = NearTier::create(kGeometry, slots);
  EXPECT_TRUE(near);
  return std::move(*near);
}

TEST(KvGeometry, CountsBytesOfBlocksAndTokens) {
  EXPECT_EQ(kGeometry.head_block_elements(), 16U * 16U);
  EXPECT_EQ(kGeometry.half_block_elements(), 2U * 16U * 16U);
  EXPECT_EQ(kGeometry.block_bytes(), 2U * 2U * 16U * 16U * 2U);
  EXPECT_EQ(kGeometry.token_bytes(), 3U * 2U * 2U * 16U * 2U);
  EXPECT_EQ(kGeometry.blocks_for(0), 0U);
  EXPECT_EQ(kGeometry.blocks_for(1), 1U);
  EXPECT_EQ(kGeometry.blocks_for(16), 1U);
  EXPECT_EQ(kGeometry.blocks_for(17), 2U);
  EXPECT_EQ(kGeometry.blocks_for(UINT32_MAX), 1U << 28) << "no sum that wraps";
}

TEST(NearTier, GivesEverySlotOnceAndThenNothing) {
  const auto near = near_tier(5);
  std::set<std::uint32_t> slots;
  for (int i = 0; i < 5; ++i) slots.insert(near->try_take()->value);
  EXPECT_EQ(slots, (std::set<std::uint32_t>{0, 1, 2, 3, 4}));
  EXPECT_FALSE(near->try_take());
  EXPECT_EQ(near->slots_free(), 0U);
  EXPECT_EQ(near->bytes_in_use(), near->bytes_capacity());
}

TEST(NearTier, TakesTheSlotGivenBackLastFirst) {
  const auto near = near_tier(4);
  const SlotIndex first = *near->try_take();
  const SlotIndex second = *near->try_take();
  near->give_back(first);
  near->give_back(second);
  EXPECT_EQ(near->bytes_in_use(), 0U);
  EXPECT_EQ(*near->try_take(), second);
  EXPECT_EQ(*near->try_take(), first);
}

TEST(NearTier, KeepsSlotsApartAndVBehindK) {
  const auto near = near_tier(3);
  const std::size_t half = kGeometry.half_block_elements();
  for (std::uint32_t i = 0; i < 3; ++i) {
    const SlotIndex slot(i);
    EXPECT_EQ(near->v(slot), near->k(slot) + half);
    EXPECT_EQ(near->k(slot), near->k(SlotIndex(0)) + i * 2 * half);
    std::memset(near->k(slot), static_cast<int>(i + 1), kGeometry.block_bytes());
  }
  for (std::uint32_t i = 0; i < 3; ++i) {
    const auto expected = static_cast<f16_bits>((i + 1) * 0x0101);
    EXPECT_EQ(near->k(SlotIndex(i))[0], expected);
    EXPECT_EQ(near->v(SlotIndex(i))[half - 1], expected);
  }
}

TEST(NearTier, RefusesMoreThanTheAddressSpace) {
  constexpr KvGeometry kHuge{.layers = 1, .kv_heads = 4096, .head_dim = 256, .block_tokens = 64};
  const auto near = NearTier::create(kHuge, UINT32_MAX);
  ASSERT_FALSE(near);
  EXPECT_EQ(near.error().code, ErrorCode::kOutOfMemory);
}

TEST(NearTierDeathTest, SlotGivenBackTwiceIsOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto near = near_tier(2);
  const SlotIndex slot = *near->try_take();
  near->give_back(slot);
  EXPECT_DEATH(near->give_back(slot), "check failed.*slot 0 of 2");
  EXPECT_DEATH(near->give_back(SlotIndex(2)), "check failed.*slot 2 of 2");
}

}  // namespace
}  // namespace dualdecoder
