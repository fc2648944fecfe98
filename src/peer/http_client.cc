#include "peer/http_client.h"

#include <algorithm>
#include <array>
#include <optional>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>

namespace dualdecoder {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::chrono::milliseconds kTick{50};
constexpr std::size_t kErrorBodyBytesMax = 1 << 20;

std::unexpected<Error> broken(const HttpUrl& url, const char* while_doing, const error_code& error) {
  if (error == beast::error::timeout)
    return fail(ErrorCode::kIo, "{}: no answer while {}: timed out", url.text(), while_doing);
  if (error == http::error::end_of_stream || error == http::error::partial_message ||
      error == asio::error::eof || error == asio::error::connection_reset) {
    return fail(ErrorCode::kIo, "{}: the connection was cut while {}", url.text(), while_doing);
  }
  if (error.category() == http::make_error_code(http::error::bad_version).category())
    return fail(ErrorCode::kIo, "{}: this is no HTTP server ({})", url.text(), error.message());
  return fail(ErrorCode::kIo, "{}: failed while {}: {}", url.text(), while_doing, error.message());
}

asio::awaitable<Result<HttpAnswer>> run_call(const HttpUrl& url, const HttpCall& call,
                                             const HttpTimes& times) {
  const auto executor = co_await asio::this_coro::executor;
  error_code error;
  tcp::resolver resolver(executor);
  const auto addresses =
      co_await resolver.async_resolve(url.host, url.port, asio::redirect_error(asio::use_awaitable, error));
  if (error)
    co_return fail(ErrorCode::kIo, "{}: no address for {}: {}", url.text(), url.host, error.message());
  beast::tcp_stream stream(executor);
  stream.expires_after(times.connect_max);
  co_await stream.async_connect(addresses, asio::redirect_error(asio::use_awaitable, error));
  if (error) {
    co_return fail(ErrorCode::kIo, "cannot connect to {}: {}; does the server run?", url.text(),
                   error == beast::error::timeout ? "timed out" : error.message());
  }

  http::request<http::string_body> request;
  request.version(11);
  request.method_string(call.method);
  request.target(call.target);
  request.set(http::field::host, url.host + ":" + url.port);
  request.set(http::field::user_agent, "dualdecoder");
  request.set(http::field::connection, "close");
  if (!call.key.empty()) request.set(http::field::authorization, "Bearer " + call.key);
  if (!call.body.empty()) request.set(http::field::content_type, "application/json");
  request.body() = call.body;
  request.prepare_payload();
  stream.expires_after(times.silence_max);
  co_await http::async_write(stream, request, asio::redirect_error(asio::use_awaitable, error));
  // A server that refuses may answer before it has read everything.
  if (error && error != asio::error::broken_pipe && error != asio::error::connection_reset)
    co_return broken(url, "sending the request", error);

  beast::flat_buffer buffer;
  http::response_parser<http::buffer_body> parser;
  parser.body_limit(boost::none);
  stream.expires_after(times.silence_max);
  co_await http::async_read_header(stream, buffer, parser, asio::redirect_error(asio::use_awaitable, error));
  if (error) co_return broken(url, "waiting for an answer", error);
  HttpAnswer answer;
  answer.status = parser.get().result_int();
  answer.reason = std::string(parser.get().reason());
  answer.content_type = std::string(parser.get()[http::field::content_type]);
  const bool hands_on = answer.status == 200 && call.on_bytes;
  std::array<char, 16384> piece;
  while (!parser.is_done()) {
    parser.get().body().data = piece.data();
    parser.get().body().size = piece.size();
    stream.expires_after(times.silence_max);
    co_await http::async_read_some(stream, buffer, parser, asio::redirect_error(asio::use_awaitable, error));
    const std::string_view bytes(piece.data(), piece.size() - parser.get().body().size);
    if (error && error != http::error::need_buffer) co_return broken(url, "reading the answer", error);
    if (hands_on) {
      if (!bytes.empty() && !call.on_bytes(bytes)) break;
    } else if (answer.status == 200 || answer.body.size() < kErrorBodyBytesMax) {
      answer.body += bytes;
    }
  }
  co_return answer;
}

asio::awaitable<void> run_into(const HttpUrl& url, const HttpCall& call, const HttpTimes& times,
                               std::optional<Result<HttpAnswer>>& result) {
  auto answer = co_await run_call(url, call, times);
  result = std::move(answer);
}

bool is_port(std::string_view text) {
  const bool digits = std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  return digits && !text.empty() && text.size() <= 5 && std::stoi(std::string(text)) <= 65535;
}

}  // namespace

std::string HttpUrl::text() const {
  const std::string name = host.find(':') == std::string::npos ? host : "[" + host + "]";
  return "http://" + name + ":" + port + path;
}

Result<HttpUrl> parse_http_url(std::string_view text) {
  constexpr std::string_view kScheme = "http://";
  if (text.starts_with("https://")) {
    return fail(ErrorCode::kInvalidArgument, "{}: https is not built in; name a server on plain http", text);
  }
  const auto refused = [&](const char* why) {
    return fail(ErrorCode::kInvalidArgument, "'{}' is no address of a server: {}; wanted is http://HOST:PORT",
                text, why);
  };
  if (!text.starts_with(kScheme)) return refused("it does not begin with http://");
  std::string_view rest = text.substr(kScheme.size());
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  HttpUrl url{.host = {}, .port = "80", .path = std::string(rest.substr(slash))};
  while (url.path.ends_with('/')) url.path.pop_back();
  std::string_view place = rest.substr(0, slash);
  if (place.starts_with('[')) {  // IPv6
    const std::size_t end = place.find(']');
    if (end == std::string_view::npos) return refused("a bracket is missing");
    url.host = std::string(place.substr(1, end - 1));
    place = place.substr(end + 1);
  } else {
    const std::size_t colon = std::min(place.find(':'), place.size());
    url.host = std::string(place.substr(0, colon));
    place = place.substr(colon);
  }
  if (!place.empty()) {
    if (!place.starts_with(':') || !is_port(place.substr(1))) return refused("the port is no number");
    url.port = std::string(place.substr(1));
  }
  if (url.host.empty() || url.host.find('@') != std::string::npos) return refused("there is no host in it");
  if (text.find_first_of(" \t\r\n?#") != std::string_view::npos) return refused("a character in it");
  return url;
}

std::vector<Result<HttpAnswer>> perform_http(const HttpUrl& url, std::span<const HttpCall> calls,
                                             const HttpTimes& times, const std::function<bool()>& go_on) {
  std::vector<std::optional<Result<HttpAnswer>>> results(calls.size());
  {
    asio::io_context io(1);
    for (std::size_t i = 0; i < calls.size(); ++i)
      asio::co_spawn(io, run_into(url, calls[i], times, results[i]), asio::detached);
    do {
      io.run_for(kTick);
    } while (!io.stopped() && go_on());
  }
  std::vector<Result<HttpAnswer>> answers;
  for (auto& result : results) {
    if (result) {
      answers.push_back(std::move(*result));
    } else {
      answers.push_back(fail(ErrorCode::kIo, "{}: interrupted", url.text()));
    }
  }
  return answers;
}

}  // namespace dualdecoder
