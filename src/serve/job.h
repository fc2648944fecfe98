// One prompt and one answer to it, as the service takes it and tells about it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "decode/generation.h"
#include "serve/scheduler.h"

namespace dualdecoder {

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0.0f;                        // natural logarithm, of the model's own distribution
  std::vector<std::pair<TokenId, float>> top;  // likeliest first
  std::size_t text_begin = 0;                  // bytes of the answer before it
};

struct JobEnd {
  FinishReason reason = FinishReason::kStop;
  Error error;  // of kError
  std::uint32_t prompt_tokens = 0;
  std::uint32_t cached_tokens = 0;  // of the prompt, not computed again
  std::uint32_t tokens = 0;         // of the answer
  double queue_s = 0.0;
  double prompt_s = 0.0;
  double decode_s = 0.0;
};

/// What has happened to a job since its last event.
struct JobEvent {
  std::uint32_t prompt_done = 0;  // tokens of the prompt computed so far; 0: as before
  std::string text;               // of the answer: whole UTF-8, nothing of a stop string
  std::vector<TokenLogprob> logprobs;
  std::vector<TokenLogprob> prompt_logprobs;  // of all its tokens but the first, with the prompt's end
  std::optional<JobEnd> end;                  // the last event
};

struct Job {
  std::vector<TokenId> prompt;
  GenerationOptions options;  // its callbacks are the service's
  std::optional<std::uint32_t> top_logprobs;
  bool prompt_logprobs = false;
  std::string client;
  std::int32_t priority = 0;
  /// Called on the engine's thread, once after each step that did something for the job; must not block.
  std::function<void(JobEvent)> listener;
};

}  // namespace dualdecoder
