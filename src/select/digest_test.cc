#include "select/digest.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <thread>

#include <gtest/gtest.h>

#include "base/f16.h"
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
  double value = 0;
  double magnitude = 0;  // |q| . (|c| + |r|)
};
/// q . c + share * |q| . r, as of a box.
Score box_score(const std::vector<float>& q, const std::vector<float>& centre,
                const std::vector<float>& radius, double share) {
  Score score;
  for (std::size_t d = 0; d < q.size(); ++d) {
    score.value += double{q[d]} * centre[d] + share * std::abs(double{q[d]}) * radius[d];
    score.magnitude += std::abs(double{q[d]}) * (std::abs(double{centre[d]}) + std::abs(radius[d]));
  }
  return score;
}
/// q . c + |q . r|
Score segment_score(const std::vector<float>& q, const std::vector<float>& centre,
                    const std::vector<float>& radius) {
  Score score = box_score(q, centre, radius, 0);
  double along = 0;
  for (std::size_t d = 0; d < q.size(); ++d) along += double{q[d]} * radius[d];
  score.value += std::abs(along);
  return score;
}
Score digest_score(DigestKind kind, const std::vector<float>& q, const std::vector<float>& centre,
                   const std::vector<float>& radius) {
  return kind == DigestKind::kPrincipal ? segment_score(q, centre, radius)
                                        : box_score(q, centre, radius, radius_share(kind));
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

/// The 16 keys of a part of a block, [token][head_dim].
std::vector<std::vector<double>> keys_of(const KvGeometry& geometry, const std::vector<f16_bits>& k,
                                         std::uint32_t part, std::uint32_t kv_head) {
  std::vector<std::vector<double>> keys(kDigestTokens);
  for (std::uint32_t t = 0; t < kDigestTokens; ++t) {
    for (std::uint32_t d = 0; d < geometry.head_dim; ++d) {
      const std::size_t row = std::size_t{kv_head} * geometry.head_dim + d;
      keys[t].push_back(float_from_f16(k[row * geometry.block_tokens + part * kDigestTokens + t]));
    }
  }
  return keys;
}

/// What a digest is when nothing is rounded. [head_dim] each.
struct Exact {
  std::vector<double> centre;
  std::vector<double> radius;
};
Exact exact_box(DigestKind kind, const std::vector<std::vector<double>>& keys) {
  Exact exact;
  for (std::size_t d = 0; d < keys[0].size(); ++d) {
    std::vector<double> values;
    for (const std::vector<double>& key : keys) values.push_back(key[d]);
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    double mean = 0;
    double deviation = 0;
    for (const double x : values) mean += x / kDigestTokens;
    for (const double x : values) deviation += std::abs(x - mean) / kDigestTokens;
    const bool box = kind == DigestKind::kMinMax;
    exact.centre.push_back(box ? (*low + *high) / 2 : mean);
    exact.radius.push_back(box ? (*high - *low) / 2 : deviation);
  }
  return exact;
}

/// Takes the mean off the keys, and returns it.
std::vector<double> subtract_mean(std::vector<std::vector<double>>& keys) {
  std::vector<double> mean = exact_box(DigestKind::kMean, keys).centre;
  for (std::vector<double>& key : keys) {
    for (std::size_t d = 0; d < mean.size(); ++d) key[d] -= mean[d];
  }
  return mean;
}

/// Sum of the squares of what keys around their mean reach along `unit`.
double variance_along(const std::vector<std::vector<double>>& keys, const std::vector<double>& unit) {
  double sum = 0;
  for (const std::vector<double>& key : keys) sum += dot(key, unit) * dot(key, unit);
  return sum;
}

/// The most that variance_along() can be: the greatest eigenvalue of the keys' Gram matrix, by power
/// iterations from every key, enough to arrive.
double greatest_variance(const std::vector<std::vector<double>>& keys) {
  const std::size_t count = keys.size();
  std::vector<std::vector<double>> gram(count);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t j = 0; j < count; ++j) gram[i].push_back(dot(keys[i], keys[j]));
  }
  double greatest = 0;
  for (std::size_t start = 0; start < count; ++start) {
    std::vector<double> unit(count);
    unit[start] = 1;
    double norm = 0;
    for (int i = 0; i < 1000; ++i) {
      std::vector<double> next;
      for (const std::vector<double>& row : gram) next.push_back(dot(row, unit));
      norm = std::sqrt(dot(next, next));
      if (norm == 0) break;
      for (std::size_t t = 0; t < count; ++t) unit[t] = next[t] / norm;
    }
    greatest = std::max(greatest, norm);
  }
  return greatest;
}

/// All digests and the groups they fill, as they are stored.
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
        for (std::uint32_t part = 0; part < digests.digests_per_block(); ++part) {
          digests.read_block(layer, block, part, head, centre.data(), radius.data());
          append();
        }
        const std::uint32_t digest = block.value * digests.digests_per_block();
        if (digest % kTileDigests != 0) continue;
        digests.read_group(layer, digest / kTileDigests, head, centre.data(), radius.data());
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

constexpr DigestKind kKinds[] = {DigestKind::kMinMax, DigestKind::kMean, DigestKind::kPrincipal};
constexpr DigestType kTypes[] = {DigestType::kF16, DigestType::kInt8};

double largest_of(const std::vector<double>& values) {
  double largest = 0;
  for (const double x : values) largest = std::max(largest, std::abs(x));
  return largest;
}

TEST_P(DigestsOnEveryTarget, StoreTheCentreAndRadiusOfTheKeys) {
  for (unsigned seed = 1; seed <= 12; ++seed) {
    std::mt19937 random(seed);
    const std::uint32_t head_dims[] = {64, 80, 128, 256};
    const KvGeometry geometry = geometry_of(1 + seed % 3, head_dims[seed % 4], 16u << seed % 3);
    const DigestOptions options = {.kind = seed % 2 == 0 ? DigestKind::kMinMax : DigestKind::kMean,
                                   .type = seed % 4 < 2 ? DigestType::kF16 : DigestType::kInt8};
    const auto digests = *Digests::create(geometry, options, 1);
    const std::vector<f16_bits> k = random_keys(geometry, random);
    digests->add(LayerIndex(0), k.data());
    std::vector<float> centre(geometry.head_dim);
    std::vector<float> radius(geometry.head_dim);
    for (std::uint32_t i = 0; i < geometry.kv_heads * digests->digests_per_block(); ++i) {
      const std::uint32_t head = i % geometry.kv_heads;
      const std::uint32_t part = i / geometry.kv_heads;
      SCOPED_TRACE(testing::Message() << "seed " << seed << " head " << head << " part " << part);
      digests->read_block(LayerIndex(0), BlockIndex(0), part, head, centre.data(), radius.data());
      const Exact exact = exact_box(options.kind, keys_of(geometry, k, part, head));
      const double largest = largest_of(exact.centre);
      const double widest = largest_of(exact.radius);
      const bool bytes = options.type == DigestType::kInt8;
      for (std::uint32_t d = 0; d < geometry.head_dim; ++d) {
        const double step = bytes ? largest / 127 : std::abs(exact.centre[d]) / 1024 + 1e-7;
        const double radius_step = bytes ? (widest + step) / 126 : exact.radius[d] / 512 + 1e-7;
        ASSERT_NEAR(centre[d], exact.centre[d], 0.51 * step) << "dimension " << d;
        // The radius covers the centre's rounding, and goes up.
        ASSERT_GE(radius[d], exact.radius[d] * (1 - 1e-6)) << "dimension " << d;
        ASSERT_LE(radius[d], exact.radius[d] + 0.52 * step + 1.01 * radius_step) << "dimension " << d;
      }
    }
  }
}

/// Keys that lie mostly along one line, lopsided, with noise around it.
std::vector<f16_bits> stretched_keys(const KvGeometry& geometry, float noise, std::mt19937& random) {
  std::vector<f16_bits> k(geometry.half_block_elements());
  std::normal_distribution<float> normal;
  std::exponential_distribution<float> lopsided;
  for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
    std::vector<float> direction(geometry.head_dim);
    std::vector<float> offset(geometry.head_dim);
    for (float& x : direction) x = normal(random);
    for (float& x : offset) x = 3 * normal(random);
    for (std::uint32_t t = 0; t < geometry.block_tokens; ++t) {
      const float along = lopsided(random);
      for (std::uint32_t d = 0; d < geometry.head_dim; ++d) {
        const std::size_t row = std::size_t{head} * geometry.head_dim + d;
        k[row * geometry.block_tokens + t] =
            f16_from_float(offset[d] + along * direction[d] + noise * normal(random));
      }
    }
  }
  return k;
}

// White noise has no principal direction: all are about as good, and the iterations have not arrived.
TEST_P(DigestsOnEveryTarget, FindTheDirectionOfGreatestVariance) {
  const struct {
    float noise;
    double at_least;
  } cases[] = {{0.0f, 0.999}, {0.2f, 0.995}, {0.5f, 0.98}, {20.0f, 0.75}};
  for (const auto& [noise, at_least] : cases) {
    for (unsigned seed = 1; seed <= 8; ++seed) {
      std::mt19937 random(seed);
      const std::uint32_t head_dims[] = {64, 80, 128, 256};
      const KvGeometry geometry = geometry_of(2, head_dims[seed % 4], 16u << seed % 3);
      const auto digests = *Digests::create(geometry, {.kind = DigestKind::kPrincipal}, 1);
      const std::vector<f16_bits> k = stretched_keys(geometry, noise, random);
      digests->add(LayerIndex(0), k.data());
      std::vector<float> centre(geometry.head_dim);
      std::vector<float> radius(geometry.head_dim);
      for (std::uint32_t i = 0; i < geometry.kv_heads * digests->digests_per_block(); ++i) {
        SCOPED_TRACE(testing::Message() << "seed " << seed << " noise " << noise << " digest " << i);
        const std::uint32_t head = i % geometry.kv_heads;
        const std::uint32_t part = i / geometry.kv_heads;
        digests->read_block(LayerIndex(0), BlockIndex(0), part, head, centre.data(), radius.data());
        std::vector<std::vector<double>> keys = keys_of(geometry, k, part, head);
        subtract_mean(keys);
        std::vector<double> u(radius.begin(), radius.end());
        const double norm = std::sqrt(dot(u, u));
        ASSERT_GT(norm, 0);
        for (double& x : u) x /= norm;
        EXPECT_GE(variance_along(keys, u), at_least * greatest_variance(keys));
      }
    }
  }
}

// Given the direction that it has found, a principal digest is defined by the keys.
TEST_P(DigestsOnEveryTarget, ScoreTheBetterEndOfTheShrunkSegment) {
  for (const DigestType type : kTypes) {
    for (unsigned seed = 1; seed <= 8; ++seed) {
      std::mt19937 random(seed);
      const KvGeometry geometry = geometry_of(2, seed % 2 == 0 ? 64 : 80, 16u << seed % 3);
      const auto digests = *Digests::create(geometry, {.kind = DigestKind::kPrincipal, .type = type}, 1);
      const std::vector<f16_bits> k = stretched_keys(geometry, 0.3f, random);
      digests->add(LayerIndex(0), k.data());
      std::vector<float> centre(geometry.head_dim);
      std::vector<float> radius(geometry.head_dim);
      std::vector<float> q(geometry.head_dim);
      std::normal_distribution<float> normal;
      for (std::uint32_t i = 0; i < geometry.kv_heads * digests->digests_per_block(); ++i) {
        const std::uint32_t head = i % geometry.kv_heads;
        const std::uint32_t part = i / geometry.kv_heads;
        digests->read_block(LayerIndex(0), BlockIndex(0), part, head, centre.data(), radius.data());
        std::vector<std::vector<double>> keys = keys_of(geometry, k, part, head);
        const std::vector<double> mean = subtract_mean(keys);
        std::vector<double> u(radius.begin(), radius.end());
        const double norm = std::sqrt(dot(u, u));
        double low = 0;
        double high = 0;
        for (double& x : u) x /= norm;
        for (const std::vector<double>& key : keys) {
          low = std::min(low, dot(key, u));
          high = std::max(high, dot(key, u));
        }
        for (float& x : q) x = normal(random);
        const std::vector<double> query(q.begin(), q.end());
        const double along = dot(query, u);
        const double expected = dot(query, mean) + 0.7 * std::max(along * low, along * high);
        const Score score = digest_score(DigestKind::kPrincipal, q, centre, radius);
        EXPECT_NEAR(score.value, expected, (type == DigestType::kF16 ? 5e-4 : 5e-3) * score.magnitude)
            << "seed " << seed << " digest " << i;
      }
    }
  }
}

TEST_P(DigestsOnEveryTarget, BoundTheScoresOfAllKeys) {
  for (const DigestType type : kTypes) {
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
      const std::uint32_t part = random() % digests->digests_per_block();
      digests->read_block(LayerIndex(0), BlockIndex(block), part, head, centre.data(), radius.data());
      const Score score = box_score(q, centre, radius, 1);
      for (std::uint32_t t = part * kDigestTokens; t < (part + 1) * kDigestTokens; ++t) {
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
  for (const DigestKind kind : kKinds) {
    for (const DigestType type : kTypes) {
      std::mt19937 random(4);
      const KvGeometry geometry = geometry_of(1, 80, 32);
      const auto digests = *Digests::create(geometry, {.kind = kind, .type = type}, 300);
      for (int i = 0; i < 281; ++i) digests->add(LayerIndex(0), random_keys(geometry, random).data());
      std::vector<float> q(geometry.head_dim);
      std::vector<float> centre(geometry.head_dim);
      std::vector<float> radius(geometry.head_dim);
      std::normal_distribution<float> normal;
      for (std::uint32_t block = 0; block < 281; ++block) {
        for (float& x : q) x = normal(random);
        const std::uint32_t part = random() % 2;
        digests->read_block(LayerIndex(0), BlockIndex(block), part, 0, centre.data(), radius.data());
        const Score score = digest_score(kind, q, centre, radius);
        digests->read_group(LayerIndex(0), (2 * block + part) / kTileDigests, 0, centre.data(),
                            radius.data());
        const Score group = box_score(q, centre, radius, 1);
        ASSERT_LE(score.value, group.value + kTolerance * group.magnitude) << "block " << block;
      }
    }
  }
}

/// Keeps the first `kept` of 70 blocks, and compares with digests that never had more.
void check_truncation(const KvGeometry& geometry, const DigestOptions& options, std::uint32_t kept) {
  const auto digests = *Digests::create(geometry, options, 70);
  const auto expected = *Digests::create(geometry, options, 70);
  std::mt19937 random(kept);
  const auto add = [&](std::uint32_t blocks, bool to_expected) {
    for (std::uint32_t i = 0; i < blocks; ++i) {
      for (LayerIndex layer(0); layer.value < geometry.layers; ++layer) {
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

TEST(Digests, AreTheSameAfterTruncationAsIfNeverLonger) {
  for (const DigestKind kind : kKinds) {
    for (const DigestType type : kTypes) {
      for (const std::uint32_t block_tokens : {16u, 64u}) {
        for (const std::uint32_t kept : {0u, 1u, 4u, 15u, 17u, 64u}) {
          SCOPED_TRACE(testing::Message() << "kind " << static_cast<int>(kind) << ", " << kept
                                          << " blocks of " << block_tokens << " kept");
          check_truncation(geometry_of(2, 64, block_tokens, 2), {.kind = kind, .type = type}, kept);
        }
      }
    }
  }
}

TEST(Digests, CopiedFromTheFirstBlocksOfOthersGoOnAsIfNeverLonger) {
  const KvGeometry geometry = geometry_of(2, 64, 32, 2);
  for (const DigestType type : kTypes) {
    for (const std::uint32_t kept : {0u, 1u, 8u, 9u, 16u, 40u}) {
      SCOPED_TRACE(testing::Message() << kept << " blocks kept");
      const auto longer = *Digests::create(geometry, {.type = type}, 70);
      const auto copy = *Digests::create(geometry, {.type = type}, 70);
      const auto expected = *Digests::create(geometry, {.type = type}, 70);
      std::mt19937 random(kept);
      const auto add = [&](std::span<Digests* const> to) {
        for (LayerIndex layer(0); layer.value < geometry.layers; ++layer) {
          const std::vector<f16_bits> k = random_keys(geometry, random);
          for (Digests* const digests : to) digests->add(layer, k.data());
        }
      };
      for (int i = 0; i < 20; ++i) add(std::array{copy.get()});  // forgotten
      for (std::uint32_t i = 0; i < 40; ++i) {
        if (i < kept) {
          add(std::array{longer.get(), expected.get()});
        } else {
          add(std::array{longer.get()});
        }
      }
      copy->copy(*longer, kept);
      EXPECT_EQ(contents(*copy), contents(*expected));
      for (int i = 0; i < 3; ++i) add(std::array{copy.get(), expected.get()});
      EXPECT_EQ(contents(*copy), contents(*expected));
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
  for (const DigestKind kind : kKinds) {
    for (const DigestType type : kTypes) {
      const KvGeometry geometry = geometry_of(1, 64, 16);
      const auto digests = *Digests::create(geometry, {.kind = kind, .type = type}, 3);
      std::vector<f16_bits> k(geometry.half_block_elements(), kNan);
      digests->add(LayerIndex(0), k.data());
      for (std::size_t i = 0; i < k.size(); i += 3) k[i] = i % 2 == 0 ? 0x7c00 : 0xfc00;
      digests->add(LayerIndex(0), k.data());
      std::fill(k.begin(), k.end(), f16_from_float(1));
      k[5] = kNan;
      k[70] = 0x7c00;
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
  // 4,096 blocks have 8,192 digests: 512 tiles and 32 tiles of groups.
  EXPECT_EQ(Digests::bytes_for(smollm2, {.type = DigestType::kF16}, 4096), 544u * 30 * 3 * 4096);
  EXPECT_EQ(Digests::bytes_for(smollm2, {.type = DigestType::kInt8}, 4096), 544u * 30 * 3 * (2048 + 128));
  EXPECT_EQ(Digests::bytes_for(geometry_of(3, 64, 16, 30), {}, 8192), Digests::bytes_for(smollm2, {}, 4096));
  EXPECT_EQ(Digests::bytes_for(geometry_of(1, 64, 64), {}, 5), 3u * 4096);
}

}  // namespace
}  // namespace dualdecoder
