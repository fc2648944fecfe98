// Requests of OpenAI's two completion endpoints as values: what a body says, checked field by field.
// docs/api.md has the table of fields and ranges. Pure; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "decode/grammar.h"
#include "decode/sampler.h"
#include "decode/tier_options.h"
#include "model/vocabulary.h"
#include "serve/api_error.h"

namespace dualdecoder {

enum class Endpoint { kChat, kCompletions };

inline constexpr std::uint32_t kChoicesMax = 16;
inline constexpr std::uint32_t kPromptsMax = 64;
inline constexpr std::uint32_t kTopLogprobsMax = 20;
inline constexpr std::uint32_t kMessagesMax = 10'000;

using Prompt = std::variant<std::string, std::vector<TokenId>>;

struct CompletionRequest {
  Endpoint endpoint = Endpoint::kChat;
  std::string model;
  std::vector<ChatMessage> messages;  // of kChat
  std::vector<Prompt> prompts;        // of kCompletions
  SamplingOptions sampling;           // its seed is drawn where none was asked for
  std::vector<std::string> stop;
  std::optional<std::uint64_t> tokens_max;
  std::shared_ptr<const Grammar> grammar;     // see response_format.h; null: none
  std::uint32_t choices = 1;                  // of each prompt
  std::optional<std::uint32_t> top_logprobs;  // none: no logprobs at all
  bool echo = false;
  bool stream = false;
  bool include_usage = false;
  bool return_progress = false;
  bool cache_prompt = true;
  std::string cache_salt;
  std::optional<Policy> policy;                // none: the server's
  std::optional<std::uint32_t> budget_tokens;  // the same
  std::string user;
  std::int32_t priority = 0;
};

/// 400 naming the first field that cannot be used. What depends on the vocabulary or the context is checked
/// later, where these are known.
ApiResult<CompletionRequest> read_completion_request(Endpoint endpoint, const nlohmann::json& body);

/// A list of whole numbers as token ids; `path` names it in messages.
ApiResult<std::vector<TokenId>> read_token_ids(const nlohmann::json& list, const std::string& path);

}  // namespace dualdecoder
