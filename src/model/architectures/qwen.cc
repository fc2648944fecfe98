// Qwen 2 and 2.5 (Yang et al. 2024) and Qwen 3 (Yang et al. 2025), dense. Pre-norm layers, grouped-query
// attention, rotary halves, SwiGLU. Qwen 2 has biases on Q, K and V; Qwen 3 drops them and norms each head of
// Q and K instead.
#include <vector>

#include "model/architecture.h"

namespace dualdecoder {
namespace {

enum class Generation { kQwen2, kQwen3 };

class Qwen final : public Architecture {
 public:
  explicit Qwen(Generation generation) : generation_(generation) {}

  Status complete(const GgufFile& /*file*/, Hyperparameters& model) const override {
    model.rotary.neox = true;
    return {};
  }

  void bind(Weights& weights, const Hyperparameters& model) override {
    token_embedding_ = weights.table("token_embd.weight", model.embedding, model.vocabulary);
    output_norm_ = weights.vector("output_norm.weight", model.embedding);
    output_ = weights.product_or("output.weight", "token_embd.weight", model.embedding, model.vocabulary);
    output_bias_ = weights.optional_vector("output.bias", model.vocabulary);
    for (std::uint32_t i = 0; i < model.layers; ++i) {
      const std::string prefix = fmt::format("blk.{}.", i);
      Layer layer;
      layer.attention_norm = weights.vector(prefix + "attn_norm.weight", model.embedding);
      layer.vqk =
          weights.group({weights.product(prefix + "attn_v.weight", model.embedding, model.kv_width()),
                         weights.product(prefix + "attn_q.weight", model.embedding, model.query_width()),
                         weights.product(prefix + "attn_k.weight", model.embedding, model.kv_width())});
      layer.q_bias = weights.optional_vector(prefix + "attn_q.bias", model.query_width());
      layer.k_bias = weights.optional_vector(prefix + "attn_k.bias", model.kv_width());
      layer.v_bias = weights.optional_vector(prefix + "attn_v.bias", model.kv_width());
      if (generation_ == Generation::kQwen3) {
        layer.q_norm = weights.vector(prefix + "attn_q_norm.weight", model.head_dim);
        layer.k_norm = weights.vector(prefix + "attn_k_norm.weight", model.head_dim);
      }
      layer.output = weights.product(prefix + "attn_output.weight", model.query_width(), model.embedding);
      layer.ffn_norm = weights.vector(prefix + "ffn_norm.weight", model.embedding);
      layer.gate_up =
          weights.group({weights.product(prefix + "ffn_gate.weight", model.embedding, model.feed_forward),
                         weights.product(prefix + "ffn_up.weight", model.embedding, model.feed_forward)});
      layer.down = weights.product(prefix + "ffn_down.weight", model.feed_forward, model.embedding);
      layers_.push_back(layer);
    }
    heads_ = model.heads;
    kv_heads_ = model.kv_heads;
  }

  ggml_tensor* embed(GraphBuilder& graph, ggml_tensor* tokens) const override {
    return ggml_get_rows(graph.context(), token_embedding_, tokens);
  }

  Projection project(GraphBuilder& graph, LayerIndex index, ggml_tensor* x) const override {
    const Layer& layer = layers_[index.value];
    x = graph.rms_norm(x, layer.attention_norm);
    const auto vqk = graph.products(*layer.vqk, x);
    ggml_tensor* v = graph.split_heads(graph.biased(vqk[0], layer.v_bias), kv_heads_);
    ggml_tensor* q = graph.split_heads(graph.biased(vqk[1], layer.q_bias), heads_);
    ggml_tensor* k = graph.split_heads(graph.biased(vqk[2], layer.k_bias), kv_heads_);
    if (generation_ == Generation::kQwen3) {
      q = graph.rms_norm(q, layer.q_norm);
      k = graph.rms_norm(k, layer.k_norm);
    }
    return {graph.rotary(q, index, nullptr), graph.rotary(k, index, nullptr), v};
  }

  ggml_tensor* finish(GraphBuilder& graph, LayerIndex index, ggml_tensor* attention,
                      ggml_tensor* x) const override {
    const Layer& layer = layers_[index.value];
    x = graph.add(graph.product(layer.output, attention), x);
    ggml_tensor* y = graph.rms_norm(x, layer.ffn_norm);
    const auto gate_up = graph.products(*layer.gate_up, y);
    y = ggml_swiglu_split(graph.context(), gate_up[0], gate_up[1]);
    return graph.add(graph.product(layer.down, y), x);
  }

  ggml_tensor* logits(GraphBuilder& graph, ggml_tensor* x) const override {
    return graph.product(output_, output_bias_, graph.rms_norm(x, output_norm_));
  }

 private:
  struct Layer {
    ggml_tensor *attention_norm, *q_bias, *k_bias, *v_bias, *ffn_norm;
    ggml_tensor *q_norm = nullptr, *k_norm = nullptr;
    const MatrixGroup *vqk, *gate_up;
    const Matrix *output, *down;
  };
  Generation generation_;
  ggml_tensor* token_embedding_ = nullptr;
  ggml_tensor* output_norm_ = nullptr;
  const Matrix* output_ = nullptr;
  ggml_tensor* output_bias_ = nullptr;
  std::vector<Layer> layers_;
  std::uint32_t heads_ = 0;
  std::uint32_t kv_heads_ = 0;
};

const ArchitectureRegistration qwen2("qwen2", []() -> std::unique_ptr<Architecture> {
  return std::make_unique<Qwen>(Generation::kQwen2);
});
const ArchitectureRegistration qwen3("qwen3", []() -> std::unique_ptr<Architecture> {
  return std::make_unique<Qwen>(Generation::kQwen3);
});

}  // namespace
}  // namespace dualdecoder
