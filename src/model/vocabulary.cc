#include "model/vocabulary.h"

#include <algorithm>
#include <array>
#include <exception>

#include "base/check.h"
#include "model/log_capture.h"

namespace dualdecoder {
namespace {

// libllama checks some of these by assertions that end the process, and reads others as far as the tokens go;
// here they are errors that name the key. Wrong types of the keys not named here are errors of libllama's
// own.
Status check_tokenizer_keys(const GgufFile& file) {
  const auto kind = file.string("tokenizer.ggml.model");
  if (!kind) return std::unexpected(kind.error());
  if (*kind != "llama" && *kind != "gpt2") {
    return fail(ErrorCode::kUnsupported, "{}: the tokenizer \"{}\" is not supported (llama and gpt2 are)",
                file.path(), *kind);
  }
  const auto tokens = file.array_length("tokenizer.ggml.tokens", GGUF_TYPE_STRING);
  if (!tokens) return std::unexpected(tokens.error());
  const auto twice = file.first_repeated("tokenizer.ggml.tokens");
  if (twice) {
    return fail(
        ErrorCode::kCorrupt,
        "{}: key tokenizer.ggml.tokens has the same entry twice, again at {}; convert the model again",
        file.path(), *twice);
  }

  struct ListKey {
    const char* name;
    gguf_type element;
    bool one_per_token;
  };
  for (const ListKey& key : {ListKey{"tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, true},
                             ListKey{"tokenizer.ggml.token_type", GGUF_TYPE_INT32, true},
                             ListKey{"tokenizer.ggml.merges", GGUF_TYPE_STRING, false}}) {
    if (!file.has(key.name)) continue;
    const auto length = file.array_length(key.name, key.element);
    if (!length) return std::unexpected(length.error());
    if (key.one_per_token && *length != *tokens) {
      return fail(ErrorCode::kCorrupt, "{}: key {} has {} entries for {} tokens; convert the model again",
                  file.path(), key.name, *length, *tokens);
    }
  }
  for (const char* name :
       {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id"}) {
    const auto id = file.u32_or(name, 0);
    if (!id) return std::unexpected(id.error());
    if (*id >= *tokens) {
      return fail(ErrorCode::kCorrupt, "{}: key {} is {}, the vocabulary has {} tokens", file.path(), name,
                  *id, *tokens);
    }
  }
  for (const char* name : {"tokenizer.ggml.pre", "tokenizer.chat_template"}) {
    if (auto text = file.string_or(name, ""); !text) return std::unexpected(text.error());
  }
  return {};
}

// What libllama would otherwise only find, by an assertion or an exception, when the first text is tokenised.
Status check_tokenizer(const GgufFile& file, const llama_vocab* vocab) {
  const auto check_special = [&](bool added, llama_token token, const char* name) -> Status {
    if (!added || token != LLAMA_TOKEN_NULL) return {};
    return fail(ErrorCode::kCorrupt, "{}: its vocabulary adds a {} token to every text and has none",
                file.path(), name);
  };
  for (const Status& status :
       {check_special(llama_vocab_get_add_bos(vocab), llama_vocab_bos(vocab), "begin-of-text"),
        check_special(llama_vocab_get_add_eos(vocab), llama_vocab_eos(vocab), "end-of-text")}) {
    if (!status) return status;
  }
  std::string bytes;
  for (int byte = 1; byte < 256; ++byte) bytes.push_back(static_cast<char>(byte));
  std::array<llama_token, 1024> tokens{};
  try {
    llama_tokenize(vocab, bytes.data(), static_cast<std::int32_t>(bytes.size()), tokens.data(), tokens.size(),
                   true, false);
  } catch (const std::exception&) {
    return fail(ErrorCode::kUnsupported,
                "{}: its vocabulary has no tokens for single bytes, so it cannot take every text",
                file.path());
  }
  return {};
}

// A character that no vocabulary has: U+10FFFD, for private use.
constexpr std::string_view kGuard = "\xf4\x8f\xbf\xbd";
constexpr std::size_t kTextPieceBytes = 1024;

constexpr bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// The character that begins at `at`, of well-formed UTF-8; of anything else, some number.
char32_t character_at(std::string_view text, std::size_t at) {
  char32_t character = static_cast<unsigned char>(text[at]);
  for (std::size_t i = at + 1; i < text.size() && is_continuation(text[i]); ++i)
    character = character << 8 | static_cast<unsigned char>(text[i]);
  return character;
}

std::vector<char32_t> characters_of(std::string_view text) {
  std::vector<char32_t> characters;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (!is_continuation(text[i])) characters.push_back(character_at(text, i));
  }
  return characters;
}

}  // namespace

Result<std::unique_ptr<Vocabulary>> Vocabulary::load(const GgufFile& file) {
  if (Status status = check_tokenizer_keys(file); !status) return std::unexpected(status.error());

  std::unique_ptr<Vocabulary> vocabulary(new Vocabulary());
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  const LogCapture log;
  vocabulary->model_.reset(llama_model_load_from_file(file.path().c_str(), params));
  if (!vocabulary->model_) {
    return fail(ErrorCode::kCorrupt, "{}: libllama cannot read its vocabulary: {}", file.path(),
                log.first_error());
  }
  vocabulary->vocab_ = llama_model_get_vocab(vocabulary->model_.get());
  if (Status status = check_tokenizer(file, vocabulary->vocab_); !status) {
    return std::unexpected(status.error());
  }
  vocabulary->size_ = static_cast<std::uint32_t>(llama_vocab_n_tokens(vocabulary->vocab_));
  if (const char* text = llama_model_chat_template(vocabulary->model_.get(), nullptr); text != nullptr) {
    vocabulary->chat_template_ = text;
  }
  if (llama_vocab_type(vocabulary->vocab_) == LLAMA_VOCAB_TYPE_SPM) vocabulary->find_joints();
  return vocabulary;
}

void Vocabulary::find_joints() {
  constexpr int kMark = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;
  for (TokenId token = 0; token < static_cast<TokenId>(size_); ++token) {
    const llama_token_attr kind = llama_vocab_get_attr(vocab_, token);
    if ((kind & LLAMA_TOKEN_ATTR_BYTE) != 0) continue;
    const auto characters = characters_of(llama_vocab_get_text(vocab_, token));
    if ((kind & kMark) == 0) {
      if (characters.size() > 1) joined_.insert(characters.begin(), characters.end());
    } else if (!characters.empty()) {
      mark_ends_.insert(characters.back());
      for (std::size_t i = 1; i < characters.size(); ++i)
        within_marks_.emplace(characters[i - 1], characters[i]);
    }
  }
  guard_tokens_ = tokenize_at_once(kGuard, false, false).size();
  cuts_ = !joined_.contains(character_at(kGuard, 0));
}

// Whether no token can reach from before `at` to behind it, and no mark ends there: libllama puts a space
// behind one.
bool Vocabulary::may_cut_before(std::string_view text, std::size_t at) const {
  if (is_continuation(text[at])) return false;
  const char32_t next = character_at(text, at);
  if (joined_.contains(next)) return false;
  std::size_t before = at - 1;
  while (before > 0 && is_continuation(text[before])) --before;
  const char32_t last = character_at(text, before);
  return !within_marks_.contains({last, next}) && !mark_ends_.contains(last);
}

// With a SentencePiece vocabulary, libllama's time is quadratic in the number of characters that are no
// tokens and become bytes: a megabyte of them takes minutes. No token reaches across such a character, so the
// text is cut before one, again and again. A guard in front of each piece but the first keeps libllama from
// putting a space there; its tokens are dropped.
std::vector<TokenId> Vocabulary::tokenize(std::string_view text, bool add_special, bool parse_special) const {
  if (!cuts_ || text.size() <= kTextPieceBytes) return tokenize_at_once(text, add_special, parse_special);
  std::vector<TokenId> tokens;
  if (add_special && llama_vocab_get_add_bos(vocab_)) tokens.push_back(llama_vocab_bos(vocab_));
  std::string piece;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = std::min(begin + kTextPieceBytes, text.size());
    while (end < text.size() && !may_cut_before(text, end)) ++end;
    piece = begin == 0 ? "" : kGuard;
    piece += text.substr(begin, end - begin);
    const std::vector<TokenId> made = tokenize_at_once(piece, false, parse_special);
    tokens.insert(tokens.end(), made.begin() + static_cast<std::ptrdiff_t>(begin == 0 ? 0 : guard_tokens_),
                  made.end());
    begin = end;
  }
  if (add_special && llama_vocab_get_add_eos(vocab_)) tokens.push_back(llama_vocab_eos(vocab_));
  return tokens;
}

std::vector<TokenId> Vocabulary::tokenize_at_once(std::string_view text, bool add_special,
                                                  bool parse_special) const {
  std::vector<TokenId> tokens(text.size() / 2 + 16);
  const auto call = [&] {
    return llama_tokenize(vocab_, text.data(), static_cast<std::int32_t>(text.size()), tokens.data(),
                          static_cast<std::int32_t>(tokens.size()), add_special, parse_special);
  };
  std::int32_t count = call();
  if (count < 0) {  // minus the number of tokens there are
    tokens.resize(static_cast<std::size_t>(-count));
    count = call();
  }
  DD_CHECK(count >= 0, "{}", count);
  tokens.resize(static_cast<std::size_t>(count));
  return tokens;
}

std::string Vocabulary::piece(TokenId token, bool special) const {
  std::array<char, 256> buffer{};
  const auto call = [&](char* data, std::size_t bytes) {
    return llama_token_to_piece(vocab_, token, data, static_cast<std::int32_t>(bytes), 0, special);
  };
  const std::int32_t count = call(buffer.data(), buffer.size());
  if (count >= 0) return {buffer.data(), static_cast<std::size_t>(count)};
  std::string text(static_cast<std::size_t>(-count), '\0');
  call(text.data(), text.size());
  return text;
}

Status Vocabulary::check_tokens(std::span<const TokenId> tokens) const {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || static_cast<std::uint32_t>(tokens[i]) >= size_) {
      return fail(ErrorCode::kInvalidArgument, "token {} at index {} is outside the vocabulary (0 to {})",
                  tokens[i], i, size_ - 1);
    }
  }
  return {};
}

Result<std::string> Vocabulary::apply_chat_template(std::span<const ChatMessage> messages,
                                                    const std::string& name) const {
  if (name.empty() && chat_template_.empty()) {
    return fail(ErrorCode::kUnsupported,
                "the model carries no chat template; name one with --chat-template, or use --raw");
  }
  std::vector<llama_chat_message> chat;
  std::size_t bytes = 256;
  for (const ChatMessage& message : messages) {
    chat.push_back({message.role.c_str(), message.content.c_str()});
    bytes += message.role.size() + message.content.size() + 64;
  }
  const char* text = name.empty() ? chat_template_.c_str() : name.c_str();
  std::string prompt(bytes, '\0');
  const auto call = [&] {
    return llama_chat_apply_template(text, chat.data(), chat.size(), true, prompt.data(),
                                     static_cast<std::int32_t>(prompt.size()));
  };
  std::int32_t length = call();
  if (length > static_cast<std::int32_t>(prompt.size())) {
    prompt.resize(static_cast<std::size_t>(length));
    length = call();
  }
  if (length < 0) {
    return fail(ErrorCode::kUnsupported,
                "{}; name one of libllama's with --chat-template (chatml, llama3, gemma, ...)",
                name.empty() ? "the model's chat template is not one that libllama knows"
                             : fmt::format("there is no chat template \"{}\"", name));
  }
  prompt.resize(static_cast<std::size_t>(length));
  return prompt;
}

bool Vocabulary::has_control_text(std::string_view text) const {
  return tokenize(text, false, true) != tokenize(text, false, false);
}

// As llama.cpp does it, in one piece, unless a message holds the text of a control token. Then the template
// is rendered with a mark in the place of each message, and what stands between the marks is tokenised apart
// from the messages.
Result<std::vector<TokenId>> Vocabulary::tokenize_chat(std::span<const ChatMessage> messages,
                                                       const std::string& name) const {
  const auto rendered = apply_chat_template(messages, name);
  if (!rendered) return std::unexpected(rendered.error());
  const bool plain = std::none_of(messages.begin(), messages.end(), [this](const ChatMessage& message) {
    return has_control_text(message.content);
  });
  if (plain) return tokenize(*rendered, true, true);

  std::vector<ChatMessage> marked(messages.begin(), messages.end());
  const auto mark = [](std::size_t i) { return fmt::format("\x01{}\x02", i); };
  for (std::size_t i = 0; i < marked.size(); ++i) marked[i].content = mark(i);
  const auto frame = apply_chat_template(marked, name);
  if (!frame) return std::unexpected(frame.error());
  std::vector<TokenId> tokens;
  const auto add = [&](std::string_view text, bool is_template) {
    if (text.empty()) return;
    const auto more = tokenize(text, tokens.empty() && is_template, is_template);
    tokens.insert(tokens.end(), more.begin(), more.end());
  };
  std::size_t begin = 0;
  for (std::size_t i = 0; i < marked.size(); ++i) {
    const std::size_t at = frame->find(mark(i), begin);
    if (at == frame->npos) {
      return fail(ErrorCode::kUnsupported,
                  "a message holds the text of a control token, and this chat template leaves messages out");
    }
    add(std::string_view(*frame).substr(begin, at - begin), true);
    add(messages[i].content, false);
    begin = at + mark(i).size();
  }
  add(std::string_view(*frame).substr(begin), true);
  return tokens;
}

}  // namespace dualdecoder
