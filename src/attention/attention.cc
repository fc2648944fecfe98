// Planning and running of the tasks; the arithmetic is in kernel.cc.
//
// A unit is one row tile of a group under one KV head. Its keys are cut into one or several tasks of whole
// splits. A unit with one task merges its splits as it goes; with several tasks each leaves its splits'
// states in `partials` and the last one to finish merges them. Both merge split by split in the list's order,
// so the result is the same.
#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numbers>

#include <hwy/aligned_allocator.h>

#include "attention/kernel.h"
#include "base/check.h"

namespace dualdecoder {

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
/// Rows (times query heads per KV head) of a tile: enough to amortise a tile of K and V, few enough for its
/// queries, scores and sums to stay in the first two cache levels. A multiple of the register block of every
/// target.
constexpr std::uint32_t kTileRows = 48;
/// Tasks aimed at per thread, so that threads finish together although tasks differ.
constexpr std::uint32_t kTasksPerThread = 8;

std::uint32_t divide_up(std::uint32_t a, std::uint32_t b) { return (a + b - 1) / b; }

/// Part `index` of `parts` of the range [0, size), sizes differing by at most one: its begin.
std::uint32_t part_begin(std::uint32_t size, std::uint32_t parts, std::uint32_t index) {
  return static_cast<std::uint32_t>(std::uint64_t{size} * index / parts);
}

/// Grows to at least `count` elements, contents lost; no allocation when it is large enough.
class FloatBuffer {
 public:
  void reserve(std::size_t count) {
    if (count <= capacity_) return;
    floats_ = hwy::AllocateAligned<float>(count);
    DD_CHECK(floats_ != nullptr, "no memory for {} floats", count);
    capacity_ = count;
  }
  float* data() const { return floats_.get(); }

 private:
  hwy::AlignedFreeUniquePtr<float[]> floats_;
  std::size_t capacity_ = 0;
};

/// Floats rounded up to whole cache line pairs, so that threads do not share them.
std::size_t whole_lines(std::size_t floats) { return (floats + 31) / 32 * 32; }

std::size_t state_floats(std::uint32_t rows, std::uint32_t head_dim) {
  return whole_lines(std::size_t{rows} * (head_dim + 2));
}

AttentionState state_at(float* from, std::uint32_t rows, std::uint32_t head_dim) {
  return {.max = from + std::size_t{rows} * head_dim,
          .sum = from + std::size_t{rows} * (head_dim + 1),
          .out = from};
}

void clear(const AttentionState& state, std::uint32_t rows, std::uint32_t head_dim) {
  std::fill_n(state.max, rows, kNegativeInfinity);
  std::fill_n(state.sum, rows, 0.0f);
  std::fill_n(state.out, std::size_t{rows} * head_dim, 0.0f);
}

/// The positions that the rows of one tile see: each position in [first, last] is seen by at least one of
/// them.
struct VisibleRange {
  std::int64_t first;
  std::int64_t last;

  bool meets(const KvBlockView& block) const {
    return block.first_position <= last && std::int64_t{block.first_position} + block.tokens > first;
  }
  bool meets_any(std::span<const KvBlockView> blocks) const {
    return std::any_of(blocks.begin(), blocks.end(),
                       [this](const KvBlockView& block) { return meets(block); });
  }
};

VisibleRange visible_range(const AttentionGroup& group, std::uint32_t first_row, std::uint32_t rows) {
  const std::int64_t position = std::int64_t{group.first_row_position} + first_row;
  return {.first = group.window == 0 ? 0 : position - group.window + 1, .last = position + rows - 1};
}

}  // namespace

struct AttentionBatch::Impl {
  struct Unit {
    std::uint32_t group;
    std::uint32_t kv_head;
    std::uint32_t first_row;
    std::uint32_t rows;         // query rows
    std::uint32_t first_split;  // the splits with a visible key lie in [first_split, end_split)
    std::uint32_t end_split;
    std::uint32_t tasks;
    std::uint64_t work;    // tiles times rows
    std::size_t partials;  // where its splits' states begin; used with several tasks
  };
  struct Task {
    std::uint32_t unit;
    std::uint32_t first_split;
    std::uint32_t end_split;
    std::uint64_t work;
  };
  /// One thread's working memory.
  struct Scratch {
    float* q;        // [rows, head_dim] times scale and log2(e)
    float* scores;   // [rows, kTileKeys]
    float* rescale;  // [rows]
    float* total;    // a state
    float* part;     // a state
  };

  struct VisibleTile {
    KeyTile keys;
    std::uint32_t first_positions[kTileBlocksMax];  // of keys.blocks
    std::size_t end_block;                          // in the group's list, where to look for the next tile
  };

  // The plan; read-only while running.
  AttentionShape shape;
  std::uint32_t heads_per_kv = 0;
  std::uint32_t rows_max = 0;  // of a unit, times heads_per_kv
  const Kernels* kernels = nullptr;
  std::vector<AttentionGroup> groups;
  std::vector<Unit> units;
  std::vector<Task> tasks;
  std::uint32_t threads = 0;
  std::size_t scratch_stride = 0;  // floats per thread

  // Each thread writes its own part of `scratch`, each task its own states in `partials`.
  FloatBuffer scratch;
  FloatBuffer partials;
  std::unique_ptr<std::atomic<std::uint32_t>[]> unfinished;  // [unit] tasks
  std::size_t unfinished_capacity = 0;
  std::atomic<std::size_t> next_task{0};

  void add_units(std::uint32_t group_index);
  void cut_into_tasks();
  void reserve_memory();

  Scratch scratch_of(std::uint32_t thread) const;
  std::uint32_t blocks_per_tile() const { return kTileKeys / shape.block_tokens; }
  std::uint32_t blocks_per_split() const { return kSplitKeys / shape.block_tokens; }
  std::span<const KvBlockView> tile_at(const AttentionGroup& group, std::size_t first_block) const {
    return group.blocks.subspan(first_block,
                                std::min<std::size_t>(blocks_per_tile(), group.blocks.size() - first_block));
  }

  void run_task(const Task& task, const Scratch& scratch);
  void pack_queries(const Unit& unit, float* q) const;
  void attend_split(const Unit& unit, std::uint32_t split, const Scratch& scratch,
                    const AttentionState& state) const;
  VisibleTile visible_tile(const Unit& unit, std::size_t first, std::size_t end) const;
  void attend_tile(const Unit& unit, const VisibleTile& tile, const Scratch& scratch,
                   const AttentionState& state) const;
  void mask(const Unit& unit, const VisibleTile& tile, float* scores) const;
  void begin_total(const Unit& unit, const AttentionState& total) const;
  void end_total(const Unit& unit, const AttentionState& total) const;
  void write_result(const Unit& unit, const AttentionState& state) const;
  /// Calls body(index in the unit's states, index in [rows, heads]) for each of the unit's rows and heads.
  template <typename Body>
  void for_each_row(const Unit& unit, const Body& body) const;
};

// ---- plan

void AttentionBatch::Impl::add_units(std::uint32_t group_index) {
  const AttentionGroup& group = groups[group_index];
  DD_CHECK(group.rows > 0 && group.q != nullptr && group.out != nullptr, "group {}: {} rows", group_index,
           group.rows);
  DD_CHECK(!group.blocks.empty(), "group {} has no blocks", group_index);
  DD_CHECK(
      !(group.carry.resume || group.carry.more) || (group.carry.max != nullptr && group.carry.sum != nullptr),
      "group {} has no place for its state", group_index);
  for (const KvBlockView& block : group.blocks) {
    DD_CHECK(block.tokens > 0 && block.tokens <= shape.block_tokens,
             "group {}: block at position {} has {} tokens", group_index, block.first_position, block.tokens);
  }

  const std::uint32_t row_tiles = divide_up(group.rows, std::max(1u, kTileRows / heads_per_kv));
  const std::uint32_t per_tile = blocks_per_tile();
  const auto blocks = static_cast<std::uint32_t>(group.blocks.size());
  for (std::uint32_t row_tile = 0; row_tile < row_tiles; ++row_tile) {
    Unit unit{};
    unit.group = group_index;
    unit.first_row = part_begin(group.rows, row_tiles, row_tile);
    unit.rows = part_begin(group.rows, row_tiles, row_tile + 1) - unit.first_row;
    const VisibleRange range = visible_range(group, unit.first_row, unit.rows);
    std::uint32_t tiles = 0;
    for (std::uint32_t first = 0; first < blocks; first += per_tile) {
      if (!range.meets_any(tile_at(group, first))) continue;
      const std::uint32_t split = first / blocks_per_split();
      if (tiles == 0) unit.first_split = split;
      unit.end_split = split + 1;
      ++tiles;
    }
    unit.work = std::uint64_t{tiles} * unit.rows * heads_per_kv;
    rows_max = std::max(rows_max, unit.rows * heads_per_kv);
    for (unit.kv_head = 0; unit.kv_head < shape.kv_heads; ++unit.kv_head) units.push_back(unit);
  }
}

void AttentionBatch::Impl::cut_into_tasks() {
  std::uint64_t work = 0;
  for (const Unit& unit : units) work += unit.work;
  const std::uint64_t task_work = threads == 1 ? work : work / (std::uint64_t{threads} * kTasksPerThread);

  for (std::uint32_t index = 0; index < units.size(); ++index) {
    Unit& unit = units[index];
    const std::uint32_t splits = unit.end_split - unit.first_split;
    const std::uint64_t wanted = task_work == 0 ? splits : (unit.work + task_work - 1) / task_work;
    unit.tasks = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(wanted, 1, std::max(1u, splits)));
    for (std::uint32_t part = 0; part < unit.tasks; ++part) {
      tasks.push_back({.unit = index,
                       .first_split = unit.first_split + part_begin(splits, unit.tasks, part),
                       .end_split = unit.first_split + part_begin(splits, unit.tasks, part + 1),
                       .work = unit.work / unit.tasks});
    }
  }
  std::sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    if (a.work != b.work) return a.work > b.work;
    return a.unit != b.unit ? a.unit < b.unit : a.first_split < b.first_split;
  });
}

void AttentionBatch::Impl::reserve_memory() {
  const std::size_t rows = rows_max;
  scratch_stride = whole_lines(rows * shape.head_dim) + whole_lines(rows * kTileKeys) + whole_lines(rows) +
                   2 * state_floats(rows_max, shape.head_dim);
  scratch.reserve(scratch_stride * threads);

  std::size_t partial_floats = 0;
  for (Unit& unit : units) {
    if (unit.tasks == 1) continue;
    unit.partials = partial_floats;
    partial_floats +=
        (unit.end_split - unit.first_split) * state_floats(unit.rows * heads_per_kv, shape.head_dim);
  }
  partials.reserve(partial_floats);

  if (units.size() > unfinished_capacity) {
    unfinished_capacity = units.size();
    unfinished = std::make_unique<std::atomic<std::uint32_t>[]>(unfinished_capacity);
  }
  for (std::size_t i = 0; i < units.size(); ++i) {
    unfinished[i].store(units[i].tasks, std::memory_order_relaxed);
  }
}

// ---- run

AttentionBatch::Impl::Scratch AttentionBatch::Impl::scratch_of(std::uint32_t thread) const {
  const std::size_t rows = rows_max;
  Scratch result{};
  result.q = scratch.data() + thread * scratch_stride;
  result.scores = result.q + whole_lines(rows * shape.head_dim);
  result.rescale = result.scores + whole_lines(rows * kTileKeys);
  result.total = result.rescale + whole_lines(rows);
  result.part = result.total + state_floats(rows_max, shape.head_dim);
  return result;
}

void AttentionBatch::Impl::run_task(const Task& task, const Scratch& own) {
  const Unit& unit = units[task.unit];
  const std::uint32_t rows = unit.rows * heads_per_kv;
  const std::uint32_t head_dim = shape.head_dim;
  const AttentionState total = state_at(own.total, rows, head_dim);
  pack_queries(unit, own.q);

  if (unit.tasks == 1) {
    std::uint32_t split = task.first_split;
    if (groups[unit.group].carry.resume) {
      begin_total(unit, total);
    } else {
      attend_split(unit, split++, own, total);  // merging it into an empty state would copy it
    }
    const AttentionState part = state_at(own.part, rows, head_dim);
    for (; split < task.end_split; ++split) {
      attend_split(unit, split, own, part);
      kernels->merge(rows, head_dim, part, total);
    }
    end_total(unit, total);
    return;
  }

  float* const states = partials.data() + unit.partials;
  const std::size_t stride = state_floats(rows, head_dim);
  for (std::uint32_t split = task.first_split; split < task.end_split; ++split) {
    attend_split(unit, split, own, state_at(states + (split - unit.first_split) * stride, rows, head_dim));
  }
  if (unfinished[task.unit].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  begin_total(unit, total);
  for (std::uint32_t split = unit.first_split; split < unit.end_split; ++split) {
    kernels->merge(rows, head_dim, state_at(states + (split - unit.first_split) * stride, rows, head_dim),
                   total);
  }
  end_total(unit, total);
}

void AttentionBatch::Impl::pack_queries(const Unit& unit, float* q) const {
  const AttentionGroup& group = groups[unit.group];
  const float factor = shape.scale * std::numbers::log2e_v<float>;
  const std::size_t row_floats = std::size_t{heads_per_kv} * shape.head_dim;
  for (std::uint32_t r = 0; r < unit.rows; ++r) {
    const float* from = group.q + (std::size_t{unit.first_row} + r) * shape.heads * shape.head_dim +
                        unit.kv_head * row_floats;
    for (std::size_t i = 0; i < row_floats; ++i) q[r * row_floats + i] = from[i] * factor;
  }
}

void AttentionBatch::Impl::attend_split(const Unit& unit, std::uint32_t split, const Scratch& own,
                                        const AttentionState& state) const {
  const AttentionGroup& group = groups[unit.group];
  const std::size_t begin = std::size_t{split} * blocks_per_split();
  const std::size_t end = std::min(begin + blocks_per_split(), group.blocks.size());
  clear(state, unit.rows * heads_per_kv, shape.head_dim);
  VisibleTile tile = visible_tile(unit, begin, end);
  while (tile.keys.count > 0) {
    const VisibleTile next = visible_tile(unit, tile.end_block, end);
    for (std::uint32_t i = 0; i < std::min(tile.keys.count, next.keys.count); ++i) {
      tile.keys.blocks[i].next_k = next.keys.blocks[i].k;
    }
    attend_tile(unit, tile, own, state);
    tile = next;
  }
}

/// The first tile in blocks [first, end) in which some row sees a key, without the blocks in which none does;
/// empty if there is none.
AttentionBatch::Impl::VisibleTile AttentionBatch::Impl::visible_tile(const Unit& unit, std::size_t first,
                                                                     std::size_t end) const {
  const AttentionGroup& group = groups[unit.group];
  const VisibleRange range = visible_range(group, unit.first_row, unit.rows);
  const std::size_t head_offset = std::size_t{unit.kv_head} * shape.head_dim * shape.block_tokens;
  VisibleTile tile;
  tile.keys.head_dim = shape.head_dim;
  tile.keys.block_tokens = shape.block_tokens;
  tile.end_block = first;
  while (tile.keys.count == 0 && tile.end_block < end) {
    for (const KvBlockView& block : tile_at(group, tile.end_block)) {
      if (!range.meets(block)) continue;
      const std::uint32_t i = tile.keys.count++;
      tile.first_positions[i] = block.first_position;
      tile.keys.blocks[i] = {.k = block.k + head_offset,
                             .v = block.v + head_offset,
                             .next_k = block.k + head_offset,
                             .tokens = block.tokens};
    }
    tile.end_block += blocks_per_tile();
  }
  return tile;
}

void AttentionBatch::Impl::attend_tile(const Unit& unit, const VisibleTile& tile, const Scratch& own,
                                       const AttentionState& state) const {
  const std::uint32_t rows = unit.rows * heads_per_kv;
  kernels->scores(tile.keys, own.q, rows, own.scores);
  mask(unit, tile, own.scores);
  kernels->softmax(tile.keys.columns(), rows, own.scores, state, own.rescale);
  kernels->values(tile.keys, own.scores, own.rescale, rows, state.out);
}

/// Puts -inf in the place of what a row does not see, garbage beyond a block's tokens included.
void AttentionBatch::Impl::mask(const Unit& unit, const VisibleTile& tile, float* scores) const {
  const AttentionGroup& group = groups[unit.group];
  for (std::uint32_t b = 0; b < tile.keys.count; ++b) {
    const std::int64_t first_key = tile.first_positions[b];
    const std::uint32_t tokens = tile.keys.blocks[b].tokens;
    for (std::uint32_t r = 0; r < unit.rows; ++r) {
      const VisibleRange range = visible_range(group, unit.first_row + r, 1);
      const std::int64_t begin = std::clamp<std::int64_t>(range.first - first_key, 0, tokens);
      const std::int64_t end = std::clamp<std::int64_t>(range.last - first_key + 1, begin, tokens);
      if (begin == 0 && end == shape.block_tokens) continue;
      for (std::uint32_t head = 0; head < heads_per_kv; ++head) {
        float* const row =
            scores + (std::size_t{r} * heads_per_kv + head) * kTileKeys + b * shape.block_tokens;
        std::fill(row, row + begin, kNegativeInfinity);
        std::fill(row + end, row + shape.block_tokens, kNegativeInfinity);
      }
    }
  }
}

template <typename Body>
void AttentionBatch::Impl::for_each_row(const Unit& unit, const Body& body) const {
  for (std::uint32_t i = 0; i < unit.rows * heads_per_kv; ++i) {
    const std::size_t row = unit.first_row + i / heads_per_kv;
    const std::size_t head = std::size_t{unit.kv_head} * heads_per_kv + i % heads_per_kv;
    body(i, row * shape.heads + head);
  }
}

/// What the calls before have left.
void AttentionBatch::Impl::begin_total(const Unit& unit, const AttentionState& total) const {
  const AttentionGroup& group = groups[unit.group];
  if (!group.carry.resume) {
    clear(total, unit.rows * heads_per_kv, shape.head_dim);
    return;
  }
  for_each_row(unit, [&](std::uint32_t i, std::size_t to) {
    total.max[i] = group.carry.max[to];
    total.sum[i] = group.carry.sum[to];
    std::copy_n(group.out + to * shape.head_dim, shape.head_dim, total.out + std::size_t{i} * shape.head_dim);
  });
}

/// Leaves it for the calls to come, or writes the result.
void AttentionBatch::Impl::end_total(const Unit& unit, const AttentionState& total) const {
  const AttentionGroup& group = groups[unit.group];
  if (!group.carry.more) return write_result(unit, total);
  for_each_row(unit, [&](std::uint32_t i, std::size_t to) {
    group.carry.max[to] = total.max[i];
    group.carry.sum[to] = total.sum[i];
    std::copy_n(total.out + std::size_t{i} * shape.head_dim, shape.head_dim, group.out + to * shape.head_dim);
  });
}

void AttentionBatch::Impl::write_result(const Unit& unit, const AttentionState& state) const {
  const AttentionGroup& group = groups[unit.group];
  const std::uint32_t head_dim = shape.head_dim;
  for_each_row(unit, [&](std::uint32_t i, std::size_t row) {
    const float factor = 1.0f / state.sum[i];
    float* const to = group.out + row * head_dim;
    for (std::uint32_t d = 0; d < head_dim; ++d) {
      // + 0 turns -0 into 0: the sign of a zero could tell whether its tile had blocks that only other rows
      // see.
      to[d] = state.out[std::size_t{i} * head_dim + d] * factor + 0.0f;
    }
    if (group.lse != nullptr) {
      group.lse[row] = (state.max[i] + std::log2(state.sum[i])) * std::numbers::ln2_v<float>;
    }
  });
}

// ---- interface

AttentionBatch::AttentionBatch() : impl_(std::make_unique<Impl>()) {}
AttentionBatch::~AttentionBatch() = default;

void AttentionBatch::plan(const AttentionShape& shape, std::span<const AttentionGroup> groups,
                          std::uint32_t threads) {
  DD_CHECK(shape.kv_heads > 0 && shape.heads > 0 && shape.heads % shape.kv_heads == 0,
           "{} heads, {} KV heads", shape.heads, shape.kv_heads);
  DD_CHECK(shape.head_dim > 0 && shape.head_dim % 16 == 0 && shape.head_dim <= 256, "head_dim {}",
           shape.head_dim);
  DD_CHECK(shape.block_tokens == 16 || shape.block_tokens == 32 || shape.block_tokens == 64,
           "block_tokens {}", shape.block_tokens);
  DD_CHECK(threads > 0);
  Impl& impl = *impl_;
  impl.shape = shape;
  impl.heads_per_kv = shape.heads / shape.kv_heads;
  impl.threads = threads;
  impl.kernels = &current_kernels();
  impl.groups.assign(groups.begin(), groups.end());
  impl.units.clear();
  impl.tasks.clear();
  impl.rows_max = 0;
  for (std::uint32_t group = 0; group < groups.size(); ++group) impl.add_units(group);
  impl.cut_into_tasks();
  impl.reserve_memory();
  impl.next_task.store(0, std::memory_order_relaxed);
}

void AttentionBatch::run(std::uint32_t thread) {
  Impl& impl = *impl_;
  DD_CHECK(thread < impl.threads, "thread {} of {}", thread, impl.threads);
  const Impl::Scratch own = impl.scratch_of(thread);
  while (true) {
    const std::size_t task = impl.next_task.fetch_add(1, std::memory_order_relaxed);
    if (task >= impl.tasks.size()) return;
    impl.run_task(impl.tasks[task], own);
  }
}

}  // namespace dualdecoder
