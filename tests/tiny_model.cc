#include "tiny_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <optional>
#include <random>

#include <ggml-cpp.h>

#include "base/check.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kScalingOriginalContext = 1024;
constexpr float kScalingFactor = 4.0f;
constexpr std::uint32_t kEndOfText = 2;
constexpr char kChatTemplate[] =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

class TinyModelWriter {
 public:
  explicit TinyModelWriter(const TinyModelOptions& options)
      : options_(options),
        name_(options.architecture_name.empty() ? options.architecture : options.architecture_name),
        gemma3_(options.architecture == "gemma3"),
        qwen2_(options.architecture == "qwen2"),
        qwen3_(options.architecture == "qwen3"),
        gguf_(gguf_init_empty()),
        random_(options.seed) {}

  Status write(const std::string& path) {
    learn_scripts();
    set_shape_keys();
    set_rotary_keys();
    set_tokenizer_keys();
    add_tensors();
    if (options_.edit_keys) options_.edit_keys(gguf_.get());
    if (!gguf_write_to_file(gguf_.get(), path.c_str(), false))
      return fail(ErrorCode::kIo, "cannot write {}", path);
    return {};
  }

 private:
  std::string key(const std::string& suffix) const { return name_ + "." + suffix; }
  void set(const std::string& name, std::uint32_t value) {
    gguf_set_val_u32(gguf_.get(), name.c_str(), value);
  }
  void set(const std::string& name, float value) { gguf_set_val_f32(gguf_.get(), name.c_str(), value); }
  void set(const std::string& name, const char* value) { gguf_set_val_str(gguf_.get(), name.c_str(), value); }
  void set_bool(const std::string& name, bool value) { gguf_set_val_bool(gguf_.get(), name.c_str(), value); }

  // successor_[t] is the likeliest token after t.
  void learn_scripts() {
    if (options_.scripts.empty()) return;
    for (std::uint32_t token = 0; token < kTinyVocabulary; ++token) successor_.push_back(token);
    std::vector<bool> used(kTinyVocabulary);
    for (const std::string& script : options_.scripts) {
      std::optional<std::uint32_t> last;
      for (const char byte : script) {
        std::uint32_t token = kTinyFirstByte + static_cast<unsigned char>(byte);
        if (used[token]) {
          DD_CHECK(last && static_cast<signed char>(byte) >= 0 &&
                       std::find(second_tokens_.begin(), second_tokens_.end(), byte) == second_tokens_.end(),
                   "byte {}", static_cast<int>(byte));
          second_tokens_.push_back(byte);
          token = static_cast<std::uint32_t>(successor_.size());
          successor_.push_back(token);
        } else {
          used[token] = true;
        }
        if (last) successor_[*last] = token;
        last = token;
      }
      if (last) successor_[*last] = kEndOfText;
    }
  }

  // What a layer adds to the residual; with a script, nothing.
  float mixing(float gain) const { return successor_.empty() ? gain : 0.0f; }

  void set_shape_keys() {
    set("general.architecture", name_.c_str());
    set("general.name", "tiny");
    set("general.alignment", std::uint32_t{GGUF_DEFAULT_ALIGNMENT});
    set(key("context_length"), options_.context);
    set(key("embedding_length"), options_.embedding);
    set(key("block_count"), options_.layers);
    set(key("feed_forward_length"), options_.feed_forward);
    set(key("attention.head_count"), options_.heads);
    set(key("attention.head_count_kv"), options_.kv_heads);
    set(key("attention.key_length"), options_.head_dim);
    set(key("attention.value_length"), options_.head_dim);
    set(key("attention.layer_norm_rms_epsilon"), 1e-5f);
    if (gemma3_ && options_.window > 0) {
      set(key("attention.sliding_window"), options_.window);
      set(key("attention.sliding_window_pattern"), options_.window_pattern);
      set(key("rope.freq_base_swa"), 5000.0f);
    }
  }

  void set_rotary_keys() {
    set(key("rope.dimension_count"), options_.head_dim);
    set(key("rope.freq_base"), 20000.0f);
    if (options_.scaling != TinyScaling::kLinear && options_.scaling != TinyScaling::kYarn) return;
    const bool yarn = options_.scaling == TinyScaling::kYarn;
    set(key("rope.scaling.type"), yarn ? "yarn" : "linear");
    set(key("rope.scaling.factor"), kScalingFactor);
    set(key("rope.scaling.original_context_length"), kScalingOriginalContext);
    if (yarn) set(key("rope.scaling.attn_factor"), 1.1f);
  }

  void set_tokenizer_keys() {
    constexpr std::int32_t kNormal = 1, kUnknown = 2, kControl = 3, kByte = 6;
    std::vector<std::string> texts = {"<unk>", "<s>", "</s>", "<pad>"};
    std::vector<std::int32_t> kinds = {kUnknown, kControl, kControl, kControl};
    for (int byte = 0; byte < 256; ++byte) {
      texts.push_back(fmt::format("<0x{:02X}>", byte));
      kinds.push_back(kByte);
    }
    texts.emplace_back("\xe2\x96\x81");  // U+2581, which stands for a space
    kinds.push_back(kNormal);
    DD_CHECK(texts.size() == kTinyVocabulary);
    for (const char byte : second_tokens_) {
      texts.emplace_back(1, byte);
      kinds.push_back(kNormal);
    }
    const std::vector<float> scores(texts.size(), 0.0f);
    std::vector<const char*> pointers;
    for (const std::string& text : texts) pointers.push_back(text.c_str());

    gguf_context* gguf = gguf_.get();
    set("tokenizer.ggml.model", "llama");
    set("tokenizer.ggml.pre", "default");
    gguf_set_arr_str(gguf, "tokenizer.ggml.tokens", pointers.data(), pointers.size());
    gguf_set_arr_data(gguf, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
    gguf_set_arr_data(gguf, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, kinds.data(), kinds.size());
    set("tokenizer.ggml.unknown_token_id", 0U);
    set("tokenizer.ggml.bos_token_id", 1U);
    set("tokenizer.ggml.eos_token_id", kEndOfText);
    set("tokenizer.ggml.padding_token_id", 3U);
    set_bool("tokenizer.ggml.add_bos_token", true);
    set_bool("tokenizer.ggml.add_eos_token", false);
    set_bool("tokenizer.ggml.add_space_prefix", false);
    set("tokenizer.chat_template", kChatTemplate);
  }

  void add_tensors() {
    const std::int64_t width = options_.embedding;
    const std::int64_t query = std::int64_t{options_.heads} * options_.head_dim;
    const std::int64_t kv = std::int64_t{options_.kv_heads} * options_.head_dim;
    const std::int64_t inner = options_.feed_forward;
    // As the output matrix, the table gives logits of a spread of about 3. Gemma scales what it embeds by
    // sqrt(width).
    const float spread = 3.0f / std::sqrt(static_cast<float>(width));
    const bool tied = options_.tied_output;
    if (successor_.empty()) {
      add("token_embd.weight", {width, kTinyVocabulary}, 0.0f,
          gemma3_ ? spread / 3.0f
          : tied  ? spread
                  : 1.0f);
      add_vector("output_norm.weight", width, gemma3_ && tied ? 3.0f : 1.0f, 0.1f);
      if (!tied) add("output.weight", {width, kTinyVocabulary}, 0.0f, spread);
    } else {
      add_script_tensors();
    }
    if (options_.scaling == TinyScaling::kLlama3) add_llama3_factors();
    for (std::uint32_t i = 0; i < options_.layers; ++i) {
      const std::string layer = fmt::format("blk.{}.", i);
      add_vector(layer + "attn_norm.weight", width, 1.0f, 0.1f);
      add_matrix(layer + "attn_q.weight", width, query, 1.5f);
      add_matrix(layer + "attn_k.weight", width, kv, 1.5f);
      add_matrix(layer + "attn_v.weight", width, kv, 1.5f);
      if (qwen2_) {
        add_vector(layer + "attn_q.bias", query, 0.0f, 0.3f);
        add_vector(layer + "attn_k.bias", kv, 0.0f, 0.3f);
        add_vector(layer + "attn_v.bias", kv, 0.0f, 0.3f);
      }
      if (qwen3_ || gemma3_) {
        add_vector(layer + "attn_q_norm.weight", options_.head_dim, 1.4f, 0.1f);
        add_vector(layer + "attn_k_norm.weight", options_.head_dim, 1.4f, 0.1f);
      }
      add_matrix(layer + "attn_output.weight", query, width, mixing(1.5f));
      if (gemma3_) add_vector(layer + "post_attention_norm.weight", width, 1.0f, 0.1f);
      add_vector(layer + "ffn_norm.weight", width, 1.0f, 0.1f);
      add_matrix(layer + "ffn_gate.weight", width, inner, 1.5f);
      add_matrix(layer + "ffn_up.weight", width, inner, 1.5f);
      add_matrix(layer + "ffn_down.weight", inner, width, mixing(2.0f));
      if (gemma3_) add_vector(layer + "post_ffw_norm.weight", width, 1.0f, 0.1f);
    }
  }

  // Nothing is added to a token's embedding on its way to the output matrix, where the row of its successor
  // is that embedding: a logit of about 20, and those of the others spread by an eighth of it.
  void add_script_tensors() {
    const std::size_t width = options_.embedding;
    std::vector<float> embeddings(width * successor_.size());
    std::normal_distribution<float> distribution;
    for (float& value : embeddings) value = distribution(random_);
    std::vector<float> outputs(embeddings.size());
    for (std::size_t token = 0; token < successor_.size(); ++token) {
      for (std::size_t i = 0; i < width; ++i)
        outputs[successor_[token] * width + i] +=
            20.0f / static_cast<float>(width) * embeddings[token * width + i];
    }
    const std::vector<std::int64_t> shape = {options_.embedding,
                                             static_cast<std::int64_t>(successor_.size())};
    add_data("token_embd.weight", shape, options_.type, std::move(embeddings));
    add_vector("output_norm.weight", options_.embedding, 1.0f, 0.0f);
    add_data("output.weight", shape, options_.type, std::move(outputs));
  }

  // Factor 8, low and high frequency factors 1 and 4 (Grattafiori et al. 2024, as released).
  void add_llama3_factors() {
    constexpr float kFactor = 8.0f, kLow = 1.0f, kHigh = 4.0f;
    std::vector<float> factors;
    for (std::uint32_t i = 0; i < options_.head_dim / 2; ++i) {
      const float exponent = 2.0f * static_cast<float>(i) / static_cast<float>(options_.head_dim);
      const float wavelength = 2.0f * std::numbers::pi_v<float> * std::pow(20000.0f, exponent);
      const float turns = static_cast<float>(kScalingOriginalContext) / wavelength;
      const float smooth = std::clamp((turns - kLow) / (kHigh - kLow), 0.0f, 1.0f);
      factors.push_back(1.0f / ((1.0f - smooth) / kFactor + smooth));
    }
    add_data("rope_freqs.weight", {static_cast<std::int64_t>(factors.size())}, GGML_TYPE_F32, factors);
  }

  void add_matrix(const std::string& name, std::int64_t inputs, std::int64_t outputs, float gain) {
    add(name, {inputs, outputs}, 0.0f, gain / std::sqrt(static_cast<float>(inputs)));
  }
  void add_vector(const std::string& name, std::int64_t elements, float mean, float deviation) {
    add(name, {elements}, mean, deviation);
  }

  void add(const std::string& name, std::vector<std::int64_t> shape, float mean, float deviation) {
    std::size_t elements = 1;
    for (const std::int64_t extent : shape) elements *= static_cast<std::size_t>(extent);
    std::vector<float> values(elements, mean);
    if (deviation > 0.0f) {
      std::normal_distribution<float> distribution(mean, deviation);
      for (float& value : values) value = distribution(random_);
    }
    const ggml_type type = shape.size() > 1 ? options_.type : GGML_TYPE_F32;
    add_data(name, std::move(shape), type, std::move(values));
  }

  void add_data(const std::string& name, std::vector<std::int64_t> shape, ggml_type type,
                std::vector<float> values) {
    if (const auto other = options_.shapes.find(name); other != options_.shapes.end()) shape = other->second;
    if (const auto other = options_.types.find(name); other != options_.types.end()) type = other->second;
    if (shape.empty()) return;
    std::size_t elements = 1;
    for (const std::int64_t extent : shape) elements *= static_cast<std::size_t>(extent);
    values.resize(elements);

    ggml_context_ptr& context = contexts_.emplace_back(
        ggml_init({.mem_size = elements * sizeof(float) + 4096, .mem_buffer = nullptr, .no_alloc = false}));
    ggml_tensor* tensor = ggml_new_tensor(context.get(), type, static_cast<int>(shape.size()), shape.data());
    ggml_set_name(tensor, name.c_str());
    if (type == GGML_TYPE_F32 || type == GGML_TYPE_I32) {
      std::memcpy(tensor->data, values.data(), elements * sizeof(float));
    } else {
      ggml_quantize_chunk(type, values.data(), tensor->data, 0,
                          static_cast<std::int64_t>(elements) / shape[0], shape[0], nullptr);
    }
    gguf_add_tensor(gguf_.get(), tensor);
  }

  const TinyModelOptions& options_;
  std::string name_;
  bool gemma3_, qwen2_, qwen3_;
  gguf_context_ptr gguf_;
  std::vector<ggml_context_ptr> contexts_;  // one a tensor
  std::mt19937_64 random_;
  std::vector<std::uint32_t> successor_;  // [vocabulary]; empty without scripts
  std::string second_tokens_;             // bytes that have a second token, after kTinyVocabulary
};

}  // namespace

Status write_tiny_model(const std::string& path, const TinyModelOptions& options) {
  return TinyModelWriter(options).write(path);
}

void retype_key(gguf_context* gguf, const std::string& key, gguf_type type) {
  const std::int64_t id = gguf_find_key(gguf, key.c_str());
  DD_CHECK(id >= 0, "{}", key);
  double value = 1.0;
  switch (gguf_get_kv_type(gguf, id)) {
    case GGUF_TYPE_UINT32:
      value = gguf_get_val_u32(gguf, id);
      break;
    case GGUF_TYPE_FLOAT32:
      value = gguf_get_val_f32(gguf, id);
      break;
    case GGUF_TYPE_BOOL:
      value = gguf_get_val_bool(gguf, id) ? 1.0 : 0.0;
      break;
    default:
      break;
  }
  const char* name = key.c_str();
  switch (type) {
    case GGUF_TYPE_UINT8:
      gguf_set_val_u8(gguf, name, static_cast<std::uint8_t>(value));
      break;
    case GGUF_TYPE_INT8:
      gguf_set_val_i8(gguf, name, static_cast<std::int8_t>(value));
      break;
    case GGUF_TYPE_UINT16:
      gguf_set_val_u16(gguf, name, static_cast<std::uint16_t>(value));
      break;
    case GGUF_TYPE_INT16:
      gguf_set_val_i16(gguf, name, static_cast<std::int16_t>(value));
      break;
    case GGUF_TYPE_UINT32:
      gguf_set_val_u32(gguf, name, static_cast<std::uint32_t>(value));
      break;
    case GGUF_TYPE_INT32:
      gguf_set_val_i32(gguf, name, static_cast<std::int32_t>(value));
      break;
    case GGUF_TYPE_UINT64:
      gguf_set_val_u64(gguf, name, static_cast<std::uint64_t>(value));
      break;
    case GGUF_TYPE_INT64:
      gguf_set_val_i64(gguf, name, static_cast<std::int64_t>(value));
      break;
    case GGUF_TYPE_FLOAT32:
      gguf_set_val_f32(gguf, name, static_cast<float>(value));
      break;
    case GGUF_TYPE_FLOAT64:
      gguf_set_val_f64(gguf, name, value);
      break;
    case GGUF_TYPE_BOOL:
      gguf_set_val_bool(gguf, name, value != 0.0);
      break;
    case GGUF_TYPE_STRING:
      gguf_set_val_str(gguf, name, fmt::format("{}", value).c_str());
      break;
    case GGUF_TYPE_ARRAY: {
      const auto element = static_cast<std::uint32_t>(value);
      gguf_set_arr_data(gguf, name, GGUF_TYPE_UINT32, &element, 1);
      break;
    }
    default:
      DD_CHECK(false, "{}", static_cast<int>(type));
  }
}

}  // namespace dualdecoder
