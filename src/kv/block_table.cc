#include "kv/block_table.h"

namespace dualdecoder {

Status BlockTable::reserve(std::uint32_t tokens) {
  const std::uint32_t wanted = geometry().blocks_for(tokens);
  if (wanted <= blocks()) return {};
  const std::size_t missing = std::size_t{wanted - blocks()} * geometry().layers;
  if (missing > near_->slots_free()) {
    return fail(ErrorCode::kOutOfMemory, "the KV cache has {} free blocks, {} tokens need {} more",
                near_->slots_free(), tokens, missing);
  }
  slots_.reserve(slots_.size() + missing);
  for (std::size_t i = 0; i < missing; ++i) slots_.push_back(*near_->try_take());
  return {};
}

void BlockTable::truncate(std::uint32_t tokens) {
  const std::size_t keep = std::size_t{geometry().blocks_for(tokens)} * geometry().layers;
  while (slots_.size() > keep) {
    near_->give_back(slots_.back());
    slots_.pop_back();
  }
}

}  // namespace dualdecoder
