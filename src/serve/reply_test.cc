#include "serve/reply.h"

#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/gguf_file.h"
#include "model/log_capture.h"
#include "temporary_directory.h"
#include "tiny_model.h"

namespace dualdecoder {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

// The vocabulary of the tiny model: the 256 bytes.
const Vocabulary& vocabulary() {
  static const TemporaryDirectory directory;
  static const std::unique_ptr<Vocabulary> loaded = [] {
    const LogCapture log;
    const std::string path = directory.file("tiny.gguf");
    EXPECT_TRUE(write_tiny_model(path, {}));
    const auto file = GgufFile::open(path);
    EXPECT_TRUE(file);
    auto vocabulary = Vocabulary::load(**file);
    EXPECT_TRUE(vocabulary);
    return std::move(*vocabulary);
  }();
  return *loaded;
}

TokenId token_of(char byte) { return kTinyFirstByte + static_cast<unsigned char>(byte); }

std::vector<TokenId> tokens_of(const std::string& text) {
  std::vector<TokenId> tokens = {1};  // <s>
  for (const char byte : text) tokens.push_back(token_of(byte));
  return tokens;
}

CompletionRequest request_for(Endpoint endpoint) {
  CompletionRequest request;
  request.endpoint = endpoint;
  if (endpoint == Endpoint::kCompletions) request.prompts = {"ab"};
  request.sampling.seed = 42;
  return request;
}

Reply reply_to(const CompletionRequest& request) {
  std::vector<std::vector<TokenId>> prompts(std::max<std::size_t>(request.prompts.size(), 1),
                                            tokens_of("ab"));
  return Reply(request, vocabulary(), {.id = "1", .model = "tiny", .created = 7}, std::move(prompts));
}

JobEvent says(std::string text) {
  JobEvent event;
  event.text = std::move(text);
  return event;
}

JobEvent ends(FinishReason reason, std::uint32_t tokens, std::string text = "") {
  JobEvent event = says(std::move(text));
  event.end = JobEnd{.reason = reason, .error = {}, .prompt_tokens = 3, .cached_tokens = 0, .tokens = tokens};
  return event;
}

TokenLogprob logprob(char byte, float value) {
  return {
      .token = token_of(byte), .logprob = value, .top = {{token_of(byte), value}, {token_of('z'), -9.0f}}};
}

json one_chunk(Reply& reply, std::uint32_t choice, JobEvent event) {
  std::vector<std::string> chunks;
  reply.take(choice, std::move(event), &chunks);
  EXPECT_EQ(chunks.size(), 1U);
  return chunks.empty() ? json() : json::parse(chunks.back());
}

TEST(Reply, StreamsAChatWithTheRoleOnceAndTheReasonLast) {
  Reply reply = reply_to(request_for(Endpoint::kChat));
  const json first = one_chunk(reply, 0, says("He"));
  EXPECT_EQ(first["object"], "chat.completion.chunk");
  EXPECT_EQ(first["id"], "chatcmpl-1");
  EXPECT_EQ(first["model"], "tiny");
  EXPECT_EQ(first["created"], 7);
  EXPECT_FALSE(first.contains("usage"));
  EXPECT_EQ(first["choices"], json::array({{{"index", 0},
                                            {"delta", {{"role", "assistant"}, {"content", "He"}}},
                                            {"logprobs", nullptr},
                                            {"finish_reason", nullptr}}}));
  EXPECT_EQ(one_chunk(reply, 0, says("llo"))["choices"][0]["delta"], json({{"content", "llo"}}));
  EXPECT_FALSE(reply.ended());
  const json last = one_chunk(reply, 0, ends(FinishReason::kStop, 6));
  EXPECT_EQ(last["choices"][0]["delta"], json::object());
  EXPECT_EQ(last["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(last["timings"]["predicted_n"], 6);
  EXPECT_TRUE(reply.ended());
  EXPECT_FALSE(reply.usage_chunk());
}

TEST(Reply, AnAnswerWithoutTextStillHasARoleAndContent) {
  Reply reply = reply_to(request_for(Endpoint::kChat));
  const json only = one_chunk(reply, 0, ends(FinishReason::kLength, 0));
  EXPECT_EQ(only["choices"][0]["delta"], json({{"role", "assistant"}, {"content", ""}}));
  EXPECT_EQ(only["choices"][0]["finish_reason"], "length");
}

TEST(Reply, TheUsageChunkHasNoChoicesAndCountsAPromptOnce) {
  CompletionRequest request = request_for(Endpoint::kCompletions);
  request.prompts = {"ab", "ab"};
  request.choices = 2;
  request.include_usage = true;
  Reply reply = reply_to(request);
  ASSERT_EQ(reply.choices(), 4U);
  std::vector<std::string> chunks;
  for (std::uint32_t i = 0; i < 4; ++i) reply.take(i, ends(FinishReason::kStop, 10 + i), &chunks);
  const auto text = reply.usage_chunk();
  ASSERT_TRUE(text);
  const json chunk = json::parse(*text);
  EXPECT_EQ(chunk["choices"], json::array());
  EXPECT_EQ(chunk["object"], "text_completion");
  EXPECT_EQ(chunk["usage"], json({{"prompt_tokens", 6},
                                  {"completion_tokens", 46},
                                  {"total_tokens", 52},
                                  {"prompt_tokens_details", {{"cached_tokens", 0}}}}));
}

TEST(Reply, AnObjectJoinsTheTextAndKeepsChoicesApart) {
  CompletionRequest request = request_for(Endpoint::kChat);
  request.choices = 2;
  Reply reply = reply_to(request);
  reply.take(1, says("wo"), nullptr);
  reply.take(0, ends(FinishReason::kStop, 3, "one"), nullptr);
  reply.take(1, ends(FinishReason::kLength, 2, "rld"), nullptr);
  ASSERT_TRUE(reply.ended());
  const json object = json::parse(reply.object());
  EXPECT_EQ(object["object"], "chat.completion");
  EXPECT_EQ(object["choices"][0]["message"],
            json({{"role", "assistant"}, {"content", "one"}, {"refusal", nullptr}}));
  EXPECT_EQ(object["choices"][1]["message"]["content"], "world");
  EXPECT_EQ(object["choices"][1]["index"], 1);
  EXPECT_EQ(object["choices"][1]["finish_reason"], "length");
  EXPECT_EQ(object["usage"]["completion_tokens"], 5);
  EXPECT_EQ(object["usage"]["prompt_tokens"], 3);
}

// Whoever sent none can repeat the answer all the same.
TEST(Reply, TellsTheSeedOfEveryChoice) {
  CompletionRequest request = request_for(Endpoint::kChat);
  request.choices = 2;
  Reply reply = reply_to(request);
  EXPECT_EQ(one_chunk(reply, 0, ends(FinishReason::kStop, 1))["choices"][0]["seed"], 42);
  EXPECT_EQ(one_chunk(reply, 1, ends(FinishReason::kStop, 1))["choices"][0]["seed"], 43);
  const json object = json::parse(reply.object());
  EXPECT_EQ(object["choices"][0]["seed"], 42);
  EXPECT_EQ(object["choices"][1]["seed"], 43);
}

TEST(Reply, LogprobsOfAChatCarryTheBytesOfSplitCharacters) {
  CompletionRequest request = request_for(Endpoint::kChat);
  request.top_logprobs = 2;
  Reply reply = reply_to(request);
  JobEvent event = says("\xf0\x9f\x98\x80");
  for (const char byte : std::string("\xf0\x9f\x98\x80")) event.logprobs.push_back(logprob(byte, -0.5f));
  const json content = one_chunk(reply, 0, std::move(event))["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 4U);
  EXPECT_EQ(content[0]["bytes"], json::array({0xf0}));
  EXPECT_EQ(content[3]["bytes"], json::array({0x80}));
  EXPECT_EQ(content[0]["token"], "\xef\xbf\xbd");
  EXPECT_FLOAT_EQ(content[0]["logprob"].get<float>(), -0.5f);
  ASSERT_EQ(content[0]["top_logprobs"].size(), 2U);
  EXPECT_EQ(content[0]["top_logprobs"][1]["token"], "z");
  EXPECT_EQ(content[0]["top_logprobs"][1]["bytes"], json::array({'z'}));
}

// As OpenAI writes tokens that are no text by themselves, so that no two are the same.
TEST(Reply, LogprobsOfACompletionNameBytesAndCountCharacters) {
  CompletionRequest request = request_for(Endpoint::kCompletions);
  request.top_logprobs = 2;
  Reply reply = reply_to(request);
  JobEvent event = says("\xc3\xa4");
  event.logprobs = {logprob('\xc3', -1.0f), logprob('\xa4', -2.0f)};
  const json first = one_chunk(reply, 0, std::move(event))["choices"][0]["logprobs"];
  EXPECT_EQ(first["tokens"], json({"bytes:\\xc3", "bytes:\\xa4"}));
  EXPECT_EQ(first["token_logprobs"], json({-1.0f, -2.0f}));
  EXPECT_EQ(first["top_logprobs"][0], json({{"bytes:\\xc3", -1.0f}, {"z", -9.0f}}));
  EXPECT_EQ(first["text_offset"], json({0, 0}));
  JobEvent next = says("b");
  next.logprobs = {logprob('b', -3.0f)};
  EXPECT_EQ(one_chunk(reply, 0, std::move(next))["choices"][0]["logprobs"]["text_offset"], json({1}));
}

// The prompt's first token has no likelihood; <s> is no text and moves no offset.
TEST(Reply, EchoPutsThePromptAndItsLogprobsFirst) {
  CompletionRequest request = request_for(Endpoint::kCompletions);
  request.echo = true;
  request.top_logprobs = 1;
  for (const bool stream : {false, true}) {
    Reply reply = reply_to(request);
    std::vector<std::string> chunks;
    JobEvent prompt = says("c");
    prompt.prompt_logprobs = {logprob('a', -1.0f), logprob('b', -2.0f)};
    prompt.logprobs = {logprob('c', -3.0f)};
    reply.take(0, std::move(prompt), stream ? &chunks : nullptr);
    reply.take(0, ends(FinishReason::kLength, 1), stream ? &chunks : nullptr);
    const json answer = json::parse(stream ? chunks.at(0) : reply.object())["choices"][0];
    EXPECT_EQ(answer["text"], "abc");
    EXPECT_EQ(answer["logprobs"]["tokens"], json({"<s>", "a", "b", "c"}));
    EXPECT_EQ(answer["logprobs"]["token_logprobs"], json({nullptr, -1.0f, -2.0f, -3.0f}));
    EXPECT_EQ(answer["logprobs"]["top_logprobs"][0], nullptr);
    EXPECT_EQ(answer["logprobs"]["text_offset"], json({0, 0, 1, 2}));
    if (stream) {
      EXPECT_EQ(json::parse(chunks.at(1))["choices"][0]["text"], "");
    }
  }
}

TEST(Reply, EchoWithoutAnswerIsThePromptAlone) {
  CompletionRequest request = request_for(Endpoint::kCompletions);
  request.echo = true;
  Reply reply = reply_to(request);
  reply.take(0, ends(FinishReason::kLength, 0), nullptr);
  const json answer = json::parse(reply.object())["choices"][0];
  EXPECT_EQ(answer["text"], "ab");
  EXPECT_EQ(answer["logprobs"], nullptr);
}

TEST(Reply, OneChoiceThatFailsFailsTheRequestAndIsNoChunk) {
  CompletionRequest request = request_for(Endpoint::kChat);
  request.choices = 2;
  Reply reply = reply_to(request);
  std::vector<std::string> chunks;
  reply.take(0, says("x"), &chunks);
  JobEvent failed = ends(FinishReason::kError, 1);
  failed.end->error = {ErrorCode::kIo, "the disk is gone"};
  reply.take(0, std::move(failed), &chunks);
  EXPECT_EQ(chunks.size(), 1U);
  ASSERT_TRUE(reply.error());
  EXPECT_EQ(reply.error()->status, 500U);
  EXPECT_THAT(reply.error()->message, HasSubstr("the disk is gone"));
  EXPECT_FALSE(reply.ended());
}

TEST(Reply, TellsTheProgressOfAPromptOnlyWhenAsked) {
  CompletionRequest request = request_for(Endpoint::kChat);
  for (const bool wanted : {false, true}) {
    request.return_progress = wanted;
    Reply reply = reply_to(request);
    JobEvent event;
    event.prompt_done = 2;
    std::vector<std::string> chunks;
    reply.take(0, std::move(event), &chunks);
    ASSERT_EQ(chunks.size(), wanted ? 1U : 0U);
    if (!wanted) continue;
    const json chunk = json::parse(chunks[0]);
    EXPECT_EQ(chunk["choices"], json::array());
    EXPECT_EQ(chunk["prompt_progress"], json({{"index", 0}, {"total", 3}, {"processed", 2}}));
  }
}

}  // namespace
}  // namespace dualdecoder
