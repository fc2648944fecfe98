// A far tier for tests and benches: memory behind a link with latency, bandwidth and faults, on a virtual
// clock. The same seed and the same calls give the same completions in the same order. Used by one thread.
//
// The clock moves only in poll() (a little), wait() (to the next completion, or by the timeout) and
// advance(). It makes mistakes of the caller visible: near memory of a read is 0xFF (NaN as f16) from
// submit() to the completion; a write takes its data at submit() or at the completion, at random, so reuse
// before the completion stores wrong data; a read meets a write that is under way before or after it; far
// memory that was never written is 0xFF.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "transfer/fixed_queue.h"
#include "transfer/port.h"

namespace dualdecoder {

enum class FaultKind : std::uint8_t {
  kNone,
  kError,           // nothing is moved; completes with `error`
  kFlippedBit,      // one bit of what is read, or of what is stored, is wrong; completes with 0
  kTornWrite,       // half is stored; completes with 0
  kTornWriteError,  // half is stored; completes with `error`
  kLost,            // never completes; the copy stays in flight
  kMisplaced,       // another far offset is read or written; completes with 0
};

struct Fault {
  FaultKind kind = FaultKind::kNone;
  int error = EIO;
  std::chrono::nanoseconds delay{0};  // on top of the latency, with any kind
};

/// A fault for the `nth` read or write, counted from 0.
struct PlannedFault {
  CopyKind copy = CopyKind::kRead;
  std::uint64_t nth = 0;
  Fault fault = {};
};

/// Probability of each fault for each copy; torn_* apply to writes.
struct FaultRates {
  double error = 0;
  double flipped_bit = 0;
  double torn_write = 0;
  double torn_write_error = 0;
  double lost = 0;
  double misplaced = 0;
};

struct SimulatedPortOptions {
  std::uint64_t bytes = 0;
  std::uint64_t seed = 0;
  std::chrono::nanoseconds latency_min{50'000};
  std::chrono::nanoseconds latency_max{200'000};
  std::uint64_t bytes_per_second = 0;  // 0: only latency
  bool reorder = true;                 // false: completions come in the order of submit()
  std::uint32_t depth = 64;
  std::chrono::nanoseconds poll_advance_max{20'000};  // poll() takes a random time up to this
  bool keep_log = true;
  FaultRates rates = {};
  std::vector<PlannedFault> planned = {};
};

class SimulatedPort final : public Port {
 public:
  using Time = std::chrono::nanoseconds;  // since the port was made

  /// What was asked, and what the port did to it.
  struct Request {
    CopyKind kind = CopyKind::kRead;
    std::uint64_t far_offset = 0;
    std::uint64_t bytes = 0;
    std::uint64_t tag = 0;
    Time submitted{0};
    FaultKind fault = FaultKind::kNone;
  };
  struct Counters {
    std::uint64_t reads = 0;
    std::uint64_t writes = 0;
    std::uint64_t bytes_read = 0;
    std::uint64_t bytes_written = 0;
    std::uint64_t faults = 0;
  };

  explicit SimulatedPort(SimulatedPortOptions options);

  std::uint32_t depth() const override { return options_.depth; }
  void submit(const Copy& copy) override;
  void flush() override;
  std::size_t poll(std::span<Completion> completions) override;
  std::size_t wait(std::span<Completion> completions, std::chrono::nanoseconds timeout) override;
  std::string description() const override;

  /// Asked for each copy at submit(). What it returns goes before planned faults and rates, unless it is
  /// kNone without a delay.
  void set_fault_hook(std::function<Fault(const Copy&)> hook) { hook_ = std::move(hook); }
  void plan_fault(const PlannedFault& planned) { options_.planned.push_back(planned); }
  void set_fault_rates(const FaultRates& rates) { options_.rates = rates; }

  /// Lets time pass, as computing does. What was not flushed has not begun.
  void advance(Time duration) { advance_to(now_ + duration); }
  Time now() const { return now_; }
  std::uint32_t in_flight() const { return options_.depth - static_cast<std::uint32_t>(free_.size()); }
  const std::vector<Request>& log() const { return log_; }
  void clear_log() { log_.clear(); }
  const Counters& counters() const { return counters_; }
  /// Far memory as it is now, to look at and to damage.
  std::span<std::byte> far_memory() { return far_; }

 private:
  struct Operation {
    CopyKind kind = CopyKind::kRead;
    std::uint64_t far_offset = 0;
    std::uint64_t bytes = 0;
    std::uint64_t tag = 0;
    std::vector<iovec> segments;
    Fault fault;
    int error = 0;
    bool moved = false;
  };
  struct Due {
    Time time{0};
    std::uint64_t order = 0;
    std::uint32_t index = 0;
    bool operator>(const Due& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };

  std::uint64_t random_below(std::uint64_t limit);
  Fault choose_fault(const Copy& copy);
  Fault fault_by_rates(CopyKind kind);
  void count(const Copy& copy, std::uint64_t bytes, const Fault& fault);
  void move(Operation& operation);
  void flip_bit(const Operation& operation, std::byte* far);
  void advance_to(Time time);
  std::size_t take(std::span<Completion> completions);

  SimulatedPortOptions options_;
  std::mt19937_64 random_;
  std::vector<std::byte> far_;
  std::vector<Operation> operations_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> staged_;
  std::priority_queue<Due, std::vector<Due>, std::greater<>> running_;
  FixedQueue<std::uint32_t> finished_;
  std::function<Fault(const Copy&)> hook_;
  Time now_{0};
  Time link_free_{0};
  Time last_due_{0};
  std::uint64_t order_ = 0;
  std::vector<Request> log_;
  Counters counters_;
};

}  // namespace dualdecoder
