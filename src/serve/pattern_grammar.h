// Regular expressions of JSON schemas as GBNF. Pure; any thread.
#pragma once

#include <string>

#include "base/error.h"

namespace dualdecoder {

/// GBNF of the JSON text, without its quotes, of the strings that match `pattern` (ECMA 262), as one item in
/// parentheses. A character has one form: as it is, or with the shortest escape where JSON wants one. Names
/// the rule "char" where the pattern does not reach an end of the string: any character, escaped or not.
/// kUnsupported for what is not regular or not built (assertions, back-references, properties of Unicode,
/// anchors within), kInvalidArgument for what is no pattern; both name the position in bytes.
Result<std::string> pattern_grammar(const std::string& pattern);

/// `text` as a literal of GBNF.
std::string grammar_literal(const std::string& text);

}  // namespace dualdecoder
