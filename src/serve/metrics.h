// What the server counts, for Prometheus. Names follow vLLM's where they mean the same, with the prefix
// "dualdecoder:". Any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include "decode/engine.h"
#include "decode/generation.h"

namespace dualdecoder {

class Metrics {
 public:
  Metrics();

  /// In Prometheus' text format.
  std::string text() const;

  double generated_tokens() const { return tokens_.Value(); }

  void note_jobs(std::uint32_t running, std::uint32_t waiting);
  void note_queued(double seconds);
  void note_parked();
  void note_prompt_tokens(std::uint32_t tokens) { prompt_tokens_.Increment(tokens); }
  void note_cached(std::uint32_t prompt_tokens, std::uint32_t cached_tokens);
  void note_first_token(double seconds) { first_token_s_.Observe(seconds); }
  void note_token(double seconds_since_last);
  void note_end(FinishReason reason, double seconds, const DraftStats& draft);
  void note_refused(const std::string& kind);
  /// After a step: what the engine has counted since the last call.
  void note_engine(const Engine& engine);

 private:
  // What is counted by the engine as a sum since its start.
  struct Rising {
    prometheus::Counter* counter = nullptr;
    double last = 0.0;

    void set(double now);
  };

  prometheus::Counter& counter(const char* name, const char* help, const prometheus::Labels& labels = {});
  prometheus::Gauge& gauge(const char* name, const char* help, const prometheus::Labels& labels = {});
  prometheus::Histogram& histogram(const char* name, const char* help, double first_s);

  prometheus::Registry registry_;
  prometheus::Gauge& running_;
  prometheus::Gauge& waiting_;
  prometheus::Gauge& near_bytes_;
  prometheus::Gauge& near_bytes_used_;
  prometheus::Gauge& far_bytes_;
  prometheus::Gauge& far_bytes_used_;
  prometheus::Gauge& kept_bytes_;
  prometheus::Counter& parked_;
  prometheus::Counter& prompt_tokens_;
  prometheus::Counter& tokens_;
  prometheus::Counter& prefix_queries_;
  prometheus::Counter& prefix_hits_;
  prometheus::Counter& guesses_;
  prometheus::Counter& guesses_right_;
  prometheus::Histogram& queue_s_;
  prometheus::Histogram& first_token_s_;
  prometheus::Histogram& inter_token_s_;
  prometheus::Histogram& request_s_;
  Rising far_read_bytes_;
  Rising far_write_bytes_;
  Rising far_reads_;
  Rising far_writes_;
  Rising far_read_s_;
  Rising far_write_s_;
  Rising stall_s_;
  Rising blocks_attended_;
  Rising blocks_missed_;
  Rising blocks_late_;
  Rising blocks_predicted_;
  Rising blocks_used_;
  Rising read_errors_;
  Rising write_errors_;
  Rising checksum_errors_;
  Rising kept_evicted_;
  Rising kept_lost_;
  Rising kept_store_errors_;
};

}  // namespace dualdecoder
