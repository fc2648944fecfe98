// What an answer is to look like: the fields response_format and grammar of a request. Pure; any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "decode/grammar.h"
#include "serve/api_error.h"

namespace dualdecoder {

inline constexpr std::size_t kSchemaBytesMax = 128 * 1024;
inline constexpr std::size_t kSchemaValuesMax = 10'000;  // of response_format: keys, items and scalars

/// The grammar that `body` asks for, null for none; 400 naming the field, and the place in a schema. `text`
/// is what `body` was read from, and has what the body has lost: the order of a schema's properties.
ApiResult<std::shared_ptr<const Grammar>> read_response_format(const nlohmann::json& body,
                                                               std::string_view text);

}  // namespace dualdecoder
