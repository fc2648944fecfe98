#include "decode/ranker.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

namespace dualdecoder {

Ranker::Ranker(const AttentionShape& shape, Tiers& tiers, Forward& forward)
    : shape_(shape), tiers_(tiers), forward_(forward), selectors_(forward.threads()) {}

void Ranker::rank(std::span<const RankRequest> requests) {
  if (requests.size() == 1) {
    rank_one(requests.front(), selectors_.front());
    return;
  }
  if (requests.empty()) return;
  std::atomic<std::size_t> next = 0;
  forward_.parallel([&](std::uint32_t thread) {
    for (std::size_t i = next++; i < requests.size(); i = next++) rank_one(requests[i], selectors_[thread]);
  });
}

void Ranker::rank_one(const RankRequest& request, Selector& selector) const {
  Selection& selection = request.sequence->selection(request.layer);
  rank_digests(request, selector, selection.blocks);
  selection.set_ranked(request.candidates.end);
}

void Ranker::rank_digests(const RankRequest& request, Selector& selector,
                          std::vector<BlockIndex>& blocks) const {
  blocks.clear();
  if (request.candidates.count() == 0) return;
  selector.select(*request.sequence->digests(),
                  {.layer = request.layer,
                   .q = request.q,
                   .heads = shape_.heads,
                   .scale = shape_.scale,
                   .first = request.candidates.first,
                   .end = request.candidates.end,
                   .count = request.count},
                  blocks);
}

void Ranker::rank_by_attention(const RankRequest& request, Streamer& streamer) {
  const std::uint32_t first = request.candidates.first.value;
  const std::uint32_t candidates = request.candidates.count();
  BlockList all;
  for (BlockIndex block = request.candidates.first; block < request.candidates.end; ++block)
    all.blocks.push_back(block);
  lse_.resize(std::size_t{candidates} * shape_.heads);
  if (!all.blocks.empty()) {
    streamer.add(*request.sequence, 0, request.layer, all);
    while (const Streamer::Segment* segment = streamer.wait_front(request.layer)) {
      measure(*segment, request);
      streamer.pop();
    }
  }
  mass_.assign(candidates, 0.0);
  for (std::uint32_t head = 0; head < shape_.heads; ++head) {
    double max = -INFINITY;
    for (std::uint32_t b = 0; b < candidates; ++b)
      max = std::max<double>(max, lse_[std::size_t{b} * shape_.heads + head]);
    double sum = 0.0;
    for (std::uint32_t b = 0; b < candidates; ++b)
      sum += std::exp(lse_[std::size_t{b} * shape_.heads + head] - max);
    for (std::uint32_t b = 0; b < candidates; ++b)
      mass_[b] += std::exp(lse_[std::size_t{b} * shape_.heads + head] - max) / sum;
  }
  std::vector<std::uint32_t> order(candidates);
  std::iota(order.begin(), order.end(), 0U);
  const std::uint32_t kept = std::min(request.count, candidates);
  std::partial_sort(order.begin(), order.begin() + kept, order.end(),
                    [&](std::uint32_t a, std::uint32_t b) { return mass_[a] > mass_[b]; });
  std::sort(order.begin(), order.begin() + kept);
  Selection& selection = request.sequence->selection(request.layer);
  selection.blocks.clear();
  for (std::uint32_t i = 0; i < kept; ++i) selection.blocks.push_back(BlockIndex(first + order[i]));
  selection.set_ranked(request.candidates.end);
}

double Ranker::mass_of(std::span<const BlockIndex> blocks, const Candidates& candidates) const {
  double sum = 0.0;
  for (const BlockIndex block : blocks) {
    if (candidates.holds(block)) sum += mass_[block.value - candidates.first.value];
  }
  return sum / shape_.heads;
}

void Ranker::measure_coverage(const RankRequest& request) {
  previous_.resize(tiers_.geometry().layers);
  std::vector<BlockIndex>& previous = previous_[request.layer.value];
  std::vector<BlockIndex> own;
  rank_digests(request, selectors_.front(), own);
  if (!previous.empty()) {
    ++coverage_.samples;
    coverage_.oracle += mass_of(request.sequence->selection(request.layer).blocks, request.candidates);
    coverage_.digest += mass_of(own, request.candidates);
    coverage_.previous += mass_of(previous, request.candidates);
  }
  previous = std::move(own);
}

// One attention over each block alone, for its log-sum-exp.
void Ranker::measure(const Streamer::Segment& segment, const RankRequest& request) {
  const std::size_t width = std::size_t{shape_.heads} * shape_.head_dim;
  out_.resize(segment.pieces.size() * width);
  views_.clear();
  groups_.clear();
  for (const Streamer::Piece& piece : segment.pieces) {
    views_.push_back({.k = tiers_.near().k(piece.slot),
                      .v = tiers_.near().v(piece.slot),
                      .first_position = piece.block.value * shape_.block_tokens,
                      .tokens = shape_.block_tokens});
  }
  for (std::size_t i = 0; i < views_.size(); ++i) {
    const std::size_t index = segment.pieces[i].block.value - request.candidates.first.value;
    groups_.push_back({.blocks = std::span(views_).subspan(i, 1),
                       .rows = 1,
                       .first_row_position = request.sequence->tokens(),
                       .window = 0,
                       .q = request.q,
                       .out = out_.data() + i * width,
                       .lse = lse_.data() + index * shape_.heads});
  }
  attention_.plan(shape_, groups_, forward_.threads());
  forward_.parallel([&](std::uint32_t thread) { attention_.run(thread); });
}

}  // namespace dualdecoder
