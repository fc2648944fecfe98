#include "decode/draft.h"

#include <algorithm>
#include <utility>

namespace dualdecoder {
namespace {

constexpr std::size_t kNgramTokensMax = 3;
constexpr std::size_t kNgramTokensMin = 2;

}  // namespace

DraftStats& DraftStats::operator+=(const DraftStats& other) {
  guesses += other.guesses;
  right += other.right;
  primings += other.primings;
  accepted += other.accepted;
  return *this;
}

void Draft::remember(TokenId token) {
  if (keeps_history_) history_.push_back(token);
}

StepGroup Draft::next(Sequence& sequence, const TokenId& newest, bool may_guess) {
  StepGroup group{.sequence = &sequence, .tokens = std::span(&newest, 1)};
  position_ = sequence.tokens() + 1;
  primes_ = false;
  const bool tells = options_.accept || options_.even_if_all_selected || engine_.needs_prediction(sequence);
  if (options_.kind == DraftKind::kNone || !may_guess || !tells || position_ + 1 > engine_.context()) {
    guess_.reset();
    return group;
  }
  if (!guess_ && options_.kind == DraftKind::kNgram) guess_ = find_ngram();
  // A priming pass buys the guess that the next step would accept: no gain.
  primes_ = !guess_ && !options_.accept;
  if (primes_) group.tokens = {};
  group.guess = primes_ ? newest : guess_;
  return group;
}

void Draft::take(Sequence& sequence, const float* logits, const Draw& draw) {
  const std::size_t vocabulary = engine_.model().vocabulary().size();
  const std::span own(logits, vocabulary);
  const std::optional<TokenId> guess = std::exchange(guess_, std::nullopt);
  if (primes_) {
    ++stats_.primings;
    guess_ = draw(own, position_, DrawnAs::kGuess);
    return;
  }
  const std::optional<TokenId> token = draw(own, position_, DrawnAs::kToken);
  if (!guess || !token) return;
  const std::span behind(logits + vocabulary, vocabulary);
  const bool right = *token == *guess;
  ++stats_.guesses;
  stats_.right += right ? 1 : 0;
  if (right && options_.accept && engine_.accept_guess(sequence)) {
    ++stats_.accepted;
    draw(behind, position_ + 1, DrawnAs::kToken);
  } else if (right || options_.kind == DraftKind::kKeep) {
    guess_ = draw(behind, position_ + 1, DrawnAs::kGuess);
  }
}

// What followed the last time that the newest tokens stood together.
std::optional<TokenId> Draft::find_ngram() const {
  for (std::size_t count = kNgramTokensMax; count >= kNgramTokensMin; --count) {
    if (history_.size() <= count) continue;
    const auto newest = history_.rbegin();
    const auto found =
        std::search(newest + 1, history_.rend(), newest, newest + static_cast<std::ptrdiff_t>(count));
    if (found != history_.rend()) return *(found - 1);
  }
  return std::nullopt;
}

}  // namespace dualdecoder
