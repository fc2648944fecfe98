// What the passes of a step share: the groups of rows under way, and what is counted.
#pragma once

#include <cstdint>

#include "decode/block_list.h"
#include "decode/sequence.h"

namespace dualdecoder {

/// Counted over all steps since the start. Blocks are those beside the window, of selecting layers and single
/// tokens.
struct StepStats {
  std::uint64_t steps = 0;
  std::uint64_t blocks_attended = 0;
  std::uint64_t blocks_missed = 0;     // neither near nor on their way when they were needed
  std::uint64_t blocks_late = 0;       // on their way
  std::uint64_t blocks_predicted = 0;  // asked for ahead of the need
  std::uint64_t blocks_used = 0;  // of these: attended to since; the others were wasted, or are still to be
  std::uint64_t bytes_streamed = 0;  // through staging
  std::uint64_t corrections = 0;     // layers ranked again with the token's own query
  std::uint64_t rank_ns = 0;         // ranking blocks
  std::uint64_t stall_ns = 0;        // waiting for the far tier

  StepStats& operator+=(const StepStats& other) {
    steps += other.steps;
    blocks_attended += other.blocks_attended;
    blocks_missed += other.blocks_missed;
    blocks_late += other.blocks_late;
    blocks_predicted += other.blocks_predicted;
    blocks_used += other.blocks_used;
    bytes_streamed += other.bytes_streamed;
    corrections += other.corrections;
    rank_ns += other.rank_ns;
    stall_ns += other.stall_ns;
    return *this;
  }
};

/// One group of rows in this step, and in the present layer.
struct Work {
  Sequence* sequence = nullptr;
  std::uint32_t first_row = 0;
  std::uint32_t rows = 0;       // committed ones and the speculated one
  std::uint32_t committed = 0;  // rows
  std::uint32_t position = 0;   // of the first row
  bool wants_logits = false;
  bool exact = false;  // of a prompt
  bool selecting = false;
  bool streamed = false;
  bool streamed_ahead = false;  // asked for while the layer before was computed
  BlockList list;

  bool decodes() const { return !exact; }  // and may select
  std::uint32_t next_position() const { return position + committed; }
};

}  // namespace dualdecoder
