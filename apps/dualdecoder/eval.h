// What the parts of `dualdecoder eval` share: the options, and where their results go.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "command.h"
#include "tasks/task.h"

namespace dualdecoder {

struct EvalOptions {
  ModelOptions model;
  TierChoices tiers;
  bool kl = false;
  bool perplexity = false;
  std::string file;
  std::uint32_t context = 6000;
  std::uint32_t positions = 256;
  std::vector<std::string> policies = {"previous"};
  std::vector<std::uint32_t> budgets = {512, 1024, 2048};
  std::vector<std::uint32_t> blocks = {32};
  std::vector<std::string> digests = {"principal"};
  std::vector<std::string> digest_types = {"f16"};
  std::vector<std::uint32_t> sinks = {TierOptions{}.sink_tokens};
  std::vector<std::uint32_t> recents = {TierOptions{}.recent_tokens};
  // Of the tasks.
  std::vector<TaskKind> tasks;
  std::vector<std::uint32_t> lengths = {2048, 4096};
  std::vector<std::uint32_t> depths = {10, 35, 65, 90};
  std::uint32_t seeds = 5;
  bool raw = false;
  std::string results;
  ServerChoices server;  // who answers; without an address, this process
  std::string output = "md";

  bool reads_text() const { return kl || perplexity; }
};

/// Rows of the JSON output, and the tables for people. What was measured before an error or an interruption
/// is in it.
struct EvalReport {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  std::string markdown;
};

/// Options for an engine that can change to any of the policies and budgets. `draft`: what --draft model:FILE
/// names is loaded into it, unless it is there.
Result<EngineOptions> eval_engine_options(const EvalOptions& options, const EngineOptions& engine,
                                          TierChoices choices, std::unique_ptr<Model>& draft);

/// Divergence from full attention and perplexity on a text.
Status eval_text(const EvalOptions& options, const Model& model, const EngineOptions& engine,
                 EvalReport& report);
/// The tasks, answered by a server.
Status eval_server(const EvalOptions& options, EvalReport& report);
/// Questions about documents, with each policy and with full attention.
Status eval_tasks(const EvalOptions& options, const Model& model, const EngineOptions& engine,
                  EvalReport& report);

}  // namespace dualdecoder
