#include "peer/http_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>

namespace dualdecoder {
namespace {

using testing::HasSubstr;

TEST(HttpUrl, HasAHostAPortAndAPathWithoutASlashAtItsEnd) {
  const auto plain = parse_http_url("http://localhost");
  ASSERT_TRUE(plain) << plain.error().message;
  EXPECT_EQ(plain->text(), "http://localhost:80");
  const auto whole = parse_http_url("http://127.0.0.1:8080/api/v1/");
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->host, "127.0.0.1");
  EXPECT_EQ(whole->port, "8080");
  EXPECT_EQ(whole->path, "/api/v1");
  const auto six = parse_http_url("http://[::1]:81");
  ASSERT_TRUE(six);
  EXPECT_EQ(six->host, "::1");
  EXPECT_EQ(six->text(), "http://[::1]:81");
}

TEST(HttpUrl, IsRefusedWithItsTextAndTheReason) {
  for (const auto& [text, part] :
       {std::pair("https://localhost", "https is not built in"), std::pair("localhost:80", "http://"),
        std::pair("http://", "no host"), std::pair("http://:80", "no host"), std::pair("http://a:b", "port"),
        std::pair("http://a:99999", "port"), std::pair("http://a:", "port"),
        std::pair("http://[::1", "bracket"), std::pair("http://u:p@a", "port"),
        std::pair("http://u@a", "no host"), std::pair("http://a/b c", "character")}) {
    const auto url = parse_http_url(text);
    ASSERT_FALSE(url) << text;
    EXPECT_EQ(url.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(url.error().message, HasSubstr(part));
    EXPECT_THAT(url.error().message, HasSubstr(text));
  }
}

/// Takes connections and never says a word.
class SilentServer {
 public:
  HttpUrl url() const {
    return {.host = "127.0.0.1", .port = fmt::format("{}", acceptor_.local_endpoint().port()), .path = {}};
  }

 private:
  boost::asio::io_context io_;
  boost::asio::ip::tcp::acceptor acceptor_{
      io_, {boost::asio::ip::address_v4::loopback(), boost::asio::ip::port_type{0}}};
};

TEST(HttpClient, GivesUpOnAServerThatSaysNothing) {
  const SilentServer server;
  HttpTimes times;
  times.silence_max = std::chrono::seconds(1);
  const std::vector<HttpCall> calls(2);
  const auto answers = perform_http(server.url(), calls, times, [] { return true; });
  ASSERT_EQ(answers.size(), 2u);
  for (const auto& answer : answers) {
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, ErrorCode::kIo);
    EXPECT_THAT(answer.error().message, HasSubstr("timed out"));
    EXPECT_THAT(answer.error().message, HasSubstr(server.url().text()));
  }
}

TEST(HttpClient, EndsEveryCallWhenItMayNotGoOn) {
  const SilentServer server;
  const std::vector<HttpCall> calls(3);
  const auto answers = perform_http(server.url(), calls, {}, [asked = 0]() mutable { return ++asked < 4; });
  ASSERT_EQ(answers.size(), 3u);
  for (const auto& answer : answers) {
    ASSERT_FALSE(answer);
    EXPECT_THAT(answer.error().message, HasSubstr("interrupted"));
  }
}

}  // namespace
}  // namespace dualdecoder
