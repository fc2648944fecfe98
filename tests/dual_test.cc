// Guesses decoded beside tokens, on small random models: what is committed is what comes without them (laws 1
// and 5 of docs/design.md), whatever the guess, where it came from, and where the KV lies.
#include <algorithm>
#include <optional>
#include <random>

#include <gmock/gmock.h>

#include "decode/generation.h"
#include "decode_running.h"
#include "tiers_testing.h"

namespace dualdecoder {
namespace {

using std::chrono::milliseconds;

constexpr DraftKind kEveryDraft[] = {DraftKind::kSelf, DraftKind::kNgram, DraftKind::kKeep,
                                     DraftKind::kModel};
constexpr Correction kEveryCorrection[] = {{},
                                           {.kind = Correction::Kind::kMiss, .cosine = 0.0f},
                                           {.kind = Correction::Kind::kCosine, .cosine = 0.9f}};

struct Text {
  std::vector<TokenId> tokens;
  DraftStats draft;
};

class Dual : public TieredEngines, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    const std::string architecture = GetParam();
    model_ = load({.architecture = architecture, .layers = architecture == "gemma3" ? 4U : 3U});
    draft_model_ = load({.layers = 1, .embedding = 32, .heads = 2, .feed_forward = 64, .seed = 9}, "draft");
  }

  /// All near, no guesses.
  static EngineOptions plain_options(std::uint32_t sequences) {
    EngineOptions options = small_options(sequences);
    options.tiers.far = {};
    return options;
  }
  EngineOptions dual_options(std::uint32_t sequences, std::uint32_t budget_tokens) const {
    EngineOptions options = small_options(sequences);
    options.tiers.far.kind = FarKind::kHost;
    options.tiers.policy = Policy::kDual;
    options.tiers.budget_tokens = budget_tokens;
    options.draft = guesses(DraftKind::kSelf, false);
    return options;
  }
  /// Wherever they can stand, so that the laws see them.
  DraftOptions guesses(DraftKind kind, bool accept) const {
    return {.kind = kind, .accept = accept, .even_if_all_selected = true, .model = draft_model_.get()};
  }

  static GenerationOptions generation_options(float temperature, std::uint32_t index, std::uint32_t tokens) {
    GenerationOptions options;
    options.sampling.temperature = temperature;
    options.sampling.seed = 7 + index;
    options.sampling.repeat_penalty = 1.1f;
    options.sampling.ignore_eos = true;
    options.tokens_max = tokens;
    return options;
  }

  /// Prompts of different lengths, each decoded for a different number of tokens.
  static std::vector<Text> write(Engine& engine, float temperature) {
    Generator generator(engine);
    std::vector<std::unique_ptr<Generation>> all;
    for (std::uint32_t i = 0; i < engine.options().sequences; ++i) {
      auto generation = generator.start(random_tokens(250 + 61 * i, i + 1),
                                        generation_options(temperature, i, 40 + 17 * i));
      DD_CHECK(generation && generator.prefill(**generation));
      all.push_back(std::move(*generation));
    }
    while (decode_running(generator, all)) continue;
    std::vector<Text> texts;
    for (const auto& generation : all) {
      DD_CHECK(generation->finish_reason() == FinishReason::kLength, "{}", generation->error().message);
      texts.push_back({generation->tokens(), generation->draft_stats()});
    }
    return texts;
  }

  /// One generation, with nothing else in its steps.
  static std::vector<TokenId> write_alone(Engine& engine, std::vector<TokenId> prompt,
                                          const GenerationOptions& options) {
    Generator generator(engine);
    const auto generation = generator.start(std::move(prompt), options);
    DD_CHECK(generation && generator.prefill(**generation));
    Generation* one = generation->get();
    while (one->running()) DD_CHECK(generator.step(std::span(&one, 1)));
    EXPECT_EQ(one->finish_reason(), FinishReason::kLength);
    return one->tokens();
  }

  /// The texts of write(), but each begins while those before it decode.
  static std::vector<std::vector<TokenId>> write_beside(Engine& engine, float temperature) {
    Generator generator(engine);
    std::vector<std::unique_ptr<Generation>> all;
    for (std::uint32_t i = 0; i < engine.options().sequences; ++i) {
      auto generation = generator.start(random_tokens(250 + 61 * i, i + 1),
                                        generation_options(temperature, i, 40 + 17 * i));
      DD_CHECK(generation);
      Generation* const one = generation->get();
      all.push_back(std::move(*generation));
      while (one->prompt_left() > 0) {
        const PromptPiece piece{.generation = one, .tokens = std::min(kTierChunk, one->prompt_left())};
        DD_CHECK(generator.begin_prompts(std::span(&piece, 1)));
        do {
          decode_running(generator, all, one);
        } while (!generator.advance_prompts(1));
      }
    }
    while (decode_running(generator, all)) continue;
    std::vector<std::vector<TokenId>> texts;
    for (const auto& generation : all) {
      DD_CHECK(generation->finish_reason() == FinishReason::kLength, "{}", generation->error().message);
      texts.push_back(generation->tokens());
    }
    return texts;
  }
  static void expect_same_texts(const std::vector<Text>& texts, const std::vector<Text>& expected) {
    ASSERT_EQ(texts.size(), expected.size());
    for (std::size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(texts[i].tokens, expected[i].tokens) << i;
  }

  static void expect_all_given_back(const Engine& engine) {
    EXPECT_EQ(engine.near().bytes_in_use(), 0U);
    EXPECT_EQ(engine.draft() == nullptr ? 0U : engine.draft()->near().bytes_in_use(), 0U);
    EXPECT_EQ(engine.tiers().far().pages_in_use(), 0U);
  }

  /// Logits of each committed row, and of what was guessed.
  struct Guessed {
    Rows committed;
    Rows guessed;
  };
  /// Decodes `tokens` one by one; behind the i-th stands guesses[i], if any.
  static Guessed play_guesses(Engine& engine, std::span<const TokenId> prompt,
                              std::span<const TokenId> tokens,
                              std::span<const std::optional<TokenId>> guesses) {
    Guessed rows;
    const auto sequence = new_sequence(engine);
    DD_CHECK(engine.prefill(*sequence, prompt));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const StepGroup group{.sequence = sequence.get(), .tokens = tokens.subspan(i, 1), .guess = guesses[i]};
      const auto logits = engine.step(std::span(&group, 1));
      DD_CHECK(logits && !sequence->error());
      rows.committed.push_back(copy_row(*logits));
      if (group.guess) rows.guessed.push_back(copy_row(*logits + kTinyVocabulary));
    }
    return rows;
  }

  std::unique_ptr<Model> model_;
  std::unique_ptr<Model> draft_model_;  // of the same vocabulary, and else quite different
};
INSTANTIATE_TEST_SUITE_P(Models, Dual, testing::Values("llama", "gemma3"),
                         [](const auto& family) { return std::string(family.param); });

TEST_P(Dual, GuessesLeaveNoTraceInWhatIsCommitted) {
  const auto prompt = random_tokens(203, 1);
  const auto tokens = random_tokens(80, 2);
  const std::vector<std::optional<TokenId>> none(tokens.size());
  for (const std::uint32_t block : {16U, 32U, 64U}) {
    EngineOptions options = dual_options(1, kTierContext);
    options.block_tokens = block;
    const Guessed expected = play_guesses(*engine(*model_, options), prompt, tokens, none);
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      SCOPED_TRACE(fmt::format("blocks of {}, seed {}", block, seed));
      std::mt19937_64 random(seed);
      auto guesses = none;
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (random() % 4 == 0) continue;
        const bool right = i + 1 < tokens.size() && random() % 2 == 0;
        guesses[i] = right ? tokens[i + 1] : static_cast<TokenId>(random() % kTinyVocabulary);
      }
      const auto dual = engine(*model_, options);
      const Guessed rows = play_guesses(*dual, prompt, tokens, guesses);
      for (std::size_t i = 0; i < tokens.size(); ++i)
        ASSERT_TRUE(same_bits(rows.committed[i], expected.committed[i])) << "token " << i;
      expect_all_given_back(*dual);
    }
  }
}

// With everything selected the row behind a right guess is the row that the guess becomes.
TEST_P(Dual, TheRowOfARightGuessHasTheBitsOfTheTokenDecodedNext) {
  const auto prompt = random_tokens(150, 3);
  const auto tokens = random_tokens(50, 4);
  std::vector<std::optional<TokenId>> guesses(tokens.size());
  for (std::size_t i = 0; i + 1 < tokens.size(); ++i) guesses[i] = tokens[i + 1];
  const auto dual = engine(*model_, dual_options(1, kTierContext));
  const Guessed rows = play_guesses(*dual, prompt, tokens, guesses);
  for (std::size_t i = 0; i + 1 < tokens.size(); ++i)
    ASSERT_TRUE(same_bits(rows.guessed[i], rows.committed[i + 1])) << "token " << i;
}

TEST_P(Dual, WritesTheTextOfAllNearForEveryDraftCorrectionAndAccept) {
  for (const float temperature : {0.0f, 0.8f}) {
    const auto expected = write(*engine(*model_, plain_options(3)), temperature);
    for (const DraftKind draft : kEveryDraft) {
      for (const Correction& correction : kEveryCorrection) {
        for (const bool accept : {false, true}) {
          SCOPED_TRACE(fmt::format("temperature {}, draft {}, correction {}, accept {}", temperature,
                                   static_cast<int>(draft), static_cast<int>(correction.kind), accept));
          EngineOptions options = dual_options(3, kTierContext);
          options.draft = guesses(draft, accept);
          options.tiers.correction = correction;
          const auto dual = engine(*model_, options);
          expect_same_texts(write(*dual, temperature), expected);
          expect_all_given_back(*dual);
        }
      }
    }
  }
}

TEST_P(Dual, WritesTheTextOfAllNearWhateverIsChosenByCost) {
  EngineOptions options = dual_options(3, kTierContext);
  options.tiers.policy = Policy::kAuto;
  options.draft = guesses(DraftKind::kNgram, false);
  expect_same_texts(write(*engine(*model_, options), 0.8f), write(*engine(*model_, plain_options(3)), 0.8f));
}

TEST_P(Dual, WritesTheTextOfAllNearFromEveryFarTierUnderAnyLatency) {
  const auto expected = write(*engine(*model_, plain_options(3)), 0.8f);
  EngineOptions options = dual_options(3, kTierContext);
  options.tiers.far = {.kind = FarKind::kFile, .directory = directory_.file(""), .make_port = {}};
  expect_same_texts(write(*engine(*model_, options), 0.8f), expected);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937_64 random(seed);
    options.draft = guesses(kEveryDraft[random() % std::size(kEveryDraft)], random() % 2 == 0);
    options.tiers.correction = kEveryCorrection[random() % 3];
    options.tiers.near_tokens = 1 + static_cast<std::uint32_t>(random() % 400);
    options.block_tokens = 16U << random() % 3;
    if (random() % 2 == 0) options.tiers.resident_layers = static_cast<std::uint32_t>(random() % 3);
    options.tiers.ring_sets = 2 + static_cast<std::uint32_t>(random() % 2);
    const auto dual = simulated(
        *model_, options, {.seed = seed, .latency_min = milliseconds(0), .latency_max = milliseconds(50)});
    expect_same_texts(write(*dual, 0.8f), expected);
  }
}

// A selection of its own per sequence: what one selects, guesses and accepts is nothing to its neighbours.
TEST_P(Dual, WritesTheSameTextAloneAndInABatch) {
  for (const bool accept : {false, true}) {
    EngineOptions options = dual_options(3, 64);
    options.draft = guesses(DraftKind::kNgram, accept);
    options.tiers.correction = kEveryCorrection[1];
    const auto together = write(*engine(*model_, options), 0.8f);
    for (std::uint32_t i = 0; i < options.sequences; ++i) {
      const auto alone = engine(*model_, options);
      const auto tokens =
          write_alone(*alone, random_tokens(250 + 61 * i, i + 1), generation_options(0.8f, i, 40 + 17 * i));
      EXPECT_EQ(tokens, together[i].tokens) << "sequence " << i << ", accept " << accept;
    }
  }
}

// Long prompts, computed a layer at a time while others decode, with reads of both that come when they like.
TEST_P(Dual, WritesTheSameTextWhilePromptsPauseBetweenLayers) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    EngineOptions options = dual_options(3, seed % 2 == 0 ? 64 : 320);
    options.prompts_beside = true;
    options.outputs_max = 2 * options.sequences;
    if (seed % 3 == 0) options.tiers.resident_layers = 1;
    const auto both = simulated(
        *model_, options, {.seed = seed, .latency_min = milliseconds(0), .latency_max = milliseconds(50)});
    const auto texts = write_beside(*both, 0.8f);
    for (std::uint32_t i = 0; i < options.sequences; ++i) {
      const auto alone = engine(*model_, dual_options(1, options.tiers.budget_tokens));
      EXPECT_EQ(texts[i], write_alone(*alone, random_tokens(250 + 61 * i, i + 1),
                                      generation_options(0.8f, i, 40 + 17 * i)))
          << "sequence " << i;
    }
    expect_all_given_back(*both);
  }
}

// What one sequence attends to is its own affair.
TEST_P(Dual, WritesTheSameTextAsAnEngineOfThePolicyThatTheSequenceHasForItself) {
  constexpr Policy kOwn[] = {Policy::kFull, Policy::kReactive, Policy::kLastSet, Policy::kPrevious,
                             Policy::kDual};
  EngineOptions options = small_options(std::size(kOwn));
  options.tiers.far.kind = FarKind::kHost;
  options.tiers.policy = Policy::kPrevious;
  options.outputs_max = 2 * options.sequences;
  const auto shared = engine(*model_, options);
  Generator generator(*shared);
  std::vector<std::unique_ptr<Generation>> all;
  const auto own = [&](std::uint32_t i) {
    GenerationOptions wanted = generation_options(0.8f, i, 60);
    wanted.policy = kOwn[i];
    wanted.budget_tokens = 32 + 32 * i;
    return wanted;
  };
  for (std::uint32_t i = 0; i < std::size(kOwn); ++i) {
    auto generation = generator.start(random_tokens(300, i + 1), own(i));
    ASSERT_TRUE(generation && generator.prefill(**generation));
    all.push_back(std::move(*generation));
  }
  while (decode_running(generator, all)) continue;
  for (std::uint32_t i = 0; i < std::size(kOwn); ++i) {
    EngineOptions same = small_options(1);
    same.tiers.far.kind = FarKind::kHost;
    same.tiers.policy = kOwn[i];
    same.tiers.budget_tokens = 32 + 32 * i;
    if (kOwn[i] == Policy::kDual) same.draft = {.kind = DraftKind::kSelf};
    const auto tokens =
        write_alone(*engine(*model_, same), random_tokens(300, i + 1), generation_options(0.8f, i, 60));
    EXPECT_EQ(all[i]->tokens(), tokens) << policy_name(kOwn[i]);
    EXPECT_EQ(all[i]->draft_stats().guesses > 0, kOwn[i] == Policy::kDual);
  }
}

TEST_P(Dual, RefusesAPolicyThatASequenceCannotHaveForItself) {
  EngineOptions options = small_options(1);
  options.tiers.far.kind = FarKind::kHost;
  options.tiers.policy = Policy::kPrevious;
  const auto selecting = engine(*model_, options);
  GenerationOptions wanted;
  for (const Policy policy : {Policy::kAuto, Policy::kPreviousLayer, Policy::kOracle}) {
    wanted.policy = policy;
    const auto refused = Generator(*selecting).start(random_tokens(10, 1), wanted);
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().message, testing::HasSubstr("there are full, reactive"));
  }
  wanted.policy = Policy::kReactive;
  EXPECT_FALSE(Generator(*engine(*model_, plain_options(1))).start(random_tokens(10, 1), wanted));
}

TEST_P(Dual, EveryGuessOfAPrimedChainIsRightWhereEverythingIsSelected) {
  for (const float temperature : {0.0f, 0.8f}) {
    for (const Text& text : write(*engine(*model_, dual_options(2, kTierContext)), temperature)) {
      EXPECT_EQ(text.draft.primings, 1U);
      EXPECT_EQ(text.draft.right, text.draft.guesses);
      EXPECT_EQ(text.draft.guesses, text.tokens.size() - 2);  // not the first token, nor behind the last
    }
  }
}

// As far as a draft model can be right: it is the same one, with full attention.
TEST_P(Dual, AModelThatDraftsForItselfIsAlwaysRightWhereEverythingIsSelected) {
  for (const bool accept : {false, true}) {
    EngineOptions options = dual_options(2, kTierContext);
    options.draft = guesses(DraftKind::kModel, accept);
    options.draft.model = model_.get();
    for (const Text& text : write(*engine(*model_, options), 0.8f)) {
      EXPECT_EQ(text.draft.primings, 0U);
      EXPECT_EQ(text.draft.right, text.draft.guesses);
      EXPECT_EQ(text.draft.accepted, accept ? text.draft.guesses : 0);
      EXPECT_GE(text.draft.guesses, text.tokens.size() / 2 - 1);
    }
  }
}

TEST_P(Dual, TheKvOfADraftModelIsPlannedAndNoMoreIsTaken) {
  EngineOptions options = dual_options(3, 64);
  options.draft = guesses(DraftKind::kModel, true);
  const auto dual = engine(*model_, options);
  EXPECT_EQ(dual->plan().draft_bytes, dual->draft()->near().bytes_capacity());
  EXPECT_EQ(dual->plan().near_bytes(), dual->near().bytes_capacity());
  write(*dual, 0.8f);
  expect_all_given_back(*dual);
}

TEST_P(Dual, RefusesADraftModelOfAnotherVocabulary) {
  const auto refusal = [&](const std::string& name, std::vector<std::string> texts) {
    TinyModelOptions tiny{.layers = 1};
    tiny.edit_keys = [&](gguf_context* gguf) {
      std::vector<const char*> pointers;
      for (const std::string& text : texts) pointers.push_back(text.c_str());
      gguf_set_arr_str(gguf, "tokenizer.ggml.tokens", pointers.data(), pointers.size());
      const std::vector<float> scores(texts.size(), 0.0f);
      gguf_set_arr_data(gguf, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
      std::vector<std::int32_t> kinds(texts.size(), 6);  // bytes
      std::fill_n(kinds.begin(), kTinyFirstByte, 3);     // control
      std::fill(kinds.begin() + kTinyFirstByte + 256, kinds.end(), 1);
      gguf_set_arr_data(gguf, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, kinds.data(), kinds.size());
    };
    const auto rows = static_cast<std::int64_t>(texts.size());
    tiny.shapes = {{"token_embd.weight", {tiny.embedding, rows}}, {"output.weight", {tiny.embedding, rows}}};
    const auto other = load(tiny, name);
    EngineOptions options = dual_options(1, 64);
    options.draft = {.kind = DraftKind::kModel, .model = other.get()};
    const auto refused = Engine::create(*model_, options);
    return refused ? std::string() : refused.error().message;
  };
  std::vector<std::string> texts;
  for (TokenId token = 0; token < static_cast<TokenId>(kTinyVocabulary); ++token) {
    const bool byte = token >= kTinyFirstByte && token < kTinyFirstByte + 256;
    texts.push_back(byte ? fmt::format("<0x{:02X}>", token - kTinyFirstByte)
                         : model_->vocabulary().piece(token, true));
  }
  texts[3] = "<blank>";
  EXPECT_THAT(refusal("renamed", texts), testing::AllOf(testing::HasSubstr("token 3 is \"<blank>\" in "),
                                                        testing::HasSubstr("\"<pad>\" in ")));
  texts.push_back("more");
  EXPECT_THAT(refusal("larger", texts), testing::AllOf(testing::HasSubstr("has 262 tokens"),
                                                       testing::HasSubstr("has 261; a draft model")));
}

// Both go on inside the last page of what they share, which the guesses' K and V come to lie in.
TEST_P(Dual, GuessesOfASequenceLeaveThePagesItSharesUntouched) {
  const auto prompt = random_tokens(203, 11);
  ASSERT_NE(prompt.size() % small_options(1).block_tokens, 0U);
  for (const std::uint32_t budget : {64U, kTierContext}) {
    SCOPED_TRACE(fmt::format("budget {}", budget));
    EngineOptions options = dual_options(3, budget);
    options.tiers.correction = kEveryCorrection[1];  // each token attends to what its own query selects
    const auto dual = engine(*model_, options);
    const auto guessing = new_sequence(*dual);
    ASSERT_TRUE(dual->prefill(*guessing, prompt));
    auto together = dual->fork(*guessing, 203);
    auto later = dual->fork(*guessing, 197);  // and one that cuts into the page
    ASSERT_TRUE(together && later);
    std::mt19937_64 random(13);
    const auto own = random_tokens(60, 14);
    const auto others = random_tokens(60, 15);
    const std::vector<std::optional<TokenId>> none(own.size());
    const Guessed own_alone = play_guesses(*engine(*model_, options), prompt, own, none);
    const Guessed others_alone = play_guesses(*engine(*model_, options), prompt, others, none);
    const Guessed later_alone =
        play_guesses(*engine(*model_, options), std::span(prompt).first(197), others, none);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const bool right = i + 1 < own.size() && random() % 2 == 0;
      const TokenId guess = right ? own[i + 1] : static_cast<TokenId>(random() % kTinyVocabulary);
      const std::array groups = {
          StepGroup{.sequence = guessing.get(), .tokens = std::span(own).subspan(i, 1), .guess = guess},
          StepGroup{.sequence = together->get(), .tokens = std::span(others).subspan(i, 1)}};
      const auto logits = dual->step(groups);
      ASSERT_TRUE(logits) << logits.error().message;
      ASSERT_TRUE(same_bits(copy_row(*logits), own_alone.committed[i])) << "token " << i;
      ASSERT_TRUE(same_bits(copy_row(*logits + 2 * kTinyVocabulary), others_alone.committed[i]))
          << "token " << i;
    }
    for (std::size_t i = 0; i < others.size(); ++i) {
      const StepGroup group{.sequence = later->get(), .tokens = std::span(others).subspan(i, 1)};
      const auto logits = dual->step(std::span(&group, 1));
      ASSERT_TRUE(logits) << logits.error().message;
      ASSERT_TRUE(same_bits(copy_row(*logits), later_alone.committed[i])) << "token " << i;
    }
  }
}

TEST_P(Dual, NothingIsGuessedWhereEverythingIsSelectedUnlessItMayBeAccepted) {
  for (const bool accept : {false, true}) {
    EngineOptions options = dual_options(1, kTierContext);
    options.draft = {.kind = DraftKind::kModel, .accept = accept, .model = model_.get()};
    const auto dual = engine(*model_, options);
    const Text text = write(*dual, 0.0f).front();
    EXPECT_EQ(text.draft.primings, 0U);
    EXPECT_EQ(text.draft.guesses > 0, accept);
    EXPECT_EQ(dual->stats().rank_ns, 0U);
  }
}

// From a prompt that the budget has room for to one that it has not.
TEST_P(Dual, AChainBeginsWhereTheContextOutgrowsTheBudget) {
  EngineOptions options = dual_options(1, 320);
  options.draft = {.kind = DraftKind::kSelf};
  const auto reactive_options = [&] {
    EngineOptions same = options;
    same.tiers.policy = Policy::kReactive;
    same.draft = {};
    return same;
  };
  options.tiers.correction = kEveryCorrection[1];
  const auto expected = write_alone(*engine(*model_, reactive_options()), random_tokens(300, 1),
                                    generation_options(0.8f, 0, 150));
  const auto dual = engine(*model_, options);
  Generator generator(*dual);
  const auto generation = generator.start(random_tokens(300, 1), generation_options(0.8f, 0, 150));
  ASSERT_TRUE(generation && generator.prefill(**generation));
  Generation* one = generation->get();
  while (one->running()) ASSERT_TRUE(generator.step(std::span(&one, 1)));
  EXPECT_EQ(one->tokens(), expected);
  EXPECT_GT(one->draft_stats().guesses, 20U);
  EXPECT_LT(one->draft_stats().guesses, 100U);
}

TEST_P(Dual, ReadsAheadWhatAPerfectGuessWillNeed) {
  EngineOptions options = dual_options(1, 64);
  options.tiers.near_tokens = 128;
  const auto dual = engine(*model_, options);
  write(*dual, 0.0f);
  EXPECT_GT(dual->stats().blocks_predicted, 0U);
  EXPECT_EQ(dual->stats().blocks_missed, 0U);
}

// Against what is counted over all steps, where every layer that selects is seen.
TEST_P(Dual, AWatchedStepSaysOfEachBlockWhatIsCounted) {
  for (const std::uint32_t resident : {0U, 3U}) {
    EngineOptions options = dual_options(1, 64);
    options.tiers.near_tokens = 80;
    options.tiers.resident_layers = resident;
    const auto watched =
        simulated(*model_, options, {.latency_min = milliseconds(1), .latency_max = milliseconds(9)});
    Generator generator(*watched);
    const auto generation = generator.start(random_tokens(300, 1), generation_options(0.8f, 0, 60));
    ASSERT_TRUE(generation && generator.prefill(**generation));
    Generation* one = generation->get();
    StepWatch watch;
    watched->set_watch(&watch);
    std::array<std::uint64_t, 7> seen{};
    const StepStats before = watched->stats();
    while (one->running()) {
      watch.begin(one->sequence());
      ASSERT_TRUE(generator.step(std::span(&one, 1)));
      for (LayerIndex layer; layer.value < watch.layers(); ++layer) {
        if (watched->tiers().layer(layer).kind != LayerKind::kSelecting) continue;
        for (const BlockFate fate : watch.fates().subspan(layer.value * watch.blocks(), watch.blocks()))
          ++seen[static_cast<std::size_t>(fate)];
      }
    }
    const StepStats after = watched->stats();
    const auto count = [&](BlockFate fate) { return seen[static_cast<std::size_t>(fate)]; };
    EXPECT_EQ(count(BlockFate::kMissed) + count(BlockFate::kStreamed),
              after.blocks_missed - before.blocks_missed);
    EXPECT_EQ(count(BlockFate::kLate), after.blocks_late - before.blocks_late);
    EXPECT_EQ(count(BlockFate::kFetched) + count(BlockFate::kLate), after.blocks_used - before.blocks_used);
    EXPECT_GT(count(BlockFate::kFetched), 0U);
    EXPECT_GT(count(BlockFate::kAttended), 0U);
    EXPECT_GT(count(BlockFate::kFar), 0U);
  }
}

// Of several sequences one is watched, and nobody after the end.
TEST_P(Dual, AWatchSeesNoOtherSequence) {
  const auto both = engine(*model_, dual_options(2, 64));
  const auto one = new_sequence(*both);
  const auto other = new_sequence(*both);
  for (Sequence* sequence : {one.get(), other.get()})
    ASSERT_TRUE(both->prefill(*sequence, random_tokens(200, 1)));
  StepWatch watch;
  both->set_watch(&watch);
  watch.begin(*one);
  const std::vector<TokenId> token = {7};
  const StepGroup group{.sequence = other.get(), .tokens = token};
  ASSERT_TRUE(both->step(std::span(&group, 1)));
  EXPECT_THAT(watch.fates(), testing::Each(BlockFate::kFar));
  watch.end();
  const StepGroup own{.sequence = one.get(), .tokens = token};
  ASSERT_TRUE(both->step(std::span(&own, 1)));
  EXPECT_THAT(watch.fates(), testing::Each(BlockFate::kFar));
  watch.begin(*one);
  ASSERT_TRUE(both->step(std::span(&own, 1)));
  EXPECT_THAT(watch.fates(), testing::Contains(BlockFate::kAttended));
}

// What a layer attends to does not depend on how its blocks came near.
TEST_P(Dual, WritesTheSameTextWithAnyNumberOfResidentLayers) {
  EngineOptions options = dual_options(2, 64);
  const auto expected = write(*engine(*model_, options), 0.8f);
  for (const std::uint32_t resident : {0U, 1U, 2U}) {
    for (const std::uint32_t sets : {2U, 3U}) {
      SCOPED_TRACE(fmt::format("{} resident, {} sets", resident, sets));
      options.tiers.resident_layers = resident;
      options.tiers.ring_sets = sets;
      const auto ring = engine(*model_, options);
      expect_same_texts(write(*ring, 0.8f), expected);
      expect_all_given_back(*ring);
    }
  }
}

TEST_P(Dual, WritesTheTextOfAllNearWhenAttendingToAllThatIsNear) {
  const auto expected = write(*engine(*model_, plain_options(2)), 0.8f);
  EngineOptions options = dual_options(2, kTierContext);
  options.tiers.attend_resident = true;
  for (const std::uint32_t resident : {0U, 3U}) {
    options.tiers.resident_layers = resident;
    expect_same_texts(write(*engine(*model_, options), 0.8f), expected);
  }
}

// Read ahead, while other layers are computed.
TEST_P(Dual, NoLayerOfTheRingMissesAPredictedBlock) {
  EngineOptions options = dual_options(1, 64);
  options.tiers.resident_layers = 0;
  const auto ring = engine(*model_, options);
  write(*ring, 0.0f);
  EXPECT_GT(ring->stats().blocks_predicted, 0U);
  EXPECT_LT(ring->stats().blocks_missed, ring->stats().blocks_predicted / 10);  // before anything was ranked
}

TEST_P(Dual, GuessesUpToTheLastTokenOfTheContext) {
  EngineOptions options = dual_options(1, kTierContext);
  const auto prompt = random_tokens(kTierContext - 40, 9);
  GenerationOptions generation_setup = generation_options(0.0f, 0, 1000);
  std::vector<std::vector<TokenId>> texts;
  for (const DraftOptions& draft : {guesses(DraftKind::kNone, false), guesses(DraftKind::kSelf, false),
                                    guesses(DraftKind::kNgram, true), guesses(DraftKind::kModel, true)}) {
    options.draft = draft;
    const auto dual = engine(*model_, options);
    texts.push_back(write_alone(*dual, prompt, generation_setup));
  }
  EXPECT_EQ(texts[0].size(), 40U);
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
  EXPECT_EQ(texts[3], texts[0]);
}

TEST_P(Dual, RefusesAGuessBehindSeveralTokensOrBeyondTheContextAndCommitsNothing) {
  const auto dual = engine(*model_, dual_options(1, 64));
  const auto sequence = new_sequence(*dual);
  const auto tokens = random_tokens(kTierContext - 1, 5);
  ASSERT_TRUE(dual->prefill(*sequence, tokens));
  const auto refused = [&](std::span<const TokenId> committed, TokenId guess) {
    const StepGroup group{.sequence = sequence.get(), .tokens = committed, .guess = guess};
    const auto logits = dual->step(std::span(&group, 1));
    return logits ? std::string() : logits.error().message;
  };
  const std::span all(tokens);
  EXPECT_THAT(refused(all.first(2), 5), testing::HasSubstr("at most one token"));
  EXPECT_THAT(refused(all.first(1), 5), testing::HasSubstr("do not fit the context"));
  EXPECT_THAT(refused({}, static_cast<TokenId>(kTinyVocabulary)), testing::HasSubstr("vocabulary"));
  const TokenId bad = -1;
  EXPECT_THAT(refused(std::span(&bad, 1), 5), testing::HasSubstr("vocabulary"));
  EXPECT_EQ(sequence->tokens(), kTierContext - 1);
}

TEST_P(Dual, AGuessThatFindsNoPageIsNotAcceptedAndTheSequenceGoesOn) {
  EngineOptions options = dual_options(1, kTierContext);
  const std::uint32_t room = 8 * options.block_tokens;
  options.tiers.far_bytes_max = 8 * model_->hyperparameters().geometry(options.block_tokens).page_bytes();
  const auto dual = engine(*model_, options);
  const auto sequence = new_sequence(*dual);
  const auto tokens = random_tokens(room, 6);
  ASSERT_TRUE(dual->prefill(*sequence, std::span(tokens).first(room - 1)));
  const StepGroup group{.sequence = sequence.get(), .tokens = std::span(tokens).last(1), .guess = 7};
  ASSERT_TRUE(dual->step(std::span(&group, 1)));
  ASSERT_FALSE(sequence->error());
  EXPECT_EQ(sequence->tokens(), room);
  EXPECT_FALSE(dual->accept_guess(*sequence));
  EXPECT_EQ(sequence->tokens(), room);
  EXPECT_FALSE(sequence->error());
  ASSERT_TRUE(sequence->truncate(room - 5));
  ASSERT_TRUE(dual->step(std::span(&group, 1)));
  EXPECT_FALSE(sequence->error());
}

}  // namespace
}  // namespace dualdecoder
