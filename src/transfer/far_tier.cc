#include "transfer/far_tier.h"

#include <algorithm>

#include "base/check.h"
#include "base/units.h"

namespace dualdecoder {

FarTier::FarTier(std::unique_ptr<Port> port, FarTierOptions options)
    : port_(std::move(port)), options_(std::move(options)) {}

Status FarTier::touch_next_page() {
  const auto touched = static_cast<std::uint32_t>(users_.size());
  if (touched == options_.pages_max) {
    return fail(ErrorCode::kOutOfMemory,
                "the far tier is full: {} of KV in use; end a sequence or raise the limit (--far-size)",
                format_bytes(static_cast<double>(bytes_in_use())));
  }
  if (options_.reserve) {
    if (Status status = options_.reserve(touched + 1); !status) return status;
  }
  users_.push_back(0);
  checksums_.resize(checksums_.size() + geometry().layers);
  free_.push_back(PageIndex(touched));
  return {};
}

Result<PageIndex> FarTier::take_page() {
  if (free_.empty()) {
    if (Status status = touch_next_page(); !status && !(reclaim_ && reclaim_() && !free_.empty()))
      return std::unexpected(status.error());
  }
  const PageIndex page = free_.back();
  free_.pop_back();
  users_[page.value] = 1;
  ++pages_in_use_;
  return page;
}

void FarTier::restore(PageIndex page, std::span<const std::uint64_t> checksums) {
  DD_CHECK(page.value < options_.pages_max && checksums.size() == geometry().layers);
  for (; users_.size() < page.value; users_.push_back(0))
    free_.push_back(PageIndex(static_cast<std::uint32_t>(users_.size())));
  if (page.value == users_.size()) {
    users_.push_back(1);
  } else {
    DD_CHECK(users_[page.value] == 0, "page {} twice", page.value);
    std::erase(free_, page);
    users_[page.value] = 1;
  }
  checksums_.resize(users_.size() * geometry().layers);
  ++pages_in_use_;
  std::copy(checksums.begin(), checksums.end(),
            checksums_.begin() + static_cast<std::ptrdiff_t>(page.value * std::size_t{geometry().layers}));
}

void FarTier::retain(PageIndex page) {
  DD_CHECK(page.value < users_.size() && users_[page.value] > 0, "page {}", page.value);
  ++users_[page.value];
}

void FarTier::release(PageIndex page) {
  DD_CHECK(page.value < users_.size() && users_[page.value] > 0, "page {}", page.value);
  if (--users_[page.value] > 0) return;
  free_.push_back(page);
  --pages_in_use_;
}

}  // namespace dualdecoder
