// HTTP/1.1 for the server: connections, limits, time-outs, event streams. It knows nothing of models. On
// Boost.Beast; all of it runs on the one thread that calls run(), and a handler is a coroutine there, so it
// must leave work that takes long to other threads (HttpServer::worker).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/error.h"

namespace dualdecoder {

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 8080;  // 0: any free one
  std::size_t header_bytes_max = 16 << 10;
  std::size_t body_bytes_max = 32 << 20;
  std::size_t connections_max = 4096;        // more wait in the kernel's queue
  std::chrono::seconds idle_time_max{75};    // between the requests of a connection
  std::chrono::seconds header_time_max{15};  // from its first byte
  std::chrono::seconds body_time_max{60};
  std::chrono::seconds write_time_max{60};  // for what a client takes its time to read
};

struct HttpRequest {
  std::string method;         // GET for HEAD, too
  std::string path;           // without the query
  std::string origin;         // header
  std::string host;           // header
  std::string authorization;  // header
  std::string if_none_match;  // header
  std::string body;
};

struct HttpReply {
  unsigned status = 200;
  std::string content_type = "application/json";
  std::string body = {};
  std::vector<std::pair<std::string, std::string>> headers = {};
};

/// The answering side of one request. A false result: the client has gone, and there is nothing more to do.
class HttpExchange {
 public:
  using Executor = boost::asio::any_io_executor;
  virtual ~HttpExchange() = default;

  virtual boost::asio::awaitable<bool> reply(HttpReply reply) = 0;
  /// Begins a stream of server-sent events instead.
  virtual boost::asio::awaitable<bool> begin_stream(
      std::vector<std::pair<std::string, std::string>> headers) = 0;
  /// Bytes of the stream, as they are.
  virtual boost::asio::awaitable<bool> send(std::string bytes) = 0;
  virtual boost::asio::awaitable<bool> end_stream() = 0;
  /// Cancels `timer` when the client closes the connection, until the exchange is over.
  virtual void watch_for_close(boost::asio::steady_timer& timer) = 0;
  virtual bool gone() const = 0;
};

class HttpServer {
 public:
  using Handler = std::function<boost::asio::awaitable<void>(const HttpRequest&, HttpExchange&)>;
  /// What a request is refused with that never reaches the handler: a body too large, a broken header.
  using Refusal = std::function<HttpReply(unsigned status, const std::string& message)>;

  /// Binds; requests are taken from run() on. kInvalidArgument for an address that cannot be used.
  static Result<std::unique_ptr<HttpServer>> listen(const HttpServerOptions& options, Handler handler,
                                                    Refusal refusal);
  ~HttpServer();

  std::uint16_t port() const;
  std::size_t connections() const;
  /// Serves until stop(), and for as long as the worker takes for what it has begun.
  void run();
  /// Takes no more connections and requests; open exchanges go on. Any thread.
  void close();
  /// Ends run(). Any thread.
  void stop();
  /// Calls `fn` on run()'s thread every `period`, for as long as it returns true.
  void every(std::chrono::milliseconds period, std::function<bool()> fn);
  /// Calls `fn` on run()'s thread. Any thread.
  void post(std::function<void()> fn);
  boost::asio::any_io_executor executor();
  /// The executor for work that takes long.
  boost::asio::any_io_executor worker();

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dualdecoder
