#include "transfer/host_port.h"

#include <cerrno>
#include <utility>

#include "base/anonymous_memory.h"
#include "base/check.h"
#include "base/file.h"
#include "base/units.h"
#include "transfer/copy.h"
#include "transfer/fixed_queue.h"

namespace dualdecoder {
namespace {

class HostPort final : public Port {
 public:
  HostPort(AnonymousMemory memory, std::uint32_t depth)
      : memory_(std::move(memory)), depth_(depth), completed_(depth) {}

  std::uint32_t depth() const override { return depth_; }

  void submit(const Copy& copy) override {
    const std::uint64_t copy_bytes = checked_copy_bytes(copy);
    const bool fits = copy_fits(copy.far_offset, copy_bytes, memory_.bytes());
    if (fits) move_segments(copy.kind, copy.segments, memory_.data() + copy.far_offset, copy_bytes);
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
    return fmt::format("memory ({})", format_bytes(static_cast<double>(memory_.bytes())));
  }

 private:
  AnonymousMemory memory_;
  std::uint32_t depth_;
  FixedQueue<Completion> completed_;
};

}  // namespace

Result<std::unique_ptr<Port>> make_host_port(std::uint64_t bytes, std::uint32_t depth) {
  DD_CHECK(bytes > 0 && depth > 0, "{} bytes, depth {}", bytes, depth);
  AnonymousMemory memory = AnonymousMemory::map(bytes);
  if (memory.data() == nullptr) {
    return fail(ErrorCode::kOutOfMemory, "cannot map {} for the far tier: {}; make it smaller",
                format_bytes(static_cast<double>(bytes)), errno_text(errno));
  }
  return std::make_unique<HostPort>(std::move(memory), depth);
}

}  // namespace dualdecoder
