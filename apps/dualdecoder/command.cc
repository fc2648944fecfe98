#include "command.h"

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>
#include <tuple>

#include <fmt/ranges.h>

#include "base/units.h"
#include "log.h"
#include "progress.h"

namespace dualdecoder {
namespace {

std::atomic<bool> interrupt_seen = false;

void on_interrupt(int signal) {
  interrupt_seen = true;
  std::signal(signal, SIG_DFL);
}

bool from_environment(const CLI::Option& option) {
  const char* value = std::getenv(option.get_envname().c_str());
  return value != nullptr && fmt::format("{}", fmt::join(option.results(), ",")) == value;
}

}  // namespace

void add_rpc_option(CLI::App& command, std::vector<std::string>& servers) {
  command.add_option("--rpc", servers, "ggml RPC servers, whose devices can be named too: RPC0 and so on")
      ->delimiter(',')
      ->type_name("HOST:PORT,...");
}

void add_model_options(CLI::App& command, ModelOptions& options) {
  command.add_option("-m,--model", options.model, "GGUF file of the model")->required()->type_name("FILE");
  command
      .add_option(
          "--device", options.device,
          "Where weights and the near tier lie and layers and attention are computed, one of `dualdecoder "
          "devices`; with --far file attention and KV stay with the CPU")
      ->capture_default_str()
      ->type_name("NAME");
  add_rpc_option(command, options.rpc_servers);
  command.add_option("-t,--threads", options.threads, "Threads; 0: one per core")
      ->capture_default_str()
      ->check(CLI::Range(0, 512))
      ->type_name("N");
  command.add_option("-b,--batch-size", options.batch, "Tokens of the prompt that are computed at once")
      ->capture_default_str()
      ->check(CLI::Range(1, 16384))
      ->type_name("TOKENS");
  command.add_option("--block-size", options.block_tokens, "Tokens of one KV block")
      ->capture_default_str()
      ->check(CLI::IsMember({16, 32, 64}))
      ->type_name("TOKENS");
  command.add_flag("--batch-invariant", options.batch_invariant,
                   "F16 and other types that ggml multiplies: a sequence's results do not depend on the "
                   "others in its step, "
                   "up to 32 rows (slower with several); for the other types they never do");
}

void add_tier_options(CLI::App& command, TierChoices& choices, bool one_engine) {
  const std::string group = "Tiers";
  const auto text = [&](const char* names, std::string& value, const char* help, const char* type) {
    command.add_option(names, value, help)->capture_default_str()->group(group)->type_name(type);
  };
  const auto tokens = [&](const char* names, std::uint32_t& value, const char* help) {
    command.add_option(names, value, help)->capture_default_str()->group(group)->type_name("TOKENS");
  };
  if (one_engine) {
    text("--far", choices.far,
         "Where the whole KV cache lies: none (all of it near), host (memory), file:DIR (a file in DIR); "
         "link:BANDWIDTH@MICROSECONDS (memory made as slow as a link, to try policies)",
         "TIER");
    text("--policy", choices.policy,
         "What brings blocks near: previous, dual, auto, reactive, last-set, previous-layer, full, oracle",
         "NAME");
  }
  text("--correct", choices.correct,
       "Rank each layer again with the token's own query, and wait for what is missing: none, miss (every "
       "layer), cosine:T (where the predicting query's cosine is below T)",
       "RULE");
  command
      .add_option(
          "--attend", choices.attend,
          "What a token attends to beside its window: selected, or resident (all that is near anyway)")
      ->capture_default_str()
      ->group(group)
      ->check(CLI::IsMember({"selected", "resident"}));
  text("--draft", choices.draft,
       "Where a guess of the next token comes from after a wrong one: self (an extra pass), ngram (the text "
       "before), keep (the row behind the wrong one), model:FILE (a smaller model of the same vocabulary), "
       "none; "
       "auto: self with the policy dual, ngram with auto",
       "NAME");
  command
      .add_flag("--accept", choices.accept,
                "Commit a right guess and the token behind it in one step (with --draft ngram or model:FILE)")
      ->group(group);
  text("--far-size", choices.far_size, "Most that the far tier may take, e.g. 20GiB; 0: what is needed",
       "SIZE");
  text("--near-memory", choices.near_memory, "Most that KV near may take, e.g. 64MiB; 0: by --near-slots",
       "SIZE");
  tokens("--budget", choices.budget, "Tokens that a layer selects, beside its window");
  tokens("--near-slots", choices.near_slots,
         "Tokens that a layer has room for beside its window; 0: twice the budget");
  text("--residency", choices.residency,
       "Layers that keep their selection near from step to step, the others read theirs anew through a ring: "
       "all, none, a number, or auto (all, if --near-memory allows it)",
       "LAYERS");
  tokens("--sink-tokens", choices.sink_tokens, "First tokens that are always near");
  tokens("--recent-tokens", choices.recent_tokens, "Last tokens that are always near");
  command
      .add_option("--dense-layers", choices.dense_layers, "First layers that keep and attend to everything")
      ->capture_default_str()
      ->group(group)
      ->type_name("N");
  command
      .add_option("--digest", choices.digest, "What stands in for a block's keys: principal, minmax or mean")
      ->capture_default_str()
      ->group(group)
      ->check(CLI::IsMember({"minmax", "mean", "principal"}));
  command.add_option("--digest-type", choices.digest_type, "Number format of digests")
      ->capture_default_str()
      ->group(group)
      ->check(CLI::IsMember({"f16", "int8"}));
}

void add_server_choices(CLI::App& command, ServerChoices& choices) {
  const std::string group = "Servers";
  command.add_option("--api-key", choices.api_key, "Key that the server wants")
      ->group(group)
      ->type_name("KEY");
  command
      .add_option("--served-model", choices.model,
                  "Name of the model there; by default the first that /v1/models lists")
      ->group(group)
      ->type_name("NAME");
}

Status refuse_options(const CLI::App& command, const std::set<std::string>& names, bool all_but_these,
                      const char* why) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0 || option->get_lnames().empty()) continue;
    const std::string& name = option->get_lnames().front();
    if (names.contains(name) == all_but_these || from_environment(*option)) continue;
    return fail(ErrorCode::kInvalidArgument, "--{}: {}", name, why);
  }
  return {};
}

void add_context_option(CLI::App& command, ModelOptions& options) {
  command
      .add_option("-c,--ctx-size", options.context,
                  "Context in tokens, e.g. 8192 or 32k; 0: what the model was trained for")
      ->capture_default_str()
      ->type_name("TOKENS");
}

void add_environment_names(CLI::App& command) {
  for (CLI::Option* option : command.get_options()) {
    if (option->get_lnames().empty() || option->get_lnames().front() == "help") continue;
    std::string name = "DUALDECODER_";
    for (const char c : option->get_lnames().front()) {
      name.push_back(c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c))));
    }
    option->envname(name);
  }
}

int report(const Error& error) {
  log(LogLevel::kError, error.message);
  return error.code == ErrorCode::kInvalidArgument ? kExitUsage : kExitFailure;
}

Result<std::unique_ptr<Vocabulary>> load_vocabulary(const std::string& path) {
  const auto file = GgufFile::open(path);
  if (!file) return std::unexpected(file.error());
  return Vocabulary::load(**file);
}

Status add_rpc_servers(const std::vector<std::string>& servers) {
  for (const std::string& server : servers) {
    if (Status status = Device::add_rpc_server(server); !status) return status;
  }
  return {};
}

Result<std::unique_ptr<Model>> load_model(const ModelOptions& options) {
  if (Status status = add_rpc_servers(options.rpc_servers); !status) return std::unexpected(status.error());
  const auto device = Device::find(options.device);
  if (!device) return std::unexpected(device.error());
  ProgressLine line("loading");
  const auto show = [&](std::size_t done, std::size_t total) {
    if (log_format() == LogFormat::kJson) return;
    line.update(static_cast<double>(done) / static_cast<double>(total),
                format_bytes(static_cast<double>(total)));
  };
  auto model = Model::load(options.model, show, *device);
  line.clear();
  if (model && !(*model)->hyperparameters().assumed.empty()) {
    log(LogLevel::kWarning, fmt::format("{}: keys are missing, assumed are {}", options.model,
                                        fmt::join((*model)->hyperparameters().assumed, ", ")));
  }
  return model;
}

Result<EngineOptions> engine_options(const ModelOptions& options, const Model& model) {
  const auto context = parse_size(options.context);
  if (!context || *context > UINT32_MAX / 2) {
    return fail(ErrorCode::kInvalidArgument, "-c {}: not a number of tokens; write for example 8192 or 32k",
                options.context);
  }
  EngineOptions engine;
  engine.context =
      *context == 0 ? model.hyperparameters().context_train : static_cast<std::uint32_t>(*context);
  if (engine.context > model.hyperparameters().context_train) {
    log(LogLevel::kWarning, fmt::format("-c {} is more than the {} tokens the model was trained for",
                                        engine.context, model.hyperparameters().context_train));
  }
  const unsigned cores = std::thread::hardware_concurrency();
  engine.threads = options.threads != 0 ? options.threads : std::max(cores, 1U);
  engine.prefill_chunk = options.batch;
  engine.block_tokens = options.block_tokens;
  engine.batch_invariant = options.batch_invariant;
  return engine;
}

Status choose_tiers(const TierChoices& choices, EngineOptions& options) {
  TierOptions tiers;
  auto far = parse_far(choices.far);
  if (!far) return std::unexpected(far.error());
  tiers.far = std::move(*far);
  const auto policy = parse_policy(choices.policy);
  if (!policy) return std::unexpected(policy.error());
  tiers.policy = *policy;
  const auto correction = parse_correction(choices.correct);
  if (!correction) return std::unexpected(correction.error());
  tiers.correction = *correction;
  tiers.attend_resident = choices.attend == "resident";
  const std::string own_draft = tiers.policy == Policy::kDual   ? "self"
                                : tiers.policy == Policy::kAuto ? "ngram"
                                                                : "none";
  auto draft = parse_draft(choices.draft == "auto" ? own_draft : choices.draft);
  if (!draft) return std::unexpected(draft.error());
  if (choices.accept && draft->kind == DraftKind::kNone)
    return fail(ErrorCode::kInvalidArgument, "--accept: there is nothing to accept; add --draft ngram");
  if (tiers.policy == Policy::kAuto && draft->kind == DraftKind::kModel)
    return fail(ErrorCode::kInvalidArgument, "--draft model: --policy auto takes its guesses from n-grams");
  draft->accept = choices.accept;
  for (const auto& [name, text, value] :
       {std::tuple("--far-size", &choices.far_size, &tiers.far_bytes_max),
        std::tuple("--near-memory", &choices.near_memory, &tiers.near_bytes_max)}) {
    const auto bytes = parse_size(*text);
    if (!bytes) return fail(ErrorCode::kInvalidArgument, "{}: {}", name, bytes.error().message);
    *value = *bytes;
  }
  if (choices.budget == 0)
    return fail(ErrorCode::kInvalidArgument, "--budget 0: at least one token is needed");
  tiers.budget_tokens = choices.budget;
  const auto residency = parse_residency(choices.residency);
  if (!residency) return std::unexpected(residency.error());
  tiers.resident_layers = *residency;
  tiers.near_tokens = choices.near_slots;
  tiers.sink_tokens = choices.sink_tokens;
  tiers.recent_tokens = choices.recent_tokens;
  tiers.dense_layers = choices.dense_layers;
  tiers.digests.kind = choices.digest == "minmax" ? DigestKind::kMinMax
                       : choices.digest == "mean" ? DigestKind::kMean
                                                  : DigestKind::kPrincipal;
  tiers.digests.type = choices.digest_type == "int8" ? DigestType::kInt8 : DigestType::kF16;
  options.tiers = std::move(tiers);
  options.draft = std::move(*draft);
  return {};
}

Status load_draft(EngineOptions& options, std::unique_ptr<Model>& draft) {
  if (options.draft.kind != DraftKind::kModel) return {};
  if (draft == nullptr) {
    ModelOptions own;
    own.model = options.draft.model_path;
    auto loaded = load_model(own);
    if (!loaded) return std::unexpected(loaded.error());
    draft = std::move(*loaded);
  }
  options.draft.model = draft.get();
  return {};
}

std::vector<std::string> short_plan(const Engine& engine) {
  std::vector<std::string> lines;
  const MemoryPlan& plan = engine.plan();
  const auto bytes = [](std::uint64_t count) { return format_bytes(static_cast<double>(count)); };
  if (engine.draft() != nullptr) {
    lines.push_back(fmt::format("draft: weights {}, KV {}, all near",
                                bytes(engine.draft()->model().weights().bytes()), bytes(plan.draft_bytes)));
  }
  if (!plan.tiered()) return lines;
  lines.push_back(
      fmt::format("plan: near KV {} (window {}, selected {}, staging {}) | far KV {} in {} | digests {}",
                  bytes(plan.near_bytes()), bytes(plan.near_window_bytes), bytes(plan.near_selected_bytes),
                  bytes(plan.near_staging_bytes), bytes(plan.far_bytes), engine.tiers().far_description(),
                  bytes(plan.digest_bytes + plan.kept_digest_bytes)));
  return lines;
}

void print_short_plan(const Engine& engine) {
  for (const std::string& line : short_plan(engine)) fmt::print(stderr, "{}\n", line);
}

bool interrupted() { return interrupt_seen; }

void catch_interrupts() {
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_interrupt);
}

}  // namespace dualdecoder
