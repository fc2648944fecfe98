#include "transfer/file_operation.h"

#include <cerrno>

#include <gtest/gtest.h>

#include "transfer/port_testing.h"

namespace dualdecoder {
namespace {

constexpr std::uint64_t kUnit = kPortAlignment;

class FileOperationTest : public testing::Test {
 protected:
  FileOperation& start() {
    const std::array<iovec, 2> segments = {segment_of(near_.span().first(2 * kUnit)),
                                           segment_of(near_.span().subspan(4 * kUnit, 3 * kUnit))};
    const Copy copy{.kind = CopyKind::kRead, .far_offset = 10 * kUnit, .segments = segments, .tag = 7};
    return operations_[operations_.take(copy, 5 * kUnit)];
  }

  AlignedMemory near_{8 * kUnit};
  FileOperations operations_{2};
};

TEST_F(FileOperationTest, ContinuesWhereAShortTransferEnded) {
  FileOperation& operation = start();
  EXPECT_EQ(operation.account(kUnit), std::nullopt);
  EXPECT_EQ(operation.far_offset, 11 * kUnit);
  ASSERT_EQ(operation.segments.size(), 2U);
  EXPECT_EQ(operation.segments[0].iov_base, near_.unit(1).data());
  EXPECT_EQ(operation.segments[0].iov_len, kUnit);
  EXPECT_EQ(operation.account(2 * kUnit), std::nullopt);
  ASSERT_EQ(operation.segments.size(), 1U);
  EXPECT_EQ(operation.segments[0].iov_base, near_.unit(5).data());
  EXPECT_EQ(operation.segments[0].iov_len, 2 * kUnit);
  EXPECT_EQ(operation.far_offset, 13 * kUnit);
  EXPECT_EQ(operation.account(2 * kUnit), 0);
  EXPECT_EQ(operation.bytes_left, 0U);
}

TEST_F(FileOperationTest, CountsOnlyWholeUnitsSoThatTheRestStaysAligned) {
  FileOperation& operation = start();
  EXPECT_EQ(operation.account(2 * kUnit + 512), std::nullopt);
  EXPECT_EQ(operation.far_offset, 12 * kUnit);
  EXPECT_EQ(operation.segments.front().iov_base, near_.unit(4).data());
  EXPECT_EQ(operation.account(512), EIO) << "the end of the file";
  EXPECT_EQ(start().account(0), EIO);
}

TEST_F(FileOperationTest, TriesAgainWhenInterruptedButNotForEver) {
  FileOperation& operation = start();
  EXPECT_EQ(operation.account(-EINTR), std::nullopt);
  EXPECT_EQ(operation.account(-EAGAIN), std::nullopt);
  EXPECT_EQ(operation.bytes_left, 5 * kUnit);
  int retries = 0;
  std::optional<int> error;
  while (!error && ++retries < 1'000'000) error = operation.account(-EAGAIN);
  EXPECT_EQ(error, EAGAIN);
}

TEST_F(FileOperationTest, EndsWithTheSystemsError) { EXPECT_EQ(start().account(-ENOSPC), ENOSPC); }

TEST_F(FileOperationTest, KeepsSegmentsOfDifferentCopiesApart) {
  const FileOperation& first = start();
  const FileOperation& second = start();
  EXPECT_NE(first.segments.data(), second.segments.data());
  EXPECT_EQ(operations_.in_flight(), 2U);
  operations_.give_back(0);
  EXPECT_EQ(operations_.in_flight(), 1U);
}

}  // namespace
}  // namespace dualdecoder
