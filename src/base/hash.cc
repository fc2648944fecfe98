#include "base/hash.h"

#include <algorithm>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace dualdecoder {

std::uint64_t hash_bytes(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::size_t piece_bytes,
                         const std::function<void(std::size_t begin, std::size_t end)>& read) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (std::size_t begin = 0; begin < bytes.size(); begin += piece_bytes) {
    const std::size_t end = std::min(begin + piece_bytes, bytes.size());
    XXH3_64bits_update(&state, bytes.data() + begin, end - begin);
    read(begin, end);
  }
  return XXH3_64bits_digest(&state);
}

}  // namespace dualdecoder
