// Hashes of data, for comparing runs and naming things. Not for secrets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace dualdecoder {

/// XXH3, 64 bits.
std::uint64_t hash_bytes(std::span<const std::byte> bytes);
/// The same of much data, from which `read` is told after each piece that it has been read up to there.
std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::size_t piece_bytes,
                         const std::function<void(std::size_t begin, std::size_t end)>& read);

template <typename T>
std::uint64_t hash_values(std::span<const T> values) {
  return hash_bytes(std::as_bytes(values));
}

}  // namespace dualdecoder
