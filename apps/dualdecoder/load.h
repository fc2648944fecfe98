// `dualdecoder bench --peer URL`: servers that speak the OpenAI API under the load of several clients. What
// is measured is what a client sees, HTTP and queueing included; it does not compare with the rows of engines
// in this process.
//
// A round has two halves. First all clients send a prompt at the same moment that the server has not seen:
// the time to the first text, and between texts while others' prompts are computed. Then they send the same
// prompts once more: where a server keeps prefixes, all are being answered at once, and from then on what it
// decodes is counted. In each round every server runs once, in turn, with the same prompts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "command.h"

namespace dualdecoder {

struct LoadOptions {
  std::string model;                 // whose vocabulary counts the prompts' tokens
  std::vector<std::string> servers;  // URL or NAME=URL
  ServerChoices server;              // key and model of all of them
  std::string file;                  // text of the prompts; made up without
  std::vector<std::uint32_t> clients;
  std::vector<std::uint32_t> prompts;  // tokens
  std::vector<std::string> prefixes;   // "unshared", "shared"
  std::uint32_t answer_tokens = 0;
  std::uint32_t repeats = 0;
};

/// What one server did under one load. Times in seconds, over all rounds.
struct LoadRow {
  std::string name = {};
  std::string url = {};
  std::string served_model = {};
  std::string prefix = {};
  std::uint32_t clients = 0;
  std::uint32_t prompt_tokens = 0;
  std::uint32_t answer_tokens = 0;
  std::uint32_t rounds = 0;
  std::uint32_t requests = 0;
  std::uint32_t errors = 0;
  std::string first_error = {};
  std::vector<double> first_s = {};                       // to the first text, all at once
  std::vector<double> busy_gaps_s = {};                   // between texts, while prompts are computed, too
  std::vector<double> gaps_s = {};                        // between texts, once all are being answered
  std::vector<std::optional<double>> tokens_per_s = {};   // [round] the same; nothing: never all at once
  std::vector<std::uint32_t> counted_prompt_tokens = {};  // as the server counts them
  std::optional<double> vs_first = {};                    // rate by that of the first server, of pairs
};

/// Whether a value of --peer is an address.
bool is_server(const std::string& peer);

/// `rows`: what was measured, also after an error or an interruption.
Status measure_load(const LoadOptions& options, std::vector<LoadRow>& rows);

/// `format`: "md", "json" or "csv".
std::string format_load(const std::vector<LoadRow>& rows, const LoadOptions& options,
                        const std::string& format);

}  // namespace dualdecoder
