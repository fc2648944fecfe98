// What a client is told when a request is refused or fails: an HTTP status and OpenAI's error object.
#pragma once

#include <cstdint>
#include <expected>
#include <optional>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "base/error.h"

namespace dualdecoder {

struct ApiError {
  unsigned status = 400;
  std::string type = "invalid_request_error";
  std::string message = {};
  std::string param = {};  // the field at fault; empty: none in particular
  std::string code = {};   // for programs, e.g. "context_length_exceeded"
  std::optional<std::uint32_t> retry_after_s = {};
  // Of "exceed_context_size_error".
  std::optional<std::uint32_t> prompt_tokens = {};
  std::optional<std::uint32_t> context = {};

  /// {"error": {...}}
  nlohmann::ordered_json json() const;
};

template <typename T>
using ApiResult = std::expected<T, ApiError>;
using ApiStatus = ApiResult<void>;

/// An engine's error as a client sees it: 400 for what the client can mend, 500 or 503 for the rest.
ApiError api_error(const Error& error);
/// 400, naming the field.
ApiError bad_field(std::string param, std::string message);

}  // namespace dualdecoder
