#include "select/score.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "select/score.cc"
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
using Vector = hn::Vec<Floats>;

constexpr int kLanes = static_cast<int>(hn::MaxLanes(Floats()));
static_assert(16 % kLanes == 0, "a row of a tile is a whole number of vectors");
/// Vectors of one row of a tile.
constexpr int kTileVectors = 16 / kLanes;

#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3) || HWY_ARCH_ARM_A64
constexpr bool kManyRegisters = true;  // 32
#else
constexpr bool kManyRegisters = false;  // 16
#endif

HWY_INLINE Vector load(const f16_bits* from) {
  const hn::Rebind<hwy::float16_t, Floats> d;
  return hn::PromoteTo(Floats(), hn::LoadU(d, reinterpret_cast<const hwy::float16_t*>(from)));
}

// Products of bytes: for each of kLanes columns two neighbouring values at a time, in 32 bits.
using Int32s = hn::RebindToSigned<Floats>;
using Integers = hn::Vec<Int32s>;

#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
using Int16s = hn::Repartition<std::int16_t, Int32s>;
using Pairs = hn::Vec<Int16s>;

HWY_INLINE Pairs set_pair(const std::int16_t* from) {
  std::int32_t both;
  std::memcpy(&both, from, sizeof(both));
  return hn::BitCast(Int16s(), hn::Set(Int32s(), both));
}
HWY_INLINE Pairs load_pairs(const std::int8_t* from) {
  return hn::PromoteTo(Int16s(), hn::LoadU(hn::Rebind<std::int8_t, Int16s>(), from));
}
HWY_INLINE Integers multiply_add(Pairs a, Pairs b, Integers sum) {
  Integers unused = hn::Zero(Int32s());  // on x86 the sum of each pair stays in its place
  return hn::ReorderWidenMulAccumulate(Int32s(), a, b, sum, unused);
}
#else
struct Pairs {
  Integers first;
  Integers second;
};

HWY_INLINE Pairs set_pair(const std::int16_t* from) {
  return {hn::Set(Int32s(), from[0]), hn::Set(Int32s(), from[1])};
}
HWY_INLINE Pairs load_pairs(const std::int8_t* from) {
  const hn::Rebind<std::int16_t, Int32s> d;
  const Integers both = hn::PromoteTo(Int32s(), hn::LoadU(d, reinterpret_cast<const std::int16_t*>(from)));
  return {hn::ShiftRight<24>(hn::ShiftLeft<24>(both)), hn::ShiftRight<8>(both)};
}
HWY_INLINE Integers multiply_add(const Pairs& a, const Pairs& b, Integers sum) {
  return hn::Add(sum, hn::Add(hn::Mul(a.first, b.first), hn::Mul(a.second, b.second)));
}
#endif

// Values and products of the two element types: `kDepth` rows of a tile at a time.

struct HalfProduct {
  using Factor = Vector;
  using Sum = Vector;
  static constexpr std::size_t kDepth = 1;
  static constexpr int kSumsMax = kManyRegisters ? 16 : 12;
  static HWY_INLINE Vector zero() { return hn::Zero(Floats()); }
  static HWY_INLINE Vector set(const float* from) { return hn::Set(Floats(), *from); }
  static HWY_INLINE Vector load_columns(const f16_bits* from) { return load(from); }
  static HWY_INLINE Vector add(Vector a, Vector b, Vector sum) { return hn::MulAdd(a, b, sum); }
};

struct ByteProduct {
  using Factor = Pairs;
  using Sum = Integers;
  static constexpr std::size_t kDepth = 2;
  // GCC takes a register for each product before it is added; and an addition takes one cycle, not four.
  static constexpr int kSumsMax = kManyRegisters ? 12 : 6;
  static HWY_INLINE Integers zero() { return hn::Zero(Int32s()); }
  static HWY_INLINE Pairs set(const std::int16_t* from) { return set_pair(from); }
  static HWY_INLINE Pairs load_columns(const std::int8_t* from) { return load_pairs(from); }
  static HWY_INLINE Integers add(const Pairs& a, const Pairs& b, Integers sum) {
    return multiply_add(a, b, sum);
  }
};

/// Rows that the registers hold sums of.
template <typename Product>
constexpr int kRowsMax = std::clamp(Product::kSumsMax / kTileVectors, 1, 8);

/// Tiles at a time for `rows` rows: as many as the registers hold, to have enough independent sums in flight.
template <typename Product>
constexpr int tiles_for(int rows) {
  int tiles = 4;
  while (tiles > 1 && tiles * kTileVectors * rows > Product::kSumsMax) tiles /= 2;
  return tiles;
}

/// sums[kRows, kVectors] = a[kRows, depth] * b[depth, kVectors], and asks for the cache lines of `ahead` as
/// it goes: tiles lie scattered, too short for the processor to see a pattern. Tried and lost: asking once
/// per line, with the loop unrolled to match (GCC then spills sums).
template <typename Product, int kRows, int kTiles, typename Value, typename Element>
HWY_INLINE void multiply(const Value* HWY_RESTRICT a, std::size_t a_stride, const Element* const (&b)[kTiles],
                         const Element* const (&ahead)[kTiles], std::size_t depth,
                         typename Product::Sum (&sums)[kRows][kTiles * kTileVectors]) {
  constexpr int kVectors = kTiles * kTileVectors;
  using Factor = typename Product::Factor;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Product::zero();
  }
  for (std::size_t k = 0; k < depth; k += Product::kDepth) {
    const std::size_t row = k * 16;
    constexpr std::size_t kVectorElements = kLanes * Product::kDepth;
#pragma GCC unroll 16
    for (int t = 0; t < kTiles; ++t) hwy::Prefetch(ahead[t] + row);
    // The shorter side is held, the longer one streams through a single register.
    if constexpr (kVectors <= kRows) {
      Factor columns[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        columns[v] = Product::load_columns(b[v / kTileVectors] + row + (v % kTileVectors) * kVectorElements);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Factor factor = Product::set(a + r * a_stride + k);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Product::add(factor, columns[v], sums[r][v]);
      }
    } else {
      Factor factors[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) factors[r] = Product::set(a + r * a_stride + k);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const Factor column =
            Product::load_columns(b[v / kTileVectors] + row + (v % kTileVectors) * kVectorElements);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) sums[r][v] = Product::add(factors[r], column, sums[r][v]);
      }
    }
  }
}

/// NaN becomes the lowest score.
HWY_INLINE Vector clamp_score(Vector x) {
  const Vector lowest = hn::Set(Floats(), -kScoreMax);
  const Vector ordered = hn::IfThenElse(hn::Eq(x, x), x, lowest);
  return hn::Min(hn::Max(ordered, lowest), hn::Set(Floats(), kScoreMax));
}

/// Scores of kRows rows against f16 tiles [first, first + kTiles).
template <int kRows, int kTiles>
HWY_INLINE void score_halves(const DigestColumns& from, const std::byte* const (&tiles)[kTiles],
                             const std::byte* const (&ahead)[kTiles], const ScoreQuery& query, float* to,
                             std::size_t stride) {
  constexpr int kVectors = kTiles * kTileVectors;
  const f16_bits* values[kTiles];
  const f16_bits* next[kTiles];
#pragma GCC unroll 16
  for (int t = 0; t < kTiles; ++t) {
    values[t] = reinterpret_cast<const f16_bits*>(tiles[t]);
    next[t] = reinterpret_cast<const f16_bits*>(ahead[t]);
  }
  const std::size_t depth = from.head_dim;
  Vector sums[kRows][kVectors];
  multiply<HalfProduct, kRows, kTiles>(query.values, 2 * depth, values, next, depth, sums);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], Floats(), to + r * stride + v * kLanes);
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTiles; ++t) {
    values[t] += depth * kTileDigests;
    next[t] += depth * kTileDigests;
  }
  multiply<HalfProduct, kRows, kTiles>(query.values + depth, 2 * depth, values, next, depth, sums);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      float* const place = to + r * stride + v * kLanes;
      hn::StoreU(clamp_score(hn::Add(hn::LoadU(Floats(), place), hn::Abs(sums[r][v]))), Floats(), place);
    }
  }
}

/// The same for int8.
template <int kRows, int kTiles>
HWY_INLINE void score_bytes(const DigestColumns& from, const std::byte* const (&tiles)[kTiles],
                            const std::byte* const (&ahead)[kTiles], const ScoreQuery& query, float* to,
                            std::size_t stride) {
  constexpr int kVectors = kTiles * kTileVectors;
  constexpr std::size_t kFactorBytes = 2 * kTileDigests * sizeof(float);
  const std::size_t depth = from.head_dim;
  const std::int8_t* centres[kTiles];
  const std::int8_t* next_centres[kTiles];
  const std::int8_t* radii[kTiles];
  const std::int8_t* next_radii[kTiles];
#pragma GCC unroll 16
  for (int t = 0; t < kTiles; ++t) {
    centres[t] = reinterpret_cast<const std::int8_t*>(tiles[t] + kFactorBytes);
    next_centres[t] = reinterpret_cast<const std::int8_t*>(ahead[t] + kFactorBytes);
    radii[t] = centres[t] + depth * kTileDigests;
    next_radii[t] = next_centres[t] + depth * kTileDigests;
    hwy::Prefetch(ahead[t]);
    hwy::Prefetch(ahead[t] + 64);
  }
  const auto factor = [&](int v, int row) HWY_ATTR {
    const float* const factors = reinterpret_cast<const float*>(tiles[v / kTileVectors]);
    return hn::LoadU(Floats(), factors + row * kTileDigests + (v % kTileVectors) * kLanes);
  };
  Integers sums[kRows][kVectors];
  multiply<ByteProduct, kRows, kTiles>(query.steps, 2 * depth, centres, next_centres, depth, sums);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(hn::Mul(hn::ConvertTo(Floats(), sums[r][v]), factor(v, 0)), Floats(),
                 to + r * stride + v * kLanes);
    }
  }
  multiply<ByteProduct, kRows, kTiles>(query.steps + depth, 2 * depth, radii, next_radii, depth, sums);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Vector step = hn::Set(Floats(), query.step[r]);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      float* const place = to + r * stride + v * kLanes;
      const Vector score =
          hn::MulAdd(hn::Abs(hn::ConvertTo(Floats(), sums[r][v])), factor(v, 1), hn::LoadU(Floats(), place));
      hn::StoreU(clamp_score(hn::Mul(score, step)), Floats(), place);
    }
  }
}

/// Scores of kRows rows against tiles [first, first + kTiles).
template <typename Product, int kRows, int kTiles>
HWY_INLINE void score_tiles(const DigestColumns& from, const ScoreQuery& query, std::uint32_t first,
                            float* to, std::size_t stride) {
  const std::byte* tiles[kTiles];
  const std::byte* ahead[kTiles];
#pragma GCC unroll 16
  for (int t = 0; t < kTiles; ++t) {
    tiles[t] = from.tiles[first + t] + from.offset;
    ahead[t] = from.tiles[std::min<std::uint32_t>(first + kTiles + t, from.count - 1)] + from.offset;
  }
  float* const out = to + std::size_t{first} * kTileDigests;
  if constexpr (std::is_same_v<Product, HalfProduct>) {
    score_halves<kRows, kTiles>(from, tiles, ahead, query, out, stride);
  } else {
    score_bytes<kRows, kTiles>(from, tiles, ahead, query, out, stride);
  }
}

template <typename Product, int kRows>
void score_rows(const DigestColumns& from, const ScoreQuery& query, float* to, std::size_t stride) {
  constexpr int kTiles = tiles_for<Product>(kRows);
  std::uint32_t tile = 0;
  for (; tile + kTiles <= from.count; tile += kTiles) {
    score_tiles<Product, kRows, kTiles>(from, query, tile, to, stride);
  }
  if constexpr (kTiles > 1) {
    for (; tile < from.count; ++tile) score_tiles<Product, kRows, 1>(from, query, tile, to, stride);
  }
}

using RowKernel = void (*)(const DigestColumns&, const ScoreQuery&, float*, std::size_t);
template <typename Product, int... kIndex>
constexpr auto make_row_kernels(std::integer_sequence<int, kIndex...>) {
  return std::array<RowKernel, sizeof...(kIndex)>{score_rows<Product, kIndex + 1>...};
}
/// Entry r - 1 is for r rows.
template <typename Product>
constexpr auto kRowKernels = make_row_kernels<Product>(std::make_integer_sequence<int, kRowsMax<Product>>());

/// In as few and as even parts of `rows` as the registers allow: 9 = 5 + 4.
template <typename Product>
HWY_INLINE void score_parts(const DigestColumns& from, const ScoreQuery& query, std::uint32_t rows, float* to,
                            std::size_t stride) {
  const std::uint32_t parts = (rows + kRowsMax<Product> - 1) / kRowsMax<Product>;
  for (std::uint32_t part = 0, first = 0; part < parts; ++part) {
    const std::uint32_t count = rows / parts + (part < rows % parts ? 1 : 0);
    const ScoreQuery part_query = query.from_row(first, from.head_dim);
    kRowKernels<Product>[count - 1](from, part_query, to + first * stride, stride);
    first += count;
  }
}

void scores(const DigestColumns& from, const ScoreQuery& query, std::uint32_t rows, float* to,
            std::size_t stride) {
  if (from.type == DigestType::kF16) {
    score_parts<HalfProduct>(from, query, rows, to, stride);
  } else {
    score_parts<ByteProduct>(from, query, rows, to, stride);
  }
}

/// The largest 16-bit step: 127 * 256 products of it fit into 32 bits.
constexpr float kStepsMax = 32767;

float steps(const float* from, std::size_t count, std::int16_t* to) {
  const Floats d;
  Vector largest = hn::Zero(d);
  Vector sum = hn::Zero(d);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Vector magnitude = hn::Abs(hn::LoadU(d, from + i));
    largest = hn::Max(largest, magnitude);
    sum = hn::Add(sum, magnitude);
  }
  const float most = hn::GetLane(hn::MaxOfLanes(d, largest));
  const bool finite = hn::GetLane(hn::SumOfLanes(d, sum)) <= std::numeric_limits<float>::max();
  const Vector inverse = hn::Set(d, finite && most > 0 ? kStepsMax / most : 0);
  const Vector limit = hn::Set(d, kStepsMax);
  const hn::Rebind<std::int16_t, Floats> d16;
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Vector exact = hn::Mul(hn::LoadU(d, from + i), inverse);
    const Vector bounded = hn::Max(hn::Min(exact, limit), hn::Neg(limit));
    const auto rounded = hn::NearestInt(finite ? bounded : hn::Zero(d));
    hn::StoreU(hn::DemoteTo(d16, rounded), d16, to + i);
  }
  return finite ? most / kStepsMax : std::numeric_limits<float>::quiet_NaN();
}

/// 2^x for x <= 0, relative error below 2e-7; exactly 0 below -127. The same as in attention/kernel.cc.
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

float highest(const float* from, std::size_t columns) {
  Vector best = hn::Set(Floats(), -std::numeric_limits<float>::infinity());
  for (std::size_t c = 0; c < columns; c += kLanes) best = hn::Max(best, hn::LoadU(Floats(), from + c));
  return hn::GetLane(hn::MaxOfLanes(Floats(), best));
}

float weights(const float* from, std::size_t columns, float max, float* to) {
  const Vector base = hn::Set(Floats(), max);
  Vector sum = hn::Zero(Floats());
  for (std::size_t c = 0; c < columns; c += kLanes) {
    const Vector weight = exp2_nonpositive(hn::Sub(hn::LoadU(Floats(), from + c), base));
    hn::StoreU(weight, Floats(), to + c);
    sum = hn::Add(sum, weight);
  }
  return hn::GetLane(hn::SumOfLanes(Floats(), sum));
}

void pool(const float* from, std::size_t stride, const float* factors, std::uint32_t rows,
          std::size_t columns, float* to) {
  for (std::size_t c = 0; c < columns; c += 16) {
    Vector sums[kTileVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kTileVectors; ++v) sums[v] = hn::Zero(Floats());
    for (std::uint32_t r = 0; r < rows; ++r) {
      const Vector factor = hn::Set(Floats(), factors[r]);
#pragma GCC unroll 16
      for (int v = 0; v < kTileVectors; ++v) {
        sums[v] = hn::MulAdd(hn::LoadU(Floats(), from + r * stride + c + v * kLanes), factor, sums[v]);
      }
    }
#pragma GCC unroll 16
    for (int v = 0; v < kTileVectors; ++v) hn::StoreU(sums[v], Floats(), to + c + v * kLanes);
  }
}

/// `x`, or `other` where it is NaN.
HWY_INLINE Vector unless_nan(Vector x, Vector other) { return hn::IfThenElse(hn::Eq(x, x), x, other); }

void box(const f16_bits* k, std::size_t rows, std::size_t stride, float* low, float* high) {
  const Floats d;
  for (std::size_t row = 0; row < rows; ++row) {
    const f16_bits* const tokens = k + row * stride;
    Vector lowest = hn::Set(d, std::numeric_limits<float>::infinity());
    Vector most = hn::Set(d, -std::numeric_limits<float>::infinity());
    for (std::uint32_t t = 0; t < kDigestTokens; t += kLanes) {
      const Vector x = load(tokens + t);
      lowest = hn::Min(lowest, unless_nan(x, lowest));
      most = hn::Max(most, unless_nan(x, most));
    }
    low[row] = hn::GetLane(hn::MinOfLanes(d, lowest));
    high[row] = hn::GetLane(hn::MaxOfLanes(d, most));
  }
}

void mean(const f16_bits* k, std::size_t rows, std::size_t stride, float* mean_of, float* deviation) {
  const Floats d;
  const Vector zero = hn::Zero(d);
  constexpr float kShare = 1.0f / static_cast<float>(kDigestTokens);
  for (std::size_t row = 0; row < rows; ++row) {
    const f16_bits* const tokens = k + row * stride;
    Vector sum = zero;
    for (std::uint32_t t = 0; t < kDigestTokens; t += kLanes) {
      sum = hn::Add(sum, unless_nan(load(tokens + t), zero));
    }
    mean_of[row] = hn::GetLane(hn::SumOfLanes(d, sum)) * kShare;
    const Vector centre = hn::Set(d, mean_of[row]);
    Vector distance = zero;
    for (std::uint32_t t = 0; t < kDigestTokens; t += kLanes) {
      distance = hn::Add(distance, unless_nan(hn::Abs(hn::Sub(load(tokens + t), centre)), zero));
    }
    deviation[row] = hn::GetLane(hn::SumOfLanes(d, distance)) * kShare;
  }
}

// The principal direction. 16 tokens are kTokenVectors vectors; x: [rows, 16] is the keys less their mean.

constexpr int kTokenVectors = static_cast<int>(kDigestTokens) / kLanes;
constexpr std::size_t kRowsOfKeysMax = 256;
constexpr int kPowerIterations = 2;

/// Fills x and mean.
HWY_INLINE void subtract_mean(const f16_bits* k, std::size_t rows, std::size_t stride, float* mean_of,
                              float* x) {
  const Floats d;
  const Vector largest = hn::Set(d, 65504.0f);
  for (std::size_t row = 0; row < rows; ++row) {
    Vector values[kTokenVectors];
    Vector sum = hn::Zero(d);
    for (int t = 0; t < kTokenVectors; ++t) {
      const Vector value = unless_nan(load(k + row * stride + t * kLanes), hn::Zero(d));
      values[t] = hn::Min(hn::Max(value, hn::Neg(largest)), largest);
      sum = hn::Add(sum, values[t]);
    }
    mean_of[row] = hn::GetLane(hn::SumOfLanes(d, sum)) * (1.0f / static_cast<float>(kDigestTokens));
    const Vector centre = hn::Set(d, mean_of[row]);
    for (int t = 0; t < kTokenVectors; ++t) {
      hn::StoreU(hn::Sub(values[t], centre), d, x + row * kDigestTokens + t * kLanes);
    }
  }
}

/// The token farthest from the mean.
HWY_INLINE std::size_t farthest_token(const float* x, std::size_t rows) {
  const Floats d;
  Vector sums[kTokenVectors];
  for (Vector& sum : sums) sum = hn::Zero(d);
  for (std::size_t row = 0; row < rows; ++row) {
    for (int t = 0; t < kTokenVectors; ++t) {
      const Vector value = hn::LoadU(d, x + row * kDigestTokens + t * kLanes);
      sums[t] = hn::MulAdd(value, value, sums[t]);
    }
  }
  float distances[kDigestTokens];
  for (int t = 0; t < kTokenVectors; ++t) hn::StoreU(sums[t], d, distances + t * kLanes);
  return static_cast<std::size_t>(std::max_element(distances, distances + kDigestTokens) - distances);
}

/// Makes `direction` a unit vector, or 0.
HWY_INLINE void set_unit(float* direction, std::size_t rows) {
  const Floats d;
  Vector sum = hn::Zero(d);
  for (std::size_t row = 0; row < rows; row += kLanes) {
    const Vector value = hn::LoadU(d, direction + row);
    sum = hn::MulAdd(value, value, sum);
  }
  const float norm = std::sqrt(hn::GetLane(hn::SumOfLanes(d, sum)));
  const Vector inverse = hn::Set(d, norm > std::numeric_limits<float>::min() ? 1 / norm : 0);
  for (std::size_t row = 0; row < rows; row += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, direction + row), inverse), d, direction + row);
  }
}

/// along[token] = direction . x.
HWY_INLINE void project(const float* x, std::size_t rows, const float* direction,
                        Vector (&along)[kTokenVectors]) {
  const Floats d;
  for (Vector& sum : along) sum = hn::Zero(d);
  for (std::size_t row = 0; row < rows; ++row) {
    const Vector factor = hn::Set(d, direction[row]);
    for (int t = 0; t < kTokenVectors; ++t) {
      along[t] = hn::MulAdd(factor, hn::LoadU(d, x + row * kDigestTokens + t * kLanes), along[t]);
    }
  }
}

Extent principal(const f16_bits* k, std::size_t rows, std::size_t stride, float* mean_of, float* direction) {
  const Floats d;
  float x[kRowsOfKeysMax * kDigestTokens];
  subtract_mean(k, rows, stride, mean_of, x);
  const std::size_t start = farthest_token(x, rows);
  for (std::size_t row = 0; row < rows; ++row) direction[row] = x[row * kDigestTokens + start];
  set_unit(direction, rows);
  Vector along[kTokenVectors];
  project(x, rows, direction, along);
  for (int i = 0; i < kPowerIterations; ++i) {
    for (std::size_t row = 0; row < rows; ++row) {
      Vector sum = hn::Zero(d);
      for (int t = 0; t < kTokenVectors; ++t) {
        sum = hn::MulAdd(along[t], hn::LoadU(d, x + row * kDigestTokens + t * kLanes), sum);
      }
      direction[row] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
    set_unit(direction, rows);
    project(x, rows, direction, along);
  }
  Vector low = hn::Zero(d);
  Vector high = hn::Zero(d);
  for (int t = 0; t < kTokenVectors; ++t) {
    low = hn::Min(low, along[t]);
    high = hn::Max(high, along[t]);
  }
  return {hn::GetLane(hn::MinOfLanes(d, low)), hn::GetLane(hn::MaxOfLanes(d, high))};
}

}  // namespace

const ScoreKernels* score_kernels() {
  static const ScoreKernels table = {.target = hwy::TargetName(HWY_TARGET),
                                     .scores = scores,
                                     .steps = steps,
                                     .highest = highest,
                                     .weights = weights,
                                     .pool = pool,
                                     .box = box,
                                     .mean = mean,
                                     .principal = principal};
  return &table;
}

}  // namespace HWY_NAMESPACE
}  // namespace dualdecoder
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "base/simd_targets.h"  // after HWY_DISABLED_TARGETS

namespace dualdecoder {

HWY_EXPORT(score_kernels);

namespace {
SimdTargets<ScoreKernels>& targets() {
  static SimdTargets<ScoreKernels> targets(HWY_DISPATCH_TABLE(score_kernels), HWY_TARGETS, "score");
  return targets;
}
}  // namespace

std::span<const ScoreKernels* const> available_score_kernels() { return targets().available(); }
const ScoreKernels& current_score_kernels() { return targets().current(); }
std::vector<std::string> score_targets() { return targets().names(); }
void force_score_target(const std::string& name) { targets().force(name); }

}  // namespace dualdecoder
#endif  // HWY_ONCE
