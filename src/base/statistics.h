// Figures of a list of measurements.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace dualdecoder {

/// Of an even number, the mean of the two in the middle. Not of an empty list.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2.0;
}

/// Half of the way from the least to the largest, as a share of the median. Not of an empty list.
inline double spread(const std::vector<double>& values) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return (*high - *low) / 2.0 / median(values);
}

struct Interval {
  double low = 0.0;
  double high = 0.0;
};

/// Of the share `successes` of `trials`, not 0, the interval that holds the true share in 95 % of all
/// experiments (Wilson 1927).
inline Interval wilson_interval(double successes, double trials) {
  constexpr double kZ = 1.959964;
  const double share = successes / trials;
  const double shrink = 1.0 + kZ * kZ / trials;
  const double middle = (share + kZ * kZ / (2.0 * trials)) / shrink;
  const double half =
      kZ / shrink * std::sqrt(share * (1.0 - share) / trials + kZ * kZ / (4.0 * trials * trials));
  return {std::max(0.0, middle - half), std::min(1.0, middle + half)};
}

}  // namespace dualdecoder
