#include "model/weights.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>

#include <ggml-cpu.h>

#include <fmt/ranges.h>

#include "base/check.h"

namespace dualdecoder {
namespace {

ggml_backend_dev_t cpu_device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

std::vector<ggml_backend_buffer_type_t> extra_buffer_types() {
  using GetExtraTypes = ggml_backend_buffer_type_t* (*)(ggml_backend_dev_t);
  ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(cpu_device());
  auto get = reinterpret_cast<GetExtraTypes>(
      ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts"));
  std::vector<ggml_backend_buffer_type_t> types;
  for (auto* type = get == nullptr ? nullptr : get(cpu_device()); type != nullptr && *type != nullptr;
       ++type) {
    types.push_back(*type);
  }
  return types;
}

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;
constexpr unsigned kPackThreads = 8;  // beyond these it is memory that limits

std::size_t aligned(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::optional<WeightFormat> weight_format(ggml_type type) {
  switch (type) {
    case GGML_TYPE_Q4_0:
      return WeightFormat::kQ4_0;
    case GGML_TYPE_Q4_1:
      return WeightFormat::kQ4_1;
    case GGML_TYPE_Q5_0:
      return WeightFormat::kQ5_0;
    case GGML_TYPE_Q5_1:
      return WeightFormat::kQ5_1;
    case GGML_TYPE_Q8_0:
      return WeightFormat::kQ8_0;
    case GGML_TYPE_Q4_K:
      return WeightFormat::kQ4_K;
    case GGML_TYPE_Q5_K:
      return WeightFormat::kQ5_K;
    case GGML_TYPE_Q6_K:
      return WeightFormat::kQ6_K;
    default:
      return std::nullopt;
  }
}

ggml_context_ptr tensor_context(std::size_t tensors) {
  return ggml_context_ptr(
      ggml_init({.mem_size = tensors * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true}));
}

// Whether the device multiplies by such a matrix in a buffer of this type.
bool supports_product(ggml_backend_dev_t device, ggml_backend_buffer_type_t type, const GgufTensor& tensor) {
  const ggml_context_ptr context = tensor_context(4);
  ggml_tensor* weight = ggml_new_tensor_2d(context.get(), tensor.type, tensor.shape[0], tensor.shape[1]);
  ggml_tensor* input = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, tensor.shape[0], 512);
  ggml_tensor* operation = ggml_mul_mat(context.get(), weight, input);
  const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(type, 0));
  weight->buffer = empty.get();
  const bool supported = ggml_backend_dev_supports_op(device, operation);
  weight->buffer = nullptr;
  return supported;
}

}  // namespace

Weights::Weights(const GgufFile& file, const Device& device)
    : file_(file), device_(device), extra_types_(extra_buffer_types()) {}

const Matrix* Weights::product(const std::string& name, std::int64_t inputs, std::int64_t outputs) {
  const GgufTensor* entry = find(name, {inputs, outputs}, Role::kProduct);
  if (entry == nullptr) return nullptr;
  Matrix& matrix = matrices_.emplace_back();
  if (!device_.is_cpu()) {
    matrix.tensor = record(*entry, device_.buffer_type());
  } else if (const auto format = weight_format(entry->type)) {
    matrix.packed = {.format = *format,
                     .inputs = static_cast<std::uint32_t>(inputs),
                     .outputs = static_cast<std::uint32_t>(outputs)};
    packed_.emplace_back(&matrix.packed, entry);
  } else {
    matrix.tensor = record(*entry, repacked_type_for(*entry));
  }
  return &matrix;
}

const Matrix* Weights::product_or(const std::string& name, const std::string& fallback, std::int64_t inputs,
                                  std::int64_t outputs) {
  return product(file_.find_tensor(name) != nullptr ? name : fallback, inputs, outputs);
}

const MatrixGroup* Weights::group(std::vector<const Matrix*> matrices) {
  MatrixGroup& group = groups_.emplace_back();
  group.matrices = std::move(matrices);
  const auto is_packed = [](const Matrix* matrix) { return matrix != nullptr && matrix->tensor == nullptr; };
  if (std::ranges::all_of(group.matrices, is_packed)) {
    for (const Matrix* matrix : group.matrices) group.packed.push_back(&matrix->packed);
  }
  return &group;
}

ggml_tensor* Weights::table(const std::string& name, std::int64_t width, std::int64_t rows) {
  return record(name, {width, rows}, Role::kTable);
}

ggml_tensor* Weights::vector(const std::string& name, std::int64_t elements) {
  return record(name, {elements}, Role::kVector);
}

ggml_tensor* Weights::optional_vector(const std::string& name, std::int64_t elements) {
  return file_.find_tensor(name) == nullptr ? nullptr : vector(name, elements);
}

const GgufTensor* Weights::find(const std::string& name, std::initializer_list<std::int64_t> shape,
                                Role role) {
  if (!first_error_) return nullptr;
  const GgufTensor* entry = file_.find_tensor(name);
  if (entry == nullptr) {
    first_error_ =
        fail(ErrorCode::kCorrupt, "{} has no tensor {}; convert the model again", file_.path(), name);
    return nullptr;
  }
  std::array<std::int64_t, GGML_MAX_DIMS> wanted{1, 1, 1, 1};
  std::copy(shape.begin(), shape.end(), wanted.begin());
  if (entry->shape != wanted) {
    first_error_ = fail(ErrorCode::kCorrupt, "{}: tensor {} has the shape [{}], wanted [{}]", file_.path(),
                        name, fmt::join(entry->shape, ", "), fmt::join(wanted, ", "));
    return nullptr;
  }
  if (!has_operation(*entry, role)) {
    first_error_ = fail(ErrorCode::kUnsupported, "{}: tensor {} is of type {}, wanted {}", file_.path(), name,
                        ggml_type_name(entry->type),
                        role == Role::kVector ? "f32" : "f32, f16, bf16 or a quantised type");
    return nullptr;
  }
  return entry;
}

ggml_tensor* Weights::record(const GgufTensor& entry, ggml_backend_buffer_type_t type) {
  Pool& pool = pool_for(type);
  ggml_tensor* tensor = ggml_new_tensor(pool.context.get(), entry.type, GGML_MAX_DIMS, entry.shape.data());
  ggml_set_name(tensor, entry.name.c_str());
  pool.tensors.emplace_back(tensor, &entry);
  return tensor;
}

ggml_tensor* Weights::record(const std::string& name, std::initializer_list<std::int64_t> shape, Role role) {
  const GgufTensor* entry = find(name, shape, role);
  if (entry == nullptr) return nullptr;
  return record(*entry, role == Role::kVector ? device_.buffer_type() : nullptr);
}

// ggml's kernels end the process on a type they have no code for.
bool Weights::has_operation(const GgufTensor& tensor, Role role) const {
  const ggml_type type = tensor.type;
  switch (role) {
    case Role::kProduct:
      return device_.is_cpu() ? ggml_get_type_traits_cpu(type)->vec_dot != nullptr
                              : supports_product(device_.handle(), device_.buffer_type(), tensor);
    case Role::kTable:
      return type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
    case Role::kVector:
      return type == GGML_TYPE_F32;
  }
  return false;
}

Weights::Pool& Weights::pool_for(ggml_backend_buffer_type_t type) {
  for (const auto& pool : pools_) {
    if (pool->type == type) return *pool;
  }
  auto pool = std::make_unique<Pool>();
  pool->type = type;
  pool->context = tensor_context(file_.tensors().size() + 8);
  return *pools_.emplace_back(std::move(pool));
}

// libllama's rule: the first extra buffer type of the CPU in which the backend supports this product.
ggml_backend_buffer_type_t Weights::repacked_type_for(const GgufTensor& tensor) const {
  for (ggml_backend_buffer_type_t type : extra_types_) {
    if (supports_product(cpu_device(), type, tensor)) return type;
  }
  return nullptr;
}

Status Weights::load(const std::function<void(std::size_t, std::size_t)>& progress) {
  if (!first_error_) return first_error_;
  std::size_t total = 0;
  for (const auto& pool : pools_) {
    for (const auto& [tensor, entry] : pool->tensors) total += entry->bytes;
  }
  for (const auto& [matrix, entry] : packed_) total += entry->bytes;
  std::size_t done = 0;
  const auto advance = [&](std::size_t bytes) {
    done += bytes;
    progress(done, total);
  };
  for (const auto& pool : pools_) {
    if (Status status = load_pool(*pool, advance); !status) return status;
  }
  return load_packed(advance);
}

bool Weights::is_mapped(const GgufTensor& tensor) const {
  return std::ranges::any_of(pools_, [&](const auto& pool) {
    return pool->type == nullptr &&
           std::ranges::any_of(pool->tensors, [&](const auto& mapped) { return mapped.second == &tensor; });
  });
}

Status Weights::load_pool(Pool& pool, const std::function<void(std::size_t)>& done) {
  const MappedFile& mapping = file_.mapping();
  auto* base = const_cast<std::byte*>(mapping.data());
  if (pool.type == nullptr) {
    pool.buffer.reset(ggml_backend_cpu_buffer_from_ptr(base, mapping.bytes()));
  } else {
    pool.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(pool.context.get(), pool.type));
  }
  if (!pool.buffer) {
    return fail(ErrorCode::kOutOfMemory, "{}: not enough memory for the weights on {}", file_.path(),
                device_.name());
  }
  for (const auto& [tensor, entry] : pool.tensors) {
    if (pool.type == nullptr) {
      const ggml_status status = ggml_backend_tensor_alloc(pool.buffer.get(), tensor, base + entry->offset);
      DD_CHECK(status == GGML_STATUS_SUCCESS, "{}", entry->name);
      mapped_bytes_ += entry->bytes;
    } else {
      ggml_backend_tensor_set(tensor, base + entry->offset, 0, entry->bytes);
      mapping.drop_pages(entry->offset, entry->bytes);
      (pool.type == device_.buffer_type() ? device_bytes_ : repacked_bytes_) += entry->bytes;
    }
    done(entry->bytes);
  }
  ggml_backend_buffer_set_usage(pool.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  return {};
}

Status Weights::load_packed(const std::function<void(std::size_t)>& done) {
  struct Piece {  // of a matrix, about as large as the others
    const PackedMatrix* matrix;
    const GgufTensor* entry;
    std::uint32_t first;
    std::uint32_t last;
    std::byte* to;
  };
  std::size_t bytes = 0;
  for (const auto& [matrix, entry] : packed_) bytes += aligned(matrix->bytes());
  if (bytes == 0) return {};
  packed_memory_ = AnonymousMemory::map(bytes);
  if (packed_memory_.data() == nullptr) {
    return fail(ErrorCode::kOutOfMemory, "{}: not enough memory for {} bytes of weights", file_.path(),
                bytes);
  }
  std::vector<Piece> pieces;
  std::byte* to = packed_memory_.data();
  for (const auto& [matrix, entry] : packed_) {
    const auto panels = static_cast<std::uint32_t>(kPieceBytes / matrix->panel_bytes() + 1);
    for (std::uint32_t first = 0; first < matrix->panels(); first += panels) {
      pieces.push_back({matrix, entry, first, std::min(first + panels, matrix->panels()), to});
    }
    matrix->data = to;
    to += aligned(matrix->bytes());
  }
  repacked_bytes_ += bytes;

  std::atomic<std::size_t> next = 0;
  std::atomic<std::size_t> packed = 0;  // bytes that have not been reported
  const auto work = [&](bool reports) {
    for (std::size_t i = next++; i < pieces.size(); i = next++) {
      const Piece& piece = pieces[i];
      const std::size_t output_bytes = piece.entry->bytes / piece.matrix->outputs;
      const std::size_t begin = piece.first * kPanelOutputs * output_bytes;
      const std::size_t end =
          std::min<std::size_t>(piece.last * kPanelOutputs, piece.matrix->outputs) * output_bytes;
      pack_panels(*piece.matrix, file_.mapping().data() + piece.entry->offset, piece.first, piece.last,
                  piece.to);
      file_.mapping().drop_pages(piece.entry->offset + begin, end - begin);
      packed += end - begin;
      if (reports) done(packed.exchange(0));
    }
  };
  {
    std::vector<std::jthread> threads(std::clamp(std::thread::hardware_concurrency(), 1u, kPackThreads) - 1);
    for (std::jthread& thread : threads) thread = std::jthread(work, false);
    work(true);
  }
  done(packed);
  return {};
}

}  // namespace dualdecoder
