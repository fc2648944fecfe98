// The pieces that architectures build their graphs from: thin names over ggml operations, with the model's
// constants filled in. One builder makes one graph, in the ggml context that it is given. Shapes are in
// ggml's order (fastest dimension first).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ggml.h>

#include "model/hyperparameters.h"
#include "model/weights.h"

namespace dualdecoder {

class GraphBuilder {
 public:
  /// `positions`: I32 [rows]. `batch_invariant`: see product().
  GraphBuilder(ggml_context* context, const Hyperparameters& model, ggml_tensor* positions,
               bool batch_invariant)
      : context_(context), model_(model), positions_(positions), batch_invariant_(batch_invariant) {}

  ggml_context* context() const { return context_; }

  /// weight [inputs, outputs] times x [inputs, rows] -> [outputs, rows]. Packed weights give each row the
  /// same bits in any company. ggml's kernels for several rows sum in another order than those for one: when
  /// batch-invariant, each row is a product of its own.
  ggml_tensor* product(const Matrix* weight, ggml_tensor* x);
  /// The same plus a bias, if there is one.
  ggml_tensor* product(const Matrix* weight, ggml_tensor* bias, ggml_tensor* x);

  /// Root mean square norm over the first dimension, times `scale` (Zhang & Sennrich 2019).
  ggml_tensor* rms_norm(ggml_tensor* x, ggml_tensor* scale) const;

  /// [heads * head_dim, rows] -> [head_dim, heads, rows]
  ggml_tensor* split_heads(ggml_tensor* x, std::uint32_t heads) const;

  /// Rotary embedding of x [head_dim, heads, rows] for this layer. `factors`: per-frequency divisors of Llama
  /// 3, or null.
  ggml_tensor* rotary(ggml_tensor* x, LayerIndex layer, ggml_tensor* factors) const;

  ggml_tensor* add(ggml_tensor* a, ggml_tensor* b) const { return ggml_add(context_, a, b); }

 private:
  /// x [inputs, rows] as bytes [activation_bytes(inputs), rows]; made once for all products of x.
  ggml_tensor* quantised(ggml_tensor* x);

  ggml_context* context_;
  const Hyperparameters& model_;
  ggml_tensor* positions_;
  bool batch_invariant_;
  std::vector<std::pair<ggml_tensor*, ggml_tensor*>> quantised_;  // x, and x quantised
};

}  // namespace dualdecoder
