#include "tasks/task.h"

#include <algorithm>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/random.h"
#include "tasks/made_up_text.h"
#include "tasks/words.h"

namespace dualdecoder {
namespace {

using testing::ElementsAre;

constexpr TaskKind kKinds[] = {TaskKind::kSingle,   TaskKind::kMultiKey, TaskKind::kMultiValue,
                               TaskKind::kTracking, TaskKind::kWords,    TaskKind::kCopy};

// Words and punctuation, roughly as a tokenizer sees them.
std::uint32_t count_words(std::string_view text) {
  return 1 + static_cast<std::uint32_t>(std::count(text.begin(), text.end(), ' ')) +
         static_cast<std::uint32_t>(std::count(text.begin(), text.end(), '.'));
}

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Random, GivesTheNumbersThatItGaveBefore) {
  // Others would change every task, and every figure that was measured with one.
  EXPECT_EQ(Random(42).next(), 0xf4abd143feb24055U);
  EXPECT_EQ(Random(42, 1).next(), 0x88a7f46294b214c9U);
  std::vector<int> list = {1, 2, 3, 4, 5};
  Random(7).shuffle(list);
  std::vector<int> sorted = list;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_THAT(sorted, ElementsAre(1, 2, 3, 4, 5));
}

TEST(Random, BelowReachesEveryValueAndNoOther) {
  Random random(3);
  std::set<std::uint32_t> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(random.below(7));
  EXPECT_EQ(seen.size(), 7U);
  EXPECT_EQ(*seen.rbegin(), 6U);
}

TEST(Words, StandInTheirListOnlyOnce) {
  for (const auto list : {nouns(), adjectives(), names(), places()}) {
    for (const std::string_view word : list) EXPECT_EQ(std::count(list.begin(), list.end(), word), 1) << word;
  }
}

TEST(MadeUpText, ContainsNoDigitsAndNoBlanks) {
  const std::string text = made_up_text(5, 100'000);
  EXPECT_GE(text.size(), 100'000U);
  EXPECT_EQ(text.find_first_of("0123456789$"), std::string::npos);
  EXPECT_EQ(text.find(" a old"), std::string::npos);
  EXPECT_NE(text.find(" an old"), std::string::npos);
}

TEST(Task, IsTheSameForTheSameSeedAndAnotherForAnother) {
  for (const TaskKind kind : kKinds) {
    const TaskRequest request{.kind = kind, .document_tokens = 800, .depth_percent = 40, .seed = 1};
    TaskRequest other = request;
    other.seed = 2;
    const Task task = make_task(request, count_words);
    EXPECT_EQ(task.document, make_task(request, count_words).document) << task_name(kind);
    EXPECT_NE(task.document, make_task(other, count_words).document) << task_name(kind);
    EXPECT_NE(task.expected, make_task(other, count_words).expected) << task_name(kind);
  }
}

TEST(Task, HasItsAnswerInTheDocumentAndNotInTheQuestion) {
  for (const TaskKind kind : kKinds) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const Task task = make_task({.kind = kind, .document_tokens = 800, .seed = seed}, count_words);
      EXPECT_EQ(count_found(task, task.document), task.expected.size()) << task_name(kind) << " " << seed;
      EXPECT_EQ(count_found(task, task.instruction + task.question + task.answer_start), 0U)
          << task_name(kind) << " " << seed;
    }
  }
}

TEST(Task, FillsTheLengthAndDoesNotExceedIt) {
  for (const TaskKind kind : kKinds) {
    for (const std::uint32_t tokens : {300U, 1000U, 5000U}) {
      const Task task = make_task({.kind = kind, .document_tokens = tokens, .seed = 9}, count_words);
      EXPECT_GT(count_words(task.document), tokens * 8 / 10) << task_name(kind);
      // Counted piece by piece, so that a document can be a little longer than its pieces.
      EXPECT_LE(count_words(task.document), tokens * 11 / 10) << task_name(kind);
    }
  }
}

TEST(Task, PutsTheFactAtItsDepth) {
  for (const TaskKind kind : {TaskKind::kSingle, TaskKind::kMultiKey, TaskKind::kCopy}) {
    ASSERT_TRUE(has_depth(kind));
    for (const std::uint32_t depth : {0U, 10U, 50U, 90U, 100U}) {
      const Task task =
          make_task({.kind = kind, .document_tokens = 4000, .depth_percent = depth, .seed = 4}, count_words);
      ASSERT_EQ(occurrences(task.document, task.expected[0]), 1U);
      const auto at = static_cast<double>(task.document.find(task.expected[0]));
      EXPECT_NEAR(at / static_cast<double>(task.document.size()), depth / 100.0, 0.03) << task_name(kind);
    }
  }
}

TEST(Task, OfTwoDepthsShareTheirDocumentUpToTheFirst) {
  TaskRequest request{.kind = TaskKind::kSingle, .document_tokens = 2000, .depth_percent = 80, .seed = 6};
  const Task deep = make_task(request, count_words);
  request.depth_percent = 30;
  const Task shallow = make_task(request, count_words);
  const std::size_t fact = shallow.document.find("The access code");
  ASSERT_NE(fact, std::string::npos);
  EXPECT_EQ(shallow.document.substr(0, fact), deep.document.substr(0, fact));
}

TEST(Task, WordsThatAreCommonAppearMoreOftenThanAnyOther) {
  for (const std::uint32_t tokens : {500U, 6000U}) {
    const Task task =
        make_task({.kind = TaskKind::kWords, .document_tokens = tokens, .seed = 3}, count_words);
    std::size_t least = task.document.size();
    for (const std::string& word : task.expected)
      least = std::min(least, occurrences(task.document + " ", ". " + word + " "));
    for (const std::string_view noun : nouns()) {
      if (std::find(task.expected.begin(), task.expected.end(), noun) != task.expected.end()) continue;
      const std::string entry = ". " + std::string(noun) + " ";
      EXPECT_LT(occurrences(task.document + " ", entry) * 2, least) << noun;
    }
  }
}

TEST(Task, HidesItInTheSentencesThatAreGiven) {
  const std::vector<std::string> sentences = split_sentences("It rained.  It\npoured. Then it did not");
  EXPECT_THAT(sentences, ElementsAre("It rained.", "It poured.", "Then it did not"));
  const Task task =
      make_task({.kind = TaskKind::kSingle, .document_tokens = 60, .seed = 1}, count_words, sentences);
  EXPECT_GT(occurrences(task.document, "It poured."), 3U);
  EXPECT_THAT(task.document, testing::HasSubstr("The access code of the"));
}

TEST(Task, FindsWholeWordsInWhateverCase) {
  const Task task{.expected = {"48213", "Lantern"}};
  EXPECT_EQ(count_found(task, "the LANTERN: 48213."), 2U);
  EXPECT_EQ(count_found(task, "lanterns 148213, 482130"), 0U);
  EXPECT_EQ(count_found(task, ""), 0U);
}

TEST(Task, NamesAreParsedAndOthersListed) {
  for (const TaskKind kind : kKinds) EXPECT_EQ(*parse_task(task_name(kind)), kind);
  const auto unknown = parse_task("haystack");
  ASSERT_FALSE(unknown);
  EXPECT_THAT(unknown.error().message, testing::HasSubstr("multi-key"));
}

}  // namespace
}  // namespace dualdecoder
