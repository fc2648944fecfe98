// Samples of what steps do, on their way from the engine's thread to those who look on (GET
// /v1/dualdecoder/steps). A step is watched only when somebody listens and the last sample is kPeriod old;
// then its thread copies what is there already, and the text is made elsewhere. A listener that is slow
// misses samples; it never holds anything up.
//
// begin_step() and end_step() are the engine thread's; everything else any thread's. Shared, because a
// listener may outlive the service.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/trace.h"
#include "decode/engine.h"
#include "decode/generation.h"
#include "decode/step_watch.h"

namespace dualdecoder {

struct StepSample {
  using Time = std::chrono::steady_clock::time_point;

  Time begin = {};  // of the step
  Time end = {};
  // Sums since the start.
  std::uint64_t tokens = 0;  // of all answers
  StepStats stats;
  std::array<std::uint64_t, kPasses> pass_ns{};
  TransferStats transfers;
  // At the end of the step.
  std::uint32_t running = 0;
  std::uint32_t waiting = 0;
  std::uint64_t near_bytes = 0;
  std::uint64_t near_bytes_used = 0;
  std::uint64_t far_bytes = 0;
  std::uint64_t far_bytes_used = 0;
  std::string choice;  // of Policy::kAuto, and why; else empty
  // Of the sequence that was watched.
  std::uint64_t job = 0;
  std::uint32_t sequence_tokens = 0;
  std::uint32_t block_tokens = 0;
  std::uint64_t slot_bytes = 0;
  Policy policy = Policy::kFull;
  std::uint32_t budget_tokens = 0;
  DraftStats draft;
  std::uint32_t layers = 0;
  std::uint32_t blocks = 0;
  std::vector<BlockFate> fates;  // [layer, block]
  // Of the step.
  std::vector<TraceEvent> events;
  std::size_t events_dropped = 0;
  std::chrono::nanoseconds cost{};  // to the engine's thread
};

/// `now`: when it is told. A map of more than kMapColumns blocks has several in a place: the worst of them.
inline constexpr std::uint32_t kMapColumns = 512;
std::string step_sample_json(const StepSample& sample, StepSample::Time now);

class StepFeed {
 public:
  static constexpr auto kPeriod = std::chrono::milliseconds(250);
  static constexpr std::size_t kEventsMax = 4096;  // of one step

  /// The latest sample for one who listens. Lives on the thread of `executor`.
  class Listener {
   public:
    Listener(std::shared_ptr<StepFeed> feed, const boost::asio::any_io_executor& executor);
    ~Listener();
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;

    /// Null when there is none since the last call.
    std::shared_ptr<const StepSample> take();
    /// Wait on it; it is cancelled when there is something to take.
    boost::asio::steady_timer& timer() { return mailbox_->timer; }

   private:
    friend class StepFeed;
    struct Mailbox {
      explicit Mailbox(const boost::asio::any_io_executor& executor) : timer(executor) {}
      boost::asio::steady_timer timer;           // the executor's thread's
      std::shared_ptr<const StepSample> latest;  // guarded by mutex_ of the feed
    };
    std::shared_ptr<StepFeed> feed_;
    std::shared_ptr<Mailbox> mailbox_;
  };

  StepFeed();
  /// For the options of the engine: paused but for the steps that are watched.
  Trace* trace() { return &trace_; }

  /// A step of decoding begins, in which `generation` of `job` is one. Returns whether it is watched: then
  /// end_step() follows, whatever becomes of it.
  bool begin_step(Engine& engine, std::uint64_t job, const Generation& generation);
  struct Load {
    std::uint32_t running = 0;
    std::uint32_t waiting = 0;
    double tokens = 0.0;  // made so far
  };
  void end_step(Engine& engine, const Generator& generator, const Generation& generation, const Load& load);

 private:
  void publish(std::shared_ptr<const StepSample> sample);

  std::atomic<bool> heard_ = false;  // whether somebody listens
  std::mutex mutex_;
  std::vector<std::shared_ptr<Listener::Mailbox>> mailboxes_;  // guarded by mutex_
  std::shared_ptr<const StepSample> latest_;                   // guarded by mutex_

  // The engine's thread.
  Trace trace_;
  StepWatch watch_;
  std::shared_ptr<StepSample> sample_;  // of the step that is watched
  StepSample::Time last_ = {};          // its begin
};

}  // namespace dualdecoder
