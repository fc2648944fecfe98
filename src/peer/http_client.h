// HTTP/1.1 as a client, for measuring other servers: several calls at once on the calling thread, bodies
// handed on as they come, time-outs, and messages that name the address. Plain http alone. On Boost.Beast.
//
// Nothing is kept between calls: each has a connection of its own, which is closed at its end.
#pragma once

#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace dualdecoder {

struct HttpUrl {
  std::string host;
  std::string port;
  std::string path;  // without a slash at its end

  std::string text() const;
};

/// "http://HOST[:PORT][/PATH]". kInvalidArgument for anything else; https is refused by name.
Result<HttpUrl> parse_http_url(std::string_view text);

struct HttpCall {
  std::string method = "GET";
  std::string target = "/";  // a path on the server
  std::string body = {};     // JSON
  std::string key = {};      // "Authorization: Bearer ..."; empty: none
  /// Takes bytes of a body with status 200; false: no more is wanted. Without it they are collected.
  std::function<bool(std::string_view)> on_bytes = {};
};

struct HttpAnswer {
  unsigned status = 0;
  std::string reason = {};
  std::string content_type = {};
  std::string body = {};  // what on_bytes did not take
};

struct HttpTimes {
  std::chrono::seconds connect_max{10};
  std::chrono::seconds silence_max{600};  // without a byte, e.g. while a long prompt is computed
};

/// [call] its answer, or kIo for a connection that failed or broke. Asks `go_on` every 50 ms; once that is
/// false, all that has not ended yet fails with kIo, too.
std::vector<Result<HttpAnswer>> perform_http(const HttpUrl& url, std::span<const HttpCall> calls,
                                             const HttpTimes& times, const std::function<bool()>& go_on);

}  // namespace dualdecoder
