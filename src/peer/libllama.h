// libllama as a dense engine behind an interface like ours: the peer that benchmarks measure us against,
// alternately in one process, and the reference that tests hold our logits against. Set up as libllama's own
// tools do it: flash attention, a KV cache of f16, one KV stream per sequence, repacked weights, a thread
// pool that stays.
//
// Sequences are numbered 0 .. sequences - 1 and start empty. Owned by one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <llama-cpp.h>

#include "base/error.h"

struct ggml_threadpool;

namespace dualdecoder {

struct LibllamaOptions {
  std::uint32_t threads = 1;
  std::uint32_t context = 0;  // tokens per sequence; 0: what the model was trained with
  std::uint32_t sequences = 1;
  std::uint32_t batch = 512;  // rows computed at once
  std::uint32_t outputs = 1;  // rows of one call that want logits; at least `sequences`
  bool flash_attention = true;
  ggml_backend_dev_t device = nullptr;  // for all layers and their KV; null: the CPU
};

class Libllama {
 public:
  static Result<std::unique_ptr<Libllama>> load(const std::string& path, const LibllamaOptions& options);
  ~Libllama();
  Libllama(const Libllama&) = delete;
  Libllama& operator=(const Libllama&) = delete;

  /// Appends at most `batch` tokens to one sequence. Returns the logits of the last `wanted` of them,
  /// [wanted, vocabulary], valid until the next call; null when wanted is 0.
  Result<const float*> append(std::uint32_t sequence, std::span<const std::int32_t> tokens,
                              std::uint32_t wanted);

  /// Called after each batch with the tokens done of this call; false stops.
  using Progress = std::function<bool(std::uint32_t done)>;
  /// Appends `tokens` batch by batch. Returns the logits of the last one; null when `progress` stopped it.
  Result<const float*> prefill(std::uint32_t sequence, std::span<const std::int32_t> tokens,
                               const Progress& progress = {});

  /// One step: tokens[i] is appended to sequence i. Returns the logits of all, [tokens.size(), vocabulary].
  Result<const float*> decode(std::span<const std::int32_t> tokens);

  /// Forgets everything from position `tokens` on. kUnsupported when a sliding window has already dropped
  /// tokens that the sequence would need there; then nothing has changed.
  Status truncate(std::uint32_t sequence, std::uint32_t tokens);

  /// Gives `to` the contents of `from`, in cells of its own.
  void copy(std::uint32_t from, std::uint32_t to);

  std::uint32_t tokens(std::uint32_t sequence) const { return tokens_[sequence]; }
  std::uint32_t vocabulary() const;
  /// Per sequence; libllama rounds what was asked for up.
  std::uint32_t context() const;

 private:
  struct ThreadpoolDeleter {
    void operator()(ggml_threadpool* pool) const;
  };

  Libllama() = default;
  void add_row(std::int32_t token, std::uint32_t sequence, std::uint32_t position, bool wanted);
  Result<const float*> run(std::uint32_t wanted);

  // The batch's arrays, filled by add_row.
  struct Rows {
    std::vector<llama_token> tokens;
    std::vector<llama_pos> positions;
    std::vector<std::int32_t> sequence_counts;
    std::vector<llama_seq_id> sequences;
    std::vector<llama_seq_id*> sequence_lists;  // into `sequences`
    std::vector<std::int8_t> wanted;
  };

  LibllamaOptions options_;
  std::unique_ptr<ggml_threadpool, ThreadpoolDeleter> threadpool_;  // outlives the context that runs on it
  llama_model_ptr model_;
  llama_context_ptr context_;
  Rows rows_;
  std::vector<std::uint32_t> tokens_;  // [sequence]
};

}  // namespace dualdecoder
