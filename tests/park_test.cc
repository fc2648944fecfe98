// Sequences that give their place near to another and take one again, on small random models: each gives the
// bits that it gives undisturbed (laws 1 and 5 of docs/design.md), and a far tier that fails meanwhile ends
// nobody else (law 3).
#include <random>

#include <gmock/gmock.h>

#include "decode/generation.h"
#include "tiers_testing.h"

namespace dualdecoder {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using testing::HasSubstr;

class Park : public TieredEngines, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    const std::string architecture = GetParam();
    model_ = load({.architecture = architecture, .layers = architecture == "gemma3" ? 4U : 3U});
  }

  static EngineOptions options_of(Policy policy) {
    EngineOptions options = small_options(1);
    options.tiers.far.kind = FarKind::kHost;
    options.tiers.policy = policy;
    if (policy == Policy::kDual) options.draft.kind = DraftKind::kSelf;
    return options;
  }

  static void park(Sequence& sequence) {
    const Status status = sequence.park();
    DD_CHECK(status, "{}", status.error().message);
  }
  static void resume(Sequence& sequence) {
    const Status status = sequence.resume();
    DD_CHECK(status, "{}", status.error().message);
  }

  /// Some other sequence, which has the only place for a while.
  static void let_another_in(Engine& engine, std::uint64_t seed) {
    play(engine, make_story(static_cast<std::uint32_t>(20 + seed % 200), 5, seed));
  }

  /// play(), parked with probability `often` before each piece of the prompt and before each step.
  static Rows play_parked(Engine& engine, const Story& story, double often, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Rows rows;
    const auto sequence = new_sequence(engine);
    const auto maybe_park = [&] {
      if (!std::bernoulli_distribution(often)(random)) return;
      park(*sequence);
      let_another_in(engine, random());
      resume(*sequence);
    };
    const std::span<const TokenId> prompt(story.prompt);
    for (std::size_t begin = 0; begin < prompt.size(); begin += kTierChunk) {
      maybe_park();
      const auto piece = prompt.subspan(begin, std::min<std::size_t>(kTierChunk, prompt.size() - begin));
      const auto logits = engine.prefill(*sequence, piece);
      DD_CHECK(logits, "{}", logits.error().message);
      if (begin + piece.size() == prompt.size()) rows.push_back(copy_row(*logits));
    }
    for (std::size_t s = 0; s < story.steps.size(); ++s) {
      maybe_park();
      const StepGroup group = step_group(engine, *sequence, story, s);
      const auto logits = engine.step(std::span(&group, 1));
      DD_CHECK(logits && !sequence->error());
      rows.push_back(copy_row(*logits));
    }
    return rows;
  }

  void expect_same_bits_parked(const EngineOptions& options, const Story& story, std::uint64_t seed) {
    const Rows expected = play_parked(*engine(*model_, options), story, 0.0, seed);
    const auto parking = engine(*model_, options);
    const Rows rows = play_parked(*parking, story, 0.3, seed);
    ASSERT_EQ(rows.size(), expected.size());
    for (std::size_t i = 0; i < rows.size(); ++i)
      ASSERT_TRUE(same_bits(rows[i], expected[i])) << "row " << i << " of " << rows.size();
    EXPECT_EQ(parking->near().bytes_in_use(), 0U);
    EXPECT_EQ(parking->tiers().far().pages_in_use(), 0U);
  }

  std::unique_ptr<Model> model_;
};

TEST_P(Park, ChangesNoBitWhateverThePolicyTheBlocksAndTheResidency) {
  std::uint64_t seed = 0;
  for (const Policy policy : kEveryPolicy) {
    for (const std::uint32_t block_tokens : {16U, 32U}) {
      for (const std::uint32_t near_tokens : {1U, 200U}) {
        SCOPED_TRACE(
            fmt::format("{}, blocks of {}, {} near", policy_name(policy), block_tokens, near_tokens));
        EngineOptions options = options_of(policy);
        options.block_tokens = block_tokens;
        options.tiers.near_tokens = near_tokens;
        ++seed;
        expect_same_bits_parked(options, make_story(203, 40, seed), seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Park, ChangesNoBitOverAFile) {
  EngineOptions options = options_of(Policy::kPrevious);
  options.tiers.far = {.kind = FarKind::kFile, .directory = directory_.file(""), .make_port = {}};
  expect_same_bits_parked(options, make_story(203, 60, 1), 1);
}

TEST_P(Park, ChangesNoBitWhenCopiesAreLateAndInAnyOrder) {
  const Story story = make_story(203, 40, 1);
  const EngineOptions options = options_of(Policy::kPrevious);
  const Rows expected = play_parked(*engine(*model_, options), story, 0.0, 0);
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    const SimulatedPortOptions slow{
        .seed = seed, .latency_min = nanoseconds(0), .latency_max = milliseconds(50)};
    const auto engine = simulated(*model_, options, slow);
    const Rows rows = play_parked(*engine, story, 0.3, seed);
    for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_TRUE(same_bits(rows[i], expected[i])) << "row " << i;
  }
}

TEST_P(Park, GivesThePlaceBackAndKeepsThePages) {
  const auto engine = this->engine(*model_, options_of(Policy::kPrevious));
  const FarTier& far = engine->tiers().far();
  auto parked = new_sequence(*engine);
  ASSERT_TRUE(engine->prefill(*parked, random_tokens(100, 1)));
  ASSERT_FALSE(engine->new_sequence());
  park(*parked);
  EXPECT_TRUE(parked->parked());
  EXPECT_EQ(engine->near().bytes_in_use(), 0U);
  EXPECT_EQ(far.pages_in_use(), 7U);

  auto other = new_sequence(*engine);
  const Status refused = parked->resume();
  ASSERT_FALSE(refused);
  EXPECT_STREQ(error_code_name(refused.error().code), error_code_name(ErrorCode::kOutOfMemory));
  EXPECT_TRUE(parked->parked());
  EXPECT_FALSE(parked->error());
  other.reset();
  resume(*parked);
  EXPECT_FALSE(parked->parked());
  park(*parked);
  parked.reset();
  EXPECT_EQ(far.pages_in_use(), 0U);
}

TEST_P(Park, ReportsWhatTheFarTierDoesWrong) {
  for (const CopyKind kind : {CopyKind::kWrite, CopyKind::kRead}) {
    SimulatedPort* port = nullptr;
    const auto engine = simulated(*model_, options_of(Policy::kPrevious), {}, &port);
    const auto sequence = new_sequence(*engine);
    ASSERT_TRUE(engine->prefill(*sequence, random_tokens(100, 1)));
    bool failed = false;
    const auto fail_once = [&](const Copy& copy) {
      if (copy.kind != kind || std::exchange(failed, true)) return Fault{};
      return Fault{.kind = FaultKind::kError, .error = EREMOTEIO};
    };
    if (kind == CopyKind::kWrite) {
      port->set_fault_hook(fail_once);
      EXPECT_FALSE(sequence->park());
      EXPECT_FALSE(sequence->parked());
    } else {
      park(*sequence);
      port->set_fault_hook(fail_once);
      EXPECT_FALSE(sequence->resume());
    }
    ASSERT_TRUE(sequence->error());
    EXPECT_THAT(sequence->error()->message, HasSubstr("simulated"));
  }
}

// Sampled, with guesses, and with one generation after the other taking the only place.
TEST_P(Park, OfGenerationsThatTakeTurnsChangesNoToken) {
  const auto draft_model = load({.layers = 1, .embedding = 32, .heads = 2, .feed_forward = 64}, "draft");
  for (const DraftKind kind : {DraftKind::kSelf, DraftKind::kModel}) {
    EngineOptions options = options_of(Policy::kDual);
    options.draft = {.kind = kind, .model = draft_model.get()};
    options.tiers.far_bytes_max = 8 << 20;
    options.tiers.keep_prefixes = true;
    const auto start = [&](Generator& generator, std::uint32_t index) {
      GenerationOptions of;
      of.tokens_max = 30 + 10 * index;
      of.sampling.seed = index;
      of.sampling.ignore_eos = true;
      auto generation = generator.start(random_tokens(220 + 31 * index, index + 1), of);
      DD_CHECK(generation, "{}", generation.error().message);
      const Status status = generator.prefill(**generation);
      DD_CHECK(status, "{}", status.error().message);
      return std::move(*generation);
    };
    const auto step = [](Generator& generator, Generation& generation) {
      Generation* const one = &generation;
      DD_CHECK(generator.step(std::span(&one, 1)));
    };
    std::vector<std::vector<TokenId>> expected;
    {
      const auto engine = this->engine(*model_, options);
      Generator generator(*engine);
      for (std::uint32_t i = 0; i < 3; ++i) {
        const auto generation = start(generator, i);
        while (generation->running()) step(generator, *generation);
        expected.push_back(generation->tokens());
      }
    }
    const auto engine = this->engine(*model_, options);
    Generator generator(*engine);
    std::vector<std::unique_ptr<Generation>> all;
    for (std::uint32_t i = 0; i < 3; ++i) {
      all.push_back(start(generator, i));
      generator.park(*all.back());
    }
    std::vector<std::vector<TokenId>> written(all.size());
    for (std::size_t left = all.size(); left > 0;) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (!all[i]) continue;
        ASSERT_TRUE(generator.resume(*all[i]));
        for (int n = 0; n < 3 && all[i]->running(); ++n) step(generator, *all[i]);
        if (all[i]->running()) {
          generator.park(*all[i]);
          continue;
        }
        EXPECT_EQ(all[i]->finish_reason(), FinishReason::kLength) << all[i]->error().message;
        written[i] = all[i]->tokens();
        all[i].reset();
        --left;
      }
    }
    EXPECT_EQ(written, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, Park, testing::Values("llama", "gemma3"),
                         [](const auto& architecture) { return std::string(architecture.param); });

}  // namespace
}  // namespace dualdecoder
