#include "serve/metrics.h"

#include <prometheus/text_serializer.h>

namespace dualdecoder {
namespace {

using prometheus::Labels;

std::string full_name(const char* name) { return std::string("dualdecoder:") + name; }

}  // namespace

prometheus::Counter& Metrics::counter(const char* name, const char* help, const Labels& labels) {
  return prometheus::BuildCounter().Name(full_name(name)).Help(help).Register(registry_).Add(labels);
}

prometheus::Gauge& Metrics::gauge(const char* name, const char* help, const Labels& labels) {
  return prometheus::BuildGauge().Name(full_name(name)).Help(help).Register(registry_).Add(labels);
}

// Buckets of 1, 2 and 5 in each of five decades.
prometheus::Histogram& Metrics::histogram(const char* name, const char* help, double first_s) {
  prometheus::Histogram::BucketBoundaries bounds;
  for (double decade = first_s; decade < first_s * 9e4; decade *= 10.0) {
    for (const double step : {1.0, 2.0, 5.0}) bounds.push_back(decade * step);
  }
  return prometheus::BuildHistogram().Name(full_name(name)).Help(help).Register(registry_).Add({}, bounds);
}

Metrics::Metrics()
    : running_(gauge("num_requests_running", "Answers in the works")),
      waiting_(gauge("num_requests_waiting", "Answers that wait for a place")),
      near_bytes_(gauge("near_kv_bytes", "KV that may be near")),
      near_bytes_used_(gauge("near_kv_bytes_used", "KV that is near")),
      far_bytes_(gauge("far_kv_bytes", "KV that the far tier may hold")),
      far_bytes_used_(gauge("far_kv_bytes_used", "KV in the far tier")),
      kept_bytes_(gauge("prefix_cache_bytes", "Of these, KV that is kept for later, in use or not")),
      parked_(counter("num_preemptions_total",
                      "Answers that gave their place to one of higher priority, for a while")),
      prompt_tokens_(counter("prompt_tokens_total", "Tokens of prompts that were computed")),
      tokens_(counter("generation_tokens_total", "Tokens generated")),
      prefix_queries_(counter("prefix_cache_queries_total", "Tokens of prompts looked up in the cache")),
      prefix_hits_(counter("prefix_cache_hits_total", "Tokens of prompts found in the cache")),
      guesses_(counter("guesses_total", "Guessed tokens that were compared with the token drawn")),
      guesses_right_(counter("guesses_right_total", "Guessed tokens that were right")),
      queue_s_(histogram("request_queue_time_seconds", "From arrival to the first step", 1e-4)),
      first_token_s_(histogram("time_to_first_token_seconds", "From arrival to the first token", 1e-3)),
      inter_token_s_(histogram("inter_token_latency_seconds", "From a token to the next", 1e-4)),
      request_s_(histogram("e2e_request_latency_seconds", "From arrival to the end", 1e-3)) {
  const auto rising = [this](const char* name, const char* help, const Labels& labels = {}) {
    return Rising{.counter = &counter(name, help, labels)};
  };
  const char* const bytes = "Bytes moved between the tiers";
  const char* const operations = "Copies between the tiers";
  const char* const seconds = "Time that copies between the tiers were under way, summed over copies";
  far_read_bytes_ = rising("far_bytes_total", bytes, {{"operation", "read"}});
  far_write_bytes_ = rising("far_bytes_total", bytes, {{"operation", "write"}});
  far_reads_ = rising("far_operations_total", operations, {{"operation", "read"}});
  far_writes_ = rising("far_operations_total", operations, {{"operation", "write"}});
  far_read_s_ = rising("far_seconds_total", seconds, {{"operation", "read"}});
  far_write_s_ = rising("far_seconds_total", seconds, {{"operation", "write"}});
  stall_s_ = rising("stall_seconds_total", "Time in which steps waited for the far tier");
  blocks_attended_ = rising("blocks_attended_total", "Blocks beside the window that tokens attended to");
  blocks_missed_ = rising("blocks_missed_total", "Of these, needed and not predicted");
  blocks_late_ = rising("blocks_late_total", "Of these, predicted and still under way when needed");
  blocks_predicted_ = rising("blocks_predicted_total", "Blocks read ahead");
  blocks_used_ = rising("blocks_predicted_used_total", "Of these, attended to since");
  const char* const errors = "Failures of the far tier";
  read_errors_ = rising("far_errors_total", errors, {{"kind", "read"}});
  write_errors_ = rising("far_errors_total", errors, {{"kind", "write"}});
  checksum_errors_ = rising("far_errors_total", errors, {{"kind", "checksum"}});
  kept_evicted_ = rising("prefix_cache_evicted_pages_total", "Kept pages that made room for others");
  kept_lost_ = rising("prefix_cache_lost_pages_total", "Kept pages that could not be read any more");
  kept_store_errors_ =
      rising("prefix_cache_store_errors_total", "Changes that the index of kept pages did not take");
}

std::string Metrics::text() const { return prometheus::TextSerializer().Serialize(registry_.Collect()); }

void Metrics::Rising::set(double now) {
  counter->Increment(now - last);
  last = now;
}

void Metrics::note_jobs(std::uint32_t running, std::uint32_t waiting) {
  running_.Set(running);
  waiting_.Set(waiting);
}

void Metrics::note_queued(double seconds) { queue_s_.Observe(seconds); }

void Metrics::note_cached(std::uint32_t prompt_tokens, std::uint32_t cached_tokens) {
  prefix_queries_.Increment(prompt_tokens);
  prefix_hits_.Increment(cached_tokens);
}

void Metrics::note_token(double seconds_since_last) {
  tokens_.Increment();
  if (seconds_since_last > 0.0) inter_token_s_.Observe(seconds_since_last);
}

void Metrics::note_end(FinishReason reason, double seconds, const DraftStats& draft) {
  counter("request_success_total", "Answers that have ended, by reason",
          {{"finished_reason", finish_reason_name(reason)}})
      .Increment();
  request_s_.Observe(seconds);
  guesses_.Increment(static_cast<double>(draft.guesses));
  guesses_right_.Increment(static_cast<double>(draft.right));
}

void Metrics::note_parked() { parked_.Increment(); }

void Metrics::note_refused(const std::string& kind) {
  counter("request_refused_total", "Requests that were refused, by kind", {{"kind", kind}}).Increment();
}

void Metrics::note_engine(const Engine& engine) {
  near_bytes_.Set(static_cast<double>(engine.plan().near_bytes()));
  near_bytes_used_.Set(static_cast<double>(engine.near().bytes_in_use()));
  const StepStats& step = engine.stats();
  stall_s_.set(static_cast<double>(step.stall_ns) * 1e-9);
  blocks_attended_.set(static_cast<double>(step.blocks_attended));
  blocks_missed_.set(static_cast<double>(step.blocks_missed));
  blocks_late_.set(static_cast<double>(step.blocks_late));
  blocks_predicted_.set(static_cast<double>(step.blocks_predicted));
  blocks_used_.set(static_cast<double>(step.blocks_used));
  if (!engine.plan().tiered()) return;
  const Tiers& tiers = engine.tiers();
  far_bytes_.Set(static_cast<double>(tiers.far().bytes_max()));
  far_bytes_used_.Set(static_cast<double>(tiers.far().bytes_in_use()));
  if (const PrefixCache* kept = engine.prefixes()) {
    kept_bytes_.Set(static_cast<double>(std::uint64_t{kept->pages()} * tiers.geometry().page_bytes()));
    kept_evicted_.set(static_cast<double>(kept->stats().evicted));
    kept_lost_.set(static_cast<double>(kept->stats().lost));
    kept_store_errors_.set(static_cast<double>(kept->stats().store_errors));
  }
  const TransferStats& transfers = tiers.transfers().stats();
  far_reads_.set(static_cast<double>(transfers.reads.copies));
  far_writes_.set(static_cast<double>(transfers.writes.copies));
  far_read_bytes_.set(static_cast<double>(transfers.reads.bytes));
  far_write_bytes_.set(static_cast<double>(transfers.writes.bytes));
  far_read_s_.set(static_cast<double>(transfers.reads.ns) * 1e-9);
  far_write_s_.set(static_cast<double>(transfers.writes.ns) * 1e-9);
  read_errors_.set(static_cast<double>(transfers.read_errors));
  write_errors_.set(static_cast<double>(transfers.write_errors));
  checksum_errors_.set(static_cast<double>(transfers.checksum_errors));
}

}  // namespace dualdecoder
