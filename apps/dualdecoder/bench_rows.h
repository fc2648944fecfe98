// What `dualdecoder bench` measured, and how it is shown: a table for people, JSON, CSV.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "contender.h"
#include "roofline.h"

namespace dualdecoder {

/// The measurements of one test with one engine.
struct BenchRow {
  std::string engine = {};
  std::string far = {};
  std::string policy = {};
  bool attends_resident = false;
  std::string test = {};
  std::uint32_t depth = 0;
  std::uint32_t sequences = 1;
  std::uint32_t steps = 1;  // per measurement
  std::uint32_t tokens_per_step = 1;
  std::uint64_t near_kv_bytes = 0;
  std::uint64_t far_kv_bytes = 0;
  std::uint64_t weight_bytes = 0;       // read by a step; 0 for a prefill
  std::uint64_t token_hash = 0;         // of the last repetition's tokens, all sequences
  TierTotals tiers = {};                // over all repetitions
  std::vector<double> seconds = {};     // one per repetition
  std::optional<double> speedup = {};   // over the peer, median of pairs
  std::optional<double> vs_first = {};  // over the first engine of the list, the same
  std::optional<Divergence> divergence = {};

  double tokens_per_s() const;
  double ms_per_step() const;
  /// Half the distance between the slowest and the fastest repetition, as a share of the median.
  double spread() const;
  /// Weights and KV that the steps read, by the time they took. 0 for a prefill.
  double memory_bytes_per_s() const;
  double far_bytes_per_s() const;
  double total_seconds() const;
  double total_steps() const { return static_cast<double>(steps * seconds.size()); }
  bool tiered() const { return far != "none"; }
};

/// What all rows have in common.
struct BenchSetting {
  std::string model;
  std::uint32_t threads = 0;
  std::string fill;
  std::string text;  // what is put in: a file, "made-up text" or "random tokens"
  std::uint32_t budget = 0;
  std::uint32_t block_tokens = 0;
  std::optional<Roofline> roofline = {};
};

/// `format`: "md", "json" or "csv". Columns of JSON are added and never renamed; those of CSV are the same.
std::string format_rows(const std::vector<BenchRow>& rows, const BenchSetting& setting,
                        const std::string& format);

/// A list of flat objects: each column that any of them has, in the order in which they come up.
std::string csv_of(const nlohmann::ordered_json& list);

}  // namespace dualdecoder
