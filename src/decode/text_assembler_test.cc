#include "decode/text_assembler.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

using Pieces = std::vector<std::string>;

constexpr std::string_view kFffd = "\xEF\xBF\xBD";

struct ByteRange {
  std::uint8_t low, high;
};

// Unicode Standard, table 3-7: the well-formed byte sequences, a row each; {0, 0} ends a row.
constexpr std::array<std::array<ByteRange, 4>, 9> kWellFormed = {{
    {{{0x00, 0x7F}}},
    {{{0xC2, 0xDF}, {0x80, 0xBF}}},
    {{{0xE0, 0xE0}, {0xA0, 0xBF}, {0x80, 0xBF}}},
    {{{0xE1, 0xEC}, {0x80, 0xBF}, {0x80, 0xBF}}},
    {{{0xED, 0xED}, {0x80, 0x9F}, {0x80, 0xBF}}},
    {{{0xEE, 0xEF}, {0x80, 0xBF}, {0x80, 0xBF}}},
    {{{0xF0, 0xF0}, {0x90, 0xBF}, {0x80, 0xBF}, {0x80, 0xBF}}},
    {{{0xF1, 0xF3}, {0x80, 0xBF}, {0x80, 0xBF}, {0x80, 0xBF}}},
    {{{0xF4, 0xF4}, {0x80, 0x8F}, {0x80, 0xBF}, {0x80, 0xBF}}},
}};

// The whole characters of `bytes`, with ill-formed maximal subparts replaced, and a character cut off at the
// end left out.
Pieces reference_characters(std::string_view bytes) {
  Pieces characters;
  while (!bytes.empty()) {
    std::size_t longest = 0;
    bool whole = false;
    for (const auto& row : kWellFormed) {
      std::size_t length = 0;
      while (length < 4 && (length == 0 || row[length].high != 0)) ++length;
      std::size_t same = 0;
      while (same < std::min(length, bytes.size())) {
        const auto byte = static_cast<std::uint8_t>(bytes[same]);
        if (byte < row[same].low || byte > row[same].high) break;
        ++same;
      }
      if (same > longest) {
        longest = same;
        whole = same == length;
      }
    }
    if (!whole && longest == bytes.size()) break;
    characters.emplace_back(whole ? bytes.substr(0, longest) : kFffd);
    bytes.remove_prefix(std::max<std::size_t>(longest, 1));
  }
  return characters;
}

struct Reference {
  std::string released;  // all that may have been shown by now
  bool stopped = false;
  std::string whole;  // ... and after the end of generation
};

// By the plain definitions, from all bytes so far, with no state.
Reference reference_text(std::string_view bytes, const Pieces& stops) {
  std::string text;
  for (const std::string& character : reference_characters(bytes)) text += character;
  for (std::size_t end = 1; end <= text.size(); ++end) {
    std::size_t longest = 0;
    for (const std::string& stop : stops) {
      if (std::string_view(text).substr(0, end).ends_with(stop)) longest = std::max(longest, stop.size());
    }
    if (longest > 0) {
      const std::string cut = text.substr(0, end - longest);
      return {cut, true, cut};
    }
  }
  for (std::size_t begin = 0; begin < text.size(); ++begin) {
    const std::string_view suffix = std::string_view(text).substr(begin);
    const bool may_grow = std::any_of(stops.begin(), stops.end(), [&](const std::string& stop) {
      return stop.size() > suffix.size() && stop.starts_with(suffix);
    });
    if (may_grow) return {text.substr(0, begin), false, text};
  }
  return {text, false, text};
}

// Every string is valid UTF-8 when decoding neither replaces nor leaves anything out.
bool is_valid(const std::string& text) {
  std::string joined;
  for (const std::string& character : reference_characters(text)) joined += character;
  return joined == text;
}

Pieces push_all(TextAssembler& assembler, const Pieces& pieces) {
  Pieces out;
  for (const std::string& piece : pieces) out.push_back(assembler.push(piece));
  return out;
}

Pieces single_bytes(std::string_view bytes) {
  Pieces pieces;
  for (char c : bytes) pieces.emplace_back(1, c);
  return pieces;
}

std::string join(const Pieces& pieces) {
  std::string joined;
  for (const std::string& piece : pieces) joined += piece;
  return joined;
}

// Compares with the reference after every piece.
void expect_like_reference(const Pieces& pieces, const Pieces& stops) {
  TextAssembler assembler(stops);
  std::string bytes;
  std::string shown;
  for (const std::string& piece : pieces) {
    bytes += piece;
    const std::string released = assembler.push(piece);
    EXPECT_TRUE(is_valid(released)) << testing::PrintToString(released);
    shown += released;
    const Reference want = reference_text(bytes, stops);
    ASSERT_EQ(shown, want.released) << "pieces " << testing::PrintToString(pieces) << " stops "
                                    << testing::PrintToString(stops);
    ASSERT_EQ(assembler.stopped(), want.stopped);
  }
  const std::string rest = assembler.finish();
  EXPECT_TRUE(is_valid(rest));
  ASSERT_EQ(shown + rest, reference_text(bytes, stops).whole);
  EXPECT_EQ(assembler.finish(), "");
  EXPECT_EQ(assembler.push("more"), "");
}

// As one piece, byte by byte, and at every pair of cuts.
void expect_like_reference_at_every_cut(std::string_view bytes, const Pieces& stops) {
  expect_like_reference(single_bytes(bytes), stops);
  for (std::size_t a = 0; a <= bytes.size(); ++a) {
    for (std::size_t b = a; b <= bytes.size(); ++b) {
      expect_like_reference({std::string(bytes.substr(0, a)), std::string(bytes.substr(a, b - a)),
                             std::string(bytes.substr(b))},
                            stops);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(TextAssembler, ReleasesEmojiWholeWithItsLastByteAndReplacesInvalidByte) {
  TextAssembler assembler({});
  EXPECT_EQ(push_all(assembler, {"\xF0", "\x9F", "\x98", "\x80", "\xFF", "a"}),
            (Pieces{"", "", "", "\xF0\x9F\x98\x80", std::string(kFffd), "a"}));
  EXPECT_EQ(assembler.finish(), "");
  expect_like_reference_at_every_cut(
      "\xF0\x9F\x98\x80\xFF"
      "a",
      {});
}

TEST(TextAssembler, LeavesOutCharacterCutOffByTheEndOfGeneration) {
  TextAssembler assembler({});
  EXPECT_EQ(push_all(assembler, {"a", "\xF0", "\x9F"}), (Pieces{"a", "", ""}));
  EXPECT_EQ(assembler.finish(), "");
}

TEST(TextAssembler, ReplacesOneMaximalSubpartAtATime) {
  struct Case {
    std::string bytes;
    std::string text;  // "?" stands for U+FFFD
  };
  const std::vector<Case> cases = {
      {"\xC0\x80.", "??."},                        // overlong, two bytes
      {"\xE0\x80\x80.", "???."},                   // overlong, three bytes
      {"\xF0\x8F\xBF\xBF.", "????."},              // overlong, four bytes
      {"\xED\xA0\x80.", "???."},                   // surrogate U+D800
      {"\xED\x9F\xBF.", "\xED\x9F\xBF."},          // U+D7FF, just below
      {"\xF4\x90\x80\x80.", "????."},              // U+110000
      {"\xF4\x8F\xBF\xBF.", "\xF4\x8F\xBF\xBF."},  // U+10FFFF
      {"\xF5\x80\x80\x80.", "????."},
      {"\x80.", "?."},                            // continuation alone
      {"\xF0\x9F\x98.", "?."},                    // three of four bytes are one subpart
      {"\xE2\x82\xE2\x82\xAC", "?\xE2\x82\xAC"},  // cut off by a new first byte
      {"\xF1\x80\x80\xE1\x80\xC2"
       "b\x80"
       "c\x80\xBF"
       "d",
       "???b?c??d"},  // the Standard's table 3-8
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF"
       "A",
       "????A"},  // the Standard's table 3-11
  };
  for (const Case& c : cases) {
    std::string want;
    for (char letter : c.text) {
      if (letter == '?') {
        want += kFffd;
      } else {
        want += letter;
      }
    }
    TextAssembler assembler({});
    EXPECT_EQ(join(push_all(assembler, single_bytes(c.bytes))), want) << testing::PrintToString(c.bytes);
    expect_like_reference_at_every_cut(c.bytes, {});
  }
}

TEST(TextAssembler, KeepsNulAndOtherControlBytes) {
  TextAssembler assembler({});
  const std::string text("a\0b\x01\x7F", 5);
  EXPECT_EQ(assembler.push(text), text);
}

TEST(TextAssembler, ReleasesFalseStartOfStopWithTheCharacterThatRefutesIt) {
  TextAssembler assembler({"DEFG"});
  EXPECT_EQ(push_all(assembler, single_bytes("ABCDEFXDEFG")),
            (Pieces{"A", "B", "C", "", "", "", "DEFX", "", "", "", ""}));
  EXPECT_TRUE(assembler.stopped());
  EXPECT_EQ(assembler.push("H"), "");
  EXPECT_EQ(assembler.finish(), "");
  expect_like_reference_at_every_cut("ABCDEFXDEFG", {"DEFG"});
}

TEST(TextAssembler, EndsAtTheStopThatIsCompleteFirst) {
  for (const Pieces& stops : {Pieces{"EF", "DEFG"}, Pieces{"DEFG", "EF"}}) {
    TextAssembler assembler(stops);
    EXPECT_EQ(join(push_all(assembler, single_bytes("ABCDEFXDEFG"))), "ABCD");
    EXPECT_TRUE(assembler.stopped());
    TextAssembler at_once(stops);
    EXPECT_EQ(at_once.push("ABCDEFXDEFG"), "ABCD");
    expect_like_reference_at_every_cut("ABCDEFXDEFG", stops);
  }
}

TEST(TextAssembler, PrefersTheLongestOfStopsThatEndTogether) {
  for (const Pieces& stops : {Pieces{"EF", "CDEF"}, Pieces{"CDEF", "EF"}}) {
    TextAssembler assembler(stops);
    EXPECT_EQ(join(push_all(assembler, single_bytes("ABCDEFG"))), "AB");
    expect_like_reference_at_every_cut("ABCDEFG", stops);
  }
}

TEST(TextAssembler, StopEqualToTheFirstTokenLeavesNoText) {
  TextAssembler assembler({"Hello"});
  EXPECT_EQ(assembler.push("Hello"), "");
  EXPECT_TRUE(assembler.stopped());
  EXPECT_EQ(assembler.finish(), "");
}

TEST(TextAssembler, MatchesStopOfMultibyteCharactersSplitOverTokens) {
  const Pieces stops = {"\xE2\x82\xAC!"};  // a euro sign and an exclamation mark
  TextAssembler assembler(stops);
  EXPECT_EQ(push_all(assembler, {"a\xE2", "\x82", "\xAC", "?\xE2\x82", "\xAC", "!b"}),
            (Pieces{"a", "", "", "\xE2\x82\xAC?", "", ""}));
  EXPECT_TRUE(assembler.stopped());
  expect_like_reference_at_every_cut("a\xE2\x82\xAC?\xE2\x82\xAC!b", stops);
  expect_like_reference_at_every_cut("a\xE2\x82\xAC?\xE2\x82\xAC!b", {"\xE2\x82\xAC"});
  expect_like_reference_at_every_cut("a\xE2\x82\xFF\xE2\x82\xAC!b", stops);
}

TEST(TextAssembler, FindsStopInsideTheBeginningOfAnother) {
  const Pieces stops = {"aabac", "bab"};
  TextAssembler assembler(stops);
  EXPECT_EQ(push_all(assembler, single_bytes("aabax")), (Pieces{"", "", "", "", "aabax"}));
  EXPECT_EQ(push_all(assembler, single_bytes("aabab")), (Pieces{"", "", "", "", "aa"}));
  EXPECT_TRUE(assembler.stopped());
  expect_like_reference_at_every_cut("aabaaabab", stops);
}

TEST(TextAssembler, FinishReturnsTheBeginningOfAStopThatWasHeldBack) {
  TextAssembler assembler({"DEFG"});
  EXPECT_EQ(assembler.push("ABCDEF"), "ABC");
  EXPECT_EQ(assembler.finish(), "DEF");
  EXPECT_EQ(assembler.finish(), "");
  EXPECT_EQ(assembler.push("G"), "");
  EXPECT_FALSE(assembler.stopped());
}

TEST(TextAssembler, RejectsStopStringsThatCannotBeMeant) {
  EXPECT_TRUE(validate_stop_strings({}).has_value());
  EXPECT_TRUE(validate_stop_strings(Pieces(16, "x")).has_value());
  const auto message = [](const Pieces& stops) {
    const Status status = validate_stop_strings(stops);
    EXPECT_FALSE(status.has_value());
    if (status.has_value()) return std::string();
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    return status.error().message;
  };
  EXPECT_EQ(message({"a", ""}), "stop string 1 is empty; it would end every text at once");
  EXPECT_EQ(message(Pieces(17, "x")), "17 stop strings given; at most 16 are allowed");
  EXPECT_EQ(message({"\xFF"}), "stop string 0 is not valid UTF-8; it could never match");
  EXPECT_EQ(message({"a\xE2\x82"}), "stop string 0 is not valid UTF-8; it could never match");
}

TEST(TextAssembler, AgreesWithSlowReferenceOnRandomBytesStopsAndCuts) {
  const std::uint32_t seed = 20250917;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](std::size_t n) { return random() % n; };
  // Few letters make matches and false starts likely; the rest are parts of characters and bytes that never
  // fit.
  const Pieces letters = {
      "a", "a", "b", "b", "c", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", std::string(kFffd)};
  const Pieces fragments = {"\xE2", "\x82",     "\xF0\x9F", "\x98",    "\xFF",
                            "\xC0", "\xED\xA0", "\xC3",     "\xE2\x82"};
  for (int round = 0; round < 20000; ++round) {
    const std::size_t alphabet = 2 + below(letters.size() - 1);
    Pieces stops(below(4));
    for (std::string& stop : stops) {
      for (std::size_t n = 1 + below(8); n > 0; --n) stop += letters[below(alphabet)];
    }
    std::string bytes;
    for (std::size_t n = below(40); n > 0; --n) {
      bytes += below(12) == 0 ? fragments[below(fragments.size())] : letters[below(alphabet)];
    }
    Pieces pieces;
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t size = std::min(below(5), bytes.size() - at);
      pieces.push_back(bytes.substr(at, size));
      at += size;
    }
    expect_like_reference(pieces, stops);
    if (HasFatalFailure() || HasNonfatalFailure()) FAIL() << "round " << round;
  }
}

double seconds_for(const Pieces& stops, std::string_view bytes, std::size_t piece_bytes) {
  const auto start = std::chrono::steady_clock::now();
  TextAssembler assembler(stops);
  std::size_t shown = 0;
  for (std::size_t at = 0; at < bytes.size(); at += piece_bytes) {
    shown += assembler.push(bytes.substr(at, piece_bytes)).size();
  }
  shown += assembler.finish().size();
  EXPECT_EQ(shown, bytes.size());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Takes 0.05 s each; a cost that grows with what is held back would take minutes.
TEST(TextAssembler, TakesAMegabyteInLinearTime) {
  std::string text;
  while (text.size() < 1'000'000) text += "word \xE2\x82\xAC ";
  text.resize(1'000'000 / 9 * 9);
  Pieces sixteen;
  for (int i = 0; i < 16; ++i)
    sixteen.push_back("word \xE2\x82\xAC wor" + std::string(1, static_cast<char>('e' + i)));
  EXPECT_LT(seconds_for(sixteen, text, 3), 2.0);
  // Nearly everything stays held back for ever: half a megabyte of one letter that could still become the
  // stop string.
  const std::string letters(1'000'000, 'a');
  EXPECT_LT(seconds_for({std::string(500'000, 'a') + "b"}, letters, 1), 2.0);
  EXPECT_LT(seconds_for({std::string(500'000, 'a') + "b"}, letters, letters.size()), 2.0);
}

}  // namespace
}  // namespace dualdecoder
