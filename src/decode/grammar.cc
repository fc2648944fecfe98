#include "decode/grammar.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace dualdecoder {
namespace {

using Symbol = Grammar::Symbol;
using Symbols = std::vector<Symbol>;

constexpr char32_t kCharacterMax = 0x10FFFF;
constexpr char32_t kSurrogateFirst = 0xD800;
constexpr char32_t kSurrogateLast = 0xDFFF;
constexpr std::uint64_t kTimesMax = 1'000'000'000;
constexpr std::size_t kQuotedBytesMax = 40;

struct CharacterRange {
  char32_t low = 0;
  char32_t high = 0;
  auto operator<=>(const CharacterRange&) const = default;
};

bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-';
}
bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string utf8(char32_t c) {
  std::string bytes;
  const auto add = [&bytes](char32_t byte) { bytes += static_cast<char>(byte); };
  if (c < 0x80) {
    add(c);
  } else if (c < 0x800) {
    add(0xC0 | c >> 6);
    add(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    add(0xE0 | c >> 12);
    add(0x80 | (c >> 6 & 0x3F));
    add(0x80 | (c & 0x3F));
  } else {
    add(0xF0 | c >> 18);
    add(0x80 | (c >> 12 & 0x3F));
    add(0x80 | (c >> 6 & 0x3F));
    add(0x80 | (c & 0x3F));
  }
  return bytes;
}

// In order, joined, without surrogates.
std::vector<CharacterRange> tidy(std::vector<CharacterRange> ranges) {
  std::sort(ranges.begin(), ranges.end());
  std::vector<CharacterRange> joined;
  for (const CharacterRange& range : ranges) {
    if (!joined.empty() && range.low <= joined.back().high + 1) {
      joined.back().high = std::max(joined.back().high, range.high);
    } else {
      joined.push_back(range);
    }
  }
  std::vector<CharacterRange> result;
  for (const CharacterRange& range : joined) {
    if (range.low < kSurrogateFirst)
      result.push_back({range.low, std::min<char32_t>(range.high, kSurrogateFirst - 1)});
    if (range.high > kSurrogateLast)
      result.push_back({std::max<char32_t>(range.low, kSurrogateLast + 1), range.high});
  }
  return result;
}

// All other characters but NUL, which no text has. `ranges` are tidy.
std::vector<CharacterRange> others(const std::vector<CharacterRange>& ranges) {
  std::vector<CharacterRange> result;
  char32_t next = 1;
  for (const CharacterRange& range : ranges) {
    if (range.low > next) result.push_back({next, range.low - 1});
    next = std::max<char32_t>(next, range.high + 1);
  }
  if (next <= kCharacterMax) result.push_back({next, kCharacterMax});
  return tidy(std::move(result));
}

// Calls add(low, high) with the ends of parts in which every byte runs through a range of its own. The ends
// of [low, high] have UTF-8 of the same length.
template <typename Add>
void split_by_bytes(char32_t low, char32_t high, const Add& add) {
  const std::size_t trailing = utf8(low).size() - 1;
  for (std::size_t i = 1; i <= trailing; ++i) {
    const char32_t mask = (char32_t{1} << (6 * i)) - 1;
    if ((low & ~mask) == (high & ~mask)) continue;
    if ((low & mask) != 0) {
      split_by_bytes(low, low | mask, add);
      return split_by_bytes((low | mask) + 1, high, add);
    }
    if ((high & mask) != mask) {
      split_by_bytes(low, (high & ~mask) - 1, add);
      return split_by_bytes(high & ~mask, high, add);
    }
  }
  add(utf8(low), utf8(high));
}

}  // namespace

// Reads the text and builds the rules as it goes. The first error stays.
class GrammarCompiler {
 public:
  explicit GrammarCompiler(std::string_view text) : text_(text) {}

  Result<std::shared_ptr<const Grammar>> compile() {
    skip_space(true);
    while (!error_ && at_ < text_.size()) read_rule();
    if (!error_) check_names();
    if (!error_) check_left_recursion();
    if (error_) return std::unexpected(*error_);
    return lay_out();
  }

 private:
  struct Rule {
    std::string name;  // empty: of a group, a repetition or a class of characters
    bool defined = false;
    bool repeats = false;  // S ::= X S | : its last symbol is itself
    std::vector<Symbols> alternatives;
  };

  // ---- Text

  char peek(std::size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }

  void refuse(const std::string& what) {
    if (error_) return;
    const std::string_view read = text_.substr(0, at_);
    const auto line = 1 + std::count(read.begin(), read.end(), '\n');
    error_ = Error{ErrorCode::kInvalidArgument, fmt::format("line {}: {}", line, what)};
  }

  void refuse_wanted(const std::string& wanted) {
    if (error_) return;
    std::string_view found = text_.substr(at_, kQuotedBytesMax);
    found = found.substr(0, found.find('\n'));
    refuse(fmt::format("wanted is {}, not {}", wanted,
                       found.empty() ? "the end of the line" : fmt::format("\"{}\"", found)));
  }

  void skip_space(bool newlines) {
    for (; at_ < text_.size(); ++at_) {
      if (peek() == '#') {
        while (at_ + 1 < text_.size() && peek(1) != '\n' && peek(1) != '\r') ++at_;
      } else if (peek() != ' ' && peek() != '\t' && !(newlines && (peek() == '\n' || peek() == '\r'))) {
        return;
      }
    }
  }

  std::string read_name() {
    const std::size_t begin = at_;
    while (is_name(peek())) ++at_;
    if (at_ == begin) refuse_wanted("the name of a rule");
    return std::string(text_.substr(begin, at_ - begin));
  }

  char32_t read_hex(std::size_t digits) {
    const std::string_view hex = text_.substr(std::min(at_, text_.size()), digits);
    std::uint32_t value = 0;
    const auto [end, error] = std::from_chars(hex.data(), hex.data() + hex.size(), value, 16);
    if (error != std::errc() || static_cast<std::size_t>(end - hex.data()) != digits) {
      refuse_wanted(fmt::format("a number of {} hexadecimal digits", digits));
      return 0;
    }
    at_ += digits;
    return value;
  }

  char32_t read_character() {
    const std::size_t begin = at_;
    if (peek() != '\\') return read_utf8();
    const char escape = peek(1);
    at_ += 2;
    switch (escape) {
      case 'x':
        return read_hex(2);
      case 'u':
        return read_hex(4);
      case 'U':
        return read_hex(8);
      case 't':
        return '\t';
      case 'r':
        return '\r';
      case 'n':
        return '\n';
      case '\\':
      case '"':
      case '[':
      case ']':
      case '-':
        return static_cast<char32_t>(escape);
      default:
        at_ = begin;
        refuse_wanted("an escape that there is");
        return 0;
    }
  }

  char32_t read_utf8() {
    const auto first = static_cast<std::uint8_t>(peek());
    const int length = first < 0x80 ? 1 : std::countl_one(first);
    char32_t value = length == 1 ? first : first & (0x7FU >> std::min(length, 7));
    for (int i = 1; i < length; ++i)
      value = value << 6 | (static_cast<std::uint8_t>(peek(static_cast<std::size_t>(i))) & 0x3FU);
    const auto size = static_cast<std::size_t>(length);
    if (length > 4 || value > kCharacterMax || utf8(value) != text_.substr(at_, size)) {
      refuse("the grammar is not UTF-8");
      return 0;
    }
    at_ += size;
    return value;
  }

  std::uint64_t read_times() {
    if (!is_digit(peek())) refuse_wanted("a number");
    std::uint64_t times = 0;
    for (; is_digit(peek()); ++at_) {
      times = times * 10 + static_cast<std::uint64_t>(peek() - '0');
      if (times > kTimesMax) {
        refuse(fmt::format("at most {} repetitions are taken", kTimesMax));
        return 0;
      }
    }
    return times;
  }

  // ---- Rules

  void read_rule() {
    const std::string name = read_name();
    skip_space(false);
    if (!error_ && text_.substr(at_, 3) != "::=") refuse_wanted("::=");
    if (error_) return;
    at_ += 3;
    skip_space(true);
    const std::uint32_t rule = named(name);
    if (rules_[rule].defined) return refuse(fmt::format("the rule \"{}\" is defined twice", name));
    rules_[rule].defined = true;
    read_alternatives(rule, 0);
    if (!error_ && at_ < text_.size() && peek() != '\n' && peek() != '\r')
      refuse_wanted("a new line or something that can follow here");
    skip_space(true);
  }

  void read_alternatives(std::uint32_t rule, std::size_t depth) {
    for (;;) {
      add_alternative(rule, read_sequence(depth));
      if (error_ || peek() != '|') return;
      ++at_;
      skip_space(true);
    }
  }

  Symbols read_sequence(std::size_t depth) {
    Symbols sequence;
    std::size_t last = 0;  // where the item begins that a repetition would apply to
    while (!error_ && at_ < text_.size()) {
      const std::optional<std::pair<std::uint64_t, std::optional<std::uint64_t>>> times =
          read_repetition(depth);
      if (error_) break;
      if (times) {
        if (last == sequence.size()) {
          refuse("a repetition needs something before it");
          break;
        }
        const Symbols item(sequence.begin() + static_cast<std::ptrdiff_t>(last), sequence.end());
        sequence.resize(last);
        repeat(item, times->first, times->second, sequence);
      } else {
        last = sequence.size();
        if (!read_item(depth, sequence)) break;
      }
      skip_space(depth > 0);
    }
    return sequence;
  }

  // How often, from and to; without a second number, to any. Nothing where no repetition stands.
  std::optional<std::pair<std::uint64_t, std::optional<std::uint64_t>>> read_repetition(std::size_t depth) {
    switch (peek()) {
      case '*':
        ++at_;
        return {{0, std::nullopt}};
      case '+':
        ++at_;
        return {{1, std::nullopt}};
      case '?':
        ++at_;
        return {{0, 1}};
      case '{':
        break;
      default:
        return std::nullopt;
    }
    const auto pass = [&] {
      ++at_;
      skip_space(depth > 0);
    };
    pass();
    const std::uint64_t least = read_times();
    skip_space(depth > 0);
    std::optional<std::uint64_t> most = least;
    if (peek() == ',') {
      pass();
      most.reset();
      if (is_digit(peek())) most = read_times();
      skip_space(depth > 0);
    }
    if (peek() != '}') refuse_wanted("}");
    ++at_;
    if (most && *most < least) refuse(fmt::format("{{{},{}}} is a range without numbers", least, *most));
    return {{least, most}};
  }

  bool read_item(std::size_t depth, Symbols& sequence) {
    switch (const char c = peek()) {
      case '"':
        read_literal(sequence);
        return true;
      case '[':
        read_class(sequence);
        return true;
      case '.':
        ++at_;
        sequence.push_back(one_of(others({})));
        return true;
      case '(':
        read_group(depth, sequence);
        return true;
      case '<':
      case '!':
        refuse("tokens in angle brackets are not supported");
        return false;
      default:
        if (!is_name(c)) return false;
        sequence.push_back({Symbol::Kind::kRule, named(read_name())});
        return true;
    }
  }

  void read_literal(Symbols& sequence) {
    ++at_;
    while (!error_ && at_ < text_.size() && peek() != '"') {
      const char32_t c = read_character();
      if (!check_character(c)) return;
      for (const char byte : utf8(c)) {
        Grammar::ByteSet set;
        set.set(static_cast<std::uint8_t>(byte));
        sequence.push_back(bytes(set));
      }
    }
    close('"');
  }

  void read_class(Symbols& sequence) {
    ++at_;
    const bool negated = peek() == '^';
    if (negated) ++at_;
    std::vector<CharacterRange> ranges;
    while (!error_ && at_ < text_.size() && peek() != ']') {
      CharacterRange range;
      range.low = range.high = read_character();
      if (peek() == '-' && peek(1) != ']' && at_ + 1 < text_.size()) {
        ++at_;
        range.high = read_character();
      }
      if (error_) return;
      if (range.high > kCharacterMax || range.low > range.high)
        return refuse("a class of characters has a range without characters");
      ranges.push_back(range);
    }
    close(']');
    ranges = tidy(std::move(ranges));
    if (negated) ranges = others(ranges);
    if (ranges.empty()) return refuse("a class of characters is empty");
    sequence.push_back(one_of(ranges));
  }

  void read_group(std::size_t depth, Symbols& sequence) {
    if (depth == kGrammarDepthMax)
      return refuse(fmt::format("at most {} parentheses may stand in each other", kGrammarDepthMax));
    ++at_;
    skip_space(true);
    const std::uint32_t rule = add_rule();
    read_alternatives(rule, depth + 1);
    if (error_) return;
    close(')');
    sequence.push_back({Symbol::Kind::kRule, rule});
  }

  void close(char c) {
    if (!error_ && peek() != c) refuse_wanted(std::string(1, c));
    ++at_;
  }

  bool check_character(char32_t c) {
    if (c > kCharacterMax || (c >= kSurrogateFirst && c <= kSurrogateLast))
      refuse("a text has an escape that is no character");
    return !error_;
  }

  // ---- Building

  std::uint32_t add_rule(std::string name = {}) {
    if (rules_.size() == kGrammarRulesMax)
      refuse(fmt::format("it comes to more than {} rules", kGrammarRulesMax));
    if (error_) return 0;
    rules_.emplace_back().name = std::move(name);
    return static_cast<std::uint32_t>(rules_.size() - 1);
  }

  std::uint32_t named(const std::string& name) {
    if (error_) return 0;
    const auto found = names_.find(name);
    if (found != names_.end()) return found->second;
    const std::uint32_t rule = add_rule(name);
    names_.emplace(name, rule);
    return rule;
  }

  void add_alternative(std::uint32_t rule, Symbols sequence) {
    symbols_ += sequence.size() + 1;
    if (symbols_ > kGrammarSymbolsMax)
      refuse(fmt::format("it comes to more than {} symbols", kGrammarSymbolsMax));
    if (!error_) rules_[rule].alternatives.push_back(std::move(sequence));
  }

  Symbol rule_of(std::initializer_list<Symbols> alternatives) {
    const std::uint32_t rule = add_rule();
    for (const Symbols& alternative : alternatives) add_alternative(rule, alternative);
    return {Symbol::Kind::kRule, rule};
  }

  Symbol bytes(const Grammar::ByteSet& set) {
    sets_.push_back(set);
    return {Symbol::Kind::kBytes, static_cast<std::uint32_t>(sets_.size() - 1)};
  }

  // One character of tidy ranges.
  Symbol one_of(const std::vector<CharacterRange>& ranges) {
    const auto found = classes_.find(ranges);
    if (found != classes_.end()) return found->second;
    std::vector<Symbols> alternatives;
    Grammar::ByteSet single;
    constexpr std::array<CharacterRange, 4> kOfEqualLength = {
        {{0, 0x7F}, {0x80, 0x7FF}, {0x800, 0xFFFF}, {0x10000, kCharacterMax}}};
    for (const CharacterRange& range : ranges) {
      for (const CharacterRange& length : kOfEqualLength) {
        const char32_t low = std::max(range.low, length.low);
        const char32_t high = std::min(range.high, length.high);
        if (low > high) continue;
        split_by_bytes(low, high, [&](const std::string& first, const std::string& last) {
          Symbols sequence;
          for (std::size_t i = 0; i < first.size(); ++i) {
            Grammar::ByteSet set;
            for (int byte = static_cast<std::uint8_t>(first[i]); byte <= static_cast<std::uint8_t>(last[i]);
                 ++byte)
              set.set(static_cast<std::size_t>(byte));
            if (first.size() == 1) {
              single |= set;
            } else {
              sequence.push_back(bytes(set));
            }
          }
          if (!sequence.empty()) alternatives.push_back(std::move(sequence));
        });
      }
    }
    Symbol symbol;
    if (alternatives.empty()) {
      symbol = bytes(single);
    } else {
      if (single.any()) alternatives.push_back({bytes(single)});
      symbol = {Symbol::Kind::kRule, add_rule()};
      for (Symbols& alternative : alternatives) add_alternative(symbol.index, std::move(alternative));
    }
    classes_.emplace(ranges, symbol);
    return symbol;
  }

  // ---- Repetitions. With E(k): 2^k times, and U(k): up to 2^k - 1 times,
  //   E(0) ::= S    E(k) ::= E(k-1) E(k-1)        U(0) ::=     U(k) ::= E(k-1) U(k-1) | U(k-1)
  // any number of times is a sequence of some E, and any limit n, with 2^k <= n, is E(k) up to n - 2^k |
  // U(k).

  struct Powers {
    Symbols exactly;  // E(k)
    Symbols up_to;    // U(k + 1)
  };

  void repeat(const Symbols& item, std::uint64_t least, std::optional<std::uint64_t> most, Symbols& out) {
    Powers powers;
    powers.exactly = {item.size() == 1 ? item.front() : rule_of({item})};
    for (std::uint64_t rest = least; rest > 0 && !error_; rest -= std::bit_floor(rest))
      out.push_back(exactly(powers, log2(rest)));
    if (!most) {
      const std::uint32_t rule = add_rule();
      if (error_) return;
      rules_[rule].repeats = true;
      add_alternative(rule, {powers.exactly.front(), {Symbol::Kind::kRule, rule}});
      add_alternative(rule, {});
      out.push_back({Symbol::Kind::kRule, rule});
    } else if (*most > least) {
      out.push_back(up_to(powers, *most - least));
    }
  }

  static std::size_t log2(std::uint64_t n) { return static_cast<std::size_t>(std::bit_width(n)) - 1; }

  Symbol exactly(Powers& powers, std::size_t k) {
    while (powers.exactly.size() <= k && !error_) {
      const Symbol half = powers.exactly.back();
      powers.exactly.push_back(rule_of({{half, half}}));
    }
    return error_ ? Symbol() : powers.exactly[k];
  }

  Symbol up_to(Powers& powers, std::uint64_t n) {
    if (std::has_single_bit(n + 1)) return below_power(powers, log2(n + 1));
    const std::size_t k = log2(n);
    Symbols with = {exactly(powers, k)};
    if (const std::uint64_t rest = n - (std::uint64_t{1} << k); rest > 0) with.push_back(up_to(powers, rest));
    const Symbol without = below_power(powers, k);
    return rule_of({with, {without}});
  }

  // U(k), k > 0.
  Symbol below_power(Powers& powers, std::size_t k) {
    while (powers.up_to.size() < k && !error_) {
      const Symbol power = exactly(powers, powers.up_to.size());
      if (powers.up_to.empty()) {
        powers.up_to.push_back(rule_of({{power}, {}}));
      } else {
        const Symbol lower = powers.up_to.back();
        powers.up_to.push_back(rule_of({{power, lower}, {lower}}));
      }
    }
    return error_ ? Symbol() : powers.up_to[k - 1];
  }

  // ---- Checks

  void check_names() {
    for (const Rule& rule : rules_) {
      if (!rule.name.empty() && !rule.defined) {
        error_ = Error{ErrorCode::kInvalidArgument, fmt::format("there is no rule \"{}\"", rule.name)};
        return;
      }
    }
    if (!names_.contains("root"))
      error_ = Error{ErrorCode::kInvalidArgument, "there is no rule \"root\", where a text begins"};
  }

  // Rules that give no bytes at all, by counting what keeps each alternative from being empty.
  std::vector<bool> find_nullable() const {
    std::vector<bool> nullable(rules_.size());
    std::vector<std::uint32_t> ready;
    struct Alternative {
      std::uint32_t rule;
      std::size_t left;
    };
    std::vector<Alternative> pending;
    std::vector<std::vector<std::size_t>> used_by(rules_.size());
    const auto note = [&](std::uint32_t rule) {
      if (!nullable[rule]) ready.push_back(rule);
      nullable[rule] = true;
    };
    for (std::uint32_t rule = 0; rule < rules_.size(); ++rule) {
      for (const Symbols& sequence : rules_[rule].alternatives) {
        if (sequence.empty()) note(rule);
        if (std::ranges::any_of(sequence, [](const Symbol& s) { return s.kind == Symbol::Kind::kBytes; }))
          continue;
        for (const Symbol& symbol : sequence) used_by[symbol.index].push_back(pending.size());
        pending.push_back({rule, sequence.size()});
      }
    }
    while (!ready.empty()) {
      const std::uint32_t rule = ready.back();
      ready.pop_back();
      for (const std::size_t alternative : used_by[rule]) {
        if (--pending[alternative].left == 0) note(pending[alternative].rule);
      }
    }
    return nullable;
  }

  // A rule that can begin with itself. Rules that begin with none that is left are taken away until nothing
  // changes; what stays is in a circle or leads to one. That S* may begin with itself where S may be empty
  // does no harm: nothing follows it.
  void check_left_recursion() {
    const std::vector<bool> nullable = find_nullable();
    std::vector<std::size_t> begins_with(rules_.size());
    std::vector<std::vector<std::uint32_t>> begins(rules_.size());
    for (std::uint32_t rule = 0; rule < rules_.size(); ++rule) {
      for (const Symbols& sequence : rules_[rule].alternatives) {
        for (const Symbol& symbol : sequence) {
          if (symbol.kind != Symbol::Kind::kRule) break;
          if (!(rules_[rule].repeats && symbol.index == rule)) {
            ++begins_with[rule];
            begins[symbol.index].push_back(rule);
          }
          if (!nullable[symbol.index]) break;
        }
      }
    }
    std::vector<std::uint32_t> ready;
    for (std::uint32_t rule = 0; rule < rules_.size(); ++rule) {
      if (begins_with[rule] == 0) ready.push_back(rule);
    }
    while (!ready.empty()) {
      const std::uint32_t gone = ready.back();
      ready.pop_back();
      for (const std::uint32_t rule : begins[gone]) {
        if (--begins_with[rule] == 0) ready.push_back(rule);
      }
    }
    for (std::uint32_t rule = 0; rule < rules_.size(); ++rule) {
      if (begins_with[rule] == 0 || rules_[rule].name.empty()) continue;
      error_ = Error{
          ErrorCode::kInvalidArgument,
          fmt::format("the rule \"{}\" begins with itself, or with a rule that does", rules_[rule].name)};
      return;
    }
  }

  std::shared_ptr<const Grammar> lay_out() {
    auto grammar = std::make_shared<Grammar>();
    for (const Rule& rule : rules_) {
      std::vector<std::uint32_t>& firsts = grammar->rules_.emplace_back();
      for (const Symbols& sequence : rule.alternatives) {
        firsts.push_back(static_cast<std::uint32_t>(grammar->symbols_.size()));
        grammar->symbols_.insert(grammar->symbols_.end(), sequence.begin(), sequence.end());
        grammar->symbols_.push_back({});
      }
    }
    grammar->sets_ = std::move(sets_);
    grammar->root_ = names_.at("root");
    return grammar;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::vector<Rule> rules_;
  std::map<std::string, std::uint32_t> names_;
  std::map<std::vector<CharacterRange>, Symbol> classes_;
  std::vector<Grammar::ByteSet> sets_;
  std::size_t symbols_ = 0;
  std::optional<Error> error_;
};

Result<std::shared_ptr<const Grammar>> Grammar::parse(std::string_view gbnf) {
  if (gbnf.size() > kGrammarBytesMax) {
    return fail(ErrorCode::kInvalidArgument, "at most {} bytes are taken, it has {}", kGrammarBytesMax,
                gbnf.size());
  }
  return GrammarCompiler(gbnf).compile();
}

}  // namespace dualdecoder
