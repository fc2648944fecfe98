// The memory plan: everything that is sized at start, in bytes, for one engine. A pure function of the
// model's shape and the options; the engine takes what is planned here and no more (law 4). `dualdecoder
// plan` prints it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "decode/engine_options.h"
#include "kv/near_tier.h"
#include "model/device.h"
#include "model/hyperparameters.h"

namespace dualdecoder {

/// How one layer keeps its KV near.
enum class LayerKind {
  kAll,       // every block: no far tier, or a dense layer
  kWindowed,  // a sliding window of the model's own: what it can see
  kSelecting  // sinks, recent tokens and a selection
};

struct LayerPlan {
  LayerKind kind = LayerKind::kAll;
  std::uint32_t slots = 0;       // per sequence; without those of the ring
  std::uint32_t ring = kNoRing;  // the set of the ring that its selection goes through
};

struct MemoryPlan {
  KvGeometry geometry;
  std::uint32_t context = 0;  // tokens per sequence
  std::uint32_t sequences = 0;
  std::uint32_t sink_blocks = 0;
  std::uint32_t budget_blocks = 0;
  std::uint32_t window_slots = 0;     // of a selecting layer
  std::uint32_t near_slots = 0;       // of a resident selecting layer, beside the window
  std::uint32_t resident_layers = 0;  // selecting ones that keep their selection from step to step
  std::uint32_t ring_sets = 0;        // for the others
  std::uint32_t ring_set_slots = 0;
  std::vector<LayerPlan> layers;
  std::uint32_t staging_tracks = 1;  // steps that may be under way at once
  std::uint32_t staging_slots = 0;   // both halves of every track
  std::uint32_t far_pages = 0;

  std::uint64_t near_window_bytes = 0;    // window, windowed layers and dense layers, all sequences
  std::uint64_t near_selected_bytes = 0;  // places beside the window, with the ring, all sequences
  std::uint64_t near_staging_bytes = 0;
  std::uint64_t far_bytes = 0;
  std::uint64_t digest_bytes = 0;
  std::uint64_t kept_digest_bytes = 0;  // of kept pages, at most; in a file's index otherwise
  std::uint64_t table_bytes = 0;        // block tables, checksums
  std::uint64_t draft_bytes = 0;        // KV of the draft model, all of it near; not in near_bytes()

  // Of a device that attends; 0 where the CPU does.
  std::uint64_t device_attention_bytes = 0;  // all tracks
  std::uint64_t device_near_bytes = 0;  // near_bytes(), the slot for rows without a place, and aligning them

  /// The near tier lies in the memory of the model's device, which attends to it there. Otherwise it is the
  /// host's, and the CPU attends.
  bool near_on_device() const { return geometry.layout == KvLayout::kTokens; }
  std::uint64_t near_bytes() const { return near_window_bytes + near_selected_bytes + near_staging_bytes; }
  bool tiered() const { return far_pages > 0; }
  /// The largest selection that `layer`, a selecting one, has room for.
  std::uint32_t selection_slots(LayerIndex layer) const {
    return layers[layer.value].ring == kNoRing ? near_slots : ring_set_slots;
  }
};

/// For a model on `device`. kInvalidArgument names the option and what would do. `options.context` is not 0.
Result<MemoryPlan> plan_memory(const Hyperparameters& model, const EngineOptions& options,
                               const Device& device = {});

}  // namespace dualdecoder
