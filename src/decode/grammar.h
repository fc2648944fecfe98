// Grammars that a text is to follow, written in llama.cpp's GBNF, compiled to rules over bytes.
//
//   root   ::= "{" pair ("," pair)* "}"      # a rule named root is where a text begins
//   pair   ::= [a-z]{1,8} ":" number?
//   number ::= "-"? [0-9]+
//
// Characters become the bytes of their UTF-8, so what a grammar lets through is well-formed. S{m,n} takes a
// number of rules logarithmic in m and n. Refused are left recursion, rules that are missing or defined
// twice, and llama.cpp's tokens in angle brackets.
//
// libllama's own grammars are not used: they print a text that they cannot read, never return from S{2,1},
// and keep every way of reading a text as a stack of its own, of which ten characters can make thousands. The
// tests compare with them.
//
// Pure and immutable; any thread.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace dualdecoder {

inline constexpr std::size_t kGrammarBytesMax = 256 * 1024;
inline constexpr std::size_t kGrammarRulesMax = 20'000;     // those of groups and repetitions too
inline constexpr std::size_t kGrammarSymbolsMax = 200'000;  // of all rules
inline constexpr std::size_t kGrammarDepthMax = 100;        // of parentheses

class Grammar {
 public:
  using ByteSet = std::bitset<256>;
  struct Symbol {
    enum class Kind : std::uint8_t { kBytes, kRule, kEnd };
    Kind kind = Kind::kEnd;
    std::uint32_t index = 0;  // of the set of bytes, or of the rule
    bool operator==(const Symbol&) const = default;
  };

  /// kInvalidArgument naming the line, or the rule, and what is wrong.
  static Result<std::shared_ptr<const Grammar>> parse(std::string_view gbnf);

  /// A rule's alternatives, as positions of their first symbols; those that follow have the next positions,
  /// up to a kEnd.
  std::span<const std::uint32_t> alternatives(std::uint32_t rule) const { return rules_[rule]; }
  const Symbol& symbol(std::uint32_t position) const { return symbols_[position]; }
  bool is_end(std::uint32_t position) const { return symbols_[position].kind == Symbol::Kind::kEnd; }
  const ByteSet& bytes(std::uint32_t set) const { return sets_[set]; }
  std::uint32_t root() const { return root_; }
  std::size_t rules() const { return rules_.size(); }

 private:
  friend class GrammarCompiler;
  std::vector<std::vector<std::uint32_t>> rules_;
  std::vector<Symbol> symbols_;
  std::vector<ByteSet> sets_;
  std::uint32_t root_ = 0;
};

}  // namespace dualdecoder
