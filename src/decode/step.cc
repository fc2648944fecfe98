#include "decode/step.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "base/check.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kSerialAppendRowsMax = 32;  // waking the threads costs more than storing so few rows

class PassTimer {
 public:
  explicit PassTimer(std::uint64_t& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~PassTimer() {
    const auto spent = std::chrono::steady_clock::now() - start_;
    total_ += static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
  }

 private:
  std::uint64_t& total_;
  std::chrono::steady_clock::time_point start_;
};

AttentionShape attention_shape(const Hyperparameters& model) {
  return {.heads = model.heads,
          .kv_heads = model.kv_heads,
          .head_dim = model.head_dim,
          .block_tokens = 0,  // known with the first sequence
          .scale = model.attention_scale};
}

}  // namespace

Step::Step(const Model& model, Forward& forward)
    : model_(model), forward_(forward), shape_(attention_shape(model.hyperparameters())) {}

const float* Step::run(std::span<const StepGroup> groups) {
  begin(groups);
  const auto timer = [&](Pass pass) { return PassTimer(pass_ns_[static_cast<std::size_t>(pass)]); };
  const std::uint32_t layers = model_.hyperparameters().layers;
  for (LayerIndex layer; layer.value < layers; ++layer) {
    LayerRows rows;
    {
      const auto time = timer(Pass::kProject);
      rows = forward_.project(layer);
    }
    {
      const auto time = timer(Pass::kAppend);
      append(layer, rows);
    }
    // Without logits, nothing reads what the last layer attends to: its K and V are all that is wanted.
    if (output_rows_.empty() && layer.value + 1 == layers) break;
    const auto time = timer(Pass::kAttend);
    attend(groups, layer, rows);
  }
  for (const StepGroup& group : groups)
    group.sequence->commit(static_cast<std::uint32_t>(group.tokens.size()));
  if (output_rows_.empty()) return nullptr;
  const auto time = timer(Pass::kFinish);
  return forward_.logits();
}

void Step::begin(std::span<const StepGroup> groups) {
  tokens_.clear();
  positions_.clear();
  output_rows_.clear();
  stretches_.clear();
  for (const StepGroup& group : groups) {
    const KvGeometry& geometry = group.sequence->blocks().geometry();
    shape_.block_tokens = geometry.block_tokens;
    const auto rows = static_cast<std::uint32_t>(group.tokens.size());
    const auto first_row = static_cast<std::uint32_t>(tokens_.size());
    DD_CHECK(rows > 0);
    DD_CHECK(group.sequence->blocks().blocks() >= geometry.blocks_for(group.sequence->tokens() + rows),
             "{} blocks for {} + {} tokens", group.sequence->blocks().blocks(), group.sequence->tokens(),
             rows);
    for (std::uint32_t r = 0; r < rows; ++r) {
      const std::uint32_t position = group.sequence->tokens() + r;
      tokens_.push_back(group.tokens[r]);
      positions_.push_back(position);
      const bool wanted =
          group.logits == LogitsWanted::kAll || (group.logits == LogitsWanted::kLast && r + 1 == rows);
      if (wanted) output_rows_.push_back(first_row + r);
      if (r == 0 || position % geometry.block_tokens == 0) {
        stretches_.push_back(
            {.sequence = group.sequence, .row = first_row + r, .position = position, .tokens = 0});
      }
      ++stretches_.back().tokens;
    }
  }
  forward_.begin(tokens_, positions_, output_rows_);
}

void Step::append(LayerIndex layer, const LayerRows& rows) {
  const std::size_t width = model_.hyperparameters().kv_width();
  const auto store = [&](const Stretch& stretch) {
    const BlockTable& blocks = stretch.sequence->blocks();
    const KvGeometry& geometry = blocks.geometry();
    const SlotIndex slot = blocks.slot(layer, BlockIndex(stretch.position / geometry.block_tokens));
    store_tokens(geometry, rows.k + stretch.row * width, rows.v + stretch.row * width, stretch.tokens,
                 stretch.position % geometry.block_tokens, blocks.near().k(slot), blocks.near().v(slot));
  };
  if (tokens_.size() <= kSerialAppendRowsMax) {
    for (const Stretch& stretch : stretches_) store(stretch);
    return;
  }
  std::atomic<std::size_t> next = 0;
  forward_.parallel([&](std::uint32_t) {
    for (std::size_t i = next++; i < stretches_.size(); i = next++) store(stretches_[i]);
  });
}

void Step::attend(std::span<const StepGroup> groups, LayerIndex layer, const LayerRows& rows) {
  views_.clear();
  attention_groups_.clear();
  const std::size_t width = model_.hyperparameters().query_width();
  std::size_t row = 0;
  for (const StepGroup& group : groups) {
    gather_blocks(group, layer);
    attention_groups_.push_back({.blocks = {},
                                 .rows = static_cast<std::uint32_t>(group.tokens.size()),
                                 .first_row_position = group.sequence->tokens(),
                                 .window = model_.hyperparameters().window[layer.value],
                                 .q = rows.q + row * width,
                                 .out = rows.attention + row * width,
                                 .lse = nullptr});
    row += group.tokens.size();
  }
  // The spans are made when views_ has stopped moving.
  std::size_t first = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const KvGeometry& geometry = groups[i].sequence->blocks().geometry();
    const std::size_t count = geometry.blocks_for(groups[i].sequence->tokens() + attention_groups_[i].rows);
    attention_groups_[i].blocks = std::span(views_).subspan(first, count);
    first += count;
  }
  attention_.plan(shape_, attention_groups_, forward_.threads());
  forward_.parallel([&](std::uint32_t thread) { attention_.run(thread); });
}

void Step::gather_blocks(const StepGroup& group, LayerIndex layer) {
  const BlockTable& blocks = group.sequence->blocks();
  const KvGeometry& geometry = blocks.geometry();
  const std::uint32_t tokens = group.sequence->tokens() + static_cast<std::uint32_t>(group.tokens.size());
  const std::uint32_t count = geometry.blocks_for(tokens);
  for (BlockIndex block; block.value < count; ++block) {
    const SlotIndex slot = blocks.slot(layer, block);
    const std::uint32_t first = block.value * geometry.block_tokens;
    views_.push_back({.k = blocks.near().k(slot),
                      .v = blocks.near().v(slot),
                      .first_position = first,
                      .tokens = std::min(geometry.block_tokens, tokens - first)});
  }
}

}  // namespace dualdecoder
