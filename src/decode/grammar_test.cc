#include "decode/grammar.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "decode/grammar_matcher.h"

namespace dualdecoder {
namespace {

using testing::HasSubstr;

constexpr TokenId kEnd = 256;

// A token for each byte, and one that ends.
std::shared_ptr<const TokenTexts> byte_tokens() {
  std::vector<std::string> texts;
  for (int byte = 0; byte < 256; ++byte) texts.emplace_back(1, static_cast<char>(byte));
  texts.emplace_back();
  const TokenId ends[] = {kEnd};
  return std::make_shared<TokenTexts>(texts, ends);
}

std::string error_of(std::string_view gbnf) {
  const auto grammar = Grammar::parse(gbnf);
  return grammar ? "" : grammar.error().message;
}

GrammarMatcher matcher_of(std::string_view gbnf) {
  auto grammar = Grammar::parse(gbnf);
  EXPECT_TRUE(grammar) << gbnf << ": " << grammar.error().message;
  return GrammarMatcher(*grammar, byte_tokens());
}

// "yes", "no", or "begins": more is to come.
std::string reads(std::string_view gbnf, std::string_view text) {
  GrammarMatcher matcher = matcher_of(gbnf);
  for (const char c : text) {
    const TokenId token = static_cast<std::uint8_t>(c);
    if (!matcher.allows(token)) return matcher.exhausted() ? "exhausted" : "no";
    matcher.accept(token);
  }
  EXPECT_EQ(matcher.allows(kEnd), matcher.complete());
  return matcher.complete() ? "yes" : "begins";
}

TEST(Grammar, ReadsLiteralsClassesGroupsAndReferences) {
  const char* const numbers =
      "root ::= number (\",\" number)* # a list\nnumber ::= \"-\"? [0-9]+ |\n  \"x\\x41\"";
  EXPECT_EQ(reads(numbers, "12,-3"), "yes");
  EXPECT_EQ(reads(numbers, "12,"), "begins");
  EXPECT_EQ(reads(numbers, "xA,1"), "yes");
  EXPECT_EQ(reads(numbers, "1,,"), "no");
  EXPECT_EQ(reads("root ::= [^a-c\\]\"]{2}", "d-"), "yes");
  EXPECT_EQ(reads("root ::= [^a-c\\]\"]{2}", "d]"), "no");
  EXPECT_EQ(reads("root ::= [a-]+", "a-a"), "yes");
  EXPECT_EQ(reads("root ::= (\n \"a\" # one\n | \"b\"\n)\n", "b"), "yes");
  EXPECT_EQ(reads("root ::= \"\"", ""), "yes");
  EXPECT_EQ(reads("root ::= (\"a\"? \"b\"?)* \"c\"", "abbac"), "yes");
}

TEST(Grammar, TakesWholeCharactersAlone) {
  EXPECT_EQ(reads("root ::= .", "\xe2\x82\xac"), "yes");
  EXPECT_EQ(reads("root ::= .", "\xe2\x82"), "begins");
  EXPECT_EQ(reads("root ::= [^a]", "\xf0\x9f\x98\x80"), "yes");
  EXPECT_EQ(reads("root ::= [à-ü]", "\xc3\xa9"), "yes");
  EXPECT_EQ(reads("root ::= [à-ü]", "\xc3\xbf"), "no");
  EXPECT_EQ(reads("root ::= \"\\u20AC\"", "\xe2\x82\xac"), "yes");
  for (const char* ill_formed : {"\x80", "\xc0\xaf", "\xed\xa0\x80", "\xf5", "\xe2\x22", "\xf4\x90\x80\x80"})
    EXPECT_EQ(reads("root ::= .*", ill_formed), "no");
}

// Against counting.
TEST(Grammar, CountsRepetitionsExactly) {
  for (int least = 0; least < 10; ++least) {
    for (int most = least; most < 20; ++most) {
      const std::string gbnf = fmt::format("root ::= (\"a\" | \"b\"){{{},{}}}", least, most);
      GrammarMatcher matcher = matcher_of(gbnf);
      for (int count = 0; count <= most; ++count) {
        EXPECT_EQ(matcher.complete(), count >= least) << gbnf << " after " << count;
        ASSERT_EQ(matcher.allows('b'), count < most) << gbnf << " after " << count;
        if (count < most) matcher.accept('b');
      }
    }
  }
  EXPECT_EQ(reads("root ::= \"a\"{3,}", "aa"), "begins");
  EXPECT_EQ(reads("root ::= \"a\"{3,}", "aaaaaa"), "yes");
  EXPECT_EQ(reads("root ::= \"ab\"{0} \"c\"", "c"), "yes");
}

TEST(Grammar, RepeatsAMillionTimesWithFewRules) {
  const auto grammar = Grammar::parse("root ::= ([a-z]{3,1000000} \",\"){1000,1000000}");
  ASSERT_TRUE(grammar);
  EXPECT_LT((*grammar)->rules(), 200U);
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "abcd,";
  EXPECT_EQ(reads("root ::= ([a-z]{3,1000000} \",\"){1000,1000000}", text), "yes");
  EXPECT_EQ(reads("root ::= ([a-z]{3,1000000} \",\"){1001,1000000}", text), "begins");
}

TEST(Grammar, SaysWhatIsWrongAndWhere) {
  EXPECT_THAT(error_of(""), HasSubstr("no rule \"root\""));
  EXPECT_THAT(error_of("a ::= \"x\""), HasSubstr("no rule \"root\""));
  EXPECT_THAT(error_of("root ::= \"a\"\nroot ::= \"b\""),
              HasSubstr("line 2: the rule \"root\" is defined twice"));
  EXPECT_THAT(error_of("root ::= a b\na ::= \"x\""), HasSubstr("no rule \"b\""));
  EXPECT_THAT(error_of("root := a"), HasSubstr("line 1: wanted is ::="));
  EXPECT_THAT(error_of("root ::= \"a"), HasSubstr("wanted is \""));
  EXPECT_THAT(error_of("root ::= [a"), HasSubstr("wanted is ]"));
  EXPECT_THAT(error_of("root ::= []"), HasSubstr("empty"));
  EXPECT_THAT(error_of("root ::= [z-a]"), HasSubstr("without characters"));
  EXPECT_THAT(error_of("root ::= (\"a\""), HasSubstr("wanted is )"));
  EXPECT_THAT(error_of("root ::= \"a\")"), HasSubstr("new line"));
  EXPECT_THAT(error_of("root ::= *"), HasSubstr("needs something before"));
  EXPECT_THAT(error_of("root ::= \"a\"{2,1}"), HasSubstr("{2,1}"));
  EXPECT_THAT(error_of("root ::= \"a\"{99999999999999999999}"), HasSubstr("at most 1000000000"));
  EXPECT_THAT(error_of("root ::= \"a\"{,3}"), HasSubstr("a number"));
  EXPECT_THAT(error_of("root ::= \"\\q\""), HasSubstr("escape"));
  EXPECT_THAT(error_of("root ::= \"\\"), HasSubstr("escape"));
  EXPECT_THAT(error_of("root ::= \"\\x4"), HasSubstr("hexadecimal"));
  EXPECT_THAT(error_of("root ::= \"\\uD800\""), HasSubstr("no character"));
  EXPECT_THAT(error_of("root ::= \"\xff\""), HasSubstr("UTF-8"));
  EXPECT_THAT(error_of("root ::= <[5]>"), HasSubstr("angle brackets"));
  EXPECT_THAT(error_of("root ::= " + std::string(200, '(')), HasSubstr("parentheses"));
  EXPECT_THAT(error_of(std::string(kGrammarBytesMax + 1, ' ')), HasSubstr("bytes"));
}

TEST(Grammar, RefusesRulesThatBeginWithThemselves) {
  EXPECT_THAT(error_of("root ::= root \"a\" | \"b\""), HasSubstr("begins with itself"));
  EXPECT_THAT(error_of("root ::= a \"x\"\na ::= b | \"y\"\nb ::= a"), HasSubstr("begins with itself"));
  EXPECT_THAT(error_of("root ::= e root \"y\" | \"x\"\ne ::= f\nf ::= \"\""),
              HasSubstr("begins with itself"));
  EXPECT_EQ(error_of("root ::= \"a\" root | \"\""), "");
  EXPECT_EQ(error_of("root ::= (\"a\"?)* \"b\""), "");
  std::string chain = "root ::= r0\n";  // long, and every rule twice in the one before it
  for (int i = 0; i < 5000; ++i) chain += fmt::format("r{} ::= r{} | r{}\n", i, i + 1, i + 1);
  EXPECT_EQ(error_of(chain + "r5000 ::= \"a\""), "");
}

TEST(GrammarMatcher, GivesUpWhereThereAreTooManyWays) {
  EXPECT_EQ(reads("root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"d\"", std::string(100, 'a')),
            "exhausted");
  // The same with something to tell the ways apart.
  EXPECT_EQ(reads("root ::= \"a\" root \"b\" | \"e\" root \"c\" | \"d\"", std::string(100, 'a') + "d"),
            "begins");
}

TEST(GrammarMatcher, AllowsTokensOfSeveralBytesAndNoneWithoutText) {
  const std::string texts[] = {"a", "ab", "abc", "b", "", "bca", "\xc3", "\xa9", ""};
  const TokenId ends[] = {8};
  const auto grammar = Grammar::parse("root ::= (\"abc\" | \"é\")+");
  ASSERT_TRUE(grammar);
  GrammarMatcher matcher(*grammar, std::make_shared<TokenTexts>(texts, ends));
  const auto allowed = [&] {
    std::string list;
    for (TokenId token = 0; token < 9; ++token)
      list += matcher.allows(token) ? static_cast<char>('0' + token) : '.';
    return list;
  };
  EXPECT_EQ(allowed(), "012...6..");
  matcher.accept(0);
  EXPECT_EQ(allowed(), "...3.5...");
  matcher.accept(5);
  EXPECT_EQ(allowed(), "...3.5...");
  EXPECT_FALSE(matcher.complete());
  GrammarMatcher other(*grammar, std::make_shared<TokenTexts>(texts, ends));
  other.accept(6);
  EXPECT_TRUE(other.allows(7) && !other.allows(0) && !other.allows(8));
  other.accept(7);
  EXPECT_TRUE(other.allows(8));
}

// Far more states than are kept.
TEST(GrammarMatcher, ForgetsStatesAndGoesOn) {
  GrammarMatcher matcher = matcher_of("root ::= \"(\" root \")\" | \"[\" root \"]\" | \"\"");
  std::string closing;
  for (std::uint32_t i = 0; i < 5000; ++i) {
    const bool round = i * i % 7 < 3;
    for (const char c : std::string("([)]")) matcher.allows(c);
    matcher.accept(round ? '(' : '[');
    closing += round ? ')' : ']';
  }
  while (!closing.empty()) {
    EXPECT_FALSE(matcher.complete());
    EXPECT_FALSE(matcher.allows(closing.back() == ')' ? ']' : ')'));
    matcher.accept(static_cast<std::uint8_t>(closing.back()));
    closing.pop_back();
  }
  EXPECT_TRUE(matcher.complete());
  EXPECT_FALSE(matcher.exhausted());
}

}  // namespace
}  // namespace dualdecoder
