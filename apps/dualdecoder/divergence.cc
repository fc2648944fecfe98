#include "divergence.h"

#include <algorithm>
#include <cmath>

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

Result<DraftStats> decode_forced(Engine& engine, Sequence& sequence, DraftKind guesses,
                                 std::span<const TokenId> tokens,
                                 const std::function<bool(std::size_t, LogProbabilities)>& body) {
  Draft draft(engine, {.kind = guesses, .accept = false});
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
      return next < tokens.size() ? std::optional(tokens[next]) : std::nullopt;
    });
  }
  return draft.stats();
}

}  // namespace dualdecoder
