#include "serve/request.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "decode/text_assembler.h"
#include "serve/json_reader.h"

namespace dualdecoder {
namespace {

using nlohmann::json;

constexpr std::size_t kNameBytesMax = 256;
constexpr std::int64_t kBudgetMax = 1 << 30;  // more than any context
constexpr std::size_t kStopBytesMax = 1024;

ApiError bad(const std::string& param, const std::string& message) {
  return bad_field(param, param + ": " + message);
}

bool is_token(const json& value) {
  using Limits = std::numeric_limits<TokenId>;
  if (value.is_number_unsigned()) return value.get<std::uint64_t>() <= std::uint64_t{Limits::max()};
  if (!value.is_number()) return false;
  const auto number = value.get<double>();  // exact for what is in range
  return std::trunc(number) == number && number >= Limits::min() && number <= Limits::max();
}

// ---- Messages

// A string, or a list of {"type": "text", "text": ...}.
ApiResult<std::string> read_content(const json* content, const std::string& path) {
  const auto checked = [&path](std::string text) -> ApiResult<std::string> {
    if (text.find('\0') == text.npos) return text;
    return std::unexpected(bad(path, "has a NUL character, which no chat template can carry"));
  };
  if (content == nullptr) return std::unexpected(bad(path, "is missing"));
  if (content->is_string()) return checked(content->get<std::string>());
  if (!content->is_array()) {
    return std::unexpected(
        bad(path, "wanted is a string or a list of text parts, not " + json_kind(*content)));
  }
  std::string text;
  for (std::size_t i = 0; i < content->size(); ++i) {
    const std::string part_path = fmt::format("{}[{}]", path, i);
    const json& part = (*content)[i];
    if (!part.is_object()) {
      return std::unexpected(bad(part_path, "wanted is an object, not " + json_kind(part)));
    }
    JsonReader reader(part, part_path + ".");
    const auto type = reader.string("type", kNameBytesMax);
    const auto piece = reader.string("text", std::numeric_limits<std::size_t>::max());
    if (auto status = reader.status(); !status) return std::unexpected(status.error());
    if (type.value_or("") != "text" || !piece) {
      return std::unexpected(bad(part_path, R"(only parts {"type": "text", "text": ...} are supported)"));
    }
    text += *piece;
  }
  return checked(std::move(text));
}

ApiResult<ChatMessage> read_message(const json& message, const std::string& path) {
  if (!message.is_object()) {
    return std::unexpected(bad(path, "wanted is an object, not " + json_kind(message)));
  }
  JsonReader reader(message, path + ".");
  auto role = reader.string("role", kNameBytesMax);
  if (auto status = reader.status(); !status) return std::unexpected(status.error());
  if (!role) return std::unexpected(bad(path + ".role", "is missing"));
  if (*role == "developer") role = "system";
  if (*role != "system" && *role != "user" && *role != "assistant") {
    return std::unexpected(bad(path + ".role", fmt::format("\"{}\" is not supported; there are system, "
                                                           "developer, user and assistant",
                                                           *role)));
  }
  if (const json* calls = reader.any("tool_calls"); calls != nullptr && *calls != json::array()) {
    return std::unexpected(bad(path + ".tool_calls", "tools are not supported"));
  }
  auto content = read_content(reader.any("content"), path + ".content");
  if (!content) return std::unexpected(content.error());
  return ChatMessage{std::move(*role), std::move(*content)};
}

ApiStatus read_messages(const json& body, CompletionRequest& request) {
  const auto messages = body.find("messages");
  if (messages == body.end() || !messages->is_array() || messages->empty()) {
    return std::unexpected(bad("messages", "wanted is a list of at least one message"));
  }
  if (messages->size() > kMessagesMax) {
    return std::unexpected(
        bad("messages", fmt::format("at most {} are taken, there are {}", kMessagesMax, messages->size())));
  }
  for (std::size_t i = 0; i < messages->size(); ++i) {
    auto message = read_message((*messages)[i], fmt::format("messages[{}]", i));
    if (!message) return std::unexpected(message.error());
    request.messages.push_back(std::move(*message));
  }
  return {};
}

// ---- Prompts

// A text, a list of token ids, or a list of either.
ApiStatus read_prompts(const json& body, CompletionRequest& request) {
  const auto found = body.find("prompt");
  if (found == body.end() || found->is_null()) {
    return std::unexpected(bad("prompt", "is missing; wanted is a string or a list of token ids"));
  }
  const json& prompt = *found;
  if (prompt.is_string()) {
    request.prompts.emplace_back(prompt.get<std::string>());
    return {};
  }
  if (!prompt.is_array() || prompt.empty()) {
    return std::unexpected(
        bad("prompt", "wanted is a string, a list of token ids, or a list of either; not " +
                          (prompt.is_array() ? "an empty list" : json_kind(prompt))));
  }
  if (prompt.front().is_number()) {
    auto tokens = read_token_ids(prompt, "prompt");
    if (!tokens) return std::unexpected(tokens.error());
    request.prompts.emplace_back(std::move(*tokens));
    return {};
  }
  if (prompt.size() > kPromptsMax) {
    return std::unexpected(
        bad("prompt", fmt::format("at most {} are taken at once, there are {}", kPromptsMax, prompt.size())));
  }
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    const std::string path = fmt::format("prompt[{}]", i);
    if (prompt[i].is_string()) {
      request.prompts.emplace_back(prompt[i].get<std::string>());
    } else if (prompt[i].is_array() && !prompt[i].empty()) {
      auto tokens = read_token_ids(prompt[i], path);
      if (!tokens) return std::unexpected(tokens.error());
      request.prompts.emplace_back(std::move(*tokens));
    } else {
      return std::unexpected(bad(path, "wanted is a string or a list of token ids"));
    }
  }
  return {};
}

// ---- What both have

void read_sampling(JsonReader& reader, SamplingOptions& sampling) {
  const auto set = [&](auto& field, const auto& value) {
    if (value) field = static_cast<std::remove_reference_t<decltype(field)>>(*value);
  };
  set(sampling.temperature, reader.number("temperature", 0.0, 100.0));
  set(sampling.top_k, reader.integer("top_k", 0, std::numeric_limits<std::int32_t>::max()));
  // What is just within the range of a double may be at its end as a float.
  if (const auto top_p = reader.number("top_p", 0.0, 1.0)) {
    if (*top_p == 0.0) reader.refuse("top_p", "wanted is a number above 0, up to 1");
    sampling.top_p = std::max(static_cast<float>(*top_p), std::numeric_limits<float>::min());
  }
  if (const auto min_p = reader.number("min_p", 0.0, 1.0)) {
    if (*min_p == 1.0) reader.refuse("min_p", "wanted is a number from 0, below 1");
    sampling.min_p = std::min(static_cast<float>(*min_p), std::nextafter(1.0f, 0.0f));
  }
  for (const char* name : {"repetition_penalty", "repeat_penalty"})
    set(sampling.repeat_penalty, reader.number(name, 0.01, 100.0));
  set(sampling.frequency_penalty, reader.number("frequency_penalty", -2.0, 2.0));
  set(sampling.presence_penalty, reader.number("presence_penalty", -2.0, 2.0));
  set(sampling.penalty_last_n, reader.integer("repeat_last_n", -1, std::numeric_limits<std::int32_t>::max()));
  set(sampling.ignore_eos, reader.boolean("ignore_eos"));
  const auto seed = reader.integer("seed", -1);
  sampling.seed = seed && *seed >= 0 ? static_cast<std::uint64_t>(*seed) : random_seed();
}

void read_logit_bias(JsonReader& reader, SamplingOptions& sampling) {
  const json* biases = reader.object("logit_bias");
  if (biases == nullptr) return;
  for (const auto& [key, value] : biases->items()) {
    TokenId token = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    if (error != std::errc() || end != key.data() + key.size()) {
      reader.refuse("logit_bias", fmt::format("\"{}\" is not a token id", key));
    } else if (!value.is_number() || !(std::abs(value.get<double>()) <= 100.0)) {
      reader.refuse("logit_bias", fmt::format("the bias of token {} is {}; wanted is a number from -100 to "
                                              "100",
                                              key, json_kind(value)));
    } else {
      sampling.logit_bias[token] = value.get<float>();
    }
  }
}

void read_stop(JsonReader& reader, std::vector<std::string>& stop) {
  const json* value = reader.any("stop");
  if (value == nullptr) return;
  if (value->is_string()) {
    stop.push_back(value->get<std::string>());
  } else if (value->is_array()) {
    for (const json& entry : *value) {
      if (!entry.is_string()) return reader.refuse("stop", "wanted are strings, not " + json_kind(entry));
      stop.push_back(entry.get<std::string>());
    }
  } else {
    return reader.refuse("stop", "wanted is a string or a list of strings, not " + json_kind(*value));
  }
  for (const std::string& text : stop) {
    if (text.size() > kStopBytesMax) {
      return reader.refuse("stop",
                           fmt::format("at most {} bytes are taken, one has {}", kStopBytesMax, text.size()));
    }
  }
  if (const Status status = validate_stop_strings(stop); !status) {
    reader.refuse("stop", status.error().message);
  }
}

void read_logprobs(JsonReader& reader, CompletionRequest& request) {
  if (request.endpoint == Endpoint::kCompletions) {
    if (const auto count = reader.integer("logprobs", 0, kTopLogprobsMax))
      request.top_logprobs = static_cast<std::uint32_t>(*count);
    return;
  }
  const bool wanted = reader.boolean("logprobs").value_or(false);
  const auto count = reader.integer("top_logprobs", 0, kTopLogprobsMax);
  if (count && *count > 0 && !wanted) reader.refuse("top_logprobs", "needs \"logprobs\": true");
  if (wanted) request.top_logprobs = static_cast<std::uint32_t>(count.value_or(0));
}

void read_streaming(JsonReader& reader, CompletionRequest& request) {
  request.stream = reader.boolean("stream").value_or(false);
  request.return_progress = reader.boolean("return_progress").value_or(false);
  const json* options = reader.object("stream_options");
  if (options == nullptr) return;
  if (!request.stream) return reader.refuse("stream_options", "needs \"stream\": true");
  JsonReader inner(*options, "stream_options.");
  request.include_usage = inner.boolean("include_usage").value_or(false);
  reader.refuse_as(inner);
}

void read_selection(JsonReader& reader, CompletionRequest& request) {
  const json* const own = reader.object("dualdecoder");
  if (own == nullptr) return;
  JsonReader fields(*own, "dualdecoder.");
  if (const auto name = fields.string("policy", kNameBytesMax)) {
    if (const auto policy = parse_policy(*name)) {
      request.policy = *policy;
    } else {
      fields.refuse("policy", "names no policy; /props lists those of this server");
    }
  }
  if (const auto budget = fields.integer("budget", 1, kBudgetMax))
    request.budget_tokens = static_cast<std::uint32_t>(*budget);
  reader.refuse_as(fields);
}

// What would change the answer and is not built is refused, not ignored.
void refuse_unsupported(JsonReader& reader) {
  for (const char* name : {"tools", "functions"}) {
    const json* value = reader.any(name);
    if (value != nullptr && *value != json::array()) reader.refuse(name, "tools are not supported");
  }
  for (const char* name : {"suffix", "audio", "prediction"}) {
    const json* value = reader.any(name);
    if (value != nullptr && *value != "") reader.refuse(name, "is not supported");
  }
}

}  // namespace

ApiResult<std::vector<TokenId>> read_token_ids(const json& list, const std::string& path) {
  std::vector<TokenId> tokens;
  tokens.reserve(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!is_token(list[i])) {
      return std::unexpected(
          bad(fmt::format("{}[{}]", path, i), "wanted is a token id, not " + json_kind(list[i])));
    }
    tokens.push_back(list[i].get<TokenId>());
  }
  return tokens;
}

ApiResult<CompletionRequest> read_completion_request(Endpoint endpoint, const json& body) {
  CompletionRequest request;
  request.endpoint = endpoint;
  const ApiStatus status =
      endpoint == Endpoint::kChat ? read_messages(body, request) : read_prompts(body, request);
  if (!status) return std::unexpected(status.error());

  JsonReader reader(body);
  request.model = reader.string("model", kNameBytesMax).value_or("");
  read_sampling(reader, request.sampling);
  read_logit_bias(reader, request.sampling);
  read_stop(reader, request.stop);
  for (const char* name : {"max_tokens", "max_completion_tokens"}) {
    if (const auto tokens = reader.integer(name, 0)) request.tokens_max = static_cast<std::uint64_t>(*tokens);
  }
  request.choices = static_cast<std::uint32_t>(reader.integer("n", 1, kChoicesMax).value_or(1));
  if (const auto best_of = reader.integer("best_of", 1, kChoicesMax); best_of && *best_of != request.choices)
    reader.refuse("best_of", "is only supported where it equals n");
  read_logprobs(reader, request);
  read_streaming(reader, request);
  if (endpoint == Endpoint::kCompletions) request.echo = reader.boolean("echo").value_or(false);
  request.cache_prompt = reader.boolean("cache_prompt").value_or(true);
  request.cache_salt = reader.string("cache_salt", kNameBytesMax).value_or("");
  read_selection(reader, request);
  request.user = reader.string("user", kNameBytesMax).value_or("");
  request.priority = static_cast<std::int32_t>(reader.integer("priority", -100, 100).value_or(0));
  refuse_unsupported(reader);
  if (const auto fields = reader.status(); !fields) return std::unexpected(fields.error());
  return request;
}

}  // namespace dualdecoder
