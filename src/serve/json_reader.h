// Reading what strangers send: JSON of bounded size and depth, and its fields by name, type and range.
// Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "serve/api_error.h"

namespace dualdecoder {

inline constexpr std::size_t kJsonDepthMax = 64;

/// 400 for what is not JSON, not valid UTF-8, nested deeper than kJsonDepthMax, or not an object. Of equal
/// keys the last one counts.
ApiResult<nlohmann::json> parse_json_object(std::string_view text);

/// The fields of one object. A field that is absent or null has no value; one of a wrong type or out of range
/// has none either, and the first such stays as error(). Fields that nobody asks for are ignored.
class JsonReader {
 public:
  /// `path` stands before the names of fields in messages, e.g. "stream_options.".
  explicit JsonReader(const nlohmann::json& object, std::string path = {})
      : object_(object), path_(std::move(path)) {}

  std::optional<bool> boolean(const char* name);
  /// A whole number; 3.0 is one, 1.5 is not.
  std::optional<std::int64_t> integer(const char* name, std::int64_t min,
                                      std::int64_t max = std::numeric_limits<std::int64_t>::max());
  std::optional<double> number(const char* name, double min, double max);
  std::optional<std::string> string(const char* name, std::size_t bytes_max);
  const nlohmann::json* object(const char* name);
  /// Null when it is absent or null.
  const nlohmann::json* any(const char* name) const;

  /// Refuses `name`, if nothing was refused before.
  void refuse(const std::string& name, const std::string& message);
  /// What `inner`, which reads an object within this one, has refused.
  void refuse_as(const JsonReader& inner) {
    if (!error_) error_ = inner.error_;
  }
  ApiStatus status() const { return error_ ? ApiStatus(std::unexpected(*error_)) : ApiStatus(); }

 private:
  const nlohmann::json& object_;
  std::string path_;
  std::optional<ApiError> error_;
};

/// "a string", "a number", ... for messages.
std::string json_kind(const nlohmann::json& value);

}  // namespace dualdecoder
