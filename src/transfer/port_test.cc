// What every port must do, for each of them.
#include "transfer/port.h"

#include <map>
#include <numeric>
#include <set>

#include <gmock/gmock.h>
#include <temporary_directory.h>

#include "transfer/beside_port.h"
#include "transfer/file_port.h"
#include "transfer/host_port.h"
#include "transfer/paced_port.h"
#include "transfer/port_testing.h"
#include "transfer/simulated_port.h"

namespace dualdecoder {
namespace {

constexpr std::size_t kUnit = kPortAlignment;
constexpr std::uint32_t kFarUnits = 512;
constexpr std::uint32_t kNearUnits = 256;
constexpr std::uint32_t kDepth = 32;

enum class PortType { kHost, kBeside, kPaced, kSimulated, kUring, kUringUnregistered, kThreads };

class PortContract : public testing::TestWithParam<PortType> {
 protected:
  void SetUp() override {
    switch (GetParam()) {
      case PortType::kHost:
        port_ = *make_host_port(kFarUnits * kUnit, kDepth);
        break;
      case PortType::kBeside:
        port_ = *make_beside_port(kFarUnits * kUnit, *memory_, kDepth);
        break;
      case PortType::kPaced:
        port_ = make_paced_port(*make_host_port(kFarUnits * kUnit, kDepth),
                                {.bytes_per_s = 1e9, .latency = std::chrono::microseconds(20)});
        break;
      case PortType::kSimulated:
        port_ = std::make_unique<SimulatedPort>(
            SimulatedPortOptions{.bytes = kFarUnits * kUnit, .seed = 7, .depth = kDepth});
        break;
      case PortType::kUring:
        make_file({.depth = kDepth});
        break;
      case PortType::kUringUnregistered:
        make_file({.depth = kDepth, .register_memory = false});
        break;
      case PortType::kThreads:
        make_file({.depth = kDepth, .allow_uring = false, .threads = 3});
        break;
    }
  }

  void make_file(const FilePortOptions& options) {
    auto file = FarFile::open(directory_.path(), {}, kUnit, kFarUnits);
    ASSERT_TRUE(file) << file.error().message;
    file_ = std::move(*file);
    ASSERT_TRUE(file_->reserve(kFarUnits));
    far_begin_ = file_->page_offset(0);
    // Half of the near memory is unknown to the port: copies must work there too.
    auto port = make_file_port(*file_, near_.span().first(kNearUnits / 2 * kUnit), options);
    ASSERT_TRUE(port) << port.error().message;
    port_ = std::move(*port);
    if (options.allow_uring && port_->description().find("io_uring,") == std::string::npos) {
      GTEST_SKIP() << port_->description();
    }
  }

  std::uint64_t far_offset(std::uint64_t unit) const { return far_begin_ + unit * kUnit; }

  TemporaryDirectory directory_;
  AlignedMemory near_{kNearUnits * kUnit};
  std::unique_ptr<NearMemory> memory_ = make_host_near_memory(kUnit);  // it copies wherever it is told to
  std::unique_ptr<FarFile> file_;
  std::unique_ptr<Port> port_;
  std::uint64_t far_begin_ = 0;
};

/// Random copies of both kinds, many at once, none of which share near or far units; checked against a plain
/// copy of the far tier.
class RandomCopies {
 public:
  RandomCopies(Port& port, AlignedMemory& near, std::uint64_t far_begin, std::uint64_t seed)
      : port_(port), near_(near), far_begin_(far_begin), random_(seed) {}

  void run(int copies) {
    for (int i = 0; i < copies; ++i) {
      while (in_flight_.size() >= port_.depth() || !try_submit()) take(std::chrono::seconds(60));
      if (below(4) == 0) take(std::chrono::microseconds(below(30)));
      if (testing::Test::HasFailure()) return;
    }
    while (!in_flight_.empty() && !testing::Test::HasFailure()) take(std::chrono::seconds(60));
  }
  std::uint64_t reads() const { return reads_; }

 private:
  struct Started {
    CopyKind kind = CopyKind::kRead;
    std::uint32_t far_unit = 0;
    std::vector<std::uint32_t> near_units;
  };

  std::uint32_t below(std::uint32_t limit) {
    return std::uniform_int_distribution<std::uint32_t>(0, limit - 1)(random_);
  }

  bool try_submit() {
    const std::uint32_t units = 1 + below(16);
    const std::uint32_t far_unit = below(kFarUnits - units + 1);
    bool written = true;
    for (std::uint32_t unit = far_unit; unit < far_unit + units; ++unit) {
      if (far_busy_.contains(unit)) return false;
      written = written && far_.contains(unit);
    }
    Started started{written && below(2) == 0 ? CopyKind::kRead : CopyKind::kWrite, far_unit, {}};
    std::vector<iovec> segments;
    while (started.near_units.size() < units) {
      const auto left = units - static_cast<std::uint32_t>(started.near_units.size());
      const std::uint32_t length = 1 + below(left);
      const std::uint32_t begin = below(kNearUnits - length + 1);
      bool free = true;
      for (std::uint32_t unit = begin; unit < begin + length; ++unit)
        free = free && !near_busy_.contains(unit);
      if (!free) continue;
      for (std::uint32_t unit = begin; unit < begin + length; ++unit) {
        near_busy_.insert(unit);
        started.near_units.push_back(unit);
      }
      segments.push_back(segment_of(near_.span().subspan(begin * kUnit, length * kUnit)));
    }
    for (std::uint32_t i = 0; i < units; ++i) {
      far_busy_.insert(far_unit + i);
      if (started.kind == CopyKind::kRead) continue;
      const std::uint64_t seed = random_();
      fill_random(near_.unit(started.near_units[i]), seed);
      far_[far_unit + i] = seed;
    }
    const std::uint64_t tag = random_();
    port_.submit({.kind = started.kind,
                  .far_offset = far_begin_ + far_unit * kUnit,
                  .segments = segments,
                  .tag = tag});
    std::ranges::fill(segments, iovec{});  // needed only during submit()
    in_flight_[tag] = std::move(started);
    return true;
  }

  void take(std::chrono::nanoseconds timeout) {
    std::array<Completion, 8> completions;
    const auto span = std::span(completions).first(1 + below(8));
    const std::size_t count = below(2) == 0 ? port_.poll(span) : port_.wait(span, timeout);
    for (const Completion& completion : span.first(count)) {
      const auto found = in_flight_.find(completion.tag);
      ASSERT_NE(found, in_flight_.end()) << "a tag that was never given, or twice";
      EXPECT_EQ(completion.error, 0);
      check_and_free(found->second);
      in_flight_.erase(found);
    }
  }

  void check_and_free(const Started& started) {
    std::array<std::byte, kUnit> expected;
    for (std::uint32_t i = 0; i < started.near_units.size(); ++i) {
      fill_random(expected, far_.at(started.far_unit + i));
      ASSERT_TRUE(std::ranges::equal(near_.unit(started.near_units[i]), expected))
          << (started.kind == CopyKind::kRead ? "read" : "write") << " of far unit " << started.far_unit + i;
      near_busy_.erase(started.near_units[i]);
      far_busy_.erase(started.far_unit + i);
    }
    reads_ += started.kind == CopyKind::kRead ? 1 : 0;
  }

  Port& port_;
  AlignedMemory& near_;
  std::uint64_t far_begin_;
  std::mt19937_64 random_;
  std::map<std::uint64_t, Started> in_flight_;  // by tag
  std::map<std::uint32_t, std::uint64_t> far_;  // unit -> seed of its bytes
  std::set<std::uint32_t> far_busy_;
  std::set<std::uint32_t> near_busy_;
  std::uint64_t reads_ = 0;
};

TEST_P(PortContract, MovesRandomVectoredCopiesBothWays) {
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RandomCopies copies(*port_, near_, far_begin_, seed);
    copies.run(300);
    EXPECT_GT(copies.reads(), 30U);
  }
}

TEST_P(PortContract, CompletesFullDepthOncePerTag) {
  EXPECT_EQ(port_->depth(), kDepth);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::uint64_t> tags(kDepth);
    std::iota(tags.begin(), tags.end(), std::uint64_t{1} << 63);
    for (std::uint32_t i = 0; i < kDepth; ++i) {
      submit(*port_, CopyKind::kWrite, far_offset(i), near_.unit(i), tags[i]);
    }
    std::vector<std::uint64_t> came;
    std::array<Completion, 3> completions;
    while (came.size() < kDepth) {
      const std::size_t count = port_->wait(completions, std::chrono::seconds(60));
      ASSERT_GT(count, 0U);
      ASSERT_LE(count, completions.size());
      for (const Completion& completion : std::span(completions).first(count)) {
        EXPECT_EQ(completion.error, 0);
        came.push_back(completion.tag);
      }
    }
    EXPECT_THAT(came, testing::UnorderedElementsAreArray(tags));
    EXPECT_EQ(port_->poll(completions), 0U);
  }
}

TEST_P(PortContract, MovesOneCopyOfManyPieces) {
  for (std::uint32_t unit = 0; unit < kNearUnits; ++unit) fill_random(near_.unit(unit), unit);
  std::vector<iovec> segments;  // backwards, so that no two pieces are one
  for (std::uint32_t unit = kNearUnits; unit > 0; --unit)
    segments.push_back(segment_of(near_.unit(unit - 1)));
  port_->submit({.kind = CopyKind::kWrite, .far_offset = far_offset(5), .segments = segments, .tag = 1});
  ASSERT_EQ(wait_for_one(*port_), 0);
  std::ranges::fill(near_.span(), std::byte{0});
  ASSERT_EQ(copy_now(*port_, CopyKind::kRead, far_offset(5), near_.span()), 0);
  std::array<std::byte, kUnit> expected;
  for (std::uint32_t unit = 0; unit < kNearUnits; ++unit) {
    fill_random(expected, kNearUnits - 1 - unit);
    ASSERT_TRUE(std::ranges::equal(near_.unit(unit), expected)) << unit;
  }
}

TEST_P(PortContract, ReachesTheLastByteAndRefusesOneMore) {
  fill_random(near_.unit(0), 1);
  ASSERT_EQ(copy_now(*port_, CopyKind::kWrite, far_offset(kFarUnits - 1), near_.unit(0)), 0);
  EXPECT_EQ(copy_now(*port_, CopyKind::kRead, far_offset(kFarUnits - 1), near_.unit(1)), 0);
  EXPECT_TRUE(std::ranges::equal(near_.unit(0), near_.unit(1)));
  const auto two_units = near_.span().first(2 * kUnit);
  for (const CopyKind kind : {CopyKind::kRead, CopyKind::kWrite}) {
    EXPECT_EQ(copy_now(*port_, kind, far_offset(kFarUnits - 1), two_units), EIO);
    EXPECT_EQ(copy_now(*port_, kind, far_offset(kFarUnits), near_.unit(2)), EIO);
    EXPECT_EQ(copy_now(*port_, kind, UINT64_MAX - kUnit + 1, near_.unit(2)), EIO) << "no sum that wraps";
  }
  EXPECT_EQ(copy_now(*port_, CopyKind::kRead, far_offset(kFarUnits - 1), near_.unit(3)), 0) << "goes on";
}

TEST_P(PortContract, WaitsNoLongerThanAsked) {
  Completion completion;
  EXPECT_EQ(port_->wait({&completion, 1}, std::chrono::nanoseconds(0)), 0U);
  EXPECT_EQ(port_->wait({&completion, 1}, std::chrono::milliseconds(1)), 0U);
  EXPECT_EQ(port_->poll({&completion, 1}), 0U);
  // A wait of nothing is a poll; in the end the copy comes.
  submit(*port_, CopyKind::kWrite, far_offset(0), near_.unit(0), 9);
  std::size_t count = 0;
  while (count == 0) count = port_->wait({&completion, 1}, std::chrono::nanoseconds(1000));
  EXPECT_EQ(completion.tag, 9U);
  EXPECT_EQ(port_->wait({}, std::chrono::seconds(60)), 0U);
}

TEST_P(PortContract, MayBeDestroyedWithCopiesInFlight) {
  for (std::uint32_t i = 0; i < kDepth; ++i) {
    submit(*port_, i % 2 == 0 ? CopyKind::kWrite : CopyKind::kRead, far_offset(i), near_.unit(i), i);
    if (i == kDepth / 2) port_->flush();
  }
  port_.reset();
  // The sanitizers see a port that still writes here.
  std::ranges::fill(near_.span(), std::byte{1});
  EXPECT_TRUE(std::ranges::all_of(near_.span(), [](std::byte byte) { return byte == std::byte{1}; }));
}

std::string port_type_name(const testing::TestParamInfo<PortType>& info) {
  constexpr std::array kNames = {"Host",   "Beside", "Paced", "Simulated", "Uring", "UringUnregistered",
                                 "Threads"};
  return kNames[static_cast<std::size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(All, PortContract,
                         testing::Values(PortType::kHost, PortType::kBeside, PortType::kPaced,
                                         PortType::kSimulated, PortType::kUring, PortType::kUringUnregistered,
                                         PortType::kThreads),
                         port_type_name);

TEST(HostPort, ReadsZerosWhereNothingWasWritten) {
  AlignedMemory near(kUnit);
  fill_random(near.span(), 1);
  const auto port = *make_host_port(4 * kUnit);
  EXPECT_EQ(copy_now(*port, CopyKind::kRead, 2 * kUnit, near.span()), 0);
  EXPECT_TRUE(std::ranges::all_of(near.span(), [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_EQ(port->description(), "memory (16.0 KiB)");
}

TEST(HostPort, RefusesMoreThanTheAddressSpace) {
  const auto port = make_host_port(std::uint64_t{1} << 60);
  ASSERT_FALSE(port);
  EXPECT_EQ(port.error().code, ErrorCode::kOutOfMemory);
}

TEST(PacedPort, TakesAtLeastTheLinksTimeForTheBytesOneAfterTheOther) {
  using std::chrono::microseconds;
  AlignedMemory near(8 * kUnit);
  const auto port = make_paced_port(*make_host_port(8 * kUnit),
                                    {.bytes_per_s = 8.0 * kUnit / 0.004, .latency = microseconds(3000)});
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t i = 0; i < 8; ++i) submit(*port, CopyKind::kWrite, i * kUnit, near.unit(i), i);
  std::array<Completion, 8> completions;
  EXPECT_EQ(port->wait(completions, microseconds(100)), 0U);
  std::size_t done = 0;
  while (done < 8) done += port->wait(std::span(completions).subspan(done), std::chrono::seconds(5));
  EXPECT_GE(std::chrono::steady_clock::now() - start, microseconds(4000 + 3000));
  for (std::uint64_t i = 0; i < 8; ++i) EXPECT_EQ(completions[i].tag, i);
}

TEST(PortDeathTest, CopyThatBreaksTheContractIsOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  AlignedMemory near(2 * kUnit);
  const auto port = *make_host_port(4 * kUnit, 1);
  EXPECT_DEATH(submit(*port, CopyKind::kRead, 512, near.unit(0)), "check failed.*far offset 512");
  EXPECT_DEATH(submit(*port, CopyKind::kRead, 0, near.span().subspan(64, kUnit)),
               "check failed.*near address");
  EXPECT_DEATH(submit(*port, CopyKind::kRead, 0, near.span().first(100)), "check failed.*100 bytes");
  EXPECT_DEATH(port->submit({}), "check failed.*0 segments");
  const std::vector<iovec> segments(kPortSegmentsMax + 1, segment_of(near.unit(0)));
  EXPECT_DEATH(port->submit({.segments = segments}), "check failed.*1025 segments");
}

}  // namespace
}  // namespace dualdecoder
