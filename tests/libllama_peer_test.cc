// libllama as the benchmark's peer: that it is driven right. What its logits are worth to us is
// libllama_agreement_test.
#include "peer/libllama.h"

#include <cmath>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/log_capture.h"
#include "temporary_directory.h"
#include "tiny_model.h"

namespace dualdecoder {
namespace {

using testing::HasSubstr;

// Root mean square, between logits of kernels for one row and for many; see libllama_agreement_test.
constexpr double kTolerance = 0.05;

class LibllamaPeer : public testing::Test {
 protected:
  std::unique_ptr<Libllama> load(const TinyModelOptions& model, const LibllamaOptions& options) const {
    quiet_library_logs();
    const std::string path = directory_.file("tiny.gguf");
    EXPECT_TRUE(write_tiny_model(path, model));
    auto peer = Libllama::load(path, options);
    if (!peer) ADD_FAILURE() << peer.error().message;
    return peer ? std::move(*peer) : nullptr;
  }

  static std::vector<std::int32_t> random_tokens(std::size_t count, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::uniform_int_distribution<std::int32_t> token(0, static_cast<std::int32_t>(kTinyVocabulary) - 1);
    std::vector<std::int32_t> tokens(count);
    for (std::int32_t& t : tokens) t = token(random);
    return tokens;
  }

  static std::vector<float> copy(const Result<const float*>& logits, std::size_t rows = 1) {
    if (!logits || *logits == nullptr) {
      ADD_FAILURE() << (logits ? "no logits" : logits.error().message);
      return std::vector<float>(rows * kTinyVocabulary, NAN);
    }
    return {*logits, *logits + rows * kTinyVocabulary};
  }

  static double difference(std::span<const float> a, std::span<const float> b) {
    double squares = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) squares += std::pow(static_cast<double>(a[i]) - b[i], 2);
    return std::sqrt(squares / static_cast<double>(a.size()));
  }

  TemporaryDirectory directory_;
};

TEST_F(LibllamaPeer, PrefillsInBatchesAndReportsEach) {
  const auto peer = load({}, {.context = 256, .sequences = 2, .batch = 64, .outputs = 64});
  const auto tokens = random_tokens(150, 1);
  std::vector<std::uint32_t> seen;
  const auto logits = copy(peer->prefill(0, tokens, [&](std::uint32_t done) {
    seen.push_back(done);
    return true;
  }));
  EXPECT_THAT(seen, testing::ElementsAre(64, 128, 150));
  EXPECT_EQ(peer->tokens(0), 150U);
  EXPECT_EQ(peer->tokens(1), 0U);

  const auto stopped = peer->prefill(1, tokens, [](std::uint32_t) { return false; });
  ASSERT_TRUE(stopped);
  EXPECT_EQ(*stopped, nullptr);
  EXPECT_EQ(peer->tokens(1), 64U);
  EXPECT_LT(difference(logits, copy(peer->prefill(1, std::span(tokens).subspan(64)))), kTolerance);
}

TEST_F(LibllamaPeer, DecodesSequencesApartAndInOrder) {
  const auto together = load({}, {.context = 256, .sequences = 2, .batch = 64});
  const auto first = random_tokens(40, 1), second = random_tokens(17, 2);
  ASSERT_TRUE(together->prefill(0, first));
  ASSERT_TRUE(together->prefill(1, second));
  const std::vector<std::int32_t> next = {11, 12};
  const auto logits = copy(together->decode(next), 2);
  EXPECT_EQ(together->tokens(0), 41U);
  EXPECT_EQ(together->tokens(1), 18U);

  const auto alone = load({}, {.context = 256, .batch = 64});
  ASSERT_TRUE(alone->prefill(0, second));
  const auto expected = copy(alone->decode(std::span(next).subspan(1)));
  EXPECT_LT(difference(expected, std::span(logits).last(kTinyVocabulary)), kTolerance);
  EXPECT_GT(difference(expected, std::span(logits).first(kTinyVocabulary)), 1.0);
}

TEST_F(LibllamaPeer, ForgetsWhatWasTruncated) {
  const auto peer = load({}, {.context = 256, .batch = 64});
  ASSERT_TRUE(peer->prefill(0, random_tokens(50, 1)));
  const std::int32_t next = 7;
  const auto before = copy(peer->decode(std::span(&next, 1)));
  ASSERT_TRUE(peer->prefill(0, random_tokens(30, 2)));
  ASSERT_TRUE(peer->truncate(0, 50));
  EXPECT_EQ(peer->tokens(0), 50U);
  EXPECT_LT(difference(before, copy(peer->decode(std::span(&next, 1)))), kTolerance);
}

TEST_F(LibllamaPeer, CopiesASequenceIntoCellsOfItsOwn) {
  const auto peer = load({}, {.context = 256, .sequences = 2, .batch = 64});
  ASSERT_TRUE(peer->prefill(0, random_tokens(50, 1)));
  ASSERT_TRUE(peer->prefill(1, random_tokens(9, 2)));
  peer->copy(0, 1);
  EXPECT_EQ(peer->tokens(1), 50U);
  const std::vector<std::int32_t> next = {7, 7};
  const auto logits = copy(peer->decode(next), 2);
  EXPECT_LT(difference(std::span(logits).first(kTinyVocabulary), std::span(logits).last(kTinyVocabulary)),
            kTolerance);
  ASSERT_TRUE(peer->truncate(0, 0));
  EXPECT_EQ(peer->tokens(1), 51U);
}

TEST_F(LibllamaPeer, RefusesToGoBackBeyondWhatASlidingWindowKept) {
  const auto peer = load({.architecture = "gemma3"}, {.context = 1024, .batch = 64});
  ASSERT_TRUE(peer->prefill(0, random_tokens(900, 1)));
  const Status far = peer->truncate(0, 200);
  ASSERT_FALSE(far);
  EXPECT_EQ(far.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(far.error().message,
              HasSubstr("cannot go back to 200 tokens: its sliding window needs those from 137"));
  EXPECT_EQ(peer->tokens(0), 900U);
  EXPECT_TRUE(peer->truncate(0, 880));
  EXPECT_TRUE(peer->truncate(0, 0));
}

TEST_F(LibllamaPeer, SaysThatItsContextIsFull) {
  const auto peer = load({}, {.context = 256, .batch = 256});
  ASSERT_EQ(peer->context(), 256U);
  ASSERT_TRUE(peer->prefill(0, random_tokens(256, 1)));
  const std::int32_t next = 7;
  const auto full = peer->decode(std::span(&next, 1));
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code, ErrorCode::kContextExceeded);
  EXPECT_EQ(peer->tokens(0), 256U);
}

TEST_F(LibllamaPeer, NamesAFileItCannotLoad) {
  quiet_library_logs();
  testing::internal::CaptureStderr();
  const auto peer = Libllama::load(directory_.file("missing.gguf"), {});
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("missing.gguf"));
  ASSERT_FALSE(peer);
  EXPECT_THAT(peer.error().message, HasSubstr("missing.gguf"));
}

}  // namespace
}  // namespace dualdecoder
