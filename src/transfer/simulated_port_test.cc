#include "transfer/simulated_port.h"

#include <bit>
#include <optional>

#include <gmock/gmock.h>

#include "transfer/port_testing.h"

namespace dualdecoder {
namespace {

using std::chrono::nanoseconds;

constexpr std::size_t kUnit = kPortAlignment;
constexpr std::byte kNotHere{0xFF};

bool all_are(std::span<const std::byte> bytes, std::byte value) {
  return std::ranges::all_of(bytes, [value](std::byte byte) { return byte == value; });
}

int bits_that_differ(std::span<const std::byte> a, std::span<const std::byte> b) {
  int bits = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    bits += std::popcount(std::to_integer<unsigned char>(a[i] ^ b[i]));
  return bits;
}

/// Sixteen far units, of which the first eight hold random bytes.
class SimulatedPortTest : public testing::Test {
 protected:
  SimulatedPort make(SimulatedPortOptions options = {}) {
    options.bytes = 16 * kUnit;
    SimulatedPort port(std::move(options));
    fill_random(port.far_memory().first(8 * kUnit), 1);
    return port;
  }
  std::span<std::byte> far_unit(SimulatedPort& port, std::size_t index) {
    return port.far_memory().subspan(index * kUnit, kUnit);
  }

  AlignedMemory near_{8 * kUnit};
};

TEST_F(SimulatedPortTest, RepeatsItselfWithTheSameSeed) {
  const auto run = [&](std::uint64_t seed) {
    SimulatedPort port = make({.seed = seed, .rates = {.error = 0.2, .flipped_bit = 0.2, .misplaced = 0.2}});
    std::vector<std::pair<std::uint64_t, int>> came;
    std::array<Completion, 3> completions;
    for (std::uint64_t i = 0; i < 64; ++i) {
      submit(port, i % 3 == 0 ? CopyKind::kWrite : CopyKind::kRead, i % 16 * kUnit, near_.unit(i % 8), i);
      const std::size_t count =
          i % 2 == 0 ? port.poll(completions) : port.wait(completions, nanoseconds(30'000));
      for (std::size_t j = 0; j < count; ++j) came.emplace_back(completions[j].tag, completions[j].error);
    }
    came.emplace_back(port.now().count(), 0);
    return came;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
}

TEST_F(SimulatedPortTest, ShowsNothingOfAReadBeforeItsCompletion) {
  SimulatedPort port = make();
  submit(port, CopyKind::kRead, 3 * kUnit, near_.unit(0));
  EXPECT_TRUE(all_are(near_.unit(0), kNotHere));
  Completion completion;
  EXPECT_EQ(port.wait({&completion, 1}, nanoseconds(10'000)), 0U);
  EXPECT_TRUE(all_are(near_.unit(0), kNotHere));
  EXPECT_EQ(wait_for_one(port), 0);
  EXPECT_TRUE(std::ranges::equal(near_.unit(0), far_unit(port, 3)));
  EXPECT_EQ(copy_now(port, CopyKind::kRead, 12 * kUnit, near_.unit(0)), 0);
  EXPECT_TRUE(all_are(near_.unit(0), kNotHere)) << "never written";
}

TEST_F(SimulatedPortTest, StoresWrongDataWhenAWriteIsReusedTooEarly) {
  int early = 0;
  int late = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SimulatedPort port = make({.seed = seed});
    std::ranges::fill(near_.unit(0), std::byte{1});
    submit(port, CopyKind::kWrite, 0, near_.unit(0));
    std::ranges::fill(near_.unit(0), std::byte{2});
    EXPECT_EQ(wait_for_one(port), 0);
    early += all_are(far_unit(port, 0), std::byte{1}) ? 1 : 0;
    late += all_are(far_unit(port, 0), std::byte{2}) ? 1 : 0;
  }
  EXPECT_EQ(early + late, 40);
  EXPECT_GT(early, 5);
  EXPECT_GT(late, 5);
}

TEST_F(SimulatedPortTest, CompletesOutOfOrderUnlessToldNotTo) {
  for (const bool reorder : {true, false}) {
    SimulatedPort port = make({.seed = 3, .reorder = reorder});
    for (std::uint64_t i = 0; i < 8; ++i) submit(port, CopyKind::kRead, i * kUnit, near_.unit(i), i);
    std::vector<std::uint64_t> tags;
    Completion completion;
    while (port.wait({&completion, 1}, std::chrono::seconds(1)) == 1) tags.push_back(completion.tag);
    EXPECT_EQ(tags.size(), 8U);
    EXPECT_EQ(std::ranges::is_sorted(tags), !reorder);
  }
}

TEST_F(SimulatedPortTest, TakesTheTimeOfLatencyAndBandwidth) {
  SimulatedPort port = make({.latency_min = nanoseconds(1000),
                             .latency_max = nanoseconds(1000),
                             .bytes_per_second = 4'096'000'000});  // a unit in 1,000 ns
  for (std::uint64_t i = 0; i < 4; ++i) submit(port, CopyKind::kRead, i * kUnit, near_.unit(i), i);
  for (std::uint64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(wait_for_one(port), 0);
    EXPECT_EQ(port.now(), nanoseconds(2000 + 1000 * i));
  }
}

TEST_F(SimulatedPortTest, LetsTimePassOnlyWhenAsked) {
  SimulatedPort port = make({.poll_advance_max = nanoseconds(50)});
  std::array<Completion, 2> completions;
  submit(port, CopyKind::kRead, 0, near_.unit(0), 1);
  port.advance(std::chrono::seconds(1));
  EXPECT_EQ(port.poll(completions), 0U) << "not flushed: begins only now";
  EXPECT_LE(port.now(), std::chrono::seconds(1) + nanoseconds(50));
  port.advance(nanoseconds(200'000));
  EXPECT_TRUE(std::ranges::equal(near_.unit(0), far_unit(port, 0))) << "is there before it is taken";
  EXPECT_EQ(port.poll(completions), 1U);
  const auto before = port.now();
  EXPECT_EQ(port.wait(completions, nanoseconds(777)), 0U);
  EXPECT_EQ(port.now(), before + nanoseconds(777));
}

TEST_F(SimulatedPortTest, ReportsAnErrorAndMovesNothing) {
  SimulatedPort port =
      make({.planned = {{CopyKind::kRead, 1, {.kind = FaultKind::kError, .error = EREMOTEIO}}}});
  EXPECT_EQ(copy_now(port, CopyKind::kRead, 0, near_.unit(0)), 0);
  EXPECT_EQ(copy_now(port, CopyKind::kRead, 0, near_.unit(0)), EREMOTEIO);
  EXPECT_TRUE(all_are(near_.unit(0), kNotHere));
  EXPECT_EQ(copy_now(port, CopyKind::kRead, 0, near_.unit(0)), 0);
  EXPECT_EQ(port.counters().faults, 1U);
}

TEST_F(SimulatedPortTest, FlipsOneBit) {
  SimulatedPort port = make({.planned = {{CopyKind::kRead, 0, {.kind = FaultKind::kFlippedBit}},
                                         {CopyKind::kWrite, 0, {.kind = FaultKind::kFlippedBit}}}});
  EXPECT_EQ(copy_now(port, CopyKind::kRead, 0, near_.span().first(4 * kUnit)), 0);
  EXPECT_EQ(bits_that_differ(near_.span().first(4 * kUnit), port.far_memory().first(4 * kUnit)), 1);
  EXPECT_EQ(copy_now(port, CopyKind::kWrite, 8 * kUnit, near_.span().first(4 * kUnit)), 0);
  EXPECT_EQ(bits_that_differ(near_.span().first(4 * kUnit), port.far_memory().subspan(8 * kUnit, 4 * kUnit)),
            1);
}

TEST_F(SimulatedPortTest, StoresHalfOfATornWrite) {
  for (const auto kind : {FaultKind::kTornWrite, FaultKind::kTornWriteError}) {
    SimulatedPort port = make({.planned = {{CopyKind::kWrite, 0, {.kind = kind, .error = ENOSPC}}}});
    fill_random(near_.unit(0), 2);
    EXPECT_EQ(copy_now(port, CopyKind::kWrite, 9 * kUnit, near_.unit(0)),
              kind == FaultKind::kTornWrite ? 0 : ENOSPC);
    const auto stored = far_unit(port, 9);
    EXPECT_TRUE(std::ranges::equal(stored.first(kUnit / 2), near_.unit(0).first(kUnit / 2)));
    EXPECT_TRUE(all_are(stored.subspan(kUnit / 2), kNotHere));
  }
}

TEST_F(SimulatedPortTest, NeverCompletesALostCopy) {
  SimulatedPort port = make({.depth = 2, .planned = {{CopyKind::kRead, 0, {.kind = FaultKind::kLost}}}});
  submit(port, CopyKind::kRead, 0, near_.unit(0), 1);
  Completion completion;
  EXPECT_EQ(port.wait({&completion, 1}, std::chrono::seconds(5)), 0U);
  EXPECT_EQ(port.now(), std::chrono::seconds(5));
  EXPECT_EQ(copy_now(port, CopyKind::kRead, kUnit, near_.unit(1)), 0) << "others do";
  EXPECT_TRUE(all_are(near_.unit(0), kNotHere));
  EXPECT_EQ(port.in_flight(), 1U);
}

TEST_F(SimulatedPortTest, ReadsFromAnotherPlaceWhenMisplaced) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SimulatedPort port =
        make({.seed = seed, .planned = {{CopyKind::kRead, 0, {.kind = FaultKind::kMisplaced}}}});
    const std::span<std::byte> near = near_.span().first(2 * kUnit);
    EXPECT_EQ(copy_now(port, CopyKind::kRead, 2 * kUnit, near), 0);
    int places = 0;
    for (std::size_t unit = 0; unit + 2 <= 16; ++unit) {
      const bool equal = std::ranges::equal(near, port.far_memory().subspan(unit * kUnit, 2 * kUnit));
      places += equal ? 1 : 0;
      EXPECT_FALSE(equal && unit == 2);
    }
    EXPECT_GE(places, 1);
  }
}

TEST_F(SimulatedPortTest, AsksTheHookFirst) {
  SimulatedPort port = make({.latency_min = nanoseconds(10), .latency_max = nanoseconds(10)});
  port.set_fault_rates({.error = 1.0});
  port.set_fault_hook([](const Copy& copy) -> Fault {
    if (copy.far_offset == kUnit) return {.kind = FaultKind::kError, .error = ENODATA};
    if (copy.far_offset == 2 * kUnit) return {.delay = nanoseconds(1'000'000)};
    return {};
  });
  EXPECT_EQ(copy_now(port, CopyKind::kRead, 0, near_.unit(0)), EIO);
  EXPECT_EQ(copy_now(port, CopyKind::kRead, kUnit, near_.unit(0)), ENODATA);
  const auto before = port.now();
  EXPECT_EQ(copy_now(port, CopyKind::kRead, 2 * kUnit, near_.unit(0)), 0);
  EXPECT_EQ(port.now() - before, nanoseconds(1'000'010));
}

TEST_F(SimulatedPortTest, MeetsFaultsAboutAsOftenAsToldTo) {
  SimulatedPort port = make({.rates = {.error = 0.1, .flipped_bit = 0.1, .torn_write = 0.1}});
  for (int i = 0; i < 1000; ++i) {
    copy_now(port, CopyKind::kRead, 0, near_.unit(0));
    copy_now(port, CopyKind::kWrite, 8 * kUnit, near_.unit(0));
  }
  const auto count = [&](FaultKind kind) {
    return std::ranges::count_if(port.log(), [kind](const auto& request) { return request.fault == kind; });
  };
  EXPECT_NEAR(static_cast<double>(count(FaultKind::kError)), 200, 60);
  EXPECT_NEAR(static_cast<double>(count(FaultKind::kFlippedBit)), 200, 60);
  EXPECT_NEAR(static_cast<double>(count(FaultKind::kTornWrite)), 100, 40);
  EXPECT_EQ(count(FaultKind::kLost), 0);
}

TEST_F(SimulatedPortTest, LogsWhatWasAsked) {
  SimulatedPort port = make();
  port.advance(nanoseconds(5));
  submit(port, CopyKind::kWrite, 2 * kUnit, near_.span().first(2 * kUnit), 42);
  submit(port, CopyKind::kRead, 5 * kUnit, near_.unit(3), 43);
  ASSERT_EQ(port.log().size(), 2U);
  const SimulatedPort::Request& write = port.log()[0];
  EXPECT_EQ(write.kind, CopyKind::kWrite);
  EXPECT_EQ(write.far_offset, 2 * kUnit);
  EXPECT_EQ(write.bytes, 2 * kUnit);
  EXPECT_EQ(write.tag, 42U);
  EXPECT_EQ(write.submitted, nanoseconds(5));
  EXPECT_EQ(port.counters().writes, 1U);
  EXPECT_EQ(port.counters().bytes_read, kUnit);
  EXPECT_EQ(port.counters().bytes_written, 2 * kUnit);
}

}  // namespace
}  // namespace dualdecoder
