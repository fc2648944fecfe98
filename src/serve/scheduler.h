// Who computes in the next step. Pure: jobs and measured times in, the next batch out; no I/O, no clock, no
// threads. The service (serve/service.h) does what it plans.
//
// A job waits, then runs: first its prompt, piece by piece, then a token a step. Running jobs all decode in
// every step; what the step has room for beside them goes to prompts.
//
// Admission. A job is let in when a sequence is free and the far tier has room for all that the job may come
// to hold: its prompt and every token it may still make. So what runs can always end without anything being
// taken from it, and since whoever is first in the queue is never overtaken by a job of lower or equal rank,
// a job that fits at all is let in once those before it have ended: no deadlock, no starvation within a
// priority. Rank: higher priority, then the client with the fewest running jobs, then arrival.
//
// Preemption. A job of higher priority does not wait for a place that one of lower priority has: that one is
// parked. It keeps its pages, so it goes on later without computing anything again; and since the job that is
// first in the queue may wait for just these pages, one that is parked goes on where that one cannot begin.
//
// Latency. Prompts go through steps of their own, which pause between layers: beside each step of those who
// decode, so many layers of a prompt's piece are computed that it all takes at most `latency_ratio` times as
// long as the step alone. A piece is as long as one layer of it may take, by what layers have cost so far:
// the longer, the fewer times the KV before it has to be brought near.
//
// Owned by the engine's thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace dualdecoder {

using JobId = std::uint64_t;

struct SchedulerOptions {
  std::uint32_t running_max = 1;          // sequences of the engine
  std::uint32_t parked_max = 0;           // 0: nobody gives a place up
  std::uint32_t layers = 1;               // of the model
  std::uint32_t outputs_max = 8;          // rows of a step over prompts that want logits
  std::uint32_t prompt_tokens_max = 512;  // of such a step
  double latency_ratio = 2.0;
  std::uint32_t block_tokens = 32;
  std::uint32_t pages_max = UINT32_MAX;  // of the far tier
};

struct JobShape {
  std::string client;
  std::int32_t priority = 0;
  std::uint32_t prompt_tokens = 1;
  std::uint32_t tokens_max = 1;  // prompt and answer; at least the prompt
  bool prompt_logits = false;    // wants logits of every row of its prompt
};

class Scheduler {
 public:
  /// A piece beside others that decode is not made shorter than this: on a slow link it would never end.
  static constexpr std::uint32_t kPieceTokensMin = 32;

  struct Piece {
    JobId job = 0;
    std::uint32_t tokens = 0;
  };
  /// What to do next, in this order; valid until the next call.
  struct Plan {
    std::vector<JobId> parked;        // give their places up
    std::vector<JobId> admitted;      // run from now on: begin, or go on
    std::vector<JobId> decoding;      // a step
    std::vector<Piece> prompts;       // begin a step over prompts; empty while one is under way
    std::uint32_t prompt_layers = 0;  // of that step; 0 when there is none
    bool idle() const { return decoding.empty() && prompt_layers == 0; }
  };

  explicit Scheduler(const SchedulerOptions& options) : options_(options) {}

  /// Whether a job with so many tokens in all could ever run.
  bool fits(std::uint32_t tokens_max) const { return pages_for(tokens_max) <= options_.pages_max; }
  /// Queues it. `id` is new and fits().
  void add(JobId id, const JobShape& shape);
  /// It has ended, in whatever state it was.
  void remove(JobId id);

  const Plan& plan();
  /// `tokens` of its prompt have been computed, or found computed.
  void note_prompt(JobId id, std::uint32_t tokens);
  /// So many tokens are still to be computed before it decodes; more than before when it had to begin again.
  void set_prompt_left(JobId id, std::uint32_t tokens);
  /// The planned step of those who decode took so long.
  void note_decoding(double seconds);
  /// So did the planned layers over prompts.
  void note_layers(double seconds);
  /// The planned step over prompts does not take place, or has ended early.
  void drop_prompts() { layers_left_ = 0; }

  std::uint32_t waiting() const { return static_cast<std::uint32_t>(jobs_.size()) - running_; }
  std::uint32_t running() const { return running_; }
  std::uint32_t pages_reserved() const { return pages_reserved_; }

 private:
  struct Job {
    JobShape shape;
    bool running = false;
    bool parked = false;
    std::uint64_t admitted = 0;  // how many began before it
    std::uint32_t prompt_left = 0;
  };

  std::uint32_t pages_for(std::uint32_t tokens) const {
    return options_.pages_max == UINT32_MAX ? 0
                                            : (tokens + options_.block_tokens - 1) / options_.block_tokens;
  }
  using JobPlace = std::map<JobId, Job>::iterator;
  template <typename Eligible>
  JobPlace first_in_queue(const Eligible& eligible);
  JobPlace next_to_run();
  JobPlace job_to_park(std::int32_t priority);
  void admit();
  void run(JobPlace job);
  void stop(JobPlace job);
  std::uint32_t step_tokens() const;
  double allowed_s() const;
  std::uint32_t prompt_tokens_now() const;
  std::uint32_t layers_now() const;
  void share_among_prompts(std::uint32_t tokens, std::uint32_t outputs);

  SchedulerOptions options_;
  std::map<JobId, Job> jobs_;  // by arrival
  std::map<std::string, std::uint32_t> running_of_client_;
  std::uint32_t running_ = 0;
  std::uint32_t parked_ = 0;
  std::uint32_t pages_reserved_ = 0;
  std::uint64_t admissions_ = 0;
  Plan plan_;
  std::map<std::uint32_t, double> decode_s_;  // [jobs that decode] of a step
  double token_layer_s_ = 0.0;                // of one token of a prompt in one layer; 0: not known yet
  // Of the step over prompts that is under way.
  std::vector<Piece> step_;
  std::uint32_t layers_left_ = 0;
};

}  // namespace dualdecoder
