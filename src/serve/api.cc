#include "serve/api.h"

#include <algorithm>
#include <array>
#include <map>
#include <random>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "serve/event_queue.h"
#include "serve/json_reader.h"
#include "serve/reply.h"
#include "serve/request.h"
#include "serve/response_format.h"
#include "serve/step_feed.h"
#include "serve/web_page.h"

namespace dualdecoder {
namespace {

namespace asio = boost::asio;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr auto kDrainPatience = std::chrono::milliseconds(250);  // of those who look on, before they leave

// What a client sent may be quoted in it, and need not be UTF-8.
std::string dump(const ordered_json& value) {
  return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

HttpReply reply_of(const ApiError& error) {
  HttpReply reply{.status = error.status, .body = dump(error.json())};
  if (error.retry_after_s) reply.headers.emplace_back("Retry-After", std::to_string(*error.retry_after_s));
  return reply;
}

HttpReply reply_of(const ordered_json& value) { return {.body = dump(value)}; }

// In time that depends on the lengths alone.
bool equal_in_constant_time(std::string_view a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference |=
        static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b.empty() ? 0 : b[i % b.size()]);
  return difference == 0;
}

std::string random_id() {
  thread_local std::mt19937_64 random{std::random_device()()};
  return fmt::format("{:016x}{:08x}", random(), static_cast<std::uint32_t>(random()));
}

HttpReply object_reply(const Reply& reply) {
  HttpReply answer;
  answer.body = reply.object();
  return answer;
}

std::string event_line(const std::string& data) { return "data: " + data + "\n\n"; }

std::string last_events(const Reply& reply) {
  if (reply.error()) return event_line(dump(reply.error()->json()));
  const auto usage = reply.usage_chunk();
  return (usage ? event_line(*usage) : "") + event_line("[DONE]");
}

// What an error object is called for programs; its message, which may quote the client, only where the fault
// is ours.
void note_error(const ApiError& error, RequestRecord& record) {
  record.error = error.code.empty() ? error.type : error.code;
  if (error.status >= 500) record.detail = error.message;
}

// An exchange that keeps the record of what was answered, and tells the client what it is called there.
class RecordedExchange final : public HttpExchange {
 public:
  RecordedExchange(HttpExchange& exchange, RequestRecord& record) : exchange_(exchange), record_(record) {}

  asio::awaitable<bool> reply(HttpReply reply) override {
    record_.status = reply.status;
    reply.headers.push_back(id_header());
    return exchange_.reply(std::move(reply));
  }
  asio::awaitable<bool> begin_stream(std::vector<std::pair<std::string, std::string>> headers) override {
    record_.status = 200;
    record_.stream = true;
    headers.push_back(id_header());
    return exchange_.begin_stream(std::move(headers));
  }
  asio::awaitable<bool> send(std::string bytes) override { return exchange_.send(std::move(bytes)); }
  asio::awaitable<bool> end_stream() override { return exchange_.end_stream(); }
  void watch_for_close(asio::steady_timer& timer) override { exchange_.watch_for_close(timer); }
  bool gone() const override { return exchange_.gone(); }

 private:
  std::pair<std::string, std::string> id_header() const { return {"X-Request-Id", record_.id}; }

  HttpExchange& exchange_;
  RequestRecord& record_;
};

// A request on its way to an answer.
struct Asked {
  CompletionRequest request;
  std::vector<std::vector<TokenId>> prompts;
  std::vector<Job> jobs;
};

}  // namespace

struct Api::Impl {
  /// An answer that is made in one go.
  using Answer = HttpReply (Impl::*)(const HttpRequest&) const;
  enum class How { kAtOnce, kOnWorker, kChat, kCompletions, kSteps };
  struct Route {
    const char* method;
    const char* path;
    How how;
    Answer answer = nullptr;  // of kAtOnce and kOnWorker
    bool open = false;        // without a key
  };

  Service& service;
  const Model& model;
  Metrics& metrics;
  ApiOptions options;
  asio::any_io_executor worker;

  static const std::vector<Route>& routes();
  bool may_ask(const HttpRequest& request) const;
  bool from_elsewhere(const HttpRequest& request) const;
  std::vector<std::pair<std::string, std::string>> cors_headers() const;
  asio::awaitable<void> send(HttpExchange& exchange, HttpReply reply) const;
  /// The route of the request, or why there is none.
  std::expected<const Route*, HttpReply> find(const HttpRequest& request) const;
  /// Of the web page, which needs no key; null for everything else, and with pages of other origins.
  const WebFile* page_file(const HttpRequest& request) const {
    return options.web && !from_elsewhere(request) ? find_web_file(request.path) : nullptr;
  }

  template <typename F>
  asio::awaitable<std::invoke_result_t<F>> on_worker(F work) {
    co_return co_await asio::co_spawn(
        worker, [&work]() -> asio::awaitable<std::invoke_result_t<F>> { co_return work(); },
        asio::use_awaitable);
  }

  HttpReply health(const HttpRequest&) const;
  HttpReply version(const HttpRequest&) const;
  HttpReply models(const HttpRequest&) const;
  HttpReply metrics_text(const HttpRequest&) const;
  HttpReply props(const HttpRequest&) const;
  HttpReply slots(const HttpRequest&) const;
  HttpReply tokenizer_info(const HttpRequest&) const;
  HttpReply tokenize(const HttpRequest& request) const;
  HttpReply detokenize(const HttpRequest& request) const;

  ApiResult<Asked> read(Endpoint endpoint, const HttpRequest& request) const;
  Job job_for(const CompletionRequest& wanted, const std::vector<TokenId>& prompt,
              const std::string& client) const;
  Reply reply_for(Asked& work, const std::string& id) const;
  asio::awaitable<void> answer(const HttpRequest& request, HttpExchange& exchange, RequestRecord& record);
  asio::awaitable<void> complete(Endpoint endpoint, const HttpRequest& request, HttpExchange& exchange,
                                 RequestRecord& record);
  asio::awaitable<void> stream_steps(HttpExchange& exchange);
  asio::awaitable<void> follow(bool streams, Reply& reply, EventQueue& queue, HttpExchange& exchange);
  static asio::awaitable<void> take_ends(Reply& reply, EventQueue& queue);
};

Api::Api(Service& service, const Model& model, Metrics& metrics, ApiOptions options)
    : impl_(new Impl{service, model, metrics, std::move(options), {}}) {}
Api::~Api() = default;

void Api::use_worker(asio::any_io_executor worker) { impl_->worker = std::move(worker); }

HttpReply Api::refusal(unsigned status, const std::string& message) {
  return reply_of(ApiError{.status = status, .message = message});
}

const std::vector<Api::Impl::Route>& Api::Impl::routes() {
  static const std::vector<Route> list = {
      {"POST", "/v1/chat/completions", How::kChat},
      {"POST", "/v1/completions", How::kCompletions},
      {"GET", "/v1/models", How::kAtOnce, &Impl::models},
      {"GET", "/v1/dualdecoder/steps", How::kSteps},
      {"GET", "/health", How::kAtOnce, &Impl::health, true},
      {"GET", "/metrics", How::kAtOnce, &Impl::metrics_text},
      {"GET", "/props", How::kAtOnce, &Impl::props},
      {"GET", "/slots", How::kAtOnce, &Impl::slots},
      {"GET", "/version", How::kAtOnce, &Impl::version},
      {"POST", "/tokenize", How::kOnWorker, &Impl::tokenize},
      {"POST", "/detokenize", How::kOnWorker, &Impl::detokenize},
      {"GET", "/tokenizer_info", How::kAtOnce, &Impl::tokenizer_info},
  };
  return list;
}

// ---- Who may ask

bool Api::Impl::may_ask(const HttpRequest& request) const {
  if (options.api_keys.empty()) return true;
  const std::string_view scheme = "Bearer ";
  const std::string_view header = request.authorization;
  const std::string_view given = header.starts_with(scheme) ? header.substr(scheme.size()) : "";
  bool known = false;
  for (const std::string& key : options.api_keys) known |= equal_in_constant_time(key, given);
  return known;
}

// A page of another origin, in the browser of somebody who can reach this server.
bool Api::Impl::from_elsewhere(const HttpRequest& request) const {
  if (request.origin.empty() || options.cors_origin == "*" || request.origin == options.cors_origin)
    return false;
  return request.origin != "http://" + request.host && request.origin != "https://" + request.host;
}

std::vector<std::pair<std::string, std::string>> Api::Impl::cors_headers() const {
  if (options.cors_origin.empty()) return {};
  return {{"Access-Control-Allow-Origin", options.cors_origin},
          {"Access-Control-Allow-Headers", "Authorization, Content-Type"},
          {"Access-Control-Allow-Methods", "GET, POST, OPTIONS"}};
}

asio::awaitable<void> Api::Impl::send(HttpExchange& exchange, HttpReply reply) const {
  for (auto& header : cors_headers()) reply.headers.push_back(std::move(header));
  co_await exchange.reply(std::move(reply));
}

std::expected<const Api::Impl::Route*, HttpReply> Api::Impl::find(const HttpRequest& request) const {
  if (from_elsewhere(request)) {
    return std::unexpected(
        reply_of(ApiError{.status = 403,
                          .type = "permission_error",
                          .message = "pages of other origins may not ask; see --cors-origin"}));
  }
  std::string allowed;
  for (const Route& route : routes()) {
    if (request.path != route.path) continue;
    if (request.method != route.method) {
      allowed = route.method;
      continue;
    }
    if (route.open || may_ask(request)) return &route;
    HttpReply reply = reply_of(
        ApiError{.status = 401,
                 .type = "authentication_error",
                 .message = "wanted is a header \"Authorization: Bearer KEY\" with a key of this server",
                 .code = "invalid_api_key"});
    reply.headers.emplace_back("WWW-Authenticate", "Bearer");
    return std::unexpected(std::move(reply));
  }
  if (allowed.empty() && page_file(request) != nullptr) allowed = "GET";
  if (allowed.empty()) {
    return std::unexpected(reply_of(ApiError{
        .status = 404, .type = "not_found_error", .message = "there is nothing at " + request.path}));
  }
  if (request.method == "OPTIONS" && !options.cors_origin.empty())
    return std::unexpected(HttpReply{.status = 204, .content_type = "text/plain", .body = {}});
  HttpReply reply = reply_of(ApiError{
      .status = 405, .message = fmt::format("{} is for {}, not {}", request.path, allowed, request.method)});
  reply.headers.emplace_back("Allow", allowed);
  return std::unexpected(std::move(reply));
}

asio::awaitable<void> Api::Impl::answer(const HttpRequest& request, HttpExchange& exchange,
                                        RequestRecord& record) {
  if (const WebFile* file = page_file(request); file != nullptr && request.method == "GET") {
    HttpReply reply = web_reply(*file, request);
    co_return co_await send(exchange, std::move(reply));
  }
  const auto route = find(request);
  if (!route) co_return co_await send(exchange, route.error());
  switch ((*route)->how) {
    case How::kAtOnce:
      co_return co_await send(exchange, (this->*(*route)->answer)(request));
    case How::kOnWorker: {
      HttpReply reply = co_await on_worker([&] { return (this->*(*route)->answer)(request); });
      co_return co_await send(exchange, std::move(reply));
    }
    case How::kChat:
      co_return co_await complete(Endpoint::kChat, request, exchange, record);
    case How::kCompletions:
      co_return co_await complete(Endpoint::kCompletions, request, exchange, record);
    case How::kSteps:
      co_return co_await stream_steps(exchange);
  }
}

asio::awaitable<void> Api::handle(const HttpRequest& request, HttpExchange& exchange) {
  const Stopwatch watch;
  RequestRecord record{.id = random_id(), .method = request.method, .path = request.path};
  RecordedExchange recorded(exchange, record);
  co_await impl_->answer(request, recorded, record);
  if (!impl_->options.on_answered) co_return;
  if (exchange.gone()) record.status = kStatusClientLeft;
  record.seconds = watch.seconds();
  impl_->options.on_answered(record);
}

// ---- Small endpoints

HttpReply Api::Impl::health(const HttpRequest&) const {
  if (!service.state().draining) return reply_of(ordered_json{{"status", "ok"}});
  return reply_of(
      ApiError{.status = 503, .type = "unavailable_error", .message = "the server is shutting down"});
}

HttpReply Api::Impl::version(const HttpRequest&) const {
  return reply_of(ordered_json{{"version", options.version}});
}

HttpReply Api::Impl::models(const HttpRequest&) const {
  const ordered_json served = {{"id", options.model_id},
                               {"object", "model"},
                               {"created", 0},
                               {"owned_by", "dualdecoder"},
                               {"max_model_len", service.engine().context()}};
  return reply_of(ordered_json{{"object", "list"}, {"data", ordered_json::array({served})}});
}

HttpReply Api::Impl::metrics_text(const HttpRequest&) const {
  return {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics.text()};
}

HttpReply Api::Impl::props(const HttpRequest&) const {
  const Engine& engine = service.engine();
  const EngineOptions& made = engine.options();
  const MemoryPlan& plan = engine.plan();
  ordered_json policies = ordered_json::array();
  for (const Policy policy : engine.own_policies()) policies.push_back(policy_name(policy));
  return reply_of(ordered_json{
      {"model", options.model_id},
      {"architecture", model.hyperparameters().architecture},
      {"version", options.version},
      {"context", engine.context()},
      {"sequences", made.sequences},
      {"queue", service.options().queue_max},
      {"threads", made.threads},
      {"block_tokens", made.block_tokens},
      {"far", engine.tiers().far_description()},
      {"policy", plan.tiered() ? policy_name(made.tiers.policy) : "full"},
      {"policies", std::move(policies)},
      {"budget_tokens", made.tiers.budget_tokens},
      {"chat_template", model.vocabulary().has_chat_template() || !options.chat_template.empty()},
      {"memory",
       {{"near_window_bytes", plan.near_window_bytes},
        {"near_selected_bytes", plan.near_selected_bytes},
        {"near_staging_bytes", plan.near_staging_bytes},
        {"far_bytes", plan.far_bytes},
        {"digest_bytes", plan.digest_bytes},
        {"kept_digest_bytes", plan.kept_digest_bytes},
        {"table_bytes", plan.table_bytes}}}});
}

HttpReply Api::Impl::slots(const HttpRequest&) const {
  const ServiceState state = service.state();
  ordered_json running = ordered_json::array();
  for (const ServiceState::Slot& slot : state.running) {
    running.push_back({{"id", slot.job},
                       {"prompt_tokens", slot.prompt_tokens},
                       {"prompt_done", slot.prompt_done},
                       {"tokens", slot.tokens},
                       {"parked", slot.parked}});
  }
  return reply_of(ordered_json{{"slots", service.engine().options().sequences},
                               {"running", std::move(running)},
                               {"waiting", state.waiting}});
}

HttpReply Api::Impl::tokenize(const HttpRequest& request) const {
  const auto body = parse_json_object(request.body);
  if (!body) return reply_of(body.error());
  JsonReader reader(*body);
  const auto content = reader.string("content", SIZE_MAX);
  const auto prompt = reader.string("prompt", SIZE_MAX);  // vLLM's name
  const bool add_special = reader.boolean("add_special").value_or(false);
  const bool parse_special = reader.boolean("parse_special").value_or(true);
  if (!content && !prompt) reader.refuse("content", "is missing");
  if (const auto status = reader.status(); !status) return reply_of(status.error());
  const auto tokens = model.vocabulary().tokenize(content ? *content : *prompt, add_special, parse_special);
  return reply_of(ordered_json{{"tokens", tokens}, {"count", tokens.size()}});
}

HttpReply Api::Impl::detokenize(const HttpRequest& request) const {
  const auto body = parse_json_object(request.body);
  if (!body) return reply_of(body.error());
  const auto list = body->find("tokens");
  if (list == body->end() || !list->is_array())
    return reply_of(bad_field("tokens", "tokens: wanted is a list of token ids"));
  const auto tokens = read_token_ids(*list, "tokens");
  if (!tokens) return reply_of(tokens.error());
  if (const Status status = model.vocabulary().check_tokens(*tokens); !status)
    return reply_of(bad_field("tokens", status.error().message));
  std::string bytes;
  for (const TokenId token : *tokens) bytes += model.vocabulary().piece(token, true);
  return reply_of(ordered_json{{"content", bytes}, {"prompt", bytes}});  // vLLM's name
}

// What vLLM tells, for clients that ask a server for its tokenizer.
HttpReply Api::Impl::tokenizer_info(const HttpRequest&) const {
  const Vocabulary& vocabulary = model.vocabulary();
  const auto text = [&](std::optional<TokenId> token) {
    return token ? ordered_json(vocabulary.piece(*token, true)) : ordered_json(nullptr);
  };
  const auto chat = vocabulary.chat_template();
  return reply_of(ordered_json{{"bos_token", text(vocabulary.begin_token())},
                               {"eos_token", text(vocabulary.end_token())},
                               {"chat_template", chat.empty() ? ordered_json(nullptr) : ordered_json(chat)}});
}

// ---- Completions

ApiResult<Asked> Api::Impl::read(Endpoint endpoint, const HttpRequest& request) const {
  const auto parsed = parse_json_object(request.body);
  if (!parsed) return std::unexpected(parsed.error());
  auto wanted = read_completion_request(endpoint, *parsed);
  if (!wanted) return std::unexpected(wanted.error());
  auto grammar = read_response_format(*parsed, request.body);
  if (!grammar) return std::unexpected(grammar.error());
  wanted->grammar = std::move(*grammar);
  Asked work{.request = std::move(*wanted), .prompts = {}, .jobs = {}};
  const Vocabulary& vocabulary = model.vocabulary();
  if (endpoint == Endpoint::kChat) {
    auto tokens = vocabulary.tokenize_chat(work.request.messages, options.chat_template);
    if (!tokens) return std::unexpected(api_error(tokens.error()));
    work.prompts.push_back(std::move(*tokens));
  } else {
    for (const Prompt& prompt : work.request.prompts) {
      const auto* text = std::get_if<std::string>(&prompt);
      work.prompts.push_back(text != nullptr ? vocabulary.tokenize(*text, true, false)
                                             : std::get<std::vector<TokenId>>(prompt));
    }
  }
  for (const std::vector<TokenId>& prompt : work.prompts) {
    Job job = job_for(work.request, prompt, request.authorization);
    if (const auto status = service.check(job); !status) return std::unexpected(status.error());
    for (std::uint32_t choice = 0; choice < work.request.choices; ++choice) {
      work.jobs.push_back(job);
      work.jobs.back().options.sampling.seed += choice;
    }
  }
  return work;
}

Job Api::Impl::job_for(const CompletionRequest& wanted, const std::vector<TokenId>& prompt,
                       const std::string& client) const {
  Job job;
  job.prompt = prompt;
  job.options.sampling = wanted.sampling;
  job.options.stop = wanted.stop;
  job.options.grammar = wanted.grammar;
  if (wanted.tokens_max)
    job.options.tokens_max =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(*wanted.tokens_max, UINT32_MAX));
  job.options.reuse_prefix = wanted.cache_prompt;
  job.options.prefix_salt = wanted.cache_salt;
  job.options.policy = wanted.policy;
  job.options.budget_tokens = wanted.budget_tokens;
  job.top_logprobs = wanted.top_logprobs;
  job.prompt_logprobs = wanted.echo && wanted.top_logprobs;
  job.client = wanted.user.empty() ? client : wanted.user;
  job.priority = wanted.priority;
  return job;
}

Reply Api::Impl::reply_for(Asked& work, const std::string& id) const {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return Reply(work.request, model.vocabulary(),
               {.id = id,
                .model = options.model_id,
                .created = std::chrono::duration_cast<std::chrono::seconds>(now).count()},
               std::move(work.prompts));
}

asio::awaitable<void> Api::Impl::complete(Endpoint endpoint, const HttpRequest& request,
                                          HttpExchange& exchange, RequestRecord& record) {
  auto work = co_await on_worker([&] { return read(endpoint, request); });
  if (!work) {
    metrics.note_refused("invalid");
    note_error(work.error(), record);
    co_return co_await send(exchange, reply_of(work.error()));
  }
  const auto queue = std::make_shared<EventQueue>(co_await asio::this_coro::executor);
  for (std::uint32_t choice = 0; choice < work->jobs.size(); ++choice) {
    work->jobs[choice].listener = [queue, choice](JobEvent event) { queue->push(choice, std::move(event)); };
  }
  const auto jobs = service.submit(std::move(work->jobs));
  if (!jobs) {
    note_error(jobs.error(), record);
    co_return co_await send(exchange, reply_of(jobs.error()));
  }
  Reply reply = reply_for(*work, record.id);
  record.id = reply.id();
  co_await follow(work->request.stream, reply, *queue, exchange);
  if (!reply.ended()) {
    for (const JobId job : *jobs) service.cancel(job);
    co_await take_ends(reply, *queue);
  }
  record.usage = reply.totals();
  if (reply.error()) note_error(*reply.error(), record);
}

// Of jobs that were cancelled: each ends within a step, and tells what it has done.
asio::awaitable<void> Api::Impl::take_ends(Reply& reply, EventQueue& queue) {
  while (!reply.ended()) {
    EventQueue::Events events = co_await queue.next(EventQueue::TimePoint::max());
    for (auto& [choice, event] : events) reply.take(choice, std::move(event), nullptr);
  }
}

// Until the client has gone, or the server shuts down.
asio::awaitable<void> Api::Impl::stream_steps(HttpExchange& exchange) {
  const auto executor = co_await asio::this_coro::executor;
  StepFeed::Listener listener(service.steps(), executor);
  asio::steady_timer& timer = listener.timer();
  const bool begun = co_await exchange.begin_stream(cors_headers());
  if (!begun) co_return;
  exchange.watch_for_close(timer);
  using Clock = asio::steady_timer::clock_type;
  auto comment_at = Clock::now();  // the first one at once: the stream stands
  while (!exchange.gone() && !service.state().draining) {
    timer.expires_after(kDrainPatience);
    auto sample = listener.take();
    if (!sample && Clock::now() < comment_at) {
      boost::system::error_code woken;
      co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, woken));
      continue;
    }
    std::string bytes = ": still here\n\n";
    if (sample)
      bytes = co_await on_worker([&] { return event_line(step_sample_json(*sample, Clock::now())); });
    comment_at = Clock::now() + options.comment_period;
    const bool sent = co_await exchange.send(std::move(bytes));
    if (!sent) co_return;
  }
  co_await exchange.end_stream();
}

// Until the answer is out, or the client has gone.
asio::awaitable<void> Api::Impl::follow(bool streams, Reply& reply, EventQueue& queue,
                                        HttpExchange& exchange) {
  if (streams) {
    const bool begun = co_await exchange.begin_stream(cors_headers());
    if (!begun) co_return;
  }
  exchange.watch_for_close(queue.timer());
  using Clock = asio::steady_timer::clock_type;
  auto comment_at = Clock::now() + options.comment_period;
  while (!reply.ended() && !reply.error() && !exchange.gone()) {
    EventQueue::Events events = co_await queue.next(comment_at);
    std::vector<std::string> chunks;
    for (auto& [choice, event] : events) reply.take(choice, std::move(event), streams ? &chunks : nullptr);
    std::string bytes;
    for (const std::string& chunk : chunks) bytes += event_line(chunk);
    // Not every event has something to tell: what counts as silence is what the client hears.
    const bool silent = bytes.empty() && Clock::now() >= comment_at;
    if (silent && streams) bytes = ": still at work\n\n";
    if (silent || !bytes.empty()) comment_at = Clock::now() + options.comment_period;
    if (!bytes.empty()) co_await exchange.send(std::move(bytes));
  }
  if (exchange.gone()) co_return;
  if (!streams) {
    HttpReply answer = reply.error() ? reply_of(*reply.error()) : object_reply(reply);
    co_return co_await send(exchange, std::move(answer));
  }
  const bool sent = co_await exchange.send(last_events(reply));
  if (sent) co_await exchange.end_stream();
}

}  // namespace dualdecoder
