#include "decode/plan.h"

#include <algorithm>

#include "attention/attention.h"
#include "base/units.h"
#include "model/device_attention.h"
#include "model/device_near_memory.h"
#include "model/model.h"
#include "select/digest.h"

namespace dualdecoder {
namespace {

/// A selection that is not ranked anew takes in what leaves the window.
constexpr std::uint32_t kRingSpareBlocks = 2;
constexpr std::uint64_t kTableBytesPerBlock = 4 + 8;  // of a layer: its place, its checksum

// Numbers of a row of the index, its keys, and what is unused of its database's pages.
constexpr std::uint64_t kIndexRowBytes = 256;

// A device attends where the far tier is host memory, or none.
KvLayout kv_layout(const Device& device, const TierOptions& tiers) {
  const FarKind far = tiers.far.kind;
  const bool here = device.is_cpu() || (far != FarKind::kNone && far != FarKind::kHost) ||
                    tiers.policy == Policy::kOracle;  // which looks at every key
  return here ? KvLayout::kTransposedKeys : KvLayout::kTokens;
}

class Planner {
 public:
  Planner(const Hyperparameters& model, const EngineOptions& options, const Device& device)
      : model_(model), options_(options), tiers_(options.tiers) {
    plan_.geometry = model.geometry(options.block_tokens);
    plan_.geometry.layout = kv_layout(device, tiers_);
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
    plan_layers();
    if (Status status = plan_far(); !status) return std::unexpected(status.error());
    if (Status status = plan_near_slots(); !status) return std::unexpected(status.error());
    count_bytes();
    return plan_;
  }

 private:
  std::uint32_t blocks(std::uint32_t tokens) const { return plan_.geometry.blocks_for(tokens); }
  std::uint64_t slot_bytes() const { return plan_.geometry.slot_bytes(); }

  Status plan_far() {
    const std::uint64_t wanted = std::uint64_t{context_blocks_} * options_.sequences;
    const std::uint64_t page_bytes = plan_.geometry.page_bytes() + index_bytes_per_page();
    const std::uint64_t fitting = tiers_.far_bytes_max / page_bytes;
    const std::uint64_t allowed = tiers_.far_bytes_max == 0 ? wanted
                                  : tiers_.keep_prefixes    ? fitting
                                                            : std::min(wanted, fitting);
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

  // What the database of kept prefixes takes on disk for a page of the file, beside which it lies.
  std::uint64_t index_bytes_per_page() const {
    if (!tiers_.keep_prefixes || tiers_.far.kind != FarKind::kFile) return 0;
    return digest_record_bytes() + 4 * options_.block_tokens + 8 * plan_.geometry.layers + kIndexRowBytes;
  }

  // Of a page that is kept.
  std::uint64_t digest_record_bytes() const {
    return has_digests() ? Digests::record_bytes(plan_.geometry, tiers_.digests, selecting_) : 0;
  }
  bool has_digests() const { return selecting_ > 0 && tiers_.policy != Policy::kFull; }

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
      selecting_ += layer.kind == LayerKind::kSelecting ? 1 : 0;
    }
    // A half holds whole splits, at which attention over streamed blocks may be cut.
    const std::uint32_t split_blocks = kSplitKeys / options_.block_tokens;
    const std::uint32_t half = std::max(1U, blocks(tiers_.staging_tokens) / split_blocks) * split_blocks;
    plan_.staging_tracks = options_.prompts_beside ? 2 : 1;
    plan_.staging_slots = plan_.staging_tracks * 2 * half;
  }

  // A selecting layer has its window, and beside it either near_slots of its own (resident) or, for a chunk
  // of the prompt alone, the least that will do; its selection then goes through the ring.
  Status plan_near_slots() {
    if (tiers_.ring_sets < 2)
      return fail(ErrorCode::kInvalidArgument, "a ring of {} sets: at least 2 are needed", tiers_.ring_sets);
    most_ = context_blocks_ - plan_.window_slots;
    least_ = std::min(chunk_blocks_, most_);
    const std::uint32_t wanted =
        tiers_.near_tokens == 0 ? 2 * plan_.budget_blocks : blocks(tiers_.near_tokens);
    plan_.near_slots = std::clamp(wanted, least_, most_);
    plan_.ring_set_slots = std::min(plan_.budget_blocks + kRingSpareBlocks, most_);
    const std::uint64_t allowed =
        tiers_.near_bytes_max == 0 ? UINT64_MAX : tiers_.near_bytes_max / slot_bytes();
    plan_.resident_layers = resident_layers(allowed);
    const std::uint64_t needed = slots_taken(plan_.resident_layers, least_);
    if (allowed < needed) {
      return fail(ErrorCode::kInvalidArgument,
                  "--near-memory {}: at least {}KiB are needed for the window, a chunk of the prompt and "
                  "staging; raise it, or lower -b, --recent-tokens or the number of sequences",
                  format_bytes(static_cast<double>(tiers_.near_bytes_max)), needed * slot_bytes() / 1024);
    }
    if (tiers_.near_bytes_max > 0 && plan_.resident_layers > 0) {
      const std::uint64_t per_slot = std::uint64_t{options_.sequences} * plan_.resident_layers;
      const std::uint64_t affordable = std::min<std::uint64_t>(least_ + (allowed - needed) / per_slot, most_);
      plan_.near_slots = static_cast<std::uint32_t>(
          tiers_.near_tokens == 0 ? affordable : std::min<std::uint64_t>(affordable, plan_.near_slots));
    }
    place_layers();
    return {};
  }

  // All, if each has room for a whole selection, or there is no room for a ring either: then what has no room
  // is streamed.
  std::uint32_t resident_layers(std::uint64_t allowed) const {
    if (tiers_.resident_layers) return std::min(*tiers_.resident_layers, selecting_);
    if (tiers_.policy == Policy::kFull) return selecting_;
    const std::uint32_t selection = std::clamp(plan_.budget_blocks, least_, most_);
    for (std::uint32_t resident = selecting_ + 1; resident-- > 0;) {
      if (slots_taken(resident, selection) <= allowed) return resident;
    }
    return selecting_;
  }

  // Of all sequences and staging.
  std::uint64_t slots_taken(std::uint32_t resident, std::uint32_t near_slots) const {
    std::uint64_t each =
        std::uint64_t{selecting_} * plan_.window_slots + std::uint64_t{resident} * near_slots;
    if (resident < selecting_) {
      each += std::uint64_t{selecting_ - resident} * least_;
      each += std::uint64_t{tiers_.ring_sets} * plan_.ring_set_slots;
    }
    for (const LayerPlan& layer : plan_.layers) each += layer.slots;
    return plan_.staging_slots + options_.sequences * each;
  }

  void place_layers() {
    std::uint32_t placed = 0;
    for (LayerPlan& layer : plan_.layers) {
      if (layer.kind != LayerKind::kSelecting) continue;
      const bool resident = placed < plan_.resident_layers;
      layer.slots = plan_.window_slots + (resident ? plan_.near_slots : least_);
      if (!resident) layer.ring = (placed - plan_.resident_layers) % tiers_.ring_sets;
      ++placed;
    }
    plan_.ring_sets = plan_.resident_layers < selecting_ ? tiers_.ring_sets : 0;
    if (plan_.ring_sets == 0) plan_.ring_set_slots = 0;
    if (plan_.resident_layers == 0) plan_.near_slots = 0;
  }

  void count_bytes() {
    const std::uint64_t sequences = options_.sequences;
    for (const LayerPlan& layer : plan_.layers) {
      std::uint64_t window = layer.slots;
      if (layer.kind == LayerKind::kSelecting && layer.ring == kNoRing) {
        window = plan_.window_slots;
        plan_.near_selected_bytes += sequences * plan_.near_slots * slot_bytes();
      }
      plan_.near_window_bytes += sequences * window * slot_bytes();
    }
    plan_.near_selected_bytes += sequences * plan_.ring_sets * plan_.ring_set_slots * slot_bytes();
    plan_.near_staging_bytes = plan_.staging_slots * slot_bytes();
    if (plan_.near_on_device()) {
      plan_.device_attention_bytes = device_attention_bytes();
      plan_.device_near_bytes = DeviceNearMemory::bytes_for(plan_.near_bytes() + slot_bytes());
    }
    plan_.far_bytes = std::uint64_t{plan_.far_pages} * plan_.geometry.page_bytes();
    const std::uint64_t table_entries = sequences * context_blocks_ * model_.layers;
    plan_.table_bytes = table_entries * kTableBytesPerBlock;
    if (has_digests()) {
      const std::uint64_t parked = options_.parked_sequences;
      plan_.digest_bytes =
          (sequences + parked) * Digests::bytes_for(plan_.geometry, tiers_.digests, context_blocks_);
      if (tiers_.keep_prefixes && tiers_.far.kind != FarKind::kFile)
        plan_.kept_digest_bytes = plan_.far_pages * digest_record_bytes();
    }
  }

  std::uint64_t device_attention_bytes() const {
    const std::uint32_t outputs =
        std::max(options_.outputs_max, options_.sequences * options_.decoding_rows());
    const auto of_track = [&](std::uint32_t rows) {
      return DeviceAttention::bytes_for(plan_.geometry, options_.context, rows);
    };
    return of_track(std::max(std::clamp(options_.prefill_chunk, 1U, options_.context), outputs)) +
           (options_.prompts_beside ? of_track(outputs) : 0);
  }

  const Hyperparameters& model_;
  const EngineOptions& options_;
  const TierOptions& tiers_;
  MemoryPlan plan_;
  std::uint32_t context_blocks_ = 0;
  std::uint32_t chunk_blocks_ = 0;  // that a chunk of the prompt can touch
  std::uint32_t selecting_ = 0;     // layers
  std::uint32_t least_ = 0;         // slots beside the window
  std::uint32_t most_ = 0;
};

}  // namespace

Result<MemoryPlan> plan_memory(const Hyperparameters& model, const EngineOptions& options,
                               const Device& device) {
  auto plan = Planner(model, options, device).plan();
  if (!plan || options.draft.model == nullptr) return plan;
  const EngineOptions of_draft = options.of_draft();
  const Model& draft_model = *options.draft.model;
  const auto draft = Planner(draft_model.hyperparameters(), of_draft, draft_model.device()).plan();
  if (!draft) return draft;
  plan->draft_bytes = draft->near_bytes();
  return plan;
}

}  // namespace dualdecoder
