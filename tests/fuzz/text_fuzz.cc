// Tokens' bytes to text: valid UTF-8 in every piece, the same text however the bytes are cut, and nothing of
// a stop string. The input: a number of stop strings, each with its length, then pieces with theirs.
#include <vector>

#include "base/check.h"
#include "decode/text_assembler.h"
#include "fuzz.h"

using namespace dualdecoder;

namespace {

bool is_utf8(std::string_view text) {
  Utf8Stream stream;
  std::string same;
  stream.push(text, same);
  return stream.replaced() == 0 && stream.partial_bytes() == 0;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(as_text(data, size));
  std::vector<std::string> stops;
  for (int count = input.byte() % 4; count > 0; --count) stops.emplace_back(input.take(input.byte() % 16));
  if (!validate_stop_strings(stops)) stops.clear();

  TextAssembler pieces(stops);
  TextAssembler bytes(stops);
  std::string from_pieces;
  std::string from_bytes;
  while (!input.empty()) {
    const std::string_view piece = input.take(1 + input.byte() % 16);
    const std::string text = pieces.push(piece);
    DD_CHECK(is_utf8(text), "{}", text);
    from_pieces += text;
    for (std::size_t i = 0; i < piece.size(); ++i) from_bytes += bytes.push(piece.substr(i, 1));
    DD_CHECK(from_pieces == from_bytes && pieces.stopped() == bytes.stopped());
  }
  from_pieces += pieces.finish();
  DD_CHECK(is_utf8(from_pieces));
  DD_CHECK(from_pieces == from_bytes + bytes.finish());
  for (const std::string& stop : stops) DD_CHECK(from_pieces.find(stop) == std::string::npos, "{}", stop);
  return 0;
}
