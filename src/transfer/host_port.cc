#include "transfer/host_port.h"

#include <cerrno>

#include <sys/mman.h>

#include "base/check.h"
#include "base/file.h"
#include "base/units.h"
#include "transfer/copy.h"
#include "transfer/fixed_queue.h"

namespace dualdecoder {
namespace {

class HostPort final : public Port {
 public:
  HostPort(std::byte* memory, std::uint64_t bytes, std::uint32_t depth)
      : memory_(memory), bytes_(bytes), depth_(depth), completed_(depth) {}
  ~HostPort() override { munmap(memory_, bytes_); }
  HostPort(const HostPort&) = delete;
  HostPort& operator=(const HostPort&) = delete;

  std::uint32_t depth() const override { return depth_; }

  void submit(const Copy& copy) override {
    const std::uint64_t copy_bytes = checked_copy_bytes(copy);
    const bool fits = copy_fits(copy.far_offset, copy_bytes, bytes_);
    if (fits) move_segments(copy.kind, copy.segments, memory_ + copy.far_offset, copy_bytes);
    completed_.push({.tag = copy.tag, .error = fits ? 0 : EIO});
  }

  void flush() override {}

  std::size_t poll(std::span<Completion> completions) override {
    std::size_t count = 0;
    while (count < completions.size() && !completed_.empty()) completions[count++] = completed_.pop();
    return count;
  }

  std::size_t wait(std::span<Completion> completions, std::chrono::nanoseconds /*timeout*/) override {
    return poll(completions);
  }

  std::string description() const override {
    return fmt::format("memory ({})", format_bytes(static_cast<double>(bytes_)));
  }

 private:
  std::byte* memory_;
  std::uint64_t bytes_;
  std::uint32_t depth_;
  FixedQueue<Completion> completed_;
};

}  // namespace

Result<std::unique_ptr<Port>> make_host_port(std::uint64_t bytes, std::uint32_t depth) {
  DD_CHECK(bytes > 0 && depth > 0, "{} bytes, depth {}", bytes, depth);
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return fail(ErrorCode::kOutOfMemory, "cannot map {} for the far tier: {}; make it smaller",
                format_bytes(static_cast<double>(bytes)), errno_text(errno));
  }
  // Only advice: without huge pages the far tier is slower, not wrong.
  madvise(memory, bytes, MADV_HUGEPAGE);
  return std::make_unique<HostPort>(static_cast<std::byte*>(memory), bytes, depth);
}

}  // namespace dualdecoder
