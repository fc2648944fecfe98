// The engine behind the server: a thread that owns the engine, and a door for all other threads. Jobs are
// handed in, cancelled and observed from anywhere; their events come on the engine's thread.
//
//   submit() -> [inbox] -> engine's thread: scheduler plans, generator steps, listeners hear -> ...
//
// The inbox is bounded: what is neither running nor fits the queue is refused at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "decode/engine.h"
#include "serve/api_error.h"
#include "serve/job.h"
#include "serve/metrics.h"
#include "serve/scheduler.h"
#include "serve/step_feed.h"

namespace dualdecoder {

struct ServiceOptions {
  std::uint32_t queue_max = 32;           // jobs that wait
  std::uint32_t prompt_tokens_max = 512;  // of one step, over all jobs
  double latency_ratio = 2.0;             // see Scheduler
};

struct ServiceState {
  struct Slot {
    JobId job = 0;
    std::uint32_t prompt_tokens = 0;
    std::uint32_t prompt_done = 0;
    std::uint32_t tokens = 0;
    bool parked = false;  // has given its place to another
  };
  std::vector<Slot> running;  // those that have begun
  std::uint32_t waiting = 0;
  bool draining = false;
};

class Service {
 public:
  /// Makes the engine on its own thread. `model` and `metrics` outlive the service.
  static Result<std::unique_ptr<Service>> create(const Model& model, const EngineOptions& engine_options,
                                                 const ServiceOptions& options, Metrics& metrics);
  /// Aborts what is left; its listeners hear of it.
  ~Service();

  /// 400 for a job that can never run. Any thread.
  ApiStatus check(const Job& job) const;
  /// All of `jobs`, which check() lets pass, or none: 400 for more than can ever be taken at once, 429 when
  /// the queue has no room, 503 while draining.
  ApiResult<std::vector<JobId>> submit(std::vector<Job> jobs);
  /// It ends as kAbort after the step under way, if it has not ended before.
  void cancel(JobId job);
  /// Takes no more jobs.
  void drain();
  /// Nothing runs or waits.
  bool idle() const;
  ServiceState state() const;

  const Engine& engine() const { return *engine_; }  // what is constant about it
  const ServiceOptions& options() const { return options_; }
  const std::shared_ptr<StepFeed>& steps() const { return steps_; }

 private:
  struct Running;

  Service(const Model& model, const ServiceOptions& options, Metrics& metrics);
  void run(const EngineOptions& engine_options, std::promise<Status> created);
  void loop();
  bool take_inbox();
  void park(const std::vector<JobId>& jobs);
  void start_admitted();
  bool decode(const std::vector<JobId>& jobs);
  bool begin_prompts(const std::vector<Scheduler::Piece>& pieces);
  void advance_prompts(std::uint32_t layers);
  void settle(JobId id);
  Generation* generation_of(JobId id) const;
  bool start(JobId id, Running& job);
  Status begin(JobId id, Running& job);
  Status resume(JobId id, Running& job);
  void tell(Running& job);
  void end(JobId id, FinishReason reason, const Error& error);
  void publish_state();

  const Model& model_;
  const ServiceOptions options_;
  Metrics& metrics_;
  const std::shared_ptr<StepFeed> steps_ = std::make_shared<StepFeed>();

  // Shared.
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::pair<JobId, Job>> inbox_;  // guarded by mutex_
  std::vector<JobId> cancelled_;              // guarded by mutex_
  std::uint32_t live_ = 0;                    // jobs submitted and not ended; guarded by mutex_
  JobId next_id_ = 1;                         // guarded by mutex_
  bool draining_ = false;                     // guarded by mutex_
  bool stopping_ = false;                     // guarded by mutex_
  ServiceState state_;                        // guarded by mutex_

  std::uint32_t capacity_ = 0;  // tokens of one sequence; constant once the engine is there

  // The engine's thread.
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Generator> generator_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unordered_map<JobId, std::unique_ptr<Running>> jobs_;
  std::vector<JobId> admitted_;  // and without a place yet
  // Of the step over prompts that is under way: none of them ends before it does.
  struct PromptJob {
    JobId job = 0;
    std::uint32_t left = 0;  // tokens of its prompt, before the step
  };
  std::vector<PromptJob> prompt_jobs_;

  std::thread thread_;
};

}  // namespace dualdecoder
