#include "transfer/far_file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/check.h"
#include "base/hash.h"
#include "base/units.h"
#include "transfer/port.h"

namespace dualdecoder {
namespace {

constexpr std::uint64_t kExtentBytes = std::uint64_t{64} << 20;
constexpr int kLockAttemptsMax = 100;

static_assert(sizeof(kFarFileMagic) - 1 == sizeof(FarFileHeader::magic));
static_assert(offsetof(FarFileHeader, checksum) + sizeof(std::uint64_t) == sizeof(FarFileHeader));

std::string parent_of(const std::string& path) { return std::filesystem::path(path).parent_path().string(); }

Status check_directory(const std::string& directory) {
  struct stat status {};
  if (stat(directory.c_str(), &status) != 0) {
    const ErrorCode code = errno == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo;
    return fail(code, "cannot use \"{}\" for the far tier: {}; create the directory or name another",
                directory, errno_text(errno));
  }
  if (!S_ISDIR(status.st_mode)) {
    return fail(ErrorCode::kInvalidArgument, "\"{}\" is not a directory; the far tier needs one for its file",
                directory);
  }
  return {};
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/// Whether `path` still leads to the file behind `fd`.
bool leads_to(const std::string& path, int fd) {
  struct stat of_fd {};
  struct stat of_path {};
  return fstat(fd, &of_fd) == 0 && lstat(path.c_str(), &of_path) == 0 && same_file(of_fd, of_path);
}

Status check_regular(const struct stat& status, const std::string& path) {
  if (S_ISREG(status.st_mode)) return {};
  return fail(ErrorCode::kInvalidArgument, "{} is {}, not a file of dualdecoder; name another directory",
              path, S_ISDIR(status.st_mode) ? "a directory" : "a special file");
}

bool has_our_magic(int fd) {
  std::array<char, sizeof(FarFileHeader::magic)> magic{};
  ssize_t count = 0;
  do {
    count = pread(fd, magic.data(), magic.size(), 0);
  } while (count < 0 && errno == EINTR);
  return count == static_cast<ssize_t>(magic.size()) &&
         std::memcmp(magic.data(), kFarFileMagic, magic.size()) == 0;
}

std::string free_space(int fd) {
  struct statvfs status {};
  if (fstatvfs(fd, &status) != 0) return "unknown";
  return format_bytes(static_cast<double>(status.f_bavail) * static_cast<double>(status.f_frsize));
}

int try_truncate(int fd, std::uint64_t bytes) {
  int result = 0;
  do {
    result = ftruncate(fd, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

}  // namespace

Result<std::unique_ptr<FarFile>> FarFile::open(const std::string& directory, const FarIdentity& identity,
                                               std::uint64_t page_bytes, std::uint32_t pages_max, bool keep) {
  DD_CHECK(page_bytes > 0 && page_bytes % kPortAlignment == 0, "page of {} bytes", page_bytes);
  constexpr auto kFileBytesMax = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (pages_max > (kFileBytesMax - kFarHeaderBytes) / page_bytes) {
    return fail(ErrorCode::kInvalidArgument,
                "a far tier of {} pages of {} bytes is more than a file can hold", pages_max, page_bytes);
  }
  if (auto status = check_directory(directory); !status) return std::unexpected(status.error());
  const char* const name = keep ? "prefixes.dualdecoder" : "kv.dualdecoder";
  std::unique_ptr<FarFile> file(
      new FarFile((std::filesystem::path(directory) / name).string(), page_bytes, pages_max, keep));
  const FarFileHeader header = file->header_for(identity);
  auto status = file->lock(header);
  if (status) status = file->open_for_copies();
  if (status && !file->taken_up_) status = file->write_header(header);
  if (!status) return std::unexpected(status.error());
  return file;
}

FarFile::~FarFile() {
  // Still under the lock: nobody else can put a file of his own there between the check and the removal.
  if (!keep_ && lock_fd_.get() >= 0 && leads_to(path_, lock_fd_.get())) unlink(path_.c_str());
}

/// Whether the file is one to go on with: then its pages are ours, as many as may be.
bool FarFile::take_up(int fd, const FarFileHeader& header, std::uint64_t bytes) {
  FarFileHeader found{};
  ssize_t count = 0;
  do {
    count = pread(fd, &found, sizeof(found), 0);
  } while (count < 0 && errno == EINTR);
  if (count != sizeof(found) || std::memcmp(&found, &header, sizeof(header)) != 0) return false;
  const std::uint64_t pages = bytes < kFarHeaderBytes ? 0 : (bytes - kFarHeaderBytes) / page_bytes_;
  pages_reserved_ = static_cast<std::uint32_t>(std::min<std::uint64_t>(pages, pages_max_));
  // What is cut off here holds no page, or more than the limit now allows.
  if (try_truncate(fd, page_offset(pages_reserved_)) != 0) return false;
  taken_up_ = true;
  return true;
}

/// Leaves in lock_fd_ a file, locked, to which path_ leads: an empty one, or one to go on with.
Status FarFile::lock(const FarFileHeader& header) {
  for (int attempt = 0; attempt < kLockAttemptsMax; ++attempt) {
    FileDescriptor fd(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (fd.get() < 0) {
      return fail(ErrorCode::kIo, "cannot create {}: {}; make the directory writable or name another", path_,
                  errno_text(errno));
    }
    struct stat status {};
    if (fstat(fd.get(), &status) != 0) {
      return fail(ErrorCode::kIo, "cannot stat {}: {}", path_, errno_text(errno));
    }
    if (auto regular = check_regular(status, path_); !regular) return regular;
    if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno == EWOULDBLOCK) {
        return fail(ErrorCode::kIo, "another dualdecoder uses {}; stop it or name another directory",
                    parent_of(path_));
      }
      return fail(ErrorCode::kIo, "cannot lock {}: {}", path_, errno_text(errno));
    }
    // The owner of that name may have changed between open() and flock().
    if (!leads_to(path_, fd.get()) || fstat(fd.get(), &status) != 0) continue;
    if (status.st_size == 0) {
      lock_fd_ = std::move(fd);
      return {};
    }
    if (!has_our_magic(fd.get())) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} exists and is not a file of dualdecoder; move it away or name another directory",
                  path_);
    }
    if (keep_ && take_up(fd.get(), header, static_cast<std::uint64_t>(status.st_size))) {
      lock_fd_ = std::move(fd);
      return {};
    }
    if (unlink(path_.c_str()) != 0) {
      return fail(ErrorCode::kIo, "cannot remove {}, left by an earlier process: {}", path_,
                  errno_text(errno));
    }
    leftover_bytes_ += static_cast<std::uint64_t>(status.st_size);
  }
  return fail(ErrorCode::kIo, "cannot lock {}: it is removed and made again all the time", path_);
}

Status FarFile::open_for_copies() {
  fd_ = FileDescriptor(::open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (fd_.get() < 0) return fail(ErrorCode::kIo, "cannot open {}: {}", path_, errno_text(errno));
  if (!leads_to(path_, lock_fd_.get()) || !leads_to(path_, fd_.get())) {
    return fail(ErrorCode::kIo, "{} was replaced while it was opened; start again", path_);
  }
  direct_ = fcntl(fd_.get(), F_SETFL, O_DIRECT) == 0;
  return {};
}

FarFileHeader FarFile::header_for(const FarIdentity& identity) const {
  FarFileHeader header{};
  std::memcpy(header.magic, kFarFileMagic, sizeof(header.magic));
  header.layout_version = kFarLayoutVersion;
  header.kv_type = kFarKvTypeF16;
  header.weights_hash = identity.weights_hash;
  header.layers = identity.geometry.layers;
  header.kv_heads = identity.geometry.kv_heads;
  header.head_dim = identity.geometry.head_dim;
  header.block_tokens = identity.geometry.block_tokens;
  header.page_bytes = page_bytes_;
  header.checksum = hash_bytes(std::as_bytes(std::span(&header, 1)).first(offsetof(FarFileHeader, checksum)));
  return header;
}

Status FarFile::write_header(const FarFileHeader& header) {
  alignas(kPortAlignment) std::array<std::byte, kFarHeaderBytes> buffer{};
  std::memcpy(buffer.data(), &header, sizeof(header));
  ssize_t count = 0;
  while (true) {
    count = pwrite(fd_.get(), buffer.data(), buffer.size(), 0);
    if (count >= 0) break;
    if (errno == EINTR) continue;
    // Some file systems take the flag and refuse the write.
    if (errno != EINVAL || !direct_) break;
    direct_ = fcntl(fd_.get(), F_SETFL, 0) != 0;
    DD_CHECK(!direct_, "{}: {}", path_, errno_text(errno));
  }
  if (count != static_cast<ssize_t>(buffer.size())) {
    const int error = count < 0 ? errno : ENOSPC;
    return fail(ErrorCode::kIo, "cannot write {}: {} ({} free)", path_, errno_text(error),
                free_space(fd_.get()));
  }
  // On disk before any page: after a power cut the next start must know the file as ours.
  if (fdatasync(fd_.get()) != 0) {
    return fail(ErrorCode::kIo, "cannot write {}: {}", path_, errno_text(errno));
  }
  return {};
}

/// 0 or the errno. Gives back what a failed attempt took.
int FarFile::try_grow(std::uint32_t pages) {
  const std::uint64_t old_bytes = bytes();
  const std::uint64_t new_bytes = page_offset(pages);
  int result = 0;
  do {
    result =
        fallocate(fd_.get(), 0, static_cast<off_t>(old_bytes), static_cast<off_t>(new_bytes - old_bytes));
  } while (result != 0 && errno == EINTR);
  int error = result == 0 ? 0 : errno;
  if (error == EOPNOTSUPP || error == ENOSYS) {
    error = try_truncate(fd_.get(), new_bytes);
  } else if (error != 0) {
    try_truncate(fd_.get(), old_bytes);
  }
  if (error == 0) pages_reserved_ = pages;
  return error;
}

Status FarFile::reserve(std::uint32_t pages) {
  DD_CHECK(pages <= pages_max_, "{} of {} pages", pages, pages_max_);
  if (pages <= pages_reserved_) return {};
  const std::uint64_t extent_pages = std::max<std::uint64_t>(1, kExtentBytes / page_bytes_);
  const std::uint64_t extent_end = (std::uint64_t{pages} + extent_pages - 1) / extent_pages * extent_pages;
  const auto wanted = static_cast<std::uint32_t>(std::min<std::uint64_t>(extent_end, pages_max_));
  if (wanted > pages && try_grow(wanted) == 0) return {};
  const int error = try_grow(pages);
  if (error == 0) return {};
  return fail(ErrorCode::kIo,
              "cannot grow {} by {}: {} ({} free); free space there or make the far tier smaller", path_,
              format_bytes(static_cast<double>(page_offset(pages) - bytes())), errno_text(error),
              free_space(fd_.get()));
}

}  // namespace dualdecoder
