// Prefixes kept for later: pages of the far tier whose sequences may have gone, found again by their tokens.
// The far tier is the cache: a page is shared, never copied, and a sequence that begins with kept pages needs
// nothing but their digests to decode.
//
// A tree for each salt: a node is one page, with the tokens of its block; its path from the root is the
// prefix. Nodes are found by a hash of (parent, tokens) and then compared token by token, so no collision can
// lead to another prefix, and a salt leads to its own tree alone. A node is exact if every token of its
// prefix attended to everything; one with tokens that attended to a selection is as good as that selection.
//
// A page leaves when the far tier has no other, the prefix that was used longest ago first, its end before
// its beginning; never while a sequence uses it. Owned by the engine's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "decode/prefix_store.h"
#include "decode/sequence.h"
#include "decode/tiers.h"
#include "model/vocabulary.h"

namespace dualdecoder {

/// Of a node; 0: none. Never used again for another one.
using PrefixNodeId = std::uint64_t;

struct PrefixCacheStats {
  std::uint64_t lookups = 0;
  std::uint64_t tokens_wanted = 0;
  std::uint64_t tokens_found = 0;
  std::uint64_t evicted = 0;         // pages
  std::uint64_t lost = 0;            // pages that were dropped because they could not be read
  std::uint64_t found_at_start = 0;  // pages
  std::uint64_t store_errors = 0;    // changes that the store did not take
};

class PrefixCache {
 public:
  /// Where a sequence stands in its tree.
  struct Cursor {
    PrefixNodeId first = 0;    // of its first block; 0: none is kept
    PrefixNodeId node = 0;     // of its last block that is kept, or the root
    std::uint32_t blocks = 0;  // on the path to it
    bool exact = true;
  };

  /// With `store`, what it leads to is there from the start, and what is kept is there for the next process.
  explicit PrefixCache(Tiers& tiers, std::unique_ptr<PrefixStore> store = nullptr);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  /// Gives `sequence`, which has no tokens, the longest kept prefix of `tokens` in whole blocks, but not all
  /// of them: the last one is always computed. The cursor behind it; Cursor::blocks may be 0. With
  /// `exact_only` it ends before the first inexact node. An error is the sequence's; then the prefix is
  /// dropped.
  Result<Cursor> adopt(Sequence& sequence, const std::string& salt, std::span<const TokenId> tokens,
                       bool exact_only);
  /// Keeps the next block of `sequence`, number cursor.blocks, which is at rest; `tokens`, those of the
  /// block. `exact`: they attended to everything.
  void keep(const Sequence& sequence, Cursor& cursor, std::span<const TokenId> tokens, bool exact);
  /// Forgets the node and all below it: it cannot be read.
  void drop(PrefixNodeId node);

  /// Pages that are kept, in use or not.
  std::uint32_t pages() const { return static_cast<std::uint32_t>(nodes_.size()); }
  /// Bytes of digests held for them in memory.
  std::uint64_t digest_bytes() const { return digest_bytes_; }
  const PrefixCacheStats& stats() const { return stats_; }

  /// For tests: a hash of (parent, tokens) in place of the own one.
  void set_hash(std::function<std::uint64_t(PrefixNodeId, std::span<const TokenId>)> hash);

 private:
  struct Node {
    PrefixNodeId parent = 0;
    std::vector<TokenId> tokens;
    PageIndex page;
    bool exact = true;
    std::uint32_t children = 0;
    std::uint64_t used = 0;  // when, in lookups and keepings
    bool stored = false;
    std::vector<std::byte> digests;  // empty where the store has them
  };

  Status load();
  void link(PrefixNodeId id, Node node);
  void store(PrefixNodeId id, Node& node);
  std::size_t record_bytes() const;
  PrefixNodeId root(const std::string& salt);
  PrefixNodeId find_child(PrefixNodeId parent, std::span<const TokenId> tokens) const;
  void touch(PrefixNodeId id, Node& node);
  void remove(PrefixNodeId id);
  bool evict();

  Tiers& tiers_;
  std::unique_ptr<PrefixStore> store_;
  std::function<std::uint64_t(PrefixNodeId, std::span<const TokenId>)> hash_;
  std::unordered_map<std::string, PrefixNodeId> roots_;  // [salt]
  std::unordered_map<PrefixNodeId, Node> nodes_;
  std::unordered_multimap<std::uint64_t, PrefixNodeId> by_hash_;
  std::set<std::pair<std::uint64_t, PrefixNodeId>> leaves_;  // (used, id)
  PrefixNodeId next_id_ = 1;
  std::uint64_t now_ = 0;
  std::uint64_t digest_bytes_ = 0;
  PrefixCacheStats stats_;
};

}  // namespace dualdecoder
