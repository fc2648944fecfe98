#include "serve/scheduler.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/check.h"

namespace dualdecoder {
namespace {

constexpr double kNewestShare = 0.2;  // of a running mean
// Steps of few different sizes, since each size has graphs of its own.
constexpr std::uint32_t kPieceGrain = 16;
// Of what a step may take longer: of a piece, for one layer. Less than all, so that one more often than none
// fits.
constexpr double kLayerShare = 0.8;

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
  if (job->second.running || job->second.parked) pages_reserved_ -= pages_for(job->second.shape.tokens_max);
  if (job->second.running) stop(job);
  if (job->second.parked) --parked_;
  jobs_.erase(job);
}

template <typename Eligible>
Scheduler::JobPlace Scheduler::first_in_queue(const Eligible& eligible) {
  const auto rank = [this](const Job& job) {
    const auto running = running_of_client_.find(job.shape.client);
    return std::tuple(-job.shape.priority, running == running_of_client_.end() ? 0U : running->second);
  };
  auto first = jobs_.end();
  for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
    if (job->second.running || !eligible(job->second)) continue;
    if (first == jobs_.end() || rank(job->second) < rank(first->second)) first = job;
  }
  return first;
}

// The first in the queue; where there are no pages for that one, the first that has its own.
Scheduler::JobPlace Scheduler::next_to_run() {
  const auto first = first_in_queue([](const Job&) { return true; });
  if (first == jobs_.end() || first->second.parked) return first;
  if (pages_for(first->second.shape.tokens_max) <= options_.pages_max - pages_reserved_) return first;
  return first_in_queue([](const Job& job) { return job.parked; });
}

// For one of that priority: of the lowest one below it, the job that began last. None that is in the step
// over prompts.
Scheduler::JobPlace Scheduler::job_to_park(std::int32_t priority) {
  auto found = jobs_.end();
  if (parked_ == options_.parked_max) return found;
  const auto in_step = [this](JobId id) {
    return layers_left_ > 0 &&
           std::any_of(step_.begin(), step_.end(), [&](const Piece& piece) { return piece.job == id; });
  };
  const auto worth = [](const Job& job) {
    return std::tuple(job.shape.priority, -static_cast<std::int64_t>(job.admitted));
  };
  for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
    if (!job->second.running || job->second.shape.priority >= priority || in_step(job->first)) continue;
    if (found == jobs_.end() || worth(job->second) < worth(found->second)) found = job;
  }
  return found;
}

void Scheduler::run(JobPlace place) {
  auto& [id, job] = *place;
  if (job.parked) {
    job.parked = false;
    --parked_;
  } else {
    job.admitted = admissions_++;
    pages_reserved_ += pages_for(job.shape.tokens_max);
  }
  job.running = true;
  ++running_;
  ++running_of_client_[job.shape.client];
  plan_.admitted.push_back(id);
}

void Scheduler::stop(JobPlace place) {
  Job& job = place->second;
  job.running = false;
  --running_;
  const auto client = running_of_client_.find(job.shape.client);
  if (--client->second == 0) running_of_client_.erase(client);
}

void Scheduler::admit() {
  while (true) {
    const auto next = next_to_run();
    if (next == jobs_.end()) return;
    if (running_ == options_.running_max) {
      const auto parked = job_to_park(next->second.shape.priority);
      if (parked == jobs_.end()) return;
      stop(parked);
      parked->second.parked = true;
      ++parked_;
      // With it, the ranks of its client's others have changed; so it may be one that was just let in.
      if (std::erase(plan_.admitted, parked->first) == 0) plan_.parked.push_back(parked->first);
    }
    run(next);
  }
}

const Scheduler::Plan& Scheduler::plan() {
  plan_ = {};
  admit();
  for (const auto& [id, job] : jobs_) {
    if (job.running && job.prompt_left == 0) plan_.decoding.push_back(id);
  }
  if (layers_left_ == 0) {
    share_among_prompts(prompt_tokens_now(), options_.outputs_max);
    step_ = plan_.prompts;
    if (!step_.empty()) layers_left_ = options_.layers;
  }
  plan_.prompt_layers = layers_now();
  return plan_;
}

std::uint32_t Scheduler::step_tokens() const {
  std::uint32_t tokens = 0;
  for (const Piece& piece : step_) tokens += piece.tokens;
  return tokens;
}

// Beside a step of those who decode; 0 where it is not known. Measured with as many of them, or more, or else
// with fewer.
double Scheduler::allowed_s() const {
  auto alone = decode_s_.lower_bound(static_cast<std::uint32_t>(plan_.decoding.size()));
  if (alone == decode_s_.end() && !decode_s_.empty()) --alone;
  return alone == decode_s_.end() ? 0.0 : (options_.latency_ratio - 1.0) * alone->second;
}

std::uint32_t Scheduler::prompt_tokens_now() const {
  if (plan_.decoding.empty()) return options_.prompt_tokens_max;
  double tokens = kPieceTokensMin;
  if (token_layer_s_ > 0.0) tokens = std::max(tokens, kLayerShare * allowed_s() / token_layer_s_);
  if (tokens >= options_.prompt_tokens_max) return options_.prompt_tokens_max;
  const auto whole = static_cast<std::uint32_t>(tokens);
  return whole - whole % kPieceGrain;
}

std::uint32_t Scheduler::layers_now() const {
  if (layers_left_ == 0 || plan_.decoding.empty()) return layers_left_;
  const double layer_s = token_layer_s_ * step_tokens();
  const double fitting = layer_s > 0.0 ? allowed_s() / layer_s : 1.0;
  return static_cast<std::uint32_t>(std::clamp(fitting, 1.0, static_cast<double>(layers_left_)));
}

// Half of it to the job admitted first, so that a long prompt moves on; the rest to those that are nearest to
// their first token.
void Scheduler::share_among_prompts(std::uint32_t tokens, std::uint32_t outputs) {
  std::vector<JobPlace> jobs;
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

// What a step takes beside a prompt, whose layers leave the caches cold, is no measure of what it may take.
void Scheduler::note_decoding(double seconds) {
  if (plan_.prompt_layers > 0 && !decode_s_.empty()) return;
  const auto decoding = static_cast<std::uint32_t>(plan_.decoding.size());
  const auto [mean, is_first] = decode_s_.try_emplace(decoding, seconds);
  if (!is_first) mean->second += kNewestShare * (seconds - mean->second);
}

void Scheduler::note_layers(double seconds) {
  const double measured = seconds / (static_cast<double>(plan_.prompt_layers) * step_tokens());
  token_layer_s_ += (token_layer_s_ > 0.0 ? kNewestShare : 1.0) * (measured - token_layer_s_);
  layers_left_ -= plan_.prompt_layers;
}

}  // namespace dualdecoder
