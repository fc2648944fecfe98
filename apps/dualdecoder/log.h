// What the program says on stderr beside its results: one line each, for people or, as JSON objects, for
// collectors of logs. Any thread. Prompts and answers are never part of it.
#pragma once

#include <string>

#include <fmt/format.h>

#include "serve/request_record.h"

namespace dualdecoder {

enum class LogFormat { kText, kJson };
enum class LogLevel { kInfo, kWarning, kError };

/// Of all that follows; text until then. Before other threads log.
void set_log_format(LogFormat format);
LogFormat log_format();

/// "dualdecoder: MESSAGE", with the level in front of a warning's; or an object with time, level and message.
void log(LogLevel level, const std::string& message);
/// A request that has been answered.
void log_request(const RequestRecord& record);

}  // namespace dualdecoder
