// Which blocks the rows of a group attend to in one layer: pure functions of positions, the plan and the
// selection.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decode/plan.h"

namespace dualdecoder {

/// Blocks of one sequence, ascending. Those below `first_needed` only keep the places of the others in the
/// kernel's splits: no row sees them, and they need not be near.
struct BlockList {
  std::uint32_t first_needed = 0;
  std::vector<BlockIndex> blocks;

  bool needed(BlockIndex block) const { return block.value >= first_needed; }
};

/// The blocks beside the window of a row at `position`: [first, end).
struct Candidates {
  BlockIndex first;
  BlockIndex end;

  std::uint32_t count() const { return end.value - first.value; }
  bool holds(BlockIndex block) const { return first <= block && block < end; }
};
Candidates candidates_at(const MemoryPlan& plan, std::uint32_t recent_tokens, std::uint32_t position);

/// Every block up to row `position` + `rows` - 1, from the first that a row with a sliding window (0: none)
/// of the model can see.
void list_all(const KvGeometry& geometry, std::uint32_t window, std::uint32_t position, std::uint32_t rows,
              BlockList& list);

/// The window of a row at `position` with the `rows` - 1 rows behind it, and those of `selected` (ascending)
/// that are candidates.
void list_selected(const KvGeometry& geometry, const Candidates& candidates,
                   std::span<const BlockIndex> selected, std::uint32_t position, std::uint32_t rows,
                   BlockList& list);

}  // namespace dualdecoder
