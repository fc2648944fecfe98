// ggml and libllama say why something failed through their log, not through their results. While a LogCapture
// lives it takes their log; first_error() is the first error line, which names the cause (those after it say
// what failed in turn). One at a time, used only while a model is loaded.
#pragma once

#include <mutex>
#include <string>

#include <ggml.h>
#include <llama.h>

namespace dualdecoder {

class LogCapture {
 public:
  LogCapture();
  ~LogCapture();
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  /// Without the name of the reporting function and the line's end; empty when nothing was reported.
  std::string first_error() const;

 private:
  static void on_log(ggml_log_level level, const char* text, void* user);

  ggml_log_callback previous_ = nullptr;
  void* previous_user_ = nullptr;
  mutable std::mutex mutex_;  // guards first_error_: libraries may log from their own threads
  std::string first_error_;
};

/// Silences ggml and libllama below errors for the whole process. Call once at start.
void quiet_library_logs();

}  // namespace dualdecoder
