#include "peer/openai_client.h"

#include <string_view>

#include <nlohmann/json.hpp>

#include "base/clock.h"

namespace dualdecoder {
namespace {

using Json = nlohmann::json;

/// The message of an error object, or the beginning of whatever else it is.
std::string error_text(const std::string& body) {
  constexpr std::size_t kShown = 200;
  const Json json = Json::parse(body, nullptr, false);
  if (json.is_object() && json.contains("error")) {
    const Json& error = json["error"];
    if (error.is_string()) return error.get<std::string>();
    if (error.is_object() && error.contains("message") && error["message"].is_string())
      return error["message"].get<std::string>();
  }
  std::string text = body.substr(0, kShown);
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  }
  return text;
}

Error refusal(const OpenAiServer& server, const HttpAnswer& answer) {
  const char* mend = "";
  if (answer.status == 401 || answer.status == 403)
    mend = server.key.empty() ? "; it wants a key: --api-key" : "; the key is not one of its keys";
  if (answer.status == 404) mend = "; is this an OpenAI-compatible server, and this its base address?";
  std::string message = fmt::format("{}: {} {}: {}{}", server.url.text(), answer.status, answer.reason,
                                    error_text(answer.body), mend);
  return {ErrorCode::kIo, std::move(message)};
}

std::string body_of(const OpenAiServer& server, const OpenAiRequest& request) {
  Json json = {{"model", server.model},
               {"max_tokens", request.max_tokens},
               {"temperature", 0},
               {"stream", true},
               {"stream_options", {{"include_usage", true}}}};
  if (request.chat) {
    json["messages"] = Json::array({{{"role", "user"}, {"content", request.text}}});
  } else {
    json["prompt"] = request.text;
  }
  if (request.ignore_end) json["ignore_eos"] = true;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::uint32_t count_in(const Json& usage, const char* name) {
  const auto found = usage.find(name);
  return found != usage.end() && found->is_number_unsigned() ? found->get<std::uint32_t>() : 0;
}

/// Server-sent events of one answer, as bytes come.
class AnswerReader {
 public:
  AnswerReader(const OpenAiServer& server, const Stopwatch& watch, OpenAiAnswer& answer)
      : server_(server), watch_(watch), answer_(answer) {}

  /// Whether text was added.
  bool take(std::string_view bytes) {
    answer_.end_time = watch_.seconds();
    const std::size_t before = answer_.text.size();
    rest_ += bytes;
    std::size_t begin = 0;
    for (std::size_t end; (end = rest_.find('\n', begin)) != std::string::npos; begin = end + 1)
      take_line(std::string_view(rest_).substr(begin, end - begin));
    rest_.erase(0, begin);
    return answer_.text.size() > before;
  }

 private:
  void take_line(std::string_view line) {
    constexpr std::string_view kData = "data:";
    if (!line.starts_with(kData)) return;
    line.remove_prefix(kData.size());
    while (!line.empty() && (line.front() == ' ')) line.remove_prefix(1);
    while (!line.empty() && (line.back() == '\r')) line.remove_suffix(1);
    if (line == "[DONE]") {
      answer_.ended = true;
      return;
    }
    const Json event = Json::parse(line.begin(), line.end(), nullptr, false);
    if (!event.is_object()) {
      fail_with("an event of its stream is no JSON object");
    } else if (event.contains("error")) {
      fail_with(error_text(std::string(line)));
    } else {
      take_event(event);
    }
  }

  void take_event(const Json& event) {
    if (const auto usage = event.find("usage"); usage != event.end() && usage->is_object()) {
      answer_.prompt_tokens = count_in(*usage, "prompt_tokens");
      answer_.answer_tokens = count_in(*usage, "completion_tokens");
    }
    const auto choices = event.find("choices");
    if (choices == event.end() || !choices->is_array() || choices->empty()) return;
    const Json& choice = choices->front();
    const Json* text = nullptr;
    if (choice.contains("text")) {
      text = &choice["text"];
    } else if (choice.contains("delta") && choice["delta"].contains("content")) {
      text = &choice["delta"]["content"];
    }
    if (text == nullptr || !text->is_string() || text->get_ref<const std::string&>().empty()) return;
    answer_.text += text->get_ref<const std::string&>();
    answer_.times.push_back(answer_.end_time);
  }

  void fail_with(const std::string& what) {
    if (!answer_.error)
      answer_.error = Error{ErrorCode::kIo, fmt::format("{}: {}", server_.url.text(), what)};
  }

  const OpenAiServer& server_;
  const Stopwatch& watch_;
  OpenAiAnswer& answer_;
  std::string rest_;  // of a line that is not whole yet
};

}  // namespace

Result<OpenAiServer> find_openai_server(const std::string& url, const std::string& key,
                                        const std::string& model, const std::function<bool()>& go_on) {
  auto parsed = parse_http_url(url);
  if (!parsed) return std::unexpected(parsed.error());
  OpenAiServer server{.url = std::move(*parsed), .key = key, .model = model};
  if (!server.url.path.ends_with("/v1")) server.url.path += "/v1";
  if (!model.empty()) return server;
  HttpTimes times;
  times.silence_max = std::chrono::seconds(30);
  const HttpCall call{.target = server.url.path + "/models", .key = key};
  const auto answer = std::move(perform_http(server.url, std::span(&call, 1), times, go_on).front());
  if (!answer) return std::unexpected(answer.error());
  if (answer->status != 200) return std::unexpected(refusal(server, *answer));
  const Json json = Json::parse(answer->body, nullptr, false);
  if (json.is_object() && json.contains("data") && json["data"].is_array() && !json["data"].empty()) {
    const Json& first = json["data"].front();
    if (first.is_object() && first.contains("id") && first["id"].is_string()) {
      server.model = first["id"].get<std::string>();
      return server;
    }
  }
  return fail(ErrorCode::kIo,
              "{}/models answered with something that is no list of models: {}; is this an OpenAI-compatible "
              "server?",
              server.url.text(), error_text(answer->body));
}

std::vector<OpenAiAnswer> ask_openai(const OpenAiServer& server, std::span<const OpenAiRequest> requests,
                                     const OnAnswer& on_answer, const std::function<bool()>& go_on) {
  std::vector<OpenAiAnswer> answers(requests.size());
  std::vector<AnswerReader> readers;
  std::vector<bool> enough(requests.size(), false);
  std::vector<HttpCall> calls;
  readers.reserve(requests.size());
  const Stopwatch watch;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    readers.emplace_back(server, watch, answers[i]);
    calls.push_back({.method = "POST",
                     .target = server.url.path + (requests[i].chat ? "/chat/completions" : "/completions"),
                     .body = body_of(server, requests[i]),
                     .key = server.key,
                     .on_bytes = [&, i](std::string_view bytes) {
                       if (readers[i].take(bytes) && !on_answer(i, answers[i])) enough[i] = true;
                       return !enough[i] && !answers[i].error && !answers[i].ended;
                     }});
  }
  const auto results = perform_http(server.url, calls, {}, go_on);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    OpenAiAnswer& answer = answers[i];
    if (answer.error || answer.ended || enough[i]) continue;
    if (!results[i]) {
      answer.error = results[i].error();
    } else if (results[i]->status != 200) {
      answer.error = refusal(server, *results[i]);
    } else {
      answer.error = Error{
          ErrorCode::kIo, fmt::format("{}: its stream ended before the answer was whole", server.url.text())};
    }
  }
  return answers;
}

}  // namespace dualdecoder
