// `dualdecoder eval --needle` and `--copy`: do answers stay right when a token attends to a selection? Each
// case is a question about a made-up document (tasks/task.h), answered greedily with full attention and with
// every policy, over the same KV: the document is computed once.
//
// Every answer starts anew from the prompt's last two tokens, computed as a prompt is (exactly, and ranking
// for the token that follows under the policy at hand). Documents that begin alike share what they have in
// common, in whole chunks, so the bits are those of a document that was computed alone, and a case has the
// same answer whatever was run before it.
#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "base/file.h"
#include "base/statistics.h"
#include "case_log.h"
#include "commit.h"
#include "decode/draft.h"
#include "decode/sampler.h"
#include "eval.h"
#include "progress.h"

namespace dualdecoder {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint32_t kAnswerTokensMax = 128;
constexpr std::uint32_t kNewTokens = 2;  // of a prompt, computed for each answer

/// A way of answering. Full attention has no budget.
struct Way {
  std::string policy;
  std::uint32_t budget = 0;
};

struct Case {
  TaskKind kind = TaskKind::kSingle;
  std::uint32_t length = 0;
  std::uint32_t depth = 0;  // percent; means nothing where !has_depth(kind)
  std::uint64_t seed = 0;
};

/// Over cases that differ in their seed, and perhaps in their depth.
struct Score {
  std::uint32_t cases = 0;
  std::uint32_t right = 0;  // all that was expected is there
  std::uint32_t same = 0;   // the tokens of full attention
  double found = 0.0;       // sum of shares of what was expected

  double accuracy() const { return static_cast<double>(right) / cases; }
};

struct Answer {
  std::string text;
  std::vector<TokenId> tokens;
  bool whole = true;  // not interrupted
};

class TaskEval {
 public:
  TaskEval(const EvalOptions& options, const Model& model, const EngineOptions& engine, CaseLog& log)
      : options_(options), model_(model), engine_options_(engine), log_(log) {
    ways_.push_back({.policy = "full"});
    for (const std::string& policy : options.policies) {
      for (const std::uint32_t budget : options.budgets) {
        if (policy != "full") ways_.push_back({policy, budget});
      }
    }
    chat_ = !options.raw && model.vocabulary().has_chat_template();
  }

  Status run() {
    if (Status status = prepare(); !status) return status;
    const std::vector<Case> cases = open_cases();
    double total = 0.0;
    for (const Case& one : cases) total += one.length;
    ProgressLine line(fmt::format("{} of {} cases", cases.size(), all_cases().size()));
    double done = 0.0;
    for (const Case& one : cases) {
      const auto show = [&](double share) {
        line.update((done + share * one.length) / total, describe(one));
      };
      if (Status status = run_case(one, show); !status) return status;
      if (interrupted()) return {};
      done += one.length;
    }
    return {};
  }

  /// Every case that has its results, for each way.
  template <typename Body>
  void for_each_result(const Body& body) const {
    for (const Case& one : all_cases()) {
      const Json* full = log_.find(case_json(one, ways_.front()));
      if (full == nullptr) continue;
      for (const Way& way : ways_) {
        const Json* result = log_.find(case_json(one, way));
        if (result != nullptr) body(one, way, *result, (*result)["tokens"] == (*full)["tokens"]);
      }
    }
  }

  bool chat() const { return chat_; }
  const std::vector<Way>& ways() const { return ways_; }

 private:
  Status prepare() {
    if (!options_.file.empty()) {
      const auto text = read_text_file(options_.file);
      if (!text) return std::unexpected(text.error());
      sentences_ = split_sentences(*text);
      if (sentences_.empty()) return fail(ErrorCode::kInvalidArgument, "{} is empty", options_.file);
    }
    TierChoices choices = options_.tiers;
    choices.digest = options_.digests.front();
    choices.digest_type = options_.digest_types.front();
    choices.sink_tokens = options_.sinks.front();
    choices.recent_tokens = options_.recents.front();
    auto engine_options = eval_engine_options(options_, engine_options_, choices, draft_model_);
    if (!engine_options) return std::unexpected(engine_options.error());
    engine_options->block_tokens = options_.blocks.front();
    engine_options->context =
        *std::max_element(options_.lengths.begin(), options_.lengths.end()) + kAnswerTokensMax;
    settings_ = settings_json(*engine_options);
    auto engine = Engine::create(model_, *engine_options);
    if (!engine) return std::unexpected(engine.error());
    engine_ = std::move(*engine);
    auto sequence = engine_->new_sequence();
    if (!sequence) return std::unexpected(sequence.error());
    sequence_ = std::move(*sequence);
    if (Engine* draft = engine_->draft()) follower_ = std::make_shared<Follower>(*draft);
    return {};
  }

  /// What a result depends on beside the case.
  Json settings_json(const EngineOptions& engine) const {
    const std::string& path = options_.model.model;
    return {{"model", path.substr(path.rfind('/') + 1)},
            {"weights", fmt::format("{:016x}", model_.weights_hash())},
            {"commit", DUALDECODER_COMMIT},
            {"chat", chat_},
            {"text", options_.file},
            {"threads", engine.threads},
            {"batch", engine.prefill_chunk},
            {"context", engine.context},
            {"block_tokens", engine.block_tokens},
            {"batch_invariant", engine.batch_invariant},
            {"digest", options_.digests.front()},
            {"digest_type", options_.digest_types.front()},
            {"sink_tokens", options_.sinks.front()},
            {"recent_tokens", options_.recents.front()},
            {"dense_layers", options_.tiers.dense_layers},
            {"correct", options_.tiers.correct},
            {"attend", options_.tiers.attend},
            {"near_slots", options_.tiers.near_slots},
            {"near_memory", options_.tiers.near_memory},
            {"residency", options_.tiers.residency},
            {"draft", options_.tiers.draft},
            {"accept", options_.tiers.accept}};
  }

  Json case_json(const Case& one, const Way& way) const {
    Json json = settings_;
    json["task"] = task_name(one.kind);
    json["length"] = one.length;
    json["depth"] = has_depth(one.kind) ? Json(one.depth) : Json(nullptr);
    json["seed"] = one.seed;
    json["policy"] = way.policy;
    json["budget"] = way.budget;
    return json;
  }

  /// Those that share most of their document one after the other, the deepest first.
  std::vector<Case> all_cases() const {
    std::vector<std::uint32_t> depths = options_.depths;
    std::sort(depths.rbegin(), depths.rend());
    std::vector<Case> cases;
    for (const TaskKind kind : options_.tasks) {
      for (const std::uint32_t length : options_.lengths) {
        for (std::uint64_t seed = 0; seed < options_.seeds; ++seed) {
          for (const std::uint32_t depth : depths) {
            cases.push_back({.kind = kind, .length = length, .depth = depth, .seed = seed});
            if (!has_depth(kind)) break;
          }
        }
      }
    }
    return cases;
  }

  std::vector<Case> open_cases() const {
    std::vector<Case> cases = all_cases();
    std::erase_if(cases, [&](const Case& one) {
      return std::all_of(ways_.begin(), ways_.end(),
                         [&](const Way& way) { return log_.find(case_json(one, way)) != nullptr; });
    });
    return cases;
  }

  static std::string describe(const Case& one) {
    const std::string depth = has_depth(one.kind) ? fmt::format(" at {} %", one.depth) : "";
    return fmt::format("{} in {} tokens{}, seed {}", task_name(one.kind), one.length, depth, one.seed);
  }

  template <typename Show>
  Status run_case(const Case& one, const Show& show) {
    Task task;
    const auto prompt = make_prompt(one, task);
    if (!prompt) return std::unexpected(prompt.error());
    if (Status status = compute(*prompt, show); !status) return status;
    for (const Way& way : ways_) {
      const Json which = case_json(one, way);
      if (interrupted()) return {};
      if (log_.find(which) != nullptr) continue;
      const auto answer = answer_with(way, *prompt, task);
      if (!answer) return std::unexpected(answer.error());
      if (!answer->whole) return {};
      const Json result = {{"found", count_found(task, answer->text)},
                           {"expected", task.expected.size()},
                           {"prompt_tokens", prompt->size()},
                           {"answer", answer->text},
                           {"tokens", answer->tokens}};
      if (Status status = log_.add(which, result); !status) return status;
      show(1.0);
    }
    return {};
  }

  /// A prompt of at most the wanted length, as near to it as whole sentences allow.
  Result<std::vector<TokenId>> make_prompt(const Case& one, Task& task) const {
    const CountTokens count = [&](std::string_view text) {
      return static_cast<std::uint32_t>(model_.vocabulary().tokenize(text, false, false).size());
    };
    TaskRequest request{
        .kind = one.kind, .document_tokens = one.length, .depth_percent = one.depth, .seed = one.seed};
    constexpr int kTrials = 8;
    for (int trial = 0; trial < kTrials; ++trial) {
      task = make_task(request, count, sentences_);
      auto tokens = tokenize(task);
      if (!tokens || tokens->size() <= one.length) return tokens;
      // The document shrinks by whole sentences; a little more spares most of the trials.
      constexpr std::uint32_t kRoom = 12;
      const auto excess = static_cast<std::uint32_t>(tokens->size()) - one.length + kRoom;
      if (excess >= request.document_tokens) break;
      request.document_tokens -= excess;
    }
    return fail(ErrorCode::kInvalidArgument, "--lengths {}: too short for the task {}", one.length,
                task_name(one.kind));
  }

  Result<std::vector<TokenId>> tokenize(const Task& task) const {
    const Vocabulary& vocabulary = model_.vocabulary();
    std::string text = task.instruction + "\n\n" + task.document + "\n\n" + task.question;
    if (!chat_) return vocabulary.tokenize(text + "\n\n" + task.answer_start, true, false);
    const ChatMessage message{"user", text};
    const auto rendered = vocabulary.apply_chat_template(std::span(&message, 1), "");
    if (!rendered) {
      Error error = rendered.error();
      error.message += "; --raw does without";
      return std::unexpected(error);
    }
    return vocabulary.tokenize(*rendered, true, true);
  }

  /// Brings the sequence to all of the prompt but its last tokens.
  template <typename Show>
  Status compute(const std::vector<TokenId>& prompt, const Show& show) {
    const auto wanted = std::span(prompt).first(prompt.size() - kNewTokens);
    const auto differs =
        std::mismatch(wanted.begin(), wanted.end(), computed_.begin(), computed_.end()).first;
    const auto common = static_cast<std::uint32_t>(differs - wanted.begin());
    const std::uint32_t chunk = engine_->options().prefill_chunk;
    const std::uint32_t kept = common == wanted.size() ? common : common / chunk * chunk;
    if (Status status = engine_->set_selection(Policy::kFull, 1); !status) return status;
    if (Status status = sequence_->truncate(kept); !status) return status;
    computed_.assign(wanted.begin(), wanted.begin() + kept);
    if (kept == wanted.size()) return {};
    const auto logits = engine_->prefill(*sequence_, wanted.subspan(kept), [&](std::uint32_t done) {
      constexpr double kShareOfPrompt = 0.8;  // of the time that a case takes, roughly
      show(kShareOfPrompt * done / static_cast<double>(wanted.size() - kept));
      return !interrupted();
    });
    if (!logits) return std::unexpected(logits.error());
    if (*logits != nullptr) computed_.assign(wanted.begin(), wanted.end());
    return {};
  }

  Result<Answer> answer_with(const Way& way, const std::vector<TokenId>& prompt, const Task& task) {
    const auto policy = parse_policy(way.policy);
    if (!policy) return std::unexpected(policy.error());
    DraftOptions guesses;
    if (*policy != Policy::kFull) guesses = engine_->options().draft;
    if (*policy == Policy::kDual && options_.tiers.draft == "auto") guesses.kind = DraftKind::kSelf;
    if (Status status = engine_->set_selection(*policy, std::max(way.budget, 1U)); !status)
      return std::unexpected(status.error());
    const auto last = std::span(prompt).last(kNewTokens);
    if (Status status = sequence_->truncate(static_cast<std::uint32_t>(prompt.size() - kNewTokens)); !status)
      return std::unexpected(status.error());
    const auto logits = engine_->prefill(*sequence_, last);
    if (!logits) return std::unexpected(logits.error());

    Answer answer;
    bool ended = false;
    TokenId newest = 0;
    Draft draft(*engine_, guesses, follower_);
    const auto take = [&](TokenId token) {
      newest = token;
      draft.remember(token);
      ended = add_token(token, task, answer);
      return ended ? std::nullopt : std::optional(token);
    };
    for (const TokenId token : prompt) draft.remember(token);
    take(likeliest(std::span(*logits, model_.vocabulary().size())));
    if (!ended) {
      draft.begin(*sequence_, [](std::span<const float> row, std::uint32_t, DrawnAs) {
        return std::optional(likeliest(row));
      });
    }
    while (!ended) {
      const bool more = answer.tokens.size() + 1 < task.answer_tokens;
      const StepGroup group = draft.next(*sequence_, newest, more);
      const auto rows = engine_->step(std::span(&group, 1));
      if (!rows) return std::unexpected(rows.error());
      if (sequence_->error()) return std::unexpected(*sequence_->error());
      draft.take(*sequence_, *rows, [&](std::span<const float> row, std::uint32_t, DrawnAs drawn_as) {
        const TokenId token = likeliest(row);
        return drawn_as == DrawnAs::kGuess ? std::optional(token) : take(token);
      });
      answer.whole = !interrupted();
      if (!answer.whole) break;
    }
    return answer;
  }

  /// True when the answer ends with it.
  bool add_token(TokenId token, const Task& task, Answer& answer) const {
    answer.tokens.push_back(token);
    if (model_.vocabulary().is_end(token)) return true;
    const std::string piece = model_.vocabulary().piece(token);
    answer.text += piece;
    // A model that only continues text would go on with a text of its own.
    const bool line_ends = !chat_ && piece.find('\n') != std::string::npos &&
                           answer.text.find_first_not_of(" \n") != std::string::npos;
    return line_ends || answer.tokens.size() >= task.answer_tokens;
  }

  const EvalOptions& options_;
  const Model& model_;
  EngineOptions engine_options_;
  std::unique_ptr<Model> draft_model_;
  CaseLog& log_;
  bool chat_ = false;
  std::vector<Way> ways_;
  std::vector<std::string> sentences_;
  Json settings_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Sequence> sequence_;
  std::shared_ptr<Follower> follower_;  // null without a draft model; goes before the engine
  std::vector<TokenId> computed_;       // tokens that the sequence holds, of the prompt
};

// Task, length, depth (-1: all), number of the way.
using Key = std::tuple<TaskKind, std::uint32_t, std::int64_t, std::size_t>;
using Scores = std::map<Key, Score>;

std::size_t way_number(const std::vector<Way>& ways, const Way& way) {
  return static_cast<std::size_t>(
      std::find_if(ways.begin(), ways.end(),
                   [&](const Way& one) { return one.policy == way.policy && one.budget == way.budget; }) -
      ways.begin());
}

Scores add_up(const TaskEval& eval, bool by_depth) {
  Scores scores;
  eval.for_each_result([&](const Case& one, const Way& way, const Json& result, bool same) {
    const bool one_depth = by_depth && has_depth(one.kind);
    Score& score = scores[{one.kind, one.length, one_depth ? std::int64_t{one.depth} : -1,
                           way_number(eval.ways(), way)}];
    const auto found = result["found"].get<std::uint32_t>();
    const auto expected = result["expected"].get<std::uint32_t>();
    ++score.cases;
    score.right += found == expected ? 1 : 0;
    score.same += same ? 1 : 0;
    score.found += static_cast<double>(found) / expected;
  });
  return scores;
}

std::string haystack(const EvalOptions& options) {
  return options.file.empty() ? "made-up sentences" : options.file;
}

void add_json(const TaskEval& eval, const EvalOptions& options, Json& list) {
  for (const auto& [key, score] : add_up(eval, true)) {
    const auto& [kind, length, depth, way] = key;
    const Interval interval = wilson_interval(score.right, score.cases);
    list.push_back({{"model", options.model.model},
                    {"task", task_name(kind)},
                    {"length", length},
                    {"depth", depth < 0 ? Json(nullptr) : Json(depth)},
                    {"policy", eval.ways()[way].policy},
                    {"budget", eval.ways()[way].budget},
                    {"block_tokens", options.blocks.front()},
                    {"chat", eval.chat()},
                    {"text", haystack(options)},
                    {"cases", score.cases},
                    {"right", score.right},
                    {"accuracy", score.accuracy()},
                    {"accuracy_low", interval.low},
                    {"accuracy_high", interval.high},
                    {"found_share", score.found / score.cases},
                    {"same_as_full", score.same},
                    {"commit", DUALDECODER_COMMIT}});
  }
}

void add_markdown(const TaskEval& eval, const EvalOptions& options, std::string& text) {
  auto out = std::back_inserter(text);
  if (!text.empty()) text += "\n";
  fmt::format_to(out, "{}, {}, blocks of {}, {}, greedy, commit {}\n\n", options.model.model,
                 eval.chat() ? "chat template" : "text continued", options.blocks.front(), haystack(options),
                 DUALDECODER_COMMIT);
  text +=
      "| task | tokens | policy | budget | right | accuracy (95 % interval) | of what was expected | "
      "answers of full attention |\n|---|---|---|---|---|---|---|---|\n";
  for (const auto& [key, score] : add_up(eval, false)) {
    const auto& [kind, length, depth, number] = key;
    const Way& way = eval.ways()[number];
    const Interval interval = wilson_interval(score.right, score.cases);
    fmt::format_to(out,
                   "| {} | {} | `{}` | {} | {} of {} | {:.2f} ({:.2f} to {:.2f}) | {:.2f} | {} of {} |\n",
                   task_name(kind), length, way.policy, way.budget == 0 ? "" : fmt::to_string(way.budget),
                   score.right, score.cases, score.accuracy(), interval.low, interval.high,
                   score.found / score.cases, score.same, score.cases);
  }
}

Status check_tasks(const EvalOptions& options) {
  for (const std::string& policy : options.policies) {
    if (policy != "auto") continue;
    return fail(ErrorCode::kInvalidArgument,
                "--policy auto: it chooses by time, so answers could not be repeated; name a policy");
  }
  for (const auto& [name, values] :
       {std::pair("--block-size", options.blocks.size()), std::pair("--digest", options.digests.size()),
        std::pair("--digest-type", options.digest_types.size()),
        std::pair("--sink-tokens", options.sinks.size()),
        std::pair("--recent-tokens", options.recents.size())}) {
    if (values != 1) return fail(ErrorCode::kInvalidArgument, "{}: a list is only possible with --kl", name);
  }
  return {};
}

}  // namespace

Status eval_tasks(const EvalOptions& options, const Model& model, const EngineOptions& engine,
                  EvalReport& report) {
  if (Status status = check_tasks(options); !status) return status;
  auto log = CaseLog::open(options.results);
  if (!log) return std::unexpected(log.error());
  TaskEval eval(options, model, engine, *log);
  Status status = eval.run();
  add_json(eval, options, report.rows);
  add_markdown(eval, options, report.markdown);
  return status;
}

}  // namespace dualdecoder
