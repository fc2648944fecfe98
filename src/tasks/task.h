// Questions with one right answer, hidden in long documents: the families of RULER (Hsieh et al. 2024,
// arXiv:2404.06654) and the extraction of a record from a log. All text is made up from a seed, so the same
// request gives the same task everywhere. The prompts are our own: figures compare with each other, not with
// RULER's published ones.
//
//   single       one access code among sentences; which is it?
//   multi-key    the same among three other things' codes
//   multi-value  four codes of one thing; which are they?
//   tracking     a variable is copied four times; which variables hold the value?
//   words        a numbered list of words, five of them common; which are they?
//   copy         a JSON record among the lines of a log; copy it
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace dualdecoder {

enum class TaskKind { kSingle, kMultiKey, kMultiValue, kTracking, kWords, kCopy };
const char* task_name(TaskKind kind);
/// kInvalidArgument lists the names.
Result<TaskKind> parse_task(const std::string& name);
/// Whether what is asked for stands in one place that can be chosen. In the other tasks it is spread over the
/// whole document.
bool has_depth(TaskKind kind);

struct TaskRequest {
  TaskKind kind = TaskKind::kSingle;
  std::uint32_t document_tokens = 0;  // at most
  std::uint32_t depth_percent = 50;   // of the document that stands before what is asked for
  std::uint64_t seed = 0;
};

struct Task {
  std::string instruction = {};  // stands before the document
  std::string document = {};
  std::string question = {};               // stands behind it
  std::string answer_start = {};           // how a model that only continues text is made to answer
  std::vector<std::string> expected = {};  // what a right answer contains
  std::uint32_t answer_tokens = 0;         // room for it
};

using CountTokens = std::function<std::uint32_t(std::string_view)>;
/// Two requests that differ in their depth alone have the same document up to the smaller one of the two.
/// `sentences` to hide it in; made up when there are none. They are repeated as needed.
Task make_task(const TaskRequest& request, const CountTokens& count,
               const std::vector<std::string>& sentences = {});

/// How many of the expected texts stand in the answer as whole words, in whatever case.
std::uint32_t count_found(const Task& task, std::string_view answer);

/// A text cut behind its full stops, line ends taken as spaces.
std::vector<std::string> split_sentences(std::string_view text);

}  // namespace dualdecoder
