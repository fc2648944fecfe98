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

/// Writes 32 values of one output to their places among 16.
void pack_part(const FormatTraits& traits, const PanelLayout& layout, const std::uint8_t* q,
               std::uint32_t lane, std::byte* part) {
  const auto put = [&](std::uint32_t offset, std::uint32_t row, std::uint32_t values) {
    std::memcpy(part + offset + (row * kPanelOutputs + lane) * 4, &values, 4);
  };
  if (traits.bits == 8) {
    for (std::uint32_t group = 0; group < 8; ++group) put(0, group, four(q + 4 * group));
    return;
  }
  for (std::uint32_t k = 0; k < 4; ++k) {
    put(0, k, (four(q + 4 * k) & 0x0f0f0f0fu) | (four(q + 16 + 4 * k) & 0x0f0f0f0fu) << 4);
  }
  if (traits.bits == 5) {
    std::uint32_t bits = 0;
    for (std::uint32_t group = 0; group < 8; ++group) {
      bits |= (four(q + 4 * group) >> 4 & 0x01010101u) << group;
    }
    put(layout.high_bits, 0, bits);
  } else if (traits.bits == 6) {
    for (std::uint32_t i = 0; i < 2; ++i) {
      std::uint32_t bits = 0;
      for (std::uint32_t f = 0; f < 4; ++f) bits |= (four(q + 16 * i + 4 * f) >> 4 & 0x03030303u) << (2 * f);
      put(layout.high_bits, i, bits);
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
  const PanelLayout layout = panel_layout(matrix.format);
  DD_CHECK(matrix.inputs % traits.inputs == 0, "{} inputs in blocks of {}", matrix.inputs, traits.inputs);
  const std::uint32_t blocks = matrix.inputs / traits.inputs;
  WeightBlock block;
  for (std::uint32_t panel = first; panel < last; ++panel) {
    for (std::uint32_t lane = 0; lane < kPanelOutputs; ++lane) {
      const std::uint32_t output = panel * kPanelOutputs + lane;
      std::byte* packed = to + panel * matrix.panel_bytes();
      for (std::uint32_t b = 0; b < blocks; ++b, packed += traits.bytes * kPanelOutputs) {
        // What fills up the last panel has scales of 0.
        block = {};
        if (output < matrix.outputs) {
          read_block(matrix.format, from + (std::size_t{output} * blocks + b) * traits.bytes, block);
        }
        std::memcpy(packed + lane * 2, &block.d, 2);
        if (traits.offset) std::memcpy(packed + layout.offsets + lane * 2, &block.m, 2);
        pack_scales(traits, block, lane, packed + layout.scales);
        for (std::uint32_t part = 0; part < traits.parts(); ++part) {
          pack_part(traits, layout, block.q + part * kBlockInputs, lane,
                    packed + layout.values + part * layout.part_bytes);
        }
      }
    }
  }
}

}  // namespace dualdecoder
