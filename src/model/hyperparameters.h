// What a GGUF file says about the shape of its model. Read once at load, constant afterwards.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/error.h"
#include "kv/geometry.h"
#include "model/gguf_file.h"

namespace dualdecoder {

/// Rotary position embedding: Su et al. 2021; linear scaling: Chen et al. 2023; YaRN: Peng et al. 2023.
struct RotaryParameters {
  std::uint32_t dimensions = 0;        // of each head that are rotated
  std::uint32_t context_original = 0;  // tokens; YaRN ramps between the two betas relative to this
  float base = 10000.0f;
  float base_window = 10000.0f;  // of layers with a sliding window
  float frequency_scale = 1.0f;  // 1 / scaling factor
  float frequency_scale_window = 1.0f;
  float extrapolation = 0.0f;  // YaRN's mix, 1 when YaRN is on
  float attention_factor = 1.0f;
  float beta_fast = 32.0f;
  float beta_slow = 1.0f;
  bool neox = false;  // pairs (i, i + d/2) instead of (2i, 2i + 1)
};

struct Hyperparameters {
  std::string architecture;
  std::uint32_t layers = 0;
  std::uint32_t embedding = 0;  // width of the residual stream
  std::uint32_t heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t feed_forward = 0;
  std::uint32_t vocabulary = 0;
  std::uint32_t context_train = 0;  // tokens
  float rms_epsilon = 1e-5f;
  float attention_scale = 0.0f;
  float final_softcap = 0.0f;  // 0: none
  RotaryParameters rotary;
  std::vector<std::uint32_t> window;  // per layer: tokens a row sees, its own included; 0: all
  std::vector<std::string> assumed;   // "key = value" of keys that a file should have and does not

  std::uint32_t query_width() const { return heads * head_dim; }
  std::uint32_t kv_width() const { return kv_heads * head_dim; }
  AttentionShape attention_shape(const KvGeometry& geometry) const {
    return {.heads = heads,
            .kv_heads = kv_heads,
            .head_dim = head_dim,
            .block_tokens = geometry.block_tokens,
            .scale = attention_scale};
  }
  KvGeometry geometry(std::uint32_t block_tokens) const {
    return {.layers = layers, .kv_heads = kv_heads, .head_dim = head_dim, .block_tokens = block_tokens};
  }
};

/// Reads the keys that all supported architectures share and checks that they fit each other and this engine.
Result<Hyperparameters> read_hyperparameters(const GgufFile& file);

}  // namespace dualdecoder
