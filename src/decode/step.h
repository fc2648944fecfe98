// One step: new rows of one or many sequences through all layers. Read step.cc's run() as the list of its
// passes (docs/design.md, "The step").
//
// Rows of a prompt (several tokens, or a group that says so) attend to everything; so do all rows of a layer
// that keeps or streams everything. Another single token of a selecting layer attends to its window and the
// selection.
//
// Behind that token a group may have a speculated row: a guess of the token that comes next. It passes the
// same layers and attends to the same blocks; its query says which blocks the next step will need, and its
// logits guess one token further. Its K and V lie behind the committed ones in the block that is being filled
// (or the one after), where nothing but its own row sees them, and the next step writes over them.
//
// A sequence whose transfers fail gets an error (Sequence::error) and zeros for attention; its rows stay in
// the step, are not committed, and disturb no other. Owned by the engine thread; append, attend and rank use
// ggml's threads.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "decode/predictor.h"
#include "decode/step_watch.h"
#include "decode/step_work.h"
#include "decode/streamer.h"
#include "model/device_attention.h"
#include "model/forward.h"

namespace dualdecoder {

enum class LogitsWanted { kNone, kLast, kAll };

/// Rows of one sequence: `tokens` come to stand at its end, in order. Behind at most one of them may be a
/// `guess`, which is decoded but not committed; its logits come last, unless none are wanted.
struct StepGroup {
  Sequence* sequence = nullptr;
  std::span<const TokenId> tokens;
  LogitsWanted logits = LogitsWanted::kLast;
  std::optional<TokenId> guess = std::nullopt;
  bool prompt = false;  // a single token that attends to everything, as several do

  bool exact() const { return prompt || tokens.size() > 1; }
  std::uint32_t rows() const { return static_cast<std::uint32_t>(tokens.size()) + (guess ? 1 : 0); }
  std::uint32_t logits_rows() const;
};

enum class Pass { kBegin, kProject, kAppend, kSelect, kArrive, kAttend, kPredict, kFinish, kRetire };
inline constexpr std::size_t kPasses = 9;
inline constexpr std::array<const char*, kPasses> kPassNames = {
    "begin", "project", "append", "select", "arrive", "attend", "predict", "finish", "retire"};

class Step {
 public:
  /// `track`: of staging, see Streamer. Steps of different tracks may be under way at once, with different
  /// sequences.
  /// `device`: attends where the near tier is; null: the CPU does.
  Step(const Model& model, Forward& forward, Tiers& tiers, std::uint32_t track,
       DeviceAttention* device = nullptr);

  /// Computes and commits all rows. The sequences have pages for them. Returns the wanted logits, [wanted
  /// rows, vocabulary] in the order of the groups, valid until the next run; null when none are wanted.
  const float* run(std::span<const StepGroup> groups);
  /// The same in parts: begin(), advance() until nothing is left, finish(). The sequences stay alive
  /// meanwhile.
  void begin(std::span<const StepGroup> groups);
  /// The next `layers` layers, or what is left of them; returns whether more are left.
  bool advance(std::uint32_t layers);
  const float* finish();
  /// Tells `watch` of the sequence that it watches, in the steps to come; null: nobody.
  void set_watch(StepWatch* watch) { watch_ = watch; }

  /// Nanoseconds spent in each pass since the start.
  const std::array<std::uint64_t, kPasses>& pass_ns() const { return pass_ns_; }
  const StepStats& stats() const { return stats_; }
  const Predictor& predictor() const { return predictor_; }
  std::size_t carry_bytes() const { return (carry_max_.size() + carry_sum_.size()) * sizeof(float); }

 private:
  // A run of tokens that fall into one block, for append.
  struct Stretch {
    const Sequence* sequence = nullptr;
    std::uint32_t row = 0;       // first row
    std::uint32_t position = 0;  // of that row
    std::uint32_t tokens = 0;
  };
  template <typename Body>
  auto timed(Pass pass, const Body& body);
  void begin_rows(std::span<const StepGroup> groups);
  void begin_work(const StepGroup& group, Work& work);
  void take_rows(const StepGroup& group, Work& work);
  void append(LayerIndex layer, const LayerRows& rows);
  void store(LayerIndex layer, const LayerRows& rows);
  void store_on_device(LayerIndex layer);
  void add_digests(LayerIndex layer);
  void arrive(LayerIndex layer);
  void list_blocks(Work& work, LayerIndex layer) const;
  void add_resident(Work& work, LayerIndex layer);
  void bring_near(Work& work, LayerIndex layer);
  bool all_readable(const Work& work, LayerIndex layer) const;
  void attend(LayerIndex layer, const LayerRows& rows);
  void attend_near(LayerIndex layer, const LayerRows& rows);
  void attend_groups(std::span<const AttentionGroup> groups);
  void open_streams(LayerIndex layer);
  void open_streams_ahead(LayerIndex layer);
  void attend_streamed(LayerIndex layer, const LayerRows& rows);
  void attend_segment(const Streamer::Segment& segment, const LayerRows& rows);
  AttentionGroup attention_group(const Work& work, LayerIndex layer, const LayerRows& rows) const;
  KvBlockView view_of(const Work& work, const Streamer::Piece& piece) const;
  void retire();

  Trace* trace() const { return tiers_.options().transfers.trace; }
  std::span<Work> works() { return std::span(work_).first(works_); }

  const Model& model_;
  Forward& forward_;
  Tiers& tiers_;
  AttentionShape shape_;
  AttentionBatch attention_;
  DeviceAttention* device_;
  Streamer streamer_;
  StepStats stats_;
  Predictor predictor_;
  std::array<std::uint64_t, kPasses> pass_ns_{};
  StepWatch* watch_ = nullptr;
  bool attends_last_layer_ = true;
  std::uint64_t step_ = 0;  // its number
  LayerIndex layer_;        // the next one, or the one under way

  // Reused from step to step.
  std::vector<TokenId> tokens_;
  std::vector<std::uint32_t> positions_;
  std::vector<std::uint32_t> output_rows_;
  std::vector<Stretch> stretches_;
  std::vector<Work> work_;
  std::size_t works_ = 0;  // of work_, in this step
  BlockList list_ahead_;
  std::vector<BlockIndex> attended_;
  std::vector<std::optional<DeviceAttention::TokenPlace>> places_;  // [row]
  std::vector<KvBlockView> views_;
  std::vector<AttentionGroup> attention_groups_;
  std::vector<float> carry_max_;  // [rows, heads] of the group that is being streamed
  std::vector<float> carry_sum_;
};

}  // namespace dualdecoder
