#include "products/kernel.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "products/format.h"

#ifndef __clang__         // which would have to be told of VNNI function by function
#define HWY_WANT_AVX3_DL  // the set with VNNI, which Highway leaves out unless asked
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "products/kernel.cc"
#ifndef HWY_DISABLED_TARGETS
// Vectors without a fixed size cannot stand in the arrays of accumulators below.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <hwy/cache_control.h>

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET == HWY_AVX3_DL
// Highway asks the machine for it and does not tell the compiler.
#pragma GCC target("avx512vnni")
#endif
namespace dualdecoder {
namespace HWY_NAMESPACE {

// One lane is no vector: the baseline of x86 computes by the reference.
#if HWY_TARGET != HWY_SCALAR
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using Ints = hn::ScalableTag<std::int32_t>;
using Floats = hn::RebindToFloat<Ints>;
using Halves = hn::Rebind<hwy::float16_t, Floats>;
using Shorts = hn::Repartition<std::int16_t, Ints>;
using Bytes = hn::Repartition<std::uint8_t, Ints>;
using SignedBytes = hn::Repartition<std::int8_t, Ints>;
using IntVector = hn::Vec<Ints>;
using FloatVector = hn::Vec<Floats>;
using ShortVector = hn::Vec<Shorts>;
using ByteVector = hn::Vec<Bytes>;

constexpr int kLanes = static_cast<int>(hn::MaxLanes(Ints()));
static_assert(kPanelOutputs % kLanes == 0 && kLanes % 4 == 0);

// Vectors of outputs and rows that are worked on together: their sums, the weights and one activation are to
// stay in registers.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
constexpr int kVectors = 1;  // of 16 lanes; 32 registers
constexpr int kRowsMax = 8;
#elif HWY_ARCH_ARM_A64
constexpr int kVectors = 4;  // of 4 lanes; 32 registers
constexpr int kRowsMax = 4;
#else
constexpr int kVectors = 2;  // 16 registers
constexpr int kRowsMax = 4;
#endif
constexpr int kColumns = kVectors * kLanes;
static_assert(kPanelOutputs % kColumns == 0);

/// Four activations for every lane.
HWY_INLINE IntVector broadcast(const void* from) {
  std::int32_t four;
  std::memcpy(&four, from, sizeof(four));
  return hn::Set(Ints(), four);
}

// The sum of four products of bytes in each lane. Below 7 bits:
//   Sum      in progress: as narrow as it stays exact over the inputs between start and finish
//   start    of centre * minus, see ActivationBlock
//   add      weights u8 times activations i8
//   finish   in 32 bits, times an integer scale where there is one, as it was prepared
// and for weights of 8 bits, signed, add_signed to a sum in 32 bits that start_signed has begun.
#if HWY_TARGET == HWY_AVX3_DL

using Sum = IntVector;
using Scale = IntVector;
template <int kCentre>
HWY_INLINE Sum start(IntVector minus) {
  if constexpr (kCentre == 0) return hn::Zero(Ints());
  return IntVector{_mm512_madd_epi16(minus.raw, _mm512_set1_epi16(kCentre))};
}
HWY_INLINE Sum add(Sum sum, ByteVector weights, IntVector activations) {
  return IntVector{_mm512_dpbusd_epi32(sum.raw, weights.raw, activations.raw)};
}
HWY_INLINE IntVector finish(Sum sum) { return sum; }
HWY_INLINE Scale prepare(IntVector scale) { return scale; }
HWY_INLINE IntVector finish(Sum sum, Scale scale) { return hn::Mul(sum, scale); }

HWY_INLINE IntVector start_signed(IntVector minus) { return start<128>(minus); }
HWY_INLINE IntVector add_signed(IntVector sum, ByteVector weights, IntVector activations) {
  return add(sum, hn::Xor(weights, hn::Set(Bytes(), 128)), activations);
}

#elif HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128

// Two products are added in 16 bits, where they saturate. The sums over 32 weights of 4 bits, or of 5 about
// their centre, or over 16 weights of 5 bits, or of 6 about their centre, are within 32,512: they may wrap
// around on their way, and end right.
using Sum = ShortVector;
using Scale = ShortVector;
HWY_INLINE ShortVector multiply_bytes(ByteVector weights, hn::Vec<SignedBytes> activations) {
#if HWY_TARGET <= HWY_AVX3
  return ShortVector{_mm512_maddubs_epi16(weights.raw, activations.raw)};
#elif HWY_TARGET == HWY_AVX2
  return ShortVector{_mm256_maddubs_epi16(weights.raw, activations.raw)};
#else
  return ShortVector{_mm_maddubs_epi16(weights.raw, activations.raw)};
#endif
}
HWY_INLINE IntVector multiply_pairs(ShortVector a, ShortVector b) {
#if HWY_TARGET <= HWY_AVX3
  return IntVector{_mm512_madd_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX2
  return IntVector{_mm256_madd_epi16(a.raw, b.raw)};
#else
  return IntVector{_mm_madd_epi16(a.raw, b.raw)};
#endif
}
/// GCC would move the additions behind the last product, and all products would have to be spilled.
template <typename V>
HWY_INLINE V pinned(V sum) {
#if HWY_COMPILER_GCC
  asm("" : "+v"(sum.raw));
#endif
  return sum;
}
template <int kCentre>
HWY_INLINE Sum start(IntVector minus) {
  if constexpr (kCentre == 0) return hn::Zero(Shorts());
  return hn::ShiftLeft<std::countr_zero(static_cast<unsigned>(kCentre))>(hn::BitCast(Shorts(), minus));
}
HWY_INLINE Sum add(Sum sum, ByteVector weights, IntVector activations) {
  return pinned(hn::Add(sum, multiply_bytes(weights, hn::BitCast(SignedBytes(), activations))));
}
HWY_INLINE IntVector finish(Sum sum) { return multiply_pairs(sum, hn::Set(Shorts(), 1)); }
HWY_INLINE Scale prepare(IntVector scale) {
  const IntVector low = hn::And(scale, hn::Set(Ints(), 0xffff));
  return hn::BitCast(Shorts(), hn::Or(low, hn::ShiftLeft<16>(scale)));
}
HWY_INLINE IntVector finish(Sum sum, Scale scale) { return multiply_pairs(sum, scale); }

// The sign of the weight goes to the activation: two products of magnitudes are within 2 * 128 * 127.
HWY_INLINE IntVector start_signed(IntVector /*minus*/) { return hn::Zero(Ints()); }
HWY_INLINE IntVector add_signed(IntVector sum, ByteVector weights, IntVector activations) {
  const hn::Vec<SignedBytes> signed_weights = hn::BitCast(SignedBytes(), weights);
  const ByteVector magnitudes = hn::BitCast(Bytes(), hn::Abs(signed_weights));
#if HWY_TARGET <= HWY_AVX3
  const hn::Vec<SignedBytes> a = hn::BitCast(SignedBytes(), activations);
  const hn::Vec<SignedBytes> turned =
      hn::IfThenElse(hn::Lt(signed_weights, hn::Zero(SignedBytes())), hn::Neg(a), a);
#elif HWY_TARGET == HWY_AVX2
  const hn::Vec<SignedBytes> turned{_mm256_sign_epi8(activations.raw, weights.raw)};
#else
  const hn::Vec<SignedBytes> turned{_mm_sign_epi8(activations.raw, weights.raw)};
#endif
  return pinned(hn::Add(sum, finish(multiply_bytes(magnitudes, turned))));
}

#else

using Sum = IntVector;
using Scale = IntVector;
/// Both signed: weights below 7 bits are, too.
HWY_INLINE IntVector add_signed(IntVector sum, ByteVector weights, IntVector activations) {
#if HWY_ARCH_ARM_A64 && defined(__ARM_FEATURE_DOTPROD)
  return IntVector{vdotq_s32(sum.raw, hn::BitCast(SignedBytes(), weights).raw,
                             hn::BitCast(SignedBytes(), activations).raw)};
#else
  const ShortVector w = hn::BitCast(Shorts(), weights);
  const ShortVector a = hn::BitCast(Shorts(), activations);
  const ShortVector even =
      hn::Mul(hn::ShiftRight<8>(hn::ShiftLeft<8>(w)), hn::ShiftRight<8>(hn::ShiftLeft<8>(a)));
  const ShortVector odd = hn::Mul(hn::ShiftRight<8>(w), hn::ShiftRight<8>(a));
  const IntVector pairs = hn::BitCast(Ints(), hn::Add(even, odd));
  return hn::Add(sum, hn::Add(hn::ShiftRight<16>(hn::ShiftLeft<16>(pairs)), hn::ShiftRight<16>(pairs)));
#endif
}
HWY_INLINE IntVector start_signed(IntVector /*minus*/) { return hn::Zero(Ints()); }
template <int kCentre>
HWY_INLINE Sum start(IntVector minus) {
  const IntVector pairs = hn::Add(hn::ShiftRight<16>(hn::ShiftLeft<16>(minus)), hn::ShiftRight<16>(minus));
  return hn::Mul(pairs, hn::Set(Ints(), kCentre));
}
HWY_INLINE Sum add(Sum sum, ByteVector weights, IntVector activations) {
  return add_signed(sum, weights, activations);
}
HWY_INLINE IntVector finish(Sum sum) { return sum; }
HWY_INLINE Scale prepare(IntVector scale) { return scale; }
HWY_INLINE IntVector finish(Sum sum, Scale scale) { return hn::Mul(sum, scale); }

#endif

template <int kBits>
HWY_INLINE ByteVector shift(ByteVector bytes) {
  const ShortVector shorts = hn::BitCast(Shorts(), bytes);
  if constexpr (kBits >= 0) {
    return hn::BitCast(Bytes(), hn::ShiftLeft<kBits>(shorts));
  } else {
    return hn::BitCast(Bytes(), hn::ShiftRight<-kBits>(shorts));
  }
}

/// The weights of one group of four inputs, from a part's bytes at the first output of the vector.
template <WeightFormat kFormat, int kGroup>
HWY_INLINE ByteVector weights_of(const std::uint8_t* part) {
  constexpr int kBits = static_cast<int>(format_traits(kFormat).bits);
  constexpr int kRow = 4 * kPanelOutputs;
  const Bytes d;
  if constexpr (kBits == 8) return hn::LoadU(d, part + kGroup * kRow);
  const ByteVector both = hn::LoadU(d, part + (kGroup % 4) * kRow);
  const ByteVector low = hn::And(kGroup < 4 ? both : shift<-4>(both), hn::Set(d, 15));
  if constexpr (kBits == 5) {
    const ByteVector high = hn::LoadU(d, part + panel_layout(kFormat).high_bits);
    return hn::Or(low, hn::And(shift<4 - kGroup>(high), hn::Set(d, 16)));
  } else if constexpr (kBits == 6) {
    const ByteVector high = hn::LoadU(d, part + panel_layout(kFormat).high_bits + kGroup / 4 * kRow);
    return hn::Or(low, hn::And(shift<4 - kGroup % 4 * 2>(high), hn::Set(d, 48)));
  }
  return low;
}

template <typename T, int kRows>
using Block = T[kRows][kVectors];

/// The place of a panel's work: kRows rows of activations, `stride` apart.
struct Place {
  const std::uint8_t* weights;  // of a part, at the first output
  const ActivationBlock* x;
  std::size_t stride;
};

template <WeightFormat kFormat, int kRows, int kGroup, typename S>
HWY_INLINE void add_group(const Place& place, Block<S, kRows>& sums) {
  ByteVector weights[kVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    weights[v] = weights_of<kFormat, kGroup>(place.weights + v * kLanes * 4);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const IntVector activations = broadcast(place.x[r * place.stride].q + 4 * kGroup);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (format_traits(kFormat).bits == 8) {
        sums[r][v] = add_signed(sums[r][v], weights[v], activations);
      } else {
        sums[r][v] = add(sums[r][v], weights[v], activations);
      }
    }
  }
}

template <WeightFormat kFormat, int kRows, int kFirst, typename S, int... kIndex>
HWY_INLINE void add_groups(const Place& place, Block<S, kRows>& sums, std::integer_sequence<int, kIndex...>) {
  (add_group<kFormat, kRows, kFirst + kIndex>(place, sums), ...);
}

/// Sums over groups kFirst .. kFirst + kCount - 1 of a part.
template <WeightFormat kFormat, int kRows, int kFirst, int kCount>
HWY_INLINE void sum_groups(const Place& place, Block<Sum, kRows>& sums) {
  constexpr int kCentre = static_cast<int>(format_traits(kFormat).centre);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const auto& minus = place.x[r * place.stride].minus;
    IntVector from = hn::Zero(Ints());
    if constexpr (kCentre != 0) {
      from = broadcast(minus[kFirst == 0 ? 0 : 1]);
      if constexpr (kFirst == 0 && kCount == 4) {
        from = hn::BitCast(Ints(),
                           hn::Sub(hn::BitCast(Shorts(), from), hn::BitCast(Shorts(), broadcast(minus[1]))));
      }
    }
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = start<kCentre>(from);
  }
  add_groups<kFormat, kRows, kFirst>(place, sums, std::make_integer_sequence<int, kCount>());
}

/// Totals of a whole part.
template <WeightFormat kFormat, int kRows>
HWY_INLINE void sum_part(const Place& place, Block<IntVector, kRows>& totals) {
  constexpr FormatTraits kTraits = format_traits(kFormat);
  if constexpr (kTraits.bits == 8) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        totals[r][v] = start_signed(broadcast(place.x[r * place.stride].minus[0]));
      }
    }
    add_groups<kFormat, kRows, 0>(place, totals, std::make_integer_sequence<int, 8>());
  } else {
    constexpr int kCount = kTraits.bits == 5 && kTraits.centre == 0 ? 4 : 8;
    Block<Sum, kRows> sums;
    sum_groups<kFormat, kRows, 0, kCount>(place, sums);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) totals[r][v] = finish(sums[r][v]);
    }
    if constexpr (kCount == 4) {
      sum_groups<kFormat, kRows, 4, 4>(place, sums);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) totals[r][v] = hn::Add(totals[r][v], finish(sums[r][v]));
      }
    }
  }
}

HWY_INLINE FloatVector load_halves(const std::uint8_t* from) {
  return hn::PromoteTo(Floats(), hn::LoadU(Halves(), reinterpret_cast<const hwy::float16_t*>(from)));
}

/// Asks for kBytes that will be read when the panel after this one is worked on: long before, and beyond the
/// page, at which the processor's own prefetching ends.
template <std::uint32_t kBytes>
HWY_INLINE void prefetch(const std::uint8_t* from) {
#pragma GCC unroll 16
  for (std::uint32_t i = 0; i < kBytes; i += 64) hwy::Prefetch(from + i);
}

/// Adds one block of a format without integer scales.
template <WeightFormat kFormat, int kRows>
HWY_INLINE void add_block(const std::uint8_t* block, std::size_t ahead, int column, const ActivationBlock* x,
                          std::size_t stride, Block<FloatVector, kRows>& sums) {
  constexpr PanelLayout kLayout = panel_layout(kFormat);
  prefetch<format_traits(kFormat).bytes * kPanelOutputs>(block + ahead);
  Block<IntVector, kRows> totals;
  sum_part<kFormat, kRows>({block + kLayout.values + column * 4, x, stride}, totals);
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const std::uint8_t* const scales = block + (column + v * kLanes) * 2;
    const FloatVector d = load_halves(scales);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const ActivationBlock& activations = x[r * stride];
      const FloatVector total =
          hn::Mul(hn::ConvertTo(Floats(), totals[r][v]), hn::Set(Floats(), activations.scale));
      sums[r][v] = hn::MulAdd(total, d, sums[r][v]);
    }
    if constexpr (format_traits(kFormat).offset) {
      const FloatVector m = load_halves(scales + kLayout.offsets);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r][v] = hn::MulAdd(m, hn::Set(Floats(), x[r * stride].sum), sums[r][v]);
      }
    }
  }
}

/// `inner` += the sums over groups kFirst .. kFirst + kCount - 1, times integer scales.
template <WeightFormat kFormat, int kRows, int kFirst, int kCount>
HWY_INLINE void add_scaled(const Place& place, const Scale (&scales)[kVectors],
                           Block<FloatVector, kRows>& inner) {
  constexpr FormatTraits kTraits = format_traits(kFormat);
  constexpr bool kHalves = kCount == 8 && kTraits.bits == 5;
  Block<Sum, kRows> sums;
  Block<IntVector, kRows> totals;
  sum_groups<kFormat, kRows, kFirst, kHalves ? 4 : kCount>(place, sums);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) totals[r][v] = finish(sums[r][v], scales[v]);
  }
  if constexpr (kHalves) {
    sum_groups<kFormat, kRows, 4, 4>(place, sums);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) totals[r][v] = hn::Add(totals[r][v], finish(sums[r][v], scales[v]));
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const FloatVector scale = hn::Set(Floats(), place.x[r * place.stride].scale);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      inner[r][v] = hn::MulAdd(hn::ConvertTo(Floats(), totals[r][v]), scale, inner[r][v]);
    }
  }
}

HWY_INLINE IntVector load_bytes(const std::uint8_t* from) {
  return hn::PromoteTo(Ints(), hn::LoadU(hn::Rebind<std::uint8_t, Ints>(), from));
}
HWY_INLINE IntVector load_signed_bytes(const std::uint8_t* from) {
  return hn::PromoteTo(
      Ints(), hn::LoadU(hn::Rebind<std::int8_t, Ints>(), reinterpret_cast<const std::int8_t*>(from)));
}

/// Part `part` of a block of 256 inputs, kOdd = part % 2: `inner` += sums times scales, `low` += offsets
/// times sums of activations.
template <WeightFormat kFormat, int kRows, int kOdd>
HWY_INLINE void add_long_part(const std::uint8_t* block, std::uint32_t part, int column,
                              const ActivationBlock* x, std::size_t stride, Block<FloatVector, kRows>& inner,
                              Block<FloatVector, kRows>& low) {
  constexpr PanelLayout kLayout = panel_layout(kFormat);
  const Place place{block + kLayout.values + part * kLayout.part_bytes + column * 4, x + part, stride};
  const std::uint8_t* const bytes = block + kLayout.scales + column;
  Scale scales[kVectors];
  if constexpr (format_traits(kFormat).scaled == 16) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      scales[v] = prepare(load_signed_bytes(bytes + 2 * part * kPanelOutputs + v * kLanes));
    }
    add_scaled<kFormat, kRows, 0, 4>(place, scales, inner);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      scales[v] = prepare(load_signed_bytes(bytes + (2 * part + 1) * kPanelOutputs + v * kLanes));
    }
    add_scaled<kFormat, kRows, 4, 4>(place, scales, inner);
  } else {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const IntVector four = load_bytes(bytes + part * kPanelOutputs + v * kLanes);
      const IntVector two = load_bytes(bytes + (8 + part / 2) * kPanelOutputs + v * kLanes);
      const auto bits = [&](int mask) { return hn::And(two, hn::Set(Ints(), mask << 4 * kOdd)); };
      const auto up = [](IntVector of) {  // to bits 4 and 5
        if constexpr (kOdd == 0) return hn::ShiftLeft<4>(of);
        return of;
      };
      const auto down = [](IntVector of) {
        if constexpr (kOdd == 0) return hn::ShiftLeft<2>(of);
        return hn::ShiftRight<2>(of);
      };
      scales[v] = prepare(hn::Or(hn::And(four, hn::Set(Ints(), 15)), up(bits(3))));
      const FloatVector offset = hn::ConvertTo(Floats(), hn::Or(hn::ShiftRight<4>(four), down(bits(12))));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        low[r][v] = hn::MulAdd(offset, hn::Set(Floats(), x[r * stride + part].sum), low[r][v]);
      }
    }
    add_scaled<kFormat, kRows, 0, 8>(place, scales, inner);
  }
}

/// Adds one block of 256 inputs.
template <WeightFormat kFormat, int kRows>
HWY_INLINE void add_long_block(const std::uint8_t* block, std::size_t ahead, int column,
                               const ActivationBlock* x, std::size_t stride,
                               Block<FloatVector, kRows>& sums) {
  constexpr FormatTraits kTraits = format_traits(kFormat);
  constexpr PanelLayout kLayout = panel_layout(kFormat);
  Block<FloatVector, kRows> inner;
  Block<FloatVector, kRows> low;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) inner[r][v] = low[r][v] = hn::Zero(Floats());
  }
  for (std::uint32_t part = 0; part < kTraits.parts(); part += 2) {
    constexpr std::uint32_t kShare = kTraits.bytes * kPanelOutputs / kTraits.parts() * 2;
    prefetch<kShare>(block + ahead + part / 2 * kShare);
    add_long_part<kFormat, kRows, 0>(block, part, column, x, stride, inner, low);
    add_long_part<kFormat, kRows, 1>(block, part + 1, column, x, stride, inner, low);
  }
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const std::uint8_t* const scales = block + (column + v * kLanes) * 2;
    if constexpr (kTraits.offset) {
      const FloatVector m = load_halves(scales + kLayout.offsets);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sums[r][v] = hn::NegMulAdd(m, low[r][v], sums[r][v]);
    }
    const FloatVector d = load_halves(scales);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums[r][v] = hn::MulAdd(inner[r][v], d, sums[r][v]);
  }
}

/// kRows rows times one panel. Rows of `out` are out_stride apart.
template <WeightFormat kFormat, int kRows>
void multiply_panel(const std::uint8_t* panel, std::size_t blocks, const ActivationBlock* x,
                    std::size_t stride, std::size_t out_stride, float* out) {
  constexpr FormatTraits kTraits = format_traits(kFormat);
  const std::size_t panel_bytes = blocks * kTraits.bytes * kPanelOutputs;
  for (int column = 0; column < static_cast<int>(kPanelOutputs); column += kColumns) {
    Block<FloatVector, kRows> sums;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(Floats());
    }
    const std::uint8_t* block = panel;
    for (std::size_t b = 0; b < blocks; ++b, block += kTraits.bytes * kPanelOutputs) {
      const ActivationBlock* const activations = x + b * kTraits.parts();
      if constexpr (kTraits.scaled == 0) {
        add_block<kFormat, kRows>(block, panel_bytes, column, activations, stride, sums);
      } else {
        add_long_block<kFormat, kRows>(block, panel_bytes, column, activations, stride, sums);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        hn::StoreU(sums[r][v], Floats(), out + r * out_stride + column + v * kLanes);
      }
    }
  }
}

using PanelKernel = void (*)(const std::uint8_t*, std::size_t, const ActivationBlock*, std::size_t,
                             std::size_t, float*);

/// Entry r - 1 is for r rows.
template <WeightFormat kFormat, int... kIndex>
constexpr auto make_panel_kernels(std::integer_sequence<int, kIndex...>) {
  return std::array<PanelKernel, sizeof...(kIndex)>{multiply_panel<kFormat, kIndex + 1>...};
}
template <WeightFormat kFormat>
constexpr auto kPanelKernels = make_panel_kernels<kFormat>(std::make_integer_sequence<int, kRowsMax>());

const std::array<PanelKernel, kRowsMax>& panel_kernels(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_0:
      return kPanelKernels<WeightFormat::kQ4_0>;
    case WeightFormat::kQ4_1:
      return kPanelKernels<WeightFormat::kQ4_1>;
    case WeightFormat::kQ5_0:
      return kPanelKernels<WeightFormat::kQ5_0>;
    case WeightFormat::kQ5_1:
      return kPanelKernels<WeightFormat::kQ5_1>;
    case WeightFormat::kQ8_0:
      return kPanelKernels<WeightFormat::kQ8_0>;
    case WeightFormat::kQ4_K:
      return kPanelKernels<WeightFormat::kQ4_K>;
    case WeightFormat::kQ5_K:
      return kPanelKernels<WeightFormat::kQ5_K>;
    case WeightFormat::kQ6_K:
      return kPanelKernels<WeightFormat::kQ6_K>;
  }
  __builtin_unreachable();
}

/// Rows whose activations stay in the second-level cache while all panels pass by.
constexpr std::uint32_t kRowsTogether = 64;

void multiply(const PackedMatrix& matrix, const ActivationBlock* x, std::uint32_t rows, std::uint32_t first,
              std::uint32_t last, float* out) {
  const auto& kernels = panel_kernels(matrix.format);
  const std::size_t stride = matrix.inputs / kBlockInputs;
  const std::size_t blocks = matrix.inputs / format_traits(matrix.format).inputs;
  const std::size_t outputs = matrix.outputs;
  for (std::uint32_t begin = 0; begin < rows; begin += kRowsTogether) {
    const std::uint32_t count = std::min(rows - begin, kRowsTogether);
    const std::uint32_t passes = (count + kRowsMax - 1) / kRowsMax;
    for (std::uint32_t panel = first; panel < last; ++panel) {
      const auto* weights = reinterpret_cast<const std::uint8_t*>(matrix.data) + panel * matrix.panel_bytes();
      const std::size_t output = std::size_t{panel} * kPanelOutputs;
      std::uint32_t row = begin;
      for (std::uint32_t pass = 0; pass < passes; ++pass) {
        const std::uint32_t together = count / passes + (pass < count % passes ? 1 : 0);
        const ActivationBlock* const activations = x + row * stride;
        float* const to = out + row * outputs + output;
        if (output + kPanelOutputs <= outputs) {
          kernels[together - 1](weights, blocks, activations, stride, outputs, to);
        } else {  // the last panel is wider than what is left of a row
          float whole[kRowsMax * kPanelOutputs];
          kernels[together - 1](weights, blocks, activations, stride, kPanelOutputs, whole);
          for (std::uint32_t r = 0; r < together; ++r) {
            std::copy_n(whole + r * kPanelOutputs, outputs - output, to + r * outputs);
          }
        }
        row += together;
      }
    }
  }
}

void quantise(const float* from, std::size_t blocks, ActivationBlock* to) {
  const Floats d;
  constexpr int kVectorsOfHalf = kBlockInputs / 2 / kLanes;
  const hn::Rebind<std::int8_t, Ints> d_bytes;
  for (; blocks > 0; --blocks, from += kBlockInputs, ++to) {
    FloatVector largest = hn::Zero(d);
#pragma GCC unroll 16
    for (int v = 0; v < 2 * kVectorsOfHalf; ++v) {
      largest = hn::Max(largest, hn::Abs(hn::LoadU(d, from + v * kLanes)));
    }
    const float most = hn::GetLane(hn::MaxOfLanes(d, largest));
    const bool zero = most < kActivationMin;
    to->scale = zero ? 0.0f : most / 127.0f;
    const FloatVector inverse = hn::Set(d, zero ? 0.0f : 127.0f / most);
    int sums[2][2] = {};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      IntVector sum = hn::Zero(Ints());
#pragma GCC unroll 16
      for (int v = half * kVectorsOfHalf; v < (half + 1) * kVectorsOfHalf; ++v) {
        const IntVector q = hn::NearestInt(hn::Mul(hn::LoadU(d, from + v * kLanes), inverse));
        hn::StoreU(hn::DemoteTo(d_bytes, q), d_bytes, to->q + v * kLanes);
        sum = hn::Add(sum, q);
      }
      HWY_ALIGN std::int32_t lanes[kLanes];
      hn::Store(sum, Ints(), lanes);
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) sums[half][lane % 4 / 2] += lanes[lane];
    }
    for (int pair = 0; pair < 2; ++pair) {
      to->minus[0][pair] = static_cast<std::int16_t>(-sums[0][pair] - sums[1][pair]);
      to->minus[1][pair] = static_cast<std::int16_t>(-sums[1][pair]);
    }
    to->sum = to->scale * static_cast<float>(sums[0][0] + sums[0][1] + sums[1][0] + sums[1][1]);
  }
}

}  // namespace
#endif  // HWY_TARGET != HWY_SCALAR

const ProductKernels* product_kernels() {
#if HWY_TARGET == HWY_SCALAR
  static const ProductKernels table = {
      .target = hwy::TargetName(HWY_TARGET), .quantise = quantise_reference, .multiply = multiply_reference};
#else
  static const ProductKernels table = {
      .target = hwy::TargetName(HWY_TARGET), .quantise = quantise, .multiply = multiply};
#endif
  return &table;
}

}  // namespace HWY_NAMESPACE
}  // namespace dualdecoder
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "base/simd_targets.h"  // after HWY_DISABLED_TARGETS

namespace dualdecoder {

HWY_EXPORT(product_kernels);

namespace {
SimdTargets<ProductKernels>& targets() {
  static SimdTargets<ProductKernels> targets(HWY_DISPATCH_TABLE(product_kernels), HWY_TARGETS, "product");
  return targets;
}
}  // namespace

std::span<const ProductKernels* const> available_product_kernels() { return targets().available(); }
std::vector<std::string> product_targets() { return targets().names(); }
void force_product_target(const std::string& name) { targets().force(name); }

void quantise_activations(const float* from, std::size_t blocks, ActivationBlock* to) {
  targets().current().quantise(from, blocks, to);
}

namespace {

struct PanelRange {
  std::uint32_t first;
  std::uint32_t last;
};

PanelRange share(std::uint64_t panels, std::uint32_t part, std::uint32_t parts) {
  DD_CHECK(part < parts, "part {} of {}", part, parts);
  return {static_cast<std::uint32_t>(panels * part / parts),
          static_cast<std::uint32_t>(panels * (part + 1) / parts)};
}

}  // namespace

void multiply(std::span<const PackedMatrix* const> matrices, const ActivationBlock* x, std::uint32_t rows,
              std::uint32_t part, std::uint32_t parts, float* out) {
  std::uint64_t panels = 0;
  for (const PackedMatrix* matrix : matrices) panels += matrix->panels();
  PanelRange left = share(panels, part, parts);  // counted from the first panel of the matrix
  for (const PackedMatrix* matrix : matrices) {
    const PanelRange own{std::min(left.first, matrix->panels()), std::min(left.last, matrix->panels())};
    if (own.first < own.last) targets().current().multiply(*matrix, x, rows, own.first, own.last, out);
    left = {left.first - own.first, left.last - own.last};
    out += std::size_t{rows} * matrix->outputs;
  }
}

void multiply_add(const PackedMatrix& matrix, const ActivationBlock* x, std::uint32_t rows,
                  const float* addend, std::size_t addend_stride, std::uint32_t part, std::uint32_t parts,
                  float* out) {
  const PanelRange own = share(matrix.panels(), part, parts);
  targets().current().multiply(matrix, x, rows, own.first, own.last, out);
  const std::size_t last = std::min<std::size_t>(std::size_t{own.last} * kPanelOutputs, matrix.outputs);
  for (std::size_t row = 0; row < rows; ++row, out += matrix.outputs, addend += addend_stride) {
    for (std::size_t i = std::size_t{own.first} * kPanelOutputs; i < last; ++i) out[i] += addend[i];
  }
}

}  // namespace dualdecoder
#endif  // HWY_ONCE
