// GCC's coverage for libFuzzer, which wants Clang's: GCC calls a function at each edge, and libFuzzer looks
// at counters. So the function counts, in a counter that the place of its call chooses. Linked before
// libFuzzer's own function of that name, which only says that it is no longer supported.
#include <cstdint>

extern "C" {

constexpr unsigned kCounterBits = 16;
static char counters[1U << kCounterBits];

void __sanitizer_cov_8bit_counters_init(char* begin, char* end);

void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  ++counters[(place * 0x9E3779B97F4A7C15U) >> (64 - kCounterBits)];
}

// Comparisons of floats, which libFuzzer has no use for.
void __sanitizer_cov_trace_cmpf(float, float) {}
void __sanitizer_cov_trace_cmpd(double, double) {}

[[gnu::constructor]] static void register_counters() {
  __sanitizer_cov_8bit_counters_init(counters, counters + sizeof(counters));
}

}  // extern "C"
