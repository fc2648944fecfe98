// `dualdecoder serve`: an OpenAI-compatible server.
#include <atomic>
#include <filesystem>
#include <future>
#include <thread>

#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/units.h"
#include "command.h"
#include "commit.h"
#include "config_file.h"
#include "estimate.h"
#include "log.h"
#include "model/gguf_file.h"
#include "serve/api.h"
#include "serve/web_page.h"

namespace dualdecoder {
namespace {

struct ServeOptions {
  ModelOptions model;
  TierChoices tiers{.far = "host"};
  std::uint32_t sequences = 4;
  HttpServerOptions http;
  ServiceOptions service;
  ApiOptions api;
  std::string api_key_file;
  std::uint32_t comment_s = 10;
  std::uint32_t drain_s = 30;
  bool measure = true;
  std::string log_format = "text";
  std::string log_requests = "answers";
};

// One key a line; blank lines and lines that begin with # do not count.
Status add_keys_from(const std::string& path, std::vector<std::string>& keys) {
  const auto text = read_text_file(path);
  if (!text) return std::unexpected(text.error());
  const std::size_t before = keys.size();
  std::size_t begin = 0;
  while (begin < text->size()) {
    const std::size_t end = std::min(text->find('\n', begin), text->size());
    std::string line = text->substr(begin, end - begin);
    while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) line.pop_back();
    if (!line.empty() && line.front() != '#') keys.push_back(std::move(line));
    begin = end + 1;
  }
  if (keys.size() > before) return {};
  return fail(ErrorCode::kInvalidArgument, "--api-key-file {}: there is no key in it", path);
}

// In memory, half of what the machine has: pages are only taken as tokens come, and what does not fit waits.
// In a file, what the contexts need four times over, for prefixes of conversations that are at rest.
std::uint64_t default_far_bytes(const EngineOptions& options, const Model& model) {
  EngineOptions contexts = options;
  contexts.tiers.keep_prefixes = false;
  const auto plan = plan_memory(model.hyperparameters(), contexts, model.device());
  const std::uint64_t needed = plan ? 4 * plan->far_bytes : 0;
  if (options.tiers.far.kind != FarKind::kHost) return needed;
  const auto pages = static_cast<std::uint64_t>(std::max(sysconf(_SC_PHYS_PAGES), 0L));
  return std::min(needed, pages * static_cast<std::uint64_t>(std::max(sysconf(_SC_PAGESIZE), 0L)) / 2);
}

Result<EngineOptions> serve_engine_options(const ServeOptions& options, const Model& model) {
  auto setup = engine_options(options.model, model);
  if (!setup) return setup;
  setup->sequences = options.sequences;
  if (Status status = choose_tiers(options.tiers, *setup); !status) return std::unexpected(status.error());
  setup->outputs_max = std::max(setup->outputs_max, 2 * options.sequences + 16);
  setup->prompts_beside = true;
  TierOptions& tiers = setup->tiers;
  tiers.keep_prefixes = tiers.far.kind != FarKind::kNone;
  setup->parked_sequences = tiers.keep_prefixes ? options.sequences : 0;
  if (tiers.far_bytes_max == 0) tiers.far_bytes_max = default_far_bytes(*setup, model);
  return setup;
}

// A template that was named has to work. Without the model's own, texts can still be completed.
Status check_chat_template(const std::string& name, const Model& model) {
  const ChatMessage hello{"user", "hello"};
  const auto prompt = model.vocabulary().apply_chat_template(std::span(&hello, 1), name);
  if (prompt) return {};
  if (!name.empty()) return std::unexpected(prompt.error());
  log(LogLevel::kWarning, "chats will be refused: " + prompt.error().message);
  return {};
}

std::string rate_text(double per_second) {
  return per_second >= 10.0 ? fmt::format("{:.0f}", per_second) : fmt::format("{:.2g}", per_second);
}

// A far tier that is too slow for its contexts should not be found out by those who wait for answers.
void log_expected_speed(const Model& model, const EngineOptions& options) {
  const auto plan = plan_memory(model.hyperparameters(), options, model.device());
  const Policy policy = options.tiers.policy;
  if (!plan || !plan->tiered() || policy == Policy::kFull || policy == Policy::kOracle) return;
  // An engine binds its thread to a CPU, and this one's threads are not to inherit that.
  const auto expected = std::async(std::launch::async, [&] {
                          return estimate(model, options, *plan, plan->near_bytes());
                        }).get();
  if (!expected)
    return log(LogLevel::kWarning, "the speed to expect is not known: " + expected.error().message);
  const double each = expected->tokens_per_s / options.sequences;
  log(LogLevel::kInfo,
      fmt::format(
          "expected: {} tokens/s, {} answers with {} tokens of context each | a step computes for {:.1f} "
          "ms and moves {}; the far tier gives {}/s",
          rate_text(expected->tokens_per_s), options.sequences, plan->context, expected->compute_ms,
          format_bytes(expected->moved_bytes_per_step), format_bytes(expected->far_bytes_per_s)));
  if (each >= 1.0) return;
  log(LogLevel::kWarning,
      fmt::format(
          "an answer will get {} tokens/s; a faster --far, a larger --near-memory, a smaller --budget or "
          "fewer --parallel answers give more",
          rate_text(each)));
}

void allow_many_descriptors() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// What answers: the API, once the model is loaded. What the API does not see is logged here.
class Front {
 public:
  /// `options.web`: the page is there from the start, and says that the model is being loaded.
  explicit Front(const ApiOptions& options) : options_(options) {}

  boost::asio::awaitable<void> handle(const HttpRequest& request, HttpExchange& exchange) {
    if (Api* api = api_.load()) co_return co_await api->handle(request, exchange);
    if (const WebFile* file =
            options_.web && request.method == "GET" ? find_web_file(request.path) : nullptr) {
      HttpReply page = web_reply(*file, request);
      co_await exchange.reply(std::move(page));
      co_return;
    }
    HttpReply reply = Api::refusal(503, "the model is still being loaded");
    reply.headers.emplace_back("Retry-After", "1");
    record({.method = request.method, .path = request.path, .status = reply.status, .error = "loading"});
    co_await exchange.reply(std::move(reply));
  }
  /// Of what could not be read as a request.
  HttpReply refuse(unsigned status, const std::string& message) {
    record({.method = "-", .path = "-", .status = status, .error = "unreadable_request"});
    return Api::refusal(status, message);
  }
  void open(Api* api) { api_ = api; }

 private:
  void record(RequestRecord record) const {
    record.id = "-";
    if (options_.on_answered) options_.on_answered(record);
  }

  const ApiOptions& options_;
  std::atomic<Api*> api_ = nullptr;
};

// Runs the server on a thread of its own, and ends it with its own life.
class ServerThread {
 public:
  explicit ServerThread(HttpServer& server) : server_(server), thread_([&server] { server.run(); }) {}
  ~ServerThread() {
    server_.stop();
    join();
  }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  HttpServer& server_;
  std::thread thread_;
};

// At the first signal: no more requests; the rest may end, for a while.
void stop_when_interrupted(HttpServer& server, Service& service, std::uint32_t drain_s) {
  auto since = std::make_shared<std::optional<Stopwatch>>();
  server.every(std::chrono::milliseconds(50), [&server, &service, drain_s, since] {
    if (!interrupted()) return true;
    if (!*since) {
      since->emplace();
      service.drain();
      server.close();
      log(LogLevel::kInfo,
          fmt::format("shutting down; {} answers are still in the works", service.state().running.size()));
    }
    const bool done = service.idle() && server.connections() == 0;
    if (!done && (*since)->seconds() < drain_s) return true;
    server.stop();
    return false;
  });
}

void print_start(const ServeOptions& options, const HttpServer& server, const Engine& engine) {
  for (const std::string& line : short_plan(engine)) log(LogLevel::kInfo, line);
  const std::string host = options.http.host.find(':') == options.http.host.npos
                               ? options.http.host
                               : "[" + options.http.host + "]";
  log(LogLevel::kInfo,
      fmt::format("listening on http://{}:{} | model {} | {} sequences of {} tokens", host, server.port(),
                  options.api.model_id, engine.options().sequences, engine.context()));
}

std::function<void(const RequestRecord&)> request_log(const std::string& which) {
  if (which == "none") return {};
  if (which == "all") return log_request;
  return [](const RequestRecord& record) {
    if (record.method == "POST" && record.path.ends_with("/completions")) log_request(record);
  };
}

Status serve(ServeOptions options) {
  if (options.log_format == "json") set_log_format(LogFormat::kJson);
  if (!options.api_key_file.empty()) {
    if (Status status = add_keys_from(options.api_key_file, options.api.api_keys); !status) return status;
  }
  // What can be refused is refused before anybody may connect.
  if (const auto file = GgufFile::open(options.model.model); !file) return std::unexpected(file.error());
  if (options.api.model_id.empty())
    options.api.model_id = std::filesystem::path(options.model.model).stem().string();
  options.api.version = fmt::format("{} ({})", DUALDECODER_VERSION, DUALDECODER_COMMIT);
  options.api.comment_period = std::chrono::seconds(options.comment_s);
  options.api.on_answered = request_log(options.log_requests);
  allow_many_descriptors();

  Front front(options.api);
  auto server = HttpServer::listen(
      options.http,
      [&front](const HttpRequest& request, HttpExchange& exchange) {
        return front.handle(request, exchange);
      },
      [&front](unsigned status, const std::string& message) { return front.refuse(status, message); });
  if (!server) return std::unexpected(server.error());
  Metrics metrics;
  std::unique_ptr<Model> model;
  std::unique_ptr<Model> draft;
  std::unique_ptr<Service> service;
  std::unique_ptr<Api> api;
  ServerThread thread(**server);

  auto loaded = load_model(options.model);
  if (!loaded) return std::unexpected(loaded.error());
  model = std::move(*loaded);
  if (Status status = check_chat_template(options.api.chat_template, *model); !status) return status;
  auto setup = serve_engine_options(options, *model);
  if (!setup) return std::unexpected(setup.error());
  if (Status status = load_draft(*setup, draft); !status) return status;
  if (options.measure) log_expected_speed(*model, *setup);
  auto made = Service::create(*model, *setup, options.service, metrics);
  if (!made) return std::unexpected(made.error());
  service = std::move(*made);
  api = std::make_unique<Api>(*service, *model, metrics, options.api);
  api->use_worker((*server)->worker());
  front.open(api.get());
  print_start(options, **server, service->engine());
  (*server)->post([&] { stop_when_interrupted(**server, *service, options.drain_s); });
  thread.join();
  return {};
}

void add_server_options(CLI::App& command, ServeOptions& options) {
  const std::string group = "Server";
  const auto number = [&](const char* names, auto& value, const char* help, auto low, auto high) {
    command.add_option(names, value, help)
        ->capture_default_str()
        ->group(group)
        ->check(CLI::Range(low, high))
        ->type_name("N");
  };
  const auto text = [&](const char* names, auto& value, const char* help, const char* type) {
    command.add_option(names, value, help)->group(group)->type_name(type);
  };
  command.add_option("--host", options.http.host, "Address to listen on; 0.0.0.0 for all of the machine's")
      ->capture_default_str()
      ->group(group)
      ->type_name("ADDRESS");
  number("--port", options.http.port, "Port; 0: any free one, named at the start", 0, 65535);
  number("--np,--parallel", options.sequences, "Answers in the works at the same time", 1, 1024);
  number("--queue", options.service.queue_max, "Answers that may wait; more are refused", 0, 100'000);
  number("--max-batch-tokens", options.service.prompt_tokens_max,
         "Tokens of prompts that one step over prompts computes at most", 1, 16384);
  number("--latency-ratio", options.service.latency_ratio,
         "How many times as long a step may take for the sake of prompts, while others decode", 1.1, 100.0);
  text("--api-key", options.api.api_keys, "Key that a client must send; repeatable", "KEY");
  text("--api-key-file", options.api_key_file, "File with one such key a line", "FILE");
  text("--cors-origin", options.api.cors_origin,
       "Origin whose pages may ask from a browser, or * for all; by default only pages of this server",
       "ORIGIN");
  text("--chat-template", options.api.chat_template,
       "One of libllama's templates, e.g. chatml, llama3, gemma", "NAME");
  text("--alias", options.api.model_id, "Name of the model for clients; by default the file's", "NAME");
  number("--comment-period", options.comment_s, "Seconds of silence in a stream before a comment line", 1,
         3600);
  number("--drain-time", options.drain_s, "Seconds that answers may still take after SIGTERM", 0, 86'400);
  command
      .add_flag("!--no-measure", options.measure, "Do not measure at the start what speed is to be expected")
      ->group(group);
  command.add_flag("!--no-web", options.api.web, "Without the web page at /")->group(group);
  const auto choice = [&](const char* name, std::string& value, const char* help,
                          const std::vector<std::string>& values) {
    command.add_option(name, value, help)->capture_default_str()->group(group)->check(CLI::IsMember(values));
  };
  choice("--log-format", options.log_format, "Lines on stderr: for people, or a JSON object each",
         {"text", "json"});
  choice("--log-requests", options.log_requests,
         "Requests that get a line when they have been answered: none, those for completions, or all",
         {"none", "answers", "all"});
}

}  // namespace

void add_serve_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<ServeOptions>();
  CLI::App* command = app.add_subcommand("serve", "Serve the OpenAI API over HTTP");
  add_config_option(*command);
  add_model_options(*command, options->model);
  add_context_option(*command, options->model);
  add_tier_options(*command, options->tiers);
  add_server_options(*command, *options);
  add_environment_names(*command);
  command->callback([options, &exit_code] {
    catch_interrupts();
    if (Status status = serve(*options); !status) exit_code = report(status.error());
  });
}

}  // namespace dualdecoder
