// GBNF of numbers between bounds. Pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace dualdecoder {

/// Bounds of numbers without a bound of their own, and the largest that are taken: 18 digits.
inline constexpr std::int64_t kNumberMax = 999'999'999'999'999'999;

struct NumberRange {
  std::int64_t low = -kNumberMax;  // both within -kNumberMax .. kNumberMax
  std::int64_t high = kNumberMax;
  bool low_open = false;  // the bound itself is out
  bool high_open = false;
};

/// The whole numbers of the range, without a point. Nothing when there is none.
std::optional<std::string> integer_grammar(NumberRange range);
/// Its numbers, with a point or without, and without an exponent.
std::optional<std::string> decimal_grammar(const NumberRange& range);

}  // namespace dualdecoder
