#include "bench_rows.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "base/statistics.h"
#include "commit.h"

namespace dualdecoder {
namespace {

using Json = nlohmann::ordered_json;

/// Share of attended blocks that were near when they were needed.
double near_in_time(const BenchRow& row) {
  const TierTotals& tiers = row.tiers;
  if (tiers.blocks_attended == 0.0) return 1.0;
  return 1.0 - (tiers.blocks_missed + tiers.blocks_late) / tiers.blocks_attended;
}

void add_tiers(const BenchRow& row, const BenchSetting& setting, Json& json) {
  const TierTotals& tiers = row.tiers;
  json["attend"] = row.attends_resident ? "resident" : "selected";
  json["budget"] = setting.budget;
  json["block_tokens"] = setting.block_tokens;
  json["stall_share"] = tiers.stall_s / row.total_seconds();
  json["select_share"] = tiers.select_s / row.total_seconds();
  json["far_read_bytes_per_step"] = tiers.read_bytes / row.total_steps();
  json["blocks_attended_per_step"] = tiers.blocks_attended / row.total_steps();
  json["blocks_missed_per_step"] = tiers.blocks_missed / row.total_steps();
  json["blocks_late_per_step"] = tiers.blocks_late / row.total_steps();
  json["blocks_wasted_per_step"] = tiers.blocks_wasted / row.total_steps();
  if (tiers.guesses > 0.0) json["guesses_right"] = tiers.guesses_right / tiers.guesses;
  json["far_read_bytes_per_token"] = tiers.read_bytes / row.total_steps() / row.tokens_per_step;
  json["far_read_bytes_per_s"] = row.far_bytes_per_s();
  if (setting.roofline && setting.roofline->disk_bytes_per_s && row.far.starts_with("file:"))
    json["disk_share"] = row.far_bytes_per_s() / *setting.roofline->disk_bytes_per_s;
  json["near_in_time"] = near_in_time(row);
  if (tiers.selected > 0.0) json["recall"] = tiers.predicted / tiers.selected;
  if (row.divergence) {
    json["kl_mean"] = row.divergence->kl_mean;
    json["kl_positions"] = row.divergence->positions;
    json["same_top"] = row.divergence->same_top;
  }
}

Json json_of(const BenchRow& row, const BenchSetting& setting) {
  Json json = {{"engine", row.engine},
               {"test", row.test},
               {"policy", row.policy},
               {"context", row.depth},
               {"sequences", row.sequences},
               {"threads", setting.threads},
               {"tokens_per_s", row.tokens_per_s()},
               {"ms_per_step", row.ms_per_step()},
               {"spread", row.spread()},
               {"near_kv_bytes", row.near_kv_bytes},
               {"commit", DUALDECODER_COMMIT},
               {"far", row.far},
               {"fill", setting.fill}};
  if (row.tiered()) add_tiers(row, setting, json);
  if (row.speedup) json["speedup"] = *row.speedup;
  if (row.vs_first) json["vs_first"] = *row.vs_first;
  json["far_kv_bytes"] = row.far_kv_bytes;
  json["model"] = setting.model;
  json["text"] = setting.text;
  json["repeats"] = row.seconds.size();
  if (row.weight_bytes > 0) {
    json["token_hash"] = fmt::format("{:016x}", row.token_hash);
    json["memory_bytes_per_s"] = row.memory_bytes_per_s();
    if (setting.roofline)
      json["memory_share"] = row.memory_bytes_per_s() / setting.roofline->memory_bytes_per_s;
  }
  return json;
}

Json json_of(const Roofline& roofline, const BenchSetting& setting) {
  Json json = {{"test", "roofline"},
               {"threads", setting.threads},
               {"commit", DUALDECODER_COMMIT},
               {"memory_bytes_per_s", roofline.memory_bytes_per_s}};
  if (roofline.disk_bytes_per_s) {
    json["disk_bytes_per_s"] = *roofline.disk_bytes_per_s;
    json["disk_block_bytes"] = roofline.disk_block_bytes;
  }
  return json;
}

Json json_of(const std::vector<BenchRow>& rows, const BenchSetting& setting) {
  Json list = Json::array();
  for (const BenchRow& row : rows) list.push_back(json_of(row, setting));
  if (setting.roofline) list.push_back(json_of(*setting.roofline, setting));
  return list;
}

std::string csv_cell(const Json& value) {
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

/// The policy, and what it attends to where that is more than it selected.
std::string policy_text(const BenchRow& row) {
  return row.policy + (row.attends_resident ? ", resident" : "");
}

std::string percent(double share) { return fmt::format("{:.0f} %", share * 100.0); }

/// The fastest of our rows with a far tier against libllama's row of the same test; nothing if there is none.
std::string headline(const std::vector<BenchRow>& rows) {
  const BenchRow* best = nullptr;
  for (const BenchRow& row : rows) {
    if (!row.tiered() || row.weight_bytes == 0) continue;
    if (best == nullptr || row.tokens_per_s() > best->tokens_per_s()) best = &row;
  }
  if (best == nullptr) return "";
  std::string text =
      fmt::format("**{:.0f} tokens/s**: {} x {} tokens, KV in {}, policy {}", best->tokens_per_s(),
                  best->sequences, best->depth, best->far, policy_text(*best));
  if (best->speedup) text += fmt::format("; **{:.1f} times libllama**, all KV in RAM", *best->speedup);
  if (best->divergence) {
    text += fmt::format("; mean KL to full attention {:.4f} over {} positions", best->divergence->kl_mean,
                        best->divergence->positions);
  }
  return text + "\n\n";
}

std::string tiers_text(const BenchRow& row, const BenchSetting& setting) {
  if (!row.tiered()) return "| | | | | | |";
  const TierTotals& tiers = row.tiers;
  const double steps = row.total_steps();
  std::string disk;
  if (setting.roofline && setting.roofline->disk_bytes_per_s && row.far.starts_with("file:"))
    disk = fmt::format(" ({})", percent(row.far_bytes_per_s() / *setting.roofline->disk_bytes_per_s));
  return fmt::format("{:.2f} | {:.2f}{} | {:.1f} % | {:.1f} % | {:.1f} / {:.1f} / {:.1f} | {} | {}",
                     tiers.read_bytes / steps / row.tokens_per_step / 1048576.0, row.far_bytes_per_s() * 1e-9,
                     disk, tiers.stall_s / row.total_seconds() * 100.0,
                     tiers.select_s / row.total_seconds() * 100.0, tiers.blocks_missed / steps,
                     tiers.blocks_late / steps, tiers.blocks_wasted / steps,
                     tiers.selected > 0.0 ? fmt::format("{:.3f}", tiers.predicted / tiers.selected) : "",
                     tiers.guesses > 0.0 ? percent(tiers.guesses_right / tiers.guesses) : "");
}

std::string markdown_of(const std::vector<BenchRow>& rows, const BenchSetting& setting) {
  std::string text;
  auto out = std::back_inserter(text);
  fmt::format_to(out, "{}, {} threads, commit {}", setting.model, setting.threads, DUALDECODER_COMMIT);
  if (std::any_of(rows.begin(), rows.end(), [](const BenchRow& row) { return row.tiered(); }))
    fmt::format_to(out, ", budget {} in blocks of {}", setting.budget, setting.block_tokens);
  fmt::format_to(out, ", {}", setting.text);
  if (setting.fill == "synthetic") text += ", filled with random KV (speed only)";
  text += "\n\n";
  if (setting.roofline) {
    fmt::format_to(out, "memory reads {:.1f} GB/s", setting.roofline->memory_bytes_per_s * 1e-9);
    if (setting.roofline->disk_bytes_per_s) {
      fmt::format_to(out, ", the disk {:.2f} GB/s in blocks of {} KiB",
                     *setting.roofline->disk_bytes_per_s * 1e-9, setting.roofline->disk_block_bytes / 1024);
    }
    text += "\n\n";
  }
  if (rows.empty()) return text;
  text += headline(rows);
  text +=
      "| test | sequences | engine | far | policy | tokens/s | ms/step | spread | mean KL | near KV MiB | "
      "memory GB/s | far MiB/token | far GB/s | stall | ranking | missed / late / wasted blocks/step | "
      "recall | "
      "guesses right | vs first | vs libllama | token hash |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const BenchRow& row : rows) {
    std::string memory;
    if (row.weight_bytes > 0) {
      memory = fmt::format("{:.1f}", row.memory_bytes_per_s() * 1e-9);
      if (setting.roofline)
        memory +=
            fmt::format(" ({})", percent(row.memory_bytes_per_s() / setting.roofline->memory_bytes_per_s));
    }
    fmt::format_to(
        out,
        "| {} | {} | {} | {} | {} | {:.1f} | {:.2f} | ±{:.0f} % | {} | {:.1f} | {} | {} | {} | {} | {} |\n",
        row.test, row.sequences, row.engine, row.far, policy_text(row), row.tokens_per_s(), row.ms_per_step(),
        row.spread() * 100.0, row.divergence ? fmt::format("{:.4f}", row.divergence->kl_mean) : "",
        static_cast<double>(row.near_kv_bytes) / 1048576.0, memory, tiers_text(row, setting),
        row.vs_first ? fmt::format("{:.3f}x", *row.vs_first) : "",
        row.speedup ? fmt::format("{:.2f}x", *row.speedup) : "",
        row.weight_bytes > 0 ? fmt::format("{:016x}", row.token_hash) : "");
  }
  return text;
}

}  // namespace

double BenchRow::total_seconds() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }
double BenchRow::tokens_per_s() const { return steps * tokens_per_step / median(seconds); }
double BenchRow::ms_per_step() const { return median(seconds) / steps * 1e3; }
double BenchRow::spread() const { return dualdecoder::spread(seconds); }
double BenchRow::memory_bytes_per_s() const {
  if (weight_bytes == 0) return 0.0;
  return (static_cast<double>(weight_bytes) * total_steps() + tiers.kv_bytes) / total_seconds();
}
double BenchRow::far_bytes_per_s() const { return tiers.read_bytes / total_seconds(); }

std::string csv_of(const Json& list) {
  std::vector<std::string> columns;
  for (const Json& row : list) {
    for (const auto& [name, value] : row.items()) {
      if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
    }
  }
  std::string text = fmt::format("{}\n", fmt::join(columns, ","));
  for (const Json& row : list) {
    for (std::size_t i = 0; i < columns.size(); ++i) {
      if (i > 0) text += ',';
      if (row.contains(columns[i])) text += csv_cell(row[columns[i]]);
    }
    text += '\n';
  }
  return text;
}

std::string format_rows(const std::vector<BenchRow>& rows, const BenchSetting& setting,
                        const std::string& format) {
  if (format == "md") return markdown_of(rows, setting);
  const Json list = json_of(rows, setting);
  if (format == "csv") return csv_of(list);
  return list.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace dualdecoder
