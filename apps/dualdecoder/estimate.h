// How fast decoding should be, before anything is decoded. Two things are measured, in about a second: the
// time of a step whose attended KV is all near, and the far tier's bandwidth for single blocks. How many
// bytes a step moves comes from the plan.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "decode/engine.h"
#include "model/model.h"

namespace dualdecoder {

struct Estimate {
  double compute_ms = 0.0;       // a step with all it attends to near
  double far_bytes_per_s = 0.0;  // single blocks, as many in flight as the port takes
  double moved_bytes_per_step = 0.0;
  double tokens_per_s = 0.0;
};

/// Of an engine that these options make; it need not be there, and what it keeps on disk is not touched.
/// Measuring holds what a step attends to, at most `kv_bytes_max`: where that is less, as it may be when
/// layers share a ring, the step that is measured is shorter.
Result<Estimate> estimate(const Model& model, const EngineOptions& options, const MemoryPlan& plan,
                          std::uint64_t kv_bytes_max = UINT64_MAX);

}  // namespace dualdecoder
