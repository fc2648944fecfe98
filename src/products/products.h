// Products of a quantised weight matrix with few rows of activations, at the speed of memory: one pass over
// the weights serves several rows.
//
// Weights are packed once, at load: panels of kPanelOutputs output rows lie interleaved, four inputs of each
// in 32 bits, so that one integer multiply-add with four activations works on a whole vector of outputs
// (kernel.h has the layout). A packed matrix takes the bytes of the original, its last panel filled up, and
// keeps every quantised value and scale as it is. The activations are quantised once for each input, 32
// values at a time, and serve all matrices that read it.
//
// The result of a row depends only on that row and the matrix: not on the other rows of the call, nor on how
// the work is divided. Integer sums are exact, and floats are summed in the order of the inputs.
//
// Knows the block formats of GGUF and nothing of models. Pure functions on memory of the caller, from any
// number of threads on disjoint parts. Dispatched at run time to the best instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace dualdecoder {

/// Of GGUF, by their names there.
enum class WeightFormat { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K };
inline constexpr WeightFormat kWeightFormats[] = {
    WeightFormat::kQ4_0, WeightFormat::kQ4_1, WeightFormat::kQ5_0, WeightFormat::kQ5_1,
    WeightFormat::kQ8_0, WeightFormat::kQ4_K, WeightFormat::kQ5_K, WeightFormat::kQ6_K};

/// Outputs that lie interleaved.
inline constexpr std::uint32_t kPanelOutputs = 16;
/// Activations that share a scale.
inline constexpr std::uint32_t kBlockInputs = 32;

/// Inputs of one block of the format: a matrix has a multiple of these.
std::uint32_t block_inputs(WeightFormat format);
/// Bytes of one such block for one output, the same in a file and packed.
std::size_t block_bytes(WeightFormat format);

/// A matrix that has been packed. Does not own its memory.
struct PackedMatrix {
  WeightFormat format = WeightFormat::kQ4_0;
  std::uint32_t inputs = 0;
  std::uint32_t outputs = 0;
  const std::byte* data = nullptr;  // [panel, block, ...], aligned to 64 bytes

  std::uint32_t panels() const { return (outputs + kPanelOutputs - 1) / kPanelOutputs; }
  std::size_t panel_bytes() const {
    return std::size_t{inputs} / block_inputs(format) * block_bytes(format) * kPanelOutputs;
  }
  std::size_t bytes() const { return panels() * panel_bytes(); }
};

/// Packs panels first .. last - 1 of the matrix, whose outputs lie one after the other in `from`, as in a
/// file, into `to`, which is to become matrix.data.
void pack_panels(const PackedMatrix& matrix, const std::byte* from, std::uint32_t first, std::uint32_t last,
                 std::byte* to);

/// 32 activations: value = scale * q.
struct ActivationBlock {
  std::int8_t q[kBlockInputs];
  float scale;
  float sum;  // of the values scale * q
  /// Minus the sum of q at the positions 0 and 1 modulo 4 and that at 2 and 3, of the whole block and of its
  /// second half: a kernel that sums pairs starts from multiples of them, to count weights from the middle of
  /// their range.
  std::int16_t minus[2][2];
};

/// Bytes of a row of quantised activations.
constexpr std::size_t activation_bytes(std::size_t inputs) {
  return inputs / kBlockInputs * sizeof(ActivationBlock);
}

/// Quantises `blocks` times 32 values.
void quantise_activations(const float* from, std::size_t blocks, ActivationBlock* to);

/// Part `part` of `parts` of the products of x [rows, inputs] with matrices of these inputs: [rows, outputs]
/// of each, one after the other in `out`. All parts together compute them.
void multiply(std::span<const PackedMatrix* const> matrices, const ActivationBlock* x, std::uint32_t rows,
              std::uint32_t part, std::uint32_t parts, float* out);
/// The same of one matrix, plus `addend`, whose rows are `addend_stride` floats apart: 0 for a bias.
void multiply_add(const PackedMatrix& matrix, const ActivationBlock* x, std::uint32_t rows,
                  const float* addend, std::size_t addend_stride, std::uint32_t part, std::uint32_t parts,
                  float* out);

/// Names of the instruction sets compiled in that this machine can run, best first.
std::vector<std::string> product_targets();
/// Makes later calls use one of product_targets(); an empty name returns to the best. For tests and
/// benchmarks.
void force_product_target(const std::string& name);

}  // namespace dualdecoder
