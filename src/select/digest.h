// Digests of a sequence's blocks: two small vectors per block and KV head that stand in for its keys when
// blocks are ranked.
//
// Both kinds are kept as a centre c and a radius r per dimension, so that a block's score for a query head q
// is  q . c + |q| . r  (|q| by dimension). kMinMax: the bounding box of the keys, and the score is the upper
// bound of q . k over the block (Quest, Tang et al. 2024). kMean: the mean of the keys and their mean
// absolute deviation (cuboid-mean; ArkVale, Chen et al. 2024). The radius is rounded upwards and covers the
// rounding of the centre: in f16 and int8, too, kMinMax bounds the keys, up to f32 rounding of the score
// (1e-6 of |q| . (|c| + r)). Values beyond f16 are clamped to it; NaN in a key has no influence.
//
// Digests lie in tiles of 16 blocks, per KV head: f16 [2 * head_dim, 16], the rows of c before those of r; or
// int8 [head_dim, 16, 2], two rows side by side, c signed and r unsigned, behind two rows of f32 that hold
// each block's factor of c and of r. The blocks of a tile form a group. Its digest is the hull of their boxes
// [c - r, c + r], so a group's score is never below that of its blocks; groups lie in tiles of the same form.
//
// Host memory, as address space up to blocks_max at start; resident is what has been written, where the
// system grants huge pages in steps of 2 MiB. Owned by the sequence: one writer per layer (add() of different
// layers may run at once), none while others read; truncate() alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/error.h"
#include "kv/geometry.h"

namespace dualdecoder {

enum class DigestKind { kMinMax, kMean };
enum class DigestType { kF16, kInt8 };

struct DigestOptions {
  DigestKind kind = DigestKind::kMinMax;
  DigestType type = DigestType::kF16;
};

/// Blocks in a tile, and so in a group.
inline constexpr std::uint32_t kTileDigests = 16;

class Digests {
 public:
  /// geometry.head_dim is at most 256.
  static Result<std::unique_ptr<Digests>> create(const KvGeometry& geometry, const DigestOptions& options,
                                                 std::uint32_t blocks_max);
  ~Digests();
  Digests(const Digests&) = delete;
  Digests& operator=(const Digests&) = delete;

  /// Bytes that digests of `blocks` blocks of every layer fill, those of their groups included.
  static std::size_t bytes_for(const KvGeometry& geometry, const DigestOptions& options,
                               std::uint32_t blocks);

  /// Appends the digest of the layer's next block, which is full. k: [kv_head, head_dim, block_tokens].
  void add(LayerIndex layer, const f16_bits* k);
  /// Forgets the blocks from `blocks` on, in all layers; a layer with fewer stays as it is. Afterwards all is
  /// as if they had never been added.
  void truncate(std::uint32_t blocks);

  std::uint32_t blocks(LayerIndex layer) const { return blocks_[layer.value]; }
  std::uint32_t blocks_max() const { return blocks_max_; }
  const KvGeometry& geometry() const { return geometry_; }
  const DigestOptions& options() const { return options_; }

  /// Blocks [16 * index, 16 * index + 16) of the layer; places beyond blocks() hold anything finite.
  const std::byte* tile(LayerIndex layer, std::uint32_t index) const {
    return place(blocks_at_, layer, index);
  }
  /// Groups [16 * index, 16 * index + 16) of the layer.
  const std::byte* group_tile(LayerIndex layer, std::uint32_t index) const {
    return place(groups_at_, layer, index);
  }
  /// Bytes of one KV head in a tile.
  std::size_t head_bytes() const { return head_bytes_; }
  std::size_t tile_bytes() const { return head_bytes_ * geometry_.kv_heads; }

  /// centre, radius: [head_dim] as they are scored.
  void read_block(LayerIndex layer, BlockIndex block, std::uint32_t kv_head, float* centre,
                  float* radius) const;
  void read_group(LayerIndex layer, std::uint32_t group, std::uint32_t kv_head, float* centre,
                  float* radius) const;

 private:
  Digests(const KvGeometry& geometry, const DigestOptions& options, std::uint32_t blocks_max);

  // [tile, layer]: what a sequence has used so far lies together.
  std::byte* place(std::byte* first, LayerIndex layer, std::uint32_t tile) const {
    return first + (std::size_t{tile} * geometry_.layers + layer.value) * tile_bytes();
  }
  float* hull(LayerIndex layer, std::uint32_t kv_head) {
    return hulls_.data() + (std::size_t{layer.value} * geometry_.kv_heads + kv_head) * 2 * geometry_.head_dim;
  }
  void clear_hull(LayerIndex layer);
  void grow_hull(LayerIndex layer, std::uint32_t kv_head, const float* centre, const float* radius);
  void write_group(LayerIndex layer, std::uint32_t group);

  KvGeometry geometry_;
  DigestOptions options_;
  std::uint32_t blocks_max_;
  std::size_t head_bytes_;
  std::byte* memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  std::byte* blocks_at_ = nullptr;
  std::byte* groups_at_ = nullptr;
  std::vector<std::uint32_t> blocks_;  // [layer]
  std::vector<float> hulls_;           // [layer, kv_head, 2, head_dim]: low and high of the last group
};

}  // namespace dualdecoder
