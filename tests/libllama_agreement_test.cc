// Our logits agree with libllama's: on every architecture and variant of rotary scaling with small random
// models, and on real models in several quantisations with long text. Both engines see the same tokens.
//
// The reference is always libllama in chunks of many rows, where its flash attention sums in float32. For one
// row it sums V in float16, which alone costs a mean KL of 1e-5 on the small models.
//
// Quantised products round their input to 8 bits, so any difference in the last place grows to that
// rounding's size within a few layers. How large that is shows in libllama itself: its logits without flash
// attention are as far from those with it. That is the yardstick for the real models, beside an absolute
// bound.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "base/file.h"
#include "decode/engine.h"
#include "model/log_capture.h"
#include "peer/libllama.h"
#include "temporary_directory.h"
#include "test_device.h"
#include "tiny_model.h"

namespace dualdecoder {
namespace {

/// How far distributions of the next token are from those of a reference, over many positions.
class Divergence {
 public:
  void add(const float* reference, const float* logits, std::size_t vocabulary) {
    const float* best_reference = std::max_element(reference, reference + vocabulary);
    const float* best = std::max_element(logits, logits + vocabulary);
    double sum_reference = 0.0, sum = 0.0, difference = 0.0;
    for (std::size_t i = 0; i < vocabulary; ++i) {
      const double weight = std::exp(static_cast<double>(reference[i] - *best_reference));
      sum_reference += weight;
      sum += std::exp(static_cast<double>(logits[i] - *best));
      difference += weight * (static_cast<double>(reference[i]) - static_cast<double>(logits[i]));
    }
    // KL(p || q) with p = softmax(a), q = softmax(b):  sum p (a - b) - log sum exp a + log sum exp b
    const double kl =
        difference / sum_reference - (*best_reference + std::log(sum_reference)) + *best + std::log(sum);
    kl_sum_ += kl;
    kl_max_ = std::isnan(kl) ? std::numeric_limits<double>::infinity() : std::max(kl_max_, kl);
    ++positions_;
    if (best - logits == best_reference - reference) ++same_top_;
  }
  std::size_t positions() const { return positions_; }
  double kl_mean() const { return kl_sum_ / static_cast<double>(positions_); }
  double kl_max() const { return kl_max_; }
  double same_top() const { return static_cast<double>(same_top_) / static_cast<double>(positions_); }

 private:
  std::size_t positions_ = 0;
  std::size_t same_top_ = 0;
  double kl_sum_ = 0.0;
  double kl_max_ = 0.0;
};

void print_row(const std::string& model, const std::string& name, const Divergence& divergence) {
  static const bool header = [] {
    fmt::print("{:24} {:>16} {:>9} {:>9} {:>9} {:>9}\n", "model", "case", "positions", "mean KL", "max KL",
               "same top");
    return true;
  }();
  (void)header;
  fmt::print("{:24} {:>16} {:9} {:9.1e} {:9.1e} {:8.2f}%\n", model, name, divergence.positions(),
             divergence.kl_mean(), divergence.kl_max(), 100.0 * divergence.same_top());
}

/// The same model in both engines.
class Pair {
 public:
  /// `device`: of libllama.
  static std::unique_ptr<Pair> load(const std::string& path, const EngineOptions& options,
                                    const Device& device = {}) {
    quiet_library_logs();
    auto pair = std::make_unique<Pair>();
    auto model = load_on_test_device(path);
    if (!model) return failure(model.error());
    pair->model = std::move(*model);
    auto engine = Engine::create(*pair->model, options);
    if (!engine) return failure(engine.error());
    pair->engine = std::move(*engine);
    auto peer = load_peer(path, pair->engine->options(), true, device);
    if (!peer) return failure(peer.error());
    pair->peer = std::move(*peer);
    for (std::uint32_t i = 0; i < options.sequences; ++i) {
      pair->sequences.push_back(std::move(*pair->engine->new_sequence()));
    }
    return pair;
  }

  static Result<std::unique_ptr<Libllama>> load_peer(const std::string& path, const EngineOptions& options,
                                                     bool flash_attention, const Device& device = {}) {
    return Libllama::load(path, {.threads = options.threads,
                                 .context = options.context,
                                 .sequences = options.sequences,
                                 .batch = options.prefill_chunk,
                                 .outputs = options.outputs_max,
                                 .flash_attention = flash_attention,
                                 .device = device.handle()});
  }

  std::uint32_t vocabulary() const { return model->vocabulary().size(); }

  /// Appends `tokens` to the first sequence of both in one step, without logits.
  void pass(std::span<const TokenId> tokens) {
    const StepGroup group{sequences[0].get(), tokens, LogitsWanted::kNone};
    ASSERT_TRUE(engine->step(std::span(&group, 1)));
    ASSERT_TRUE(peer->append(0, tokens, 0));
  }

  /// Appends `tokens` to the first sequence of both, to libllama's in one step and to ours in steps of
  /// `rows`, and calls compare_row(i, theirs, ours) with the logits of each token.
  template <typename CompareRow>
  void compare(std::span<const TokenId> tokens, std::size_t rows, const CompareRow& compare_row) {
    const auto theirs = peer->append(0, tokens, static_cast<std::uint32_t>(tokens.size()));
    ASSERT_TRUE(theirs) << theirs.error().message;
    for (std::size_t done = 0; done < tokens.size(); done += rows) {
      const auto step = tokens.subspan(done, std::min(rows, tokens.size() - done));
      const StepGroup group{sequences[0].get(), step, LogitsWanted::kAll};
      const auto ours = engine->step(std::span(&group, 1));
      ASSERT_TRUE(ours) << ours.error().message;
      for (std::size_t i = 0; i < step.size(); ++i) {
        compare_row(done + i, *theirs + (done + i) * vocabulary(), *ours + i * vocabulary());
      }
    }
  }

  /// Ours in steps of one row. On a device that is the CPU behind a server theirs, too: ggml's attention
  /// there sums in f16 for few rows, and in float32 for many.
  template <typename CompareRow>
  void compare_steps(std::span<const TokenId> tokens, const CompareRow& compare_row) {
    if (test_device().is_cpu()) return compare(tokens, 1, compare_row);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      compare(tokens.subspan(i, 1), 1,
              [&](std::size_t, const float* theirs, const float* ours) { compare_row(i, theirs, ours); });
    }
  }

  std::unique_ptr<Model> model;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Libllama> peer;
  std::vector<std::unique_ptr<Sequence>> sequences;

 private:
  static std::unique_ptr<Pair> failure(const Error& error) {
    ADD_FAILURE() << error.message;
    return nullptr;
  }
};

struct TinyCase {
  std::string name;
  TinyModelOptions options;
};
void PrintTo(const TinyCase& tiny, std::ostream* out) { *out << tiny.name; }

std::vector<TinyCase> tiny_cases() {
  const auto drop_pattern = [](gguf_context* gguf) {
    gguf_remove_key(gguf, "gemma3.attention.sliding_window_pattern");
  };
  const auto list_pattern = [](gguf_context* gguf) {
    const std::int8_t windowed[] = {0, 1, 1};
    gguf_set_arr_data(gguf, "gemma3.attention.sliding_window_pattern", GGUF_TYPE_BOOL, windowed, 3);
  };
  const auto add_softcap = [](gguf_context* gguf) {
    gguf_set_val_f32(gguf, "gemma3.final_logit_softcapping", 5.0f);
  };
  return {
      {"llama", {}},
      {"llama_tied", {.tied_output = true}},
      {"llama_heads_of_64", {.heads = 3, .kv_heads = 1, .head_dim = 64}},
      {"llama3_factors", {.scaling = TinyScaling::kLlama3}},
      {"llama_linear", {.scaling = TinyScaling::kLinear}},
      {"llama_yarn", {.scaling = TinyScaling::kYarn}},
      {"qwen2", {.architecture = "qwen2"}},
      {"qwen2_yarn_tied", {.architecture = "qwen2", .scaling = TinyScaling::kYarn, .tied_output = true}},
      {"qwen3", {.architecture = "qwen3"}},
      {"qwen3_heads_of_32_yarn", {.architecture = "qwen3", .head_dim = 32, .scaling = TinyScaling::kYarn}},
      {"gemma3_tied", {.architecture = "gemma3", .layers = 3, .tied_output = true}},
      {"gemma3_default_pattern", {.architecture = "gemma3", .layers = 7, .edit_keys = drop_pattern}},
      {"gemma3_listed_pattern", {.architecture = "gemma3", .layers = 3, .edit_keys = list_pattern}},
      {"gemma3_linear_softcap",
       {.architecture = "gemma3", .scaling = TinyScaling::kLinear, .edit_keys = add_softcap}},
      {"gemma3_no_window", {.architecture = "gemma3", .window = 0}},
  };
}

constexpr std::uint32_t kTinyTokens = 300;
constexpr double kTinyKlMean = 1e-5;
// Between sums in float32 and those in f16, which ggml's attention takes for few rows on the CPU: libllama's
// there, and ours on a device that is the CPU behind a server.
constexpr double kTinyKlMeanToF16 = 1e-4;
constexpr double kTinySameTop = 0.98;

/// Of our steps of few rows to libllama's chunks, and to its steps.
double kl_mean_to_chunks() { return test_device().is_cpu() ? kTinyKlMean : kTinyKlMeanToF16; }
double kl_mean_to_steps() { return test_device().is_cpu() ? kTinyKlMeanToF16 : kTinyKlMean; }

class TinyAgreement : public testing::TestWithParam<TinyCase> {
 protected:
  void SetUp() override {
    load({.threads = 1, .context = 512, .sequences = 3, .prefill_chunk = 100, .outputs_max = 100});
  }

  void load(const EngineOptions& options) {
    const std::string path = directory_.file("tiny.gguf");
    ASSERT_TRUE(write_tiny_model(path, GetParam().options));
    pair_ = Pair::load(path, options);
    ASSERT_NE(pair_, nullptr);
  }

  static std::vector<TokenId> random_tokens(std::uint64_t seed, std::size_t count = kTinyTokens) {
    std::mt19937_64 random(seed);
    std::uniform_int_distribution<TokenId> token(0, static_cast<TokenId>(kTinyVocabulary) - 1);
    std::vector<TokenId> tokens(count);
    for (TokenId& t : tokens) t = token(random);
    return tokens;
  }

  void expect_close(const std::string& name, const Divergence& divergence, double kl_mean) const {
    print_row(GetParam().name, name, divergence);
    EXPECT_LE(divergence.kl_mean(), kl_mean) << name;
    EXPECT_GE(divergence.same_top(), kTinySameTop) << name;
  }

  /// One sequence in chunks of 100 by libllama, and by us or in steps of one row.
  Divergence compare_alone(bool steps, std::vector<TokenId>& tops) const {
    const auto tokens = random_tokens(1);
    Divergence divergence;
    const auto compare_row = [&](std::size_t, const float* theirs, const float* ours) {
      divergence.add(theirs, ours, kTinyVocabulary);
      const auto top = std::max_element(theirs, theirs + kTinyVocabulary) - theirs;
      tops.push_back(static_cast<TokenId>(top));
    };
    for (std::size_t done = 0; done < tokens.size(); done += 100) {
      const auto chunk = std::span(tokens).subspan(done, 100);
      if (steps) {
        pair_->compare_steps(chunk, compare_row);
      } else {
        pair_->compare(chunk, chunk.size(), compare_row);
      }
    }
    EXPECT_EQ(divergence.positions(), kTinyTokens);
    return divergence;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<Pair> pair_;
};

TEST_P(TinyAgreement, HoldsInChunks) {
  std::vector<TokenId> tops;
  expect_close("chunks", compare_alone(false, tops), kTinyKlMean);
  std::sort(tops.begin(), tops.end());
  tops.erase(std::unique(tops.begin(), tops.end()), tops.end());
  EXPECT_GE(tops.size(), 20U) << "answers that hardly depend on the input: agreement would mean little";
}

TEST_P(TinyAgreement, HoldsInStepsOfOneRow) {
  std::vector<TokenId> tops;
  expect_close("steps", compare_alone(true, tops), kTinyKlMean);
}

TEST_P(TinyAgreement, HoldsForSeveralSequencesInOneStep) {
  constexpr std::array<std::uint32_t, 3> kPrompts = {5, 70, 121};
  constexpr std::uint32_t kSteps = 100;
  auto peer_in_steps = Pair::load_peer(directory_.file("tiny.gguf"), pair_->engine->options(), true);
  ASSERT_TRUE(peer_in_steps);
  std::vector<std::vector<TokenId>> tokens;
  std::vector<std::vector<float>> reference;  // [sequence][step, vocabulary]
  for (std::uint32_t i = 0; i < kPrompts.size(); ++i) {
    tokens.push_back(random_tokens(2 + i));
    const auto prompt = std::span(tokens[i]).first(kPrompts[i]);
    ASSERT_TRUE(pair_->engine->prefill(*pair_->sequences[i], prompt));
    ASSERT_TRUE((*peer_in_steps)->prefill(i, prompt));
    ASSERT_TRUE(pair_->peer->prefill(i, prompt));
    const auto chunk = pair_->peer->append(i, std::span(tokens[i]).subspan(kPrompts[i], kSteps), kSteps);
    ASSERT_TRUE(chunk);
    reference.emplace_back(*chunk, *chunk + kSteps * kTinyVocabulary);
  }
  Divergence divergence, divergence_to_steps;
  for (std::uint32_t s = 0; s < kSteps; ++s) {
    std::vector<TokenId> next;
    std::vector<StepGroup> groups;
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      const auto row = std::span(tokens[i]).subspan(kPrompts[i] + s, 1);
      next.push_back(row[0]);
      groups.push_back({pair_->sequences[i].get(), row, LogitsWanted::kLast});
    }
    const auto ours = pair_->engine->step(groups);
    const auto theirs = (*peer_in_steps)->decode(next);
    ASSERT_TRUE(ours && theirs);
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      const float* row = *ours + i * kTinyVocabulary;
      divergence.add(&reference[i][s * kTinyVocabulary], row, kTinyVocabulary);
      divergence_to_steps.add(*theirs + i * kTinyVocabulary, row, kTinyVocabulary);
    }
  }
  expect_close("3 sequences", divergence, kl_mean_to_chunks());
  expect_close("to its steps", divergence_to_steps, kl_mean_to_steps());
}

INSTANTIATE_TEST_SUITE_P(All, TinyAgreement, testing::ValuesIn(tiny_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

class TinyAgreementFarOut : public TinyAgreement {
 protected:
  static constexpr std::uint32_t kDepth = 3000;
  static constexpr std::uint32_t kSteps = 100;  // libllama sums in float32 from 64 rows on
  static constexpr std::uint32_t kChunk = 500;

  void SetUp() override {
    load({.threads = 1, .context = kDepth + kSteps, .prefill_chunk = kChunk, .outputs_max = kChunk});
  }
};

// Several splits of the attention kernel, and beyond the original context of the scaled ones.
TEST_P(TinyAgreementFarOut, HoldsInChunksAndInStepsOfOneRow) {
  const auto tokens = random_tokens(1, kDepth + kSteps);
  const auto text = std::span(tokens);
  Divergence chunk, steps;
  for (std::uint32_t done = 0; done < kDepth - kChunk; done += kChunk)
    pair_->pass(text.subspan(done, kChunk));
  pair_->compare(
      text.subspan(kDepth - kChunk, kChunk), kChunk,
      [&](std::size_t, const float* theirs, const float* ours) { chunk.add(theirs, ours, kTinyVocabulary); });
  pair_->compare_steps(text.last(kSteps), [&](std::size_t, const float* theirs, const float* ours) {
    steps.add(theirs, ours, kTinyVocabulary);
  });
  expect_close("chunk to 3,000", chunk, kTinyKlMean);
  expect_close("steps from 3,000", steps, kTinyKlMean);
}

INSTANTIATE_TEST_SUITE_P(All, TinyAgreementFarOut,
                         testing::Values(TinyCase{"llama3_factors", {.scaling = TinyScaling::kLlama3}},
                                         TinyCase{"qwen2_yarn",
                                                  {.architecture = "qwen2", .scaling = TinyScaling::kYarn}},
                                         TinyCase{"gemma3", {.architecture = "gemma3", .layers = 3}}),
                         [](const auto& parameter) { return parameter.param.name; });

struct RealCase {
  std::string name;
  std::string path;
  std::vector<std::uint32_t> contexts;  // ascending; the number of tokens that the first compared row sees
  double kl_mean;
};
void PrintTo(const RealCase& real, std::ostream* out) { *out << real.name; }

constexpr std::uint32_t kPositions = 512;       // compared from each context on
constexpr std::uint32_t kSingleRows = 64;       // of them in steps of one row, ...
constexpr std::uint32_t kSingleRowsFrom = 500;  // ... from this context on
constexpr std::uint32_t kChunk = 512;           // rows of a step without logits
constexpr std::uint32_t kCompareChunk = 64;     // rows of a step with logits: Gemma's are 1 MiB each
constexpr double kToYardstick = 2.0;            // mean KL, as a multiple of libllama's to itself
constexpr double kTopBelowYardstick = 0.03;
// On a device both have ggml's products and attention.
constexpr double kKlMeanOnDevice = 1e-3;
constexpr double kSameTopOnDevice = 0.99;

/// How the text is passed: which positions are compared and which are steps of one row.
struct Schedule {
  std::vector<std::uint32_t> contexts;

  bool compared(std::uint32_t position) const { return in_reach(position, kPositions, 0); }
  bool single(std::uint32_t position) const { return in_reach(position, kSingleRows, kSingleRowsFrom); }
  bool in_reach(std::uint32_t position, std::uint32_t reach, std::uint32_t from) const {
    return std::any_of(contexts.begin(), contexts.end(), [&](std::uint32_t context) {
      return context >= from && position + 1 >= context && position + 1 < context + reach;
    });
  }
  /// Tokens from `position` on that are treated alike, as many as one step may have.
  std::uint32_t alike(std::uint32_t position) const {
    const std::uint32_t most = compared(position) ? kCompareChunk : kChunk;
    std::uint32_t count = 1;
    while (count < most && position + count < tokens() && compared(position + count) == compared(position) &&
           single(position + count) == single(position)) {
      ++count;
    }
    return count;
  }
  std::uint32_t tokens() const { return contexts.back() + kPositions - 1; }
};

class RealAgreement : public testing::TestWithParam<RealCase> {
 protected:
  void SetUp() override {
    const RealCase& real = GetParam();
    schedule_.contexts = real.contexts;
    pair_ = Pair::load(real.path,
                       {.threads = 2,
                        .context = schedule_.tokens() + 1,
                        .prefill_chunk = kChunk,
                        .outputs_max = kCompareChunk},
                       test_device());
    ASSERT_NE(pair_, nullptr);
    const auto text = read_text_file(DUALDECODER_TEST_DATA "/prose.txt");
    ASSERT_TRUE(text) << text.error().message;
    tokens_ = pair_->model->vocabulary().tokenize(*text, true, false);
    ASSERT_GE(tokens_.size(), schedule_.tokens());
  }

  struct Comparison {
    std::vector<Divergence> ours;  // [context]
    Divergence yardstick;          // of libllama without flash attention, over the first positions
  };

  /// One pass over the text.
  Comparison compare() {
    auto other = Pair::load_peer(GetParam().path,
                                 {.threads = 2,
                                  .context = kPositions + kCompareChunk,
                                  .prefill_chunk = kCompareChunk,
                                  .outputs_max = kCompareChunk},
                                 false, test_device());
    if (!other) ADD_FAILURE() << other.error().message;
    const std::vector<std::uint32_t>& contexts = schedule_.contexts;
    const std::size_t vocabulary = pair_->vocabulary();
    Comparison result;
    result.ours.resize(contexts.size());
    for (std::uint32_t position = 0; position < schedule_.tokens() && !HasFailure();) {
      const std::uint32_t count = schedule_.alike(position);
      const auto text = std::span(tokens_).subspan(position, count);
      if (!schedule_.compared(position)) {
        pair_->pass(text);
        position += count;
        continue;
      }
      const float* without =
          position < kPositions ? (*other)->append(0, text, count).value_or(nullptr) : nullptr;
      EXPECT_TRUE(without != nullptr || position >= kPositions);
      const auto compare_row = [&](std::size_t i, const float* theirs, const float* ours) {
        const std::uint32_t context = position + static_cast<std::uint32_t>(i) + 1;
        if (without != nullptr) result.yardstick.add(theirs, without + i * vocabulary, vocabulary);
        for (std::size_t c = 0; c < contexts.size(); ++c) {
          if (context < contexts[c] || context >= contexts[c] + kPositions) continue;
          result.ours[c].add(theirs, ours, vocabulary);
        }
      };
      if (schedule_.single(position)) {
        pair_->compare_steps(text, compare_row);
      } else {
        pair_->compare(text, count, compare_row);
      }
      position += count;
    }
    return result;
  }

  Schedule schedule_;
  std::unique_ptr<Pair> pair_;
  std::vector<TokenId> tokens_;
};

TEST_P(RealAgreement, HoldsOverALongText) {
  const RealCase& real = GetParam();
  const auto [divergences, yardstick] = compare();
  print_row(real.name, "libllama itself", yardstick);
  for (std::size_t c = 0; c < real.contexts.size(); ++c) {
    const std::string name = fmt::format("context {}", real.contexts[c]);
    print_row(real.name, name, divergences[c]);
    EXPECT_EQ(divergences[c].positions(), kPositions) << name;
    if (!test_device().is_cpu()) {
      EXPECT_LE(divergences[c].kl_mean(), kKlMeanOnDevice) << name;
      EXPECT_GE(divergences[c].same_top(), kSameTopOnDevice) << name;
      continue;
    }
    EXPECT_LE(divergences[c].kl_mean(), real.kl_mean) << name;
    EXPECT_LE(divergences[c].kl_mean(), kToYardstick * yardstick.kl_mean()) << name;
    EXPECT_GE(divergences[c].same_top(), yardstick.same_top() - kTopBelowYardstick) << name;
  }
}

/// Gemma crosses its sliding windows of 512 and, in the long cases, 8,192 tokens.
std::vector<RealCase> all_cases(const std::vector<std::uint32_t>& contexts,
                                const std::vector<std::uint32_t>& gemma_contexts) {
  const auto made = [](const char* type) {
    return fmt::format("{}/SmolLM2-135M-Instruct.{}.gguf", DUALDECODER_MADE_MODELS, type);
  };
  const std::string models = DUALDECODER_MODELS;
  constexpr double kFloat = 1e-4, kQuantised = 1e-2;
  return {
      {"SmolLM2_Q4_1", models + "/SmolLM2-135M-Instruct.Q4_1.gguf", contexts, kQuantised},
      {"SmolLM2_Q4_0", made("Q4_0"), contexts, kQuantised},
      {"SmolLM2_Q8_0", made("Q8_0"), contexts, kQuantised},
      {"SmolLM2_F16", made("F16"), contexts, kFloat},
      {"Gemma3_Q4_K_M", models + "/gemma-3-270m.Q4_K_M.gguf", gemma_contexts, kQuantised},
  };
}

// One of each kind: the quantised default, the one without rounding, the other family.
std::vector<RealCase> short_cases() {
  std::vector<RealCase> cases = all_cases({1, 500}, {1});
  std::erase_if(cases,
                [](const RealCase& c) { return c.name.ends_with("Q4_0") || c.name.ends_with("Q8_0"); });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Short, RealAgreement, testing::ValuesIn(short_cases()),
                         [](const auto& parameter) { return parameter.param.name; });
// Minutes: ctest label long. The first context is there for the yardstick.
INSTANTIATE_TEST_SUITE_P(Long, RealAgreement,
                         testing::ValuesIn(all_cases({1, 500, 6000}, {1, 500, 6000, 8193})),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace dualdecoder
