// The shape of the KV cache and of one block in it. A plain value: owned by nobody, free of threads.
//
// A block holds the K and V of `block_tokens` consecutive tokens, all KV heads, of one layer, in f16, without
// gaps, so that a block is one read. In one of two layouts:
//
//   kTransposedKeys, for the CPU's kernel:
//     K: [kv_head, head_dim, block_tokens]   (scores for adjacent tokens are one vector load)
//     V: [kv_head, block_tokens, head_dim]
//   In this order both products of attention have the form C[m, 16] += a[m] * B[16]: no horizontal sums, and
//   one micro-kernel for both (attention/kernel).
//
//   kTokens, for ggml's devices: [block_tokens, K then V, kv_head, head_dim], so that blocks one behind the
//   other are one run of tokens at one stride.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/f16.h"
#include "base/strong_int.h"

namespace dualdecoder {

using LayerIndex = StrongInt<struct LayerIndexTag>;
/// Index of a block within its sequence: block b holds the tokens [b * block_tokens, (b + 1) * block_tokens).
using BlockIndex = StrongInt<struct BlockIndexTag>;
/// A block-sized place in the near tier.
using SlotIndex = StrongInt<struct SlotIndexTag>;
/// A place in the far tier for the blocks of all layers for the same tokens.
using PageIndex = StrongInt<struct PageIndexTag>;

/// Blocks begin at multiples of this in both tiers, so that direct I/O can move them.
inline constexpr std::size_t kBlockAlignment = 4096;

enum class KvLayout : std::uint8_t { kTransposedKeys, kTokens };

struct KvGeometry {
  std::uint32_t layers = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;       // of K and of V; a multiple of 16
  std::uint32_t block_tokens = 32;  // 16, 32 or 64
  KvLayout layout = KvLayout::kTransposedKeys;

  /// f16 values of K (or of V) of one KV head in one block.
  std::size_t head_block_elements() const { return std::size_t{head_dim} * block_tokens; }
  /// f16 values of K (or of V) of one block.
  std::size_t half_block_elements() const { return head_block_elements() * kv_heads; }
  std::size_t block_bytes() const { return 2 * half_block_elements() * sizeof(f16_bits); }
  /// A block with the padding behind it: what a slot takes, and what is moved.
  std::size_t slot_bytes() const {
    return (block_bytes() + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  }
  std::size_t page_bytes() const { return slot_bytes() * layers; }
  /// Bytes of one token's K and V over all layers.
  std::size_t token_bytes() const { return block_bytes() / block_tokens * layers; }
  std::uint32_t blocks_for(std::uint32_t tokens) const {
    return tokens / block_tokens + (tokens % block_tokens != 0 ? 1 : 0);
  }
};

}  // namespace dualdecoder
