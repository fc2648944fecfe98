// What an engine is made with.
#pragma once

#include <cstdint>

#include "decode/draft_options.h"
#include "decode/tier_options.h"

namespace dualdecoder {

struct EngineOptions {
  std::uint32_t threads = 1;
  std::uint32_t context = 0;           // tokens per sequence; 0: what the model was trained with
  std::uint32_t sequences = 1;         // at the same time
  std::uint32_t parked_sequences = 0;  // beside them (Sequence::park)
  std::uint32_t prefill_chunk = 512;   // rows of one prefill step
  std::uint32_t outputs_max = 8;       // rows of one step that want logits; at least `sequences`
  std::uint32_t block_tokens = 32;     // 16, 32 or 64
  bool batch_invariant = false;        // see Forward
  /// A prompt's step may pause between two layers while others decode (Engine::begin_prompts). Takes
  /// activations and staging a second time.
  bool prompts_beside = false;
  TierOptions tiers = {};
  DraftOptions draft = {};

  /// Of a sequence in one decoding step.
  std::uint32_t decoding_rows() const { return draft.kind == DraftKind::kNone ? 1 : 2; }
  /// Of the draft model's engine: full attention, all near.
  EngineOptions of_draft() const {
    EngineOptions own = *this;
    own.outputs_max = sequences;
    own.tiers = {};
    own.prompts_beside = false;
    own.draft = {};
    return own;
  }
};

}  // namespace dualdecoder
