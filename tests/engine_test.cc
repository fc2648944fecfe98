// The engine on small random models: what it refuses and leaves unchanged, where memory goes, and that logits
// do not depend on how the same tokens were brought in.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "decode/generation.h"
#include "model/log_capture.h"
#include "temporary_directory.h"
#include "test_device.h"
#include "tiny_model.h"

namespace dualdecoder {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Between logits of different summation orders, root mean square. The orders alone make 1e-6, but they also
// round some K and V to the neighbouring f16: 1e-4 with most models here, 4e-4 with Gemma.
constexpr double kTolerance = 1e-3;
constexpr std::uint32_t kMany = 600;

std::vector<TokenId> random_tokens(std::size_t count, std::uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<TokenId> token(0, static_cast<TokenId>(kTinyVocabulary) - 1);
  std::vector<TokenId> tokens(count);
  for (TokenId& t : tokens) t = token(random);
  return tokens;
}

using Logits = std::vector<float>;

double difference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double squares = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    squares += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  }
  const double result = std::sqrt(squares / static_cast<double>(a.size()));
  return std::isnan(result) ? std::numeric_limits<double>::infinity() : result;
}

bool bit_equal(const Logits& a, const Logits& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class EngineTest : public testing::Test {
 protected:
  void load(const TinyModelOptions& options) {
    quiet_library_logs();
    const std::string path = directory_.file("tiny.gguf");
    ASSERT_TRUE(write_tiny_model(path, options));
    auto model = load_on_test_device(path);
    ASSERT_TRUE(model) << model.error().message;
    model_ = std::move(*model);
  }

  std::unique_ptr<Engine> engine(const EngineOptions& options) const {
    auto created = Engine::create(*model_, options);
    if (!created) ADD_FAILURE() << created.error().message;
    return created ? std::move(*created) : nullptr;
  }

  static std::unique_ptr<Sequence> new_sequence(Engine& engine) {
    auto created = engine.new_sequence();
    DD_CHECK(created, "{}", created.error().message);
    return std::move(*created);
  }

  static Logits copy(const Result<const float*>& logits, std::size_t rows = 1) {
    if (!logits || *logits == nullptr) {
      ADD_FAILURE() << (logits ? "no logits" : logits.error().message);
      return {};
    }
    return {*logits, *logits + rows * kTinyVocabulary};
  }

  static Logits step(Engine& engine, Sequence& sequence, std::span<const TokenId> tokens,
                     LogitsWanted wanted = LogitsWanted::kAll) {
    const StepGroup group{&sequence, tokens, wanted};
    return copy(engine.step(std::span(&group, 1)), wanted == LogitsWanted::kAll ? tokens.size() : 1);
  }

  /// Logits of every token when `tokens` are brought in by steps of `rows`.
  static Logits in_steps_of(std::size_t rows, Engine& engine, std::span<const TokenId> tokens) {
    const auto sequence = new_sequence(engine);
    Logits all;
    for (std::size_t done = 0; done < tokens.size(); done += rows) {
      const Logits part = step(engine, *sequence, tokens.subspan(done, std::min(rows, tokens.size() - done)));
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

  static void expect_error(const Error& error, ErrorCode code,
                           const testing::Matcher<const std::string&>& matcher) {
    EXPECT_STREQ(error_code_name(error.code), error_code_name(code));
    EXPECT_THAT(error.message, matcher);
  }

  TemporaryDirectory directory_;
  std::unique_ptr<Model> model_;
};

TEST_F(EngineTest, RefusesAPromptAsLongAsTheContextBeforeAnyComputeAndNamesBothNumbers) {
  load({});
  const auto e = engine({.context = 256});
  Generator generator(*e);
  for (const std::size_t length : {256U, 257U, 100'000U}) {
    const auto generation = generator.start(random_tokens(length), {});
    ASSERT_FALSE(generation);
    expect_error(generation.error(), ErrorCode::kContextExceeded,
                 AllOf(HasSubstr(fmt::format("{} tokens", length)), HasSubstr("256")));
  }
  const auto pass_ns = e->pass_ns();
  EXPECT_EQ(std::accumulate(pass_ns.begin(), pass_ns.end(), std::uint64_t{0}), 0U);
  EXPECT_EQ(e->near().bytes_in_use(), 0U);
}

TEST_F(EngineTest, MakesOneTokenAfterAPromptOneShorterThanTheContext) {
  load({});
  const auto e = engine({.context = 256});
  Generator generator(*e);
  GenerationOptions options;
  options.sampling.ignore_eos = true;
  auto generation = generator.start(random_tokens(255), options);
  ASSERT_TRUE(generation);
  ASSERT_TRUE(generator.prefill(**generation));
  EXPECT_EQ((*generation)->tokens().size(), 1U);
  EXPECT_EQ((*generation)->finish_reason(), FinishReason::kLength);
}

TEST_F(EngineTest, EndsAGenerationWhenTheContextIsFullOrTheLimitReached) {
  load({});
  const auto e = engine({.context = 128});
  Generator generator(*e);
  const std::vector<std::pair<std::optional<std::uint32_t>, std::size_t>> cases = {
      {std::nullopt, 28}, {10, 10}, {1000, 28}};
  for (const auto& [limit, made] : cases) {
    GenerationOptions options;
    options.sampling.ignore_eos = true;
    options.tokens_max = limit;
    auto generation = generator.start(random_tokens(100), options);
    ASSERT_TRUE(generation);
    ASSERT_TRUE(generator.prefill(**generation));
    Generation* running = generation->get();
    while (running->running()) ASSERT_TRUE(generator.step(std::span(&running, 1)));
    EXPECT_EQ(running->tokens().size(), made);
    EXPECT_EQ(running->finish_reason(), FinishReason::kLength);
  }
  EXPECT_EQ(e->near().bytes_in_use(), 0U);
}

TEST_F(EngineTest, RefusesTokensBeyondTheContextAndCommitsNothing) {
  load({});
  const auto e = engine({.context = 64, .prefill_chunk = 16});
  const auto sequence = new_sequence(*e);
  const auto tokens = random_tokens(65);
  const auto too_many = e->prefill(*sequence, tokens);
  ASSERT_FALSE(too_many);
  expect_error(too_many.error(), ErrorCode::kContextExceeded, AllOf(HasSubstr("65"), HasSubstr("64")));
  EXPECT_EQ(sequence->tokens(), 0U);
  EXPECT_EQ(e->near().bytes_in_use(), 0U);

  ASSERT_TRUE(e->prefill(*sequence, std::span(tokens).first(64)));
  const StepGroup group{sequence.get(), std::span(tokens).subspan(64, 1)};
  const auto one_more = e->step(std::span(&group, 1));
  ASSERT_FALSE(one_more);
  expect_error(one_more.error(), ErrorCode::kContextExceeded, AllOf(HasSubstr("65"), HasSubstr("64")));
  EXPECT_EQ(sequence->tokens(), 64U);
}

TEST_F(EngineTest, NamesIndexAndValueOfATokenOutsideTheVocabulary) {
  load({});
  const auto e = engine({.context = 64, .sequences = 2});
  const auto sequence = new_sequence(*e);
  const auto other = new_sequence(*e);
  for (const TokenId bad : {-1, static_cast<TokenId>(kTinyVocabulary), std::numeric_limits<TokenId>::max(),
                            std::numeric_limits<TokenId>::min()}) {
    const std::vector<TokenId> tokens = {1, 2, bad, 3};
    const auto names = AllOf(HasSubstr("index 2"), HasSubstr(fmt::format("token {} ", bad)));
    const auto prefill = e->prefill(*sequence, tokens);
    ASSERT_FALSE(prefill);
    expect_error(prefill.error(), ErrorCode::kInvalidArgument, names);
    const std::vector<TokenId> good = {1};
    const std::array<StepGroup, 2> groups = {StepGroup{other.get(), good}, StepGroup{sequence.get(), tokens}};
    const auto step = e->step(groups);
    ASSERT_FALSE(step);
    expect_error(step.error(), ErrorCode::kInvalidArgument, names);
  }
  EXPECT_EQ(sequence->tokens(), 0U);
  EXPECT_EQ(other->tokens(), 0U) << "a neighbour's bad token must not commit this one's";
  EXPECT_EQ(e->near().bytes_in_use(), 0U);
  ASSERT_FALSE(e->prefill(*sequence, {}));
}

TEST_F(EngineTest, StopsAPrefillAtAChunkAndCanGoOn) {
  load({});
  const auto e = engine({.context = 128, .sequences = 2, .prefill_chunk = 16});
  const auto tokens = random_tokens(50);
  const auto sequence = new_sequence(*e);
  std::vector<std::uint32_t> seen;
  const auto stopped = e->prefill(*sequence, tokens, [&](std::uint32_t done) {
    seen.push_back(done);
    return done < 32;
  });
  ASSERT_TRUE(stopped);
  EXPECT_EQ(*stopped, nullptr);
  EXPECT_THAT(seen, testing::ElementsAre(16, 32));
  EXPECT_EQ(sequence->tokens(), 32U);
  const Logits resumed = copy(e->prefill(*sequence, std::span(tokens).subspan(32)));
  const auto whole = new_sequence(*e);
  EXPECT_TRUE(bit_equal(resumed, copy(e->prefill(*whole, tokens))));
}

TEST_F(EngineTest, ReturnsAllMemoryOfASequenceToTheNearTier) {
  load({});
  const auto e = engine({.context = 256, .sequences = 2, .block_tokens = 16});
  const KvGeometry geometry = model_->hyperparameters().geometry(16);
  const std::size_t page = geometry.page_bytes();
  {
    const auto first = new_sequence(*e);
    ASSERT_TRUE(e->prefill(*first, random_tokens(33)));
    EXPECT_EQ(e->near().bytes_in_use(), 3 * page);
    const auto second = new_sequence(*e);
    ASSERT_TRUE(e->prefill(*second, random_tokens(16)));
    EXPECT_EQ(e->near().bytes_in_use(), 4 * page);
    ASSERT_TRUE(first->truncate(32));
    EXPECT_EQ(e->near().bytes_in_use(), 3 * page);
    ASSERT_TRUE(first->truncate(0));
    EXPECT_EQ(e->near().bytes_in_use(), 1 * page);
  }
  EXPECT_EQ(e->near().bytes_in_use(), 0U);
}

TEST_F(EngineTest, RefusesASequenceMoreThanItHasPlacesForAndLeavesTheOthersAlone) {
  load({});
  const auto e = engine({.context = 64, .sequences = 1});
  auto first = new_sequence(*e);
  const Logits before = copy(e->prefill(*first, random_tokens(40)));
  const auto refused = e->new_sequence();
  ASSERT_FALSE(refused);
  expect_error(refused.error(), ErrorCode::kOutOfMemory, HasSubstr("--np"));
  ASSERT_TRUE(first->truncate(0));
  EXPECT_TRUE(bit_equal(before, copy(e->prefill(*first, random_tokens(40)))));
  first.reset();
  EXPECT_TRUE(e->new_sequence());
}

TEST_F(EngineTest, RefusesOptionsItCannotServe) {
  load({});
  const auto block = Engine::create(*model_, {.context = 64, .block_tokens = 24});
  ASSERT_FALSE(block);
  expect_error(block.error(), ErrorCode::kInvalidArgument, HasSubstr("a block of 24 tokens"));
  const auto huge = Engine::create(*model_, {.context = UINT32_MAX, .sequences = 1'000'000});
  ASSERT_FALSE(huge);
  expect_error(huge.error(), ErrorCode::kInvalidArgument, HasSubstr("too large"));
}

class EngineLogits : public EngineTest, public testing::WithParamInterface<const char*> {
 protected:
  // Gemma's windows of 64 tokens end inside blocks and chunks.
  void SetUp() override { load({.architecture = GetParam(), .layers = 3}); }
};

TEST_P(EngineLogits, DoNotDependOnTheSizeOfChunks) {
  const auto e = engine({.context = kMany, .sequences = 2, .outputs_max = 512});
  const auto tokens = random_tokens(kMany);
  const Logits reference = in_steps_of(1, *e, tokens);
  for (const std::size_t rows : {7, 64, 512}) {
    EXPECT_LT(difference(reference, in_steps_of(rows, *e, tokens)), kTolerance) << "chunks of " << rows;
  }
}

TEST_P(EngineLogits, AreBitEqualForAllSmallChunksWhenBatchInvariant) {
  const auto e = engine({.context = kMany, .sequences = 2, .outputs_max = 512, .batch_invariant = true});
  const auto tokens = random_tokens(kMany);
  const Logits reference = in_steps_of(1, *e, tokens);
  for (const std::size_t rows : {2, 7, 31, 32}) {
    EXPECT_TRUE(bit_equal(reference, in_steps_of(rows, *e, tokens))) << "chunks of " << rows;
  }
  EXPECT_LT(difference(reference, in_steps_of(64, *e, tokens)), kTolerance);
}

TEST_P(EngineLogits, DoNotDependOnTheSizeOfBlocks) {
  const auto tokens = random_tokens(kMany);
  Logits reference;
  for (const std::uint32_t block_tokens : {32U, 16U, 64U}) {
    const auto e =
        engine({.context = kMany, .sequences = 2, .outputs_max = 512, .block_tokens = block_tokens});
    const Logits logits = in_steps_of(100, *e, tokens);
    if (reference.empty()) reference = logits;
    EXPECT_TRUE(bit_equal(reference, logits)) << "blocks of " << block_tokens;
  }
}

TEST_P(EngineLogits, DoNotDependOnTheNumberOfThreads) {
  const auto tokens = random_tokens(kMany);
  const auto one = engine({.threads = 1, .context = kMany, .sequences = 2, .outputs_max = 512});
  const auto two = engine({.threads = 2, .context = kMany, .sequences = 2, .outputs_max = 512});
  EXPECT_LT(difference(in_steps_of(100, *one, tokens), in_steps_of(100, *two, tokens)), kTolerance);
}

TEST_P(EngineLogits, OfTheLastTokenAreThoseOfAllTokens) {
  const auto e = engine({.context = kMany, .sequences = 2, .outputs_max = 512});
  const auto tokens = random_tokens(300);
  const Logits all = in_steps_of(300, *e, tokens);
  const auto sequence = new_sequence(*e);
  const Logits last = step(*e, *sequence, tokens, LogitsWanted::kLast);
  EXPECT_LT(difference(last, std::span(all).last(kTinyVocabulary)), kTolerance);
}

TEST_P(EngineLogits, AfterTruncationAreAsIfTheRestHadNeverBeen) {
  const auto e = engine({.context = kMany, .sequences = 2, .outputs_max = 512, .batch_invariant = true});
  const auto tokens = random_tokens(200, 1);
  const auto detour = random_tokens(150, 2);
  for (const std::uint32_t kept : {64U, 75U, 1U}) {  // at a block's edge, inside one, nearly nothing
    const auto begin = std::span(tokens).first(kept);
    const auto rest = std::span(tokens).subspan(kept, 30);
    const auto straight = new_sequence(*e);
    ASSERT_TRUE(e->prefill(*straight, begin));
    const Logits expected = step(*e, *straight, rest);

    const auto sequence = new_sequence(*e);
    ASSERT_TRUE(e->prefill(*sequence, begin));
    ASSERT_TRUE(e->prefill(*sequence, detour));
    ASSERT_TRUE(sequence->truncate(kept));
    EXPECT_TRUE(bit_equal(step(*e, *sequence, rest), expected)) << kept << " tokens kept";
  }
}

TEST_P(EngineLogits, OfSeveralSequencesInOneStepAreBitEqualToEachAloneWhenBatchInvariant) {
  constexpr std::array<std::uint32_t, 5> kPrompts = {1, 31, 32, 100, 257};
  constexpr std::uint32_t kSteps = 40;
  const EngineOptions options{.context = 512, .sequences = kPrompts.size(), .batch_invariant = true};
  const auto alone = engine(options);
  const auto together = engine(options);
  std::vector<std::vector<TokenId>> tokens;
  std::vector<std::unique_ptr<Sequence>> sequences;
  std::vector<Logits> expected;
  for (std::size_t i = 0; i < kPrompts.size(); ++i) {
    tokens.push_back(random_tokens(kPrompts[i] + 2 * kSteps, i));
    const auto prompt = std::span(tokens[i]).first(kPrompts[i]);
    const auto sequence = new_sequence(*alone);
    ASSERT_TRUE(alone->prefill(*sequence, prompt));
    expected.emplace_back();
    for (std::uint32_t s = 0; s < kSteps; ++s) {
      const Logits row = step(*alone, *sequence, std::span(tokens[i]).subspan(kPrompts[i] + s, 1));
      expected[i].insert(expected[i].end(), row.begin(), row.end());
    }
    sequences.push_back(new_sequence(*together));
    ASSERT_TRUE(together->prefill(*sequences[i], prompt));
  }
  // In each step another one has two rows, as a real and a guessed token would be.
  std::vector<std::uint32_t> done(kPrompts.size(), 0);
  for (std::uint32_t s = 0; *std::max_element(done.begin(), done.end()) + 2 <= kSteps; ++s) {
    std::vector<StepGroup> groups;
    std::size_t rows = 0;
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      const std::size_t count = i == s % kPrompts.size() ? 2 : 1;
      groups.push_back({sequences[i].get(), std::span(tokens[i]).subspan(kPrompts[i] + done[i], count),
                        LogitsWanted::kAll});
      rows += count;
    }
    const Logits logits = copy(together->step(groups), rows);
    std::size_t row = 0;
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      const std::size_t count = groups[i].tokens.size();
      EXPECT_EQ(std::memcmp(&logits[row * kTinyVocabulary], &expected[i][done[i] * kTinyVocabulary],
                            count * kTinyVocabulary * sizeof(float)),
                0)
          << "sequence " << i << ", step " << s;
      row += count;
      done[i] += static_cast<std::uint32_t>(count);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, EngineLogits, testing::Values("llama", "qwen2", "qwen3", "gemma3"),
                         [](const auto& parameter) { return std::string(parameter.param); });

// Repacked matrices and those that ggml multiplies in other ways, which have kernels of their own for one
// row.
TEST_F(EngineTest, BatchInvarianceHoldsForEveryTypeOfWeights) {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
                               GGML_TYPE_Q4_K, GGML_TYPE_Q6_K}) {
    load({.embedding = 256, .heads = 4, .kv_heads = 2, .head_dim = 64, .feed_forward = 256, .type = type});
    const auto e = engine({.context = 128, .outputs_max = 32, .batch_invariant = true});
    const auto tokens = random_tokens(100);
    const Logits reference = in_steps_of(1, *e, tokens);
    for (const std::size_t rows : {3, 8, 32}) {
      EXPECT_TRUE(bit_equal(reference, in_steps_of(rows, *e, tokens)))
          << ggml_type_name(type) << ", " << rows;
    }
  }
}

// Our own products, at every number of rows: no option, no limit.
TEST_F(EngineTest, PackedWeightsAreBatchInvariantWithoutTheOption) {
  for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0,
                               GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K}) {
    load({.embedding = 256, .heads = 4, .kv_heads = 2, .head_dim = 64, .feed_forward = 256, .type = type});
    const auto e = engine({.context = 128, .outputs_max = 100});
    const auto tokens = random_tokens(100);
    const Logits reference = in_steps_of(1, *e, tokens);
    for (const std::size_t rows : {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 33, 100}) {
      EXPECT_TRUE(bit_equal(reference, in_steps_of(rows, *e, tokens)))
          << ggml_type_name(type) << ", " << rows;
    }
  }
}

// Graphs are kept by their numbers of rows and outputs and share one buffer: none may spoil another.
TEST_F(EngineTest, StepsOfManyShapesInAnyOrderGiveTheSameLogits) {
  load({});
  const auto e = engine({.context = 4000, .outputs_max = 64});
  const auto tokens = random_tokens(64);
  const Logits reference = in_steps_of(64, *e, tokens);
  std::mt19937_64 random(7);
  for (int round = 0; round < 40; ++round) {
    const auto sequence = new_sequence(*e);
    while (sequence->tokens() < tokens.size()) {
      const std::size_t left = tokens.size() - sequence->tokens();
      const std::size_t rows = std::uniform_int_distribution<std::size_t>(1, left)(random);
      const auto wanted = static_cast<LogitsWanted>(random() % 3);
      const StepGroup group{sequence.get(), std::span(tokens).subspan(sequence->tokens(), rows), wanted};
      const auto result = e->step(std::span(&group, 1));
      ASSERT_TRUE(result);
      if (wanted == LogitsWanted::kNone) {
        EXPECT_EQ(*result, nullptr);
        continue;
      }
      const std::size_t got = wanted == LogitsWanted::kAll ? rows : 1;
      const std::span expected(&reference[(sequence->tokens() - got) * kTinyVocabulary],
                               got * kTinyVocabulary);
      EXPECT_LT(difference(std::span(*result, expected.size()), expected), kTolerance);
    }
  }
}

TEST_F(EngineTest, TokensBeforeASlidingWindowHaveNoInfluence) {
  load(
      {.architecture = "gemma3", .layers = 1, .window = 64, .window_pattern = 0});  // 0: every layer windowed
  const auto e = engine({.context = 512, .batch_invariant = true});
  const auto tail = random_tokens(64, 3);
  Logits reference;
  for (const std::uint64_t seed : {10, 11}) {
    auto tokens = random_tokens(96, seed);
    tokens.insert(tokens.end(), tail.begin(), tail.end());
    const auto sequence = new_sequence(*e);
    const Logits logits = copy(e->prefill(*sequence, tokens));
    if (reference.empty()) reference = logits;
    EXPECT_TRUE(bit_equal(reference, logits));
  }
}

using EngineDeathTest = EngineTest;

TEST_F(EngineDeathTest, TruncatingToMoreThanThereIsIsOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  load({});
  const auto e = engine({.context = 64});
  const auto sequence = new_sequence(*e);
  EXPECT_DEATH(static_cast<void>(sequence->truncate(1)), "check failed.*1 of 0");
}

}  // namespace
}  // namespace dualdecoder
