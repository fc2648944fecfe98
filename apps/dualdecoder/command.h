// What the subcommands share: exit codes, the options that choose a model and an engine, loading with
// progress.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/error.h"
#include "decode/engine.h"
#include "model/model.h"

namespace dualdecoder {

inline constexpr int kExitSuccess = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;  // as a shell reports SIGINT

struct ModelOptions {
  std::string model;
  std::string device = "cpu";
  std::vector<std::string> rpc_servers;  // whose devices can be named, too
  std::string context = "0";             // tokens, with an optional unit; 0: the model's own
  std::uint32_t threads = 0;             // 0: one per core
  std::uint32_t batch = 512;
  std::uint32_t block_tokens = 32;
  bool batch_invariant = false;
};

/// Where the KV lies and what comes near, as a user writes it.
struct TierChoices {
  std::string far = "none";
  std::string far_size = "0";
  std::string near_memory = "0";
  std::string policy = "previous";
  std::string correct = "none";
  std::string attend = "selected";
  std::string draft = "auto";  // self with the policy dual, else none
  bool accept = false;
  std::string digest = "principal";
  std::string digest_type = "f16";
  std::uint32_t budget = TierOptions{}.budget_tokens;
  std::uint32_t sink_tokens = TierOptions{}.sink_tokens;
  std::uint32_t recent_tokens = TierOptions{}.recent_tokens;
  std::string residency = "auto";
  std::uint32_t near_slots = 0;
  std::uint32_t dense_layers = 0;
};

/// A server that speaks the OpenAI API, as a user writes it.
struct ServerChoices {
  std::string url;
  std::string api_key;
  std::string model;  // empty: the first one that it lists
};

/// -m, -t, -b and the like.
void add_model_options(CLI::App& command, ModelOptions& options);
/// --rpc
void add_rpc_option(CLI::App& command, std::vector<std::string>& servers);
/// --far, --near-memory, --policy and the like; --far and --policy only if `one_engine`.
void add_tier_options(CLI::App& command, TierChoices& choices, bool one_engine = true);
/// --api-key, --served-model
void add_server_choices(CLI::App& command, ServerChoices& choices);
/// kInvalidArgument for the first of these options, or of all but these, that the command line has, with
/// `why` behind its name. The environment speaks to every subcommand, so what it says is passed over.
Status refuse_options(const CLI::App& command, const std::set<std::string>& names, bool all_but_these,
                      const char* why);
/// -c
void add_context_option(CLI::App& command, ModelOptions& options);
/// Makes every long flag of `command` settable as DUALDECODER_<NAME>, e.g. --top-k as DUALDECODER_TOP_K.
void add_environment_names(CLI::App& command);

/// Registers a subcommand; its result is what `main` returns.
void add_run_command(CLI::App& app, int& exit_code);
void add_bench_command(CLI::App& app, int& exit_code);
void add_eval_command(CLI::App& app, int& exit_code);
void add_plan_command(CLI::App& app, int& exit_code);
void add_serve_command(CLI::App& app, int& exit_code);
void add_devices_command(CLI::App& app, int& exit_code);

/// "dualdecoder: <message>" on stderr; returns the exit code that fits: 2 for input that can never work, 1
/// otherwise.
int report(const Error& error);

/// Makes the devices of these servers known.
Status add_rpc_servers(const std::vector<std::string>& servers);
Result<std::unique_ptr<Model>> load_model(const ModelOptions& options);
/// The tokens of a model file, without its weights.
Result<std::unique_ptr<Vocabulary>> load_vocabulary(const std::string& path);
/// The engine options of these model options; a context beyond the model's training gives a warning on
/// stderr.
Result<EngineOptions> engine_options(const ModelOptions& options, const Model& model);

/// Sets what concerns tiers and guesses.
Status choose_tiers(const TierChoices& choices, EngineOptions& options);
/// Loads the model that --draft model:FILE names into `draft`, unless it is there, and gives it to `options`.
Status load_draft(EngineOptions& options, std::unique_ptr<Model>& draft);
/// The plan in lines; none when all KV stays near and there is no draft model.
std::vector<std::string> short_plan(const Engine& engine);
/// The same on stderr.
void print_short_plan(const Engine& engine);

/// Set by the first Ctrl-C or SIGTERM; a second one ends the process at once.
bool interrupted();
void catch_interrupts();

}  // namespace dualdecoder
