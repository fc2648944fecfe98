// From a prompt to text: a Generation is one request's state, a Generator moves any number of them forward.
//
//   auto generation = generator.start(prompt_tokens, options);   // checks everything, computes nothing
//   generator.prefill(*generation, progress);                    // the prompt, and the first token
//   while (running) generator.step(running);                     // a token for each, mostly
//
// Or piece by piece, and layer by layer, beside others that decode:
//
//   generator.begin_prompts({{generation, tokens}});
//   do generator.step(others); while (!generator.advance_prompts(layers));
//
// A token is drawn from the logits of the row before it, with noise that belongs to its position, so its
// value does not depend on which other generations share the step (as far as the logits do not; see
// EngineOptions::batch_invariant). The generator and its generations belong to the engine's thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "decode/draft.h"
#include "decode/engine.h"
#include "decode/grammar_matcher.h"
#include "decode/policy_chooser.h"
#include "decode/sampler.h"
#include "decode/text_assembler.h"

namespace dualdecoder {

struct GenerationOptions {
  SamplingOptions sampling;
  std::vector<std::string> stop;            // at most kMaxStopStrings
  std::optional<std::uint32_t> tokens_max;  // none: until the model ends or the context is full
  std::shared_ptr<const Grammar> grammar;   // that the text is to follow; null: none
  /// Its own, instead of the engine's: see Engine::own_policies(). kDual guesses, and only that.
  std::optional<Policy> policy;
  std::optional<std::uint32_t> budget_tokens;
  /// Where the engine keeps prefixes: begin with a kept one, and keep this one.
  bool reuse_prefix = true;
  bool exact_prefix_only = false;  // none whose tokens attended to a selection
  std::string prefix_salt;         // prefixes of different salts do not know each other
  /// Called with each token drawn and the logits [vocabulary] that it was drawn from.
  std::function<void(TokenId, std::span<const float>)> on_token;
  /// Called with each token of the prompt but the first, and the logits of the row before it. The prompt then
  /// goes in pieces of at most EngineOptions::outputs_max tokens.
  std::function<void(TokenId, std::span<const float>)> on_prompt_token;
};

class Generation;

/// The next tokens of a prompt that is computed piece by piece, at most so many.
struct PromptPiece {
  Generation* generation = nullptr;
  std::uint32_t tokens = 0;  // 1 to Generation::prompt_left()
};

enum class FinishReason {
  kRunning,
  kStop,    // an end token, a stop string, or the end of the grammar
  kLength,  // tokens_max, or the context is full
  kAbort,   // stopped from outside
  kError,   // of this generation alone; see error()
};
/// "stop", "length", "abort", "error"; "" while running.
const char* finish_reason_name(FinishReason reason);

class Generation {
 public:
  const std::vector<TokenId>& prompt() const { return prompt_; }
  /// Every token drawn, the end token included.
  const std::vector<TokenId>& tokens() const { return tokens_; }
  FinishReason finish_reason() const { return finish_reason_; }
  bool running() const { return finish_reason_ == FinishReason::kRunning; }
  /// Tokens that have to be computed before it can decode: of the prompt, and after a restart those of the
  /// answer, too.
  std::uint32_t prompt_left() const {
    const std::size_t wanted = prompt_.size() + (tokens_.empty() ? 0 : tokens_.size() - 1);
    const std::size_t computed = sequence_ ? sequence_->tokens() : 0;
    return static_cast<std::uint32_t>(wanted - std::min(wanted, computed));
  }
  /// Tokens of the prompt that were found in the far tier.
  std::uint32_t cached_tokens() const { return cached_tokens_; }
  /// What ended it as kError.
  const Error& error() const { return error_; }
  const Sequence& sequence() const { return *sequence_; }
  /// See Generator::park().
  bool parked() const { return sequence_ && sequence_->parked(); }
  const DraftStats& draft_stats() const { return draft_.stats(); }
  /// Text that has become final since the last call: whole UTF-8, without stop strings.
  std::string take_text();
  /// Ends it from outside; the text held back is released.
  void abort() { finish(FinishReason::kAbort); }

 private:
  friend class Generator;
  Generation(std::vector<TokenId> prompt, GenerationOptions options, Sampler sampler, Draft draft);
  void remember(TokenId token);
  std::span<const TokenId> next_tokens(std::uint32_t count) const;
  TokenId token_at(std::uint32_t position) const;
  bool wants_more_than_one() const;
  void finish(FinishReason reason);

  std::unique_ptr<Sequence> sequence_;
  std::vector<TokenId> prompt_;
  GenerationOptions options_;
  Sampler sampler_;
  std::unique_ptr<GrammarMatcher> grammar_;  // knows the tokens drawn, never a guess; null: no grammar
  Draft draft_;
  TextAssembler assembler_;
  std::vector<TokenId> tokens_;
  std::string text_;
  PrefixCache::Cursor kept_;
  std::uint32_t cached_tokens_ = 0;
  bool restarted_ = false;
  FinishReason finish_reason_ = FinishReason::kRunning;
  Error error_;
};

class Generator {
 public:
  explicit Generator(Engine& engine);

  /// Refuses bad options, tokens outside the vocabulary and prompts that leave no room in the context. Any
  /// thread.
  Status check(std::span<const TokenId> prompt, const GenerationOptions& options) const;
  /// Checks, too; kOutOfMemory when the engine has no place for another sequence.
  Result<std::unique_ptr<Generation>> start(std::vector<TokenId> prompt, GenerationOptions options);
  /// Computes the prompt and draws the first token. When `progress` stops it, the generation ends as kAbort.
  /// An error means that nothing has changed.
  Status prefill(Generation& generation, const Engine::Progress& progress = {});
  /// One step in which each of `running` gets its next token; none where the step only finds a guess of it,
  /// two where a guess was accepted. All are running and prefilled. An error means that nothing has changed;
  /// what goes wrong with one of them alone ends that one as kError.
  Status step(std::span<Generation* const> running);
  /// A step in which these get on with their prompts; with its end one draws its first token. They stay where
  /// they are until advance_prompts() says that the step is over. For step() in between see
  /// EngineOptions::prompts_beside. Errors like step().
  Status begin_prompts(std::span<const PromptPiece> pieces);
  /// The next `layers` layers of it; true with the last one.
  bool advance_prompts(std::uint32_t layers);
  /// Gives the place of one that runs to another, with a far tier; it must not be in the step over prompts.
  /// It can only be resumed, or end. What goes wrong ends it as kError.
  void park(Generation& generation);
  /// Goes on where it was. kOutOfMemory when the engine has no place for it: it stays parked. What else goes
  /// wrong is its own, as in a step.
  Status resume(Generation& generation);
  /// Keeps what is full of its sequence for later ones, after waiting for the writes. For one that has ended.
  void keep_prefix(Generation& generation);
  /// Null unless the engine's policy is kAuto.
  const PolicyChooser* chooser() const { return chooser_ ? &*chooser_ : nullptr; }

 private:
  Status run_step(std::span<Generation* const> running);
  void end_prompts(const float* logits);
  void take_prompt_logits(Generation& generation, std::span<const TokenId> tokens, const float* logits);
  void end_prompt(Generation& generation, const float* logits);
  struct OwnSelection {
    Policy policy;
    std::uint32_t budget_tokens;
  };
  std::optional<OwnSelection> own_selection(const GenerationOptions& options) const;
  DraftOptions draft_for(const GenerationOptions& options) const;
  Status begin_sequence(Generation& generation);
  void keep_blocks(Generation& generation);
  void begin_grammar(Generation& generation);
  void end_undrawn(Generation& generation, const Error& error);
  void settle(Generation& generation);
  bool restart(Generation& generation);
  Draft::Draw draw_of(Generation& generation);
  std::optional<TokenId> draw(Generation& generation, std::span<const float> logits);
  std::optional<TokenId> guess(const Generation& generation, std::span<const float> logits,
                               std::uint32_t position);

  Engine& engine_;
  std::vector<TokenId> end_tokens_;
  SamplerScratch scratch_;
  std::shared_ptr<const TokenTexts> texts_;  // made for the first grammar
  std::optional<PolicyChooser> chooser_;
  std::vector<StepGroup> groups_;
  std::vector<Generation*> members_;  // of groups_
  // Of the step over prompts that is under way.
  std::vector<PromptPiece> pieces_;
  std::vector<StepGroup> prompt_groups_;
  std::vector<Generation*> prompt_members_;  // of prompt_groups_
};

}  // namespace dualdecoder
