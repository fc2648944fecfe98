// Digests of a sequence's blocks: two small vectors per 16 tokens and KV head that stand in for the keys when
// blocks are ranked. A block of 32 tokens has two digests, one of 64 four.
//
// All kinds are a centre c and a radius r. Of a box, the score for a query head q is  q . c + share * |q| . r
// (|q| by dimension). kMinMax: the bounding box of the keys (Quest, Tang et al. 2024); the share of 1 is the
// upper bound of q . k, which a key only reaches if it is extreme in all dimensions at once. kMean: the mean
// of the keys and their mean absolute deviation (cuboid-mean; ArkVale, Chen et al. 2024). kPrincipal (ours)
// estimates the highest q . k: the keys lie on the line along their principal direction u through their mean
// mu, from mu - v_low * u to mu + v_high * u, and of this segment, shrunk to 0.7 around mu, c is the middle
// and r, with signs, the half. The score  q . c + |q . r|  is that of the better end, or
// q . mu + 0.7 * max(v_high * (q . u), -v_low * (q . u)).
//
// Measured, SmolLM2-135M after 6,000 tokens: of the attention that the best 1,024 tokens hold (0.77 and 0.72
// of all), those chosen by digests hold, at blocks of 16 / of 32: kPrincipal 0.959 / 0.959 (shrunk to 0.6:
// the same, to 0.8: 0.956); kMinMax 0.938 / 0.945 (with the bound 0.890 / 0.898); kMean 0.887 / 0.899. One
// digest for 32 tokens: 0.940, 0.933, 0.888. Tried and lost: a temperature of the pooled softmax (0.002 at
// most).
//
// The radius of a box is rounded upwards and covers the rounding of the centre: in f16 and int8, too, kMinMax
// bounds the keys, up to f32 rounding of the score (1e-6 of |q| . (|c| + r)). Values beyond f16 are clamped
// to it; NaN in a key has no influence on a box, and counts as 0 in a mean.
//
// Digests lie in tiles of 16, per KV head: f16 [2 * head_dim, 16], the rows of c before those of r; or int8
// [head_dim, 16, 2], two rows side by side, behind two rows of f32 that hold each digest's factor of c and of
// r. The digests of a tile form a group. Its own digest is a box, the hull of what its digests reach for any
// q: c +- share * r, or c +- |r|; so with a share of 1 it scores no less than they. Groups lie in tiles of
// the same form.
//
// Host memory, as address space up to blocks_max at start; resident is what has been written, where the
// system grants huge pages in steps of 2 MiB. Owned by the sequence: one writer per layer (add() of different
// layers may run at once), none while others read; truncate() alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/anonymous_memory.h"
#include "base/error.h"
#include "kv/geometry.h"

namespace dualdecoder {

enum class DigestKind { kMinMax, kMean, kPrincipal };
enum class DigestType { kF16, kInt8 };

struct DigestOptions {
  DigestKind kind = DigestKind::kPrincipal;
  DigestType type = DigestType::kF16;
};

/// Tokens that one digest covers: the smallest block.
inline constexpr std::uint32_t kDigestTokens = 16;
/// Digests in a tile, and so in a group.
inline constexpr std::uint32_t kTileDigests = 16;
static_assert(kTileDigests % (64 / kDigestTokens) == 0, "the digests of a block lie in one tile");

/// What counts of a radius in a score.
constexpr float radius_share(DigestKind kind) {
  switch (kind) {
    case DigestKind::kMinMax:
      return 0.35f;
    case DigestKind::kMean:
      return 1.1f;
    case DigestKind::kPrincipal:
      return 1;  // the radius has been shrunk
  }
  return 1;
}

class DigestColumn;

class Digests {
 public:
  /// geometry.head_dim is at most 256.
  static Result<std::unique_ptr<Digests>> create(const KvGeometry& geometry, const DigestOptions& options,
                                                 std::uint32_t blocks_max);
  Digests(const Digests&) = delete;
  Digests& operator=(const Digests&) = delete;

  /// Bytes that digests of `blocks` blocks of every layer fill, those of their groups included.
  static std::size_t bytes_for(const KvGeometry& geometry, const DigestOptions& options,
                               std::uint32_t blocks);

  /// Appends the digests of the layer's next block, which is full. k: [kv_head, head_dim, block_tokens].
  void add(LayerIndex layer, const f16_bits* k);
  /// Replaces all by those of the first `blocks` blocks of `other`, which has the same shape and options.
  void copy(const Digests& other, std::uint32_t blocks);
  /// Bytes of one block's digests in `layers` layers, as save() gives them.
  static std::size_t record_bytes(const KvGeometry& geometry, const DigestOptions& options,
                                  std::size_t layers);
  /// One block's digests in `layers`, bit by bit: [layer, part, kv_head], record_bytes().
  void save(BlockIndex block, std::span<const LayerIndex> layers, std::span<std::byte> record) const;
  /// Appends such a record as the next block of `layers`, which have equally many; what add() would have
  /// done.
  void append(std::span<const LayerIndex> layers, std::span<const std::byte> record);
  /// Forgets the blocks from `blocks` on, in all layers; a layer with fewer stays as it is. Afterwards all is
  /// as if they had never been added.
  void truncate(std::uint32_t blocks);

  std::uint32_t blocks(LayerIndex layer) const { return blocks_[layer.value]; }
  std::uint32_t blocks_max() const { return blocks_max_; }
  std::uint32_t digests_per_block() const { return geometry_.block_tokens / kDigestTokens; }
  const KvGeometry& geometry() const { return geometry_; }
  const DigestOptions& options() const { return options_; }

  /// Digests [16 * index, 16 * index + 16) of the layer; places beyond the last hold anything finite. Digest
  /// i is part i % digests_per_block() of block i / digests_per_block().
  const std::byte* tile(LayerIndex layer, std::uint32_t index) const {
    return place(digests_at_, layer, index);
  }
  /// Groups [16 * index, 16 * index + 16) of the layer.
  const std::byte* group_tile(LayerIndex layer, std::uint32_t index) const {
    return place(groups_at_, layer, index);
  }
  /// Bytes of one KV head in a tile.
  std::size_t head_bytes() const { return head_bytes_; }
  std::size_t tile_bytes() const { return head_bytes_ * geometry_.kv_heads; }

  /// centre, radius: [head_dim] as they are scored, of the block's tokens [16 * part, 16 * part + 16).
  void read_block(LayerIndex layer, BlockIndex block, std::uint32_t part, std::uint32_t kv_head,
                  float* centre, float* radius) const;
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
  DigestColumn column_of(LayerIndex layer, std::uint32_t digest, std::uint32_t kv_head) const;
  void add_digest(LayerIndex layer, std::uint32_t digest, const f16_bits* k);
  void read_digest(LayerIndex layer, std::uint32_t digest, std::uint32_t kv_head, float* centre,
                   float* radius) const;
  void clear_hull(LayerIndex layer);
  void grow_hull(LayerIndex layer, std::uint32_t kv_head, const float* centre, const float* radius);
  void write_group(LayerIndex layer, std::uint32_t group);

  KvGeometry geometry_;
  DigestOptions options_;
  std::uint32_t blocks_max_;
  std::size_t head_bytes_;
  AnonymousMemory memory_;
  std::byte* digests_at_ = nullptr;
  std::byte* groups_at_ = nullptr;
  std::vector<std::uint32_t> blocks_;  // [layer]
  std::vector<float> hulls_;           // [layer, kv_head, 2, head_dim]: low and high of the last group
};

}  // namespace dualdecoder
