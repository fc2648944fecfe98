// Decoding with the KV in a far tier against decoding with all of it near, on small random models (law 1 and
// law 3 of docs/design.md): the same bits when every block is selected, whatever the far tier, the policy and
// the room near; and the right bits or an error of that sequence alone when the far tier fails.
#include <bit>
#include <optional>
#include <random>

#include "tiers_testing.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kContext = 640;
constexpr std::uint32_t kChunk = 64;
constexpr std::uint32_t kAll = kContext;  // a budget that selects every block
constexpr Policy kEveryPolicy[] = {Policy::kFull,     Policy::kReactive,      Policy::kLastSet,
                                   Policy::kPrevious, Policy::kPreviousLayer, Policy::kOracle};

/// On a device, what attends there: the others are attended to by the CPU, which rounds otherwise.
std::vector<Policy> policies_here() {
  std::vector<Policy> policies(std::begin(kEveryPolicy), std::end(kEveryPolicy));
  if (!test_device().is_cpu()) std::erase(policies, Policy::kOracle);
  return policies;
}
std::vector<FarKind> far_tiers_here() {
  if (!test_device().is_cpu()) return {FarKind::kHost};
  return {FarKind::kHost, FarKind::kFile};
}

/// What to decode: prompts, brought in one after the other, then steps of one token for each.
struct Script {
  std::vector<std::vector<TokenId>> prompts;
  std::vector<std::vector<TokenId>> steps;  // [step][sequence]
};

Script make_script(std::span<const std::uint32_t> lengths, std::uint32_t steps, std::uint64_t seed) {
  Script script;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    script.prompts.push_back(random_tokens(lengths[i], seed * 1000 + i));
  for (std::uint32_t s = 0; s < steps; ++s)
    script.steps.push_back(random_tokens(lengths.size(), seed * 1000 + 100 + s));
  return script;
}

struct Outcome {
  std::vector<std::vector<float>> logits;  // [sequence], of all its rows; ends where an error came
  std::vector<std::optional<Error>> errors;
};

class TiersTest : public TieredEngines {
 protected:
  void load(const std::string& architecture) {
    model_ =
        TieredEngines::load({.architecture = architecture, .layers = architecture == "gemma3" ? 4U : 3U});
  }

  static EngineOptions base_options(std::uint32_t sequences, std::uint32_t block_tokens) {
    EngineOptions options{
        .context = kContext, .sequences = sequences, .prefill_chunk = kChunk, .block_tokens = block_tokens};
    options.tiers.sink_tokens = 16;
    options.tiers.recent_tokens = 64;
    options.tiers.budget_tokens = kAll;
    options.tiers.staging_tokens = 256;
    options.tiers.poison = true;
    return options;
  }

  std::unique_ptr<Engine> engine(const EngineOptions& options) const {
    return TieredEngines::engine(*model_, options);
  }

  static Outcome play(Engine& engine, const Script& script) {
    Outcome outcome;
    std::vector<std::unique_ptr<Sequence>> sequences;
    outcome.logits.resize(script.prompts.size());
    outcome.errors.resize(script.prompts.size());
    const auto keep = [&](std::size_t i, const float* row) {
      outcome.logits[i].insert(outcome.logits[i].end(), row, row + kTinyVocabulary);
    };
    for (std::size_t i = 0; i < script.prompts.size(); ++i) {
      sequences.push_back(new_sequence(engine));
      const auto logits = engine.prefill(*sequences[i], script.prompts[i]);
      if (logits) {
        keep(i, *logits);
      } else {
        outcome.errors[i] = logits.error();
      }
    }
    for (const std::vector<TokenId>& tokens : script.steps) {
      std::vector<StepGroup> groups;
      std::vector<std::size_t> members;
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        if (outcome.errors[i]) continue;
        groups.push_back({sequences[i].get(), std::span(tokens).subspan(i, 1), LogitsWanted::kLast});
        members.push_back(i);
      }
      if (groups.empty()) break;
      const auto logits = engine.step(groups);
      DD_CHECK(logits, "{}", logits.error().message);
      for (std::size_t g = 0; g < members.size(); ++g) {
        outcome.errors[members[g]] = sequences[members[g]]->error();
        if (!outcome.errors[members[g]]) keep(members[g], *logits + g * kTinyVocabulary);
      }
    }
    return outcome;
  }

  /// One sequence: each turn is brought in as a prompt and followed by `steps` single tokens.
  static Outcome play_turns(Engine& engine, std::span<const std::vector<TokenId>> turns,
                            std::uint32_t steps) {
    Outcome outcome{.logits = {{}}, .errors = {std::nullopt}};
    const auto sequence = new_sequence(engine);
    const auto keep = [&](const Result<const float*>& logits) {
      if (!logits) {
        outcome.errors[0] = logits.error();
      } else {
        outcome.logits[0].insert(outcome.logits[0].end(), *logits, *logits + kTinyVocabulary);
      }
    };
    for (const std::vector<TokenId>& turn : turns) {
      keep(engine.prefill(*sequence, turn));
      for (std::uint32_t s = 0; s < steps && !outcome.errors[0]; ++s) {
        const StepGroup group{sequence.get(), std::span(turn).first(1), LogitsWanted::kLast};
        keep(engine.step(std::span(&group, 1)));
      }
      if (outcome.errors[0]) break;
    }
    return outcome;
  }

  static void expect_same_bits(const Outcome& outcome, const Outcome& reference) {
    for (std::size_t i = 0; i < reference.logits.size(); ++i) {
      EXPECT_FALSE(outcome.errors[i]) << "sequence " << i << ": " << outcome.errors[i]->message;
      ASSERT_EQ(outcome.logits[i].size(), reference.logits[i].size()) << "sequence " << i;
      for (std::size_t at = 0; at < reference.logits[i].size(); ++at) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(outcome.logits[i][at]),
                  std::bit_cast<std::uint32_t>(reference.logits[i][at]))
            << "sequence " << i << ", row " << at / kTinyVocabulary << ", logit " << at % kTinyVocabulary;
      }
    }
  }

  std::unique_ptr<Model> model_;
};

class EveryBlockSelected : public TiersTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override { load(GetParam()); }

  Outcome all_near(const EngineOptions& options, const Script& script) const {
    EngineOptions near = options;
    near.tiers.far = {};
    return play(*engine(near), script);
  }
};
INSTANTIATE_TEST_SUITE_P(Models, EveryBlockSelected, testing::Values("llama", "gemma3"),
                         [](const auto& family) { return family.param; });

TEST_P(EveryBlockSelected, GivesTheBitsOfAllNearForEveryPolicyBlockSizeAndRoomNear) {
  for (const std::uint32_t block : {16U, 32U, 64U}) {
    EngineOptions options = base_options(1, block);
    const std::vector<std::uint32_t> lengths = {512};
    const Script script = make_script(lengths, 24, block);
    const Outcome reference = all_near(options, script);
    for (const Policy policy : policies_here()) {
      for (const std::uint32_t near_tokens : {1U, 128U, 300U, kContext}) {
        SCOPED_TRACE(
            fmt::format("{}, blocks of {}, {} tokens near", policy_name(policy), block, near_tokens));
        options.tiers.far.kind = FarKind::kHost;
        options.tiers.policy = policy;
        options.tiers.near_tokens = near_tokens;
        const auto tiered = engine(options);
        expect_same_bits(play(*tiered, script), reference);
        EXPECT_EQ(tiered->near().bytes_in_use(), 0U);
        EXPECT_EQ(tiered->tiers().far().pages_in_use(), 0U);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(EveryBlockSelected, GivesTheBitsOfAllNearForPromptsAroundBlockBoundariesAndEveryFarTier) {
  for (const std::uint32_t block : {16U, 32U, 64U}) {
    for (const std::uint32_t length :
         {1U, block - 1, block, block + 1, 5 * block - 1, 5 * block, 5 * block + 1}) {
      EngineOptions options = base_options(1, block);
      const Script script = make_script(std::vector{length}, block + 2, length);
      const Outcome reference = all_near(options, script);
      options.tiers.near_tokens = 1;
      options.tiers.sink_tokens = 0;
      options.tiers.recent_tokens = 1;
      for (const FarKind far : far_tiers_here()) {
        SCOPED_TRACE(fmt::format("{} tokens, blocks of {}, {}", length, block,
                                 far == FarKind::kHost ? "host" : "file"));
        options.tiers.far = {.kind = far, .directory = directory_.file(""), .make_port = {}};
        expect_same_bits(play(*engine(options), script), reference);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A last chunk of one row selects, behind chunks that have ranked nothing; a chunk needs many slots at once.
TEST_P(EveryBlockSelected, GivesTheBitsOfAllNearWhenPromptsComeBehindDecodedTokens) {
  for (const std::uint32_t more : {1U, 2U, kChunk, kChunk + 1, 3 * kChunk + 1}) {
    EngineOptions options = base_options(1, 16);
    const std::vector<std::uint32_t> lengths = {133, more, more};
    const Script script = make_script(lengths, 0, more);
    const Outcome reference = play_turns(*engine(options), script.prompts, 7);
    for (const Policy policy : policies_here()) {
      for (const std::uint32_t near_tokens : {1U, 128U, kContext}) {
        SCOPED_TRACE(fmt::format("{}, {} tokens more, {} near", policy_name(policy), more, near_tokens));
        options.tiers.far.kind = FarKind::kHost;
        options.tiers.policy = policy;
        options.tiers.near_tokens = near_tokens;
        expect_same_bits(play_turns(*engine(options), script.prompts, 7), reference);
        if (HasFatalFailure()) return;
      }
    }
    options.tiers.far = {};
  }
}

TEST_P(EveryBlockSelected, GivesTheBitsOfAllNearUnderAnyLatencyAndOrderOfCompletions) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    std::mt19937_64 random(seed);
    const std::uint32_t block = 16U << random() % 3;
    std::vector<std::uint32_t> lengths;
    for (std::uint64_t i = 0; i < 1 + random() % 4; ++i)
      lengths.push_back(1 + static_cast<std::uint32_t>(random() % 400));
    EngineOptions options = base_options(static_cast<std::uint32_t>(lengths.size()), block);
    const Script script = make_script(lengths, 20, seed);
    const Outcome reference = all_near(options, script);
    options.tiers.policy = kEveryPolicy[random() % std::size(kEveryPolicy)];
    options.tiers.near_tokens = 1 + static_cast<std::uint32_t>(random() % 400);
    options.tiers.dense_layers = static_cast<std::uint32_t>(random() % 2);
    SCOPED_TRACE(fmt::format("seed {}: {}, blocks of {}, {} sequences, {} tokens near", seed,
                             policy_name(options.tiers.policy), block, lengths.size(),
                             options.tiers.near_tokens));
    const auto tiered = simulated(*model_, options,
                                  {.seed = seed,
                                   .latency_min = std::chrono::nanoseconds(0),
                                   .latency_max = std::chrono::milliseconds(50),
                                   .keep_log = false});
    expect_same_bits(play(*tiered, script), reference);
    if (HasFatalFailure()) return;
  }
}

TEST_F(TiersTest, ANarrowerWindowGivesTheBitsOfAnEngineMadeWithItAndAWiderOneIsRefused) {
  load("llama");
  const Script script = make_script(std::vector{400U}, 24, 1);
  for (const Policy policy : policies_here()) {
    SCOPED_TRACE(policy_name(policy));
    EngineOptions options = base_options(1, 16);
    options.tiers.far.kind = FarKind::kHost;
    options.tiers.policy = policy;
    options.tiers.budget_tokens = 64;
    const Outcome reference = play(*engine(options), script);
    options.tiers.sink_tokens = 48;
    options.tiers.recent_tokens = 200;
    const auto narrowed = engine(options);
    EXPECT_FALSE(narrowed->set_window(49, 64));
    EXPECT_FALSE(narrowed->set_window(16, 201));
    ASSERT_TRUE(narrowed->set_window(16, 64));
    expect_same_bits(play(*narrowed, script), reference);
  }
}

// Blocks that were filled under another policy can be selected, although they are not near any more.
TEST_F(TiersTest, SelectsAmongBlocksThatWereFilledWhileEveryBlockWasAttendedTo) {
  load("llama");
  EngineOptions options = base_options(1, 16);
  options.tiers.far.kind = FarKind::kHost;
  options.tiers.policy = Policy::kPrevious;
  options.tiers.budget_tokens = 32;
  const std::vector<TokenId> prompt = random_tokens(400, 1);
  const std::vector<TokenId> steps = random_tokens(40, 2);
  const auto decode = [&](Policy policy_of_prompt) {
    const auto engine = this->engine(options);
    const auto sequence = new_sequence(*engine);
    EXPECT_TRUE(engine->set_selection(policy_of_prompt, 32));
    EXPECT_TRUE(engine->prefill(*sequence, prompt));
    EXPECT_TRUE(engine->set_selection(Policy::kReactive, 32));
    std::vector<float> logits;
    for (std::size_t s = 0; s < steps.size(); ++s) {
      const StepGroup group{.sequence = sequence.get(), .tokens = std::span(steps).subspan(s, 1)};
      const auto row = engine->step(std::span(&group, 1));
      EXPECT_TRUE(row && !sequence->error());
      logits.insert(logits.end(), *row, *row + kTinyVocabulary);
    }
    return logits;
  };
  EXPECT_TRUE(same_bits(decode(Policy::kFull), decode(Policy::kReactive)));
}

}  // namespace
}  // namespace dualdecoder
