// The pieces that architectures build their graphs from: thin names over ggml operations, with the model's
// constants filled in. One builder makes one graph, in the ggml context that it is given. Shapes are in
// ggml's order (fastest dimension first).
//
// At few rows a step is many short nodes, and after each the threads wait for each other. So one node takes
// in what belongs to a product of packed weights: the norm before it, quantising its input, all matrices of
// that input, and what is added to the result. The nodes that it replaces are made, and not reached by the
// graph.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include <ggml.h>

#include "model/hyperparameters.h"
#include "model/weights.h"

namespace dualdecoder {

/// A node that multiplies by packed weights. Its sources: the input, the norm's scale, what is added; only
/// the first is always there.
struct PackedProduct {
  std::vector<const PackedMatrix*> matrices;  // one where something is added
  bool quantised = false;                     // the input is, by a node of its own
  bool normed = false;                        // the input is normed first
  bool added = false;
  float epsilon = 0.0f;  // of the norm
};

class GraphBuilder {
 public:
  /// `positions`: I32 [rows]. `batch_invariant`: see product(). `products`: what the graph's nodes refer to,
  /// for as long as it is used.
  GraphBuilder(ggml_context* context, const Hyperparameters& model, ggml_tensor* positions,
               bool batch_invariant, std::deque<PackedProduct>& products)
      : context_(context),
        model_(model),
        positions_(positions),
        batch_invariant_(batch_invariant),
        products_(products) {}

  ggml_context* context() const { return context_; }

  /// weight [inputs, outputs] times x [inputs, rows] -> [outputs, rows]. Packed weights give each row the
  /// same bits in any company. ggml's kernels for several rows sum in another order than those for one: when
  /// batch-invariant, each row is a product of its own.
  ggml_tensor* product(const Matrix* weight, ggml_tensor* x);
  /// The same plus a bias, if there is one.
  ggml_tensor* product(const Matrix* weight, ggml_tensor* bias, ggml_tensor* x);
  /// The products of all matrices of a group, in its order. Packed ones are views of one tensor, the first at
  /// its beginning.
  std::vector<ggml_tensor*> products(const MatrixGroup& group, ggml_tensor* x);

  /// Root mean square norm over the first dimension, times `scale` (Zhang & Sennrich 2019).
  ggml_tensor* rms_norm(ggml_tensor* x, ggml_tensor* scale);

  /// [heads * head_dim, rows] -> [head_dim, heads, rows]
  ggml_tensor* split_heads(ggml_tensor* x, std::uint32_t heads) const;

  /// Rotary embedding of x [head_dim, heads, rows] for this layer. `factors`: per-frequency divisors of Llama
  /// 3, or null.
  ggml_tensor* rotary(ggml_tensor* x, LayerIndex layer, ggml_tensor* factors) const;

  /// a [width, rows] plus b, of the same shape or [width].
  ggml_tensor* add(ggml_tensor* a, ggml_tensor* b);
  /// x plus a bias, if there is one.
  ggml_tensor* biased(ggml_tensor* x, ggml_tensor* bias) { return bias == nullptr ? x : add(x, bias); }

 private:
  struct Norm {
    ggml_tensor* result;
    ggml_tensor* x;
    ggml_tensor* scale;
  };
  struct Input {  // of a packed product, under way
    std::vector<ggml_tensor*> sources;
    PackedProduct product;
  };

  Input input(ggml_tensor* x);
  /// x [inputs, rows], normed or not, as bytes [activation_bytes(inputs), rows]; made once for all products
  /// of x.
  ggml_tensor* quantised(ggml_tensor* x, const Input& input);
  ggml_tensor* packed_product(std::int64_t width, std::int64_t rows, const Input& input);

  ggml_context* context_;
  const Hyperparameters& model_;
  ggml_tensor* positions_;
  bool batch_invariant_;
  std::deque<PackedProduct>& products_;
  std::vector<std::pair<ggml_tensor*, ggml_tensor*>> quantised_;  // x, and x quantised
  std::vector<Norm> norms_;
  std::vector<std::pair<ggml_tensor*, Input>> single_;  // products of one matrix
};

}  // namespace dualdecoder
