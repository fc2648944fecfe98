#include "estimate.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/statistics.h"

namespace dualdecoder {
namespace {

/// Share of a selection that is not near when it is wanted, when the near tier has `ratio` times the
/// selection's slots: measured on SmolLM2 with blocks of 16 tokens (docs/design.md).
double missed_share(double ratio) {
  constexpr std::pair<double, double> kMeasured[] = {{1.0, 0.18},  {1.25, 0.116}, {1.5, 0.059},
                                                     {2.0, 0.023}, {3.0, 0.011},  {4.0, 0.006}};
  if (ratio <= kMeasured[0].first) return kMeasured[0].second;
  for (std::size_t i = 1; i < std::size(kMeasured); ++i) {
    const auto& [high, high_share] = kMeasured[i];
    const auto& [low, low_share] = kMeasured[i - 1];
    if (ratio <= high) return low_share + (high_share - low_share) * (ratio - low) / (high - low);
  }
  return kMeasured[std::size(kMeasured) - 1].second;
}

double moved_bytes_per_step(const MemoryPlan& plan, const TierOptions& tiers) {
  if (!plan.tiered()) return 0.0;
  const auto in_ring = static_cast<double>(
      std::ranges::count_if(plan.layers, [](const LayerPlan& layer) { return layer.ring != kNoRing; }));
  const double selecting = plan.resident_layers + in_ring;
  const double context_blocks = plan.geometry.blocks_for(plan.context);
  const double beside_window = std::max(0.0, context_blocks - plan.window_slots);
  const double block_bytes = static_cast<double>(plan.geometry.slot_bytes()) * plan.sequences;
  // What a sequence adds is written once; per step that is a token's share of its page.
  const double written = static_cast<double>(plan.geometry.token_bytes()) * plan.sequences;
  if (tiers.policy == Policy::kFull || tiers.policy == Policy::kOracle)
    return beside_window * block_bytes * selecting + written;
  const double selected = std::min<double>(plan.budget_blocks, beside_window);
  if (selected == 0.0) return written;
  const bool streams = plan.budget_blocks > plan.near_slots;
  const double share = streams ? 1.0 - plan.near_slots / selected : missed_share(plan.near_slots / selected);
  const double layers_moved = std::max(share, 0.0) * plan.resident_layers + in_ring;
  return layers_moved * selected * block_bytes + written;
}

/// Median of a few decode steps with all KV near, at the length that a step attends to.
Result<double> measure_compute_ms(const Model& model, const EngineOptions& options, const MemoryPlan& plan,
                                  std::uint64_t kv_bytes_max) {
  constexpr std::uint32_t kSteps = 9;
  const std::uint32_t block = plan.geometry.block_tokens;
  const std::uint32_t window_and_selection =
      plan.tiered() && options.tiers.policy != Policy::kFull
          ? std::min(plan.context, (plan.window_slots + plan.budget_blocks) * block)
          : plan.context;
  const std::uint64_t room = kv_bytes_max / plan.geometry.token_bytes() / options.sequences;
  const auto attended = static_cast<std::uint32_t>(std::min<std::uint64_t>(window_and_selection, room));
  const std::uint32_t depth = attended > kSteps ? attended - kSteps : 1;
  EngineOptions near = options;
  near.tiers = {};
  near.draft = {};
  near.prompts_beside = false;
  near.context = depth + kSteps;
  near.prefill_chunk = std::min(near.prefill_chunk, 32U);
  const auto engine = Engine::create(model, near);
  if (!engine) return std::unexpected(engine.error());
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (std::uint32_t i = 0; i < options.sequences; ++i) {
    auto sequence = (*engine)->new_sequence();
    if (!sequence) return std::unexpected(sequence.error());
    if (Status status = (*engine)->fill_synthetic(**sequence, depth, i + 1); !status)
      return std::unexpected(status.error());
    sequences.push_back(std::move(*sequence));
  }
  std::vector<double> ms;
  const TokenId token = 0;
  for (std::uint32_t step = 0; step < kSteps; ++step) {
    std::vector<StepGroup> groups;
    for (const auto& sequence : sequences)
      groups.push_back({sequence.get(), std::span(&token, 1), LogitsWanted::kLast});
    const Stopwatch watch;
    if (const auto logits = (*engine)->step(groups); !logits) return std::unexpected(logits.error());
    if (step >= 2) ms.push_back(watch.seconds() * 1e3);  // the first two touch memory
  }
  return median(std::move(ms));
}

/// Writes some pages and reads their blocks back in another order.
Result<double> measure_far_bandwidth(const Model& model, const EngineOptions& options,
                                     const MemoryPlan& plan) {
  constexpr std::uint32_t kPages = 32;
  EngineOptions probe = options;
  probe.sequences = 1;
  probe.context = std::min(options.context, std::min(kPages, plan.far_pages) * options.block_tokens);
  probe.tiers.recent_tokens = 1;
  probe.tiers.sink_tokens = 0;
  probe.prefill_chunk = 1;
  probe.tiers.near_bytes_max = 0;
  probe.tiers.near_tokens = 1;
  probe.tiers.budget_tokens = 1;
  probe.tiers.policy = Policy::kFull;
  probe.tiers.keep_prefixes = false;
  probe.draft = {};
  probe.prompts_beside = false;
  const auto engine = Engine::create(model, probe);
  if (!engine) return std::unexpected(engine.error());
  const auto sequence = (*engine)->new_sequence();
  if (!sequence) return std::unexpected(sequence.error());
  if (Status status = (*engine)->fill_synthetic(**sequence, probe.context - 1, 1); !status)
    return std::unexpected(status.error());
  return (*engine)->measure_far_bandwidth(**sequence);
}

}  // namespace

Result<Estimate> estimate(const Model& model, const EngineOptions& options, const MemoryPlan& plan,
                          std::uint64_t kv_bytes_max) {
  Estimate result;
  result.moved_bytes_per_step = moved_bytes_per_step(plan, options.tiers);
  const auto compute = measure_compute_ms(model, options, plan, kv_bytes_max);
  if (!compute) return std::unexpected(compute.error());
  result.compute_ms = *compute;
  double step_ms = result.compute_ms;
  if (plan.tiered()) {
    const auto bandwidth = measure_far_bandwidth(model, options, plan);
    if (!bandwidth) return std::unexpected(bandwidth.error());
    result.far_bytes_per_s = *bandwidth;
    const double link_ms = result.moved_bytes_per_step / result.far_bytes_per_s * 1e3;
    const bool waits = options.tiers.policy == Policy::kReactive || options.tiers.policy == Policy::kOracle;
    step_ms = waits ? step_ms + link_ms : std::max(step_ms, link_ms);
  }
  result.tokens_per_s = options.sequences * 1e3 / step_ms;
  return result;
}

}  // namespace dualdecoder
