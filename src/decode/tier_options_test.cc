#include "decode/tier_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "decode/draft_options.h"

namespace dualdecoder {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(ParsePolicy, KnowsEveryNameThatPolicyNameGivesAndListsThemForAnother) {
  const auto unknown = parse_policy("quantum");
  ASSERT_FALSE(unknown);
  for (const Policy policy : {Policy::kFull, Policy::kReactive, Policy::kLastSet, Policy::kPrevious,
                              Policy::kAuto, Policy::kDual, Policy::kPreviousLayer, Policy::kOracle}) {
    const auto parsed = parse_policy(policy_name(policy));
    ASSERT_TRUE(parsed) << policy_name(policy);
    EXPECT_EQ(*parsed, policy);
    EXPECT_THAT(unknown.error().message, HasSubstr(policy_name(policy)));
  }
}

TEST(ParseCorrection, ReadsTheThresholdAndRefusesWhatIsNotACosine) {
  EXPECT_EQ(parse_correction("none")->kind, Correction::Kind::kNone);
  EXPECT_EQ(parse_correction("miss")->kind, Correction::Kind::kMiss);
  const auto cosine = parse_correction("cosine:0.75");
  ASSERT_TRUE(cosine);
  EXPECT_EQ(cosine->kind, Correction::Kind::kCosine);
  EXPECT_EQ(cosine->cosine, 0.75f);
  for (const char* text : {"", "misses", "cosine", "cosine:", "cosine:x", "cosine:0.5x", "cosine:1.5",
                           "cosine:-2", "cosine:nan", "cosine:inf"}) {
    const auto refused = parse_correction(text);
    ASSERT_FALSE(refused) << text;
    EXPECT_THAT(refused.error().message, AllOf(HasSubstr("--correct"), HasSubstr("cosine:T")));
  }
}

TEST(ParseFar, ReadsTheLinkAndRefusesWhatHasNoBandwidth) {
  const auto link = parse_far("link:2GiB@50");
  ASSERT_TRUE(link) << link.error().message;
  EXPECT_EQ(link->kind, FarKind::kHost);
  EXPECT_EQ(link->link->bytes_per_s, 2.0 * (1U << 30));
  EXPECT_EQ(link->link->latency, std::chrono::microseconds(50));
  EXPECT_FALSE(parse_far("host")->link);
  EXPECT_EQ(parse_far("file:/data")->directory, "/data");
  for (const char* text : {"", "file:", "link:", "link:@", "link:0@5", "link:1GiB", "link:1GiB@-3",
                           "link:x@5", "link:1GiB@2000000", "disk"}) {
    const auto refused = parse_far(text);
    ASSERT_FALSE(refused) << text;
    EXPECT_THAT(refused.error().message, AllOf(HasSubstr("file:DIRECTORY"), HasSubstr("link:2GiB@50")));
  }
}

TEST(ParseDraft, ListsTheNamesForAnother) {
  EXPECT_EQ(parse_draft("ngram")->kind, DraftKind::kNgram);
  EXPECT_EQ(parse_draft("model:a:b.gguf")->kind, DraftKind::kModel);
  EXPECT_EQ(parse_draft("model:a:b.gguf")->model_path, "a:b.gguf");
  for (const char* text : {"", "model", "model:", "Self"}) {
    const auto refused = parse_draft(text);
    ASSERT_FALSE(refused) << text;
    EXPECT_THAT(refused.error().message, HasSubstr("self, ngram, keep, model:FILE"));
  }
}

}  // namespace
}  // namespace dualdecoder
