#include "serve/json_reader.h"

#include <cmath>

namespace dualdecoder {
namespace {

using nlohmann::json;

constexpr std::size_t kQuotedBytesMax = 300;

// The library's own parser keeps its nesting on the heap, but what it builds is also copied and walked: so
// depth ends here, before anything is built.
std::size_t nesting(std::string_view text) {
  std::size_t depth = 0;
  std::size_t deepest = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if ((c == '}' || c == ']') && depth > 0) {
      --depth;
    }
  }
  return deepest;
}

// Whole numbers only, and only those that 64 bits hold.
std::optional<std::int64_t> whole(const json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<std::uint64_t>();
    if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
    return static_cast<std::int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double number = value.get<double>();
  if (std::nearbyint(number) != number || std::abs(number) >= 0x1p63) return std::nullopt;
  return static_cast<std::int64_t>(number);
}

}  // namespace

std::string json_kind(const json& value) {
  if (value.is_null()) return "null";
  if (value.is_boolean()) return "a boolean";
  if (value.is_number_float()) return fmt::format("the number {}", value.get<double>());
  if (value.is_number()) return "the number " + value.dump();
  if (value.is_string()) return "a string";
  return value.is_array() ? "a list" : "an object";
}

ApiResult<json> parse_json_object(std::string_view text) {
  const auto bad = [](std::string message) {
    return std::unexpected(ApiError{.status = 400, .message = std::move(message), .code = "invalid_json"});
  };
  if (text.empty()) return bad("the body is empty; wanted is a JSON object");
  if (const std::size_t depth = nesting(text); depth > kJsonDepthMax) {
    return bad(fmt::format("the body is nested {} levels deep; at most {} are taken", depth, kJsonDepthMax));
  }
  try {
    json value = json::parse(text);
    if (!value.is_object()) return bad(fmt::format("the body is {}; wanted is an object", json_kind(value)));
    return value;
  } catch (const json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    const std::string_view what = error.what();
    const std::size_t end = what.find("] ");
    const std::string_view message = end == what.npos ? what : what.substr(end + 2);
    // It quotes the body as far as it had come within a string.
    return bad(fmt::format("the body is not JSON: {}", message.substr(0, kQuotedBytesMax)));
  }
}

const json* JsonReader::any(const char* name) const {
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void JsonReader::refuse(const std::string& name, const std::string& message) {
  if (!error_) error_ = bad_field(path_ + name, fmt::format("{}{}: {}", path_, name, message));
}

std::optional<bool> JsonReader::boolean(const char* name) {
  const json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_boolean()) return value->get<bool>();
  refuse(name, fmt::format("wanted is true or false, not {}", json_kind(*value)));
  return std::nullopt;
}

std::optional<std::int64_t> JsonReader::integer(const char* name, std::int64_t min, std::int64_t max) {
  const json* value = any(name);
  if (value == nullptr) return std::nullopt;
  const auto number = whole(*value);
  if (number && *number >= min && *number <= max) return number;
  refuse(name, fmt::format("wanted is a whole number from {} to {}, not {}", min, max, json_kind(*value)));
  return std::nullopt;
}

std::optional<double> JsonReader::number(const char* name, double min, double max) {
  const json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) {
    const double number = value->get<double>();
    if (number >= min && number <= max) return number;
  }
  refuse(name, fmt::format("wanted is a number from {} to {}, not {}", min, max, json_kind(*value)));
  return std::nullopt;
}

std::optional<std::string> JsonReader::string(const char* name, std::size_t bytes_max) {
  const json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) {
    refuse(name, fmt::format("wanted is a string, not {}", json_kind(*value)));
    return std::nullopt;
  }
  const auto& text = value->get_ref<const std::string&>();
  if (text.size() <= bytes_max) return text;
  refuse(name, fmt::format("at most {} bytes are taken, it has {}", bytes_max, text.size()));
  return std::nullopt;
}

const json* JsonReader::object(const char* name) {
  const json* value = any(name);
  if (value == nullptr || value->is_object()) return value;
  refuse(name, fmt::format("wanted is an object, not {}", json_kind(*value)));
  return nullptr;
}

}  // namespace dualdecoder
