// A port in front of another that makes it as slow as a link: a copy occupies the link for its bytes at the
// bandwidth, one copy after the other, and ends a latency later. For seeing, in real time and with real
// compute beside it, what a policy gives on a link that this machine does not have. Used by one thread.
#pragma once

#include <chrono>
#include <memory>

#include "transfer/port.h"

namespace dualdecoder {

struct Link {
  double bytes_per_s = 0.0;
  std::chrono::nanoseconds latency{0};
};

/// `inner` completes its copies at once, as memory does (host_port.h).
std::unique_ptr<Port> make_paced_port(std::unique_ptr<Port> inner, const Link& link);

}  // namespace dualdecoder
