#include "model/graph_builder.h"

namespace dualdecoder {

ggml_tensor* GraphBuilder::product(ggml_tensor* weight, ggml_tensor* x) const {
  const std::int64_t rows = x->ne[1];
  if (!batch_invariant_ || rows == 1) return ggml_mul_mat(context_, weight, x);
  // Rows along the third dimension: ggml then takes one matrix-vector product after the other.
  ggml_tensor* planes = ggml_reshape_3d(context_, x, x->ne[0], 1, rows);
  ggml_tensor* result = ggml_mul_mat(context_, weight, planes);
  return ggml_reshape_2d(context_, result, result->ne[0], rows);
}

ggml_tensor* GraphBuilder::product(ggml_tensor* weight, ggml_tensor* bias, ggml_tensor* x) const {
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
