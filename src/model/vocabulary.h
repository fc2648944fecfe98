// Text to tokens and back, and chat templates: libllama's own, loaded from the same GGUF file without its
// weights. Immutable after load: any thread may call.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <llama.h>

#include "base/error.h"
#include "model/gguf_file.h"

namespace dualdecoder {

using TokenId = std::int32_t;

struct ChatMessage {
  std::string role;
  std::string content;
};

class Vocabulary {
 public:
  static Result<std::unique_ptr<Vocabulary>> load(const GgufFile& file);

  std::uint32_t size() const { return size_; }

  /// Tokens of `text`. `add_special`: with the tokens the model wants at its beginning; `parse_special`:
  /// texts of control tokens become these tokens (for rendered chat templates), otherwise they stay plain
  /// text. As libllama does it, in time proportional to the text.
  std::vector<TokenId> tokenize(std::string_view text, bool add_special, bool parse_special) const;
  /// The bytes of one token; they need not be whole UTF-8. Control tokens give nothing unless `special`.
  std::string piece(TokenId token, bool special = false) const;
  bool is_end(TokenId token) const { return llama_vocab_is_eog(vocab_, token); }
  /// That of a text's beginning, and the one that ends a text, where the model has one.
  std::optional<TokenId> begin_token() const { return known(llama_vocab_bos(vocab_)); }
  std::optional<TokenId> end_token() const { return known(llama_vocab_eos(vocab_)); }
  /// kInvalidArgument naming the index and the value of the first id outside the vocabulary.
  Status check_tokens(std::span<const TokenId> tokens) const;

  /// The file's, in Jinja; empty when it carries none.
  const std::string& chat_template() const { return chat_template_; }
  bool has_chat_template() const { return !chat_template_.empty(); }
  /// The messages as one prompt that ends where the assistant speaks. `name`: one of libllama's built-in
  /// templates; empty: the template in the file. A template that libllama does not know is kUnsupported,
  /// never a guess.
  Result<std::string> apply_chat_template(std::span<const ChatMessage> messages,
                                          const std::string& name) const;
  /// The tokens of that prompt. Texts of control tokens count as such in the template alone, never in a
  /// message: whoever writes one cannot write another's.
  Result<std::vector<TokenId>> tokenize_chat(std::span<const ChatMessage> messages,
                                             const std::string& name) const;

 private:
  Vocabulary() = default;
  static std::optional<TokenId> known(llama_token token) {
    return token == LLAMA_TOKEN_NULL ? std::nullopt : std::optional<TokenId>(token);
  }
  bool has_control_text(std::string_view text) const;
  std::vector<TokenId> tokenize_at_once(std::string_view text, bool add_special, bool parse_special) const;
  void find_joints();
  bool may_cut_before(std::string_view text, std::size_t at) const;

  struct FreeModel {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  std::unique_ptr<llama_model, FreeModel> model_;
  const llama_vocab* vocab_ = nullptr;
  std::uint32_t size_ = 0;
  std::string chat_template_;

  // Where a text can be cut; see tokenize().
  bool cuts_ = false;
  std::unordered_set<char32_t> joined_;                   // characters of tokens of more than one
  std::set<std::pair<char32_t, char32_t>> within_marks_;  // neighbours in texts of control and user's tokens
  std::set<char32_t> mark_ends_;                          // their last characters
  std::size_t guard_tokens_ = 0;                          // that kGuard becomes
};

}  // namespace dualdecoder
