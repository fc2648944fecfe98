// A port moves bytes between near slots and the far tier without making the caller wait: the one seam to
// everything slow. It knows offsets and buffers, not blocks, and decides nothing: what to move, in which
// order and how much at once is the planner's (transfer/transfers.h).
//
// Ports: memory (host_port.h), a file (file_port.h: io_uring, or threads where that is refused), and a
// simulated one with a virtual clock and faults (simulated_port.h). Used by one thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <sys/uio.h>

#include "base/error.h"

namespace dualdecoder {

/// Everything a port is given is a multiple of this: far offsets, near addresses, lengths.
inline constexpr std::size_t kPortAlignment = 4096;
/// Pieces of one copy at most: the system's limit for a vectored read or write.
inline constexpr std::size_t kPortSegmentsMax = 1024;

enum class CopyKind : std::uint8_t { kRead, kWrite };

/// One run of the far tier, and the near memory it goes to or comes from, piece by piece.
struct Copy {
  CopyKind kind = CopyKind::kRead;
  std::uint64_t far_offset = 0;     // bytes
  std::span<const iovec> segments;  // needed only during submit()
  std::uint64_t tag = 0;            // comes back with the completion
};

struct Completion {
  std::uint64_t tag = 0;
  /// 0, or the errno that ended it. A copy that moved less than was asked for without an errno is continued
  /// by the port; one that reaches the end of the file is EIO.
  int error = 0;
};

class Port {
 public:
  virtual ~Port() = default;

  /// Copies in flight at most.
  virtual std::uint32_t depth() const = 0;
  /// Starts a copy; returns without waiting for it. The caller keeps at most depth() in flight, and leaves
  /// the near memory alone until the completion. Copies complete in any order.
  virtual void submit(const Copy& copy) = 0;
  /// Hands over what is still held back for a common system call. poll() and wait() do it too.
  virtual void flush() = 0;
  /// Takes completions that are there; returns how many. Never blocks.
  virtual std::size_t poll(std::span<Completion> completions) = 0;
  /// The same, but waits for the first one, `timeout` at most. 0 only when nothing came in that time.
  virtual std::size_t wait(std::span<Completion> completions, std::chrono::nanoseconds timeout) = 0;
  /// For logs and plans, e.g. "file /data/kv (io_uring, direct)".
  virtual std::string description() const = 0;
};

}  // namespace dualdecoder
