// Hashes of data, for comparing runs and naming things. Not for secrets.
#pragma once

#include <cstdint>
#include <span>

namespace dualdecoder {

/// XXH3, 64 bits.
std::uint64_t hash_bytes(std::span<const std::byte> bytes);

template <typename T>
std::uint64_t hash_values(std::span<const T> values) {
  return hash_bytes(std::as_bytes(values));
}

}  // namespace dualdecoder
