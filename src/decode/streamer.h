// Brings blocks that have no place near through two halves of staging: while attention works on one, the next
// is filled. What attention gets is a run of segments, each a whole number of the kernel's splits of one
// group's list in one layer, so that the bits are those of one call over the whole list (AttentionCarry).
//
// Blocks that are near are used where they are. Owned by the engine thread.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "decode/block_list.h"
#include "decode/sequence.h"

namespace dualdecoder {

class Streamer {
 public:
  struct Piece {
    BlockIndex block;
    SlotIndex slot;
    bool needed = true;  // otherwise it only keeps its place (BlockList)
    bool staged = false;
  };
  struct Segment {
    Sequence* sequence = nullptr;
    std::size_t group = 0;
    LayerIndex layer;
    bool first = false;  // of its list
    bool last = false;
    std::size_t half = 0;
    std::vector<Piece> pieces;
  };

  /// `track`: which part of staging is its own, of MemoryPlan::staging_tracks.
  Streamer(Tiers& tiers, std::uint32_t track);

  /// Lists are served in the order in which they are added. The list is copied.
  void add(Sequence& sequence, std::size_t group, LayerIndex layer, const BlockList& list);
  /// Starts reads as far as there is room.
  void top_up();
  /// The layer's next segment, once its blocks are there; null when none is left, or when what is left had
  /// to be given up (its sequences have an error then). After an error of its sequence the contents may be
  /// anything.
  const Segment* wait_front(LayerIndex layer);
  /// Attention is done with it.
  void pop();
  bool empty() const { return streams_.empty() && ready_.empty(); }
  std::uint64_t bytes_staged() const { return bytes_staged_; }

 private:
  struct Stream {
    Sequence* sequence;
    std::size_t group;
    LayerIndex layer;
    BlockList list;
    std::size_t next = 0;  // of list.blocks
  };

  void cut_segment(Stream& stream, Segment& segment);
  void start(Segment& segment);
  bool arrived(const Segment& segment) const;
  bool staged_ended(const Segment& segment) const;
  void free_late_halves();
  const Segment* give_up();

  SlotIndex staging_slot(std::size_t half, std::uint32_t index) const;
  bool& done(SlotIndex staged) const { return done_[staged.value - first_slot_]; }

  Tiers& tiers_;
  std::uint32_t half_slots_;
  std::uint32_t first_slot_;
  std::uint32_t split_blocks_;
  std::deque<Stream> streams_;
  std::deque<Segment> ready_;
  std::vector<Segment> late_;  // given up, with reads that may still come; their sequence may be gone
  std::array<bool, 2> half_in_use_{};
  std::unique_ptr<bool[]> done_;  // [staging slot of the track]
  std::uint64_t bytes_staged_ = 0;
};

}  // namespace dualdecoder
