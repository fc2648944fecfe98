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
#include <boost/asio/awaitable.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "serve/job.h"

namespace dualdecoder {

class EventQueue : public std::enable_shared_from_this<EventQueue> {
 public:
  using Events = std::vector<std::pair<std::uint32_t, JobEvent>>;
  using TimePoint = boost::asio::steady_timer::time_point;

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

  /// The HTTP thread: all that has come. Where that is nothing, waits for it until then, or until timer() is
  /// cancelled; it may still be nothing.
  boost::asio::awaitable<Events> next(TimePoint until) {
    timer_.expires_at(until);
    Events events = take();
    if (!events.empty()) co_return events;
    boost::system::error_code woken;
    co_await timer_.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, woken));
    co_return take();
  }
  boost::asio::steady_timer& timer() { return timer_; }

 private:
  Events take() {
    const std::lock_guard lock(mutex_);
    woken_ = false;
    return std::exchange(events_, {});
  }

  boost::asio::steady_timer timer_;  // the HTTP thread's; cancelled when something has come
  std::mutex mutex_;
  Events events_;       // guarded by mutex_
  bool woken_ = false;  // guarded by mutex_
};

}  // namespace dualdecoder
