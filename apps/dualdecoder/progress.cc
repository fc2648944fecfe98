#include "progress.h"

#include <cstdlib>

#include <fmt/format.h>
#include <unistd.h>

namespace dualdecoder {
namespace {

constexpr double kFirstAfterS = 0.3;  // what ends sooner needs no line
constexpr double kRedrawEveryS = 0.1;
constexpr double kPlainLineEveryS = 5.0;  // where there is no terminal

std::string format_seconds(double seconds) {
  const auto whole = static_cast<long>(seconds + 0.5);
  return whole < 60 ? fmt::format("{} s", whole) : fmt::format("{}:{:02} min", whole / 60, whole % 60);
}

}  // namespace

ProgressLine::ProgressLine(std::string stage)
    : stage_(std::move(stage)),
      terminal_(isatty(STDERR_FILENO) == 1),
      last_s_(terminal_ ? kFirstAfterS : 0.0) {
  const char* no_color = std::getenv("NO_COLOR");
  dim_ = terminal_ && (no_color == nullptr || *no_color == '\0');
}

void ProgressLine::update(double share, std::string_view details) {
  const double now = watch_.seconds();
  if (now < last_s_ + (terminal_ ? (drawn_ ? kRedrawEveryS : 0.0) : kPlainLineEveryS)) return;
  last_s_ = now;
  const std::string left = share > 0.0 ? format_seconds(now / share * (1.0 - share)) : "?";
  const std::string line = fmt::format("{} {:3.0f} %  {}  {} left", stage_, share * 100.0, details, left);
  if (terminal_) {
    fmt::print(stderr, "\r\x1b[K{}{}{}", dim_ ? "\x1b[2m" : "", line, dim_ ? "\x1b[0m" : "");
    std::fflush(stderr);
    drawn_ = true;
  } else {
    fmt::print(stderr, "{}\n", line);
  }
}

void ProgressLine::clear() {
  if (!drawn_) return;
  fmt::print(stderr, "\r\x1b[K");
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace dualdecoder
