#include "serve/pattern_grammar.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace dualdecoder {
namespace {

constexpr std::size_t kPatternBytesMax = 4096;
constexpr std::size_t kPatternDepthMax = 32;

struct Range {
  char32_t low = 0;
  char32_t high = 0;
};
using Ranges = std::vector<Range>;

// What JSON wants escaped, and line ends as the dot of a pattern leaves them out.
constexpr std::string_view kNotPlain = R"("\\\x00-\x1F)";
constexpr std::string_view kNotDot = R"("\\\x00-\x1F\u2028\u2029)";

const Ranges kDigits = {{'0', '9'}};
const Ranges kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const Ranges kSpace = {{'\t', '\r'}, {' ', ' '}, {0xA0, 0xA0}, {0x2028, 0x2029}, {0x3000, 0x3000}};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string range_text(const Range& range) {
  if (range.low == range.high) return fmt::format("\\U{:08X}", static_cast<std::uint32_t>(range.low));
  return fmt::format("\\U{:08X}-\\U{:08X}", static_cast<std::uint32_t>(range.low),
                     static_cast<std::uint32_t>(range.high));
}

// The JSON text of a character that JSON wants escaped; empty for the others.
std::string_view json_escape(char32_t c) {
  switch (c) {
    case '"':
      return R"(\")";
    case '\\':
      return R"(\\)";
    case '\n':
      return R"(\n)";
    case '\r':
      return R"(\r)";
    case '\t':
      return R"(\t)";
    case '\f':
      return R"(\f)";
    default:
      return "";
  }
}

// One character of the ranges. Of those below a space the ones with a short escape.
std::string one_of(const Ranges& ranges) {
  std::string plain;
  std::string result;
  const auto add = [&result](const std::string& alternative) {
    result += (result.empty() ? "(" : " | ") + alternative;
  };
  const auto add_plain = [&](char32_t low, char32_t high) {
    if (low <= high) plain += range_text({low, high});
  };
  for (const Range& range : ranges) {
    for (const char32_t c : {U'"', U'\\', U'\n', U'\r', U'\t', U'\f'}) {
      if (range.low <= c && c <= range.high) add(grammar_literal(std::string(json_escape(c))));
    }
    add_plain(std::max<char32_t>(range.low, ' '), std::min<char32_t>(range.high, '"' - 1));
    add_plain(std::max<char32_t>(range.low, '"' + 1), std::min<char32_t>(range.high, '\\' - 1));
    add_plain(std::max<char32_t>(range.low, '\\' + 1), range.high);
  }
  if (!plain.empty()) add(fmt::format("[{}]", plain));
  return result.empty() ? result : result + ")";
}

// Of the characters that JSON does not want escaped.
std::string none_of(const Ranges& ranges) {
  std::string text = fmt::format("[^{}", kNotPlain);
  for (const Range& range : ranges) text += range_text(range);
  return text + "]";
}

class PatternReader {
 public:
  explicit PatternReader(std::string_view text) : text_(text) {}

  Result<std::string> read() {
    const bool from_begin = text_.starts_with('^');
    if (from_begin) ++at_;
    bool to_end = text_.size() > at_ && text_.ends_with('$');
    for (std::size_t i = text_.size() - 1; to_end && i > at_ && text_[i - 1] == '\\'; --i)
      escaped_ = !escaped_;
    to_end = to_end && !escaped_;
    if (to_end) text_.remove_suffix(1);
    std::size_t alternatives = 0;
    const std::string body = read_alternatives(0, alternatives);
    if (!error_ && at_ < text_.size()) refuse(ErrorCode::kInvalidArgument, "has a ) without a (");
    if (!error_ && alternatives > 1 && (from_begin || to_end))
      refuse(ErrorCode::kUnsupported, "has | beside ^ or $; put it into parentheses");
    if (error_) return std::unexpected(*error_);
    return fmt::format("({}{}{})", from_begin ? "" : "char* ", body, to_end ? "" : " char*");
  }

 private:
  char peek(std::size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }

  void refuse(ErrorCode code, const std::string& what) {
    if (!error_) error_ = Error{code, fmt::format("{} (at byte {})", what, at_)};
  }

  std::string read_alternatives(std::size_t depth, std::size_t& count) {
    std::string text = fmt::format("({}", read_sequence(depth));
    for (count = 1; !error_ && peek() == '|'; ++count) {
      ++at_;
      text += fmt::format(" | {}", read_sequence(depth));
    }
    return text + ")";
  }

  std::string read_sequence(std::size_t depth) {
    std::string text = "\"\"";
    while (!error_ && at_ < text_.size() && peek() != '|' && peek() != ')') {
      text += fmt::format(" {}", read_atom(depth));
      text += read_repetition();
    }
    return text;
  }

  std::string read_atom(std::size_t depth) {
    switch (peek()) {
      case '(':
        return read_group(depth);
      case '[':
        return read_class();
      case '.':
        ++at_;
        return fmt::format("[^{}]", kNotDot);
      case '^':
      case '$':
        refuse(ErrorCode::kUnsupported, "has ^ or $ within");
        return {};
      case '*':
      case '+':
      case '?':
      case '{':
        refuse(ErrorCode::kInvalidArgument, "has a repetition of nothing");
        return {};
      default:
        break;
    }
    bool negated = false;
    const Ranges ranges = read_character(negated);
    return negated ? none_of(ranges) : one_of(ranges);
  }

  std::string read_group(std::size_t depth) {
    if (depth == kPatternDepthMax) refuse(ErrorCode::kUnsupported, "has too many parentheses in each other");
    ++at_;
    if (peek() == '?' && peek(1) == ':') {
      at_ += 2;
    } else if (peek() == '?') {
      refuse(ErrorCode::kUnsupported, "has an assertion or a named group");
    }
    if (error_) return {};
    std::size_t alternatives = 0;
    std::string text = read_alternatives(depth + 1, alternatives);
    if (!error_ && peek() != ')') refuse(ErrorCode::kInvalidArgument, "has a ( without a )");
    ++at_;
    return text;
  }

  std::string read_class() {
    ++at_;
    const bool negated = peek() == '^';
    if (negated) ++at_;
    Ranges ranges;
    while (!error_ && at_ < text_.size() && peek() != ']') {
      bool others = false;
      Ranges part = read_character(others);
      if (others) refuse(ErrorCode::kUnsupported, "has \\D, \\W or \\S in a class");
      if (!error_ && part.size() == 1 && part[0].low == part[0].high && peek() == '-' && peek(1) != ']') {
        ++at_;
        const Ranges end = read_character(others);
        if (others || end.size() != 1 || end[0].low != end[0].high || end[0].low < part[0].low)
          refuse(ErrorCode::kInvalidArgument, "has a range without characters");
        if (!error_) part[0].high = end[0].low;
      }
      ranges.insert(ranges.end(), part.begin(), part.end());
    }
    if (!error_ && peek() != ']') refuse(ErrorCode::kInvalidArgument, "has a [ without a ]");
    ++at_;
    if (error_) return {};
    std::string text = negated ? none_of(ranges) : one_of(ranges);
    if (text.empty()) refuse(ErrorCode::kUnsupported, "has a class without characters");
    return text;
  }

  // One character, or what an escape stands for; `negated`: all but these.
  Ranges read_character(bool& negated) {
    if (peek() != '\\') return read_utf8();
    const char escape = peek(1);
    at_ += 2;
    negated = escape == 'D' || escape == 'W' || escape == 'S';
    switch (escape) {
      case 'd':
      case 'D':
        return kDigits;
      case 'w':
      case 'W':
        return kWord;
      case 's':
      case 'S':
        return kSpace;
      case 'n':
        return {{'\n', '\n'}};
      case 'r':
        return {{'\r', '\r'}};
      case 't':
        return {{'\t', '\t'}};
      case 'f':
        return {{'\f', '\f'}};
      default:
        break;
    }
    const bool is_sign =
        std::string_view("^$\\.*+?()[]{}|/-\"'#%&,:;<=>@_`~! ").find(escape) != std::string_view::npos;
    if (!is_sign || escape == '\0') refuse(ErrorCode::kUnsupported, "has an escape that is not supported");
    return {{static_cast<char32_t>(escape), static_cast<char32_t>(escape)}};
  }

  // The pattern comes from JSON, which is UTF-8.
  Ranges read_utf8() {
    const auto first = static_cast<std::uint8_t>(peek());
    const std::size_t size = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    char32_t c = first;
    if (size > 1) c = first & (0xFFU >> (size + 1));
    for (std::size_t i = 1; i < size; ++i) c = c << 6 | (static_cast<std::uint8_t>(peek(i)) & 0x3FU);
    at_ = std::min(at_ + size, text_.size());
    if (c < ' ' && json_escape(c).empty()) refuse(ErrorCode::kUnsupported, "has a control character");
    return {{c, c}};
  }

  std::string read_repetition() {
    std::string text;
    if (peek() == '*' || peek() == '+' || peek() == '?') {
      text = peek();
      ++at_;
    } else if (peek() == '{') {
      text = read_counts();
    }
    if (!text.empty() && peek() == '?') ++at_;  // which match comes first does not matter here
    return text;
  }

  std::string read_counts() {
    const std::size_t end = text_.find('}', at_);
    const std::string_view counts = text_.substr(at_ + 1, end == text_.npos ? end : end - at_ - 1);
    const std::size_t comma = counts.find(',');
    const std::string_view most = comma == counts.npos ? "" : counts.substr(comma + 1);
    const bool are_numbers = !counts.empty() && is_digit(counts.front()) &&
                             std::ranges::all_of(counts.substr(0, comma), is_digit) &&
                             std::ranges::all_of(most, is_digit);
    if (end == text_.npos || !are_numbers) {
      refuse(ErrorCode::kInvalidArgument, "has a { that no numbers follow");
      return {};
    }
    at_ = end + 1;
    return fmt::format("{{{}}}", counts);
  }

  std::string_view text_;
  std::size_t at_ = 0;
  bool escaped_ = false;  // the $ at the end is
  std::optional<Error> error_;
};

}  // namespace

Result<std::string> pattern_grammar(const std::string& pattern) {
  if (pattern.size() > kPatternBytesMax) {
    return fail(ErrorCode::kUnsupported, "at most {} bytes are taken, it has {}", kPatternBytesMax,
                pattern.size());
  }
  return PatternReader(pattern).read();
}

std::string grammar_literal(const std::string& text) {
  std::string literal = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7F') {
      literal += fmt::format("\\x{:02X}", static_cast<unsigned>(static_cast<unsigned char>(c)));
    } else {
      if (c == '"' || c == '\\') literal += '\\';
      literal += c;
    }
  }
  return literal + "\"";
}

}  // namespace dualdecoder
