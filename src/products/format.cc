#include "products/format.h"

namespace dualdecoder {
namespace {

f16_bits read_f16(const std::uint8_t* from) {
  f16_bits half;
  std::memcpy(&half, from, sizeof(half));
  return half;
}

/// 32 values of 4 bits in 16 bytes: the low halves first.
void read_nibbles(const std::uint8_t* from, std::uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = from[i] & 15;
    q[i + 16] = from[i] >> 4;
  }
}

/// Adds the fifth bits, one for each of 32 values, in their order.
void read_fifth_bits(const std::uint8_t* from, std::uint8_t* q) {
  for (int i = 0; i < 32; ++i) q[i] |= static_cast<std::uint8_t>((from[i / 8] >> (i % 8) & 1) << 4);
}

/// Eight pairs of 6-bit numbers in 12 bytes. The first four pairs lie in the low six bits of bytes 0 to 7; of
/// the other four, the low four bits lie in bytes 8 to 11 and the high two on top of the first eight bytes.
void read_scales(const std::uint8_t* from, WeightBlock& to) {
  for (int i = 0; i < 4; ++i) {
    to.scales[i] = static_cast<std::int8_t>(from[i] & 63);
    to.offsets[i] = from[i + 4] & 63;
    to.scales[i + 4] = static_cast<std::int8_t>((from[i + 8] & 15) | from[i] >> 6 << 4);
    to.offsets[i + 4] = static_cast<std::uint8_t>(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
  }
}

/// 256 values of 4 bits: in each 32 bytes the low halves are 32 values, and the high halves the next 32.
void read_long_nibbles(const std::uint8_t* from, std::uint8_t* q) {
  for (int run = 0; run < 4; ++run, from += 32, q += 64) {
    for (int i = 0; i < 32; ++i) {
      q[i] = from[i] & 15;
      q[i + 32] = from[i] >> 4;
    }
  }
}

void read_q6_k(const std::uint8_t* from, WeightBlock& to) {
  const std::uint8_t* low = from;
  const std::uint8_t* high = from + 128;
  for (std::uint8_t* q = to.q; q != to.q + 256; q += 128, low += 64, high += 32) {
    for (int i = 0; i < 32; ++i) {
      q[i] = static_cast<std::uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
      q[i + 32] = static_cast<std::uint8_t>((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      q[i + 64] = static_cast<std::uint8_t>(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      q[i + 96] = static_cast<std::uint8_t>(low[i + 32] >> 4 | high[i] >> 6 << 4);
    }
  }
  std::memcpy(to.scales, from + 192, 16);
  to.d = read_f16(from + 208);
}

}  // namespace

void read_block(WeightFormat format, const std::byte* block, WeightBlock& to) {
  const auto* from = reinterpret_cast<const std::uint8_t*>(block);
  if (format == WeightFormat::kQ6_K) return read_q6_k(from, to);
  to.d = read_f16(from);
  if (format_traits(format).offset) to.m = read_f16(from + 2);
  switch (format) {
    case WeightFormat::kQ4_0:
      return read_nibbles(from + 2, to.q);
    case WeightFormat::kQ4_1:
      return read_nibbles(from + 4, to.q);
    case WeightFormat::kQ5_0:
      read_nibbles(from + 6, to.q);
      return read_fifth_bits(from + 2, to.q);
    case WeightFormat::kQ5_1:
      read_nibbles(from + 8, to.q);
      return read_fifth_bits(from + 4, to.q);
    case WeightFormat::kQ8_0:
      std::memcpy(to.q, from + 2, 32);
      return;
    case WeightFormat::kQ4_K:
      read_scales(from + 4, to);
      return read_long_nibbles(from + 16, to.q);
    case WeightFormat::kQ5_K:
      read_scales(from + 4, to);
      read_long_nibbles(from + 48, to.q);
      for (int i = 0; i < 256; ++i) {
        to.q[i] |= static_cast<std::uint8_t>((from[16 + i % 32] >> (i / 32) & 1) << 4);
      }
      return;
    case WeightFormat::kQ6_K:
      return;
  }
}

}  // namespace dualdecoder
