// Decides which copies run when, and keeps the books of kv/residency.h and of the checksums as they end.
//
// Three lanes, strictly in this order: what attention waits for now, what a later attention is expected to
// need, and writes. Each lane is first in, first out; a block that turns out to be needed now moves to the
// first (`promote`) and is never read twice. Bytes in flight are bounded per lane, so that a full lane leaves
// the port to the one before it.
//
// Completions are taken only in poll() and wait(). A failed copy is an error of the sequence it was for
// (Residency::set_error) and of no other. Owned by the engine thread.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/trace.h"
#include "kv/residency.h"
#include "transfer/far_tier.h"

namespace dualdecoder {

enum class Lane : std::uint8_t { kDemand, kPredicted, kWrite };
inline constexpr std::size_t kLanes = 3;

struct TransferOptions {
  /// Bytes in flight at most, but always at least one copy: [lane].
  std::array<std::uint64_t, kLanes> in_flight_bytes_max = {8u << 20, 4u << 20, 8u << 20};
  /// A read that takes longer ends its sequence; a write that does fills the queue and then ends those who
  /// wait.
  std::chrono::nanoseconds deadline = std::chrono::seconds(5);
  Trace* trace = nullptr;  // copies and promotions, on the tracks below
};
inline constexpr std::uint32_t kReadTrack = 1;
inline constexpr std::uint32_t kWriteTrack = 2;

struct TransferCounts {
  std::uint64_t copies = 0;
  std::uint64_t bytes = 0;
  std::uint64_t ns = 0;  // summed over copies, from start to completion
  std::uint64_t ns_max = 0;
};

struct TransferStats {
  TransferCounts reads;
  TransferCounts writes;
  std::uint64_t promoted = 0;
  std::uint64_t read_errors = 0;
  std::uint64_t checksum_errors = 0;
  std::uint64_t write_errors = 0;
  std::uint64_t deadlines_missed = 0;
};

class Transfers {
 public:
  Transfers(FarTier& far, const TransferOptions& options);
  /// Waits for what is in flight.
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  /// Reads a block into the slot that was taken for it as loading.
  void read(Residency& owner, LayerIndex layer, BlockIndex block, PageIndex page, Lane lane);
  /// Reads a block into a slot that no residency knows; `done` becomes true when it has ended, well or not.
  void read_staged(Residency& owner, LayerIndex layer, PageIndex page, SlotIndex to, bool& done);
  /// Writes the blocks of all layers, held now, as one page.
  void write(Residency& owner, BlockIndex block, PageIndex page);
  /// A loading block is needed now.
  void promote(const Residency& owner, LayerIndex layer, BlockIndex block);

  /// Starts what may start and takes what has ended. Never blocks.
  void poll();
  /// The same, after waiting for a first completion. False when none came within the deadline or nothing is
  /// in flight.
  bool wait();
  /// Waits for all that was asked for. False when something did not end within the deadline: then the owner
  /// must stay alive until owner.transfers() is 0.
  bool finish(Residency& owner);
  /// The same, but takes back what has not started.
  bool drain(Residency& owner);

  const TransferStats& stats() const { return stats_; }
  const FarTier& far() const { return far_; }
  /// For who gave up waiting.
  void note_deadline_missed() { ++stats_.deadlines_missed; }

 private:
  struct Operation {
    Residency* owner = nullptr;  // null: not in use
    LayerIndex layer = {};
    BlockIndex block = {};
    PageIndex page = {};
    SlotIndex slot = {};  // of a read
    bool* staged_done = nullptr;
    Lane lane = Lane::kDemand;
    bool started = false;
    std::uint64_t bytes = 0;
    std::chrono::steady_clock::time_point start = {};
  };

  std::uint32_t add(const Operation& operation);
  void start_what_may();
  void start(std::uint32_t index);
  void start_read(const Operation& operation, std::uint32_t index);
  void start_write(const Operation& operation, std::uint32_t index);
  void end(const Completion& completion);
  void end_read(Operation& operation, int error);
  void end_write(Operation& operation, int error);
  void take_back(std::uint32_t index);
  void release(Operation& operation);
  void trace(const char* name, const Operation& operation, TraceEvent::Time start,
             TraceEvent::Time end) const;

  FarTier& far_;
  TransferOptions options_;
  std::vector<Operation> operations_;
  std::vector<std::uint32_t> free_operations_;
  std::array<std::deque<std::uint32_t>, kLanes> waiting_;
  std::array<std::uint64_t, kLanes> in_flight_bytes_{};
  std::uint32_t in_flight_ = 0;
  std::vector<iovec> segments_;
  std::vector<Completion> completions_;
  TransferStats stats_;
};

}  // namespace dualdecoder
