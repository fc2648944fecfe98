// One sequence's place in the engine: how many tokens are committed, where their KV lies in both tiers, their
// digests, and what the next step should attend to. Owned by the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/check.h"
#include "decode/tiers.h"
#include "select/digest.h"

namespace dualdecoder {

/// The blocks that one layer should attend to beside its window, ascending.
struct Selection {
  bool valid = false;
  std::uint32_t age = 0;  // steps since it was ranked
  BlockIndex end;         // of the candidates that it was ranked from
  std::vector<BlockIndex> blocks;
  std::vector<float> q;  // [heads, head_dim] that predicted it; kept only for Correction::Kind::kCosine

  /// `blocks` were ranked just now, from candidates up to `candidates_end`.
  void set_ranked(BlockIndex candidates_end) {
    valid = true;
    age = 0;
    end = candidates_end;
  }
  /// There is nothing to rank.
  void take_all(const Candidates& candidates) {
    blocks.clear();
    for (BlockIndex block = candidates.first; block < candidates.end; ++block) blocks.push_back(block);
    set_ranked(candidates.end);
  }
  /// Takes in what has left the window since it was ranked.
  void extend(BlockIndex to) {
    for (; end < to; ++end) blocks.push_back(end);
  }
};

class Sequence {
 public:
  /// kOutOfMemory when the engine has no place for another one.
  static Result<std::unique_ptr<Sequence>> create(Tiers& tiers);
  /// A new sequence whose tokens are the first `tokens` of this one, which has at least as many: what a copy
  /// that was then cut back to them would be. Full pages are shared, so it takes no far memory but a page for
  /// a last block that is not full; what is near here is near there, too, as far as it has room. Waits for
  /// this sequence's transfers. On an error there is no new sequence, and what this one holds is as before:
  /// that the engine has no place left, that of FarTier::take_page, of a read that failed, or error().
  Result<std::unique_ptr<Sequence>> fork(std::uint32_t tokens);
  /// Waits for the transfers in flight.
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  /// Committed tokens; the next one stands at this position.
  std::uint32_t tokens() const { return tokens_; }
  /// What a transfer of this sequence ended with. It can then only be destroyed.
  const std::optional<Error>& error() const { return residency_ ? residency_->error() : kNoError; }

  /// Begins with blocks that are in the far tier, full and written: `pages`, which it comes to share, and for
  /// each the record of its digests (Digests::save; empty where there are none). For a sequence without
  /// tokens. Reads what windowed layers see. An error is error(), or leaves it without tokens.
  Status adopt(std::span<const PageIndex> pages, std::span<const std::vector<std::byte>> digests);
  /// Its first blocks whose write to the far tier has ended well.
  std::uint32_t blocks_at_rest() const;
  /// From now on the block, which is at rest, lies in `page`, which holds the same and is shared. False, and
  /// nothing has changed, while it is being read.
  bool try_share_page(BlockIndex block, PageIndex page);
  /// Waits for the writes asked for so far. An error is error().
  Status finish_writes() { return finish_transfers("a write"); }

  /// Makes room near for another sequence: what only the near tier holds is written, and all its slots are
  /// given back. Its tokens, pages and digests stay. Only with a far tier, and not in a step. Waits for its
  /// transfers. An error is error(); then it is not parked.
  Status park();
  /// Takes a place again and reads what would be missed at every step. Nothing is computed, and what follows
  /// is as if it had not been parked. kOutOfMemory when the engine has no place: it stays parked. Any other
  /// error is error().
  Status resume();
  bool parked() const { return residency_ == nullptr; }

  /// Forgets everything from position `tokens` on; there are at least that many. May read one page. Where it
  /// cuts a page that is shared it needs one of its own: without one it returns the error of
  /// FarTier::take_page and nothing has changed. Any other error is error().
  Status truncate(std::uint32_t tokens);

  /// Its own, for the steps to come, instead of the engine's.
  void set_rule(const SelectionRule& rule) { rule_ = rule; }
  const SelectionRule& rule() const { return rule_ ? *rule_ : tiers_.rule(); }
  /// Whether its tokens attend to a selection in `layer`.
  bool selects(LayerIndex layer) const {
    return tiers_.layer(layer).kind == LayerKind::kSelecting && rule().policy != Policy::kFull;
  }
  /// Whether the budget has room for all of them. The oracle measures, even so.
  bool selects_all(const Candidates& candidates) const {
    return rule().policy != Policy::kOracle && candidates.count() <= rule().budget_blocks;
  }

  // For the engine and the step.

  /// Far pages for tokens [0, tokens). On an error nothing has changed.
  Status reserve_pages(std::uint32_t tokens);
  /// Near slots for the blocks that tokens [tokens(), tokens) are written into, wanted in the present step.
  /// May wait for writes. An error is the sequence's own and stays (error()).
  Status take_slots(std::uint32_t tokens);
  /// Of the blocks of a selecting layer that tokens [0, tokens) fill; those that lack one are near.
  void add_digests(LayerIndex layer, std::uint32_t tokens);
  void commit(std::uint32_t tokens) {
    tokens_ += tokens;
    guessed_ = 0;
  }
  /// The last step left the K and V of so many guesses (0 or 1) behind the committed tokens.
  void set_guessed(std::uint32_t guesses) { guessed_ = guesses; }
  std::uint32_t guessed() const { return guessed_; }
  /// Gives back pages and slots that were taken for tokens which did not come.
  void release_unused();
  /// Starts writing the pages that are full and not yet written.
  void write_full_pages();

  Residency& residency() const { return *residency_; }
  /// Null when no layer selects.
  Digests* digests() const { return digests_.get(); }
  Selection& selection(LayerIndex layer) { return selections_[layer.value]; }
  PageIndex page(BlockIndex block) const { return pages_[block.value]; }
  const KvGeometry& geometry() const { return tiers_.geometry(); }

 private:
  static const std::optional<Error> kNoError;

  explicit Sequence(Tiers& tiers) : tiers_(tiers) {}
  Status take_share();
  Status finish_transfers(const char* what);
  bool shares_page(BlockIndex block) const { return tiers_.far().users(page(block)) > 1; }
  Result<PageIndex> take_page_for_shared(std::uint32_t first_dropped);
  Status reopen(BlockIndex block);
  void drop_blocks_from(std::uint32_t first);
  void share_full_pages(const Sequence& parent, std::uint32_t tokens);
  Status bring_near(const Sequence* parent);

  Tiers& tiers_;
  std::unique_ptr<Residency> residency_;  // null while parked
  std::unique_ptr<Digests> digests_;
  std::optional<SelectionRule> rule_;
  std::vector<PageIndex> pages_;       // [block]
  std::vector<Selection> selections_;  // [layer]
  std::uint32_t tokens_ = 0;
  std::uint32_t guessed_ = 0;
  std::uint32_t blocks_ = 0;   // with slots in every layer, or written
  std::uint32_t written_ = 0;  // blocks whose write has been asked for
};

}  // namespace dualdecoder
