#include "base/file.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace dualdecoder {
namespace {

// The live mappings, for the SIGBUS handler: plain atomics, because a handler may touch nothing else.
struct MappedRange {
  std::atomic<std::uintptr_t> begin{0};
  std::atomic<std::uintptr_t> end{0};
};
constexpr std::size_t kMappedRangesMax = 64;
std::array<MappedRange, kMappedRangesMax> mapped_ranges;
struct sigaction previous_sigbus;

void on_sigbus(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const MappedRange& range : mapped_ranges) {
    if (address >= range.begin.load() && address < range.end.load()) {
      constexpr char kMessage[] =
          "dualdecoder: the model file changed or became unreadable while in use; put it back and start "
          "again\n";
      [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
      _exit(1);
    }
  }
  if ((previous_sigbus.sa_flags & SA_SIGINFO) != 0 && previous_sigbus.sa_sigaction != nullptr) {
    previous_sigbus.sa_sigaction(signal, info, context);
    return;
  }
  std::signal(signal, SIG_DFL);
  raise(signal);
}

void register_mapping(const std::byte* data, std::size_t bytes) {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGBUS, &action, &previous_sigbus) == 0;
  }();
  (void)installed;
  for (MappedRange& range : mapped_ranges) {
    std::uintptr_t expected = 0;
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    if (range.begin.compare_exchange_strong(expected, begin)) {
      range.end.store(begin + bytes);
      return;
    }
  }
}

void unregister_mapping(const std::byte* data) {
  for (MappedRange& range : mapped_ranges) {
    if (range.begin.load() == reinterpret_cast<std::uintptr_t>(data)) {
      range.end.store(0);
      range.begin.store(0);
      return;
    }
  }
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

std::string errno_text(int error) {
  std::array<char, 256> buffer{};
  return strerror_r(error, buffer.data(), buffer.size());
}

Result<FileDescriptor> open_regular_file(const std::string& path) {
  FileDescriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) {
    const ErrorCode code = errno == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo;
    return fail(code, "cannot open {}: {}", path, errno_text(errno));
  }
  struct stat status {};
  if (fstat(fd.get(), &status) != 0)
    return fail(ErrorCode::kIo, "cannot stat {}: {}", path, errno_text(errno));
  if (!S_ISREG(status.st_mode)) {
    return fail(ErrorCode::kInvalidArgument, "{} is {}, not a file", path,
                S_ISDIR(status.st_mode) ? "a directory" : "a special file");
  }
  return fd;
}

Result<std::size_t> file_bytes(const FileDescriptor& fd, const std::string& path) {
  struct stat status {};
  if (fstat(fd.get(), &status) != 0)
    return fail(ErrorCode::kIo, "cannot stat {}: {}", path, errno_text(errno));
  return static_cast<std::size_t>(status.st_size);
}

Result<std::string> read_text_file(const std::string& path) {
  FileDescriptor fd;
  if (path == "-") {
    fd = FileDescriptor(dup(STDIN_FILENO));
  } else {
    auto opened = open_regular_file(path);
    if (!opened) return std::unexpected(opened.error());
    fd = std::move(*opened);
  }
  std::string text;
  std::array<char, 1 << 16> buffer{};
  while (true) {
    const ssize_t count = read(fd.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return fail(ErrorCode::kIo, "cannot read {}: {}", path, errno_text(errno));
    if (count == 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
}

Result<MappedFile> MappedFile::map(const std::string& path) {
  auto fd = open_regular_file(path);
  if (!fd) return std::unexpected(fd.error());
  const auto bytes = file_bytes(*fd, path);
  if (!bytes) return std::unexpected(bytes.error());
  if (*bytes == 0) return fail(ErrorCode::kCorrupt, "{} is empty", path);
  void* address = mmap(nullptr, *bytes, PROT_READ, MAP_SHARED, fd->get(), 0);
  if (address == MAP_FAILED) return fail(ErrorCode::kIo, "cannot map {}: {}", path, errno_text(errno));
  MappedFile file;
  file.data_ = static_cast<const std::byte*>(address);
  file.bytes_ = *bytes;
  register_mapping(file.data_, file.bytes_);
  return file;
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  unregister_mapping(data_);
  munmap(const_cast<std::byte*>(data_), bytes_);
}

void MappedFile::drop_pages(std::size_t offset, std::size_t bytes) const {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t begin = (offset + page - 1) / page * page;
  const std::size_t end = std::min(offset + bytes, bytes_) / page * page;
  if (begin < end) madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_DONTNEED);
}

}  // namespace dualdecoder
