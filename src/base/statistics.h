// Figures of a list of measurements.
#pragma once

#include <algorithm>
#include <vector>

namespace dualdecoder {

/// Of an even number, the mean of the two in the middle. Not of an empty list.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2.0;
}

}  // namespace dualdecoder
