#include "serve/http_server.h"

#include <optional>
#include <set>

#include <boost/asio/bind_executor.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/version.hpp>

#include "base/check.h"

namespace dualdecoder {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

// An exchange's answer on its connection.
class Exchange final : public HttpExchange {
 public:
  struct Wanted {
    bool keep_alive = false;
    bool head_only = false;  // the request was HEAD: an answer without its body
    unsigned version = 11;
  };

  Exchange(beast::tcp_stream& stream, const HttpServerOptions& options, const Wanted& wanted)
      : stream_(stream),
        options_(options),
        keep_alive_(wanted.keep_alive),
        head_only_(wanted.head_only),
        version_(wanted.version) {}

  bool keep_alive() const { return keep_alive_ && answered_ && !gone_; }

  asio::awaitable<bool> reply(HttpReply reply) override {
    DD_CHECK(!answered_);
    answered_ = true;
    http::response<http::string_body> response(static_cast<http::status>(reply.status), version_);
    set_common(response, reply.headers);
    response.set(http::field::content_type, reply.content_type);
    response.body() = std::move(reply.body);
    response.prepare_payload();
    error_code error;
    stream_.expires_after(options_.write_time_max);
    if (head_only_) {
      http::response_serializer<http::string_body> serializer(response);
      co_await http::async_write_header(stream_, serializer,
                                        asio::redirect_error(asio::use_awaitable, error));
    } else {
      co_await http::async_write(stream_, response, asio::redirect_error(asio::use_awaitable, error));
    }
    co_return note(error);
  }

  asio::awaitable<bool> begin_stream(std::vector<std::pair<std::string, std::string>> headers) override {
    DD_CHECK(!answered_);
    answered_ = true;
    http::response<http::empty_body> response(http::status::ok, version_);
    set_common(response, headers);
    response.set(http::field::content_type, "text/event-stream; charset=utf-8");
    response.set(http::field::cache_control, "no-cache");
    response.set("X-Accel-Buffering", "no");
    chunked_ = version_ >= 11;
    if (chunked_) {
      response.chunked(true);
    } else {
      keep_alive_ = false;  // the end of the connection is that of the body
      response.keep_alive(false);
    }
    http::response_serializer<http::empty_body> serializer(response);
    error_code error;
    stream_.expires_after(options_.write_time_max);
    co_await http::async_write_header(stream_, serializer, asio::redirect_error(asio::use_awaitable, error));
    const bool written = note(error);
    co_return written && !head_only_;
  }

  asio::awaitable<bool> send(std::string bytes) override {
    if (gone_) co_return false;
    error_code error;
    stream_.expires_after(options_.write_time_max);
    if (chunked_) {
      co_await asio::async_write(stream_, http::make_chunk(asio::buffer(bytes)),
                                 asio::redirect_error(asio::use_awaitable, error));
    } else {
      co_await asio::async_write(stream_, asio::buffer(bytes),
                                 asio::redirect_error(asio::use_awaitable, error));
    }
    co_return note(error);
  }

  asio::awaitable<bool> end_stream() override {
    if (gone_) co_return false;
    error_code error;
    if (chunked_) {
      stream_.expires_after(options_.write_time_max);
      co_await asio::async_write(stream_, http::make_chunk_last(),
                                 asio::redirect_error(asio::use_awaitable, error));
    }
    co_return note(error);
  }

  void watch_for_close(asio::steady_timer& timer) override {
    timer_ = &timer;
    stream_.expires_never();
    watch();
  }

  // Nothing may call back into this object any more.
  void end_watch() {
    timer_ = nullptr;
    *alive_ = false;
    error_code ignored;
    if (watching_) stream_.socket().cancel(ignored);
  }

  bool gone() const override { return gone_; }

 private:
  template <typename Response>
  void set_common(Response& response, const std::vector<std::pair<std::string, std::string>>& headers) {
    response.set(http::field::server, "dualdecoder");
    response.keep_alive(keep_alive_);
    for (const auto& [name, value] : headers) response.set(name, value);
  }

  bool note(const error_code& error) {
    if (error) gone_ = true;
    return !gone_;
  }

  // Readable and nothing to read: the other side has closed. A next request that comes early is left where it
  // is, and the watch ends with it.
  void watch() {
    watching_ = true;
    stream_.socket().async_wait(tcp::socket::wait_read, [this, alive = alive_](const error_code& error) {
      if (!*alive) return;
      watching_ = false;
      if (error) return;
      char byte = 0;
      error_code peek_error;
      stream_.socket().non_blocking(true, peek_error);
      const std::size_t bytes =
          stream_.socket().receive(asio::buffer(&byte, 1), tcp::socket::message_peek, peek_error);
      if (peek_error == asio::error::would_block) return watch();
      if (!peek_error && bytes > 0) return;
      gone_ = true;
      if (timer_ != nullptr) timer_->cancel();
    });
  }

  beast::tcp_stream& stream_;
  const HttpServerOptions& options_;
  bool keep_alive_;
  const bool head_only_;
  const unsigned version_;
  bool answered_ = false;
  bool chunked_ = false;
  bool gone_ = false;
  bool watching_ = false;
  asio::steady_timer* timer_ = nullptr;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

unsigned status_of_read_error(const error_code& error) {
  if (error == http::error::body_limit) return 413;
  if (error == http::error::header_limit) return 431;
  return 400;
}

bool is_protocol_error(const error_code& error) {
  return error.category() == make_error_code(http::error::bad_method).category() &&
         error != http::error::end_of_stream;
}

HttpRequest plain(const http::request<http::string_body>& from) {
  const auto text = [](const auto& view) { return std::string(view.data(), view.size()); };
  const std::string target = text(from.target());
  return {.method = text(from.method_string()),
          .path = target.substr(0, target.find('?')),
          .origin = text(from[http::field::origin]),
          .host = text(from[http::field::host]),
          .authorization = text(from[http::field::authorization]),
          .if_none_match = text(from[http::field::if_none_match]),
          .body = {}};
}

}  // namespace

struct HttpServer::Impl {
  HttpServerOptions options;
  Handler handler;
  Refusal refusal;
  asio::io_context io{1};
  asio::thread_pool workers{1};
  tcp::acceptor acceptor{io};
  asio::steady_timer room{io};        // cancelled when a connection ends
  std::set<beast::tcp_stream*> idle;  // connections between two requests
  std::size_t connections = 0;
  bool closing = false;

  asio::awaitable<void> accept();
  asio::awaitable<void> serve(tcp::socket socket);
  asio::awaitable<bool> serve_one(beast::tcp_stream& stream, beast::flat_buffer& buffer);
  asio::awaitable<bool> refuse(beast::tcp_stream& stream, error_code why, unsigned version);
};

asio::awaitable<void> HttpServer::Impl::accept() {
  while (!closing) {
    error_code error;
    if (connections >= options.connections_max) {
      room.expires_at(asio::steady_timer::time_point::max());
      co_await room.async_wait(asio::redirect_error(asio::use_awaitable, error));
      continue;
    }
    tcp::socket socket = co_await acceptor.async_accept(asio::redirect_error(asio::use_awaitable, error));
    if (closing || error == asio::error::operation_aborted) co_return;
    if (error) {
      // Out of descriptors, or a client that left at once: later connections may fare better.
      asio::steady_timer pause(io, std::chrono::milliseconds(50));
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
      continue;
    }
    socket.set_option(tcp::no_delay(true), error);
    ++connections;
    asio::co_spawn(io, serve(std::move(socket)), [this](std::exception_ptr) {
      --connections;
      room.cancel();
    });
  }
}

asio::awaitable<void> HttpServer::Impl::serve(tcp::socket socket) {
  beast::tcp_stream stream(std::move(socket));
  beast::flat_buffer buffer;
  while (co_await serve_one(stream, buffer)) {
  }
  error_code ignored;
  stream.socket().shutdown(tcp::socket::shutdown_send, ignored);
}

// Answers a request that could not be read, where there is somebody left to tell.
asio::awaitable<bool> HttpServer::Impl::refuse(beast::tcp_stream& stream, error_code why, unsigned version) {
  if (!is_protocol_error(why)) co_return false;
  // GCC 12 destroys some temporaries of a co_await expression twice: they have names here.
  const unsigned status = status_of_read_error(why);
  std::string message = "the request is not HTTP: " + why.message();
  if (status == 413)
    message = fmt::format("the body is larger than the {} bytes that are taken", options.body_bytes_max);
  HttpReply reply = refusal(status, message);
  const Exchange::Wanted wanted{.version = version};
  Exchange exchange(stream, options, wanted);
  co_await exchange.reply(std::move(reply));
  // A client that is still sending would take a reset for the answer.
  error_code error;
  stream.socket().shutdown(tcp::socket::shutdown_send, error);
  stream.expires_after(std::chrono::seconds(2));
  std::array<char, 16384> rest;
  while (!error)
    co_await stream.async_read_some(asio::buffer(rest), asio::redirect_error(asio::use_awaitable, error));
  co_return false;
}

// Whether the connection goes on.
asio::awaitable<bool> HttpServer::Impl::serve_one(beast::tcp_stream& stream, beast::flat_buffer& buffer) {
  if (closing) co_return false;
  error_code error;
  if (buffer.size() == 0) {
    idle.insert(&stream);
    stream.expires_after(options.idle_time_max);
    const std::size_t bytes = co_await stream.async_read_some(
        buffer.prepare(4096), asio::redirect_error(asio::use_awaitable, error));
    idle.erase(&stream);
    if (error) co_return false;
    buffer.commit(bytes);
  }
  http::request_parser<http::string_body> parser;
  parser.header_limit(static_cast<std::uint32_t>(options.header_bytes_max));
  parser.body_limit(options.body_bytes_max);
  stream.expires_after(options.header_time_max);
  co_await http::async_read_header(stream, buffer, parser, asio::redirect_error(asio::use_awaitable, error));
  if (error) co_return co_await refuse(stream, error, 11);
  const unsigned version = parser.get().version();
  if (beast::iequals(parser.get()[http::field::expect], "100-continue")) {
    http::response<http::empty_body> go_on(http::status::continue_, version);
    co_await http::async_write(stream, go_on, asio::redirect_error(asio::use_awaitable, error));
    if (error) co_return false;
  }
  stream.expires_after(options.body_time_max);
  co_await http::async_read(stream, buffer, parser, asio::redirect_error(asio::use_awaitable, error));
  if (error) co_return co_await refuse(stream, error, version);
  HttpRequest request = plain(parser.get());
  request.body = std::move(parser.get().body());
  const bool head_only = request.method == "HEAD";
  if (head_only) request.method = "GET";
  const Exchange::Wanted wanted{
      .keep_alive = parser.get().keep_alive() && !closing, .head_only = head_only, .version = version};
  Exchange exchange(stream, options, wanted);
  co_await handler(request, exchange);
  exchange.end_watch();
  co_return exchange.keep_alive();
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;

Result<std::unique_ptr<HttpServer>> HttpServer::listen(const HttpServerOptions& options, Handler handler,
                                                       Refusal refusal) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->handler = std::move(handler);
  impl->refusal = std::move(refusal);
  error_code error;
  const auto address =
      asio::ip::make_address(options.host == "localhost" ? "127.0.0.1" : options.host, error);
  if (error) {
    return fail(ErrorCode::kInvalidArgument,
                "--host {}: not an IP address; write 127.0.0.1 for this machine alone, or 0.0.0.0 for all",
                options.host);
  }
  const tcp::endpoint endpoint(address, options.port);
  tcp::acceptor& acceptor = impl->acceptor;
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    return fail(ErrorCode::kIo, "cannot listen on {}:{}: {}; choose another --port or --host", options.host,
                options.port, error.message());
  }
  asio::co_spawn(impl->io, impl->accept(), asio::detached);
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

std::uint16_t HttpServer::port() const { return impl_->acceptor.local_endpoint().port(); }
std::size_t HttpServer::connections() const { return impl_->connections; }

void HttpServer::run() {
  impl_->io.run();
  impl_->workers.stop();
  impl_->workers.join();
}

void HttpServer::stop() { impl_->io.stop(); }
void HttpServer::post(std::function<void()> fn) { asio::post(impl_->io, std::move(fn)); }
asio::any_io_executor HttpServer::executor() { return impl_->io.get_executor(); }
asio::any_io_executor HttpServer::worker() { return impl_->workers.get_executor(); }

void HttpServer::close() {
  asio::post(impl_->io, [impl = impl_.get()] {
    impl->closing = true;
    error_code ignored;
    impl->acceptor.close(ignored);
    impl->room.cancel();
    for (beast::tcp_stream* stream : impl->idle) stream->cancel();
  });
}

void HttpServer::every(std::chrono::milliseconds period, std::function<bool()> fn) {
  asio::co_spawn(
      impl_->io,
      [impl = impl_.get(), period, fn = std::move(fn)]() -> asio::awaitable<void> {
        asio::steady_timer timer(impl->io);
        do {
          timer.expires_after(period);
          co_await timer.async_wait(asio::use_awaitable);
        } while (fn());
      },
      asio::detached);
}

}  // namespace dualdecoder
