// Sequences that share the pages of a common beginning, on small random models: whatever one of them does
// afterwards, each gives the bits that it gives alone (laws 1 and 5 of docs/design.md), and pages go back
// when the last of them goes.
#include <optional>
#include <random>

#include <gmock/gmock.h>

#include "tiers_testing.h"

namespace dualdecoder {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using testing::HasSubstr;

constexpr std::array kGuesslessPolicies = {Policy::kFull,     Policy::kReactive,      Policy::kLastSet,
                                           Policy::kPrevious, Policy::kPreviousLayer, Policy::kOracle};

enum class Far { kNone, kHost, kFile, kSimulated };

/// A sequence, and the tokens that a sequence of its own would have been given.
struct Twin {
  std::unique_ptr<Sequence> sequence;
  std::vector<TokenId> tokens;
};

class Fork : public TieredEngines {
 protected:
  void SetUp() override { load_model("llama"); }
  void load_model(const std::string& architecture) {
    model_ = load({.architecture = architecture, .layers = architecture == "gemma3" ? 4U : 3U});
  }

  /// A budget that selects every block, and little room near.
  static EngineOptions options_of(std::uint32_t sequences, std::uint32_t block_tokens = 16) {
    EngineOptions options = small_options(sequences, block_tokens);
    options.tiers.budget_tokens = kTierContext;
    return options;
  }

  std::unique_ptr<Engine> engine_over(Far far, EngineOptions options, std::uint64_t seed) {
    if (far == Far::kSimulated) {
      return simulated(*model_, options,
                       {.seed = seed, .latency_min = nanoseconds(0), .latency_max = milliseconds(50)},
                       &port_);
    }
    const FarKind kinds[] = {FarKind::kNone, FarKind::kHost, FarKind::kFile};
    options.tiers.far = {
        .kind = kinds[static_cast<std::size_t>(far)], .directory = directory_.file(""), .make_port = {}};
    return engine(*model_, options);
  }
  std::unique_ptr<Engine> host_engine(const EngineOptions& options) {
    return engine_over(Far::kHost, options, 0);
  }

  static Twin begin(Engine& engine, std::uint32_t tokens, std::uint64_t seed) {
    Twin twin{.sequence = new_sequence(engine), .tokens = {}};
    prefill(engine, twin, tokens, seed);
    return twin;
  }
  static void prefill(Engine& engine, Twin& twin, std::uint32_t count, std::uint64_t seed) {
    const std::vector<TokenId> tokens = random_tokens(count, seed);
    const auto logits = engine.prefill(*twin.sequence, tokens);
    DD_CHECK(logits, "{}", logits.error().message);
    twin.tokens.insert(twin.tokens.end(), tokens.begin(), tokens.end());
  }
  static Twin fork(Engine& engine, const Twin& parent, std::uint32_t tokens) {
    auto forked = engine.fork(*parent.sequence, tokens);
    DD_CHECK(forked, "{}", forked.error().message);
    return {.sequence = std::move(*forked),
            .tokens = {parent.tokens.begin(), parent.tokens.begin() + tokens}};
  }
  static void truncate(Twin& twin, std::uint32_t tokens) {
    const Status status = twin.sequence->truncate(tokens);
    DD_CHECK(status, "{}", status.error().message);
    twin.tokens.resize(tokens);
  }

  /// 40 steps of two sequences together, with the same tokens.
  static void expect_same_bits_together(Engine& engine, Sequence& a, Sequence& b) {
    for (const TokenId& token : random_tokens(40, 2)) {
      const std::array groups = {StepGroup{&a, std::span(&token, 1), LogitsWanted::kLast},
                                 StepGroup{&b, std::span(&token, 1), LogitsWanted::kLast}};
      const auto logits = engine.step(groups);
      ASSERT_TRUE(logits) << logits.error().message;
      ASSERT_TRUE(same_bits(copy_row(*logits), copy_row(*logits + kTinyVocabulary)))
          << "at " << b.tokens() << " tokens";
    }
  }

  /// Some steps of all of them together, each with tokens of its own; in the last one each is compared with
  /// what its tokens give alone, with all KV near.
  void expect_as_alone(Engine& engine, std::span<Twin* const> twins, std::uint32_t steps,
                       std::uint64_t seed) {
    std::vector<std::vector<float>> rows;
    for (std::uint32_t s = 0; s < steps; ++s) {
      const std::vector<TokenId> next = random_tokens(twins.size(), 1000 * seed + s);
      std::vector<StepGroup> groups;
      for (std::size_t i = 0; i < twins.size(); ++i) {
        groups.push_back({twins[i]->sequence.get(), std::span(next).subspan(i, 1), LogitsWanted::kLast});
        twins[i]->tokens.push_back(next[i]);
      }
      const auto logits = engine.step(groups);
      ASSERT_TRUE(logits) << logits.error().message;
      rows.clear();
      for (std::size_t i = 0; i < twins.size(); ++i) {
        ASSERT_FALSE(twins[i]->sequence->error()) << twins[i]->sequence->error()->message;
        ASSERT_EQ(twins[i]->sequence->tokens(), twins[i]->tokens.size());
        rows.push_back(copy_row(*logits + i * kTinyVocabulary));
      }
    }
    for (std::size_t i = 0; i < twins.size(); ++i)
      ASSERT_TRUE(same_bits(rows[i], alone(twins[i]->tokens))) << "twin " << i << " of " << twins.size();
  }

  std::vector<float> alone(std::span<const TokenId> tokens) {
    if (!alone_) {
      EngineOptions options = options_of(1);
      options.tiers.far = {};
      alone_ = engine(*model_, options);
    }
    const auto sequence = new_sequence(*alone_);
    const auto logits = alone_->prefill(*sequence, tokens);
    DD_CHECK(logits, "{}", logits.error().message);
    return copy_row(*logits);
  }

  static void expect_all_given_back(const Engine& engine) {
    EXPECT_EQ(engine.near().bytes_in_use(), 0U);
    if (!engine.plan().tiered()) return;
    EXPECT_EQ(engine.tiers().far().pages_in_use(), 0U);
  }

  std::unique_ptr<Model> model_;
  std::unique_ptr<Engine> alone_;
  SimulatedPort* port_ = nullptr;  // of the last engine over Far::kSimulated
};

class ForkOver : public Fork, public testing::WithParamInterface<std::tuple<const char*, Far>> {
 protected:
  void SetUp() override { load_model(std::get<0>(GetParam())); }
  Far far() const { return std::get<1>(GetParam()); }
};
std::string name_of(const testing::TestParamInfo<std::tuple<const char*, Far>>& info) {
  constexpr const char* kFarNames[] = {"None", "Host", "File", "Simulated"};
  return std::string(std::get<0>(info.param)) + kFarNames[static_cast<std::size_t>(std::get<1>(info.param))];
}
INSTANTIATE_TEST_SUITE_P(Every, ForkOver,
                         testing::Combine(testing::Values("llama", "gemma3"),
                                          testing::Values(Far::kNone, Far::kHost, Far::kFile,
                                                          Far::kSimulated)),
                         name_of);

TEST_P(ForkOver, AroundBlockBoundariesParentAndChildAreAsEachAlone) {
  std::uint64_t seed = 0;
  for (const std::uint32_t block : {16U, 32U, 64U}) {
    const std::uint32_t length = 4 * block + 3;
    for (const std::uint32_t kept :
         {0U, 1U, block - 1, block, block + 1, 4 * block - 1, 4 * block, 4 * block + 1, length}) {
      ++seed;
      EngineOptions options = options_of(2, block);
      options.tiers.policy = kGuesslessPolicies[seed % kGuesslessPolicies.size()];
      options.tiers.dense_layers = static_cast<std::uint32_t>(seed % 2);
      SCOPED_TRACE(fmt::format("{} of {} tokens, blocks of {}, {}", kept, length, block,
                               policy_name(options.tiers.policy)));
      const auto engine = engine_over(far(), options, seed);
      {
        Twin parent = begin(*engine, length, seed);
        Twin child = fork(*engine, parent, kept);
        expect_as_alone(*engine, std::array{&parent, &child}, block + 2, seed);
        prefill(*engine, child, block + 1, seed + 1);
        expect_as_alone(*engine, std::array{&child, &parent}, 2, seed);
      }
      expect_all_given_back(*engine);
      if (HasFatalFailure()) return;
    }
  }
}

// A small selection depends on what was ranked before: the child of all tokens goes on from the parent's.
TEST_F(Fork, OfAllTokensGivesTheParentsOwnBitsWithASmallBudget) {
  for (const Policy policy : kGuesslessPolicies) {
    SCOPED_TRACE(policy_name(policy));
    EngineOptions options = small_options(2);
    options.tiers.policy = policy;
    const auto engine = host_engine(options);
    const Twin parent = begin(*engine, 301, 1);
    const Twin child = fork(*engine, parent, 301);
    expect_same_bits_together(*engine, *parent.sequence, *child.sequence);
  }
}

// The copy is cut back where a prompt would have to be computed again.
TEST_F(Fork, OfFewerTokensGivesTheBitsOfASequenceCutBackWithASmallBudget) {
  for (const Policy policy : kGuesslessPolicies) {
    SCOPED_TRACE(policy_name(policy));
    EngineOptions options = small_options(2);
    options.tiers.policy = policy;
    const auto engine = host_engine(options);
    Twin cut = begin(*engine, 301, 1);
    const Twin child = fork(*engine, cut, 217);
    truncate(cut, 217);
    expect_same_bits_together(*engine, *cut.sequence, *child.sequence);
  }
}

TEST_F(Fork, OfAForkIsAsAloneWhenThoseItComesFromAreGone) {
  for (const Far far : {Far::kNone, Far::kHost, Far::kFile, Far::kSimulated}) {
    const auto engine = engine_over(far, options_of(3), 1);
    Twin parent = begin(*engine, 130, 1);
    Twin child = fork(*engine, parent, 90);
    expect_as_alone(*engine, std::array{&parent, &child}, 20, 1);
    Twin grandchild = fork(*engine, child, 101);
    parent.sequence.reset();
    expect_as_alone(*engine, std::array{&grandchild, &child}, 20, 2);
    child.sequence.reset();
    Twin other = begin(*engine, 200, 3);  // takes what has become free
    expect_as_alone(*engine, std::array{&other, &grandchild}, 40, 3);
    grandchild.sequence.reset();
    other.sequence.reset();
    expect_all_given_back(*engine);
    if (HasFatalFailure()) return;
  }
}

TEST_F(Fork, ThatIsCutInsideASharedPageLeavesTheOtherAsItWas) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937_64 random(seed);
    EngineOptions options = options_of(2, 16U << seed % 3);
    options.tiers.policy = kGuesslessPolicies[random() % kGuesslessPolicies.size()];
    options.tiers.dense_layers = static_cast<std::uint32_t>(random() % 2);
    const auto engine = engine_over(seed % 4 == 0 ? Far::kFile : Far::kSimulated, options, seed);
    Twin parent = begin(*engine, 200, seed);
    Twin child = fork(*engine, parent, static_cast<std::uint32_t>(100 + random() % 101));
    Twin& cut = seed % 2 == 0 ? parent : child;
    truncate(cut, static_cast<std::uint32_t>(random() % 100));
    prefill(*engine, cut, static_cast<std::uint32_t>(1 + random() % 100), seed + 1);
    expect_as_alone(*engine, std::array{&parent, &child}, 20, seed);
    truncate(parent, static_cast<std::uint32_t>(random() % parent.tokens.size()));
    truncate(child, static_cast<std::uint32_t>(random() % child.tokens.size()));
    expect_as_alone(*engine, std::array{&parent, &child}, 70, seed + 1);
    if (HasFatalFailure()) return;
  }
}

TEST_F(Fork, TakesAPageForItsLastBlockOnlyAndGivesEachBackWithItsLastUser) {
  const auto engine = host_engine(options_of(3));
  const FarTier& far = engine->tiers().far();
  Twin parent = begin(*engine, 5 * 16 + 3, 1);
  ASSERT_EQ(far.pages_in_use(), 6U);
  Twin whole = fork(*engine, parent, 3 * 16);
  EXPECT_EQ(far.pages_in_use(), 6U);
  Twin part = fork(*engine, parent, 5 * 16 + 1);
  EXPECT_EQ(far.pages_in_use(), 7U);
  EXPECT_EQ(far.users(parent.sequence->page(BlockIndex(2))), 3U);
  EXPECT_EQ(far.users(parent.sequence->page(BlockIndex(4))), 2U);
  truncate(part, 2 * 16 + 5);  // block 2 becomes its own
  EXPECT_EQ(far.pages_in_use(), 7U);
  EXPECT_EQ(far.users(parent.sequence->page(BlockIndex(2))), 2U);
  parent.sequence.reset();  // pages 3 to 5 go with it
  EXPECT_EQ(far.pages_in_use(), 4U);
  whole.sequence.reset();
  EXPECT_EQ(far.pages_in_use(), 3U);
  part.sequence.reset();
  expect_all_given_back(*engine);
}

TEST_F(Fork, BeyondTheTokensThereAreIsRefused) {
  const auto engine = host_engine(options_of(2));
  const Twin parent = begin(*engine, 20, 1);
  const auto forked = engine->fork(*parent.sequence, 21);
  ASSERT_FALSE(forked);
  EXPECT_STREQ(error_code_name(forked.error().code), error_code_name(ErrorCode::kInvalidArgument));
  EXPECT_THAT(forked.error().message, testing::AllOf(HasSubstr("20"), HasSubstr("21")));
}

TEST_F(Fork, WithoutAPlaceOrAPageChangesNothing) {
  EngineOptions options = options_of(3);
  options.tiers.far_bytes_max = 12 * model_->hyperparameters().geometry(16).page_bytes();
  const auto engine = host_engine(options);
  const FarTier& far = engine->tiers().far();
  Twin parent = begin(*engine, 5 * 16 + 3, 1);
  std::optional<Twin> other = begin(*engine, 6 * 16, 2);
  ASSERT_EQ(far.pages_in_use(), far.pages_max());
  const std::size_t near_bytes = engine->near().bytes_in_use();
  const auto refused = engine->fork(*parent.sequence, 40);  // its last block would need a page
  ASSERT_FALSE(refused);
  EXPECT_STREQ(error_code_name(refused.error().code), error_code_name(ErrorCode::kOutOfMemory));
  EXPECT_THAT(refused.error().message, HasSubstr("far tier is full"));
  EXPECT_EQ(far.pages_in_use(), far.pages_max());
  EXPECT_EQ(far.users(parent.sequence->page(BlockIndex(0))), 1U);
  EXPECT_EQ(engine->near().bytes_in_use(), near_bytes);

  Twin child = fork(*engine, parent, 48);
  const auto crowded = engine->fork(*parent.sequence, 48);
  ASSERT_FALSE(crowded);
  EXPECT_THAT(crowded.error().message, HasSubstr("every place for a sequence is in use"));
  EXPECT_EQ(far.users(parent.sequence->page(BlockIndex(0))), 2U);
  other.reset();
  expect_as_alone(*engine, std::array{&parent, &child}, 20, 1);
}

TEST_F(Fork, IsNotCutInsideASharedPageWhenTheFarTierIsFullUntilAPageIsFree) {
  EngineOptions options = options_of(3);
  options.tiers.far_bytes_max = 8 * model_->hyperparameters().geometry(16).page_bytes();
  const auto engine = host_engine(options);
  Twin parent = begin(*engine, 5 * 16, 1);
  Twin child = fork(*engine, parent, 5 * 16);
  std::optional<Twin> other = begin(*engine, 3 * 16, 2);
  ASSERT_EQ(engine->tiers().far().pages_in_use(), 8U);
  const std::size_t near_bytes = engine->near().bytes_in_use();
  const Status refused = child.sequence->truncate(40);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("far tier is full"));
  EXPECT_FALSE(child.sequence->error());
  EXPECT_EQ(child.sequence->tokens(), 80U);
  EXPECT_EQ(engine->near().bytes_in_use(), near_bytes);
  EXPECT_EQ(engine->tiers().far().pages_in_use(), 8U);
  other.reset();
  expect_as_alone(*engine, std::array{&parent, &child}, 1, 1);
  truncate(child, 40);
  expect_as_alone(*engine, std::array{&parent, &child}, 3, 2);
}

TEST_F(Fork, IsCutInsideASharedPageOfAFullFarTierIfAPageOfItsOwnGoes) {
  EngineOptions options = options_of(2);
  options.tiers.far_bytes_max = 7 * model_->hyperparameters().geometry(16).page_bytes();
  const auto engine = host_engine(options);
  Twin parent = begin(*engine, 5 * 16, 1);
  Twin child = fork(*engine, parent, 5 * 16);
  prefill(*engine, child, 20, 2);
  ASSERT_EQ(engine->tiers().far().pages_in_use(), 7U);
  truncate(child, 40);
  EXPECT_EQ(engine->tiers().far().pages_in_use(), 6U);
  expect_as_alone(*engine, std::array{&parent, &child}, 8, 1);
}

TEST_F(Fork, ThatCannotReadItsLastBlockLeavesTheParentAsItWas) {
  const auto engine = engine_over(Far::kSimulated, options_of(2), 1);
  Twin parent = begin(*engine, 400, 1);
  const std::uint32_t pages = engine->tiers().far().pages_in_use();
  port_->set_fault_hook([](const Copy& copy) {
    return Fault{.kind = copy.kind == CopyKind::kRead ? FaultKind::kFlippedBit : FaultKind::kNone};
  });
  const auto forked = engine->fork(*parent.sequence, 200);
  ASSERT_FALSE(forked);
  EXPECT_THAT(forked.error().message, HasSubstr("is damaged"));
  port_->set_fault_hook(nullptr);
  EXPECT_FALSE(parent.sequence->error());
  EXPECT_EQ(engine->tiers().far().pages_in_use(), pages);
  Twin child = fork(*engine, parent, 200);
  expect_as_alone(*engine, std::array{&parent, &child}, 20, 1);
}

TEST_F(Fork, OfASequenceThatFailsGoesOn) {
  const auto engine = engine_over(Far::kSimulated, options_of(2), 1);
  Twin parent = begin(*engine, 400, 1);
  Twin child = fork(*engine, parent, 390);
  prefill(*engine, parent, 20, 2);
  parent.sequence->residency().set_error({ErrorCode::kIo, "pulled out"});
  const auto forked = engine->fork(*parent.sequence, 100);
  ASSERT_FALSE(forked);
  EXPECT_EQ(forked.error().message, "pulled out");
  parent.sequence.reset();
  expect_as_alone(*engine, std::array{&child}, 20, 1);
}

}  // namespace
}  // namespace dualdecoder
