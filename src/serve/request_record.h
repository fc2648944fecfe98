// What is told about a request that has been answered, for the log. Never its text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace dualdecoder {

/// Sums over the answers of one request; times are those of the first.
struct RequestUsage {
  std::uint64_t prompt_tokens = 0;  // a prompt with several answers counts once
  std::uint64_t cached_tokens = 0;  // of these, not computed
  std::uint64_t completion_tokens = 0;
  double queue_s = 0.0;
  double prompt_s = 0.0;
  double decode_s = 0.0;
};

inline constexpr unsigned kStatusClientLeft = 499;  // as proxies log it; nobody was left to be told

struct RequestRecord {
  std::string id = {};  // of the answer, as the client has it; the header X-Request-Id
  std::string method = {};
  std::string path = {};
  unsigned status = 0;
  bool stream = false;
  double seconds = 0.0;
  std::string error = {};                  // code or type of the error object, also of one within a stream
  std::string detail = {};                 // message of a failure of ours
  std::optional<RequestUsage> usage = {};  // of completions that were let in
};

}  // namespace dualdecoder
