#include "model/vocabulary.h"

#include <memory>
#include <random>

#include <gtest/gtest.h>

#include "model/log_capture.h"
#include "temporary_directory.h"
#include "tiny_model.h"

namespace dualdecoder {
namespace {

// The tiny model's vocabulary with a few tokens of more than one character, among them one that a space
// begins and one of the user's that is cut out of every text.
void add_words(gguf_context* gguf, bool space_prefix) {
  const std::int64_t list = gguf_find_key(gguf, "tokenizer.ggml.tokens");
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < gguf_get_arr_n(gguf, list); ++i)
    texts.emplace_back(gguf_get_arr_str(gguf, list, i));
  const auto* old_kinds = static_cast<const std::int32_t*>(
      gguf_get_arr_data(gguf, gguf_find_key(gguf, "tokenizer.ggml.token_type")));
  std::vector<std::int32_t> kinds(old_kinds, old_kinds + texts.size());
  constexpr std::int32_t kNormal = 1, kUserDefined = 4;
  for (const char* word :
       {"t", "h", "e", "th", "the", "\xe2\x96\x81t", "\xe2\x96\x81the", "\xc3\xa4", "\xc3\xa4h"}) {
    texts.emplace_back(word);
    kinds.push_back(kNormal);
  }
  texts.emplace_back("<tool>");
  kinds.push_back(kUserDefined);
  std::vector<float> scores;
  std::vector<const char*> pointers;
  for (const std::string& text : texts) {
    scores.push_back(static_cast<float>(text.size()));
    pointers.push_back(text.c_str());
  }
  gguf_set_arr_str(gguf, "tokenizer.ggml.tokens", pointers.data(), pointers.size());
  gguf_set_arr_data(gguf, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
  gguf_set_arr_data(gguf, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, kinds.data(), kinds.size());
  gguf_set_val_bool(gguf, "tokenizer.ggml.add_space_prefix", space_prefix);
  gguf_set_val_bool(gguf, "tokenizer.ggml.add_eos_token", space_prefix);
}

std::vector<TokenId> libllama_tokens(const llama_vocab* vocab, const std::string& text, bool add_special,
                                     bool parse_special) {
  std::vector<TokenId> tokens(text.size() + 16);
  tokens.resize(static_cast<std::size_t>(
      llama_tokenize(vocab, text.data(), static_cast<std::int32_t>(text.size()), tokens.data(),
                     static_cast<std::int32_t>(tokens.size()), add_special, parse_special)));
  return tokens;
}

// Texts of several pieces, of characters that are tokens, parts of tokens and neither.
TEST(Vocabulary, TokenisesALongTextInPiecesAsLibllamaDoesAtOnce) {
  const LogCapture log;
  const TemporaryDirectory directory;
  for (const bool space_prefix : {false, true}) {
    const std::string path = directory.file("words.gguf");
    ASSERT_TRUE(
        write_tiny_model(path, {.edit_keys = [&](gguf_context* gguf) { add_words(gguf, space_prefix); }}));
    const auto file = GgufFile::open(path);
    ASSERT_TRUE(file) << file.error().message;
    const auto vocabulary = Vocabulary::load(**file);
    ASSERT_TRUE(vocabulary) << vocabulary.error().message;
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(
        llama_model_load_from_file(path.c_str(), params), llama_model_free);
    const llama_vocab* vocab = llama_model_get_vocab(model.get());

    const std::vector<std::string> parts = {
        "the",  " the",   "t", "h", "e", " ", "q", "qq", "\xc3\xa4", "\xc3\xa4h", "\xf0\x9f\x98\x80",
        "</s>", "<tool>", "<", "s", "/", "\n"};
    for (std::uint64_t seed = 0; seed < 30; ++seed) {
      std::mt19937_64 random(seed);
      std::string text;
      while (text.size() < 5000) text += parts[random() % parts.size()];
      for (const bool add_special : {false, true}) {
        for (const bool parse_special : {false, true}) {
          ASSERT_EQ((*vocabulary)->tokenize(text, add_special, parse_special),
                    libllama_tokens(vocab, text, add_special, parse_special))
              << "seed " << seed << ' ' << space_prefix << add_special << parse_special;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dualdecoder
