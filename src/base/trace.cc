#include "base/trace.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

namespace dualdecoder {

std::string Trace::json(const std::vector<std::string>& tracks) const {
  const auto first = std::min_element(events_.begin(), events_.end(),
                                      [](const auto& a, const auto& b) { return a.start < b.start; });
  const auto microseconds = [](auto duration) {
    return std::chrono::duration<double, std::micro>(duration).count();
  };
  std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
  auto out = std::back_inserter(text);
  for (std::size_t i = 0; i < tracks.size(); ++i) {
    fmt::format_to(out,
                   R"({{"ph": "M", "pid": 1, "tid": {}, "name": "thread_name", "args": {{"name": "{}"}}}},)"
                   "\n",
                   i, tracks[i]);
  }
  for (const TraceEvent& event : events_) {
    fmt::format_to(out, R"({{"name": "{}", "pid": 1, "tid": {}, "ts": {:.3f}, )", event.name, event.track,
                   microseconds(event.start - first->start));
    if (event.end > event.start) {
      fmt::format_to(out, R"("ph": "X", "dur": {:.3f}, "args": {{)", microseconds(event.end - event.start));
    } else {
      text += R"("ph": "i", "s": "t", "args": {)";
    }
    const char* comma = "";
    for (const auto& [name, value] :
         {std::pair("step", event.step), std::pair("layer", event.layer), std::pair("block", event.block)}) {
      if (value < 0) continue;
      fmt::format_to(out, R"({}"{}": {})", comma, name, value);
      comma = ", ";
    }
    text += "}},\n";
  }
  fmt::format_to(out,
                 R"({{"name": "end", "ph": "M", "pid": 1, "args": {{"dropped": {}}}}})"
                 "\n]}}\n",
                 dropped_);
  return text;
}

}  // namespace dualdecoder
