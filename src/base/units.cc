#include "base/units.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

namespace dualdecoder {

Result<std::uint64_t> parse_size(std::string_view text) {
  const auto wrong = [&] {
    return fail(ErrorCode::kInvalidArgument, "\"{}\" is not a size; write for example 64MiB, 1.5GiB or 4096",
                text);
  };
  double number = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !(number >= 0.0)) return wrong();
  std::string unit;
  for (const char c : std::string_view(end, text.data() + text.size())) {
    if (c != ' ') unit.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
  }
  constexpr std::string_view kUnits = "kmgt";
  double factor = 1.0;
  if (!unit.empty() && unit != "b") {
    const std::size_t power = kUnits.find(unit[0]);
    const std::string_view rest = std::string_view(unit).substr(1);
    if (power == std::string_view::npos || (!rest.empty() && rest != "b" && rest != "ib")) return wrong();
    for (std::size_t i = 0; i <= power; ++i) factor *= 1024.0;
  }
  const double bytes = number * factor;
  if (bytes > 9e18 || bytes != std::floor(bytes)) return wrong();
  return static_cast<std::uint64_t>(bytes);
}

std::string format_bytes(double bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024.0 && unit + 1 < kUnits.size()) {
    bytes /= 1024.0;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 || bytes >= 100.0 ? 0 : (bytes >= 10.0 ? 1 : 2),
                     kUnits[unit]);
}

}  // namespace dualdecoder
