#include "select/digest.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/f16.h"
#include "base/file.h"
#include "select/score.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kHeadDimMax = 256;
constexpr float kF16Max = 65504.0f;
constexpr float kByteMax = 127;

std::size_t head_bytes_of(const KvGeometry& geometry, DigestType type) {
  const std::size_t values = std::size_t{2} * geometry.head_dim * kTileDigests;
  return type == DigestType::kF16 ? values * sizeof(f16_bits) : values + 2 * kTileDigests * sizeof(float);
}

/// Of the segment that kPrincipal estimates, so much counts (measured, digest.h).
constexpr float kSegmentShare = 0.7f;

std::uint32_t tiles_for(std::uint32_t digests) { return (digests + kTileDigests - 1) / kTileDigests; }

/// The least f16 that is not below a value in [0, kF16Max].
f16_bits f16_not_below(float value) {
  const f16_bits nearest = f16_from_float(value);
  return float_from_f16(nearest) < value ? static_cast<f16_bits>(nearest + 1) : nearest;
}

}  // namespace

/// One digest's place in a tile. What is written is rounded, and the caller's values with it.
class DigestColumn {
 public:
  DigestColumn(DigestType type, std::uint32_t head_dim, std::byte* head, std::uint32_t index)
      : type_(type), head_dim_(head_dim), head_(head), index_(index) {}

  /// Stores a box. On return, centre and radius are what the place now stands for, which holds the box.
  void write_box(const float* low, const float* high, float* centre, float* radius) {
    for (std::uint32_t d = 0; d < head_dim_; ++d) centre[d] = 0.5f * low[d] + 0.5f * high[d];
    write(kCentre, centre);
    for (std::uint32_t d = 0; d < head_dim_; ++d) {
      radius[d] = std::max(high[d] - centre[d], centre[d] - low[d]);
    }
    write_not_below(radius);
  }

  enum Half : std::uint32_t { kCentre = 0, kRadius = 1 };
  /// Rounds to nearest.
  void write(Half half, float* values);
  /// The radius of a box, which is not negative, rounded upwards.
  void write_not_below(float* radius);
  void read(Half half, float* values) const;

  static std::size_t bytes(DigestType type, std::uint32_t head_dim) {
    const std::size_t values = std::size_t{2} * head_dim;
    return type == DigestType::kF16 ? values * sizeof(f16_bits) : values + 2 * sizeof(float);
  }
  /// Calls copy(place in the tile, bytes) for each of its pieces, always in the same order.
  template <typename F>
  void for_each_piece(const F& copy) const {
    if (type_ == DigestType::kF16) {
      for (std::uint32_t row = 0; row < 2 * head_dim_; ++row) copy(place_f16(row), sizeof(f16_bits));
      return;
    }
    for (const Half half : {kCentre, kRadius}) copy(&factor(half), sizeof(float));
    for (std::uint32_t row = 0; row < 2 * head_dim_; ++row) copy(place_int8(row), sizeof(std::int8_t));
  }

 private:
  f16_bits* place_f16(std::uint32_t row) const {
    return reinterpret_cast<f16_bits*>(head_) + row * kTileDigests + index_;
  }
  float& factor(Half half) const { return reinterpret_cast<float*>(head_)[half * kTileDigests + index_]; }
  std::int8_t* place_int8(std::uint32_t row) const {
    return reinterpret_cast<std::int8_t*>(head_ + 2 * kTileDigests * sizeof(float)) +
           (row / 2 * kTileDigests + index_) * 2 + row % 2;
  }

  DigestType type_;
  std::uint32_t head_dim_;
  std::byte* head_;
  std::uint32_t index_;
};

namespace {

using Column = DigestColumn;

}  // namespace

void Column::write(Half half, float* values) {
  const std::uint32_t row = half * head_dim_;
  if (type_ == DigestType::kF16) {
    for (std::uint32_t d = 0; d < head_dim_; ++d) {
      const f16_bits rounded = f16_from_float(std::clamp(values[d], -kF16Max, kF16Max));
      *place_f16(row + d) = rounded;
      values[d] = float_from_f16(rounded);
    }
    return;
  }
  float largest = 0;
  for (std::uint32_t d = 0; d < head_dim_; ++d) largest = std::max(largest, std::abs(values[d]));
  const float step = largest / kByteMax;
  const float inverse = step > 0 ? 1 / step : 0;
  factor(half) = step;
  for (std::uint32_t d = 0; d < head_dim_; ++d) {
    const float steps = std::clamp(std::nearbyint(values[d] * inverse), -kByteMax, kByteMax);
    *place_int8(row + d) = static_cast<std::int8_t>(steps);
    values[d] = steps * step;
  }
}

void Column::write_not_below(float* radius) {
  if (type_ == DigestType::kF16) {
    for (std::uint32_t d = 0; d < head_dim_; ++d) {
      const f16_bits rounded = f16_not_below(std::clamp(radius[d], 0.0f, kF16Max));
      *place_f16(head_dim_ + d) = rounded;
      radius[d] = float_from_f16(rounded);
    }
    return;
  }
  float largest = 0;
  for (std::uint32_t d = 0; d < head_dim_; ++d) largest = std::max(largest, radius[d]);
  // A little more than 1/127, so that rounding the largest upwards does not take 128 steps.
  const float step = largest * (1 + 1e-6f) / kByteMax;
  const float inverse = step > 0 ? 1 / step : 0;
  factor(kRadius) = step;
  for (std::uint32_t d = 0; d < head_dim_; ++d) {
    const float steps = std::clamp(std::ceil(radius[d] * inverse), 0.0f, kByteMax);
    *place_int8(head_dim_ + d) = static_cast<std::int8_t>(steps);
    radius[d] = steps * step;
  }
}

void Column::read(Half half, float* values) const {
  const std::uint32_t row = half * head_dim_;
  for (std::uint32_t d = 0; d < head_dim_; ++d) {
    values[d] = type_ == DigestType::kF16 ? float_from_f16(*place_f16(row + d))
                                          : static_cast<float>(*place_int8(row + d)) * factor(half);
  }
}

namespace {

/// 16 keys of one KV head. k: [head_dim, stride].
struct Keys {
  const f16_bits* k;
  std::uint32_t head_dim;
  std::size_t stride;
};

void write_min_max(const Keys& keys, Column& column, float* centre, float* radius) {
  float low[kHeadDimMax];
  float high[kHeadDimMax];
  current_score_kernels().box(keys.k, keys.head_dim, keys.stride, low, high);
  for (std::uint32_t d = 0; d < keys.head_dim; ++d) {
    const bool all_nan = low[d] > high[d];
    low[d] = all_nan ? 0 : std::clamp(low[d], -kF16Max, kF16Max);
    high[d] = all_nan ? 0 : std::clamp(high[d], -kF16Max, kF16Max);
  }
  column.write_box(low, high, centre, radius);
}

void write_mean(const Keys& keys, Column& column, float* centre, float* radius) {
  current_score_kernels().mean(keys.k, keys.head_dim, keys.stride, centre, radius);
  for (std::uint32_t d = 0; d < keys.head_dim; ++d) {
    centre[d] = std::isnan(centre[d]) ? 0 : std::clamp(centre[d], -kF16Max, kF16Max);
    radius[d] = std::min(radius[d], kF16Max);
  }
  column.write(Column::kCentre, centre);
  column.write_not_below(radius);
}

void write_principal(const Keys& keys, Column& column, float* centre, float* radius) {
  const Extent extent = current_score_kernels().principal(keys.k, keys.head_dim, keys.stride, centre, radius);
  const float middle = kSegmentShare * (extent.low + extent.high) / 2;
  const float half = kSegmentShare * (extent.high - extent.low) / 2;
  for (std::uint32_t d = 0; d < keys.head_dim; ++d) {
    centre[d] += middle * radius[d];
    radius[d] *= half;
  }
  column.write(Column::kCentre, centre);
  column.write(Column::kRadius, radius);
}

}  // namespace

Digests::Digests(const KvGeometry& geometry, const DigestOptions& options, std::uint32_t blocks_max)
    : geometry_(geometry),
      options_(options),
      blocks_max_(blocks_max),
      head_bytes_(head_bytes_of(geometry, options.type)),
      blocks_(geometry.layers, 0),
      hulls_(std::size_t{2} * geometry.layers * geometry.kv_heads * geometry.head_dim) {}

Result<std::unique_ptr<Digests>> Digests::create(const KvGeometry& geometry, const DigestOptions& options,
                                                 std::uint32_t blocks_max) {
  DD_CHECK(geometry.head_dim > 0 && geometry.head_dim % 16 == 0 && geometry.head_dim <= kHeadDimMax,
           "head_dim {}", geometry.head_dim);
  DD_CHECK(blocks_max > 0);
  std::unique_ptr<Digests> digests(new Digests(geometry, options, blocks_max));
  DD_CHECK(geometry.block_tokens % kDigestTokens == 0 && geometry.block_tokens <= 4 * kDigestTokens,
           "blocks of {} tokens", geometry.block_tokens);
  const std::size_t bytes = bytes_for(geometry, options, blocks_max);
  // In huge pages: a layer's tiles lie far apart, so with small ones every tile is a miss of the TLB.
  digests->memory_ = AnonymousMemory::map(bytes);
  if (digests->memory_.data() == nullptr) {
    return fail(ErrorCode::kOutOfMemory, "cannot take {} bytes for digests: {}; lower the context (-c)",
                bytes, errno_text(errno));
  }
  digests->groups_at_ = digests->memory_.data();
  const std::uint32_t group_tiles = tiles_for(tiles_for(blocks_max * digests->digests_per_block()));
  digests->digests_at_ = digests->place(digests->groups_at_, LayerIndex(0), group_tiles);
  return digests;
}

std::size_t Digests::bytes_for(const KvGeometry& geometry, const DigestOptions& options,
                               std::uint32_t blocks) {
  const std::uint32_t digests = blocks * (geometry.block_tokens / kDigestTokens);
  const std::size_t tiles = std::size_t{tiles_for(digests)} + tiles_for(tiles_for(digests));
  return tiles * geometry.layers * geometry.kv_heads * head_bytes_of(geometry, options.type);
}

void Digests::add(LayerIndex layer, const f16_bits* k) {
  const std::uint32_t block = blocks_[layer.value];
  DD_CHECK(block < blocks_max_, "layer {}: digests for {} blocks", layer.value, blocks_max_);
  const std::uint32_t first = block * digests_per_block();
  if (first % kTileDigests == 0) clear_hull(layer);
  for (std::uint32_t part = 0; part < digests_per_block(); ++part) {
    add_digest(layer, first + part, k + std::size_t{part} * kDigestTokens);
  }
  write_group(layer, first / kTileDigests);
  blocks_[layer.value] = block + 1;
}

void Digests::add_digest(LayerIndex layer, std::uint32_t digest, const f16_bits* k) {
  std::byte* const to = place(digests_at_, layer, digest / kTileDigests);
  float centre[kHeadDimMax];
  float radius[kHeadDimMax];
  for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
    Column column(options_.type, geometry_.head_dim, to + head * head_bytes_, digest % kTileDigests);
    const Keys keys = {k + head * geometry_.head_block_elements(), geometry_.head_dim,
                       geometry_.block_tokens};
    switch (options_.kind) {
      case DigestKind::kMinMax:
        write_min_max(keys, column, centre, radius);
        break;
      case DigestKind::kMean:
        write_mean(keys, column, centre, radius);
        break;
      case DigestKind::kPrincipal:
        write_principal(keys, column, centre, radius);
        break;
    }
    grow_hull(layer, head, centre, radius);
  }
}

void Digests::copy(const Digests& other, std::uint32_t blocks) {
  DD_CHECK(blocks <= blocks_max_ && memory_.bytes() == other.memory_.bytes(), "{} of {} blocks", blocks,
           blocks_max_);
  const std::uint32_t tiles = tiles_for(blocks * digests_per_block());
  const std::size_t row_bytes = tile_bytes() * geometry_.layers;  // of one tile of every layer
  std::memcpy(digests_at_, other.digests_at_, tiles * row_bytes);
  std::memcpy(groups_at_, other.groups_at_, tiles_for(tiles) * row_bytes);
  blocks_ = other.blocks_;
  hulls_ = other.hulls_;
  truncate(blocks);
}

std::size_t Digests::record_bytes(const KvGeometry& geometry, const DigestOptions& options,
                                  std::size_t layers) {
  return layers * (geometry.block_tokens / kDigestTokens) * geometry.kv_heads *
         Column::bytes(options.type, geometry.head_dim);
}

void Digests::save(BlockIndex block, std::span<const LayerIndex> layers, std::span<std::byte> record) const {
  DD_CHECK(record.size() == record_bytes(geometry_, options_, layers.size()));
  std::byte* to = record.data();
  for (const LayerIndex layer : layers) {
    DD_CHECK(block.value < blocks_[layer.value], "block {} of {}", block.value, blocks_[layer.value]);
    for (std::uint32_t part = 0; part < digests_per_block(); ++part) {
      const std::uint32_t digest = block.value * digests_per_block() + part;
      for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
        column_of(layer, digest, head).for_each_piece([&to](const void* from, std::size_t bytes) {
          std::memcpy(to, from, bytes);
          to += bytes;
        });
      }
    }
  }
}

void Digests::append(std::span<const LayerIndex> layers, std::span<const std::byte> record) {
  DD_CHECK(record.size() == record_bytes(geometry_, options_, layers.size()));
  const std::byte* from = record.data();
  float centre[kHeadDimMax];
  float radius[kHeadDimMax];
  for (const LayerIndex layer : layers) {
    const std::uint32_t block = blocks_[layer.value];
    DD_CHECK(block < blocks_max_, "layer {}: digests for {} blocks", layer.value, blocks_max_);
    const std::uint32_t first = block * digests_per_block();
    if (first % kTileDigests == 0) clear_hull(layer);
    for (std::uint32_t digest = first; digest < first + digests_per_block(); ++digest) {
      for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
        column_of(layer, digest, head).for_each_piece([&from](void* to, std::size_t bytes) {
          std::memcpy(to, from, bytes);
          from += bytes;
        });
        read_digest(layer, digest, head, centre, radius);
        grow_hull(layer, head, centre, radius);
      }
    }
    write_group(layer, first / kTileDigests);
    blocks_[layer.value] = block + 1;
  }
}

void Digests::truncate(std::uint32_t blocks) {
  const std::uint32_t end = blocks * digests_per_block();
  const std::uint32_t first = end - end % kTileDigests;
  for (LayerIndex layer(0); layer.value < geometry_.layers; ++layer) {
    if (blocks >= blocks_[layer.value]) continue;
    blocks_[layer.value] = blocks;
    if (first == end) continue;
    clear_hull(layer);
    float centre[kHeadDimMax];
    float radius[kHeadDimMax];
    for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
      for (std::uint32_t digest = first; digest < end; ++digest) {
        read_digest(layer, digest, head, centre, radius);
        grow_hull(layer, head, centre, radius);
      }
    }
    write_group(layer, end / kTileDigests);
  }
}

void Digests::clear_hull(LayerIndex layer) {
  for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
    float* const low = hull(layer, head);
    float* const high = low + geometry_.head_dim;
    std::fill(low, high, std::numeric_limits<float>::infinity());
    std::fill(high, high + geometry_.head_dim, -std::numeric_limits<float>::infinity());
  }
}

void Digests::grow_hull(LayerIndex layer, std::uint32_t kv_head, const float* centre, const float* radius) {
  const float share = radius_share(options_.kind);
  float* const low = hull(layer, kv_head);
  float* const high = low + geometry_.head_dim;
  for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
    const float reach = share * std::abs(radius[d]);
    low[d] = std::min(low[d], centre[d] - reach);
    high[d] = std::max(high[d], centre[d] + reach);
  }
}

void Digests::write_group(LayerIndex layer, std::uint32_t group) {
  std::byte* const to = place(groups_at_, layer, group / kTileDigests);
  float centre[kHeadDimMax];
  float radius[kHeadDimMax];
  for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
    const float* const low = hull(layer, head);
    Column(options_.type, geometry_.head_dim, to + head * head_bytes_, group % kTileDigests)
        .write_box(low, low + geometry_.head_dim, centre, radius);
  }
}

DigestColumn Digests::column_of(LayerIndex layer, std::uint32_t digest, std::uint32_t kv_head) const {
  std::byte* const head = place(digests_at_, layer, digest / kTileDigests) + kv_head * head_bytes_;
  return {options_.type, geometry_.head_dim, head, digest % kTileDigests};
}

void Digests::read_digest(LayerIndex layer, std::uint32_t digest, std::uint32_t kv_head, float* centre,
                          float* radius) const {
  const Column from = column_of(layer, digest, kv_head);
  from.read(Column::kCentre, centre);
  from.read(Column::kRadius, radius);
}

void Digests::read_block(LayerIndex layer, BlockIndex block, std::uint32_t part, std::uint32_t kv_head,
                         float* centre, float* radius) const {
  DD_CHECK(block.value < blocks_[layer.value] && part < digests_per_block(), "part {} of block {} of {}",
           part, block.value, blocks_[layer.value]);
  read_digest(layer, block.value * digests_per_block() + part, kv_head, centre, radius);
}

void Digests::read_group(LayerIndex layer, std::uint32_t group, std::uint32_t kv_head, float* centre,
                         float* radius) const {
  DD_CHECK(group < tiles_for(blocks_[layer.value] * digests_per_block()), "group {}", group);
  std::byte* const head = place(groups_at_, layer, group / kTileDigests) + kv_head * head_bytes_;
  const Column column(options_.type, geometry_.head_dim, head, group % kTileDigests);
  column.read(Column::kCentre, centre);
  column.read(Column::kRadius, radius);
}

}  // namespace dualdecoder
