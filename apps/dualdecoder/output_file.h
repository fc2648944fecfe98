// Files that a command writes its results to. Opened before any work, so that a path that cannot be written
// is known at once and not after minutes; what an existing file holds stays until there is something to
// write. Every failure names the path.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace dualdecoder {

class OutputFile {
 public:
  static Result<OutputFile> create(const std::string& path);
  Status write(std::string_view bytes);
  /// Writes at the file's beginning, over what is there.
  Status overwrite_start(std::string_view bytes);
  /// Reports what buffering has hidden so far, e.g. a full disk.
  Status close();

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Closer> file_;
  bool written_ = false;
};

/// A NumPy .npy file (format 1.0) of float32 rows, written row by row. The first row sets the columns.
class NpyWriter {
 public:
  static Result<NpyWriter> create(const std::string& path);
  Status add_row(std::span<const float> row);
  Status close();

 private:
  explicit NpyWriter(OutputFile file) : file_(std::move(file)) {}
  OutputFile file_;
  std::size_t columns_ = 0;
  std::size_t rows_ = 0;
};

/// A command's result on stdout, all of it or an error.
Status print_result(std::string_view text);

}  // namespace dualdecoder
