// Which tokens may come next in a text that follows a grammar.
//
// A text that has been read so far leaves a set of stacks: each is one way of going on, a list of places in
// the grammar. Sets that have occurred are kept with a table of where each byte leads, so that most bytes
// cost one look-up; the vocabulary is then checked in a few milliseconds.
//
// An ambiguous grammar can leave ever more stacks. Beyond kStacksMax of them at once, or too much work for
// one token, the matcher gives up: nothing is allowed any more, and exhausted() says why.
//
// A token is allowed when its bytes are; one that ends an answer, when the text may end. Tokens without a
// text (control tokens) are never allowed. State is the text read, and accept() alone changes it. One owner,
// the generation; one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "decode/grammar.h"
#include "model/vocabulary.h"

namespace dualdecoder {

/// The bytes of all tokens in one place. Immutable; shared by matchers.
class TokenTexts {
 public:
  explicit TokenTexts(const Vocabulary& vocabulary);
  /// `ends`: the tokens that end an answer.
  TokenTexts(std::span<const std::string> texts, std::span<const TokenId> ends);

  std::string_view text(TokenId token) const {
    const auto at = static_cast<std::size_t>(token);
    return std::string_view(bytes_).substr(begin_[at], begin_[at + 1] - begin_[at]);
  }
  bool is_end(TokenId token) const { return is_end_[static_cast<std::size_t>(token)]; }
  std::size_t size() const { return is_end_.size(); }

 private:
  void add(std::string_view text, bool is_end);

  std::string bytes_;
  std::vector<std::uint32_t> begin_ = {0};  // [tokens + 1]
  std::vector<bool> is_end_;
};

class GrammarMatcher {
 public:
  static constexpr std::size_t kStacksMax = 4096;

  GrammarMatcher(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const TokenTexts> texts);

  /// Whether `token` may come next. Changes what is kept, not what is said.
  bool allows(TokenId token);
  /// `token` has come: one that is allowed.
  void accept(TokenId token);
  /// The text read so far is one of the grammar's.
  bool complete() const { return states_[current_].complete; }
  /// It gave up.
  bool exhausted() const { return exhausted_; }

 private:
  using Stack = std::vector<std::uint32_t>;  // positions in the grammar, the one at work last
  using Stacks = std::vector<Stack>;         // in order, each once
  static constexpr std::uint32_t kDead = 0;  // the state without stacks
  static constexpr std::uint32_t kUnknown = UINT32_MAX;

  struct State {
    std::array<std::uint32_t, 256> next;
    bool complete = false;
  };

  std::uint32_t walk(std::string_view text);
  std::uint32_t next(std::uint32_t from, std::uint8_t byte);
  Stacks advance(const Stacks& stacks, std::uint8_t byte);
  Stacks expand(std::vector<Stack> todo);
  std::uint32_t intern(Stacks stacks);
  void forget();

  std::shared_ptr<const Grammar> grammar_;
  std::shared_ptr<const TokenTexts> texts_;
  std::map<Stacks, std::uint32_t> ids_;
  std::vector<const Stacks*> stacks_;  // of the states, keys of ids_
  std::vector<State> states_;
  std::uint32_t current_ = kDead;
  std::size_t work_ = 0;  // stack entries looked at since the last token
  bool exhausted_ = false;
};

}  // namespace dualdecoder
