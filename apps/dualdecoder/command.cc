#include "command.h"

#include <atomic>
#include <csignal>
#include <thread>

#include "base/units.h"
#include "progress.h"

namespace dualdecoder {
namespace {

std::atomic<bool> interrupt_seen = false;

void on_interrupt(int signal) {
  interrupt_seen = true;
  std::signal(signal, SIG_DFL);
}

}  // namespace

void add_model_options(CLI::App& command, ModelOptions& options) {
  command.add_option("-m,--model", options.model, "GGUF file of the model")->required()->type_name("FILE");
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
  command.add_flag(
      "--batch-invariant", options.batch_invariant,
      "A sequence's results do not depend on the others in its step, up to 32 rows (slower with several)");
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
  fmt::print(stderr, "dualdecoder: {}\n", error.message);
  return error.code == ErrorCode::kInvalidArgument ? kExitUsage : kExitFailure;
}

Result<std::unique_ptr<Model>> load_model(const ModelOptions& options) {
  ProgressLine line("loading");
  auto model = Model::load(options.model, [&](std::size_t done, std::size_t total) {
    line.update(static_cast<double>(done) / static_cast<double>(total),
                format_bytes(static_cast<double>(total)));
  });
  line.clear();
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
    fmt::print(stderr, "dualdecoder: warning: -c {} is more than the {} tokens the model was trained for\n",
               engine.context, model.hyperparameters().context_train);
  }
  const unsigned cores = std::thread::hardware_concurrency();
  engine.threads = options.threads != 0 ? options.threads : std::max(cores, 1U);
  engine.prefill_chunk = options.batch;
  engine.block_tokens = options.block_tokens;
  engine.batch_invariant = options.batch_invariant;
  return engine;
}

bool interrupted() { return interrupt_seen; }

void catch_interrupts() { std::signal(SIGINT, on_interrupt); }

}  // namespace dualdecoder
