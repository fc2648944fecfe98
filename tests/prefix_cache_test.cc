// Kept prefixes, on small random models: a prompt that finds its beginning in the far tier gives the bits of
// one that was computed, never meets another prefix's pages, and what cannot be read is computed again.
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>

#include "decode/generation.h"
#include "tiers_testing.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kBlock = 16;

struct Answer {
  std::vector<TokenId> tokens;
  Rows rows;
  std::uint32_t cached = 0;
  FinishReason reason = FinishReason::kRunning;
};

std::vector<TokenId> joined(std::vector<TokenId> a, const std::vector<TokenId>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class PrefixCacheTest : public TieredEngines, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    const std::string architecture = GetParam();
    model_ = load({.architecture = architecture, .layers = architecture == "gemma3" ? 4U : 2U});
  }

  static EngineOptions keeping(std::uint32_t pages = 400) {
    EngineOptions options = small_options(2, kBlock);
    options.tiers.far.kind = FarKind::kHost;
    options.tiers.keep_prefixes = true;
    pages_ = pages;
    return options;
  }
  std::unique_ptr<Engine> keeping_engine(EngineOptions options) {
    // Pages of the tiny models are a few KiB: so many of them, whatever the size.
    KvGeometry geometry = plan_memory(model_->hyperparameters(), options)->geometry;
    options.tiers.far_bytes_max = pages_ * geometry.page_bytes();
    return engine(*model_, options);
  }

  static GenerationOptions greedy(std::uint32_t tokens_max) {
    GenerationOptions options;
    options.sampling.temperature = 0.0f;
    options.sampling.ignore_eos = true;
    options.tokens_max = tokens_max;
    return options;
  }

  static Answer ask(Engine& engine, const std::vector<TokenId>& prompt, GenerationOptions options) {
    Generator generator(engine);
    Answer answer;
    options.on_token = [&](TokenId, std::span<const float> row) {
      answer.rows.emplace_back(row.begin(), row.end());
    };
    const auto started = generator.start(prompt, std::move(options));
    DD_CHECK(started, "{}", started.error().message);
    Generation& generation = **started;
    answer.cached = generation.cached_tokens();
    Generation* const one = &generation;
    while (generation.running()) {
      const PromptPiece piece{.generation = one, .tokens = std::min(kTierChunk, generation.prompt_left())};
      const bool has_prompt = generation.prompt_left() > 0;
      const Status status =
          has_prompt ? generator.begin_prompts(std::span(&piece, 1)) : generator.step(std::span(&one, 1));
      while (status && has_prompt && !generator.advance_prompts(1)) continue;
      DD_CHECK(status, "{}", status.error().message);
    }
    generator.keep_prefix(generation);
    answer.tokens = generation.tokens();
    answer.reason = generation.finish_reason();
    return answer;
  }
  Answer cold(const std::vector<TokenId>& prompt, GenerationOptions options) {
    EngineOptions engine_options = keeping();
    engine_options.tiers.keep_prefixes = false;
    return ask(*engine(*model_, engine_options), prompt, std::move(options));
  }

  static void expect_same(const Answer& a, const Answer& b) {
    EXPECT_EQ(a.tokens, b.tokens);
    ASSERT_EQ(a.rows.size(), b.rows.size());
    for (std::size_t i = 0; i < a.rows.size(); ++i)
      ASSERT_TRUE(same_bits(a.rows[i], b.rows[i])) << "row " << i;
  }

  std::unique_ptr<Model> model_;
  static std::uint32_t pages_;
};

std::uint32_t PrefixCacheTest::pages_ = 0;

INSTANTIATE_TEST_SUITE_P(Models, PrefixCacheTest, testing::Values("llama", "gemma3"),
                         [](const auto& model) { return model.param; });

TEST_P(PrefixCacheTest, GivesTheBitsOfAColdPromptAndFindsWholeBlocksButNeverTheLastToken) {
  const auto shared = random_tokens(40, 1);
  for (const std::uint32_t length : {15U, 16U, 17U, 31U, 32U, 33U}) {
    const auto warm = keeping_engine(keeping());
    const std::vector<TokenId> prefix(shared.begin(), shared.begin() + length);
    const auto x = joined(prefix, random_tokens(200, 2));
    const auto y = joined(prefix, random_tokens(150, 3));
    for (const auto& prompt : {x, y}) expect_same(ask(*warm, prompt, greedy(20)), cold(prompt, greedy(20)));
    const Answer again = ask(*warm, x, greedy(20));
    EXPECT_EQ(again.cached, (x.size() - 1) / kBlock * kBlock);
    expect_same(again, cold(x, greedy(20)));
    const auto other = joined(prefix, random_tokens(100, 4));
    EXPECT_EQ(ask(*warm, other, greedy(3)).cached, length / kBlock * kBlock);
    const std::vector<TokenId> strict(x.begin(), x.begin() + 96);
    const Answer of_strict = ask(*warm, strict, greedy(5));
    EXPECT_EQ(of_strict.cached, 80U);
    expect_same(of_strict, cold(strict, greedy(5)));
  }
}

TEST_P(PrefixCacheTest, TellsPrefixesApartThoughAllHashesAreEqual) {
  const auto warm = keeping_engine(keeping());
  warm->prefixes()->set_hash([](PrefixNodeId, std::span<const TokenId>) { return std::uint64_t{7}; });
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    const auto prompt = random_tokens(100, seed);
    const Answer answer = ask(*warm, prompt, greedy(4));
    EXPECT_EQ(answer.cached, 0U);
    expect_same(answer, cold(prompt, greedy(4)));
    EXPECT_EQ(ask(*warm, prompt, greedy(4)).cached, 96U);
  }
}

TEST_P(PrefixCacheTest, KnowsNoPrefixOfAnotherSalt) {
  const auto warm = keeping_engine(keeping());
  const auto prompt = random_tokens(100, 1);
  const auto salted = [](const char* salt) {
    GenerationOptions options = greedy(4);
    options.prefix_salt = salt;
    return options;
  };
  EXPECT_EQ(ask(*warm, prompt, salted("a")).cached, 0U);
  EXPECT_EQ(ask(*warm, prompt, salted("b")).cached, 0U);
  EXPECT_EQ(ask(*warm, prompt, greedy(4)).cached, 0U);
  EXPECT_EQ(ask(*warm, prompt, salted("b")).cached, 96U);
  GenerationOptions none = greedy(4);
  none.reuse_prefix = false;
  EXPECT_EQ(ask(*warm, prompt, none).cached, 0U);
}

TEST_P(PrefixCacheTest, GoesOnWhereAConversationStoodAndTellsExactBlocksFromOthers) {
  const auto warm = keeping_engine(keeping());
  std::vector<TokenId> chat = random_tokens(200, 1);
  for (std::uint64_t turn = 2; turn < 6; ++turn) {
    const Answer answer = ask(*warm, chat, greedy(40));
    chat = joined(joined(chat, answer.tokens), random_tokens(10, turn));
    const Answer next = ask(*warm, chat, greedy(1));
    // All but the new text, the newest token of the answer, and a block that was not full.
    EXPECT_GE(next.cached + 10 + 1 + kBlock, chat.size());
    GenerationOptions exact = greedy(1);
    exact.exact_prefix_only = true;
    exact.reuse_prefix = true;
    EXPECT_LE(ask(*warm, chat, exact).cached, next.cached);
  }
}

TEST_P(PrefixCacheTest, MakesInexactBlocksExactWhenTheyAreComputedAgain) {
  const auto warm = keeping_engine(keeping());
  const auto prompt = random_tokens(200, 1);
  const auto longer = joined(joined(prompt, ask(*warm, prompt, greedy(60)).tokens), random_tokens(5, 2));
  GenerationOptions exact = greedy(10);
  exact.exact_prefix_only = true;
  const Answer first = ask(*warm, longer, exact);
  EXPECT_EQ(first.cached, 192U);
  expect_same(first, cold(longer, greedy(10)));
  const Answer second = ask(*warm, longer, exact);
  EXPECT_EQ(second.cached, (longer.size() - 1) / kBlock * kBlock);
  expect_same(second, cold(longer, greedy(10)));
}

TEST_P(PrefixCacheTest, MakesRoomFromTheEndOfWhatWasUsedLongestAgoAndNeverFails) {
  const auto warm = keeping_engine(keeping(40));  // 640 tokens
  const auto a = random_tokens(200, 1);
  const auto b = random_tokens(200, 2);
  const auto c = random_tokens(300, 3);
  ask(*warm, a, greedy(4));
  ask(*warm, b, greedy(4));
  EXPECT_EQ(ask(*warm, a, greedy(4)).cached, 192U);
  expect_same(ask(*warm, c, greedy(4)), cold(c, greedy(4)));
  EXPECT_LE(warm->tiers().far().pages_in_use(), 40U);
  EXPECT_GT(warm->prefixes()->stats().evicted, 0U);
  // b was used longest ago, and has lost its end.
  const std::uint32_t of_a = ask(*warm, a, greedy(1)).cached;
  EXPECT_EQ(of_a, 192U);
  EXPECT_LT(ask(*warm, b, greedy(1)).cached, 192U);
  for (std::uint64_t seed = 10; seed < 30; ++seed) {
    const auto prompt = random_tokens(500, seed);
    ASSERT_EQ(ask(*warm, prompt, greedy(4)).reason, FinishReason::kLength);
  }
}

TEST_P(PrefixCacheTest, ComputesAgainWhatCannotBeReadAnyMore) {
  EngineOptions options = keeping();
  options.tiers.far_bytes_max = 0;
  options.tiers.keep_prefixes = true;
  SimulatedPort* port = nullptr;
  const auto warm = simulated(*model_, options, {.seed = 1}, &port);
  const auto prompt = random_tokens(400, 1);
  const Answer reference = cold(prompt, greedy(30));
  expect_same(ask(*warm, prompt, greedy(30)), reference);
  for (std::uint64_t round = 0; round < 6; ++round) {
    port->plan_fault({.copy = CopyKind::kRead,
                      .nth = port->counters().reads + round * 7,
                      .fault = {.kind = round % 2 == 0 ? FaultKind::kError : FaultKind::kFlippedBit}});
    const Answer answer = ask(*warm, prompt, greedy(30));
    EXPECT_EQ(answer.reason, FinishReason::kLength);
    EXPECT_EQ(answer.tokens, reference.tokens) << round;
  }
  EXPECT_GT(warm->prefixes()->stats().lost, 0U);
}

class KeptFile : public PrefixCacheTest {
 protected:
  EngineOptions in_file() const {
    EngineOptions options = keeping();
    options.tiers.far = {.kind = FarKind::kFile, .directory = directory_.file(""), .make_port = {}};
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Models, KeptFile, testing::Values("llama", "gemma3"),
                         [](const auto& model) { return model.param; });

TEST_P(KeptFile, IsThereForTheNextEngineWithAllItsPrefixesAndSalts) {
  const auto prompt = random_tokens(300, 1);
  const Answer reference = cold(prompt, greedy(30));
  GenerationOptions salted = greedy(30);
  salted.prefix_salt = "s";
  {
    const auto first = keeping_engine(in_file());
    expect_same(ask(*first, prompt, greedy(30)), reference);
  }
  for (int start = 0; start < 3; ++start) {
    const auto next = keeping_engine(in_file());
    EXPECT_GE(next->prefixes()->stats().found_at_start, 300U / kBlock);
    const Answer answer = ask(*next, prompt, greedy(30));
    EXPECT_EQ(answer.cached, 288U);
    expect_same(answer, reference);
    EXPECT_EQ(ask(*next, prompt, salted).cached, start == 0 ? 0U : 288U);
    EXPECT_EQ(next->prefixes()->stats().store_errors, 0U);
    EXPECT_LE(next->tiers().far().pages_in_use(), pages_);
  }
}

TEST_P(KeptFile, BeginsAnewForOtherBlocksOrDigestsAndWithADamagedIndex) {
  const auto prompt = random_tokens(300, 1);
  const auto cached_after = [&](const EngineOptions& options, const auto& damage) {
    ask(*keeping_engine(in_file()), prompt, greedy(3));
    damage();
    const auto next = keeping_engine(options);
    const Answer answer = ask(*next, prompt, greedy(3));
    EXPECT_EQ(answer.reason, FinishReason::kLength);
    return answer.cached;
  };
  const auto nothing = [] {};
  EXPECT_EQ(cached_after(in_file(), nothing), 288U);
  EngineOptions blocks = in_file();
  blocks.block_tokens = 32;
  EXPECT_EQ(cached_after(blocks, nothing), 0U);
  EngineOptions digests = in_file();
  digests.tiers.digests.type = DigestType::kInt8;
  EXPECT_EQ(cached_after(digests, nothing), 0U);
  const auto overwrite = [&](const char* name, std::streamoff at) {
    std::fstream file(directory_.file(name), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(at);
    const std::string noise(200, 'x');
    file.write(noise.data(), static_cast<std::streamsize>(noise.size()));
  };
  EXPECT_EQ(cached_after(in_file(), [&] { overwrite("prefixes.sqlite", 0); }), 0U);
  EXPECT_EQ(cached_after(in_file(), [&] { std::filesystem::remove(directory_.file("prefixes.sqlite")); }),
            0U);
  EXPECT_EQ(
      cached_after(in_file(), [&] { std::filesystem::remove(directory_.file("prefixes.dualdecoder")); }), 0U);
  // Found, and then it cannot be read: computed again.
  const Answer reference = cold(prompt, greedy(3));
  ask(*keeping_engine(in_file()), prompt, greedy(3));
  for (std::streamoff at = 5000; at < 400'000; at += 4096) overwrite("prefixes.dualdecoder", at);
  const auto next = keeping_engine(in_file());
  const Answer answer = ask(*next, prompt, greedy(3));
  EXPECT_EQ(answer.tokens, reference.tokens);
  EXPECT_GT(next->prefixes()->stats().lost, 0U);
}

TEST_P(KeptFile, ShrinksToASmallerLimitAndKeepsWhatLiesWithinIt) {
  const auto prompt = random_tokens(300, 1);
  ask(*keeping_engine(in_file()), prompt, greedy(3));
  EngineOptions options = in_file();
  pages_ = 45;
  const auto next = keeping_engine(options);
  const auto bytes = std::filesystem::file_size(directory_.file("prefixes.dualdecoder"));
  EXPECT_LE(bytes, kFarHeaderBytes + pages_ * next->plan().geometry.page_bytes());
  EXPECT_EQ(ask(*next, prompt, greedy(3)).cached, 288U);
}

}  // namespace
}  // namespace dualdecoder
