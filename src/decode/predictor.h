// Chooses what the tokens of a step attend to beside their windows, and brings it near ahead of the need.
//
// The selection of a layer is ranked with the token's own query (select), or was ranked in the step before
// with a query that predicts it (predict): docs/tiers.md, "Policies". What a prediction lacks near is read
// while the rest of the step is computed; it has until that layer's next attention.
//
// One layer of a step: select(), attention, predict(), turn_ring(). After the last one rank_predictions().
// Owned by the engine thread; ranks with ggml's threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decode/ranker.h"
#include "decode/step_work.h"
#include "decode/streamer.h"
#include "model/forward.h"

namespace dualdecoder {

/// Of one layer, over all steps: how much of what tokens' own queries select had been predicted. Only where a
/// correction ranks again.
struct LayerRecall {
  std::uint64_t selected = 0;   // blocks
  std::uint64_t predicted = 0;  // of these
};

class Predictor {
 public:
  /// `streamer`: empty whenever select() is called. Counts in `stats`.
  Predictor(const Hyperparameters& model, const AttentionShape& shape, Forward& forward, Tiers& tiers,
            Streamer& streamer, StepStats& stats);

  /// A step with `works` begins, which stay until it ends: their windows and what is selected for them keep
  /// their slots. `step`: its number.
  void begin(std::span<Work> works, std::uint64_t step);
  /// Before the layer's blocks are brought near. Sets Work::selecting.
  void select(LayerIndex layer, const LayerRows& rows);
  /// For the next step, when the layer has been attended to.
  void predict(LayerIndex layer, const LayerRows& rows);
  /// The layer has been attended to and is done with its set of the ring.
  void turn_ring(LayerIndex layer);
  /// What predict() has left to be ranked together.
  void rank_predictions();

  const Coverage& coverage() const { return ranker_.coverage(); }
  std::span<const LayerRecall> recall() const { return recall_; }

 private:
  // A ranking for the next step that waits for others.
  struct Prediction {
    std::size_t work = 0;  // of works_
    LayerIndex layer = {};
    Candidates candidates = {};
  };

  const float* own_query(const Work& work, const float* q) const;
  const float* last_query(const Work& work, const float* q) const;
  bool ranks_with_own(const Work& work, LayerIndex layer, const float* q);
  void note_recall(LayerIndex layer);
  void select_ahead(LayerIndex layer, const LayerRows& rows);
  bool ranks_again(const Work& work, LayerIndex layer, const Candidates& candidates) const;
  RankRequest request_of(const Work& work, LayerIndex layer, const float* q,
                         const Candidates& candidates) const;
  void rank();
  void fetch_ahead(Work& work, LayerIndex layer, std::uint32_t position, std::uint64_t step);
  void keep_window_near(const Work& work, std::uint32_t position, LayerIndex layer, std::uint64_t step) const;
  void keep_selection_near(const Work& work, LayerIndex layer, std::uint64_t step) const;
  void unkeep_selection(const Work& work, LayerIndex layer) const;

  const Hyperparameters& model_;
  Forward& forward_;
  Tiers& tiers_;
  Streamer& streamer_;
  StepStats& stats_;
  Ranker ranker_;
  std::vector<LayerRecall> recall_;  // [layer]
  std::span<Work> works_;            // of this step
  std::uint64_t step_ = 0;           // its number

  // Reused from step to step.
  std::vector<RankRequest> rank_requests_;
  std::vector<BlockIndex> predicted_blocks_;  // of rank_requests_, one after the other
  std::vector<std::size_t> predicted_end_;    // [request]
  std::vector<Prediction> predictions_;
  std::vector<float> predicted_q_;  // [prediction, heads, head_dim]
};

}  // namespace dualdecoder
