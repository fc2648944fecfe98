#include "transfer/transfers.h"

#include <algorithm>
#include <map>
#include <random>

#include <gmock/gmock.h>

#include "transfer/port_testing.h"
#include "transfer/simulated_port.h"

namespace dualdecoder {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr KvGeometry kGeometry{.layers = 3, .kv_heads = 1, .head_dim = 16, .block_tokens = 16};
constexpr std::uint64_t kSlot = 4096;
constexpr std::uint64_t kPage = 3 * kSlot;
constexpr std::uint32_t kBlocks = 16;
constexpr std::uint32_t kPages = 64;
constexpr LayerIndex kFirst(0);

/// A sequence as far as the transfers see one.
struct Owner {
  std::uint64_t number = 0;
  std::unique_ptr<Residency> residency;
  std::map<std::uint32_t, PageIndex> pages;  // of blocks

  std::span<std::byte> bytes(LayerIndex layer, BlockIndex block) const {
    return {residency->near().data(residency->slot(layer, block)), kSlot};
  }
  /// What the block should hold.
  std::vector<std::byte> expected(LayerIndex layer, BlockIndex block) const {
    std::vector<std::byte> content(kSlot);
    fill_random(content, number * 1000 + block.value * 10 + layer.value);
    return content;
  }
  bool holds_its_bytes(LayerIndex layer, BlockIndex block) const {
    return std::ranges::equal(bytes(layer, block), expected(layer, block));
  }
};

class TransfersTest : public testing::Test {
 protected:
  void start(SimulatedPortOptions port_options = {}, const TransferOptions& options = {}) {
    transfers_.reset();
    for (Owner& owner : owners_) owner.residency.reset();
    near_ = *NearTier::create({.geometry = kGeometry,
                               .layer_slots = {kBlocks, kBlocks, kBlocks},
                               .shares = 2,
                               .staging_slots = 4,
                               .poison = true});
    port_options.bytes = kPages * kPage;
    auto port = std::make_unique<SimulatedPort>(std::move(port_options));
    port_ = port.get();
    far_ = std::make_unique<FarTier>(std::move(port), FarTierOptions{.geometry = kGeometry,
                                                                     .pages_max = kPages,
                                                                     .first_page_offset = 0,
                                                                     .verify = true,
                                                                     .reserve = {}});
    transfers_ = std::make_unique<Transfers>(*far_, options);
    for (std::uint64_t i = 0; i < 2; ++i)
      owners_[i] = {.number = i, .residency = *Residency::create(*near_, kBlocks), .pages = {}};
  }

  /// A block in every layer, full and held, with a page.
  void fill(Owner& owner, std::uint32_t index) {
    const BlockIndex block(index);
    for (LayerIndex layer; layer.value < kGeometry.layers; ++layer) {
      ASSERT_TRUE(owner.residency->try_take(layer, block, SlotState::kHeld, 1));
      std::ranges::copy(owner.expected(layer, block), owner.bytes(layer, block).begin());
    }
    owner.pages[index] = *far_->take_page();
  }
  void ask_write(Owner& owner, std::uint32_t block) {
    fill(owner, block);
    transfers_->write(*owner.residency, BlockIndex(block), owner.pages[block]);
  }
  /// Blocks [first, end): written, and no longer near.
  void store(Owner& owner, std::uint32_t first, std::uint32_t end) {
    for (std::uint32_t block = first; block < end; ++block) ask_write(owner, block);
    ASSERT_TRUE(transfers_->finish(*owner.residency));
    for (BlockIndex block(first); block.value < end; ++block) {
      for (LayerIndex layer; layer.value < kGeometry.layers; ++layer) owner.residency->drop(layer, block);
    }
    port_->clear_log();
  }
  void ask_read(Owner& owner, LayerIndex layer, std::uint32_t block, Lane lane) {
    ASSERT_TRUE(owner.residency->try_take(layer, BlockIndex(block), SlotState::kLoading, 2));
    transfers_->read(*owner.residency, layer, BlockIndex(block), owner.pages[block], lane);
  }
  std::uint64_t offset(Owner& owner, std::uint32_t block, LayerIndex layer = kFirst) {
    return far_->offset(owner.pages[block], layer);
  }
  std::vector<std::uint64_t> asked_offsets() const {
    std::vector<std::uint64_t> offsets;
    for (const SimulatedPort::Request& request : port_->log()) offsets.push_back(request.far_offset);
    return offsets;
  }

  static void expect_error(const Owner& owner, ErrorCode code, const std::string& text) {
    ASSERT_TRUE(owner.residency->error()) << "no error";
    EXPECT_STREQ(error_code_name(owner.residency->error()->code), error_code_name(code));
    EXPECT_THAT(owner.residency->error()->message,
                AllOf(StartsWith("simulated ("), HasSubstr(text), Not(HasSubstr("\n"))));
  }
  /// Every block of the owner, in every layer, comes back as it was written.
  void expect_unharmed(Owner& owner) {
    for (const auto& [block, page] : owner.pages) {
      for (LayerIndex layer; layer.value < kGeometry.layers; ++layer) {
        ask_read(owner, layer, block, Lane::kDemand);
        ASSERT_TRUE(transfers_->finish(*owner.residency));
        EXPECT_TRUE(owner.holds_its_bytes(layer, BlockIndex(block))) << "block " << block;
      }
    }
    EXPECT_FALSE(owner.residency->error());
  }

  std::unique_ptr<NearTier> near_;
  SimulatedPort* port_ = nullptr;
  std::unique_ptr<FarTier> far_;
  std::array<Owner, 2> owners_;
  std::unique_ptr<Transfers> transfers_;
};

TEST_F(TransfersTest, StartsDemandBeforePredictedBeforeWritesAndEachLaneInOrder) {
  start({.depth = 1});
  Owner& a = owners_[0];
  Owner& b = owners_[1];
  store(a, 0, 3);
  store(b, 0, 3);
  ask_write(a, 5);
  ask_read(a, kFirst, 0, Lane::kPredicted);
  ask_write(b, 4);
  ask_read(b, kFirst, 0, Lane::kDemand);
  ask_read(b, kFirst, 1, Lane::kPredicted);
  ask_read(a, kFirst, 2, Lane::kDemand);
  ask_read(b, kFirst, 2, Lane::kDemand);
  EXPECT_TRUE(asked_offsets().empty()) << "nothing starts before poll or wait";
  ASSERT_TRUE(transfers_->finish(*a.residency));
  ASSERT_TRUE(transfers_->finish(*b.residency));
  EXPECT_THAT(asked_offsets(), ElementsAre(offset(b, 0), offset(a, 2), offset(b, 2), offset(a, 0),
                                           offset(b, 1), offset(a, 5), offset(b, 4)));
}

TEST_F(TransfersTest, LetsADemandOvertakeWhatWaitsButNotWhatHasStarted) {
  start({.poll_advance_max = {}}, {.in_flight_bytes_max = {kSlot, kSlot, kPage}});
  Owner& a = owners_[0];
  store(a, 0, 4);
  ask_read(a, kFirst, 0, Lane::kPredicted);
  ask_read(a, kFirst, 1, Lane::kPredicted);
  transfers_->poll();
  ask_read(a, kFirst, 2, Lane::kDemand);
  ask_read(a, kFirst, 3, Lane::kDemand);
  transfers_->poll();
  EXPECT_THAT(asked_offsets(), ElementsAre(offset(a, 0), offset(a, 2)));
  ASSERT_TRUE(transfers_->finish(*a.residency));
}

TEST_F(TransfersTest, KeepsEachLaneFullButNeverAboveItsBytesInFlight) {
  start({.poll_advance_max = {}}, {.in_flight_bytes_max = {2 * kSlot, kSlot + 1, 1}});
  Owner& a = owners_[0];
  store(a, 0, 10);
  for (std::uint32_t block = 0; block < 6; ++block) ask_read(a, kFirst, block, Lane::kDemand);
  for (std::uint32_t block = 6; block < 10; ++block) ask_read(a, kFirst, block, Lane::kPredicted);
  for (std::uint32_t block = 10; block < 13; ++block) ask_write(a, block);
  struct Range {
    std::uint32_t first, end, at_once;
    LayerIndex layer;
  };
  const std::array ranges = {Range{0, 6, 2, kFirst}, Range{6, 10, 1, kFirst}, Range{10, 13, 1, kFirst}};
  transfers_->poll();
  do {
    for (const Range& range : ranges) {
      std::uint32_t ended = 0;
      for (BlockIndex block(range.first); block.value < range.end; ++block)
        ended += a.residency->state(range.layer, block) == SlotState::kClean ? 1 : 0;
      std::uint32_t started = 0;
      for (const std::uint64_t at : asked_offsets())
        started += at >= offset(a, range.first) && at < offset(a, range.end - 1) + kPage ? 1 : 0;
      EXPECT_EQ(started - ended, std::min(range.at_once, range.end - range.first - ended));
    }
  } while (transfers_->wait());
  EXPECT_EQ(a.residency->transfers(), 0U);
}

TEST_F(TransfersTest, PromotesAReadToTheDemandLaneAndNeverReadsTwice) {
  start({.depth = 1});
  Owner& a = owners_[0];
  store(a, 0, 5);
  for (std::uint32_t block = 0; block < 4; ++block) ask_read(a, kFirst, block, Lane::kPredicted);
  transfers_->promote(*a.residency, kFirst, BlockIndex(3));
  transfers_->promote(*a.residency, kFirst, BlockIndex(3));
  ask_read(a, kFirst, 4, Lane::kDemand);
  transfers_->poll();
  transfers_->promote(*a.residency, kFirst, BlockIndex(1));
  transfers_->promote(*a.residency, kFirst, BlockIndex(4));
  ASSERT_TRUE(transfers_->finish(*a.residency));
  EXPECT_THAT(asked_offsets(),
              ElementsAre(offset(a, 3), offset(a, 4), offset(a, 1), offset(a, 0), offset(a, 2)));
  EXPECT_EQ(transfers_->stats().promoted, 2U);
}

TEST_F(TransfersTest, LeavesAPromotedReadAloneThatIsUnderWay) {
  start({.poll_advance_max = {}});
  Owner& a = owners_[0];
  store(a, 0, 1);
  ask_read(a, kFirst, 0, Lane::kPredicted);
  transfers_->poll();
  transfers_->promote(*a.residency, kFirst, BlockIndex(0));
  ASSERT_TRUE(transfers_->finish(*a.residency));
  EXPECT_EQ(port_->counters().reads, 1U);
  EXPECT_EQ(transfers_->stats().promoted, 0U);
  EXPECT_TRUE(a.holds_its_bytes(kFirst, BlockIndex(0)));
}

TEST_F(TransfersTest, WritesAPageAtOnceFromTheSlotsOfItsLayersInOrder) {
  start();
  Owner& a = owners_[0];
  for (std::uint32_t i = 1; i < 4; ++i)  // so that the layers' slots are no neighbours
    ASSERT_TRUE(a.residency->try_take(LayerIndex(1), BlockIndex(i), SlotState::kHeld, 1));
  fill(a, 0);
  fill(a, 7);
  std::vector<std::byte*> sources;
  port_->set_fault_hook([&sources](const Copy& copy) -> Fault {
    for (const iovec& segment : copy.segments) {
      for (std::size_t at = 0; at < segment.iov_len; at += kSlot)
        sources.push_back(static_cast<std::byte*>(segment.iov_base) + at);
    }
    return {};
  });
  transfers_->write(*a.residency, BlockIndex(7), a.pages[7]);
  for (LayerIndex layer; layer.value < kGeometry.layers; ++layer)
    EXPECT_EQ(a.residency->state(layer, BlockIndex(7)), SlotState::kWriting);
  ASSERT_TRUE(transfers_->finish(*a.residency));
  ASSERT_EQ(port_->log().size(), 1U);
  EXPECT_EQ(port_->log()[0].kind, CopyKind::kWrite);
  EXPECT_EQ(port_->log()[0].far_offset, offset(a, 7));
  EXPECT_EQ(port_->log()[0].bytes, kPage);
  ASSERT_EQ(sources.size(), 3U);
  for (LayerIndex layer; layer.value < kGeometry.layers; ++layer) {
    EXPECT_EQ(a.residency->state(layer, BlockIndex(7)), SlotState::kClean);
    EXPECT_EQ(sources[layer.value], a.bytes(layer, BlockIndex(7)).data());
    EXPECT_TRUE(std::ranges::equal(port_->far_memory().subspan(offset(a, 7, layer), kSlot),
                                   a.expected(layer, BlockIndex(7))));
  }
}

TEST_F(TransfersTest, ReadsIntoStagingAndSaysWhenItHasEnded) {
  start();
  Owner& a = owners_[0];
  store(a, 0, 2);
  std::array<bool, 2> done = {true, true};
  for (std::uint32_t i = 0; i < 2; ++i)
    transfers_->read_staged(*a.residency, LayerIndex(2), a.pages[i], near_->staging_slot(i), done[i]);
  EXPECT_THAT(done, ElementsAre(false, false));
  EXPECT_EQ(a.residency->transfers(), 2U);
  ASSERT_TRUE(transfers_->finish(*a.residency));
  EXPECT_THAT(done, ElementsAre(true, true));
  for (std::uint32_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(std::ranges::equal(std::span(near_->data(near_->staging_slot(i)), kSlot),
                                   a.expected(LayerIndex(2), BlockIndex(i))));
    EXPECT_FALSE(a.residency->near(LayerIndex(2), BlockIndex(i)));
  }
}

TEST_F(TransfersTest, CountsCopiesAndBytes) {
  start();
  Owner& a = owners_[0];
  store(a, 0, 4);
  ask_read(a, kFirst, 0, Lane::kDemand);
  ask_read(a, kFirst, 1, Lane::kPredicted);
  bool done = false;
  transfers_->read_staged(*a.residency, kFirst, a.pages[2], near_->staging_slot(0), done);
  ASSERT_TRUE(transfers_->finish(*a.residency));
  const TransferStats& stats = transfers_->stats();
  EXPECT_EQ(stats.writes.copies, 4U);
  EXPECT_EQ(stats.writes.bytes, 4 * kPage);
  EXPECT_EQ(stats.reads.copies, 3U);
  EXPECT_EQ(stats.reads.bytes, 3 * kSlot);
  EXPECT_LE(stats.reads.ns_max, stats.reads.ns);
  EXPECT_EQ(stats.read_errors + stats.checksum_errors + stats.write_errors + stats.deadlines_missed, 0U);
}

TEST_F(TransfersTest, PollAndWaitWithNothingToDoComeBackAtOnce) {
  start();
  transfers_->poll();
  EXPECT_FALSE(transfers_->wait());
  EXPECT_TRUE(transfers_->finish(*owners_[0].residency));
  EXPECT_TRUE(transfers_->drain(*owners_[0].residency));
  EXPECT_EQ(port_->now().count(), 0);
}

// ---- faults

TEST_F(TransfersTest, AFailedReadIsAnErrorOfItsOwnerAloneAndFreesTheSlot) {
  start();
  store(owners_[0], 0, 2);
  store(owners_[1], 0, 2);
  Owner& a = owners_[0];
  port_->plan_fault(
      {CopyKind::kRead, port_->counters().reads, {.kind = FaultKind::kError, .error = EREMOTEIO}});
  ask_read(a, LayerIndex(1), 0, Lane::kDemand);
  ask_read(a, LayerIndex(1), 1, Lane::kDemand);
  ASSERT_TRUE(transfers_->finish(*a.residency));
  expect_error(a, ErrorCode::kIo,
               fmt::format("a block of layer 1 at byte {} cannot be read: Remote I/O error",
                           offset(a, 0, LayerIndex(1))));
  EXPECT_EQ(a.residency->state(LayerIndex(1), BlockIndex(0)), SlotState::kFree);
  EXPECT_TRUE(a.holds_its_bytes(LayerIndex(1), BlockIndex(1)));
  EXPECT_EQ(transfers_->stats().read_errors, 1U);
  expect_unharmed(owners_[1]);
}

TEST_F(TransfersTest, AFailedStagedReadEndsToo) {
  start({.planned = {{CopyKind::kRead, 0, {.kind = FaultKind::kError}}}});
  Owner& a = owners_[0];
  store(a, 0, 1);
  bool done = false;
  transfers_->read_staged(*a.residency, kFirst, a.pages[0], near_->staging_slot(1), done);
  ASSERT_TRUE(transfers_->finish(*a.residency));
  EXPECT_TRUE(done);
  expect_error(a, ErrorCode::kIo, "cannot be read: Input/output error");
}

TEST_F(TransfersTest, AFailedWriteIsAnErrorOfItsOwnerAloneAndLeavesTheBlocksHeld) {
  for (const FaultKind kind : {FaultKind::kError, FaultKind::kTornWriteError}) {
    start({.planned = {{CopyKind::kWrite, 1, {.kind = kind, .error = ENOSPC}}}});
    Owner& a = owners_[0];
    store(owners_[1], 0, 1);
    ask_write(a, 0);
    ask_write(a, 1);
    ASSERT_TRUE(transfers_->finish(*a.residency));
    expect_error(a, ErrorCode::kIo,
                 fmt::format("a page at byte {} cannot be written: No space left on device", offset(a, 0)));
    for (LayerIndex layer; layer.value < kGeometry.layers; ++layer) {
      EXPECT_EQ(a.residency->state(layer, BlockIndex(0)), SlotState::kHeld);
      EXPECT_EQ(a.residency->state(layer, BlockIndex(1)), SlotState::kClean);
      EXPECT_TRUE(a.holds_its_bytes(layer, BlockIndex(0)));
    }
    EXPECT_EQ(transfers_->stats().write_errors, 1U);
    expect_unharmed(owners_[1]);
  }
}

struct Damage {
  std::string name;
  CopyKind copy;
  FaultKind fault;
};

class DamagedBlock : public TransfersTest, public testing::WithParamInterface<Damage> {
 protected:
  // Blocks that come back are right; the others have no place any more.
  std::uint32_t count_refused(Owner& owner) {
    std::uint32_t refused = 0;
    for (LayerIndex layer; layer.value < kGeometry.layers; ++layer) {
      ask_read(owner, layer, 0, Lane::kDemand);
      EXPECT_TRUE(transfers_->finish(*owner.residency));
      if (owner.residency->state(layer, BlockIndex(0)) == SlotState::kFree) {
        ++refused;
      } else {
        EXPECT_TRUE(owner.holds_its_bytes(layer, BlockIndex(0))) << "layer " << layer.value;
      }
    }
    return refused;
  }
};
INSTANTIATE_TEST_SUITE_P(
    Kinds, DamagedBlock,
    testing::Values(Damage{"FlippedBitInWhatIsRead", CopyKind::kRead, FaultKind::kFlippedBit},
                    Damage{"MisplacedRead", CopyKind::kRead, FaultKind::kMisplaced},
                    Damage{"FlippedBitInWhatIsStored", CopyKind::kWrite, FaultKind::kFlippedBit},
                    Damage{"TornWrite", CopyKind::kWrite, FaultKind::kTornWrite},
                    Damage{"MisplacedWrite", CopyKind::kWrite, FaultKind::kMisplaced}),
    [](const auto& damage) { return damage.param.name; });

TEST_P(DamagedBlock, IsAnErrorOfItsOwnerAloneAndNeverReadable) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    start({.seed = seed, .planned = {{GetParam().copy, 0, {.kind = GetParam().fault}}}});
    Owner& a = owners_[0];
    store(a, 0, 1);
    const std::uint32_t refused = count_refused(a);
    EXPECT_GE(refused, 1U);
    if (GetParam().copy == CopyKind::kRead || GetParam().fault == FaultKind::kFlippedBit) {
      EXPECT_EQ(refused, 1U);
    }
    EXPECT_EQ(transfers_->stats().checksum_errors, refused);
    EXPECT_EQ(transfers_->stats().read_errors, 0U);
    expect_error(a, ErrorCode::kCorrupt, "is damaged: checksum");
    store(owners_[1], 0, 4);
    expect_unharmed(owners_[1]);
  }
}

TEST_F(TransfersTest, NoticesEachFlippedBitInWhatWasStored) {
  start();
  std::mt19937_64 random(1);
  Owner& a = owners_[0];
  store(a, 0, 1);
  for (std::uint32_t round = 0; round < 200; ++round) {
    const LayerIndex layer(round % 3);
    std::byte& byte = port_->far_memory()[offset(a, 0, layer) + random() % kSlot];
    const std::byte bit{static_cast<unsigned char>(1U << random() % 8)};
    byte ^= bit;
    ask_read(a, layer, 0, Lane::kDemand);
    ASSERT_TRUE(transfers_->finish(*a.residency));
    ASSERT_EQ(a.residency->state(layer, BlockIndex(0)), SlotState::kFree) << "round " << round;
    byte ^= bit;
  }
  EXPECT_EQ(transfers_->stats().checksum_errors, 200U);
  expect_error(a, ErrorCode::kCorrupt, "a block of layer 0 at byte 0 is damaged");
}

TEST_F(TransfersTest, NoticesPagesThatHaveChangedPlaces) {
  start();
  Owner& a = owners_[0];
  store(a, 0, 2);
  store(owners_[1], 0, 2);
  const auto first = port_->far_memory().subspan(offset(a, 0), kPage);
  std::ranges::swap_ranges(first, port_->far_memory().subspan(offset(a, 1), kPage));
  for (std::uint32_t block = 0; block < 2; ++block) ask_read(a, LayerIndex(2), block, Lane::kPredicted);
  ASSERT_TRUE(transfers_->finish(*a.residency));
  EXPECT_EQ(transfers_->stats().checksum_errors, 2U);
  expect_error(a, ErrorCode::kCorrupt, "damaged");
  expect_unharmed(owners_[1]);
}

TEST_F(TransfersTest, GivesUpOnACopyThatDoesNotEndWithinTheDeadline) {
  for (const CopyKind kind : {CopyKind::kRead, CopyKind::kWrite}) {
    start({.poll_advance_max = {}}, {.deadline = seconds(3)});
    Owner& a = owners_[0];
    Owner& b = owners_[1];
    store(a, 0, 1);
    store(b, 0, 2);
    const auto nth = kind == CopyKind::kRead ? port_->counters().reads : port_->counters().writes;
    port_->plan_fault({kind, nth, {.kind = FaultKind::kLost}});
    if (kind == CopyKind::kRead) {
      ask_read(a, kFirst, 0, Lane::kDemand);
    } else {
      ask_write(a, 1);
    }
    transfers_->poll();
    const auto before = port_->now();
    EXPECT_FALSE(transfers_->wait());
    EXPECT_EQ(port_->now() - before, seconds(3));
    EXPECT_FALSE(transfers_->finish(*a.residency));
    EXPECT_FALSE(transfers_->drain(*a.residency));
    EXPECT_EQ(transfers_->stats().deadlines_missed, 2U);
    EXPECT_EQ(a.residency->transfers(), 1U);
    expect_unharmed(b);
    EXPECT_TRUE(transfers_->drain(*b.residency));
    transfers_.reset();
    a.residency->note_transfer_ended();  // now nothing can come any more
  }
}

TEST_F(TransfersTest, TakesBackWhatHasNotStartedAndWaitsForTheRest) {
  start({.depth = 1, .poll_advance_max = {}});
  Owner& a = owners_[0];
  Owner& b = owners_[1];
  store(a, 0, 3);
  store(b, 0, 1);
  ask_read(a, kFirst, 0, Lane::kDemand);
  transfers_->poll();
  ask_read(a, kFirst, 1, Lane::kDemand);
  ask_read(b, kFirst, 0, Lane::kPredicted);
  ask_read(a, kFirst, 2, Lane::kPredicted);
  ask_write(a, 3);
  bool done = false;
  transfers_->read_staged(*a.residency, kFirst, a.pages[1], near_->staging_slot(0), done);
  EXPECT_TRUE(transfers_->drain(*a.residency));
  EXPECT_EQ(a.residency->state(kFirst, BlockIndex(0)), SlotState::kClean);
  EXPECT_EQ(a.residency->state(kFirst, BlockIndex(1)), SlotState::kFree);
  EXPECT_EQ(a.residency->state(kFirst, BlockIndex(2)), SlotState::kFree);
  for (LayerIndex layer; layer.value < kGeometry.layers; ++layer)
    EXPECT_EQ(a.residency->state(layer, BlockIndex(3)), SlotState::kHeld);
  EXPECT_TRUE(done);
  EXPECT_FALSE(a.residency->error());
  ASSERT_TRUE(transfers_->finish(*b.residency));
  EXPECT_THAT(asked_offsets(), ElementsAre(offset(a, 0), offset(b, 0)));
}

TEST_F(TransfersTest, BringsEveryBlockBackInRandomTraffic) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937_64 random(seed);
    const std::uint64_t bound = kSlot << random() % 4;
    start({.seed = seed, .latency_max = std::chrono::milliseconds(5), .depth = 1U << random() % 6},
          {.in_flight_bytes_max = {bound, bound, bound}});
    for (int i = 0; i < 1000; ++i) {
      Owner& owner = owners_[random() % 2];
      const auto block = static_cast<std::uint32_t>(random() % kBlocks);
      const LayerIndex layer(static_cast<std::uint32_t>(random() % 3));
      const SlotState state = owner.residency->state(layer, BlockIndex(block));
      if (!owner.pages.contains(block)) {
        ask_write(owner, block);
      } else if (state == SlotState::kFree) {
        ask_read(owner, layer, block, random() % 2 == 0 ? Lane::kDemand : Lane::kPredicted);
      } else if (state == SlotState::kLoading) {
        transfers_->promote(*owner.residency, layer, BlockIndex(block));
      } else {
        ASSERT_TRUE(owner.holds_its_bytes(layer, BlockIndex(block))) << "operation " << i;
        if (state == SlotState::kClean) owner.residency->drop(layer, BlockIndex(block));
      }
      if (random() % 2 == 0) transfers_->poll();
      if (random() % 16 == 0) transfers_->wait();
    }
    for (Owner& owner : owners_) {
      ASSERT_TRUE(transfers_->finish(*owner.residency));
      EXPECT_FALSE(owner.residency->error());
    }
  }
}

}  // namespace
}  // namespace dualdecoder
