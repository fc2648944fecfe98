#include "decode/step.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace dualdecoder {
namespace {

/// A layer is ranked at every step; for each so many tokens of context, one step later.
constexpr std::uint64_t kTokensPerInterval = 32768;
constexpr std::size_t kRankedTogether = 3;          // rankings for each thread, at least
constexpr std::uint32_t kSerialAppendRowsMax = 32;  // waking the threads costs more than storing so few rows

/// Adds the time it lives to `total`, and an event to `trace`, if there is one.
class PassTimer {
 public:
  explicit PassTimer(std::uint64_t& total, Trace* trace = nullptr, const TraceEvent& event = {})
      : total_(total), trace_(trace), event_(event), start_(std::chrono::steady_clock::now()) {}
  ~PassTimer() {
    const auto end = std::chrono::steady_clock::now();
    total_ += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(end - start_).count());
    if (trace_ == nullptr) return;
    event_.start = start_;
    event_.end = end;
    trace_->add(event_);
  }

 private:
  std::uint64_t& total_;
  Trace* trace_;
  TraceEvent event_;
  TraceEvent::Time start_;
};

// Smallest over the query heads: one that turned away is enough to want other blocks.
float cosine(const float* a, const float* b, const AttentionShape& shape) {
  float smallest = 1.0f;
  for (std::uint32_t head = 0; head < shape.heads; ++head, a += shape.head_dim, b += shape.head_dim) {
    const float ab = std::inner_product(a, a + shape.head_dim, b, 0.0f);
    const float aa = std::inner_product(a, a + shape.head_dim, a, 0.0f);
    const float bb = std::inner_product(b, b + shape.head_dim, b, 0.0f);
    smallest = std::min(smallest, aa * bb > 0.0f ? ab / std::sqrt(aa * bb) : 0.0f);
  }
  return smallest;
}

AttentionShape attention_shape(const Hyperparameters& model, const KvGeometry& geometry) {
  return {.heads = model.heads,
          .kv_heads = model.kv_heads,
          .head_dim = model.head_dim,
          .block_tokens = geometry.block_tokens,
          .scale = model.attention_scale};
}

}  // namespace

std::uint32_t StepGroup::logits_rows() const {
  switch (logits) {
    case LogitsWanted::kNone:
      return 0;
    case LogitsWanted::kLast:
      return (tokens.empty() ? 0 : 1) + (guess ? 1 : 0);
    case LogitsWanted::kAll:
      return rows();
  }
  return 0;
}

Step::Step(const Model& model, Forward& forward, Tiers& tiers)
    : model_(model),
      forward_(forward),
      tiers_(tiers),
      shape_(attention_shape(model.hyperparameters(), tiers.geometry())),
      streamer_(tiers),
      ranker_(shape_, tiers, forward),
      recall_(model.hyperparameters().layers) {
  if (!tiers.tiered()) return;
  carry_max_.resize(std::size_t{forward.rows_max()} * shape_.heads);
  carry_sum_.resize(carry_max_.size());
}

const float* Step::run(std::span<const StepGroup> groups) {
  LayerIndex layer;
  const auto timed = [&](Pass pass, const auto& body) {
    const auto index = static_cast<std::size_t>(pass);
    const PassTimer timer(pass_ns_[index], trace(),
                          {.name = kPassNames[index],
                           .step = static_cast<std::int64_t>(tiers_.step()),
                           .layer = static_cast<std::int64_t>(layer.value)});
    return body();
  };
  timed(Pass::kBegin, [&] { begin(groups); });
  const std::uint32_t layers = model_.hyperparameters().layers;
  for (; layer.value < layers; ++layer) {
    const LayerRows rows = timed(Pass::kProject, [&] { return forward_.project(layer); });
    timed(Pass::kAppend, [&] { append(layer, rows); });
    // Without logits, nothing reads what the last layer attends to: its K and V are all that is wanted.
    if (!attends_last_layer_ && layer.value + 1 == layers) break;
    timed(Pass::kSelect, [&] { select(layer, rows); });
    timed(Pass::kArrive, [&] { arrive(layer); });
    timed(Pass::kAttend, [&] { attend(layer, rows); });
    timed(Pass::kPredict, [&] { predict(layer, rows); });
    if (tiers_.layer(layer).ring != kNoRing) timed(Pass::kPredict, [&] { turn_ring(layer); });
  }
  timed(Pass::kPredict, [&] { rank_predictions(); });
  timed(Pass::kRetire, [&] { retire(); });
  if (output_rows_.empty()) return nullptr;
  return timed(Pass::kFinish, [&] { return forward_.logits(); });
}

// ---- begin

void Step::begin(std::span<const StepGroup> groups) {
  tiers_.begin_step();
  ++stats_.steps;
  tokens_.clear();
  positions_.clear();
  output_rows_.clear();
  stretches_.clear();
  works_ = groups.size();
  if (work_.size() < works_) work_.resize(works_);
  for (std::size_t i = 0; i < works_; ++i) begin_rows(groups[i], work_[i]);
  attends_last_layer_ = !output_rows_.empty();
  forward_.begin(tokens_, positions_, output_rows_);
  if (!tiers_.tiered()) return;
  tiers_.transfers().poll();
}

void Step::begin_rows(const StepGroup& group, Work& work) {
  work.sequence = group.sequence;
  work.first_row = static_cast<std::uint32_t>(tokens_.size());
  work.rows = group.rows();
  work.committed = static_cast<std::uint32_t>(group.tokens.size());
  work.position = group.sequence->tokens();
  work.wants_logits = group.logits != LogitsWanted::kNone;
  work.streamed_ahead = false;
  DD_CHECK(work.rows > 0 && (!group.guess || work.decodes()));
  if (tiers_.tiered()) {
    // A prompt attends to no selection, and may need its slots for the blocks that it fills.
    if (!work.decodes()) group.sequence->residency().forget_wants();
    for (LayerIndex layer; layer.value < model_.hyperparameters().layers; ++layer) {
      keep_window_near(work, work.position, layer, tiers_.step());
      if (work.decodes()) keep_selection_near(work, layer, tiers_.step());
    }
  }
  // A failure is the sequence's own error; its rows go through the step without effect.
  static_cast<void>(group.sequence->take_slots(work.position + work.rows));
  const std::uint32_t block_tokens = tiers_.geometry().block_tokens;
  for (std::uint32_t r = 0; r < work.rows; ++r) {
    const std::uint32_t position = work.position + r;
    tokens_.push_back(r < work.committed ? group.tokens[r] : *group.guess);
    positions_.push_back(position);
    const bool wanted = group.logits == LogitsWanted::kAll ||
                        (group.logits == LogitsWanted::kLast && r + 1 >= work.committed);
    if (wanted) output_rows_.push_back(work.first_row + r);
    if (r == 0 || position % block_tokens == 0) {
      stretches_.push_back(
          {.sequence = group.sequence, .row = work.first_row + r, .position = position, .tokens = 0});
    }
    ++stretches_.back().tokens;
  }
}

// The window of a row at `position` keeps its slots in `step`.
void Step::keep_window_near(const Work& work, std::uint32_t position, LayerIndex layer,
                            std::uint64_t step) const {
  Residency& residency = work.sequence->residency();
  const std::uint32_t end = tiers_.geometry().blocks_for(position);
  const std::uint32_t window = model_.hyperparameters().window[layer.value];
  switch (tiers_.layer(layer).kind) {
    case LayerKind::kAll:
      return;
    case LayerKind::kWindowed: {
      const std::uint32_t first = position < window ? 0 : position - window + 1;
      for (BlockIndex block(first / shape_.block_tokens); block.value < end; ++block)
        residency.want(layer, block, step);
      return;
    }
    case LayerKind::kSelecting:
      break;
  }
  const Candidates candidates = candidates_at_position(position);
  for (BlockIndex block; block < candidates.first && block.value < end; ++block)
    residency.want(layer, block, step);
  for (BlockIndex block = candidates.end; block.value < end; ++block) residency.want(layer, block, step);
}

// A selection that has no room is streamed, and keeps nothing. Where selections go through the ring, what a
// layer still has of its former window may go, since tokens need these slots.
void Step::keep_selection_near(const Work& work, LayerIndex layer, std::uint64_t step) const {
  const Selection& selection = work.sequence->selection(layer);
  if (!selection.valid || selection.blocks.size() > tiers_.plan().selection_slots(layer)) return;
  Residency& residency = work.sequence->residency();
  const bool resident = tiers_.layer(layer).ring == kNoRing;
  for (const BlockIndex block : selection.blocks) {
    if (resident || residency.in_ring(layer, block)) residency.want(layer, block, step);
  }
}

// ---- append

void Step::append(LayerIndex layer, const LayerRows& rows) {
  const std::size_t width = model_.hyperparameters().kv_width();
  const KvGeometry& geometry = tiers_.geometry();
  const auto store = [&](const Stretch& stretch) {
    if (stretch.sequence->error()) return;
    const Residency& residency = stretch.sequence->residency();
    const SlotIndex slot = residency.slot(layer, BlockIndex(stretch.position / geometry.block_tokens));
    store_tokens(geometry, rows.k + stretch.row * width, rows.v + stretch.row * width, stretch.tokens,
                 stretch.position % geometry.block_tokens, tiers_.near().k(slot), tiers_.near().v(slot));
  };
  if (tokens_.size() <= kSerialAppendRowsMax) {
    for (const Stretch& stretch : stretches_) store(stretch);
  } else {
    std::atomic<std::size_t> next = 0;
    forward_.parallel([&](std::uint32_t) {
      for (std::size_t i = next++; i < stretches_.size(); i = next++) store(stretches_[i]);
    });
  }
  if (tiers_.layer(layer).kind == LayerKind::kSelecting) add_digests(layer);
}

// Of the blocks that these rows have filled, also while every block is attended to: a later step may select.
void Step::add_digests(LayerIndex layer) {
  for (const Work& work : std::span(work_).first(works_)) {
    Sequence& sequence = *work.sequence;
    if (sequence.digests() != nullptr && !sequence.error()) sequence.add_digests(layer, work.next_position());
  }
}

// ---- select

Candidates Step::candidates_at_position(std::uint32_t position) const {
  return candidates_at(tiers_.plan(), tiers_.options().recent_tokens, position);
}

// Of the last committed row; of the guess where that stands alone.
const float* Step::own_query(const Work& work, const float* q) const {
  const std::uint32_t row = work.committed == 0 ? 0 : work.committed - 1;
  return q + (std::size_t{work.first_row} + row) * model_.hyperparameters().query_width();
}

const float* Step::last_query(const Work& work, const float* q) const {
  return q + (std::size_t{work.first_row} + work.rows - 1) * model_.hyperparameters().query_width();
}

// Ranks with this step's own queries, where the policy or the correction says so, nothing was ranked before,
// or chunks that rank nothing have moved blocks out of the window since.
void Step::select(LayerIndex layer, const LayerRows& rows) {
  rank_requests_.clear();
  predicted_blocks_.clear();
  predicted_end_.clear();
  for (Work& work : std::span(work_).first(works_)) {
    work.selecting = selects(layer) && work.decodes();
    if (!work.selecting || work.sequence->error()) continue;
    const float* const q = own_query(work, rows.q);
    const Candidates candidates = candidates_at_position(work.position);
    const Selection& selection = work.sequence->selection(layer);
    if (selection.valid && selection.end == candidates.end && !ranks_with_own(work, layer, q)) continue;
    unkeep_selection(work, layer);
    rank_requests_.push_back({.sequence = work.sequence, .layer = layer, .q = q, .candidates = candidates});
    if (selection.valid)
      predicted_blocks_.insert(predicted_blocks_.end(), selection.blocks.begin(), selection.blocks.end());
    predicted_end_.push_back(predicted_blocks_.size());
  }
  rank();
  note_recall(layer);
  if (policy() == Policy::kPreviousLayer) select_ahead(layer, rows);
}

bool Step::ranks_with_own(const Work& work, LayerIndex layer, const float* q) {
  if (policy() == Policy::kReactive || policy() == Policy::kOracle) return true;
  if (policy() == Policy::kPreviousLayer && layer.value == 0) return true;
  const Correction& correction = tiers_.options().correction;
  if (correction.kind == Correction::Kind::kNone || work.committed == 0) return false;
  const std::vector<float>& predicting = work.sequence->selection(layer).q;
  const bool corrects = correction.kind == Correction::Kind::kMiss || predicting.empty() ||
                        cosine(q, predicting.data(), shape_) < correction.cosine;
  stats_.corrections += corrects ? 1 : 0;
  return corrects;
}

// Of the selections that have just been ranked again.
void Step::note_recall(LayerIndex layer) {
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
void Step::unkeep_selection(const Work& work, LayerIndex layer) const {
  for (const BlockIndex block : work.sequence->selection(layer).blocks)
    work.sequence->residency().unwant(layer, block, tiers_.step());
}

void Step::rank() {
  const PassTimer timer(stats_.rank_ns);
  const std::uint32_t count = tiers_.plan().budget_blocks;
  if (policy() != Policy::kOracle) {
    ranker_.rank(rank_requests_, count);
    return;
  }
  for (const RankRequest& request : rank_requests_) {
    ranker_.rank_by_attention(request, count, streamer_);
    if (tiers_.options().measure_coverage) ranker_.measure_coverage(request, count);
  }
}

// The next layer's selection for this same step, from its query as this layer's input lets guess it.
void Step::select_ahead(LayerIndex layer, const LayerRows& rows) {
  const LayerIndex next(layer.value + 1);
  if (next.value == model_.hyperparameters().layers || !selects(next)) return;
  rank_requests_.clear();
  for (const Work& work : std::span(work_).first(works_)) {
    if (!work.decodes() || work.sequence->error()) continue;
    rank_requests_.push_back({.sequence = work.sequence,
                              .layer = next,
                              .q = own_query(work, rows.q_next),
                              .candidates = candidates_at_position(work.position)});
  }
  rank();
  for (Work& work : std::span(work_).first(works_)) {
    if (work.decodes() && !work.sequence->error()) fetch_ahead(work, next, work.position, tiers_.step());
  }
}

// ---- arrive

void Step::list_blocks(Work& work, LayerIndex layer) const {
  if (work.selecting) {
    list_selected(tiers_.geometry(), candidates_at_position(work.position),
                  work.sequence->selection(layer).blocks, work.position, work.rows, work.list);
  } else {
    list_all(tiers_.geometry(), model_.hyperparameters().window[layer.value], work.position, work.rows,
             work.list);
  }
}

// Adds what is near beside the selection. It is not wanted, so that what was selected longest ago still goes
// first; nothing goes before this attention is done.
void Step::add_resident(Work& work, LayerIndex layer) {
  const Candidates candidates = candidates_at_position(work.position);
  attended_ = work.sequence->selection(layer).blocks;
  work.sequence->residency().list_clean(layer, candidates.first, candidates.end, attended_);
  std::sort(attended_.begin(), attended_.end());
  attended_.erase(std::unique(attended_.begin(), attended_.end()), attended_.end());
  list_selected(tiers_.geometry(), candidates, attended_, work.position, work.rows, work.list);
}

// Asks for what is missing, then waits for all of it. A group whose blocks have no room near, or that reads
// everything once, is streamed instead.
void Step::arrive(LayerIndex layer) {
  for (Work& work : std::span(work_).first(works_)) {
    work.streamed = false;
    list_blocks(work, layer);
    if (!tiers_.tiered() || work.sequence->error()) continue;
    bring_near(work, layer);
    if (tiers_.options().attend_resident && work.selecting && !work.streamed) add_resident(work, layer);
  }
  if (!tiers_.tiered()) return;
  Transfers& transfers = tiers_.transfers();
  transfers.poll();
  const auto waiting = [&](const Work& work) {
    return !work.streamed && !work.sequence->error() && !all_readable(work, layer);
  };
  const PassTimer stall(stats_.stall_ns);
  for (Work& work : std::span(work_).first(works_)) {
    while (waiting(work)) {
      if (!transfers.wait()) tiers_.give_up(work.sequence->residency(), "a read");
    }
  }
}

void Step::bring_near(Work& work, LayerIndex layer) {
  Residency& residency = work.sequence->residency();
  std::uint32_t missing = 0;
  for (const BlockIndex block : work.list.blocks) {
    if (!work.list.needed(block)) continue;
    if (!residency.want(layer, block, tiers_.step())) {
      ++missing;
      continue;
    }
    if (residency.take_predicted_mark(layer, block)) ++stats_.blocks_used;
    if (residency.state(layer, block) == SlotState::kLoading) {
      tiers_.transfers().promote(residency, layer, block);
      if (work.selecting) ++stats_.blocks_late;
    }
  }
  if (work.selecting) {
    stats_.blocks_attended += work.sequence->selection(layer).blocks.size();
    stats_.blocks_missed += missing;
  }
  if (missing == 0) return;
  work.streamed = !work.selecting || missing > residency.takeable(layer, tiers_.step(), PoolKind::kSelection);
  if (work.streamed) return;
  for (const BlockIndex block : work.list.blocks) {
    if (residency.near(layer, block)) continue;
    const auto slot =
        residency.try_take(layer, block, SlotState::kLoading, tiers_.step(), PoolKind::kSelection);
    DD_CHECK(slot, "layer {} block {}", layer.value, block.value);
    tiers_.transfers().read(residency, layer, block, work.sequence->page(block), Lane::kDemand);
  }
}

bool Step::all_readable(const Work& work, LayerIndex layer) const {
  const Residency& residency = work.sequence->residency();
  return std::all_of(work.list.blocks.begin(), work.list.blocks.end(), [&](BlockIndex block) {
    return !work.list.needed(block) || residency.readable(layer, block);
  });
}

// ---- attend

void Step::attend(LayerIndex layer, const LayerRows& rows) {
  const std::size_t width = model_.hyperparameters().query_width();
  if (tiers_.tiered()) open_streams(layer);
  attend_near(layer, rows);
  if (tiers_.tiered()) attend_streamed(layer, rows);
  for (const Work& work : std::span(work_).first(works_)) {
    if (work.sequence->error()) std::fill_n(rows.attention + work.first_row * width, work.rows * width, 0.0f);
  }
}

AttentionGroup Step::attention_group(const Work& work, LayerIndex layer, const LayerRows& rows) const {
  const std::size_t width = model_.hyperparameters().query_width();
  return {.blocks = {},
          .rows = work.rows,
          .first_row_position = work.position,
          .window = model_.hyperparameters().window[layer.value],
          .q = rows.q + work.first_row * width,
          .out = rows.attention + work.first_row * width,
          .lse = nullptr};
}

KvBlockView Step::view_of(const Work& work, const Streamer::Piece& piece) const {
  const std::uint32_t first = piece.block.value * shape_.block_tokens;
  return {.k = piece.needed ? tiers_.near().k(piece.slot) : nullptr,
          .v = piece.needed ? tiers_.near().v(piece.slot) : nullptr,
          .first_position = first,
          .tokens = std::min(shape_.block_tokens, work.position + work.rows - first)};
}

void Step::attend_near(LayerIndex layer, const LayerRows& rows) {
  views_.clear();
  attention_groups_.clear();
  for (const Work& work : std::span(work_).first(works_)) {
    if (work.streamed || work.sequence->error()) continue;
    const Residency& residency = work.sequence->residency();
    for (const BlockIndex block : work.list.blocks) {
      const bool needed = work.list.needed(block);
      views_.push_back(view_of(
          work,
          {.block = block, .slot = needed ? residency.slot(layer, block) : SlotIndex(), .needed = needed}));
    }
    attention_groups_.push_back(attention_group(work, layer, rows));
  }
  if (attention_groups_.empty()) return;
  // The spans are made when views_ has stopped moving.
  std::size_t first = 0;
  std::size_t index = 0;
  for (const Work& work : std::span(work_).first(works_)) {
    if (work.streamed || work.sequence->error()) continue;
    attention_groups_[index++].blocks = std::span(views_).subspan(first, work.list.blocks.size());
    first += work.list.blocks.size();
  }
  attention_.plan(shape_, attention_groups_, forward_.threads());
  forward_.parallel([&](std::uint32_t thread) { attention_.run(thread); });
}

void Step::open_streams(LayerIndex layer) {
  for (std::size_t i = 0; i < works_; ++i) {
    const Work& work = work_[i];
    if (work.streamed && !work.streamed_ahead && !work.sequence->error())
      streamer_.add(*work.sequence, i, layer, work.list);
  }
  if (policy() != Policy::kOracle) open_streams_ahead(LayerIndex(layer.value + 1));
  streamer_.top_up();
}

// Of groups that will stream everything in the next layer: which blocks they read depends on no query, so the
// first are read while this layer is computed.
void Step::open_streams_ahead(LayerIndex layer) {
  const std::uint32_t layers = model_.hyperparameters().layers - (attends_last_layer_ ? 0 : 1);
  for (std::size_t i = 0; i < works_; ++i) {
    Work& work = work_[i];
    work.streamed_ahead = false;
    if (layer.value >= layers || work.sequence->error()) continue;
    if (work.decodes() && selects(layer)) continue;
    list_all(tiers_.geometry(), model_.hyperparameters().window[layer.value], work.position, work.rows,
             list_ahead_);
    const Residency& residency = work.sequence->residency();
    work.streamed_ahead =
        std::any_of(list_ahead_.blocks.begin(), list_ahead_.blocks.end(),
                    [&](BlockIndex b) { return list_ahead_.needed(b) && !residency.near(layer, b); });
    if (work.streamed_ahead) streamer_.add(*work.sequence, i, layer, list_ahead_);
  }
}

// Segment by segment: the next one is read while this one is attended to.
void Step::attend_streamed(LayerIndex layer, const LayerRows& rows) {
  while (true) {
    const Streamer::Segment* segment = nullptr;
    {
      const PassTimer stall(stats_.stall_ns, trace(),
                            {.name = "segment", .layer = static_cast<std::int64_t>(layer.value)});
      segment = streamer_.wait_front(layer);
    }
    if (segment == nullptr) break;
    if (!segment->sequence->error()) attend_segment(*segment, rows);
    streamer_.pop();
  }
  stats_.bytes_streamed = streamer_.bytes_staged();
}

void Step::attend_segment(const Streamer::Segment& segment, const LayerRows& rows) {
  const Work& work = work_[segment.group];
  views_.clear();
  for (const Streamer::Piece& piece : segment.pieces) views_.push_back(view_of(work, piece));
  AttentionGroup group = attention_group(work, segment.layer, rows);
  group.blocks = views_;
  group.carry = {
      .max = carry_max_.data(), .sum = carry_sum_.data(), .resume = !segment.first, .more = !segment.last};
  attention_.plan(shape_, std::span(&group, 1), forward_.threads());
  forward_.parallel([&](std::uint32_t thread) { attention_.run(thread); });
}

// ---- predict

// For the next step, with this step's last queries: of the guess, where there is one, else of the last token.
// Ranking costs a thread some ten microseconds, so a few layers
// are ranked together, by all threads: their reads start a little later and still have most of a step.
void Step::predict(LayerIndex layer, const LayerRows& rows) {
  if (!selects(layer) || !predicts(policy())) return;
  for (std::size_t i = 0; i < works_; ++i) {
    Work& work = work_[i];
    const bool asked = work.decodes() || work.wants_logits;  // another chunk would not use it
    if (!asked || work.sequence->error()) continue;
    Selection& selection = work.sequence->selection(layer);
    const Candidates candidates = candidates_at_position(work.next_position());
    if (selection.valid && !ranks_again(selection, layer, candidates)) {
      selection.extend(candidates.end);
      if (tiers_.layer(layer).ring == kNoRing)
        fetch_ahead(work, layer, work.next_position(), tiers_.step() + 1);
      continue;
    }
    const std::size_t width = model_.hyperparameters().query_width();
    const float* const q = last_query(work, rows.q);
    predictions_.push_back({.work = i, .layer = layer, .candidates = candidates});
    predicted_q_.insert(predicted_q_.end(), q, q + width);  // q's place is the next layer's, too
  }
  if (predictions_.size() >= kRankedTogether * forward_.threads()) rank_predictions();
}

// Over a long context ranking would cost as much as it saves, while a selection changes little from step to
// step: there every layer is ranked in its turn.
bool Step::ranks_again(Selection& selection, LayerIndex layer, const Candidates& candidates) const {
  if (policy() == Policy::kLastSet) return ++selection.age >= kLastSetSteps;
  const std::uint64_t interval =
      1 + std::uint64_t{candidates.count()} * shape_.block_tokens / kTokensPerInterval;
  return (tiers_.step() + layer.value) % interval == 0;
}

void Step::rank_predictions() {
  if (predictions_.empty()) return;
  const std::size_t width = model_.hyperparameters().query_width();
  rank_requests_.clear();
  for (std::size_t i = 0; i < predictions_.size(); ++i) {
    const Prediction& prediction = predictions_[i];
    rank_requests_.push_back({.sequence = work_[prediction.work].sequence,
                              .layer = prediction.layer,
                              .q = predicted_q_.data() + i * width,
                              .candidates = prediction.candidates});
  }
  rank();
  const bool compared = tiers_.options().correction.kind == Correction::Kind::kCosine;
  for (std::size_t i = 0; i < predictions_.size(); ++i) {
    const Prediction& prediction = predictions_[i];
    Work& work = work_[prediction.work];
    const auto q = std::span(predicted_q_).subspan(i * width, width);
    if (compared) work.sequence->selection(prediction.layer).q.assign(q.begin(), q.end());
    if (!work.sequence->error() && tiers_.layer(prediction.layer).ring == kNoRing)
      fetch_ahead(work, prediction.layer, work.next_position(), tiers_.step() + 1);
  }
  predictions_.clear();
  predicted_q_.clear();
}

// The layer is done with its set of the ring: it goes to the next layer that uses it, in this step or, after
// the last one, in the next.
void Step::turn_ring(LayerIndex layer) {
  const std::uint32_t layers = model_.hyperparameters().layers;
  LayerIndex next(layer.value + 1);
  while (next.value < layers && tiers_.layer(next).ring != tiers_.layer(layer).ring) ++next;
  const bool wraps = next.value == layers;
  if (wraps) {
    rank_predictions();  // those of the next step's first layers may not be through
    next = LayerIndex(0);
    while (tiers_.layer(next).ring != tiers_.layer(layer).ring) ++next;
  }
  for (Work& work : std::span(work_).first(works_)) {
    if (work.sequence->error()) continue;
    work.sequence->residency().leave_ring(layer);
    if (!predicts(policy()) || !work.decodes() || !work.sequence->selection(next).valid) continue;
    fetch_ahead(work, next, wraps ? work.next_position() : work.position, tiers_.step() + (wraps ? 1 : 0));
  }
}

// Starts the reads of a selection for an attention at `position` in `step`, if there is room for all of it.
void Step::fetch_ahead(Work& work, LayerIndex layer, std::uint32_t position, std::uint64_t step) {
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

// ---- retire

void Step::retire() {
  for (const Work& work : std::span(work_).first(works_)) {
    if (work.sequence->error()) continue;
    work.sequence->commit(work.committed);
    work.sequence->set_guessed(work.rows - work.committed);
    work.sequence->write_full_pages();
  }
  if (tiers_.tiered()) tiers_.transfers().poll();
}

}  // namespace dualdecoder
