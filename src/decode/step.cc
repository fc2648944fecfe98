#include "decode/step.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "decode/pass_timer.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kSerialAppendRowsMax = 32;  // waking the threads costs more than storing so few rows

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

Step::Step(const Model& model, Forward& forward, Tiers& tiers, std::uint32_t track, DeviceAttention* device)
    : model_(model),
      forward_(forward),
      tiers_(tiers),
      shape_(model.hyperparameters().attention_shape(tiers.geometry())),
      device_(device),
      streamer_(tiers, track),
      predictor_(model.hyperparameters(), shape_, forward, tiers, streamer_, stats_) {
  if (!tiers.tiered()) return;
  carry_max_.resize(std::size_t{forward.rows_max()} * shape_.heads);
  carry_sum_.resize(carry_max_.size());
}

const float* Step::run(std::span<const StepGroup> groups) {
  begin(groups);
  advance(model_.hyperparameters().layers);
  return finish();
}

template <typename Body>
auto Step::timed(Pass pass, const Body& body) {
  const auto index = static_cast<std::size_t>(pass);
  const PassTimer timer(pass_ns_[index], trace(),
                        {.name = kPassNames[index],
                         .step = static_cast<std::int64_t>(step_),
                         .layer = static_cast<std::int64_t>(layer_.value)});
  return body();
}

void Step::begin(std::span<const StepGroup> groups) {
  layer_ = LayerIndex(0);
  timed(Pass::kBegin, [&] { begin_rows(groups); });
}

bool Step::advance(std::uint32_t layers) {
  const std::uint32_t all = model_.hyperparameters().layers;
  for (; layers > 0 && layer_.value < all; --layers, ++layer_) {
    const LayerRows rows = timed(Pass::kProject, [&] { return forward_.project(layer_); });
    timed(Pass::kAppend, [&] { append(layer_, rows); });
    // Without logits, nothing reads what the last layer attends to: its K and V are all that is wanted.
    if (!attends_last_layer_ && layer_.value + 1 == all) continue;
    timed(Pass::kSelect, [&] { predictor_.select(layer_, rows); });
    timed(Pass::kArrive, [&] { arrive(layer_); });
    timed(Pass::kAttend, [&] { attend(layer_, rows); });
    timed(Pass::kPredict, [&] { predictor_.predict(layer_, rows); });
    if (tiers_.layer(layer_).ring != kNoRing) timed(Pass::kPredict, [&] { predictor_.turn_ring(layer_); });
  }
  return layer_.value < all;
}

const float* Step::finish() {
  timed(Pass::kPredict, [&] { predictor_.rank_predictions(); });
  timed(Pass::kRetire, [&] { retire(); });
  if (output_rows_.empty()) return nullptr;
  return timed(Pass::kFinish, [&] { return forward_.logits(); });
}

// ---- begin

void Step::begin_rows(std::span<const StepGroup> groups) {
  step_ = tiers_.begin_step();
  ++stats_.steps;
  tokens_.clear();
  positions_.clear();
  output_rows_.clear();
  stretches_.clear();
  works_ = groups.size();
  if (work_.size() < works_) work_.resize(works_);
  for (std::size_t i = 0; i < works_; ++i) begin_work(groups[i], work_[i]);
  // What is near for this step is kept before new tokens take their slots.
  if (tiers_.tiered()) predictor_.begin(works(), step_);
  for (std::size_t i = 0; i < works_; ++i) take_rows(groups[i], work_[i]);
  attends_last_layer_ = !output_rows_.empty();
  forward_.begin(tokens_, positions_, output_rows_);
  if (!tiers_.tiered()) return;
  tiers_.transfers().poll();
}

void Step::begin_work(const StepGroup& group, Work& work) {
  work.sequence = group.sequence;
  work.rows = group.rows();
  work.committed = static_cast<std::uint32_t>(group.tokens.size());
  work.position = group.sequence->tokens();
  work.wants_logits = group.logits != LogitsWanted::kNone;
  work.exact = group.exact();
  work.streamed_ahead = false;
  DD_CHECK(work.rows > 0 && (!group.guess || work.decodes()));
}

void Step::take_rows(const StepGroup& group, Work& work) {
  work.first_row = static_cast<std::uint32_t>(tokens_.size());
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

// ---- append

void Step::append(LayerIndex layer, const LayerRows& rows) {
  if (device_ != nullptr) {
    store_on_device(layer);
  } else {
    store(layer, rows);
  }
  if (tiers_.layer(layer).kind == LayerKind::kSelecting) add_digests(layer);
}

void Step::store_on_device(LayerIndex layer) {
  const std::uint32_t block_tokens = tiers_.geometry().block_tokens;
  places_.assign(tokens_.size(), std::nullopt);
  for (const Stretch& stretch : stretches_) {
    if (stretch.sequence->error()) continue;
    const Residency& residency = stretch.sequence->residency();
    const SlotIndex slot = residency.slot(layer, BlockIndex(stretch.position / block_tokens));
    for (std::uint32_t i = 0; i < stretch.tokens; ++i)
      places_[stretch.row + i] = {.slot = slot, .token = stretch.position % block_tokens + i};
  }
  device_->append(places_);
}

void Step::store(LayerIndex layer, const LayerRows& rows) {
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
}

// Of the blocks that these rows have filled, also while every block is attended to: a later step may select.
void Step::add_digests(LayerIndex layer) {
  for (const Work& work : works()) {
    Sequence& sequence = *work.sequence;
    if (sequence.digests() != nullptr && !sequence.error()) sequence.add_digests(layer, work.next_position());
  }
}

// ---- arrive

void Step::list_blocks(Work& work, LayerIndex layer) const {
  if (work.selecting) {
    list_selected(tiers_.geometry(), tiers_.candidates_at_position(work.position),
                  work.sequence->selection(layer).blocks, work.position, work.rows, work.list);
  } else {
    list_all(tiers_.geometry(), model_.hyperparameters().window[layer.value], work.position, work.rows,
             work.list);
  }
}

// Adds what is near beside the selection. It is not wanted, so that what was selected longest ago still goes
// first; nothing goes before this attention is done.
void Step::add_resident(Work& work, LayerIndex layer) {
  const Candidates candidates = tiers_.candidates_at_position(work.position);
  attended_ = work.sequence->selection(layer).blocks;
  work.sequence->residency().list_clean(layer, candidates.first, candidates.end, attended_);
  std::sort(attended_.begin(), attended_.end());
  attended_.erase(std::unique(attended_.begin(), attended_.end()), attended_.end());
  list_selected(tiers_.geometry(), candidates, attended_, work.position, work.rows, work.list);
}

// Asks for what is missing, then waits for all of it. A group whose blocks have no room near, or that reads
// everything once, is streamed instead.
void Step::arrive(LayerIndex layer) {
  for (Work& work : works()) {
    work.streamed = false;
    list_blocks(work, layer);
    const bool watched = watch_ != nullptr && watch_->watches(work.sequence);
    if (watched) watch_->note_needed(work, layer);
    if (!tiers_.tiered() || work.sequence->error()) continue;
    bring_near(work, layer);
    if (tiers_.options().attend_resident && work.selecting && !work.streamed) add_resident(work, layer);
    if (watched) watch_->note_arriving(work, layer);
  }
  if (!tiers_.tiered()) return;
  Transfers& transfers = tiers_.transfers();
  transfers.poll();
  const auto waiting = [&](const Work& work) {
    return !work.streamed && !work.sequence->error() && !all_readable(work, layer);
  };
  const PassTimer stall(stats_.stall_ns);
  for (Work& work : works()) {
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
    if (!residency.want(layer, block, step_)) {
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
  work.streamed = !work.selecting || missing > residency.takeable(layer, step_, PoolKind::kSelection);
  if (work.streamed) return;
  for (const BlockIndex block : work.list.blocks) {
    if (residency.near(layer, block)) continue;
    const auto slot = residency.try_take(layer, block, SlotState::kLoading, step_, PoolKind::kSelection);
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
  for (const Work& work : works()) {
    if (device_ == nullptr && work.sequence->error())
      std::fill_n(rows.attention + work.first_row * width, work.rows * width, 0.0f);
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
  for (const Work& work : works()) {
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
  for (const Work& work : works()) {
    if (work.streamed || work.sequence->error()) continue;
    attention_groups_[index++].blocks = std::span(views_).subspan(first, work.list.blocks.size());
    first += work.list.blocks.size();
  }
  attend_groups(attention_groups_);
}

void Step::attend_groups(std::span<const AttentionGroup> groups) {
  if (device_ != nullptr) return device_->attend(groups);
  attention_.plan(shape_, groups, forward_.threads());
  forward_.parallel([&](std::uint32_t thread) { attention_.run(thread); });
}

void Step::open_streams(LayerIndex layer) {
  for (std::size_t i = 0; i < works_; ++i) {
    const Work& work = work_[i];
    if (work.streamed && !work.streamed_ahead && !work.sequence->error())
      streamer_.add(*work.sequence, i, layer, work.list);
  }
  if (tiers_.rule().policy != Policy::kOracle) open_streams_ahead(LayerIndex(layer.value + 1));
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
    if (work.decodes() && work.sequence->selects(layer)) continue;
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
  attend_groups(std::span(&group, 1));
}

// ---- retire

void Step::retire() {
  for (const Work& work : works()) {
    if (work.sequence->error()) continue;
    work.sequence->commit(work.committed);
    work.sequence->set_guessed(work.rows - work.committed);
    work.sequence->write_full_pages();
  }
  if (tiers_.tiered()) tiers_.transfers().poll();
}

}  // namespace dualdecoder
