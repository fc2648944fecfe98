#include "select/select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>

#include "base/check.h"
#include "select/score.h"

namespace dualdecoder {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
/// Of the groups, one in so many is refined. On smooth keys (correlation of 0.998 from token to token, blocks
/// of 32, 9 heads that each look at a place of their own) the 32 best of 4,096 blocks lie in 11 groups; the
/// 32 refined ones of 256 hold 92 % of these blocks and 98 % of their weight, 64 would hold 95 and 99.6 %.
/// With 0.9995, 32 hold 97 and 99.9 %; with white noise, 24 and 59 %. Tried and lost: to refine in two
/// rounds, the second ranked with the first one's normalisers (no better), and to stop when no other group's
/// bound reaches the worst chosen block (never happened).
constexpr std::uint32_t kRefinedShare = 8;
/// Groups refined for every group that the wanted blocks would fill.
constexpr std::uint32_t kRefinedPerFull = 16;
/// Of a group's radius, so much counts when groups are ranked. All of it gives the bound, which a group only
/// reaches if its blocks are extreme in all dimensions at once: ranked by it, 2 % fewer of the best are
/// found.
constexpr float kRadiusShare = 0.6f;

/// Scores are not negative, so their bits have their order; a tie goes to the higher index.
std::uint64_t key_of(float score, std::uint32_t index) {
  return std::uint64_t{std::bit_cast<std::uint32_t>(score)} << 32 | index;
}

std::uint32_t groups_for(std::uint32_t blocks) { return (blocks + kTileDigests - 1) / kTileDigests; }

}  // namespace

// ---- tables

void Selector::Table::clear(std::uint32_t heads, std::size_t tiles_max) {
  columns = 0;
  stride = tiles_max * kTileDigests;
  tiles.clear();
  const auto grow = [](std::vector<float>& vector, std::size_t size) {
    if (vector.size() < size) vector.resize(size);
  };
  grow(scores, heads * stride);
  grow(weights, heads * stride);
  grow(max, heads);
  grow(sum, heads);
  grow(pooled, stride);
}

void Selector::begin(const Digests& digests, const SelectRequest& request) {
  const KvGeometry& geometry = digests.geometry();
  DD_CHECK(request.heads > 0 && request.heads % geometry.kv_heads == 0, "{} heads, {} KV heads",
           request.heads, geometry.kv_heads);
  DD_CHECK(request.first <= request.end && request.end.value <= digests.blocks(request.layer),
           "candidates {} to {} of {}", request.first.value, request.end.value,
           digests.blocks(request.layer));
  call_ = {.digests = &digests,
           .kernels = &current_score_kernels(),
           .request = request,
           .first_group = request.first.value / kTileDigests,
           .end_group = groups_for(request.end.value)};
  bytes_read_ = 0;

  query_.resize(std::max(query_.size(), std::size_t{request.heads} * 2 * geometry.head_dim));
  steps_.resize(query_.size());
  step_.resize(std::max<std::size_t>(step_.size(), request.heads));
  factors_.resize(step_.size());
}

/// `radius_share` is what counts of a radius.
void Selector::set_query(float radius_share) {
  const SelectRequest& request = call_.request;
  const std::size_t head_dim = call_.digests->geometry().head_dim;
  const float factor = request.scale * std::numbers::log2e_v<float>;
  for (std::uint32_t head = 0; head < request.heads; ++head) {
    const std::size_t first = head * 2 * head_dim;
    float* const to = query_.data() + first;
    for (std::size_t d = 0; d < head_dim; ++d) {
      to[d] = request.q[head * head_dim + d] * factor;
      to[head_dim + d] = std::abs(to[d]) * radius_share;
    }
    if (call_.digests->options().type == DigestType::kF16) continue;
    step_[head] = call_.kernels->steps(to, 2 * head_dim, steps_.data() + first);
  }
}

void Selector::score_tiles(Table& table) {
  const Digests& digests = *call_.digests;
  const KvGeometry& geometry = digests.geometry();
  const std::uint32_t rows = call_.request.heads / geometry.kv_heads;
  table.columns = table.tiles.size() * kTileDigests;
  DigestColumns columns = {.type = digests.options().type,
                           .head_dim = geometry.head_dim,
                           .tiles = table.tiles.data(),
                           .count = static_cast<std::uint32_t>(table.tiles.size())};
  const ScoreQuery query = {.values = query_.data(), .steps = steps_.data(), .step = step_.data()};
  for (std::uint32_t kv_head = 0; kv_head < geometry.kv_heads; ++kv_head) {
    const std::size_t first_row = std::size_t{kv_head} * rows;
    columns.offset = kv_head * digests.head_bytes();
    call_.kernels->scores(columns, query.from_row(first_row, geometry.head_dim), rows,
                          table.scores.data() + first_row * table.stride, table.stride);
  }
  bytes_read_ += table.tiles.size() * digests.tile_bytes();
}

/// Columns [begin, end) are no candidates.
void Selector::mask(Table& table, std::size_t begin, std::size_t end) const {
  if (begin == end) return;
  for (std::uint32_t head = 0; head < call_.request.heads; ++head) {
    float* const row = table.scores.data() + head * table.stride;
    std::fill(row + begin, row + end, kNegativeInfinity);
  }
}

void Selector::normalise(Table& table) const {
  for (std::uint32_t head = 0; head < call_.request.heads; ++head) {
    const float* const scores = table.scores.data() + head * table.stride;
    table.max[head] = call_.kernels->highest(scores, table.columns);
    table.sum[head] = call_.kernels->weights(scores, table.columns, table.max[head],
                                             table.weights.data() + head * table.stride);
  }
}

void Selector::pool(Table& table) const {
  call_.kernels->pool(table.weights.data(), table.stride, factors_.data(), call_.request.heads, table.columns,
                      table.pooled.data());
}

// ---- the best so far

/// Keeps the best `count` of what it is given.
void Selector::keep_best(float score, std::uint32_t index, std::uint32_t count) {
  const std::uint64_t key = key_of(score, index);
  if (best_.size() == count) {
    if (key <= best_.front()) [[likely]]
      return;
    std::pop_heap(best_.begin(), best_.end(), std::greater<>());
    best_.back() = key;
  } else {
    best_.push_back(key);
  }
  std::push_heap(best_.begin(), best_.end(), std::greater<>());
}

void Selector::take_best(std::vector<BlockIndex>& out) {
  out.clear();
  for (const std::uint64_t key : best_) out.emplace_back(static_cast<std::uint32_t>(key));
  std::sort(out.begin(), out.end());
}

// ---- flat

void Selector::score_candidates() {
  const SelectRequest& request = call_.request;
  set_query(1);
  blocks_.clear(request.heads, call_.end_group - call_.first_group);
  for (std::uint32_t group = call_.first_group; group < call_.end_group; ++group) {
    blocks_.tiles.push_back(call_.digests->tile(request.layer, group));
  }
  score_tiles(blocks_);
  const std::uint32_t first_column = request.first.value % kTileDigests;
  mask(blocks_, 0, first_column);
  mask(blocks_, first_column + (request.end.value - request.first.value), blocks_.columns);
  normalise(blocks_);
  for (std::uint32_t head = 0; head < request.heads; ++head) factors_[head] = 1 / blocks_.sum[head];
  pool(blocks_);
}

void Selector::scores_flat(const Digests& digests, const SelectRequest& request, std::vector<float>& pooled) {
  begin(digests, request);
  pooled.clear();
  if (request.first == request.end) return;
  score_candidates();
  const auto first = blocks_.pooled.begin() + request.first.value % kTileDigests;
  pooled.assign(first, first + (request.end.value - request.first.value));
}

namespace {

/// True if there is nothing to choose.
bool take_all(const SelectRequest& request, std::vector<BlockIndex>& out) {
  out.clear();
  if (request.count == 0) return true;
  if (request.end.value - request.first.value > request.count) return false;
  for (BlockIndex block = request.first; block < request.end; ++block) out.push_back(block);
  return true;
}

}  // namespace

void Selector::select_flat(const Digests& digests, const SelectRequest& request,
                           std::vector<BlockIndex>& out) {
  begin(digests, request);
  if (take_all(request, out)) return;
  score_candidates();
  best_.clear();
  const std::uint32_t column_0 = call_.first_group * kTileDigests;
  for (std::uint32_t block = request.end.value; block > request.first.value; --block) {
    keep_best(blocks_.pooled[block - 1 - column_0], block - 1, request.count);
  }
  take_best(out);
}

// ---- by groups

void Selector::select(const Digests& digests, const SelectRequest& request, std::vector<BlockIndex>& out) {
  const std::uint32_t candidates = request.end.value - request.first.value;
  const std::uint32_t groups = groups_for(candidates);
  const std::uint32_t wanted = std::max(groups / kRefinedShare, kRefinedPerFull * groups_for(request.count));
  if (candidates < kFlatCandidates || wanted > groups / 2) return select_flat(digests, request, out);
  begin(digests, request);
  if (take_all(request, out)) return;
  score_groups();
  blocks_.clear(request.heads, wanted);
  refine(wanted);
  pool_refined();
  keep_best_blocks();
  take_best(out);
}

void Selector::score_groups() {
  const LayerIndex layer = call_.request.layer;
  const std::uint32_t first_tile = call_.first_group / kTileDigests;
  const std::uint32_t end_tile = groups_for(call_.end_group);
  groups_.clear(call_.request.heads, end_tile - first_tile);
  for (std::uint32_t tile = first_tile; tile < end_tile; ++tile) {
    groups_.tiles.push_back(call_.digests->group_tile(layer, tile));
  }
  set_query(kRadiusShare);
  score_tiles(groups_);
  set_query(1);
  const std::uint32_t first_column = call_.first_group % kTileDigests;
  mask(groups_, 0, first_column);
  mask(groups_, first_column + (call_.end_group - call_.first_group), groups_.columns);
  normalise(groups_);
  for (std::uint32_t head = 0; head < call_.request.heads; ++head) factors_[head] = 1 / groups_.sum[head];
  pool(groups_);
}

/// Scores the blocks of the `wanted` best groups.
void Selector::refine(std::uint32_t wanted) {
  const SelectRequest& request = call_.request;
  const std::uint32_t column_0 = call_.first_group - call_.first_group % kTileDigests;
  best_.clear();
  for (std::uint32_t group = call_.end_group; group > call_.first_group; --group) {
    keep_best(groups_.pooled[group - 1 - column_0], group - 1, wanted);
  }
  refined_.clear();
  for (const std::uint64_t key : best_) {
    refined_.push_back(static_cast<std::uint32_t>(key));
    blocks_.tiles.push_back(call_.digests->tile(request.layer, refined_.back()));
  }
  score_tiles(blocks_);
  for (std::size_t tile = 0; tile < refined_.size(); ++tile) {
    const std::uint32_t block_0 = refined_[tile] * kTileDigests;
    const std::size_t column = tile * kTileDigests;
    if (request.first.value > block_0) mask(blocks_, column, column + (request.first.value - block_0));
    if (request.end.value < block_0 + kTileDigests) {
      mask(blocks_, column + (request.end.value - block_0), column + kTileDigests);
    }
  }
}

/// A head's normaliser is the sum of its refined blocks' weights, times what all groups weigh against the
/// refined ones: groups score too high, but by much the same factor everywhere.
void Selector::pool_refined() {
  const std::uint32_t column_0 = call_.first_group - call_.first_group % kTileDigests;
  normalise(blocks_);
  for (std::uint32_t head = 0; head < call_.request.heads; ++head) {
    const float* const guesses = groups_.weights.data() + head * groups_.stride;
    float refined = 0;
    for (const std::uint32_t group : refined_) refined += guesses[group - column_0];
    factors_[head] = refined / (groups_.sum[head] * blocks_.sum[head]);
  }
  pool(blocks_);
}

void Selector::keep_best_blocks() {
  const SelectRequest& request = call_.request;
  best_.clear();
  for (std::size_t tile = 0; tile < refined_.size(); ++tile) {
    const std::uint32_t block_0 = refined_[tile] * kTileDigests;
    const std::uint32_t first = std::max(block_0, request.first.value);
    const std::uint32_t end = std::min(block_0 + kTileDigests, request.end.value);
    for (std::uint32_t block = first; block < end; ++block) {
      keep_best(blocks_.pooled[tile * kTileDigests + (block - block_0)], block, request.count);
    }
  }
}

}  // namespace dualdecoder
