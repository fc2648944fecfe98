#include "decode/sequence.h"

namespace dualdecoder {

Result<std::unique_ptr<Sequence>> Sequence::create(Tiers& tiers) {
  tiers.sweep();
  std::unique_ptr<Sequence> sequence(new Sequence(tiers));
  const MemoryPlan& plan = tiers.plan();
  const std::uint32_t blocks_max = plan.geometry.blocks_for(plan.context);
  auto residency = Residency::create(tiers.near(), blocks_max);
  if (!residency) return std::unexpected(residency.error());
  sequence->residency_ = std::move(*residency);
  sequence->selections_.resize(plan.geometry.layers);
  if (plan.digest_bytes > 0) {
    auto digests = Digests::create(plan.geometry, tiers.options().digests, blocks_max);
    if (!digests) return std::unexpected(digests.error());
    sequence->digests_ = std::move(*digests);
  }
  return sequence;
}

Sequence::~Sequence() {
  if (!residency_) return;
  if (tiers_.tiered() && !tiers_.transfers().drain(*residency_)) {
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

Status Sequence::truncate(std::uint32_t tokens) {
  DD_CHECK(tokens <= tokens_, "{} of {}", tokens, tokens_);
  if (error()) return std::unexpected(*error());
  guessed_ = 0;
  if (tokens == tokens_) return {};
  if (tiers_.tiered() && !tiers_.transfers().finish(*residency_))
    residency_->set_error(tiers_.overdue("a transfer"));
  if (error()) return std::unexpected(*error());
  const std::uint32_t full = tokens / geometry().block_tokens;
  drop_blocks_from(geometry().blocks_for(tokens));
  tokens_ = tokens;
  if (full < written_) {
    if (tokens % geometry().block_tokens != 0) {
      if (Status status = reopen(BlockIndex(full)); !status) return status;
    }
    written_ = full;
  }
  if (digests_) digests_->truncate(full);
  for (Selection& selection : selections_) selection.valid = false;
  return {};
}

// A block that was written will be filled again: it has to be near in every layer, and its page is not to be
// written any more by whom it is shared with.
Status Sequence::reopen(BlockIndex block) {
  Transfers& transfers = tiers_.transfers();
  residency_->forget_wants();
  for (LayerIndex layer; layer.value < geometry().layers; ++layer) {
    if (residency_->near(layer, block)) continue;
    const auto slot = residency_->try_take(layer, block, SlotState::kLoading, tiers_.step() + 1);
    DD_CHECK(slot, "layer {} has no slot for block {}", layer.value, block.value);
    transfers.read(*residency_, layer, block, page(block), Lane::kDemand);
  }
  if (!transfers.finish(*residency_)) residency_->set_error(tiers_.overdue("a read"));
  if (error()) return std::unexpected(*error());
  for (LayerIndex layer; layer.value < geometry().layers; ++layer) {
    if (residency_->state(layer, block) == SlotState::kClean) residency_->reopen(layer, block);
  }
  if (tiers_.far().users(page(block)) == 1) return {};
  const auto own = tiers_.far().take_page();
  if (!own) return std::unexpected(own.error());
  tiers_.far().release(page(block));
  pages_[block.value] = *own;
  return {};
}

void Sequence::add_digests(LayerIndex layer, std::uint32_t tokens) {
  while (digests_->blocks(layer) < tokens / geometry().block_tokens) {
    const BlockIndex block(digests_->blocks(layer));
    digests_->add(layer, tiers_.near().k(residency_->slot(layer, block)));
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
