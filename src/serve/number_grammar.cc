#include "serve/number_grammar.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace dualdecoder {
namespace {

std::string alternatives(const std::vector<std::string>& list) {
  return fmt::format("({})", fmt::join(list, " | "));
}

std::string literal(std::string_view text) { return fmt::format("\"{}\"", text); }

std::string digit_between(char low, char high) {
  return low == high ? literal({&low, 1}) : fmt::format("[{}-{}]", low, high);
}

// The numbers from low to high, both of the same number of digits.
std::string digits_between(std::string_view low, std::string_view high) {
  const std::size_t rest = low.size() - 1;
  const std::string zeros(rest, '0');
  const std::string nines(rest, '9');
  const auto then = [](const std::string& first, const std::string& others) {
    return others.empty() ? first : fmt::format("{} {}", first, others);
  };
  if (low.empty()) return "";
  if (low.substr(1) == zeros && high.substr(1) == nines) {
    return then(digit_between(low[0], high[0]), rest == 0 ? "" : fmt::format("[0-9]{{{}}}", rest));
  }
  if (low[0] == high[0])
    return then(digit_between(low[0], low[0]), digits_between(low.substr(1), high.substr(1)));
  std::vector<std::string> parts;
  char first = low[0];
  char last = high[0];
  if (low.substr(1) != zeros) {
    parts.push_back(then(digit_between(first, first), digits_between(low.substr(1), nines)));
    ++first;
  }
  if (high.substr(1) != nines) --last;
  if (first <= last) parts.push_back(then(digit_between(first, last), fmt::format("[0-9]{{{}}}", rest)));
  if (high.substr(1) != nines)
    parts.push_back(then(digit_between(high[0], high[0]), digits_between(zeros, high.substr(1))));
  return alternatives(parts);
}

// 0 <= low <= high.
std::string naturals(std::int64_t low, std::int64_t high) {
  std::vector<std::string> parts;
  while (low <= high) {
    const std::string first = std::to_string(low);
    std::int64_t last = 9;
    for (std::size_t digits = 1; digits < first.size(); ++digits) last = last * 10 + 9;
    last = std::min(last, high);
    parts.push_back(digits_between(first, std::to_string(last)));
    low = last + 1;
  }
  return alternatives(parts);
}

// The numbers from low to high, 0 <= low; appended to `parts`, each behind `sign`.
void add_decimals(const NumberRange& range, const std::string& sign, std::vector<std::string>& parts) {
  const auto add = [&](const std::string& whole, const char* fraction) {
    parts.push_back(fmt::format("{}{} {}", sign, whole, fraction));
  };
  constexpr const char* kAny = R"(("." [0-9]{1,18})?)";
  constexpr const char* kZero = R"(("." "0"{1,18})?)";
  constexpr const char* kAboveZero = R"("." "0"{0,16} [1-9] [0-9]{0,16})";
  const auto [low, high, low_open, high_open] = range;
  if (low > high || (low == high && (low_open || high_open))) return;
  if (low == high) return add(literal(std::to_string(low)), kZero);
  add(literal(std::to_string(low)), low_open ? kAboveZero : kAny);
  if (low + 1 < high) add(naturals(low + 1, high - 1), kAny);
  if (!high_open) add(literal(std::to_string(high)), kZero);
}

}  // namespace

std::optional<std::string> integer_grammar(NumberRange range) {
  range.low += range.low_open ? 1 : 0;
  range.high -= range.high_open ? 1 : 0;
  std::vector<std::string> parts;
  if (range.low > range.high) return std::nullopt;
  if (range.low < 0)
    parts.push_back(fmt::format("\"-\" {}", naturals(std::max<std::int64_t>(1, -range.high), -range.low)));
  if (range.high >= 0) parts.push_back(naturals(std::max<std::int64_t>(0, range.low), range.high));
  return alternatives(parts);
}

std::optional<std::string> decimal_grammar(const NumberRange& range) {
  std::vector<std::string> parts;
  if (range.low < 0) {
    NumberRange mirrored{-range.high, -range.low, range.high_open, range.low_open};
    if (mirrored.low < 0) mirrored = {0, mirrored.high, false, mirrored.high_open};
    add_decimals(mirrored, "\"-\" ", parts);
  }
  if (range.high >= 0) {
    const bool from_zero = range.low < 0;
    add_decimals({from_zero ? 0 : range.low, range.high, !from_zero && range.low_open, range.high_open}, "",
                 parts);
  }
  if (parts.empty()) return std::nullopt;
  return alternatives(parts);
}

}  // namespace dualdecoder
