#include "model/graph_builder.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/check.h"

namespace dualdecoder {
namespace {

/// Inputs of a product, over all rows, up to which each thread quantises all of them for itself: that takes
/// no longer than waiting for the others once more.
constexpr std::int64_t kOwnInputsMax = 4096;

/// One divided by the root mean square.
float inverse_rms(const float* x, std::int64_t elements, float epsilon) {
  std::array<double, 8> sums{};
  const auto lanes = static_cast<std::int64_t>(sums.size());
  for (std::int64_t i = 0; i + lanes <= elements; i += lanes) {
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      sums[static_cast<std::size_t>(lane)] += static_cast<double>(x[i + lane] * x[i + lane]);
    }
  }
  double sum = 0.0;
  for (const double part : sums) sum += part;
  return 1.0f / std::sqrt(static_cast<float>(sum / static_cast<double>(elements)) + epsilon);
}

/// Quantises blocks first .. last - 1 of a row of x, normed.
void quantise_normed(const float* x, const float* scale, float inverse, std::int64_t first, std::int64_t last,
                     ActivationBlock* to) {
  constexpr std::int64_t kBlocksTogether = 8;
  std::array<float, kBlocksTogether * kBlockInputs> normed;
  for (std::int64_t block = first; block < last; block += kBlocksTogether) {
    const std::int64_t blocks = std::min(kBlocksTogether, last - block);
    const std::int64_t from = block * kBlockInputs;
    for (std::int64_t i = 0; i < blocks * kBlockInputs; ++i) {
      normed[static_cast<std::size_t>(i)] = x[from + i] * inverse * scale[from + i];
    }
    quantise_activations(normed.data(), static_cast<std::size_t>(blocks), to + block);
  }
}

/// Quantises blocks first .. last - 1 of one row of a node's input, normed if it is to be.
void quantise_row(const ggml_tensor* node, const PackedProduct& product, std::int64_t row, std::int64_t first,
                  std::int64_t last, ActivationBlock* to) {
  const ggml_tensor* x = node->src[0];
  const float* from = static_cast<const float*>(x->data) + row * x->ne[0];
  if (product.normed) {
    const float inverse = inverse_rms(from, x->ne[0], product.epsilon);
    quantise_normed(from, static_cast<const float*>(node->src[1]->data), inverse, first, last, to);
  } else {
    quantise_activations(from + first * kBlockInputs, static_cast<std::size_t>(last - first), to + first);
  }
}

// The functions of the custom nodes, called once on every thread.

/// Threads have rows of their own; where these do not go evenly, a part of every row, and each computes the
/// norm of all.
void quantise_part(ggml_tensor* to, int thread, int threads, void* user) {
  const auto& product = *static_cast<const PackedProduct*>(user);
  const std::int64_t rows = to->src[0]->ne[1];
  const std::int64_t blocks = to->src[0]->ne[0] / kBlockInputs;
  const bool own_rows = rows % threads == 0 || rows >= 8 * threads;
  const auto share = [&](std::int64_t of, int before) { return of * before / threads; };
  const std::int64_t first_row = own_rows ? share(rows, thread) : 0;
  const std::int64_t last_row = own_rows ? share(rows, thread + 1) : rows;
  for (std::int64_t row = first_row; row < last_row; ++row) {
    quantise_row(to, product, row, own_rows ? 0 : share(blocks, thread),
                 own_rows ? blocks : share(blocks, thread + 1),
                 static_cast<ActivationBlock*>(to->data) + row * blocks);
  }
}

const ActivationBlock* quantise_all(const ggml_tensor* node, const PackedProduct& product) {
  static thread_local std::array<ActivationBlock, kOwnInputsMax / kBlockInputs> own;
  const std::int64_t blocks = node->src[0]->ne[0] / kBlockInputs;
  for (std::int64_t row = 0; row < node->src[0]->ne[1]; ++row) {
    quantise_row(node, product, row, 0, blocks, own.data() + row * blocks);
  }
  return own.data();
}

void multiply_part(ggml_tensor* to, int thread, int threads, void* user) {
  const auto& product = *static_cast<const PackedProduct*>(user);
  const ActivationBlock* x =
      product.quantised ? static_cast<const ActivationBlock*>(to->src[0]->data) : quantise_all(to, product);
  const auto rows = static_cast<std::uint32_t>(to->src[0]->ne[1]);
  const auto part = static_cast<std::uint32_t>(thread);
  const auto parts = static_cast<std::uint32_t>(threads);
  auto* out = static_cast<float*>(to->data);
  if (!product.added) return multiply(product.matrices, x, rows, part, parts, out);
  const ggml_tensor* addend = to->src[product.normed ? 2 : 1];
  multiply_add(*product.matrices.front(), x, rows, static_cast<const float*>(addend->data),
               ggml_nrows(addend) == 1 ? 0 : static_cast<std::size_t>(addend->ne[0]), part, parts, out);
}

}  // namespace

GraphBuilder::Input GraphBuilder::input(ggml_tensor* x) {
  Input input{.sources = {x}, .product = {}};
  const auto norm = std::ranges::find(norms_, x, &Norm::result);
  if (norm != norms_.end()) {
    input.sources = {norm->x, norm->scale};
    input.product.normed = true;
    input.product.epsilon = model_.rms_epsilon;
  }
  const ggml_tensor* from = input.sources.front();
  DD_CHECK(from->type == GGML_TYPE_F32 && ggml_is_contiguous(from) && ggml_is_matrix(from), "{}", x->name);
  if (ggml_nelements(from) > kOwnInputsMax) {
    input.sources = {quantised(x, input)};
    input.product = {};
    input.product.quantised = true;
  }
  return input;
}

ggml_tensor* GraphBuilder::quantised(ggml_tensor* x, const Input& input) {
  for (const auto& [from, bytes] : quantised_) {
    if (from == x) return bytes;
  }
  std::vector<ggml_tensor*> sources = input.sources;
  const auto row_bytes = static_cast<std::int64_t>(activation_bytes(static_cast<std::size_t>(x->ne[0])));
  ggml_tensor* bytes = ggml_custom_4d(context_, GGML_TYPE_I8, row_bytes, x->ne[1], 1, 1, sources.data(),
                                      static_cast<int>(sources.size()), quantise_part, GGML_N_TASKS_MAX,
                                      &products_.emplace_back(input.product));
  quantised_.emplace_back(x, bytes);
  return bytes;
}

ggml_tensor* GraphBuilder::packed_product(std::int64_t width, std::int64_t rows, const Input& input) {
  std::vector<ggml_tensor*> sources = input.sources;
  return ggml_custom_4d(context_, GGML_TYPE_F32, width, rows, 1, 1, sources.data(),
                        static_cast<int>(sources.size()), multiply_part, GGML_N_TASKS_MAX,
                        &products_.emplace_back(input.product));
}

ggml_tensor* GraphBuilder::product(const Matrix* weight, ggml_tensor* x) {
  const std::int64_t rows = x->ne[1];
  if (weight->tensor == nullptr) {
    Input of = input(x);
    of.product.matrices = {&weight->packed};
    ggml_tensor* result = packed_product(weight->packed.outputs, rows, of);
    single_.emplace_back(result, std::move(of));
    return result;
  }
  if (!batch_invariant_ || rows == 1) return ggml_mul_mat(context_, weight->tensor, x);
  // Rows along the third dimension: ggml then takes one matrix-vector product after the other.
  ggml_tensor* planes = ggml_reshape_3d(context_, x, x->ne[0], 1, rows);
  ggml_tensor* result = ggml_mul_mat(context_, weight->tensor, planes);
  return ggml_reshape_2d(context_, result, result->ne[0], rows);
}

ggml_tensor* GraphBuilder::product(const Matrix* weight, ggml_tensor* bias, ggml_tensor* x) {
  return biased(product(weight, x), bias);
}

std::vector<ggml_tensor*> GraphBuilder::products(const MatrixGroup& group, ggml_tensor* x) {
  std::vector<ggml_tensor*> results;
  if (group.packed.empty()) {
    for (const Matrix* matrix : group.matrices) results.push_back(product(matrix, x));
    return results;
  }
  const std::int64_t rows = x->ne[1];
  std::int64_t elements = 0;
  for (const PackedMatrix* matrix : group.packed) elements += rows * matrix->outputs;
  Input of = input(x);
  of.product.matrices = group.packed;
  ggml_tensor* all = packed_product(elements, 1, of);
  std::size_t offset = 0;
  for (const PackedMatrix* matrix : group.packed) {
    const std::size_t row_bytes = matrix->outputs * sizeof(float);
    results.push_back(ggml_view_2d(context_, all, matrix->outputs, rows, row_bytes, offset));
    offset += static_cast<std::size_t>(rows) * row_bytes;
  }
  return results;
}

ggml_tensor* GraphBuilder::add(ggml_tensor* a, ggml_tensor* b) {
  const auto product = std::ranges::find(single_, a, [](const auto& single) { return single.first; });
  if (product == single_.end()) return ggml_add(context_, a, b);
  DD_CHECK(b->ne[0] == a->ne[0] && (ggml_nrows(b) == 1 || ggml_nrows(b) == a->ne[1]) &&
           ggml_is_contiguous(b));
  Input sum = product->second;
  sum.sources.push_back(b);
  sum.product.added = true;
  return packed_product(a->ne[0], a->ne[1], sum);
}

ggml_tensor* GraphBuilder::rms_norm(ggml_tensor* x, ggml_tensor* scale) {
  ggml_tensor* normed = ggml_mul(context_, ggml_rms_norm(context_, x, model_.rms_epsilon), scale);
  norms_.push_back({normed, x, scale});
  return normed;
}

ggml_tensor* GraphBuilder::split_heads(ggml_tensor* x, std::uint32_t heads) const {
  return ggml_reshape_3d(context_, x, model_.head_dim, heads, x->ne[1]);
}

ggml_tensor* GraphBuilder::rotary(ggml_tensor* x, LayerIndex layer, ggml_tensor* factors) const {
  const RotaryParameters& rotary = model_.rotary;
  const bool windowed = model_.window[layer.value] != 0;
  return ggml_rope_ext(context_, x, positions_, factors, static_cast<int>(rotary.dimensions),
                       rotary.neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL,
                       static_cast<int>(rotary.context_original), windowed ? rotary.base_window : rotary.base,
                       windowed ? rotary.frequency_scale_window : rotary.frequency_scale,
                       rotary.extrapolation, rotary.attention_factor, rotary.beta_fast, rotary.beta_slow);
}

}  // namespace dualdecoder
