// Expected failures as values. A function that can fail in a way its caller must handle returns Result<T>;
// our own mistakes end the process through DD_CHECK (base/check.h) instead. The message says what, where and
// what to do, in one line, so that it can be shown to a user as it is.
#pragma once

#include <expected>
#include <string>
#include <utility>

#include <fmt/format.h>

namespace dualdecoder {

enum class ErrorCode {
  kInvalidArgument,  // the caller's input is wrong; nothing was changed
  kNotFound,         // a file or an entry does not exist
  kUnsupported,      // valid, but not something this build can do
  kCorrupt,          // stored data contradict themselves
  kContextExceeded,  // more tokens than the context holds
  kOutOfMemory,      // a stated limit, or the machine's
  kIo,               // the operating system refused a read or a write
  kInternal,         // a library failed where it should not
};

/// The code's name as it appears in JSON and logs, e.g. "context_exceeded".
const char* error_code_name(ErrorCode code);

struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};

template <typename T>
using Result = std::expected<T, Error>;
using Status = Result<void>;

/// Builds the error side of a Result: `return fail(ErrorCode::kIo, "cannot read {}: {}", path, reason);`
template <typename... Args>
std::unexpected<Error> fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return std::unexpected(Error{code, fmt::format(format, std::forward<Args>(args)...)});
}

}  // namespace dualdecoder
