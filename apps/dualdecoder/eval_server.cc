// `dualdecoder eval --url`: the tasks of eval_tasks.cc, answered greedily by any server that speaks the
// OpenAI API. The documents are the same, counted in the tokens of the model file's vocabulary, so answers
// compare with those of this process. A chat goes to /v1/chat/completions and is rendered by the server's
// template.
#include <algorithm>

#include "case_log.h"
#include "commit.h"
#include "eval.h"
#include "eval_cases.h"
#include "peer/openai_client.h"
#include "progress.h"

namespace dualdecoder {
namespace {

using Json = nlohmann::ordered_json;

class ServerEval {
 public:
  ServerEval(const EvalOptions& options, OpenAiServer server, PromptMaker prompts, CaseLog& log)
      : options_(options), server_(std::move(server)), prompts_(std::move(prompts)), log_(log) {
    settings_ = {{"server", server_.url.text()},      {"served_model", server_.model},
                 {"model", model_file_name(options)}, {"commit", DUALDECODER_COMMIT},
                 {"chat", prompts_.chat()},           {"text", options.file}};
  }

  Status run() {
    const std::vector<Case> all = all_cases(options_);
    std::vector<Case> open = all;
    std::erase_if(open, [&](const Case& one) { return find(one) != nullptr; });
    double total = 0.0;
    for (const Case& one : open) total += one.length;
    ProgressLine line(fmt::format("{} of {} cases", open.size(), all.size()));
    double done = 0.0;
    for (const Case& one : open) {
      if (Status status = run_case(one); !status) return status;
      if (interrupted()) return {};
      done += one.length;
      line.update(done / total, describe(one));
    }
    return {};
  }

  TaskSetting setting() const {
    TaskSetting setting;
    setting.ways = {kWay};
    setting.chat = prompts_.chat();
    setting.model = server_.model;
    setting.server = server_.url.text();
    return setting;
  }

  std::vector<CaseResult> results() const {
    std::vector<CaseResult> found;
    for (const Case& one : all_cases(options_)) {
      const Json* result = find(one);
      if (result == nullptr) continue;
      found.push_back({.one = one,
                       .found = (*result)["found"].get<std::uint32_t>(),
                       .expected = (*result)["expected"].get<std::uint32_t>()});
    }
    return found;
  }

 private:
  inline static const Way kWay = {.policy = "server"};

  const Json* find(const Case& one) const { return log_.find(case_json(settings_, one, kWay)); }

  Status run_case(const Case& one) {
    const auto prompt = prompts_.make(one);
    if (!prompt) return std::unexpected(prompt.error());
    const Task& task = prompt->task;
    const bool continued = !prompts_.chat();
    const OpenAiRequest request{
        .text = prompt->text, .chat = prompts_.chat(), .max_tokens = task.answer_tokens};
    const auto wants_more = [&](std::size_t, const OpenAiAnswer& answer) {
      return !continued || !line_ends(answer.text, answer.text);
    };
    OpenAiAnswer answer =
        ask_openai(server_, std::span(&request, 1), wants_more, [] { return !interrupted(); }).front();
    if (interrupted()) return {};
    if (answer.error) return std::unexpected(*answer.error);
    if (continued) {
      const std::size_t text = answer.text.find_first_not_of(" \n");
      const std::size_t end = text == std::string::npos ? text : answer.text.find('\n', text);
      if (end != std::string::npos) answer.text.resize(end + 1);
    }
    return log_.add(case_json(settings_, one, kWay), {{"found", count_found(task, answer.text)},
                                                      {"expected", task.expected.size()},
                                                      {"prompt_tokens", prompt->tokens.size()},
                                                      {"answer", answer.text}});
  }

  const EvalOptions& options_;
  OpenAiServer server_;
  PromptMaker prompts_;
  CaseLog& log_;
  Json settings_;
};

}  // namespace

Status eval_server(const EvalOptions& options, EvalReport& report) {
  const auto vocabulary = load_vocabulary(options.model.model);
  if (!vocabulary) return std::unexpected(vocabulary.error());
  auto prompts = PromptMaker::create(options, **vocabulary);
  if (!prompts) return std::unexpected(prompts.error());
  auto server = find_openai_server(options.server.url, options.server.api_key, options.server.model,
                                   [] { return !interrupted(); });
  if (interrupted()) return {};
  if (!server) return std::unexpected(server.error());
  auto log = CaseLog::open(options.results);
  if (!log) return std::unexpected(log.error());
  ServerEval eval(options, std::move(*server), std::move(*prompts), *log);
  Status status = eval.run();
  add_task_tables(options, eval.setting(), eval.results(), report);
  return status;
}

}  // namespace dualdecoder
