#include "model/graph_builder.h"

#include "base/check.h"

namespace dualdecoder {
namespace {

// The functions of the custom nodes, called once on every thread.

void quantise_part(ggml_tensor* to, int thread, int threads, void* /*user*/) {
  const ggml_tensor* from = to->src[0];
  const std::int64_t blocks = ggml_nelements(from) / kBlockInputs;
  const std::int64_t first = blocks * thread / threads;
  const std::int64_t last = blocks * (thread + 1) / threads;
  quantise_activations(static_cast<const float*>(from->data) + first * kBlockInputs,
                       static_cast<std::size_t>(last - first),
                       static_cast<ActivationBlock*>(to->data) + first);
}

void multiply_part(ggml_tensor* to, int thread, int threads, void* matrix) {
  multiply(*static_cast<const PackedMatrix*>(matrix), static_cast<const ActivationBlock*>(to->src[0]->data),
           static_cast<std::uint32_t>(to->ne[1]), static_cast<std::uint32_t>(thread),
           static_cast<std::uint32_t>(threads), static_cast<float*>(to->data));
}

}  // namespace

ggml_tensor* GraphBuilder::quantised(ggml_tensor* x) {
  for (const auto& [from, bytes] : quantised_) {
    if (from == x) return bytes;
  }
  DD_CHECK(x->type == GGML_TYPE_F32 && ggml_is_contiguous(x) && ggml_is_matrix(x), "{}", x->name);
  const auto row_bytes = static_cast<std::int64_t>(activation_bytes(static_cast<std::size_t>(x->ne[0])));
  ggml_tensor* bytes = ggml_custom_4d(context_, GGML_TYPE_I8, row_bytes, x->ne[1], 1, 1, &x, 1, quantise_part,
                                      GGML_N_TASKS_MAX, nullptr);
  quantised_.emplace_back(x, bytes);
  return bytes;
}

ggml_tensor* GraphBuilder::product(const Matrix* weight, ggml_tensor* x) {
  const std::int64_t rows = x->ne[1];
  if (weight->tensor == nullptr) {
    ggml_tensor* bytes = quantised(x);
    return ggml_custom_4d(context_, GGML_TYPE_F32, weight->packed.outputs, rows, 1, 1, &bytes, 1,
                          multiply_part, GGML_N_TASKS_MAX, const_cast<PackedMatrix*>(&weight->packed));
  }
  if (!batch_invariant_ || rows == 1) return ggml_mul_mat(context_, weight->tensor, x);
  // Rows along the third dimension: ggml then takes one matrix-vector product after the other.
  ggml_tensor* planes = ggml_reshape_3d(context_, x, x->ne[0], 1, rows);
  ggml_tensor* result = ggml_mul_mat(context_, weight->tensor, planes);
  return ggml_reshape_2d(context_, result, result->ne[0], rows);
}

ggml_tensor* GraphBuilder::product(const Matrix* weight, ggml_tensor* bias, ggml_tensor* x) {
  ggml_tensor* result = product(weight, x);
  return bias == nullptr ? result : ggml_add(context_, result, bias);
}

ggml_tensor* GraphBuilder::rms_norm(ggml_tensor* x, ggml_tensor* scale) const {
  return ggml_mul(context_, ggml_rms_norm(context_, x, model_.rms_epsilon), scale);
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
