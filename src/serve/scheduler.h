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
// Latency. While others decode, a step may take `latency_ratio` times as long as it takes without a prompt;
// the length of a prompt's piece follows from what pieces have cost so far.
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
  std::uint32_t rows_max = 512;           // of one step
  std::uint32_t rows_each = 1;            // of a job that decodes; 2 with a guess
  std::uint32_t outputs_max = 8;          // rows of one step that want logits
  std::uint32_t prompt_tokens_max = 512;  // of one step
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
  struct Piece {
    JobId job = 0;
    std::uint32_t tokens = 0;
  };
  /// What the next step does; valid until the next call.
  struct Plan {
    std::vector<JobId> admitted;  // run from now on
    std::vector<JobId> decoding;
    std::vector<Piece> prompts;
    bool idle() const { return decoding.empty() && prompts.empty(); }
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
  /// The planned step took so long.
  void note_step(double seconds);

  std::uint32_t waiting() const { return static_cast<std::uint32_t>(jobs_.size()) - running_; }
  std::uint32_t running() const { return running_; }
  std::uint32_t pages_reserved() const { return pages_reserved_; }

 private:
  struct Job {
    JobShape shape;
    bool running = false;
    std::uint64_t admitted = 0;  // how many were admitted before it
    std::uint32_t prompt_left = 0;
  };

  std::uint32_t pages_for(std::uint32_t tokens) const {
    return options_.pages_max == UINT32_MAX ? 0
                                            : (tokens + options_.block_tokens - 1) / options_.block_tokens;
  }
  std::map<JobId, Job>::iterator first_in_queue();
  void admit();
  std::uint32_t prompt_tokens_now(std::uint32_t decoding_rows) const;
  void share_among_prompts(std::uint32_t tokens, std::uint32_t outputs);

  SchedulerOptions options_;
  std::map<JobId, Job> jobs_;  // by arrival
  std::map<std::string, std::uint32_t> running_of_client_;
  std::uint32_t running_ = 0;
  std::uint32_t pages_reserved_ = 0;
  std::uint64_t admissions_ = 0;
  Plan plan_;
  std::map<std::uint32_t, double> decode_s_;  // [jobs that decode] of a step without prompts
  double piece_tokens_ = 16.0;                // of a step in which others decode
};

}  // namespace dualdecoder
