#include "eval_cases.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <tuple>

#include "base/file.h"
#include "base/statistics.h"
#include "commit.h"

namespace dualdecoder {
namespace {

using Json = nlohmann::ordered_json;

/// Over cases that differ in their seed, and perhaps in their depth.
struct Score {
  std::uint32_t cases = 0;
  std::uint32_t right = 0;     // all that was expected is there
  std::uint32_t compared = 0;  // with full attention
  std::uint32_t same = 0;      // of these: its tokens
  double found = 0.0;          // sum of shares of what was expected

  double accuracy() const { return static_cast<double>(right) / cases; }
};

// Task, length, depth (-1: all), number of the way.
using Key = std::tuple<TaskKind, std::uint32_t, std::int64_t, std::size_t>;
using Scores = std::map<Key, Score>;

Scores add_up(const std::vector<CaseResult>& results, bool by_depth) {
  Scores scores;
  for (const CaseResult& result : results) {
    const Case& one = result.one;
    const bool one_depth = by_depth && has_depth(one.kind);
    Score& score = scores[{one.kind, one.length, one_depth ? std::int64_t{one.depth} : -1, result.way}];
    ++score.cases;
    score.right += result.found == result.expected ? 1 : 0;
    score.compared += result.same.has_value() ? 1 : 0;
    score.same += result.same.value_or(false) ? 1 : 0;
    score.found += static_cast<double>(result.found) / result.expected;
  }
  return scores;
}

std::string haystack(const EvalOptions& options) {
  return options.file.empty() ? "made-up sentences" : options.file;
}

void add_json(const EvalOptions& options, const TaskSetting& setting, const std::vector<CaseResult>& results,
              Json& list) {
  for (const auto& [key, score] : add_up(results, true)) {
    const auto& [kind, length, depth, way] = key;
    const Interval interval = wilson_interval(score.right, score.cases);
    Json row = {{"model", setting.model},
                {"task", task_name(kind)},
                {"length", length},
                {"depth", depth < 0 ? Json(nullptr) : Json(depth)},
                {"policy", setting.ways[way].policy},
                {"budget", setting.ways[way].budget}};
    if (setting.server.empty()) {
      row["block_tokens"] = setting.block_tokens;
    } else {
      row["server"] = setting.server;
    }
    row["chat"] = setting.chat;
    row["text"] = haystack(options);
    row["cases"] = score.cases;
    row["right"] = score.right;
    row["accuracy"] = score.accuracy();
    row["accuracy_low"] = interval.low;
    row["accuracy_high"] = interval.high;
    row["found_share"] = score.found / score.cases;
    if (score.compared > 0) row["same_as_full"] = score.same;
    row["commit"] = DUALDECODER_COMMIT;
    list.push_back(std::move(row));
  }
}

void add_markdown(const EvalOptions& options, const TaskSetting& setting,
                  const std::vector<CaseResult>& results, std::string& text) {
  auto out = std::back_inserter(text);
  if (!text.empty()) text += "\n";
  const std::string where = setting.server.empty() ? fmt::format("blocks of {}", setting.block_tokens)
                                                   : "answered by " + setting.server;
  fmt::format_to(out, "{}, {}, {}, {}, greedy, commit {}\n\n", setting.model,
                 setting.chat ? "chat template" : "text continued", where, haystack(options),
                 DUALDECODER_COMMIT);
  text +=
      "| task | tokens | policy | budget | right | accuracy (95 % interval) | of what was expected | "
      "answers of full attention |\n|---|---|---|---|---|---|---|---|\n";
  for (const auto& [key, score] : add_up(results, false)) {
    const auto& [kind, length, depth, number] = key;
    const Way& way = setting.ways[number];
    const Interval interval = wilson_interval(score.right, score.cases);
    fmt::format_to(out, "| {} | {} | `{}` | {} | {} of {} | {:.2f} ({:.2f} to {:.2f}) | {:.2f} | {} |\n",
                   task_name(kind), length, way.policy, way.budget == 0 ? "" : fmt::to_string(way.budget),
                   score.right, score.cases, score.accuracy(), interval.low, interval.high,
                   score.found / score.cases,
                   score.compared == 0 ? "" : fmt::format("{} of {}", score.same, score.compared));
  }
}

}  // namespace

std::vector<Case> all_cases(const EvalOptions& options) {
  std::vector<std::uint32_t> depths = options.depths;
  std::sort(depths.rbegin(), depths.rend());
  std::vector<Case> cases;
  for (const TaskKind kind : options.tasks) {
    for (const std::uint32_t length : options.lengths) {
      for (std::uint64_t seed = 0; seed < options.seeds; ++seed) {
        for (const std::uint32_t depth : depths) {
          cases.push_back({.kind = kind, .length = length, .depth = depth, .seed = seed});
          if (!has_depth(kind)) break;
        }
      }
    }
  }
  return cases;
}

std::string describe(const Case& one) {
  const std::string depth = has_depth(one.kind) ? fmt::format(" at {} %", one.depth) : "";
  return fmt::format("{} in {} tokens{}, seed {}", task_name(one.kind), one.length, depth, one.seed);
}

std::string model_file_name(const EvalOptions& options) {
  return std::filesystem::path(options.model.model).filename();
}

Json case_json(Json settings, const Case& one, const Way& way) {
  settings["task"] = task_name(one.kind);
  settings["length"] = one.length;
  settings["depth"] = has_depth(one.kind) ? Json(one.depth) : Json(nullptr);
  settings["seed"] = one.seed;
  settings["policy"] = way.policy;
  settings["budget"] = way.budget;
  return settings;
}

Result<PromptMaker> PromptMaker::create(const EvalOptions& options, const Vocabulary& vocabulary) {
  PromptMaker maker(vocabulary, !options.raw && vocabulary.has_chat_template());
  if (options.file.empty()) return maker;
  const auto text = read_text_file(options.file);
  if (!text) return std::unexpected(text.error());
  maker.sentences_ = split_sentences(*text);
  if (maker.sentences_.empty()) return fail(ErrorCode::kInvalidArgument, "{} is empty", options.file);
  return maker;
}

Result<Prompt> PromptMaker::make(const Case& one) const {
  const CountTokens count = [&](std::string_view text) {
    return static_cast<std::uint32_t>(vocabulary_->tokenize(text, false, false).size());
  };
  TaskRequest request{
      .kind = one.kind, .document_tokens = one.length, .depth_percent = one.depth, .seed = one.seed};
  constexpr int kTrials = 8;
  for (int trial = 0; trial < kTrials; ++trial) {
    Prompt prompt{.task = make_task(request, count, sentences_), .text = {}, .tokens = {}};
    const Task& task = prompt.task;
    prompt.text = task.instruction + "\n\n" + task.document + "\n\n" + task.question;
    if (!chat_) prompt.text += "\n\n" + task.answer_start;
    auto tokens = tokenize(prompt.text);
    if (!tokens) return std::unexpected(tokens.error());
    prompt.tokens = std::move(*tokens);
    if (prompt.tokens.size() <= one.length) return prompt;
    // The document shrinks by whole sentences; a little more spares most of the trials.
    constexpr std::uint32_t kRoom = 12;
    const auto excess = static_cast<std::uint32_t>(prompt.tokens.size()) - one.length + kRoom;
    if (excess >= request.document_tokens) break;
    request.document_tokens -= excess;
  }
  return fail(ErrorCode::kInvalidArgument, "--lengths {}: too short for the task {}", one.length,
              task_name(one.kind));
}

Result<std::vector<TokenId>> PromptMaker::tokenize(const std::string& text) const {
  if (!chat_) return vocabulary_->tokenize(text, true, false);
  const ChatMessage message{"user", text};
  const auto rendered = vocabulary_->apply_chat_template(std::span(&message, 1), "");
  if (!rendered) {
    Error error = rendered.error();
    error.message += "; --raw does without";
    return std::unexpected(error);
  }
  return vocabulary_->tokenize(*rendered, true, true);
}

bool line_ends(const std::string& answer, std::string_view piece) {
  return piece.find('\n') != std::string_view::npos && answer.find_first_not_of(" \n") != std::string::npos;
}

void add_task_tables(const EvalOptions& options, const TaskSetting& setting,
                     const std::vector<CaseResult>& results, EvalReport& report) {
  add_json(options, setting, results, report.rows);
  add_markdown(options, setting, results, report.markdown);
}

}  // namespace dualdecoder
