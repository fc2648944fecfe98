#include "contender.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/hash.h"
#include "command.h"
#include "decode/draft.h"
#include "decode/policy_chooser.h"
#include "decode/sampler.h"

namespace dualdecoder {
namespace {

constexpr TokenId kNoToken = -1;  // stands where KV has been made up

/// The same for every order in which sequences took turns.
std::uint64_t hash_of(const std::vector<std::vector<TokenId>>& tokens) {
  std::vector<TokenId> all;
  for (const std::vector<TokenId>& one : tokens) all.insert(all.end(), one.begin(), one.end());
  return hash_values(std::span<const TokenId>(all));
}

class Ours final : public Contender {
 public:
  Ours(std::shared_ptr<OurEngine> ours, const EngineOptions& options, std::string far)
      : ours_(std::move(ours)),
        engine_(ours_->engine.get()),
        sequences_(ours_->sequences),
        policy_(options.tiers.policy),
        attend_resident_(options.tiers.attend_resident),
        draft_(options.draft),
        far_(std::move(far)) {}

  std::string engine() const override { return "dualdecoder"; }
  std::string far() const override { return far_; }
  std::string policy() const override { return engine_->plan().tiered() ? policy_name(policy_) : "dense"; }
  bool attends_resident() const override { return engine_->plan().tiered() && attend_resident_; }
  bool content_matters() const override { return true; }
  std::uint32_t depth(std::uint32_t sequence) const override { return sequences_[sequence]->tokens(); }
  Status append(std::uint32_t sequence, std::span<const TokenId> tokens) override {
    const auto logits = engine_->prefill(*sequences_[sequence], tokens);
    if (!logits) return std::unexpected(logits.error());
    text(sequence).insert(text(sequence).end(), tokens.begin(), tokens.end());
    return {};
  }
  Result<bool> fill_synthetic(std::uint32_t sequence, std::uint32_t tokens) override {
    const Status status = engine_->fill_synthetic(*sequences_[sequence], tokens, sequence + 1);
    if (!status) return std::unexpected(status.error());
    text(sequence).resize(depth(sequence), kNoToken);
    return true;
  }
  Status decode(std::span<const TokenId> first, std::uint32_t tokens) override {
    if (Status status = follow_policy(); !status) return status;
    std::vector<Decoding> all;
    for (std::size_t i = 0; i < first.size(); ++i) {
      all.push_back({.sequence = sequences_[i].get(),
                     .draft = Draft(*engine_, draft_, follower(i)),
                     .newest = first[i],
                     .left = tokens,
                     .number = i});
      for (const TokenId token : ours_->texts[i]) all.back().draft.remember(token);
      all.back().draft.remember(first[i]);
    }
    decoded_.assign(first.size(), {});
    const auto goes_on = [](const Decoding& one) { return one.left > 0; };
    while (std::any_of(all.begin(), all.end(), goes_on) && !interrupted()) {
      note_attended(all);
      if (Status status = step(all); !status) return status;
    }
    for (const Decoding& one : all) drafts_ += one.draft.stats();
    return {};
  }
  Status truncate(std::uint32_t sequence, std::uint32_t tokens) override {
    text(sequence).resize(std::min<std::size_t>(text(sequence).size(), tokens));
    return sequences_[sequence]->truncate(tokens);
  }
  std::uint64_t near_kv_bytes() const override {
    return engine_->plan().tiered() ? engine_->plan().near_bytes() : engine_->near().bytes_in_use();
  }
  std::uint64_t far_kv_bytes() const override {
    return engine_->plan().tiered() ? engine_->tiers().far().bytes_in_use() : 0;
  }
  std::uint64_t token_hash() const override { return hash_of(decoded_); }
  Result<std::optional<Divergence>> divergence(std::span<const TokenId> tokens) override {
    const bool full = !engine_->plan().tiered() || policy_ == Policy::kFull;
    if (full || policy_ == Policy::kAuto) return std::nullopt;  // kAuto changes its way by time
    Sequence& sequence = *sequences_[0];
    const std::uint32_t depth = sequence.tokens();
    if (ours_->reference_depth != depth || !std::ranges::equal(ours_->reference_tokens, tokens)) {
      ours_->reference.clear();
      if (Status status = engine_->set_selection(Policy::kFull, 1); !status)
        return std::unexpected(status.error());
      const auto done =
          decode_forced(*engine_, sequence, {}, {}, tokens, [&](std::size_t, LogProbabilities row) {
            ours_->reference.push_back(std::move(row));
            return !interrupted();
          });
      if (!done) return std::unexpected(done.error());
      if (Status status = sequence.truncate(depth); !status) return std::unexpected(status.error());
      if (interrupted()) return std::nullopt;
      ours_->reference_depth = depth;
      ours_->reference_tokens.assign(tokens.begin(), tokens.end());
    }
    if (Status status = follow_policy(); !status) return std::unexpected(status.error());
    Divergence sum;
    const auto done = decode_forced(
        *engine_, sequence, draft_, text(0), tokens,
        [&](std::size_t i, const LogProbabilities& row) {
          const LogProbabilities& reference = ours_->reference[i];
          sum.kl_mean += kl_divergence(reference, row);
          sum.same_top += likeliest(reference) == likeliest(row) ? 1.0 : 0.0;
          ++sum.positions;
          return !interrupted();
        },
        follower(0));
    if (!done) return std::unexpected(done.error());
    if (Status status = sequence.truncate(depth); !status) return std::unexpected(status.error());
    if (interrupted()) return std::nullopt;
    sum.kl_mean /= sum.positions;
    sum.same_top /= sum.positions;
    return sum;
  }
  std::string choice() const override { return policy_ == Policy::kAuto ? chooser_.reason() : ""; }
  TierTotals totals() const override {
    if (!engine_->plan().tiered()) return {.kv_bytes = kv_bytes_};
    const StepStats& step = engine_->stats();
    double selected = 0.0;
    double predicted = 0.0;
    for (const LayerRecall& layer : engine_->recall()) {
      selected += static_cast<double>(layer.selected);
      predicted += static_cast<double>(layer.predicted);
    }
    const auto attended = static_cast<double>(step.blocks_attended);
    return {.kv_bytes = kv_bytes_ + attended * static_cast<double>(engine_->plan().geometry.block_bytes()),
            .stall_s = static_cast<double>(step.stall_ns) * 1e-9,
            .select_s = static_cast<double>(step.rank_ns) * 1e-9,
            .read_bytes = static_cast<double>(engine_->tiers().transfers().stats().reads.bytes),
            .blocks_attended = attended,
            .blocks_missed = static_cast<double>(step.blocks_missed),
            .blocks_late = static_cast<double>(step.blocks_late),
            .blocks_wasted = static_cast<double>(step.blocks_predicted - step.blocks_used),
            .guesses = static_cast<double>(drafts_.guesses),
            .guesses_right = static_cast<double>(drafts_.right),
            .selected = selected,
            .predicted = predicted};
  }

 private:
  struct Decoding {
    Sequence* sequence = nullptr;
    Draft draft;
    TokenId newest = 0;
    std::uint32_t left = 0;  // tokens
    std::size_t number = 0;  // of its sequence
  };

  std::vector<TokenId>& text(std::uint32_t sequence) { return ours_->texts[sequence]; }

  std::shared_ptr<Follower> follower(std::size_t sequence) const {
    return ours_->followers.empty() ? nullptr : ours_->followers[sequence];
  }

  /// Adds what a step will read of window, windowed and dense layers; what it selects is counted elsewhere.
  void note_attended(std::span<const Decoding> all) {
    const MemoryPlan& plan = engine_->plan();
    const TierOptions& tiers = engine_->options().tiers;
    const std::size_t token_bytes = plan.geometry.token_bytes() / plan.geometry.layers;
    const bool selects = plan.tiered() && policy_ != Policy::kFull;
    for (const Decoding& one : all) {
      if (one.left == 0) continue;
      const std::uint32_t depth = one.sequence->tokens() + 1;
      for (std::uint32_t layer = 0; layer < plan.geometry.layers; ++layer) {
        const std::uint32_t sees = engine_->model().hyperparameters().window[layer];
        std::uint32_t tokens = sees == 0 ? depth : std::min(depth, sees);
        if (selects && plan.layers[layer].kind == LayerKind::kSelecting)
          tokens = std::min(depth, tiers.sink_tokens + tiers.recent_tokens);
        kv_bytes_ += static_cast<double>(tokens * token_bytes);
      }
    }
  }

  Status follow_policy() {
    if (!engine_->plan().tiered()) return {};
    engine_->set_attend_resident(attend_resident_);
    return engine_->set_selection(policy_, engine_->options().tiers.budget_tokens);
  }

  Status step(std::span<Decoding> all) {
    groups_.clear();
    members_.clear();
    const Stopwatch watch;
    std::uint32_t committed = 0;
    for (Decoding& one : all) {
      if (one.left == 0) continue;
      if (policy_ == Policy::kAuto) one.draft.use(draft_of(chooser_.way()));
      members_.push_back(&one);
      groups_.push_back(one.draft.next(*one.sequence, one.newest, one.left > 1));
    }
    const auto logits = engine_->step(groups_);
    if (!logits) return std::unexpected(logits.error());
    const float* row = *logits;
    for (std::size_t i = 0; i < members_.size(); ++i) {
      Decoding& one = *members_[i];
      if (one.sequence->error()) return std::unexpected(*one.sequence->error());
      one.draft.take(*one.sequence, row, [&](std::span<const float> from, std::uint32_t, DrawnAs drawn_as) {
        const TokenId token = likeliest(from);
        if (drawn_as == DrawnAs::kGuess) return std::optional(token);
        one.newest = token;
        one.draft.remember(token);
        decoded_[one.number].push_back(token);
        ++committed;
        return --one.left > 0 ? std::optional(token) : std::nullopt;
      });
      row += groups_[i].logits_rows() * engine_->model().vocabulary().size();
    }
    chooser_.note(watch.seconds(), committed);
    return {};
  }

  std::shared_ptr<OurEngine> ours_;
  Engine* engine_;
  std::span<const std::unique_ptr<Sequence>> sequences_;
  Policy policy_;
  bool attend_resident_;
  DraftOptions draft_;
  std::string far_;
  std::vector<StepGroup> groups_;
  std::vector<Decoding*> members_;  // of groups_
  DraftStats drafts_;
  PolicyChooser chooser_;                      // for Policy::kAuto
  std::vector<std::vector<TokenId>> decoded_;  // [sequence] by the last decode()
  double kv_bytes_ = 0.0;
};

class Peer final : public Contender {
 public:
  Peer(std::unique_ptr<Libllama> llama, std::size_t token_bytes, std::uint32_t sequences)
      : llama_(std::move(llama)), token_bytes_(token_bytes), sequences_(sequences) {}
  std::string engine() const override { return "libllama"; }
  std::string far() const override { return "none"; }
  std::string policy() const override { return "dense"; }
  bool content_matters() const override { return false; }  // dense
  std::uint32_t depth(std::uint32_t sequence) const override { return llama_->tokens(sequence); }
  Status append(std::uint32_t sequence, std::span<const TokenId> tokens) override {
    const auto logits = llama_->prefill(sequence, tokens);
    return logits ? Status{} : std::unexpected(logits.error());
  }
  Result<bool> fill_synthetic(std::uint32_t sequence, std::uint32_t tokens) override {
    if (sequence == 0 || depth(sequence) != 0 || depth(0) < tokens) return false;
    llama_->copy(0, sequence);
    return true;
  }
  Status decode(std::span<const TokenId> first, std::uint32_t tokens) override {
    std::vector<TokenId> newest(first.begin(), first.end());
    decoded_.assign(first.size(), {});
    for (std::uint32_t step = 0; step < tokens && !interrupted(); ++step) {
      kv_bytes_ += static_cast<double>(near_kv_bytes());
      const auto logits = llama_->decode(newest);
      if (!logits) return std::unexpected(logits.error());
      const std::size_t vocabulary = llama_->vocabulary();
      for (std::size_t i = 0; i < newest.size(); ++i) {
        newest[i] = likeliest(std::span(*logits + i * vocabulary, vocabulary));
        decoded_[i].push_back(newest[i]);
      }
    }
    return {};
  }
  Status truncate(std::uint32_t sequence, std::uint32_t tokens) override {
    return llama_->truncate(sequence, tokens);
  }
  std::uint64_t near_kv_bytes() const override {
    std::uint64_t tokens = 0;
    for (std::uint32_t i = 0; i < sequences_; ++i) tokens += llama_->tokens(i);
    return tokens * token_bytes_;
  }
  TierTotals totals() const override { return {.kv_bytes = kv_bytes_}; }
  std::uint64_t token_hash() const override { return hash_of(decoded_); }

 private:
  std::unique_ptr<Libllama> llama_;
  std::size_t token_bytes_;
  std::uint32_t sequences_;
  std::vector<std::vector<TokenId>> decoded_;  // [sequence] by the last decode()
  double kv_bytes_ = 0.0;                      // as near_kv_bytes() counts them
};

}  // namespace

TierTotals TierTotals::operator-(const TierTotals& before) const {
  return {.kv_bytes = kv_bytes - before.kv_bytes,
          .stall_s = stall_s - before.stall_s,
          .select_s = select_s - before.select_s,
          .read_bytes = read_bytes - before.read_bytes,
          .blocks_attended = blocks_attended - before.blocks_attended,
          .blocks_missed = blocks_missed - before.blocks_missed,
          .blocks_late = blocks_late - before.blocks_late,
          .blocks_wasted = blocks_wasted - before.blocks_wasted,
          .guesses = guesses - before.guesses,
          .guesses_right = guesses_right - before.guesses_right,
          .selected = selected - before.selected,
          .predicted = predicted - before.predicted};
}

Result<std::shared_ptr<OurEngine>> OurEngine::create(const Model& model, const EngineOptions& options) {
  auto engine = Engine::create(model, options);
  if (!engine) return std::unexpected(engine.error());
  print_short_plan(**engine);
  auto ours = std::make_shared<OurEngine>();
  ours->engine = std::move(*engine);
  ours->texts.resize(options.sequences);
  for (std::uint32_t i = 0; i < options.sequences; ++i) {
    auto sequence = ours->engine->new_sequence();
    if (!sequence) return std::unexpected(sequence.error());
    ours->sequences.push_back(std::move(*sequence));
    if (Engine* draft = ours->engine->draft()) ours->followers.push_back(std::make_shared<Follower>(*draft));
  }
  return ours;
}

std::unique_ptr<Contender> make_our_contender(std::shared_ptr<OurEngine> ours, const EngineOptions& options,
                                              const std::string& far) {
  return std::make_unique<Ours>(std::move(ours), options, far);
}

Result<std::unique_ptr<Contender>> make_libllama_contender(const Model& model, const EngineOptions& options) {
  auto llama = Libllama::load(model.path(), {.threads = options.threads,
                                             .context = options.context,
                                             .sequences = options.sequences,
                                             .batch = options.prefill_chunk,
                                             .outputs = options.sequences,
                                             .device = model.device().handle()});
  if (!llama) return std::unexpected(llama.error());
  const std::size_t token_bytes = model.hyperparameters().geometry(options.block_tokens).token_bytes();
  return std::make_unique<Peer>(std::move(*llama), token_bytes, options.sequences);
}

}  // namespace dualdecoder
