#include "contender.h"

#include <utility>
#include <vector>

#include "command.h"

namespace dualdecoder {
namespace {

class Ours final : public Contender {
 public:
  Ours(std::unique_ptr<Engine> engine, std::string far) : engine_(std::move(engine)), far_(std::move(far)) {}

  Status add_sequences() {
    for (std::uint32_t i = 0; i < engine_->options().sequences; ++i) {
      auto sequence = engine_->new_sequence();
      if (!sequence) return std::unexpected(sequence.error());
      sequences_.push_back(std::move(*sequence));
    }
    return {};
  }
  std::string engine() const override { return "dualdecoder"; }
  std::string far() const override { return far_; }
  std::string policy() const override {
    return engine_->plan().tiered() ? policy_name(engine_->options().tiers.policy) : "dense";
  }
  std::uint32_t depth(std::uint32_t sequence) const override { return sequences_[sequence]->tokens(); }
  Status append(std::uint32_t sequence, std::span<const TokenId> tokens) override {
    const auto logits = engine_->prefill(*sequences_[sequence], tokens);
    return logits ? Status{} : std::unexpected(logits.error());
  }
  Result<bool> fill_synthetic(std::uint32_t sequence, std::uint32_t tokens) override {
    const Status status = engine_->fill_synthetic(*sequences_[sequence], tokens, sequence + 1);
    if (!status) return std::unexpected(status.error());
    return true;
  }
  Status decode(std::span<const TokenId> tokens) override {
    groups_.clear();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      groups_.push_back({sequences_[i].get(), tokens.subspan(i, 1), LogitsWanted::kLast});
    }
    const auto logits = engine_->step(groups_);
    if (!logits) return std::unexpected(logits.error());
    for (const auto& sequence : sequences_) {
      if (sequence->error()) return std::unexpected(*sequence->error());
    }
    return {};
  }
  Status truncate(std::uint32_t sequence, std::uint32_t tokens) override {
    return sequences_[sequence]->truncate(tokens);
  }
  std::uint64_t near_kv_bytes() const override {
    return engine_->plan().tiered() ? engine_->plan().near_bytes() : engine_->near().bytes_in_use();
  }
  TierTotals totals() const override {
    if (!engine_->plan().tiered()) return {};
    const StepStats& step = engine_->stats();
    return {.stall_s = static_cast<double>(step.stall_ns) * 1e-9,
            .select_s = static_cast<double>(step.rank_ns) * 1e-9,
            .read_bytes = static_cast<double>(engine_->tiers().transfers().stats().reads.bytes),
            .blocks_attended = static_cast<double>(step.blocks_attended),
            .blocks_missed = static_cast<double>(step.blocks_missed),
            .blocks_late = static_cast<double>(step.blocks_late)};
  }

 private:
  std::unique_ptr<Engine> engine_;
  std::string far_;
  std::vector<std::unique_ptr<Sequence>> sequences_;  // go before engine_'s memory
  std::vector<StepGroup> groups_;
};

class Peer final : public Contender {
 public:
  Peer(std::unique_ptr<Libllama> llama, std::size_t token_bytes, std::uint32_t sequences)
      : llama_(std::move(llama)), token_bytes_(token_bytes), sequences_(sequences) {}
  std::string engine() const override { return "libllama"; }
  std::string far() const override { return "none"; }
  std::string policy() const override { return "dense"; }
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
  Status decode(std::span<const TokenId> tokens) override {
    const auto logits = llama_->decode(tokens);
    return logits ? Status{} : std::unexpected(logits.error());
  }
  Status truncate(std::uint32_t sequence, std::uint32_t tokens) override {
    return llama_->truncate(sequence, tokens);
  }
  std::uint64_t near_kv_bytes() const override {
    std::uint64_t tokens = 0;
    for (std::uint32_t i = 0; i < sequences_; ++i) tokens += llama_->tokens(i);
    return tokens * token_bytes_;
  }

 private:
  std::unique_ptr<Libllama> llama_;
  std::size_t token_bytes_;
  std::uint32_t sequences_;
};

}  // namespace

TierTotals TierTotals::operator-(const TierTotals& before) const {
  return {.stall_s = stall_s - before.stall_s,
          .select_s = select_s - before.select_s,
          .read_bytes = read_bytes - before.read_bytes,
          .blocks_attended = blocks_attended - before.blocks_attended,
          .blocks_missed = blocks_missed - before.blocks_missed,
          .blocks_late = blocks_late - before.blocks_late};
}

Result<std::unique_ptr<Contender>> make_our_contender(const Model& model, const EngineOptions& options,
                                                      const std::string& far) {
  auto engine = Engine::create(model, options);
  if (!engine) return std::unexpected(engine.error());
  print_short_plan(**engine);
  auto ours = std::make_unique<Ours>(std::move(*engine), far);
  if (Status status = ours->add_sequences(); !status) return std::unexpected(status.error());
  return ours;
}

Result<std::unique_ptr<Contender>> make_libllama_contender(const Model& model, const EngineOptions& options) {
  auto llama = Libllama::load(model.path(), {.threads = options.threads,
                                             .context = options.context,
                                             .sequences = options.sequences,
                                             .batch = options.prefill_chunk,
                                             .outputs = options.sequences});
  if (!llama) return std::unexpected(llama.error());
  const std::size_t token_bytes = model.hyperparameters().geometry(options.block_tokens).token_bytes();
  return std::make_unique<Peer>(std::move(*llama), token_bytes, options.sequences);
}

}  // namespace dualdecoder
