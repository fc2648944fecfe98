// One sequence's place in the engine: how many tokens are committed and where their KV lies. Owned by the
// engine thread.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "kv/block_table.h"

namespace dualdecoder {

class Sequence {
 public:
  explicit Sequence(NearTier& near) : blocks_(near) {}

  /// Committed tokens; the next one stands at this position.
  std::uint32_t tokens() const { return tokens_; }
  BlockTable& blocks() { return blocks_; }
  const BlockTable& blocks() const { return blocks_; }

  /// Gives back slots that were reserved for tokens which did not come.
  void release_unused() { blocks_.truncate(tokens_); }
  void commit(std::uint32_t tokens) { tokens_ += tokens; }
  /// Forgets everything from position `tokens` on; there are at least that many.
  void truncate(std::uint32_t tokens) {
    DD_CHECK(tokens <= tokens_, "{} of {}", tokens, tokens_);
    tokens_ = tokens;
    blocks_.truncate(tokens);
  }

 private:
  BlockTable blocks_;
  std::uint32_t tokens_ = 0;
};

}  // namespace dualdecoder
