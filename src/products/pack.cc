#include <cstring>

#include "base/check.h"
#include "products/format.h"
#include "products/kernel.h"
#include "products/products.h"

namespace dualdecoder {
namespace {

std::uint32_t four(const std::uint8_t* q) {
  std::uint32_t values;
  std::memcpy(&values, q, sizeof(values));
  return values;
}

/// Four bytes of one output among 16, in row `row` of such words.
void put(std::uint32_t values, std::uint32_t row, std::uint32_t lane, std::byte* rows) {
  std::memcpy(rows + (row * kPanelOutputs + lane) * 4, &values, 4);
}

/// Moves bit 4 g + i to bit 8 i + g, for g below 8 and i below 4: twice even bits to the low half and odd
/// ones to the high half (Warren, Hacker's Delight, 7-2).
std::uint32_t transpose_bits(std::uint32_t x) {
  for (int twice = 0; twice < 2; ++twice) {
    std::uint32_t t = (x ^ x >> 1) & 0x22222222u;
    x ^= t ^ t << 1;
    t = (x ^ x >> 2) & 0x0c0c0c0cu;
    x ^= t ^ t << 2;
    t = (x ^ x >> 4) & 0x00f000f0u;
    x ^= t ^ t << 4;
    t = (x ^ x >> 8) & 0x0000ff00u;
    x ^= t ^ t << 8;
  }
  return x;
}

/// A block of 32 inputs ends with its values, which are in groups of four already: group k with group k + 4
/// in the high halves, or one byte each. Fifth bits stand before them, one for each input in turn.
void pack_short(const FormatTraits& traits, const PanelLayout& layout, const std::uint8_t* from,
                std::uint32_t lane, std::byte* packed) {
  const std::uint32_t words = traits.bits == 8 ? 8 : 4;
  const std::uint8_t* const values = from + traits.bytes - 4 * words;
  std::memcpy(packed + lane * 2, from, 2);
  if (traits.offset) std::memcpy(packed + layout.offsets + lane * 2, from + 2, 2);
  for (std::uint32_t k = 0; k < words; ++k) put(four(values + 4 * k), k, lane, packed + layout.values);
  if (traits.bits == 5) {
    put(transpose_bits(four(values - 4)), 0, lane, packed + layout.values + layout.high_bits);
  }
}

/// 32 values of one output, of less than 8 bits.
void pack_part(const FormatTraits& traits, const PanelLayout& layout, const std::uint8_t* q,
               std::uint32_t lane, std::byte* part) {
  for (std::uint32_t k = 0; k < 4; ++k) {
    put((four(q + 4 * k) & 0x0f0f0f0fu) | (four(q + 16 + 4 * k) & 0x0f0f0f0fu) << 4, k, lane, part);
  }
  if (traits.bits == 5) {
    std::uint32_t bits = 0;
    for (std::uint32_t group = 0; group < 8; ++group) {
      bits |= (four(q + 4 * group) >> 4 & 0x01010101u) << group;
    }
    put(bits, 0, lane, part + layout.high_bits);
  } else if (traits.bits == 6) {
    for (std::uint32_t i = 0; i < 2; ++i) {
      std::uint32_t bits = 0;
      for (std::uint32_t f = 0; f < 4; ++f) {
        bits |= (four(q + 16 * i + 4 * f) >> 4 & 0x03030303u) << (2 * f);
      }
      put(bits, i, lane, part + layout.high_bits);
    }
  }
}

void pack_scales(const FormatTraits& traits, const WeightBlock& block, std::uint32_t lane,
                 std::byte* scales) {
  if (traits.scaled == 16) {
    for (std::uint32_t i = 0; i < 16; ++i) scales[i * kPanelOutputs + lane] = std::byte(block.scales[i]);
  } else if (traits.scaled == 32) {
    std::byte* const high = scales + 8 * kPanelOutputs;
    for (std::uint32_t i = 0; i < 8; ++i) {
      scales[i * kPanelOutputs + lane] = std::byte((block.scales[i] & 15) | (block.offsets[i] & 15) << 4);
    }
    for (std::uint32_t i = 0; i < 4; ++i) {
      const auto two = [&](std::uint32_t part) {
        return block.scales[part] >> 4 | block.offsets[part] >> 4 << 2;
      };
      high[i * kPanelOutputs + lane] = std::byte(two(2 * i) | two(2 * i + 1) << 4);
    }
  }
}

/// One block of one output. Compiled for each format: loading is a matter of a few instructions a block.
template <WeightFormat kFormat>
void pack_block(const std::uint8_t* from, std::uint32_t lane, std::byte* packed) {
  constexpr FormatTraits kTraits = format_traits(kFormat);
  constexpr PanelLayout kLayout = panel_layout(kFormat);
  if constexpr (kTraits.scaled == 0) {
    pack_short(kTraits, kLayout, from, lane, packed);
  } else {
    WeightBlock block;
    read_block(kFormat, reinterpret_cast<const std::byte*>(from), block);
    std::memcpy(packed + lane * 2, &block.d, 2);
    if (kTraits.offset) std::memcpy(packed + kLayout.offsets + lane * 2, &block.m, 2);
    pack_scales(kTraits, block, lane, packed + kLayout.scales);
    for (std::uint32_t part = 0; part < kTraits.parts(); ++part) {
      pack_part(kTraits, kLayout, block.q + part * kBlockInputs, lane,
                packed + kLayout.values + part * kLayout.part_bytes);
    }
  }
}

using PackBlock = void (*)(const std::uint8_t*, std::uint32_t, std::byte*);
PackBlock block_packer(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_0:
      return pack_block<WeightFormat::kQ4_0>;
    case WeightFormat::kQ4_1:
      return pack_block<WeightFormat::kQ4_1>;
    case WeightFormat::kQ5_0:
      return pack_block<WeightFormat::kQ5_0>;
    case WeightFormat::kQ5_1:
      return pack_block<WeightFormat::kQ5_1>;
    case WeightFormat::kQ8_0:
      return pack_block<WeightFormat::kQ8_0>;
    case WeightFormat::kQ4_K:
      return pack_block<WeightFormat::kQ4_K>;
    case WeightFormat::kQ5_K:
      return pack_block<WeightFormat::kQ5_K>;
    case WeightFormat::kQ6_K:
      return pack_block<WeightFormat::kQ6_K>;
  }
  __builtin_unreachable();
}

void unpack_part(const FormatTraits& traits, const PanelLayout& layout, const std::byte* part,
                 std::uint32_t lane, std::uint8_t* q) {
  const auto bits = [&](std::uint32_t offset, std::uint32_t row, std::uint32_t i) {
    return static_cast<unsigned>(part[offset + (row * kPanelOutputs + lane) * 4 + i]);
  };
  for (std::uint32_t value = 0; value < kBlockInputs; ++value) {
    const std::uint32_t group = value / 4;
    const std::uint32_t i = value % 4;
    unsigned all = traits.bits == 8 ? bits(0, group, i) : bits(0, group % 4, i) >> (group < 4 ? 0 : 4) & 15;
    if (traits.bits == 5) all |= (bits(layout.high_bits, 0, i) >> group & 1) << 4;
    if (traits.bits == 6) all |= (bits(layout.high_bits, group / 4, i) >> (group % 4 * 2) & 3) << 4;
    q[value] = static_cast<std::uint8_t>(all);
  }
}

void unpack_scales(const FormatTraits& traits, const std::byte* scales, std::uint32_t lane, WeightBlock& to) {
  const auto byte = [&](std::uint32_t row) {
    return static_cast<unsigned>(scales[row * kPanelOutputs + lane]);
  };
  if (traits.scaled == 16) {
    for (std::uint32_t i = 0; i < 16; ++i) to.scales[i] = static_cast<std::int8_t>(byte(i));
  } else if (traits.scaled == 32) {
    for (std::uint32_t i = 0; i < 8; ++i) {
      const unsigned high = byte(8 + i / 2) >> (i % 2 * 4);
      to.scales[i] = static_cast<std::int8_t>((byte(i) & 15) | (high & 3) << 4);
      to.offsets[i] = static_cast<std::uint8_t>(byte(i) >> 4 | (high >> 2 & 3) << 4);
    }
  }
}

}  // namespace

void unpack_block(WeightFormat format, const std::byte* panel, std::uint32_t index, std::uint32_t lane,
                  WeightBlock& to) {
  const FormatTraits traits = format_traits(format);
  const PanelLayout layout = panel_layout(format);
  const std::byte* const block = panel + std::size_t{index} * traits.bytes * kPanelOutputs;
  to = {};
  std::memcpy(&to.d, block + lane * 2, 2);
  if (traits.offset) std::memcpy(&to.m, block + layout.offsets + lane * 2, 2);
  unpack_scales(traits, block + layout.scales, lane, to);
  for (std::uint32_t part = 0; part < traits.parts(); ++part) {
    unpack_part(traits, layout, block + layout.values + part * layout.part_bytes, lane,
                to.q + part * kBlockInputs);
  }
}

std::uint32_t block_inputs(WeightFormat format) { return format_traits(format).inputs; }
std::size_t block_bytes(WeightFormat format) { return format_traits(format).bytes; }

void pack_panels(const PackedMatrix& matrix, const std::byte* from, std::uint32_t first, std::uint32_t last,
                 std::byte* to) {
  const FormatTraits traits = format_traits(matrix.format);
  DD_CHECK(matrix.inputs % traits.inputs == 0, "{} inputs in blocks of {}", matrix.inputs, traits.inputs);
  const PackBlock pack = block_packer(matrix.format);
  const std::size_t row_bytes = std::size_t{matrix.inputs} / traits.inputs * traits.bytes;
  static constexpr std::uint8_t kZeros[256] = {};  // a block with scales of 0 fills up the last panel
  for (std::uint32_t panel = first; panel < last; ++panel) {
    for (std::uint32_t lane = 0; lane < kPanelOutputs; ++lane) {
      const std::size_t output = std::size_t{panel} * kPanelOutputs + lane;
      const bool exists = output < matrix.outputs;
      const auto* row = reinterpret_cast<const std::uint8_t*>(from) + output * row_bytes;
      std::byte* packed = to + panel * matrix.panel_bytes();
      for (std::size_t at = 0; at < row_bytes; at += traits.bytes, packed += traits.bytes * kPanelOutputs) {
        pack(exists ? row + at : kZeros, lane, packed);
      }
    }
  }
}

}  // namespace dualdecoder
