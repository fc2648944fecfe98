#include "tasks/made_up_text.h"

#include <array>
#include <string_view>

#include <fmt/format.h>

#include "tasks/words.h"

namespace dualdecoder {
namespace {

using namespace std::string_view_literals;

// $N name, $A adjective, $O noun, $P place, $S season or month, $T time of day; each is chosen anew.
constexpr std::array kPatterns = {
    "The $A $O near the $P was repaired in $S."sv,
    "$N carried the $O to the $P before $T."sv,
    "Nobody at the $P could say who had left the $A $O behind."sv,
    "In $S the people of the $P built a $A $O out of an old $O."sv,
    "$N and $N met at the $P every week to talk about the $O."sv,
    "At $T the $A $O was still standing beside the $O."sv,
    "It is said that the $O of the $P once belonged to $N."sv,
    "When the rain stopped, $N put the $O under the $A $O."sv,
    "The $P is known for its $A $O, which visitors like to see in $S."sv,
    "$N wrote a long letter about the $O and sent it to the $P."sv,
    "There were more people at the $P than anyone had seen since $S."sv,
    "$N sold the $A $O and bought a $O for the $P."sv,
    "Behind the $P a $A path leads down to the water."sv,
    "The children of the $P painted a $O on the wall of the $P."sv,
    "$N had never learned how to mend a $O, and asked $N for help."sv,
    "Most of the guests left at $T, but $N stayed to look for the $O."sv,
    "A $A $O and a $A $O were all that the storm had spared."sv,
    "The road from the $P to the $P is closed in $S."sv,
    "$N remembered the $P as a $A place with a $O at every door."sv,
    "By $T the wind had turned, and the $O would not move."sv,
    "Every $O in the $P was cleaned, counted and put back on its shelf."sv,
    "If the $O had not been so $A, $N would have kept it."sv,
    "The old keeper of the $P collected anything that looked like a $O."sv,
    "$N laughed, closed the $A $O and walked slowly towards the $P."sv,
    "Some say the $O is $A; others have only heard of it at the $P."sv,
    "After the harvest the $P gave $N a $O as a present."sv,
    "The $O was too $A to be of any use, so $N took it to the $P."sv,
    "$N opened the window at $T and saw a $A $O in front of the $P."sv,
    "Last $S a traveller left a $O at the $P and never came back."sv,
    "No one had told $N that the $P would be empty in $S."sv,
};
constexpr std::array kSeasons = {"spring"sv,   "summer"sv,  "autumn"sv,   "winter"sv,
                                 "March"sv,    "April"sv,   "May"sv,      "June"sv,
                                 "July"sv,     "August"sv,  "October"sv,  "November"sv,
                                 "December"sv, "January"sv, "February"sv, "September"sv};
constexpr std::array kTimes = {"noon"sv,   "dawn"sv,    "dusk"sv,      "midnight"sv,
                               "sunset"sv, "sunrise"sv, "nightfall"sv, "daybreak"sv};
constexpr std::array kLevels = {"INFO"sv, "INFO"sv, "INFO"sv, "DEBUG"sv, "WARN"sv};
constexpr std::array kEvents = {"opened the $O at the $P"sv,
                                "waits for the $A $O"sv,
                                "has finished with the $O of the $P"sv,
                                "cannot find the $A $O, trying again"sv,
                                "moved the $O to the $P"sv,
                                "was asked by $N for the $A $O"sv,
                                "checks the $O twice"sv,
                                "closed the $P"sv};

std::string_view word(Random& random, char kind) {
  switch (kind) {
    case 'N':
      return random.pick(names());
    case 'A':
      return random.pick(adjectives());
    case 'O':
      return random.pick(nouns());
    case 'P':
      return random.pick(places());
    case 'S':
      return random.pick(kSeasons);
    default:
      return random.pick(kTimes);
  }
}

std::string fill_in(Random& random, std::string_view pattern) {
  std::string text;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '$') {
      text += pattern[i];
      continue;
    }
    const std::string_view chosen = word(random, pattern[++i]);
    const bool vowel = std::string_view("aeiou").find(chosen.front()) != std::string_view::npos;
    if (vowel && (text == "A " || text.ends_with(" a "))) text.insert(text.size() - 1, 1, 'n');
    text += chosen;
  }
  return text;
}

}  // namespace

std::string made_up_sentence(Random& random) { return fill_in(random, random.pick(kPatterns)); }

std::string made_up_thing(Random& random) { return fill_in(random, "$A $O"); }

std::string made_up_log_line(Random& random, std::uint32_t second) {
  const std::string_view level = random.pick(kLevels);
  const std::string_view worker = random.pick(nouns());
  return fmt::format("{:02}:{:02}:{:02} {} {}: {}", second / 3600 % 24, second / 60 % 60, second % 60, level,
                     worker, fill_in(random, random.pick(kEvents)));
}

std::string made_up_text(std::uint64_t seed, std::size_t bytes) {
  constexpr std::uint32_t kParagraphSentences = 8;
  Random random(seed);
  std::string text;
  for (std::uint32_t i = 1; text.size() < bytes; ++i) {
    text += made_up_sentence(random);
    text += i % kParagraphSentences == 0 ? "\n\n" : " ";
  }
  return text;
}

}  // namespace dualdecoder
