#include "serve/scheduler.h"

#include <algorithm>
#include <deque>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

JobShape shape(std::uint32_t prompt, std::uint32_t tokens_max, const std::string& client = "a",
               std::int32_t priority = 0) {
  return {.client = client, .priority = priority, .prompt_tokens = prompt, .tokens_max = tokens_max};
}

std::vector<std::pair<JobId, std::uint32_t>> pieces(const Scheduler::Plan& plan) {
  std::vector<std::pair<JobId, std::uint32_t>> list;
  for (const auto& [job, tokens] : plan.prompts) list.emplace_back(job, tokens);
  return list;
}

// What a step does to the jobs, except that nobody ends.
void play(Scheduler& scheduler, double seconds) {
  const Scheduler::Plan plan = scheduler.plan();
  scheduler.note_step(seconds);
  for (const auto& [job, tokens] : plan.prompts) scheduler.note_prompt(job, tokens);
}

TEST(Scheduler, ComputesAPromptInPiecesAndThenDecodes) {
  Scheduler scheduler({.running_max = 2, .prompt_tokens_max = 100});
  scheduler.add(1, shape(250, 300));
  EXPECT_THAT(pieces(scheduler.plan()), ElementsAre(std::pair(1, 100)));
  EXPECT_THAT(scheduler.plan().admitted, IsEmpty());
  scheduler.note_prompt(1, 100);
  scheduler.note_prompt(1, 100);
  EXPECT_THAT(pieces(scheduler.plan()), ElementsAre(std::pair(1, 50)));
  scheduler.note_prompt(1, 50);
  EXPECT_THAT(scheduler.plan().decoding, ElementsAre(1));
  EXPECT_TRUE(scheduler.plan().prompts.empty());
  scheduler.remove(1);
  EXPECT_TRUE(scheduler.plan().idle());
}

TEST(Scheduler, LetsInHigherPriorityThenTheClientWithFewerRunningThenTheEarlier) {
  Scheduler scheduler({.running_max = 1});
  scheduler.add(1, shape(1, 10, "a"));
  EXPECT_THAT(scheduler.plan().admitted, ElementsAre(1));
  scheduler.add(2, shape(1, 10, "a"));
  scheduler.add(3, shape(1, 10, "b"));
  scheduler.add(4, shape(1, 10, "a", 5));
  EXPECT_THAT(scheduler.plan().admitted, IsEmpty());
  std::vector<JobId> order;
  for (JobId running = 1; order.size() < 3; running = order.back()) {
    scheduler.remove(running);
    order.push_back(scheduler.plan().admitted.at(0));
  }
  EXPECT_THAT(order, ElementsAre(4, 2, 3));

  Scheduler two({.running_max = 2});
  for (JobId id = 1; id <= 3; ++id) two.add(id, shape(1, 10, "a"));
  two.add(4, shape(1, 10, "b"));
  EXPECT_THAT(two.plan().admitted, ElementsAre(1, 4));
}

TEST(Scheduler, ReservesAllPagesThatAJobMayComeToHoldAndLetsNobodyOvertake) {
  Scheduler scheduler({.running_max = 4, .block_tokens = 16, .pages_max = 10});
  EXPECT_TRUE(scheduler.fits(160));
  EXPECT_FALSE(scheduler.fits(161));
  scheduler.add(1, shape(17, 81));  // 6 pages
  scheduler.add(2, shape(17, 80));  // 5
  scheduler.add(3, shape(1, 16));   // 1: would fit beside job 1
  EXPECT_THAT(scheduler.plan().admitted, ElementsAre(1));
  EXPECT_EQ(scheduler.pages_reserved(), 6U);
  EXPECT_EQ(scheduler.waiting(), 2U);
  scheduler.remove(1);
  EXPECT_THAT(scheduler.plan().admitted, ElementsAre(2, 3));
  EXPECT_EQ(scheduler.pages_reserved(), 6U);
  scheduler.remove(3);
  scheduler.remove(2);
  EXPECT_EQ(scheduler.pages_reserved(), 0U);
}

TEST(Scheduler, GivesHalfToTheOldestPromptAndTheRestToTheShortest) {
  Scheduler scheduler({.running_max = 3, .prompt_tokens_max = 100});
  scheduler.add(1, shape(1000, 1001));
  scheduler.add(2, shape(300, 301));
  scheduler.add(3, shape(20, 21));
  EXPECT_THAT(pieces(scheduler.plan()), ElementsAre(std::pair(1, 50), std::pair(3, 20), std::pair(2, 30)));
}

TEST(Scheduler, AsksForNoMoreLogitsThanAStepHas) {
  Scheduler scheduler({.running_max = 3, .rows_each = 2, .outputs_max = 5, .prompt_tokens_max = 100});
  scheduler.add(1, shape(1, 100));
  scheduler.note_prompt((scheduler.plan(), 1), 1);
  JobShape wants_all = shape(50, 60);
  wants_all.prompt_logits = true;
  scheduler.add(2, wants_all);
  scheduler.add(3, shape(8, 60));
  // Two of the five go to job 1 and its guess, three to job 2: nothing is left for the end of job 3's prompt.
  EXPECT_THAT(pieces(scheduler.plan()), ElementsAre(std::pair(2, 3), std::pair(3, 7)));
}

TEST(Scheduler, KeepsStepsBesideDecodingNearTheAllowedMultipleWhateverAPromptTokenCosts) {
  for (const double token_s : {1e-5, 2e-4, 3e-3}) {
    Scheduler scheduler({.running_max = 2, .latency_ratio = 2.0});
    scheduler.add(1, shape(1, 8000));
    scheduler.note_prompt((scheduler.plan(), 1), 1);
    for (int i = 0; i < 20; ++i) play(scheduler, 0.010);
    scheduler.add(2, shape(100'000, 100'001));
    std::uint32_t tokens = 0;
    for (int i = 0; i < 60; ++i) {
      const Scheduler::Plan plan = scheduler.plan();
      ASSERT_THAT(plan.decoding, ElementsAre(1));
      ASSERT_EQ(plan.prompts.size(), 1U);
      tokens = plan.prompts[0].tokens;
      const double seconds = 0.010 + tokens * token_s;
      if (i >= 20) {
        EXPECT_LE(seconds, 0.024) << token_s;
      }
      scheduler.note_step(seconds);
      scheduler.note_prompt(2, tokens);
    }
    const double most = std::min(512.0, 0.010 / token_s);
    EXPECT_GE(tokens, std::max(1.0, most * 0.5)) << token_s;
  }
}

// Every order in which up to four jobs of all shapes can arrive, with every number of pages and places: each
// one gets through, since the first in the queue runs as soon as those before it have ended.
TEST(Scheduler, LetsEveryJobThatFitsGetThroughInEverySmallCase) {
  for (std::uint32_t pages = 1; pages <= 3; ++pages) {
    for (std::uint32_t places = 1; places <= 3; ++places) {
      for (std::uint32_t code = 0; code < 6 * 6 * 6 * 6; ++code) {
        Scheduler scheduler(
            {.running_max = places, .prompt_tokens_max = 2, .block_tokens = 1, .pages_max = pages});
        std::uint32_t rest = code;
        std::set<JobId> left;
        std::map<JobId, std::uint32_t> answer;
        for (JobId id = 1; id <= 4; ++id, rest /= 6) {
          const std::uint32_t tokens_max = 1 + rest % 3;
          if (!scheduler.fits(tokens_max)) continue;
          scheduler.add(id, shape(1, tokens_max, rest % 2 == 0 ? "a" : "b", rest % 6 < 3 ? 0 : 1));
          left.insert(id);
          answer[id] = tokens_max - 1;
        }
        int steps = 0;
        while (!left.empty()) {
          ASSERT_LT(++steps, 40) << "pages " << pages << " places " << places << " code " << code;
          const Scheduler::Plan plan = scheduler.plan();
          ASSERT_FALSE(plan.idle());
          ASSERT_LE(scheduler.running(), places);
          ASSERT_LE(scheduler.pages_reserved(), pages);
          for (const auto& [job, tokens] : plan.prompts) scheduler.note_prompt(job, tokens);
          for (const JobId job : plan.decoding) {
            if (answer[job] > 0 && --answer[job] > 0) continue;
            scheduler.remove(job);
            left.erase(job);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace dualdecoder
