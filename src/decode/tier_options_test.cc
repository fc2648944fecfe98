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
                              Policy::kDual, Policy::kPreviousLayer, Policy::kOracle}) {
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

TEST(ParseDraft, ListsTheNamesForAnother) {
  EXPECT_EQ(*parse_draft("ngram"), DraftKind::kNgram);
  const auto refused = parse_draft("model");
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, AllOf(HasSubstr("self"), HasSubstr("ngram"), HasSubstr("keep")));
}

}  // namespace
}  // namespace dualdecoder
