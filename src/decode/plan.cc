#include "decode/plan.h"

#include <algorithm>

#include "attention/attention.h"
#include "base/units.h"
#include "select/digest.h"

namespace dualdecoder {
namespace {

constexpr std::uint64_t kTableBytesPerBlock = 4 + 8;  // of a layer: its place, its checksum

class Planner {
 public:
  Planner(const Hyperparameters& model, const EngineOptions& options)
      : model_(model), options_(options), tiers_(options.tiers) {
    plan_.geometry = model.geometry(options.block_tokens);
    plan_.context = options.context;
    plan_.sequences = options.sequences;
    context_blocks_ = blocks(options.context);
    chunk_blocks_ = std::min(blocks(options.prefill_chunk) + 1, context_blocks_);
  }

  Result<MemoryPlan> plan() {
    if (tiers_.far.kind == FarKind::kNone) {
      plan_.layers.assign(model_.layers, {.kind = LayerKind::kAll, .slots = context_blocks_});
      count_bytes();
      return plan_;
    }
    if (Status status = plan_far(); !status) return std::unexpected(status.error());
    plan_layers();
    if (Status status = plan_near_slots(); !status) return std::unexpected(status.error());
    count_bytes();
    return plan_;
  }

 private:
  std::uint32_t blocks(std::uint32_t tokens) const { return plan_.geometry.blocks_for(tokens); }
  std::uint64_t slot_bytes() const { return plan_.geometry.slot_bytes(); }

  Status plan_far() {
    const std::uint64_t wanted = std::uint64_t{context_blocks_} * options_.sequences;
    const std::uint64_t page_bytes = plan_.geometry.page_bytes();
    const std::uint64_t allowed =
        tiers_.far_bytes_max == 0 ? wanted : std::min(wanted, tiers_.far_bytes_max / page_bytes);
    if (allowed == 0) {
      return fail(ErrorCode::kInvalidArgument, "--far-size {}: not even one page of {} fits",
                  format_bytes(static_cast<double>(tiers_.far_bytes_max)),
                  format_bytes(static_cast<double>(page_bytes)));
    }
    if (allowed > UINT32_MAX) {
      return fail(ErrorCode::kInvalidArgument, "a context of {} tokens for {} sequences is too large",
                  options_.context, options_.sequences);
    }
    plan_.far_pages = static_cast<std::uint32_t>(allowed);
    return {};
  }

  // A window of n tokens can touch n / block + 1 blocks, and one more is being filled.
  std::uint32_t window_blocks(std::uint32_t tokens) const { return tokens / options_.block_tokens + 2; }

  void plan_layers() {
    plan_.sink_blocks = blocks(tiers_.sink_tokens);
    plan_.budget_blocks = blocks(tiers_.budget_tokens);
    plan_.window_slots = std::min(context_blocks_, plan_.sink_blocks + window_blocks(tiers_.recent_tokens));
    for (std::uint32_t i = 0; i < model_.layers; ++i) {
      LayerPlan layer{.kind = LayerKind::kSelecting, .slots = 0};
      if (i < tiers_.dense_layers) {
        layer = {.kind = LayerKind::kAll, .slots = context_blocks_};
      } else if (model_.window[i] > 0) {
        layer = {.kind = LayerKind::kWindowed,
                 .slots = std::min(context_blocks_, window_blocks(model_.window[i]) + chunk_blocks_)};
      }
      plan_.layers.push_back(layer);
    }
    // A half holds whole splits, at which attention over streamed blocks may be cut.
    const std::uint32_t split_blocks = kSplitKeys / options_.block_tokens;
    const std::uint32_t half = std::max(1U, blocks(tiers_.staging_tokens) / split_blocks) * split_blocks;
    plan_.staging_slots = 2 * half;
  }

  Status plan_near_slots() {
    const auto selecting = static_cast<std::uint64_t>(
        std::count_if(plan_.layers.begin(), plan_.layers.end(),
                      [](const LayerPlan& layer) { return layer.kind == LayerKind::kSelecting; }));
    const std::uint32_t most = context_blocks_ - plan_.window_slots;
    const std::uint32_t least = std::min(chunk_blocks_, most);
    const std::uint32_t wanted =
        tiers_.near_tokens == 0 ? 2 * plan_.budget_blocks : blocks(tiers_.near_tokens);
    plan_.near_slots = std::clamp(wanted, least, most);
    if (tiers_.near_bytes_max > 0) {
      std::uint64_t fixed = plan_.staging_slots + options_.sequences * selecting * plan_.window_slots;
      for (const LayerPlan& layer : plan_.layers) fixed += std::uint64_t{options_.sequences} * layer.slots;
      const std::uint64_t per_slot = options_.sequences * selecting;
      const std::uint64_t allowed = tiers_.near_bytes_max / slot_bytes();
      if (allowed < fixed + per_slot * least) {
        return fail(ErrorCode::kInvalidArgument,
                    "--near-memory {}: at least {}KiB are needed for the window, a chunk of the prompt and "
                    "staging; raise it, or lower -b, --recent-tokens or the number of sequences",
                    format_bytes(static_cast<double>(tiers_.near_bytes_max)),
                    (fixed + per_slot * least) * slot_bytes() / 1024);
      }
      if (selecting > 0) {
        const std::uint64_t affordable = std::min<std::uint64_t>((allowed - fixed) / per_slot, most);
        plan_.near_slots = static_cast<std::uint32_t>(
            tiers_.near_tokens == 0 ? affordable : std::min<std::uint64_t>(affordable, plan_.near_slots));
      }
    }
    for (LayerPlan& layer : plan_.layers) {
      if (layer.kind == LayerKind::kSelecting) layer.slots = plan_.window_slots + plan_.near_slots;
    }
    return {};
  }

  void count_bytes() {
    const std::uint64_t sequences = options_.sequences;
    std::uint32_t selecting = 0;
    for (const LayerPlan& layer : plan_.layers) {
      std::uint64_t window = layer.slots;
      if (layer.kind == LayerKind::kSelecting) {
        ++selecting;
        window = plan_.window_slots;
        plan_.near_selected_bytes += sequences * plan_.near_slots * slot_bytes();
      }
      plan_.near_window_bytes += sequences * window * slot_bytes();
    }
    plan_.near_staging_bytes = plan_.staging_slots * slot_bytes();
    plan_.far_bytes = std::uint64_t{plan_.far_pages} * plan_.geometry.page_bytes();
    const std::uint64_t table_entries = sequences * context_blocks_ * model_.layers;
    plan_.table_bytes = table_entries * kTableBytesPerBlock;
    if (selecting > 0 && tiers_.policy != Policy::kFull) {
      plan_.digest_bytes = sequences * Digests::bytes_for(plan_.geometry, tiers_.digests, context_blocks_);
    }
  }

  const Hyperparameters& model_;
  const EngineOptions& options_;
  const TierOptions& tiers_;
  MemoryPlan plan_;
  std::uint32_t context_blocks_ = 0;
  std::uint32_t chunk_blocks_ = 0;  // that a chunk of the prompt can touch
};

}  // namespace

Result<MemoryPlan> plan_memory(const Hyperparameters& model, const EngineOptions& options) {
  return Planner(model, options).plan();
}

}  // namespace dualdecoder
