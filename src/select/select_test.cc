#include "select/select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "base/f16.h"
#include "select/score.h"

namespace dualdecoder {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr DigestKind kKinds[] = {DigestKind::kMinMax, DigestKind::kMean, DigestKind::kPrincipal};

/// How the keys of a test come about.
struct KeyOptions {
  float correlation = 0;  // of a token's key with the one before: 0 is white noise
  float offset = 0;       // deviation of an offset per dimension that all tokens share
};

/// One sequence: its keys, their digests, and heads that ask.
class Sequence {
 public:
  Sequence(const KvGeometry& geometry, const DigestOptions& options, std::uint32_t blocks,
           const KeyOptions& keys, unsigned seed)
      : digests(std::move(*Digests::create(geometry, options, blocks))), random_(seed) {
    const std::size_t vectors = std::size_t{geometry.kv_heads} * geometry.head_dim;
    std::vector<float> offset(vectors);
    for (float& x : offset) x = keys.offset * normal_(random_);
    for (LayerIndex layer(0); layer.value < geometry.layers; ++layer) {
      std::vector<float> walk(vectors);
      for (float& x : walk) x = normal_(random_);
      for (std::uint32_t block = 0; block < blocks; ++block) {
        std::vector<f16_bits>& k = blocks_.emplace_back(geometry.half_block_elements());
        for (std::uint32_t t = 0; t < geometry.block_tokens; ++t) {
          for (std::size_t d = 0; d < vectors; ++d) {
            walk[d] = keys.correlation * walk[d] +
                      std::sqrt(1 - keys.correlation * keys.correlation) * normal_(random_);
            k[d * geometry.block_tokens + t] = f16_from_float(walk[d] + offset[d]);
          }
        }
        digests->add(layer, k.data());
      }
    }
  }

  float key(LayerIndex layer, std::uint32_t block, std::uint32_t token, std::size_t vector) const {
    const KvGeometry& geometry = digests->geometry();
    return float_from_f16(keys(layer, block)[vector * geometry.block_tokens + token]);
  }
  const f16_bits* keys(LayerIndex layer, std::uint32_t block) const {
    return blocks_[std::size_t{layer.value} * digests->blocks_max() + block].data();
  }

  /// Each query head stands near the key of a random token, and is blurred by noise of deviation `noise`.
  std::vector<float> queries_near_keys(LayerIndex layer, std::uint32_t heads, float noise) {
    const KvGeometry& geometry = digests->geometry();
    std::vector<float> q;
    for (std::uint32_t head = 0; head < heads; ++head) {
      const std::uint32_t block = random_() % digests->blocks(layer);
      const std::uint32_t token = random_() % geometry.block_tokens;
      const std::size_t kv_head = head / (heads / geometry.kv_heads);
      for (std::size_t d = 0; d < geometry.head_dim; ++d) {
        q.push_back(key(layer, block, token, kv_head * geometry.head_dim + d) + noise * normal_(random_));
      }
    }
    return q;
  }
  std::vector<float> random_queries(std::uint32_t heads) {
    std::vector<float> q(std::size_t{heads} * digests->geometry().head_dim);
    for (float& x : q) x = normal_(random_);
    return q;
  }

  std::unique_ptr<Digests> digests;

 private:
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::vector<std::vector<f16_bits>> blocks_;  // [layer, block]
};

KvGeometry geometry_of(std::uint32_t kv_heads, std::uint32_t head_dim, std::uint32_t block_tokens = 16,
                       std::uint32_t layers = 1) {
  return {.layers = layers, .kv_heads = kv_heads, .head_dim = head_dim, .block_tokens = block_tokens};
}

SelectRequest request_of(const Sequence& sequence, const std::vector<float>& q, std::uint32_t count) {
  const std::uint32_t head_dim = sequence.digests->geometry().head_dim;
  return {.layer = LayerIndex(0),
          .q = q.data(),
          .heads = static_cast<std::uint32_t>(q.size() / head_dim),
          .scale = 1.0f / std::sqrt(static_cast<float>(head_dim)),
          .first = BlockIndex(0),
          .end = BlockIndex(sequence.digests->blocks(LayerIndex(0))),
          .count = count};
}

double score_reference(DigestKind kind, const float* q, const std::vector<float>& centre,
                       const std::vector<float>& radius) {
  double middle = 0;
  double along = 0;
  for (std::size_t d = 0; d < centre.size(); ++d) {
    const double x = q[d];
    middle += x * centre[d];
    along += (kind == DigestKind::kPrincipal ? x : std::abs(x) * radius_share(kind)) * radius[d];
  }
  return middle + std::abs(along);
}

/// Pooled scores by the definition, from the digests as they are stored.
std::vector<double> pooled_reference(const Digests& digests, const SelectRequest& request) {
  const KvGeometry& geometry = digests.geometry();
  const std::uint32_t candidates = request.end.value - request.first.value;
  const std::uint32_t parts = digests.digests_per_block();
  std::vector<double> pooled(candidates);
  std::vector<float> centre(geometry.head_dim);
  std::vector<float> radius(geometry.head_dim);
  for (std::uint32_t head = 0; head < request.heads; ++head) {
    std::vector<double> scores(std::size_t{candidates} * parts);
    for (std::uint32_t i = 0; i < scores.size(); ++i) {
      digests.read_block(request.layer, BlockIndex(request.first.value + i / parts), i % parts,
                         head / (request.heads / geometry.kv_heads), centre.data(), radius.data());
      const float* const q = request.q + std::size_t{head} * geometry.head_dim;
      scores[i] = request.scale * score_reference(digests.options().kind, q, centre, radius);
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& x : scores) sum += x = std::exp(x - max);
    for (std::uint32_t i = 0; i < scores.size(); ++i) pooled[i / parts] += scores[i] / sum;
  }
  return pooled;
}

/// The best of `pooled` by sorting; ties to the later block.
std::vector<BlockIndex> best_by_sorting(const std::vector<float>& pooled, const SelectRequest& request) {
  std::vector<std::uint32_t> order(pooled.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return pooled[a] != pooled[b] ? pooled[a] > pooled[b] : a > b;
  });
  order.resize(std::min<std::size_t>(order.size(), request.count));
  std::vector<BlockIndex> blocks;
  for (const std::uint32_t i : order) blocks.emplace_back(request.first.value + i);
  std::sort(blocks.begin(), blocks.end());
  return blocks;
}

double recall(const std::vector<BlockIndex>& found, const std::vector<BlockIndex>& wanted) {
  std::vector<BlockIndex> both;
  std::set_intersection(found.begin(), found.end(), wanted.begin(), wanted.end(), std::back_inserter(both));
  return static_cast<double>(both.size()) / static_cast<double>(wanted.size());
}

template <typename T, std::size_t N>
T pick(const T (&from)[N], std::mt19937& random) {
  return from[random() % N];
}

class SelectOnEveryTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { force_score_target(GetParam()); }
  void TearDown() override { force_score_target(""); }
};
INSTANTIATE_TEST_SUITE_P(Select, SelectOnEveryTarget, testing::ValuesIn(score_targets()),
                         [](const auto& target) { return target.param; });

TEST_P(SelectOnEveryTarget, PoolsScoresAsTheReferenceDoes) {
  for (unsigned seed = 1; seed <= 24; ++seed) {
    std::mt19937 random(seed);
    const KvGeometry geometry =
        geometry_of(1 + seed % 3, pick({64u, 80u, 128u, 256u}, random), pick({16u, 32u, 64u}, random));
    const DigestOptions options = {.kind = kKinds[seed % 3],
                                   .type = seed % 4 < 2 ? DigestType::kF16 : DigestType::kInt8};
    const std::uint32_t heads = geometry.kv_heads * (1 + seed % 8);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << heads << "/" << geometry.kv_heads
                                    << " heads of " << geometry.head_dim);
    Sequence sequence(geometry, options, 1 + random() % 90, {.offset = 1}, seed);
    const std::vector<float> q = sequence.random_queries(heads);
    SelectRequest request = request_of(sequence, q, 7);
    request.first = BlockIndex(random() % request.end.value);
    request.end = BlockIndex(request.first.value + 1 + random() % (request.end.value - request.first.value));

    Selector selector;
    std::vector<float> pooled;
    selector.scores_flat(*sequence.digests, request, pooled);
    const std::vector<double> expected = pooled_reference(*sequence.digests, request);
    ASSERT_EQ(pooled.size(), expected.size());
    for (std::size_t i = 0; i < pooled.size(); ++i) {
      ASSERT_NEAR(pooled[i], expected[i], 1e-4 * expected[i] + 1e-9);
    }
    std::vector<BlockIndex> blocks;
    selector.select_flat(*sequence.digests, request, blocks);
    EXPECT_EQ(blocks, best_by_sorting(pooled, request));
  }
}

/// What select() finds of select_flat()'s 32 blocks, and of their pooled scores, on average.
struct Found {
  double blocks = 0;
  double weight = 0;
  double bytes = 0;  // read, against select_flat()
};
Found find_by_groups(Sequence& sequence, std::uint32_t heads) {
  constexpr int kQueries = 60;
  Selector selector;
  std::vector<BlockIndex> some;
  std::vector<BlockIndex> best;
  std::vector<float> pooled;
  Found found;
  for (int i = 0; i < kQueries; ++i) {
    const std::vector<float> q = sequence.queries_near_keys(LayerIndex(0), heads, 0.3f);
    const SelectRequest request = request_of(sequence, q, 32);
    selector.select(*sequence.digests, request, some);
    const auto bytes = static_cast<double>(selector.bytes_read());
    selector.select_flat(*sequence.digests, request, best);
    found.bytes += bytes / static_cast<double>(selector.bytes_read()) / kQueries;
    found.blocks += recall(some, best) / kQueries;
    selector.scores_flat(*sequence.digests, request, pooled);
    const auto weigh = [&](const std::vector<BlockIndex>& blocks) {
      return std::accumulate(blocks.begin(), blocks.end(), 0.0,
                             [&](double sum, BlockIndex block) { return sum + pooled[block.value]; });
    };
    found.weight += weigh(some) / weigh(best) / kQueries;
  }
  return found;
}

// The keys of a passage resemble each other over some 2,000 tokens (0.9995), a group is 256 of them.
TEST(Select, FindsTheBestBlocksOfSmoothKeysByReadingAThird) {
  for (const DigestKind kind : kKinds) {
    for (const DigestType type : {DigestType::kF16, DigestType::kInt8}) {
      SCOPED_TRACE(testing::Message()
                   << "kind " << static_cast<int>(kind) << " type " << static_cast<int>(type));
      Sequence sequence(geometry_of(3, 64), {.kind = kind, .type = type}, 2048,
                        {.correlation = 0.9995f, .offset = 2}, 5);
      const Found found = find_by_groups(sequence, 9);

      EXPECT_GE(found.blocks, 0.97);
      EXPECT_GE(found.weight, 0.99);
      EXPECT_LE(found.bytes, 0.32);
    }
  }
}

// In white noise every group has the same box, and its bound says next to nothing.
TEST(Select, FindsMostOfTheWeightInWhiteNoiseByGroups) {
  Sequence sequence(geometry_of(3, 64), {}, 2048, {}, 5);
  const Found found = find_by_groups(sequence, 9);
  EXPECT_GE(found.blocks, 0.3);
  EXPECT_GE(found.weight, 0.75);
}

TEST_P(SelectOnEveryTarget, TakesOnlyCandidatesAndInAscendingOrder) {
  Sequence sequence(geometry_of(1, 64), {}, 1100, {.correlation = 0.998f}, 9);
  Selector selector;
  std::vector<BlockIndex> blocks;
  std::mt19937 random(9);
  for (int i = 0; i < 40; ++i) {
    const std::vector<float> q = sequence.queries_near_keys(LayerIndex(0), 2, 0.3f);
    SelectRequest request = request_of(sequence, q, 1 + random() % 40);
    request.first = BlockIndex(random() % 300);
    request.end = BlockIndex(1100 - random() % 300);
    selector.select(*sequence.digests, request, blocks);
    ASSERT_EQ(blocks.size(), request.count);
    EXPECT_TRUE(std::is_sorted(blocks.begin(), blocks.end()));
    EXPECT_EQ(std::adjacent_find(blocks.begin(), blocks.end()), blocks.end());
    EXPECT_GE(blocks.front(), request.first);
    EXPECT_LT(blocks.back(), request.end);
  }
}

TEST(Select, TakesTheCandidatesAtBothEndsOfAPartialGroup) {
  // All keys are zero but those of the first and of the last candidate.
  const KvGeometry geometry = geometry_of(1, 64);
  const auto digests = *Digests::create(geometry, {}, 1030);
  const std::vector<f16_bits> zero(geometry.half_block_elements(), 0);
  const std::vector<f16_bits> one(geometry.half_block_elements(), f16_from_float(1));
  for (std::uint32_t block = 0; block < 1030; ++block) {
    const bool candidate = block == 37 || block == 1001;
    const bool beyond = block == 36 || block == 1002;  // would be as good
    digests->add(LayerIndex(0), candidate || beyond ? one.data() : zero.data());
  }
  const std::vector<float> q(64, 1.0f);
  const SelectRequest request = {
      .q = q.data(), .heads = 1, .first = BlockIndex(37), .end = BlockIndex(1002), .count = 2};
  Selector selector;
  std::vector<BlockIndex> blocks;
  selector.select(*digests, request, blocks);
  EXPECT_EQ(blocks, (std::vector<BlockIndex>{BlockIndex(37), BlockIndex(1001)}));
  selector.select_flat(*digests, request, blocks);
  EXPECT_EQ(blocks, (std::vector<BlockIndex>{BlockIndex(37), BlockIndex(1001)}));
}

TEST(Select, TakesEveryCandidateWhenThereAreNoMoreThanWanted) {
  Sequence sequence(geometry_of(1, 64), {}, 20, {}, 1);
  const std::vector<float> q = sequence.random_queries(1);
  SelectRequest request = request_of(sequence, q, 5);
  request.first = BlockIndex(3);
  request.end = BlockIndex(7);
  Selector selector;
  std::vector<BlockIndex> blocks;
  selector.select(*sequence.digests, request, blocks);
  EXPECT_EQ(blocks, (std::vector<BlockIndex>{BlockIndex(3), BlockIndex(4), BlockIndex(5), BlockIndex(6)}));
  EXPECT_EQ(selector.bytes_read(), 0u);
  request.end = request.first;
  selector.select(*sequence.digests, request, blocks);
  EXPECT_TRUE(blocks.empty());
  std::vector<float> pooled(3);
  selector.scores_flat(*sequence.digests, request, pooled);
  EXPECT_TRUE(pooled.empty());
}

TEST(Select, TakesNothingWhenNothingIsWanted) {
  Sequence sequence(geometry_of(1, 64), {}, 600, {}, 1);
  const std::vector<float> q = sequence.random_queries(1);
  Selector selector;
  std::vector<BlockIndex> blocks(2);
  selector.select(*sequence.digests, request_of(sequence, q, 0), blocks);
  EXPECT_TRUE(blocks.empty());
  blocks.resize(2);
  selector.select_flat(*sequence.digests, request_of(sequence, q, 0), blocks);
  EXPECT_TRUE(blocks.empty());
}

TEST(Select, GivesEqualBlocksToTheLater) {
  const KvGeometry geometry = geometry_of(1, 64);
  const auto digests = *Digests::create(geometry, {}, 700);
  const std::vector<f16_bits> same(geometry.half_block_elements(), f16_from_float(0.5f));
  for (int i = 0; i < 700; ++i) digests->add(LayerIndex(0), same.data());
  const std::vector<float> q(64, 1.0f);
  const SelectRequest request = {.q = q.data(), .heads = 1, .end = BlockIndex(700), .count = 3};
  Selector selector;
  std::vector<BlockIndex> blocks;
  const std::vector<BlockIndex> last = {BlockIndex(697), BlockIndex(698), BlockIndex(699)};
  selector.select(*digests, request, blocks);
  EXPECT_EQ(blocks, last);
  selector.select_flat(*digests, request, blocks);
  EXPECT_EQ(blocks, last);
}

TEST(Select, OutlivesQueriesThatAreNotFinite) {
  for (const DigestType type : {DigestType::kF16, DigestType::kInt8}) {
    Sequence sequence(geometry_of(1, 64), {.type = type}, 1000, {.correlation = 0.99f}, 2);
    Selector selector;
    std::vector<BlockIndex> blocks;
    for (const float bad : {kNan, kInfinity, -kInfinity, 3e38f, -3e38f}) {
      std::vector<float> q = sequence.random_queries(2);
      for (const bool everywhere : {false, true}) {
        if (everywhere) std::fill(q.begin(), q.end(), bad);
        q[3] = bad;
        const SelectRequest request = request_of(sequence, q, 32);
        selector.select(*sequence.digests, request, blocks);
        EXPECT_EQ(blocks.size(), 32u);
        selector.select_flat(*sequence.digests, request, blocks);
        EXPECT_EQ(blocks.size(), 32u);
        std::vector<float> pooled;
        selector.scores_flat(*sequence.digests, request, pooled);
        for (const float x : pooled) ASSERT_TRUE(std::isfinite(x));
      }
    }
  }
}

TEST(Select, LetsAHeadThatIsNanHaveNoSay) {
  Sequence sequence(geometry_of(1, 64), {}, 300, {}, 2);
  std::vector<float> q = sequence.random_queries(2);
  std::fill(q.begin() + 64, q.end(), kNan);
  const std::vector<float> q_alone(q.begin(), q.begin() + 64);
  Selector selector;
  std::vector<BlockIndex> with_nan;
  std::vector<BlockIndex> alone;
  selector.select_flat(*sequence.digests, request_of(sequence, q, 8), with_nan);
  selector.select_flat(*sequence.digests, request_of(sequence, q_alone, 8), alone);
  EXPECT_EQ(with_nan, alone);
}

TEST(Select, GivesTheSameWithAUsedSelectorAsWithAFreshOne) {
  Sequence sequence(geometry_of(3, 64), {}, 1000, {.correlation = 0.99f}, 3);
  Selector used;
  std::vector<BlockIndex> blocks;
  std::vector<BlockIndex> fresh_blocks;
  for (const std::uint32_t count : {64u, 3u, 32u, 1u}) {
    const std::vector<float> q = sequence.queries_near_keys(LayerIndex(0), 9, 0.3f);
    SelectRequest request = request_of(sequence, q, count);
    used.select(*sequence.digests, request, blocks);
    Selector fresh;
    fresh.select(*sequence.digests, request, fresh_blocks);
    EXPECT_EQ(blocks, fresh_blocks);
    used.select_flat(*sequence.digests, request, blocks);
  }
}

}  // namespace
}  // namespace dualdecoder
