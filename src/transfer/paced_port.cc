#include "transfer/paced_port.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "transfer/copy.h"
#include "transfer/fixed_queue.h"

namespace dualdecoder {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kSleepLess{100};  // a sleep may end so much late

class PacedPort final : public Port {
 public:
  PacedPort(std::unique_ptr<Port> inner, const Link& link)
      : inner_(std::move(inner)), link_(link), waiting_(inner_->depth()) {}

  std::uint32_t depth() const override { return inner_->depth(); }

  void submit(const Copy& copy) override {
    const double seconds = static_cast<double>(checked_copy_bytes(copy)) / link_.bytes_per_s;
    free_at_ = std::max(free_at_, Clock::now()) +
               std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    inner_->submit(copy);
    Completion completion;
    const std::size_t count = inner_->poll(std::span(&completion, 1));
    DD_CHECK(count == 1, "the port behind a paced one has to complete at once");
    waiting_.push({.completion = completion, .due = free_at_ + link_.latency});
  }

  void flush() override {}

  std::size_t poll(std::span<Completion> completions) override {
    const Clock::time_point now = Clock::now();
    std::size_t count = 0;
    while (count < completions.size() && !waiting_.empty() && waiting_.front().due <= now)
      completions[count++] = waiting_.pop().completion;
    return count;
  }

  std::size_t wait(std::span<Completion> completions, std::chrono::nanoseconds timeout) override {
    if (waiting_.empty()) return 0;
    const Clock::time_point until = std::min(waiting_.front().due, Clock::now() + timeout);
    std::this_thread::sleep_until(until - kSleepLess);
    while (Clock::now() < until) {
    }
    return poll(completions);
  }

  std::string description() const override {
    return fmt::format("{} behind a link of {}/s and {:.0f} us", inner_->description(),
                       format_bytes(link_.bytes_per_s),
                       std::chrono::duration<double, std::micro>(link_.latency).count());
  }

 private:
  struct Waiting {
    Completion completion;
    Clock::time_point due = {};
  };

  std::unique_ptr<Port> inner_;
  Link link_;
  Clock::time_point free_at_ = {};
  FixedQueue<Waiting> waiting_;  // by due time: it grows with each copy
};

}  // namespace

std::unique_ptr<Port> make_paced_port(std::unique_ptr<Port> inner, const Link& link) {
  DD_CHECK(link.bytes_per_s > 0.0 && link.latency.count() >= 0);
  return std::make_unique<PacedPort>(std::move(inner), link);
}

}  // namespace dualdecoder
