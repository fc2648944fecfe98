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

Draft::Draft(Engine& engine, const DraftOptions& options, std::shared_ptr<Follower> follower)
    : engine_(engine),
      options_(options),
      keeps_history_(options.kind == DraftKind::kNgram || options.kind == DraftKind::kModel),
      follower_(std::move(follower)) {
  if (options.kind == DraftKind::kModel && !follower_)
    follower_ = std::make_shared<Follower>(*engine.draft());
}

void Draft::remember(TokenId token) {
  if (keeps_history_) history_.push_back(token);
}

void Draft::begin(const Sequence& sequence, const Draw& draw) {
  ask_model(sequence, sequence.tokens() + 1, draw);
}

StepGroup Draft::next(Sequence& sequence, const TokenId& newest, bool may_guess) {
  StepGroup group{.sequence = &sequence, .tokens = std::span(&newest, 1)};
  position_ = sequence.tokens() + 1;
  primes_ = false;
  if (!may_guess || !tells(sequence) || position_ + 1 > engine_.context()) {
    guess_.reset();
    return group;
  }
  if (!guess_ && options_.kind == DraftKind::kNgram) guess_ = find_ngram();
  // A priming pass buys the guess that the next step would accept, or that a draft model gives: no gain.
  primes_ = !guess_ && !options_.accept && options_.kind != DraftKind::kModel;
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
  std::optional<TokenId> newest = draw(own, position_, DrawnAs::kToken);
  std::uint32_t position = position_;  // of `newest`
  if (guess && newest) {
    const std::span behind(logits + vocabulary, vocabulary);
    const bool right = *newest == *guess;
    ++stats_.guesses;
    stats_.right += right ? 1 : 0;
    if (right && options_.accept && engine_.accept_guess(sequence)) {
      ++stats_.accepted;
      newest = draw(behind, ++position, DrawnAs::kToken);
    } else if (right || options_.kind == DraftKind::kKeep) {
      guess_ = draw(behind, position + 1, DrawnAs::kGuess);
    }
  }
  if (!guess_ && newest) ask_model(sequence, position + 1, draw);
}

void Draft::ask_model(const Sequence& sequence, std::uint32_t position, const Draw& draw) {
  if (options_.kind != DraftKind::kModel || !tells(sequence)) return;
  if (const auto logits = follower_->next(history_)) guess_ = draw(*logits, position, DrawnAs::kGuess);
}

// Whether a guess in the next step would be of any use.
bool Draft::tells(const Sequence& sequence) const {
  if (options_.kind == DraftKind::kNone) return false;
  return options_.accept || options_.even_if_all_selected || engine_.needs_prediction(sequence);
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
