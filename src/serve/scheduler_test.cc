#include "serve/scheduler.h"

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Not;

JobShape shape(std::uint32_t prompt, std::uint32_t tokens_max, const std::string& client = "a",
               std::int32_t priority = 0) {
  return {.client = client, .priority = priority, .prompt_tokens = prompt, .tokens_max = tokens_max};
}

std::vector<std::pair<JobId, std::uint32_t>> pieces(const Scheduler::Plan& plan) {
  std::vector<std::pair<JobId, std::uint32_t>> list;
  for (const auto& [job, tokens] : plan.prompts) list.emplace_back(job, tokens);
  return list;
}

// What the service does with plans, except that nobody ends. Times are the caller's.
class Player {
 public:
  explicit Player(Scheduler& scheduler) : scheduler_(scheduler) {}

  /// Returns the seconds that it all took.
  double play(double decode_s, const std::function<double(std::uint32_t)>& layer_s) {
    const Scheduler::Plan plan = scheduler_.plan();
    double seconds = 0.0;
    if (!plan.decoding.empty()) {
      scheduler_.note_decoding(decode_s);
      seconds += decode_s;
    }
    if (!plan.prompts.empty()) pieces_ = plan.prompts;
    if (plan.prompt_layers == 0) return seconds;
    const double layers_s = plan.prompt_layers * layer_s(tokens());
    scheduler_.note_layers(layers_s);
    layers_ += plan.prompt_layers;
    if (layers_ == kLayers) {
      for (const auto& [job, tokens] : pieces_) scheduler_.note_prompt(job, tokens);
      layers_ = 0;
    }
    return seconds + layers_s;
  }
  /// Of the step over prompts.
  std::uint32_t tokens() const {
    std::uint32_t sum = 0;
    for (const auto& [job, tokens] : pieces_) sum += tokens;
    return sum;
  }

  static constexpr std::uint32_t kLayers = 12;

 private:
  Scheduler& scheduler_;
  std::vector<Scheduler::Piece> pieces_;
  std::uint32_t layers_ = 0;
};

// The planned step over prompts, as a whole.
void compute_prompts(Scheduler& scheduler, const Scheduler::Plan& plan) {
  if (plan.prompt_layers == 0) return;
  scheduler.note_layers(1e-3);
  for (const auto& [job, tokens] : plan.prompts) scheduler.note_prompt(job, tokens);
}

TEST(Scheduler, ComputesAPromptInPiecesAndThenDecodes) {
  Scheduler scheduler({.running_max = 2, .layers = 5, .prompt_tokens_max = 100});
  scheduler.add(1, shape(250, 300));
  for (const std::uint32_t piece : {100U, 100U, 50U}) {
    const Scheduler::Plan plan = scheduler.plan();
    EXPECT_THAT(pieces(plan), ElementsAre(std::pair(1, piece)));
    EXPECT_EQ(plan.prompt_layers, 5U);
    compute_prompts(scheduler, plan);
  }
  EXPECT_THAT(scheduler.plan().decoding, ElementsAre(1));
  EXPECT_EQ(scheduler.plan().prompt_layers, 0U);
  scheduler.remove(1);
  EXPECT_TRUE(scheduler.plan().idle());
}

TEST(Scheduler, BeginsNoOtherStepOverPromptsWhileOneIsUnderWay) {
  Scheduler scheduler({.running_max = 3, .layers = 4, .prompt_tokens_max = 100});
  scheduler.add(1, shape(1, 100));
  compute_prompts(scheduler, scheduler.plan());
  scheduler.add(2, shape(50, 60));
  EXPECT_THAT(pieces(scheduler.plan()), ElementsAre(std::pair(2, 32)));
  EXPECT_EQ(scheduler.plan().prompt_layers, 1U) << "what a layer costs beside it is not known yet";
  scheduler.note_layers(1e-3);
  scheduler.add(3, shape(50, 60));
  EXPECT_THAT(pieces(scheduler.plan()), IsEmpty());
  scheduler.drop_prompts();
  EXPECT_THAT(pieces(scheduler.plan()), Not(IsEmpty()));
  scheduler.remove(1);
  EXPECT_EQ(scheduler.plan().prompt_layers, 4U) << "nobody decodes: all that is left";
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

TEST(Scheduler, ParksTheYoungestOfTheLowestPriorityForAHigherOneAndLetsItGoOnLater) {
  Scheduler scheduler({.running_max = 3, .parked_max = 2, .block_tokens = 16, .pages_max = 20});
  scheduler.add(1, shape(1, 32, "a", -1));
  scheduler.add(2, shape(1, 32, "a", -1));
  scheduler.add(3, shape(1, 32, "a", 1));
  compute_prompts(scheduler, scheduler.plan());
  scheduler.add(4, shape(1, 32, "b", 0));
  Scheduler::Plan plan = scheduler.plan();
  EXPECT_THAT(plan.parked, ElementsAre(2));
  EXPECT_THAT(plan.admitted, ElementsAre(4));
  EXPECT_THAT(plan.decoding, ElementsAre(1, 3));
  EXPECT_EQ(scheduler.running(), 3U);
  EXPECT_EQ(scheduler.waiting(), 1U);
  EXPECT_EQ(scheduler.pages_reserved(), 8U) << "it keeps its pages";
  compute_prompts(scheduler, plan);

  scheduler.add(5, shape(1, 32, "c", 0));
  plan = scheduler.plan();
  EXPECT_THAT(plan.parked, ElementsAre(1));
  compute_prompts(scheduler, plan);
  scheduler.add(6, shape(1, 32, "d", 1));
  EXPECT_THAT(scheduler.plan().parked, IsEmpty()) << "there are as many as there may be";
  scheduler.remove(4);
  plan = scheduler.plan();
  EXPECT_THAT(plan.admitted, ElementsAre(6));
  scheduler.remove(5);
  EXPECT_THAT(scheduler.plan().admitted, ElementsAre(1)) << "the one that came first";
  scheduler.remove(2);  // while it is parked
  for (const JobId job : {1, 3, 6}) scheduler.remove(job);
  EXPECT_EQ(scheduler.pages_reserved(), 0U);
  EXPECT_EQ(scheduler.waiting(), 0U);
}

TEST(Scheduler, ParksNobodyForTheSamePriorityNorOutOfAStepOverPromptsNorWithoutPages) {
  Scheduler scheduler({.running_max = 1, .parked_max = 1, .layers = 4, .block_tokens = 16, .pages_max = 4});
  scheduler.add(1, shape(20, 32));
  ASSERT_THAT(scheduler.plan().prompts, Not(IsEmpty()));  // under way from now on
  scheduler.add(2, shape(1, 32));
  scheduler.add(3, shape(1, 48, "a", 1));
  EXPECT_THAT(scheduler.plan().parked, IsEmpty()) << "job 3 has no pages";
  scheduler.remove(3);
  scheduler.add(4, shape(1, 32, "a", 1));
  EXPECT_THAT(scheduler.plan().parked, IsEmpty()) << "job 1 is being computed";
  scheduler.note_layers(1e-3);
  scheduler.note_prompt(1, 20);
  EXPECT_THAT(scheduler.plan().parked, ElementsAre(1));
}

// What is first in the queue waits for pages of one that waits for a place.
TEST(Scheduler, LetsOneThatIsParkedGoOnWhereTheFirstInTheQueueHasNoPages) {
  Scheduler scheduler({.running_max = 1, .parked_max = 1, .block_tokens = 16, .pages_max = 4});
  scheduler.add(1, shape(1, 32));
  compute_prompts(scheduler, scheduler.plan());
  scheduler.add(2, shape(1, 16, "a", 1));
  EXPECT_THAT(scheduler.plan().parked, ElementsAre(1));
  scheduler.add(3, shape(1, 64, "a", 2));
  scheduler.remove(2);
  EXPECT_THAT(scheduler.plan().admitted, ElementsAre(1));
  scheduler.remove(1);
  EXPECT_THAT(scheduler.plan().admitted, ElementsAre(3));
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
  Scheduler scheduler({.running_max = 3, .outputs_max = 3, .prompt_tokens_max = 100});
  JobShape wants_all = shape(50, 60);
  wants_all.prompt_logits = true;
  scheduler.add(1, wants_all);
  scheduler.add(2, shape(8, 60));
  // All three go to job 1: nothing is left for the end of job 2's prompt.
  EXPECT_THAT(pieces(scheduler.plan()), ElementsAre(std::pair(1, 3), std::pair(2, 7)));
}

TEST(Scheduler, KeepsStepsBesideDecodingNearTheAllowedMultipleWhateverALayerCosts) {
  constexpr double kDecodeSeconds = 0.010;
  for (const double token_s : {1e-7, 1e-5, 2e-4}) {
    for (const double fixed_s : {0.0, 0.002}) {
      const auto layer_s = [&](std::uint32_t tokens) { return fixed_s + tokens * token_s; };
      Scheduler scheduler({.running_max = 2, .layers = Player::kLayers, .latency_ratio = 2.0});
      Player player(scheduler);
      scheduler.add(1, shape(1, 8000));
      for (int i = 0; i < 20; ++i) player.play(kDecodeSeconds, layer_s);
      scheduler.add(2, shape(1'000'000, 1'000'001));
      for (int i = 0; i < 400; ++i) {
        const double seconds = player.play(kDecodeSeconds, layer_s);
        if (i >= 100) {
          EXPECT_LE(seconds, 2.2 * kDecodeSeconds) << token_s << ' ' << fixed_s;
        }
      }
      const double most = std::min(512.0, (kDecodeSeconds - fixed_s) / token_s);
      EXPECT_GE(player.tokens(), most * 0.5) << token_s << ' ' << fixed_s;
    }
  }
}

TEST(Scheduler, GetsOnWithAPromptThatIsDearerThanAllowed) {
  const auto layer_s = [](std::uint32_t tokens) { return 0.050 + tokens * 1e-3; };
  Scheduler scheduler({.running_max = 2, .layers = Player::kLayers, .latency_ratio = 2.0});
  Player player(scheduler);
  scheduler.add(1, shape(1, 8000));
  for (int i = 0; i < 20; ++i) player.play(0.010, layer_s);
  scheduler.add(2, shape(320, 400));
  for (std::uint32_t i = 0; i < 10 * Player::kLayers; ++i) {
    player.play(0.010, layer_s);
    EXPECT_EQ(player.tokens(), Scheduler::kPieceTokensMin);
  }
  EXPECT_THAT(scheduler.plan().decoding, ElementsAre(1, 2));
}

// Up to four jobs of all shapes, all at once or one a step, in every order, with every number of pages and
// places, with and without parking.
TEST(Scheduler, LetsEveryJobThatFitsGetThroughInEverySmallCase) {
  constexpr std::uint32_t kShapes = 6;
  constexpr std::uint32_t kCodes = kShapes * kShapes * kShapes * kShapes;
  std::uint64_t parked = 0;
  for (std::uint32_t setting = 0; setting < 3 * 3 * 2 * 2; ++setting) {
    const std::uint32_t pages = 1 + setting % 3;
    const std::uint32_t places = 1 + setting / 3 % 3;
    const std::uint32_t parked_max = setting / 9 % 2 * places;
    const bool one_a_step = setting / 18 == 1;
    for (std::uint32_t code = 0; code < kCodes; ++code) {
      SCOPED_TRACE(testing::Message() << "setting " << setting << " code " << code);
      Scheduler scheduler({.running_max = places,
                           .parked_max = parked_max,
                           .prompt_tokens_max = 2,
                           .block_tokens = 1,
                           .pages_max = pages});
      std::uint32_t rest = code;
      std::map<JobId, std::uint32_t> answer;  // of those left: tokens still to come
      std::set<JobId> in_place;
      JobId id = 0;
      for (int step = 0; id < 4 || !answer.empty(); ++step) {
        ASSERT_LT(step, 40);
        for (bool more = true; more && id < 4; rest /= kShapes) {
          const std::uint32_t tokens_max = 1 + rest % 3;
          more = !one_a_step;
          if (!scheduler.fits(tokens_max)) {
            ++id;
            continue;
          }
          scheduler.add(++id, shape(1, tokens_max, rest % 2 == 0 ? "a" : "b", rest % 6 < 3 ? 0 : 1));
          answer[id] = tokens_max - 1;
        }
        if (answer.empty()) continue;
        const Scheduler::Plan plan = scheduler.plan();
        ASSERT_FALSE(plan.idle());
        parked += plan.parked.size();
        for (const JobId job : plan.parked) ASSERT_EQ(in_place.erase(job), 1U);
        for (const JobId job : plan.admitted) ASSERT_TRUE(in_place.insert(job).second);
        ASSERT_LE(in_place.size(), places);
        ASSERT_EQ(in_place.size(), scheduler.running());
        ASSERT_LE(scheduler.pages_reserved(), pages);
        compute_prompts(scheduler, plan);
        for (const JobId job : plan.decoding) {
          ASSERT_TRUE(in_place.contains(job));
          if (answer[job] > 0 && --answer[job] > 0) continue;
          scheduler.remove(job);
          answer.erase(job);
          in_place.erase(job);
        }
      }
    }
  }
  EXPECT_GT(parked, 100U);
}

}  // namespace
}  // namespace dualdecoder
