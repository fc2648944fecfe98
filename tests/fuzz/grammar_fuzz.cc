// GBNF: compiled or refused, and followed for a few tokens. The input: a grammar, and behind a NUL a text.
#include "base/check.h"
#include "decode/grammar_matcher.h"
#include "fuzz.h"

using namespace dualdecoder;

namespace {

std::shared_ptr<const TokenTexts> some_tokens() {
  std::vector<std::string> texts = byte_texts();
  for (const char* text : {"aa", "ab", "  ", "\":", "\xc3\xa9", "{\"", "aaaaaaaa"}) texts.emplace_back(text);
  return std::make_shared<TokenTexts>(texts, std::span<const TokenId>());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto tokens = some_tokens();
  const std::string_view text = as_text(data, size);
  const std::size_t end = std::min(text.find('\0'), text.size());
  const auto grammar = Grammar::parse(text.substr(0, end));
  if (!grammar) {
    DD_CHECK(grammar.error().code == ErrorCode::kInvalidArgument && !grammar.error().message.empty());
    return 0;
  }
  DD_CHECK((*grammar)->rules() <= kGrammarRulesMax);
  GrammarMatcher matcher(*grammar, tokens);
  for (const char c : text.substr(std::min(end + 1, text.size())).substr(0, 32)) {
    for (TokenId token = 256; token < static_cast<TokenId>(tokens->size()); ++token) matcher.allows(token);
    const TokenId token = static_cast<std::uint8_t>(c);
    if (!matcher.allows(token)) break;
    matcher.accept(token);
  }
  return 0;
}
