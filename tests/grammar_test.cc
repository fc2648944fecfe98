// Grammars over a vocabulary: ours against libllama's, and generations that follow one, alone, in company and
// with guesses.
#include "decode/grammar.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <regex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <llama.h>

#include "decode/generation.h"
#include "decode/grammar_matcher.h"
#include "decode_running.h"
#include "model/log_capture.h"
#include "temporary_directory.h"
#include "tiny_model.h"

namespace dualdecoder {
namespace {

using testing::HasSubstr;

constexpr TokenId kEndToken = 2;

TokenId token_of(char c) { return kTinyFirstByte + static_cast<std::uint8_t>(c); }

class GrammarOfModel : public testing::Test {
 protected:
  void SetUp() override {
    quiet_library_logs();
    const std::string path = directory_.file("tiny.gguf");
    ASSERT_TRUE(write_tiny_model(path, {}));
    auto model = Model::load(path, [](std::size_t, std::size_t) {});
    ASSERT_TRUE(model) << model.error().message;
    model_ = std::move(*model);
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    reference_.reset(llama_model_load_from_file(path.c_str(), params));
    ASSERT_NE(reference_, nullptr);
  }

  static std::shared_ptr<const Grammar> grammar_of(const std::string& gbnf) {
    const auto grammar = Grammar::parse(gbnf);
    DD_CHECK(grammar, "{}: {}", gbnf, grammar.error().message);
    return *grammar;
  }

  EngineOptions engine_options(std::uint32_t sequences, DraftKind draft) const {
    EngineOptions options;
    options.context = 1024;
    options.sequences = sequences;
    options.threads = 1;
    options.outputs_max = 16;
    options.draft = {.kind = draft, .accept = true, .even_if_all_selected = true};
    return options;
  }

  /// Steps all of them to their ends, and returns their texts.
  static std::vector<std::string> write(Engine& engine, const std::vector<GenerationOptions>& wanted,
                                        std::vector<std::unique_ptr<Generation>>& all) {
    Generator generator(engine);
    std::vector<std::string> texts(wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      std::vector<TokenId> prompt(20 + 7 * i);
      for (std::size_t j = 0; j < prompt.size(); ++j)
        prompt[j] = static_cast<TokenId>(4 + (j * 37 + i) % 250);
      auto generation = generator.start(prompt, wanted[i]);
      DD_CHECK(generation && generator.prefill(**generation));
      all.push_back(std::move(*generation));
    }
    while (decode_running(generator, all)) continue;
    for (std::size_t i = 0; i < all.size(); ++i) texts[i] = all[i]->take_text();
    return texts;
  }

  struct FreeModel {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  TemporaryDirectory directory_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<llama_model, FreeModel> reference_;
};

// Of all ASCII characters and the end of the text, at every step of random walks. Characters of several bytes
// are left out: libllama lets ill-formed ones through.
TEST_F(GrammarOfModel, AllowsWhatLibllamaAllows) {
  const char* const grammars[] = {
      "root ::= \"yes\" | \"no\" | \"\"",
      "root ::= [a-c]{2,5} ([0-9]+ | \"-\"{0,3})*",
      "root ::= item (\", \" item){1,3} \".\"?\nitem ::= [^,. \\n]+ | \"(\" item \")\"",
      "root ::= expression\nexpression ::= term ([-+*/] term)*\nterm ::= [0-9]+ | \"(\" expression \")\"",
      "root ::= (\"ab\" | \"a\" \"b\"? \"c\")* \"a\"{2,}",
      "root ::= object\nvalue ::= object | \"[\" (value (\",\" value)*)? \"]\" | [0-9]{1,3} | \"\\\"\" "
      "[a-z\\\\]* \"\\\"\"\n"
      "object ::= \"{\" (\"\\\"\" [a-z]+ \"\\\":\" value (\",\" \"\\\"\" [a-z]+ \"\\\":\" value)*)? \"}\""};
  const auto texts = std::make_shared<TokenTexts>(model_->vocabulary());
  std::mt19937_64 random(1);
  for (const char* gbnf : grammars) {
    for (int walk = 0; walk < 20; ++walk) {
      GrammarMatcher matcher(grammar_of(gbnf), texts);
      const std::unique_ptr<llama_sampler, void (*)(llama_sampler*)> peer(
          llama_sampler_init_grammar(llama_model_get_vocab(reference_.get()), gbnf, "root"),
          llama_sampler_free);
      ASSERT_NE(peer, nullptr) << gbnf;
      std::string text;
      for (int step = 0; step < 40; ++step) {
        std::vector<llama_token_data> candidates = {{kEndToken, 0.0f, 0.0f}};
        for (int c = 1; c < 128; ++c) candidates.push_back({token_of(static_cast<char>(c)), 0.0f, 0.0f});
        llama_token_data_array array = {candidates.data(), candidates.size(), -1, false};
        llama_sampler_apply(peer.get(), &array);
        std::vector<TokenId> allowed;
        for (const llama_token_data& candidate : candidates) {
          const bool by_peer = std::isfinite(candidate.logit);
          ASSERT_EQ(matcher.allows(candidate.id), by_peer)
              << gbnf << " after " << text << ": " << candidate.id;
          if (by_peer && candidate.id != kEndToken) allowed.push_back(candidate.id);
        }
        if (allowed.empty()) break;
        const TokenId token = allowed[random() % allowed.size()];
        matcher.accept(token);
        llama_sampler_accept(peer.get(), token);
        text += static_cast<char>(token - kTinyFirstByte);
      }
    }
  }
}

// The same tokens alone, in company of other grammars and of none, and with guesses that are accepted.
TEST_F(GrammarOfModel, IsFollowedAloneInCompanyAndWithGuesses) {
  std::vector<GenerationOptions> wanted(4);
  const char* const grammars[] = {"root ::= (\"<\" [a-z]{1,5} \":\" [0-9]{1,3} \">\"){10}",
                                  "root ::= ([ab]{3} \",\")*", "root ::= [^a-y]{40}"};
  const std::regex forms[] = {std::regex("(<[a-z]{1,5}:[0-9]{1,3}>){10}"),
                              std::regex("([ab]{3},)*([ab]{0,3})")};
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    wanted[i].sampling.temperature = i == 1 ? 0.0f : 1.0f;
    wanted[i].sampling.seed = 5 + i;
    wanted[i].tokens_max = 200;
    if (i < 3) wanted[i].grammar = grammar_of(grammars[i]);
  }
  const auto engine = Engine::create(*model_, engine_options(4, DraftKind::kNone));
  ASSERT_TRUE(engine) << engine.error().message;
  std::vector<std::unique_ptr<Generation>> together;
  const std::vector<std::string> texts = write(**engine, wanted, together);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(std::regex_match(texts[i], forms[i])) << texts[i];
  std::uint64_t accepted = 0;
  for (const DraftKind draft : {DraftKind::kNone, DraftKind::kSelf, DraftKind::kNgram}) {
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const auto one = Engine::create(*model_, engine_options(1, draft));
      ASSERT_TRUE(one) << one.error().message;
      Generator generator(**one);
      std::vector<TokenId> prompt = together[i]->prompt();
      auto generation = generator.start(prompt, wanted[i]);
      ASSERT_TRUE(generation && generator.prefill(**generation));
      Generation* running = generation->get();
      while (running->running()) ASSERT_TRUE(generator.step(std::span(&running, 1)));
      EXPECT_EQ(running->tokens(), together[i]->tokens()) << i;
      EXPECT_EQ(running->finish_reason(), together[i]->finish_reason()) << i;
      accepted += running->draft_stats().accepted;
    }
  }
  EXPECT_GT(accepted, 0U);
}

TEST_F(GrammarOfModel, EndsWhereTheGrammarDoes) {
  const auto engine = Engine::create(*model_, engine_options(5, DraftKind::kNone));
  ASSERT_TRUE(engine);
  std::vector<GenerationOptions> wanted(5);
  for (GenerationOptions& options : wanted) options.tokens_max = 50;
  wanted[0].grammar = grammar_of("root ::= \"one\"");
  wanted[1].grammar = grammar_of("root ::= \"two\"");  // and no token that says so
  wanted[1].sampling.ignore_eos = true;
  wanted[2].grammar = grammar_of("root ::= \"a\" \"b\"");  // which nothing can follow
  wanted[2].sampling.logit_bias[token_of('b')] = -INFINITY;
  wanted[3].grammar = grammar_of("root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"d\"");
  wanted[3].sampling.logit_bias[token_of('d')] = -INFINITY;
  wanted[4].grammar = grammar_of("root ::= \"three\"");
  wanted[4].stop = {"r"};
  std::vector<std::unique_ptr<Generation>> all;
  const std::vector<std::string> texts = write(**engine, wanted, all);
  EXPECT_EQ(texts[0], "one");
  EXPECT_EQ(all[0]->tokens().back(), kEndToken);
  EXPECT_EQ(all[0]->finish_reason(), FinishReason::kStop);
  EXPECT_EQ(texts[1], "two");
  EXPECT_EQ(all[1]->finish_reason(), FinishReason::kStop);
  EXPECT_EQ(all[1]->tokens().size(), 3U);
  EXPECT_EQ(all[2]->finish_reason(), FinishReason::kError);
  EXPECT_THAT(all[2]->error().message, HasSubstr("grammar allows no token"));
  EXPECT_EQ(all[3]->finish_reason(), FinishReason::kError);
  EXPECT_THAT(all[3]->error().message, HasSubstr("too ambiguous"));
  EXPECT_EQ(texts[4], "th");
  EXPECT_EQ(all[4]->finish_reason(), FinishReason::kStop);
}

}  // namespace
}  // namespace dualdecoder
