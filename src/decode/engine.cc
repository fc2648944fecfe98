#include "decode/engine.h"

#include <algorithm>
#include <array>
#include <random>

#include <fmt/ranges.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/f16.h"
#include "base/hash.h"
#include "decode/follower.h"

namespace dualdecoder {

namespace {

// Null where the far tier is memory: then prefixes live as long as the engine.
Result<std::unique_ptr<PrefixStore>> open_prefix_store(const Tiers& tiers, std::uint64_t weights_hash) {
  if (tiers.file() == nullptr) return nullptr;
  const KvGeometry& geometry = tiers.geometry();
  const DigestOptions& digests = tiers.options().digests;
  std::uint64_t selecting = 0;
  for (const LayerIndex layer : tiers.selecting_layers()) selecting = selecting * 31 + layer.value + 1;
  const std::array<std::uint64_t, 8> identity = {weights_hash,
                                                 geometry.layers,
                                                 geometry.kv_heads,
                                                 geometry.head_dim,
                                                 geometry.block_tokens,
                                                 static_cast<std::uint64_t>(digests.kind),
                                                 static_cast<std::uint64_t>(digests.type),
                                                 selecting};
  return PrefixStore::open(tiers.options().far.directory,
                           hash_values(std::span<const std::uint64_t>(identity)), !tiers.file()->taken_up());
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create(const Model& model, const EngineOptions& requested) {
  const Hyperparameters& shape = model.hyperparameters();
  EngineOptions options = requested;
  if (options.context == 0) options.context = shape.context_train;
  if (options.block_tokens != 16 && options.block_tokens != 32 && options.block_tokens != 64) {
    return fail(ErrorCode::kInvalidArgument, "a block of {} tokens: 16, 32 and 64 are possible",
                options.block_tokens);
  }
  options.prefill_chunk = std::clamp(options.prefill_chunk, 1U, options.context);
  options.sequences = std::max(options.sequences, 1U);
  options.outputs_max = std::max(options.outputs_max, options.sequences * options.decoding_rows());

  std::unique_ptr<Engine> engine(new Engine(model, options));
  if (options.draft.kind == DraftKind::kModel) {
    DD_CHECK(options.draft.model != nullptr, "{} is not loaded", options.draft.model_path);
    if (Status status = check_same_vocabulary(model, *options.draft.model); !status)
      return std::unexpected(status.error());
    auto draft = create(*options.draft.model, options.of_draft());
    if (!draft) return std::unexpected(draft.error());
    engine->draft_ = std::move(*draft);
  }
  const auto plan = plan_memory(shape, options, model.device());
  if (!plan) return std::unexpected(plan.error());
  const std::uint64_t weights_hash = options.tiers.far.kind == FarKind::kFile ? model.weights_hash() : 0;
  auto tiers = Tiers::create(*plan, options.tiers, weights_hash, engine->near_memory(*plan));
  if (!tiers) return std::unexpected(tiers.error());
  engine->tiers_ = std::move(*tiers);

  if (options.tiers.keep_prefixes && plan->tiered()) {
    auto store = open_prefix_store(*engine->tiers_, weights_hash);
    if (!store) return std::unexpected(store.error());
    engine->prefixes_ = std::make_unique<PrefixCache>(*engine->tiers_, std::move(*store));
  }

  if (Status status = engine->make_tracks(); !status) return std::unexpected(status.error());
  return engine;
}

// With a device the near tier lies in its memory, with a slot behind the last one (DeviceAttention::append).
TakeNearMemory Engine::near_memory(const MemoryPlan& plan) {
  if (!plan.near_on_device()) return {};
  return [this,
          slot_bytes = plan.geometry.slot_bytes()](std::size_t bytes) -> Result<std::unique_ptr<NearMemory>> {
    auto memory = DeviceNearMemory::create(model_.device(), bytes + slot_bytes);
    if (!memory) return std::unexpected(memory.error());
    device_near_ = memory->get();
    return std::move(*memory);
  };
}

Status Engine::make_tracks() {
  ForwardOptions options{.threads = options_.threads,
                         .rows_max = std::max(options_.prefill_chunk, options_.outputs_max),
                         .outputs_max = options_.outputs_max,
                         .batch_invariant = options_.batch_invariant,
                         .next_query = plan().tiered() && options_.tiers.policy == Policy::kPreviousLayer,
                         .attends_on_device = device_near_ != nullptr};
  const auto make = [&](Track& track, std::uint32_t number, const Forward* beside) -> Status {
    auto forward = Forward::create(model_, options, beside);
    if (!forward) return std::unexpected(forward.error());
    track.forward = std::move(*forward);
    if (device_near_ != nullptr) {
      const Hyperparameters& shape = model_.hyperparameters();
      auto attention = DeviceAttention::create(model_.device(), *device_near_, track.forward->device_rows(),
                                               {.shape = shape.attention_shape(plan().geometry),
                                                .geometry = plan().geometry,
                                                .slots = near().slots(),
                                                .context = options_.context,
                                                .rows_max = options.rows_max});
      if (!attention) return std::unexpected(attention.error());
      track.attention = std::move(*attention);
    }
    track.step = std::make_unique<Step>(model_, *track.forward, *tiers_, number, track.attention.get());
    return {};
  };
  if (!options_.prompts_beside) return make(decoding_, 0, nullptr);
  if (Status status = make(prompts_, 1, nullptr); !status) return status;
  options.rows_max = options_.outputs_max;
  return make(decoding_, 0, prompts_.forward.get());
}

template <typename Fn>
void Engine::for_each_track(const Fn& fn) const {
  fn(decoding_);
  if (prompts_.step) fn(prompts_);
}

StepStats Engine::stats() const {
  StepStats sum;
  for_each_track([&](const Track& track) { sum += track.step->stats(); });
  return sum;
}

std::array<std::uint64_t, kPasses> Engine::pass_ns() const {
  std::array<std::uint64_t, kPasses> sum{};
  for_each_track([&](const Track& track) {
    for (std::size_t i = 0; i < kPasses; ++i) sum[i] += track.step->pass_ns()[i];
  });
  return sum;
}

std::size_t Engine::activation_bytes() const {
  std::size_t sum = draft_ ? draft_->activation_bytes() : 0;
  for_each_track(
      [&](const Track& track) { sum += track.forward->activation_bytes() + track.step->carry_bytes(); });
  return sum;
}

std::size_t Engine::device_activation_bytes() const {
  std::size_t sum = 0;
  for_each_track([&](const Track& track) { sum += track.forward->device_activation_bytes(); });
  return sum;
}

std::size_t Engine::device_attention_bytes() const {
  std::size_t sum = 0;
  for_each_track([&](const Track& track) { sum += track.attention ? track.attention->device_bytes() : 0; });
  return sum;
}

std::size_t Engine::device_near_bytes() const {
  return device_near_ == nullptr ? 0 : device_near_->device_bytes();
}

Result<std::unique_ptr<Sequence>> Engine::fork(Sequence& sequence, std::uint32_t tokens) {
  if (tokens <= sequence.tokens()) return sequence.fork(tokens);
  return fail(ErrorCode::kInvalidArgument, "a sequence of {} tokens cannot be forked at {}",
              sequence.tokens(), tokens);
}

Status Engine::fill_synthetic(Sequence& sequence, std::uint32_t tokens, std::uint64_t seed) {
  if (sequence.error()) return std::unexpected(*sequence.error());
  if (Status status = check_room(sequence, tokens); !status) return status;
  if (Status status = sequence.reserve_pages(sequence.tokens() + tokens); !status) return status;
  // Blocks are pieces of one pool of normal numbers, each from another place.
  const std::size_t block_values = 2 * sequence.geometry().half_block_elements();
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<f16_bits> pool(8 * block_values);
  std::vector<f16_bits> scratch;
  for (f16_bits& value : pool) value = f16_from_float(normal(random));
  const std::uint32_t end = sequence.tokens() + tokens;
  const std::uint32_t block_tokens = sequence.geometry().block_tokens;
  while (sequence.tokens() < end) {
    tiers_->begin_step();
    const BlockIndex block(sequence.tokens() / block_tokens);
    const std::uint32_t block_end = std::min(end, (block.value + 1) * block_tokens);
    if (Status status = sequence.take_slots(block_end); !status) return status;
    for (LayerIndex layer; layer.value < sequence.geometry().layers; ++layer) {
      const SlotIndex slot = sequence.residency().slot(layer, block);
      f16_bits* const from = pool.data() + random() % (pool.size() - block_values);
      const NearCopy copy{.near = near().data(slot),
                          .host = reinterpret_cast<std::byte*>(from),
                          .bytes = block_values * sizeof(f16_bits)};
      near().memory().copy({&copy, 1});
      const bool full = block_end == (block.value + 1) * block_tokens;
      if (full && sequence.digests() != nullptr && plan().layers[layer.value].kind == LayerKind::kSelecting)
        sequence.digests()->add(layer, near().transposed_keys(slot, scratch));
    }
    sequence.commit(block_end - sequence.tokens());
    sequence.write_full_pages();
    if (sequence.error()) return std::unexpected(*sequence.error());
  }
  return {};
}

Result<double> Engine::measure_far_bandwidth(Sequence& sequence) {
  if (!plan().tiered()) return fail(ErrorCode::kInvalidArgument, "there is no far tier");
  Transfers& transfers = tiers_->transfers();
  if (!transfers.finish(sequence.residency())) return std::unexpected(tiers_->overdue("a write"));
  // Every staging slot once a round, from blocks that lie far apart.
  const std::uint32_t pages = sequence.tokens() / sequence.geometry().block_tokens;
  const std::uint32_t slots = plan().staging_slots;
  if (pages == 0 || slots == 0) return fail(ErrorCode::kInvalidArgument, "there is nothing to read");
  const auto done = std::make_unique<bool[]>(slots);
  constexpr std::uint64_t kBytesMax = 64ULL << 20;
  constexpr double kSecondsMax = 1.0;
  std::mt19937_64 random(1);
  std::uint64_t bytes = 0;
  const Stopwatch watch;
  while (bytes == 0 || (bytes < kBytesMax && watch.seconds() < kSecondsMax)) {
    for (std::uint32_t i = 0; i < slots; ++i, bytes += sequence.geometry().slot_bytes()) {
      const PageIndex page = sequence.page(BlockIndex(static_cast<std::uint32_t>(random() % pages)));
      const LayerIndex layer(static_cast<std::uint32_t>(random() % sequence.geometry().layers));
      transfers.read_staged(sequence.residency(), layer, page, near().staging_slot(i), done[i]);
    }
    if (!transfers.finish(sequence.residency())) return std::unexpected(tiers_->overdue("a read"));
    if (sequence.error()) return std::unexpected(*sequence.error());
  }
  return static_cast<double>(bytes) / watch.seconds();
}

Status Engine::set_selection(Policy policy, std::uint32_t budget_tokens) {
  const Policy made_with = options_.tiers.policy;
  const bool possible = plan().tiered() && (policy == Policy::kFull || made_with != Policy::kFull) &&
                        (policy != Policy::kPreviousLayer || made_with == Policy::kPreviousLayer);
  if (!possible || budget_tokens == 0) {
    return fail(ErrorCode::kInvalidArgument, "the policy {} with a budget of {} is not possible here",
                policy_name(policy), budget_tokens);
  }
  tiers_->set_rule({policy, plan().geometry.blocks_for(budget_tokens)});
  return {};
}

std::vector<Policy> Engine::own_policies() const {
  const Policy made_with = options_.tiers.policy;
  if (!plan().tiered() || made_with == Policy::kFull) return {Policy::kFull};
  if (made_with == Policy::kOracle) return {Policy::kOracle};
  std::vector<Policy> policies = {Policy::kFull, Policy::kReactive, Policy::kLastSet, Policy::kPrevious,
                                  Policy::kDual};
  if (std::ranges::find(policies, made_with) == policies.end()) policies.push_back(made_with);
  return policies;
}

Status Engine::check_selection(Policy policy, std::uint32_t budget_tokens) const {
  const std::vector<Policy> policies = own_policies();
  if (std::ranges::find(policies, policy) == policies.end()) {
    std::vector<const char*> names;
    for (const Policy possible : policies) names.push_back(policy_name(possible));
    return fail(ErrorCode::kInvalidArgument, "the policy {} is not possible here; there are {}",
                policy_name(policy), fmt::join(names, ", "));
  }
  if (budget_tokens > 0) return {};
  return fail(ErrorCode::kInvalidArgument, "a budget of 0 tokens: at least 1 is needed");
}

Status Engine::set_selection(Sequence& sequence, Policy policy, std::uint32_t budget_tokens) const {
  if (Status status = check_selection(policy, budget_tokens); !status) return status;
  sequence.set_rule({policy, plan().geometry.blocks_for(budget_tokens)});
  return {};
}

Status Engine::set_window(std::uint32_t sink_tokens, std::uint32_t recent_tokens) {
  if (sink_tokens > options_.tiers.sink_tokens || recent_tokens > options_.tiers.recent_tokens) {
    return fail(ErrorCode::kInvalidArgument, "a window of {} + {} tokens is more than the {} + {} planned",
                sink_tokens, recent_tokens, options_.tiers.sink_tokens, options_.tiers.recent_tokens);
  }
  tiers_->set_window(sink_tokens, recent_tokens);
  return {};
}

Status Engine::check(const Sequence& sequence, std::span<const TokenId> tokens) const {
  if (sequence.error()) return std::unexpected(*sequence.error());
  if (tokens.empty()) return fail(ErrorCode::kInvalidArgument, "no tokens to decode");
  if (Status status = model_.vocabulary().check_tokens(tokens); !status) return status;
  return check_room(sequence, tokens.size());
}

Status Engine::check(const StepGroup& group) const {
  if (!group.guess) return check(*group.sequence, group.tokens);
  if (group.exact()) {
    return fail(ErrorCode::kInvalidArgument, "a guess stands behind at most one token, and none of a prompt");
  }
  if (Status status = check(*group.sequence, std::span(&*group.guess, 1)); !status) return status;
  if (group.tokens.empty()) return {};
  if (Status status = check(*group.sequence, group.tokens); !status) return status;
  return check_room(*group.sequence, 2);
}

Status Engine::check_room(const Sequence& sequence, std::size_t tokens) const {
  if (tokens <= options_.context - sequence.tokens()) return {};
  return fail(ErrorCode::kContextExceeded,
              "{} tokens do not fit the context of {}; shorten them or raise it with -c",
              sequence.tokens() + tokens, options_.context);
}

Result<const float*> Engine::prefill(Sequence& sequence, std::span<const TokenId> tokens,
                                     const Progress& progress) {
  if (Status status = check(sequence, tokens); !status) return std::unexpected(status.error());
  DD_CHECK(!prompts_under_way_);
  const auto total = static_cast<std::uint32_t>(tokens.size());
  if (Status status = sequence.reserve_pages(sequence.tokens() + total); !status) {
    return std::unexpected(status.error());
  }
  for (std::uint32_t done = 0; done < total;) {
    const std::uint32_t rows = std::min(options_.prefill_chunk, total - done);
    const bool last = done + rows == total;
    const StepGroup group{.sequence = &sequence,
                          .tokens = tokens.subspan(done, rows),
                          .logits = last ? LogitsWanted::kLast : LogitsWanted::kNone,
                          .prompt = true};
    const float* logits = prompt_track().step->run(std::span(&group, 1));
    if (sequence.error()) return std::unexpected(*sequence.error());
    done += rows;
    const bool go_on = !progress || progress(done);
    if (last) return logits;
    if (!go_on) break;
  }
  sequence.release_unused();
  return nullptr;
}

// Checks `groups`, and sees to their pages.
Status Engine::begin(const Track& track, std::span<const StepGroup> groups) {
  std::size_t rows = 0;
  std::size_t outputs = 0;
  for (const StepGroup& group : groups) {
    if (Status status = check(group); !status) return status;
    rows += group.rows();
    outputs += group.logits_rows();
  }
  const std::uint32_t rows_max = track.forward->rows_max();
  if (rows == 0 || rows > rows_max || outputs > options_.outputs_max) {
    return fail(ErrorCode::kInvalidArgument,
                "a step of {} rows, {} with logits: 1 to {} and up to {} are possible", rows, outputs,
                rows_max, options_.outputs_max);
  }
  for (const StepGroup& group : groups) {
    const auto tokens = static_cast<std::uint32_t>(group.tokens.size());
    const Status status = group.sequence->reserve_pages(group.sequence->tokens() + tokens);
    if (!status) group.sequence->residency().set_error(status.error());
  }
  return {};
}

Result<const float*> Engine::step(std::span<const StepGroup> groups) {
  DD_CHECK(!prompts_under_way_ || prompts_.step);
  if (Status status = begin(decoding_, groups); !status) return std::unexpected(status.error());
  return decoding_.step->run(groups);
}

Status Engine::begin_prompts(std::span<const StepGroup> groups) {
  DD_CHECK(!prompts_under_way_);
  if (Status status = begin(prompt_track(), groups); !status) return status;
  prompt_track().step->begin(groups);
  prompts_under_way_ = true;
  return {};
}

std::optional<const float*> Engine::advance_prompts(std::uint32_t layers) {
  DD_CHECK(prompts_under_way_ && layers > 0);
  if (prompt_track().step->advance(layers)) return std::nullopt;
  prompts_under_way_ = false;
  return prompt_track().step->finish();
}

bool Engine::needs_prediction(const Sequence& sequence) const {
  if (!tiers_->tiered() || sequence.rule().policy == Policy::kFull) return false;
  return !sequence.selects_all(tiers_->candidates_at_position(sequence.tokens() + 1));
}

Status Engine::accept_guess(Sequence& sequence) {
  if (sequence.error()) return std::unexpected(*sequence.error());
  DD_CHECK(sequence.guessed() == 1, "the last step had no guess");
  if (Status status = sequence.reserve_pages(sequence.tokens() + 1); !status) return status;
  sequence.commit(1);
  for (LayerIndex layer; sequence.digests() != nullptr && layer.value < sequence.geometry().layers; ++layer) {
    if (plan().layers[layer.value].kind == LayerKind::kSelecting)
      sequence.add_digests(layer, sequence.tokens());
  }
  sequence.write_full_pages();
  return {};
}

}  // namespace dualdecoder
