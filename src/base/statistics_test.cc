#include "base/statistics.h"

#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

TEST(Statistics, WilsonIntervalIsThatOfTheTables) {
  const Interval half = wilson_interval(5, 10);
  EXPECT_NEAR(half.low, 0.2366, 1e-4);
  EXPECT_NEAR(half.high, 0.7634, 1e-4);
  const Interval all = wilson_interval(20, 20);
  EXPECT_NEAR(all.low, 0.8389, 1e-4);
  EXPECT_DOUBLE_EQ(all.high, 1.0);
  EXPECT_DOUBLE_EQ(wilson_interval(0, 20).low, 0.0);
}

}  // namespace
}  // namespace dualdecoder
