#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace dualdecoder {

void check_failed(const char* file, int line, const char* condition, std::string_view details) {
  fmt::print(stderr, "{}:{}: check failed: {}{}{}\n", file, line, condition, details.empty() ? "" : ": ",
             details);
  std::fflush(stderr);
  std::abort();
}

}  // namespace dualdecoder
