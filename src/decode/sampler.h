// Chooses the next token from a row of logits.
//
// Order, as in llama.cpp: logit bias, penalties, top-k, top-p, min-p, temperature, draw. The filters on
// candidates are libllama's. Bias and penalties are our own: they touch a few logits, where libllama's
// penalty sampler looks every token of the vocabulary up (nearly a millisecond at 262,144 tokens), allocates
// its window by the number in the request, and reads penalty_last_n -1 as "off".
//
// The draw is Gumbel-max: of the candidates left, the token with the largest logit + g(seed, position, token)
// wins, which is an exact draw from their softmax (Gumbel 1954). g is computed from these three numbers
// alone, by a counter-based hash (sampler.cc), so that
//   - a seed gives the same text alone, in a batch and after a restart, as long as the logits are the same;
//   - rows sampled for the same position share their noise: two distributions at total variation distance d
//     draw the same token with a probability of at least (1 - d) / (1 + d) (Daliri, Musco and Suresh 2024,
//     arXiv:2408.07978). The speculated row relies on this to guess the real draw as often as possible.
// Greedy (temperature 0) takes the largest logit, of equal ones the lowest token id, and uses neither seed
// nor filters.
//
// Under a grammar, a token that it does not allow is out when the filters are through. Where they have left
// none that is allowed, the grammar comes first: what it does not allow is excluded, and filters and draw
// follow. Either way the noise is the same, so the token is a function of logits, seed, position and the text
// before it. Most tokens cost a look at the few that the filters leave, not at the vocabulary.
//
// State is the penalties' history alone, and accept() alone changes it. One owner, the sequence; one thread
// at a time per Sampler (libllama's filters have buffers inside) and per SamplerScratch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"

struct llama_sampler;
struct llama_token_data;

namespace dualdecoder {

class GrammarMatcher;

/// Defaults are llama.cpp's. validate() says what is allowed.
struct SamplingOptions {
  float temperature = 0.8f;                  // 0: greedy
  std::int32_t top_k = 40;                   // 0: off
  float top_p = 0.95f;                       // 1: off
  float min_p = 0.05f;                       // 0: off
  float repeat_penalty = 1.0f;               // 1: off; logits are divided by it, negative ones multiplied
  float frequency_penalty = 0.0f;            // subtracted once for each time the token occurs
  float presence_penalty = 0.0f;             // subtracted once when the token occurs
  std::int32_t penalty_last_n = 64;          // tokens the three penalties look at; 0: none (off), -1: all
  std::uint64_t seed = 0;                    // all 64 bits count
  std::map<std::int32_t, float> logit_bias;  // token -> added to its logit; -infinity bans the token
  bool ignore_eos = false;                   // ban the tokens that end a generation
};

/// Names the first field that is out of range, its value and what is allowed. `end_tokens` are the tokens
/// that ignore_eos bans.
Status validate(const SamplingOptions& options, std::int32_t vocabulary_size,
                std::span<const std::int32_t> end_tokens = {});

/// The token of the largest logit; of equal ones the first.
std::int32_t likeliest(std::span<const float> logits);

/// A seed nobody chose; below 2^53, so that it survives a JSON number.
std::uint64_t random_seed();

/// Buffers of one step, for any number of samplers that are used one after the other. About 16 bytes per
/// token of the vocabulary, allocated here and not in the step. (Inside libllama a step allocates when top_k
/// is above 128, or off while top_p or min_p is on.)
class SamplerScratch {
 public:
  explicit SamplerScratch(std::int32_t vocabulary_size);
  ~SamplerScratch();
  SamplerScratch(SamplerScratch&&) noexcept;
  SamplerScratch& operator=(SamplerScratch&&) noexcept;

 private:
  friend class Sampler;
  std::vector<float> logits_;                 // [vocabulary] after bias and penalties
  std::vector<float> block_maximum_;          // [blocks of 64 tokens], the largest logit of each
  std::vector<float> block_order_;            // the same, partly sorted
  std::vector<llama_token_data> candidates_;  // [vocabulary]
};

class Sampler {
 public:
  /// `options` have passed validate() with the same arguments.
  Sampler(const SamplingOptions& options, std::int32_t vocabulary_size,
          std::span<const std::int32_t> end_tokens = {});
  ~Sampler();
  Sampler(Sampler&&) noexcept;
  Sampler& operator=(Sampler&&) noexcept;

  /// Adds a committed token, of the prompt or generated, 0 .. vocabulary - 1, to what the penalties look at.
  void accept(std::int32_t token);

  /// The token for `position`, its place in the sequence counted from 0, given the logits of the row before
  /// it, [vocabulary]; -infinity excludes a token. Changes no state: asked again, or for a speculated row, it
  /// answers from the same history. The scratch must be for this vocabulary size; it holds nothing from one
  /// call to the next. NaN or +infinity among the logits gives kInternal; no token left, kInvalidArgument.
  /// `grammar`: what the tokens drawn so far have left of it; null for none. It is asked, and told nothing.
  Result<std::int32_t> sample(std::span<const float> logits, std::uint32_t position, SamplerScratch& scratch,
                              GrammarMatcher* grammar = nullptr) const;

  const SamplingOptions& options() const { return options_; }

 private:
  struct TokenCount {
    std::int32_t token = 0;
    std::uint32_t count = 0;
  };
  struct ChainDeleter {
    void operator()(llama_sampler* chain) const;
  };

  void remember(std::int32_t token);
  void forget(std::int32_t token);
  std::span<const float> edit(std::span<const float> logits, SamplerScratch& scratch) const;
  std::span<const llama_token_data> filter(std::span<const float> logits, float maximum,
                                           SamplerScratch& scratch) const;
  std::int32_t draw(std::span<const llama_token_data> candidates, std::uint32_t position) const;
  std::optional<std::int32_t> draw_allowed(std::span<const float> logits, float maximum,
                                           std::uint32_t position, SamplerScratch& scratch,
                                           GrammarMatcher& grammar) const;

  SamplingOptions options_;
  std::int32_t vocabulary_size_ = 0;
  bool penalises_ = false;
  std::vector<std::pair<std::int32_t, float>> bias_;  // with -infinity for each end token to ignore
  std::unique_ptr<llama_sampler, ChainDeleter> filters_;

  std::vector<std::int32_t> recent_;  // ring of the last penalty_last_n tokens; unused when that is -1
  std::size_t oldest_ = 0;            // in recent_, once it is full
  std::vector<TokenCount> counts_;    // of the tokens in the history, by token id
};

}  // namespace dualdecoder
