#include "model/log_capture.h"

#include <cstdio>

namespace dualdecoder {

LogCapture::LogCapture() {
  ggml_log_get(&previous_, &previous_user_);
  llama_log_set(on_log, this);
}

LogCapture::~LogCapture() { llama_log_set(previous_, previous_user_); }

void LogCapture::on_log(ggml_log_level level, const char* text, void* user) {
  if (level != GGML_LOG_LEVEL_ERROR) return;
  auto* self = static_cast<LogCapture*>(user);
  const std::lock_guard lock(self->mutex_);
  if (self->first_error_.empty()) self->first_error_ = text;
}

std::string LogCapture::first_error() const {
  const std::lock_guard lock(mutex_);
  std::string text = first_error_;
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  const std::size_t colon = text.find(": ");
  return colon == std::string::npos ? text : text.substr(colon + 2);
}

void quiet_library_logs() {
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
}

}  // namespace dualdecoder
