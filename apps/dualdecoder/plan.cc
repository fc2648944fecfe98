// `dualdecoder plan`: what a model, a context and a number of sequences will take in each tier, what a decode
// step moves, and how fast it should be, before anything is decoded.
//
// Sizes come from the same plan that the engine is made from. Two things are measured here, in about a
// second: the time of a step whose attended KV is all near, and the far tier's bandwidth for single blocks.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/statistics.h"
#include "base/units.h"
#include "command.h"
#include "commit.h"

namespace dualdecoder {
namespace {

struct PlanOptions {
  ModelOptions model;
  TierChoices tiers;
  std::uint32_t sequences = 1;
  std::string output = "text";
  bool measure = true;
};

struct Estimate {
  double compute_ms = 0.0;       // a step with all it attends to near
  double far_bytes_per_s = 0.0;  // single blocks, as many in flight as the port takes
  double moved_bytes_per_step = 0.0;
  double tokens_per_s = 0.0;
};

std::string text_of(double bytes) { return format_bytes(bytes); }
std::string text_of(std::uint64_t bytes) { return format_bytes(static_cast<double>(bytes)); }

/// A value in bytes of /proc/meminfo or /proc/self/status, e.g. "MemAvailable:"; 0 when there is none.
std::uint64_t proc_bytes(const char* file, const std::string& key) {
  std::ifstream in(file);
  std::string line;
  while (std::getline(in, line)) {
    if (line.starts_with(key)) return std::strtoull(line.c_str() + key.size(), nullptr, 10) * 1024;
  }
  return 0;
}

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

/// Of one sequence.
std::string selected_text(const MemoryPlan& plan) {
  const std::string resident =
      fmt::format("{} blocks for each of {} layers", plan.near_slots, plan.resident_layers);
  if (plan.ring_sets == 0) return resident;
  const std::string ring =
      fmt::format("{} sets of {} blocks for the others", plan.ring_sets, plan.ring_set_slots);
  return plan.resident_layers == 0 ? ring : resident + ", " + ring;
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
Result<double> measure_compute_ms(const Model& model, const EngineOptions& options, const MemoryPlan& plan) {
  constexpr std::uint32_t kSteps = 9;
  const std::uint32_t block = plan.geometry.block_tokens;
  const std::uint32_t window_and_selection =
      plan.tiered() && options.tiers.policy != Policy::kFull
          ? std::min(plan.context, (plan.window_slots + plan.budget_blocks) * block)
          : plan.context;
  const std::uint32_t depth = window_and_selection > kSteps ? window_and_selection - kSteps : 1;
  EngineOptions near = options;
  near.tiers = {};
  near.draft = {};
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
Result<double> measure_far_bandwidth(const Model& model, const EngineOptions& options) {
  constexpr std::uint32_t kPages = 32;
  EngineOptions probe = options;
  probe.sequences = 1;
  probe.context = std::min(options.context, kPages * options.block_tokens);
  probe.tiers.recent_tokens = 1;
  probe.tiers.sink_tokens = 0;
  probe.prefill_chunk = 1;
  probe.tiers.near_bytes_max = 0;
  probe.tiers.near_tokens = 1;
  probe.tiers.budget_tokens = 1;
  probe.tiers.policy = Policy::kFull;
  probe.draft = {};
  const auto engine = Engine::create(model, probe);
  if (!engine) return std::unexpected(engine.error());
  const auto sequence = (*engine)->new_sequence();
  if (!sequence) return std::unexpected(sequence.error());
  if (Status status = (*engine)->fill_synthetic(**sequence, probe.context - 1, 1); !status)
    return std::unexpected(status.error());
  return (*engine)->measure_far_bandwidth(**sequence);
}

std::uint64_t available_far_bytes(const TierOptions& tiers) {
  if (tiers.far_bytes_max > 0) return tiers.far_bytes_max;
  if (tiers.far.kind == FarKind::kHost) return proc_bytes("/proc/meminfo", "MemAvailable:");
  std::error_code error;
  const auto space = std::filesystem::space(tiers.far.directory, error);
  return error ? 0 : space.available;
}

/// Tokens per sequence that the far tier and the memory for digests have room for.
std::uint64_t largest_context(const Hyperparameters& model, const EngineOptions& options,
                              const MemoryPlan& plan) {
  const std::uint64_t block = plan.geometry.block_tokens;
  const std::uint64_t memory = proc_bytes("/proc/meminfo", "MemAvailable:");
  if (!plan.tiered()) {
    const std::uint64_t near = options.tiers.near_bytes_max > 0 ? options.tiers.near_bytes_max : memory;
    return near / plan.geometry.page_bytes() / options.sequences * block;
  }
  const std::uint64_t pages = available_far_bytes(options.tiers) / plan.geometry.page_bytes();
  const std::uint64_t blocks = std::max<std::uint64_t>(1, plan.geometry.blocks_for(plan.context));
  const std::uint64_t host_per_block =
      (plan.digest_bytes + plan.table_bytes) / blocks / options.sequences + model.layers;
  return std::min(pages, memory / host_per_block) / options.sequences * block;
}

/// Those of an engine made for the same steps, with next to no KV.
Result<std::uint64_t> activation_bytes(const Model& model, const EngineOptions& options) {
  EngineOptions bare = options;
  bare.tiers = {};
  bare.context = std::max(1U, options.prefill_chunk);
  const auto engine = Engine::create(model, bare);
  if (!engine) return std::unexpected(engine.error());
  return (*engine)->activation_bytes();
}

Result<Estimate> estimate(const Model& model, const EngineOptions& options, const MemoryPlan& plan) {
  Estimate result;
  result.moved_bytes_per_step = moved_bytes_per_step(plan, options.tiers);
  const auto compute = measure_compute_ms(model, options, plan);
  if (!compute) return std::unexpected(compute.error());
  result.compute_ms = *compute;
  double step_ms = result.compute_ms;
  if (plan.tiered()) {
    const auto bandwidth = measure_far_bandwidth(model, options);
    if (!bandwidth) return std::unexpected(bandwidth.error());
    result.far_bytes_per_s = *bandwidth;
    const double link_ms = result.moved_bytes_per_step / result.far_bytes_per_s * 1e3;
    const bool waits = options.tiers.policy == Policy::kReactive || options.tiers.policy == Policy::kOracle;
    step_ms = waits ? step_ms + link_ms : std::max(step_ms, link_ms);
  }
  result.tokens_per_s = options.sequences * 1e3 / step_ms;
  return result;
}

std::uint64_t draft_weights_bytes(const EngineOptions& options) {
  return options.draft.model == nullptr ? 0 : options.draft.model->weights().bytes();
}

std::uint64_t resident_bytes(const Model& model, const EngineOptions& options, const MemoryPlan& plan,
                             std::uint64_t activation_bytes, std::uint64_t base_bytes) {
  return plan.near_bytes() + model.weights().bytes() + draft_weights_bytes(options) + plan.draft_bytes +
         activation_bytes + plan.digest_bytes + plan.table_bytes + base_bytes +
         (options.tiers.far.kind == FarKind::kHost ? plan.far_bytes : 0);
}

void print_text(const Model& model, const EngineOptions& options, const MemoryPlan& plan,
                const std::optional<Estimate>& estimate, std::uint64_t activation_bytes,
                std::uint64_t base_bytes, std::uint64_t context_max) {
  fmt::print("{}, {} x {} tokens, blocks of {} ({})\n", model.path(), plan.sequences, plan.context,
             plan.geometry.block_tokens, text_of(std::uint64_t{plan.geometry.slot_bytes()}));
  const auto line = [](const char* name, std::uint64_t bytes, const std::string& note) {
    fmt::print("  {:<22}{:>12}   {}\n", name, text_of(bytes), note);
  };
  fmt::print("near tier\n");
  line("KV: window", plan.near_window_bytes,
       plan.tiered() ? "first and last tokens, windowed and dense layers" : "all");
  line("KV: selected", plan.near_selected_bytes, plan.tiered() ? selected_text(plan) : "");
  line("KV: staging", plan.near_staging_bytes, "");
  line("KV near in all", plan.near_bytes(), "");
  line("weights", model.weights().bytes(), "");
  if (options.draft.model != nullptr) {
    line("draft model: weights", draft_weights_bytes(options), options.draft.model->path());
    line("draft model: KV", plan.draft_bytes, "all");
  }
  line("activations", activation_bytes, "");
  fmt::print("host memory\n");
  line("digests", plan.digest_bytes, "");
  line("tables, checksums", plan.table_bytes, "");
  line("program, vocabulary", base_bytes, "measured");
  fmt::print("far tier\n");
  line("KV", plan.far_bytes,
       fmt::format("{} pages of {}", plan.far_pages, text_of(std::uint64_t{plan.geometry.page_bytes()})));
  line("resident in all", resident_bytes(model, options, plan, activation_bytes, base_bytes), "");
  fmt::print("largest context that fits: {} tokens a sequence\n", context_max);
  if (!estimate) return;
  fmt::print("a decode step computes for {:.1f} ms and moves {}", estimate->compute_ms,
             text_of(estimate->moved_bytes_per_step));
  if (plan.tiered())
    fmt::print("; the far tier gives {}/s in single blocks", text_of(estimate->far_bytes_per_s));
  fmt::print("\nexpected: {:.0f} tokens/s\n", estimate->tokens_per_s);
}

nlohmann::ordered_json json_of(const Model& model, const EngineOptions& options, const MemoryPlan& plan,
                               const std::optional<Estimate>& estimate, std::uint64_t activation_bytes,
                               std::uint64_t base_bytes, std::uint64_t context_max) {
  nlohmann::ordered_json json = {
      {"model", model.path()},
      {"context", plan.context},
      {"sequences", plan.sequences},
      {"policy", plan.tiered() ? policy_name(options.tiers.policy) : "dense"},
      {"block_tokens", plan.geometry.block_tokens},
      {"near_window_bytes", plan.near_window_bytes},
      {"near_selected_bytes", plan.near_selected_bytes},
      {"near_staging_bytes", plan.near_staging_bytes},
      {"near_kv_bytes", plan.near_bytes()},
      {"weights_bytes", model.weights().bytes()},
      {"draft_weights_bytes", draft_weights_bytes(options)},
      {"draft_kv_bytes", plan.draft_bytes},
      {"activation_bytes", activation_bytes},
      {"digest_bytes", plan.digest_bytes},
      {"table_bytes", plan.table_bytes},
      {"base_bytes", base_bytes},
      {"far_kv_bytes", plan.far_bytes},
      {"resident_bytes", resident_bytes(model, options, plan, activation_bytes, base_bytes)},
      {"context_max", context_max},
      {"commit", DUALDECODER_COMMIT}};
  if (estimate) {
    json["compute_ms"] = estimate->compute_ms;
    json["moved_bytes_per_step"] = estimate->moved_bytes_per_step;
    json["far_bytes_per_s"] = estimate->far_bytes_per_s;
    json["expected_tokens_per_s"] = estimate->tokens_per_s;
  }
  return json;
}

Status run_plan(const PlanOptions& options) {
  const std::uint64_t program = proc_bytes("/proc/self/status", "VmRSS:");
  const std::uint64_t anonymous = proc_bytes("/proc/self/status", "RssAnon:");
  const auto model = load_model(options.model);
  if (!model) return std::unexpected(model.error());
  auto engine = engine_options(options.model, **model);
  if (!engine) return std::unexpected(engine.error());
  if (Status status = choose_tiers(options.tiers, *engine); !status) return status;
  std::unique_ptr<Model> draft;
  if (Status status = load_draft(*engine, draft); !status) return status;
  // Beside the weights, loading leaves the vocabulary and the file's metadata.
  const std::uint64_t loaded = proc_bytes("/proc/self/status", "RssAnon:") - anonymous;
  std::uint64_t packed = (*model)->weights().repacked_bytes();
  if (draft != nullptr) packed += draft->weights().repacked_bytes();
  const std::uint64_t base = program + loaded - std::min(loaded, packed);
  engine->sequences = options.sequences;
  const auto plan = plan_memory((*model)->hyperparameters(), *engine);
  if (!plan) return std::unexpected(plan.error());
  const auto activations = activation_bytes(**model, *engine);
  if (!activations) return std::unexpected(activations.error());
  std::optional<Estimate> expected;
  if (options.measure) {
    const auto measured = estimate(**model, *engine, *plan);
    if (!measured) return std::unexpected(measured.error());
    expected = *measured;
  }
  const std::uint64_t context_max = largest_context((*model)->hyperparameters(), *engine, *plan);
  if (options.output == "json") {
    fmt::print("{}\n", json_of(**model, *engine, *plan, expected, *activations, base, context_max)
                           .dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else {
    print_text(**model, *engine, *plan, expected, *activations, base, context_max);
  }
  return {};
}

}  // namespace

void add_plan_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command =
      app.add_subcommand("plan", "What will be used in each tier, and how fast decoding should be");
  add_model_options(*command, options->model);
  add_context_option(*command, options->model);
  command->add_option("--np,--sequences", options->sequences, "Sequences at the same time; -np as well")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
  add_tier_options(*command, options->tiers);
  command->add_flag("!--no-measure", options->measure, "Only sizes: measure nothing, expect nothing");
  command->add_option("-o,--output", options->output, "Format")
      ->capture_default_str()
      ->check(CLI::IsMember({"text", "json"}));
  add_environment_names(*command);
  command->callback([options, &exit_code] {
    if (Status status = run_plan(*options); !status) exit_code = report(status.error());
  });
}

}  // namespace dualdecoder
