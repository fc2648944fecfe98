#include "select/digest.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <limits>

#include <sys/mman.h>

#include "attention/f16.h"
#include "base/check.h"
#include "base/file.h"
#include "select/score.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kHeadDimMax = 256;
constexpr float kF16Max = 65504.0f;

std::size_t head_bytes_of(const KvGeometry& geometry, DigestType type) {
  const std::size_t values = std::size_t{2} * geometry.head_dim * kTileDigests;
  return type == DigestType::kF16 ? values * sizeof(f16_bits) : values + 2 * kTileDigests * sizeof(float);
}

std::uint32_t tiles_for(std::uint32_t digests) { return (digests + kTileDigests - 1) / kTileDigests; }

/// The least f16 that is not below a value in [0, kF16Max].
f16_bits f16_not_below(float value) {
  const f16_bits nearest = f16_from_float(value);
  return float_from_f16(nearest) < value ? static_cast<f16_bits>(nearest + 1) : nearest;
}

/// One digest's place in a tile.
class Column {
 public:
  Column(DigestType type, std::uint32_t head_dim, std::byte* head, std::uint32_t index)
      : type_(type), head_dim_(head_dim), head_(head), index_(index) {}

  /// Stores a box. On return, centre and radius are what the place now stands for, which holds the box.
  void write_box(const float* low, const float* high, float* centre, float* radius) {
    for (std::uint32_t d = 0; d < head_dim_; ++d) centre[d] = 0.5f * low[d] + 0.5f * high[d];
    write_centre(centre);
    for (std::uint32_t d = 0; d < head_dim_; ++d) {
      radius[d] = std::max(high[d] - centre[d], centre[d] - low[d]);
    }
    write_radius(radius);
  }
  /// Both are rounded to what is stored.
  void write_centre(float* centre);
  void write_radius(float* radius);
  void read(float* centre, float* radius) const;

 private:
  f16_bits* half(std::uint32_t row) const {
    return reinterpret_cast<f16_bits*>(head_) + row * kTileDigests + index_;
  }
  float& factor(std::uint32_t row) const {
    return reinterpret_cast<float*>(head_)[row * kTileDigests + index_];
  }
  std::int8_t* byte(std::uint32_t row) const {
    return reinterpret_cast<std::int8_t*>(head_ + 2 * kTileDigests * sizeof(float)) +
           (row / 2 * kTileDigests + index_) * 2 + row % 2;
  }
  std::uint8_t* unsigned_byte(std::uint32_t row) const { return reinterpret_cast<std::uint8_t*>(byte(row)); }

  DigestType type_;
  std::uint32_t head_dim_;
  std::byte* head_;
  std::uint32_t index_;
};

void Column::write_centre(float* centre) {
  if (type_ == DigestType::kF16) {
    for (std::uint32_t d = 0; d < head_dim_; ++d) {
      *half(d) = f16_from_float(std::clamp(centre[d], -kF16Max, kF16Max));
      centre[d] = float_from_f16(*half(d));
    }
    return;
  }
  float largest = 0;
  for (std::uint32_t d = 0; d < head_dim_; ++d) largest = std::max(largest, std::abs(centre[d]));
  const float step = largest / 127;
  const float inverse = step > 0 ? 1 / step : 0;
  factor(0) = step;
  for (std::uint32_t d = 0; d < head_dim_; ++d) {
    const float steps = std::clamp(std::nearbyint(centre[d] * inverse), -127.0f, 127.0f);
    *byte(d) = static_cast<std::int8_t>(steps);
    centre[d] = steps * step;
  }
}

void Column::write_radius(float* radius) {
  if (type_ == DigestType::kF16) {
    for (std::uint32_t d = 0; d < head_dim_; ++d) {
      *half(head_dim_ + d) = f16_not_below(std::clamp(radius[d], 0.0f, kF16Max));
      radius[d] = float_from_f16(*half(head_dim_ + d));
    }
    return;
  }
  float largest = 0;
  for (std::uint32_t d = 0; d < head_dim_; ++d) largest = std::max(largest, radius[d]);
  // A little more than 1/255, so that rounding the largest upwards does not take 256 steps.
  const float step = largest * (1 + 1e-6f) / 255;
  const float inverse = step > 0 ? 1 / step : 0;
  factor(1) = step;
  for (std::uint32_t d = 0; d < head_dim_; ++d) {
    const float steps = std::clamp(std::ceil(radius[d] * inverse), 0.0f, 255.0f);
    *unsigned_byte(head_dim_ + d) = static_cast<std::uint8_t>(steps);
    radius[d] = steps * step;
  }
}

void Column::read(float* centre, float* radius) const {
  for (std::uint32_t d = 0; d < head_dim_; ++d) {
    if (type_ == DigestType::kF16) {
      centre[d] = float_from_f16(*half(d));
      radius[d] = float_from_f16(*half(head_dim_ + d));
    } else {
      centre[d] = static_cast<float>(*byte(d)) * factor(0);
      radius[d] = static_cast<float>(*unsigned_byte(head_dim_ + d)) * factor(1);
    }
  }
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
  const std::size_t bytes = bytes_for(geometry, options, blocks_max);
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return fail(ErrorCode::kOutOfMemory, "cannot take {} bytes for digests: {}; lower the context (-c)",
                bytes, errno_text(errno));
  }
  // Only a hint. A layer's tiles lie far apart, so with small pages every tile is a miss of the TLB.
  madvise(memory, bytes, MADV_HUGEPAGE);
  digests->memory_ = static_cast<std::byte*>(memory);
  digests->memory_bytes_ = bytes;
  digests->groups_at_ = digests->memory_;
  digests->blocks_at_ = digests->place(digests->groups_at_, LayerIndex(0), tiles_for(tiles_for(blocks_max)));
  return digests;
}

Digests::~Digests() {
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
}

std::size_t Digests::bytes_for(const KvGeometry& geometry, const DigestOptions& options,
                               std::uint32_t blocks) {
  const std::size_t tiles = std::size_t{tiles_for(blocks)} + tiles_for(tiles_for(blocks));
  return tiles * geometry.layers * geometry.kv_heads * head_bytes_of(geometry, options.type);
}

void Digests::add(LayerIndex layer, const f16_bits* k) {
  const std::uint32_t block = blocks_[layer.value];
  DD_CHECK(block < blocks_max_, "layer {}: digests for {} blocks", layer.value, blocks_max_);
  const ScoreKernels& kernels = current_score_kernels();
  if (block % kTileDigests == 0) clear_hull(layer);
  std::byte* const to = place(blocks_at_, layer, block / kTileDigests);
  float centre[kHeadDimMax];
  float radius[kHeadDimMax];
  for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
    Column column(options_.type, geometry_.head_dim, to + head * head_bytes_, block % kTileDigests);
    const f16_bits* const keys = k + head * geometry_.head_block_elements();
    if (options_.kind == DigestKind::kMinMax) {
      float low[kHeadDimMax];
      float high[kHeadDimMax];
      kernels.box(keys, geometry_.head_dim, geometry_.block_tokens, low, high);
      for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
        const bool all_nan = low[d] > high[d];
        low[d] = all_nan ? 0 : std::clamp(low[d], -kF16Max, kF16Max);
        high[d] = all_nan ? 0 : std::clamp(high[d], -kF16Max, kF16Max);
      }
      column.write_box(low, high, centre, radius);
    } else {
      kernels.mean(keys, geometry_.head_dim, geometry_.block_tokens, centre, radius);
      for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
        centre[d] = std::isnan(centre[d]) ? 0 : std::clamp(centre[d], -kF16Max, kF16Max);
        radius[d] = std::min(radius[d], kF16Max);
      }
      column.write_centre(centre);
      column.write_radius(radius);
    }
    grow_hull(layer, head, centre, radius);
  }
  write_group(layer, block / kTileDigests);
  blocks_[layer.value] = block + 1;
}

void Digests::truncate(std::uint32_t blocks) {
  for (LayerIndex layer(0); layer.value < geometry_.layers; ++layer) {
    if (blocks >= blocks_[layer.value]) continue;
    blocks_[layer.value] = blocks;
    const std::uint32_t first = blocks - blocks % kTileDigests;
    if (first == blocks) continue;
    clear_hull(layer);
    float centre[kHeadDimMax];
    float radius[kHeadDimMax];
    for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
      for (BlockIndex block(first); block.value < blocks; ++block) {
        read_block(layer, block, head, centre, radius);
        grow_hull(layer, head, centre, radius);
      }
    }
    write_group(layer, blocks / kTileDigests);
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
  float* const low = hull(layer, kv_head);
  float* const high = low + geometry_.head_dim;
  for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
    low[d] = std::min(low[d], centre[d] - radius[d]);
    high[d] = std::max(high[d], centre[d] + radius[d]);
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

void Digests::read_block(LayerIndex layer, BlockIndex block, std::uint32_t kv_head, float* centre,
                         float* radius) const {
  DD_CHECK(block.value < blocks_[layer.value], "block {} of {}", block.value, blocks_[layer.value]);
  std::byte* const head = place(blocks_at_, layer, block.value / kTileDigests) + kv_head * head_bytes_;
  Column(options_.type, geometry_.head_dim, head, block.value % kTileDigests).read(centre, radius);
}

void Digests::read_group(LayerIndex layer, std::uint32_t group, std::uint32_t kv_head, float* centre,
                         float* radius) const {
  DD_CHECK(group < tiles_for(blocks_[layer.value]), "group {}", group);
  std::byte* const head = place(groups_at_, layer, group / kTileDigests) + kv_head * head_bytes_;
  Column(options_.type, geometry_.head_dim, head, group % kTileDigests).read(centre, radius);
}

}  // namespace dualdecoder
