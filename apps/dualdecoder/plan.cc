// `dualdecoder plan`: what a model, a context and a number of sequences will take in each tier, what a decode
// step moves, and how fast it should be, before anything is decoded.
//
// Sizes come from the same plan that the engine is made from; the speed is measured (estimate.h).
#include <algorithm>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "base/units.h"
#include "command.h"
#include "commit.h"
#include "estimate.h"

namespace dualdecoder {
namespace {

struct PlanOptions {
  ModelOptions model;
  TierChoices tiers;
  std::uint32_t sequences = 1;
  std::string output = "text";
  bool measure = true;
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

/// Of one sequence.
std::string selected_text(const MemoryPlan& plan) {
  const std::string resident =
      fmt::format("{} blocks for each of {} layers", plan.near_slots, plan.resident_layers);
  if (plan.ring_sets == 0) return resident;
  const std::string ring =
      fmt::format("{} sets of {} blocks for the others", plan.ring_sets, plan.ring_set_slots);
  return plan.resident_layers == 0 ? ring : resident + ", " + ring;
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

struct ActivationBytes {
  std::uint64_t host = 0;
  std::uint64_t device = 0;  // other than the CPU
};

/// Those of an engine made for the same steps, with next to no KV.
Result<ActivationBytes> activation_bytes(const Model& model, const EngineOptions& options) {
  EngineOptions bare = options;
  bare.tiers = {};
  bare.context = std::max(1U, options.prefill_chunk);
  const auto engine = Engine::create(model, bare);
  if (!engine) return std::unexpected(engine.error());
  return ActivationBytes{(*engine)->activation_bytes(), (*engine)->device_activation_bytes()};
}

std::uint64_t draft_weights_bytes(const EngineOptions& options) {
  return options.draft.model == nullptr ? 0 : options.draft.model->weights().bytes();
}

std::uint64_t host_weights_bytes(const Model& model) {
  return model.weights().bytes() - model.weights().device_bytes();
}

std::uint64_t resident_bytes(const Model& model, const EngineOptions& options, const MemoryPlan& plan,
                             std::uint64_t activation_bytes, std::uint64_t base_bytes) {
  return (plan.near_on_device() ? 0 : plan.near_bytes()) + host_weights_bytes(model) +
         draft_weights_bytes(options) + plan.draft_bytes + activation_bytes + plan.digest_bytes +
         plan.table_bytes + base_bytes + (options.tiers.far.kind == FarKind::kHost ? plan.far_bytes : 0);
}

void print_text(const Model& model, const EngineOptions& options, const MemoryPlan& plan,
                const std::optional<Estimate>& estimate, const ActivationBytes& activations,
                std::uint64_t base_bytes, std::uint64_t context_max) {
  fmt::print("{}, {} x {} tokens, blocks of {} ({})\n", model.path(), plan.sequences, plan.context,
             plan.geometry.block_tokens, text_of(std::uint64_t{plan.geometry.slot_bytes()}));
  const auto line = [](const char* name, std::uint64_t bytes, const std::string& note) {
    fmt::print("  {:<22}{:>12}   {}\n", name, text_of(bytes), note);
  };
  fmt::print("near tier{}\n", plan.near_on_device() ? ", on the device" : "");
  line("KV: window", plan.near_window_bytes,
       plan.tiered() ? "first and last tokens, windowed and dense layers" : "all");
  line("KV: selected", plan.near_selected_bytes, plan.tiered() ? selected_text(plan) : "");
  line("KV: staging", plan.near_staging_bytes, "");
  line("KV near in all", plan.near_bytes(), "");
  if (plan.near_on_device()) fmt::print("host memory\n");
  line("weights", host_weights_bytes(model), "");
  if (options.draft.model != nullptr) {
    line("draft model: weights", draft_weights_bytes(options), options.draft.model->path());
    line("draft model: KV", plan.draft_bytes, "all");
  }
  line("activations", activations.host, "");
  if (!model.device().is_cpu()) {
    fmt::print("{}, {}\n", model.device().name(), model.device().description());
    line("weights", model.weights().device_bytes(), "");
    line("activations", activations.device, "");
    if (plan.near_on_device()) {
      line("attention", plan.device_attention_bytes, "one layer's KV, masks");
      line("KV near", plan.device_near_bytes, "with a block to spare");
    }
    line("in all",
         model.weights().device_bytes() + activations.device + plan.device_attention_bytes +
             plan.device_near_bytes,
         "");
  }
  fmt::print("host memory\n");
  line("digests", plan.digest_bytes, "");
  line("tables, checksums", plan.table_bytes, "");
  line("program, vocabulary", base_bytes, "measured");
  fmt::print("far tier\n");
  line("KV", plan.far_bytes,
       fmt::format("{} pages of {}", plan.far_pages, text_of(std::uint64_t{plan.geometry.page_bytes()})));
  line("resident in all", resident_bytes(model, options, plan, activations.host, base_bytes), "");
  fmt::print("largest context that fits: {} tokens a sequence\n", context_max);
  if (!estimate) return;
  fmt::print("a decode step computes for {:.1f} ms and moves {}", estimate->compute_ms,
             text_of(estimate->moved_bytes_per_step));
  if (plan.tiered())
    fmt::print("; the far tier gives {}/s in single blocks", text_of(estimate->far_bytes_per_s));
  fmt::print("\nexpected: {:.0f} tokens/s\n", estimate->tokens_per_s);
}

nlohmann::ordered_json json_of(const Model& model, const EngineOptions& options, const MemoryPlan& plan,
                               const std::optional<Estimate>& estimate, const ActivationBytes& activations,
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
      {"activation_bytes", activations.host},
      {"device", model.device().name()},
      {"device_weights_bytes", model.weights().device_bytes()},
      {"device_activation_bytes", activations.device},
      {"device_attention_bytes", plan.device_attention_bytes},
      {"device_near_bytes", plan.device_near_bytes},
      {"digest_bytes", plan.digest_bytes},
      {"table_bytes", plan.table_bytes},
      {"base_bytes", base_bytes},
      {"far_kv_bytes", plan.far_bytes},
      {"resident_bytes", resident_bytes(model, options, plan, activations.host, base_bytes)},
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
  const auto plan = plan_memory((*model)->hyperparameters(), *engine, (*model)->device());
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
