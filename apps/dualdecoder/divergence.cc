#include "divergence.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "decode/sampler.h"

namespace dualdecoder {

LogProbabilities log_softmax(std::span<const float> logits) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - max);
  const auto shift = static_cast<float>(max + std::log(sum));
  LogProbabilities result(logits.size());
  std::transform(logits.begin(), logits.end(), result.begin(), [shift](float x) { return x - shift; });
  return result;
}

double kl_divergence(const LogProbabilities& p, const LogProbabilities& q) {
  double sum = 0.0;
  for (std::size_t i = 0; i < p.size(); ++i) sum += std::exp(static_cast<double>(p[i])) * (p[i] - q[i]);
  return sum;
}

Result<DraftStats> decode_forced(Engine& engine, Sequence& sequence, DraftOptions guesses,
                                 std::span<const TokenId> context, std::span<const TokenId> tokens,
                                 const std::function<bool(std::size_t, LogProbabilities)>& body,
                                 std::shared_ptr<Follower> follower) {
  guesses.accept = false;  // the tokens are the text's
  Draft draft(engine, guesses, std::move(follower));
  for (const TokenId token : context) draft.remember(token);
  if (!tokens.empty()) draft.remember(tokens.front());
  const std::uint32_t first = sequence.tokens();
  bool go_on = true;
  for (std::size_t i = 0; i < tokens.size() && go_on;) {
    const StepGroup group = draft.next(sequence, tokens[i], i + 1 < tokens.size());
    const auto logits = engine.step(std::span(&group, 1));
    if (!logits) return std::unexpected(logits.error());
    if (sequence.error()) return std::unexpected(*sequence.error());
    draft.take(sequence, *logits, [&](std::span<const float> row, std::uint32_t position, DrawnAs drawn_as) {
      if (drawn_as == DrawnAs::kGuess) return std::optional(likeliest(row));
      go_on = body(i++, log_softmax(row));
      const std::size_t next = position - first;
      if (next >= tokens.size()) return std::optional<TokenId>();
      draft.remember(tokens[next]);
      return std::optional(tokens[next]);
    });
  }
  return draft.stats();
}

}  // namespace dualdecoder
