// For tests of sequences in two tiers: engines over a simulated far tier, and what one sequence gives when it
// is alone and nothing fails.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "decode/engine.h"
#include "model/log_capture.h"
#include "temporary_directory.h"
#include "test_device.h"
#include "tiny_model.h"
#include "transfer/simulated_port.h"

namespace dualdecoder {

inline constexpr std::array kEveryPolicy = {Policy::kFull,     Policy::kReactive, Policy::kLastSet,
                                            Policy::kPrevious, Policy::kDual,     Policy::kPreviousLayer,
                                            Policy::kOracle};
inline constexpr std::uint32_t kTierContext = 640;
inline constexpr std::uint32_t kTierChunk = 32;

inline std::vector<TokenId> random_tokens(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<TokenId> token(0, static_cast<TokenId>(kTinyVocabulary) - 1);
  std::vector<TokenId> tokens(count);
  for (TokenId& t : tokens) t = token(random);
  return tokens;
}

/// One sequence: a prompt, then the tokens of its steps.
struct Story {
  std::vector<TokenId> prompt;
  std::vector<TokenId> steps;
};

inline Story make_story(std::uint32_t prompt, std::uint32_t steps, std::uint64_t seed) {
  return {random_tokens(prompt, 2 * seed), random_tokens(steps, 2 * seed + 1)};
}

/// The group of step `s`: with the next token as a guess behind it where the engine guesses.
inline StepGroup step_group(const Engine& engine, Sequence& sequence, const Story& story, std::size_t s) {
  StepGroup group{.sequence = &sequence, .tokens = std::span(story.steps).subspan(s, 1)};
  const bool guesses = engine.options().draft.kind != DraftKind::kNone;
  if (guesses && s + 1 < story.steps.size()) group.guess = story.steps[s + 1];
  return group;
}

/// Logits of the prompt's last row and of each step.
using Rows = std::vector<std::vector<float>>;

inline std::vector<float> copy_row(const float* logits) { return {logits, logits + kTinyVocabulary}; }

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class TieredEngines : public testing::Test {
 protected:
  /// `name`: of its file; each model that lives has one of its own.
  std::unique_ptr<Model> load(const TinyModelOptions& options, const std::string& name = "model") const {
    quiet_library_logs();
    const std::string path = directory_.file(name + ".gguf");
    const Status written = write_tiny_model(path, options);
    DD_CHECK(written, "{}", written.error().message);
    auto model = load_on_test_device(path);
    DD_CHECK(model, "{}", model.error().message);
    return std::move(*model);
  }

  /// Little room near, so that nearly every step moves blocks.
  static EngineOptions small_options(std::uint32_t sequences, std::uint32_t block_tokens = 16) {
    EngineOptions options{.context = kTierContext,
                          .sequences = sequences,
                          .prefill_chunk = kTierChunk,
                          .block_tokens = block_tokens,
                          .batch_invariant = true};
    options.tiers.sink_tokens = 16;
    options.tiers.recent_tokens = 32;
    options.tiers.budget_tokens = 64;
    options.tiers.near_tokens = 1;
    options.tiers.staging_tokens = 256;
    options.tiers.poison = true;
    return options;
  }

  static std::unique_ptr<Engine> engine(const Model& model, const EngineOptions& options) {
    auto created = Engine::create(model, options);
    DD_CHECK(created, "{}", created.error().message);
    return std::move(*created);
  }

  /// The port belongs to the engine.
  static std::unique_ptr<Engine> simulated(const Model& model, EngineOptions options,
                                           SimulatedPortOptions port_options,
                                           SimulatedPort** port = nullptr) {
    options.tiers.far.kind = FarKind::kCustom;
    options.tiers.far.make_port = [&](std::uint64_t bytes) {
      port_options.bytes = bytes;
      port_options.keep_log = false;
      auto made = std::make_unique<SimulatedPort>(port_options);
      if (port != nullptr) *port = made.get();
      return made;
    };
    return engine(model, options);
  }

  static std::unique_ptr<Sequence> new_sequence(Engine& engine) {
    auto created = engine.new_sequence();
    DD_CHECK(created, "{}", created.error().message);
    return std::move(*created);
  }

  /// The same options, but one sequence, a far tier that never fails, and room near for all of it.
  static EngineOptions alone_options(EngineOptions options) {
    options.sequences = 1;
    options.tiers.far = {.kind = FarKind::kHost, .directory = {}, .make_port = {}};
    options.tiers.near_tokens = options.context;
    options.tiers.near_bytes_max = 0;
    options.tiers.transfers = {};
    return options;
  }

  static Rows play(Engine& engine, const Story& story) {
    Rows rows;
    const auto sequence = new_sequence(engine);
    const auto prompt = engine.prefill(*sequence, story.prompt);
    DD_CHECK(prompt, "{}", prompt.error().message);
    rows.push_back(copy_row(*prompt));
    for (std::size_t s = 0; s < story.steps.size(); ++s) {
      const StepGroup group = step_group(engine, *sequence, story, s);
      const auto logits = engine.step(std::span(&group, 1));
      DD_CHECK(logits && !sequence->error(), "{}",
               logits ? sequence->error()->message : logits.error().message);
      rows.push_back(copy_row(*logits));
    }
    return rows;
  }

  TemporaryDirectory directory_;
};

}  // namespace dualdecoder
