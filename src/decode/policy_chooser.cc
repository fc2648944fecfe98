#include "decode/policy_chooser.h"

#include <algorithm>

#include <fmt/format.h>

namespace dualdecoder {
namespace {

constexpr double kNewShare = 0.3;  // of a new measurement in the cost of the way in use
constexpr std::array kWayNames = {"previous", "dual", "accept"};

Way next(Way way) { return static_cast<Way>((static_cast<std::size_t>(way) + 1) % kWays); }

}  // namespace

const char* way_name(Way way) { return kWayNames[static_cast<std::size_t>(way)]; }

DraftOptions draft_of(Way way) {
  return {.kind = way == Way::kPrevious ? DraftKind::kNone : DraftKind::kNgram,
          .accept = way == Way::kAccept};
}

void PolicyChooser::note(double seconds, std::uint32_t tokens) {
  ++steps_;
  if (!trying_ || steps_ > kTrialStepsSkipped) {
    seconds_ += seconds;
    tokens_ += tokens;
  }
  if (steps_ % kTrialSteps != 0) return;
  if (tokens_ > 0) {
    double& cost = costs_[static_cast<std::size_t>(way())];
    const double measured = seconds_ / tokens_;
    // What was known of a way that is tried is from long ago.
    cost = trying_ ? measured : (1.0 - kNewShare) * cost + kNewShare * measured;
    seconds_ = 0.0;
    tokens_ = 0;
  }
  if (trying_) {
    end_trial();
  } else if (steps_ >= steps_between_) {
    trying_ = true;
    tried_ = next(tried_);
    if (tried_ == chosen_) tried_ = next(tried_);
    steps_ = 0;
    steps_between_ = std::min(2 * steps_between_, kStepsBetweenTrialsMax);
  }
}

// The first round tries all; later ones one at a time.
void PolicyChooser::end_trial() {
  steps_ = 0;
  if (costs_[static_cast<std::size_t>(next(tried_))] == 0.0) {
    tried_ = next(tried_);
    return;
  }
  trying_ = false;
  Way best = chosen_;
  for (std::size_t i = 0; i < kWays; ++i) {
    const auto way = static_cast<Way>(i);
    if (worth(way) < worth(best)) best = way;
  }
  if (worth(best) * (1.0 + kHysteresis) < worth(chosen_)) chosen_ = best;
}

double PolicyChooser::worth(Way way) const {
  return way == Way::kDual ? cost(way) / (1.0 + kDualWorth) : cost(way);
}

std::string PolicyChooser::reason() const {
  std::string others;
  for (std::size_t i = 0; i < kWays; ++i) {
    if (static_cast<Way>(i) == chosen_ || costs_[i] == 0.0) continue;
    others += fmt::format("{}{} {:.1f}", others.empty() ? "; " : ", ", kWayNames[i], costs_[i] * 1e3);
  }
  if (cost(chosen_) == 0.0) return way_name(chosen_);
  return fmt::format("{} ({:.1f} ms a token{})", way_name(chosen_), cost(chosen_) * 1e3, others);
}

}  // namespace dualdecoder
