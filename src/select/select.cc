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
/// Of the groups, one in so many is refined. On smooth keys (correlation of 0.998 from token to token, 9
/// heads that each look at a place of their own) 64 refined ones of 512 hold 97 % of the 32 best of 4,096
/// blocks of 32, and 99.9 % of their weight; 128 would hold 98 and 99.98 %. With 0.9995, 64 hold 99 and 99.98
/// %; with white noise, 15 and 46 %. Tried and lost: to refine in two rounds, the second ranked with the
/// first one's normalisers (no better), and to stop when no other group's bound reaches the worst chosen
/// block (never happened).
constexpr std::uint32_t kRefinedShare = 8;
/// Groups refined for every group that the wanted blocks would fill.
constexpr std::uint32_t kRefinedPerFull = 16;
/// Of a group's radius, so much counts when groups are ranked. All of it gives the bound, which a group only
/// reaches if its digests are extreme in all dimensions at once. Measured on keys and queries of SmolLM2-135M
/// after 6,000 tokens, 6 of 22 groups refined: they hold 0.887 of the best 32 digests' weight; without the
/// radius 0.883, with 0.6 of it 0.876, with all of it 0.848.
constexpr float kGroupShare = 0.3f;

/// Scores are not negative, so their bits have their order; a tie goes to the higher index.
std::uint64_t key_of(float score, std::uint32_t index) {
  return std::uint64_t{std::bit_cast<std::uint32_t>(score)} << 32 | index;
}

std::uint32_t groups_for(std::uint32_t digests) { return (digests + kTileDigests - 1) / kTileDigests; }

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
  const std::uint32_t parts = digests.digests_per_block();
  call_ = {.digests = &digests,
           .kernels = &current_score_kernels(),
           .request = request,
           .parts = parts,
           .first = request.first.value * parts,
           .end = request.end.value * parts,
           .first_group = request.first.value * parts / kTileDigests,
           .end_group = groups_for(request.end.value * parts)};
  bytes_read_ = 0;

  query_.resize(std::max(query_.size(), std::size_t{request.heads} * 2 * geometry.head_dim));
  steps_.resize(query_.size());
  step_.resize(std::max<std::size_t>(step_.size(), request.heads));
  factors_.resize(step_.size());
}

void Selector::set_block_query() {
  const DigestKind kind = call_.digests->options().kind;
  const bool box = kind != DigestKind::kPrincipal;
  const float share = radius_share(kind);
  set_query([&](float x) { return box ? std::abs(x) * share : x; });
}

void Selector::set_group_query() {
  set_query([&](float x) { return std::abs(x) * kGroupShare; });
}

/// for_radius: what stands for a value of q before the radius.
template <typename ForRadius>
void Selector::set_query(ForRadius for_radius) {
  const SelectRequest& request = call_.request;
  const std::size_t head_dim = call_.digests->geometry().head_dim;
  const float factor = request.scale * std::numbers::log2e_v<float>;
  for (std::uint32_t head = 0; head < request.heads; ++head) {
    const std::size_t first = head * 2 * head_dim;
    float* const to = query_.data() + first;
    for (std::size_t d = 0; d < head_dim; ++d) {
      to[d] = request.q[head * head_dim + d] * factor;
      to[head_dim + d] = for_radius(to[d]);
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

/// Of the block whose first digest is in that column.
float Selector::block_score(std::size_t column) const {
  float sum = 0;
  for (std::uint32_t part = 0; part < call_.parts; ++part) sum += digests_.pooled[column + part];
  return sum;
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
  set_block_query();
  digests_.clear(request.heads, call_.end_group - call_.first_group);
  for (std::uint32_t group = call_.first_group; group < call_.end_group; ++group) {
    digests_.tiles.push_back(call_.digests->tile(request.layer, group));
  }
  score_tiles(digests_);
  const std::uint32_t first_column = call_.first % kTileDigests;
  mask(digests_, 0, first_column);
  mask(digests_, first_column + (call_.end - call_.first), digests_.columns);
  normalise(digests_);
  for (std::uint32_t head = 0; head < request.heads; ++head) factors_[head] = 1 / digests_.sum[head];
  pool(digests_);
}

void Selector::scores_flat(const Digests& digests, const SelectRequest& request, std::vector<float>& pooled) {
  begin(digests, request);
  pooled.clear();
  if (request.first == request.end) return;
  score_candidates();
  const std::uint32_t column_0 = call_.first_group * kTileDigests;
  for (std::uint32_t first = call_.first; first < call_.end; first += call_.parts) {
    pooled.push_back(block_score(first - column_0));
  }
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
    keep_best(block_score((block - 1) * call_.parts - column_0), block - 1, request.count);
  }
  take_best(out);
}

// ---- by groups

void Selector::select(const Digests& digests, const SelectRequest& request, std::vector<BlockIndex>& out) {
  const std::uint32_t parts = digests.digests_per_block();
  const std::uint32_t candidates = (request.end.value - request.first.value) * parts;
  const std::uint32_t groups = groups_for(candidates);
  const std::uint32_t full = groups_for(std::min(request.count * parts, candidates));
  const std::uint32_t wanted = std::max(groups / kRefinedShare, kRefinedPerFull * full);
  if (candidates < kFlatDigests || wanted > groups / 2) return select_flat(digests, request, out);
  begin(digests, request);
  if (take_all(request, out)) return;
  score_groups();
  digests_.clear(request.heads, wanted);
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
  set_group_query();
  score_tiles(groups_);
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
    digests_.tiles.push_back(call_.digests->tile(request.layer, refined_.back()));
  }
  set_block_query();
  score_tiles(digests_);
  for (std::size_t tile = 0; tile < refined_.size(); ++tile) {
    const std::uint32_t digest_0 = refined_[tile] * kTileDigests;
    const std::size_t column = tile * kTileDigests;
    if (call_.first > digest_0) mask(digests_, column, column + (call_.first - digest_0));
    if (call_.end < digest_0 + kTileDigests) {
      mask(digests_, column + (call_.end - digest_0), column + kTileDigests);
    }
  }
}

/// A head's normaliser is the sum of its refined blocks' weights, times what all groups weigh against the
/// refined ones: groups score too high, but by much the same factor everywhere.
void Selector::pool_refined() {
  const std::uint32_t column_0 = call_.first_group - call_.first_group % kTileDigests;
  normalise(digests_);
  for (std::uint32_t head = 0; head < call_.request.heads; ++head) {
    const float* const guesses = groups_.weights.data() + head * groups_.stride;
    float refined = 0;
    for (const std::uint32_t group : refined_) refined += guesses[group - column_0];
    factors_[head] = refined / (groups_.sum[head] * digests_.sum[head]);
  }
  pool(digests_);
}

void Selector::keep_best_blocks() {
  best_.clear();
  for (std::size_t tile = 0; tile < refined_.size(); ++tile) {
    const std::uint32_t digest_0 = refined_[tile] * kTileDigests;
    const std::uint32_t first = std::max(digest_0, call_.first);
    const std::uint32_t end = std::min(digest_0 + kTileDigests, call_.end);
    for (std::uint32_t digest = first; digest < end; digest += call_.parts) {
      const float score = block_score(tile * kTileDigests + (digest - digest_0));
      keep_best(score, digest / call_.parts, call_.request.count);
    }
  }
}

}  // namespace dualdecoder
