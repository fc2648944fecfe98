// Checks for our own mistakes. They stay on in release builds: a wrong KV block costs more than a compare.
// DD_CHECK(slot < slots_, "slot {} of {}", slot, slots_) prints the condition, the values and the place, then
// aborts.
#pragma once

#include <string_view>

#include <fmt/format.h>

namespace dualdecoder {

[[noreturn]] void check_failed(const char* file, int line, const char* condition, std::string_view details);

}  // namespace dualdecoder

#define DD_CHECK(condition, ...)                                                                  \
  do {                                                                                            \
    if (!(condition)) [[unlikely]] {                                                              \
      ::dualdecoder::check_failed(__FILE__, __LINE__, #condition, ::fmt::format("" __VA_ARGS__)); \
    }                                                                                             \
  } while (false)
