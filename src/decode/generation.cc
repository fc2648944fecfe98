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

Generation::Generation(std::unique_ptr<Sequence> sequence, std::vector<TokenId> prompt,
                       GenerationOptions options, Sampler sampler, Draft draft)
    : sequence_(std::move(sequence)),
      prompt_(std::move(prompt)),
      options_(std::move(options)),
      sampler_(std::move(sampler)),
      draft_(std::move(draft)),
      assembler_(options_.stop) {}

std::string Generation::take_text() { return std::exchange(text_, {}); }

void Generation::remember(TokenId token) {
  sampler_.accept(token);
  draft_.remember(token);
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

Result<std::unique_ptr<Generation>> Generator::start(std::vector<TokenId> prompt, GenerationOptions options) {
  const Vocabulary& vocabulary = engine_.model().vocabulary();
  const auto vocabulary_size = static_cast<std::int32_t>(vocabulary.size());
  if (prompt.empty()) return fail(ErrorCode::kInvalidArgument, "the prompt is empty");
  if (Status status = vocabulary.check_tokens(prompt); !status) return std::unexpected(status.error());
  if (prompt.size() >= engine_.context()) {
    return fail(ErrorCode::kContextExceeded,
                "the prompt has {} tokens and the context holds {}: nothing would be left for an answer; "
                "shorten the prompt or raise the context (-c)",
                prompt.size(), engine_.context());
  }
  if (Status status = validate(options.sampling, vocabulary_size, end_tokens_); !status) {
    return std::unexpected(status.error());
  }
  if (Status status = validate_stop_strings(options.stop); !status) return std::unexpected(status.error());

  auto sequence = engine_.new_sequence();
  if (!sequence) return std::unexpected(sequence.error());
  Sampler sampler(options.sampling, vocabulary_size, end_tokens_);
  std::unique_ptr<Generation> generation(new Generation(std::move(*sequence), std::move(prompt),
                                                        std::move(options), std::move(sampler),
                                                        Draft(engine_, engine_.options().draft)));
  for (const TokenId token : generation->prompt_) generation->remember(token);
  return generation;
}

Status Generator::prefill(Generation& generation, const Engine::Progress& progress) {
  DD_CHECK(generation.running() && generation.sequence_->tokens() == 0);
  const auto logits = engine_.prefill(*generation.sequence_, generation.prompt_, progress);
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
  if (generation.options_.tokens_max == 0U) {
    generation.finish(FinishReason::kLength);
    return {};
  }
  draw(generation, std::span(*logits, engine_.model().vocabulary().size()));
  if (generation.running()) generation.draft_.begin(*generation.sequence_, draw_of(generation));
  return {};
}

Status Generator::step(std::span<Generation* const> running) {
  if (!chooser_) return run_step(running);
  const auto tokens = [&] {
    std::size_t count = 0;
    for (const Generation* generation : running) count += generation->tokens_.size();
    return count;
  };
  for (Generation* generation : running) generation->draft_.use(draft_of(chooser_->way()));
  const std::size_t before = tokens();
  const Stopwatch watch;
  Status status = run_step(running);
  chooser_->note(watch.seconds(), static_cast<std::uint32_t>(tokens() - before));
  return status;
}

Status Generator::run_step(std::span<Generation* const> running) {
  groups_.clear();
  members_.clear();
  for (Generation* generation : running) {
    DD_CHECK(generation->running() && !generation->tokens_.empty());
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
      if (!generation.sequence_->error())
        generation.draft_.take(*generation.sequence_, row, draw_of(generation));
      row += groups_[i].logits_rows() * engine_.model().vocabulary().size();
    }
  }
  for (Generation* generation : running) {
    if (!generation->running() || !generation->sequence_->error()) continue;
    generation->error_ = *generation->sequence_->error();
    generation->finish(FinishReason::kError);
  }
  return {};
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
  if (generation.options_.on_logits) generation.options_.on_logits(row);
  const auto token = generation.sampler_.sample(row, position, scratch_);
  if (!token) {
    generation.error_ = token.error();
    generation.finish(FinishReason::kError);
    return std::nullopt;
  }
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

// With the noise of its position and the same history: what draw() will say of the same logits.
std::optional<TokenId> Generator::guess(const Generation& generation, std::span<const float> logits,
                                        std::uint32_t position) {
  const auto token = generation.sampler_.sample(logits, position, scratch_);
  return token ? std::optional(*token) : std::nullopt;
}

}  // namespace dualdecoder
