#include "tasks/task.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/random.h"
#include "tasks/made_up_text.h"
#include "tasks/words.h"

namespace dualdecoder {
namespace {

constexpr std::array<std::pair<TaskKind, const char*>, 6> kTaskNames = {
    {{TaskKind::kSingle, "single"},
     {TaskKind::kMultiKey, "multi-key"},
     {TaskKind::kMultiValue, "multi-value"},
     {TaskKind::kTracking, "tracking"},
     {TaskKind::kWords, "words"},
     {TaskKind::kCopy, "copy"}}};

constexpr std::uint32_t kOtherKeys = 3;
constexpr std::uint32_t kValues = 4;
constexpr std::uint32_t kVariables = 5;
constexpr std::uint32_t kCommonWords = 5;
constexpr std::uint32_t kCommonShare = 6;  // percent of the list that each common word takes

// What a task consists of has streams of random numbers of its own: a longer document asks for the same.
enum Stream : std::uint64_t { kFacts, kHay, kPlacesOfOthers };

/// A piece of the document that is to stand at `depth_percent`.
struct Fact {
  std::string text;
  std::uint32_t depth_percent = 0;
};

struct Piece {
  std::string text;
  std::uint32_t tokens = 0;
};

/// Hay as long as fits beside the facts, and the facts between it.
std::string hide(std::vector<Fact> facts, std::uint32_t tokens, std::string_view between,
                 const CountTokens& count, const std::function<std::string()>& next_piece) {
  const auto tokens_of = [&](const std::string& text) { return count(std::string(between) + text); };
  for (const Fact& fact : facts) tokens -= std::min(tokens, tokens_of(fact.text));
  std::vector<Piece> hay;
  std::uint32_t hay_tokens = 0;
  for (;;) {
    Piece piece{.text = next_piece()};
    piece.tokens = tokens_of(piece.text);
    if (hay_tokens + piece.tokens > tokens) break;
    hay_tokens += piece.tokens;
    hay.push_back(std::move(piece));
  }
  std::stable_sort(facts.begin(), facts.end(),
                   [](const Fact& a, const Fact& b) { return a.depth_percent < b.depth_percent; });
  std::string document;
  const auto add = [&](const std::string& text) {
    if (!document.empty()) document += between;
    document += text;
  };
  std::uint64_t before = 0;
  auto fact = facts.begin();
  const auto add_due_facts = [&] {
    for (; fact != facts.end() && before * 100 >= std::uint64_t{fact->depth_percent} * hay_tokens; ++fact)
      add(fact->text);
  };
  for (const Piece& piece : hay) {
    add_due_facts();
    add(piece.text);
    before += piece.tokens;
  }
  add_due_facts();
  return document;
}

std::string five_digits(Random& random) { return fmt::format("{}", 10000 + random.below(90000)); }

/// `count` values of make(random), all different.
template <typename Make>
std::vector<std::string> different(Random& random, std::uint32_t count, const Make& make) {
  std::vector<std::string> values;
  while (values.size() < count) {
    std::string value = make(random);
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(std::move(value));
  }
  return values;
}

std::function<std::string()> hay_of(const TaskRequest& request, const std::vector<std::string>& sentences) {
  Random random(request.seed, kHay);
  if (sentences.empty()) return [random]() mutable { return made_up_sentence(random); };
  return [next = random.below(static_cast<std::uint32_t>(sentences.size())), &sentences]() mutable {
    return sentences[next++ % sentences.size()];
  };
}

Task access_codes(const TaskRequest& request, const CountTokens& count,
                  const std::vector<std::string>& sentences) {
  Random random(request.seed, kFacts);
  Random places_of_others(request.seed, kPlacesOfOthers);
  const std::vector<std::string> things = different(random, 1 + kOtherKeys, made_up_thing);
  const std::vector<std::string> codes = different(random, std::max(1 + kOtherKeys, kValues), five_digits);
  const std::string& thing = things[0];
  Task task{.instruction =
                "Some access codes are hidden in the following text. Remember them; you will be "
                "asked about them afterwards.",
            .answer_tokens = 32};
  std::vector<Fact> facts;
  if (request.kind == TaskKind::kMultiValue) {
    task.question = fmt::format("What are the {} access codes of the {}?", kValues, thing);
    task.answer_start = fmt::format("The {} access codes of the {} are", kValues, thing);
    task.answer_tokens = 64;
    for (std::uint32_t i = 0; i < kValues; ++i) {
      facts.push_back({.text = fmt::format("One of the access codes of the {} is {}.", thing, codes[i]),
                       .depth_percent = places_of_others.below(100)});
      task.expected.push_back(codes[i]);
    }
  } else {
    task.question = fmt::format("What is the access code of the {}?", thing);
    task.answer_start = fmt::format("The access code of the {} is", thing);
    task.expected = {codes[0]};
    const std::uint32_t keys = request.kind == TaskKind::kMultiKey ? 1 + kOtherKeys : 1;
    for (std::uint32_t i = 0; i < keys; ++i) {
      facts.push_back({.text = fmt::format("The access code of the {} is {}.", things[i], codes[i]),
                       .depth_percent = i == 0 ? request.depth_percent : places_of_others.below(100)});
    }
  }
  task.document = hide(std::move(facts), request.document_tokens, " ", count, hay_of(request, sentences));
  return task;
}

Task tracking(const TaskRequest& request, const CountTokens& count,
              const std::vector<std::string>& sentences) {
  Random random(request.seed, kFacts);
  const auto variable = [](Random& from) {
    std::string name;
    for (int i = 0; i < 5; ++i) name += static_cast<char>('A' + from.below(26));
    return name;
  };
  Task task{.instruction = "Track the assignments of variables that are hidden in the following text.",
            .expected = different(random, kVariables, variable),
            .answer_tokens = 64};
  const std::string value = five_digits(random);
  std::vector<std::uint32_t> depths;
  for (std::uint32_t i = 0; i < kVariables; ++i) depths.push_back(random.below(100));
  std::sort(depths.begin(), depths.end());
  std::vector<Fact> facts;
  for (std::uint32_t i = 0; i < kVariables; ++i) {
    const std::string from = i == 0 ? value : fmt::format("VAR {}", task.expected[i - 1]);
    facts.push_back(
        {.text = fmt::format("VAR {} = {}.", task.expected[i], from), .depth_percent = depths[i]});
  }
  task.question = fmt::format("Find all variables that are assigned the value {} in the text above.", value);
  task.answer_start = fmt::format(
      "By the assignments in the text above, {} variables have the value {}. They are", kVariables, value);
  task.document = hide(std::move(facts), request.document_tokens, " ", count, hay_of(request, sentences));
  return task;
}

Task common_words(const TaskRequest& request, const CountTokens& count) {
  Random random(request.seed, kFacts);
  std::vector<std::string> words;
  for (const std::string_view noun : nouns()) words.emplace_back(noun);
  random.shuffle(words);
  Task task{.instruction =
                "Below is a numbered list of words. Some of them appear much more often than the "
                "others. Remember those.",
            .question = fmt::format("What are the {} most common words in the list above?", kCommonWords),
            .answer_start = fmt::format("The {} most common words in the list are:", kCommonWords),
            .expected = {words.begin(), words.begin() + kCommonWords},
            .answer_tokens = 48};
  // How many fit: an entry in the middle of the list stands for all.
  const std::string entry = fmt::format("500. {} ", words.front());
  const std::uint32_t entries =
      std::max(kCommonWords * 4, request.document_tokens / count(entry + entry) * 2);
  std::vector<std::string> list;
  for (const std::string& word : task.expected)
    list.insert(list.end(), std::max(2U, entries * kCommonShare / 100), word);
  for (std::size_t i = kCommonWords; list.size() < entries; ++i)
    list.push_back(words[kCommonWords + i % (words.size() - kCommonWords)]);
  Random(request.seed, kHay).shuffle(list);
  for (std::size_t i = 0; i < list.size(); ++i)
    task.document += fmt::format("{}{}. {}", i == 0 ? "" : " ", i + 1, list[i]);
  return task;
}

Task copying(const TaskRequest& request, const CountTokens& count) {
  Random random(request.seed, kFacts);
  const std::string order = five_digits(random);
  const std::vector<std::string> fields = {
      fmt::format(R"("customer": "{} {}")", random.pick(names()), random.pick(names())),
      fmt::format(R"("item": "{}")", made_up_thing(random)),
      fmt::format(R"("count": {})", 2 + random.below(97)),
      fmt::format(R"("price": {}.{:02})", 10 + random.below(990), random.below(100)),
      fmt::format(R"("city": "{}")", random.pick(places())),
  };
  const std::string start = fmt::format(R"({{"order": {},)", order);
  Task task{.instruction = "Below is a log. One of its lines is a record in JSON.",
            .question = fmt::format("Copy the JSON record of order {} from the log above, exactly.", order),
            .answer_start = start,
            .expected = fields,
            .answer_tokens = 96};
  const Fact record{.text = fmt::format("{} {}}}", start, fmt::join(fields, ", ")),
                    .depth_percent = request.depth_percent};
  Random lines(request.seed, kHay);
  std::uint32_t second = lines.below(8 * 3600);
  task.document = hide({record}, request.document_tokens, "\n", count, [&] {
    second += 1 + lines.below(9);
    return made_up_log_line(lines, second);
  });
  return task;
}

bool is_word_byte(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

bool contains_word(const std::string& text, const std::string& word) {
  for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const std::size_t end = at + word.size();
    const bool begins = at == 0 || !is_word_byte(text[at - 1]) || !is_word_byte(word.front());
    const bool ends = end == text.size() || !is_word_byte(text[end]) || !is_word_byte(word.back());
    if (begins && ends) return true;
  }
  return false;
}

}  // namespace

const char* task_name(TaskKind kind) {
  for (const auto& [known, name] : kTaskNames) {
    if (known == kind) return name;
  }
  return "";
}

Result<TaskKind> parse_task(const std::string& name) {
  std::vector<std::string_view> all;
  for (const auto& [kind, known] : kTaskNames) {
    if (name == known) return kind;
    all.emplace_back(known);
  }
  return fail(ErrorCode::kInvalidArgument, "no task is called '{}'; there are {}", name,
              fmt::join(all, ", "));
}

bool has_depth(TaskKind kind) {
  return kind == TaskKind::kSingle || kind == TaskKind::kMultiKey || kind == TaskKind::kCopy;
}

Task make_task(const TaskRequest& request, const CountTokens& count,
               const std::vector<std::string>& sentences) {
  switch (request.kind) {
    case TaskKind::kSingle:
    case TaskKind::kMultiKey:
    case TaskKind::kMultiValue:
      return access_codes(request, count, sentences);
    case TaskKind::kTracking:
      return tracking(request, count, sentences);
    case TaskKind::kWords:
      return common_words(request, count);
    case TaskKind::kCopy:
      return copying(request, count);
  }
  return {};
}

std::uint32_t count_found(const Task& task, std::string_view answer) {
  const std::string text = lower(answer);
  return static_cast<std::uint32_t>(
      std::count_if(task.expected.begin(), task.expected.end(),
                    [&](const std::string& expected) { return contains_word(text, lower(expected)); }));
}

std::vector<std::string> split_sentences(std::string_view text) {
  std::vector<std::string> sentences;
  std::string sentence;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool space = std::isspace(static_cast<unsigned char>(text[i])) != 0;
    if (space && (sentence.empty() || sentence.back() == ' ')) continue;
    sentence += space ? ' ' : text[i];
    const bool full_stop =
        sentence.size() > 1 && sentence.back() == ' ' && sentence[sentence.size() - 2] == '.';
    if (!full_stop && i + 1 < text.size()) continue;
    if (sentence.back() == ' ') sentence.pop_back();
    if (!sentence.empty()) sentences.push_back(std::exchange(sentence, {}));
  }
  return sentences;
}

}  // namespace dualdecoder
