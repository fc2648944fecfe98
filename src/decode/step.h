// One step: new rows of one or many sequences through all layers. Read step.cc's run() as the list of its
// passes (docs/design.md, "The step").
//
// Here every block is near, so the passes that move blocks between the tiers do not exist yet; they come
// between `append` and `attend`. Owned by the engine thread; append and attend use ggml's threads.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "decode/sequence.h"
#include "model/forward.h"

namespace dualdecoder {

enum class LogitsWanted { kNone, kLast, kAll };

/// Rows of one sequence: `tokens` stand at its end, in order.
struct StepGroup {
  Sequence* sequence = nullptr;
  std::span<const TokenId> tokens;
  LogitsWanted logits = LogitsWanted::kLast;
};

enum class Pass { kProject, kAppend, kAttend, kFinish };
inline constexpr std::size_t kPasses = 4;
inline constexpr std::array<const char*, kPasses> kPassNames = {"project", "append", "attend", "finish"};

class Step {
 public:
  Step(const Model& model, Forward& forward);

  /// Computes and commits all rows. The sequences' block tables have room for them. Returns the wanted
  /// logits, [wanted rows, vocabulary] in the order of the groups, valid until the next run; null when none
  /// are wanted.
  const float* run(std::span<const StepGroup> groups);

  /// Nanoseconds spent in each pass since the start.
  const std::array<std::uint64_t, kPasses>& pass_ns() const { return pass_ns_; }

 private:
  void begin(std::span<const StepGroup> groups);
  void append(LayerIndex layer, const LayerRows& rows);
  void attend(std::span<const StepGroup> groups, LayerIndex layer, const LayerRows& rows);
  void gather_blocks(const StepGroup& group, LayerIndex layer);

  // A run of tokens that fall into one block, for append.
  struct Stretch {
    const Sequence* sequence = nullptr;
    std::uint32_t row = 0;       // first row
    std::uint32_t position = 0;  // of that row
    std::uint32_t tokens = 0;
  };

  const Model& model_;
  Forward& forward_;
  AttentionShape shape_;
  AttentionBatch attention_;
  std::array<std::uint64_t, kPasses> pass_ns_{};

  // Reused from step to step.
  std::vector<TokenId> tokens_;
  std::vector<std::uint32_t> positions_;
  std::vector<std::uint32_t> output_rows_;
  std::vector<Stretch> stretches_;
  std::vector<KvBlockView> views_;
  std::vector<AttentionGroup> attention_groups_;
};

}  // namespace dualdecoder
