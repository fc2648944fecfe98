// The arithmetic of digests and of ranking, for each instruction set. Pure functions on buffers of the
// caller.
//
// Scores are in units of log2 (the caller scales the query) and are clamped to +-kScoreMax, NaN to the lower
// end, so that sums and differences of them stay finite. -inf marks a column that is no candidate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "select/digest.h"

namespace dualdecoder {

inline constexpr float kScoreMax = 1e30f;

/// Tiles of digests (select/digest.h) as columns: tile i holds columns [16 * i, 16 * i + 16).
struct DigestColumns {
  DigestType type = DigestType::kF16;
  std::uint32_t head_dim = 0;
  const std::byte* const* tiles = nullptr;  // [count]
  std::uint32_t count = 0;
  std::size_t offset = 0;  // of the KV head in each tile, in bytes
};

/// Some query heads, each as two vectors: q for the centres and p for the radii. For int8 digests in 16-bit
/// steps, so that the products are sums of integers.
struct ScoreQuery {
  const float* values = nullptr;        // [rows, 2 * head_dim]
  const std::int16_t* steps = nullptr;  // the same, values = step * steps
  const float* step = nullptr;          // [rows]

  ScoreQuery from_row(std::size_t row, std::uint32_t head_dim) const {
    const std::size_t offset = row * 2 * head_dim;
    return {values + offset, steps + offset, step + row};
  }
};

struct Extent {
  float low;   // not above 0
  float high;  // not below 0
};

struct ScoreKernels {
  const char* target;

  /// to[r, column] = q[r] . c + |p[r] . r|.  to: [rows, stride].
  void (*scores)(const DigestColumns& from, const ScoreQuery& query, std::uint32_t rows, float* to,
                 std::size_t stride);

  /// Rounds to steps and returns the step; NaN, and all steps 0, unless everything is finite. `count` is a
  /// multiple of 16.
  float (*steps)(const float* from, std::size_t count, std::int16_t* to);

  // Below, `columns` is a multiple of 16.

  float (*highest)(const float* from, std::size_t columns);
  /// to = 2^(from - max), which is returned as a sum, too. `max` is not below any score. In place is allowed.
  float (*weights)(const float* from, std::size_t columns, float max, float* to);
  /// to[column] = the sum over rows of factors[row] * from[row, column].
  void (*pool)(const float* from, std::size_t stride, const float* factors, std::uint32_t rows,
               std::size_t columns, float* to);

  // Of 16 keys. k: [rows, stride], a row for each dimension.

  /// Lowest and highest of each row.
  void (*box)(const f16_bits* k, std::size_t rows, std::size_t stride, float* low, float* high);
  /// Mean and mean absolute deviation of each row.
  void (*mean)(const f16_bits* k, std::size_t rows, std::size_t stride, float* mean, float* deviation);
  /// Mean, and about the direction of greatest variance: a unit vector, or 0 if all keys are equal. Returned
  /// is what the keys reach along it from the mean. Values beyond f16 are clamped to it, NaN counts as 0.
  Extent (*principal)(const f16_bits* k, std::size_t rows, std::size_t stride, float* mean, float* direction);
};

/// For every instruction set compiled in that this machine can run, best first.
std::span<const ScoreKernels* const> available_score_kernels();
/// The first of these, or the one that force_score_target() has named.
const ScoreKernels& current_score_kernels();

std::vector<std::string> score_targets();
/// Makes later calls use one of score_targets(); an empty name returns to the best. For tests and benchmarks.
void force_score_target(const std::string& name);

}  // namespace dualdecoder
