#include "base/units.h"

#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

TEST(Units, ReadsSizesAsPeopleWriteThem) {
  EXPECT_EQ(*parse_size("4096"), 4096U);
  EXPECT_EQ(*parse_size("64MiB"), 64U << 20);
  EXPECT_EQ(*parse_size("64 mb"), 64U << 20);
  EXPECT_EQ(*parse_size("1.5G"), 3ULL << 29);
  EXPECT_EQ(*parse_size("0"), 0U);
}

TEST(Units, RefusesWhatIsNotASize) {
  for (const char* text : {"", "MiB", "-1", "1.5.5", "12 apples", "1e300", "nan", "inf", "1kk", "0.5"}) {
    const auto bytes = parse_size(text);
    ASSERT_FALSE(bytes) << text;
    EXPECT_NE(bytes.error().message.find("is not a size"), std::string::npos);
  }
}

TEST(Units, PrintsThreeFigures) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(183.4 * 1048576), "183 MiB");
}

}  // namespace
}  // namespace dualdecoder
