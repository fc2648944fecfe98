// IEEE half precision in plain integer arithmetic: for references, tests, and instruction sets without a
// conversion.
#pragma once

#include <bit>
#include <cstdint>

namespace dualdecoder {

using f16_bits = std::uint16_t;

constexpr float float_from_f16(f16_bits half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1f;
  const std::uint32_t mantissa = half & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

/// Rounds to nearest, ties to even; beyond the range to infinity; NaN stays NaN.
constexpr f16_bits f16_from_float(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<f16_bits>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<f16_bits>(sign | 0x7c00u);  // 65520 and above
  if (magnitude < 0x38800000u) {  // below 2^-14: the float adder rounds to multiples of 2^-24 for us
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<f16_bits>(
        sign | (std::bit_cast<std::uint32_t>(aligned) - std::bit_cast<std::uint32_t>(0.5f)));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1;
  return static_cast<f16_bits>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

}  // namespace dualdecoder
