// For tests of several generations at once.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/check.h"
#include "decode/generation.h"

namespace dualdecoder {

/// A step of all that run, `but` one; false when there are none.
inline bool decode_running(Generator& generator, std::span<const std::unique_ptr<Generation>> all,
                           const Generation* but = nullptr) {
  std::vector<Generation*> running;
  for (const auto& generation : all) {
    if (generation->running() && generation.get() != but) running.push_back(generation.get());
  }
  if (running.empty()) return false;
  const Status status = generator.step(running);
  DD_CHECK(status, "{}", status.error().message);
  return true;
}

}  // namespace dualdecoder
