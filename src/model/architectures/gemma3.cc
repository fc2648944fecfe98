// Gemma 3 (Gemma Team 2025), text. Embeddings scaled by the square root of their width; norms before and
// after both attention and feed-forward; each head of Q and K normed; five layers with a sliding window for
// each layer that sees everything, with a rotary base of their own; GeGLU.
#include <cmath>
#include <vector>

#include "model/architecture.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kDefaultWindowPattern = 6;  // every sixth layer sees everything
constexpr std::uint32_t kLayersOf27B = 62;          // the one size that scales queries by the embedding width

class Gemma3 final : public Architecture {
 public:
  Status complete(const GgufFile& file, Hyperparameters& model) const override {
    model.rotary.neox = true;
    const auto window = file.u32_or("gemma3.attention.sliding_window", 0);
    if (!window) return std::unexpected(window.error());
    const auto softcap = file.f32_or("gemma3.final_logit_softcapping", 0.0f);
    if (!softcap) return std::unexpected(softcap.error());
    model.final_softcap = *softcap;
    if (*window > 0) {
      if (Status status = read_windows(file, *window, model); !status) return status;
    }
    const float query_dim = model.layers == kLayersOf27B ? static_cast<float>(model.embedding / model.heads)
                                                         : static_cast<float>(model.head_dim);
    model.attention_scale = 1.0f / std::sqrt(query_dim);
    return {};
  }

  void bind(Weights& weights, const Hyperparameters& model) override {
    token_embedding_ = weights.table("token_embd.weight", model.embedding, model.vocabulary);
    output_norm_ = weights.vector("output_norm.weight", model.embedding);
    output_ = weights.product_or("output.weight", "token_embd.weight", model.embedding, model.vocabulary);
    for (std::uint32_t i = 0; i < model.layers; ++i) {
      const std::string prefix = fmt::format("blk.{}.", i);
      Layer layer;
      layer.attention_norm = weights.vector(prefix + "attn_norm.weight", model.embedding);
      layer.vqk =
          weights.group({weights.product(prefix + "attn_v.weight", model.embedding, model.kv_width()),
                         weights.product(prefix + "attn_q.weight", model.embedding, model.query_width()),
                         weights.product(prefix + "attn_k.weight", model.embedding, model.kv_width())});
      layer.q_norm = weights.vector(prefix + "attn_q_norm.weight", model.head_dim);
      layer.k_norm = weights.vector(prefix + "attn_k_norm.weight", model.head_dim);
      layer.output = weights.product(prefix + "attn_output.weight", model.query_width(), model.embedding);
      layer.attention_post_norm = weights.vector(prefix + "post_attention_norm.weight", model.embedding);
      layer.ffn_norm = weights.vector(prefix + "ffn_norm.weight", model.embedding);
      layer.gate_up =
          weights.group({weights.product(prefix + "ffn_gate.weight", model.embedding, model.feed_forward),
                         weights.product(prefix + "ffn_up.weight", model.embedding, model.feed_forward)});
      layer.down = weights.product(prefix + "ffn_down.weight", model.feed_forward, model.embedding);
      layer.ffn_post_norm = weights.vector(prefix + "post_ffw_norm.weight", model.embedding);
      layers_.push_back(layer);
    }
    heads_ = model.heads;
    kv_heads_ = model.kv_heads;
    embedding_scale_ = std::sqrt(static_cast<float>(model.embedding));
    final_softcap_ = model.final_softcap;
  }

  ggml_tensor* embed(GraphBuilder& graph, ggml_tensor* tokens) const override {
    ggml_tensor* rows = ggml_get_rows(graph.context(), token_embedding_, tokens);
    return ggml_scale(graph.context(), rows, embedding_scale_);
  }

  Projection project(GraphBuilder& graph, LayerIndex index, ggml_tensor* x) const override {
    const Layer& layer = layers_[index.value];
    x = graph.rms_norm(x, layer.attention_norm);
    const auto vqk = graph.products(*layer.vqk, x);
    ggml_tensor* v = graph.split_heads(vqk[0], kv_heads_);
    ggml_tensor* q = graph.rms_norm(graph.split_heads(vqk[1], heads_), layer.q_norm);
    ggml_tensor* k = graph.rms_norm(graph.split_heads(vqk[2], kv_heads_), layer.k_norm);
    return {graph.rotary(q, index, nullptr), graph.rotary(k, index, nullptr), v};
  }

  ggml_tensor* finish(GraphBuilder& graph, LayerIndex index, ggml_tensor* attention,
                      ggml_tensor* x) const override {
    const Layer& layer = layers_[index.value];
    x = graph.add(graph.rms_norm(graph.product(layer.output, attention), layer.attention_post_norm), x);
    ggml_tensor* y = graph.rms_norm(x, layer.ffn_norm);
    const auto gate_up = graph.products(*layer.gate_up, y);
    y = ggml_geglu_split(graph.context(), gate_up[0], gate_up[1]);
    return graph.add(graph.rms_norm(graph.product(layer.down, y), layer.ffn_post_norm), x);
  }

  ggml_tensor* logits(GraphBuilder& graph, ggml_tensor* x) const override {
    ggml_tensor* y = graph.product(output_, graph.rms_norm(x, output_norm_));
    if (final_softcap_ == 0.0f) return y;
    y = ggml_tanh(graph.context(), ggml_scale(graph.context(), y, 1.0f / final_softcap_));
    return ggml_scale(graph.context(), y, final_softcap_);
  }

 private:
  struct Layer {
    ggml_tensor *attention_norm, *q_norm, *k_norm, *attention_post_norm, *ffn_norm, *ffn_post_norm;
    const MatrixGroup *vqk, *gate_up;
    const Matrix *output, *down;
  };

  // The pattern key is either one number n (every n-th layer sees everything) or a list, one entry a layer.
  static Status read_windows(const GgufFile& file, std::uint32_t window, Hyperparameters& model) {
    const auto base = file.f32_or("gemma3.rope.freq_base_swa", model.rotary.base_window);
    if (!base) return std::unexpected(base.error());
    model.rotary.base_window = *base;
    const auto list = file.u32_list("gemma3.attention.sliding_window_pattern", model.layers);
    if (!list) return std::unexpected(list.error());
    const bool one_number = file.u32("gemma3.attention.sliding_window_pattern").has_value();
    const std::uint32_t pattern = one_number ? (*list)->front() : kDefaultWindowPattern;
    for (std::uint32_t i = 0; i < model.layers; ++i) {
      const bool listed = list->has_value() && !one_number;
      const bool windowed = listed ? (**list)[i] != 0 : pattern == 0 || i % pattern < pattern - 1;
      model.window[i] = windowed ? window : 0;
    }
    return {};
  }

  ggml_tensor* token_embedding_ = nullptr;
  ggml_tensor* output_norm_ = nullptr;
  const Matrix* output_ = nullptr;
  std::vector<Layer> layers_;
  std::uint32_t heads_ = 0;
  std::uint32_t kv_heads_ = 0;
  float embedding_scale_ = 1.0f;
  float final_softcap_ = 0.0f;
};

const ArchitectureRegistration kGemma3("gemma3", []() -> std::unique_ptr<Architecture> {
  return std::make_unique<Gemma3>();
});

}  // namespace
}  // namespace dualdecoder
