#include "decode/predictor.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "decode/pass_timer.h"

namespace dualdecoder {
namespace {

/// A layer is ranked at every step; for each so many tokens of context, one step later.
constexpr std::uint64_t kTokensPerInterval = 32768;
constexpr std::size_t kRankedTogether = 3;  // rankings for each thread, at least

// Smallest over the query heads: one that turned away is enough to want other blocks.
float cosine(const float* a, const float* b, const Hyperparameters& model) {
  float smallest = 1.0f;
  for (std::uint32_t head = 0; head < model.heads; ++head, a += model.head_dim, b += model.head_dim) {
    const float ab = std::inner_product(a, a + model.head_dim, b, 0.0f);
    const float aa = std::inner_product(a, a + model.head_dim, a, 0.0f);
    const float bb = std::inner_product(b, b + model.head_dim, b, 0.0f);
    smallest = std::min(smallest, aa * bb > 0.0f ? ab / std::sqrt(aa * bb) : 0.0f);
  }
  return smallest;
}

}  // namespace

Predictor::Predictor(const Hyperparameters& model, const AttentionShape& shape, Forward& forward,
                     Tiers& tiers, Streamer& streamer, StepStats& stats)
    : model_(model),
      forward_(forward),
      tiers_(tiers),
      streamer_(streamer),
      stats_(stats),
      ranker_(shape, tiers, forward),
      recall_(model.layers) {}

void Predictor::begin(std::span<Work> works, std::uint64_t step) {
  works_ = works;
  step_ = step;
  for (const Work& work : works_) {
    // A prompt attends to no selection, and may need its slots for the blocks that it fills.
    if (!work.decodes()) work.sequence->residency().forget_wants();
    for (LayerIndex layer; layer.value < model_.layers; ++layer) {
      keep_window_near(work, work.position, layer, step_);
      if (work.decodes()) keep_selection_near(work, layer, step_);
    }
  }
}

// ---- select

// Of the last committed row; of the guess where that stands alone.
const float* Predictor::own_query(const Work& work, const float* q) const {
  const std::uint32_t row = work.committed == 0 ? 0 : work.committed - 1;
  return q + (std::size_t{work.first_row} + row) * model_.query_width();
}

const float* Predictor::last_query(const Work& work, const float* q) const {
  return q + (std::size_t{work.first_row} + work.rows - 1) * model_.query_width();
}

// Ranks with this step's own queries, where the policy or the correction says so, nothing was ranked before,
// or chunks that rank nothing have moved blocks out of the window since. A context that the budget has room
// for is taken whole.
void Predictor::select(LayerIndex layer, const LayerRows& rows) {
  rank_requests_.clear();
  predicted_blocks_.clear();
  predicted_end_.clear();
  for (Work& work : works_) {
    work.selecting = work.sequence->selects(layer) && work.decodes();
    if (!work.selecting || work.sequence->error()) continue;
    const float* const q = own_query(work, rows.q);
    const Candidates candidates = tiers_.candidates_at_position(work.position);
    Selection& selection = work.sequence->selection(layer);
    if (work.sequence->selects_all(candidates)) {
      selection.take_all(candidates);
      continue;
    }
    if (selection.valid && selection.end == candidates.end && !ranks_with_own(work, layer, q)) continue;
    unkeep_selection(work, layer);
    rank_requests_.push_back(request_of(work, layer, q, candidates));
    if (selection.valid)
      predicted_blocks_.insert(predicted_blocks_.end(), selection.blocks.begin(), selection.blocks.end());
    predicted_end_.push_back(predicted_blocks_.size());
  }
  rank();
  note_recall(layer);
  select_ahead(layer, rows);
}

bool Predictor::ranks_with_own(const Work& work, LayerIndex layer, const float* q) {
  const Policy policy = work.sequence->rule().policy;
  if (policy == Policy::kReactive || policy == Policy::kOracle) return true;
  if (policy == Policy::kPreviousLayer && layer.value == 0) return true;
  const Correction& correction = tiers_.options().correction;
  if (correction.kind == Correction::Kind::kNone || work.committed == 0) return false;
  const std::vector<float>& predicting = work.sequence->selection(layer).q;
  const bool corrects = correction.kind == Correction::Kind::kMiss || predicting.empty() ||
                        cosine(q, predicting.data(), model_) < correction.cosine;
  stats_.corrections += corrects ? 1 : 0;
  return corrects;
}

// Of the selections that have just been ranked again.
void Predictor::note_recall(LayerIndex layer) {
  std::size_t begin = 0;
  for (std::size_t i = 0; i < rank_requests_.size(); ++i) {
    const auto predicted = std::span(predicted_blocks_).subspan(begin, predicted_end_[i] - begin);
    begin = predicted_end_[i];
    if (predicted.empty()) continue;
    const std::vector<BlockIndex>& selected = rank_requests_[i].sequence->selection(layer).blocks;
    recall_[layer.value].selected += selected.size();
    recall_[layer.value].predicted +=
        static_cast<std::uint64_t>(std::count_if(selected.begin(), selected.end(), [&](BlockIndex block) {
          return std::binary_search(predicted.begin(), predicted.end(), block);
        }));
  }
}

// A selection that is about to be replaced: its blocks may go as soon as their slots are needed.
void Predictor::unkeep_selection(const Work& work, LayerIndex layer) const {
  for (const BlockIndex block : work.sequence->selection(layer).blocks)
    work.sequence->residency().unwant(layer, block, step_);
}

void Predictor::rank() {
  if (rank_requests_.empty()) return;
  const PassTimer timer(stats_.rank_ns);
  if (tiers_.rule().policy != Policy::kOracle) {  // which leaves no sequence another one
    ranker_.rank(rank_requests_);
    return;
  }
  for (const RankRequest& request : rank_requests_) {
    ranker_.rank_by_attention(request, streamer_);
    if (tiers_.options().measure_coverage) ranker_.measure_coverage(request);
  }
}

RankRequest Predictor::request_of(const Work& work, LayerIndex layer, const float* q,
                                  const Candidates& candidates) const {
  return {.sequence = work.sequence,
          .layer = layer,
          .q = q,
          .candidates = candidates,
          .count = work.sequence->rule().budget_blocks};
}

// The next layer's selection for this same step, where the policy is that, from its query as this layer's
// input lets guess it.
void Predictor::select_ahead(LayerIndex layer, const LayerRows& rows) {
  const LayerIndex next(layer.value + 1);
  if (next.value == model_.layers) return;
  const auto ahead = [&](const Work& work) {
    return work.decodes() && !work.sequence->error() && work.sequence->selects(next) &&
           work.sequence->rule().policy == Policy::kPreviousLayer;
  };
  rank_requests_.clear();
  for (const Work& work : works_) {
    if (!ahead(work)) continue;
    const Candidates candidates = tiers_.candidates_at_position(work.position);
    if (work.sequence->selects_all(candidates)) {
      work.sequence->selection(next).take_all(candidates);
      continue;
    }
    rank_requests_.push_back(request_of(work, next, own_query(work, rows.q_next), candidates));
  }
  rank();
  for (Work& work : works_) {
    if (ahead(work)) fetch_ahead(work, next, work.position, step_);
  }
}

// ---- predict

// For the next step, with this step's last queries: of the guess, where there is one, else of the last token.
// Ranking costs a thread some ten microseconds, so a few layers are ranked together, by all threads: their
// reads start a little later and still have most of a step.
void Predictor::predict(LayerIndex layer, const LayerRows& rows) {
  for (std::size_t i = 0; i < works_.size(); ++i) {
    Work& work = works_[i];
    const bool asked = work.decodes() || work.wants_logits;  // another chunk would not use it
    const bool reads_ahead = work.sequence->selects(layer) && predicts(work.sequence->rule().policy);
    if (!asked || !reads_ahead || work.sequence->error()) continue;
    Selection& selection = work.sequence->selection(layer);
    const Candidates candidates = tiers_.candidates_at_position(work.next_position());
    if (work.sequence->selects_all(candidates)) {
      selection.take_all(candidates);
    } else if (selection.valid && !ranks_again(work, layer, candidates)) {
      selection.extend(candidates.end);
    } else {
      const float* const q = last_query(work, rows.q);
      predictions_.push_back({.work = i, .layer = layer, .candidates = candidates});
      predicted_q_.insert(predicted_q_.end(), q, q + model_.query_width());  // the next layer writes over q
      continue;
    }
    if (tiers_.layer(layer).ring == kNoRing) fetch_ahead(work, layer, work.next_position(), step_ + 1);
  }
  if (predictions_.size() >= kRankedTogether * forward_.threads()) rank_predictions();
}

// Over a long context ranking would cost as much as it saves, while a selection changes little from step to
// step: there every layer is ranked in its turn.
bool Predictor::ranks_again(const Work& work, LayerIndex layer, const Candidates& candidates) const {
  if (work.sequence->rule().policy == Policy::kLastSet)
    return ++work.sequence->selection(layer).age >= kLastSetSteps;
  const std::uint64_t interval =
      1 + std::uint64_t{candidates.count()} * tiers_.geometry().block_tokens / kTokensPerInterval;
  return (work.position + layer.value) % interval == 0;  // whatever else is decoded beside it
}

void Predictor::rank_predictions() {
  if (predictions_.empty()) return;
  const std::size_t width = model_.query_width();
  rank_requests_.clear();
  for (std::size_t i = 0; i < predictions_.size(); ++i) {
    const Prediction& prediction = predictions_[i];
    rank_requests_.push_back(request_of(works_[prediction.work], prediction.layer,
                                        predicted_q_.data() + i * width, prediction.candidates));
  }
  rank();
  const bool compared = tiers_.options().correction.kind == Correction::Kind::kCosine;
  for (std::size_t i = 0; i < predictions_.size(); ++i) {
    const Prediction& prediction = predictions_[i];
    Work& work = works_[prediction.work];
    const auto q = std::span(predicted_q_).subspan(i * width, width);
    if (compared) work.sequence->selection(prediction.layer).q.assign(q.begin(), q.end());
    if (!work.sequence->error() && tiers_.layer(prediction.layer).ring == kNoRing)
      fetch_ahead(work, prediction.layer, work.next_position(), step_ + 1);
  }
  predictions_.clear();
  predicted_q_.clear();
}

// The layer is done with its set of the ring: it goes to the next layer that uses it, in this step or, after
// the last one, in the next.
void Predictor::turn_ring(LayerIndex layer) {
  const std::uint32_t layers = model_.layers;
  LayerIndex next(layer.value + 1);
  while (next.value < layers && tiers_.layer(next).ring != tiers_.layer(layer).ring) ++next;
  const bool wraps = next.value == layers;
  if (wraps) {
    rank_predictions();  // those of the next step's first layers may not be through
    next = LayerIndex(0);
    while (tiers_.layer(next).ring != tiers_.layer(layer).ring) ++next;
  }
  for (Work& work : works_) {
    if (work.sequence->error()) continue;
    work.sequence->residency().leave_ring(layer);
    const bool reads_ahead = predicts(work.sequence->rule().policy) && work.decodes();
    if (!reads_ahead || !work.sequence->selection(next).valid) continue;
    fetch_ahead(work, next, wraps ? work.next_position() : work.position, step_ + (wraps ? 1 : 0));
  }
}

// Starts the reads of a selection for an attention at `position` in `step`, if there is room for all of it.
void Predictor::fetch_ahead(Work& work, LayerIndex layer, std::uint32_t position, std::uint64_t step) {
  keep_window_near(work, position, layer, step);
  keep_selection_near(work, layer, step);
  Residency& residency = work.sequence->residency();
  const Selection& selection = work.sequence->selection(layer);
  if (selection.blocks.size() > tiers_.plan().selection_slots(layer)) return;
  const auto missing =
      static_cast<std::uint32_t>(std::count_if(selection.blocks.begin(), selection.blocks.end(),
                                               [&](BlockIndex b) { return !residency.near(layer, b); }));
  // One slot more, where it is the same pool: the next token may begin a block.
  const std::uint32_t reserved = tiers_.layer(layer).ring == kNoRing ? 1 : 0;
  if (missing == 0 || missing + reserved > residency.takeable(layer, step, PoolKind::kSelection)) return;
  for (const BlockIndex block : selection.blocks) {
    if (residency.near(layer, block)) continue;
    const auto slot = residency.try_take(layer, block, SlotState::kLoading, step, PoolKind::kSelection);
    DD_CHECK(slot, "layer {} block {}", layer.value, block.value);
    tiers_.transfers().read(residency, layer, block, work.sequence->page(block), Lane::kPredicted);
    residency.mark_predicted(layer, block);
    ++stats_.blocks_predicted;
  }
  tiers_.transfers().poll();
}

// ---- slots

// The window of a row at `position` keeps its slots in `step`.
void Predictor::keep_window_near(const Work& work, std::uint32_t position, LayerIndex layer,
                                 std::uint64_t step) const {
  Residency& residency = work.sequence->residency();
  const std::uint32_t end = tiers_.geometry().blocks_for(position);
  const std::uint32_t window = model_.window[layer.value];
  switch (tiers_.layer(layer).kind) {
    case LayerKind::kAll:
      return;
    case LayerKind::kWindowed: {
      const std::uint32_t first = position < window ? 0 : position - window + 1;
      for (BlockIndex block(first / tiers_.geometry().block_tokens); block.value < end; ++block)
        residency.want(layer, block, step);
      return;
    }
    case LayerKind::kSelecting:
      break;
  }
  const Candidates candidates = tiers_.candidates_at_position(position);
  for (BlockIndex block; block < candidates.first && block.value < end; ++block)
    residency.want(layer, block, step);
  for (BlockIndex block = candidates.end; block.value < end; ++block) residency.want(layer, block, step);
}

// A selection that has no room is streamed, and keeps nothing. Where selections go through the ring, what a
// layer still has of its former window may go, since tokens need these slots.
void Predictor::keep_selection_near(const Work& work, LayerIndex layer, std::uint64_t step) const {
  const Selection& selection = work.sequence->selection(layer);
  if (!selection.valid || selection.blocks.size() > tiers_.plan().selection_slots(layer)) return;
  Residency& residency = work.sequence->residency();
  const bool resident = tiers_.layer(layer).ring == kNoRing;
  for (const BlockIndex block : selection.blocks) {
    if (resident || residency.in_ring(layer, block)) residency.want(layer, block, step);
  }
}

}  // namespace dualdecoder
