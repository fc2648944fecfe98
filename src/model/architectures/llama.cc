// Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024), and the models that share its form: SmolLM2,
// Mistral. Pre-norm layers, grouped-query attention, interleaved rotary pairs, SwiGLU; Llama 3 divides its
// rotary frequencies by the factors in rope_freqs.weight.
#include <vector>

#include "model/architecture.h"

namespace dualdecoder {
namespace {

class Llama final : public Architecture {
 public:
  Status complete(const GgufFile& file, Hyperparameters& model) const override {
    if (model.rotary.dimensions != model.head_dim) {
      return fail(ErrorCode::kCorrupt, "{}: {} rotary dimensions, wanted the head size {}", file.path(),
                  model.rotary.dimensions, model.head_dim);
    }
    return {};
  }

  void bind(Weights& weights, const Hyperparameters& model) override {
    token_embedding_ = weights.table("token_embd.weight", model.embedding, model.vocabulary);
    output_norm_ = weights.vector("output_norm.weight", model.embedding);
    output_ = weights.product_or("output.weight", "token_embd.weight", model.embedding, model.vocabulary);
    rotary_factors_ = weights.optional_vector("rope_freqs.weight", model.rotary.dimensions / 2);
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
      layer.output = weights.product(prefix + "attn_output.weight", model.query_width(), model.embedding);
      layer.output_bias = weights.optional_vector(prefix + "attn_output.bias", model.embedding);
      layer.ffn_norm = weights.vector(prefix + "ffn_norm.weight", model.embedding);
      layer.gate_up =
          weights.group({weights.product(prefix + "ffn_gate.weight", model.embedding, model.feed_forward),
                         weights.product(prefix + "ffn_up.weight", model.embedding, model.feed_forward)});
      layer.down = weights.product(prefix + "ffn_down.weight", model.feed_forward, model.embedding);
      layer.gate_bias = weights.optional_vector(prefix + "ffn_gate.bias", model.feed_forward);
      layer.up_bias = weights.optional_vector(prefix + "ffn_up.bias", model.feed_forward);
      layer.down_bias = weights.optional_vector(prefix + "ffn_down.bias", model.embedding);
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
    return {graph.rotary(q, index, rotary_factors_), graph.rotary(k, index, rotary_factors_), v};
  }

  ggml_tensor* finish(GraphBuilder& graph, LayerIndex index, ggml_tensor* attention,
                      ggml_tensor* x) const override {
    const Layer& layer = layers_[index.value];
    x = graph.add(graph.product(layer.output, layer.output_bias, attention), x);
    ggml_tensor* y = graph.rms_norm(x, layer.ffn_norm);
    const auto gate_up = graph.products(*layer.gate_up, y);
    ggml_tensor* gate = graph.biased(gate_up[0], layer.gate_bias);
    ggml_tensor* up = graph.biased(gate_up[1], layer.up_bias);
    y = ggml_swiglu_split(graph.context(), gate, up);
    return graph.add(graph.product(layer.down, layer.down_bias, y), x);
  }

  ggml_tensor* logits(GraphBuilder& graph, ggml_tensor* x) const override {
    return graph.product(output_, graph.rms_norm(x, output_norm_));
  }

 private:
  struct Layer {
    ggml_tensor *attention_norm, *q_bias, *k_bias, *v_bias, *output_bias;
    ggml_tensor *ffn_norm, *gate_bias, *up_bias, *down_bias;
    const MatrixGroup *vqk, *gate_up;
    const Matrix *output, *down;
  };
  ggml_tensor* token_embedding_ = nullptr;
  ggml_tensor* output_norm_ = nullptr;
  const Matrix* output_ = nullptr;
  ggml_tensor* rotary_factors_ = nullptr;
  std::vector<Layer> layers_;
  std::uint32_t heads_ = 0;
  std::uint32_t kv_heads_ = 0;
};

const ArchitectureRegistration kLlama("llama", []() -> std::unique_ptr<Architecture> {
  return std::make_unique<Llama>();
});

}  // namespace
}  // namespace dualdecoder
