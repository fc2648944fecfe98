#include "transfer/simulated_port.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/units.h"
#include "transfer/copy.h"

namespace dualdecoder {
namespace {

constexpr std::byte kNotHere{0xFF};
/// A disk stores whole sectors; a torn write ends at the border of one.
constexpr std::uint64_t kSectorBytes = 512;
constexpr std::chrono::nanoseconds kWaitMax = std::chrono::hours(24);

}  // namespace

SimulatedPort::SimulatedPort(SimulatedPortOptions options)
    : options_(std::move(options)),
      random_(options_.seed),
      far_(options_.bytes, kNotHere),
      operations_(options_.depth),
      finished_(options_.depth) {
  DD_CHECK(options_.depth > 0 && options_.latency_min <= options_.latency_max, "depth {}", options_.depth);
  for (std::uint32_t i = options_.depth; i > 0; --i) free_.push_back(i - 1);
}

std::uint64_t SimulatedPort::random_below(std::uint64_t limit) {
  return std::uniform_int_distribution<std::uint64_t>(0, limit - 1)(random_);
}

Fault SimulatedPort::fault_by_rates(CopyKind kind) {
  const FaultRates& rates = options_.rates;
  double draw = std::uniform_real_distribution<double>(0.0, 1.0)(random_);
  const auto hit = [&draw](double rate) {
    draw -= rate;
    return draw < 0.0;
  };
  if (hit(rates.error)) return {.kind = FaultKind::kError};
  if (hit(rates.flipped_bit)) return {.kind = FaultKind::kFlippedBit};
  if (hit(rates.lost)) return {.kind = FaultKind::kLost};
  if (hit(rates.misplaced)) return {.kind = FaultKind::kMisplaced};
  if (kind == CopyKind::kRead) return {};
  if (hit(rates.torn_write)) return {.kind = FaultKind::kTornWrite};
  if (hit(rates.torn_write_error)) return {.kind = FaultKind::kTornWriteError};
  return {};
}

Fault SimulatedPort::choose_fault(const Copy& copy) {
  const Fault by_rates = fault_by_rates(copy.kind);  // always drawn: a hook does not change what others meet
  if (hook_) {
    const Fault fault = hook_(copy);
    if (fault.kind != FaultKind::kNone || fault.delay.count() != 0) return fault;
  }
  const std::uint64_t nth = copy.kind == CopyKind::kRead ? counters_.reads : counters_.writes;
  for (const PlannedFault& planned : options_.planned) {
    if (planned.copy == copy.kind && planned.nth == nth) return planned.fault;
  }
  return by_rates;
}

void SimulatedPort::count(const Copy& copy, std::uint64_t bytes, const Fault& fault) {
  const bool read = copy.kind == CopyKind::kRead;
  ++(read ? counters_.reads : counters_.writes);
  (read ? counters_.bytes_read : counters_.bytes_written) += bytes;
  if (fault.kind != FaultKind::kNone) ++counters_.faults;
  if (!options_.keep_log) return;
  log_.push_back({.kind = copy.kind,
                  .far_offset = copy.far_offset,
                  .bytes = bytes,
                  .tag = copy.tag,
                  .submitted = now_,
                  .fault = fault.kind});
}

void SimulatedPort::submit(const Copy& copy) {
  const std::uint64_t bytes = checked_copy_bytes(copy);
  DD_CHECK(!free_.empty(), "more than {} copies in flight", options_.depth);
  const Fault fault = choose_fault(copy);
  DD_CHECK(copy.kind == CopyKind::kWrite ||
               (fault.kind != FaultKind::kTornWrite && fault.kind != FaultKind::kTornWriteError),
           "a torn write for a read");
  count(copy, bytes, fault);
  const std::uint32_t index = free_.back();
  free_.pop_back();
  Operation& operation = operations_[index];
  operation.kind = copy.kind;
  operation.far_offset = copy.far_offset;
  operation.bytes = bytes;
  operation.tag = copy.tag;
  operation.segments.assign(copy.segments.begin(), copy.segments.end());
  operation.fault = fault;
  operation.error = 0;
  operation.moved = false;
  if (!copy_fits(copy.far_offset, bytes, far_.size())) {
    operation.error = EIO;
    operation.moved = true;
  }
  if (copy.kind == CopyKind::kRead) {
    for (const iovec& segment : copy.segments) {
      std::memset(segment.iov_base, std::to_integer<int>(kNotHere), segment.iov_len);
    }
  } else if (random_below(2) == 0) {
    move(operation);
  }
  staged_.push_back(index);
}

void SimulatedPort::move(Operation& operation) {
  if (operation.moved) return;
  operation.moved = true;
  std::uint64_t far_offset = operation.far_offset;
  std::uint64_t bytes = operation.bytes;
  switch (operation.fault.kind) {
    case FaultKind::kError:
      operation.error = operation.fault.error;
      return;
    case FaultKind::kTornWriteError:
      operation.error = operation.fault.error;
      [[fallthrough]];
    case FaultKind::kTornWrite:
      bytes = bytes / 2 / kSectorBytes * kSectorBytes;
      break;
    case FaultKind::kMisplaced: {
      // One of the other places, at equal odds; there is none where the copy is as large as the far tier.
      const std::uint64_t places = (far_.size() - bytes) / kPortAlignment + 1;
      if (places > 1) {
        const std::uint64_t shift = 1 + random_below(places - 1);
        far_offset = (far_offset / kPortAlignment + shift) % places * kPortAlignment;
      }
      break;
    }
    case FaultKind::kNone:
    case FaultKind::kFlippedBit:
    case FaultKind::kLost:
      break;
  }
  move_segments(operation.kind, operation.segments, far_.data() + far_offset, bytes);
  if (operation.fault.kind == FaultKind::kFlippedBit) flip_bit(operation, far_.data() + far_offset);
}

void SimulatedPort::flip_bit(const Operation& operation, std::byte* far) {
  std::uint64_t position = random_below(operation.bytes);
  const std::byte bit{static_cast<unsigned char>(1U << random_below(8))};
  if (operation.kind == CopyKind::kWrite) {
    far[position] ^= bit;
    return;
  }
  for (const iovec& segment : operation.segments) {
    if (position < segment.iov_len) {
      static_cast<std::byte*>(segment.iov_base)[position] ^= bit;
      return;
    }
    position -= segment.iov_len;
  }
}

void SimulatedPort::flush() {
  for (const std::uint32_t index : staged_) {
    const Operation& operation = operations_[index];
    link_free_ = std::max(link_free_, now_);
    if (options_.bytes_per_second > 0) {
      const double seconds =
          static_cast<double>(operation.bytes) / static_cast<double>(options_.bytes_per_second);
      link_free_ += Time(static_cast<std::int64_t>(seconds * 1e9));
    }
    const auto latency_range =
        static_cast<std::uint64_t>((options_.latency_max - options_.latency_min).count());
    const auto extra = static_cast<std::int64_t>(random_below(latency_range + 1));
    Time due = link_free_ + options_.latency_min + Time(extra) + operation.fault.delay;
    if (operation.fault.kind == FaultKind::kLost) continue;
    if (!options_.reorder) due = std::max(due, last_due_);
    last_due_ = due;
    running_.push({.time = due, .order = order_++, .index = index});
  }
  staged_.clear();
}

void SimulatedPort::advance_to(Time time) {
  while (!running_.empty() && running_.top().time <= time) {
    const Due due = running_.top();
    running_.pop();
    now_ = std::max(now_, due.time);
    move(operations_[due.index]);
    finished_.push(due.index);
  }
  now_ = std::max(now_, time);
}

std::size_t SimulatedPort::take(std::span<Completion> completions) {
  std::size_t count = 0;
  while (count < completions.size() && !finished_.empty()) {
    const std::uint32_t index = finished_.pop();
    completions[count++] = {.tag = operations_[index].tag, .error = operations_[index].error};
    free_.push_back(index);
  }
  return count;
}

std::size_t SimulatedPort::poll(std::span<Completion> completions) {
  flush();
  const auto limit = static_cast<std::uint64_t>(options_.poll_advance_max.count()) + 1;
  advance(Time(static_cast<std::int64_t>(random_below(limit))));
  return take(completions);
}

std::size_t SimulatedPort::wait(std::span<Completion> completions, std::chrono::nanoseconds timeout) {
  flush();
  if (finished_.empty()) {
    const Time deadline = now_ + std::clamp(timeout, Time(0), kWaitMax);
    advance_to(running_.empty() ? deadline : std::min(deadline, running_.top().time));
  }
  return take(completions);
}

std::string SimulatedPort::description() const {
  return fmt::format("simulated ({}, seed {})", format_bytes(static_cast<double>(options_.bytes)),
                     options_.seed);
}

}  // namespace dualdecoder
