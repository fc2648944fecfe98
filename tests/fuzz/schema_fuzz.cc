// JSON schemas to grammars. The input: a schema, and behind a NUL what chooses a text of its grammar. A text
// that is whole is JSON.
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "decode/grammar_matcher.h"
#include "fuzz.h"
#include "serve/json_reader.h"
#include "serve/response_format.h"

using namespace dualdecoder;

namespace {

constexpr int kStepsMax = 60;

std::shared_ptr<const TokenTexts> byte_tokens() {
  return std::make_shared<TokenTexts>(byte_texts(), std::span<const TokenId>());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto tokens = byte_tokens();
  const std::string_view text = as_text(data, size);
  const std::size_t end = std::min(text.find('\0'), text.size());
  const std::string request =
      fmt::format(R"({{"response_format": {{"type": "json_object", "schema": {}}}}})", text.substr(0, end));
  const auto body = parse_json_object(request);
  if (!body) return 0;
  const auto grammar = read_response_format(*body, request);
  if (!grammar || *grammar == nullptr) return 0;
  GrammarMatcher matcher(*grammar, tokens);
  Input choices(text.substr(std::min(end + 1, text.size())));
  std::string made;
  for (int step = 0; step < kStepsMax && !matcher.exhausted(); ++step) {
    if (matcher.complete()) {
      const auto value = nlohmann::json::parse(made, nullptr, false);
      DD_CHECK(!value.is_discarded(), "{}", made);
    }
    const TokenId first = choices.byte();
    TokenId token = first;
    while (!matcher.allows(token) && (token = (token + 1) % 256) != first) continue;
    if (!matcher.allows(token)) break;
    matcher.accept(token);
    made += static_cast<char>(token);
  }
  return 0;
}
