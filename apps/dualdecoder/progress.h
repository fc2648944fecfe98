// One line on stderr that says how far a long stage is. On a terminal it is redrawn in place; elsewhere it
// becomes a plain line now and then, so that a log stays readable. Quick stages print nothing at all.
#pragma once

#include <string>
#include <string_view>

#include "base/clock.h"

namespace dualdecoder {

class ProgressLine {
 public:
  explicit ProgressLine(std::string stage);
  ~ProgressLine() { clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// `share` done of this stage, 0 to 1; `details` e.g. a rate. Time left is worked out here.
  void update(double share, std::string_view details);
  /// Removes the redrawn line.
  void clear();

 private:
  std::string stage_;
  bool terminal_;
  bool dim_;
  bool drawn_ = false;
  double last_s_;
  Stopwatch watch_;
};

}  // namespace dualdecoder
