#include "kv/block_table.h"

#include <algorithm>
#include <random>
#include <set>

#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

constexpr std::uint32_t kLayers = 3;
constexpr KvGeometry kGeometry{.layers = kLayers, .kv_heads = 1, .head_dim = 16, .block_tokens = 16};

std::unique_ptr<NearTier> near_tier(std::uint32_t slots) {
  auto near = NearTier::create(kGeometry, slots);
  EXPECT_TRUE(near);
  return std::move(*near);
}

std::set<std::uint32_t> slots_of(const BlockTable& table) {
  std::set<std::uint32_t> slots;
  for (BlockIndex block; block.value < table.blocks(); ++block) {
    for (LayerIndex layer; layer.value < kLayers; ++layer) slots.insert(table.slot(layer, block).value);
  }
  return slots;
}

TEST(BlockTable, GrowsByWholePages) {
  const auto near = near_tier(12);
  BlockTable table(*near);
  EXPECT_EQ(table.blocks(), 0U);
  ASSERT_TRUE(table.reserve(1));
  EXPECT_EQ(table.blocks(), 1U);
  EXPECT_EQ(near->slots_free(), 9U);
  ASSERT_TRUE(table.reserve(16));
  EXPECT_EQ(table.blocks(), 1U) << "the page still has room";
  ASSERT_TRUE(table.reserve(17));
  EXPECT_EQ(table.blocks(), 2U);
  ASSERT_TRUE(table.reserve(3));
  EXPECT_EQ(table.blocks(), 2U) << "a smaller reservation takes nothing back";
  EXPECT_EQ(slots_of(table).size(), 2 * kLayers) << "no slot is used twice";
}

TEST(BlockTable, KeepsSlotsWhenItGrowsAndWhenItIsCutBack) {
  const auto near = near_tier(30);
  BlockTable table(*near);
  ASSERT_TRUE(table.reserve(40));
  const SlotIndex before = table.slot(LayerIndex(2), BlockIndex(1));
  ASSERT_TRUE(table.reserve(100));
  table.truncate(20);
  EXPECT_EQ(table.blocks(), 2U);
  EXPECT_EQ(table.slot(LayerIndex(2), BlockIndex(1)), before);
}

TEST(BlockTable, GivesBackOnlyPagesOfForgottenTokens) {
  const auto near = near_tier(12);
  BlockTable table(*near);
  ASSERT_TRUE(table.reserve(33));
  table.truncate(33);
  EXPECT_EQ(near->slots_free(), 3U);
  table.truncate(32);
  EXPECT_EQ(near->slots_free(), 6U);
  table.truncate(17);
  EXPECT_EQ(near->slots_free(), 6U) << "token 16 is in the second page";
  table.truncate(0);
  EXPECT_EQ(near->slots_free(), 12U);
}

TEST(BlockTable, TakesNothingWhenTheTierIsTooSmall) {
  const auto near = near_tier(8);
  BlockTable table(*near);
  ASSERT_TRUE(table.reserve(16));
  const Status status = table.reserve(48);  // 6 more slots, 5 are free
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kOutOfMemory);
  EXPECT_EQ(table.blocks(), 1U);
  EXPECT_EQ(near->slots_free(), 5U);
  EXPECT_TRUE(table.reserve(32));
}

TEST(BlockTable, GivesItsSlotsBackOnceWhenMovedAndDestroyed) {
  const auto near = near_tier(6);
  {
    BlockTable table(*near);
    ASSERT_TRUE(table.reserve(32));
    const BlockTable moved(std::move(table));
    EXPECT_EQ(moved.blocks(), 2U);
    EXPECT_EQ(near->slots_free(), 0U);
  }
  EXPECT_EQ(near->slots_free(), 6U);
}

TEST(BlockTable, SharesTheTierWithOthersWithoutOverlap) {
  constexpr std::uint32_t kSlots = 60;
  const auto near = near_tier(kSlots);
  std::vector<BlockTable> tables;
  for (int i = 0; i < 4; ++i) tables.emplace_back(*near);
  std::mt19937_64 random(1);
  for (int round = 0; round < 1000; ++round) {
    BlockTable& table = tables[random() % tables.size()];
    const auto tokens = static_cast<std::uint32_t>(random() % 200);
    if (random() % 2 == 0) {
      (void)table.reserve(tokens);  // may be refused
    } else {
      table.truncate(tokens);
    }
    std::set<std::uint32_t> all;
    std::size_t used = 0;
    for (const BlockTable& each : tables) {
      const auto slots = slots_of(each);
      EXPECT_EQ(slots.size(), std::size_t{each.blocks()} * kLayers);
      used += slots.size();
      all.insert(slots.begin(), slots.end());
    }
    ASSERT_EQ(all.size(), used) << "round " << round;
    ASSERT_EQ(near->slots_free(), kSlots - used) << "round " << round;
  }
}

}  // namespace
}  // namespace dualdecoder
