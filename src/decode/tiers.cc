#include "decode/tiers.h"

#include <utility>

#include "transfer/beside_port.h"
#include "transfer/far_file.h"
#include "transfer/file_port.h"
#include "transfer/host_port.h"

namespace dualdecoder {

Tiers::Tiers(const MemoryPlan& plan, const TierOptions& options)
    : plan_(plan), options_(options), rule_{options.policy, plan.budget_blocks} {
  if (plan.digest_bytes == 0) return;
  for (LayerIndex layer; layer.value < plan.geometry.layers; ++layer) {
    if (plan.layers[layer.value].kind == LayerKind::kSelecting) selecting_layers_.push_back(layer);
  }
}

Result<std::unique_ptr<Tiers>> Tiers::create(const MemoryPlan& plan, const TierOptions& options,
                                             std::uint64_t weights_hash, const TakeNearMemory& take_memory) {
  std::unique_ptr<Tiers> tiers(new Tiers(plan, options));
  NearTierOptions near_options{.geometry = plan.geometry,
                               .layer_slots = {},
                               .layer_ring = {},
                               .ring_sets = plan.ring_sets,
                               .ring_set_slots = plan.ring_set_slots,
                               .shares = plan.sequences,
                               .staging_slots = plan.staging_slots,
                               .poison = options.poison,
                               .take_memory = take_memory};
  for (const LayerPlan& layer : plan.layers) {
    near_options.layer_slots.push_back(layer.slots);
    near_options.layer_ring.push_back(layer.ring);
  }
  auto near = NearTier::create(near_options);
  if (!near) return std::unexpected(near.error());
  tiers->near_ = std::move(*near);
  if (plan.tiered()) {
    if (Status status = tiers->open_far(weights_hash); !status) return std::unexpected(status.error());
    // All of it will be in use, and a block that begins touches a place in every layer: a step would wait for
    // as many pages.
    tiers->near_->memory().populate();
  }
  return tiers;
}

Tiers::~Tiers() {
  while (!graves_.empty() && transfers_->wait()) sweep();
  // What the far tier never answered for could still come into a slot until the port has gone.
  transfers_.reset();
  far_.reset();
  for (Grave& grave : graves_) {
    while (grave.residency->transfers() > 0) grave.residency->note_transfer_ended();
  }
}

Status Tiers::open_far(std::uint64_t weights_hash) {
  FarTierOptions options{.geometry = plan_.geometry,
                         .pages_max = plan_.far_pages,
                         .first_page_offset = 0,
                         .verify = true,
                         .reserve = {}};
  std::unique_ptr<Port> port;
  switch (options_.far.kind) {
    case FarKind::kNone:
      return {};
    case FarKind::kCustom:
      port = options_.far.make_port(plan_.far_bytes);
      break;
    case FarKind::kHost: {
      auto host = near_->memory().on_host() ? make_host_port(plan_.far_bytes)
                                            : make_beside_port(plan_.far_bytes, near_->memory());
      if (!host) return std::unexpected(host.error());
      port = options_.far.link ? make_paced_port(std::move(*host), *options_.far.link) : std::move(*host);
      options.verify = false;
      break;
    }
    case FarKind::kFile: {
      auto file =
          FarFile::open(options_.far.directory, {.weights_hash = weights_hash, .geometry = plan_.geometry},
                        plan_.geometry.page_bytes(), plan_.far_pages, options_.keep_prefixes);
      if (!file) return std::unexpected(file.error());
      file_ = std::move(*file);
      auto made = make_file_port(*file_, near_->arena(), {});
      if (!made) return std::unexpected(made.error());
      port = std::move(*made);
      options.first_page_offset = file_->page_offset(0);
      options.reserve = [file = file_.get()](std::uint32_t pages) { return file->reserve(pages); };
      break;
    }
  }
  far_ = std::make_unique<FarTier>(std::move(port), std::move(options));
  transfers_ = std::make_unique<Transfers>(*far_, options_.transfers);
  return {};
}

std::string Tiers::far_description() const { return tiered() ? far_->port().description() : "none"; }

void Tiers::bury(std::unique_ptr<Residency> residency, std::vector<PageIndex> pages) {
  graves_.push_back({std::move(residency), std::move(pages)});
}

void Tiers::sweep() {
  if (graves_.empty()) return;
  transfers_->poll();
  std::erase_if(graves_, [this](const Grave& grave) {
    if (grave.residency->transfers() > 0) return false;
    for (const PageIndex page : grave.pages) far_->release(page);
    return true;
  });
}

}  // namespace dualdecoder
