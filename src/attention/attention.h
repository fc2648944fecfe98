// Exact attention of a few or of many query rows over a list of scattered KV blocks (kv/geometry.h gives
// their layout).
//
// All query heads of a KV head and all rows of a group share every load of K and V. Softmax is online, in
// float32 (Milakov & Gimelshein 2018; Dao et al. 2022). The kernel returns the log-sum-exp per row and head,
// so that the results over disjoint sets of keys can be merged exactly.
//
// The result of a row depends only on its query and on its list of blocks: not on the other rows or groups of
// the call, not on the number of threads. Keys are taken in tiles of kTileKeys and splits of kSplitKeys,
// counted along the list; the splits are merged in order. Blocks in which no row sees a key are not read.
//
// AttentionBatch is a plan made by one thread (`plan`) and then carried out by any number of threads that
// call `run` at the same time; `run` blocks on nothing. Written with Highway, dispatched at run time to the
// best instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv/geometry.h"

namespace dualdecoder {

inline constexpr std::uint32_t kTileKeys = 64;
/// Also the least work of a task: few enough keys that threads can share a short context evenly.
inline constexpr std::uint32_t kSplitKeys = 256;

/// One block as the kernel reads it. Tokens beyond `tokens` may hold anything, NaN included: they have no
/// influence.
struct KvBlockView {
  const f16_bits* k = nullptr;       // [kv_head, head_dim, block_tokens]; null if no row sees the block
  const f16_bits* v = nullptr;       // [kv_head, block_tokens, head_dim]
  std::uint32_t first_position = 0;  // of the block's first token in its sequence
  std::uint32_t tokens = 0;          // valid ones, 1 .. block_tokens
};

struct AttentionShape {
  std::uint32_t heads = 0;  // query heads, a multiple of kv_heads
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;      // a multiple of 16, at most 256
  std::uint32_t block_tokens = 0;  // 16, 32 or 64
  float scale = 1.0f;              // applied to q . k
};

/// The softmax in progress of a group whose keys come in several calls, [rows, heads] each, of the caller.
/// Between the calls, `out` holds sums that are not yet divided. The bits are those of one call, if every
/// call but the last brings a multiple of kSplitKeys keys.
struct AttentionCarry {
  float* max = nullptr;
  float* sum = nullptr;
  bool resume = false;  // not the first call
  bool more = false;    // not the last one
};

/// Rows of one sequence at consecutive positions; row r stands at first_row_position + r and sees the keys of
/// `blocks` whose position p satisfies  p <= its own  and, with a window w > 0,  p > its own - w.
struct AttentionGroup {
  std::span<const KvBlockView> blocks;  // any order, gaps allowed; a row that sees no key gets NaN
  std::uint32_t rows = 0;
  std::uint32_t first_row_position = 0;
  std::uint32_t window = 0;  // 0: unlimited
  const float* q = nullptr;  // [rows, heads, head_dim], dense
  float* out = nullptr;      // [rows, heads, head_dim], dense
  float* lse = nullptr;      // [rows, heads] natural logarithm; may be null
  AttentionCarry carry = {};
};

class AttentionBatch {
 public:
  AttentionBatch();
  ~AttentionBatch();
  AttentionBatch(const AttentionBatch&) = delete;
  AttentionBatch& operator=(const AttentionBatch&) = delete;

  /// Divides the work of `groups` into tasks, for at most `threads` callers of run(). The spans and pointers
  /// in `groups` must outlive the run() calls. Reuses its buffers: after the largest batch has been planned
  /// once, planning allocates nothing.
  void plan(const AttentionShape& shape, std::span<const AttentionGroup> groups, std::uint32_t threads);

  /// Takes tasks until none is left. `thread` in 0 .. threads - 1, each used by one caller at a time. When
  /// all callers have returned, `out` and `lse` are complete.
  void run(std::uint32_t thread);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The same result in double precision by the plain definition, one row and head after the other. Slow; for
/// tests.
void attention_reference(const AttentionShape& shape, const AttentionGroup& group);

/// Names of the instruction sets compiled in that this machine can run, best first, e.g. {"AVX2", "SSE4",
/// ...}.
std::vector<std::string> attention_targets();
/// Makes later calls of plan() and store_tokens() use one of attention_targets(); an empty name returns to
/// the best. For tests and benchmarks.
void force_attention_target(const std::string& name);

/// Writes the K and V (f32, [count, kv_head, head_dim] each, dense) of `count` consecutive tokens as f16,
/// rounded to nearest even, into places index .. index + count - 1 of a block.
void store_tokens(const KvGeometry& geometry, const float* k, const float* v, std::uint32_t count,
                  std::uint32_t index, f16_bits* block_k, f16_bits* block_v);
/// The same for one token.
inline void store_token(const KvGeometry& geometry, const float* k, const float* v, std::uint32_t index,
                        f16_bits* block_k, f16_bits* block_v) {
  store_tokens(geometry, k, v, 1, index, block_k, block_v);
}

/// Merges the results over two disjoint sets of keys into (out_a, lse_a). out: [head_dim]. An lse of -inf
/// means no keys.
void merge_attention(float* out_a, float& lse_a, const float* out_b, float lse_b, std::uint32_t head_dim);

}  // namespace dualdecoder
