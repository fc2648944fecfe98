// `dualdecoder eval --kl`: how close decoding from a far tier stays to full attention, on a real text.
//
// The text's first -c tokens are the context; the next -n tokens are decoded one by one, each with the true
// token put in (teacher-forced). Reference are the logits of the same model with all KV near. The prompt is
// computed once per block size and digest; every window, policy and budget then decodes over that same KV.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "command.h"
#include "commit.h"
#include "decode/draft.h"
#include "decode/sampler.h"
#include "progress.h"

namespace dualdecoder {
namespace {

struct EvalOptions {
  ModelOptions model;
  TierChoices tiers;
  bool kl = false;
  std::string file;
  std::uint32_t context = 6000;
  std::uint32_t positions = 256;
  std::vector<std::string> policies = {"previous"};
  std::vector<std::uint32_t> budgets = {512, 1024, 2048};
  std::vector<std::uint32_t> blocks = {32};
  std::vector<std::string> digests = {"principal"};
  std::vector<std::string> digest_types = {"f16"};
  std::vector<std::uint32_t> sinks = {TierOptions{}.sink_tokens};
  std::vector<std::uint32_t> recents = {TierOptions{}.recent_tokens};
  std::string output = "md";
};

/// One of each list.
struct Choice {
  std::uint32_t block_tokens = 0;
  std::string digest = {};
  std::string digest_type = {};
  std::uint32_t sink_tokens = 0;
  std::uint32_t recent_tokens = 0;
  std::string policy = {};
  std::uint32_t budget = 0;
};

struct Row {
  Choice choice = {};
  double kl_mean = 0.0;
  double kl_p99 = 0.0;
  double same_top = 0.0;  // share of positions
  std::optional<Coverage> coverage = {};
  std::vector<double> recall = {};  // [layer] share of the own query's blocks that were predicted; or empty
  DraftStats draft = {};
};

double mean(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

using LogProbabilities = std::vector<float>;  // [vocabulary]

LogProbabilities log_softmax(std::span<const float> logits) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - max);
  const auto shift = static_cast<float>(max + std::log(sum));
  LogProbabilities result(logits.size());
  std::transform(logits.begin(), logits.end(), result.begin(), [shift](float x) { return x - shift; });
  return result;
}

double kl_divergence(const LogProbabilities& p, const LogProbabilities& q) {
  double sum = 0.0;
  for (std::size_t i = 0; i < p.size(); ++i) sum += std::exp(static_cast<double>(p[i])) * (p[i] - q[i]);
  return sum;
}

class Eval {
 public:
  Eval(const EvalOptions& options, const Model& model, const EngineOptions& engine)
      : options_(options), model_(model), engine_options_(engine) {}

  Result<std::vector<Row>> run() {
    if (Status status = read_text(); !status) return std::unexpected(status.error());
    if (Status status = compute_reference(); !status) return std::unexpected(status.error());
    for (const std::uint32_t block : options_.blocks) {
      for (const std::string& digest : options_.digests) {
        for (const std::string& type : options_.digest_types) {
          const Choice choice{.block_tokens = block, .digest = digest, .digest_type = type};
          if (Status status = run_engine(choice); !status) return std::unexpected(status.error());
          if (interrupted()) return std::move(rows_);
        }
      }
    }
    return std::move(rows_);
  }

 private:
  Status read_text() {
    const auto text = read_text_file(options_.file);
    if (!text) return std::unexpected(text.error());
    tokens_ = model_.vocabulary().tokenize(*text, true, false);
    const std::size_t wanted = std::size_t{options_.context} + options_.positions;
    if (tokens_.size() < wanted) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} has {} tokens, {} + {} are wanted; give a longer text (-f) or lower -c or -n",
                  options_.file, tokens_.size(), options_.context, options_.positions);
    }
    tokens_.resize(wanted);
    return {};
  }

  Result<std::unique_ptr<Engine>> make_engine(const EngineOptions& options) const {
    EngineOptions complete = options;
    complete.context = static_cast<std::uint32_t>(tokens_.size());
    return Engine::create(model_, complete);
  }

  Status prefill(Engine& engine, Sequence& sequence, const std::string& what) const {
    ProgressLine line(what);
    const auto context = std::span(tokens_).first(options_.context);
    const auto logits = engine.prefill(sequence, context, [&](std::uint32_t done) {
      line.update(static_cast<double>(done) / options_.context, fmt::format("{} tokens", done));
      return !interrupted();
    });
    return logits ? Status{} : std::unexpected(logits.error());
  }

  /// Calls body(position, log probabilities) for each decoded position.
  template <typename Body>
  Result<DraftStats> decode(Engine& engine, Sequence& sequence, const DraftOptions& guesses,
                            const std::string& what, const Body& body) const {
    ProgressLine line(what);
    Draft draft(engine, guesses);
    for (std::uint32_t i = 0; i <= options_.context; ++i) draft.remember(tokens_[i]);
    for (std::uint32_t i = 0; i < options_.positions && !interrupted();) {
      const StepGroup group = draft.next(sequence, tokens_[options_.context + i], i + 1 < options_.positions);
      const auto logits = engine.step(std::span(&group, 1));
      if (!logits) return std::unexpected(logits.error());
      if (sequence.error()) return std::unexpected(*sequence.error());
      draft.take(sequence, *logits,
                 [&](std::span<const float> row, std::uint32_t position, DrawnAs drawn_as) {
                   if (drawn_as == DrawnAs::kGuess) return std::optional(likeliest(row));
                   body(i++, log_softmax(row));
                   if (position >= tokens_.size()) return std::optional<TokenId>();
                   draft.remember(tokens_[position]);
                   return std::optional(tokens_[position]);
                 });
      line.update(static_cast<double>(i) / options_.positions, fmt::format("{} positions", i));
    }
    return draft.stats();
  }

  Status compute_reference() {
    EngineOptions options = engine_options_;
    options.tiers = {};
    const auto engine = make_engine(options);
    if (!engine) return std::unexpected(engine.error());
    const auto sequence = (*engine)->new_sequence();
    if (!sequence) return std::unexpected(sequence.error());
    if (Status status = prefill(**engine, **sequence, "full attention: text"); !status) return status;
    const auto decoded =
        decode(**engine, **sequence, {}, "full attention",
               [&](std::uint32_t, LogProbabilities row) { reference_.push_back(std::move(row)); });
    return decoded ? Status{} : std::unexpected(decoded.error());
  }

  Status run_engine(Choice choice) {
    EngineOptions options = engine_options_;
    options.block_tokens = choice.block_tokens;
    TierChoices choices = options_.tiers;
    choices.digest = choice.digest;
    choices.digest_type = choice.digest_type;
    if (choices.far == "none") choices.far = "host";
    choices.policy = "previous-layer";  // an engine that can change to any
    choices.budget = *std::max_element(options_.budgets.begin(), options_.budgets.end());
    choices.sink_tokens = *std::max_element(options_.sinks.begin(), options_.sinks.end());
    choices.recent_tokens = *std::max_element(options_.recents.begin(), options_.recents.end());
    if (Status status = choose_tiers(choices, options); !status) return status;
    if (Status status = load_draft(options, draft_model_); !status) return status;
    options.tiers.measure_coverage = true;
    const auto engine = make_engine(options);
    if (!engine) return std::unexpected(engine.error());
    const auto sequence = (*engine)->new_sequence();
    if (!sequence) return std::unexpected(sequence.error());
    const std::string name =
        fmt::format("blocks of {}, {} {}", choice.block_tokens, choice.digest, choice.digest_type);
    if (Status status = prefill(**engine, **sequence, name + ": text"); !status) return status;
    for (const std::uint32_t sinks : options_.sinks) {
      for (const std::uint32_t recent : options_.recents) {
        choice.sink_tokens = sinks;
        choice.recent_tokens = recent;
        if (Status status = measure_selections(**engine, **sequence, choice); !status) return status;
        if (interrupted()) return {};
      }
    }
    return {};
  }

  Status measure_selections(Engine& engine, Sequence& sequence, Choice choice) {
    if (Status status = engine.set_window(choice.sink_tokens, choice.recent_tokens); !status) return status;
    for (const std::string& policy : options_.policies) {
      for (const std::uint32_t budget : options_.budgets) {
        choice.policy = policy;
        choice.budget = budget;
        if (Status status = measure(engine, sequence, choice); !status) return status;
        if (interrupted()) return {};
        if (Status status = sequence.truncate(options_.context); !status) return status;
      }
    }
    return {};
  }

  Status measure(Engine& engine, Sequence& sequence, const Choice& choice) {
    const auto policy = parse_policy(choice.policy);
    if (!policy) return std::unexpected(policy.error());
    if (Status status = engine.set_selection(*policy, choice.budget); !status) return status;
    const Coverage before = engine.coverage();
    std::vector<double> kl;
    std::size_t same = 0;
    const std::string name = fmt::format("{}, window {} + {}, budget {}", choice.policy, choice.sink_tokens,
                                         choice.recent_tokens, choice.budget);
    DraftOptions guesses;
    if (*policy == Policy::kDual) guesses = engine.options().draft;
    if (*policy == Policy::kDual && guesses.kind == DraftKind::kNone) guesses.kind = DraftKind::kSelf;
    guesses.accept = false;  // the tokens are the text's
    const std::vector<LayerRecall> recall(engine.recall().begin(), engine.recall().end());
    const auto decoded =
        decode(engine, sequence, guesses, name, [&](std::uint32_t i, const LogProbabilities& row) {
          kl.push_back(kl_divergence(reference_[i], row));
          same += likeliest(reference_[i]) == likeliest(row);
        });
    if (!decoded) return std::unexpected(decoded.error());
    if (interrupted()) return {};  // the row is not complete
    Row row{.choice = choice, .draft = *decoded};
    for (std::size_t i = 0; i < recall.size(); ++i) {
      const auto selected = static_cast<double>(engine.recall()[i].selected - recall[i].selected);
      const auto predicted = static_cast<double>(engine.recall()[i].predicted - recall[i].predicted);
      if (selected > 0.0) row.recall.push_back(predicted / selected);
    }
    for (const double value : kl) row.kl_mean += value / static_cast<double>(kl.size());
    row.same_top = static_cast<double>(same) / static_cast<double>(kl.size());
    std::sort(kl.begin(), kl.end());
    row.kl_p99 = kl[(kl.size() - 1) * 99 / 100];
    if (*policy == Policy::kOracle) {
      const Coverage& after = engine.coverage();
      const auto samples = static_cast<double>(after.samples - before.samples);
      row.coverage = Coverage{.samples = after.samples - before.samples,
                              .oracle = (after.oracle - before.oracle) / samples,
                              .digest = (after.digest - before.digest) / samples,
                              .previous = (after.previous - before.previous) / samples};
    }
    rows_.push_back(std::move(row));
    return {};
  }

  const EvalOptions& options_;
  const Model& model_;
  EngineOptions engine_options_;
  std::unique_ptr<Model> draft_model_;
  std::vector<TokenId> tokens_;
  std::vector<LogProbabilities> reference_;  // [position]
  std::vector<Row> rows_;
};

std::string coverage_text(const Row& row) {
  if (!row.coverage) return "";
  return fmt::format("{:.3f} / {:.3f} / {:.3f}", row.coverage->oracle, row.coverage->digest,
                     row.coverage->previous);
}

std::string recall_text(const Row& row) {
  return row.recall.empty() ? "" : fmt::format("{:.3f}", mean(row.recall));
}

void print_markdown(const std::vector<Row>& rows, const EvalOptions& options) {
  fmt::print("{}, {}: {} positions after {} tokens, commit {}\n\n", options.model.model, options.file,
             options.positions, options.context, DUALDECODER_COMMIT);
  fmt::print(
      "| block | digest | sinks | recent | policy | budget | mean KL | KL p99 | same top token | predicted | "
      "attention covered: oracle / digest / previous query "
      "|\n|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const Row& row : rows) {
    const Choice& choice = row.choice;
    fmt::print("| {} | {} {} | {} | {} | {} | {} | {:.4f} | {:.3f} | {:.1f} % | {} | {} |\n",
               choice.block_tokens, choice.digest, choice.digest_type, choice.sink_tokens,
               choice.recent_tokens, choice.policy, choice.budget, row.kl_mean, row.kl_p99,
               row.same_top * 100.0, recall_text(row), coverage_text(row));
  }
}

void print_json(const std::vector<Row>& rows, const EvalOptions& options) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    nlohmann::ordered_json json = {{"model", options.model.model},
                                   {"text", options.file},
                                   {"context", options.context},
                                   {"positions", options.positions},
                                   {"block_tokens", row.choice.block_tokens},
                                   {"digest", row.choice.digest},
                                   {"digest_type", row.choice.digest_type},
                                   {"sink_tokens", row.choice.sink_tokens},
                                   {"recent_tokens", row.choice.recent_tokens},
                                   {"policy", row.choice.policy},
                                   {"budget", row.choice.budget},
                                   {"kl_mean", row.kl_mean},
                                   {"kl_p99", row.kl_p99},
                                   {"same_top", row.same_top},
                                   {"commit", DUALDECODER_COMMIT}};
    if (row.coverage) {
      json["coverage_oracle"] = row.coverage->oracle;
      json["coverage_digest"] = row.coverage->digest;
      json["coverage_previous"] = row.coverage->previous;
    }
    if (!row.recall.empty()) {
      json["recall"] = mean(row.recall);
      json["layer_recall"] = row.recall;
    }
    if (row.draft.guesses > 0) {
      json["guesses"] = row.draft.guesses;
      json["guesses_right"] = row.draft.right;
    }
    list.push_back(std::move(json));
  }
  fmt::print("{}\n", list.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

Status run_eval(const EvalOptions& options) {
  if (!options.kl) return fail(ErrorCode::kInvalidArgument, "name what to measure: --kl");
  for (const std::string& policy : options.policies) {
    if (const auto known = parse_policy(policy); !known) return std::unexpected(known.error());
  }
  const auto model = load_model(options.model);
  if (!model) return std::unexpected(model.error());
  const auto engine = engine_options(options.model, **model);
  if (!engine) return std::unexpected(engine.error());
  const auto rows = Eval(options, **model, *engine).run();
  if (!rows) return std::unexpected(rows.error());
  if (options.output == "json") {
    print_json(*rows, options);
  } else {
    print_markdown(*rows, options);
  }
  return {};
}

}  // namespace

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
  command->add_option("-f,--file", options->file, "Text to read")->required()->type_name("FILE");
  command->add_option("-c,--ctx-size", options->context, "Tokens of the text that are context")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 24))
      ->type_name("TOKENS");
  command->add_option("-n,--positions", options->positions, "Tokens after it that are decoded")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("TOKENS");
  command->add_option("--policy", options->policies, "Policies to compare")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--budget", options->budgets, "Budgets to compare, in tokens")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--block-size", options->blocks, "Block sizes to compare")
      ->delimiter(',')
      ->check(CLI::IsMember({16, 32, 64}))
      ->capture_default_str();
  command->add_option("--digest", options->digests, "Digests to compare")
      ->delimiter(',')
      ->check(CLI::IsMember({"minmax", "mean", "principal"}))
      ->capture_default_str();
  command->add_option("--digest-type", options->digest_types, "Number formats of digests to compare")
      ->delimiter(',')
      ->check(CLI::IsMember({"f16", "int8"}))
      ->capture_default_str();
  command->add_option("--sink-tokens", options->sinks, "Numbers of first tokens that are always near")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--recent-tokens", options->recents, "Numbers of last tokens that are always near")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("-o,--output", options->output, "Format of the table")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "json"}));
  add_environment_names(*command);
  command->callback([options, &exit_code] {
    catch_interrupts();
    if (Status status = run_eval(*options); !status) {
      exit_code = report(status.error());
    } else if (interrupted()) {
      exit_code = kExitInterrupted;
    }
  });
}

}  // namespace dualdecoder
