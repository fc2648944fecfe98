// The implementations of one table of functions, for each instruction set that Highway compiled it for and
// this machine can run. Included by the file that Highway compiles several times, after its HWY_EXPORT. The
// list is constant; the choice may be changed from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <hwy/targets.h>

#include "base/check.h"

namespace dualdecoder {

/// `Table` has a member `target`, the instruction set's name.
template <typename Table>
class SimdTargets {
 public:
  using Getter = const Table* (*)();

  /// `dispatch`: HWY_DISPATCH_TABLE of a function that returns the table; `compiled`: that file's
  /// HWY_TARGETS; `kind`: for the message of force().
  SimdTargets(const Getter* dispatch, std::int64_t compiled, const char* kind) : kind_(kind) {
    const bool one_target = (compiled & (compiled - 1)) == 0;
    for (std::int64_t targets = hwy::SupportedTargets() & compiled; targets != 0; targets &= targets - 1) {
      hwy::ChosenTarget chosen;  // a local one: the process-wide choice stays as it is
      chosen.Update(targets & -targets);
      available_.push_back(dispatch[one_target ? 0 : chosen.GetIndex()]());
    }
  }

  /// Best first.
  std::span<const Table* const> available() const { return available_; }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const Table* candidate : available_) names.emplace_back(candidate->target);
    return names;
  }
  /// The best one, or the one that force() has named.
  const Table& current() const {
    const Table* forced = forced_.load(std::memory_order_acquire);
    return forced != nullptr ? *forced : *available_.front();
  }
  /// An empty name returns to the best.
  void force(const std::string& name) {
    const Table* found = nullptr;
    for (const Table* candidate : available_) {
      if (name == candidate->target) found = candidate;
    }
    DD_CHECK(name.empty() || found != nullptr, "no {} kernel for {} on this machine", kind_, name);
    forced_.store(found, std::memory_order_release);
  }

 private:
  const char* kind_;
  std::vector<const Table*> available_;
  std::atomic<const Table*> forced_{nullptr};
};

}  // namespace dualdecoder
