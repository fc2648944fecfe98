#include "log.h"

#include <chrono>
#include <cstdio>

#include <fmt/chrono.h>
#include <nlohmann/json.hpp>

namespace dualdecoder {
namespace {

using nlohmann::ordered_json;

LogFormat chosen_format = LogFormat::kText;

const char* level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      break;
  }
  return "error";
}

// RFC 3339, UTC.
std::string now_text() {
  const auto now = std::chrono::time_point_cast<std::chrono::milliseconds>(std::chrono::system_clock::now());
  const auto ms = now.time_since_epoch().count() % 1000;
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(std::chrono::system_clock::to_time_t(now)),
                     ms);
}

// In one piece, so that lines of several threads do not mix.
void write_line(std::string line) {
  line.push_back('\n');
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

void write_json(LogLevel level, const std::string& message, const ordered_json& fields) {
  ordered_json object = {{"time", now_text()}, {"level", level_name(level)}, {"message", message}};
  object.update(fields);
  write_line(object.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
}

LogLevel level_of(const RequestRecord& record) {
  return record.status >= 500   ? LogLevel::kError
         : record.status >= 400 ? LogLevel::kWarning
                                : LogLevel::kInfo;
}

ordered_json fields_of(const RequestRecord& record) {
  ordered_json fields = {{"id", record.id},
                         {"method", record.method},
                         {"path", record.path},
                         {"status", record.status},
                         {"seconds", record.seconds}};
  if (!record.error.empty()) fields["error"] = record.error;
  if (!record.detail.empty()) fields["detail"] = record.detail;
  if (!record.usage) return fields;
  fields["stream"] = record.stream;
  fields["prompt_tokens"] = record.usage->prompt_tokens;
  fields["cached_tokens"] = record.usage->cached_tokens;
  fields["completion_tokens"] = record.usage->completion_tokens;
  fields["queue_seconds"] = record.usage->queue_s;
  fields["prompt_seconds"] = record.usage->prompt_s;
  fields["decode_seconds"] = record.usage->decode_s;
  return fields;
}

std::string text_of(const RequestRecord& record) {
  std::string text =
      fmt::format("{} {} {} in {:.3f} s", record.method, record.path, record.status, record.seconds);
  if (record.usage) {
    text += fmt::format(" | prompt {} ({} cached) | answer {}", record.usage->prompt_tokens,
                        record.usage->cached_tokens, record.usage->completion_tokens);
  }
  if (!record.error.empty()) text += " | " + record.error;
  if (!record.detail.empty()) text += ": " + record.detail;
  return text + " | " + record.id;
}

}  // namespace

void set_log_format(LogFormat format) { chosen_format = format; }
LogFormat log_format() { return chosen_format; }

void log(LogLevel level, const std::string& message) {
  if (chosen_format == LogFormat::kJson) return write_json(level, message, ordered_json::object());
  write_line((level == LogLevel::kWarning ? "dualdecoder: warning: " : "dualdecoder: ") + message);
}

void log_request(const RequestRecord& record) {
  if (chosen_format == LogFormat::kJson) return write_json(level_of(record), "request", fields_of(record));
  write_line("dualdecoder: " + text_of(record));
}

}  // namespace dualdecoder
