#include "serve/schema_grammar.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "decode/grammar_matcher.h"
#include "serve/json_reader.h"
#include "serve/number_grammar.h"
#include "serve/response_format.h"

namespace dualdecoder {
namespace {

using nlohmann::ordered_json;
using testing::HasSubstr;

std::string refusal(const std::string& schema) {
  const auto gbnf = schema_grammar(ordered_json::parse(schema), "s");
  if (!gbnf) return gbnf.error().message;
  const auto grammar = Grammar::parse(*gbnf);
  return grammar ? "" : "no grammar: " + grammar.error().message + "\n" + *gbnf;
}

class Reader {
 public:
  explicit Reader(const std::string& schema) {
    const auto gbnf = schema_grammar(ordered_json::parse(schema), "s");
    EXPECT_TRUE(gbnf) << schema << ": " << gbnf.error().message;
    if (!gbnf) return;
    const auto grammar = Grammar::parse(*gbnf);
    EXPECT_TRUE(grammar) << grammar.error().message << "\n" << *gbnf;
    if (grammar) grammar_ = *grammar;
  }

  bool takes(const std::string& text) const {
    std::vector<std::string> texts;
    for (int byte = 0; byte < 256; ++byte) texts.emplace_back(1, static_cast<char>(byte));
    GrammarMatcher matcher(grammar_, std::make_shared<TokenTexts>(texts, std::span<const TokenId>()));
    for (const char c : text) {
      if (!matcher.allows(static_cast<std::uint8_t>(c))) return false;
      matcher.accept(static_cast<std::uint8_t>(c));
    }
    return matcher.complete();
  }

 private:
  std::shared_ptr<const Grammar> grammar_;
};

void expect(const std::string& schema, std::initializer_list<const char*> taken,
            std::initializer_list<const char*> not_taken) {
  const Reader reader(schema);
  for (const char* text : taken) EXPECT_TRUE(reader.takes(text)) << schema << "\n  should take " << text;
  for (const char* text : not_taken)
    EXPECT_FALSE(reader.takes(text)) << schema << "\n  should not take " << text;
}

TEST(SchemaGrammar, TakesAnyValueWhereNothingIsSaid) {
  for (const char* any : {"{}", "true", R"({"title": "x", "x-mine": {"not": 1}})"}) {
    expect(any,
           {"null", "true", "-0.5e+10", R"("a\"\\\u00e9é")", "[]", "[1, [{}]]",
            R"({"a": {"b":[ 1,2 ]},"c":""})"},
           {"", "nul", "01", "1.", "+1", "\"", "\"\\x\"", "\"\\ud800\"", "[1,]", "{a:1}", R"({"a":1,})",
            "1 2", "\"\n\""});
  }
}

TEST(SchemaGrammar, KnowsTheTypes) {
  expect(R"({"type": "object"})", {"{}", R"({ "a": 1 })", "{\n  \"a\": 1,\n  \"b\": 2\n}"}, {"[]", "1"});
  expect(R"({"type": ["string", "null"]})", {"null", "\"\""}, {"1", "true"});
  expect(R"({"type": "integer"})", {"0", "-12", "999999999999999999"}, {"1.0", "1e3", "00"});
  expect(R"({"type": "boolean"})", {"true", "false"}, {"null"});
}

TEST(SchemaGrammar, WritesPropertiesInOrderAndAllThatAreRequired) {
  const char* const schema = R"({"properties": {"z": {"type": "integer"}, "a": {"type": "boolean"},
                                 "m": {"type": "null"}}, "required": ["a"]})";
  expect(
      schema,
      {R"({"a":true})", R"({"z":1,"a":true})", R"({"z":1, "a":true, "m":null})", R"({"a":false,"m":null})"},
      {"{}", R"({"z":1})", R"({"a":true,"z":1})", R"({"a":1})", R"({"a":true,"b":1})",
       R"({"z":1,"z":1,"a":true})"});
  expect(R"({"properties": {"a": {}, "b": {}}})", {"{}", R"({"a":1})", R"({"b":1})", R"({"a":1,"b":2})"},
         {R"({"b":2,"a":1})", R"({"a":1,})", R"({,"b":1})"});
  expect(R"({"properties": {}, "additionalProperties": false})", {"{}", "{ }"}, {R"({"a":1})"});
  expect(R"({"required": ["a", "b"]})", {R"({"a":1,"b":[]})", R"({"a":1,"b":2,"c":3})"},
         {R"({"a":1})", R"({"a":1,"b":2,"a":3})"});
}

TEST(SchemaGrammar, AdditionalPropertiesHaveOtherNames) {
  const char* const schema =
      R"({"properties": {"a": {"type": "null"}, "ab": {"type": "null"}, "é": {"type": "null"}},
                                 "required": ["ab"], "additionalProperties": {"type": "integer"}})";
  expect(schema,
         {R"({"ab":null})", R"({"a":null,"ab":null,"abc":1,"":2,"b":3,"e":4})", R"({"ab":null,"ê":1})"},
         {R"({"ab":null,"a":1})", R"({"ab":null,"ab":1})", R"({"ab":null,"é":1})", R"({"ab":null,"x":null})",
          R"({"ab":null,"\u0061":1})"});
  expect(R"({"additionalProperties": {"type": "boolean"}})", {"{}", R"({"a":true,"b":false})"},
         {R"({"a":1})"});
}

TEST(SchemaGrammar, CountsItems) {
  expect(R"({"items": {"type": "integer"}, "minItems": 2, "maxItems": 3})", {"[1,2]", "[1, 2, 3]"},
         {"[]", "[1]", "[1,2,3,4]", "[1,true]"});
  expect(R"({"type": "array", "maxItems": 0})", {"[]"}, {"[1]"});
  expect(R"({"type": "array", "maxItems": 1})", {"[]", "[1]"}, {"[1,2]"});
  expect(R"({"prefixItems": [{"type": "integer"}, {"type": "boolean"}]})", {"[]", "[1]", "[1,true]"},
         {"[true]", "[1,true,2]"});
  expect(R"({"prefixItems": [{"type": "integer"}, {"type": "boolean"}], "minItems": 2, "items": false})",
         {"[1,true]"}, {"[1]", "[1,true,2]"});
  expect(R"({"prefixItems": [{"type": "integer"}], "items": {"type": "null"}, "maxItems": 3})",
         {"[]", "[1]", "[1,null,null]"}, {"[1,null,null,null]", "[1,1]", "[null]"});
  expect(R"({"prefixItems": [{"type": "integer"}], "items": {"type": "null"}, "minItems": 3})",
         {"[1,null,null]"}, {"[1,null]"});
  expect(R"({"prefixItems": [{"type": "integer"}, {}], "maxItems": 1})", {"[]", "[1]"}, {"[1,2]"});
}

TEST(SchemaGrammar, CountsCharactersAsCodePoints) {
  expect(R"({"minLength": 2, "maxLength": 3})", {R"("ab")", R"("é€😀")", R"("\n\u00e9")"},
         {R"("")", R"("a")", R"("abcd")"});
  expect(R"({"maxLength": 100000})", {R"("")", R"("abc")"}, {"1"});
}

TEST(SchemaGrammar, KnowsPatterns) {
  const auto pattern = [](const std::string& text) { return ordered_json({{"pattern", text}}).dump(); };
  expect(pattern("^[A-Z]{2}-\\d+$"), {R"("AB-12")"}, {R"("AB-")", R"("ab-1")", R"("xAB-1")", R"("AB-1 ")"});
  expect(pattern("b+"), {R"("b")", R"("abba")"}, {R"("a")"});
  expect(pattern("^(?:a|bc)*?$"), {R"("")", R"("abca")"}, {R"("b")"});
  expect(pattern("^\"\\\\.$"), {R"("\"\\x")", R"("\"\\é")"}, {R"("\"\\\n")"});
  expect(pattern("^[^\\d\\s]\\W[\"x]$"), {R"("a-x")", R"("a-\"")"}, {R"("1-x")", R"("aax")"});
  expect(pattern("^[à-ü]\\$$"), {R"("é$")"}, {R"("e$")"});
  expect(pattern("^\\w\\S\\D$"), {R"("a-b")"}, {R"("a-1")"});
  for (const char* text : {"(?=a)b", "a\\b", "(a)\\1", "\\p{L}", "a^b", "^a|b$", "[\\D]", "(?<n>a)"})
    EXPECT_THAT(refusal(pattern(text)), HasSubstr("s.pattern: ")) << text;
  for (const char* text : {"(", ")", "[a", "*a", "a{x}", "[b-a]", "a\\", "a{2,1}"})
    EXPECT_NE(refusal(pattern(text)), "") << text;
}

TEST(SchemaGrammar, KnowsDatesAndIdentifiers) {
  const auto format = [](const char* name) {
    return fmt::format(R"({{"type": "string", "format": "{}"}})", name);
  };
  expect(format("date"), {R"("2024-02-28")", R"("1999-12-31")", R"("2024-04-30")"},
         {R"("2024-02-30")", R"("2024-13-01")", R"("2024-04-31")", R"("24-01-01")"});
  expect(format("time"), {R"("23:59:59Z")", R"("00:00:00.5+01:30")"}, {R"("24:00:00Z")", R"("10:00:00")"});
  expect(format("date-time"), {R"("2024-02-28T10:00:00Z")"}, {R"("2024-02-28 10:00:00Z")"});
  expect(format("uuid"), {R"("123e4567-e89b-12d3-a456-426614174000")"}, {R"("123e4567")"});
}

// Against arithmetic.
TEST(SchemaGrammar, KeepsNumbersBetweenBounds) {
  const std::pair<int, int> ranges[] = {{0, 0},      {0, 9},    {1, 10},    {5, 123},  {-7, 7},
                                        {-120, -15}, {99, 101}, {-1000, 0}, {37, 1205}};
  for (const auto& [low, high] : ranges) {
    const Reader closed(fmt::format(R"({{"type": "integer", "minimum": {}, "maximum": {}}})", low, high));
    const Reader open(fmt::format(R"({{"type": "integer", "exclusiveMinimum": {}, "exclusiveMaximum": {}}})",
                                  low - 0.5, high + 1));
    for (int number = low - 30; number <= high + 30; ++number) {
      const bool within = low <= number && number <= high;
      ASSERT_EQ(closed.takes(std::to_string(number)), within) << number << " in " << low << " to " << high;
      ASSERT_EQ(open.takes(std::to_string(number)), within) << number << " in " << low << " to " << high;
    }
    const Reader decimals(
        fmt::format(R"({{"type": "number", "minimum": {}, "exclusiveMaximum": {}}})", low, high + 1));
    for (int tenths = 10 * low - 25; tenths <= 10 * high + 25; ++tenths) {
      const std::string text =
          fmt::format("{}{}.{}", tenths < 0 ? "-" : "", std::abs(tenths) / 10, std::abs(tenths) % 10);
      ASSERT_EQ(decimals.takes(text), 10 * low <= tenths && tenths < 10 * (high + 1))
          << text << " in " << low << " to " << high;
    }
  }
  expect(R"({"type": "number", "exclusiveMinimum": 0, "maximum": 1})", {"0.5", "0.001", "1", "1.0"},
         {"0", "0.0", "1.1", "-0.5"});
  expect(R"({"type": "integer", "minimum": 10})", {"10", "1234567"}, {"9", "-10"});
  EXPECT_THAT(refusal(R"({"type": "integer", "minimum": 3, "maximum": 2})"), HasSubstr("s: no number"));
  EXPECT_THAT(refusal(R"({"type": "integer", "minimum": 1e30})"), HasSubstr("s.minimum: "));
  EXPECT_EQ(
      refusal(R"({"type": "integer", "maximum": 18446744073709551615, "minimum": -9223372036854775808})"),
      "");
  EXPECT_THAT(refusal(R"({"type": "number", "minimum": 0.5})"), HasSubstr("s.minimum: only whole"));
}

TEST(SchemaGrammar, ListsValues) {
  expect(R"({"enum": ["a", 1, null, {"b": [2]}, "\"\\\n"]})",
         {"\"a\"", "1", "null", R"({"b":[2]})", R"("\"\\\n")"}, {"\"b\"", "2"});
  expect(R"({"const": "x", "type": "string"})", {"\"x\""}, {"\"y\""});
  expect(R"({"enum": [1, "a", 2.0], "type": "integer"})", {"1", "2.0"}, {"\"a\""});
}

TEST(SchemaGrammar, JoinsAlternativesAndWhatHoldsTogether) {
  expect(R"({"anyOf": [{"type": "string"}, {"type": "integer"}]})", {"\"a\"", "1"}, {"null"});
  expect(R"({"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"],
             "oneOf": [{"properties": {"a": {"type": "null"}}, "required": ["a"]}, {"properties": {"b": {"type": "null"}}}]})",
         {R"({"k":1,"a":null})", R"({"k":1,"b":null})", R"({"k":1})"}, {R"({"a":null})", R"({"k":1,"c":1})"});
  expect(R"({"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"minimum": 3}}, "required": ["b"]}],
             "$defs": {"A": {"type": "object", "properties": {"a": {}, "b": {"type": "integer", "minimum": 1}}, "required": ["a"]}}})",
         {R"({"a":1,"b":3})"}, {R"({"a":1})", R"({"a":1,"b":2})"});
  expect(R"({"allOf": [{"type": ["number", "string"]}, {"type": ["integer", "null"]}]})", {"1"},
         {"null", "1.5"});
  EXPECT_THAT(refusal(R"({"allOf": [{"type": "string"}, {"type": "null"}]})"), HasSubstr("s.allOf.type: "));
  EXPECT_THAT(refusal(R"({"allOf": [{"pattern": "a"}, {"pattern": "b"}]})"), HasSubstr("s.allOf.pattern: "));
  EXPECT_THAT(
      refusal(
          R"({"allOf": [{"properties": {"a": {}}, "additionalProperties": false}, {"properties": {"b": {}}}]})"),
      HasSubstr("s.allOf.additionalProperties: "));
}

TEST(SchemaGrammar, FollowsReferencesAlsoToThemselves) {
  const char* const tree = R"({"$ref": "#/$defs/Node", "$defs": {"Node": {"type": "object", "properties":
      {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}, "required": ["value", "next"]}}})";
  expect(tree, {R"({"value":1,"next":null})", R"({"value":1,"next":{"value":2,"next":null}})"},
         {R"({"value":1})", R"({"value":1,"next":{}})"});
  expect(R"({"type": "array", "items": {"$ref": "#"}})", {"[]", "[[],[[]]]"}, {"[1]"});
  expect(R"({"properties": {"a": {"$ref": "#/$defs/A", "description": "x"}}, "$defs": {"A": {"enum": [1]}}})",
         {R"({"a":1})"}, {R"({"a":2})"});
  for (const char* circle :
       {R"({"$ref": "#"})", R"({"anyOf": [{"$ref": "#"}, {"type": "null"}]})",
        R"({"allOf": [{"$ref": "#"}]})",
        R"({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}})",
        R"({"$ref": "#", "type": "object"})"})
    EXPECT_NE(refusal(circle), "") << circle;
  EXPECT_THAT(refusal(R"({"$ref": "#/$defs/none"})"), HasSubstr("s.$ref: there is no"));
  EXPECT_THAT(refusal(R"({"$ref": "http://example.org/x"})"), HasSubstr("s.$ref: only references"));
}

TEST(SchemaGrammar, NamesThePlaceOfWhatItRefuses) {
  EXPECT_THAT(refusal(R"({"properties": {"a": {"items": {"pattern": "x\\bx"}}}})"),
              HasSubstr("s.properties.a.items.pattern: "));
  EXPECT_THAT(refusal(R"({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"not": {}}}})"),
              HasSubstr("s.$defs.A.not: "));
  EXPECT_THAT(refusal(R"({"anyOf": [{}, {"type": "wizard"}]})"), HasSubstr("s.anyOf[1].type: "));
  EXPECT_THAT(refusal("5"), HasSubstr("s: wanted is a schema"));
  EXPECT_THAT(refusal("false"), HasSubstr("s: false accepts nothing"));
  for (const char* schema : {R"({"multipleOf": 2})",
                             R"({"patternProperties": {}})",
                             R"({"uniqueItems": true})",
                             R"({"if": {}})",
                             R"({"format": "email"})",
                             R"({"minLength": -1})",
                             R"({"minLength": 2, "maxLength": 1})",
                             R"({"minItems": 2, "maxItems": 1})",
                             R"({"enum": []})",
                             R"({"enum": 1})",
                             R"({"required": [1]})",
                             R"({"properties": []})",
                             R"({"items": [{}]})",
                             R"({"type": []})",
                             R"({"type": 5})",
                             R"({"allOf": []})",
                             R"({"anyOf": 1})",
                             R"({"prefixItems": {}})",
                             R"({"enum": [1], "minimum": 0})",
                             R"({"pattern": "a", "minLength": 1})",
                             R"({"properties": {"a": false}, "required": ["a"]})",
                             R"({"additionalProperties": false, "required": ["a"]})",
                             R"({"minimum": "1"})"})
    EXPECT_THAT(refusal(schema), HasSubstr("s")) << schema;
}

TEST(SchemaGrammar, BoundsItsSizeAndTime) {
  ordered_json wide = {{"properties", ordered_json::object()}};
  for (int i = 0; i < 3000; ++i) wide["properties"][fmt::format("p{}", i)] = {{"type", "integer"}};
  EXPECT_THAT(refusal(wide.dump()), HasSubstr("more than 2000 parts"));
  ordered_json doubled = {{"$defs", {{"d0", {{"type", "null"}}}}}};
  for (int i = 1; i < 90; ++i) {
    const ordered_json below = {{"$ref", fmt::format("#/$defs/d{}", i - 1)}};
    doubled["$defs"][fmt::format("d{}", i)] = {{"prefixItems", {below, below}}};
  }
  doubled["$ref"] = "#/$defs/d40";
  EXPECT_EQ(refusal(doubled.dump()), "");
  ordered_json joined = {{"$defs", {{"d0", {{"minimum", 1}}}, {"e0", {{"maximum", 1}}}}}};
  for (int i = 1; i < 90; ++i) {
    const ordered_json d = {{"$ref", fmt::format("#/$defs/d{}", i - 1)}};
    const ordered_json e = {{"$ref", fmt::format("#/$defs/e{}", i - 1)}};
    joined["$defs"][fmt::format("d{}", i)] = {{"allOf", {d, e}}};
    joined["$defs"][fmt::format("e{}", i)] = {{"allOf", {e, d}}};
  }
  joined["$ref"] = "#/$defs/d80";
  EXPECT_THAT(refusal(joined.dump()), HasSubstr("more than 2000 parts"));
}

// ---- The fields of a request

ApiResult<std::shared_ptr<const Grammar>> read(const std::string& text) {
  return read_response_format(*parse_json_object(text), text);
}

std::string refused(const std::string& text) {
  const auto grammar = read(text);
  return grammar ? "" : grammar.error().param + "|" + grammar.error().message;
}

TEST(ResponseFormat, TakesTheFormsThatThereAre) {
  for (const char* none : {"{}", R"({"response_format": null})", R"({"response_format": {"type": "text"}})",
                           R"({"grammar": ""})"}) {
    const auto grammar = read(none);
    EXPECT_TRUE(grammar && *grammar == nullptr) << none;
  }
  for (
      const char* some :
      {R"({"response_format": {"type": "json_object"}})", R"({"grammar": "root ::= \"a\""})",
       R"({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": true}}})",
       R"({"response_format": {"type": "json_object", "schema": {"type": "object"}}})",
       R"({"response_format": {"type": "text"}, "grammar": "root ::= \"a\""})"}) {
    const auto grammar = read(some);
    EXPECT_TRUE(grammar && *grammar != nullptr) << some;
  }
}

TEST(ResponseFormat, NamesTheFieldThatItRefuses) {
  EXPECT_THAT(refused(R"({"response_format": 5})"), HasSubstr("response_format|"));
  EXPECT_THAT(refused(R"({"response_format": {}})"), HasSubstr("response_format.type|"));
  EXPECT_THAT(refused(R"({"response_format": {"type": "json_schema"}})"),
              HasSubstr("response_format.json_schema|"));
  EXPECT_THAT(refused(R"({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}})"),
              HasSubstr("response_format.json_schema.schema|"));
  EXPECT_THAT(
      refused(R"({"response_format": {"type": "json_schema", "json_schema": {"strict": 1, "schema": {}}}})"),
      HasSubstr("response_format.json_schema.strict|"));
  EXPECT_THAT(refused(R"({"response_format": {"type": "json_schema", "json_schema":
                      {"schema": {"properties": {"a": {"pattern": "a\\b"}}}}}})"),
              HasSubstr("response_format.json_schema.schema.properties.a.pattern|"));
  EXPECT_THAT(refused(R"({"grammar": "root ::="})"), testing::Not(HasSubstr("grammar|")));
  EXPECT_THAT(refused(R"({"grammar": "root = x"})"), HasSubstr("grammar|grammar: line 1: "));
  EXPECT_THAT(refused(R"({"grammar": "root ::= \"a\"", "response_format": {"type": "json_object"}})"),
              HasSubstr("grammar|"));
}

TEST(ResponseFormat, KeepsTheOrderOfPropertiesAndBoundsTheirNumber) {
  const std::string before =
      R"({"zz": {"schema": [1, {"a": 2}]}, "response_format": {"type": "json_schema", "json_schema": {"schema":)";
  const auto grammar =
      read(before + R"({"properties": {"b": {}, "a": {}}, "required": ["a", "b"]}}}, "prompt": {"b": 1}})");
  ASSERT_TRUE(grammar);
  std::string many = "{\"x\": [";
  for (int i = 0; i < 20'000; ++i) many += "1,";
  EXPECT_THAT(refused(before + many + "1]}}}}"), HasSubstr("at most 10000 values"));
  EXPECT_THAT(refused(before + "{\"x\": \"" + std::string(kSchemaBytesMax, 'x') + "\"}}}}"),
              HasSubstr("bytes"));
}

}  // namespace
}  // namespace dualdecoder
