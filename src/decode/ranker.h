// Ranks a sequence's blocks for one layer: by digests, with any number of threads, or by the attention that
// the keys really get (the oracle). Owned by the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "decode/block_list.h"
#include "decode/sequence.h"
#include "decode/streamer.h"
#include "model/forward.h"
#include "select/select.h"

namespace dualdecoder {

struct RankRequest {
  Sequence* sequence = nullptr;
  LayerIndex layer;
  const float* q = nullptr;  // [heads, head_dim]
  Candidates candidates;
  std::uint32_t count = 0;  // of blocks to select, at most
};

/// How much of the true attention beside the window (mean over heads, 0 to 1) some selections of the same
/// size hold, summed over `samples` layers and steps.
struct Coverage {
  std::uint64_t samples = 0;
  double oracle = 0.0;    // the best blocks
  double digest = 0.0;    // ranked by digests with the row's own query
  double previous = 0.0;  // ranked by digests with the row before's query
};

class Ranker {
 public:
  Ranker(const AttentionShape& shape, Tiers& tiers, Forward& forward);

  /// Sets the selection of each request's sequence and layer: the best candidates.
  void rank(std::span<const RankRequest> requests);
  /// The same by true attention mass, summed over heads. Reads every candidate through `streamer`, which is
  /// empty.
  void rank_by_attention(const RankRequest& request, Streamer& streamer);
  /// After rank_by_attention with the same request. For one sequence at a time.
  void measure_coverage(const RankRequest& request);
  const Coverage& coverage() const { return coverage_; }

 private:
  void rank_one(const RankRequest& request, Selector& selector) const;
  void rank_digests(const RankRequest& request, Selector& selector, std::vector<BlockIndex>& blocks) const;
  void measure(const Streamer::Segment& segment, const RankRequest& request);
  double mass_of(std::span<const BlockIndex> blocks, const Candidates& candidates) const;

  AttentionShape shape_;
  Tiers& tiers_;
  Forward& forward_;
  std::vector<Selector> selectors_;  // [thread]
  // Of rank_by_attention.
  AttentionBatch attention_;
  std::vector<KvBlockView> views_;
  std::vector<AttentionGroup> groups_;
  std::vector<float> out_;    // [piece, heads, head_dim], not wanted
  std::vector<float> lse_;    // [block, heads]
  std::vector<double> mass_;  // [block] summed over heads
  // Of measure_coverage.
  Coverage coverage_;
  std::vector<std::vector<BlockIndex>> previous_;  // [layer] as ranked in the step before
};

}  // namespace dualdecoder
