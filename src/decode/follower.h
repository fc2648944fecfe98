// A draft model reading along: a sequence of its engine that follows a text and says what may come next.
//
// What is new of the text since the last call is put in, in one pass, and where the text has changed the
// sequence is cut back first. So it only ever holds tokens of the text, never guesses. One owner, that of the
// text; the engine's thread.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "decode/engine.h"

namespace dualdecoder {

class Follower {
 public:
  /// `draft`: with a place for this sequence; outlives it.
  explicit Follower(Engine& draft) : draft_(draft) {}

  /// Logits [vocabulary] of the token behind `text`, valid until the engine's next call. Nothing where the
  /// draft model cannot follow: the text is empty, beyond its context, or holds what is no token.
  std::optional<std::span<const float>> next(std::span<const TokenId> text);
  /// Gives its place back; the next call reads the text from its beginning.
  void rest();

 private:
  Engine& draft_;
  std::unique_ptr<Sequence> sequence_;
  std::vector<TokenId> tokens_;  // of sequence_
};

/// kInvalidArgument unless both have the same tokens: names both sizes, or the first token that differs.
Status check_same_vocabulary(const Model& model, const Model& draft);

}  // namespace dualdecoder
