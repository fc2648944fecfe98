#include "decode/sampler.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <random>
#include <string_view>

#include <llama.h>

#include "base/check.h"
#include "decode/grammar_matcher.h"

namespace dualdecoder {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kTemperatureMax = 100.0f;
constexpr float kRepeatPenaltyMin = 0.01f;
constexpr float kRepeatPenaltyMax = 100.0f;
constexpr float kPenaltyMax = 100.0f;  // of the frequency and presence penalties, either sign
constexpr float kBiasMax = 10000.0f;

constexpr std::size_t kBlockTokens = 64;
// A logit so far below the largest cannot win: not at the highest temperature, with noise of -3.7 to 36.8.
constexpr float kHopeless = -1e6f;
// Longer histories grow as tokens come, never by the number in a request.
constexpr std::int32_t kHistoryReserve = 1024;

template <typename T>
Status refuse(std::string_view field, T value, std::string_view allowed) {
  return fail(ErrorCode::kInvalidArgument, "{} is {}; allowed: {}", field, value, allowed);
}

// False for NaN.
bool within(float value, float low, float high) { return value >= low && value <= high; }

Status validate_logit_bias(const SamplingOptions& options, std::int32_t vocabulary_size,
                           std::span<const std::int32_t> end_tokens) {
  std::size_t banned = 0;
  for (const auto& [token, bias] : options.logit_bias) {
    if (token < 0 || token >= vocabulary_size) {
      return refuse("token id in logit_bias", token, fmt::format("0 to {}", vocabulary_size - 1));
    }
    if (!within(bias, -kBiasMax, kBiasMax) && bias != -kInfinity) {
      return refuse(fmt::format("logit_bias of token {}", token), bias,
                    fmt::format("-{0} to {0}, or -infinity to ban the token", kBiasMax));
    }
    banned += bias == -kInfinity ? 1 : 0;
  }
  if (options.ignore_eos) {
    std::vector<std::int32_t> ends(end_tokens.begin(), end_tokens.end());
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    for (std::int32_t token : ends) {
      const auto bias = options.logit_bias.find(token);
      banned += bias == options.logit_bias.end() || bias->second != -kInfinity ? 1 : 0;
    }
  }
  if (banned >= static_cast<std::size_t>(vocabulary_size)) {
    return fail(ErrorCode::kInvalidArgument,
                "logit_bias{} bans all {} tokens of the vocabulary; at least one must be left",
                options.ignore_eos ? " with ignore_eos" : "", vocabulary_size);
  }
  return {};
}

// ---- The noise. splitmix64 (Steele, Lea and Flood 2014) used as a counter-based generator: its output
// number `token` of the stream that begins at a hash of seed and position. Two positions' streams overlap
// with a probability of about 2^-45.

constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15;          // splitmix64's increment
constexpr std::uint64_t kPositionGamma = 0xD1342543DE82EF95;  // another odd number: position is not token

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

std::uint64_t noise_stream(std::uint64_t seed, std::uint32_t position) {
  return mix(mix(seed + kGamma) + (std::uint64_t{position} + 1) * kPositionGamma);
}

std::uint64_t noise_bits(std::uint64_t stream, std::int32_t token) {
  return mix(stream + (static_cast<std::uint64_t>(token) + 1) * kGamma);
}

// A Gumbel variate from the upper 52 bits: -log(-log(1 - v)) with v uniform over the centres of 2^52 cells of
// (0, 1). v, not 1 - v, is what has the many digits near 0, and that is where the large values come from: up
// to 36.8.
double gumbel(std::uint64_t bits) {
  const double v = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
  return -std::log(-std::log1p(-v));
}

// Never below gumbel(bits), and far cheaper: v >= 2^-(z + 1) for z leading zeros, and -log(1 - v) >= v.
double gumbel_bound(std::uint64_t bits) { return (std::countl_zero(bits) + 1) * 0.6932; }

// ---- The scan over all logits, the only pass over the whole vocabulary that most steps need.

// Floats in their order, as integers: -NaN < -infinity < ... < -0 < +0 < ... < +infinity < +NaN. The compiler
// makes vector code of integer minima and maxima, and NaN shows in them. Its own inverse.
std::int32_t order_key(std::int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }
std::int32_t order_key(float x) { return order_key(std::bit_cast<std::int32_t>(x)); }

struct Scan {
  float maximum = 0.0f;
  bool sound = false;  // neither NaN nor +infinity
};

// Fills block_maximum, [ceil(tokens / kBlockTokens)].
Scan scan_blocks(std::span<const float> logits, std::span<float> block_maximum) {
  std::int32_t highest = std::numeric_limits<std::int32_t>::min();
  std::int32_t lowest = std::numeric_limits<std::int32_t>::max();
  for (std::size_t block = 0; block < block_maximum.size(); ++block) {
    const float* first = logits.data() + block * kBlockTokens;
    const std::size_t tokens = std::min(kBlockTokens, logits.size() - block * kBlockTokens);
    std::int32_t high = std::numeric_limits<std::int32_t>::min();
    std::int32_t low = std::numeric_limits<std::int32_t>::max();
    for (std::size_t i = 0; i < tokens; ++i) {
      const std::int32_t key = order_key(first[i]);
      high = std::max(high, key);
      low = std::min(low, key);
    }
    block_maximum[block] = std::bit_cast<float>(order_key(high));
    highest = std::max(highest, high);
    lowest = std::min(lowest, low);
  }
  const bool sound = lowest >= order_key(-kInfinity) && highest < order_key(kInfinity);
  return {std::bit_cast<float>(order_key(highest)), sound};
}

std::int32_t first_token_with(std::span<const float> logits, float value,
                              std::span<const float> block_maximum) {
  const auto block = std::find(block_maximum.begin(), block_maximum.end(), value) - block_maximum.begin();
  const auto begin = logits.begin() + block * static_cast<std::ptrdiff_t>(kBlockTokens);
  return static_cast<std::int32_t>(std::find(begin, logits.end(), value) - logits.begin());
}

// A value that at least k logits reach: the k-th largest of the block maxima. -infinity when there are fewer
// blocks.
float top_k_bound(std::int32_t k, std::span<const float> block_maximum, std::span<float> order) {
  if (k <= 0 || static_cast<std::size_t>(k) >= block_maximum.size()) return -kInfinity;
  std::copy(block_maximum.begin(), block_maximum.end(), order.begin());
  std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<>());
  return order[static_cast<std::size_t>(k - 1)];
}

}  // namespace

Status validate(const SamplingOptions& options, std::int32_t vocabulary_size,
                std::span<const std::int32_t> end_tokens) {
  DD_CHECK(vocabulary_size > 0, "vocabulary of {}", vocabulary_size);
  if (!within(options.temperature, 0.0f, kTemperatureMax)) {
    return refuse("temperature", options.temperature, fmt::format("0 (greedy) to {}", kTemperatureMax));
  }
  if (options.top_k < 0) return refuse("top_k", options.top_k, "0 (off) and above");
  if (!within(options.top_p, 0.0f, 1.0f) || options.top_p == 0.0f) {
    return refuse("top_p", options.top_p, "above 0, up to 1 (off)");
  }
  if (!within(options.min_p, 0.0f, 1.0f) || options.min_p == 1.0f) {
    return refuse("min_p", options.min_p, "0 (off) and above, below 1");
  }
  if (!within(options.repeat_penalty, kRepeatPenaltyMin, kRepeatPenaltyMax)) {
    return refuse("repeat_penalty", options.repeat_penalty,
                  fmt::format("{} to {}; 1 is off", kRepeatPenaltyMin, kRepeatPenaltyMax));
  }
  const std::pair<std::string_view, float> additive[] = {{"frequency_penalty", options.frequency_penalty},
                                                         {"presence_penalty", options.presence_penalty}};
  for (const auto& [field, value] : additive) {
    if (!within(value, -kPenaltyMax, kPenaltyMax)) {
      return refuse(field, value, fmt::format("-{0} to {0}", kPenaltyMax));
    }
  }
  if (options.penalty_last_n < -1) {
    return refuse("penalty_last_n", options.penalty_last_n, "-1 (all tokens), 0 (off) and above");
  }
  return validate_logit_bias(options, vocabulary_size, end_tokens);
}

std::int32_t likeliest(std::span<const float> logits) {
  return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

std::uint64_t random_seed() {
  std::uint64_t bits = 0;
  try {
    std::random_device device;
    bits = (std::uint64_t{device()} << 32) ^ device();
  } catch (const std::exception&) {  // no source of randomness in this system: a seed need not be a secret
    bits = mix(static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()));
  }
  return bits >> 11;
}

SamplerScratch::SamplerScratch(std::int32_t vocabulary_size) {
  DD_CHECK(vocabulary_size > 0, "vocabulary of {}", vocabulary_size);
  const auto tokens = static_cast<std::size_t>(vocabulary_size);
  logits_.resize(tokens);
  block_maximum_.resize((tokens + kBlockTokens - 1) / kBlockTokens);
  block_order_.resize(block_maximum_.size());
  candidates_.resize(tokens);
}

SamplerScratch::~SamplerScratch() = default;
SamplerScratch::SamplerScratch(SamplerScratch&&) noexcept = default;
SamplerScratch& SamplerScratch::operator=(SamplerScratch&&) noexcept = default;

void Sampler::ChainDeleter::operator()(llama_sampler* chain) const { llama_sampler_free(chain); }

Sampler::Sampler(const SamplingOptions& options, std::int32_t vocabulary_size,
                 std::span<const std::int32_t> end_tokens)
    : options_(options), vocabulary_size_(vocabulary_size) {
  const Status valid = validate(options, vocabulary_size, end_tokens);
  DD_CHECK(valid.has_value(), "{}", valid.error().message);
  penalises_ =
      options.penalty_last_n != 0 && (options.repeat_penalty != 1.0f || options.frequency_penalty != 0.0f ||
                                      options.presence_penalty != 0.0f);
  if (penalises_) {
    const std::int32_t window = options.penalty_last_n < 0 ? kHistoryReserve : options.penalty_last_n;
    recent_.reserve(static_cast<std::size_t>(std::min(window, kHistoryReserve)));
    counts_.reserve(recent_.capacity() + 1);
  }
  bias_.assign(options.logit_bias.begin(), options.logit_bias.end());
  if (options.ignore_eos) {
    for (std::int32_t token : end_tokens) {
      DD_CHECK(token >= 0 && token < vocabulary_size, "end token {} of {}", token, vocabulary_size);
      bias_.emplace_back(token, -kInfinity);
    }
  }
  if (options.temperature == 0.0f) return;
  filters_.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
  const bool limited = options.top_k < vocabulary_size;  // else libllama sorts everything to leave everything
  llama_sampler_chain_add(filters_.get(), llama_sampler_init_top_k(limited ? options.top_k : 0));
  llama_sampler_chain_add(filters_.get(), llama_sampler_init_top_p(options.top_p, 1));
  llama_sampler_chain_add(filters_.get(), llama_sampler_init_min_p(options.min_p, 1));
  llama_sampler_chain_add(filters_.get(), llama_sampler_init_temp(options.temperature));
}

Sampler::~Sampler() = default;
Sampler::Sampler(Sampler&&) noexcept = default;
Sampler& Sampler::operator=(Sampler&&) noexcept = default;

void Sampler::accept(std::int32_t token) {
  DD_CHECK(token >= 0 && token < vocabulary_size_, "token {} of {}", token, vocabulary_size_);
  if (!penalises_) return;
  if (options_.penalty_last_n > 0) {
    if (recent_.size() < static_cast<std::size_t>(options_.penalty_last_n)) {
      recent_.push_back(token);
    } else {
      forget(std::exchange(recent_[oldest_], token));
      oldest_ = (oldest_ + 1) % recent_.size();
    }
  }
  remember(token);
}

void Sampler::remember(std::int32_t token) {
  const auto place = std::ranges::lower_bound(counts_, token, {}, &TokenCount::token);
  if (place != counts_.end() && place->token == token) {
    ++place->count;
  } else {
    counts_.insert(place, {token, 1});
  }
}

void Sampler::forget(std::int32_t token) {
  const auto place = std::ranges::lower_bound(counts_, token, {}, &TokenCount::token);
  DD_CHECK(place != counts_.end() && place->token == token, "token {} is not in the history", token);
  if (--place->count == 0) counts_.erase(place);
}

Result<std::int32_t> Sampler::sample(std::span<const float> logits, std::uint32_t position,
                                     SamplerScratch& scratch, GrammarMatcher* grammar) const {
  const auto tokens = static_cast<std::size_t>(vocabulary_size_);
  DD_CHECK(logits.size() == tokens && scratch.logits_.size() == tokens,
           "{} logits, scratch for {}, vocabulary of {}", logits.size(), scratch.logits_.size(), tokens);
  if (!bias_.empty() || !counts_.empty()) logits = edit(logits, scratch);
  Scan scan = scan_blocks(logits, scratch.block_maximum_);
  if (!scan.sound) {
    const auto bad = std::find_if(logits.begin(), logits.end(), [](float x) { return !(x < kInfinity); });
    return fail(ErrorCode::kInternal,
                "the logit of token {} for position {} is {}: the model's output is unusable, weights or KV "
                "are damaged",
                bad - logits.begin(), position, *bad);
  }
  if (scan.maximum == -kInfinity) {
    return fail(ErrorCode::kInvalidArgument, "no token is left for position {}: all {} are excluded",
                position, tokens);
  }
  if (grammar != nullptr) {
    if (const auto token = draw_allowed(logits, scan.maximum, position, scratch, *grammar)) return *token;
    std::vector<float>& allowed = scratch.logits_;
    if (logits.data() != allowed.data()) std::copy(logits.begin(), logits.end(), allowed.begin());
    for (std::size_t token = 0; token < tokens; ++token) {
      if (!grammar->allows(static_cast<std::int32_t>(token))) allowed[token] = -kInfinity;
    }
    logits = allowed;
    scan = scan_blocks(logits, scratch.block_maximum_);
    if (scan.maximum == -kInfinity) {
      return fail(ErrorCode::kInvalidArgument, "the grammar allows no token for position {}", position);
    }
  }
  if (options_.temperature == 0.0f) return first_token_with(logits, scan.maximum, scratch.block_maximum_);
  return draw(filter(logits, scan.maximum, scratch), position);
}

// Of the tokens that the filters leave; nothing when the grammar allows none of these.
std::optional<std::int32_t> Sampler::draw_allowed(std::span<const float> logits, float maximum,
                                                  std::uint32_t position, SamplerScratch& scratch,
                                                  GrammarMatcher& grammar) const {
  if (options_.temperature == 0.0f) {
    const std::int32_t likeliest = first_token_with(logits, maximum, scratch.block_maximum_);
    return grammar.allows(likeliest) ? std::optional(likeliest) : std::nullopt;
  }
  const std::span<const llama_token_data> candidates = filter(logits, maximum, scratch);
  const auto end = std::copy_if(candidates.begin(), candidates.end(), scratch.candidates_.begin(),
                                [&](const llama_token_data& c) { return grammar.allows(c.id); });
  const std::span allowed(scratch.candidates_.begin(), end);
  return allowed.empty() ? std::nullopt : std::optional(draw(allowed, position));
}

// Bias and penalties, on a copy.
std::span<const float> Sampler::edit(std::span<const float> logits, SamplerScratch& scratch) const {
  std::vector<float>& edited = scratch.logits_;
  std::copy(logits.begin(), logits.end(), edited.begin());
  for (const auto& [token, bias] : bias_) edited[static_cast<std::size_t>(token)] += bias;
  for (const auto& [token, count] : counts_) {
    float& logit = edited[static_cast<std::size_t>(token)];
    // Keskar et al. 2019 only divide; a negative logit would become more likely by that.
    logit = logit <= 0.0f ? logit * options_.repeat_penalty : logit / options_.repeat_penalty;
    logit -= static_cast<float>(count) * options_.frequency_penalty + options_.presence_penalty;
  }
  return edited;
}

// The candidates that top-k, top-p and min-p leave, with logits divided by the temperature. The chain is
// given only tokens that can be among the top k, and logits less their maximum: the same softmax, and a range
// that libllama's bucket sort, which converts to integers, can hold.
std::span<const llama_token_data> Sampler::filter(std::span<const float> logits, float maximum,
                                                  SamplerScratch& scratch) const {
  const float bound = top_k_bound(options_.top_k, scratch.block_maximum_, scratch.block_order_);
  std::size_t size = 0;
  for (std::size_t block = 0; block < scratch.block_maximum_.size(); ++block) {
    if (scratch.block_maximum_[block] < bound) continue;
    const std::size_t end = std::min((block + 1) * kBlockTokens, logits.size());
    for (std::size_t token = block * kBlockTokens; token < end; ++token) {
      const float logit = logits[token] - maximum;
      if (logits[token] >= bound && logit > kHopeless) {
        scratch.candidates_[size++] = {static_cast<llama_token>(token), logit, 0.0f};
      }
    }
  }
  llama_token_data_array candidates = {scratch.candidates_.data(), size, -1, false};
  llama_sampler_apply(filters_.get(), &candidates);
  return {candidates.data, candidates.size};
}

std::int32_t Sampler::draw(std::span<const llama_token_data> candidates, std::uint32_t position) const {
  const std::uint64_t stream = noise_stream(options_.seed, position);
  double best_score = -std::numeric_limits<double>::infinity();
  std::int32_t best = candidates.front().id;
  for (const llama_token_data& candidate : candidates) {
    const std::uint64_t bits = noise_bits(stream, candidate.id);
    if (candidate.logit + gumbel_bound(bits) < best_score) continue;
    const double score = candidate.logit + gumbel(bits);
    if (score > best_score || (score == best_score && candidate.id < best)) {
      best_score = score;
      best = candidate.id;
    }
  }
  return best;
}

}  // namespace dualdecoder
