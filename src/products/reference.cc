// The definition of every figure, in the order in which the kernels sum.
#include <algorithm>
#include <cmath>

#include "products/kernel.h"

namespace dualdecoder {
namespace {

/// Sum of (q - centre) * x over inputs first .. last - 1 of a part.
std::int32_t dot(const FormatTraits& traits, const std::uint8_t* q, const std::int8_t* x, std::uint32_t first,
                 std::uint32_t last) {
  std::int32_t sum = 0;
  for (std::uint32_t i = first; i < last; ++i) {
    const int weight =
        traits.bits == 8 ? static_cast<std::int8_t>(q[i]) : q[i] - static_cast<int>(traits.centre);
    sum += weight * x[i];
  }
  return sum;
}

float add_block(const FormatTraits& traits, const WeightBlock& block, const ActivationBlock* x, float sum) {
  const float d = float_from_f16(block.d);
  const float m = float_from_f16(block.m);
  if (traits.scaled == 0) {
    const auto total = static_cast<float>(dot(traits, block.q, x->q, 0, kBlockInputs));
    sum = std::fma(total * x->scale, d, sum);
    return traits.offset ? std::fma(m, x->sum, sum) : sum;
  }
  float inner = 0.0f;
  float low = 0.0f;  // of the offsets
  for (std::uint32_t part = 0; part < traits.parts(); ++part) {
    const std::uint8_t* q = block.q + part * kBlockInputs;
    for (std::uint32_t first = 0; first < kBlockInputs; first += traits.scaled) {
      const std::int8_t scale = block.scales[(part * kBlockInputs + first) / traits.scaled];
      const auto total = static_cast<float>(scale * dot(traits, q, x[part].q, first, first + traits.scaled));
      inner = std::fma(total, x[part].scale, inner);
    }
    low = std::fma(static_cast<float>(block.offsets[part]), x[part].sum, low);
  }
  if (traits.offset) sum = std::fma(-m, low, sum);
  return std::fma(inner, d, sum);
}

}  // namespace

void multiply_reference(const PackedMatrix& matrix, const ActivationBlock* x, std::uint32_t rows,
                        std::uint32_t first, std::uint32_t last, float* out) {
  const FormatTraits traits = format_traits(matrix.format);
  const std::size_t row_blocks = matrix.inputs / kBlockInputs;
  const std::uint32_t end = std::min(last * kPanelOutputs, matrix.outputs);
  WeightBlock block;
  for (std::uint32_t output = first * kPanelOutputs; output < end; ++output) {
    const std::byte* const panel = matrix.data + output / kPanelOutputs * matrix.panel_bytes();
    float* const to = out + output;  // of row 0
    for (std::size_t row = 0; row < rows; ++row) to[row * matrix.outputs] = 0.0f;
    for (std::uint32_t b = 0; b < matrix.inputs / traits.inputs; ++b) {
      unpack_block(matrix.format, panel, b, output % kPanelOutputs, block);
      for (std::size_t row = 0; row < rows; ++row) {
        float& sum = to[row * matrix.outputs];
        sum = add_block(traits, block, x + row * row_blocks + b * traits.parts(), sum);
      }
    }
  }
}

void quantise_reference(const float* from, std::size_t blocks, ActivationBlock* to) {
  for (; blocks > 0; --blocks, from += kBlockInputs, ++to) {
    float largest = 0.0f;
    for (std::uint32_t i = 0; i < kBlockInputs; ++i) largest = std::max(largest, std::abs(from[i]));
    const bool zero = largest < kActivationMin;
    to->scale = zero ? 0.0f : largest / 127.0f;
    const float inverse = zero ? 0.0f : 127.0f / largest;
    int sums[2][2] = {};
    for (std::uint32_t i = 0; i < kBlockInputs; ++i) {
      to->q[i] = static_cast<std::int8_t>(std::nearbyint(from[i] * inverse));
      sums[i / 16][i % 4 / 2] += to->q[i];
    }
    int sum = 0;
    for (int pair = 0; pair < 2; ++pair) {
      to->minus[0][pair] = static_cast<std::int16_t>(-sums[0][pair] - sums[1][pair]);
      to->minus[1][pair] = static_cast<std::int16_t>(-sums[1][pair]);
      sum += sums[0][pair] + sums[1][pair];
    }
    to->sum = to->scale * static_cast<float>(sum);
  }
}

}  // namespace dualdecoder
