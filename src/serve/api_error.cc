#include "serve/api_error.h"

#include <utility>

#include <nlohmann/json.hpp>

namespace dualdecoder {

nlohmann::ordered_json ApiError::json() const {
  const auto or_null = [](const std::string& text) {
    return text.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(text);
  };
  nlohmann::ordered_json error = {
      {"message", message}, {"type", type}, {"param", or_null(param)}, {"code", or_null(code)}};
  if (prompt_tokens) error["n_prompt_tokens"] = *prompt_tokens;
  if (context) error["n_ctx"] = *context;
  return {{"error", std::move(error)}};
}

ApiError bad_field(std::string param, std::string message) {
  return {.status = 400, .message = std::move(message), .param = std::move(param)};
}

ApiError api_error(const Error& error) {
  switch (error.code) {
    case ErrorCode::kInvalidArgument:
      return {.status = 400, .message = error.message};
    case ErrorCode::kContextExceeded:
      return {.status = 400,
              .type = "exceed_context_size_error",
              .message = error.message,
              .code = "context_length_exceeded"};
    case ErrorCode::kUnsupported:
      return {.status = 501, .type = "not_supported_error", .message = error.message};
    case ErrorCode::kOutOfMemory:
      return {.status = 503, .type = "server_error", .message = error.message, .code = "out_of_memory"};
    case ErrorCode::kNotFound:
    case ErrorCode::kCorrupt:
    case ErrorCode::kIo:
    case ErrorCode::kInternal:
      break;
  }
  return {
      .status = 500, .type = "server_error", .message = error.message, .code = error_code_name(error.code)};
}

}  // namespace dualdecoder
