#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>
#include <sched.h>

#include "base/check.h"
#include "transfer/copy.h"
#include "transfer/file_operation.h"
#include "transfer/file_port_kinds.h"
#include "transfer/fixed_queue.h"

namespace dualdecoder {
namespace {

/// Signals are for the threads that know what to do with them: blocks all while threads are made.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t previous_{};
};

class ThreadPort final : public Port {
 public:
  ThreadPort(const FarFile& file, std::uint32_t depth, std::string reason)
      : file_(file),
        fd_(file.fd()),
        depth_(depth),
        reason_(std::move(reason)),
        operations_(depth),
        staged_(depth),
        refused_(depth),
        queue_(depth),
        finished_(depth) {}
  ~ThreadPort() override;
  ThreadPort(const ThreadPort&) = delete;
  ThreadPort& operator=(const ThreadPort&) = delete;

  void start(std::uint32_t threads);

  std::uint32_t depth() const override { return depth_; }
  void submit(const Copy& copy) override;
  void flush() override;
  std::size_t poll(std::span<Completion> completions) override;
  std::size_t wait(std::span<Completion> completions, std::chrono::nanoseconds timeout) override;
  std::string description() const override;

 private:
  struct Finished {
    std::uint32_t index = 0;
    int error = 0;
  };
  void work();
  int move(FileOperation& operation) const;

  const FarFile& file_;  // not for the helper threads
  const int fd_;
  std::uint32_t depth_;
  std::string reason_;
  FileOperations operations_;
  FixedQueue<std::uint32_t> staged_;
  FixedQueue<Completion> refused_;

  std::mutex mutex_;  // guards queue_, finished_ and stopping_
  std::condition_variable work_to_do_;
  std::condition_variable something_finished_;
  FixedQueue<std::uint32_t> queue_;
  FixedQueue<Finished> finished_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

ThreadPort::~ThreadPort() {
  flush();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_to_do_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPort::start(std::uint32_t threads) {
  const SignalsBlocked blocked;
  // The caller may be pinned to one processor for its computations; these threads mostly sleep in the kernel.
  cpu_set_t all;
  CPU_ZERO(&all);
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &all);
  for (std::uint32_t i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { work(); });
    pthread_setaffinity_np(threads_.back().native_handle(), sizeof(all), &all);
    pthread_setname_np(threads_.back().native_handle(), "far-file");
  }
}

void ThreadPort::submit(const Copy& copy) {
  const std::uint64_t bytes = checked_copy_bytes(copy);
  if (!copy_fits(copy.far_offset, bytes, file_.bytes())) {
    refused_.push({.tag = copy.tag, .error = EIO});
    return;
  }
  staged_.push(operations_.take(copy, bytes));
}

void ThreadPort::flush() {
  const std::size_t count = staged_.size();
  if (count == 0) return;
  {
    const std::lock_guard lock(mutex_);
    while (!staged_.empty()) queue_.push(staged_.pop());
  }
  for (std::size_t i = 0; i < std::min(count, threads_.size()); ++i) work_to_do_.notify_one();
}

std::size_t ThreadPort::poll(std::span<Completion> completions) {
  return wait(completions, std::chrono::nanoseconds::zero());
}

std::size_t ThreadPort::wait(std::span<Completion> completions, std::chrono::nanoseconds timeout) {
  flush();
  std::size_t count = 0;
  while (count < completions.size() && !refused_.empty()) completions[count++] = refused_.pop();
  if (count == completions.size() || operations_.in_flight() == 0) return count;
  std::unique_lock lock(mutex_);
  if (count == 0 && timeout > std::chrono::nanoseconds::zero()) {
    const auto deadline = std::chrono::steady_clock::now() + std::min(timeout, kFileWaitMax);
    something_finished_.wait_until(lock, deadline, [this] { return !finished_.empty(); });
  }
  while (count < completions.size() && !finished_.empty()) {
    const Finished finished = finished_.pop();
    completions[count++] = {.tag = operations_[finished.index].tag, .error = finished.error};
    operations_.give_back(finished.index);
  }
  return count;
}

void ThreadPort::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_to_do_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::uint32_t index = queue_.pop();
    lock.unlock();
    const int error = move(operations_[index]);
    lock.lock();
    finished_.push({.index = index, .error = error});
    something_finished_.notify_one();
  }
}

int ThreadPort::move(FileOperation& operation) const {
  while (true) {
    const auto count = static_cast<int>(operation.segments.size());
    const auto offset = static_cast<off_t>(operation.far_offset);
    const ssize_t moved = operation.kind == CopyKind::kRead
                              ? preadv(fd_, operation.segments.data(), count, offset)
                              : pwritev(fd_, operation.segments.data(), count, offset);
    if (const auto error = operation.account(moved < 0 ? -errno : moved)) return *error;
  }
}

std::string ThreadPort::description() const {
  return fmt::format("file {} ({} threads, {}{}{})", file_.path(), threads_.size(),
                     file_.direct() ? "direct" : "page cache",
                     reason_.empty() ? "" : "; no io_uring: ", reason_);
}

}  // namespace

Result<std::unique_ptr<Port>> make_thread_port(const FarFile& file, const FilePortOptions& options,
                                               const std::string& reason) {
  DD_CHECK(options.threads > 0, "no threads");
  auto port = std::make_unique<ThreadPort>(file, options.depth, reason);
  try {
    port->start(options.threads);
  } catch (const std::system_error& error) {
    return fail(ErrorCode::kOutOfMemory, "cannot start {} threads for {}: {}", options.threads, file.path(),
                error.what());
  }
  return port;
}

}  // namespace dualdecoder
