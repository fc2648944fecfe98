// `dualdecoder eval`: how close decoding from a far tier stays to full attention. The command line; what is
// measured is in eval_text.cc, eval_tasks.cc and eval_server.cc.
#include "eval.h"

#include <algorithm>

#include "output_file.h"

namespace dualdecoder {
namespace {

Status check(const EvalOptions& options) {
  if (!options.reads_text() && options.tasks.empty())
    return fail(ErrorCode::kInvalidArgument, "name what to measure: --kl, --ppl, --needle or --copy");
  if (options.reads_text() && options.file.empty())
    return fail(ErrorCode::kInvalidArgument, "--kl and --ppl read a text; name one with -f");
  for (const std::string& policy : options.policies) {
    if (const auto known = parse_policy(policy); !known) return std::unexpected(known.error());
  }
  return {};
}

/// Nothing that a server would not follow is taken in silence.
Status check_server(const EvalOptions& options, const CLI::App& command) {
  if (options.server.url.empty())
    return refuse_options(command, {"api-key", "served-model"}, false, "it goes with --url");
  if (options.reads_text()) {
    return fail(
        ErrorCode::kInvalidArgument,
        "--kl and --ppl need the distribution of every token, which the API does not give; --url works "
        "with --needle and --copy");
  }
  return refuse_options(command,
                        {"model", "url", "api-key", "served-model", "needle", "copy", "lengths", "depths",
                         "seeds", "raw", "results", "file", "output"},
                        true, "it is for answers in this process; with --url, start the server with it");
}

Status measure(const EvalOptions& options, EvalReport& report) {
  if (Status status = check(options); !status) return status;
  if (!options.server.url.empty()) return eval_server(options, report);
  const auto model = load_model(options.model);
  if (!model) return std::unexpected(model.error());
  const auto engine = engine_options(options.model, **model);
  if (!engine) return std::unexpected(engine.error());
  if (options.reads_text()) {
    if (Status status = eval_text(options, **model, *engine, report); !status) return status;
  }
  if (options.tasks.empty() || interrupted()) return {};
  return eval_tasks(options, **model, *engine, report);
}

Status run_eval(const EvalOptions& options, const CLI::App& command) {
  if (Status status = check_server(options, command); !status) return status;
  EvalReport report;
  const Status measured = measure(options, report);
  if (!measured && report.rows.empty()) return measured;
  const std::string json =
      report.rows.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  const Status printed = print_result(options.output == "json" ? json : report.markdown);
  return measured ? printed : measured;
}

void add_task_options(CLI::App& command, EvalOptions& options) {
  const std::string group = "Tasks";
  command
      .add_option_function<std::vector<std::string>>(
          "--needle",
          [&options](const std::vector<std::string>& names) {
            for (const std::string& name : names) {
              const auto kind = parse_task(name);
              if (!kind || *kind == TaskKind::kCopy) {
                throw CLI::ValidationError(
                    "--needle",
                    fmt::format("'{}' is not one of single, multi-key, multi-value, tracking, words", name));
              }
              options.tasks.push_back(*kind);
            }
          },
          "Questions about facts in a long document: single, multi-key, multi-value, tracking, words")
      ->delimiter(',')
      ->group(group)
      ->type_name("NAME,...");
  command
      .add_flag_callback(
          "--copy", [&options] { options.tasks.push_back(TaskKind::kCopy); },
          "A JSON record in a long log, to be copied")
      ->group(group);
  command.add_option("--lengths", options.lengths, "Tokens of the prompts")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(64, 1 << 24))
      ->group(group)
      ->type_name("TOKENS,...");
  command
      .add_option("--depths", options.depths,
                  "Where the fact stands in the document (single, multi-key, copy)")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(0, 100))
      ->group(group)
      ->type_name("PERCENT,...");
  command.add_option("--seeds", options.seeds, "Documents for each length and depth: seeds 0, 1, ...")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000))
      ->group(group)
      ->type_name("N");
  command.add_flag("--raw", options.raw, "Let the model continue the text, even if it has a chat template")
      ->group(group);
  command
      .add_option("--results", options.results,
                  "Keep each answer in this file (JSON lines) and skip those that are in it already")
      ->group(group)
      ->type_name("FILE");
  command
      .add_option("--url", options.server.url,
                  "Let a server answer the tasks, any that speaks the OpenAI API over http (no https), e.g. "
                  "http://127.0.0.1:8080; of the model file the vocabulary alone is read")
      ->group("Servers")
      ->type_name("URL");
  add_server_choices(command, options.server);
}

}  // namespace

Result<EngineOptions> eval_engine_options(const EvalOptions& options, const EngineOptions& engine,
                                          TierChoices choices, std::unique_ptr<Model>& draft) {
  EngineOptions complete = engine;
  if (choices.far == "none") choices.far = "host";
  const bool needs_next_query =
      std::find(options.policies.begin(), options.policies.end(), "previous-layer") != options.policies.end();
  choices.policy = needs_next_query ? "previous-layer" : "previous";
  choices.budget = *std::max_element(options.budgets.begin(), options.budgets.end());
  if (Status status = choose_tiers(choices, complete); !status) return std::unexpected(status.error());
  if (Status status = load_draft(complete, draft); !status) return std::unexpected(status.error());
  return complete;
}

void add_eval_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command = app.add_subcommand("eval", "Measure how close decoding stays to full attention");
  add_model_options(*command, options->model);
  add_tier_options(*command, options->tiers, false);
  for (const char* one :
       {"--block-size", "--budget", "--digest", "--digest-type", "--sink-tokens", "--recent-tokens"})
    command->remove_option(command->get_option(one));  // lists here
  command->add_flag("--kl", options->kl,
                    "Divergence of the next token's distribution from full attention, teacher-forced");
  command->add_flag("--ppl", options->perplexity, "Perplexity of the same tokens, and with full attention");
  command
      ->add_option("-f,--file", options->file,
                   "Text to read (--kl, --ppl); what facts are hidden in, made up otherwise (--needle)")
      ->type_name("FILE");
  command->add_option("-c,--ctx-size", options->context, "Tokens of the text that are context")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 24))
      ->type_name("TOKENS");
  command->add_option("-n,--positions", options->positions, "Tokens after it that are decoded")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("TOKENS");
  add_task_options(*command, *options);
  const auto list = [&](const char* name, auto& values, const char* text) {
    return command->add_option(name, values, text)->delimiter(',')->capture_default_str();
  };
  list("--policy", options->policies, "Policies to compare");
  list("--budget", options->budgets, "Budgets to compare, in tokens");
  list("--block-size", options->blocks, "Block sizes to compare")->check(CLI::IsMember({16, 32, 64}));
  list("--digest", options->digests, "Digests to compare")
      ->check(CLI::IsMember({"minmax", "mean", "principal"}));
  list("--digest-type", options->digest_types, "Number formats of digests to compare")
      ->check(CLI::IsMember({"f16", "int8"}));
  list("--sink-tokens", options->sinks, "Numbers of first tokens that are always near");
  list("--recent-tokens", options->recents, "Numbers of last tokens that are always near");
  command->add_option("-o,--output", options->output, "Format of the table")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "json"}));
  add_environment_names(*command);
  command->callback([options, command, &exit_code] {
    catch_interrupts();
    if (Status status = run_eval(*options, *command); !status) {
      exit_code = report(status.error());
    } else if (interrupted()) {
      exit_code = kExitInterrupted;
    }
  });
}

}  // namespace dualdecoder
