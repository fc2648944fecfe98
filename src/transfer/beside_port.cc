#include "transfer/beside_port.h"

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "transfer/copy.h"

namespace dualdecoder {
namespace {

class BesidePort final : public Port {
 public:
  BesidePort(std::byte* far, std::uint64_t bytes, NearMemory& near, std::uint32_t depth)
      : far_(far), bytes_(bytes), near_(near), depth_(depth), thread_([this](const std::stop_token& stop) {
          work(stop);
        }) {}

  std::uint32_t depth() const override { return depth_; }

  void submit(const Copy& copy) override {
    const std::uint64_t copy_bytes = checked_copy_bytes(copy);
    ++in_flight_;
    if (!copy_fits(copy.far_offset, copy_bytes, bytes_)) {
      const std::lock_guard lock(mutex_);
      completed_.push_back({.tag = copy.tag, .error = EIO});
      return;
    }
    std::byte* far = far_ + copy.far_offset;
    for (const iovec& segment : copy.segments) {
      held_back_.copies.push_back({.near = static_cast<std::byte*>(segment.iov_base),
                                   .host = far,
                                   .bytes = segment.iov_len,
                                   .into_near = copy.kind == CopyKind::kRead});
      far += segment.iov_len;
    }
    held_back_.tags.push_back(copy.tag);
  }

  void flush() override {
    if (held_back_.tags.empty()) return;
    {
      const std::lock_guard lock(mutex_);
      waiting_.copies.insert(waiting_.copies.end(), held_back_.copies.begin(), held_back_.copies.end());
      waiting_.tags.insert(waiting_.tags.end(), held_back_.tags.begin(), held_back_.tags.end());
    }
    held_back_ = {};
    work_.notify_one();
  }

  std::size_t poll(std::span<Completion> completions) override {
    flush();
    const std::lock_guard lock(mutex_);
    return take(completions);
  }

  std::size_t wait(std::span<Completion> completions, std::chrono::nanoseconds timeout) override {
    flush();
    if (completions.empty() || in_flight_ == 0) return 0;
    std::unique_lock lock(mutex_);
    done_.wait_for(lock, timeout, [this] { return !completed_.empty(); });
    return take(completions);
  }

  std::string description() const override {
    return fmt::format("memory beside the device ({})", format_bytes(static_cast<double>(bytes_)));
  }

 private:
  struct Batch {
    std::vector<NearCopy> copies;
    std::vector<std::uint64_t> tags;
  };

  std::size_t take(std::span<Completion> completions) {
    std::size_t count = 0;
    for (; count < completions.size() && !completed_.empty(); ++count) {
      completions[count] = completed_.front();
      completed_.pop_front();
    }
    in_flight_ -= static_cast<std::uint32_t>(count);
    return count;
  }

  void work(const std::stop_token& stop) {
    while (true) {
      Batch batch;
      {
        std::unique_lock lock(mutex_);
        if (!work_.wait(lock, stop, [this] { return !waiting_.tags.empty(); })) return;
        std::swap(batch, waiting_);
      }
      near_.copy(batch.copies);
      {
        const std::lock_guard lock(mutex_);
        for (const std::uint64_t tag : batch.tags) completed_.push_back({.tag = tag, .error = 0});
      }
      done_.notify_one();
    }
  }

  std::byte* far_;
  std::uint64_t bytes_;
  NearMemory& near_;
  std::uint32_t depth_;
  Batch held_back_;              // the engine thread's, until flush()
  std::uint32_t in_flight_ = 0;  // the engine thread's: not yet taken
  std::mutex mutex_;
  std::condition_variable_any work_;
  std::condition_variable done_;
  Batch waiting_;
  std::deque<Completion> completed_;
  std::jthread thread_;  // last: it uses the others
};

}  // namespace

Result<std::unique_ptr<Port>> make_beside_port(std::uint64_t bytes, NearMemory& near, std::uint32_t depth) {
  DD_CHECK(bytes > 0 && depth > 0, "{} bytes, depth {}", bytes, depth);
  std::byte* const far = near.take_host_memory(bytes);
  if (far == nullptr) {
    return fail(ErrorCode::kOutOfMemory, "cannot take {} of host memory for the far tier; make it smaller",
                format_bytes(static_cast<double>(bytes)));
  }
  return std::make_unique<BesidePort>(far, bytes, near, depth);
}

}  // namespace dualdecoder
