// The words that made-up texts consist of: plain English, each a single word and in one list only once.
#pragma once

#include <span>
#include <string_view>

namespace dualdecoder {

std::span<const std::string_view> nouns();
std::span<const std::string_view> adjectives();
std::span<const std::string_view> names();
std::span<const std::string_view> places();

}  // namespace dualdecoder
