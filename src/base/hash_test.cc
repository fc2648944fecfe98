#include "base/hash.h"

#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace dualdecoder {
namespace {

TEST(HashBytes, InPiecesIsTheHashOfTheWholeAndTellsEachPieceOnce) {
  std::vector<std::byte> bytes(100'003);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * i >> 3);
  for (const std::size_t piece : {1000U, 4096U, 100'003U, 1'000'000U}) {
    std::size_t next = 0;
    const std::uint64_t hash = hash_bytes(bytes, piece, [&](std::size_t begin, std::size_t end) {
      EXPECT_EQ(begin, next);
      EXPECT_EQ(end, std::min(begin + piece, bytes.size()));
      next = end;
    });
    EXPECT_EQ(next, bytes.size());
    EXPECT_EQ(hash, hash_bytes(bytes)) << "pieces of " << piece;
  }
}

}  // namespace
}  // namespace dualdecoder
