#include "decode/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/hash.h"

namespace dualdecoder {
namespace {

// Pages that leave together.
constexpr std::uint32_t kEvictedAtOnce = 8;
// Of ids and times of use in an index: far from the end of counting.
constexpr std::uint64_t kNumberMax = std::uint64_t{1} << 62;

bool is_id(std::uint64_t number) { return number > 0 && number < kNumberMax; }

std::uint64_t hash_of(PrefixNodeId parent, std::span<const TokenId> tokens) {
  return hash_values(tokens) ^ (parent * 0x9E3779B97F4A7C15);
}

}  // namespace

PrefixCache::PrefixCache(Tiers& tiers, std::unique_ptr<PrefixStore> store)
    : tiers_(tiers), store_(std::move(store)), hash_(hash_of) {
  DD_CHECK(tiers.tiered());
  if (store_ && !load()) {
    // The rest is of no use without its parents.
    ++stats_.store_errors;
  }
  tiers_.far().set_reclaim([this] {
    if (store_ && !store_->begin()) ++stats_.store_errors;
    std::uint32_t evicted = 0;
    while (evicted < kEvictedAtOnce && evict()) ++evicted;
    // Before any of these pages is written again.
    if (store_ && !store_->commit()) ++stats_.store_errors;
    return evicted > 0;
  });
}

PrefixCache::~PrefixCache() {
  tiers_.far().set_reclaim({});
  if (store_ && store_->begin()) {
    for (const auto& [id, node] : nodes_) static_cast<void>(store_->set_used(id, node.used));
    static_cast<void>(store_->commit());
  }
  for (const auto& [id, node] : nodes_) tiers_.far().release(node.page);
}

Status PrefixCache::load() {
  const auto roots = store_->load_roots();
  if (!roots) return std::unexpected(roots.error());
  std::set<PrefixNodeId> root_ids;
  for (const KeptRoot& root : *roots) {
    if (!is_id(root.id)) continue;
    roots_.emplace(root.salt, root.id);
    root_ids.insert(root.id);
    next_id_ = std::max(next_id_, root.id + 1);
  }
  auto pages = store_->load_pages();
  if (!pages) return std::unexpected(pages.error());
  const std::uint32_t pages_there = tiers_.file() == nullptr ? 0 : tiers_.file()->pages_reserved();
  std::vector<bool> taken(pages_there);
  std::vector<KeptPage> good;
  for (KeptPage& page : *pages) {
    const bool counts = is_id(page.id) && !root_ids.contains(page.id) && page.used < kNumberMax;
    const bool fits = counts && page.page.value < pages_there && !taken[page.page.value] &&
                      page.tokens.size() == tiers_.geometry().block_tokens &&
                      page.checksums.size() == tiers_.geometry().layers &&
                      (nodes_.contains(page.parent) || root_ids.contains(page.parent));
    if (!fits) {  // nor do those behind it
      static_cast<void>(store_->remove(page.id));
      continue;
    }
    next_id_ = std::max(next_id_, page.id + 1);
    now_ = std::max(now_, page.used);
    taken[page.page.value] = true;
    link(page.id, {.parent = page.parent,
                   .tokens = page.tokens,
                   .page = page.page,
                   .exact = page.exact,
                   .used = page.used,
                   .stored = true,
                   .digests = {}});
    good.push_back(std::move(page));
  }
  std::ranges::sort(good, {}, &KeptPage::page);
  for (const KeptPage& page : good) tiers_.far().restore(page.page, page.checksums);
  stats_.found_at_start = good.size();
  return {};
}

// Puts the node, which has its page, into the tree.
void PrefixCache::link(PrefixNodeId id, Node node) {
  if (const auto parent = nodes_.find(node.parent); parent != nodes_.end() && parent->second.children++ == 0)
    leaves_.erase({parent->second.used, node.parent});
  by_hash_.emplace(hash_(node.parent, node.tokens), id);
  leaves_.emplace(node.used, id);
  digest_bytes_ += node.digests.size();
  nodes_.emplace(id, std::move(node));
}

// What the store does not take is only kept as long as the process lives.
void PrefixCache::store(PrefixNodeId id, Node& node) {
  if (!store_) return;
  const auto checksums = tiers_.far().checksums(node.page);
  const KeptPage page{.id = id,
                      .parent = node.parent,
                      .used = node.used,
                      .exact = node.exact,
                      .page = node.page,
                      .tokens = node.tokens,
                      .checksums = {checksums.begin(), checksums.end()}};
  if (store_->add(page, node.digests)) {
    node.stored = true;
    node.digests = {};
    return;
  }
  ++stats_.store_errors;
  if (std::exchange(node.stored, false)) static_cast<void>(store_->remove(id));
}

void PrefixCache::set_hash(std::function<std::uint64_t(PrefixNodeId, std::span<const TokenId>)> hash) {
  DD_CHECK(nodes_.empty());
  hash_ = std::move(hash);
}

std::size_t PrefixCache::record_bytes() const {
  const std::size_t layers = tiers_.selecting_layers().size();
  return layers == 0 ? 0 : Digests::record_bytes(tiers_.geometry(), tiers_.options().digests, layers);
}

PrefixNodeId PrefixCache::root(const std::string& salt) {
  const auto [root, is_new] = roots_.try_emplace(salt, next_id_);
  if (is_new && store_ && !store_->add_root({.id = next_id_, .salt = salt})) ++stats_.store_errors;
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
    if (node.stored) {
      auto record = store_->digests(id);
      if (!record || record->size() != record_bytes()) {
        drop(id);
        break;
      }
      digests.push_back(std::move(*record));
    } else {
      digests.push_back(node.digests);
    }
    touch(id, node);
    pages.push_back(node.page);
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

bool PrefixCache::keep(Sequence& sequence, Cursor& cursor, std::span<const TokenId> tokens, bool exact) {
  const BlockIndex block(cursor.blocks);
  DD_CHECK(block.value < sequence.blocks_at_rest() && tokens.size() == tiers_.geometry().block_tokens);
  ++now_;
  exact = exact && cursor.exact;
  const PageIndex page = sequence.page(block);
  PrefixNodeId id = find_child(cursor.node, tokens);
  const auto record = [&] {
    std::vector<std::byte> bytes(record_bytes());
    if (!bytes.empty()) sequence.digests()->save(block, tiers_.selecting_layers(), bytes);
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
    store(id, node);
    tiers_.far().retain(page);
    link(id, std::move(node));
  } else {
    Node& node = nodes_.at(id);
    const bool same_bits = exact && node.exact;
    if (node.page != page && same_bits && !sequence.try_share_page(block, node.page)) return false;
    if (node.page != page && !same_bits) {
      // Computed again: the page of this sequence takes the place of the other one.
      if (node.exact || tiers_.far().users(node.page) > 1) return false;
      tiers_.far().retain(page);
      tiers_.far().release(std::exchange(node.page, page));
      digest_bytes_ -= node.digests.size();
      node.digests = record();
      node.exact = exact;
      store(id, node);
      digest_bytes_ += node.digests.size();
    }
    touch(id, node);
  }
  cursor = {.first = cursor.blocks == 0 ? id : cursor.first,
            .node = id,
            .blocks = cursor.blocks + 1,
            .exact = exact};
  return true;
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
  if (node.stored && !store_->remove(id)) ++stats_.store_errors;
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
