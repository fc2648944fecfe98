// The arithmetic of products for each instruction set, and the packed layout that all of them read.
//
// A panel holds, for each block of inputs in turn (16 outputs side by side, "lane" = output):
//   d       f16 [16]
//   m, dmin f16 [16]                 formats with an offset
//   Q4_K, Q5_K: scales of 6 bits
//           u8 [8, 16]               low 4 bits of s, low 4 bits of t above them
//           u8 [4, 16]               high 2 bits of s and t of part 2i, those of part 2i + 1 above them
//   Q6_K:   i8 [16, 16]              scales
//   then for each part of 32 inputs, in 8 groups of four inputs:
//   4 bits  u8 [4, 16, 4]            group k, and group k + 4 in the high halves
//   5 bits  the same, and u8 [16, 4]     fifth bits, that of group g in bit g
//   6 bits  the same, and u8 [2, 16, 4]  high two bits, those of group 4i + f in bits 2f and 2f + 1
//   8 bits  i8 [8, 16, 4]            by groups
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "products/format.h"
#include "products/products.h"

namespace dualdecoder {

/// Offsets in bytes within a block of a panel.
struct PanelLayout {
  std::uint32_t offsets;  // m or dmin
  std::uint32_t scales;
  std::uint32_t values;     // of the first part
  std::uint32_t high_bits;  // within a part
  std::uint32_t part_bytes;
};

constexpr PanelLayout panel_layout(WeightFormat format) {
  const FormatTraits traits = format_traits(format);
  PanelLayout layout{};
  layout.offsets = 2 * kPanelOutputs;
  layout.scales = layout.offsets * (traits.offset ? 2 : 1);
  const std::uint32_t scale_bytes = traits.scaled == 0 ? 0 : traits.scaled == 16 ? 16 : 12;
  layout.values = layout.scales + scale_bytes * kPanelOutputs;
  layout.high_bits = (traits.bits == 8 ? kBlockInputs : kBlockInputs / 2) * kPanelOutputs;
  layout.part_bytes = traits.bits * kBlockInputs / 8 * kPanelOutputs;
  return layout;
}

/// Takes block `index` of one output, lane `lane` of a panel, out of its places.
void unpack_block(WeightFormat format, const std::byte* panel, std::uint32_t index, std::uint32_t lane,
                  WeightBlock& to);

struct ProductKernels {
  const char* target;

  void (*quantise)(const float* from, std::size_t blocks, ActivationBlock* to);
  /// out [rows, outputs] = x times panels first .. last - 1.
  void (*multiply)(const PackedMatrix& matrix, const ActivationBlock* x, std::uint32_t rows,
                   std::uint32_t first, std::uint32_t last, float* out);
};

/// The same by the plain definition: the bits of every instruction set that has fused multiply-add. Slow; for
/// tests, and where there is no vector unit.
void quantise_reference(const float* from, std::size_t blocks, ActivationBlock* to);
void multiply_reference(const PackedMatrix& matrix, const ActivationBlock* x, std::uint32_t rows,
                        std::uint32_t first, std::uint32_t last, float* out);

/// For every instruction set compiled in that this machine can run, best first.
std::span<const ProductKernels* const> available_product_kernels();

}  // namespace dualdecoder
