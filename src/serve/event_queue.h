// Events of a request's jobs on their way from the engine's thread to the HTTP thread. The only place where
// the two meet. Bounded by what the jobs may make: a few dozen bytes a token.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

#include "serve/job.h"

namespace dualdecoder {

class EventQueue : public std::enable_shared_from_this<EventQueue> {
 public:
  explicit EventQueue(const boost::asio::any_io_executor& executor) : timer_(executor) {}

  /// The engine's thread.
  void push(std::uint32_t choice, JobEvent event) {
    {
      const std::lock_guard lock(mutex_);
      events_.emplace_back(choice, std::move(event));
      if (std::exchange(woken_, true)) return;
    }
    boost::asio::post(timer_.get_executor(), [self = shared_from_this()] { self->timer_.cancel(); });
  }

  /// The HTTP thread: all that came, perhaps nothing.
  std::vector<std::pair<std::uint32_t, JobEvent>> take() {
    const std::lock_guard lock(mutex_);
    woken_ = false;
    return std::exchange(events_, {});
  }
  /// Wait on it; it is cancelled when there is something to take.
  boost::asio::steady_timer& timer() { return timer_; }

 private:
  boost::asio::steady_timer timer_;  // the HTTP thread's
  std::mutex mutex_;
  std::vector<std::pair<std::uint32_t, JobEvent>> events_;  // guarded by mutex_
  bool woken_ = false;                                      // guarded by mutex_
};

}  // namespace dualdecoder
