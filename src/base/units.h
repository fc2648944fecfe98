// Sizes as people write and read them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace dualdecoder {

/// "64MiB", "1.5 GiB", "32k", "4096" -> a number (of bytes, or of tokens). K, M, G and T are powers of 1,024,
/// with or without "B" or "iB".
Result<std::uint64_t> parse_size(std::string_view text);
/// Three significant figures and a binary unit, e.g. "183 MiB".
std::string format_bytes(double bytes);

}  // namespace dualdecoder
