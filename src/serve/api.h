// The OpenAI API over HTTP: which path answers what, who may ask, and how a request becomes jobs and their
// events an answer. Runs on the HTTP thread; texts are read and tokenised on its worker. docs/api.md.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/model.h"
#include "serve/http_server.h"
#include "serve/metrics.h"
#include "serve/request_record.h"
#include "serve/service.h"

namespace dualdecoder {

struct ApiOptions {
  std::string model_id;
  std::string version;
  std::vector<std::string> api_keys;  // any of them; none: everybody may ask
  std::string cors_origin;            // "*" or an origin; empty: pages of other origins may not ask
  bool web = true;                    // the page at /
  std::string chat_template;          // one of libllama's names; empty: the model's own
  std::chrono::milliseconds comment_period{10'000};  // of silence in a stream, before a comment line
  std::function<void(const RequestRecord&)> on_answered = {};  // on the HTTP thread; must not block
};

class Api {
 public:
  /// All of them outlive the API.
  Api(Service& service, const Model& model, Metrics& metrics, ApiOptions options);
  ~Api();

  boost::asio::awaitable<void> handle(const HttpRequest& request, HttpExchange& exchange);
  /// The executor for what takes long; before the first request.
  void use_worker(boost::asio::any_io_executor worker);
  /// An answer to what never became a request.
  static HttpReply refusal(unsigned status, const std::string& message);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dualdecoder
