#include "select/digest.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "attention/f16.h"
#include "select/score.h"

namespace dualdecoder {
namespace {

constexpr f16_bits kNan = 0x7e00;
/// Of |q| . (|c| + r): what f32 may lose in a score.
constexpr double kTolerance = 1e-6;

KvGeometry geometry_of(std::uint32_t kv_heads, std::uint32_t head_dim, std::uint32_t block_tokens = 16,
                       std::uint32_t layers = 1) {
  return {.layers = layers, .kv_heads = kv_heads, .head_dim = head_dim, .block_tokens = block_tokens};
}

std::vector<f16_bits> random_keys(const KvGeometry& geometry, std::mt19937& random) {
  // Dimensions of very different size, as models have them.
  std::vector<f16_bits> k(geometry.half_block_elements());
  std::normal_distribution<float> normal;
  for (std::size_t row = 0; row < k.size() / geometry.block_tokens; ++row) {
    const float size = std::ldexp(1.0f, static_cast<int>(row % 9) - 5);
    const float offset = 3 * normal(random);
    for (std::uint32_t t = 0; t < geometry.block_tokens; ++t) {
      k[row * geometry.block_tokens + t] = f16_from_float(size * (normal(random) + offset));
    }
  }
  return k;
}

struct Score {
  double value = 0;      // q . c + |q| . r
  double magnitude = 0;  // |q| . (|c| + r)
};
Score score_of(const std::vector<float>& q, const std::vector<float>& centre,
               const std::vector<float>& radius) {
  Score score;
  for (std::size_t d = 0; d < q.size(); ++d) {
    score.value += double{q[d]} * centre[d] + std::abs(double{q[d]}) * radius[d];
    score.magnitude += std::abs(double{q[d]}) * (std::abs(double{centre[d]}) + radius[d]);
  }
  return score;
}

/// What a block's digest is when nothing is rounded. [head_dim] each.
struct Exact {
  std::vector<double> centre;
  std::vector<double> radius;
};
Exact exact_digest(const KvGeometry& geometry, DigestKind kind, const std::vector<f16_bits>& k,
                   std::uint32_t kv_head) {
  Exact exact;
  for (std::uint32_t d = 0; d < geometry.head_dim; ++d) {
    std::vector<double> values;
    for (std::uint32_t t = 0; t < geometry.block_tokens; ++t) {
      values.push_back(
          float_from_f16(k[(std::size_t{kv_head} * geometry.head_dim + d) * geometry.block_tokens + t]));
    }
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    double mean = 0;
    double deviation = 0;
    for (const double x : values) mean += x / geometry.block_tokens;
    for (const double x : values) deviation += std::abs(x - mean) / geometry.block_tokens;
    const bool box = kind == DigestKind::kMinMax;
    exact.centre.push_back(box ? (*low + *high) / 2 : mean);
    exact.radius.push_back(box ? (*high - *low) / 2 : deviation);
  }
  return exact;
}

/// The first `blocks` digests and the groups they fill, as they are stored, of all layers.
std::vector<float> contents(const Digests& digests) {
  const KvGeometry& geometry = digests.geometry();
  std::vector<float> all;
  std::vector<float> centre(geometry.head_dim);
  std::vector<float> radius(geometry.head_dim);
  const auto append = [&] {
    all.insert(all.end(), centre.begin(), centre.end());
    all.insert(all.end(), radius.begin(), radius.end());
  };
  for (LayerIndex layer(0); layer.value < geometry.layers; ++layer) {
    for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
      for (BlockIndex block(0); block.value < digests.blocks(layer); ++block) {
        digests.read_block(layer, block, head, centre.data(), radius.data());
        append();
        if (block.value % kTileDigests != 0) continue;
        digests.read_group(layer, block.value / kTileDigests, head, centre.data(), radius.data());
        append();
      }
    }
  }
  return all;
}

class DigestsOnEveryTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { force_score_target(GetParam()); }
  void TearDown() override { force_score_target(""); }
};
INSTANTIATE_TEST_SUITE_P(Select, DigestsOnEveryTarget, testing::ValuesIn(score_targets()),
                         [](const auto& target) { return target.param; });

TEST_P(DigestsOnEveryTarget, StoreTheCentreAndRadiusOfTheKeys) {
  for (unsigned seed = 1; seed <= 12; ++seed) {
    std::mt19937 random(seed);
    const std::uint32_t head_dims[] = {64, 80, 128, 256};
    const KvGeometry geometry = geometry_of(1 + seed % 3, head_dims[seed % 4], 16u << seed % 3);
    const DigestOptions options = {.kind = seed % 2 == 0 ? DigestKind::kMinMax : DigestKind::kMean,
                                   .type = seed % 4 < 2 ? DigestType::kF16 : DigestType::kInt8};
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const auto digests = *Digests::create(geometry, options, 1);
    const std::vector<f16_bits> k = random_keys(geometry, random);
    digests->add(LayerIndex(0), k.data());
    std::vector<float> centre(geometry.head_dim);
    std::vector<float> radius(geometry.head_dim);
    for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
      digests->read_block(LayerIndex(0), BlockIndex(0), head, centre.data(), radius.data());
      const Exact exact = exact_digest(geometry, options.kind, k, head);
      double largest = 0;
      double widest = 0;
      for (std::uint32_t d = 0; d < geometry.head_dim; ++d) {
        largest = std::max(largest, std::abs(exact.centre[d]));
        widest = std::max(widest, exact.radius[d]);
      }
      const bool bytes = options.type == DigestType::kInt8;
      for (std::uint32_t d = 0; d < geometry.head_dim; ++d) {
        const double step = bytes ? largest / 127 : std::abs(exact.centre[d]) / 1024 + 1e-7;
        const double radius_step = bytes ? (widest + step) / 254 : exact.radius[d] / 512 + 1e-7;
        ASSERT_NEAR(centre[d], exact.centre[d], 0.51 * step) << "dimension " << d;
        // The radius covers the centre's rounding, and goes up.
        ASSERT_GE(radius[d], exact.radius[d] * (1 - 1e-6)) << "dimension " << d;
        ASSERT_LE(radius[d], exact.radius[d] + 0.52 * step + 1.01 * radius_step) << "dimension " << d;
      }
    }
  }
}

TEST_P(DigestsOnEveryTarget, BoundTheScoresOfAllKeys) {
  for (const DigestType type : {DigestType::kF16, DigestType::kInt8}) {
    std::mt19937 random(3);
    const KvGeometry geometry = geometry_of(2, 64, 32);
    const auto digests = *Digests::create(geometry, {.kind = DigestKind::kMinMax, .type = type}, 40);
    std::vector<std::vector<f16_bits>> blocks;
    for (int i = 0; i < 40; ++i) {
      blocks.push_back(random_keys(geometry, random));
      digests->add(LayerIndex(0), blocks.back().data());
    }
    std::vector<float> q(geometry.head_dim);
    std::vector<float> centre(geometry.head_dim);
    std::vector<float> radius(geometry.head_dim);
    std::normal_distribution<float> normal;
    for (int i = 0; i < 400; ++i) {
      const std::uint32_t block = random() % 40;
      const std::uint32_t head = random() % 2;
      for (float& x : q) x = i % 2 == 0 ? normal(random) : (random() % 2 == 0 ? 1.0f : -1.0f);
      digests->read_block(LayerIndex(0), BlockIndex(block), head, centre.data(), radius.data());
      const Score score = score_of(q, centre, radius);
      for (std::uint32_t t = 0; t < geometry.block_tokens; ++t) {
        double exact = 0;
        for (std::uint32_t d = 0; d < geometry.head_dim; ++d) {
          const std::size_t row = std::size_t{head} * geometry.head_dim + d;
          exact += double{q[d]} * float_from_f16(blocks[block][row * geometry.block_tokens + t]);
        }
        ASSERT_LE(exact, score.value + kTolerance * score.magnitude) << "block " << block;
      }
    }
  }
}

TEST_P(DigestsOnEveryTarget, BoundTheBlocksOfAGroupWhateverTheKind) {
  for (const DigestKind kind : {DigestKind::kMinMax, DigestKind::kMean}) {
    for (const DigestType type : {DigestType::kF16, DigestType::kInt8}) {
      std::mt19937 random(4);
      const KvGeometry geometry = geometry_of(1, 80, 16);
      const auto digests = *Digests::create(geometry, {.kind = kind, .type = type}, 300);
      for (int i = 0; i < 281; ++i) digests->add(LayerIndex(0), random_keys(geometry, random).data());
      std::vector<float> q(geometry.head_dim);
      std::vector<float> centre(geometry.head_dim);
      std::vector<float> radius(geometry.head_dim);
      std::normal_distribution<float> normal;
      for (std::uint32_t block = 0; block < 281; ++block) {
        for (float& x : q) x = normal(random);
        digests->read_block(LayerIndex(0), BlockIndex(block), 0, centre.data(), radius.data());
        const Score score = score_of(q, centre, radius);
        digests->read_group(LayerIndex(0), block / kTileDigests, 0, centre.data(), radius.data());
        const Score group = score_of(q, centre, radius);
        ASSERT_LE(score.value, group.value + kTolerance * group.magnitude) << "block " << block;
      }
    }
  }
}

TEST(Digests, AreTheSameAfterTruncationAsIfNeverLonger) {
  for (const DigestType type : {DigestType::kF16, DigestType::kInt8}) {
    for (const std::uint32_t kept : {0u, 1u, 15u, 16u, 17u, 40u, 64u}) {
      SCOPED_TRACE(testing::Message() << kept << " blocks kept");
      const KvGeometry geometry = geometry_of(2, 64, 16, 3);
      const DigestOptions options = {.kind = DigestKind::kMinMax, .type = type};
      const auto digests = *Digests::create(geometry, options, 70);
      const auto expected = *Digests::create(geometry, options, 70);
      std::mt19937 random(kept);
      const auto add = [&](std::uint32_t blocks, bool to_expected) {
        for (std::uint32_t i = 0; i < blocks; ++i) {
          for (LayerIndex layer(0); layer.value < 3; ++layer) {
            const std::vector<f16_bits> k = random_keys(geometry, random);
            digests->add(layer, k.data());
            if (to_expected) expected->add(layer, k.data());
          }
        }
      };
      add(kept, true);
      add(70 - kept, false);
      digests->truncate(kept);
      EXPECT_EQ(contents(*digests), contents(*expected));
      add(3, true);
      EXPECT_EQ(contents(*digests), contents(*expected));
    }
  }
}

TEST(Digests, KeepLayersThatAreShorterThanTheTruncation) {
  std::mt19937 random(1);
  const KvGeometry geometry = geometry_of(1, 64, 16, 2);
  const auto digests = *Digests::create(geometry, {}, 8);
  for (int i = 0; i < 5; ++i) digests->add(LayerIndex(0), random_keys(geometry, random).data());
  digests->add(LayerIndex(1), random_keys(geometry, random).data());
  digests->truncate(3);
  EXPECT_EQ(digests->blocks(LayerIndex(0)), 3u);
  EXPECT_EQ(digests->blocks(LayerIndex(1)), 1u);
}

TEST(Digests, IgnoreNanAndStayFiniteWithInfinity) {
  for (const DigestKind kind : {DigestKind::kMinMax, DigestKind::kMean}) {
    for (const DigestType type : {DigestType::kF16, DigestType::kInt8}) {
      const KvGeometry geometry = geometry_of(1, 64, 16);
      const auto digests = *Digests::create(geometry, {.kind = kind, .type = type}, 2);
      std::vector<f16_bits> k(geometry.half_block_elements(), kNan);
      digests->add(LayerIndex(0), k.data());
      for (std::size_t i = 0; i < k.size(); i += 3) k[i] = i % 2 == 0 ? 0x7c00 : 0xfc00;
      digests->add(LayerIndex(0), k.data());
      for (const float x : contents(*digests)) EXPECT_TRUE(std::isfinite(x)) << x;
    }
  }
}

TEST(Digests, OfDifferentLayersMayBeAddedAtOnce) {
  const KvGeometry geometry = geometry_of(3, 64, 16, 4);
  const auto digests = *Digests::create(geometry, {}, 100);
  const auto expected = *Digests::create(geometry, {}, 100);
  const auto fill = [&geometry](Digests& to, std::uint32_t layer) {
    std::mt19937 random(layer);
    for (int i = 0; i < 100; ++i) to.add(LayerIndex(layer), random_keys(geometry, random).data());
  };
  for (std::uint32_t layer = 0; layer < 4; ++layer) fill(*expected, layer);
  {
    std::vector<std::jthread> threads;
    for (std::uint32_t layer = 0; layer < 4; ++layer) {
      threads.emplace_back([&, layer] { fill(*digests, layer); });
    }
  }
  EXPECT_EQ(contents(*digests), contents(*expected));
}

TEST(Digests, FillTheBytesThatAreStated) {
  const KvGeometry smollm2 = geometry_of(3, 64, 32, 30);
  // 4,096 blocks are 256 tiles and 16 tiles of groups.
  EXPECT_EQ(Digests::bytes_for(smollm2, {.type = DigestType::kF16}, 4096), 272u * 30 * 3 * 4096);
  EXPECT_EQ(Digests::bytes_for(smollm2, {.type = DigestType::kInt8}, 4096), 272u * 30 * 3 * (2048 + 128));
}

}  // namespace
}  // namespace dualdecoder
