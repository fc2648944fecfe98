// What the tasks of `eval` are, whoever answers them: the cases, their prompts, and the tables of the
// answers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "eval.h"
#include "model/vocabulary.h"

namespace dualdecoder {

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

/// Those that share most of their document one after the other, the deepest first.
std::vector<Case> all_cases(const EvalOptions& options);
std::string describe(const Case& one);
/// Without its directory: results stay valid where the file is moved.
std::string model_file_name(const EvalOptions& options);
/// Adds what makes it this case to the settings that all have in common.
nlohmann::ordered_json case_json(nlohmann::ordered_json settings, const Case& one, const Way& way);

/// A case as a question: as a user's message or, for a model that only continues text, with the beginning of
/// the answer.
struct Prompt {
  Task task;
  std::string text;
  std::vector<TokenId> tokens;  // of the text, rendered by the chat template if it is a message
};

class PromptMaker {
 public:
  static Result<PromptMaker> create(const EvalOptions& options, const Vocabulary& vocabulary);
  bool chat() const { return chat_; }
  /// A prompt of at most the wanted length, as near to it as whole sentences allow.
  Result<Prompt> make(const Case& one) const;

 private:
  PromptMaker(const Vocabulary& vocabulary, bool chat) : vocabulary_(&vocabulary), chat_(chat) {}
  Result<std::vector<TokenId>> tokenize(const std::string& text) const;

  const Vocabulary* vocabulary_;
  bool chat_;
  std::vector<std::string> sentences_;
};

/// True when an answer that continues a text ends behind `piece`: such a model would go on with a text of its
/// own.
bool line_ends(const std::string& answer, std::string_view piece);

struct CaseResult {
  Case one;
  std::size_t way = 0;
  std::uint32_t found = 0;
  std::uint32_t expected = 0;
  std::optional<bool> same = {};  // the tokens of full attention; nothing where these are not known
};

/// What the tables say of all results together.
struct TaskSetting {
  std::vector<Way> ways;
  bool chat = false;
  std::string model;
  std::string server = {};         // its address; empty: in this process
  std::uint32_t block_tokens = 0;  // in this process
};

void add_task_tables(const EvalOptions& options, const TaskSetting& setting,
                     const std::vector<CaseResult>& results, EvalReport& report);

}  // namespace dualdecoder
