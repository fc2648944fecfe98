// A first-in-first-out queue that allocates once. Holds at most `capacity` values; a push beyond that is our
// mistake. No threads: the owner guards it.
#pragma once

#include <cstddef>
#include <vector>

#include "base/check.h"

namespace dualdecoder {

template <typename T>
class FixedQueue {
 public:
  explicit FixedQueue(std::size_t capacity) : values_(capacity) {}

  bool empty() const { return count_ == 0; }
  std::size_t size() const { return count_; }

  void push(T value) {
    DD_CHECK(count_ < values_.size(), "queue of {} is full", values_.size());
    values_[(first_ + count_) % values_.size()] = value;
    ++count_;
  }

  const T& front() const {
    DD_CHECK(count_ > 0, "queue is empty");
    return values_[first_];
  }

  T pop() {
    DD_CHECK(count_ > 0, "queue is empty");
    const T value = values_[first_];
    first_ = (first_ + 1) % values_.size();
    --count_;
    return value;
  }

 private:
  std::vector<T> values_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

}  // namespace dualdecoder
