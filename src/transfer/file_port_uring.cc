#include <algorithm>
#include <cerrno>

#include <liburing.h>

#include "base/check.h"
#include "base/file.h"
#include "transfer/copy.h"
#include "transfer/file_operation.h"
#include "transfer/file_port_kinds.h"
#include "transfer/fixed_queue.h"

namespace dualdecoder {
namespace {

/// The kernel's limit for one registered buffer.
constexpr std::size_t kRegisteredBytesMax = std::size_t{1} << 30;

class UringPort final : public Port {
 public:
  UringPort(const FarFile& file, std::uint32_t depth)
      : file_(file), depth_(depth), operations_(depth), refused_(depth) {}
  ~UringPort() override;
  UringPort(const UringPort&) = delete;
  UringPort& operator=(const UringPort&) = delete;

  /// 0 or the errno.
  int start();
  void register_with_kernel(std::span<std::byte> near_memory, bool register_memory);

  std::uint32_t depth() const override { return depth_; }
  void submit(const Copy& copy) override;
  void flush() override;
  std::size_t poll(std::span<Completion> completions) override;
  std::size_t wait(std::span<Completion> completions, std::chrono::nanoseconds timeout) override;
  std::string description() const override;

 private:
  void enqueue(std::uint32_t index);
  std::size_t take(std::span<Completion> completions);
  void wait_for_kernel(std::chrono::nanoseconds timeout);
  int registered_piece(const iovec& segment) const;

  const FarFile& file_;
  std::uint32_t depth_;
  FileOperations operations_;
  FixedQueue<Completion> refused_;
  io_uring ring_{};
  bool started_ = false;
  bool file_registered_ = false;
  std::span<std::byte> registered_;  // in pieces of kRegisteredBytesMax
  int register_error_ = 0;
};

UringPort::~UringPort() {
  if (!started_) return;
  // The kernel still writes to near memory for what is in flight.
  Completion completion;
  while (operations_.in_flight() > 0) wait({&completion, 1}, kFileWaitMax);
  io_uring_queue_exit(&ring_);
}

int UringPort::start() {
  io_uring_params parameters{};
  const int result = io_uring_queue_init_params(depth_, &ring_, &parameters);
  if (result < 0) return -result;
  // Waiting with a timeout without a request of its own (Linux 5.11).
  if ((parameters.features & IORING_FEAT_EXT_ARG) == 0) {
    io_uring_queue_exit(&ring_);
    return ENOSYS;
  }
  started_ = true;
  return 0;
}

void UringPort::register_with_kernel(std::span<std::byte> near_memory, bool register_memory) {
  const int fd = file_.fd();
  file_registered_ = io_uring_register_files(&ring_, &fd, 1) == 0;
  if (!register_memory || near_memory.empty()) return;
  std::vector<iovec> pieces;
  for (std::size_t begin = 0; begin < near_memory.size(); begin += kRegisteredBytesMax) {
    const std::size_t bytes = std::min(kRegisteredBytesMax, near_memory.size() - begin);
    pieces.push_back({.iov_base = near_memory.data() + begin, .iov_len = bytes});
  }
  const int result = io_uring_register_buffers(&ring_, pieces.data(), static_cast<unsigned>(pieces.size()));
  if (result == 0) {
    registered_ = near_memory;
  } else {
    register_error_ = -result;
  }
}

void UringPort::submit(const Copy& copy) {
  const std::uint64_t bytes = checked_copy_bytes(copy);
  if (!copy_fits(copy.far_offset, bytes, file_.bytes())) {
    refused_.push({.tag = copy.tag, .error = EIO});
    return;
  }
  enqueue(operations_.take(copy, bytes));
}

/// The registered piece that holds the segment, or -1.
int UringPort::registered_piece(const iovec& segment) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(registered_.data());
  const auto address = reinterpret_cast<std::uintptr_t>(segment.iov_base);
  if (address < begin || !copy_fits(address - begin, segment.iov_len, registered_.size())) return -1;
  const std::size_t first = (address - begin) / kRegisteredBytesMax;
  const std::size_t last = (address - begin + segment.iov_len - 1) / kRegisteredBytesMax;
  return first == last ? static_cast<int>(first) : -1;
}

void UringPort::enqueue(std::uint32_t index) {
  FileOperation& operation = operations_[index];
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  DD_CHECK(sqe != nullptr, "no room for {} copies in the submission queue", operations_.in_flight());
  const iovec& first = operation.segments.front();
  const auto count = static_cast<unsigned>(operation.segments.size());
  const int piece = count == 1 ? registered_piece(first) : -1;
  const int fd = file_registered_ ? 0 : file_.fd();
  const bool read = operation.kind == CopyKind::kRead;
  if (piece >= 0) {
    const auto bytes = static_cast<unsigned>(first.iov_len);
    if (read) {
      io_uring_prep_read_fixed(sqe, fd, first.iov_base, bytes, operation.far_offset, piece);
    } else {
      io_uring_prep_write_fixed(sqe, fd, first.iov_base, bytes, operation.far_offset, piece);
    }
  } else if (read) {
    io_uring_prep_readv(sqe, fd, operation.segments.data(), count, operation.far_offset);
  } else {
    io_uring_prep_writev(sqe, fd, operation.segments.data(), count, operation.far_offset);
  }
  if (file_registered_) io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data64(sqe, index);
}

void UringPort::flush() {
  while (io_uring_sq_ready(&ring_) > 0) {
    const int result = io_uring_submit(&ring_);
    if (result >= 0 || result == -EINTR) continue;
    // The kernel is short of memory or of completion slots; what is held back goes with the next call.
    if (result == -EAGAIN || result == -EBUSY || result == -ENOMEM) return;
    DD_CHECK(false, "io_uring_submit: {}", errno_text(-result));
  }
}

std::size_t UringPort::take(std::span<Completion> completions) {
  std::size_t count = 0;
  while (count < completions.size() && !refused_.empty()) completions[count++] = refused_.pop();
  while (count < completions.size()) {
    io_uring_cqe* cqe = nullptr;
    if (io_uring_peek_cqe(&ring_, &cqe) != 0) break;
    const auto index = static_cast<std::uint32_t>(io_uring_cqe_get_data64(cqe));
    const int result = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    FileOperation& operation = operations_[index];
    if (const auto error = operation.account(result)) {
      completions[count++] = {.tag = operation.tag, .error = *error};
      operations_.give_back(index);
    } else {
      enqueue(index);
    }
  }
  flush();
  return count;
}

std::size_t UringPort::poll(std::span<Completion> completions) {
  flush();
  return take(completions);
}

std::size_t UringPort::wait(std::span<Completion> completions, std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + std::min(timeout, kFileWaitMax);
  while (true) {
    const std::size_t count = poll(completions);
    if (count > 0 || completions.empty() || operations_.in_flight() == 0) return count;
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds::zero()) return 0;
    wait_for_kernel(left);
  }
}

void UringPort::wait_for_kernel(std::chrono::nanoseconds timeout) {
  // Copies that the kernel did not take yet are offered again soon.
  if (io_uring_sq_ready(&ring_) > 0)
    timeout = std::min<std::chrono::nanoseconds>(timeout, std::chrono::milliseconds(1));
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  __kernel_timespec limit{.tv_sec = seconds.count(), .tv_nsec = (timeout - seconds).count()};
  io_uring_cqe* cqe = nullptr;
  const int result = io_uring_wait_cqe_timeout(&ring_, &cqe, &limit);
  DD_CHECK(result == 0 || result == -ETIME || result == -EINTR || result == -EAGAIN, "io_uring_wait_cqe: {}",
           errno_text(-result));
}

std::string UringPort::description() const {
  std::string text =
      fmt::format("file {} (io_uring, {}", file_.path(), file_.direct() ? "direct" : "page cache");
  if (!registered_.empty()) text += ", registered";
  if (register_error_ != 0) text += fmt::format(", not registered: {}", errno_text(register_error_));
  return text + ")";
}

}  // namespace

Result<std::unique_ptr<Port>> make_uring_port(const FarFile& file, std::span<std::byte> near_memory,
                                              const FilePortOptions& options) {
  auto port = std::make_unique<UringPort>(file, options.depth);
  if (const int error = port->start(); error != 0) {
    return fail(ErrorCode::kUnsupported, "{}", errno_text(error));
  }
  port->register_with_kernel(near_memory, options.register_memory);
  return port;
}

}  // namespace dualdecoder
