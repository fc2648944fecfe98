#include "decode/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/hash.h"

namespace dualdecoder {
namespace {

// Pages that leave together.
constexpr std::uint32_t kEvictedAtOnce = 8;

std::uint64_t hash_of(PrefixNodeId parent, std::span<const TokenId> tokens) {
  return hash_values(tokens) ^ (parent * 0x9E3779B97F4A7C15);
}

}  // namespace

PrefixCache::PrefixCache(Tiers& tiers) : tiers_(tiers), hash_(hash_of) {
  DD_CHECK(tiers.tiered());
  tiers_.far().set_reclaim([this] {
    std::uint32_t evicted = 0;
    while (evicted < kEvictedAtOnce && evict()) ++evicted;
    return evicted > 0;
  });
}

PrefixCache::~PrefixCache() {
  tiers_.far().set_reclaim({});
  for (const auto& [id, node] : nodes_) tiers_.far().release(node.page);
}

void PrefixCache::set_hash(std::function<std::uint64_t(PrefixNodeId, std::span<const TokenId>)> hash) {
  DD_CHECK(nodes_.empty());
  hash_ = std::move(hash);
}

PrefixNodeId PrefixCache::root(const std::string& salt) {
  const auto [root, is_new] = roots_.try_emplace(salt, next_id_);
  if (is_new) ++next_id_;
  return root->second;
}

PrefixNodeId PrefixCache::find_child(PrefixNodeId parent, std::span<const TokenId> tokens) const {
  const auto [first, last] = by_hash_.equal_range(hash_(parent, tokens));
  for (auto entry = first; entry != last; ++entry) {
    const Node& node = nodes_.at(entry->second);
    if (node.parent == parent && std::ranges::equal(node.tokens, tokens)) return entry->second;
  }
  return 0;
}

void PrefixCache::touch(PrefixNodeId id, Node& node) {
  const bool leaf = leaves_.erase({node.used, id}) > 0;
  node.used = now_;
  if (leaf) leaves_.emplace(now_, id);
}

Result<PrefixCache::Cursor> PrefixCache::adopt(Sequence& sequence, const std::string& salt,
                                               std::span<const TokenId> tokens, bool exact_only) {
  ++now_;
  ++stats_.lookups;
  stats_.tokens_wanted += tokens.size();
  const std::uint32_t block_tokens = tiers_.geometry().block_tokens;
  const std::size_t blocks_max = tokens.empty() ? 0 : (tokens.size() - 1) / block_tokens;
  Cursor cursor{.node = root(salt)};
  std::vector<PageIndex> pages;
  std::vector<std::vector<std::byte>> digests;
  while (cursor.blocks < blocks_max) {
    const auto block = tokens.subspan(std::size_t{cursor.blocks} * block_tokens, block_tokens);
    const PrefixNodeId id = find_child(cursor.node, block);
    if (id == 0) break;
    Node& node = nodes_.at(id);
    if (exact_only && !node.exact) break;
    touch(id, node);
    pages.push_back(node.page);
    digests.push_back(node.digests);
    cursor = {.first = cursor.blocks == 0 ? id : cursor.first,
              .node = id,
              .blocks = cursor.blocks + 1,
              .exact = node.exact};
  }
  if (pages.empty()) return cursor;
  if (Status status = sequence.adopt(pages, digests); !status) {
    drop(cursor.first);
    return std::unexpected(status.error());
  }
  stats_.tokens_found += std::uint64_t{cursor.blocks} * block_tokens;
  return cursor;
}

void PrefixCache::keep(const Sequence& sequence, Cursor& cursor, std::span<const TokenId> tokens,
                       bool exact) {
  const BlockIndex block(cursor.blocks);
  DD_CHECK(block.value < sequence.blocks_at_rest() && tokens.size() == tiers_.geometry().block_tokens);
  ++now_;
  exact = exact && cursor.exact;
  const PageIndex page = sequence.page(block);
  PrefixNodeId id = find_child(cursor.node, tokens);
  const auto record = [&] {
    std::vector<std::byte> bytes;
    const auto layers = tiers_.selecting_layers();
    if (sequence.digests() == nullptr) return bytes;
    bytes.resize(Digests::record_bytes(tiers_.geometry(), tiers_.options().digests, layers.size()));
    sequence.digests()->save(block, layers, bytes);
    return bytes;
  };
  if (id == 0) {
    id = next_id_++;
    Node node{.parent = cursor.node,
              .tokens = {tokens.begin(), tokens.end()},
              .page = page,
              .exact = exact,
              .used = now_,
              .digests = record()};
    digest_bytes_ += node.digests.size();
    tiers_.far().retain(page);
    if (const auto parent = nodes_.find(cursor.node);
        parent != nodes_.end() && parent->second.children++ == 0)
      leaves_.erase({parent->second.used, cursor.node});
    by_hash_.emplace(hash_(cursor.node, tokens), id);
    leaves_.emplace(now_, id);
    nodes_.emplace(id, std::move(node));
  } else {
    Node& node = nodes_.at(id);
    touch(id, node);
    if (exact && !node.exact) {
      // The same tokens, now computed exactly.
      tiers_.far().retain(page);
      tiers_.far().release(std::exchange(node.page, page));
      node.digests = record();
      node.exact = true;
    }
  }
  cursor = {.first = cursor.blocks == 0 ? id : cursor.first,
            .node = id,
            .blocks = cursor.blocks + 1,
            .exact = exact};
}

void PrefixCache::remove(PrefixNodeId id) {
  const auto entry = nodes_.find(id);
  const Node& node = entry->second;
  DD_CHECK(node.children == 0);
  leaves_.erase({node.used, id});
  const auto [first, last] = by_hash_.equal_range(hash_(node.parent, node.tokens));
  by_hash_.erase(std::find_if(first, last, [id](const auto& other) { return other.second == id; }));
  if (const auto parent = nodes_.find(node.parent); parent != nodes_.end() && --parent->second.children == 0)
    leaves_.emplace(parent->second.used, node.parent);
  digest_bytes_ -= node.digests.size();
  tiers_.far().release(node.page);
  nodes_.erase(entry);
}

void PrefixCache::drop(PrefixNodeId id) {
  if (!nodes_.contains(id)) return;
  // Those below it, deepest first: few calls, and each looks through all nodes.
  std::vector<PrefixNodeId> path = {id};
  for (std::size_t i = 0; i < path.size(); ++i) {
    for (const auto& [child, node] : nodes_) {
      if (node.parent == path[i]) path.push_back(child);
    }
  }
  stats_.lost += path.size();
  for (; !path.empty(); path.pop_back()) remove(path.back());
}

bool PrefixCache::evict() {
  for (const auto& [used, id] : leaves_) {
    if (tiers_.far().users(nodes_.at(id).page) > 1) continue;
    ++stats_.evicted;
    remove(id);
    return true;
  }
  return false;
}

}  // namespace dualdecoder
