#include "serve/http_server.h"

#include <sys/socket.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <netinet/in.h>

#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// A server whose handler answers with the method and the body, on a thread of its own.
class Http : public testing::Test {
 protected:
  void start(const HttpServerOptions& options) {
    auto listening = HttpServer::listen(
        options,
        [](const HttpRequest& request, HttpExchange& exchange) -> boost::asio::awaitable<void> {
          HttpReply reply{.content_type = "text/plain", .body = request.method + " " + request.body};
          co_await exchange.reply(std::move(reply));
        },
        [](unsigned status, const std::string& message) {
          return HttpReply{.status = status, .content_type = "text/plain", .body = message};
        });
    ASSERT_TRUE(listening) << listening.error().message;
    server_ = std::move(*listening);
    thread_ = std::thread([this] { server_->run(); });
  }
  void TearDown() override {
    if (!server_) return;
    server_->stop();
    thread_.join();
  }

  int connect() const {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(server_->port());
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return socket;
  }
  static void send(int socket, const std::string& text) {
    EXPECT_EQ(::send(socket, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }
  // Until the server closes.
  static std::string read_all(int socket) {
    std::string text;
    char buffer[4096];
    for (ssize_t bytes = 0; (bytes = ::recv(socket, buffer, sizeof(buffer), 0)) > 0;)
      text.append(buffer, static_cast<std::size_t>(bytes));
    ::close(socket);
    return text;
  }
  std::string exchange(const std::string& request) const {
    const int socket = connect();
    send(socket, request);
    return read_all(socket);
  }

  std::unique_ptr<HttpServer> server_;
  std::thread thread_;
};

TEST_F(Http, ClosesAConnectionWhoseHeaderTakesTooLongAndServesOthersMeanwhile) {
  start({.port = 0, .header_time_max = std::chrono::seconds(1)});
  const auto begin = std::chrono::steady_clock::now();
  const int slow = connect();
  send(slow, "GET / HTTP/1.1\r\nHo");
  EXPECT_THAT(exchange("GET / HTTP/1.1\r\nConnection: close\r\n\r\n"), HasSubstr("GET "));
  std::thread drip([slow] {
    // Each byte comes in time; it is the whole header that does not.
    for (int i = 0; i < 8; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      ::send(slow, "s", 1, MSG_NOSIGNAL);
    }
  });
  EXPECT_EQ(read_all(slow), "");
  const auto taken = std::chrono::steady_clock::now() - begin;
  drip.join();
  EXPECT_GE(taken, std::chrono::milliseconds(900));
  EXPECT_LT(taken, std::chrono::milliseconds(2500));
}

TEST_F(Http, ClosesIdleConnectionsAndThoseWhoseBodyTakesTooLong) {
  start({.port = 0, .idle_time_max = std::chrono::seconds(1), .body_time_max = std::chrono::seconds(1)});
  const int idle = connect();
  const int slow = connect();
  send(slow, "POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nabc");
  EXPECT_EQ(read_all(idle), "");
  EXPECT_EQ(read_all(slow), "");
  EXPECT_THAT(exchange("GET / HTTP/1.1\r\nConnection: close\r\n\r\n"), StartsWith("HTTP/1.1 200"));
}

TEST_F(Http, RefusesHeadersAndBodiesBeyondTheLimits) {
  start({.port = 0, .header_bytes_max = 256, .body_bytes_max = 8});
  const std::string more = std::string(300, 'x');
  EXPECT_THAT(exchange("GET / HTTP/1.1\r\nX: " + more + "\r\n\r\n"), StartsWith("HTTP/1.1 431"));
  EXPECT_THAT(exchange("POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"), StartsWith("HTTP/1.1 413"));
  EXPECT_THAT(exchange("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n123456789\r\n0\r\n\r\n"),
              StartsWith("HTTP/1.1 413"));
  EXPECT_THAT(exchange("POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: 8\r\n\r\n12345678"),
              HasSubstr("POST 12345678"));
}

TEST_F(Http, ServesNoMoreConnectionsAtOnceThanItMayAndTheNextWhenOneEnds) {
  start({.port = 0, .connections_max = 1});
  const int first = connect();
  send(first, "GET / HTTP/1.1\r\n\r\n");
  char byte = 0;
  ASSERT_EQ(::recv(first, &byte, 1, 0), 1);
  const int second = connect();
  send(second, "GET / HTTP/1.1\r\nConnection: close\r\n\r\n");
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(::recv(second, &byte, 1, MSG_DONTWAIT), -1);
  ::close(first);
  EXPECT_THAT(read_all(second), StartsWith("HTTP/1.1 200"));
}

TEST_F(Http, AnswersHeadWithoutABody) {
  start({.port = 0});
  const std::string reply = exchange("HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n");
  EXPECT_THAT(reply, HasSubstr("Content-Length: 4\r\n"));
  EXPECT_THAT(reply, testing::EndsWith("\r\n\r\n"));
}

TEST_F(Http, RefusesWhatIsNoHttpAndBodiesThatEndEarly) {
  start({.port = 0});
  EXPECT_THAT(exchange("\x16\x03\x01 hello\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  const int socket = connect();
  send(socket, "POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nabc");
  ::shutdown(socket, SHUT_WR);
  EXPECT_THAT(read_all(socket), StartsWith("HTTP/1.1 400"));
}

TEST(HttpListen, RefusesAPortInUseAndAnAddressThatIsNone) {
  const auto serve = [](const HttpServerOptions& options) {
    return HttpServer::listen(
        options, [](const HttpRequest&, HttpExchange&) -> boost::asio::awaitable<void> { co_return; },
        [](unsigned, const std::string&) { return HttpReply{}; });
  };
  const auto first = serve({.port = 0});
  ASSERT_TRUE(first);
  const auto second = serve({.port = (*first)->port()});
  ASSERT_FALSE(second);
  EXPECT_THAT(second.error().message, HasSubstr(std::to_string((*first)->port())));
  const auto nowhere = serve({.host = "nowhere", .port = 0});
  ASSERT_FALSE(nowhere);
  EXPECT_THAT(nowhere.error().message, HasSubstr("nowhere"));
}

}  // namespace
}  // namespace dualdecoder
