// What this machine's memory and disk give at most, measured: what a step's traffic is held against.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"
#include "kv/geometry.h"

namespace dualdecoder {

struct Roofline {
  double memory_bytes_per_s = 0.0;              // reading, all threads
  std::optional<double> disk_bytes_per_s = {};  // reading single blocks, as many at a time as the port takes
  std::uint32_t disk_block_bytes = 0;
};

/// `directory` empty: memory alone. A file of a quarter of a GiB is written there and removed again.
Result<Roofline> measure_roofline(std::uint32_t threads, const std::string& directory,
                                  const KvGeometry& geometry);

}  // namespace dualdecoder
