#include "decode/step_watch.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kRowsMax = 2;  // of a sequence that decodes

BlockFate fate_of(const Residency& residency, LayerIndex layer, BlockIndex block, bool needed) {
  switch (residency.state(layer, block)) {
    case SlotState::kFree:
      return needed ? BlockFate::kMissed : BlockFate::kFar;
    case SlotState::kLoading:
      return needed ? BlockFate::kLate : BlockFate::kNear;
    case SlotState::kHeld:
    case SlotState::kWriting:
    case SlotState::kClean:
      break;
  }
  if (!needed) return BlockFate::kNear;
  return residency.predicted(layer, block) ? BlockFate::kFetched : BlockFate::kAttended;
}

}  // namespace

void StepWatch::begin(const Sequence& sequence) {
  sequence_ = &sequence;
  layers_ = sequence.geometry().layers;
  blocks_ = sequence.geometry().blocks_for(sequence.tokens() + kRowsMax);
  fates_.assign(std::size_t{layers_} * blocks_, BlockFate::kFar);
}

void StepWatch::note_needed(const Work& work, LayerIndex layer) {
  const Residency& residency = work.sequence->residency();
  for (BlockIndex block; block.value < blocks_; ++block)
    fate(layer, block) = fate_of(residency, layer, block, false);
  for (const BlockIndex block : work.list.blocks) {
    if (block.value < blocks_ && work.list.needed(block))
      fate(layer, block) = fate_of(residency, layer, block, true);
  }
}

void StepWatch::note_arriving(const Work& work, LayerIndex layer) {
  for (const BlockIndex block : work.list.blocks) {
    if (block.value >= blocks_) break;
    BlockFate& now = fate(layer, block);
    if (work.streamed && now == BlockFate::kMissed) now = BlockFate::kStreamed;
    if (now == BlockFate::kNear && work.list.needed(block)) now = BlockFate::kAttended;
  }
}

}  // namespace dualdecoder
