#include "serve/schema_grammar.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "decode/grammar.h"
#include "serve/json_reader.h"
#include "serve/number_grammar.h"
#include "serve/pattern_grammar.h"

namespace dualdecoder {
namespace {

using Schema = nlohmann::ordered_json;

constexpr std::size_t kPathNameBytesMax = 64;
constexpr std::size_t kExcludedNameBytesMax = 200;

// What every grammar may name. A character in quotes has one code point, escaped or not: halves of surrogate
// pairs are left out.
constexpr const char* kCommonRules = R"(
ws ::= (" " | "\n" [ \t]{0,20})?
hex ::= [0-9a-fA-F]
char ::= [^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" ([0-9abcABCefEF] hex{3} | [dD] [0-7] hex{2}))
string ::= "\"" char* "\""
integer ::= "-"? ("0" | [1-9] [0-9]{0,17})
number ::= integer ("." [0-9]{1,18})? ([eE] [-+]? [0-9]{1,2})?
boolean ::= "true" | "false"
value ::= object | array | string | number | boolean | "null"
object ::= "{" ws (pair ("," ws pair)* ws)? "}"
pair ::= string ":" ws value
array ::= "[" ws (value ("," ws value)* ws)? "]"
date ::= [1-9] [0-9]{3} "-" (month31 "-" (day28 | "29" | "30" | "31") | month30 "-" (day28 | "29" | "30") | "02-" day28)
month31 ::= "01" | "03" | "05" | "07" | "08" | "10" | "12"
month30 ::= "04" | "06" | "09" | "11"
day28 ::= "0" [1-9] | "1" [0-9] | "2" [0-8]
hour-minute ::= ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9]
time ::= hour-minute ":" [0-5] [0-9] ("." [0-9]{1,6})? ("Z" | [-+] hour-minute)
date-time ::= date "T" time
uuid ::= hex{8} "-" hex{4} "-" hex{4} "-" hex{4} "-" hex{12}
)";

constexpr std::array kNotSupported = {"not",
                                      "if",
                                      "then",
                                      "else",
                                      "contains",
                                      "minContains",
                                      "maxContains",
                                      "dependencies",
                                      "dependentSchemas",
                                      "dependentRequired",
                                      "patternProperties",
                                      "propertyNames",
                                      "minProperties",
                                      "maxProperties",
                                      "unevaluatedProperties",
                                      "unevaluatedItems",
                                      "additionalItems",
                                      "multipleOf",
                                      "$dynamicRef",
                                      "$recursiveRef"};
constexpr std::array kBranches = {"anyOf", "oneOf"};

struct TypeKeywords {
  const char* type;
  std::vector<const char*> keywords;
};
const std::array kTypes = {
    TypeKeywords{"object", {"properties", "required", "additionalProperties"}},
    TypeKeywords{"array", {"prefixItems", "items", "minItems", "maxItems"}},
    TypeKeywords{"string", {"minLength", "maxLength", "pattern", "format"}},
    TypeKeywords{"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}}};

bool constrains(const std::string& keyword) {
  static const std::set<std::string, std::less<>> others = {"$ref",  "allOf", "anyOf", "oneOf",
                                                            "const", "enum",  "type"};
  if (others.contains(keyword)) return true;
  return std::ranges::any_of(kTypes, [&](const TypeKeywords& type) {
    return std::ranges::any_of(type.keywords, [&](const char* name) { return keyword == name; });
  });
}

// Without `left_out`, titles, definitions and the like.
Schema constraints(const Schema& schema, const char* left_out) {
  Schema rest = Schema::object();
  for (const auto& [key, value] : schema.items()) {
    if (key != left_out && constrains(key)) rest[key] = value;
  }
  return rest;
}

bool is_open(const Schema& schema) {
  const auto found = schema.find("additionalProperties");
  return found == schema.end() || (found->is_boolean() && found->get<bool>());
}

bool has_type(const Schema& value, const Schema& types) {
  if (types.is_array())
    return std::ranges::any_of(types, [&](const Schema& type) { return has_type(value, type); });
  if (!types.is_string()) return false;
  const auto& type = types.get_ref<const std::string&>();
  if (type == "integer")
    return value.is_number_integer() || (value.is_number_float() && std::trunc(value.get<double>()) == value);
  return (type == "object" && value.is_object()) || (type == "array" && value.is_array()) ||
         (type == "string" && value.is_string()) || (type == "number" && value.is_number()) ||
         (type == "boolean" && value.is_boolean()) || (type == "null" && value.is_null());
}

// Of JSON.
std::string in_quotes(std::string_view body) { return fmt::format(R"("\"" {} "\"")", body); }

std::string in_path(const std::string& path, const std::string& name) {
  return path + "." + name.substr(0, kPathNameBytesMax);
}
std::string in_path(const std::string& path, const std::string& name, std::size_t index) {
  return fmt::format("{}.{}[{}]", path, name, index);
}

// The characters of valid UTF-8, each as its bytes.
std::vector<std::string> characters(const std::string& text) {
  std::vector<std::string> list;
  for (const char c : text) {
    if ((static_cast<unsigned char>(c) & 0xC0) != 0x80) list.emplace_back();
    if (!list.empty()) list.back() += c;
  }
  return list;
}

class SchemaCompiler {
 public:
  SchemaCompiler(const Schema& root, std::string path) : root_(root), path_(std::move(path)) {}

  ApiResult<std::string> compile() {
    const std::string start = schema(root_, path_);
    if (!error_) define("root", start);
    if (error_) return std::unexpected(*error_);
    return text_ + kCommonRules;
  }

 private:
  // ---- Rules and refusals

  void refuse(const std::string& path, const std::string& message) {
    if (!error_) error_ = bad_field(path, path + ": " + message);
  }

  void count_part() {
    if (++parts_ > kSchemaPartsMax)
      refuse(path_, fmt::format("the schema has more than {} parts", kSchemaPartsMax));
  }

  void define(const std::string& name, const std::string& body) {
    text_ += name + " ::= " + body + "\n";
    if (text_.size() > kGrammarBytesMax / 2)
      refuse(path_, fmt::format("the schema is too large: its grammar comes to more than {} bytes",
                                kGrammarBytesMax / 2));
  }

  std::string new_name() { return fmt::format("r{}", ++rules_); }

  std::string rule(const std::string& body) {
    std::string name = new_name();
    define(name, body);
    return name;
  }

  // ---- Any schema: the name of a rule or a literal.

  std::string schema(const Schema& s, const std::string& path) {
    if (error_) return {};
    count_part();
    if (depth_ == kSchemaDepthMax)
      refuse(path, fmt::format("lies deeper than {} levels, or is part of itself", kSchemaDepthMax));
    if (error_) return {};
    ++depth_;
    std::string result = any_schema(s, path);
    --depth_;
    return result;
  }

  // One that stands within something: what leads to itself through it is finite.
  std::string inner(const Schema& s, const std::string& path) {
    std::set<std::string> open = std::exchange(open_references_, {});
    std::string result = schema(s, path);
    open_references_ = std::move(open);
    return result;
  }

  std::string any_schema(const Schema& s, const std::string& path) {
    if (s.is_boolean() && s.get<bool>()) return "value";
    if (s.is_boolean()) refuse(path, "false accepts nothing");
    if (!s.is_object())
      refuse(path, fmt::format("wanted is a schema: an object or a boolean, not a {}", s.type_name()));
    check_keywords(s, path);
    if (error_) return {};
    if (s.contains("$ref")) return with_reference(s, path);
    if (s.contains("allOf")) return all_of(s, path);
    for (const char* keyword : kBranches) {
      if (s.contains(keyword)) return any_of(s, keyword, path);
    }
    if (s.contains("const") || s.contains("enum")) return one_of_values(s, path);
    return typed(s, path);
  }

  void check_keywords(const Schema& s, const std::string& path) {
    for (const char* keyword : kNotSupported) {
      if (s.is_object() && s.contains(keyword)) refuse(in_path(path, keyword), "is not supported");
    }
    if (s.is_object() && s.value("uniqueItems", Schema(false)) != Schema(false))
      refuse(in_path(path, "uniqueItems"), "is not supported");
  }

  // ---- References

  const Schema* target(const Schema& reference, const std::string& path) {
    const auto* pointer = reference.get_ptr<const std::string*>();
    if (pointer == nullptr || !pointer->starts_with('#') || pointer->find('%') != pointer->npos) {
      refuse(in_path(path, "$ref"),
             "only references into the same schema are supported, such as \"#/$defs/NAME\"");
      return nullptr;
    }
    try {
      const Schema::json_pointer place(pointer->substr(1));
      if (root_.contains(place)) return &root_.at(place);
    } catch (const Schema::exception&) {
      // Not a pointer.
    }
    refuse(in_path(path, "$ref"), fmt::format("there is no \"{}\"", pointer->substr(0, kPathNameBytesMax)));
    return nullptr;
  }

  std::string with_reference(const Schema& s, const std::string& path) {
    const Schema* const schema_there = target(s["$ref"], path);
    if (schema_there == nullptr) return {};
    const Schema rest = constraints(s, "$ref");
    if (!rest.empty()) return merged({schema_there, &rest}, path);
    const auto& pointer = s["$ref"].get_ref<const std::string&>();
    if (open_references_.contains(pointer))
      refuse(in_path(path, "$ref"), "leads to itself and to nothing else");
    if (const auto known = references_.find(pointer); known != references_.end()) return known->second;
    const std::string name = new_name();
    references_.emplace(pointer, name);
    open_references_.insert(pointer);
    define(name, schema(*schema_there, path_of(pointer)));
    open_references_.erase(pointer);
    return name;
  }

  std::string path_of(const std::string& pointer) const {
    std::string path = path_ + pointer.substr(1, 4 * kPathNameBytesMax);
    std::replace(path.begin() + static_cast<std::ptrdiff_t>(path_.size()), path.end(), '/', '.');
    return path;
  }

  // ---- Schemas that hold together

  std::string all_of(const Schema& s, const std::string& path) {
    const Schema& list = s["allOf"];
    if (!list.is_array() || list.empty()) {
      refuse(in_path(path, "allOf"), "wanted is a list of schemas");
      return {};
    }
    const Schema rest = constraints(s, "allOf");
    std::vector<const Schema*> parts;
    for (const Schema& part : list) parts.push_back(&part);
    parts.push_back(&rest);
    return merged(parts, in_path(path, "allOf"));
  }

  std::string merged(const std::vector<const Schema*>& parts, const std::string& path) {
    Schema sum = Schema::object();
    for (const Schema* part : parts) add_to(sum, *part, path, 0);
    return schema(sum, path);
  }

  // `sum` becomes what accepts what both accept.
  void add_to(Schema& sum, const Schema& part, const std::string& path, std::size_t references) {
    count_part();
    if (error_ || (part.is_boolean() && part.get<bool>())) return;
    if (!part.is_object()) return refuse(path, "wanted are schemas that are objects");
    check_keywords(part, path);
    if (const auto reference = part.find("$ref"); reference != part.end()) {
      if (references == kSchemaDepthMax) return refuse(in_path(path, "$ref"), "leads to itself");
      const Schema* const there = target(*reference, path);
      if (there != nullptr) add_to(sum, *there, path, references + 1);
    }
    const Schema own = constraints(part, "$ref");
    if (!properties_fit(sum, own) || !properties_fit(own, sum)) {
      return refuse(in_path(path, "additionalProperties"),
                    "cannot be joined with properties that are defined elsewhere");
    }
    for (const auto& [key, value] : own.items()) {
      if (!sum.contains(key)) {
        sum[key] = value;
      } else if (sum[key] != value) {
        join(sum[key], key, value, path);
      }
    }
  }

  // Whether all properties of `other` are among those of `schema`, if it says that there are no others.
  static bool properties_fit(const Schema& schema, const Schema& other) {
    if (is_open(schema)) return true;
    const Schema known = schema.value("properties", Schema::object());
    const Schema wanted = other.value("properties", Schema::object());
    if (!known.is_object() || !wanted.is_object()) return true;
    return std::ranges::all_of(wanted.items(), [&](const auto& item) { return known.contains(item.key()); });
  }

  void join(Schema& value, const std::string& key, const Schema& other, const std::string& path) {
    const bool numbers = value.is_number() && other.is_number();
    if (key == "properties" && value.is_object() && other.is_object()) {
      for (const auto& [name, schema_of_name] : other.items()) {
        if (!value.contains(name)) {
          value[name] = schema_of_name;
        } else if (value[name] != schema_of_name) {
          value[name] = Schema{{"allOf", Schema::array({value[name], schema_of_name})}};
        }
      }
    } else if ((key == "required" || key == "allOf") && value.is_array() && other.is_array()) {
      for (const Schema& entry : other) value.push_back(entry);
    } else if (key == "type") {
      join_types(value, other, path);
    } else if (numbers && (key.starts_with("min") || key == "exclusiveMinimum")) {
      value = std::max(value, other);
    } else if (numbers && (key.starts_with("max") || key == "exclusiveMaximum")) {
      value = std::min(value, other);
    } else {
      refuse(in_path(path, key), "two different ones cannot be joined");
    }
  }

  void join_types(Schema& types, const Schema& others, const std::string& path) {
    const auto list = [](const Schema& of) { return of.is_array() ? of : Schema::array({of}); };
    Schema both = Schema::array();
    const Schema other_list = list(others);
    const auto has = [&](const char* type) {
      return std::ranges::find(other_list, Schema(type)) != other_list.end();
    };
    for (const Schema& type : list(types)) {
      if (std::ranges::find(other_list, type) != other_list.end()) {
        both.push_back(type);
      } else if ((type == "integer" && has("number")) || (type == "number" && has("integer"))) {
        both.push_back("integer");
      }
    }
    if (both.empty()) refuse(in_path(path, "type"), "no type is among all that are wanted");
    types = std::move(both);
  }

  // ---- Alternatives

  std::string any_of(const Schema& s, const char* keyword, const std::string& path) {
    const std::string place = in_path(path, keyword);
    const Schema& list = s[keyword];
    if (!list.is_array() || list.empty()) {
      refuse(place, "wanted is a list of schemas");
      return {};
    }
    const Schema rest = constraints(s, keyword);
    std::vector<std::string> branches;
    for (std::size_t i = 0; i < list.size() && !error_; ++i) {
      const std::string branch = in_path(path, keyword, i);
      branches.push_back(rest.empty() ? schema(list[i], branch) : merged({&rest, &list[i]}, branch));
    }
    return rule(fmt::format("{}", fmt::join(branches, " | ")));
  }

  std::string one_of_values(const Schema& s, const std::string& path) {
    const char* const keyword = s.contains("const") ? "const" : "enum";
    const std::string place = in_path(path, keyword);
    const Schema values = s.contains("const") ? Schema::array({s["const"]}) : s["enum"];
    if (!values.is_array() || values.empty()) refuse(place, "wanted is a list of at least one value");
    for (const auto& [key, value] : s.items()) {
      if (key != keyword && key != "type" && constrains(key))
        refuse(in_path(path, key), fmt::format("is not supported beside {}", keyword));
    }
    std::vector<std::string> texts;
    for (const Schema& value : values) {
      if (error_) return {};
      count_part();
      if (!s.contains("type") || has_type(value, s["type"])) texts.push_back(grammar_literal(value.dump()));
    }
    if (texts.empty()) refuse(place, "no value is of the type that is wanted");
    return rule(fmt::format("{}", fmt::join(texts, " | ")));
  }

  // ---- Types

  std::string typed(const Schema& s, const std::string& path) {
    Schema types = Schema::array();
    if (const auto found = s.find("type"); found != s.end()) {
      types = found->is_array() ? *found : Schema::array({*found});
      if (types.empty()) refuse(in_path(path, "type"), "is an empty list");
    } else {
      for (const auto& [type, keywords] : kTypes) {
        if (std::ranges::any_of(keywords, [&](const char* keyword) { return s.contains(keyword); }))
          types.push_back(type);
      }
      if (types.empty()) return "value";
    }
    std::vector<std::string> alternatives;
    for (const Schema& type : types) {
      if (!error_) alternatives.push_back(of_type(type, s, path));
    }
    return alternatives.size() == 1 ? alternatives.front()
                                    : rule(fmt::format("{}", fmt::join(alternatives, " | ")));
  }

  std::string of_type(const Schema& type, const Schema& s, const std::string& path) {
    if (type == "object") return object(s, path);
    if (type == "array") return array(s, path);
    if (type == "string") return string(s, path);
    if (type == "number" || type == "integer") return number(s, type == "integer", path);
    if (type == "boolean") return "boolean";
    if (type == "null") return "\"null\"";
    refuse(in_path(path, "type"), "there are object, array, string, number, integer, boolean and null");
    return {};
  }

  // A count, or what stands for it where there is none.
  std::optional<std::uint64_t> count(const Schema& s, const char* keyword, const std::string& path) {
    const auto found = s.find(keyword);
    if (found == s.end()) return std::nullopt;
    if (found->is_number()) {
      const double number = found->get<double>();
      if (number >= 0 && number <= 1e9 && std::trunc(number) == number)
        return static_cast<std::uint64_t>(number);
    }
    refuse(in_path(path, keyword), "wanted is a whole number from 0 to 1000000000");
    return std::nullopt;
  }

  // {least,most}
  std::string times(const Schema& s, const char* least_keyword, const char* most_keyword,
                    const std::string& path) {
    const std::uint64_t least = count(s, least_keyword, path).value_or(0);
    const auto most = count(s, most_keyword, path);
    if (most && *most < least) refuse(in_path(path, most_keyword), fmt::format("is below {}", least_keyword));
    return most ? fmt::format("{{{},{}}}", least, *most) : fmt::format("{{{},}}", least);
  }

  std::string string(const Schema& s, const std::string& path) {
    const bool has_length = s.contains("minLength") || s.contains("maxLength");
    if (s.contains("pattern")) {
      const auto* pattern = s["pattern"].get_ptr<const std::string*>();
      if (pattern == nullptr) refuse(in_path(path, "pattern"), "wanted is a string");
      if (has_length || s.contains("format"))
        refuse(in_path(path, "pattern"), "is not supported beside minLength, maxLength and format");
      if (error_) return {};
      const auto body = pattern_grammar(*pattern);
      if (!body) refuse(in_path(path, "pattern"), body.error().message);
      return body ? rule(in_quotes(*body)) : "";
    }
    if (s.contains("format")) {
      for (const char* format : {"date", "time", "date-time", "uuid"}) {
        if (s["format"] == format && !has_length) return rule(in_quotes(format));
      }
      refuse(in_path(path, "format"), "only date, time, date-time and uuid are supported, without lengths");
      return {};
    }
    if (!has_length) return "string";
    return rule(in_quotes(fmt::format("char{}", times(s, "minLength", "maxLength", path))));
  }

  // A bound, towards the inside of the range where it is no whole number; those of `whole` numbers may be
  // any.
  void bound(const Schema& s, const char* keyword, bool whole, const std::string& path, NumberRange& range) {
    const auto found = s.find(keyword);
    if (found == s.end()) return;
    if (!found->is_number()) return refuse(in_path(path, keyword), "wanted is a number");
    const bool is_low =
        keyword == std::string_view("minimum") || keyword == std::string_view("exclusiveMinimum");
    bool open = std::string_view(keyword).starts_with("exclusive");
    const double number = found->get<double>();
    const double inside = is_low ? std::ceil(number) : std::floor(number);
    if (inside != number && !whole)
      return refuse(in_path(path, keyword), "only whole numbers are supported as bounds of a number");
    if (inside != number) open = false;
    const bool fits = std::abs(inside) <= static_cast<double>(kNumberMax);
    if (!fits && is_low == (inside > 0))
      return refuse(in_path(path, keyword), "numbers have at most 18 digits here");
    if (!fits) return;
    std::int64_t value =
        found->is_number_integer() ? found->get<std::int64_t>() : static_cast<std::int64_t>(inside);
    value = std::clamp(value, -kNumberMax, kNumberMax);
    std::int64_t& side = is_low ? range.low : range.high;
    bool& side_open = is_low ? range.low_open : range.high_open;
    const bool tighter = is_low ? value > side : value < side;
    if (tighter || value == side) side_open = open || (side_open && value == side);
    if (tighter) side = value;
  }

  std::string number(const Schema& s, bool whole, const std::string& path) {
    const std::array bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};
    if (std::ranges::none_of(bounds, [&](const char* keyword) { return s.contains(keyword); }))
      return whole ? "integer" : "number";
    NumberRange range;
    for (const char* keyword : bounds) bound(s, keyword, whole, path, range);
    const auto body = whole ? integer_grammar(range) : decimal_grammar(range);
    if (!body) refuse(path, "no number lies between its bounds");
    return body ? rule(*body) : "";
  }

  // ---- Arrays

  std::string array(const Schema& s, const std::string& path) {
    const Schema empty = Schema::array();
    const Schema& first = s.contains("prefixItems") ? s["prefixItems"] : empty;
    if (!first.is_array()) refuse(in_path(path, "prefixItems"), "wanted is a list of schemas");
    if (s.contains("items") && s["items"].is_array())
      refuse(in_path(path, "items"), "wanted is a schema; a list is called prefixItems");
    times(s, "minItems", "maxItems", path);
    if (error_) return {};
    const std::uint64_t least = count(s, "minItems", path).value_or(0);
    auto most = count(s, "maxItems", path);
    const bool closed = s.contains("items") && s["items"].is_boolean() && !s["items"].get<bool>();
    // Items that nothing is said about come behind the first ones only as far as they are wanted.
    if (closed || (!s.contains("items") && !first.empty()))
      most = std::min<std::uint64_t>(most.value_or(UINT64_MAX),
                                     std::max<std::uint64_t>(first.size(), closed ? 0 : least));
    if (most && *most < least)
      refuse(in_path(path, "minItems"), "is above the number of items that there can be");
    return error_ ? "" : items(s, first, least, most, path);
  }

  std::string items(const Schema& s, const Schema& first, std::uint64_t least,
                    std::optional<std::uint64_t> most, const std::string& path) {
    // Backwards: what follows item i, with its comma.
    const std::uint64_t prefix = first.size();
    std::string rest;
    std::string head;  // item 0 and what follows
    const auto named = [&](const Schema& item, const std::string& place) { return inner(item, place); };
    if (!most || *most > prefix) {
      const std::string item = s.contains("items") ? named(s["items"], in_path(path, "items")) : "value";
      const std::uint64_t taken = prefix == 0 ? 1 : 0;
      const std::uint64_t more_least = least - std::min(least, std::max(prefix, taken));
      const std::string limit = most ? std::to_string(*most - std::max(prefix, taken)) : "";
      rest = rule(fmt::format("(\",\" ws {}){{{},{}}}", item, more_least, limit));
      head = item + " " + rest;
    }
    for (std::uint64_t i = std::min(prefix, most.value_or(prefix)); i-- > 0 && !error_;) {
      const std::string item = named(first[i], in_path(path, "prefixItems", i));
      head = item + " " + rest;
      rest = rule(fmt::format(R"(("," ws {} {}){})", item, rest, i < least ? "" : "?"));
    }
    if (head.empty()) return rule("\"[\" ws \"]\"");
    return rule(fmt::format(R"("[" ws ({} ws){} "]")", head, least > 0 ? "" : "?"));
  }

  // ---- Objects

  struct Property {
    std::string pair;  // rule of its name, colon and value
    bool required = false;
  };

  std::string object(const Schema& s, const std::string& path) {
    std::vector<std::string> required;
    if (const auto found = s.find("required"); found != s.end()) {
      const bool strings =
          found->is_array() && std::ranges::all_of(*found, [](const Schema& x) { return x.is_string(); });
      if (!strings) refuse(in_path(path, "required"), "wanted is a list of strings");
      if (strings) required = found->get<std::vector<std::string>>();
    }
    const bool has_properties = s.contains("properties");
    const Schema declared = s.value("properties", Schema::object());
    if (!declared.is_object()) refuse(in_path(path, "properties"), "wanted is an object");
    if (error_) return {};
    const Schema others = s.value("additionalProperties", Schema(!has_properties));
    const bool closed = others.is_boolean() && !others.get<bool>();
    if (!has_properties && required.empty() && others == Schema(true)) return "object";

    std::set<std::string> wanted(required.begin(), required.end());
    std::vector<Property> properties;
    std::set<std::string> names;
    for (const auto& [name, value] : declared.items()) {
      names.insert(name);
      if (value == Schema(false) && !wanted.contains(name)) continue;
      properties.push_back(
          {pair_of(name, value, in_path(in_path(path, "properties"), name)), wanted.contains(name)});
      if (error_) return {};
    }
    for (const std::string& name : required) {
      if (!names.insert(name).second) continue;
      // Not among the properties: one of the others.
      if (s.contains("additionalProperties") && closed)
        refuse(in_path(path, "required"),
               fmt::format("\"{}\" is not among the properties", name.substr(0, kPathNameBytesMax)));
      properties.push_back(
          {pair_of(name, closed ? Schema(true) : others, in_path(path, "additionalProperties")), true});
      if (error_) return {};
    }
    std::string other;
    if (!closed) {
      const std::string value = inner(others, in_path(path, "additionalProperties"));
      other = rule(fmt::format(R"({} ":" ws {})", name_but(names, path), value));
    }
    return braces(properties, other);
  }

  std::string pair_of(const std::string& name, const Schema& value, const std::string& path) {
    return rule(fmt::format(R"({} ":" ws {})", grammar_literal(Schema(name).dump()), inner(value, path)));
  }

  // The properties in order, those that are not required or not, then any number of others. From the end:
  // `list` is a list from here that is not empty, `tail` what follows something, with its comma.
  std::string braces(const std::vector<Property>& properties, const std::string& other) {
    std::string list;
    std::string tail = "\"\"";
    bool may_be_empty = true;
    if (!other.empty()) {
      tail = rule(fmt::format(R"(("," ws {})*)", other));
      list = rule(fmt::format("{} {}", other, tail));
    }
    for (auto property = properties.rbegin(); property != properties.rend(); ++property) {
      const std::string with = fmt::format("{} {}", property->pair, tail);
      list = rule(property->required || list.empty() ? with : fmt::format("{} | {}", with, list));
      may_be_empty = may_be_empty && !property->required;
      tail = rule(fmt::format(R"(("," ws {}){})", list, may_be_empty ? "?" : ""));
    }
    if (list.empty()) return rule("\"{\" ws \"}\"");
    return rule(fmt::format(R"("{{" ws ({} ws){} "}}")", list, may_be_empty ? "?" : ""));
  }

  // A name in quotes that is none of `names`. Those have one spelling, so escapes are left out. The names as
  // a tree of characters: leaving it anywhere, or ending within it, gives another name.
  struct Node {
    std::map<std::string, Node> next;
    bool is_name = false;
  };

  std::string name_but(const std::set<std::string>& names, const std::string& path) {
    if (names.empty()) return "string";
    Node tree;
    for (const std::string& name : names) {
      if (name.size() > kExcludedNameBytesMax) {
        refuse(in_path(path, "additionalProperties"),
               fmt::format("is not supported beside properties with names of more than {} bytes",
                           kExcludedNameBytesMax));
      }
      if (error_) return {};
      Node* node = &tree;
      for (const std::string& character : characters(name)) node = &node->next[character];
      node->is_name = true;
    }
    return rule(in_quotes(other_than(tree)));
  }

  std::string other_than(const Node& node) {
    std::string leaves = R"([^"\\\x00-\x1F)";
    std::string body;
    for (const auto& [character, next] : node.next) {
      const bool plain =
          character != "\"" && character != "\\" && static_cast<unsigned char>(character[0]) >= ' ';
      if (!plain || error_) continue;  // a name with an escape: none is made here
      leaves += character.find_first_of("]-^") == character.npos
                    ? character
                    : fmt::format("\\x{:02X}", static_cast<unsigned>(character[0]));
      body += fmt::format("{} {} | ", grammar_literal(character), other_than(next));
    }
    return rule(fmt::format(R"({}{}] [^"\\\x00-\x1F]*{})", body, leaves, node.is_name ? "" : " | \"\""));
  }

  const Schema& root_;
  const std::string path_;
  std::string text_;
  std::size_t rules_ = 0;
  std::size_t parts_ = 0;
  std::size_t depth_ = 0;
  std::map<std::string, std::string> references_;  // that were met, and their rules
  std::set<std::string> open_references_;          // that lead here, with nothing in between
  std::optional<ApiError> error_;
};

}  // namespace

std::string json_object_grammar() { return std::string("root ::= object\n") + kCommonRules; }

ApiResult<std::string> schema_grammar(const Schema& schema, const std::string& path) {
  return SchemaCompiler(schema, path).compile();
}

}  // namespace dualdecoder
