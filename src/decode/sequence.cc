#include "decode/sequence.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace dualdecoder {

const std::optional<Error> Sequence::kNoError;

Result<std::unique_ptr<Sequence>> Sequence::create(Tiers& tiers) {
  std::unique_ptr<Sequence> sequence(new Sequence(tiers));
  if (Status status = sequence->take_share(); !status) return std::unexpected(status.error());
  const MemoryPlan& plan = tiers.plan();
  sequence->selections_.resize(plan.geometry.layers);
  if (plan.digest_bytes > 0) {
    const std::uint32_t blocks_max = plan.geometry.blocks_for(plan.context);
    auto digests = Digests::create(plan.geometry, tiers.options().digests, blocks_max);
    if (!digests) return std::unexpected(digests.error());
    sequence->digests_ = std::move(*digests);
  }
  return sequence;
}

Status Sequence::take_share() {
  tiers_.sweep();
  const MemoryPlan& plan = tiers_.plan();
  auto residency = Residency::create(tiers_.near(), plan.geometry.blocks_for(plan.context));
  if (!residency) return std::unexpected(residency.error());
  residency_ = std::move(*residency);
  return {};
}

Sequence::~Sequence() {
  if (tiers_.tiered() && residency_ && !tiers_.transfers().drain(*residency_)) {
    tiers_.bury(std::move(residency_), std::move(pages_));
    return;
  }
  for (const PageIndex page : pages_) tiers_.far().release(page);
}

Status Sequence::reserve_pages(std::uint32_t tokens) {
  if (!tiers_.tiered()) return {};
  const std::size_t before = pages_.size();
  while (pages_.size() < geometry().blocks_for(tokens)) {
    const auto page = tiers_.far().take_page();
    if (!page) {
      for (; pages_.size() > before; pages_.pop_back()) tiers_.far().release(pages_.back());
      return std::unexpected(page.error());
    }
    pages_.push_back(*page);
  }
  return {};
}

Status Sequence::take_slots(std::uint32_t tokens) {
  const std::uint32_t wanted = geometry().blocks_for(tokens);
  for (; blocks_ < wanted; ++blocks_) {
    for (LayerIndex layer; layer.value < geometry().layers; ++layer) {
      const BlockIndex block(blocks_);
      while (!residency_->try_take(layer, block, SlotState::kHeld, tiers_.step())) {
        DD_CHECK(tiers_.tiered(), "layer {} has no slot for block {}", layer.value, block.value);
        if (!tiers_.transfers().wait()) tiers_.give_up(*residency_, "a write");
        if (!error()) continue;
        for (LayerIndex taken; taken < layer; ++taken) residency_->drop(taken, block);
        return std::unexpected(*error());
      }
    }
  }
  return {};
}

void Sequence::drop_blocks_from(std::uint32_t first) {
  for (BlockIndex block(first); block.value < blocks_; ++block) {
    for (LayerIndex layer; layer.value < geometry().layers; ++layer) residency_->drop(layer, block);
  }
  blocks_ = std::min(blocks_, first);
  for (; pages_.size() > first; pages_.pop_back()) tiers_.far().release(pages_.back());
}

void Sequence::release_unused() { drop_blocks_from(geometry().blocks_for(tokens_)); }

Status Sequence::finish_transfers(const char* what) {
  if (parked()) return {};
  if (tiers_.tiered() && !tiers_.transfers().finish(*residency_)) residency_->set_error(tiers_.overdue(what));
  return error() ? Status(std::unexpected(*error())) : Status{};
}

Status Sequence::truncate(std::uint32_t tokens) {
  DD_CHECK(tokens <= tokens_, "{} of {}", tokens, tokens_);
  if (error()) return std::unexpected(*error());
  guessed_ = 0;
  if (tokens == tokens_) return {};
  if (Status status = finish_transfers("a transfer"); !status) return status;
  const std::uint32_t full = tokens / geometry().block_tokens;
  const std::uint32_t kept = geometry().blocks_for(tokens);
  const bool reopens = full < written_ && full < kept;
  std::optional<PageIndex> own;
  if (reopens && shares_page(BlockIndex(full))) {
    const auto page = take_page_for_shared(kept);
    if (!page) return std::unexpected(page.error());
    own = *page;
  }
  drop_blocks_from(kept);
  tokens_ = tokens;
  written_ = std::min(written_, full);
  const Status status = reopens ? reopen(BlockIndex(full)) : Status{};
  if (own) {
    // The block will be written again, and those who share its old page keep that.
    if (status) std::swap(pages_[full], *own);
    tiers_.far().release(*own);
  }
  if (!status) return status;
  if (digests_) digests_->truncate(full);
  residency_->forget_predicted_marks();
  for (Selection& selection : selections_) selection.valid = false;
  return {};
}

// One that goes with the blocks from `first_dropped` on, where nobody else uses it, is as good as a free one,
// and there even when the far tier is full.
Result<PageIndex> Sequence::take_page_for_shared(std::uint32_t first_dropped) {
  const auto dropped = std::find_if(pages_.begin() + first_dropped, pages_.end(),
                                    [&](PageIndex page) { return tiers_.far().users(page) == 1; });
  if (dropped == pages_.end()) return tiers_.far().take_page();
  const PageIndex page = *dropped;
  pages_.erase(dropped);
  return page;
}

// A block that was written will be filled again: it has to be near in every layer.
Status Sequence::reopen(BlockIndex block) {
  residency_->forget_wants();
  for (LayerIndex layer; layer.value < geometry().layers; ++layer) {
    if (residency_->near(layer, block)) continue;
    const auto slot = residency_->try_take(layer, block, SlotState::kLoading, tiers_.step() + 1);
    DD_CHECK(slot, "layer {} has no slot for block {}", layer.value, block.value);
    tiers_.transfers().read(*residency_, layer, block, page(block), Lane::kDemand);
  }
  if (Status status = finish_transfers("a read"); !status) return status;
  for (LayerIndex layer; layer.value < geometry().layers; ++layer) {
    if (residency_->state(layer, block) == SlotState::kClean) residency_->reopen(layer, block);
  }
  return {};
}

Result<std::unique_ptr<Sequence>> Sequence::fork(std::uint32_t tokens) {
  DD_CHECK(tokens <= tokens_, "{} of {}", tokens, tokens_);
  if (error()) return std::unexpected(*error());
  // What is shared has to have been written, and what is copied to be at rest.
  if (Status status = finish_transfers("a transfer"); !status) return std::unexpected(status.error());
  auto created = create(tiers_);
  if (!created) return created;
  Sequence& child = **created;
  if (tiers_.tiered()) child.share_full_pages(*this, tokens);
  if (Status status = child.reserve_pages(tokens); !status) return std::unexpected(status.error());
  child.rule_ = rule_;
  child.tokens_ = tokens;
  child.blocks_ = geometry().blocks_for(tokens);
  if (Status status = child.bring_near(this); !status) return std::unexpected(status.error());
  if (digests_) child.digests_->copy(*digests_, tokens / geometry().block_tokens);
  if (tokens == tokens_) child.selections_ = selections_;
  return created;
}

void Sequence::share_full_pages(const Sequence& parent, std::uint32_t tokens) {
  for (; written_ < tokens / geometry().block_tokens; ++written_) {
    const PageIndex page = parent.page(BlockIndex(written_));
    tiers_.far().retain(page);
    pages_.push_back(page);
  }
}

// Copies the blocks that `parent` has near, if there is one, and reads what would be missed at every step:
// the block that is filled next, and what windowed layers see, since they stream what is not near. The last
// block comes first, because it needs its slots: where the parent had none for it, one of the others finds no
// room.
Status Sequence::bring_near(const Sequence* parent) {
  const NearTier& near = tiers_.near();
  const auto first_held = BlockIndex(written_);
  for (std::uint32_t b = blocks_; b-- > 0;) {
    const BlockIndex block(b);
    for (LayerIndex layer; layer.value < geometry().layers; ++layer) {
      const bool copied = parent != nullptr && parent->residency_->readable(layer, block);
      const bool read = block >= first_held || tiers_.layer(layer).kind == LayerKind::kWindowed;
      if (!copied && !read) continue;
      const auto slot = residency_->try_take(layer, block, SlotState::kLoading, 0);
      if (!slot) continue;
      if (copied) {
        near.memory().copy_within(near.data(*slot), near.data(parent->residency_->slot(layer, block)),
                                  geometry().slot_bytes());
        residency_->end_read(layer, block);
      } else {
        const PageIndex from = parent != nullptr ? parent->page(block) : page(block);
        tiers_.transfers().read(*residency_, layer, block, from, Lane::kDemand);
      }
    }
  }
  if (Status status = finish_transfers("a read"); !status) return status;
  for (BlockIndex block = first_held; block.value < blocks_; ++block) {
    for (LayerIndex layer; layer.value < geometry().layers; ++layer) residency_->reopen(layer, block);
  }
  return {};
}

Status Sequence::adopt(std::span<const PageIndex> pages, std::span<const std::vector<std::byte>> digests) {
  DD_CHECK(tokens_ == 0 && pages_.empty() && tiers_.tiered() && pages.size() == digests.size());
  for (const PageIndex page : pages) {
    tiers_.far().retain(page);
    pages_.push_back(page);
  }
  blocks_ = written_ = static_cast<std::uint32_t>(pages.size());
  tokens_ = blocks_ * geometry().block_tokens;
  if (digests_) {
    for (const std::vector<std::byte>& record : digests) digests_->append(tiers_.selecting_layers(), record);
  }
  return bring_near(nullptr);
}

Status Sequence::park() {
  DD_CHECK(tiers_.tiered() && !parked());
  guessed_ = 0;
  release_unused();
  write_full_pages();
  // The block that is not full yet goes to the page that it will be written to again.
  if (written_ < blocks_) tiers_.transfers().write(*residency_, BlockIndex(written_), pages_[written_]);
  if (Status status = finish_transfers("a transfer"); !status) return status;
  residency_.reset();
  return {};
}

Status Sequence::resume() {
  DD_CHECK(parked());
  if (Status status = take_share(); !status) return status;
  return bring_near(nullptr);
}

bool Sequence::try_share_page(BlockIndex block, PageIndex page) {
  for (LayerIndex layer; !parked() && layer.value < geometry().layers; ++layer) {
    if (residency_->state(layer, block) == SlotState::kLoading) return false;
  }
  tiers_.far().retain(page);
  tiers_.far().release(std::exchange(pages_[block.value], page));
  return true;
}

std::uint32_t Sequence::blocks_at_rest() const {
  // All layers of a block are written at once, and leave only afterwards.
  std::uint32_t blocks = written_;
  if (parked()) return blocks;
  const auto at_rest = [this](BlockIndex block) {
    const SlotState state = residency_->state(LayerIndex(0), block);
    return state != SlotState::kHeld && state != SlotState::kWriting;
  };
  while (blocks > 0 && !at_rest(BlockIndex(blocks - 1))) --blocks;
  return blocks;
}

void Sequence::add_digests(LayerIndex layer, std::uint32_t tokens) {
  std::vector<f16_bits> scratch;
  while (digests_->blocks(layer) < tokens / geometry().block_tokens) {
    const BlockIndex block(digests_->blocks(layer));
    digests_->add(layer, tiers_.near().transposed_keys(residency_->slot(layer, block), scratch));
  }
}

void Sequence::write_full_pages() {
  if (!tiers_.tiered()) return;
  const std::uint32_t full = tokens_ / geometry().block_tokens;
  for (; written_ < full; ++written_) {
    tiers_.transfers().write(*residency_, BlockIndex(written_), pages_[written_]);
  }
}

}  // namespace dualdecoder
