#include "decode/block_list.h"

#include <algorithm>

#include "attention/attention.h"

namespace dualdecoder {

Candidates candidates_at(const MemoryPlan& plan, std::uint32_t recent_tokens, std::uint32_t position) {
  const std::uint32_t first_recent =
      position > recent_tokens ? (position - recent_tokens) / plan.geometry.block_tokens : 0;
  return {.first = BlockIndex(plan.sink_blocks), .end = BlockIndex(std::max(first_recent, plan.sink_blocks))};
}

// Begins at a whole split, so that a key has the same place in the kernel's splits whatever is left out.
void list_all(const KvGeometry& geometry, std::uint32_t window, std::uint32_t position, std::uint32_t rows,
              BlockList& list) {
  const std::uint32_t first_token = window == 0 || position < window ? 0 : position - window + 1;
  list.first_needed = first_token / geometry.block_tokens;
  list.blocks.clear();
  const std::uint32_t first = first_token / kSplitKeys * (kSplitKeys / geometry.block_tokens);
  for (BlockIndex block(first); block.value < geometry.blocks_for(position + rows); ++block)
    list.blocks.push_back(block);
}

void list_selected(const KvGeometry& geometry, const Candidates& candidates,
                   std::span<const BlockIndex> selected, std::uint32_t position, std::uint32_t rows,
                   BlockList& list) {
  list.first_needed = 0;
  list.blocks.clear();
  const std::uint32_t end = geometry.blocks_for(position + rows);
  for (BlockIndex block; block < candidates.first && block.value < end; ++block) list.blocks.push_back(block);
  for (const BlockIndex block : selected) {
    if (candidates.holds(block)) list.blocks.push_back(block);
  }
  for (BlockIndex block = std::max(candidates.end, candidates.first); block.value < end; ++block)
    list.blocks.push_back(block);
}

}  // namespace dualdecoder
