#include "serve/scheduler.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/check.h"

namespace dualdecoder {
namespace {

constexpr double kNewestShare = 0.2;  // of a running mean
// Steps of few different sizes, since each size has graphs of its own.
constexpr std::uint32_t kPieceGrain = 8;

}  // namespace

void Scheduler::add(JobId id, const JobShape& shape) {
  DD_CHECK(shape.prompt_tokens > 0 && shape.tokens_max >= shape.prompt_tokens && fits(shape.tokens_max),
           "job of {} + {} tokens", shape.prompt_tokens, shape.tokens_max);
  const auto [job, is_new] = jobs_.emplace(id, Job{.shape = shape, .prompt_left = shape.prompt_tokens});
  DD_CHECK(is_new, "job {}", id);
}

void Scheduler::remove(JobId id) {
  const auto job = jobs_.find(id);
  DD_CHECK(job != jobs_.end(), "job {}", id);
  if (job->second.running) {
    --running_;
    pages_reserved_ -= pages_for(job->second.shape.tokens_max);
    const auto client = running_of_client_.find(job->second.shape.client);
    if (--client->second == 0) running_of_client_.erase(client);
  }
  jobs_.erase(job);
}

std::map<JobId, Scheduler::Job>::iterator Scheduler::first_in_queue() {
  const auto rank = [this](const Job& job) {
    const auto running = running_of_client_.find(job.shape.client);
    return std::tuple(-job.shape.priority, running == running_of_client_.end() ? 0U : running->second);
  };
  auto first = jobs_.end();
  for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
    if (job->second.running) continue;
    if (first == jobs_.end() || rank(job->second) < rank(first->second)) first = job;
  }
  return first;
}

void Scheduler::admit() {
  while (running_ < options_.running_max) {
    const auto first = first_in_queue();
    if (first == jobs_.end()) return;
    Job& job = first->second;
    const std::uint32_t pages = pages_for(job.shape.tokens_max);
    if (pages > options_.pages_max - pages_reserved_) return;
    job.running = true;
    job.admitted = admissions_++;
    ++running_;
    pages_reserved_ += pages;
    ++running_of_client_[job.shape.client];
    plan_.admitted.push_back(first->first);
  }
}

const Scheduler::Plan& Scheduler::plan() {
  plan_.admitted.clear();
  plan_.decoding.clear();
  plan_.prompts.clear();
  admit();
  for (const auto& [id, job] : jobs_) {
    if (job.running && job.prompt_left == 0) plan_.decoding.push_back(id);
  }
  const auto rows = static_cast<std::uint32_t>(plan_.decoding.size()) * options_.rows_each;
  const std::uint32_t outputs = options_.outputs_max - std::min(rows, options_.outputs_max);
  share_among_prompts(prompt_tokens_now(rows), outputs);
  return plan_;
}

std::uint32_t Scheduler::prompt_tokens_now(std::uint32_t decoding_rows) const {
  const std::uint32_t room = options_.rows_max - std::min(decoding_rows, options_.rows_max);
  const std::uint32_t most = std::min(options_.prompt_tokens_max, room);
  if (decoding_rows == 0) return most;
  auto piece = static_cast<std::uint32_t>(piece_tokens_);
  if (piece > kPieceGrain) piece -= piece % kPieceGrain;
  return std::min(most, std::max(1U, piece));
}

// Half of it to the job admitted first, so that a long prompt moves on; the rest to those that are nearest to
// their first token.
void Scheduler::share_among_prompts(std::uint32_t tokens, std::uint32_t outputs) {
  std::vector<std::map<JobId, Job>::iterator> jobs;
  for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
    if (job->second.running && job->second.prompt_left > 0) jobs.push_back(job);
  }
  if (jobs.empty()) return;
  const auto oldest = std::min_element(jobs.begin(), jobs.end(), [](const auto& a, const auto& b) {
    return a->second.admitted < b->second.admitted;
  });
  std::iter_swap(jobs.begin(), oldest);
  std::sort(jobs.begin() + 1, jobs.end(), [](const auto& a, const auto& b) {
    return std::tuple(a->second.prompt_left, a->first) < std::tuple(b->second.prompt_left, b->first);
  });
  std::vector<std::uint32_t> shares(jobs.size());
  const auto give = [&](std::size_t i, std::uint32_t most) {
    const Job& job = jobs[i]->second;
    const std::uint32_t left = job.prompt_left - shares[i];
    std::uint32_t share = std::min({most, tokens, left});
    if (share == 0) return;
    // The row that ends a prompt wants logits.
    std::uint32_t wanted = job.shape.prompt_logits ? share : (share == left ? 1U : 0U);
    if (wanted > outputs) {
      share = job.shape.prompt_logits ? outputs : share - 1;
      wanted = job.shape.prompt_logits ? outputs : 0;
    }
    shares[i] += share;
    tokens -= share;
    outputs -= wanted;
  };
  give(0, (tokens + 1) / 2);
  for (std::size_t i = 1; i < jobs.size(); ++i) give(i, tokens);
  give(0, tokens);
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (shares[i] > 0) plan_.prompts.push_back({jobs[i]->first, shares[i]});
  }
}

void Scheduler::note_prompt(JobId id, std::uint32_t tokens) {
  const auto job = jobs_.find(id);
  DD_CHECK(job != jobs_.end() && tokens <= job->second.prompt_left, "job {}", id);
  job->second.prompt_left -= tokens;
}

void Scheduler::set_prompt_left(JobId id, std::uint32_t tokens) { jobs_.at(id).prompt_left = tokens; }

void Scheduler::note_step(double seconds) {
  const auto decoding = static_cast<std::uint32_t>(plan_.decoding.size());
  if (decoding == 0) return;
  if (plan_.prompts.empty()) {
    const auto [mean, is_first] = decode_s_.try_emplace(decoding, seconds);
    if (!is_first) mean->second += kNewestShare * (seconds - mean->second);
    return;
  }
  // The time of a step with as many or more jobs that decode, if there was one; else with fewer.
  auto alone = decode_s_.lower_bound(decoding);
  if (alone == decode_s_.end() && !decode_s_.empty()) --alone;
  if (alone == decode_s_.end()) return;
  std::uint32_t tokens = 0;
  for (const Piece& piece : plan_.prompts) tokens += piece.tokens;
  const double allowed = (options_.latency_ratio - 1.0) * alone->second;
  const double taken = std::max(seconds - alone->second, 1e-9);
  const double fitting = tokens * std::clamp(allowed / taken, 0.5, 2.0);
  // A last, short piece says nothing about longer ones.
  if (tokens + 1.0 < piece_tokens_ && fitting < piece_tokens_ && taken < allowed) return;
  piece_tokens_ +=
      0.5 * (std::clamp(fitting, 1.0, static_cast<double>(options_.prompt_tokens_max)) - piece_tokens_);
}

}  // namespace dualdecoder
