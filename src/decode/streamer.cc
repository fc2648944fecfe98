#include "decode/streamer.h"

#include <algorithm>

#include "attention/attention.h"

namespace dualdecoder {

Streamer::Streamer(Tiers& tiers, std::uint32_t track)
    : tiers_(tiers),
      half_slots_(tiers.plan().staging_slots / tiers.plan().staging_tracks / 2),
      first_slot_(half_slots_ == 0 ? 0 : tiers.near().staging_slot(track * 2 * half_slots_).value),
      split_blocks_(kSplitKeys / tiers.geometry().block_tokens),
      done_(std::make_unique<bool[]>(std::size_t{2} * half_slots_)) {}

SlotIndex Streamer::staging_slot(std::size_t half, std::uint32_t index) const {
  return SlotIndex(first_slot_ + static_cast<std::uint32_t>(half) * half_slots_ + index);
}

void Streamer::add(Sequence& sequence, std::size_t group, LayerIndex layer, const BlockList& list) {
  streams_.push_back({.sequence = &sequence, .group = group, .layer = layer, .list = list});
}

void Streamer::top_up() {
  free_late_halves();
  while (!streams_.empty()) {
    const auto half = std::find(half_in_use_.begin(), half_in_use_.end(), false);
    if (half == half_in_use_.end()) return;
    Stream& stream = streams_.front();
    Segment segment{.sequence = stream.sequence,
                    .group = stream.group,
                    .layer = stream.layer,
                    .first = stream.next == 0,
                    .half = static_cast<std::size_t>(half - half_in_use_.begin()),
                    .pieces = {}};
    cut_segment(stream, segment);
    segment.last = stream.next == stream.list.blocks.size();
    *half = true;
    start(segment);
    ready_.push_back(std::move(segment));
    if (ready_.back().last) streams_.pop_front();
  }
}

// Takes splits as long as the blocks that have to be read fit into the half.
void Streamer::cut_segment(Stream& stream, Segment& segment) {
  const Residency& residency = stream.sequence->residency();
  std::uint32_t staged = 0;
  while (stream.next < stream.list.blocks.size()) {
    const std::size_t end = std::min(stream.next + split_blocks_, stream.list.blocks.size());
    const auto split = std::span(stream.list.blocks).subspan(stream.next, end - stream.next);
    const auto missing =
        static_cast<std::uint32_t>(std::count_if(split.begin(), split.end(), [&](BlockIndex b) {
          return stream.list.needed(b) && !residency.near(stream.layer, b);
        }));
    if (staged + missing > half_slots_) return;
    for (const BlockIndex block : split) {
      Piece piece{.block = block, .slot = {}, .needed = stream.list.needed(block)};
      if (piece.needed && residency.near(stream.layer, block)) {
        piece.slot = residency.slot(stream.layer, block);
      } else if (piece.needed) {
        piece.staged = true;
        piece.slot = staging_slot(segment.half, staged++);
      }
      segment.pieces.push_back(piece);
    }
    stream.next = end;
  }
}

void Streamer::start(Segment& segment) {
  Residency& residency = segment.sequence->residency();
  for (const Piece& piece : segment.pieces) {
    if (piece.staged) {
      tiers_.transfers().read_staged(residency, segment.layer, segment.sequence->page(piece.block),
                                     piece.slot, done(piece.slot));
      bytes_staged_ += tiers_.geometry().slot_bytes();
    } else if (piece.needed && residency.state(segment.layer, piece.block) == SlotState::kLoading) {
      tiers_.transfers().promote(residency, segment.layer, piece.block);
    }
  }
  tiers_.transfers().poll();
}

bool Streamer::staged_ended(const Segment& segment) const {
  return std::all_of(segment.pieces.begin(), segment.pieces.end(),
                     [this](const Piece& piece) { return !piece.staged || done(piece.slot); });
}

bool Streamer::arrived(const Segment& segment) const {
  const Residency& residency = segment.sequence->residency();
  return staged_ended(segment) &&
         std::none_of(segment.pieces.begin(), segment.pieces.end(), [&](const Piece& piece) {
           return piece.needed && !piece.staged &&
                  residency.state(segment.layer, piece.block) == SlotState::kLoading;
         });
}

const Streamer::Segment* Streamer::wait_front(LayerIndex layer) {
  top_up();
  while (ready_.empty() && !streams_.empty() &&
         streams_.front().layer == layer) {  // both halves wait for reads that did not end in time
    if (!tiers_.transfers().wait()) return give_up();
    top_up();
  }
  if (ready_.empty() || ready_.front().layer != layer) return nullptr;
  const Segment& segment = ready_.front();
  tiers_.transfers().poll();
  while (!arrived(segment)) {
    if (tiers_.transfers().wait()) continue;
    tiers_.give_up(segment.sequence->residency(), "a read");
    break;
  }
  return &segment;
}

const Streamer::Segment* Streamer::give_up() {
  for (const Stream& stream : streams_) stream.sequence->residency().set_error(tiers_.overdue("a read"));
  streams_.clear();
  return nullptr;
}

// A half that a read may still reach is not used again before that read has ended.
void Streamer::pop() {
  if (arrived(ready_.front())) {
    half_in_use_[ready_.front().half] = false;
  } else {
    late_.push_back(std::move(ready_.front()));
  }
  ready_.pop_front();
  top_up();
}

void Streamer::free_late_halves() {
  std::erase_if(late_, [this](const Segment& segment) {
    const bool ended = staged_ended(segment);
    if (ended) half_in_use_[segment.half] = false;
    return ended;
  });
}

}  // namespace dualdecoder
