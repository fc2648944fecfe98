#include "decode/generation.h"

#include <utility>

#include "base/check.h"
#include "base/clock.h"

namespace dualdecoder {
namespace {

std::vector<TokenId> find_end_tokens(const Vocabulary& vocabulary) {
  std::vector<TokenId> tokens;
  for (TokenId token = 0; token < static_cast<TokenId>(vocabulary.size()); ++token) {
    if (vocabulary.is_end(token)) tokens.push_back(token);
  }
  return tokens;
}

}  // namespace

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kRunning:
      return "";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAbort:
      return "abort";
    case FinishReason::kError:
      return "error";
  }
  return "";
}

Generation::Generation(std::vector<TokenId> prompt, GenerationOptions options, Sampler sampler, Draft draft)
    : prompt_(std::move(prompt)),
      options_(std::move(options)),
      sampler_(std::move(sampler)),
      draft_(std::move(draft)),
      assembler_(options_.stop) {}

std::string Generation::take_text() { return std::exchange(text_, {}); }

void Generation::remember(TokenId token) {
  sampler_.accept(token);
  draft_.remember(token);
}

TokenId Generation::token_at(std::uint32_t position) const {
  return position < prompt_.size() ? prompt_[position] : tokens_[position - prompt_.size()];
}

// Of the prompt_left(), those that come next and lie together: `count` at most.
std::span<const TokenId> Generation::next_tokens(std::uint32_t count) const {
  const std::uint32_t position = sequence_->tokens();
  const auto rest = position < prompt_.size() ? std::span(prompt_).subspan(position)
                                              : std::span(tokens_).subspan(position - prompt_.size());
  return rest.first(std::min<std::size_t>({rest.size(), count, prompt_left()}));
}

bool Generation::wants_more_than_one() const {
  return !options_.tokens_max || tokens_.size() + 1 < *options_.tokens_max;
}

void Generation::finish(FinishReason reason) {
  if (!running()) return;
  finish_reason_ = reason;
  text_ += assembler_.finish();
}

Generator::Generator(Engine& engine)
    : engine_(engine),
      end_tokens_(find_end_tokens(engine.model().vocabulary())),
      scratch_(static_cast<std::int32_t>(engine.model().vocabulary().size())) {
  if (engine.options().tiers.policy == Policy::kAuto) chooser_.emplace();
}

Status Generator::check(std::span<const TokenId> prompt, const GenerationOptions& options) const {
  const Vocabulary& vocabulary = engine_.model().vocabulary();
  if (prompt.empty()) return fail(ErrorCode::kInvalidArgument, "the prompt is empty");
  if (Status status = vocabulary.check_tokens(prompt); !status) return status;
  if (prompt.size() >= engine_.context()) {
    return fail(ErrorCode::kContextExceeded,
                "the prompt has {} tokens and the context holds {}: nothing would be left for an answer; "
                "shorten the prompt or raise the context (-c)",
                prompt.size(), engine_.context());
  }
  if (Status status = validate(options.sampling, static_cast<std::int32_t>(vocabulary.size()), end_tokens_);
      !status) {
    return status;
  }
  if (const auto own = own_selection(options)) {
    if (Status status = engine_.check_selection(own->policy, own->budget_tokens); !status) return status;
  }
  return validate_stop_strings(options.stop);
}

Result<std::unique_ptr<Generation>> Generator::start(std::vector<TokenId> prompt, GenerationOptions options) {
  if (Status status = check(prompt, options); !status) return std::unexpected(status.error());
  const auto vocabulary_size = static_cast<std::int32_t>(engine_.model().vocabulary().size());
  Sampler sampler(options.sampling, vocabulary_size, end_tokens_);
  const DraftOptions draft = draft_for(options);
  std::unique_ptr<Generation> generation(
      new Generation(std::move(prompt), std::move(options), std::move(sampler), Draft(engine_, draft)));
  if (Status status = begin_sequence(*generation); !status) return std::unexpected(status.error());
  begin_grammar(*generation);
  for (const TokenId token : generation->prompt_) generation->remember(token);
  return generation;
}

std::optional<Generator::OwnSelection> Generator::own_selection(const GenerationOptions& options) const {
  if (!options.policy && !options.budget_tokens) return std::nullopt;
  const TierOptions& tiers = engine_.options().tiers;
  return OwnSelection{options.policy.value_or(tiers.policy),
                      options.budget_tokens.value_or(tiers.budget_tokens)};
}

DraftOptions Generator::draft_for(const GenerationOptions& options) const {
  if (!options.policy || *options.policy == engine_.options().tiers.policy) return engine_.options().draft;
  return {.kind = *options.policy == Policy::kDual ? DraftKind::kSelf : DraftKind::kNone};
}

void Generator::begin_grammar(Generation& generation) {
  if (!generation.options_.grammar) return;
  if (!texts_) texts_ = std::make_shared<TokenTexts>(engine_.model().vocabulary());
  generation.grammar_ = std::make_unique<GrammarMatcher>(generation.options_.grammar, texts_);
}

// With a kept prefix, if there is one that can be read.
Status Generator::begin_sequence(Generation& generation) {
  auto sequence = engine_.new_sequence();
  if (!sequence) return std::unexpected(sequence.error());
  generation.sequence_ = std::move(*sequence);
  generation.kept_ = {};
  const GenerationOptions& options = generation.options_;
  if (const auto own = own_selection(options)) {
    Status status = engine_.set_selection(*generation.sequence_, own->policy, own->budget_tokens);
    if (!status) return status;
  }
  PrefixCache* const prefixes = engine_.prefixes();
  if (prefixes == nullptr || !options.reuse_prefix) return {};
  // A prompt whose rows all want logits is computed from its beginning.
  const std::span<const TokenId> wanted =
      options.on_prompt_token ? std::span<const TokenId>() : generation.prompt_;
  const auto found =
      prefixes->adopt(*generation.sequence_, options.prefix_salt, wanted, options.exact_prefix_only);
  if (found) {
    generation.kept_ = *found;
    generation.cached_tokens_ = generation.sequence_->tokens();
    return {};
  }
  generation.sequence_.reset();
  return begin_sequence(generation);  // that prefix is gone
}

// What is full and written. Of a block that decoding has filled, only full attention can say that it is
// exact.
void Generator::keep_blocks(Generation& generation) {
  PrefixCache* const prefixes = engine_.prefixes();
  if (prefixes == nullptr || !generation.options_.reuse_prefix || generation.sequence_->error()) return;
  const std::uint32_t block_tokens = engine_.options().block_tokens;
  const std::uint32_t at_rest = generation.sequence_->blocks_at_rest();
  std::vector<TokenId> tokens(block_tokens);
  while (generation.kept_.blocks < at_rest) {
    const std::uint32_t begin = generation.kept_.blocks * block_tokens;
    for (std::uint32_t i = 0; i < block_tokens; ++i) tokens[i] = generation.token_at(begin + i);
    const bool exact = begin + block_tokens <= generation.prompt_.size() ||
                       generation.sequence_->rule().policy == Policy::kFull;
    if (!prefixes->keep(*generation.sequence_, generation.kept_, tokens, exact)) return;
  }
}

void Generator::keep_prefix(Generation& generation) {
  if (engine_.prefixes() == nullptr || !generation.sequence_ || generation.sequence_->error()) return;
  if (generation.sequence_->finish_writes()) keep_blocks(generation);
}

void Generator::park(Generation& generation) {
  DD_CHECK(generation.running());
  if (Status status = generation.sequence_->park(); !status) {
    generation.error_ = status.error();
    return generation.finish(FinishReason::kError);
  }
  generation.draft_.rest();
}

Status Generator::resume(Generation& generation) {
  Status status = generation.sequence_->resume();
  if (generation.parked()) return status;
  settle(generation);
  return {};
}

Status Generator::prefill(Generation& generation, const Engine::Progress& progress) {
  DD_CHECK(generation.running() && generation.tokens_.empty());
  const auto rest = std::span<const TokenId>(generation.prompt_).subspan(generation.sequence_->tokens());
  const auto logits = engine_.prefill(*generation.sequence_, rest, progress);
  if (!logits) {
    if (!generation.sequence_->error()) return std::unexpected(logits.error());
    generation.error_ = logits.error();
    generation.finish(FinishReason::kError);
    return {};
  }
  if (*logits == nullptr) {
    generation.finish(FinishReason::kAbort);
    return {};
  }
  end_prompt(generation, *logits);
  return {};
}

Status Generator::step(std::span<Generation* const> running) {
  if (!chooser_) return run_step(running);
  const auto tokens = [&] {
    std::size_t count = 0;
    for (const Generation* generation : running) count += generation->tokens_.size();
    return count;
  };
  for (Generation* generation : running) {
    if (!generation->options_.policy) generation->draft_.use(draft_of(chooser_->way()));
  }
  const std::size_t before = tokens();
  const Stopwatch watch;
  Status status = run_step(running);
  // What a step costs beside a prompt says nothing about the way of decoding.
  if (pieces_.empty()) chooser_->note(watch.seconds(), static_cast<std::uint32_t>(tokens() - before));
  return status;
}

Status Generator::run_step(std::span<Generation* const> running) {
  groups_.clear();
  members_.clear();
  for (Generation* generation : running) {
    DD_CHECK(generation->running() && !generation->tokens_.empty() && generation->prompt_left() == 0);
    if (generation->sequence_->error()) continue;  // since the last step: a write came back
    members_.push_back(generation);
    groups_.push_back(generation->draft_.next(*generation->sequence_, generation->tokens_.back(),
                                              generation->wants_more_than_one()));
  }
  if (!groups_.empty()) {
    const auto logits = engine_.step(groups_);
    if (!logits) return std::unexpected(logits.error());
    const float* row = *logits;
    for (std::size_t i = 0; i < members_.size(); ++i) {
      Generation& generation = *members_[i];
      const std::size_t rows = groups_[i].logits_rows();
      if (!generation.sequence_->error())
        generation.draft_.take(*generation.sequence_, row, draw_of(generation));
      row += rows * engine_.model().vocabulary().size();
    }
  }
  for (Generation* generation : running) settle(*generation);
  return {};
}

Status Generator::begin_prompts(std::span<const PromptPiece> pieces) {
  DD_CHECK(pieces_.empty() && !pieces.empty());
  prompt_groups_.clear();
  prompt_members_.clear();
  for (const auto& [generation, tokens] : pieces) {
    DD_CHECK(generation->running() && tokens > 0 && tokens <= generation->prompt_left());
    if (generation->sequence_->error()) continue;
    const std::span<const TokenId> next = generation->next_tokens(tokens);
    const bool draws = next.size() == generation->prompt_left() && generation->tokens_.empty();
    const LogitsWanted logits = generation->options_.on_prompt_token ? LogitsWanted::kAll
                                : draws                              ? LogitsWanted::kLast
                                                                     : LogitsWanted::kNone;
    prompt_members_.push_back(generation);
    prompt_groups_.push_back(
        {.sequence = generation->sequence_.get(), .tokens = next, .logits = logits, .prompt = true});
  }
  if (!prompt_groups_.empty()) {
    if (Status status = engine_.begin_prompts(prompt_groups_); !status) return status;
  }
  pieces_.assign(pieces.begin(), pieces.end());
  return {};
}

bool Generator::advance_prompts(std::uint32_t layers) {
  DD_CHECK(!pieces_.empty());
  if (engine_.prompts_under_way()) {
    const auto logits = engine_.advance_prompts(layers);
    if (!logits) return false;
    end_prompts(*logits);
  }
  for (const PromptPiece& piece : pieces_) settle(*piece.generation);
  pieces_.clear();
  return true;
}

// `logits`: of the rows of all that wanted any.
void Generator::end_prompts(const float* logits) {
  for (std::size_t i = 0; i < prompt_members_.size(); ++i) {
    Generation& generation = *prompt_members_[i];
    if (!generation.sequence_->error()) take_prompt_logits(generation, prompt_groups_[i].tokens, logits);
    logits += prompt_groups_[i].logits_rows() * engine_.model().vocabulary().size();
  }
}

// After a step: keeps what is full, or sees to what has failed.
void Generator::settle(Generation& generation) {
  if (!generation.sequence_->error()) return keep_blocks(generation);
  if (!generation.running()) return;
  const Error error = *generation.sequence_->error();
  if (restart(generation)) return;
  generation.error_ = error;
  generation.finish(FinishReason::kError);
}

// A kept prefix that cannot be read any more is no reason to fail: its tokens are computed again, once.
bool Generator::restart(Generation& generation) {
  if (generation.cached_tokens_ == 0 || generation.restarted_) return false;
  generation.restarted_ = true;
  engine_.prefixes()->drop(generation.kept_.first);
  generation.sequence_.reset();
  generation.cached_tokens_ = 0;
  generation.draft_.forget_guess();
  return begin_sequence(generation).has_value();
}

// `tokens` of the prompt have just been computed; `logits` are those of the rows that wanted any.
void Generator::take_prompt_logits(Generation& generation, std::span<const TokenId> tokens,
                                   const float* logits) {
  const std::size_t width = engine_.model().vocabulary().size();
  if (generation.options_.on_prompt_token) {
    const TokenId* const end = generation.prompt_.data() + generation.prompt_.size();
    for (const TokenId* next = tokens.data() + 1; next <= tokens.data() + tokens.size(); ++next) {
      if (next == end) break;
      generation.options_.on_prompt_token(*next, std::span(logits, width));
      logits += width;
    }
  }
  if (generation.prompt_left() == 0 && generation.tokens_.empty()) end_prompt(generation, logits);
}

// `logits`: of the prompt's last row.
void Generator::end_prompt(Generation& generation, const float* logits) {
  if (generation.options_.tokens_max == 0U) {
    generation.finish(FinishReason::kLength);
    return;
  }
  draw(generation, std::span(logits, engine_.model().vocabulary().size()));
  if (generation.running()) generation.draft_.begin(*generation.sequence_, draw_of(generation));
}

Draft::Draw Generator::draw_of(Generation& generation) {
  return [&](std::span<const float> from, std::uint32_t position, DrawnAs drawn_as) {
    return drawn_as == DrawnAs::kToken ? draw(generation, from) : guess(generation, from, position);
  };
}

// Nothing when the generation ends with it.
std::optional<TokenId> Generator::draw(Generation& generation, std::span<const float> row) {
  const Vocabulary& vocabulary = engine_.model().vocabulary();
  const auto position = static_cast<std::uint32_t>(generation.prompt_.size() + generation.tokens_.size());
  const auto token = generation.sampler_.sample(row, position, scratch_, generation.grammar_.get());
  if (!token) {
    end_undrawn(generation, token.error());
    return std::nullopt;
  }
  if (generation.grammar_) generation.grammar_->accept(*token);
  if (generation.options_.on_token) generation.options_.on_token(*token, row);
  generation.remember(*token);
  generation.tokens_.push_back(*token);

  if (vocabulary.is_end(*token)) {
    generation.finish(FinishReason::kStop);
    return std::nullopt;
  }
  generation.text_ += generation.assembler_.push(vocabulary.piece(*token));
  if (generation.assembler_.stopped()) {
    generation.finish(FinishReason::kStop);
  } else if (generation.tokens_.size() == generation.options_.tokens_max ||
             position + 1 >= engine_.context()) {
    generation.finish(FinishReason::kLength);
  }
  return generation.running() ? std::optional(*token) : std::nullopt;
}

// A text that can only end has ended, whether or not a token says so. Else nothing can be drawn.
void Generator::end_undrawn(Generation& generation, const Error& error) {
  const GrammarMatcher* const grammar = generation.grammar_.get();
  const bool out_of_tokens = grammar != nullptr && error.code == ErrorCode::kInvalidArgument;
  if (out_of_tokens && !grammar->exhausted() && grammar->complete())
    return generation.finish(FinishReason::kStop);
  generation.error_ = error;
  if (out_of_tokens && grammar->exhausted())
    generation.error_.message = "the grammar is too ambiguous: there are too many ways of reading the text";
  generation.finish(FinishReason::kError);
}

// With the noise of its position and the same history: what draw() will say of the same logits. The grammar
// has read what was drawn, and a guess is of what comes next: it is asked the same.
std::optional<TokenId> Generator::guess(const Generation& generation, std::span<const float> logits,
                                        std::uint32_t position) {
  const auto token = generation.sampler_.sample(logits, position, scratch_, generation.grammar_.get());
  return token ? std::optional(*token) : std::nullopt;
}

}  // namespace dualdecoder
