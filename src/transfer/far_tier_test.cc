#include "transfer/far_tier.h"

#include <algorithm>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transfer/simulated_port.h"

namespace dualdecoder {
namespace {

using testing::HasSubstr;

constexpr KvGeometry kGeometry{.layers = 3, .kv_heads = 1, .head_dim = 16, .block_tokens = 16};

FarTier far_tier(std::uint32_t pages_max, std::function<Status(std::uint32_t)> reserve = {},
                 std::uint64_t first_page_offset = 0) {
  return {std::make_unique<SimulatedPort>(SimulatedPortOptions{.bytes = pages_max * kGeometry.page_bytes()}),
          {.geometry = kGeometry,
           .pages_max = pages_max,
           .first_page_offset = first_page_offset,
           .verify = true,
           .reserve = std::move(reserve)}};
}

TEST(FarTier, GivesEveryPageOnceAndThenSaysThatItIsFullAndHowToGoOn) {
  FarTier far = far_tier(3);
  std::vector<std::uint32_t> pages;
  for (int i = 0; i < 3; ++i) pages.push_back(far.take_page()->value);
  EXPECT_THAT(pages, testing::UnorderedElementsAre(0, 1, 2));
  EXPECT_EQ(far.bytes_in_use(), far.bytes_max());
  const auto full = far.take_page();
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code, ErrorCode::kOutOfMemory);
  EXPECT_THAT(full.error().message, testing::AllOf(HasSubstr("36.0 KiB"), HasSubstr("--far-size")));
  EXPECT_EQ(far.pages_in_use(), 3U);
  far.release(PageIndex(1));
  const auto again = far.take_page();
  ASSERT_TRUE(again);
  EXPECT_EQ(*again, PageIndex(1));
  EXPECT_EQ(far.users(*again), 1U);
}

TEST(FarTier, FreesAPageOnlyWithTheReleaseOfItsLastUser) {
  FarTier far = far_tier(1);
  const PageIndex page = *far.take_page();
  far.retain(page);
  far.retain(page);
  EXPECT_EQ(far.users(page), 3U);
  far.release(page);
  far.release(page);
  EXPECT_EQ(far.pages_in_use(), 1U);
  EXPECT_FALSE(far.take_page());
  far.release(page);
  EXPECT_EQ(far.pages_in_use(), 0U);
  EXPECT_EQ(*far.take_page(), page);
}

TEST(FarTier, TakesAPageThatWasUsedBeforeItMakesRoomForANewOne) {
  std::uint32_t reserved = 0;
  FarTier far = far_tier(8, [&reserved](std::uint32_t pages) -> Status {
    reserved = pages;
    return {};
  });
  const PageIndex first = *far.take_page();
  ASSERT_TRUE(far.take_page());
  EXPECT_EQ(reserved, 2U);
  far.release(first);
  EXPECT_EQ(*far.take_page(), first);
  EXPECT_EQ(reserved, 2U);
  ASSERT_TRUE(far.take_page());
  EXPECT_EQ(reserved, 3U);
}

TEST(FarTier, PassesOnThatThereIsNoRoomAndTakesAPageOnceThereIs) {
  bool room = false;
  FarTier far = far_tier(2, [&room](std::uint32_t) -> Status {
    if (!room) return fail(ErrorCode::kIo, "disk full");
    return {};
  });
  for (int i = 0; i < 3; ++i) {
    const auto refused = far.take_page();
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kIo);
    EXPECT_EQ(refused.error().message, "disk full");
    EXPECT_EQ(far.pages_in_use(), 0U);
  }
  room = true;
  EXPECT_EQ(*far.take_page(), PageIndex(0));
  EXPECT_EQ(*far.take_page(), PageIndex(1));
}

TEST(FarTier, LaysLayersSideBySideAndPagesBehindTheHeader) {
  const FarTier far = far_tier(4, {}, 4096);
  EXPECT_EQ(far.offset(PageIndex(0), LayerIndex(0)), 4096U);
  EXPECT_EQ(far.offset(PageIndex(0), LayerIndex(2)), 4096U + 2 * kGeometry.slot_bytes());
  EXPECT_EQ(far.offset(PageIndex(3), LayerIndex(1)),
            4096U + 3 * kGeometry.page_bytes() + kGeometry.slot_bytes());
}

TEST(FarTier, KeepsOneChecksumForEachPageAndLayer) {
  FarTier far = far_tier(3);
  for (std::uint32_t p = 0; p < 3; ++p) {
    const PageIndex page = *far.take_page();
    for (LayerIndex layer; layer.value < 3; ++layer)
      far.checksum(page, layer) = page.value * 10 + layer.value;
  }
  for (PageIndex page; page.value < 3; ++page) {
    for (LayerIndex layer; layer.value < 3; ++layer)
      EXPECT_EQ(far.checksum(page, layer), page.value * 10 + layer.value);
  }
}

TEST(FarTier, CountsUsersLikeAMapInARandomWalk) {
  constexpr std::uint32_t kPages = 6;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937_64 random(seed);
    FarTier far = far_tier(kPages);
    std::map<std::uint32_t, std::uint32_t> users;
    for (int i = 0; i < 2000; ++i) {
      if (users.empty() || random() % 3 == 0) {
        const auto page = far.take_page();
        ASSERT_EQ(page.has_value(), users.size() < kPages);
        if (!page) continue;
        ASSERT_TRUE(users.emplace(page->value, 1).second) << "page " << page->value << " given twice";
      } else {
        const auto user = std::next(users.begin(), static_cast<std::ptrdiff_t>(random() % users.size()));
        if (random() % 3 == 0) {
          far.retain(PageIndex(user->first));
          ++user->second;
        } else {
          far.release(PageIndex(user->first));
          if (--user->second == 0) users.erase(user);
        }
      }
      ASSERT_EQ(far.pages_in_use(), users.size());
      for (const auto& [page, count] : users) ASSERT_EQ(far.users(PageIndex(page)), count);
    }
  }
}

TEST(FarTierDeathTest, ReleasingOrRetainingAFreePageIsOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  FarTier far = far_tier(2);
  EXPECT_DEATH(far.release(PageIndex(0)), "check failed.*page 0");
  const PageIndex page = *far.take_page();
  far.release(page);
  EXPECT_DEATH(far.release(page), "check failed.*page 0");
  EXPECT_DEATH(far.retain(page), "check failed.*page 0");
}

}  // namespace
}  // namespace dualdecoder
