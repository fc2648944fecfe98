// Small GGUF files with seeded random weights and a byte-level vocabulary, for tests: every architecture and
// variant of rotary scaling, and files damaged on purpose. Loads in milliseconds, decodes in microseconds.
// Weights are scaled so that attention is neither flat nor one-hot and the likeliest token changes from
// position to position.
//
// The vocabulary (SentencePiece): <unk>, <s>, </s>, <pad>, the 256 bytes, the space mark, and what scripts
// add.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ggml.h>
#include <gguf.h>

#include "base/error.h"

namespace dualdecoder {

enum class TinyScaling { kNone, kLinear, kYarn, kLlama3 };

struct TinyModelOptions {
  std::string architecture = "llama";  // or qwen2, qwen3, gemma3
  std::uint32_t layers = 2;
  std::uint32_t embedding = 64;
  std::uint32_t heads = 4;
  std::uint32_t kv_heads = 2;
  std::uint32_t head_dim = 16;
  std::uint32_t feed_forward = 128;
  std::uint32_t context = 4096;
  TinyScaling scaling = TinyScaling::kNone;
  std::uint32_t window = 64;         // gemma3: tokens a windowed layer sees; 0: every layer sees all
  std::uint32_t window_pattern = 2;  // gemma3: every n-th layer sees all
  bool tied_output = false;          // the output matrix is the embedding table
  ggml_type type = GGML_TYPE_F32;    // of the matrices
  std::uint64_t seed = 1;
  /// Texts that the model says by heart, which makes the likeliest token a function of the current one alone:
  /// a prompt that ends with the first byte of a script is continued with the rest of it and the end of text,
  /// and every other token repeats itself. A byte that occurs again, in one script or in several, gets a
  /// second token of its own, so that it can be followed by something else; a third time there is none left,
  /// and such a byte must be ASCII. llama only.
  std::vector<std::string> scripts = {};

  // Damage.
  std::string architecture_name = {};                 // written instead of `architecture`, if not empty
  std::function<void(gguf_context*)> edit_keys = {};  // called before the file is written
  // Tensors written with another shape, or left out if that is empty; and with another type.
  std::map<std::string, std::vector<std::int64_t>> shapes = {};
  std::map<std::string, ggml_type> types = {};
};

inline constexpr std::uint32_t kTinyVocabulary = 261;  // without scripts
inline constexpr std::int32_t kTinyFirstByte = 4;      // the token of byte b is kTinyFirstByte + b

Status write_tiny_model(const std::string& path, const TinyModelOptions& options);

/// Gives a key another type and, as far as that type can hold it, the same value. GGUF_TYPE_ARRAY: an array
/// of one.
void retype_key(gguf_context* gguf, const std::string& key, gguf_type type);

}  // namespace dualdecoder
