#include "kv/residency.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

using testing::HasSubstr;

constexpr KvGeometry kGeometry{.layers = 2, .kv_heads = 1, .head_dim = 16, .block_tokens = 16};
constexpr std::uint32_t kBlocks = 12;
constexpr LayerIndex kLayer(1);
constexpr BlockIndex kBlock(5);
constexpr std::array kStates = {SlotState::kFree, SlotState::kHeld, SlotState::kWriting, SlotState::kLoading,
                                SlotState::kClean};

class ResidencyTest : public testing::Test {
 protected:
  explicit ResidencyTest(std::uint32_t slots = 4)
      : near_(*NearTier::create({.geometry = kGeometry, .layer_slots = {1, slots}, .shares = 1})),
        residency_(*Residency::create(*near_, kBlocks)) {}

  bool take(std::uint32_t block, SlotState state, std::uint64_t step) {
    return residency_->try_take(kLayer, BlockIndex(block), state, step).has_value();
  }
  SlotState state(std::uint32_t block) const { return residency_->state(kLayer, BlockIndex(block)); }

  /// Brings kBlock from free into a state.
  void bring(SlotState to) {
    if (to == SlotState::kFree) return;
    ASSERT_TRUE(take(kBlock.value, to == SlotState::kLoading ? to : SlotState::kHeld, 1));
    if (to == SlotState::kWriting || to == SlotState::kClean) residency_->begin_write(kLayer, kBlock);
    if (to == SlotState::kClean) residency_->end_write(kLayer, kBlock);
    ASSERT_EQ(state(kBlock.value), to);
  }
  /// A clean block last wanted in `step`.
  void add_clean(std::uint32_t block, std::uint64_t step) {
    ASSERT_TRUE(take(block, SlotState::kLoading, step));
    residency_->end_read(kLayer, BlockIndex(block));
  }

  std::unique_ptr<NearTier> near_;
  std::unique_ptr<Residency> residency_;
};

struct Transition {
  const char* name;
  std::function<void(Residency&)> apply;
  std::map<SlotState, SlotState> legal;  // from, to
};

std::vector<Transition> transitions() {
  using enum SlotState;
  return {
      {"begin_write", [](Residency& r) { r.begin_write(kLayer, kBlock); }, {{kHeld, kWriting}}},
      {"end_write", [](Residency& r) { r.end_write(kLayer, kBlock); }, {{kWriting, kClean}}},
      {"fail_write", [](Residency& r) { r.fail_write(kLayer, kBlock); }, {{kWriting, kHeld}}},
      {"end_read", [](Residency& r) { r.end_read(kLayer, kBlock); }, {{kLoading, kClean}}},
      {"fail_read", [](Residency& r) { r.fail_read(kLayer, kBlock); }, {{kLoading, kFree}}},
      {"reopen", [](Residency& r) { r.reopen(kLayer, kBlock); }, {{kClean, kHeld}}},
      {"drop",
       [](Residency& r) { r.drop(kLayer, kBlock); },
       {{kFree, kFree}, {kHeld, kFree}, {kClean, kFree}}},
      {"try_take held",
       [](Residency& r) { static_cast<void>(r.try_take(kLayer, kBlock, kHeld, 2)); },
       {{kFree, kHeld}}},
      {"try_take loading",
       [](Residency& r) { static_cast<void>(r.try_take(kLayer, kBlock, kLoading, 2)); },
       {{kFree, kLoading}}},
  };
}

TEST_F(ResidencyTest, MakesEveryLegalTransitionAndCountsTheSlotsInUse) {
  for (const Transition& transition : transitions()) {
    for (const auto& [from, to] : transition.legal) {
      SCOPED_TRACE(fmt::format("{} from {}", transition.name, slot_state_name(from)));
      bring(from);
      transition.apply(*residency_);
      EXPECT_STREQ(slot_state_name(state(kBlock.value)), slot_state_name(to));
      EXPECT_EQ(residency_->near(kLayer, kBlock), to != SlotState::kFree);
      EXPECT_EQ(residency_->readable(kLayer, kBlock), to != SlotState::kFree && to != SlotState::kLoading);
      EXPECT_EQ(near_->bytes_in_use(), to == SlotState::kFree ? 0 : kGeometry.slot_bytes());
      residency_.reset();
      EXPECT_EQ(near_->bytes_in_use(), 0U);
      residency_ = *Residency::create(*near_, kBlocks);
    }
  }
}

using ResidencyDeathTest = ResidencyTest;

TEST_F(ResidencyDeathTest, EveryOtherTransitionIsOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const Transition& transition : transitions()) {
    for (const SlotState from : kStates) {
      if (transition.legal.contains(from)) continue;
      SCOPED_TRACE(fmt::format("{} from {}", transition.name, slot_state_name(from)));
      EXPECT_DEATH(
          {
            bring(from);
            transition.apply(*residency_);
          },
          "check failed.*layer 1 block 5 is");
    }
  }
}

TEST_F(ResidencyDeathTest, TakingASlotInAnyOtherStateIsOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const SlotState to : {SlotState::kFree, SlotState::kWriting, SlotState::kClean})
    EXPECT_DEATH(take(0, to, 1), "check failed") << slot_state_name(to);
}

TEST_F(ResidencyDeathTest, AskingWhereABlockLiesThatIsNotNearIsOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(residency_->slot(kLayer, kBlock), "layer 1 block 5 is not near");
  EXPECT_DEATH(residency_->transfer(kLayer, kBlock), "layer 1 block 5 is not near");
  EXPECT_DEATH(residency_->set_transfer(kLayer, kBlock, 0), "layer 1 block 5 is not near");
}

TEST_F(ResidencyDeathTest, EndingWithATransferInFlightIsOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        residency_->note_transfer_begun();
        residency_.reset();
      },
      "1 transfers in flight");
}

TEST_F(ResidencyTest, EvictsTheCleanBlockWantedLongestAgo) {
  add_clean(0, 4);
  add_clean(1, 2);
  add_clean(2, 3);
  add_clean(3, 1);
  EXPECT_TRUE(residency_->want(kLayer, BlockIndex(3), 5));
  const SlotIndex oldest = residency_->slot(kLayer, BlockIndex(1));
  EXPECT_EQ(residency_->try_take(kLayer, BlockIndex(4), SlotState::kHeld, 6), oldest);
  EXPECT_EQ(state(1), SlotState::kFree);
  ASSERT_TRUE(take(5, SlotState::kLoading, 6));
  EXPECT_EQ(state(2), SlotState::kFree);
  ASSERT_TRUE(take(6, SlotState::kLoading, 6));
  EXPECT_EQ(state(0), SlotState::kFree);
  ASSERT_TRUE(take(7, SlotState::kLoading, 6));
  EXPECT_EQ(state(3), SlotState::kFree);
  EXPECT_FALSE(take(8, SlotState::kLoading, 6));
}

TEST_F(ResidencyTest, NeverEvictsWhatIsWantedInThisStepOrHeldOrUnderWay) {
  add_clean(0, 7);
  ASSERT_TRUE(take(1, SlotState::kHeld, 1));
  ASSERT_TRUE(take(2, SlotState::kHeld, 1));
  residency_->begin_write(kLayer, BlockIndex(2));
  ASSERT_TRUE(take(3, SlotState::kLoading, 1));
  EXPECT_FALSE(take(4, SlotState::kHeld, 7));
  EXPECT_EQ(residency_->takeable(kLayer, 7), 0U);
  EXPECT_EQ(residency_->takeable(kLayer, 8), 1U);
  EXPECT_FALSE(take(4, SlotState::kHeld, 7)) << "asking changes nothing";
  EXPECT_EQ(state(0), SlotState::kClean);
  ASSERT_TRUE(take(4, SlotState::kHeld, 8));
  EXPECT_EQ(state(0), SlotState::kFree);
  EXPECT_FALSE(take(5, SlotState::kHeld, 100));
}

TEST_F(ResidencyTest, AnEarlierWantNeverTakesALaterOneBack) {
  add_clean(0, 3);
  EXPECT_TRUE(residency_->want(kLayer, BlockIndex(0), 9));
  EXPECT_TRUE(residency_->want(kLayer, BlockIndex(0), 4));
  EXPECT_EQ(residency_->takeable(kLayer, 9), 3U);
  residency_->forget_wants();
  EXPECT_EQ(residency_->takeable(kLayer, 1), 4U);
}

TEST_F(ResidencyTest, WantingABlockThatIsNotNearSaysSoAndKeepsNothing) {
  EXPECT_FALSE(residency_->want(kLayer, kBlock, 3));
  EXPECT_EQ(residency_->takeable(kLayer, 3), 4U);
}

TEST_F(ResidencyTest, KeepsTheSameBlockOfTwoLayersApart) {
  ASSERT_TRUE(take(2, SlotState::kHeld, 1));
  EXPECT_FALSE(residency_->near(LayerIndex(0), BlockIndex(2)));
  const auto slot = residency_->try_take(LayerIndex(0), BlockIndex(2), SlotState::kLoading, 1);
  ASSERT_TRUE(slot);
  EXPECT_NE(*slot, residency_->slot(kLayer, BlockIndex(2)));
  residency_->drop(kLayer, BlockIndex(2));
  EXPECT_EQ(residency_->state(LayerIndex(0), BlockIndex(2)), SlotState::kLoading);
}

TEST_F(ResidencyTest, IsRefusedWhenEveryShareIsTakenAndGivesItsOwnBack) {
  const auto refused = Residency::create(*near_, kBlocks);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfMemory);
  EXPECT_THAT(refused.error().message, HasSubstr("--np"));
  residency_.reset();
  EXPECT_TRUE(Residency::create(*near_, kBlocks));
}

TEST_F(ResidencyTest, KeepsTheFirstErrorOnly) {
  EXPECT_FALSE(residency_->error());
  residency_->set_error({ErrorCode::kIo, "first"});
  residency_->set_error({ErrorCode::kCorrupt, "second"});
  EXPECT_EQ(residency_->error()->code, ErrorCode::kIo);
  EXPECT_EQ(residency_->error()->message, "first");
}

/// What one layer should hold: block -> state and when it was wanted.
class Model {
 public:
  explicit Model(std::uint32_t slots) : slots_(slots) {}

  struct Entry {
    SlotState state = SlotState::kFree;
    std::uint64_t wanted = 0;
  };

  std::uint32_t takeable(std::uint64_t step) const {
    auto count = slots_ - static_cast<std::uint32_t>(blocks.size());
    for (const auto& [block, entry] : blocks)
      count += entry.state == SlotState::kClean && entry.wanted < step ? 1 : 0;
    return count;
  }
  /// Whether the block may go for a take in `step`: nothing clean was wanted longer ago.
  bool may_go(std::uint32_t block, std::uint64_t step) const {
    const Entry& entry = blocks.at(block);
    if (entry.state != SlotState::kClean || entry.wanted >= step || blocks.size() < slots_) return false;
    return std::none_of(blocks.begin(), blocks.end(), [&](const auto& other) {
      return other.second.state == SlotState::kClean && other.second.wanted < entry.wanted;
    });
  }

  std::map<std::uint32_t, Entry> blocks;

 private:
  std::uint32_t slots_;
};

class ResidencyWalk : public ResidencyTest {
 protected:
  static constexpr std::uint32_t kSlots = 5;
  ResidencyWalk() : ResidencyTest(kSlots) {}

  void expect_as_model() const {
    for (std::uint32_t block = 0; block < kBlocks; ++block) {
      const auto found = model_.blocks.find(block);
      const SlotState wanted = found == model_.blocks.end() ? SlotState::kFree : found->second.state;
      ASSERT_STREQ(slot_state_name(state(block)), slot_state_name(wanted)) << "block " << block;
    }
    ASSERT_EQ(near_->bytes_in_use(), model_.blocks.size() * kGeometry.slot_bytes());
    for (std::uint64_t step = step_; step < step_ + 3; ++step)
      ASSERT_EQ(residency_->takeable(kLayer, step), model_.takeable(step)) << "step " << step;
  }

  void take_at_random(std::uint32_t block) {
    const SlotState to = random_() % 2 == 0 ? SlotState::kHeld : SlotState::kLoading;
    const bool may = model_.takeable(step_) > 0;
    ASSERT_EQ(take(block, to, step_), may);
    if (!may) return;
    for (const auto& [other, entry] : model_.blocks) {
      if (state(other) != SlotState::kFree) continue;
      ASSERT_TRUE(model_.may_go(other, step_)) << "block " << other << " lost its slot";
      model_.blocks.erase(other);
      break;
    }
    model_.blocks[block] = {.state = to, .wanted = step_};
  }

  void change_at_random(std::uint32_t block, Model::Entry& entry) {
    const BlockIndex index(block);
    switch (entry.state) {
      case SlotState::kFree:
        return;
      case SlotState::kHeld:
        residency_->begin_write(kLayer, index);
        entry.state = SlotState::kWriting;
        return;
      case SlotState::kWriting:
        if (random_() % 4 != 0) {
          residency_->end_write(kLayer, index);
          entry.state = SlotState::kClean;
        } else {
          residency_->fail_write(kLayer, index);
          entry.state = SlotState::kHeld;
        }
        return;
      case SlotState::kLoading:
        if (random_() % 4 != 0) {
          residency_->end_read(kLayer, index);
          entry.state = SlotState::kClean;
        } else {
          residency_->fail_read(kLayer, index);
          model_.blocks.erase(block);
        }
        return;
      case SlotState::kClean:
        if (random_() % 4 != 0) return;
        residency_->reopen(kLayer, index);
        entry.state = SlotState::kHeld;
        return;
    }
  }

  void move_at_random() {
    const auto block = static_cast<std::uint32_t>(random_() % kBlocks);
    const auto found = model_.blocks.find(block);
    const std::uint64_t choice = random_() % 16;
    if (choice == 0) {
      ++step_;
    } else if (choice < 4) {
      const std::uint64_t step = step_ + random_() % 2;
      ASSERT_EQ(residency_->want(kLayer, BlockIndex(block), step), found != model_.blocks.end());
      if (found != model_.blocks.end()) found->second.wanted = std::max(found->second.wanted, step);
    } else if (found == model_.blocks.end()) {
      take_at_random(block);
    } else if (choice == 4 &&
               (found->second.state == SlotState::kHeld || found->second.state == SlotState::kClean)) {
      residency_->drop(kLayer, BlockIndex(block));
      model_.blocks.erase(found);
    } else {
      change_at_random(block, found->second);
    }
  }

  std::mt19937_64 random_;
  std::uint64_t step_ = 1;
  Model model_{kSlots};
};

TEST_F(ResidencyWalk, AgreesWithAMapAfterEachOfManyRandomOperations) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    random_.seed(seed);
    for (int i = 0; i < 3000; ++i) {
      SCOPED_TRACE(fmt::format("seed {}, operation {}", seed, i));
      move_at_random();
      expect_as_model();
      if (HasFatalFailure()) return;
    }
  }
  residency_.reset();
  EXPECT_EQ(near_->bytes_in_use(), 0U);
}

TEST_F(ResidencyTest, UnwantTakesBackTheWantOfThatStepAlone) {
  add_clean(1, 7);
  add_clean(2, 6);
  EXPECT_EQ(residency_->takeable(kLayer, 7), 2U + 1U);  // two free, and block 2
  residency_->unwant(kLayer, BlockIndex(1), 8);         // wanted in 7
  EXPECT_EQ(residency_->takeable(kLayer, 7), 2U + 1U);
  residency_->unwant(kLayer, BlockIndex(1), 7);
  EXPECT_EQ(residency_->takeable(kLayer, 7), 2U + 2U);
  residency_->unwant(kLayer, BlockIndex(9), 7);  // not near: nothing
}

TEST_F(ResidencyTest, APredictedMarkIsTakenOnceAndGoesWithTheSlot) {
  ASSERT_TRUE(take(1, SlotState::kLoading, 1));
  EXPECT_FALSE(residency_->take_predicted_mark(kLayer, BlockIndex(1)));
  residency_->mark_predicted(kLayer, BlockIndex(1));
  EXPECT_TRUE(residency_->take_predicted_mark(kLayer, BlockIndex(1)));
  EXPECT_FALSE(residency_->take_predicted_mark(kLayer, BlockIndex(1)));
  residency_->mark_predicted(kLayer, BlockIndex(1));
  residency_->end_read(kLayer, BlockIndex(1));
  residency_->drop(kLayer, BlockIndex(1));
  ASSERT_TRUE(take(1, SlotState::kLoading, 2));
  EXPECT_FALSE(residency_->take_predicted_mark(kLayer, BlockIndex(1)));
  residency_->end_read(kLayer, BlockIndex(1));
}

}  // namespace
}  // namespace dualdecoder
