// What the kernel is tested against, and the small host-side arithmetic around it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/attention.h"
#include "base/f16.h"

namespace dualdecoder {

namespace {

/// One row under one query head.
void reference_row(const AttentionShape& shape, const AttentionGroup& group, std::uint32_t row,
                   std::uint32_t head) {
  const std::size_t head_dim = shape.head_dim;
  const std::size_t kv_head = head / (shape.heads / shape.kv_heads);
  const std::size_t at = std::size_t{row} * shape.heads + head;
  const float* q = group.q + at * head_dim;
  const std::int64_t position = std::int64_t{group.first_row_position} + row;

  std::vector<double> scores;
  std::vector<const f16_bits*> values;  // [head_dim] each
  for (const KvBlockView& block : group.blocks) {
    for (std::uint32_t t = 0; t < block.tokens; ++t) {
      const std::int64_t key = std::int64_t{block.first_position} + t;
      if (key > position || (group.window > 0 && key <= position - std::int64_t{group.window})) continue;
      double score = 0;
      for (std::size_t d = 0; d < head_dim; ++d) {
        score += double{q[d]} * float_from_f16(block.k[(kv_head * head_dim + d) * shape.block_tokens + t]);
      }
      scores.push_back(score * shape.scale);
      values.push_back(block.v + (kv_head * shape.block_tokens + t) * head_dim);
    }
  }

  const double max = scores.empty() ? 0 : *std::max_element(scores.begin(), scores.end());
  std::vector<double> out(head_dim, 0.0);
  double sum = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - max);
    sum += weight;
    for (std::size_t d = 0; d < head_dim; ++d) out[d] += weight * float_from_f16(values[i][d]);
  }
  for (std::size_t d = 0; d < head_dim; ++d) group.out[at * head_dim + d] = static_cast<float>(out[d] / sum);
  if (group.lse != nullptr) group.lse[at] = static_cast<float>(max + std::log(sum));
}

}  // namespace

void attention_reference(const AttentionShape& shape, const AttentionGroup& group) {
  for (std::uint32_t row = 0; row < group.rows; ++row) {
    for (std::uint32_t head = 0; head < shape.heads; ++head) reference_row(shape, group, row, head);
  }
}

void merge_attention(float* out_a, float& lse_a, const float* out_b, float lse_b, std::uint32_t head_dim) {
  if (lse_b == -std::numeric_limits<float>::infinity()) return;  // saw no key; its out means nothing
  const float max = std::max(lse_a, lse_b);
  const float a = std::exp(lse_a - max);
  const float b = std::exp(lse_b - max);
  for (std::uint32_t d = 0; d < head_dim; ++d) {
    out_a[d] = a == 0 ? out_b[d] : (a * out_a[d] + b * out_b[d]) / (a + b);
  }
  lse_a = max + std::log(a + b);
}

}  // namespace dualdecoder
