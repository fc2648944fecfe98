#include "output_file.h"

#include <cerrno>

#include <fcntl.h>
#include <unistd.h>

#include "base/check.h"
#include "base/file.h"

namespace dualdecoder {
namespace {

constexpr std::size_t kNpyHeaderBytes = 128;  // room for any shape; a multiple of 64, as the format wants

std::string npy_header(std::size_t rows, std::size_t columns) {
  std::string text =
      fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", rows, columns);
  constexpr std::size_t kTextBytes = kNpyHeaderBytes - 10;
  DD_CHECK(text.size() < kTextBytes);
  text.resize(kTextBytes - 1, ' ');
  text.push_back('\n');
  std::string header("\x93NUMPY\x01\x00", 8);
  header.push_back(static_cast<char>(kTextBytes & 0xFF));
  header.push_back(static_cast<char>(kTextBytes >> 8));
  return header + text;
}

}  // namespace

Result<OutputFile> OutputFile::create(const std::string& path) {
  OutputFile file;
  file.path_ = path;
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (fd >= 0) file.file_.reset(fdopen(fd, "wb"));
  if (!file.file_) return fail(ErrorCode::kIo, "cannot write {}: {}", path, errno_text(errno));
  return file;
}

Status OutputFile::write(std::string_view bytes) {
  // Fails for what has no length, such as a terminal; that needs no cutting.
  if (!written_ && ftruncate(fileno(file_.get()), 0) != 0) errno = 0;
  written_ = true;
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) == bytes.size()) return {};
  return fail(ErrorCode::kIo, "cannot write {}: {}", path_, errno_text(errno));
}

Status OutputFile::overwrite_start(std::string_view bytes) {
  if (std::fseek(file_.get(), 0, SEEK_SET) != 0) {
    return fail(ErrorCode::kIo, "cannot seek in {}: {}", path_, errno_text(errno));
  }
  return write(bytes);
}

Status OutputFile::close() {
  if (std::fclose(file_.release()) == 0) return {};
  return fail(ErrorCode::kIo, "cannot write {}: {}", path_, errno_text(errno));
}

Result<NpyWriter> NpyWriter::create(const std::string& path) {
  auto file = OutputFile::create(path);
  if (!file) return std::unexpected(file.error());
  return NpyWriter(std::move(*file));
}

Status NpyWriter::add_row(std::span<const float> row) {
  if (rows_ == 0) {
    columns_ = row.size();
    if (Status status = file_.write(npy_header(0, columns_)); !status) return status;
  }
  DD_CHECK(row.size() == columns_, "{} of {}", row.size(), columns_);
  ++rows_;
  return file_.write({reinterpret_cast<const char*>(row.data()), row.size_bytes()});
}

Status NpyWriter::close() {
  if (Status status = file_.overwrite_start(npy_header(rows_, columns_)); !status) return status;
  return file_.close();
}

Status print_result(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return {};
  return fail(ErrorCode::kIo, "cannot write the result to standard output: {}", errno_text(errno));
}

}  // namespace dualdecoder
