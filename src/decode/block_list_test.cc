#include "decode/block_list.h"

#include <algorithm>
#include <array>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "attention/attention.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kPositions = 400;

KvGeometry geometry_of(std::uint32_t block) {
  return {.layers = 1, .kv_heads = 1, .head_dim = 16, .block_tokens = block};
}

std::vector<std::uint32_t> values(const std::vector<BlockIndex>& blocks) {
  std::vector<std::uint32_t> list;
  for (const BlockIndex block : blocks) list.push_back(block.value);
  return list;
}

/// Token by token: a block may stay far if it is no sink and every token of it lies before the recent ones.
bool may_stay_far(std::uint32_t block_tokens, std::uint32_t sink_blocks, std::uint32_t recent,
                  std::uint32_t position, std::uint32_t block) {
  if (block < sink_blocks) return false;
  for (std::uint32_t token = block * block_tokens; token < (block + 1) * block_tokens; ++token) {
    if (token + recent >= position) return false;
  }
  return true;
}

TEST(Candidates, AreTheBlocksWithNoSinkAndNoRecentToken) {
  for (const std::uint32_t block_tokens : {16U, 32U, 64U}) {
    for (const std::uint32_t sinks : {0U, 1U, 3U}) {
      for (const std::uint32_t recent : {0U, 1U, 15U, 16U, 17U, 100U, 1000U}) {
        MemoryPlan plan;
        plan.geometry = geometry_of(block_tokens);
        plan.sink_blocks = sinks;
        for (std::uint32_t position = 0; position < kPositions; ++position) {
          const Candidates candidates = candidates_at(plan, recent, position);
          ASSERT_LE(candidates.first, candidates.end);
          std::uint32_t count = 0;
          for (BlockIndex block; block.value <= kPositions / block_tokens; ++block) {
            const bool far = may_stay_far(block_tokens, sinks, recent, position, block.value);
            count += far ? 1 : 0;
            ASSERT_EQ(candidates.holds(block), far)
                << "blocks of " << block_tokens << ", " << sinks << " sinks, " << recent
                << " recent, position " << position << ", block " << block.value;
          }
          ASSERT_EQ(candidates.count(), count);
        }
      }
    }
  }
}

class ListOfAll : public testing::TestWithParam<std::uint32_t> {};
INSTANTIATE_TEST_SUITE_P(BlockTokens, ListOfAll, testing::Values(16, 32, 64));

TEST_P(ListOfAll, NeedsExactlyTheBlocksThatSomeRowSees) {
  const KvGeometry geometry = geometry_of(GetParam());
  BlockList list;
  for (const std::uint32_t window : {0U, 1U, 16U, 17U, 63U, 64U, 65U, 300U}) {
    for (std::uint32_t position = 0; position < kPositions; position += 1 + position % 3) {
      for (const std::uint32_t rows : {1U, 2U, 16U, 33U}) {
        SCOPED_TRACE(fmt::format("window {}, position {}, {} rows", window, position, rows));
        list_all(geometry, window, position, rows, list);
        std::set<std::uint32_t> seen;
        for (std::uint32_t row = position; row < position + rows; ++row) {
          for (std::uint32_t token = 0; token <= row; ++token) {
            if (window == 0 || row - token < window) seen.insert(token / geometry.block_tokens);
          }
        }
        std::set<std::uint32_t> needed;
        for (const BlockIndex block : list.blocks) {
          if (list.needed(block)) needed.insert(block.value);
        }
        ASSERT_EQ(needed, seen);
      }
    }
  }
}

TEST_P(ListOfAll, IsARunOfBlocksFromTheStartOfTheFirstNeededSplit) {
  const KvGeometry geometry = geometry_of(GetParam());
  BlockList list;
  for (const std::uint32_t window : {0U, 1U, 16U, 64U, 200U}) {
    for (std::uint32_t position = 0; position < kPositions; ++position) {
      SCOPED_TRACE(fmt::format("window {}, position {}", window, position));
      list_all(geometry, window, position, 5, list);
      const std::uint32_t first = list.blocks.front().value * geometry.block_tokens;
      ASSERT_EQ(first % kSplitKeys, 0U);
      ASSERT_LE(first, list.first_needed * geometry.block_tokens);
      ASSERT_LT(list.first_needed * geometry.block_tokens - first, kSplitKeys);
      for (std::size_t i = 1; i < list.blocks.size(); ++i)
        ASSERT_EQ(list.blocks[i].value, list.blocks[i - 1].value + 1);
      ASSERT_EQ(list.blocks.back().value, (position + 4) / geometry.block_tokens);
    }
  }
}

TEST(ListOfSelected, IsTheWindowAndTheSelectedCandidatesInOrder) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 3000; ++round) {
    const std::uint32_t block_tokens = 16U << random() % 3;
    const auto sinks = static_cast<std::uint32_t>(random() % 4);
    const auto recent = static_cast<std::uint32_t>(random() % 150);
    const auto position = static_cast<std::uint32_t>(random() % kPositions);
    SCOPED_TRACE(fmt::format("round {}: blocks of {}, {} sinks, {} recent, position {}", round, block_tokens,
                             sinks, recent, position));
    MemoryPlan plan;
    plan.geometry = geometry_of(block_tokens);
    plan.sink_blocks = sinks;
    std::vector<BlockIndex> selected;  // also of what is no candidate: ranked at another position
    std::vector<std::uint32_t> expected;
    for (BlockIndex block; block.value <= position / block_tokens + 2; ++block) {
      const bool chosen = random() % 2 == 0;
      if (chosen) selected.push_back(block);
      if (block.value > position / block_tokens) continue;
      if (chosen || !may_stay_far(block_tokens, sinks, recent, position, block.value))
        expected.push_back(block.value);
    }
    BlockList list;
    list.first_needed = 7;
    list.blocks.assign(3, BlockIndex(99));
    list_selected(plan.geometry, candidates_at(plan, recent, position), selected, position, 1, list);
    ASSERT_EQ(values(list.blocks), expected);
    ASSERT_EQ(list.first_needed, 0U);
  }
}

}  // namespace
}  // namespace dualdecoder
