// Model files that are damaged, incomplete or of another kind: each is one error that names the file, what is
// wrong in it, what was wanted and what was found; never a signal. And the other way round: what is optional
// may be missing, and a good file is never refused.
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "decode/engine.h"
#include "model/log_capture.h"
#include "model/model.h"
#include "temporary_directory.h"
#include "tiny_model.h"

namespace dualdecoder {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

// Every integer fits a signed byte, so that a key can be given any integer type; as many KV heads as heads
// and heads of the default size, so that their keys may be missing.
TinyModelOptions small_numbers() { return {.kv_heads = 4, .feed_forward = 96, .context = 100}; }

constexpr char kAlignment[] = "general.alignment";

enum class Kind { kInteger, kFloat, kString, kList, kExactU32, kExactBool };
struct Key {
  Kind kind;
  bool required;
};

const std::map<std::string, Key>& known_keys() {
  static const std::map<std::string, Key> keys = {
      {"general.architecture", {Kind::kString, true}},
      {"general.name", {Kind::kString, false}},
      {kAlignment, {Kind::kExactU32, false}},
      {"llama.context_length", {Kind::kInteger, true}},
      {"llama.embedding_length", {Kind::kInteger, true}},
      {"llama.block_count", {Kind::kInteger, true}},
      {"llama.feed_forward_length", {Kind::kInteger, true}},
      {"llama.attention.head_count", {Kind::kInteger, true}},
      {"llama.attention.head_count_kv", {Kind::kInteger, false}},
      {"llama.attention.key_length", {Kind::kInteger, false}},
      {"llama.attention.value_length", {Kind::kInteger, false}},
      {"llama.attention.layer_norm_rms_epsilon", {Kind::kFloat, true}},
      {"llama.rope.dimension_count", {Kind::kInteger, false}},
      {"llama.rope.freq_base", {Kind::kFloat, false}},
      {"tokenizer.ggml.model", {Kind::kString, true}},
      {"tokenizer.ggml.pre", {Kind::kString, false}},
      {"tokenizer.ggml.tokens", {Kind::kList, true}},
      {"tokenizer.ggml.scores", {Kind::kList, false}},
      {"tokenizer.ggml.token_type", {Kind::kList, false}},
      {"tokenizer.ggml.unknown_token_id", {Kind::kExactU32, false}},
      {"tokenizer.ggml.bos_token_id", {Kind::kExactU32, false}},
      {"tokenizer.ggml.eos_token_id", {Kind::kExactU32, false}},
      {"tokenizer.ggml.padding_token_id", {Kind::kExactU32, false}},
      {"tokenizer.ggml.add_bos_token", {Kind::kExactBool, false}},
      {"tokenizer.ggml.add_eos_token", {Kind::kExactBool, false}},
      {"tokenizer.ggml.add_space_prefix", {Kind::kExactBool, false}},
      {"tokenizer.chat_template", {Kind::kString, false}},
  };
  return keys;
}

constexpr std::array kTypes = {GGUF_TYPE_UINT8,   GGUF_TYPE_INT8,    GGUF_TYPE_UINT16, GGUF_TYPE_INT16,
                               GGUF_TYPE_UINT32,  GGUF_TYPE_INT32,   GGUF_TYPE_UINT64, GGUF_TYPE_INT64,
                               GGUF_TYPE_FLOAT32, GGUF_TYPE_FLOAT64, GGUF_TYPE_BOOL,   GGUF_TYPE_STRING,
                               GGUF_TYPE_ARRAY};

bool takes(Kind kind, gguf_type type) {
  switch (kind) {
    case Kind::kInteger:
      return type != GGUF_TYPE_FLOAT32 && type != GGUF_TYPE_FLOAT64 && type != GGUF_TYPE_BOOL &&
             type != GGUF_TYPE_STRING && type != GGUF_TYPE_ARRAY;
    case Kind::kFloat:
      return type == GGUF_TYPE_FLOAT32 || type == GGUF_TYPE_FLOAT64;
    case Kind::kString:
      return type == GGUF_TYPE_STRING;
    case Kind::kList:
      return false;  // an array of one number is none of them
    case Kind::kExactU32:
      return type == GGUF_TYPE_UINT32;
    case Kind::kExactBool:
      return type == GGUF_TYPE_BOOL;
  }
  return false;
}

Result<std::unique_ptr<Model>> load(const std::string& path) {
  return Model::load(path, [](std::size_t, std::size_t) {});
}

class GgufFaults : public testing::Test {
 protected:
  void SetUp() override { quiet_library_logs(); }

  std::string write(const TinyModelOptions& options) const {
    EXPECT_TRUE(write_tiny_model(path_, options));
    return path_;
  }
  std::string write_edited(const std::function<void(gguf_context*)>& edit) const {
    TinyModelOptions options = small_numbers();
    options.edit_keys = edit;
    return write(options);
  }

  void expect_loads() const {
    const auto model = load(path_);
    EXPECT_TRUE(model) << model.error().message;
  }
  /// One line with the file's name that also fits `matcher`.
  void expect_error(const testing::Matcher<const std::string&>& matcher) const {
    const auto model = load(path_);
    ASSERT_FALSE(model);
    EXPECT_THAT(model.error().message, AllOf(HasSubstr(path_), Not(HasSubstr("\n")), matcher));
  }

  TemporaryDirectory directory_;
  std::string path_ = directory_.file("model.gguf");
};

TEST_F(GgufFaults, UntouchedFileLoads) {
  write({});
  expect_loads();
}

TEST_F(GgufFaults, KnownKeysAreThoseOfTheFile) {
  write(small_numbers());
  const gguf_context_ptr gguf(gguf_init_from_file(path_.c_str(), {.no_alloc = true, .ctx = nullptr}));
  ASSERT_NE(gguf, nullptr);
  std::vector<std::string> keys, known;
  for (std::int64_t i = 0; i < gguf_get_n_kv(gguf.get()); ++i) keys.emplace_back(gguf_get_key(gguf.get(), i));
  for (const auto& [name, key] : known_keys()) known.push_back(name);
  EXPECT_THAT(keys, testing::UnorderedElementsAreArray(known));
}

TEST_F(GgufFaults, FileCutInItsHeaderIsNamed) {
  write(small_numbers());
  for (std::size_t bytes = 4096; bytes > 0; --bytes) {
    fs::resize_file(path_, bytes);
    expect_error(AllOf(HasSubstr("not a readable GGUF file"), HasSubstr(fmt::format("({} bytes)", bytes))));
    if (HasFailure()) FAIL() << bytes << " bytes";
  }
  fs::resize_file(path_, 0);
  expect_error(HasSubstr("is empty"));
}

TEST_F(GgufFaults, FileCutInItsTensorsNamesTheFirstThatIsIncomplete) {
  write(small_numbers());
  const std::size_t bytes = fs::file_size(path_);
  const gguf_context_ptr gguf(gguf_init_from_file(path_.c_str(), {.no_alloc = true, .ctx = nullptr}));
  ASSERT_NE(gguf, nullptr);
  const std::size_t data = gguf_get_data_offset(gguf.get());
  const std::int64_t last = gguf_get_n_tensors(gguf.get()) - 1;
  const std::size_t data_end =
      data + gguf_get_tensor_offset(gguf.get(), last) + gguf_get_tensor_size(gguf.get(), last);
  EXPECT_GE(bytes, data_end);
  constexpr std::size_t kCuts = 20;
  for (std::size_t i = kCuts; i > 0; --i) {
    const std::size_t cut = data + (data_end - data) * i / kCuts - 1;
    fs::resize_file(path_, cut);
    std::int64_t incomplete = 0;
    while (data + gguf_get_tensor_offset(gguf.get(), incomplete) +
               gguf_get_tensor_size(gguf.get(), incomplete) <=
           cut) {
      ++incomplete;
    }
    expect_error(AllOf(
        HasSubstr(fmt::format("ends too early: tensor {} ", gguf_get_tensor_name(gguf.get(), incomplete))),
        HasSubstr(fmt::format("{} bytes", gguf_get_tensor_size(gguf.get(), incomplete))),
        HasSubstr(fmt::format("the file has {}", cut))));
  }
}

TEST_F(GgufFaults, RequiredKeyThatIsMissingIsNamedAndAnOptionalOneHasADefault) {
  for (const auto& [name, key] : known_keys()) {
    write_edited([&name = name](gguf_context* gguf) { EXPECT_GE(gguf_remove_key(gguf, name.c_str()), 0); });
    SCOPED_TRACE(name);
    if (key.required) {
      expect_error(HasSubstr("has no key " + name));
    } else {
      expect_loads();
    }
  }
}

TEST_F(GgufFaults, ValueAssumedForAMissingKeyIsReported) {
  for (const std::string name : {"llama.rope.freq_base", "llama.attention.head_count_kv",
                                 "tokenizer.ggml.pre", "tokenizer.ggml.eos_token_id"}) {
    TinyModelOptions options = small_numbers();
    options.kv_heads = options.heads;  // what a missing number of KV heads means
    options.edit_keys = [&](gguf_context* gguf) { EXPECT_GE(gguf_remove_key(gguf, name.c_str()), 0); };
    const auto model = load(write(options));
    ASSERT_TRUE(model) << model.error().message;
    EXPECT_THAT((*model)->hyperparameters().assumed, testing::ElementsAre(HasSubstr(name + " = ")));
  }
  const auto model = load(write(small_numbers()));
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_THAT((*model)->hyperparameters().assumed, testing::IsEmpty());
}

TEST_F(GgufFaults, KeyOfAnotherTypeIsNamedWithTheTypeThatWasFound) {
  for (const auto& [name, key] : known_keys()) {
    if (name == kAlignment) continue;  // ggml's writer refuses; see below
    for (const gguf_type type : kTypes) {
      write_edited([&name = name, type](gguf_context* gguf) { retype_key(gguf, name, type); });
      SCOPED_TRACE(fmt::format("{} as {}", name, gguf_type_name(type)));
      if (key.kind == Kind::kString && type == GGUF_TYPE_STRING) continue;  // as it was, but for the value
      if (takes(key.kind, type)) {
        expect_loads();
      } else {
        const char* found = key.kind == Kind::kList && type == GGUF_TYPE_ARRAY ? "u32" : gguf_type_name(type);
        expect_error(AllOf(HasSubstr(name), HasSubstr(found)));
      }
    }
  }
}

TEST_F(GgufFaults, AlignmentOfAnotherTypeIsNamedWithTheTypeThatWasFound) {
  write(small_numbers());
  std::ifstream in(path_, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::size_t type_at = bytes.find(kAlignment) + std::string_view(kAlignment).size();
  for (const gguf_type type : {GGUF_TYPE_INT32, GGUF_TYPE_FLOAT32}) {  // as wide as the right one
    bytes[type_at] = static_cast<char>(type);
    std::ofstream(path_, std::ios::binary) << bytes;
    expect_error(
        AllOf(HasSubstr(kAlignment), HasSubstr("must be of type u32"), HasSubstr(gguf_type_name(type))));
  }
}

TEST_F(GgufFaults, ValueOutOfRangeIsRefused) {
  const std::vector<std::tuple<std::string, std::int64_t, std::string>> cases = {
      {"llama.block_count", 0, "the number of layers is 0"},
      {"llama.block_count", 100'000, "the number of layers is 100000"},
      {"llama.block_count", -1, "llama.block_count is -1, out of range"},
      {"llama.block_count", 3, "has no tensor blk.2."},
      {"llama.block_count", std::int64_t{1} << 32, "llama.block_count is 4294967296, out of range"},
      {"llama.context_length", 0, "the training context is 0"},
      {"llama.embedding_length", 0, "the embedding width is 0"},
      {"llama.embedding_length", 48,
       "token_embd.weight has the shape [64, 261, 1, 1], wanted [48, 261, 1, 1]"},
      {"llama.attention.head_count", 0, "the number of heads is 0"},
      {"llama.attention.head_count_kv", 3, "4 heads are not a multiple of 3 KV heads"},
      {"llama.attention.head_count_kv", 0, "the number of KV heads is 0"},
      {"llama.attention.key_length", 24, "K heads of 24 with V heads of 16"},
      {"llama.rope.dimension_count", 8, "8 rotary dimensions"},
      {"llama.rope.dimension_count", 0, "0 rotary dimensions"},
      {"llama.expert_count", 8, "a mixture of 8 experts"},
      {"tokenizer.ggml.bos_token_id", 261, "tokenizer.ggml.bos_token_id is 261, the vocabulary has 261"},
  };
  for (const auto& [key, value, message] : cases) {
    write_edited(
        [&key = key, value = value](gguf_context* gguf) { gguf_set_val_i64(gguf, key.c_str(), value); });
    SCOPED_TRACE(fmt::format("{} = {}", key, value));
    expect_error(HasSubstr(message));
  }
  write_edited([](gguf_context* gguf) { gguf_set_val_str(gguf, "llama.rope.scaling.type", "longrope"); });
  expect_error(HasSubstr("rotary scaling \"longrope\" is not supported"));
  write_edited([](gguf_context* gguf) { gguf_set_val_f32(gguf, "llama.rope.freq_base", NAN); });
  expect_error(HasSubstr("rotary base nan"));
}

// libllama would end the process for each of these, at load or with the first text.
TEST_F(GgufFaults, VocabularyThatCannotTokeniseIsRefused) {
  const auto set_tokens = [](gguf_context* gguf, const std::function<std::string(std::size_t)>& text) {
    const std::int64_t id = gguf_find_key(gguf, "tokenizer.ggml.tokens");
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < gguf_get_arr_n(gguf, id); ++i) {
      const std::string other = text(i);
      texts.push_back(other.empty() ? gguf_get_arr_str(gguf, id, i) : other);
    }
    std::vector<const char*> pointers;
    for (const std::string& t : texts) pointers.push_back(t.c_str());
    gguf_set_arr_str(gguf, "tokenizer.ggml.tokens", pointers.data(), pointers.size());
  };
  write_edited([&](gguf_context* gguf) { set_tokens(gguf, [](auto i) { return i == 7 ? "<0x00>" : ""; }); });
  expect_error(HasSubstr("tokenizer.ggml.tokens has the same entry twice, again at 7"));

  write_edited([&](gguf_context* gguf) {
    set_tokens(gguf, [](auto i) { return i >= 4 && i < 260 ? fmt::format("word{}", i) : ""; });
  });
  expect_error(HasSubstr("no tokens for single bytes"));

  for (const char* model : {"none", "no_vocab", "rwkv", "bert", "t5", "plamo2", "test", "unheard-of"}) {
    write_edited([&](gguf_context* gguf) { gguf_set_val_str(gguf, "tokenizer.ggml.model", model); });
    expect_error(HasSubstr(fmt::format("the tokenizer \"{}\" is not supported", model)));
  }
  write_edited([](gguf_context* gguf) { gguf_set_val_str(gguf, "tokenizer.ggml.model", "gpt2"); });
  expect_error(HasSubstr("cannot find tokenizer merges"));

  const float score = 0.0f;
  write_edited([&](gguf_context* gguf) {
    gguf_set_arr_data(gguf, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, &score, 1);
  });
  expect_error(HasSubstr("tokenizer.ggml.scores has 1 entries for 261 tokens"));
}

TEST_F(GgufFaults, TensorThatIsMissingIsNamedUnlessItIsOptional) {
  write({.scaling = TinyScaling::kLlama3});
  const gguf_context_ptr gguf(gguf_init_from_file(path_.c_str(), {.no_alloc = true, .ctx = nullptr}));
  ASSERT_NE(gguf, nullptr);
  for (std::int64_t i = 0; i < gguf_get_n_tensors(gguf.get()); ++i) {
    const std::string name = gguf_get_tensor_name(gguf.get(), i);
    SCOPED_TRACE(name);
    write({.scaling = TinyScaling::kLlama3, .shapes = {{name, {}}}});
    if (name == "output.weight" || name == "rope_freqs.weight") {
      expect_loads();
    } else {
      expect_error(HasSubstr("has no tensor " + name));
    }
  }
}

TEST_F(GgufFaults, TensorOfAnotherShapeOrTypeIsNamedWithBoth) {
  write({.shapes = {{"blk.1.ffn_down.weight", {64, 128}}}});
  expect_error(
      HasSubstr("tensor blk.1.ffn_down.weight has the shape [64, 128, 1, 1], wanted [128, 64, 1, 1]"));
  write({.shapes = {{"blk.0.attn_norm.weight", {32}}}});
  expect_error(HasSubstr("tensor blk.0.attn_norm.weight has the shape [32, 1, 1, 1], wanted [64, 1, 1, 1]"));
  write({.types = {{"blk.0.attn_norm.weight", GGML_TYPE_F16}}});
  expect_error(HasSubstr("tensor blk.0.attn_norm.weight is of type f16, wanted f32"));
  for (const char* matrix : {"token_embd.weight", "output.weight", "blk.1.attn_q.weight"}) {
    write({.types = {{matrix, GGML_TYPE_I32}}});
    expect_error(HasSubstr(fmt::format("tensor {} is of type i32, wanted f32, f16", matrix)));
  }
}

TEST_F(GgufFaults, UnsupportedArchitectureIsNamedWithThoseSupported) {
  write({.architecture_name = "mamba2"});
  expect_error(AllOf(HasSubstr("\"mamba2\" is not supported"), HasSubstr("gemma3, llama, qwen2, qwen3")));
}

TEST_F(GgufFaults, WhatIsNoGgufFileIsNamed) {
  expect_error(HasSubstr("No such file or directory"));
  std::ofstream(path_) << std::string(100'000, '\0');
  expect_error(HasSubstr("not a readable GGUF file"));
  std::ofstream(path_, std::ios::trunc) << "GGUF";
  expect_error(HasSubstr("not a readable GGUF file"));
  std::ofstream(path_, std::ios::trunc) << "<!DOCTYPE html><html></html>";
  expect_error(HasSubstr("not a readable GGUF file"));
  fs::remove(path_);
  fs::create_directory(path_);
  expect_error(HasSubstr("is a directory, not a file"));
  const auto pipe = load("/dev/null");
  ASSERT_FALSE(pipe);
  EXPECT_EQ(pipe.error().message, "/dev/null is a special file, not a file");
}

// Whatever one wrong byte in the header means, loading returns.
TEST_F(GgufFaults, WrongByteInTheHeaderNeverEndsTheProcess) {
  constexpr std::uint64_t kSeed = 20260101;
  constexpr int kFiles = 2000;
  RecordProperty("seed", std::to_string(kSeed));
  write(small_numbers());
  std::ifstream in(path_, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const gguf_context_ptr gguf(gguf_init_from_file(path_.c_str(), {.no_alloc = true, .ctx = nullptr}));
  ASSERT_NE(gguf, nullptr);
  std::mt19937_64 random(kSeed);
  std::uniform_int_distribution<std::size_t> place(0, gguf_get_data_offset(gguf.get()) - 1);
  std::uniform_int_distribution<int> value(0, 255);
  std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&](std::size_t at, char byte) {
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte);
    file.flush();
  };
  int loaded = 0;
  for (int i = 0; i < kFiles; ++i) {
    const std::size_t at = place(random);
    put(at, static_cast<char>(value(random)));
    const auto model = load(path_);
    if (model) {
      ++loaded;
    } else {
      EXPECT_THAT(model.error().message, HasSubstr(path_)) << "byte " << at;
    }
    put(at, bytes[at]);
  }
  fmt::print("{} of {} files with one wrong byte in the header load\n", loaded, kFiles);
  expect_loads();
}

using GgufFaultsDeathTest = GgufFaults;

TEST_F(GgufFaultsDeathTest, FileThatShrinksWhileInUseEndsTheProcessWithOneLine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  write({});
  const auto use_after_shrinking = [&] {
    quiet_library_logs();
    const auto model = load(path_);
    auto engine = Engine::create(**model, {.context = 64});
    fs::resize_file(path_, 4096);
    const auto sequence = std::move(*(*engine)->new_sequence());
    const std::vector<TokenId> tokens = {1, 10, 20};
    (void)(*engine)->prefill(*sequence, tokens);
  };
  EXPECT_EXIT(use_after_shrinking(), testing::ExitedWithCode(1),
              "^dualdecoder: the model file changed or became unreadable[^\n]*\n$");
}

}  // namespace
}  // namespace dualdecoder
