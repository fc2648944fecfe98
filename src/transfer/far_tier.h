// The far tier as the engine sees it: pages that are taken, shared and given back, and a checksum for every
// block that was written. A page holds the blocks of all layers for the same tokens, one slot_bytes() after
// the other, so that a page is one sequential write and a block one read. Bytes are moved by a port
// (transfer/port.h), in the order that transfer/transfers.h decides. Owned by the engine thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "kv/geometry.h"
#include "transfer/port.h"

namespace dualdecoder {

struct FarTierOptions {
  KvGeometry geometry = {};
  std::uint32_t pages_max = 0;
  std::uint64_t first_page_offset = 0;  // bytes
  /// Checks what is read against the checksum of what was written. Off for memory, which guards itself.
  bool verify = true;
  /// Makes room for that many pages in all; null when there is room for all from the start.
  std::function<Status(std::uint32_t pages)> reserve;
};

/// Gives back at least one page that is only kept for later; false when there is none.
using Reclaim = std::function<bool()>;

class FarTier {
 public:
  FarTier(std::unique_ptr<Port> port, FarTierOptions options);

  const KvGeometry& geometry() const { return options_.geometry; }
  Port& port() const { return *port_; }
  bool verify() const { return options_.verify; }

  /// A page with one user. kOutOfMemory when all are in use; kIo when the file cannot grow. What is only kept
  /// for later makes room first.
  Result<PageIndex> take_page();
  void set_reclaim(Reclaim reclaim) { reclaim_ = std::move(reclaim); }
  /// A page that an earlier process has left, with one user. Before the first take_page().
  void restore(PageIndex page, std::span<const std::uint64_t> checksums);
  void retain(PageIndex page);
  /// The last user's release frees the page; no transfer may be in flight on it then.
  void release(PageIndex page);
  std::uint32_t users(PageIndex page) const { return users_[page.value]; }

  std::uint32_t pages_in_use() const { return pages_in_use_; }
  std::uint32_t pages_max() const { return options_.pages_max; }
  std::uint64_t bytes_in_use() const { return std::uint64_t{pages_in_use_} * geometry().page_bytes(); }
  std::uint64_t bytes_max() const { return std::uint64_t{options_.pages_max} * geometry().page_bytes(); }

  std::uint64_t offset(PageIndex page, LayerIndex layer) const {
    return options_.first_page_offset + page.value * std::uint64_t{geometry().page_bytes()} +
           layer.value * std::uint64_t{geometry().slot_bytes()};
  }
  /// Of the slot_bytes() last written there.
  std::uint64_t& checksum(PageIndex page, LayerIndex layer) {
    return checksums_[std::size_t{page.value} * geometry().layers + layer.value];
  }
  /// Those of all its layers.
  std::span<const std::uint64_t> checksums(PageIndex page) const {
    return std::span(checksums_).subspan(std::size_t{page.value} * geometry().layers, geometry().layers);
  }

 private:
  Status touch_next_page();

  std::unique_ptr<Port> port_;
  FarTierOptions options_;
  Reclaim reclaim_;
  std::vector<std::uint32_t> users_;      // [page], of pages touched so far
  std::vector<std::uint64_t> checksums_;  // [page, layer]
  std::vector<PageIndex> free_;           // touched before and free again
  std::uint32_t pages_in_use_ = 0;
};

}  // namespace dualdecoder
