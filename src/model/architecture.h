// What distinguishes one model family from another: which tensors it has, and how a layer's head and tail are
// computed around attention. Attention itself is common to all and lies outside (attention/attention.h), so a
// layer is cut in two: `project` up to Q, K and V, and `finish` from attention's output to the next layer's
// input.
//
// One architecture is one file in model/architectures/, to be held against the model's paper. It registers
// itself; adding one touches nothing else.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ggml.h>

#include "base/error.h"
#include "model/gguf_file.h"
#include "model/graph_builder.h"
#include "model/hyperparameters.h"
#include "model/weights.h"

namespace dualdecoder {

/// Results of `project`, contiguous: q [head_dim, heads, rows], k and v [head_dim, kv_heads, rows].
struct Projection {
  ggml_tensor* q = nullptr;
  ggml_tensor* k = nullptr;
  ggml_tensor* v = nullptr;
};

class Architecture {
 public:
  virtual ~Architecture() = default;

  /// Adds what only this family knows (sliding windows, rotary kind, scales) to the common hyperparameters.
  virtual Status complete(const GgufFile& file, Hyperparameters& model) const = 0;
  /// Records the tensors it will use.
  virtual void bind(Weights& weights, const Hyperparameters& model) = 0;

  /// tokens I32 [rows] -> [embedding, rows]
  virtual ggml_tensor* embed(GraphBuilder& graph, ggml_tensor* tokens) const = 0;
  /// x [embedding, rows]
  virtual Projection project(GraphBuilder& graph, LayerIndex layer, ggml_tensor* x) const = 0;
  /// attention [heads * head_dim, rows], x [embedding, rows] -> [embedding, rows]
  virtual ggml_tensor* finish(GraphBuilder& graph, LayerIndex layer, ggml_tensor* attention,
                              ggml_tensor* x) const = 0;
  /// x [embedding, rows] -> [vocabulary, rows]
  virtual ggml_tensor* logits(GraphBuilder& graph, ggml_tensor* x) const = 0;
};

/// A file-scope object of this type makes an architecture known under its GGUF name.
class ArchitectureRegistration {
 public:
  using Factory = std::unique_ptr<Architecture> (*)();
  ArchitectureRegistration(std::string name, Factory factory);
};

/// kUnsupported, with the list of known names, when there is no such architecture.
Result<std::unique_ptr<Architecture>> make_architecture(const std::string& name);
std::vector<std::string> supported_architectures();

}  // namespace dualdecoder
