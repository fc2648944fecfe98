// A GGUF file, checked and mapped. open() reads the header through ggml's own reader and then proves what
// that reader takes on trust: that every tensor's data lie inside the file and that every key we or
// libllama's tokeniser read has the right type, so that a truncated or damaged file is one clear error and
// never a signal.
//
// The mapping is read-only and lives as long as the object (base/file.h says what happens when the file
// changes under it). Immutable after open(): any thread may read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ggml.h>
#include <gguf.h>

#include "base/error.h"
#include "base/file.h"

namespace dualdecoder {

struct GgufTensor {
  std::string name;
  ggml_type type = GGML_TYPE_F32;
  std::array<std::int64_t, GGML_MAX_DIMS> shape{};  // ggml's order: fastest dimension first
  std::size_t bytes = 0;
  std::size_t offset = 0;  // from the start of the file
};

class GgufFile {
 public:
  static Result<std::unique_ptr<GgufFile>> open(const std::string& path);
  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  const std::string& path() const { return path_; }
  const MappedFile& mapping() const { return mapping_; }

  /// Typed reads of one metadata key. Integers of any width and sign are accepted where the value fits. A
  /// missing key is kNotFound, another type kCorrupt; both messages name the file and the key.
  Result<std::uint32_t> u32(const std::string& key) const;
  Result<float> f32(const std::string& key) const;
  Result<std::string> string(const std::string& key) const;
  /// As above, with a value for a missing key. A present key of another type is still an error.
  Result<std::uint32_t> u32_or(const std::string& key, std::uint32_t missing) const;
  Result<float> f32_or(const std::string& key, float missing) const;
  Result<std::string> string_or(const std::string& key, const std::string& missing) const;
  bool has(const std::string& key) const;
  /// The array's length, after checking its element type.
  Result<std::size_t> array_length(const std::string& key, gguf_type element) const;
  /// The index of the first entry of an array of strings that repeats an earlier one. Empty entries do not
  /// count.
  std::optional<std::size_t> first_repeated(const std::string& key) const;
  /// An array of bool or integers, or one integer repeated `length` times; nullopt when the key is missing.
  Result<std::optional<std::vector<std::uint32_t>>> u32_list(const std::string& key,
                                                             std::size_t length) const;

  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* find_tensor(const std::string& name) const;

 private:
  GgufFile() = default;
  Status read_tensors();
  Result<std::int64_t> find_key(const std::string& key) const;
  std::unexpected<Error> wrong_type(const std::string& key, const char* wanted) const;

  std::string path_;
  MappedFile mapping_;
  gguf_context* gguf_ = nullptr;
  std::vector<GgufTensor> tensors_;
};

}  // namespace dualdecoder
