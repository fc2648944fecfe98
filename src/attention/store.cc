// Writes new tokens into blocks.
#include "attention/attention.h"
#include "attention/kernel.h"
#include "base/check.h"

namespace dualdecoder {

void store_tokens(const KvGeometry& geometry, const float* k, const float* v, std::uint32_t count,
                  std::uint32_t index, f16_bits* block_k, f16_bits* block_v) {
  constexpr std::uint32_t kBlockTokensMax = 64;
  constexpr std::uint32_t kHeadDimMax = 256;
  const std::uint32_t head_dim = geometry.head_dim;
  const std::size_t token_floats = std::size_t{geometry.kv_heads} * head_dim;
  DD_CHECK(index + count <= geometry.block_tokens && geometry.block_tokens <= kBlockTokensMax &&
               head_dim <= kHeadDimMax,
           "tokens {} to {} in a block of {}, head_dim {}", index, index + count, geometry.block_tokens,
           head_dim);
  const Kernels& kernels = current_kernels();
  f16_bits keys[kBlockTokensMax * kHeadDimMax];  // [count, head_dim] of one head, before it is transposed
  for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
    for (std::uint32_t t = 0; t < count; ++t) {
      kernels.to_f16(k + t * token_floats + std::size_t{head} * head_dim, head_dim, keys + t * head_dim);
      kernels.to_f16(v + t * token_floats + std::size_t{head} * head_dim, head_dim,
                     block_v + (std::size_t{head} * geometry.block_tokens + index + t) * head_dim);
    }
    for (std::uint32_t d = 0; d < head_dim; ++d) {
      f16_bits* const to = block_k + (std::size_t{head} * head_dim + d) * geometry.block_tokens + index;
      for (std::uint32_t t = 0; t < count; ++t) to[t] = keys[t * head_dim + d];
    }
  }
}

}  // namespace dualdecoder
