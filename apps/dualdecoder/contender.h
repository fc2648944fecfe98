// An engine under measurement: some sequences that can be filled, advanced and cut back. Ours, with a far
// tier and a policy or with all KV near, and libllama.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "decode/engine.h"
#include "decode/follower.h"
#include "divergence.h"
#include "peer/libllama.h"

namespace dualdecoder {

/// Running totals of what the tiers did; zeros when there is only one, but for kv_bytes.
struct TierTotals {
  double kv_bytes = 0.0;  // of tokens decoded one by one: keys and values that they attended to
  double stall_s = 0.0;
  double select_s = 0.0;  // ranking blocks
  double read_bytes = 0.0;
  double blocks_attended = 0.0;
  double blocks_missed = 0.0;
  double blocks_late = 0.0;
  double blocks_wasted = 0.0;  // read ahead and not attended to, or not yet
  double guesses = 0.0;
  double guesses_right = 0.0;
  double selected = 0.0;   // blocks that tokens' own queries select, where a correction ranks again
  double predicted = 0.0;  // of these: those that had been chosen ahead

  TierTotals operator-(const TierTotals& before) const;
};

/// How far decoding is from full attention, on average over some positions.
struct Divergence {
  std::uint32_t positions = 0;
  double kl_mean = 0.0;   // nats
  double same_top = 0.0;  // share of positions where the likeliest token is the same
};

class Contender {
 public:
  virtual ~Contender() = default;
  virtual std::string engine() const = 0;
  virtual std::string far() const = 0;     // "none", "host", "file:DIR"
  virtual std::string policy() const = 0;  // "dense" when all KV is near
  virtual bool attends_resident() const { return false; }
  virtual std::uint32_t depth(std::uint32_t sequence) const = 0;
  /// Whether its speed depends on what the sequences hold. Where it does not, they need not differ.
  virtual bool content_matters() const = 0;
  virtual Status append(std::uint32_t sequence, std::span<const TokenId> tokens) = 0;
  /// Brings a sequence `tokens` further without computing them: ours by random KV, libllama's by copying
  /// sequence 0, which is further. False where that is not possible.
  virtual Result<bool> fill_synthetic(std::uint32_t sequence, std::uint32_t tokens) = 0;
  /// `tokens` tokens for each sequence, the likeliest each time, beginning with first[sequence]. Fewer when
  /// interrupted().
  virtual Status decode(std::span<const TokenId> first, std::uint32_t tokens) = 0;
  virtual Status truncate(std::uint32_t sequence, std::uint32_t tokens) = 0;
  virtual std::uint64_t near_kv_bytes() const = 0;
  virtual std::uint64_t far_kv_bytes() const { return 0; }
  virtual TierTotals totals() const { return {}; }
  /// Of the tokens that the last decode() found, one sequence after the other.
  virtual std::uint64_t token_hash() const = 0;
  /// Puts `tokens` in at the end of sequence 0, as decoding does and with full attention, over the same KV.
  /// Nothing where attention is full anyway, or when interrupted().
  virtual Result<std::optional<Divergence>> divergence(std::span<const TokenId> /*tokens*/) {
    return std::nullopt;
  }
  /// What the policy auto chose and why; else empty.
  virtual std::string choice() const { return ""; }
};

/// One of our engines and its sequences. Contenders that differ in their policy and in what they attend to
/// alone can share it, and with it the KV: then it is filled once.
struct OurEngine {
  std::unique_ptr<Engine> engine;
  std::vector<std::unique_ptr<Sequence>> sequences;  // go before the engine
  std::vector<std::vector<TokenId>> texts;           // [sequence] its tokens, what n-grams are looked up in
  // With full attention behind the first `reference_depth` tokens of sequence 0, for `reference_tokens`.
  std::vector<LogProbabilities> reference = {};
  std::vector<TokenId> reference_tokens = {};
  std::uint32_t reference_depth = 0;
  std::vector<std::shared_ptr<Follower>>
      followers;  // [sequence] that have read them; empty without a draft model

  static Result<std::shared_ptr<OurEngine>> create(const Model& model, const EngineOptions& options);
};

/// `far`: as the user wrote it, for the table. The engine can follow the policy in `options`.
std::unique_ptr<Contender> make_our_contender(std::shared_ptr<OurEngine> ours, const EngineOptions& options,
                                              const std::string& far);
Result<std::unique_ptr<Contender>> make_libllama_contender(const Model& model, const EngineOptions& options);

}  // namespace dualdecoder
