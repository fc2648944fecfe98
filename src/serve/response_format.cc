#include "serve/response_format.h"

#include <optional>
#include <string>

#include "serve/json_reader.h"
#include "serve/schema_grammar.h"

namespace dualdecoder {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::size_t kFormatNameBytesMax = 256;

ApiResult<std::shared_ptr<const Grammar>> compile(const std::string& field, const std::string& gbnf) {
  auto grammar = Grammar::parse(gbnf);
  if (!grammar) return std::unexpected(bad_field(field, field + ": " + grammar.error().message));
  return std::move(*grammar);
}

// The member `response_format` of the object in `text`, with its keys in order. Nothing when it has more than
// kSchemaValuesMax values. Keys in order are found one by one, so the other members are left out.
std::optional<ordered_json> in_order(std::string_view text) {
  bool wanted = false;
  std::size_t values = 0;
  const auto keep = [&](int depth, ordered_json::parse_event_t event, ordered_json& parsed) {
    if (depth == 1 && event == ordered_json::parse_event_t::key) wanted = parsed == "response_format";
    if (depth == 0) return true;
    if (wanted) ++values;
    return wanted && values <= kSchemaValuesMax;
  };
  ordered_json members = ordered_json::parse(text, keep);
  if (values > kSchemaValuesMax || !members.contains("response_format")) return std::nullopt;
  return std::move(members["response_format"]);
}

// `holder`: the object within response_format that has the schema, at `path`.
ApiResult<std::string> schema_of(const ordered_json& holder, const std::string& path) {
  const std::string place = path + ".schema";
  const auto schema = holder.find("schema");
  if (schema == holder.end()) return std::unexpected(bad_field(place, place + ": is missing"));
  if (schema->dump().size() > kSchemaBytesMax) {
    return std::unexpected(
        bad_field(place, fmt::format("{}: at most {} bytes are taken", place, kSchemaBytesMax)));
  }
  return schema_grammar(*schema, place);
}

ApiResult<std::string> format_grammar(const json& format, std::string_view text) {
  const std::string path = "response_format";
  JsonReader reader(format, path + ".");
  const auto type = reader.string("type", kFormatNameBytesMax);
  const json* const named = reader.object("json_schema");
  if (type == "json_schema" && named == nullptr) reader.refuse("json_schema", "is missing");
  if (type != "text" && type != "json_object" && type != "json_schema")
    reader.refuse("type", "there are text, json_object and json_schema");
  if (const auto status = reader.status(); !status) return std::unexpected(status.error());
  if (type == "text") return "";
  const bool is_schema = type == "json_schema";
  if (is_schema) {
    JsonReader inner(*named, path + ".json_schema.");
    inner.string("name", kFormatNameBytesMax);
    inner.boolean("strict");
    if (const auto status = inner.status(); !status) return std::unexpected(status.error());
  } else if (reader.any("schema") == nullptr) {
    return json_object_grammar();
  }
  const auto ordered = in_order(text);
  if (!ordered) {
    return std::unexpected(
        bad_field(path, fmt::format("{}: at most {} values are taken", path, kSchemaValuesMax)));
  }
  return is_schema ? schema_of((*ordered)["json_schema"], path + ".json_schema") : schema_of(*ordered, path);
}

}  // namespace

ApiResult<std::shared_ptr<const Grammar>> read_response_format(const json& body, std::string_view text) {
  JsonReader reader(body);
  const auto gbnf = reader.string("grammar", kGrammarBytesMax);
  const json* const format = reader.object("response_format");
  if (const auto status = reader.status(); !status) return std::unexpected(status.error());
  ApiResult<std::string> wanted = format == nullptr ? "" : format_grammar(*format, text);
  if (!wanted) return std::unexpected(wanted.error());
  const bool has_grammar = gbnf && !gbnf->empty();
  if (has_grammar && !wanted->empty())
    return std::unexpected(bad_field("grammar", "grammar: cannot be had beside a response_format"));
  if (has_grammar) return compile("grammar", *gbnf);
  if (!wanted->empty()) return compile("response_format", *wanted);
  return nullptr;
}

}  // namespace dualdecoder
