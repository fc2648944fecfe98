// Which blocks one layer of one sequence should attend to: the candidates with the best pooled scores.
//
// Scored are digests (select/digest.h). Pooled are the softmax weights: per head over the digests of all
// candidates, then summed over a block's digests and over the heads, so that all KV heads of a layer share
// one selection and a head that is sure of its blocks counts as much as any other. Equal blocks: the later
// one wins. NaN in a query's score counts as the lowest score.
//
// select_flat() scores every candidate. select() scores groups of 16 digests by their hull, then the blocks
// of the most promising groups only: an approximation that reads a fifth of the digests of many blocks, and
// works as well as neighbouring blocks resemble each other. The same call gives the same answer on the same
// machine.
//
// A Selector is scratch memory and a little state of the current call: one per thread. It allocates nothing
// once its largest call has been made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kv/geometry.h"
#include "select/digest.h"

namespace dualdecoder {

struct ScoreKernels;

/// Below this many digests of candidates select() is select_flat(), which is as fast there; also where most
/// groups would have to be refined, e.g. below 2,048 for blocks that have 64.
inline constexpr std::uint32_t kFlatDigests = 512;

struct SelectRequest {
  LayerIndex layer{};
  const float* q = nullptr;  // [heads, head_dim]
  std::uint32_t heads = 0;   // a multiple of kv_heads
  float scale = 1.0f;        // applied to q . k
  BlockIndex first{};        // candidates are [first, end)
  BlockIndex end{};
  std::uint32_t count = 0;  // wanted
};

class Selector {
 public:
  /// The `count` best candidates in ascending order; all of them, without scoring, when there are no more.
  void select(const Digests& digests, const SelectRequest& request, std::vector<BlockIndex>& out);
  void select_flat(const Digests& digests, const SelectRequest& request, std::vector<BlockIndex>& out);
  /// Pooled scores of all candidates: pooled[i] is that of block first + i. They sum to `heads`.
  void scores_flat(const Digests& digests, const SelectRequest& request, std::vector<float>& pooled);

  /// Bytes of digests that the last call read.
  std::size_t bytes_read() const { return bytes_read_; }

 private:
  /// Columns of some tiles for all heads.
  struct Table {
    std::size_t columns = 0;  // a multiple of 16
    std::size_t stride = 0;   // columns from one head to the next
    std::vector<const std::byte*> tiles;
    std::vector<float> scores;   // [heads, stride], in units of log2
    std::vector<float> weights;  // [heads, stride]: 2^(score - max)
    std::vector<float> max;      // [heads]
    std::vector<float> sum;      // [heads] of weights
    std::vector<float> pooled;   // [stride]

    void clear(std::uint32_t heads, std::size_t tiles_max);
  };
  /// What does not change during a call.
  struct Call {
    const Digests* digests = nullptr;
    const ScoreKernels* kernels = nullptr;
    SelectRequest request;
    std::uint32_t parts = 0;  // digests of a block
    std::uint32_t first = 0;  // digests of the candidates are [first, end)
    std::uint32_t end = 0;
    std::uint32_t first_group = 0;
    std::uint32_t end_group = 0;
  };

  void begin(const Digests& digests, const SelectRequest& request);
  void set_block_query();
  void set_group_query();
  template <typename ForRadius>
  void set_query(ForRadius for_radius);
  void score_tiles(Table& table);
  void mask(Table& table, std::size_t begin, std::size_t end) const;
  void normalise(Table& table) const;
  void pool(Table& table) const;
  float block_score(std::size_t column) const;
  void score_candidates();
  void score_groups();
  void refine(std::uint32_t wanted);
  void pool_refined();
  void keep_best(float score, std::uint32_t index, std::uint32_t count);
  void keep_best_blocks();
  void take_best(std::vector<BlockIndex>& out);

  Call call_;
  std::vector<float> query_;            // [heads, 2, head_dim]: for c and for r, in units of log2
  std::vector<std::int16_t> steps_;     // the same, in steps
  std::vector<float> step_;             // [heads]
  std::vector<float> factors_;          // [heads]
  Table digests_;                       // of all candidates, or of the refined groups one after the other
  Table groups_;                        // column 0 is the first of the tile with first_group
  std::vector<std::uint32_t> refined_;  // groups
  std::vector<std::uint64_t> best_;     // a heap with the worst on top: bits of the score, index
  std::size_t bytes_read_ = 0;
};

}  // namespace dualdecoder
