#include "serve/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serve/json_reader.h"

namespace dualdecoder {
namespace {

using nlohmann::json;
using testing::HasSubstr;

ApiResult<CompletionRequest> read_chat(json more) {
  json body = {{"messages", json::array({{{"role", "user"}, {"content", "hi"}}})}};
  body.update(more);
  return read_completion_request(Endpoint::kChat, body);
}

std::string refusal(const ApiResult<CompletionRequest>& result) {
  return result ? "" : result.error().param + "|" + result.error().message;
}

TEST(JsonBody, RefusesWhatIsNoObjectOfBoundedDepth) {
  const auto message = [](std::string_view text) {
    const auto value = parse_json_object(text);
    return value ? std::string("taken") : value.error().message;
  };
  EXPECT_THAT(message(""), HasSubstr("empty"));
  EXPECT_THAT(message("{"), HasSubstr("not JSON"));
  EXPECT_THAT(message("[]"), HasSubstr("a list"));
  EXPECT_THAT(message("\"x\""), HasSubstr("a string"));
  EXPECT_THAT(message("{\"a\":\"\xff\"}"), HasSubstr("UTF-8"));
  EXPECT_THAT(message("{\"a\":\"\\ud800\"}"), HasSubstr("surrogate"));
  EXPECT_THAT(message(std::string(100'000, '[')), HasSubstr("100000 levels"));
  EXPECT_EQ(message("{\"a\":\"[[[[\",\"a\":2}"), "taken");
  std::string nested = "{\"a\":";
  for (std::size_t i = 1; i < kJsonDepthMax; ++i) nested += "[";
  for (std::size_t i = 1; i < kJsonDepthMax; ++i) nested += "]";
  EXPECT_EQ(message(nested + "}"), "taken");
}

// Each numeric field at the ends of its range, beyond them, and with what is no number.
TEST(Request, HasAPolicyAndABudgetOfItsOwn) {
  const auto read = [](const json& own) {
    return read_completion_request(Endpoint::kCompletions, {{"prompt", "a"}, {"dualdecoder", own}});
  };
  const auto request = read({{"policy", "reactive"}, {"budget", 64}});
  ASSERT_TRUE(request);
  EXPECT_EQ(request->policy, Policy::kReactive);
  EXPECT_EQ(request->budget_tokens, 64U);
  EXPECT_EQ(read({{"budget", 64}})->policy, std::nullopt);
  EXPECT_EQ(read({{"policy", "best"}}).error().param, "dualdecoder.policy");
  EXPECT_EQ(read({{"budget", 0}}).error().param, "dualdecoder.budget");
  EXPECT_EQ(read({{"budget", "much"}}).error().param, "dualdecoder.budget");
  EXPECT_EQ(read("full").error().param, "dualdecoder");
}

TEST(Request, NamesTheFieldAndTheRangeOfEveryNumberThatIsOut) {
  struct Field {
    const char* name;
    std::vector<json> good;
    std::vector<json> bad;
  };
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const std::uint64_t beyond = std::uint64_t{1} << 63;
  const std::vector<Field> fields = {
      {"max_tokens", {0, 1, most, 3.0}, {-1, -2, beyond, 1.5, "3", 1e308, json::array(), true}},
      {"max_completion_tokens", {0, most}, {-1, "1"}},
      {"n", {1, 16}, {0, -1, 17, 10'000, 1.5, "2", 4294967297}},
      {"top_k", {0, 1, 2147483647}, {-1, 2147483648, 1.5, "3"}},
      {"seed", {-1, 0, 1, 4294967297, most}, {-2, beyond, 1.5, "3"}},
      {"temperature", {0, 0.5, 100}, {-1, 101, "1", 1e308}},
      {"top_p", {1e-6, 1, 0.5}, {0, -0.1, 1.5, "1"}},
      {"min_p", {0, 0.999}, {1, -0.1, 1.5}},
      {"repetition_penalty", {0.01, 100}, {0, -1, 101, "x"}},
      {"repeat_penalty", {1.1}, {0}},
      {"frequency_penalty", {-2, 2}, {-2.1, 2.1, "0"}},
      {"presence_penalty", {-2, 2}, {-2.1, 2.1}},
      {"repeat_last_n", {-1, 0, 2147483647}, {-2, 2147483648}},
      {"priority", {-100, 100}, {-101, 101, 1.5}},
  };
  for (const Field& field : fields) {
    for (const json& value : field.good)
      EXPECT_EQ(refusal(read_chat({{field.name, value}})), "") << field.name << value;
    for (const json& value : field.bad) {
      EXPECT_THAT(refusal(read_chat({{field.name, value}})),
                  testing::StartsWith(std::string(field.name) + "|"))
          << value;
    }
    EXPECT_EQ(refusal(read_chat({{field.name, nullptr}})), "");
  }
  EXPECT_EQ(read_chat({{"max_tokens", 0}})->tokens_max, 0U);
  EXPECT_EQ(read_chat({{"seed", 4294967297}})->sampling.seed, 4294967297U);
  EXPECT_THAT(refusal(read_chat({{"logprobs", true}, {"top_logprobs", 21}})), HasSubstr("0 to 20"));
  EXPECT_THAT(refusal(read_chat({{"top_logprobs", 2}})), HasSubstr("needs"));
}

TEST(Request, RefusesMessagesThatNoTemplateCanTake) {
  const auto messages = [](json value) {
    return refusal(read_completion_request(Endpoint::kChat, json{{"messages", std::move(value)}}));
  };
  EXPECT_THAT(messages(5), HasSubstr("messages|"));
  EXPECT_THAT(messages(json::array()), HasSubstr("at least one"));
  EXPECT_THAT(messages(json::array({nullptr})), HasSubstr("messages[0]|"));
  EXPECT_THAT(messages({{{"role", 7}, {"content", "x"}}}), HasSubstr("messages[0].role"));
  EXPECT_THAT(messages({{{"role", "wizard"}, {"content", "x"}}}), HasSubstr("wizard"));
  EXPECT_THAT(messages({{{"role", "user"}}}), HasSubstr("messages[0].content|"));
  EXPECT_THAT(messages({{{"role", "user"}, {"content", 3}}}), HasSubstr("the number 3"));
  EXPECT_THAT(messages({{{"role", "user"}, {"content", std::string("a\0b", 3)}}}), HasSubstr("NUL"));
  EXPECT_THAT(messages({{{"role", "user"}, {"content", {{{"type", "image_url"}}}}}}), HasSubstr("[0]"));
  EXPECT_EQ(refusal(read_completion_request(Endpoint::kChat, json{})).substr(0, 9), "messages|");
}

TEST(Request, JoinsTextPartsAndTakesDeveloperForSystem) {
  const auto request = read_completion_request(
      Endpoint::kChat,
      json{{"messages",
            {{{"role", "developer"}, {"content", "be brief"}},
             {{"role", "user"},
              {"content", {{{"type", "text"}, {"text", "a"}}, {{"type", "text"}, {"text", "b"}}}}}}}});
  ASSERT_TRUE(request);
  EXPECT_EQ(request->messages[0].role, "system");
  EXPECT_EQ(request->messages[1].content, "ab");
}

TEST(Request, TakesPromptsAsTextTokensOrListsOfEither) {
  const auto prompts = [](json value) {
    return read_completion_request(Endpoint::kCompletions, json{{"prompt", std::move(value)}});
  };
  EXPECT_EQ(std::get<std::string>(prompts("")->prompts.at(0)), "");
  EXPECT_EQ(std::get<std::vector<TokenId>>(prompts({1, 2})->prompts.at(0)), (std::vector<TokenId>{1, 2}));
  EXPECT_EQ(std::get<std::vector<TokenId>>(prompts({3.0})->prompts.at(0)), std::vector<TokenId>{3});
  EXPECT_EQ(prompts({{1}, {2}})->prompts.size(), 2U);
  EXPECT_EQ(prompts({"a", "b"})->prompts.size(), 2U);
  for (const json& bad : {json(5), json::array(), json({1.5}), json({2147483648}), json({{}}), json({1, "a"}),
                          json({"a", nullptr})})
    EXPECT_THAT(refusal(prompts(bad)), testing::StartsWith("prompt")) << bad;
  EXPECT_THAT(refusal(prompts({1, 1.5})), HasSubstr("prompt[1]"));
}

TEST(Request, ChecksStopsBiasesAndOptionsOfStreams) {
  EXPECT_EQ(read_chat({{"stop", "x"}})->stop, std::vector<std::string>{"x"});
  EXPECT_LT(read_chat({{"min_p", 0.9999999999999999}})->sampling.min_p, 1.0f);
  EXPECT_GT(read_chat({{"top_p", 1e-300}})->sampling.top_p, 0.0f);
  EXPECT_THAT(refusal(read_chat({{"stop", ""}})), HasSubstr("stop|"));
  EXPECT_THAT(refusal(read_chat({{"stop", {1}}})), HasSubstr("the number 1"));
  EXPECT_THAT(refusal(read_chat({{"stop", std::vector<std::string>(17, "x")}})), HasSubstr("16"));
  EXPECT_FLOAT_EQ(read_chat({{"logit_bias", {{"5", -100}}}})->sampling.logit_bias.at(5), -100.0f);
  EXPECT_THAT(refusal(read_chat({{"logit_bias", {{"x", 1}}}})), HasSubstr("\"x\""));
  EXPECT_THAT(refusal(read_chat({{"logit_bias", {{"5", 1e9}}}})), HasSubstr("token 5"));
  EXPECT_THAT(refusal(read_chat({{"stream_options", {{"include_usage", true}}}})), HasSubstr("stream"));
  EXPECT_TRUE(read_chat({{"stream", true}, {"stream_options", {{"include_usage", true}}}})->include_usage);
  EXPECT_THAT(refusal(read_chat({{"tools", {{{"type", "function"}}}}})), HasSubstr("tools"));
  EXPECT_THAT(refusal(read_chat({{"functions", json::object()}})), HasSubstr("functions"));
  EXPECT_EQ(refusal(read_chat({{"tools", json::array()}, {"suffix", ""}, {"unknown", {1, 2}}})), "");
}

}  // namespace
}  // namespace dualdecoder
