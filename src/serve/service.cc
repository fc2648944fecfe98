#include "serve/service.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/check.h"

namespace dualdecoder {
namespace {

using Clock = std::chrono::steady_clock;

// A sequence that has just ended may hold its place until its last transfer is over.
constexpr auto kStartPatience = std::chrono::seconds(10);
constexpr auto kStartRetry = std::chrono::milliseconds(1);

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// `row`: logits [vocabulary].
TokenLogprob logprob_of(TokenId token, std::span<const float> row, std::uint32_t top) {
  const float maximum = *std::max_element(row.begin(), row.end());
  double sum = 0.0;
  for (const float logit : row) sum += std::exp(static_cast<double>(logit - maximum));
  const float log_sum = maximum + static_cast<float>(std::log(sum));
  TokenLogprob result;
  result.token = token;
  result.logprob = row[static_cast<std::size_t>(token)] - log_sum;
  if (top == 0) return result;
  std::vector<TokenId> order(row.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<TokenId>(i);
  const auto end = order.begin() + std::min<std::size_t>(top, order.size());
  std::partial_sort(order.begin(), end, order.end(), [&](TokenId a, TokenId b) {
    const float la = row[static_cast<std::size_t>(a)];
    const float lb = row[static_cast<std::size_t>(b)];
    return la != lb ? la > lb : a < b;
  });
  for (auto it = order.begin(); it != end; ++it)
    result.top.emplace_back(*it, row[static_cast<std::size_t>(*it)] - log_sum);
  return result;
}

}  // namespace

// A job that was taken from the inbox.
struct Service::Running {
  Job job;
  bool cancelled = false;
  Clock::time_point arrived = Clock::now();
  Clock::time_point admitted = {};  // first
  Clock::time_point planned = {};   // last
  Clock::time_point first_token = {};
  Clock::time_point last_token = {};
  std::unique_ptr<Generation> generation;  // null before it has begun
  std::uint32_t prompt_told = 0;
  std::uint32_t tokens_told = 0;
  std::size_t text_told = 0;           // bytes
  std::size_t text_made = 0;           // bytes of its tokens
  std::vector<TokenLogprob> logprobs;  // of tokens whose text is held back
  std::vector<TokenLogprob> prompt_logprobs;
};

Service::Service(const Model& model, const ServiceOptions& options, Metrics& metrics)
    : model_(model), options_(options), metrics_(metrics) {}

Result<std::unique_ptr<Service>> Service::create(const Model& model, const EngineOptions& engine_options,
                                                 const ServiceOptions& options, Metrics& metrics) {
  std::unique_ptr<Service> service(new Service(model, options, metrics));
  std::promise<Status> created;
  std::future<Status> status = created.get_future();
  // The engine binds its thread to a CPU; so it is made there, and no other thread inherits that.
  service->thread_ =
      std::thread([service = service.get(), engine_options, promise = std::move(created)]() mutable {
        service->run(engine_options, std::move(promise));
      });
  if (Status result = status.get(); !result) return std::unexpected(result.error());
  return service;
}

Service::~Service() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Service::run(const EngineOptions& engine_options, std::promise<Status> created) {
  EngineOptions watched = engine_options;
  watched.tiers.transfers.trace = steps_->trace();
  auto engine = Engine::create(model_, watched);
  if (!engine) {
    created.set_value(std::unexpected(engine.error()));
    return;
  }
  engine_ = std::move(*engine);
  generator_ = std::make_unique<Generator>(*engine_);
  const EngineOptions& made = engine_->options();
  const MemoryPlan& memory = engine_->plan();
  capacity_ = engine_->context();
  if (memory.tiered())
    capacity_ = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(capacity_, std::uint64_t{memory.far_pages} * made.block_tokens));
  scheduler_ = std::make_unique<Scheduler>(
      SchedulerOptions{.running_max = made.sequences,
                       .parked_max = made.parked_sequences,
                       .layers = model_.hyperparameters().layers,
                       .outputs_max = made.outputs_max,
                       .prompt_tokens_max = std::min(options_.prompt_tokens_max, made.prefill_chunk),
                       .latency_ratio = options_.latency_ratio,
                       .block_tokens = made.block_tokens,
                       .pages_max = memory.tiered() ? memory.far_pages : UINT32_MAX});
  metrics_.note_engine(*engine_);
  created.set_value({});
  loop();
  generator_.reset();
  engine_.reset();
}

// ---- From other threads

ApiStatus Service::check(const Job& job) const {
  const auto refuse = [&](const Error& why, std::uint32_t context) {
    ApiError error = api_error(why);
    if (why.code == ErrorCode::kContextExceeded) {
      error.prompt_tokens = static_cast<std::uint32_t>(job.prompt.size());
      error.context = context;
    }
    return std::unexpected(std::move(error));
  };
  const Vocabulary& vocabulary = model_.vocabulary();
  if (Status status = vocabulary.check_tokens(job.prompt); !status)
    return std::unexpected(bad_field("prompt", "prompt: " + status.error().message));
  for (const auto& [token, bias] : job.options.sampling.logit_bias) {
    const TokenId list[] = {token};
    if (Status status = vocabulary.check_tokens(list); !status) {
      return std::unexpected(
          bad_field("logit_bias", fmt::format("logit_bias: token {} is outside the vocabulary (0 to {})",
                                              token, vocabulary.size() - 1)));
    }
  }
  if (job.options.policy) {
    if (Status status = engine_->check_selection(*job.options.policy, 1); !status)
      return std::unexpected(
          bad_field("dualdecoder.policy", "dualdecoder.policy: " + status.error().message));
  }
  if (Status status = generator_->check(job.prompt, job.options); !status)
    return refuse(status.error(), engine_->context());
  if (job.prompt.size() < capacity_) return {};
  return refuse(
      {ErrorCode::kContextExceeded,
       fmt::format("the prompt has {} tokens and the far tier holds {} in all; shorten the prompt or "
                   "raise the limit (--far-size)",
                   job.prompt.size(), capacity_)},
      capacity_);
}

ApiResult<std::vector<JobId>> Service::submit(std::vector<Job> jobs) {
  std::vector<JobId> ids;
  {
    const std::lock_guard lock(mutex_);
    if (draining_ || stopping_) {
      metrics_.note_refused("draining");
      return std::unexpected(ApiError{.status = 503,
                                      .type = "server_error",
                                      .message = "the server is shutting down",
                                      .code = "shutting_down"});
    }
    const std::size_t room = std::size_t{engine_->options().sequences} + options_.queue_max;
    if (jobs.size() > room) {
      metrics_.note_refused("too_many_choices");
      return std::unexpected(ApiError{.message = fmt::format("{} answers at once are more than the {} that "
                                                             "this server runs and queues; ask for fewer",
                                                             jobs.size(), room)});
    }
    if (live_ + jobs.size() > room) {
      metrics_.note_refused("queue_full");
      return std::unexpected(ApiError{
          .status = 429,
          .type = "rate_limit_error",
          .message = fmt::format("the queue is full: {} answers run or wait; try again later", live_),
          .code = "queue_full",
          .retry_after_s = 1});
    }
    live_ += static_cast<std::uint32_t>(jobs.size());
    for (Job& job : jobs) {
      ids.push_back(next_id_);
      inbox_.emplace_back(next_id_++, std::move(job));
    }
  }
  wake_.notify_all();
  return ids;
}

void Service::cancel(JobId job) {
  {
    const std::lock_guard lock(mutex_);
    cancelled_.push_back(job);
  }
  wake_.notify_all();
}

void Service::drain() {
  const std::lock_guard lock(mutex_);
  draining_ = true;
  state_.draining = true;
}

bool Service::idle() const {
  const std::lock_guard lock(mutex_);
  return live_ == 0;
}

ServiceState Service::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

// ---- The engine's thread

void Service::loop() {
  while (take_inbox()) {
    const Scheduler::Plan& plan = scheduler_->plan();
    park(plan.parked);
    for (const JobId id : plan.admitted) jobs_.at(id)->planned = Clock::now();
    admitted_.insert(admitted_.end(), plan.admitted.begin(), plan.admitted.end());
    start_admitted();
    bool worked = decode(plan.decoding);
    if (!plan.prompts.empty() && !begin_prompts(plan.prompts)) scheduler_->drop_prompts();
    if (!prompt_jobs_.empty()) {
      advance_prompts(plan.prompt_layers);
      worked = true;
    }
    // Where only jobs run that cannot start yet.
    if (!worked && scheduler_->running() > 0) std::this_thread::sleep_for(kStartRetry);
    publish_state();
  }
  if (!prompt_jobs_.empty()) advance_prompts(model_.hyperparameters().layers);
  while (!jobs_.empty()) {
    const JobId id = jobs_.begin()->first;
    end(id, FinishReason::kAbort, {});
  }
}

// False when the service stops. Waits while there is nothing to do.
bool Service::take_inbox() {
  std::vector<std::pair<JobId, Job>> arrived;
  std::vector<JobId> cancelled;
  bool stopping = false;
  {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [this] {
      return stopping_ || !inbox_.empty() || !cancelled_.empty() || scheduler_->running() > 0 ||
             scheduler_->waiting() > 0;
    });
    arrived.swap(inbox_);
    cancelled.swap(cancelled_);
    stopping = stopping_;
  }
  for (auto& [id, job] : arrived) {
    const auto prompt_tokens = static_cast<std::uint32_t>(job.prompt.size());
    const std::uint32_t room = capacity_ - prompt_tokens;
    const std::uint32_t tokens_max = std::min(room, job.options.tokens_max.value_or(room));
    if (capacity_ < engine_->context()) job.options.tokens_max = tokens_max;
    scheduler_->add(id, {.client = job.client,
                         .priority = job.priority,
                         .prompt_tokens = prompt_tokens,
                         .tokens_max = prompt_tokens + tokens_max,
                         .prompt_logits = job.prompt_logprobs});
    auto running = std::make_unique<Running>();
    running->job = std::move(job);
    jobs_.emplace(id, std::move(running));
  }
  for (const JobId id : cancelled) {
    const auto job = jobs_.find(id);
    if (job == jobs_.end()) continue;
    const bool computed = std::any_of(prompt_jobs_.begin(), prompt_jobs_.end(),
                                      [&](const PromptJob& member) { return member.job == id; });
    if (computed) {
      job->second->cancelled = true;  // ends with the step
    } else {
      end(id, FinishReason::kAbort, {});
    }
  }
  return !stopping;
}

void Service::park(const std::vector<JobId>& jobs) {
  for (const JobId id : jobs) {
    metrics_.note_parked();
    std::erase(admitted_, id);
    const auto& generation = jobs_.at(id)->generation;
    if (!generation || generation->parked()) continue;  // it had no place yet
    generator_->park(*generation);
    if (!generation->running()) end(id, generation->finish_reason(), generation->error());
  }
}

void Service::start_admitted() {
  std::erase_if(admitted_, [this](JobId id) {
    const auto job = jobs_.find(id);
    return job == jobs_.end() || start(id, *job->second);
  });
}

// Whether it has started, or ended with an error.
bool Service::start(JobId id, Running& running) {
  const Status status = running.generation ? resume(id, running) : begin(id, running);
  if (status) return true;
  if (status.error().code == ErrorCode::kOutOfMemory && Clock::now() - running.planned < kStartPatience)
    return false;
  end(id, FinishReason::kError, status.error());
  return true;
}

Status Service::begin(JobId id, Running& running) {
  const Clock::time_point now = Clock::now();
  if (running.admitted == Clock::time_point{}) running.admitted = now;
  Job& job = running.job;
  GenerationOptions options = job.options;
  if (job.top_logprobs) {
    options.on_token = [this, &running](TokenId token, std::span<const float> row) {
      running.logprobs.push_back(logprob_of(token, row, *running.job.top_logprobs));
      running.logprobs.back().text_begin = running.text_made;
      running.text_made += model_.vocabulary().piece(token).size();
    };
  }
  if (job.prompt_logprobs) {
    options.on_prompt_token = [&running](TokenId token, std::span<const float> row) {
      running.prompt_logprobs.push_back(logprob_of(token, row, running.job.top_logprobs.value_or(0)));
    };
  }
  auto generation = generator_->start(job.prompt, std::move(options));
  if (!generation) return std::unexpected(generation.error());
  running.generation = std::move(*generation);
  const std::uint32_t cached = running.generation->cached_tokens();
  scheduler_->note_prompt(id, cached);
  metrics_.note_queued(seconds_between(running.arrived, now));
  metrics_.note_cached(static_cast<std::uint32_t>(job.prompt.size()), cached);
  return {};
}

Status Service::resume(JobId id, Running& running) {
  Generation& generation = *running.generation;
  if (Status status = generator_->resume(generation); !status) return status;
  scheduler_->set_prompt_left(id, generation.prompt_left());  // all of it, where it could not be read
  if (!generation.running()) end(id, generation.finish_reason(), generation.error());
  return {};
}

// Null for one that has no place yet, or has ended since it was planned.
Generation* Service::generation_of(JobId id) const {
  const auto job = jobs_.find(id);
  if (job == jobs_.end() || !job->second->generation || job->second->generation->parked()) return nullptr;
  return job->second->generation.get();
}

// Whether there was anybody to decode.
bool Service::decode(const std::vector<JobId>& jobs) {
  std::vector<JobId> members;
  std::vector<Generation*> generations;
  for (const JobId id : jobs) {
    Generation* const generation = generation_of(id);
    if (generation == nullptr) continue;
    members.push_back(id);
    generations.push_back(generation);
  }
  if (members.empty()) return false;
  const bool sampled = steps_->begin_step(*engine_, members.back(), *generations.back());
  const Clock::time_point begin = Clock::now();
  const Status status = generator_->step(generations);
  if (sampled) {
    steps_->end_step(*engine_, *generator_, *generations.back(),
                     {.running = scheduler_->running(),
                      .waiting = scheduler_->waiting(),
                      .tokens = metrics_.generated_tokens()});
  }
  if (!status) {
    for (const JobId id : members) end(id, FinishReason::kError, status.error());
    return true;
  }
  scheduler_->note_decoding(seconds_between(begin, Clock::now()));
  for (const JobId id : members) settle(id);
  return true;
}

// Whether there is now a step over prompts.
bool Service::begin_prompts(const std::vector<Scheduler::Piece>& pieces) {
  std::vector<PromptPiece> prompts;
  for (const auto& [id, tokens] : pieces) {
    Generation* const generation = generation_of(id);
    if (generation == nullptr) continue;
    prompts.push_back({.generation = generation, .tokens = std::min(tokens, generation->prompt_left())});
    prompt_jobs_.push_back({.job = id, .left = generation->prompt_left()});
  }
  if (prompts.empty()) return false;
  const Status status = generator_->begin_prompts(prompts);
  if (status) return true;
  for (const PromptJob& failed : std::exchange(prompt_jobs_, {}))
    end(failed.job, FinishReason::kError, status.error());
  return false;
}

void Service::advance_prompts(std::uint32_t layers) {
  const Clock::time_point begin = Clock::now();
  const bool over = generator_->advance_prompts(layers);
  scheduler_->note_layers(seconds_between(begin, Clock::now()));
  if (!over) return;
  scheduler_->drop_prompts();
  for (const PromptJob& member : std::exchange(prompt_jobs_, {})) {
    const std::uint32_t left = jobs_.at(member.job)->generation->prompt_left();
    if (left < member.left) metrics_.note_prompt_tokens(member.left - left);
    if (jobs_.at(member.job)->cancelled) {
      end(member.job, FinishReason::kAbort, {});
    } else {
      settle(member.job);
    }
  }
}

// After a step: tells what is new, and ends what has ended.
void Service::settle(JobId id) {
  Running& running = *jobs_.at(id);
  const Generation& generation = *running.generation;
  scheduler_->set_prompt_left(id, generation.prompt_left());
  if (generation.running()) {
    tell(running);
  } else {
    end(id, generation.finish_reason(), generation.error());
  }
}

// What is new about a job, to its listener; with its end, if it has ended.
void Service::tell(Running& running) {
  JobEvent event;
  Generation& generation = *running.generation;
  const Clock::time_point now = Clock::now();
  const auto tokens = static_cast<std::uint32_t>(generation.tokens().size());
  for (; running.tokens_told < tokens; ++running.tokens_told) {
    if (running.tokens_told == 0) {
      running.first_token = now;
      metrics_.note_first_token(seconds_between(running.arrived, now));
    }
    metrics_.note_token(running.tokens_told == 0 ? 0.0 : seconds_between(running.last_token, now));
    running.last_token = now;
  }
  const auto prompt = static_cast<std::uint32_t>(generation.prompt().size());
  const std::uint32_t prompt_done = prompt - std::min(prompt, generation.prompt_left());
  if (prompt_done > running.prompt_told) event.prompt_done = running.prompt_told = prompt_done;
  event.text = generation.take_text();
  running.text_told += event.text.size();
  // With the text in which its first byte stands; at an end that cuts nothing off, all. The token that ends a
  // text has none: it counts where those of the prompt do.
  const bool ended = running.job.prompt_logprobs && generation.finish_reason() == FinishReason::kStop &&
                     model_.vocabulary().is_end(generation.tokens().back());
  const bool all = generation.finish_reason() == FinishReason::kLength || ended;
  const auto held = std::find_if(running.logprobs.begin(), running.logprobs.end(), [&](const auto& entry) {
    return !all && entry.text_begin >= running.text_told;
  });
  event.logprobs.assign(std::make_move_iterator(running.logprobs.begin()), std::make_move_iterator(held));
  running.logprobs.erase(running.logprobs.begin(), held);
  if (generation.prompt_left() == 0) event.prompt_logprobs = std::exchange(running.prompt_logprobs, {});
  if (!generation.running()) {
    event.end = JobEnd{.reason = generation.finish_reason(),
                       .error = generation.error(),
                       .prompt_tokens = static_cast<std::uint32_t>(generation.prompt().size()),
                       .cached_tokens = generation.cached_tokens(),
                       .tokens = tokens,
                       .queue_s = seconds_between(running.arrived, running.admitted)};
    const Clock::time_point prompt_end = tokens == 0 ? now : running.first_token;
    event.end->prompt_s = seconds_between(running.admitted, prompt_end);
    event.end->decode_s = seconds_between(prompt_end, now);
  }
  const bool has_news = event.prompt_done > 0 || !event.text.empty() || !event.logprobs.empty() ||
                        !event.prompt_logprobs.empty() || event.end;
  if (has_news && running.job.listener) running.job.listener(std::move(event));
}

void Service::end(JobId id, FinishReason reason, const Error& error) {
  const std::unique_ptr<Running> running = std::move(jobs_.at(id));
  jobs_.erase(id);
  scheduler_->remove(id);
  DraftStats draft;
  if (running->generation) {
    if (reason == FinishReason::kAbort) running->generation->abort();
    draft = running->generation->draft_stats();
  }
  metrics_.note_end(reason, seconds_between(running->arrived, Clock::now()), draft);
  if (running->generation && !running->generation->running()) {
    tell(*running);
  } else if (running->job.listener) {
    JobEvent event;
    event.end = JobEnd{.reason = reason,
                       .error = error,
                       .prompt_tokens = static_cast<std::uint32_t>(running->job.prompt.size())};
    running->job.listener(std::move(event));
  }
  if (running->generation) generator_->keep_prefix(*running->generation);
  running->generation.reset();  // its memory is free before its place in the queue is
  {
    const std::lock_guard lock(mutex_);
    --live_;
  }
  publish_state();
}

void Service::publish_state() {
  metrics_.note_engine(*engine_);
  metrics_.note_jobs(scheduler_->running(), scheduler_->waiting());
  ServiceState state;
  for (const auto& [id, running] : jobs_) {
    if (!running->generation) continue;
    const Generation& generation = *running->generation;
    const auto prompt = static_cast<std::uint32_t>(generation.prompt().size());
    state.running.push_back({.job = id,
                             .prompt_tokens = prompt,
                             .prompt_done = prompt - std::min(prompt, generation.prompt_left()),
                             .tokens = static_cast<std::uint32_t>(generation.tokens().size()),
                             .parked = generation.parked()});
  }
  std::sort(state.running.begin(), state.running.end(),
            [](const auto& a, const auto& b) { return a.job < b.job; });
  state.waiting = scheduler_->waiting();
  const std::lock_guard lock(mutex_);
  state.draining = draining_;
  state_ = std::move(state);
}

}  // namespace dualdecoder
