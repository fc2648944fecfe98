// A far tier that fails, on small random models (law 3 of docs/design.md): the sequence that a failure hits
// ends with an error that names the far tier, and every other one gives the bits it gives alone.
#include <algorithm>
#include <deque>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>

#include "decode/generation.h"
#include "tiers_testing.h"
#include "transfer/far_file_testing.h"

namespace dualdecoder {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr std::size_t kVictim = 2;
constexpr std::array<std::uint32_t, 4> kPrompts = {40, 150, 200, 97};
constexpr std::uint32_t kSteps = 60;
constexpr std::uint32_t kFaultStep = 20;

/// Sequences that decode together and end where an error comes.
class Company {
 public:
  struct Member {
    Story story;
    std::unique_ptr<Sequence> sequence;
    Rows rows;
    std::optional<Error> error;
  };

  explicit Company(Engine& engine) : engine_(engine) {}

  Member& add(Story story) {
    Member& member = members.emplace_back();
    member.story = std::move(story);
    auto created = engine_.new_sequence();
    DD_CHECK(created, "{}", created.error().message);
    member.sequence = std::move(*created);
    const auto logits = engine_.prefill(*member.sequence, member.story.prompt);
    if (logits) {
      member.rows.push_back(copy_row(*logits));
    } else {
      end(member, logits.error());
    }
    return member;
  }

  /// One step of all that are left. Those with an error are dropped.
  void step() {
    std::vector<StepGroup> groups;
    std::vector<Member*> running;
    for (Member& member : members) {
      if (member.error || member.rows.size() > member.story.steps.size()) continue;
      groups.push_back(step_group(engine_, *member.sequence, member.story, member.rows.size() - 1));
      running.push_back(&member);
    }
    if (groups.empty()) return;
    const auto logits = engine_.step(groups);
    ASSERT_TRUE(logits) << logits.error().message;
    const float* row = *logits;
    for (std::size_t i = 0; i < running.size(); ++i) {
      if (running[i]->sequence->error()) {
        end(*running[i], *running[i]->sequence->error());
      } else {
        running[i]->rows.push_back(copy_row(row));
      }
      row += std::size_t{groups[i].logits_rows()} * kTinyVocabulary;
    }
  }

  std::deque<Member> members;

 private:
  static void end(Member& member, const Error& error) {
    member.error = error;
    member.sequence.reset();
  }

  Engine& engine_;
};

void expect_bits(const Rows& rows, const Rows& reference) {
  ASSERT_LE(rows.size(), reference.size());
  for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_TRUE(same_bits(rows[i], reference[i])) << "row " << i;
}

/// A fault for the first copy that concerns one of the sequence's pages, once armed.
class Trap {
 public:
  Trap(SimulatedPort& port, std::uint64_t page_bytes) : page_bytes_(page_bytes) {
    port.set_fault_hook([this](const Copy& copy) { return choose(copy); });
  }
  void arm(const Sequence& victim, CopyKind copy, const Fault& fault) {
    victim_ = &victim;
    copy_ = copy;
    fault_ = fault;
  }
  void arm(const Sequence& victim, CopyKind copy, FaultKind kind) {
    arm(victim, copy, Fault{.kind = kind, .error = EREMOTEIO});
  }
  bool sprung() const { return victim_ == nullptr; }

 private:
  Fault choose(const Copy& copy) {
    if (victim_ == nullptr || copy.kind != copy_ || !is_of_victim(copy.far_offset / page_bytes_)) return {};
    victim_ = nullptr;
    return fault_;
  }
  bool is_of_victim(std::uint64_t page) const {
    const std::uint32_t blocks = victim_->geometry().blocks_for(victim_->tokens());
    for (BlockIndex block; block.value < blocks; ++block) {
      if (victim_->page(block).value == page) return true;
    }
    return false;
  }

  std::uint64_t page_bytes_;
  const Sequence* victim_ = nullptr;
  CopyKind copy_ = CopyKind::kRead;
  Fault fault_ = {};
};

struct FaultCase {
  std::string name;
  CopyKind copy;
  FaultKind fault;
  ErrorCode code;
};

class OneFault : public TieredEngines, public testing::WithParamInterface<std::tuple<FaultCase, Policy>> {
 protected:
  const FaultCase& fault() const { return std::get<0>(GetParam()); }
  Policy policy() const { return std::get<1>(GetParam()); }
  bool lost() const { return fault().fault == FaultKind::kLost; }

  // Of a write that says nothing, only a later read of that page can tell.
  bool must_show() const {
    if (fault().copy == CopyKind::kRead || fault().code == ErrorCode::kIo) return !lost_write();
    return policy() == Policy::kFull;
  }
  bool lost_write() const { return lost() && fault().copy == CopyKind::kWrite; }
  bool may_hit_others() const {
    return fault().copy == CopyKind::kWrite && fault().fault == FaultKind::kMisplaced;
  }

  void expect_victims_error(const std::optional<Error>& error) const {
    if (!error) {
      EXPECT_FALSE(must_show()) << "no error";
      return;
    }
    EXPECT_STREQ(error_code_name(error->code), error_code_name(fault().code));
    EXPECT_THAT(error->message, AllOf(StartsWith("simulated ("), Not(HasSubstr("\n"))));
  }
  void expect_neighbour(const Company::Member& member, const Rows& reference) const {
    expect_bits(member.rows, reference);
    if (member.error) {
      EXPECT_TRUE(may_hit_others()) << member.error->message;
      EXPECT_EQ(member.error->code, ErrorCode::kCorrupt);
    } else {
      EXPECT_EQ(member.rows.size(), reference.size());
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    All, OneFault,
    testing::Combine(
        testing::Values(
            FaultCase{"FailedRead", CopyKind::kRead, FaultKind::kError, ErrorCode::kIo},
            FaultCase{"LostRead", CopyKind::kRead, FaultKind::kLost, ErrorCode::kIo},
            FaultCase{"BitFlippedWhenRead", CopyKind::kRead, FaultKind::kFlippedBit, ErrorCode::kCorrupt},
            FaultCase{"MisplacedRead", CopyKind::kRead, FaultKind::kMisplaced, ErrorCode::kCorrupt},
            FaultCase{"FailedWrite", CopyKind::kWrite, FaultKind::kError, ErrorCode::kIo},
            FaultCase{"LostWrite", CopyKind::kWrite, FaultKind::kLost, ErrorCode::kIo},
            FaultCase{"TornWriteThatFailed", CopyKind::kWrite, FaultKind::kTornWriteError, ErrorCode::kIo},
            FaultCase{"TornWrite", CopyKind::kWrite, FaultKind::kTornWrite, ErrorCode::kCorrupt},
            FaultCase{"BitFlippedWhenStored", CopyKind::kWrite, FaultKind::kFlippedBit, ErrorCode::kCorrupt},
            FaultCase{"MisplacedWrite", CopyKind::kWrite, FaultKind::kMisplaced, ErrorCode::kCorrupt}),
        testing::Values(Policy::kFull, Policy::kReactive, Policy::kPrevious, Policy::kDual,
                        Policy::kPreviousLayer, Policy::kOracle)),
    [](const auto& fault) {
      std::string name = std::get<0>(fault.param).name + "_" + policy_name(std::get<1>(fault.param));
      std::ranges::replace(name, '-', '_');
      return name;
    });

TEST_P(OneFault, EndsItsSequenceAndLeavesEveryOtherTheBitsItGivesAlone) {
  const auto model = load({.layers = 3});
  EngineOptions options = small_options(kPrompts.size());
  options.tiers.policy = policy();
  if (policy() == Policy::kDual) options.draft.kind = DraftKind::kSelf;
  options.tiers.near_tokens = 96;
  std::vector<Rows> references;
  {
    const auto alone = engine(*model, alone_options(options));
    for (std::size_t i = 0; i < kPrompts.size(); ++i)
      references.push_back(play(*alone, make_story(kPrompts[i], kSteps, i)));
  }
  SimulatedPort* port = nullptr;
  const auto tiered = simulated(*model, options, {.seed = 5}, &port);
  Trap trap(*port, tiered->plan().geometry.page_bytes());
  Company company(*tiered);
  for (std::size_t i = 0; i < kPrompts.size(); ++i) company.add(make_story(kPrompts[i], kSteps, i));
  for (std::uint32_t s = 0; s < kSteps; ++s) {
    if (s == kFaultStep) trap.arm(*company.members[kVictim].sequence, fault().copy, fault().fault);
    company.step();
  }
  EXPECT_TRUE(trap.sprung());
  EXPECT_EQ(port->counters().faults, 1U);
  for (std::size_t i = 0; i < kPrompts.size(); ++i) {
    SCOPED_TRACE(fmt::format("sequence {}", i));
    if (i == kVictim) {
      expect_victims_error(company.members[i].error);
      expect_bits(company.members[i].rows, references[i]);
    } else {
      expect_neighbour(company.members[i], references[i]);
    }
  }
  company.members.clear();
  if (lost()) return;
  EXPECT_EQ(tiered->tiers().far().pages_in_use(), 0U);
  EXPECT_EQ(tiered->near().bytes_in_use(), 0U);
  expect_bits(play(*tiered, make_story(kPrompts[kVictim], kSteps, kVictim)), references[kVictim]);
}

class FarFaults : public TieredEngines {
 protected:
  FarFaults() : model_(load({.layers = 3})) {}
  std::unique_ptr<Model> model_;
};

TEST_F(FarFaults, OfAPromptEndItsSequenceAndLeaveThePlaceForAnother) {
  EngineOptions options = small_options(2);
  const Story story = make_story(300, 10, 1);
  const Rows reference = play(*engine(*model_, alone_options(options)), story);
  SimulatedPort* port = nullptr;
  const auto tiered = simulated(*model_, options, {}, &port);
  for (const CopyKind kind : {CopyKind::kRead, CopyKind::kWrite}) {
    const auto nth = kind == CopyKind::kRead ? port->counters().reads : port->counters().writes;
    port->plan_fault({kind, nth + 7, {.kind = FaultKind::kError}});
    const auto sequence = new_sequence(*tiered);
    const auto failed = tiered->prefill(*sequence, story.prompt);
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code, ErrorCode::kIo);
    ASSERT_TRUE(sequence->error());
    EXPECT_FALSE(tiered->prefill(*sequence, story.steps)) << "it stays ended";
    EXPECT_FALSE(sequence->truncate(0));
    expect_bits(play(*tiered, story), reference);
  }
}

TEST_F(FarFaults, OfReadsThatNeverEndDoNotStopTheEngine) {
  const EngineOptions options = small_options(4);
  const Story story = make_story(200, 20, 1);
  const Rows reference = play(*engine(*model_, alone_options(options)), story);
  SimulatedPort* port = nullptr;
  const auto tiered = simulated(*model_, options, {}, &port);
  Company company(*tiered);
  company.add(story);
  company.add(make_story(200, 20, 2));
  Trap trap(*port, tiered->plan().geometry.page_bytes());
  trap.arm(*company.members[1].sequence, CopyKind::kRead, FaultKind::kLost);
  for (int s = 0; s < 20; ++s) company.step();
  ASSERT_TRUE(company.members[1].error);
  EXPECT_THAT(company.members[1].error->message, HasSubstr("does not end"));
  EXPECT_GE(tiered->tiers().transfers().stats().deadlines_missed, 1U);
  EXPECT_FALSE(company.members[0].error);
  expect_bits(company.members[0].rows, reference);
  expect_bits(play(*tiered, story), reference);
}

class LateRead : public FarFaults, public testing::WithParamInterface<Policy> {
 protected:
  /// An engine in which a read outlives its sequence: given up after 5 s, and again by its drain.
  void make_late() {
    EngineOptions options = small_options(1);
    options.tiers.policy = GetParam();
    options.tiers.near_tokens = 96;
    reference_ = play(*engine(*model_, alone_options(options)), story_);
    tiered_ = simulated(*model_, options, {}, &port_);
    Trap trap(*port_, tiered_->plan().geometry.page_bytes());
    Company company(*tiered_);
    company.add(story_);
    trap.arm(*company.members[0].sequence, CopyKind::kRead, Fault{.delay = std::chrono::seconds(12)});
    for (int s = 0; s < 20 && !company.members[0].error; ++s) company.step();
    ASSERT_TRUE(company.members[0].error);
    EXPECT_THAT(company.members[0].error->message, HasSubstr("does not end"));
    port_->set_fault_hook({});
    EXPECT_GT(tiered_->tiers().far().pages_in_use(), 0U) << "a read may still come";
  }

  Story story_ = make_story(200, 20, 1);
  Rows reference_;
  SimulatedPort* port_ = nullptr;
  std::unique_ptr<Engine> tiered_;
};
INSTANTIATE_TEST_SUITE_P(Policies, LateRead, testing::Values(Policy::kFull, Policy::kReactive),
                         [](const auto& policy) { return policy_name(policy.param); });

TEST_P(LateRead, KeepsThePlaceOfItsSequenceUntilItHasCome) {
  make_late();
  EXPECT_FALSE(tiered_->new_sequence());
  port_->advance(std::chrono::seconds(12));
  expect_bits(play(*tiered_, story_), reference_);
  EXPECT_EQ(tiered_->tiers().far().pages_in_use(), 0U);
  EXPECT_EQ(tiered_->near().bytes_in_use(), 0U);
}

TEST_P(LateRead, MayComeWhileTheEngineEnds) {
  make_late();
  tiered_.reset();
}

// ---- generations

class FaultyGenerations : public FarFaults {
 protected:
  static std::unique_ptr<Generation> start(Generator& generator, std::size_t index) {
    GenerationOptions options;
    options.sampling.ignore_eos = true;
    options.tokens_max = 40;
    auto generation = generator.start(random_tokens(kPrompts[index], index), options);
    DD_CHECK(generation, "{}", generation.error().message);
    return std::move(*generation);
  }

  static void run(Generator& generator, std::span<const std::unique_ptr<Generation>> generations) {
    while (true) {
      std::vector<Generation*> running;
      for (const auto& generation : generations) {
        if (generation->running()) running.push_back(generation.get());
      }
      if (running.empty()) return;
      ASSERT_TRUE(generator.step(running));
    }
  }

  std::vector<TokenId> tokens_alone(const EngineOptions& options, std::size_t index) const {
    const auto alone = engine(*model_, alone_options(options));
    Generator generator(*alone);
    const auto generation = start(generator, index);
    DD_CHECK(generator.prefill(*generation));
    run(generator, std::span(&generation, 1));
    return generation->tokens();
  }
};

TEST_F(FaultyGenerations, EndAsErrorAloneWhenAStepFails) {
  const EngineOptions options = small_options(kPrompts.size());
  SimulatedPort* port = nullptr;
  const auto tiered = simulated(*model_, options, {}, &port);
  Generator generator(*tiered);
  std::vector<std::unique_ptr<Generation>> generations;
  for (std::size_t i = 0; i < kPrompts.size(); ++i) {
    generations.push_back(start(generator, i));
    ASSERT_TRUE(generator.prefill(*generations[i]));
  }
  Trap trap(*port, tiered->plan().geometry.page_bytes());
  trap.arm(generations[kVictim]->sequence(), CopyKind::kRead, FaultKind::kFlippedBit);
  run(generator, generations);
  for (std::size_t i = 0; i < kPrompts.size(); ++i) {
    SCOPED_TRACE(fmt::format("generation {}", i));
    if (i == kVictim) {
      EXPECT_STREQ(finish_reason_name(generations[i]->finish_reason()), "error");
      EXPECT_EQ(generations[i]->error().code, ErrorCode::kCorrupt);
      EXPECT_THAT(generations[i]->error().message, StartsWith("simulated ("));
    } else {
      EXPECT_STREQ(finish_reason_name(generations[i]->finish_reason()), "length");
      EXPECT_EQ(generations[i]->tokens(), tokens_alone(options, i));
    }
  }
}

// Of guesses, too: the read is one that a guess asked for, or one that the token behind it waits for.
TEST_F(FaultyGenerations, WithAcceptedGuessesEndAtTheDeadlineOfAReadThatNeverEnds) {
  for (const std::uint32_t resident : {0U, 3U}) {
    SCOPED_TRACE(fmt::format("{} resident layers", resident));
    EngineOptions options = small_options(kPrompts.size());
    options.tiers.policy = Policy::kDual;
    options.tiers.near_tokens = 96;
    options.tiers.resident_layers = resident;
    options.draft = {.kind = DraftKind::kModel, .accept = true, .model = model_.get()};
    SimulatedPort* port = nullptr;
    const auto tiered = simulated(*model_, options, {.seed = 3}, &port);
    Generator generator(*tiered);
    std::vector<std::unique_ptr<Generation>> generations;
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      generations.push_back(start(generator, i));
      ASSERT_TRUE(generator.prefill(*generations[i]));
    }
    Trap trap(*port, tiered->plan().geometry.page_bytes());
    trap.arm(generations[kVictim]->sequence(), CopyKind::kRead, FaultKind::kLost);
    const auto begun = port->now();
    run(generator, generations);
    ASSERT_TRUE(trap.sprung());
    const auto deadline = options.tiers.transfers.deadline;
    EXPECT_GE(port->now() - begun, deadline);
    EXPECT_LT(port->now() - begun, deadline + deadline / 2) << "waited more than once";
    EXPECT_EQ(generations[kVictim]->finish_reason(), FinishReason::kError);
    EXPECT_THAT(generations[kVictim]->error().message, HasSubstr("a read does not end"));
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      if (i == kVictim) continue;
      SCOPED_TRACE(fmt::format("generation {}", i));
      EXPECT_EQ(generations[i]->finish_reason(), FinishReason::kLength);
      EXPECT_EQ(generations[i]->tokens(), tokens_alone(options, i));
      EXPECT_GT(generations[i]->draft_stats().accepted, 0U);
    }
  }
}

TEST_F(FaultyGenerations, EndAsErrorAloneWhenAWriteFailsBetweenSteps) {
  const EngineOptions options = small_options(2);
  SimulatedPort* port = nullptr;
  const auto tiered = simulated(
      *model_, options,
      {.latency_min = std::chrono::milliseconds(100), .latency_max = std::chrono::milliseconds(200)}, &port);
  Generator generator(*tiered);
  std::vector<std::unique_ptr<Generation>> generations;
  generations.push_back(start(generator, 0));
  ASSERT_TRUE(generator.prefill(*generations[0]));
  Trap trap(*port, tiered->plan().geometry.page_bytes());
  trap.arm(generations[0]->sequence(), CopyKind::kWrite, FaultKind::kError);
  Generation* const first = generations[0].get();
  while (!trap.sprung()) ASSERT_TRUE(generator.step(std::span(&first, 1)));
  ASSERT_FALSE(first->sequence().error()) << "the write is under way";
  generations.push_back(start(generator, 1));
  ASSERT_TRUE(generator.prefill(*generations[1]));
  ASSERT_TRUE(first->sequence().error());
  EXPECT_TRUE(first->running());
  run(generator, generations);
  EXPECT_EQ(first->finish_reason(), FinishReason::kError);
  EXPECT_EQ(first->error().code, ErrorCode::kIo);
  EXPECT_EQ(generations[1]->finish_reason(), FinishReason::kLength);
  EXPECT_EQ(generations[1]->tokens(), tokens_alone(options, 1));
}

TEST_F(FaultyGenerations, EndAsErrorAloneWhenTheirPromptFails) {
  const EngineOptions options = small_options(2);
  SimulatedPort* port = nullptr;
  const auto tiered = simulated(*model_, options, {}, &port);
  Generator generator(*tiered);
  std::vector<std::unique_ptr<Generation>> generations;
  for (const std::size_t i : {1U, 2U}) generations.push_back(start(generator, i));
  ASSERT_TRUE(generator.prefill(*generations[0]));
  port->plan_fault({CopyKind::kRead, port->counters().reads, {.kind = FaultKind::kError}});
  ASSERT_TRUE(generator.prefill(*generations[1])) << "an error of the generation, not of the call";
  EXPECT_EQ(generations[1]->finish_reason(), FinishReason::kError);
  EXPECT_EQ(generations[1]->error().code, ErrorCode::kIo);
  EXPECT_TRUE(generations[1]->tokens().empty());
  run(generator, generations);
  EXPECT_EQ(generations[0]->tokens(), tokens_alone(options, 1));
}

// ---- files

class FarFileFaults : public FarFaults {
 protected:
  EngineOptions file_options(std::uint32_t sequences, const std::string& directory) const {
    EngineOptions options = small_options(sequences);
    options.tiers.far = {.kind = FarKind::kFile, .directory = directory, .make_port = {}};
    return options;
  }
  static std::string file_in(const std::string& directory) {
    return (std::filesystem::path(directory) / "kv.dualdecoder").string();
  }

  TemporaryDirectory far_;
};

TEST_F(FarFileFaults, AFileThatIsCutOffEndsTheSequencesThatReadItAndServesNewOnes) {
  for (const std::uint64_t left : {std::uint64_t{0}, std::uint64_t{4096}, std::uint64_t{100'000}}) {
    SCOPED_TRACE(fmt::format("{} bytes left", left));
    const EngineOptions options = file_options(2, far_.path());
    const Story story = make_story(300, 20, 1);
    const Rows reference = play(*engine(*model_, alone_options(options)), story);
    const auto tiered = engine(*model_, options);
    Company company(*tiered);
    company.add(make_story(20, 20, 2));  // all near: nothing of it is read
    company.add(story);
    for (int s = 0; s < 5; ++s) company.step();
    std::filesystem::resize_file(file_in(far_.path()), left);
    for (int s = 0; s < 5; ++s) company.step();
    EXPECT_FALSE(company.members[0].error);
    ASSERT_TRUE(company.members[1].error);
    EXPECT_EQ(company.members[1].error->code, ErrorCode::kIo);
    EXPECT_THAT(company.members[1].error->message, AllOf(HasSubstr(far_.path()), Not(HasSubstr("\n"))));
    expect_bits(company.members[1].rows, reference);
    expect_bits(play(*tiered, story), reference);
  }
}

TEST_F(FarFileFaults, AFileThatIsRemovedGoesOnToServe) {
  const EngineOptions options = file_options(1, far_.path());
  const Story story = make_story(300, 100, 1);
  const Rows reference = play(*engine(*model_, alone_options(options)), story);
  {
    const auto tiered = engine(*model_, options);
    Company company(*tiered);
    company.add(story);
    for (int s = 0; s < 10; ++s) company.step();
    ASSERT_TRUE(std::filesystem::remove(file_in(far_.path())));
    for (int s = 10; s < 100; ++s) company.step();
    EXPECT_FALSE(company.members[0].error);
    EXPECT_EQ(company.members[0].rows.size(), reference.size());
    expect_bits(company.members[0].rows, reference);
  }
  EXPECT_TRUE(std::filesystem::is_empty(far_.path()));
}

TEST_F(FarFileFaults, ASecondEngineInTheSameDirectoryIsRefusedWhileTheFirstLives) {
  const EngineOptions options = file_options(1, far_.path());
  const Story story = make_story(200, 20, 1);
  const Rows reference = play(*engine(*model_, alone_options(options)), story);
  {
    const auto first = engine(*model_, options);
    const auto second = Engine::create(*model_, options);
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code, ErrorCode::kIo);
    EXPECT_THAT(second.error().message, AllOf(HasSubstr("another dualdecoder"), HasSubstr(far_.path())));
    expect_bits(play(*first, story), reference);
  }
  EXPECT_TRUE(std::filesystem::is_empty(far_.path()));
  expect_bits(play(*engine(*model_, options), story), reference);
}

TEST_F(FarFileFaults, ADirectoryThatIsMissingOrAFileIsRefusedByName) {
  const auto missing = Engine::create(*model_, file_options(1, far_.file("missing")));
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr(far_.file("missing")));
  std::ofstream(far_.file("plain")) << "text";
  const auto plain = Engine::create(*model_, file_options(1, far_.file("plain")));
  ASSERT_FALSE(plain);
  EXPECT_EQ(plain.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(plain.error().message, HasSubstr("is not a directory"));
}

// Smaller than what the contexts need, so that the far file grows page by page. A ballast file takes the
// rest.
class FullFileSystem : public FarFileFaults {
 protected:
  FullFileSystem() : small_("size=600k") {}
  void SetUp() override {
    if (!small_.mounted()) GTEST_SKIP() << "mounting is refused";
  }
  /// Leaves room for that many bytes at most.
  void fill_up(std::uint64_t left) const {
    const std::uint64_t free = std::filesystem::space(small_.path()).available;
    ASSERT_GT(free, left);
    std::ofstream(small_.file("ballast"), std::ios::binary) << std::string(free - left, 'x');
  }
  void free_up() const { std::filesystem::remove(small_.file("ballast")); }

  MountedFileSystem small_;
};

TEST_F(FullFileSystem, RefusesAPromptThatDoesNotFitUntilThereIsRoomAndTheOthersGoOn) {
  const EngineOptions options = file_options(2, small_.path());
  const Story story = make_story(400, 20, 1);
  const auto alone = engine(*model_, alone_options(options));
  const Rows reference = play(*alone, story);
  const Story other = make_story(30, 12, 2);
  const Rows other_reference = play(*alone, other);
  const auto tiered = engine(*model_, options);
  Company company(*tiered);
  company.add(other);
  fill_up(100'000);
  {
    const auto sequence = new_sequence(*tiered);
    const auto refused = tiered->prefill(*sequence, story.prompt);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kIo);
    EXPECT_THAT(refused.error().message, AllOf(HasSubstr("cannot grow"), HasSubstr(small_.path())));
    EXPECT_FALSE(sequence->error()) << "nothing has changed";
    EXPECT_EQ(sequence->tokens(), 0U);
    for (int s = 0; s < 12; ++s) company.step();
    free_up();
    const auto logits = tiered->prefill(*sequence, story.prompt);
    ASSERT_TRUE(logits) << logits.error().message;
    EXPECT_TRUE(same_bits(copy_row(*logits), reference[0]));
  }
  EXPECT_EQ(company.members[0].rows.size(), other_reference.size());
  expect_bits(company.members[0].rows, other_reference);
  expect_bits(play(*tiered, story), reference);
}

TEST_F(FullFileSystem, EndsTheSequenceThatNeedsAPageAndTheOthersGoOn) {
  const EngineOptions options = file_options(2, small_.path());
  const Story full_block = make_story(32, 20, 1);  // the next token begins a block
  const Story with_room = make_story(40, 8, 2);
  const auto alone = engine(*model_, alone_options(options));
  const Rows with_room_reference = play(*alone, with_room);
  const Rows full_block_reference = play(*alone, full_block);
  const auto tiered = engine(*model_, options);
  Company company(*tiered);
  company.add(full_block);
  company.add(with_room);
  fill_up(4096);
  for (int s = 0; s < 8; ++s) company.step();
  ASSERT_TRUE(company.members[0].error);
  EXPECT_EQ(company.members[0].error->code, ErrorCode::kIo);
  EXPECT_THAT(company.members[0].error->message, HasSubstr("cannot grow"));
  EXPECT_FALSE(company.members[1].error);
  expect_bits(company.members[1].rows, with_room_reference);
  company.members.clear();
  free_up();
  expect_bits(play(*tiered, full_block), full_block_reference);
}

}  // namespace
}  // namespace dualdecoder
