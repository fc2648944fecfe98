#include "model/hyperparameters.h"

#include <cmath>

namespace dualdecoder {
namespace {

// Collects the first failure, so that a list of reads stays a list.
class Reader {
 public:
  explicit Reader(const GgufFile& file, const std::string& architecture)
      : file_(file), prefix_(architecture + ".") {}

  void u32(const char* key, std::uint32_t& value) { keep(file_.u32(prefix_ + key), value); }
  void u32_or(const char* key, std::uint32_t& value) { keep(file_.u32_or(prefix_ + key, value), value); }
  void f32(const char* key, float& value) { keep(file_.f32(prefix_ + key), value); }
  void f32_or(const char* key, float& value) { keep(file_.f32_or(prefix_ + key, value), value); }
  void string_or(const char* key, std::string& value) { keep(file_.string_or(prefix_ + key, value), value); }
  /// For keys that converters write always: a model without one may be meant otherwise.
  template <typename T>
  void note_missing(const char* key, const T& assumed, std::vector<std::string>& notes) const {
    if (!file_.has(prefix_ + key)) notes.push_back(fmt::format("{}{} = {}", prefix_, key, assumed));
  }
  Status status() const { return status_; }

 private:
  template <typename T>
  void keep(Result<T> read, T& value) {
    if (!status_) return;
    if (read) {
      value = std::move(*read);
    } else {
      status_ = std::unexpected(read.error());
    }
  }

  const GgufFile& file_;
  std::string prefix_;
  Status status_;
};

Status read_rotary(Reader& reader, const GgufFile& file, Hyperparameters& model) {
  RotaryParameters& rotary = model.rotary;
  rotary.dimensions = model.head_dim;
  rotary.context_original = model.context_train;
  reader.u32_or("rope.dimension_count", rotary.dimensions);
  reader.f32_or("rope.freq_base", rotary.base);
  reader.u32_or("rope.scaling.original_context_length", rotary.context_original);
  std::string scaling = "linear";
  reader.string_or("rope.scaling.type", scaling);
  float factor = 0.0f;
  reader.f32_or("rope.scale_linear", factor);  // the key's old name
  reader.f32_or("rope.scaling.factor", factor);
  reader.f32_or("rope.scaling.attn_factor", rotary.attention_factor);
  if (Status status = reader.status(); !status) return status;
  if (scaling != "none" && scaling != "linear" && scaling != "yarn") {
    return fail(ErrorCode::kUnsupported,
                "{}: rotary scaling \"{}\" is not supported (none, linear, yarn are)", file.path(), scaling);
  }
  reader.note_missing("rope.freq_base", rotary.base, model.assumed);
  rotary.frequency_scale = scaling == "none" || factor == 0.0f ? 1.0f : 1.0f / factor;
  rotary.extrapolation = scaling == "yarn" ? 1.0f : 0.0f;
  return {};
}

Status check_shape(const GgufFile& file, const Hyperparameters& model) {
  const auto range = [&](const char* what, std::uint32_t value, std::uint32_t low,
                         std::uint32_t high) -> Status {
    if (value >= low && value <= high) return {};
    return fail(ErrorCode::kCorrupt, "{}: {} is {}, wanted {} to {}", file.path(), what, value, low, high);
  };
  for (const Status& status : {range("the number of layers", model.layers, 1, 1024),
                               range("the embedding width", model.embedding, 1, 1 << 20),
                               range("the number of heads", model.heads, 1, 4096),
                               range("the number of KV heads", model.kv_heads, 1, 4096),
                               range("the feed-forward width", model.feed_forward, 1, 1 << 22),
                               range("the training context", model.context_train, 1, 1U << 30),
                               range("the vocabulary", model.vocabulary, 1, 1U << 24)}) {
    if (!status) return status;
  }
  if (model.heads % model.kv_heads != 0) {
    return fail(ErrorCode::kCorrupt, "{}: {} heads are not a multiple of {} KV heads", file.path(),
                model.heads, model.kv_heads);
  }
  if (model.head_dim == 0 || model.head_dim % 16 != 0 || model.head_dim > 256) {
    return fail(ErrorCode::kUnsupported,
                "{}: a head size of {} is not supported (multiples of 16 up to 256 are)", file.path(),
                model.head_dim);
  }
  if (model.rotary.dimensions == 0 || model.rotary.dimensions > model.head_dim ||
      model.rotary.dimensions % 2 != 0) {
    return fail(ErrorCode::kCorrupt, "{}: {} rotary dimensions in a head of {}", file.path(),
                model.rotary.dimensions, model.head_dim);
  }
  if (!(model.rms_epsilon >= 0.0f) || !(model.rotary.base > 0.0f) || !(model.rotary.frequency_scale > 0.0f)) {
    return fail(ErrorCode::kCorrupt,
                "{}: norm epsilon {}, rotary base {}, rotary scale {}: one is not usable", file.path(),
                model.rms_epsilon, model.rotary.base, model.rotary.frequency_scale);
  }
  return {};
}

}  // namespace

Result<Hyperparameters> read_hyperparameters(const GgufFile& file) {
  Hyperparameters model;
  const auto architecture = file.string("general.architecture");
  if (!architecture) return std::unexpected(architecture.error());
  model.architecture = *architecture;

  Reader reader(file, model.architecture);
  reader.u32("block_count", model.layers);
  reader.u32("embedding_length", model.embedding);
  reader.u32("attention.head_count", model.heads);
  model.kv_heads = model.heads;
  reader.u32_or("attention.head_count_kv", model.kv_heads);
  reader.u32("feed_forward_length", model.feed_forward);
  reader.u32("context_length", model.context_train);
  reader.f32("attention.layer_norm_rms_epsilon", model.rms_epsilon);
  model.head_dim = model.heads == 0 ? 0 : model.embedding / model.heads;
  std::uint32_t value_dim = model.head_dim;
  reader.u32_or("attention.key_length", model.head_dim);
  reader.u32_or("attention.value_length", value_dim);
  reader.f32_or("attention.scale", model.attention_scale);
  std::uint32_t experts = 0;
  reader.u32_or("expert_count", experts);
  if (Status status = reader.status(); !status) return std::unexpected(status.error());
  reader.note_missing("attention.head_count_kv", model.kv_heads, model.assumed);

  if (experts > 0) {
    return fail(ErrorCode::kUnsupported, "{}: a mixture of {} experts is not supported", file.path(),
                experts);
  }
  if (model.heads != 0 && value_dim != model.head_dim) {
    return fail(ErrorCode::kUnsupported, "{}: K heads of {} with V heads of {} are not supported",
                file.path(), model.head_dim, value_dim);
  }
  const auto vocabulary = file.array_length("tokenizer.ggml.tokens", GGUF_TYPE_STRING);
  if (!vocabulary) return std::unexpected(vocabulary.error());
  model.vocabulary = static_cast<std::uint32_t>(*vocabulary);
  for (const char* key : {"tokenizer.ggml.pre", "tokenizer.ggml.token_type", "tokenizer.ggml.bos_token_id",
                          "tokenizer.ggml.eos_token_id"}) {
    if (!file.has(key)) model.assumed.push_back(fmt::format("{} = libllama's default", key));
  }
  if (Status status = read_rotary(reader, file, model); !status) return std::unexpected(status.error());
  if (Status status = check_shape(file, model); !status) return std::unexpected(status.error());

  if (model.attention_scale == 0.0f)
    model.attention_scale = 1.0f / std::sqrt(static_cast<float>(model.head_dim));
  model.window.assign(model.layers, 0);
  return model;
}

}  // namespace dualdecoder
