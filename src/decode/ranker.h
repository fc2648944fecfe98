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
};

class Ranker {
 public:
  Ranker(const AttentionShape& shape, Tiers& tiers, Forward& forward);

  /// Sets the selection of each request's sequence and layer: the `count` best candidates.
  void rank(std::span<const RankRequest> requests, std::uint32_t count);
  /// The same by true attention mass, summed over heads. Reads every candidate through `streamer`, which is
  /// empty.
  void rank_by_attention(const RankRequest& request, std::uint32_t count, Streamer& streamer);

 private:
  void rank_one(const RankRequest& request, std::uint32_t count, Selector& selector) const;
  void measure(const Streamer::Segment& segment, const RankRequest& request);

  AttentionShape shape_;
  Tiers& tiers_;
  Forward& forward_;
  std::vector<Selector> selectors_;  // [thread]
  // Of rank_by_attention.
  AttentionBatch attention_;
  std::vector<KvBlockView> views_;
  std::vector<AttentionGroup> groups_;
  std::vector<float> out_;  // [piece, heads, head_dim], not wanted
  std::vector<float> lse_;  // [block, heads]
};

}  // namespace dualdecoder
