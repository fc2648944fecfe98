#include "base/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

using std::chrono::microseconds;
using testing::HasSubstr;
using testing::Not;

TEST(Trace, TellsTimesFromTheFirstEventAndOnlyTheNumbersThatWereGiven) {
  const TraceEvent::Time start(microseconds(5'000'000));
  Trace trace(3);
  trace.add({.name = "read",
             .track = 1,
             .start = start + microseconds(10),
             .end = start + microseconds(35),
             .layer = 4});
  trace.add({.name = "attend", .start = start, .end = start + microseconds(7), .step = 2});
  trace.add({.name = "promoted", .track = 1, .start = start, .end = start});
  trace.add({.name = "late", .start = start, .end = start});
  EXPECT_EQ(trace.events(), 3U);
  EXPECT_EQ(trace.dropped(), 1U);
  const std::string json = trace.json({"engine", "reads"});
  EXPECT_THAT(json, HasSubstr(R"("tid": 1, "name": "thread_name", "args": {"name": "reads"})"));
  EXPECT_THAT(
      json,
      HasSubstr(
          R"({"name": "read", "pid": 1, "tid": 1, "ts": 10.000, "ph": "X", "dur": 25.000, "args": {"layer": 4}})"));
  EXPECT_THAT(json, HasSubstr(R"("ts": 0.000, "ph": "X", "dur": 7.000, "args": {"step": 2}})"));
  EXPECT_THAT(
      json,
      HasSubstr(R"({"name": "promoted", "pid": 1, "tid": 1, "ts": 0.000, "ph": "i", "s": "t", "args": {}})"));
  EXPECT_THAT(json, HasSubstr(R"("dropped": 1)"));
  EXPECT_THAT(json, Not(HasSubstr("late")));
}

}  // namespace
}  // namespace dualdecoder
