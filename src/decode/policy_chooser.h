// Chooses, from what steps have cost so far, whether the sequences of a batch are decoded with guesses:
//
//   previous   one row each; selected by the previous token's query
//   dual       a guess beside each; nearer to full attention, so it may cost kDualWorth more for a token
//   accept     a guess from n-grams, committed with the token behind it when it is right
//
// Each is tried in turn at the start, and those not in use again from time to time: soon at first, when near
// memory is still filling and nothing costs what it will, then ever more seldom. A change needs to gain more
// than kHysteresis. A pure function of what it is told. Owned by the generator.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "decode/draft_options.h"

namespace dualdecoder {

enum class Way { kPrevious, kDual, kAccept };
inline constexpr std::size_t kWays = 3;
const char* way_name(Way way);
/// The guesses of it.
DraftOptions draft_of(Way way);

class PolicyChooser {
 public:
  static constexpr double kDualWorth = 0.10;
  static constexpr double kHysteresis = 0.05;
  static constexpr std::uint32_t kTrialSteps = 12;
  static constexpr std::uint32_t kTrialStepsSkipped = 3;         // a chain is primed, slots are cold
  static constexpr std::uint32_t kFirstStepsBetweenTrials = 32;  // doubled after each trial
  static constexpr std::uint32_t kStepsBetweenTrialsMax = 512;

  /// For the next step.
  Way way() const { return trying_ ? tried_ : chosen_; }
  /// That step took so long and committed so many tokens, 0 or more.
  void note(double seconds, std::uint32_t tokens);

  Way chosen() const { return chosen_; }
  /// Seconds for a token; 0 where it is not known yet.
  double cost(Way way) const { return costs_[static_cast<std::size_t>(way)]; }
  /// E.g. "previous (7.9 ms a token; dual 11.3, accept 8.4)"
  std::string reason() const;

 private:
  void end_trial();
  double worth(Way way) const;

  std::array<double, kWays> costs_{};
  Way chosen_ = Way::kPrevious;
  Way tried_ = Way::kPrevious;
  bool trying_ = true;
  std::uint32_t steps_ = 0;  // of this trial, or since the last one
  std::uint32_t steps_between_ = kFirstStepsBetweenTrials;
  double seconds_ = 0.0;  // of the steps that count, not yet in costs_
  std::uint32_t tokens_ = 0;
};

}  // namespace dualdecoder
