// Where the KV blocks of one sequence are: (layer, block) -> slot of the near tier. Grows by whole pages (the
// blocks of all layers for the same tokens), so that every layer holds the same tokens. Owned by the engine
// thread.
#pragma once

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "kv/near_tier.h"

namespace dualdecoder {

class BlockTable {
 public:
  explicit BlockTable(NearTier& near) : near_(&near) {}
  ~BlockTable() { truncate(0); }
  BlockTable(BlockTable&& other) noexcept : near_(other.near_), slots_(std::move(other.slots_)) {
    other.slots_.clear();
  }
  BlockTable& operator=(BlockTable&&) = delete;

  /// Makes room for tokens [0, tokens). kOutOfMemory when the near tier has too few slots; then nothing has
  /// changed.
  Status reserve(std::uint32_t tokens);
  /// Gives back every page that holds only tokens >= `tokens`.
  void truncate(std::uint32_t tokens);

  SlotIndex slot(LayerIndex layer, BlockIndex block) const {
    return slots_[std::size_t{block.value} * geometry().layers + layer.value];
  }
  std::uint32_t blocks() const { return static_cast<std::uint32_t>(slots_.size() / geometry().layers); }
  const KvGeometry& geometry() const { return near_->geometry(); }
  NearTier& near() const { return *near_; }

 private:
  NearTier* near_;
  std::vector<SlotIndex> slots_;  // [block, layer]
};

}  // namespace dualdecoder
