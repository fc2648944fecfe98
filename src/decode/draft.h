// Guesses of one sequence's next token, and what a sequence puts into a step: its newest token, not decoded
// yet, and a guess of the one after it.
//
// A guess comes from real tokens. The first is found by a pass that decodes the newest token as a guess of
// itself and commits nothing ("priming"); the row that follows is the next guess. From then on each right
// guess has decoded what the next one is drawn from, so the chain stays one token ahead. A wrong guess breaks
// it: what the speculated row says then follows a token that never was.
//
// Where the budget has room for the whole context there is nothing to predict, and no guess is made, unless
// it may be accepted.
//
// A draft model (DraftKind::kModel) reads the text along and is asked where the chain has no guess; nothing
// is primed then.
//
// In a batch whose way of decoding is chosen by cost (Policy::kAuto), use() follows the choice.
//
//   const StepGroup group = draft.next(sequence, newest);
//   ... engine.step(...) ...
//   draft.take(sequence, logits, draw);    // draws the next token, or two, or a guess alone
//
// One owner, that of the sequence; the engine's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "decode/engine.h"
#include "decode/follower.h"

namespace dualdecoder {

struct DraftStats {
  std::uint64_t guesses = 0;   // compared with the token that was drawn
  std::uint64_t right = 0;     // of these
  std::uint64_t primings = 0;  // passes that only found a guess
  std::uint64_t accepted = 0;  // right guesses whose successor was committed in the same step

  DraftStats& operator+=(const DraftStats& other);
};

enum class DrawnAs { kToken, kGuess };

class Draft {
 public:
  /// Draws a token for `position` from `logits`. As a kToken it becomes the newest one of the sequence, and
  /// nothing is returned when the sequence ends with it.
  using Draw = std::function<std::optional<TokenId>(std::span<const float> logits, std::uint32_t position,
                                                    DrawnAs drawn_as)>;

  /// `follower`: the draft model's, where it has read some of the text before; else it begins a new one.
  Draft(Engine& engine, const DraftOptions& options, std::shared_ptr<Follower> follower = nullptr);

  /// For the steps to come. N-grams are only found, and a draft model only asked, if it was made for that.
  void use(const DraftOptions& options) {
    options_.kind = options.kind;
    options_.accept = options.accept;
  }

  /// A token of the prompt, or drawn: what n-grams are looked up in, and a draft model reads.
  void remember(TokenId token);
  /// The prompt is in `sequence`, and what follows it was drawn: a draft model reads them and guesses. Left
  /// out, it reads them behind the first step.
  void begin(const Sequence& sequence, const Draw& draw);
  /// What goes into the next step. `newest` is to stay where it is until the step is over. Without
  /// `may_guess` the token alone: for the last one that is wanted.
  StepGroup next(Sequence& sequence, const TokenId& newest, bool may_guess = true);
  /// After that step: `logits`, those of the group's rows.
  void take(Sequence& sequence, const float* logits, const Draw& draw);

  /// Its sequence begins again.
  void forget_guess() {
    guess_.reset();
    primes_ = false;
  }

  /// Its sequence is parked: a draft model's gives its place back, too, and reads the text again later. A
  /// guess stays.
  void rest() {
    if (follower_) follower_->rest();
  }

  const DraftStats& stats() const { return stats_; }

 private:
  bool tells(const Sequence& sequence) const;
  void ask_model(const Sequence& sequence, std::uint32_t position, const Draw& draw);
  std::optional<TokenId> find_ngram() const;

  Engine& engine_;
  DraftOptions options_;
  bool keeps_history_;
  std::vector<TokenId> history_;
  std::shared_ptr<Follower> follower_;  // null without a draft model
  std::optional<TokenId> guess_;
  bool primes_ = false;         // the group of next() does
  std::uint32_t position_ = 0;  // of the token that its first logits are for
  DraftStats stats_;
};

}  // namespace dualdecoder
