// Small helpers around files: descriptors that close themselves, whole-file reads, read-only mappings.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/error.h"

namespace dualdecoder {

/// A file descriptor with one owner.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

/// The text of errno, e.g. "No such file or directory".
std::string errno_text(int error);

/// Opens a regular file for reading; anything else (a directory, a pipe) is an error that says so.
Result<FileDescriptor> open_regular_file(const std::string& path);
Result<std::size_t> file_bytes(const FileDescriptor& fd, const std::string& path);

/// Reads a whole file; "-" is standard input.
Result<std::string> read_text_file(const std::string& path);

/// A read-only mapping of a whole file. If the file is truncated by somebody else while it is mapped,
/// touching the lost part prints one line and ends the process with exit code 1 instead of dying of SIGBUS.
class MappedFile {
 public:
  static Result<MappedFile> map(const std::string& path);
  MappedFile() = default;
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept { swap(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    swap(other);
    return *this;
  }
  const std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// Gives the pages of [offset, offset + bytes) back to the system; they are read again from the file when
  /// touched.
  void drop_pages(std::size_t offset, std::size_t bytes) const;

 private:
  void swap(MappedFile& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  const std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace dualdecoder
