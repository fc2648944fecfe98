#include "decode/plan.h"

#include <algorithm>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "attention/attention.h"
#include "base/units.h"
#include "kv/near_tier.h"

namespace dualdecoder {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Hyperparameters model_of(std::vector<std::uint32_t> windows) {
  Hyperparameters model;
  model.layers = static_cast<std::uint32_t>(windows.size());
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 64;
  model.window = std::move(windows);
  return model;
}

const Hyperparameters kFullModel = model_of({0, 0, 0, 0});
const Hyperparameters kMixedModel = model_of({128, 0, 128, 0, 50});
const Hyperparameters kWindowedModel = model_of({96, 96});

EngineOptions tiered_options() {
  EngineOptions options{.context = 4096, .sequences = 2, .prefill_chunk = 128};
  options.tiers.far.kind = FarKind::kHost;
  return options;
}

EngineOptions random_options(std::mt19937_64& random) {
  const auto up_to = [&random](std::uint32_t limit) { return static_cast<std::uint32_t>(random() % limit); };
  EngineOptions options{.context = 1 + up_to(3000),
                        .sequences = 1 + up_to(4),
                        .prefill_chunk = 1 + up_to(600),
                        .block_tokens = 16U << random() % 3};
  options.prefill_chunk = std::min(options.prefill_chunk, options.context);
  options.tiers.far.kind = FarKind::kHost;
  options.tiers.policy = random() % 2 == 0 ? Policy::kPrevious : Policy::kFull;
  options.tiers.budget_tokens = 1 + up_to(1500);
  options.tiers.sink_tokens = up_to(100);
  options.tiers.recent_tokens = up_to(400);
  options.tiers.near_tokens = random() % 2 == 0 ? 0 : 1 + up_to(2000);
  if (random() % 3 == 0) options.tiers.resident_layers = up_to(4);
  options.tiers.ring_sets = 2 + up_to(3);
  options.tiers.dense_layers = up_to(6);
  options.tiers.staging_tokens = 1 + up_to(2000);
  return options;
}

const Hyperparameters& random_model(std::mt19937_64& random) {
  const std::uint64_t choice = random() % 3;
  return choice == 0 ? kFullModel : choice == 1 ? kMixedModel : kWindowedModel;
}

TEST(MemoryPlan, KeepsEveryBlockNearWithoutAFarTier) {
  const auto plan = plan_memory(kMixedModel, {.context = 1000, .sequences = 3, .block_tokens = 64});
  ASSERT_TRUE(plan);
  EXPECT_FALSE(plan->tiered());
  for (const LayerPlan& layer : plan->layers) {
    EXPECT_EQ(layer.kind, LayerKind::kAll);
    EXPECT_EQ(layer.slots, 16U);
  }
  EXPECT_EQ(plan->near_bytes(), 3 * 5 * 16 * plan->geometry.slot_bytes());
  EXPECT_EQ(plan->near_window_bytes, plan->near_bytes());
  EXPECT_EQ(plan->far_bytes + plan->digest_bytes, 0U);
}

TEST(MemoryPlan, KeepsDenseLayersWholeAndWindowedOnesToTheirWindow) {
  EngineOptions options = tiered_options();
  options.tiers.dense_layers = 2;
  const auto plan = plan_memory(kMixedModel, options);
  ASSERT_TRUE(plan);
  std::vector<LayerKind> kinds;
  for (const LayerPlan& layer : plan->layers) kinds.push_back(layer.kind);
  using enum LayerKind;
  EXPECT_THAT(kinds, testing::ElementsAre(kAll, kAll, kWindowed, kSelecting, kWindowed));
  EXPECT_EQ(plan->layers[0].slots, 128U);
  EXPECT_LT(plan->layers[2].slots, 20U);
  EXPECT_EQ(plan->layers[3].slots, plan->window_slots + plan->near_slots);
}

TEST(MemoryPlan, IsWhatTheNearTierTakesAndItsBytesAddUp) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937_64 random(seed);
    const Hyperparameters& model = random_model(random);
    const EngineOptions options = random_options(random);
    const auto plan = plan_memory(model, options);
    ASSERT_TRUE(plan) << plan.error().message;
    NearTierOptions near_options{.geometry = plan->geometry,
                                 .layer_slots = {},
                                 .layer_ring = {},
                                 .ring_sets = plan->ring_sets,
                                 .ring_set_slots = plan->ring_set_slots,
                                 .shares = plan->sequences,
                                 .staging_slots = plan->staging_slots,
                                 .poison = false};
    for (const LayerPlan& layer : plan->layers) near_options.layer_slots.push_back(layer.slots);
    const auto near = NearTier::create(near_options);
    ASSERT_TRUE(near);
    EXPECT_EQ((*near)->bytes_capacity(), plan->near_bytes());
    EXPECT_EQ(plan->far_bytes, plan->far_pages * plan->geometry.page_bytes());
    EXPECT_EQ(plan->far_pages, plan->sequences * plan->geometry.blocks_for(plan->context));
    const bool selecting =
        std::ranges::any_of(plan->layers, [](const auto& l) { return l.kind == LayerKind::kSelecting; });
    EXPECT_EQ(plan->digest_bytes > 0, selecting && options.tiers.policy != Policy::kFull);
    EXPECT_EQ(plan->near_selected_bytes > 0, plan->near_slots > 0 || plan->ring_set_slots > 0);
    EXPECT_TRUE(selecting || plan->near_selected_bytes == 0);
  }
}

TEST(MemoryPlan, NeverHasMoreNearBytesThanAllowedOrMoreSlotsThanTheContextHasBlocks) {
  int accepted = 0;
  for (std::uint64_t seed = 1; seed <= 3000; ++seed) {
    std::mt19937_64 random(seed);
    const Hyperparameters& model = random_model(random);
    EngineOptions options = random_options(random);
    options.tiers.near_bytes_max = 1 + random() % (64u << 20);
    SCOPED_TRACE(fmt::format("seed {}, {} bytes near", seed, options.tiers.near_bytes_max));
    const auto plan = plan_memory(model, options);
    if (!plan) continue;
    ++accepted;
    ASSERT_LE(plan->near_bytes(), options.tiers.near_bytes_max);
    for (const LayerPlan& layer : plan->layers)
      ASSERT_LE(layer.slots, plan->geometry.blocks_for(options.context));
  }
  EXPECT_GT(accepted, 500);
}

/// The number that a refusal of --near-memory names.
std::uint64_t bytes_that_would_do(const Error& error) {
  const std::string before = "at least ";
  const std::size_t first = error.message.find(before) + before.size();
  const auto bytes = parse_size(error.message.substr(first, error.message.find(" are needed") - first));
  EXPECT_TRUE(bytes) << error.message;
  return bytes.value_or(0);
}

TEST(MemoryPlan, RefusesOneByteLessThanTheSmallestPlanAndNamesTheBytesThatWouldDo) {
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    std::mt19937_64 random(seed);
    const Hyperparameters& model = random_model(random);
    EngineOptions options = random_options(random);
    options.tiers.near_tokens = 1;
    const auto smallest = plan_memory(model, options);
    ASSERT_TRUE(smallest);
    SCOPED_TRACE(fmt::format("seed {}, {} bytes near", seed, smallest->near_bytes()));
    options.tiers.near_tokens = 0;
    options.tiers.near_bytes_max = smallest->near_bytes();
    const auto same = plan_memory(model, options);
    ASSERT_TRUE(same) << same.error().message;
    ASSERT_EQ(same->near_bytes(), smallest->near_bytes());
    for (const std::uint64_t less :
         {std::uint64_t{1}, smallest->geometry.slot_bytes(), same->near_bytes() - 1}) {
      options.tiers.near_bytes_max = smallest->near_bytes() - less;
      const auto refused = plan_memory(model, options);
      ASSERT_FALSE(refused);
      ASSERT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
      ASSERT_THAT(refused.error().message, HasSubstr("--near-memory"));
      ASSERT_EQ(bytes_that_would_do(refused.error()), smallest->near_bytes());
    }
  }
}

TEST(MemoryPlan, SpendsTheNearMemoryItIsGivenButNotBeyondWhatNearTokensAsk) {
  EngineOptions options = tiered_options();
  options.sequences = 1;
  options.tiers.near_bytes_max = 5 << 20;
  const auto all = plan_memory(kFullModel, options);
  ASSERT_TRUE(all);
  EXPECT_GT(all->near_bytes() + kFullModel.layers * all->geometry.slot_bytes(), options.tiers.near_bytes_max);
  options.tiers.near_tokens = 320;
  const auto asked = plan_memory(kFullModel, options);
  ASSERT_TRUE(asked);
  EXPECT_EQ(asked->near_slots, 10U);
}

TEST(MemoryPlan, HasPlacesForTheWindowAndAChunkAtEveryPosition) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 random(seed);
    EngineOptions options = random_options(random);
    options.context = std::min(options.context, 1200U);
    options.prefill_chunk = std::min(options.prefill_chunk, options.context);
    options.tiers.near_tokens = 1;
    options.tiers.dense_layers = 0;
    const auto plan = plan_memory(kMixedModel, options);
    ASSERT_TRUE(plan);
    const std::uint32_t block = options.block_tokens;
    const auto blocks_of = [&](std::uint32_t first_token, std::uint32_t end_token, std::uint32_t sinks) {
      std::set<std::uint32_t> blocks;
      for (std::uint32_t b = 0; b < sinks && b * block < end_token; ++b) blocks.insert(b);
      for (std::uint32_t b = first_token / block; b * block < end_token; ++b) blocks.insert(b);
      return blocks.size();
    };
    const auto before = [](std::uint32_t position, std::uint32_t tokens) {
      return position > tokens ? position - tokens : 0;
    };
    for (std::uint32_t position = 0; position < options.context; ++position) {
      SCOPED_TRACE(fmt::format("seed {}, position {}", seed, position));
      const std::uint32_t end = std::min(position + options.prefill_chunk, options.context);
      const std::uint32_t recent = before(position, options.tiers.recent_tokens);
      ASSERT_LE(blocks_of(recent, position + 1, plan->sink_blocks), plan->window_slots);
      ASSERT_LE(blocks_of(recent, end, plan->sink_blocks), plan->layers[1].slots);
      for (const std::uint32_t layer : {0U, 4U}) {
        ASSERT_LE(blocks_of(before(position + 1, kMixedModel.window[layer]), end, 0),
                  plan->layers[layer].slots);
      }
    }
  }
}

TEST(MemoryPlan, SelectionsInARingTakeNoMoreForMoreLayersOrALongerContext) {
  EngineOptions options = tiered_options();
  options.tiers.resident_layers = 0;
  options.context = 16384;
  const auto few = plan_memory(kFullModel, options);
  ASSERT_TRUE(few);
  options.context = 131072;
  const auto many = plan_memory(model_of(std::vector<std::uint32_t>(24, 0)), options);
  ASSERT_TRUE(many);
  const std::uint64_t set_bytes = (few->budget_blocks + 2) * few->geometry.slot_bytes();
  EXPECT_EQ(few->near_selected_bytes, options.sequences * options.tiers.ring_sets * set_bytes);
  EXPECT_EQ(many->near_selected_bytes, few->near_selected_bytes);
  EXPECT_EQ(many->near_window_bytes / many->layers.size(), few->near_window_bytes / few->layers.size());
}

TEST(MemoryPlan, PutsLayersIntoTheRingWhereNotEveryOneHasRoomForASelection) {
  EngineOptions options = tiered_options();
  options.prefill_chunk = 32;
  const std::uint32_t layers = 12;
  const Hyperparameters model = model_of(std::vector<std::uint32_t>(layers, 0));
  const auto none = [&] {
    EngineOptions ring = options;
    ring.tiers.resident_layers = 0;
    return *plan_memory(model, ring);
  }();
  std::uint32_t before = 0;
  for (std::uint64_t bytes = none.near_bytes();; bytes += 64 << 10) {
    options.tiers.near_bytes_max = bytes;
    const auto plan = plan_memory(model, options);
    ASSERT_TRUE(plan);
    ASSERT_GE(plan->resident_layers, before);
    before = plan->resident_layers;
    for (LayerIndex layer; layer.value < layers; ++layer) {
      ASSERT_EQ(plan->layers[layer.value].ring == kNoRing, layer.value < plan->resident_layers);
      ASSERT_GE(plan->selection_slots(layer), plan->budget_blocks);
    }
    if (plan->resident_layers == layers) break;
  }
  EXPECT_EQ(none.resident_layers, 0U);
}

TEST(MemoryPlan, RefusesARingOfOneSet) {
  EngineOptions options = tiered_options();
  options.tiers.ring_sets = 1;
  const auto refused = plan_memory(kFullModel, options);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("at least 2"));
}

TEST(MemoryPlan, StagesWholeSplitsInBothHalves) {
  for (const std::uint32_t block : {16U, 32U, 64U}) {
    for (const std::uint32_t tokens : {0U, 1U, 64U, 128U, 1000U, 1024U}) {
      EngineOptions options = tiered_options();
      options.block_tokens = block;
      options.tiers.staging_tokens = tokens;
      const auto plan = plan_memory(kFullModel, options);
      ASSERT_TRUE(plan);
      const std::uint32_t half_tokens = plan->staging_slots / 2 * block;
      EXPECT_EQ(plan->staging_slots % 2, 0U);
      EXPECT_EQ(half_tokens % kSplitKeys, 0U);
      EXPECT_GE(half_tokens, kSplitKeys);
      EXPECT_LE(half_tokens, std::max(kSplitKeys, plan->geometry.blocks_for(tokens) * block));
      EXPECT_GT(half_tokens + kSplitKeys, tokens);
    }
  }
}

TEST(MemoryPlan, StaysWithinTheFarSizeAndRefusesLessThanAPage) {
  EngineOptions options = tiered_options();
  const auto all = plan_memory(kFullModel, options);
  ASSERT_TRUE(all);
  const std::uint64_t page = all->geometry.page_bytes();
  for (const std::uint64_t bytes : {page, page + 1, 10 * page - 1, all->far_bytes, all->far_bytes + page}) {
    options.tiers.far_bytes_max = bytes;
    const auto plan = plan_memory(kFullModel, options);
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->far_pages, std::min(bytes, all->far_bytes) / page);
    EXPECT_LE(plan->far_bytes, bytes);
    EXPECT_EQ(plan->near_bytes(), all->near_bytes());
  }
  options.tiers.far_bytes_max = page - 1;
  const auto refused = plan_memory(kFullModel, options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("--far-size"));
}

TEST(MemoryPlan, RefusesMorePagesThanCanBeCounted) {
  EngineOptions options = tiered_options();
  options.context = UINT32_MAX;
  options.sequences = 1000;
  options.tiers.near_bytes_max = 1 << 20;
  const auto refused = plan_memory(kFullModel, options);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, AllOf(HasSubstr("4294967295"), HasSubstr("1000")));
}

}  // namespace
}  // namespace dualdecoder
