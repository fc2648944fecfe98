// Random numbers that are the same with every compiler and library, unlike those of the standard
// distributions: for whatever a seed must bring back exactly. Not for secrets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace dualdecoder {

/// SplitMix64 (Steele, Lea and Flood 2014).
class Random {
 public:
  /// Different `stream`s of a seed have nothing to do with each other.
  explicit Random(std::uint64_t seed, std::uint64_t stream = 0) : state_(seed) {
    state_ = next() ^ (stream * 0xD1342543DE82EF95);
    next();
  }

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

  /// 0 .. count - 1, count not 0; each value's chance is off by less than count / 2^32.
  std::uint32_t below(std::uint32_t count) {
    return static_cast<std::uint32_t>(((next() >> 32) * count) >> 32);
  }

  template <typename List>
  const auto& pick(const List& list) {
    return list[below(static_cast<std::uint32_t>(std::size(list)))];
  }

  template <typename T>
  void shuffle(std::vector<T>& list) {
    for (std::size_t i = list.size(); i > 1; --i)
      std::swap(list[i - 1], list[below(static_cast<std::uint32_t>(i))]);
  }

 private:
  std::uint64_t state_;
};

}  // namespace dualdecoder
