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
#include "decode/engine_options.h"
#include "decode/prefix_cache.h"
#include "decode/step.h"
#include "decode/tiers.h"
#include "model/model.h"

namespace dualdecoder {

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> create(const Model& model, const EngineOptions& options);

  /// kOutOfMemory when `options().sequences` of them live. They must not outlive the engine.
  Result<std::unique_ptr<Sequence>> new_sequence() { return Sequence::create(*tiers_); }

  /// The prefixes kept in the far tier; null unless TierOptions::keep_prefixes.
  PrefixCache* prefixes() { return prefixes_.get(); }
  const PrefixCache* prefixes() const { return prefixes_.get(); }

  /// A new sequence that begins as the first `tokens` tokens of `sequence`, computed once and kept once
  /// (Sequence::fork). kInvalidArgument when there are not as many.
  Result<std::unique_ptr<Sequence>> fork(Sequence& sequence, std::uint32_t tokens);

  /// Called after each chunk with the tokens done of this call; false stops.
  using Progress = std::function<bool(std::uint32_t done)>;

  /// Appends `tokens` chunk by chunk. Returns the logits of the last one, [vocabulary], valid until the next
  /// call; null when `progress` stopped it (the chunks done stay committed). On an error nothing of this call
  /// is committed: kInvalidArgument names a token outside the vocabulary, kContextExceeded both counts. Only
  /// a failure of the far tier can come later; it is sequence.error(), and ends the sequence.
  Result<const float*> prefill(Sequence& sequence, std::span<const TokenId> tokens,
                               const Progress& progress = {});

  /// One step over several sequences, each with one or a few tokens, or one or none and a guess: at most
  /// max(prefill_chunk, outputs_max) rows in all, of which outputs_max want logits. Checks like prefill; on
  /// an error nothing has changed. Returns [wanted rows, vocabulary]. A sequence whose far tier failed or is
  /// full has an error() afterwards and meaningless logits; the others are as if it had not been there.
  Result<const float*> step(std::span<const StepGroup> groups);

  /// Whether the token behind the next one of `sequence` will find more blocks beside its window than it may
  /// select. Only then does a guess of it have anything to tell.
  bool needs_prediction(const Sequence& sequence) const;

  /// Commits the guess of the last step, in which `sequence` had one. On an error (a full far tier) it is not
  /// committed, and nothing has changed.
  Status accept_guess(Sequence& sequence);

  /// Appends `tokens` tokens of random K and V, to reach a depth fast. For measuring speed: nothing that is
  /// decoded afterwards means anything. Errors like prefill.
  Status fill_synthetic(Sequence& sequence, std::uint32_t tokens, std::uint64_t seed);

  /// Bytes per second at which single blocks of `sequence` come from the far tier, as many in flight as its
  /// port takes. Tiered, some pages written.
  Result<double> measure_far_bandwidth(Sequence& sequence);

  /// Changes policy and budget for the steps to come, to compare them over the same KV. kInvalidArgument for
  /// a policy that this engine was not made for: a selecting one after kFull or without a far tier,
  /// kPreviousLayer unless made with it.
  Status set_selection(Policy policy, std::uint32_t budget_tokens);
  /// The same with the first and the last tokens, which are always near. kInvalidArgument for more of either
  /// than the engine was made with.
  Status set_window(std::uint32_t sink_tokens, std::uint32_t recent_tokens);
  /// Whether a token attends to all that is near (TierOptions::attend_resident), for the steps to come.
  void set_attend_resident(bool resident) { tiers_->set_attend_resident(resident); }

  const Model& model() const { return model_; }
  /// Of DraftKind::kModel; else null.
  Engine* draft() const { return draft_.get(); }
  const EngineOptions& options() const { return options_; }
  std::uint32_t context() const { return options_.context; }
  const MemoryPlan& plan() const { return tiers_->plan(); }
  const Tiers& tiers() const { return *tiers_; }
  const NearTier& near() const { return tiers_->near(); }
  const StepStats& stats() const { return step_->stats(); }
  const Coverage& coverage() const { return step_->predictor().coverage(); }
  std::span<const LayerRecall> recall() const { return step_->predictor().recall(); }
  /// Everything beside weights, KV, digests and tables: activations and what attention works in. With the
  /// draft's.
  std::size_t activation_bytes() const {
    return forward_->activation_bytes() + step_->carry_bytes() + (draft_ ? draft_->activation_bytes() : 0);
  }
  const std::array<std::uint64_t, kPasses>& pass_ns() const { return step_->pass_ns(); }

 private:
  Engine(const Model& model, const EngineOptions& options) : model_(model), options_(options) {}
  Status check(const Sequence& sequence, std::span<const TokenId> tokens) const;
  Status check(const StepGroup& group) const;
  Status check_room(const Sequence& sequence, std::size_t tokens) const;

  const Model& model_;
  EngineOptions options_;
  std::unique_ptr<Engine> draft_;
  std::unique_ptr<Forward> forward_;
  std::unique_ptr<Step> step_;
  std::unique_ptr<Tiers>
      tiers_;  // goes before the step: it waits for late reads, of which that keeps the flags
  std::unique_ptr<PrefixCache> prefixes_;
};

}  // namespace dualdecoder
