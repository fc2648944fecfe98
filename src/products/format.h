// The block formats of GGUF: where one output's block keeps its scales and values, and these taken out as
// integers. Pure.
//
//   Q4_0, Q5_0, Q8_0   w = d * (q - centre)             32 inputs a block; d in f16
//   Q4_1, Q5_1         w = d * q + m                    32; d, m in f16
//   Q4_K, Q5_K         w = d * s * q - dmin * t         256; d, dmin in f16; s, t of 6 bits for 32 inputs
//   Q6_K               w = d * s * (q - 32)             256; d in f16; s of 8 bits, signed, for 16 inputs
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/f16.h"
#include "products/products.h"

namespace dualdecoder {

struct FormatTraits {
  std::uint32_t inputs;  // of a block
  std::uint32_t bytes;   // of a block
  std::uint32_t bits;    // of q, 8: signed
  std::uint32_t centre;  // of q, where no second scale takes its place
  bool offset;           // has m or dmin
  std::uint32_t scaled;  // inputs that share an integer scale; 0 without such scales

  constexpr std::uint32_t parts() const { return inputs / kBlockInputs; }
};

constexpr FormatTraits format_traits(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_0:
      return {32, 18, 4, 8, false, 0};
    case WeightFormat::kQ4_1:
      return {32, 20, 4, 0, true, 0};
    case WeightFormat::kQ5_0:
      return {32, 22, 5, 16, false, 0};
    case WeightFormat::kQ5_1:
      return {32, 24, 5, 0, true, 0};
    case WeightFormat::kQ8_0:
      return {32, 34, 8, 0, false, 0};
    case WeightFormat::kQ4_K:
      return {256, 144, 4, 0, true, 32};
    case WeightFormat::kQ5_K:
      return {256, 176, 5, 0, true, 32};
    case WeightFormat::kQ6_K:
      return {256, 210, 6, 32, false, 16};
  }
  __builtin_unreachable();
}

/// A block of activations with none as large as this counts as zeros: 127 / it must stay finite.
inline constexpr float kActivationMin = 1e-30f;

/// One block of one output, taken apart.
struct WeightBlock {
  f16_bits d = 0;
  f16_bits m = 0;                // or dmin
  std::int8_t scales[16] = {};   // s
  std::uint8_t offsets[8] = {};  // t
  std::uint8_t q[256] = {};      // for Q8_0 the bits of a signed number
};

/// `to` has been cleared.
void read_block(WeightFormat format, const std::byte* block, WeightBlock& to);

}  // namespace dualdecoder
