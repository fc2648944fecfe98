// The OpenAI API from the client's side: what `eval --url` and `bench --peer URL` ask a server for. Any
// server that streams completions will do. Every failure names the server and says what to do.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "peer/http_client.h"

namespace dualdecoder {

struct OpenAiServer {
  HttpUrl url;  // its path ends in /v1
  std::string key = {};
  std::string model = {};
};

/// A server whose model is `model`, or, where that is empty, the first that it lists; then a wrong address or
/// key is known at once.
Result<OpenAiServer> find_openai_server(const std::string& url, const std::string& key,
                                        const std::string& model, const std::function<bool()>& go_on);

/// Answered greedily.
struct OpenAiRequest {
  std::string text = {};
  bool chat = false;  // the one message of a user; otherwise a text to be continued
  std::uint32_t max_tokens = 0;
  bool ignore_end = false;  // for servers that know ignore_eos
};

/// What has come of an answer.
struct OpenAiAnswer {
  std::string text = {};
  std::vector<double> times = {};   // of the events with text, in seconds since all were asked for
  std::uint32_t prompt_tokens = 0;  // as the server counts them; 0: it did not say
  std::uint32_t answer_tokens = 0;
  double end_time = 0.0;            // of its last byte
  bool ended = false;               // by itself
  std::optional<Error> error = {};  // of this answer; a cut connection among them
};

/// Takes note of an answer to which something has been added; false: no more of it is wanted.
using OnAnswer = std::function<bool(std::size_t number, const OpenAiAnswer& answer)>;

/// All at once, each a stream. The answers that there are when `go_on` becomes false are not whole.
std::vector<OpenAiAnswer> ask_openai(const OpenAiServer& server, std::span<const OpenAiRequest> requests,
                                     const OnAnswer& on_answer, const std::function<bool()>& go_on);

}  // namespace dualdecoder
