// What became of each block of one sequence in one step: the map that a viewer draws. The step fills it in as
// its layers come to attend; who watches says whose step, and reads it afterwards. It changes nothing, and
// costs a look at each block of the sequence and layer in the step that is watched. Owned by the engine
// thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decode/step_work.h"

namespace dualdecoder {

/// In ascending order of what a viewer would rather not overlook.
enum class BlockFate : std::uint8_t {
  kFar,       // in the far tier alone
  kNear,      // near or on its way, and not attended to
  kAttended,  // near
  kStreamed,  // attended to in staging
  kFetched,   // near, read ahead for this step
  kLate,      // read ahead, and still on its way when it was needed
  kMissed,    // needed, and neither near nor on its way
};

class StepWatch {
 public:
  /// Watches the next step of `sequence`, until end().
  void begin(const Sequence& sequence);
  void end() { sequence_ = nullptr; }
  bool watches(const Sequence* sequence) const { return sequence == sequence_; }

  /// The layer is about to attend to work.list, of which nothing has been asked for in this step.
  void note_needed(const Work& work, LayerIndex layer);
  /// What was missing has been asked for, or will be streamed.
  void note_arriving(const Work& work, LayerIndex layer);

  std::uint32_t layers() const { return layers_; }
  std::uint32_t blocks() const { return blocks_; }
  /// [layer, block]
  std::span<const BlockFate> fates() const { return fates_; }

 private:
  BlockFate& fate(LayerIndex layer, BlockIndex block) {
    return fates_[std::size_t{layer.value} * blocks_ + block.value];
  }

  const Sequence* sequence_ = nullptr;
  std::uint32_t layers_ = 0;
  std::uint32_t blocks_ = 0;
  std::vector<BlockFate> fates_;
};

}  // namespace dualdecoder
