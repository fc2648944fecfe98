#include "attention/kernel.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/f16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernel.cc"
#ifndef HWY_DISABLED_TARGETS
// Vectors without a fixed size cannot stand in the arrays of accumulators below.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <hwy/cache_control.h>

HWY_BEFORE_NAMESPACE();
namespace dualdecoder {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Halves = hn::Rebind<hwy::float16_t, Floats>;
using Vector = hn::Vec<Floats>;

constexpr int kLanes = static_cast<int>(hn::MaxLanes(Floats()));
static_assert(16 % kLanes == 0, "columns come in multiples of 16");

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
constexpr int kAccumulatorsMax = 24;  // of 32 registers
#elif HWY_ARCH_ARM_A64
constexpr int kAccumulatorsMax = 16;  // of 32: GCC holds the factors of all rows, and spills with 24
#else
constexpr int kAccumulatorsMax = 12;  // of 16
#endif
constexpr int kRowsMax = kAccumulatorsMax / 2;
/// Vectors of columns that the last few columns come in.
constexpr int kVectorsMin = 16 / kLanes < 2 ? 1 : 2;

/// Vectors of columns for `rows` rows: as many as the registers hold, to have enough independent sums in
/// flight.
constexpr int vectors_for(int rows) {
  int vectors = 8;
  while (vectors * rows > kAccumulatorsMax) vectors /= 2;
  return vectors > kVectorsMin ? vectors : kVectorsMin;
}

HWY_INLINE Vector load(const f16_bits* from) {
  return hn::PromoteTo(Floats(), hn::LoadU(Halves(), reinterpret_cast<const hwy::float16_t*>(from)));
}

/// sums[kRows, kVectors] += a[kRows, depth] * b[depth, kVectors]: one multiply-add per element and step of
/// depth.
/// Asks for the cache lines of `ahead` as it goes: blocks lie scattered, a page or two each, too short for
/// the processor to see a pattern. Per Zen 3 core this reads 12 GB/s where none of it reads 8, and asking for
/// a whole tile at a time 9. Tried and lost for many rows: converting a tile to f32 once (5 % slower).
template <int kRows, int kVectors>
HWY_INLINE void multiply(const float* HWY_RESTRICT a, std::size_t a_stride,
                         const f16_bits* const (&b)[kVectors], const f16_bits* const (&ahead)[kVectors],
                         std::size_t b_stride, std::size_t depth, Vector (&sums)[kRows][kVectors]) {
  for (std::size_t k = 0; k < depth; ++k) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; v += 16 / kLanes) hwy::Prefetch(ahead[v] + k * b_stride);
    // The shorter side is held, the longer one streams through a single register.
    if constexpr (kVectors <= kRows) {
      Vector columns[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) columns[v] = load(b[v] + k * b_stride);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vector factor = hn::Set(Floats(), a[r * a_stride + k]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(factor, columns[v], sums[r][v]);
      }
    } else {
      Vector factors[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) factors[r] = hn::Set(Floats(), a[r * a_stride + k]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const Vector column = load(b[v] + k * b_stride);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) sums[r][v] = hn::MulAdd(factors[r], column, sums[r][v]);
      }
    }
  }
}

/// Scores of kRows rows against the tile's columns [vector, vector + kVectors) * kLanes.
template <int kRows, int kVectors>
HWY_INLINE void score_columns(const KeyTile& tile, const float* q, std::size_t vector, float* scores) {
  const f16_bits* k[kVectors];
  const f16_bits* ahead[kVectors];
  const int shift = std::countr_zero(tile.block_tokens);
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const std::size_t column = (vector + v) * kLanes;
    const KeyTile::Block& block = tile.blocks[column >> shift];
    const std::size_t offset = column & (tile.block_tokens - 1);
    k[v] = block.k + offset;
    ahead[v] = block.v + offset;
  }
  Vector sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(Floats());
  }
  multiply<kRows, kVectors>(q, tile.head_dim, k, ahead, tile.block_tokens, tile.head_dim, sums);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(sums[r][v], Floats(), scores + r * kTileKeys + (vector + v) * kLanes);
    }
  }
}

template <int kRows>
void score_rows(const KeyTile& tile, const float* q, float* scores) {
  constexpr int kVectors = vectors_for(kRows);
  const std::size_t vectors = tile.columns() / kLanes;
  std::size_t vector = 0;
  for (; vector + kVectors <= vectors; vector += kVectors) {
    score_columns<kRows, kVectors>(tile, q, vector, scores);
  }
  for (; vector < vectors; vector += kVectorsMin) {
    score_columns<kRows, kVectorsMin>(tile, q, vector, scores);
  }
}

/// The part of out = out * rescale + weights * V in columns [vector, vector + kVectors) * kLanes.
template <int kRows, int kVectors>
HWY_INLINE void value_columns(const KeyTile& tile, const float* weights, const float* rescale,
                              std::size_t vector, float* out) {
  float* const first = out + vector * kLanes;
  Vector sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Vector factor = hn::Set(Floats(), rescale[r]);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = hn::Mul(hn::LoadU(Floats(), first + r * tile.head_dim + v * kLanes), factor);
    }
  }
  for (std::uint32_t i = 0; i < tile.count; ++i) {
    const KeyTile::Block& block = tile.blocks[i];
    const f16_bits* columns[kVectors];
    const f16_bits* ahead[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = block.v + (vector + v) * kLanes;
      ahead[v] = block.next_k + (vector + v) * kLanes;
    }
    multiply<kRows, kVectors>(weights + i * tile.block_tokens, kTileKeys, columns, ahead, tile.head_dim,
                              block.tokens, sums);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(sums[r][v], Floats(), first + r * tile.head_dim + v * kLanes);
    }
  }
}

template <int kRows>
void value_rows(const KeyTile& tile, const float* weights, const float* rescale, float* out) {
  constexpr int kVectors = vectors_for(kRows);
  const std::size_t vectors = tile.head_dim / kLanes;
  std::size_t vector = 0;
  for (; vector + kVectors <= vectors; vector += kVectors) {
    value_columns<kRows, kVectors>(tile, weights, rescale, vector, out);
  }
  for (; vector < vectors; vector += kVectorsMin) {
    value_columns<kRows, kVectorsMin>(tile, weights, rescale, vector, out);
  }
}

/// The two products for 1 to kRowsMax rows; entry r - 1 is for r rows.
struct RowKernels {
  void (*score)(const KeyTile&, const float*, float*);
  void (*value)(const KeyTile&, const float*, const float*, float*);
};
template <int... kIndex>
constexpr auto make_row_kernels(std::integer_sequence<int, kIndex...>) {
  return std::array<RowKernels, sizeof...(kIndex)>{
      RowKernels{score_rows<kIndex + 1>, value_rows<kIndex + 1>}...};
}
constexpr auto kRowKernels = make_row_kernels(std::make_integer_sequence<int, kRowsMax>());

/// Calls body(first row, rows) for as few and as even parts of `rows` as the registers allow: 9 = 5 + 4.
template <typename Body>
HWY_INLINE void for_row_parts(std::uint32_t rows, const Body& body) {
  const std::uint32_t parts = (rows + kRowsMax - 1) / kRowsMax;
  for (std::uint32_t part = 0, first = 0; part < parts; ++part) {
    const std::uint32_t count = rows / parts + (part < rows % parts ? 1 : 0);
    body(first, count);
    first += count;
  }
}

void scores(const KeyTile& tile, const float* q, std::uint32_t rows, float* to) {
  for_row_parts(rows, [&](std::uint32_t first, std::uint32_t count) HWY_ATTR {
    kRowKernels[count - 1].score(tile, q + first * tile.head_dim, to + first * kTileKeys);
  });
}

void values(const KeyTile& tile, const float* weights, const float* rescale, std::uint32_t rows, float* out) {
  for_row_parts(rows, [&](std::uint32_t first, std::uint32_t count) HWY_ATTR {
    kRowKernels[count - 1].value(tile, weights + first * kTileKeys, rescale + first,
                                 out + first * tile.head_dim);
  });
}

/// 2^x for x <= 0, relative error below 2e-7; exactly 1 at 0, exactly 0 below -127. NaN gives anything.
HWY_INLINE Vector exp2_nonpositive(Vector x) {
  const Floats d;
  const hn::RebindToSigned<Floats> di;
  x = hn::Max(x, hn::Set(d, -127.0f));
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
  const Vector magic = hn::Set(d, 12582912.0f);
  const Vector shifted = hn::Add(x, magic);
  const Vector fraction = hn::Sub(x, hn::Sub(shifted, magic));
  // Minimax polynomial of 2^fraction on [-1/2, 1/2] with value 1 at 0.
  Vector y = hn::Set(d, 0.0013264722f);
  y = hn::MulAdd(y, fraction, hn::Set(d, 0.009671513f));
  y = hn::MulAdd(y, fraction, hn::Set(d, 0.0555073376f));
  y = hn::MulAdd(y, fraction, hn::Set(d, 0.2402224208f));
  y = hn::MulAdd(y, fraction, hn::Set(d, 0.6931469776f));
  y = hn::MulAdd(y, fraction, hn::Set(d, 1.0f));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, y), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

HWY_INLINE float exp2_nonpositive(float x) { return hn::GetLane(exp2_nonpositive(hn::Set(Floats(), x))); }

void softmax(std::uint32_t columns, std::uint32_t rows, float* scores, const AttentionState& state,
             float* rescale) {
  const Floats d;
  for (std::uint32_t r = 0; r < rows; ++r) {
    float* const row = scores + r * kTileKeys;
    Vector highest = hn::Set(d, state.max[r]);
    for (std::uint32_t c = 0; c < columns; c += kLanes) highest = hn::Max(highest, hn::LoadU(d, row + c));
    const float max = hn::GetLane(hn::MaxOfLanes(d, highest));
    // A row that has seen nothing yet has max -inf; with 0 in its place every weight becomes 2^-inf = 0.
    const float base = max == -std::numeric_limits<float>::infinity() ? 0.0f : max;
    const Vector base_vector = hn::Set(d, base);
    Vector sum = hn::Zero(d);
    for (std::uint32_t c = 0; c < columns; c += kLanes) {
      const Vector weight = exp2_nonpositive(hn::Sub(hn::LoadU(d, row + c), base_vector));
      hn::StoreU(weight, d, row + c);
      sum = hn::Add(sum, weight);
    }
    rescale[r] = exp2_nonpositive(state.max[r] - base);
    state.sum[r] = state.sum[r] * rescale[r] + hn::GetLane(hn::SumOfLanes(d, sum));
    state.max[r] = max;
  }
}

void merge(std::uint32_t rows, std::uint32_t head_dim, const AttentionState& part,
           const AttentionState& total) {
  const Floats d;
  for (std::uint32_t r = 0; r < rows; ++r) {
    if (part.max[r] == -std::numeric_limits<float>::infinity()) continue;
    const float max = std::fmax(total.max[r], part.max[r]);
    const float keep = exp2_nonpositive(total.max[r] - max);
    const float add = exp2_nonpositive(part.max[r] - max);
    total.sum[r] = total.sum[r] * keep + part.sum[r] * add;
    total.max[r] = max;
    float* const to = total.out + r * head_dim;
    const float* const from = part.out + r * head_dim;
    for (std::uint32_t c = 0; c < head_dim; c += kLanes) {
      const Vector kept = hn::Mul(hn::LoadU(d, to + c), hn::Set(d, keep));
      hn::StoreU(hn::MulAdd(hn::LoadU(d, from + c), hn::Set(d, add), kept), d, to + c);
    }
  }
}

void to_f16(const float* from, std::size_t count, f16_bits* to) {
  std::size_t i = 0;
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_ARCH_ARM_A64  // elsewhere Highway truncates
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(hn::DemoteTo(Halves(), hn::LoadU(Floats(), from + i)), Halves(),
               reinterpret_cast<hwy::float16_t*>(to + i));
  }
#endif
  for (; i < count; ++i) to[i] = f16_from_float(from[i]);
}

}  // namespace

const Kernels* kernels() {
  static const Kernels table = {.target = hwy::TargetName(HWY_TARGET),
                                .scores = scores,
                                .softmax = softmax,
                                .values = values,
                                .merge = merge,
                                .to_f16 = to_f16};
  return &table;
}

}  // namespace HWY_NAMESPACE
}  // namespace dualdecoder
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "base/simd_targets.h"  // after HWY_DISABLED_TARGETS

namespace dualdecoder {

HWY_EXPORT(kernels);

namespace {
SimdTargets<Kernels>& targets() {
  static SimdTargets<Kernels> targets(HWY_DISPATCH_TABLE(kernels), HWY_TARGETS, "attention");
  return targets;
}
}  // namespace

std::span<const Kernels* const> available_kernels() { return targets().available(); }
const Kernels& current_kernels() { return targets().current(); }
std::vector<std::string> attention_targets() { return targets().names(); }
void force_attention_target(const std::string& name) { targets().force(name); }

}  // namespace dualdecoder
#endif  // HWY_ONCE
