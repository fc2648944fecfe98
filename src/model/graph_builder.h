// The pieces that architectures build their graphs from: thin names over ggml operations, with the model's
// constants filled in. Holds no state but the ggml context that the tensors are made in. Shapes are in ggml's
// order (fastest dimension first).
#pragma once

#include <cstdint>

#include <ggml.h>

#include "model/hyperparameters.h"

namespace dualdecoder {

class GraphBuilder {
 public:
  /// `positions`: I32 [rows]. `batch_invariant`: see product().
  GraphBuilder(ggml_context* context, const Hyperparameters& model, ggml_tensor* positions,
               bool batch_invariant)
      : context_(context), model_(model), positions_(positions), batch_invariant_(batch_invariant) {}

  ggml_context* context() const { return context_; }

  /// weight [inputs, outputs] times x [inputs, rows] -> [outputs, rows]. When batch-invariant, each row is a
  /// product of its own: ggml's kernels for several rows sum in another order than those for one.
  ggml_tensor* product(ggml_tensor* weight, ggml_tensor* x) const;
  /// The same plus a bias, if there is one.
  ggml_tensor* product(ggml_tensor* weight, ggml_tensor* bias, ggml_tensor* x) const;

  /// Root mean square norm over the first dimension, times `scale` (Zhang & Sennrich 2019).
  ggml_tensor* rms_norm(ggml_tensor* x, ggml_tensor* scale) const;

  /// [heads * head_dim, rows] -> [head_dim, heads, rows]
  ggml_tensor* split_heads(ggml_tensor* x, std::uint32_t heads) const;

  /// Rotary embedding of x [head_dim, heads, rows] for this layer. `factors`: per-frequency divisors of Llama
  /// 3, or null.
  ggml_tensor* rotary(ggml_tensor* x, LayerIndex layer, ggml_tensor* factors) const;

  ggml_tensor* add(ggml_tensor* a, ggml_tensor* b) const { return ggml_add(context_, a, b); }

 private:
  ggml_context* context_;
  const Hyperparameters& model_;
  ggml_tensor* positions_;
  bool batch_invariant_;
};

}  // namespace dualdecoder
