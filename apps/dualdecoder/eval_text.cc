// `dualdecoder eval --kl` and `--ppl`: how close decoding from a far tier stays to full attention, on a real
// text.
//
// The text's first -c tokens are the context; the next -n tokens are decoded one by one, each with the true
// token put in (teacher-forced). Reference are the logits of the same model with all KV near. The prompt is
// computed once per block size and digest; every window, policy and budget then decodes over that same KV.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>

#include "base/file.h"
#include "commit.h"
#include "decode/sampler.h"
#include "divergence.h"
#include "eval.h"
#include "progress.h"

namespace dualdecoder {
namespace {

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
  double perplexity = 0.0;
  std::optional<Coverage> coverage = {};
  std::vector<double> recall = {};  // [layer] share of the own query's blocks that were predicted; or empty
  DraftStats draft = {};
};

double mean(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

class TextEval {
 public:
  TextEval(const EvalOptions& options, const Model& model, const EngineOptions& engine)
      : options_(options), model_(model), engine_options_(engine) {}

  Status run() {
    if (Status status = read_text(); !status) return status;
    if (Status status = compute_reference(); !status) return status;
    for (const std::uint32_t block : options_.blocks) {
      for (const std::string& digest : options_.digests) {
        for (const std::string& type : options_.digest_types) {
          const Choice choice{.block_tokens = block, .digest = digest, .digest_type = type};
          if (interrupted()) return {};
          if (Status status = run_engine(choice); !status) return status;
        }
      }
    }
    return {};
  }

  const std::vector<Row>& rows() const { return rows_; }
  double full_perplexity() const { return full_perplexity_; }

 private:
  Status read_text() {
    const auto text = read_text_file(options_.file);
    if (!text) return std::unexpected(text.error());
    tokens_ = model_.vocabulary().tokenize(*text, true, false);
    // One more when it is asked how well the last one was expected.
    const std::size_t wanted =
        std::size_t{options_.context} + options_.positions + (options_.perplexity ? 1 : 0);
    if (tokens_.size() < wanted) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} has {} tokens, {} are wanted; give a longer text (-f) or lower -c or -n", options_.file,
                  tokens_.size(), wanted);
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

  /// Calls body(i, log probabilities) for each decoded position.
  template <typename Body>
  Result<DraftStats> decode(Engine& engine, Sequence& sequence, const DraftOptions& guesses,
                            const std::string& what, const Body& body) const {
    ProgressLine line(what);
    const auto context = std::span(tokens_).first(options_.context);
    const auto forced = std::span(tokens_).subspan(options_.context, options_.positions);
    return decode_forced(
        engine, sequence, guesses, context, forced, [&](std::size_t i, LogProbabilities row) {
          line.update(static_cast<double>(i + 1) / options_.positions, fmt::format("{} positions", i + 1));
          body(i, std::move(row));
          return !interrupted();
        });
  }

  /// What the token after position i was worth to the model, in nats; 0 when that token is not known.
  double surprise(std::size_t i, const LogProbabilities& row) const {
    const std::size_t next = options_.context + i + 1;
    return options_.perplexity ? -static_cast<double>(row[static_cast<std::size_t>(tokens_[next])]) : 0.0;
  }

  Status compute_reference() {
    EngineOptions options = engine_options_;
    options.tiers = {};
    const auto engine = make_engine(options);
    if (!engine) return std::unexpected(engine.error());
    const auto sequence = (*engine)->new_sequence();
    if (!sequence) return std::unexpected(sequence.error());
    if (Status status = prefill(**engine, **sequence, "full attention: text"); !status) return status;
    double surprises = 0.0;
    const auto decoded =
        decode(**engine, **sequence, {}, "full attention", [&](std::size_t i, LogProbabilities row) {
          surprises += surprise(i, row);
          reference_.push_back(std::move(row));
        });
    full_perplexity_ = std::exp(surprises / options_.positions);
    return decoded ? Status{} : std::unexpected(decoded.error());
  }

  Status run_engine(Choice choice) {
    TierChoices choices = options_.tiers;
    choices.digest = choice.digest;
    choices.digest_type = choice.digest_type;
    choices.sink_tokens = *std::max_element(options_.sinks.begin(), options_.sinks.end());
    choices.recent_tokens = *std::max_element(options_.recents.begin(), options_.recents.end());
    auto options = eval_engine_options(options_, engine_options_, choices, draft_model_);
    if (!options) return std::unexpected(options.error());
    options->block_tokens = choice.block_tokens;
    options->tiers.measure_coverage = true;
    const auto engine = make_engine(*options);
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
    double surprises = 0.0;
    std::size_t same = 0;
    const std::string name = fmt::format("{}, window {} + {}, budget {}", choice.policy, choice.sink_tokens,
                                         choice.recent_tokens, choice.budget);
    DraftOptions guesses;
    if (*policy == Policy::kDual) guesses = engine.options().draft;
    if (*policy == Policy::kDual && guesses.kind == DraftKind::kNone) guesses.kind = DraftKind::kSelf;
    const std::vector<LayerRecall> recall(engine.recall().begin(), engine.recall().end());
    const auto decoded =
        decode(engine, sequence, guesses, name, [&](std::size_t i, const LogProbabilities& row) {
          surprises += surprise(i, row);
          kl.push_back(kl_divergence(reference_[i], row));
          same += likeliest(reference_[i]) == likeliest(row);
        });
    if (!decoded) return std::unexpected(decoded.error());
    if (interrupted()) return {};  // the row is not complete
    Row row{.choice = choice, .perplexity = std::exp(surprises / options_.positions), .draft = *decoded};
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
  double full_perplexity_ = 0.0;
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

void add_markdown(const std::vector<Row>& rows, double full_perplexity, const EvalOptions& options,
                  std::string& text) {
  auto out = std::back_inserter(text);
  fmt::format_to(out, "{}, {}: {} positions after {} tokens, commit {}", options.model.model, options.file,
                 options.positions, options.context, DUALDECODER_COMMIT);
  if (options.perplexity) fmt::format_to(out, "; perplexity with full attention {:.3f}", full_perplexity);
  text += "\n\n| block | digest | sinks | recent | policy | budget | ";
  if (options.kl) text += "mean KL | KL p99 | same top token | ";
  if (options.perplexity) text += "perplexity | ";
  text += "predicted | attention covered: oracle / digest / previous query |\n|---|---|---|---|---|---|";
  if (options.kl) text += "---|---|---|";
  if (options.perplexity) text += "---|";
  text += "---|---|\n";
  for (const Row& row : rows) {
    const Choice& choice = row.choice;
    fmt::format_to(out, "| {} | {} {} | {} | {} | {} | {} | ", choice.block_tokens, choice.digest,
                   choice.digest_type, choice.sink_tokens, choice.recent_tokens, choice.policy,
                   choice.budget);
    if (options.kl)
      fmt::format_to(out, "{:.4f} | {:.3f} | {:.1f} % | ", row.kl_mean, row.kl_p99, row.same_top * 100.0);
    if (options.perplexity) fmt::format_to(out, "{:.3f} | ", row.perplexity);
    fmt::format_to(out, "{} | {} |\n", recall_text(row), coverage_text(row));
  }
}

void add_json(const std::vector<Row>& rows, double full_perplexity, const EvalOptions& options,
              nlohmann::ordered_json& list) {
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
                                   {"budget", row.choice.budget}};
    if (options.kl) {
      json["kl_mean"] = row.kl_mean;
      json["kl_p99"] = row.kl_p99;
      json["same_top"] = row.same_top;
    }
    json["commit"] = DUALDECODER_COMMIT;
    if (options.perplexity) {
      json["perplexity"] = row.perplexity;
      json["full_perplexity"] = full_perplexity;
    }
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
}

}  // namespace

Status eval_text(const EvalOptions& options, const Model& model, const EngineOptions& engine,
                 EvalReport& report) {
  TextEval eval(options, model, engine);
  Status status = eval.run();
  if (!eval.rows().empty()) add_markdown(eval.rows(), eval.full_perplexity(), options, report.markdown);
  add_json(eval.rows(), eval.full_perplexity(), options, report.rows);
  return status;
}

}  // namespace dualdecoder
