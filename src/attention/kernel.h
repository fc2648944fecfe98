// The arithmetic of attention over one tile of keys, for each instruction set. Pure functions on buffers of
// the caller.
//
// "Rows" here are query rows times the query heads of one KV head. Each element of a result is one chain of
// multiply-adds in the order of its sum, whatever the number of rows, so a row's result does not depend on
// the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/attention.h"

namespace dualdecoder {

inline constexpr std::uint32_t kTileBlocksMax = kTileKeys / 16;

/// Up to kTileKeys keys and values of one KV head.
struct KeyTile {
  struct Block {
    const f16_bits* k;       // [head_dim, block_tokens]
    const f16_bits* v;       // [block_tokens, head_dim]
    const f16_bits* next_k;  // what will be read after v: asked for while v is read, as v is while k is read
    std::uint32_t tokens;    // valid ones; v beyond them is never used
  };
  std::uint32_t head_dim = 0;
  std::uint32_t block_tokens = 0;
  std::uint32_t count = 0;
  Block blocks[kTileBlocksMax];

  std::uint32_t columns() const { return count * block_tokens; }
};

/// Softmax in progress over some keys. Scores are in units of log2: score = log2(e) * scale * q . k.
struct AttentionState {
  float* max;  // [rows] highest score so far, -inf before the first visible key
  float* sum;  // [rows] of 2^(score - max)
  float* out;  // [rows, head_dim] the same weights times V
};

struct Kernels {
  const char* target;

  /// scores [rows, kTileKeys] = q [rows, head_dim] * K, columns() of them per row.
  void (*scores)(const KeyTile& tile, const float* q, std::uint32_t rows, float* scores);
  /// Turns scores (-inf where masked) into weights 2^(score - max), with max and sum brought up to date;
  /// rescale [rows] is what the weights so far must be multiplied with: 1 if max stays.
  void (*softmax)(std::uint32_t columns, std::uint32_t rows, float* scores, const AttentionState& state,
                  float* rescale);
  /// out = out * rescale + weights * V.
  void (*values)(const KeyTile& tile, const float* weights, const float* rescale, std::uint32_t rows,
                 float* out);
  /// Adds the keys of `part` to `total`. A part that saw no key changes nothing.
  void (*merge)(std::uint32_t rows, std::uint32_t head_dim, const AttentionState& part,
                const AttentionState& total);
  /// Rounds to nearest even.
  void (*to_f16)(const float* from, std::size_t count, f16_bits* to);
};

/// For every instruction set compiled in that this machine can run, best first.
std::span<const Kernels* const> available_kernels();
/// The first of these, or the one that force_attention_target() has named.
const Kernels& current_kernels();

}  // namespace dualdecoder
