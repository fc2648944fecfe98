// The two tiers of one engine: the near tier, the far tier and what moves blocks between them, all sized by
// the memory plan. Sequences live in it; the step asks it for blocks. Owned by the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "decode/block_list.h"
#include "decode/plan.h"
#include "kv/near_tier.h"
#include "kv/residency.h"
#include "transfer/far_file.h"
#include "transfer/far_tier.h"
#include "transfer/transfers.h"

namespace dualdecoder {

/// What the tokens of a sequence attend to beside their windows.
struct SelectionRule {
  Policy policy = Policy::kPrevious;
  std::uint32_t budget_blocks = 1;
};

class Tiers {
 public:
  /// `weights_hash`: names the model in a far file's header. `take_memory`: for the near tier; null: the
  /// host's.
  static Result<std::unique_ptr<Tiers>> create(const MemoryPlan& plan, const TierOptions& options,
                                               std::uint64_t weights_hash,
                                               const TakeNearMemory& take_memory = {});
  ~Tiers();

  const MemoryPlan& plan() const { return plan_; }
  const TierOptions& options() const { return options_; }
  /// Of sequences without one of their own, for the steps to come. The slots stay as planned; a selection
  /// that has no room is streamed.
  void set_rule(const SelectionRule& rule) { rule_ = rule; }
  const SelectionRule& rule() const { return rule_; }
  void set_attend_resident(bool resident) { options_.attend_resident = resident; }
  void set_window(std::uint32_t sink_tokens, std::uint32_t recent_tokens) {
    options_.recent_tokens = recent_tokens;
    plan_.sink_blocks = geometry().blocks_for(sink_tokens);
  }
  /// The blocks beside the window of a row at `position`.
  Candidates candidates_at_position(std::uint32_t position) const {
    return candidates_at(plan_, options_.recent_tokens, position);
  }
  const KvGeometry& geometry() const { return plan_.geometry; }
  const LayerPlan& layer(LayerIndex layer) const { return plan_.layers[layer.value]; }
  bool tiered() const { return far_ != nullptr; }
  /// The layers that have digests.
  std::span<const LayerIndex> selecting_layers() const { return selecting_layers_; }

  NearTier& near() const { return *near_; }
  /// Only when tiered.
  FarTier& far() const { return *far_; }
  Transfers& transfers() const { return *transfers_; }
  /// Null unless the far tier is one.
  const FarFile* file() const { return file_.get(); }
  /// "none", or the port's own words.
  std::string far_description() const;
  /// What a transfer (`what`: "a read") that missed its deadline ends a sequence with.
  Error overdue(const char* what) const {
    return {ErrorCode::kIo, fmt::format("{}: {} does not end", far_description(), what)};
  }
  /// Ends the sequence of `residency` with it, after Transfers::wait() gave up.
  void give_up(Residency& residency, const char* what) const {
    transfers_->note_deadline_missed();
    residency.set_error(overdue(what));
  }
  /// The number of the step last begun; what is wanted in a step keeps its slot in that.
  std::uint64_t step() const { return step_; }
  std::uint64_t begin_step() { return ++step_; }

  /// Keeps the residency of a sequence that is gone until its last transfer has ended.
  void bury(std::unique_ptr<Residency> residency, std::vector<PageIndex> pages);
  /// Forgets the buried ones that have come to rest.
  void sweep();

 private:
  struct Grave {
    std::unique_ptr<Residency> residency;
    std::vector<PageIndex> pages;
  };

  Tiers(const MemoryPlan& plan, const TierOptions& options);
  Status open_far(std::uint64_t weights_hash);

  MemoryPlan plan_;
  TierOptions options_;
  SelectionRule rule_;
  std::vector<LayerIndex> selecting_layers_;
  std::unique_ptr<NearTier> near_;
  std::unique_ptr<FarFile> file_;  // outlives the port in far_
  std::unique_ptr<FarTier> far_;
  std::unique_ptr<Transfers> transfers_;
  std::vector<Grave> graves_;
  std::uint64_t step_ = 1;
};

}  // namespace dualdecoder
