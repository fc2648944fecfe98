// JSON schemas as grammars (GBNF) of the JSON texts that they accept. Pure; any thread.
//
// Every text of the grammar is valid for the schema. The other way round the grammar is narrower where that
// makes no difference to what can be said: properties come in the schema's order, at most one space or a new
// line and an indentation stand between things, numbers have at most 18 digits on either side, and where
// additionalProperties is not there an object has no others than its properties. A keyword that is not built
// is refused, never ignored; what is no keyword of JSON Schema is ignored. docs/api.md has the list.
//
// Time and size are bounded: kSchemaPartsMax parts of the schema are read, each reference once, and the text
// has at most kGrammarBytesMax bytes.
#pragma once

#include <cstddef>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "serve/api_error.h"

namespace dualdecoder {

inline constexpr std::size_t kSchemaPartsMax = 2000;
inline constexpr std::size_t kSchemaDepthMax = 100;

/// Any JSON object.
std::string json_object_grammar();

/// 400 naming the place in the schema, which `path` begins. The keys of `schema` are in the client's order.
ApiResult<std::string> schema_grammar(const nlohmann::ordered_json& schema, const std::string& path);

}  // namespace dualdecoder
