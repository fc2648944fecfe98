// Many sequences over a slow and disorderly far tier, for long: nobody's KV is ever somebody else's, late or
// old, nothing grows beyond its plan, and everything is given back. DD_SOAK_STEPS sets how long: the steps
// of the random walk. DD_SOAK_SEED begins with the round of a failure's trace.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <set>

#include <gmock/gmock.h>

#include "base/hash.h"
#include "tiers_testing.h"

namespace dualdecoder {
namespace {

using std::chrono::milliseconds;

constexpr std::uint64_t kStepsByDefault = 10'000;

std::uint64_t soak_steps() {
  const char* text = std::getenv("DD_SOAK_STEPS");
  return text == nullptr ? kStepsByDefault : std::strtoull(text, nullptr, 10);
}

std::uint64_t first_seed() {
  const char* text = std::getenv("DD_SOAK_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

std::uint64_t hash_rows(const float* logits, std::uint32_t rows) {
  return hash_bytes(std::as_bytes(std::span(logits, std::size_t{rows} * kTinyVocabulary)));
}

using OutOfOrder = TieredEngines;

TEST_F(OutOfOrder, FourSequencesInTheLeastNearMemoryAreAsEachAlone) {
  constexpr std::array<std::uint32_t, 4> kPrompts = {380, 383, 370, 384};
  constexpr std::uint32_t kSteps = 16;
  const auto model = load({.layers = 3});
  std::array<std::array<Rows, 4>, std::size(kEveryPolicy)> references;
  const std::uint64_t seeds = std::clamp<std::uint64_t>(soak_steps() / 100, 6, 100);
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const std::size_t policy = seed % std::size(kEveryPolicy);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, policy_name(kEveryPolicy[policy])));
    EngineOptions options = small_options(kPrompts.size());
    options.tiers.policy = kEveryPolicy[policy];
    options.tiers.near_bytes_max = plan_memory(model->hyperparameters(),
                                               [&] {
                                                 EngineOptions tiered = options;
                                                 tiered.tiers.far.kind = FarKind::kHost;
                                                 return tiered;
                                               }())
                                       ->near_bytes();
    if (references[policy][0].empty()) {
      const auto alone = engine(*model, alone_options(options));
      for (std::size_t i = 0; i < kPrompts.size(); ++i)
        references[policy][i] = play(*alone, make_story(kPrompts[i], kSteps, i));
    }
    const auto tiered = simulated(
        *model, options, {.seed = seed, .latency_min = milliseconds(0), .latency_max = milliseconds(50)});
    ASSERT_EQ(tiered->near().bytes_capacity(), options.tiers.near_bytes_max);
    std::vector<std::unique_ptr<Sequence>> sequences;
    std::vector<Story> stories;
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      stories.push_back(make_story(kPrompts[i], kSteps, i));
      sequences.push_back(new_sequence(*tiered));
      const auto logits = tiered->prefill(*sequences[i], stories[i].prompt);
      ASSERT_TRUE(logits) << logits.error().message;
      ASSERT_TRUE(same_bits(copy_row(*logits), references[policy][i][0])) << "sequence " << i;
    }
    for (std::uint32_t s = 0; s < kSteps; ++s) {
      std::array<StepGroup, 4> groups;
      for (std::size_t i = 0; i < groups.size(); ++i)
        groups[i] = {sequences[i].get(), std::span(stories[i].steps).subspan(s, 1), LogitsWanted::kLast};
      const auto logits = tiered->step(groups);
      ASSERT_TRUE(logits) << logits.error().message;
      for (std::size_t i = 0; i < groups.size(); ++i) {
        ASSERT_TRUE(same_bits(copy_row(*logits + i * kTinyVocabulary), references[policy][i][s + 1]))
            << "sequence " << i << ", step " << s;
      }
    }
  }
}

/// What was done with a sequence, and a hash of the logits that came of it.
struct Deed {
  enum class Kind { kPrefill, kStep, kAccept, kTruncate };
  Kind kind = Kind::kStep;
  std::vector<TokenId> tokens = {};
  std::optional<TokenId> guess = {};
  std::uint32_t kept = 0;
  std::uint64_t hash = 0;
};

struct Live {
  std::unique_ptr<Sequence> sequence;
  std::vector<Deed> deeds;
};

struct RoundOptions {
  EngineOptions engine;
  SimulatedPortOptions port;
  bool every_block = false;  // the budget selects all: the reference keeps everything near
  bool lossy = false;        // completions get lost: what they were for is not given back
  bool faulty = false;
};

FaultRates random_rates(std::mt19937_64& random, bool lossy) {
  const double rate = 1e-4 * static_cast<double>(1 + random() % 20);
  return {.error = rate,
          .flipped_bit = rate,
          .torn_write = rate,
          .torn_write_error = rate,
          .lost = lossy ? rate / 4 : 0.0,
          .misplaced = rate};
}

class Soak : public TieredEngines {
 protected:
  Soak() : models_{load({.layers = 3}), load({.architecture = "gemma3", .layers = 4})} {}

  std::uint32_t below(std::uint32_t limit) { return static_cast<std::uint32_t>(random_() % limit); }
  bool chance(std::uint32_t one_in) { return random_() % one_in == 0; }
  std::vector<TokenId> tokens(std::uint32_t count) { return random_tokens(count, random_()); }

  RoundOptions random_round(std::uint64_t seed) {
    RoundOptions round;
    round.engine = small_options(1 + below(8), 16U << below(3));
    round.engine.draft.kind = DraftKind::kSelf;
    TierOptions& tiers = round.engine.tiers;
    round.every_block = chance(2);
    round.faulty = seed % 3 == 0;
    round.lossy = round.faulty && chance(3);
    tiers.policy = kEveryPolicy[below(std::size(kEveryPolicy))];
    if (chance(2)) tiers.correction = {.kind = Correction::Kind::kMiss, .cosine = 0.0f};
    if (chance(4)) tiers.correction = {.kind = Correction::Kind::kCosine, .cosine = 0.9f};
    tiers.budget_tokens = round.every_block ? kTierContext : 16 + below(150);
    tiers.sink_tokens = below(50);
    tiers.recent_tokens = below(100);
    tiers.near_tokens = 1 + below(300);
    tiers.dense_layers = below(2);
    if (chance(2)) tiers.resident_layers = below(3);
    tiers.ring_sets = 2 + below(2);
    tiers.staging_tokens = 1 + below(600);
    for (std::uint64_t& bytes : tiers.transfers.in_flight_bytes_max) bytes = std::uint64_t{4096} << below(8);
    round.port = {.seed = seed,
                  .latency_min = milliseconds(0),
                  .latency_max = milliseconds(below(50)),
                  .reorder = !chance(4),
                  .depth = 1U << below(7)};
    if (round.faulty) round.port.rates = random_rates(random_, round.lossy);
    return round;
  }

  /// Plays the round named by `seed`; returns the steps taken.
  std::uint64_t play_round(std::uint64_t seed, std::uint64_t steps_max) {
    random_.seed(seed);
    round_ = random_round(seed);
    const Model& model = *models_[seed % models_.size()];
    const TierOptions& tiers = round_.engine.tiers;
    SCOPED_TRACE(fmt::format("seed {}: {}, {} sequences, blocks of {}, budget {}, {} near, {}", seed,
                             policy_name(tiers.policy), round_.engine.sequences, round_.engine.block_tokens,
                             tiers.budget_tokens, tiers.near_tokens,
                             round_.lossy ? "lossy" : (round_.faulty ? "faulty" : "no faults")));
    EngineOptions reference_options = alone_options(round_.engine);
    if (round_.every_block) reference_options.tiers.far = {};
    reference_ = engine(model, reference_options);
    engine_ = simulated(model, round_.engine, round_.port);
    const std::uint64_t limit = std::min<std::uint64_t>(steps_max, 40 + below(200));
    // Where completions get lost, every place may be lost in the end.
    for (std::uint64_t i = 0; steps() < limit && i < 2 * limit && !HasFatalFailure(); ++i) {
      disturb();
      advance();
      expect_plan_kept();
    }
    while (!live_.empty() && !HasFatalFailure()) end(live_.size() - 1, !chance(3));
    live_.clear();
    if (!round_.lossy && !HasFatalFailure()) {
      EXPECT_EQ(engine_->near().bytes_in_use(), 0U);
      EXPECT_EQ(engine_->tiers().far().pages_in_use(), 0U);
    }
    const std::uint64_t taken = steps();
    engine_.reset();
    return taken;
  }

  std::uint64_t steps() const { return engine_->stats().steps; }

  /// Sequences come, go, fork, forget and take in more.
  void disturb() {
    const bool room = live_.size() < round_.engine.sequences;
    if (room && !live_.empty() && chance(12)) {
      fork(below(static_cast<std::uint32_t>(live_.size())));
    } else if (room && (live_.empty() || chance(8))) {
      begin();
    }
    if (!live_.empty() && chance(40)) end(below(static_cast<std::uint32_t>(live_.size())), chance(2));
    if (!live_.empty() && chance(15)) truncate(below(static_cast<std::uint32_t>(live_.size())));
    if (!live_.empty() && chance(25)) prefill(below(static_cast<std::uint32_t>(live_.size())), 1 + below(80));
  }

  void begin() {
    auto sequence = engine_->new_sequence();
    if (!sequence) {
      ASSERT_TRUE(round_.lossy) << sequence.error().message;
      return;
    }
    live_.push_back({.sequence = std::move(*sequence), .deeds = {}});
    prefill(live_.size() - 1, 1 + below(300));
  }

  void prefill(std::size_t index, std::uint32_t count) {
    Live& live = live_[index];
    if (live.sequence->tokens() + count > kTierContext) return;
    Deed deed{.kind = Deed::Kind::kPrefill, .tokens = tokens(count)};
    const auto logits = engine_->prefill(*live.sequence, deed.tokens);
    if (!logits) {
      fail_at(index, logits.error());
      return;
    }
    deed.hash = hash_rows(*logits, 1);
    live.deeds.push_back(std::move(deed));
  }

  void truncate(std::size_t index) {
    Live& live = live_[index];
    Deed deed{.kind = Deed::Kind::kTruncate, .kept = below(live.sequence->tokens() + 1)};
    const Status status = live.sequence->truncate(deed.kept);
    if (!status) {
      fail_at(index, status.error());
      return;
    }
    ASSERT_EQ(live.sequence->tokens(), deed.kept);
    live.deeds.push_back(std::move(deed));
  }

  /// The child's deeds are the parent's, and that it was cut.
  void fork(std::size_t index) {
    const Live& parent = live_[index];
    Deed deed{.kind = Deed::Kind::kTruncate, .kept = below(parent.sequence->tokens() + 1)};
    if (chance(3)) deed.kept = parent.sequence->tokens();
    auto child = engine_->fork(*parent.sequence, deed.kept);
    if (!child) {
      ASSERT_TRUE(round_.faulty) << child.error().message;
      if (parent.sequence->error()) fail_at(index, *parent.sequence->error());
      return;
    }
    Live live{.sequence = std::move(*child), .deeds = parent.deeds};
    live.deeds.push_back(std::move(deed));
    live_.push_back(std::move(live));
  }

  void fail_at(std::size_t index, const Error& error) {
    ASSERT_TRUE(round_.faulty) << error.message;
    ASSERT_TRUE(live_[index].sequence->error()) << error.message;
    remove(index);
  }
  void remove(std::size_t index) { live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index)); }

  /// One token mostly, with a guess behind it or none; sometimes a few, or a guess alone.
  Deed random_step() {
    Deed deed{.kind = Deed::Kind::kStep, .tokens = tokens(chance(10) ? 2 + below(3) : 1)};
    if (deed.tokens.size() > 1 || chance(2)) return deed;
    deed.guess = tokens(1).front();
    if (chance(5)) deed.tokens.clear();
    return deed;
  }

  /// One step of some of them.
  void advance() {
    for (std::size_t i = live_.size(); i-- > 0;) {
      if (live_[i].sequence->error()) fail_at(i, *live_[i].sequence->error());  // a write came back
    }
    std::vector<std::size_t> members;
    std::vector<Deed> deeds;
    for (std::size_t i = 0; i < live_.size(); ++i) {
      Deed deed = random_step();
      const std::size_t rows = deed.tokens.size() + (deed.guess ? 1 : 0);
      if (live_[i].sequence->tokens() + rows > kTierContext || chance(6)) continue;
      members.push_back(i);
      deeds.push_back(std::move(deed));
    }
    if (members.empty()) return;
    std::vector<StepGroup> groups;
    for (std::size_t g = 0; g < members.size(); ++g)
      groups.push_back(
          {live_[members[g]].sequence.get(), deeds[g].tokens, LogitsWanted::kLast, deeds[g].guess});
    const auto logits = engine_->step(groups);
    ASSERT_TRUE(logits) << logits.error().message;
    const float* row = *logits;
    for (std::size_t g = 0; g < members.size(); ++g) {
      const std::uint32_t rows = groups[g].logits_rows();
      deeds[g].hash = hash_rows(row, rows);
      row += std::size_t{rows} * kTinyVocabulary;
    }
    for (std::size_t g = members.size(); g-- > 0;) {
      const std::size_t i = members[g];
      if (live_[i].sequence->error()) {
        fail_at(i, *live_[i].sequence->error());
        continue;
      }
      const bool accept = deeds[g].guess && chance(3);
      live_[i].deeds.push_back(std::move(deeds[g]));
      if (!accept) continue;
      ASSERT_TRUE(engine_->accept_guess(*live_[i].sequence));
      live_[i].deeds.push_back({.kind = Deed::Kind::kAccept});
    }
  }

  void expect_plan_kept() {
    // An error that came after a sequence's last step has taken nothing back yet.
    std::set<PageIndex> pages;
    for (const Live& live : live_) {
      const std::uint32_t blocks = live.sequence->geometry().blocks_for(live.sequence->tokens());
      for (BlockIndex block; block.value < blocks; ++block) pages.insert(live.sequence->page(block));
    }
    if (round_.lossy) {
      ASSERT_GE(engine_->tiers().far().pages_in_use(), pages.size());
    } else {
      ASSERT_EQ(engine_->tiers().far().pages_in_use(), pages.size());
    }
    ASSERT_LE(engine_->near().bytes_in_use(), engine_->plan().near_bytes());
    ASSERT_LE(engine_->tiers().far().bytes_in_use(), engine_->plan().far_bytes);
  }

  void end(std::size_t index, bool compare) {
    if (compare && !live_[index].sequence->error()) expect_as_alone(live_[index].deeds);
    remove(index);
  }

  void expect_as_alone(const std::vector<Deed>& deeds) {
    const auto sequence = new_sequence(*reference_);
    for (std::size_t i = 0; i < deeds.size(); ++i) {
      const Deed& deed = deeds[i];
      if (deed.kind == Deed::Kind::kTruncate) {
        ASSERT_TRUE(sequence->truncate(deed.kept));
        continue;
      }
      if (deed.kind == Deed::Kind::kAccept) {
        ASSERT_TRUE(reference_->accept_guess(*sequence));
        continue;
      }
      const StepGroup group{sequence.get(), deed.tokens, LogitsWanted::kLast, deed.guess};
      const auto logits = deed.kind == Deed::Kind::kPrefill ? reference_->prefill(*sequence, deed.tokens)
                                                            : reference_->step(std::span(&group, 1));
      ASSERT_TRUE(logits) << logits.error().message;
      const std::uint32_t rows = deed.kind == Deed::Kind::kPrefill ? 1 : group.logits_rows();
      ASSERT_EQ(hash_rows(*logits, rows), deed.hash)
          << "deed " << i << " of " << deeds.size() << ", at " << sequence->tokens() << " tokens";
    }
    ++compared_;
  }

  std::array<std::unique_ptr<Model>, 2> models_;
  std::mt19937_64 random_;
  RoundOptions round_;
  std::unique_ptr<Engine> reference_;
  std::unique_ptr<Engine> engine_;
  std::vector<Live> live_;
  std::uint64_t compared_ = 0;
};

TEST_F(Soak, OfRandomSequencesGivesTheBitsOfEachAloneKeepsThePlanAndGivesAllMemoryBack) {
  const std::uint64_t total = soak_steps();
  std::uint64_t seed = first_seed();
  for (std::uint64_t done = 0; done < total; ++seed) {
    done += play_round(seed, total - done);
    if (HasFailure()) return;
  }
  EXPECT_GT(2 * compared_, seed - first_seed()) << compared_ << " sequences compared";
}

}  // namespace
}  // namespace dualdecoder
