// The tables of `bench --peer URL`.
#include <algorithm>
#include <iterator>

#include "base/statistics.h"
#include "bench_rows.h"
#include "commit.h"
#include "load.h"

namespace dualdecoder {
namespace {

using Json = nlohmann::ordered_json;

/// Not of an empty list.
double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const auto at = static_cast<std::size_t>(share * static_cast<double>(values.size()));
  return values[std::min(at, values.size() - 1)];
}

std::vector<double> rates(const LoadRow& row) {
  std::vector<double> known;
  for (const auto& rate : row.tokens_per_s) {
    if (rate) known.push_back(*rate);
  }
  return known;
}

void add_times(const char* name, const std::vector<double>& seconds, Json& json) {
  if (seconds.empty()) return;
  json[fmt::format("{}_ms_median", name)] = median(seconds) * 1e3;
  json[fmt::format("{}_ms_p99", name)] = percentile(seconds, 0.99) * 1e3;
}

Json json_of(const LoadRow& row, const LoadOptions& options) {
  Json json = {{"engine", "server"},
               {"test", "load"},
               {"server", row.name},
               {"url", row.url},
               {"served_model", row.served_model},
               {"clients", row.clients},
               {"prompt_tokens", row.prompt_tokens},
               {"prefix", row.prefix},
               {"answer_tokens", row.answer_tokens},
               {"rounds", row.rounds},
               {"requests", row.requests},
               {"errors", row.errors}};
  if (row.errors > 0) json["first_error"] = row.first_error;
  add_times("first_text", row.first_s, json);
  if (!row.first_s.empty())
    json["first_text_ms_max"] = *std::max_element(row.first_s.begin(), row.first_s.end()) * 1e3;
  add_times("busy_gap", row.busy_gaps_s, json);
  add_times("gap", row.gaps_s, json);
  if (const std::vector<double> known = rates(row); !known.empty()) {
    json["decode_tokens_per_s"] = median(known);
    json["spread"] = spread(known);
  }
  if (row.vs_first) json["vs_first"] = *row.vs_first;
  if (!row.counted_prompt_tokens.empty()) {
    std::vector<double> counted(row.counted_prompt_tokens.begin(), row.counted_prompt_tokens.end());
    json["counted_prompt_tokens"] = median(counted);
  }
  json["model"] = options.model;
  json["text"] = options.file.empty() ? "made-up text" : options.file;
  json["commit"] = DUALDECODER_COMMIT;
  return json;
}

std::string ms(const std::vector<double>& seconds, double share) {
  if (seconds.empty()) return "";
  return fmt::format("{:.1f}", (share == 0.5 ? median(seconds) : percentile(seconds, share)) * 1e3);
}

std::string markdown_of(const std::vector<LoadRow>& rows, const LoadOptions& options) {
  std::string text;
  auto out = std::back_inserter(text);
  fmt::format_to(
      out,
      "servers as their clients see them, answers of {} tokens, {}, tokens counted as in {}, commit "
      "{}\n\n",
      options.answer_tokens, options.file.empty() ? "made-up text" : options.file, options.model,
      DUALDECODER_COMMIT);
  text +=
      "| server | clients | prompt | prefix | first text s: median / max | ms between texts beside prompts: "
      "median / p99 | ms between texts: median / p99 | decode tokens/s | spread | vs first | errors |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const LoadRow& row : rows) {
    const std::vector<double> known = rates(row);
    const std::string first = row.first_s.empty()
                                  ? ""
                                  : fmt::format("{:.2f} / {:.2f}", median(row.first_s),
                                                *std::max_element(row.first_s.begin(), row.first_s.end()));
    fmt::format_to(out, "| {} | {} | {} | {} | {} | {} / {} | {} / {} | {} | {} | {} | {} of {} |\n",
                   row.name, row.clients, row.prompt_tokens, row.prefix, first, ms(row.busy_gaps_s, 0.5),
                   ms(row.busy_gaps_s, 0.99), ms(row.gaps_s, 0.5), ms(row.gaps_s, 0.99),
                   known.empty() ? "" : fmt::format("{:.1f}", median(known)),
                   known.empty() ? "" : fmt::format("±{:.0f} %", spread(known) * 100.0),
                   row.vs_first ? fmt::format("{:.2f}x", *row.vs_first) : "", row.errors, row.requests);
  }
  for (const LoadRow& row : rows) {
    if (row.errors > 0) fmt::format_to(out, "\n{}, {} clients: {}\n", row.name, row.clients, row.first_error);
  }
  return text;
}

}  // namespace

std::string format_load(const std::vector<LoadRow>& rows, const LoadOptions& options,
                        const std::string& format) {
  if (format == "md") return markdown_of(rows, options);
  Json list = Json::array();
  for (const LoadRow& row : rows) list.push_back(json_of(row, options));
  if (format == "csv") return csv_of(list);
  return list.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace dualdecoder
