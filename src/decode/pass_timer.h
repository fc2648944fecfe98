// Times a scope.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/trace.h"

namespace dualdecoder {

/// Adds the time it lives to `total`, and an event to `trace`, if there is one.
class PassTimer {
 public:
  explicit PassTimer(std::uint64_t& total, Trace* trace = nullptr, const TraceEvent& event = {})
      : total_(total), trace_(trace), event_(event), start_(std::chrono::steady_clock::now()) {}
  ~PassTimer() {
    const auto end = std::chrono::steady_clock::now();
    total_ += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(end - start_).count());
    if (trace_ == nullptr) return;
    event_.start = start_;
    event_.end = end;
    trace_->add(event_);
  }
  PassTimer(const PassTimer&) = delete;
  PassTimer& operator=(const PassTimer&) = delete;

 private:
  std::uint64_t& total_;
  Trace* trace_;
  TraceEvent event_;
  TraceEvent::Time start_;
};

}  // namespace dualdecoder
