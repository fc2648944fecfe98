#include "attention/attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <list>
#include <numeric>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "base/f16.h"

namespace dualdecoder {
namespace {

constexpr f16_bits kNan = 0x7e00;
/// Largest difference of a row and head, relative to the largest magnitude in the reference's row.
constexpr double kTolerance = 2e-4;

struct SequenceOptions {
  std::uint32_t keys = 100;
  std::uint32_t rows = 1;
  std::uint32_t window = 0;
  bool gaps = false;            // leaves out positions between blocks
  bool partial_blocks = false;  // some blocks hold fewer tokens than they could
  bool shuffled = false;        // blocks are listed in no particular order
};

/// Owns the blocks, queries and results of one AttentionGroup. Places of a block beyond its tokens hold NaN.
class Sequence {
 public:
  Sequence(const AttentionShape& shape, const SequenceOptions& options, std::mt19937& random)
      : shape_(shape) {
    add_blocks(options, random);
    const std::size_t last_key = views_.back().first_position + views_.back().tokens - 1;
    if (options.shuffled) std::shuffle(views_.begin(), views_.end(), random);
    group.rows = options.rows;
    group.window = options.window;
    // Usually the rows are the last keys' own. A window could be empty for a row that stands in a gap, so
    // such rows follow the last key.
    const bool may_stand_in_gap = options.window > 0 && (options.gaps || options.partial_blocks);
    const std::size_t end = last_key + (may_stand_in_gap ? options.rows : 1);
    group.first_row_position =
        static_cast<std::uint32_t>(std::max<std::size_t>(end, options.rows) - options.rows);
    std::normal_distribution<float> normal(0, 1.5f);
    q_.resize(std::size_t{options.rows} * shape.heads * shape.head_dim);
    for (float& x : q_) x = normal(random);
    allocate_results();
  }

  /// The same blocks, for rows [first, first + count) only.
  Sequence(const Sequence& whole, std::uint32_t first, std::uint32_t count)
      : group(whole.group), shape_(whole.shape_) {
    const std::size_t row_floats = std::size_t{shape_.heads} * shape_.head_dim;
    q_.assign(whole.q_.begin() + first * row_floats, whole.q_.begin() + (first + count) * row_floats);
    group.rows = count;
    group.first_row_position += first;
    allocate_results();
  }

  Sequence(const Sequence&) = delete;

  AttentionGroup group;
  std::vector<float> out;
  std::vector<float> lse;

  const std::vector<KvBlockView>& views() const { return views_; }

  void compute_reference() {
    std::swap(out, expected_out_);
    std::swap(lse, expected_lse_);
    out.resize(expected_out_.size());
    lse.resize(expected_lse_.size());
    point_at_results();
    attention_reference(shape_, group);
    std::swap(out, expected_out_);
    std::swap(lse, expected_lse_);
    point_at_results();
  }

  void expect_near_reference() const {
    const std::size_t head_dim = shape_.head_dim;
    for (std::size_t i = 0; i < lse.size(); ++i) {
      double largest = 0;
      double difference = 0;
      for (std::size_t d = i * head_dim; d < (i + 1) * head_dim; ++d) {
        largest = std::max(largest, std::abs(double{expected_out_[d]}));
        const double error = std::abs(double{out[d]} - expected_out_[d]);
        difference =
            std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(difference, error);
      }
      ASSERT_LE(difference, kTolerance * largest)
          << "row " << i / shape_.heads << " head " << i % shape_.heads;
      ASSERT_NEAR(lse[i], expected_lse_[i], 1e-4)
          << "row " << i / shape_.heads << " head " << i % shape_.heads;
    }
  }

  void clear_results() {
    std::fill(out.begin(), out.end(), -1e30f);
    std::fill(lse.begin(), lse.end(), -1e30f);
  }

 private:
  void add_blocks(const SequenceOptions& options, std::mt19937& random) {
    const std::size_t half = std::size_t{shape_.kv_heads} * shape_.head_dim * shape_.block_tokens;
    std::normal_distribution<float> normal(0, 1);
    std::uint32_t position = 0;
    for (std::uint32_t left = options.keys; left > 0;) {
      KvBlockView view;
      view.tokens = std::min(left, shape_.block_tokens);
      if (options.partial_blocks && random() % 3 == 0) view.tokens = 1 + random() % view.tokens;
      view.first_position = position;
      // Every block is an allocation of its own, so an access beyond it is seen by the address sanitizer.
      std::vector<f16_bits>& block = blocks_.emplace_back(2 * half, kNan);
      for (std::size_t hd = 0; hd < std::size_t{shape_.kv_heads} * shape_.head_dim; ++hd) {
        for (std::uint32_t t = 0; t < view.tokens; ++t) {
          block[hd * shape_.block_tokens + t] = f16_from_float(normal(random));
          const std::size_t head = hd / shape_.head_dim;
          block[half + (head * shape_.block_tokens + t) * shape_.head_dim + hd % shape_.head_dim] =
              f16_from_float(normal(random));
        }
      }
      view.k = block.data();
      view.v = block.data() + half;
      views_.push_back(view);
      left -= view.tokens;
      position += shape_.block_tokens * (options.gaps ? 1 + random() % 3 : 1);
    }
    group.blocks = views_;
  }

  void allocate_results() {
    const std::size_t rows = std::size_t{group.rows} * shape_.heads;
    out.resize(rows * shape_.head_dim);
    lse.resize(rows);
    expected_out_.resize(out.size());
    expected_lse_.resize(lse.size());
    point_at_results();
    clear_results();
  }

  void point_at_results() {
    group.q = q_.data();
    group.out = out.data();
    group.lse = lse.data();
  }

  AttentionShape shape_;
  std::list<std::vector<f16_bits>> blocks_;
  std::vector<KvBlockView> views_;
  std::vector<float> q_;
  std::vector<float> expected_out_;
  std::vector<float> expected_lse_;
};

AttentionShape make_shape(std::uint32_t heads, std::uint32_t kv_heads, std::uint32_t head_dim,
                          std::uint32_t block_tokens) {
  return {.heads = heads,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .block_tokens = block_tokens,
          .scale = 1.0f / std::sqrt(static_cast<float>(head_dim))};
}

void attend(const AttentionShape& shape, std::span<const AttentionGroup> groups, std::uint32_t threads = 1) {
  AttentionBatch batch;
  batch.plan(shape, groups, threads);
  std::vector<std::jthread> others;
  for (std::uint32_t thread = 1; thread < threads; ++thread)
    others.emplace_back([&, thread] { batch.run(thread); });
  batch.run(0);
}

void attend(const AttentionShape& shape, const Sequence& sequence, std::uint32_t threads = 1) {
  attend(shape, std::span(&sequence.group, 1), threads);
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

/// Rows of `part` must equal the rows of `whole` from `first` on, bit by bit.
void expect_same_rows(const Sequence& part, const Sequence& whole, std::uint32_t first) {
  const std::size_t heads = part.lse.size() / part.group.rows;
  const std::size_t row_floats = part.out.size() / part.group.rows;
  EXPECT_TRUE(same_bits(part.out, std::span(whole.out).subspan(first * row_floats, part.out.size())));
  EXPECT_TRUE(same_bits(part.lse, std::span(whole.lse).subspan(first * heads, part.lse.size())));
}

template <typename T, std::size_t N>
T pick(const T (&from)[N], std::mt19937& random) {
  return from[random() % N];
}

class AttentionOnEveryTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { force_attention_target(GetParam()); }
  void TearDown() override { force_attention_target(""); }
};
INSTANTIATE_TEST_SUITE_P(Attention, AttentionOnEveryTarget, testing::ValuesIn(attention_targets()),
                         [](const auto& target) { return target.param; });

TEST_P(AttentionOnEveryTarget, AgreesWithTheReferenceOnRandomDecodeShapes) {
  for (unsigned seed = 1; seed <= 40; ++seed) {
    std::mt19937 random(seed);
    const std::uint32_t kv_heads = 1 + random() % 3;
    const std::uint32_t head_dim = pick({64u, 80u, 96u, 128u, 256u}, random);
    const AttentionShape shape =
        make_shape(kv_heads * (1 + random() % 8), kv_heads, head_dim, pick({16u, 32u, 64u}, random));
    SequenceOptions options;
    options.keys = 1 + random() % (seed % 8 == 0 ? 5000 : 300);
    options.rows = std::min(1 + static_cast<std::uint32_t>(random() % 4), options.keys);
    options.window = random() % 3 == 0 ? options.rows + random() % options.keys : 0;
    options.gaps = random() % 2 == 0;
    options.shuffled = random() % 2 == 0;
    options.partial_blocks = random() % 2 == 0;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << shape.heads << "/" << kv_heads
                                    << " heads of " << head_dim << ", blocks of " << shape.block_tokens
                                    << ", " << options.keys << " keys, " << options.rows << " rows, window "
                                    << options.window);
    Sequence sequence(shape, options, random);
    sequence.compute_reference();
    attend(shape, sequence, 1 + seed % 2);
    sequence.expect_near_reference();
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionOnEveryTarget, AgreesWithTheReferenceOnPrefillShapes) {
  const std::uint32_t rows_of[] = {5, 17, 64, 200};
  for (unsigned seed = 1; seed <= 4; ++seed) {
    std::mt19937 random(seed);
    const AttentionShape shape =
        make_shape(seed % 2 == 0 ? 9 : 4, seed % 2 == 0 ? 3 : 4, 64, seed < 3 ? 16 : 32);
    SequenceOptions options;
    options.rows = rows_of[seed - 1];
    options.keys = options.rows + random() % 1200;
    options.window = seed == 3 ? 50 : 0;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", " << options.keys << " keys, " << options.rows
                                    << " rows");
    Sequence sequence(shape, options, random);
    sequence.compute_reference();
    attend(shape, sequence, 2);
    sequence.expect_near_reference();
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionOnEveryTarget, GivesARowTheSameBitsAloneAndAmongOthers) {
  std::mt19937 random(7);
  const AttentionShape shape = make_shape(9, 3, 64, 32);
  Sequence whole(shape, {.keys = 1500, .rows = 100}, random);
  attend(shape, whole);
  for (const std::uint32_t count : {1u, 2u, 4u}) {
    for (const std::uint32_t first : {0u, 37u, 96u}) {
      SCOPED_TRACE(testing::Message() << count << " rows from " << first);
      Sequence part(whole, first, count);
      attend(shape, part);
      expect_same_rows(part, whole, first);
    }
  }
}

TEST_P(AttentionOnEveryTarget, RoundsStoredTokensToNearestEven) {
  const KvGeometry geometry{.layers = 1, .kv_heads = 2, .head_dim = 32, .block_tokens = 16};
  const std::size_t token = geometry.kv_heads * geometry.head_dim;
  std::mt19937 random(11);
  std::vector<float> k(3 * token);
  std::vector<float> v(3 * token);
  for (float& x : k)
    x = std::ldexp(std::normal_distribution<float>()(random), static_cast<int>(random() % 36) - 26);
  for (float& x : v) x = std::normal_distribution<float>()(random);
  v[0] = 1.0f + 0x1p-11f;  // between 1 and the next f16: goes to the even one, 1
  v[1] = 1.0f + 0x3p-11f;  // goes up
  v[2] = -0x1p-25f;        // half the least f16: to zero
  v[3] = 0x1.8p-24f;       // between 1 and 2 times the least: to 2
  std::vector<f16_bits> block_k(geometry.half_block_elements(), kNan);
  std::vector<f16_bits> block_v(geometry.half_block_elements(), kNan);

  store_tokens(geometry, k.data(), v.data(), 2, 5, block_k.data(), block_v.data());
  store_token(geometry, k.data() + 2 * token, v.data() + 2 * token, 7, block_k.data(), block_v.data());

  EXPECT_EQ(block_v[5 * 32], 0x3c00);
  EXPECT_EQ(block_v[5 * 32 + 1], 0x3c02);
  EXPECT_EQ(block_v[5 * 32 + 2], 0x8000);
  EXPECT_EQ(block_v[5 * 32 + 3], 2);
  for (std::size_t head = 0; head < 2; ++head) {
    for (std::size_t d = 0; d < 32; ++d) {
      for (std::size_t t = 0; t < 16; ++t) {
        const bool stored = t >= 5 && t < 8;
        const std::size_t from = (t - 5) * token + head * 32 + d;
        EXPECT_EQ(block_k[(head * 32 + d) * 16 + t], stored ? f16_from_float(k[from]) : kNan) << k[from];
        EXPECT_EQ(block_v[(head * 16 + t) * 32 + d], stored ? f16_from_float(v[from]) : kNan) << v[from];
      }
    }
  }
}

TEST(Attention, IgnoresNanInTokensBeyondTheBlocksEnd) {
  std::mt19937 random(3);
  const AttentionShape shape = make_shape(4, 2, 64, 32);
  Sequence sequence(shape, {.keys = 33}, random);  // the second block holds one token and 31 NaN
  sequence.compute_reference();
  attend(shape, sequence);
  sequence.expect_near_reference();
}

TEST(Attention, SeesOnlyTheKeysOfTheWindow) {
  std::mt19937 random(5);
  const AttentionShape shape = make_shape(2, 1, 64, 16);
  Sequence windowed(shape, {.keys = 400, .rows = 1, .window = 16}, random);
  attend(shape, windowed);
  Sequence last_block(windowed, 0, 1);  // 400 = 25 * 16: the window is exactly the last block
  last_block.group.window = 0;
  last_block.group.blocks = std::span(windowed.views()).last(1);
  attend(shape, last_block);
  EXPECT_LT(std::abs(windowed.out[0] - last_block.out[0]), 1e-6);
  EXPECT_LT(std::abs(windowed.lse[0] - last_block.lse[0]), 1e-5);
}

TEST(Attention, DoesNotTouchBlocksThatNoRowSees) {
  std::mt19937 random(6);
  const AttentionShape shape = make_shape(2, 1, 64, 32);
  Sequence sequence(shape, {.keys = 4064, .rows = 2, .window = 40}, random);
  sequence.compute_reference();
  std::vector<KvBlockView> views = sequence.views();
  // The rows see keys 4,023 to 4,063: blocks 125 and 126. Block 124 shares a tile with 125, and two tiles of
  // the same split come before it.
  for (std::size_t i = 0; i < 125; ++i) views[i].k = views[i].v = nullptr;
  sequence.group.blocks = views;
  attend(shape, sequence);
  sequence.expect_near_reference();
}

TEST(Attention, GivesHiddenKeysNoWeightAtAll) {
  std::mt19937 random(14);
  const AttentionShape shape = make_shape(2, 1, 64, 32);
  Sequence sequence(shape, {.keys = 90, .rows = 1}, random);
  sequence.group.first_row_position = 49;
  std::vector<f16_bits> values(shape.block_tokens * shape.head_dim, 0);
  std::vector<KvBlockView> views = sequence.views();
  views[0].v = values.data();  // keys 0 to 31 have zeros
  std::vector<f16_bits> mixed = values;
  std::fill(mixed.begin() + 18 * shape.head_dim, mixed.end(), f16_from_float(60000));
  views[1].v = mixed.data();  // 32 to 49 have zeros, 50 to 63 do not
  sequence.group.blocks = views;
  attend(shape, sequence);
  for (const float x : sequence.out) EXPECT_EQ(x, 0.0f);
}

TEST(Attention, KeepsItsPrecisionWhenTheMaximumGrowsWithEveryTile) {
  std::mt19937 random(8);
  const AttentionShape shape{.heads = 1, .kv_heads = 1, .head_dim = 16, .block_tokens = 16, .scale = 12.0f};
  Sequence sequence(shape, {.keys = 3000, .rows = 1}, random);
  sequence.compute_reference();
  attend(shape, sequence, 2);
  sequence.expect_near_reference();
}

TEST(Attention, GivesTheSameBitsForAnyNumberOfThreads) {
  std::mt19937 random(9);
  const AttentionShape shape = make_shape(9, 3, 64, 32);
  for (const std::uint32_t rows : {1u, 2u, 70u}) {
    SCOPED_TRACE(rows);
    Sequence one(shape, {.keys = 5000, .rows = rows}, random);
    attend(shape, one, 1);
    for (const std::uint32_t threads : {2u, 3u, 8u}) {
      Sequence several(one, 0, rows);
      attend(shape, several, threads);
      expect_same_rows(several, one, 0);
    }
  }
}

TEST(Attention, GivesAGroupTheSameBitsAloneAndBesideOtherGroups) {
  std::mt19937 random(10);
  const AttentionShape shape = make_shape(6, 2, 64, 16);
  Sequence a(shape, {.keys = 3000, .rows = 2, .gaps = true}, random);
  Sequence b(shape, {.keys = 50, .rows = 1}, random);
  Sequence c(shape, {.keys = 700, .rows = 60, .window = 200}, random);
  for (const Sequence* alone : {&a, &b, &c}) attend(shape, *alone, 2);
  Sequence a2(a, 0, 2);
  Sequence b2(b, 0, 1);
  Sequence c2(c, 0, 60);
  const AttentionGroup together[] = {c2.group, a2.group, b2.group};
  attend(shape, together, 2);
  expect_same_rows(a2, a, 0);
  expect_same_rows(b2, b, 0);
  expect_same_rows(c2, c, 0);
}

TEST(Attention, GivesTheSameBitsWhenTheKeysComeInSeveralCalls) {
  for (const std::uint32_t rows : {1u, 2u, 70u}) {
    for (const std::uint32_t window : {0u, 300u}) {
      std::mt19937 random(rows + window);
      const AttentionShape shape = make_shape(6, 2, 64, 16);
      Sequence whole(shape, {.keys = 1700, .rows = rows, .window = window}, random);
      attend(shape, whole);
      const auto blocks = whole.group.blocks;
      const std::size_t split_blocks = kSplitKeys / shape.block_tokens;
      for (const std::size_t splits_per_call : {1u, 2u, 5u}) {
        for (const std::uint32_t threads : {1u, 3u}) {
          Sequence part(whole, 0, rows);
          std::vector<float> max(part.lse.size());
          std::vector<float> sum(part.lse.size());
          const std::size_t step = splits_per_call * split_blocks;
          for (std::size_t first = 0; first < blocks.size(); first += step) {
            AttentionGroup group = part.group;
            group.blocks = blocks.subspan(first, std::min(step, blocks.size() - first));
            group.carry = {.max = max.data(),
                           .sum = sum.data(),
                           .resume = first > 0,
                           .more = first + step < blocks.size()};
            attend(shape, std::span(&group, 1), threads);
          }
          SCOPED_TRACE(testing::Message() << rows << " rows, window " << window << ", " << splits_per_call
                                          << " splits a call, " << threads << " threads");
          expect_same_rows(part, whole, 0);
        }
      }
    }
  }
}

TEST(Attention, CanPlanSmallerAndLargerBatchesOneAfterTheOther) {
  std::mt19937 random(12);
  const AttentionShape shape = make_shape(4, 2, 64, 32);
  Sequence small(shape, {.keys = 40}, random);
  Sequence large(shape, {.keys = 2500, .rows = 100}, random);
  AttentionBatch batch;
  for (Sequence* sequence : {&small, &large, &small}) {
    sequence->clear_results();
    sequence->compute_reference();
    batch.plan(shape, std::span(&sequence->group, 1), 1);
    batch.run(0);
    sequence->expect_near_reference();
  }
}

TEST(MergeAttention, GivesTheAttentionOverBothSetsOfKeys) {
  std::mt19937 random(13);
  const AttentionShape shape = make_shape(4, 2, 64, 16);
  Sequence both(shape, {.keys = 600, .rows = 3, .shuffled = true}, random);
  Sequence a(both, 0, 3);
  Sequence b(both, 0, 3);
  // The rows see all keys, so any cut is a cut of what each row sees.
  both.group.first_row_position = a.group.first_row_position = b.group.first_row_position = 600;
  a.group.blocks = std::span(both.views()).first(9);
  b.group.blocks = std::span(both.views()).subspan(9);
  both.compute_reference();
  attend(shape, a);
  attend(shape, b);
  for (std::size_t i = 0; i < a.lse.size(); ++i) {
    merge_attention(a.out.data() + i * 64, a.lse[i], b.out.data() + i * 64, b.lse[i], 64);
  }
  both.out = a.out;
  both.lse = a.lse;
  both.expect_near_reference();
}

TEST(MergeAttention, TakesAnLseOfMinusInfinityAsNoKeys) {
  const float none = -std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float a[2] = {1, 2};
  float lse = 0.5f;
  const float nothing[2] = {nan, nan};
  merge_attention(a, lse, nothing, none, 2);
  EXPECT_EQ(a[0], 1);
  EXPECT_EQ(lse, 0.5f);
  float b[2] = {nan, nan};
  float lse_b = none;
  merge_attention(b, lse_b, a, lse, 2);
  EXPECT_EQ(b[1], 2);
  EXPECT_EQ(lse_b, 0.5f);
}

TEST(F16, SurvivesTheWayToFloatAndBack) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<f16_bits>(bits);
    const float value = float_from_f16(half);
    if (std::isnan(value)) continue;
    ASSERT_EQ(f16_from_float(value), half);
  }
  EXPECT_EQ(f16_from_float(65519.996f), 0x7bff);
  EXPECT_EQ(f16_from_float(65520.0f), 0x7c00);
}

}  // namespace
}  // namespace dualdecoder
