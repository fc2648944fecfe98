#include "decode/policy_chooser.h"

#include <array>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

struct Cost {
  double seconds = 0.0;  // of a step
  double tokens = 1.0;   // that it commits, on average
};
using Costs = std::map<Way, Cost>;

/// Plays steps, and counts how many went each way.
std::map<Way, int> play(PolicyChooser& chooser, const Costs& costs, int steps) {
  std::map<Way, int> ways;
  double owed = 0.0;
  for (int i = 0; i < steps; ++i) {
    const Way way = chooser.way();
    ++ways[way];
    owed += costs.at(way).tokens;
    const auto tokens = static_cast<std::uint32_t>(owed);
    owed -= tokens;
    chooser.note(costs.at(way).seconds, tokens);
  }
  return ways;
}

constexpr int kFirstRound = static_cast<int>(kWays * PolicyChooser::kTrialSteps);

TEST(PolicyChooser, TriesEveryWayThenTakesTheOneThatIsCheapestForAToken) {
  PolicyChooser chooser;
  const auto first = play(
      chooser, {{Way::kPrevious, {8e-3}}, {Way::kDual, {12e-3}}, {Way::kAccept, {9e-3, 1.6}}}, kFirstRound);
  for (const auto& [way, steps] : first) EXPECT_EQ(steps, static_cast<int>(PolicyChooser::kTrialSteps));
  EXPECT_EQ(first.size(), kWays);
  EXPECT_EQ(chooser.chosen(), Way::kAccept);
  EXPECT_NEAR(chooser.cost(Way::kAccept), 9e-3 / 1.6, 1e-3);
  EXPECT_THAT(chooser.reason(), testing::StartsWith("accept ("));
}

TEST(PolicyChooser, TakesDualAsLongAsItCostsLittleMoreForAToken) {
  for (const auto& [dual, chosen] : {std::pair(8.3e-3, Way::kDual), std::pair(8.9e-3, Way::kPrevious)}) {
    PolicyChooser chooser;
    play(chooser, {{Way::kPrevious, {8e-3}}, {Way::kDual, {dual}}, {Way::kAccept, {9e-3, 1.0}}}, kFirstRound);
    EXPECT_EQ(chooser.chosen(), chosen) << dual;
  }
}

TEST(PolicyChooser, FollowsACostThatHasChangedAndSpendsLittleOnTrials) {
  PolicyChooser chooser;
  Costs costs = {{Way::kPrevious, {8e-3}}, {Way::kDual, {16e-3}}, {Way::kAccept, {9e-3, 1.0}}};
  play(chooser, costs, kFirstRound);
  ASSERT_EQ(chooser.chosen(), Way::kPrevious);
  auto ways = play(chooser, costs, 20'000);
  EXPECT_GT(ways[Way::kPrevious], 19'400);
  EXPECT_GT(ways[Way::kDual], 0);
  EXPECT_GT(ways[Way::kAccept], 0);
  costs[Way::kAccept] = {9e-3, 1.8};  // the text has begun to repeat itself
  play(chooser, costs, 5'000);
  EXPECT_EQ(chooser.chosen(), Way::kAccept);
}

TEST(PolicyChooser, SoonMeasuresAgainWhatWasTriedWhileNearMemoryWasFilling) {
  PolicyChooser chooser;
  Costs costs = {{Way::kPrevious, {19e-3}}, {Way::kDual, {14e-3}}, {Way::kAccept, {13e-3, 1.0}}};
  play(chooser, costs, kFirstRound);
  ASSERT_EQ(chooser.chosen(), Way::kDual);
  costs[Way::kPrevious] = {10e-3};
  play(chooser, costs, 150);
  EXPECT_EQ(chooser.chosen(), Way::kPrevious);
  EXPECT_NEAR(chooser.cost(Way::kPrevious), 10e-3, 1e-4);
}

TEST(PolicyChooser, StaysWhereTheGainIsWithinTheNoise) {
  PolicyChooser chooser;
  Costs costs = {{Way::kPrevious, {8e-3}}, {Way::kDual, {16e-3}}, {Way::kAccept, {9e-3, 1.0}}};
  play(chooser, costs, kFirstRound);
  costs[Way::kAccept] = {7.8e-3, 1.0};
  play(chooser, costs, 10'000);
  EXPECT_EQ(chooser.chosen(), Way::kPrevious);
}

TEST(PolicyChooser, KeepsAWayWhoseStepsCommitNothingForAWhile) {
  PolicyChooser chooser;
  play(chooser, {{Way::kPrevious, {8e-3, 0.0}}, {Way::kDual, {8e-3, 0.0}}, {Way::kAccept, {8e-3, 0.0}}}, 200);
  EXPECT_EQ(chooser.cost(Way::kPrevious), 0.0);
}

}  // namespace
}  // namespace dualdecoder
