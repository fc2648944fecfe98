// Our logits agree with libllama's: on every architecture and variant of rotary scaling with small random models, where
// the tolerance is tight, and on real models in several quantisations with long text. Both engines see the same tokens
// in the same chunks; what differs is attention (ours over blocks, libllama's flash attention) and nothing else.
//
// The real models are compared at positions named by their context, the number of tokens a row sees.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "base/file.h"
#include "decode/engine.h"
#include "model/log_capture.h"
#include "peer/libllama.h"
#include "temporary_directory.h"
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
    // KL(reference || ours) = sum p (a - b) - log sum exp a + log sum exp b
    const double kl = difference / sum_reference - (*best_reference + std::log(sum_reference)) + *best + std::log(sum);
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

void print_header() {
  fmt::print("{:36} {:>16} {:>9} {:>9} {:>9} {:>9}\n", "model", "case", "positions", "mean KL", "max KL", "same top");
}

void print_row(const std::string& model, const std::string& name, const Divergence& divergence) {
  fmt::print("{:36} {:>16} {:9} {:9.1e} {:9.1e} {:8.2f}%\n", model, name, divergence.positions(),
             divergence.kl_mean(), divergence.kl_max(), 100.0 * divergence.same_top());
}

/// The same model in both engines.
class Pair {
 public:
  static std::unique_ptr<Pair> load(const std::string& path, const EngineOptions& options) {
    quiet_library_logs();
    auto pair = std::make_unique<Pair>();
    auto model = Model::load(path, [](std::size_t, std::size_t) {});
    if (!model) return failure(model.error());
    pair->model = std::move(*model);
    auto engine = Engine::create(*pair->model, options);
    if (!engine) return failure(engine.error());
    pair->engine = std::move(*engine);
    auto peer = Libllama::load(path, {.threads = options.threads,
                                      .context = options.context,
                                      .sequences = options.sequences,
                                      .batch = options.prefill_chunk,
                                      .outputs = options.outputs_max});
    if (!peer) return failure(peer.error());
    pair->peer = std::move(*peer);
    for (std::uint32_t i = 0; i < options.sequences; ++i) pair->sequences.push_back(pair->engine->new_sequence());
    return pair;
  }

  std::uint32_t vocabulary() const { return model->vocabulary().size(); }

  /// Appends `tokens` to a sequence of both in one step, without logits.
  void pass(std::uint32_t sequence, std::span<const TokenId> tokens) {
    const StepGroup group{sequences[sequence].get(), tokens, LogitsWanted::kNone};
    ASSERT_TRUE(engine->step(std::span(&group, 1)).has_value());
    ASSERT_TRUE(peer->append(sequence, tokens, 0).has_value());
  }

  /// Appends `tokens` to a sequence of both in one step and calls compare(i, theirs, ours) for each token's logits.
  template <typename Compare>
  void compare(std::uint32_t sequence, std::span<const TokenId> tokens, const Compare& compare_row) {
    const StepGroup group{sequences[sequence].get(), tokens, LogitsWanted::kAll};
    const auto ours = engine->step(std::span(&group, 1));
    ASSERT_TRUE(ours.has_value()) << ours.error().message;
    const auto theirs = peer->append(sequence, tokens, static_cast<std::uint32_t>(tokens.size()));
    ASSERT_TRUE(theirs.has_value()) << theirs.error().message;
    for (std::size_t i = 0; i < tokens.size(); ++i) compare_row(i, *theirs + i * vocabulary(), *ours + i * vocabulary());
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

std::vector<TinyCase> tiny_cases() {
  return {
      {"llama", {}},
      {"llama_tied", {.tied_output = true}},
      {"llama_q8_0", {.type = GGML_TYPE_Q8_0}},
      {"llama_heads_of_64", {.heads = 3, .kv_heads = 1, .head_dim = 64}},
      {"llama3_factors", {.scaling = TinyScaling::kLlama3}},
      {"llama_linear", {.scaling = TinyScaling::kLinear}},
      {"llama_yarn", {.scaling = TinyScaling::kYarn}},
      {"qwen2", {.architecture = "qwen2"}},
      {"qwen2_yarn_tied", {.architecture = "qwen2", .scaling = TinyScaling::kYarn, .tied_output = true}},
      {"qwen3", {.architecture = "qwen3"}},
      {"qwen3_heads_of_32_yarn", {.architecture = "qwen3", .head_dim = 32, .scaling = TinyScaling::kYarn}},
      {"gemma3", {.architecture = "gemma3", .layers = 3, .tied_output = true}},
      {"gemma3_default_pattern", {.architecture = "gemma3", .layers = 7, .edit_keys = [](gguf_context* gguf) {
                                    gguf_remove_key(gguf, "gemma3.attention.sliding_window_pattern");
                                  }}},
      {"gemma3_listed_pattern", {.architecture = "gemma3", .layers = 3, .edit_keys = [](gguf_context* gguf) {
                                   const std::int8_t windowed[] = {0, 1, 1};
                                   gguf_set_arr_data(gguf, "gemma3.attention.sliding_window_pattern", GGUF_TYPE_BOOL,
                                                     windowed, 3);
                                 }}},
      {"gemma3_linear_softcap", {.architecture = "gemma3", .scaling = TinyScaling::kLinear,
                                 .edit_keys = [](gguf_context* gguf) {
                                   gguf_set_val_f32(gguf, "gemma3.final_logit_softcapping", 5.0f);
                                 }}},
      {"gemma3_no_window", {.architecture = "gemma3", .window = 0}},
  };
}

constexpr std::uint32_t kTinyTokens = 300;
constexpr double kTinyKlMean = 1e-5;

class TinyAgreement : public ::testing::TestWithParam<TinyCase> {
 protected:
  void SetUp() override {
    const std::string path = directory_.file("tiny.gguf");
    ASSERT_TRUE(write_tiny_model(path, GetParam().options).has_value());
    pair_ = Pair::load(path, {.threads = 1, .context = 512, .sequences = 3, .prefill_chunk = 128, .outputs_max = 128});
    ASSERT_NE(pair_, nullptr);
  }

  std::vector<TokenId> random_tokens(std::uint64_t seed) const {
    std::mt19937_64 random(seed);
    std::uniform_int_distribution<TokenId> token(0, static_cast<TokenId>(kTinyVocabulary) - 1);
    std::vector<TokenId> tokens(kTinyTokens);
    for (TokenId& t : tokens) t = token(random);
    return tokens;
  }

  void expect_close(const std::string& name, const Divergence& divergence) const {
    print_row(GetParam().name, name, divergence);
    EXPECT_LE(divergence.kl_mean(), kTinyKlMean) << name;
    EXPECT_GE(divergence.same_top(), 0.99) << name;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<Pair> pair_;
};

TEST_P(TinyAgreement, HoldsInChunks) {
  const auto tokens = random_tokens(1);
  Divergence divergence;
  for (std::size_t done = 0; done < tokens.size(); done += 100) {
    pair_->compare(0, std::span(tokens).subspan(done, 100), [&](std::size_t, const float* theirs, const float* ours) {
      divergence.add(theirs, ours, kTinyVocabulary);
    });
  }
  EXPECT_EQ(divergence.positions(), kTinyTokens);
  expect_close("chunks", divergence);
}

TEST_P(TinyAgreement, HoldsInStepsOfOneRow) {
  const auto tokens = random_tokens(2);
  Divergence divergence;
  std::vector<TokenId> tops;
  for (const TokenId& token : tokens) {
    pair_->compare(0, std::span(&token, 1), [&](std::size_t, const float* theirs, const float* ours) {
      divergence.add(theirs, ours, kTinyVocabulary);
      tops.push_back(static_cast<TokenId>(std::max_element(theirs, theirs + kTinyVocabulary) - theirs));
    });
  }
  EXPECT_EQ(divergence.positions(), kTinyTokens);
  expect_close("steps", divergence);
  std::sort(tops.begin(), tops.end());
  tops.erase(std::unique(tops.begin(), tops.end()), tops.end());
  EXPECT_GE(tops.size(), 20U) << "the model's answers hardly depend on its input: agreement would mean little";
}

TEST_P(TinyAgreement, HoldsForSeveralSequencesInOneStep) {
  constexpr std::array<std::uint32_t, 3> kPrompts = {5, 70, 121};
  constexpr std::uint32_t kSteps = 100;
  std::vector<std::vector<TokenId>> tokens;
  for (std::uint32_t i = 0; i < kPrompts.size(); ++i) {
    tokens.push_back(random_tokens(3 + i));
    pair_->pass(i, std::span(tokens[i]).first(kPrompts[i]));
  }
  Divergence divergence;
  for (std::uint32_t s = 0; s < kSteps; ++s) {
    std::vector<TokenId> next;
    std::vector<StepGroup> groups;
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      const auto row = std::span(tokens[i]).subspan(kPrompts[i] + s, 1);
      next.push_back(row[0]);
      groups.push_back({pair_->sequences[i].get(), row, LogitsWanted::kLast});
    }
    const auto ours = pair_->engine->step(groups);
    const auto theirs = pair_->peer->decode(next);
    ASSERT_TRUE(ours.has_value() && theirs.has_value());
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      divergence.add(*theirs + i * kTinyVocabulary, *ours + i * kTinyVocabulary, kTinyVocabulary);
    }
  }
  expect_close("3 sequences", divergence);
}

INSTANTIATE_TEST_SUITE_P(All, TinyAgreement, ::testing::ValuesIn(tiny_cases()),
                         [](const auto& info) { return info.param.name; });

struct RealCase {
  std::string name;
  std::string path;
  std::vector<std::uint32_t> contexts;
};

constexpr std::uint32_t kPositions = 512;      // compared from each context on
constexpr std::uint32_t kSingleRows = 64;      // of them in steps of one row, from context kSingleRowsFrom on
constexpr std::uint32_t kSingleRowsFrom = 500;
constexpr std::uint32_t kChunk = 512;          // rows of a step without logits
constexpr std::uint32_t kCompareChunk = 64;    // rows of a step with logits: Gemma's are 1 MiB a row
constexpr double kRealKlMean = 1e-3;
constexpr double kRealSameTop = 0.99;

/// Where the compared positions lie: position p belongs to context c when p + 1 is in [c, c + kPositions).
struct Schedule {
  std::vector<std::uint32_t> contexts;

  bool compared(std::uint32_t position) const { return in_reach(position, kPositions, 0); }
  bool single(std::uint32_t position) const { return in_reach(position, kSingleRows, kSingleRowsFrom); }
  bool in_reach(std::uint32_t position, std::uint32_t reach, std::uint32_t from) const {
    return std::any_of(contexts.begin(), contexts.end(), [&](std::uint32_t context) {
      return context >= from && position + 1 >= context && position + 1 < context + reach;
    });
  }
  /// Rows of the step that begins at `position`: all alike, as many as one step may have.
  std::uint32_t rows(std::uint32_t position) const {
    if (single(position)) return 1;
    const std::uint32_t most = compared(position) ? kCompareChunk : kChunk;
    std::uint32_t rows = 1;
    while (rows < most && compared(position + rows) == compared(position) && !single(position + rows)) ++rows;
    return rows;
  }
  std::uint32_t tokens() const { return contexts.back() + kPositions - 1; }
};

class RealModel : public ::testing::TestWithParam<RealCase> {};

TEST_P(RealModel, AgreesWithLibllamaOnLongText) {
  const RealCase& real = GetParam();
  const Schedule schedule{real.contexts};
  const auto pair = Pair::load(real.path, {.threads = 2,
                                           .context = schedule.tokens() + 1,
                                           .prefill_chunk = kChunk,
                                           .outputs_max = kCompareChunk});
  ASSERT_NE(pair, nullptr);
  const auto text = read_text_file(DUALDECODER_TEST_DATA "/prose.txt");
  ASSERT_TRUE(text.has_value()) << text.error().message;
  const std::vector<TokenId> tokens = pair->model->vocabulary().tokenize(*text, true, false);
  ASSERT_GE(tokens.size(), schedule.tokens());

  std::vector<Divergence> divergences(real.contexts.size());
  for (std::uint32_t position = 0; position < schedule.tokens();) {
    const std::uint32_t rows = schedule.rows(position);
    const auto step = std::span(tokens).subspan(position, rows);
    if (schedule.compared(position)) {
      pair->compare(0, step, [&](std::size_t i, const float* theirs, const float* ours) {
        const std::uint32_t context = position + static_cast<std::uint32_t>(i) + 1;
        for (std::size_t c = 0; c < real.contexts.size(); ++c) {
          if (context < real.contexts[c] || context >= real.contexts[c] + kPositions) continue;
          divergences[c].add(theirs, ours, pair->vocabulary());
        }
      });
    } else {
      pair->pass(0, step);
    }
    if (HasFatalFailure()) return;
    position += rows;
  }
  for (std::size_t c = 0; c < real.contexts.size(); ++c) {
    print_row(real.name, fmt::format("context {}", real.contexts[c]), divergences[c]);
    EXPECT_EQ(divergences[c].positions(), kPositions);
    EXPECT_LE(divergences[c].kl_mean(), kRealKlMean) << "context " << real.contexts[c];
    EXPECT_GE(divergences[c].same_top(), kRealSameTop) << "context " << real.contexts[c];
  }
}

constexpr char kSmolLm2[] = "SmolLM2-135M-Instruct";

INSTANTIATE_TEST_SUITE_P(
    All, RealModel,
    ::testing::Values(
        RealCase{"SmolLM2_Q4_1", fmt::format("{}/{}.Q4_1.gguf", DUALDECODER_MODELS, kSmolLm2), {1, 500, 6000}},
        RealCase{"SmolLM2_Q8_0", fmt::format("{}/{}.Q8_0.gguf", DUALDECODER_MADE_MODELS, kSmolLm2), {1, 500, 6000}},
        RealCase{"SmolLM2_Q4_0", fmt::format("{}/{}.Q4_0.gguf", DUALDECODER_MADE_MODELS, kSmolLm2), {1, 500, 6000}},
        RealCase{"SmolLM2_F16", fmt::format("{}/{}.F16.gguf", DUALDECODER_MADE_MODELS, kSmolLm2), {1, 500, 6000}},
        // Past 8,192 tokens, far beyond its sliding windows of 512.
        RealCase{"Gemma3_Q4_K_M", DUALDECODER_MODELS "/gemma-3-270m.Q4_K_M.gguf", {1, 500, 6000, 8193}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace dualdecoder

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  dualdecoder::print_header();
  return RUN_ALL_TESTS();
}
