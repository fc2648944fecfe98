#include "serve/reply.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace dualdecoder {
namespace {

using nlohmann::ordered_json;

// What is not UTF-8 (a token's piece can end within a character) becomes U+FFFD.
std::string dump(const ordered_json& document) {
  return document.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

ordered_json bytes_of(const std::string& text) {
  ordered_json bytes = ordered_json::array();
  for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

std::string as_utf8(const std::string& bytes) {
  Utf8Stream stream;
  std::string text;
  stream.push(bytes, text);
  if (stream.partial_bytes() > 0) text += "\xEF\xBF\xBD";
  return text;
}

// As OpenAI writes a token of a text completion that is no text by itself: "bytes:\\xf0\\x9f". So no two
// tokens look the same.
std::string text_or_bytes(const std::string& piece) {
  Utf8Stream stream;
  std::string text;
  stream.push(piece, text);
  if (stream.partial_bytes() == 0 && stream.replaced() == 0) return piece;
  std::string bytes = "bytes:";
  for (const char c : piece) bytes += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return bytes;
}

std::size_t count_characters(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

double per_second(std::uint32_t count, double seconds) { return seconds > 0.0 ? count / seconds : 0.0; }

}  // namespace

Reply::Reply(const CompletionRequest& request, const Vocabulary& vocabulary, ReplyHead head,
             std::vector<std::vector<TokenId>> prompts)
    : request_(request), vocabulary_(vocabulary), head_(std::move(head)), prompts_(std::move(prompts)) {
  choices_.resize(prompts_.size() * request_.choices);
  offsets_.resize(choices_.size());
}

ordered_json Reply::frame(bool chunk) const {
  const char* object = !chat() ? "text_completion" : chunk ? "chat.completion.chunk" : "chat.completion";
  return {{"id", id()}, {"object", object}, {"created", head_.created}, {"model", head_.model}};
}

std::string Reply::token_text(TokenId token) const { return vocabulary_.piece(token, true); }

// ---- Logprobs

ordered_json Reply::chat_logprobs(std::span<const TokenLogprob> entries) const {
  const auto entry = [this](TokenId token, float logprob) {
    const std::string text = token_text(token);
    return ordered_json{{"token", as_utf8(text)}, {"logprob", logprob}, {"bytes", bytes_of(text)}};
  };
  ordered_json content = ordered_json::array();
  for (const TokenLogprob& made : entries) {
    ordered_json item = entry(made.token, made.logprob);
    item["top_logprobs"] = ordered_json::array();
    for (const auto& [token, logprob] : made.top) item["top_logprobs"].push_back(entry(token, logprob));
    content.push_back(std::move(item));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

// `with_first`: before them stands the prompt's first token, of which nothing says how likely it was.
ordered_json Reply::completion_logprobs(std::span<const TokenLogprob> entries, bool with_first,
                                        std::uint32_t choice, TextOffset& offset) const {
  ordered_json tokens = ordered_json::array();
  ordered_json logprobs = ordered_json::array();
  ordered_json tops = ordered_json::array();
  ordered_json offsets = ordered_json::array();
  const auto add = [&](TokenId token) {
    tokens.push_back(text_or_bytes(token_text(token)));
    offsets.push_back(offset.characters);
    std::string text;
    offset.stream.push(vocabulary_.piece(token), text);
    offset.characters += count_characters(text);
  };
  if (with_first) {
    add(prompt_of(choice).front());
    logprobs.push_back(nullptr);
    tops.push_back(nullptr);
  }
  for (const TokenLogprob& made : entries) {
    add(made.token);
    logprobs.push_back(made.logprob);
    ordered_json top = ordered_json::object();
    for (const auto& [token, logprob] : made.top) top[text_or_bytes(token_text(token))] = logprob;
    top[text_or_bytes(token_text(made.token))] = made.logprob;
    tops.push_back(std::move(top));
  }
  return {{"tokens", std::move(tokens)},
          {"token_logprobs", std::move(logprobs)},
          {"top_logprobs", std::move(tops)},
          {"text_offset", std::move(offsets)}};
}

ordered_json Reply::logprobs_of(std::span<const TokenLogprob> entries, bool with_first, std::uint32_t choice,
                                TextOffset& offset) const {
  if (!request_.top_logprobs) return nullptr;
  return chat() ? chat_logprobs(entries) : completion_logprobs(entries, with_first, choice, offset);
}

std::string Reply::echoed(std::uint32_t choice) const {
  const Prompt& prompt = request_.prompts[choice / request_.choices];
  if (const auto* text = std::get_if<std::string>(&prompt)) return *text;
  std::string bytes;
  for (const TokenId token : prompt_of(choice)) bytes += vocabulary_.piece(token);
  return as_utf8(bytes);
}

// ---- Events

void Reply::take(std::uint32_t index, JobEvent event, std::vector<std::string>* chunks) {
  Choice& choice = choices_[index];
  DD_CHECK(!choice.end, "choice {} has ended", index);
  const bool echoes = request_.echo && !choice.begun;
  if (event.end && event.end->reason == FinishReason::kError && !error_) error_ = api_error(event.end->error);

  if (chunks != nullptr && event.prompt_done > 0 && request_.return_progress) {
    ordered_json chunk = frame(true);
    chunk["choices"] = ordered_json::array();
    chunk["prompt_progress"] = {
        {"index", index}, {"total", prompt_of(index).size()}, {"processed", event.prompt_done}};
    chunks->push_back(dump(chunk));
  }
  std::vector<TokenLogprob> logprobs = std::move(event.prompt_logprobs);
  const bool with_first = echoes && (!logprobs.empty() || prompt_of(index).size() == 1);
  logprobs.insert(logprobs.end(), event.logprobs.begin(), event.logprobs.end());
  const bool begins = !event.text.empty() || !logprobs.empty() || event.end;
  if (!begins) return;
  const std::string text = echoes ? echoed(index) + event.text : event.text;
  if (chunks != nullptr) {
    const bool is_first = !std::exchange(choice.begun, true);
    const bool failed = event.end && event.end->reason == FinishReason::kError;
    ordered_json item = {{"index", index}};
    if (chat()) {
      item["delta"] = ordered_json::object();
      if (is_first) item["delta"]["role"] = "assistant";
      if (is_first || !text.empty()) item["delta"]["content"] = text;
    } else {
      item["text"] = text;
    }
    item["logprobs"] = logprobs.empty() && !with_first
                           ? ordered_json(nullptr)
                           : logprobs_of(logprobs, with_first, index, offsets_[index]);
    item["finish_reason"] =
        event.end && !failed ? ordered_json(finish_reason_name(event.end->reason)) : ordered_json(nullptr);
    if (event.end) item["seed"] = seed_of(index);
    ordered_json chunk = frame(true);
    chunk["choices"] = ordered_json::array({std::move(item)});
    if (event.end) chunk["timings"] = timings(*event.end);
    if (!failed) chunks->push_back(dump(chunk));
  } else {
    choice.begun = true;
    choice.text += text;
    choice.logprobs.insert(choice.logprobs.end(), std::make_move_iterator(logprobs.begin()),
                           std::make_move_iterator(logprobs.end()));
  }
  if (event.end) {
    choice.end = std::move(event.end);
    ++ended_;
  }
}

// ---- Ends

RequestUsage Reply::totals() const {
  RequestUsage sum;
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    const std::optional<JobEnd>& end = choices_[i].end;
    const bool first_of_prompt = i % request_.choices == 0;
    if (first_of_prompt) sum.prompt_tokens += prompts_[i / request_.choices].size();
    if (!end) continue;
    if (first_of_prompt) sum.cached_tokens += end->cached_tokens;
    sum.completion_tokens += end->tokens;
  }
  if (const std::optional<JobEnd>& end = choices_.front().end) {
    sum.queue_s = end->queue_s;
    sum.prompt_s = end->prompt_s;
    sum.decode_s = end->decode_s;
  }
  return sum;
}

ordered_json Reply::usage() const {
  const RequestUsage sum = totals();
  return {{"prompt_tokens", sum.prompt_tokens},
          {"completion_tokens", sum.completion_tokens},
          {"total_tokens", sum.prompt_tokens + sum.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", sum.cached_tokens}}}};
}

ordered_json Reply::timings(const JobEnd& end) const {
  const std::uint32_t computed = end.prompt_tokens - end.cached_tokens;
  const std::uint32_t decoded = end.tokens == 0 ? 0 : end.tokens - 1;  // the first comes with the prompt
  return {{"queue_ms", end.queue_s * 1e3},
          {"cache_n", end.cached_tokens},
          {"prompt_n", computed},
          {"prompt_ms", end.prompt_s * 1e3},
          {"prompt_per_second", per_second(computed, end.prompt_s)},
          {"predicted_n", end.tokens},
          {"predicted_ms", end.decode_s * 1e3},
          {"predicted_per_second", per_second(decoded, end.decode_s)}};
}

std::optional<std::string> Reply::usage_chunk() const {
  if (!request_.include_usage) return std::nullopt;
  ordered_json chunk = frame(true);
  chunk["choices"] = ordered_json::array();
  chunk["usage"] = usage();
  return dump(chunk);
}

std::string Reply::object() const {
  ordered_json object = frame(false);
  object["choices"] = ordered_json::array();
  for (std::uint32_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = choices_[i];
    ordered_json item = {{"index", i}};
    if (chat()) {
      item["message"] = {{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
    } else {
      item["text"] = choice.text;
    }
    TextOffset offset;
    item["logprobs"] = logprobs_of(choice.logprobs, request_.echo, i, offset);
    item["finish_reason"] = finish_reason_name(choice.end->reason);
    item["seed"] = seed_of(i);
    object["choices"].push_back(std::move(item));
  }
  object["usage"] = usage();
  object["timings"] = timings(*choices_.front().end);
  return dump(object);
}

}  // namespace dualdecoder
