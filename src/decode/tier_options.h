// What a user chooses about the two tiers, and the policies by which blocks come near.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "select/digest.h"
#include "transfer/paced_port.h"
#include "transfer/transfers.h"

namespace dualdecoder {

/// Where the blocks come from that a row attends to beside the window.
enum class Policy {
  kFull,           // every block, streamed through staging at each step
  kReactive,       // ranked by the row's own query; attention waits for what is not near
  kLastSet,        // the set last ranked, renewed every kLastSetSteps steps
  kPrevious,       // ranked by the previous token's query; the reads overlap the rest of the step
  kAuto,           // kPrevious or kDual, or guesses that are accepted, as PolicyChooser finds
  kDual,           // ranked by the query of a guess that is decoded beside the previous token; else the same
  kPreviousLayer,  // ranked by the layer's query as the layer before can guess it; the reads overlap that
                   // layer
  kOracle,         // the blocks of greatest true attention; reads everything, shows what digests lose
};
inline constexpr std::uint32_t kLastSetSteps = 16;

/// Whether a step reads ahead for the next one.
inline bool predicts(Policy policy) {
  return policy == Policy::kLastSet || policy == Policy::kPrevious || policy == Policy::kDual ||
         policy == Policy::kAuto;
}

/// "full", "reactive", "last-set", "previous", "auto", "dual", "previous-layer", "oracle"
const char* policy_name(Policy policy);
/// kInvalidArgument lists the names.
Result<Policy> parse_policy(const std::string& name);

/// Whether a layer is ranked again with the token's own query before it is attended to, when a policy that
/// predicts has chosen its blocks; what is missing then is read at once, and waited for.
struct Correction {
  enum class Kind { kNone, kMiss, kCosine };
  Kind kind = Kind::kNone;
  float cosine = 0.0f;  // of kCosine: where the two queries' least cosine over heads is below this
};
/// "none", "miss" or "cosine:T"
Result<Correction> parse_correction(const std::string& text);

enum class FarKind { kNone, kHost, kFile, kCustom };

struct FarChoice {
  FarKind kind = FarKind::kNone;
  std::string directory;          // of kFile
  std::optional<Link> link = {};  // of kHost: as slow as that
  /// Of kCustom: a port over that many bytes. For tests.
  std::function<std::unique_ptr<Port>(std::uint64_t bytes)> make_port;
};
/// "all", "none", "auto" (nothing is returned) or a number of layers
Result<std::optional<std::uint32_t>> parse_residency(const std::string& text);

/// "none", "host", "file:DIR", or "link:BANDWIDTH@MICROSECONDS" for memory behind a link
Result<FarChoice> parse_far(const std::string& text);

struct TierOptions {
  FarChoice far;                    // kNone: every block stays near, and nothing below matters
  std::uint64_t far_bytes_max = 0;  // 0: what the contexts need
  /// Pages stay in the far tier for later sequences that begin with the same tokens, as long as there is
  /// room: all of far_bytes_max is for them.
  bool keep_prefixes = false;
  std::uint64_t near_bytes_max = 0;  // of all sequences and staging; 0: what near_tokens needs
  Policy policy = Policy::kPrevious;
  Correction correction;
  /// A token attends to every block that is near anyway, not to its selection alone. What is near depends on
  /// when transfers end, so the last bits may differ from run to run with a far tier slower than memory.
  bool attend_resident = false;
  std::uint32_t budget_tokens = 2048;  // selected per layer, beside the window
  std::uint32_t sink_tokens = 32;      // the first tokens, always near
  std::uint32_t recent_tokens = 256;   // the last tokens, always near
  /// How many selecting layers keep their selection near from step to step, the first ones; the others' goes
  /// through a ring of `ring_sets` sets of slots. Not given: all, or as many as near_bytes_max allows.
  std::optional<std::uint32_t> resident_layers;
  std::uint32_t ring_sets = 2;          // at least 2: one is read while another is attended to
  std::uint32_t near_tokens = 0;        // places beside the window; 0: twice the budget
  std::uint32_t dense_layers = 0;       // the first layers that keep and attend to everything
  std::uint32_t staging_tokens = 1024;  // of each of the two halves through which older KV streams
  DigestOptions digests;
  TransferOptions transfers;
  bool measure_coverage = false;  // with kOracle: Ranker::coverage(), one sequence at a time
  bool poison = false;            // for tests: NaN over what is no longer valid
};

}  // namespace dualdecoder
