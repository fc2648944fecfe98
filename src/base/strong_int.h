// An integer that cannot be mistaken for another one: a LayerIndex is not a BlockIndex, and neither converts
// to the other or from a plain number without saying so. No arithmetic beyond stepping; take .value for that.
#pragma once

#include <compare>
#include <cstdint>

namespace dualdecoder {

template <typename Tag>
struct StrongInt {
  std::uint32_t value = 0;

  constexpr StrongInt() = default;
  constexpr explicit StrongInt(std::uint32_t v) : value(v) {}
  constexpr auto operator<=>(const StrongInt&) const = default;
  constexpr StrongInt& operator++() {
    ++value;
    return *this;
  }
};

}  // namespace dualdecoder
