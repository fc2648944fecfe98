#include "decode/tier_options.h"

#include <array>
#include <charconv>
#include <utility>
#include <vector>

#include <fmt/ranges.h>

#include "base/units.h"

namespace dualdecoder {
namespace {

constexpr std::array<std::pair<Policy, const char*>, 8> kPolicies = {
    {{Policy::kFull, "full"},
     {Policy::kReactive, "reactive"},
     {Policy::kLastSet, "last-set"},
     {Policy::kPrevious, "previous"},
     {Policy::kAuto, "auto"},
     {Policy::kDual, "dual"},
     {Policy::kPreviousLayer, "previous-layer"},
     {Policy::kOracle, "oracle"}}};

}  // namespace

const char* policy_name(Policy policy) {
  for (const auto& [value, name] : kPolicies) {
    if (value == policy) return name;
  }
  return "";
}

Result<Policy> parse_policy(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& [value, known] : kPolicies) {
    if (name == known) return value;
    names.emplace_back(known);
  }
  return fail(ErrorCode::kInvalidArgument, "--policy {}: there are {}", name, fmt::join(names, ", "));
}

Result<Correction> parse_correction(const std::string& text) {
  if (text == "none") return Correction{};
  if (text == "miss") return Correction{.kind = Correction::Kind::kMiss, .cosine = 0.0f};
  const std::string prefix = "cosine:";
  if (text.starts_with(prefix)) {
    Correction correction{.kind = Correction::Kind::kCosine, .cosine = 0.0f};
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + prefix.size(), end, correction.cosine);
    if (error == std::errc() && stop == end && correction.cosine >= -1.0f && correction.cosine <= 1.0f)
      return correction;
  }
  return fail(ErrorCode::kInvalidArgument, "--correct {}: write none, miss or cosine:T with T from -1 to 1",
              text);
}

Result<std::optional<std::uint32_t>> parse_residency(const std::string& text) {
  if (text == "auto") return std::nullopt;
  if (text == "all") return UINT32_MAX;
  if (text == "none") return 0;
  std::uint32_t layers = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, layers);
  if (!text.empty() && error == std::errc() && stop == end) return layers;
  return fail(ErrorCode::kInvalidArgument, "--residency {}: write auto, all, none or a number of layers",
              text);
}

Result<FarChoice> parse_far(const std::string& text) {
  if (text == "none") return FarChoice{};
  if (text == "host") return FarChoice{.kind = FarKind::kHost, .directory = {}, .make_port = {}};
  const std::string file = "file:";
  if (text.starts_with(file) && text.size() > file.size()) {
    return FarChoice{.kind = FarKind::kFile, .directory = text.substr(file.size()), .make_port = {}};
  }
  const std::string link = "link:";
  const std::size_t at = text.rfind('@');
  if (text.starts_with(link) && at != std::string::npos) {
    const auto bandwidth = parse_size(std::string_view(text).substr(link.size(), at - link.size()));
    const auto latency_us = parse_size(std::string_view(text).substr(at + 1));
    if (bandwidth && *bandwidth > 0 && latency_us && *latency_us <= 1'000'000) {
      return FarChoice{.kind = FarKind::kHost,
                       .directory = {},
                       .link = Link{.bytes_per_s = static_cast<double>(*bandwidth),
                                    .latency = std::chrono::microseconds(*latency_us)},
                       .make_port = {}};
    }
  }
  return fail(ErrorCode::kInvalidArgument,
              "--far {}: write none, host, file:DIRECTORY, or link:BANDWIDTH@MICROSECONDS as in link:2GiB@50",
              text);
}

}  // namespace dualdecoder
