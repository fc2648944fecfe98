// The engine: decodes sequences of one model. The only door to decoding for what lies above (command line,
// server, benchmarks, tests). All memory that depends on options is taken in create(); all calls come from
// one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "decode/step.h"
#include "model/model.h"

namespace dualdecoder {

struct EngineOptions {
  std::uint32_t threads = 1;
  std::uint32_t context = 0;          // tokens per sequence; 0: what the model was trained with
  std::uint32_t sequences = 1;        // at the same time
  std::uint32_t prefill_chunk = 512;  // rows of one prefill step
  std::uint32_t outputs_max = 8;      // rows of one step that want logits; at least `sequences`
  std::uint32_t block_tokens = 32;    // 16, 32 or 64
  bool batch_invariant = false;       // see Forward
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> create(const Model& model, const EngineOptions& options);

  std::unique_ptr<Sequence> new_sequence() { return std::make_unique<Sequence>(*near_); }

  /// Called after each chunk with the tokens done of this call; false stops.
  using Progress = std::function<bool(std::uint32_t done)>;

  /// Appends `tokens` chunk by chunk. Returns the logits of the last one, [vocabulary], valid until the next
  /// call; null when `progress` stopped it (the chunks done stay committed). On an error nothing of this call
  /// is committed: kInvalidArgument names a token outside the vocabulary, kContextExceeded both counts.
  Result<const float*> prefill(Sequence& sequence, std::span<const TokenId> tokens,
                               const Progress& progress = {});

  /// One step over several sequences, each with one or a few tokens: at most max(prefill_chunk, outputs_max)
  /// rows in all, of which outputs_max want logits. Checks like prefill; on an error nothing has changed.
  /// Returns [wanted rows, vocabulary].
  Result<const float*> step(std::span<const StepGroup> groups);

  const Model& model() const { return model_; }
  const EngineOptions& options() const { return options_; }
  std::uint32_t context() const { return options_.context; }
  const NearTier& near() const { return *near_; }
  std::size_t activation_bytes() const { return forward_->activation_bytes(); }
  const std::array<std::uint64_t, kPasses>& pass_ns() const { return step_->pass_ns(); }

 private:
  Engine(const Model& model, const EngineOptions& options) : model_(model), options_(options) {}
  Status check(const Sequence& sequence, std::span<const TokenId> tokens) const;

  const Model& model_;
  EngineOptions options_;
  std::unique_ptr<NearTier> near_;
  std::unique_ptr<Forward> forward_;
  std::unique_ptr<Step> step_;
};

}  // namespace dualdecoder
