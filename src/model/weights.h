// The tensors of a model where the matrix products read them. A matrix in one of the formats of
// products/products.h is packed for these. Any other goes, as in libllama, into one of the CPU backend's
// repacked buffers when that backend has a faster product for its type, and stays memory-mapped otherwise.
// Norms, biases and the embedding table stay mapped.
//
// With a device other than the CPU, matrices, norms and biases lie in its memory as they are in the file; the
// embedding table stays mapped, since rows are looked up by the host.
//
// Use in two phases: an architecture asks for its tensors by name and shape (product, vector, ...), which
// only records them; then load() allocates, repacks and makes their data valid. The first tensor that is
// missing or has another shape, or a type without an operation, is remembered, and load() returns it.
// Immutable after load().
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml.h>

#include "base/anonymous_memory.h"
#include "base/error.h"
#include "model/device.h"
#include "model/gguf_file.h"
#include "products/products.h"

namespace dualdecoder {

/// A matrix [inputs, outputs] for products, in one of two forms.
struct Matrix {
  ggml_tensor* tensor = nullptr;  // for ggml's products; null if packed for ours
  PackedMatrix packed;            // its data is null until load()
};

/// Matrices that multiply the same input, as one product.
struct MatrixGroup {
  std::vector<const Matrix*> matrices;
  std::vector<const PackedMatrix*> packed;  // of each; empty unless all are packed
};

class Weights {
 public:
  explicit Weights(const GgufFile& file, const Device& device = {});

  /// A matrix [inputs, outputs] for products. Owned by the weights.
  const Matrix* product(const std::string& name, std::int64_t inputs, std::int64_t outputs);
  /// The same matrix under a second role: `name` if the file has it, otherwise `fallback` (tied embeddings).
  const Matrix* product_or(const std::string& name, const std::string& fallback, std::int64_t inputs,
                           std::int64_t outputs);
  /// Matrices of the same inputs. Owned by the weights.
  const MatrixGroup* group(std::vector<const Matrix*> matrices);
  /// A table of which single rows are read.
  ggml_tensor* table(const std::string& name, std::int64_t width, std::int64_t rows);
  /// A norm's scale or a bias.
  ggml_tensor* vector(const std::string& name, std::int64_t elements);
  /// The same, or null when the file has none.
  ggml_tensor* optional_vector(const std::string& name, std::int64_t elements);

  /// Makes every recorded tensor valid. `progress` is called with bytes done of bytes in all.
  Status load(const std::function<void(std::size_t, std::size_t)>& progress);

  /// Whether the tensor is read where it lies in the file.
  bool is_mapped(const GgufTensor& tensor) const;
  /// Bytes in the memory of the device; 0 on the CPU.
  std::size_t device_bytes() const { return device_bytes_; }
  /// Bytes of packed matrices and in ggml's repacked buffers (resident memory beside the mapped file).
  std::size_t repacked_bytes() const { return repacked_bytes_; }
  /// Bytes of mapped tensors in use.
  std::size_t mapped_bytes() const { return mapped_bytes_; }
  std::size_t bytes() const { return device_bytes_ + repacked_bytes_ + mapped_bytes_; }

 private:
  struct Pool {  // tensors of one buffer type; a null type means the mapped file
    ggml_backend_buffer_type_t type = nullptr;
    ggml_context_ptr context;
    ggml_backend_buffer_ptr buffer;
    std::vector<std::pair<ggml_tensor*, const GgufTensor*>> tensors;
  };

  enum class Role { kProduct, kTable, kVector };

  const GgufTensor* find(const std::string& name, std::initializer_list<std::int64_t> shape, Role role);
  ggml_tensor* record(const GgufTensor& entry, ggml_backend_buffer_type_t type);
  ggml_tensor* record(const std::string& name, std::initializer_list<std::int64_t> shape, Role role);
  bool has_operation(const GgufTensor& tensor, Role role) const;
  Pool& pool_for(ggml_backend_buffer_type_t type);
  ggml_backend_buffer_type_t repacked_type_for(const GgufTensor& tensor) const;
  Status load_pool(Pool& pool, const std::function<void(std::size_t)>& done);
  Status load_packed(const std::function<void(std::size_t)>& done);

  const GgufFile& file_;
  Device device_;
  std::vector<ggml_backend_buffer_type_t> extra_types_;
  std::vector<std::unique_ptr<Pool>> pools_;
  std::deque<Matrix> matrices_;
  std::deque<MatrixGroup> groups_;
  std::vector<std::pair<PackedMatrix*, const GgufTensor*>> packed_;
  AnonymousMemory packed_memory_;
  Status first_error_;
  std::size_t device_bytes_ = 0;
  std::size_t repacked_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;
};

}  // namespace dualdecoder
