// What happened when, in the JSON that Perfetto and chrome://tracing read (Trace Event Format, complete and
// instant events). Events are kept in memory, as many as were planned for; what comes later is counted and
// dropped. One thread adds. Paused, it takes nothing.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dualdecoder {

struct TraceEvent {
  using Time = std::chrono::steady_clock::time_point;

  const char* name = "";  // a literal
  std::uint32_t track = 0;
  Time start = {};
  Time end = {};  // equal to start: an instant
  // Shown beside the event; negative ones are not.
  std::int64_t step = -1;
  std::int64_t layer = -1;
  std::int64_t block = -1;
};

class Trace {
 public:
  explicit Trace(std::size_t events_max) { events_.reserve(events_max); }

  void add(const TraceEvent& event) {
    if (paused_) return;
    if (events_.size() < events_.capacity()) {
      events_.push_back(event);
    } else {
      ++dropped_;
    }
  }
  void clear() {
    events_.clear();
    dropped_ = 0;
  }
  void pause(bool paused) { paused_ = paused; }
  std::size_t events() const { return events_.size(); }
  const std::vector<TraceEvent>& list() const { return events_; }
  std::size_t dropped() const { return dropped_; }
  /// Times in microseconds since the first event began. `tracks`: their names, by number.
  std::string json(const std::vector<std::string>& tracks) const;

 private:
  std::vector<TraceEvent> events_;
  std::size_t dropped_ = 0;
  bool paused_ = false;
};

}  // namespace dualdecoder
