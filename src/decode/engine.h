// The engine: decodes sequences of one model. The only door to decoding for what lies above (command line,
// server, benchmarks, tests). All memory that depends on options is taken in create(); all calls come from
// one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "decode/engine_options.h"
#include "decode/prefix_cache.h"
#include "decode/step.h"
#include "decode/tiers.h"
#include "model/device_attention.h"
#include "model/device_near_memory.h"
#include "model/forward.h"
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
  /// max(prefill_chunk, outputs_max) rows in all (outputs_max with EngineOptions::prompts_beside), of which
  /// outputs_max want logits. Checks like prefill; on an error nothing has changed. Returns [wanted rows,
  /// vocabulary]. A sequence whose far tier failed or is full has an error() afterwards and meaningless
  /// logits; the others are as if it had not been there.
  Result<const float*> step(std::span<const StepGroup> groups);

  /// A step over prompts that goes on in parts, so that others can be decoded in between: step() and the
  /// other calls may come between these, for other sequences than those of `groups`; that needs
  /// EngineOptions::prompts_beside. Checks and failures as in step(). Ends when advance_prompts() says so.
  Status begin_prompts(std::span<const StepGroup> groups);
  bool prompts_under_way() const { return prompts_under_way_; }
  /// The next `layers` layers. Nothing while some are left; with the last one, what step() returns, valid
  /// until the next step over prompts.
  std::optional<const float*> advance_prompts(std::uint32_t layers);

  /// Tells `watch` of the steps of decoding to come; null: nobody.
  void set_watch(StepWatch* watch) { decoding_.step->set_watch(watch); }

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
  /// Policy and budget of one sequence alone, for its steps to come, whatever is set for the others. Both
  /// fail as kInvalidArgument for a policy that is not one of own_policies().
  Status set_selection(Sequence& sequence, Policy policy, std::uint32_t budget_tokens) const;
  Status check_selection(Policy policy, std::uint32_t budget_tokens) const;
  /// Those that a sequence may have for itself. Constant.
  std::vector<Policy> own_policies() const;
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
  StepStats stats() const;
  const Coverage& coverage() const { return decoding_.step->predictor().coverage(); }
  std::span<const LayerRecall> recall() const { return decoding_.step->predictor().recall(); }
  /// Everything in host memory beside weights, KV, digests and tables: activations and what attention works
  /// in. With the draft's.
  std::size_t activation_bytes() const;
  /// Activations in the memory of the model's device; 0 on the CPU.
  std::size_t device_activation_bytes() const;
  /// Of the device's memory: for attention, and the near tier. 0 on the CPU.
  std::size_t device_attention_bytes() const;
  std::size_t device_near_bytes() const;
  std::array<std::uint64_t, kPasses> pass_ns() const;

 private:
  // What one step needs to be under way.
  struct Track {
    std::unique_ptr<Forward> forward;
    std::unique_ptr<DeviceAttention> attention;  // null: on the CPU
    std::unique_ptr<Step> step;
  };

  Engine(const Model& model, const EngineOptions& options) : model_(model), options_(options) {}
  TakeNearMemory near_memory(const MemoryPlan& plan);
  Status make_tracks();
  Track& prompt_track() { return prompts_.step ? prompts_ : decoding_; }
  /// Of one or both tracks.
  template <typename Fn>
  void for_each_track(const Fn& fn) const;
  Status begin(const Track& track, std::span<const StepGroup> groups);
  Status check(const Sequence& sequence, std::span<const TokenId> tokens) const;
  Status check(const StepGroup& group) const;
  Status check_room(const Sequence& sequence, std::size_t tokens) const;

  const Model& model_;
  EngineOptions options_;
  std::unique_ptr<Engine> draft_;
  Track decoding_;
  Track prompts_;  // empty unless EngineOptions::prompts_beside
  bool prompts_under_way_ = false;
  DeviceNearMemory* device_near_ = nullptr;  // the near tier's; null: on the host
  std::unique_ptr<Tiers> tiers_;  // goes before the tracks: it waits for late reads, whose flags are theirs
  std::unique_ptr<PrefixCache> prefixes_;
};

}  // namespace dualdecoder
