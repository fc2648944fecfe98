// OpenAI's answer objects, built from the events of the jobs that one request became: chunks for a stream, or
// one object at the end. Pure; one owner.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "decode/text_assembler.h"
#include "model/vocabulary.h"
#include "serve/job.h"
#include "serve/request.h"
#include "serve/request_record.h"

namespace dualdecoder {

struct ReplyHead {
  std::string id;            // without its prefix
  std::string model;         // as the server names it
  std::int64_t created = 0;  // seconds since 1970
};

class Reply {
 public:
  /// `prompts`: the tokens of each prompt. Choice i answers prompt i / request.choices. `vocabulary` outlives
  /// the reply.
  Reply(const CompletionRequest& request, const Vocabulary& vocabulary, ReplyHead head,
        std::vector<std::vector<TokenId>> prompts);

  /// As the client sees it.
  std::string id() const { return (chat() ? "chatcmpl-" : "cmpl-") + head_.id; }
  std::uint32_t choices() const { return static_cast<std::uint32_t>(choices_.size()); }
  /// Adds to `chunks` what the event of a choice is in a stream, each one JSON text.
  void take(std::uint32_t choice, JobEvent event, std::vector<std::string>* chunks);
  /// All choices have ended.
  bool ended() const { return ended_ == choices_.size(); }
  /// Of a choice that failed. The whole request fails with it.
  const std::optional<ApiError>& error() const { return error_; }
  /// Of the choices that have ended.
  RequestUsage totals() const;
  /// The chunk with the usage, if it was asked for; after the end.
  std::optional<std::string> usage_chunk() const;
  /// The whole answer, after the end.
  std::string object() const;

 private:
  struct Choice {
    std::string text;
    std::vector<TokenLogprob> logprobs;  // completions with echo: those of the prompt first
    std::optional<JobEnd> end;
    bool begun = false;  // its first chunk is out
  };

  // How much text stands before a token: in characters, of which the last may be begun.
  struct TextOffset {
    Utf8Stream stream;
    std::size_t characters = 0;
  };

  bool chat() const { return request_.endpoint == Endpoint::kChat; }
  const std::vector<TokenId>& prompt_of(std::uint32_t choice) const {
    return prompts_[choice / request_.choices];
  }
  std::uint64_t seed_of(std::uint32_t choice) const {
    return request_.sampling.seed + choice % request_.choices;
  }
  nlohmann::ordered_json frame(bool chunk) const;
  nlohmann::ordered_json usage() const;
  nlohmann::ordered_json timings(const JobEnd& end) const;
  std::string token_text(TokenId token) const;
  nlohmann::ordered_json chat_logprobs(std::span<const TokenLogprob> entries) const;
  nlohmann::ordered_json completion_logprobs(std::span<const TokenLogprob> entries, bool with_first,
                                             std::uint32_t choice, TextOffset& offset) const;
  nlohmann::ordered_json logprobs_of(std::span<const TokenLogprob> entries, bool with_first,
                                     std::uint32_t choice, TextOffset& offset) const;
  std::string echoed(std::uint32_t choice) const;

  CompletionRequest request_;
  const Vocabulary& vocabulary_;
  ReplyHead head_;
  std::vector<std::vector<TokenId>> prompts_;
  std::vector<Choice> choices_;
  std::vector<TextOffset> offsets_;  // [choice] of logprobs in a stream
  std::size_t ended_ = 0;
  std::optional<ApiError> error_;
};

}  // namespace dualdecoder
