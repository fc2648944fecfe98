// `dualdecoder eval --needle` and `--copy`: do answers stay right when a token attends to a selection? Each
// case is a question about a made-up document (tasks/task.h), answered greedily with full attention and with
// every policy, over the same KV: the document is computed once.
//
// Every answer starts anew from the prompt's last two tokens, computed as a prompt is (exactly, and ranking
// for the token that follows under the policy at hand). Documents that begin alike share what they have in
// common, in whole chunks, so the bits are those of a document that was computed alone, and a case has the
// same answer whatever was run before it.
#include <algorithm>
#include <memory>
#include <optional>

#include "case_log.h"
#include "commit.h"
#include "decode/draft.h"
#include "decode/sampler.h"
#include "eval.h"
#include "eval_cases.h"
#include "progress.h"

namespace dualdecoder {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint32_t kAnswerTokensMax = 128;
constexpr std::uint32_t kNewTokens = 2;  // of a prompt, computed for each answer

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
  }

  Status run() {
    if (Status status = prepare(); !status) return status;
    const std::vector<Case> cases = open_cases();
    double total = 0.0;
    for (const Case& one : cases) total += one.length;
    ProgressLine line(fmt::format("{} of {} cases", cases.size(), all_cases(options_).size()));
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
  std::vector<CaseResult> results() const {
    std::vector<CaseResult> found;
    for (const Case& one : all_cases(options_)) {
      const Json* full = log_.find(case_json(settings_, one, ways_.front()));
      if (full == nullptr) continue;
      for (std::size_t way = 0; way < ways_.size(); ++way) {
        const Json* result = log_.find(case_json(settings_, one, ways_[way]));
        if (result == nullptr) continue;
        found.push_back({.one = one,
                         .way = way,
                         .found = (*result)["found"].get<std::uint32_t>(),
                         .expected = (*result)["expected"].get<std::uint32_t>(),
                         .same = (*result)["tokens"] == (*full)["tokens"]});
      }
    }
    return found;
  }

  bool chat() const { return prompts_ && prompts_->chat(); }
  const std::vector<Way>& ways() const { return ways_; }

 private:
  Status prepare() {
    auto prompts = PromptMaker::create(options_, model_.vocabulary());
    if (!prompts) return std::unexpected(prompts.error());
    prompts_ = std::move(*prompts);
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
    return {{"model", model_file_name(options_)},
            {"weights", fmt::format("{:016x}", model_.weights_hash())},
            {"commit", DUALDECODER_COMMIT},
            {"chat", chat()},
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

  std::vector<Case> open_cases() const {
    std::vector<Case> cases = all_cases(options_);
    std::erase_if(cases, [&](const Case& one) {
      return std::all_of(ways_.begin(), ways_.end(), [&](const Way& way) {
        return log_.find(case_json(settings_, one, way)) != nullptr;
      });
    });
    return cases;
  }

  template <typename Show>
  Status run_case(const Case& one, const Show& show) {
    const auto prompt = prompts_->make(one);
    if (!prompt) return std::unexpected(prompt.error());
    if (Status status = compute(prompt->tokens, show); !status) return status;
    for (const Way& way : ways_) {
      const Json which = case_json(settings_, one, way);
      if (interrupted()) return {};
      if (log_.find(which) != nullptr) continue;
      const auto answer = answer_with(way, prompt->tokens, prompt->task);
      if (!answer) return std::unexpected(answer.error());
      if (!answer->whole) return {};
      const Json result = {{"found", count_found(prompt->task, answer->text)},
                           {"expected", prompt->task.expected.size()},
                           {"prompt_tokens", prompt->tokens.size()},
                           {"answer", answer->text},
                           {"tokens", answer->tokens}};
      if (Status status = log_.add(which, result); !status) return status;
      show(1.0);
    }
    return {};
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
    return (!chat() && line_ends(answer.text, piece)) || answer.tokens.size() >= task.answer_tokens;
  }

  const EvalOptions& options_;
  const Model& model_;
  EngineOptions engine_options_;
  std::unique_ptr<Model> draft_model_;
  CaseLog& log_;
  std::vector<Way> ways_;
  std::optional<PromptMaker> prompts_;
  Json settings_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Sequence> sequence_;
  std::shared_ptr<Follower> follower_;  // null without a draft model; goes before the engine
  std::vector<TokenId> computed_;       // tokens that the sequence holds, of the prompt
};

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
  const TaskSetting setting{.ways = eval.ways(),
                            .chat = eval.chat(),
                            .model = options.model.model,
                            .block_tokens = options.blocks.front()};
  add_task_tables(options, setting, eval.results(), report);
  return status;
}

}  // namespace dualdecoder
