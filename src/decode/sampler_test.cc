#include "decode/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <llama.h>

namespace dualdecoder {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Nothing but the draw: temperature 1, no filter.
SamplingOptions plain(std::uint64_t seed = 1) {
  SamplingOptions options;
  options.temperature = 1.0f;
  options.top_k = 0;
  options.top_p = 1.0f;
  options.min_p = 0.0f;
  options.seed = seed;
  return options;
}

SamplingOptions greedy() {
  SamplingOptions options;
  options.temperature = 0.0f;
  return options;
}

std::vector<float> random_logits(std::size_t tokens, float deviation, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(3.0f, deviation);
  std::vector<float> logits(tokens);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

std::int32_t size_of(const std::vector<float>& logits) { return static_cast<std::int32_t>(logits.size()); }

// One sampler with its own scratch, for one row of logits at a time.
struct Row {
  explicit Row(const SamplingOptions& options, std::int32_t vocabulary,
               std::vector<std::int32_t> end_tokens = {})
      : sampler(options, vocabulary, end_tokens), scratch(vocabulary) {}

  std::int32_t at(std::uint32_t position, const std::vector<float>& logits) {
    const Result<std::int32_t> token = sampler.sample(logits, position, scratch);
    EXPECT_TRUE(token.has_value()) << token.error().message;
    return token.value_or(-1);
  }
  Error error(const std::vector<float>& logits) {
    const Result<std::int32_t> token = sampler.sample(logits, 7, scratch);
    return token.has_value() ? Error{ErrorCode::kNotFound, "no error"} : token.error();
  }

  Sampler sampler;
  SamplerScratch scratch;
};

std::vector<double> softmax(const std::vector<float>& logits) {
  const double maximum = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p;
  double sum = 0.0;
  for (float logit : logits) p.push_back(std::exp(logit - maximum));
  for (double x : p) sum += x;
  for (double& x : p) x /= sum;
  return p;
}

// What libllama's samplers make of the logits: the reference for every filter.
class LlamaChain {
 public:
  LlamaChain() : chain_(llama_sampler_chain_init(llama_sampler_chain_default_params()), llama_sampler_free) {}

  LlamaChain& add(llama_sampler* sampler) {
    llama_sampler_chain_add(chain_.get(), sampler);
    return *this;
  }
  void accept(std::int32_t token) { llama_sampler_accept(chain_.get(), token); }

  // -infinity for what was filtered out.
  std::vector<float> apply(const std::vector<float>& logits) {
    std::vector<llama_token_data> data;
    for (float logit : logits) data.push_back({static_cast<llama_token>(data.size()), logit, 0.0f});
    llama_token_data_array array = {data.data(), data.size(), -1, false};
    llama_sampler_apply(chain_.get(), &array);
    std::vector<float> left(logits.size(), -kInfinity);
    for (std::size_t i = 0; i < array.size; ++i)
      left[static_cast<std::size_t>(array.data[i].id)] = array.data[i].logit;
    return left;
  }

 private:
  std::unique_ptr<llama_sampler, void (*)(llama_sampler*)> chain_;
};

// How far counts are from p, in standard deviations of chi-square; cells that expect fewer than 5 are taken
// together.
double chi_square_excess(const std::vector<int>& counts, const std::vector<double>& p, int draws) {
  double chi_square = 0.0;
  double rest_expected = 0.0;
  int rest = 0;
  int cells = 0;
  const auto add = [&](double expected, int count) {
    chi_square += (count - expected) * (count - expected) / expected;
    ++cells;
  };
  for (std::size_t i = 0; i < p.size(); ++i) {
    if (p[i] * draws >= 5.0) {
      add(p[i] * draws, counts[i]);
    } else {
      rest_expected += p[i] * draws;
      rest += counts[i];
    }
  }
  if (rest_expected >= 1.0) add(rest_expected, rest);
  const double freedom = std::max(cells - 1, 1);
  return (chi_square - freedom) / std::sqrt(2.0 * freedom);
}

// Draws at many positions and compares with the softmax of what libllama's filters leave.
void expect_distribution(const SamplingOptions& options, const std::vector<float>& logits,
                         LlamaChain& reference, int draws) {
  const std::vector<double> p = softmax(reference.apply(logits));
  Row row(options, size_of(logits));
  std::vector<int> counts(logits.size(), 0);
  for (int i = 0; i < draws; ++i)
    ++counts[static_cast<std::size_t>(row.at(static_cast<std::uint32_t>(i), logits))];
  for (std::size_t token = 0; token < p.size(); ++token) {
    if (p[token] > 0.0) continue;
    ASSERT_EQ(counts[token], 0) << "token " << token << " was filtered out and drawn";
  }
  EXPECT_LT(chi_square_excess(counts, p, draws), 4.0) << "seed " << options.seed;
}

TEST(Sampler, DrawsFromTheSoftmax) {
  LlamaChain all;
  for (std::uint64_t seed : {0ull, 42ull, ~0ull}) {
    expect_distribution(plain(seed), random_logits(10, 1.5f, 5), all, 50000);
    expect_distribution(plain(seed), random_logits(1000, 2.0f, 6), all, 20000);
    expect_distribution(plain(seed), std::vector<float>(64, -7.0f), all, 50000);
  }
}

TEST(Sampler, DrawsFromTheSoftmaxOverSeedsAtOnePosition) {
  const std::vector<float> logits = random_logits(20, 1.0f, 8);
  std::vector<int> counts(logits.size(), 0);
  SamplerScratch scratch(size_of(logits));
  for (std::uint64_t seed = 0; seed < 50000; ++seed) {
    const Sampler sampler(plain(seed), size_of(logits));
    ++counts[static_cast<std::size_t>(sampler.sample(logits, 3, scratch).value())];
  }
  EXPECT_LT(chi_square_excess(counts, softmax(logits), 50000), 4.0);
}

TEST(Sampler, DrawsAtNeighbouringPositionsAndSeedsIndependently) {
  const std::vector<float> logits(4, 0.0f);
  Row a(plain(10), 4);
  Row b(plain(11), 4);
  std::vector<int> positions(16, 0);
  std::vector<int> seeds(16, 0);
  for (std::uint32_t i = 0; i < 40000; ++i) {
    const auto here = static_cast<std::size_t>(a.at(i, logits));
    ++positions[here * 4 + static_cast<std::size_t>(a.at(i + 1, logits))];
    ++seeds[here * 4 + static_cast<std::size_t>(b.at(i, logits))];
  }
  EXPECT_LT(chi_square_excess(positions, std::vector<double>(16, 1.0 / 16), 40000), 4.0);
  EXPECT_LT(chi_square_excess(seeds, std::vector<double>(16, 1.0 / 16), 40000), 4.0);
}

TEST(Sampler, TopKLeavesWhatLlamaLeaves) {
  for (std::int32_t k : {1, 3, 40, 200, 5000, 9999}) {  // by the block maxima; bucket sort from 129 on; off
    SamplingOptions options = plain();
    options.top_k = k;
    expect_distribution(options, random_logits(5000, 1.0f, 11), LlamaChain().add(llama_sampler_init_top_k(k)),
                        4000);
  }
}

TEST(Sampler, TopPAndMinPLeaveWhatLlamaLeaves) {
  for (float p : {0.01f, 0.5f, 0.95f}) {
    for (std::size_t vocabulary : {100u, 3000u}) {  // libllama's top-p sorts in place, or by parts
      const std::vector<float> logits = random_logits(vocabulary, 3.0f, 12);
      SamplingOptions top_p = plain();
      top_p.top_p = p;
      expect_distribution(top_p, logits, LlamaChain().add(llama_sampler_init_top_p(p, 1)), 2000);
      SamplingOptions min_p = plain();
      min_p.min_p = p;
      expect_distribution(min_p, logits, LlamaChain().add(llama_sampler_init_min_p(p, 1)), 2000);
    }
  }
}

TEST(Sampler, DefaultsDrawWhatLlamasDefaultChainLeaves) {
  for (float temperature : {0.8f, 1.7f, 0.01f}) {
    SamplingOptions options;
    options.seed = 99;
    options.temperature = temperature;
    LlamaChain reference;
    reference.add(llama_sampler_init_top_k(40)).add(llama_sampler_init_top_p(0.95f, 1));
    reference.add(llama_sampler_init_min_p(0.05f, 1)).add(llama_sampler_init_temp(temperature));
    expect_distribution(options, random_logits(49152, 1.5f, 14), reference, 1000);
  }
}

TEST(Sampler, BiasAndPenaltiesEqualLlamasOnAMovingWindow) {
  const std::uint32_t seed = 77;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const std::int32_t vocabulary = 200;
  for (std::int32_t window : {1, 5, 64, -1}) {
    SamplingOptions options = plain(seed);
    options.repeat_penalty = 1.3f;
    options.frequency_penalty = 0.2f;
    options.presence_penalty = -0.4f;
    options.penalty_last_n = window;
    options.logit_bias = {{3, 2.5f}, {4, -kInfinity}, {150, -1.0f}};
    const std::vector<llama_logit_bias> bias = {{3, 2.5f}, {4, -kInfinity}, {150, -1.0f}};
    LlamaChain reference;
    reference.add(llama_sampler_init_logit_bias(vocabulary, 3, bias.data()));
    reference.add(llama_sampler_init_penalties(vocabulary, window < 0 ? 100000 : window, 1.3f, 0.2f, -0.4f));
    Row ours(options, vocabulary);
    Row unedited(plain(seed), vocabulary);
    options.temperature = 0.0f;
    Row ours_greedy(options, vocabulary);
    Row unedited_greedy(greedy(), vocabulary);
    for (std::uint32_t position = 0; position < 400; ++position) {
      const std::vector<float> logits = random_logits(static_cast<std::size_t>(vocabulary), 3.0f, position);
      const std::vector<float> edited = reference.apply(logits);
      ASSERT_EQ(ours.at(position, logits), unedited.at(position, edited)) << "window " << window;
      ASSERT_EQ(ours_greedy.at(position, logits), unedited_greedy.at(position, edited));
      const auto token = static_cast<std::int32_t>(random() % 30 + (position % 2) * 150);
      ours.sampler.accept(token);
      ours_greedy.sampler.accept(token);
      reference.accept(token);
    }
  }
}

TEST(Sampler, BiasForcesBansAndIgnoresEndTokens) {
  const std::vector<float> logits = random_logits(100, 1.0f, 15);
  SamplingOptions force = plain();
  force.logit_bias = {{17, 100.0f}};
  SamplingOptions ban = plain();
  for (std::int32_t token = 0; token < 100; ++token) {
    if (token != 17 && token != 18) ban.logit_bias[token] = -kInfinity;
  }
  SamplingOptions no_end = ban;
  no_end.ignore_eos = true;
  Row forced(force, 100);
  Row banned(ban, 100);
  Row endless(no_end, 100, {18, 90});
  std::set<std::int32_t> drawn;
  for (std::uint32_t position = 0; position < 200; ++position) {
    EXPECT_EQ(forced.at(position, logits), 17);
    EXPECT_EQ(endless.at(position, logits), 17);
    drawn.insert(banned.at(position, logits));
  }
  EXPECT_EQ(drawn, (std::set<std::int32_t>{17, 18}));
}

TEST(Sampler, UniformBiasOverTheWholeVocabularyChangesNothing) {
  SamplingOptions options = plain(5);
  for (std::int32_t token = 0; token < 50; ++token) options.logit_bias[token] = -100.0f;
  Row biased(options, 50);
  Row unbiased(plain(5), 50);
  const std::vector<float> logits(50, 0.0f);
  for (std::uint32_t position = 0; position < 100; ++position) {
    EXPECT_EQ(biased.at(position, logits), unbiased.at(position, logits));
  }
}

TEST(Sampler, GreedyTakesTheLargestLogitAndOfEqualOnesTheLowestToken) {
  for (std::size_t vocabulary : {1u, 63u, 64u, 65u, 200u, 1000u}) {
    std::vector<float> logits = random_logits(vocabulary, 1.0f, 16);
    Row row(greedy(), size_of(logits));
    const auto largest = std::max_element(logits.begin(), logits.end()) - logits.begin();
    EXPECT_EQ(row.at(0, logits), largest);
    for (std::size_t token : {vocabulary - 1, vocabulary / 2, vocabulary / 3}) {
      logits[token] = 50.0f;
      EXPECT_EQ(row.at(0, logits), static_cast<std::int32_t>(token));
    }
  }
  SamplingOptions options = greedy();  // in which seed and filters have no say
  options.seed = 12345;
  options.top_k = 1;
  options.top_p = 0.1f;
  Row row(options, 130);
  std::vector<float> zeros(130, -1.0f);
  zeros[70] = -0.0f;  // equals the zero after it
  zeros[129] = 0.0f;
  for (std::uint32_t position = 0; position < 20; ++position) EXPECT_EQ(row.at(position, zeros), 70);
}

TEST(Sampler, SameSeedGivesSameTokensAloneAmongOthersAndAfterARestart) {
  const std::int32_t vocabulary = 500;
  const auto logits = [](std::uint32_t position) { return random_logits(500, 2.0f, position); };
  SamplingOptions options;
  options.seed = 42;
  options.temperature = 1.0f;
  options.repeat_penalty = 1.1f;
  std::vector<std::int32_t> alone;
  Row row(options, vocabulary);
  for (std::uint32_t position = 0; position < 64; ++position) {
    alone.push_back(row.at(position, logits(position)));
    row.sampler.accept(alone.back());
  }
  SamplerScratch scratch(vocabulary);  // shared by all rows of the batch
  Sampler again(options, vocabulary);
  options.seed = 43;
  Sampler other(options, vocabulary);
  int same = 0;
  for (std::uint32_t position = 0; position < 64; ++position) {
    const std::vector<float> row_logits = logits(position);
    const std::int32_t speculated = again.sample(row_logits, position, scratch).value();
    const std::int32_t others = other.sample(row_logits, position, scratch).value();
    const std::int32_t real = again.sample(row_logits, position, scratch).value();
    ASSERT_EQ(real, alone[position]);
    ASSERT_EQ(speculated, real) << "sampling changed the state";
    again.accept(real);
    other.accept(others);
    same += others == real ? 1 : 0;
    Sampler moved = std::move(again);
    again = std::move(moved);
  }
  EXPECT_LT(same, 40);
}

// The noise is part of what a seed means: a change here changes every sampled text, and must be declared.
TEST(Sampler, SeedMeansTheSameNoiseInEveryVersion) {
  const std::vector<float> logits(1000, 0.0f);
  Row row(plain(42), 1000);
  std::vector<std::int32_t> tokens;
  for (std::uint32_t position = 0; position < 8; ++position) tokens.push_back(row.at(position, logits));
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{333, 300, 163, 765, 717, 871, 392, 383}));
}

TEST(Sampler, EveryBitOfTheSeedCounts) {
  const std::vector<float> logits(1000, 0.0f);
  std::set<std::vector<std::int32_t>> texts;
  std::vector<std::uint64_t> seeds = {0, (1ull << 32) + 1, ~0ull};  // and every single bit
  for (int bit = 0; bit < 64; ++bit) seeds.push_back(1ull << bit);
  for (std::uint64_t seed : seeds) {
    Row row(plain(seed), 1000);
    texts.insert({row.at(0, logits), row.at(1, logits), row.at(2, logits), row.at(3, logits)});
  }
  EXPECT_EQ(texts.size(), seeds.size());
}

TEST(Sampler, NearDistributionsDrawTheSameTokenAtTheSamePosition) {
  const std::vector<float> p_logits = random_logits(1000, 2.0f, 18);
  std::vector<float> q_logits = random_logits(1000, 0.3f, 19);
  for (std::size_t i = 0; i < q_logits.size(); ++i) q_logits[i] += p_logits[i];
  const std::vector<double> p = softmax(p_logits);
  const std::vector<double> q = softmax(q_logits);
  double distance = 0.0;  // total variation
  for (std::size_t i = 0; i < p.size(); ++i) distance += 0.5 * std::abs(p[i] - q[i]);
  ASSERT_GT(distance, 0.05);

  Row real(plain(20), 1000);
  Row guess(plain(20), 1000);
  Row independent(plain(21), 1000);
  const int draws = 20000;
  double coupled = 0.0;
  double uncoupled = 0.0;
  for (std::uint32_t position = 0; position < draws; ++position) {
    const std::int32_t token = real.at(position, p_logits);
    coupled += guess.at(position, q_logits) == token ? 1.0 / draws : 0.0;
    uncoupled += independent.at(position, q_logits) == token ? 1.0 / draws : 0.0;
  }
  EXPECT_GT(coupled, (1.0 - distance) / (1.0 + distance) - 0.02) << "distance " << distance;
  EXPECT_LE(coupled, 1.0 - distance + 0.02) << "above what any coupling can reach";
  EXPECT_LT(uncoupled, 0.5 * coupled);
}

TEST(Sampler, UnsoundLogitsAreAnErrorThatNamesTheToken) {
  for (const SamplingOptions& options : {greedy(), plain(), SamplingOptions{}}) {
    Row row(options, 200);
    for (float bad : {kNan, -kNan, kInfinity}) {
      std::vector<float> logits = random_logits(200, 1.0f, 22);
      logits[131] = bad;
      const Error error = row.error(logits);
      EXPECT_EQ(error.code, ErrorCode::kInternal);
      EXPECT_TRUE(error.message.starts_with("the logit of token 131 for position 7 is ")) << error.message;
      EXPECT_EQ(row.error(std::vector<float>(200, bad)).code, ErrorCode::kInternal);
    }
    const Error none = row.error(std::vector<float>(200, -kInfinity));
    EXPECT_EQ(none.code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(none.message, "no token is left for position 7: all 200 are excluded");
    std::vector<float> one(200, -kInfinity);
    one[5] = -3e38f;
    EXPECT_EQ(row.at(0, one), 5);
    one[6] = 3e38f;
    EXPECT_EQ(row.at(0, one), 6);
  }
}

TEST(Sampler, ExtremeOptionsStillDraw) {
  const std::vector<float> logits = random_logits(2000, 5.0f, 23);
  const auto largest =
      static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  SamplingOptions cold = plain();
  cold.temperature = std::numeric_limits<float>::denorm_min();
  SamplingOptions narrow = plain();
  narrow.top_p = std::numeric_limits<float>::min();
  SamplingOptions strict = plain();
  strict.min_p = 0.99999994f;
  SamplingOptions wide;
  wide.top_k = std::numeric_limits<std::int32_t>::max();
  wide.repeat_penalty = 1.5f;
  wide.penalty_last_n = std::numeric_limits<std::int32_t>::max();  // must not be allocated
  for (const SamplingOptions& options : {cold, narrow, strict})
    EXPECT_EQ(Row(options, 2000).at(9, logits), largest);
  Row row(wide, 2000);
  row.sampler.accept(largest);
  EXPECT_GE(row.at(9, logits), 0);
}

std::string refusal(const SamplingOptions& options, std::span<const std::int32_t> end_tokens = {}) {
  const Status status = validate(options, 10, end_tokens);
  if (status.has_value()) return "";
  EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
  return status.error().message;
}

TEST(SamplingOptions, MessageNamesFieldValueAndAllowedRange) {
  using O = SamplingOptions;
  const auto with = [](auto change) {
    SamplingOptions options;
    change(options);
    return refusal(options);
  };
  EXPECT_EQ(with([](O& o) { o.temperature = -1; }), "temperature is -1; allowed: 0 (greedy) to 100");
  EXPECT_EQ(with([](O& o) { o.temperature = kNan; }), "temperature is nan; allowed: 0 (greedy) to 100");
  EXPECT_EQ(with([](O& o) { o.temperature = kInfinity; }), "temperature is inf; allowed: 0 (greedy) to 100");
  EXPECT_EQ(with([](O& o) { o.top_k = -1; }), "top_k is -1; allowed: 0 (off) and above");
  EXPECT_EQ(with([](O& o) { o.top_p = 1.5f; }), "top_p is 1.5; allowed: above 0, up to 1 (off)");
  EXPECT_EQ(with([](O& o) { o.top_p = 0; }), "top_p is 0; allowed: above 0, up to 1 (off)");
  EXPECT_EQ(with([](O& o) { o.min_p = 1; }), "min_p is 1; allowed: 0 (off) and above, below 1");
  EXPECT_EQ(with([](O& o) { o.repeat_penalty = 0; }), "repeat_penalty is 0; allowed: 0.01 to 100; 1 is off");
  EXPECT_EQ(with([](O& o) { o.frequency_penalty = 101; }), "frequency_penalty is 101; allowed: -100 to 100");
  EXPECT_EQ(with([](O& o) { o.presence_penalty = kNan; }), "presence_penalty is nan; allowed: -100 to 100");
  EXPECT_EQ(with([](O& o) { o.penalty_last_n = -2; }),
            "penalty_last_n is -2; allowed: -1 (all tokens), 0 (off) and above");
  EXPECT_EQ(with([](O& o) { o.logit_bias[10] = 1; }), "token id in logit_bias is 10; allowed: 0 to 9");
  EXPECT_EQ(with([](O& o) { o.logit_bias[-1] = 1; }), "token id in logit_bias is -1; allowed: 0 to 9");
  EXPECT_EQ(with([](O& o) { o.logit_bias[5] = 1e9f; }),
            "logit_bias of token 5 is 1000000000; allowed: -10000 to 10000, or -infinity to ban the token");
  EXPECT_EQ(with([](O& o) { o.logit_bias[5] = kInfinity; }),
            "logit_bias of token 5 is inf; allowed: -10000 to 10000, or -infinity to ban the token");
}

TEST(SamplingOptions, AcceptsDefaultsAndTheEndsOfEveryRange) {
  EXPECT_EQ(refusal({}), "");
  SamplingOptions low = plain();
  low.temperature = 0.0f;
  low.repeat_penalty = 0.01f;
  low.frequency_penalty = -100.0f;
  low.penalty_last_n = -1;
  low.logit_bias = {{0, -kInfinity}, {9, -10000.0f}};
  EXPECT_EQ(refusal(low), "");
  SamplingOptions high;
  high.temperature = 100.0f;
  high.top_k = std::numeric_limits<std::int32_t>::max();
  high.presence_penalty = 100.0f;
  high.penalty_last_n = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(refusal(high), "");
}

TEST(SamplingOptions, RefusesToBanTheWholeVocabulary) {
  SamplingOptions options;
  for (std::int32_t token = 0; token < 9; ++token) options.logit_bias[token] = -kInfinity;
  const std::vector<std::int32_t> end_tokens = {9, 9, 3};
  EXPECT_EQ(refusal(options, end_tokens), "");
  options.ignore_eos = true;
  EXPECT_EQ(refusal(options), "");
  EXPECT_EQ(refusal(options, end_tokens),
            "logit_bias with ignore_eos bans all 10 tokens of the vocabulary; at least one must be left");
  options.ignore_eos = false;
  options.logit_bias[9] = -kInfinity;
  EXPECT_EQ(refusal(options), "logit_bias bans all 10 tokens of the vocabulary; at least one must be left");
}

TEST(RandomSeed, DiffersEachTimeAndFitsAJsonNumber) {
  std::set<std::uint64_t> seeds;
  for (int i = 0; i < 100; ++i) seeds.insert(random_seed());
  EXPECT_EQ(seeds.size(), 100u);
  EXPECT_LT(*seeds.rbegin(), 1ull << 53);
}

}  // namespace
}  // namespace dualdecoder
