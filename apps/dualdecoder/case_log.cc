#include "case_log.h"

#include <cerrno>
#include <filesystem>

#include <unistd.h>

#include "base/file.h"

namespace dualdecoder {

Result<CaseLog> CaseLog::open(const std::string& path) {
  CaseLog log;
  log.path_ = path;
  if (path.empty()) return log;
  std::size_t kept = 0;
  if (std::filesystem::exists(path)) {
    const auto text = read_text_file(path);
    if (!text) return std::unexpected(text.error());
    const auto read = log.read(*text);
    if (!read) return std::unexpected(read.error());
    kept = *read;
  }
  log.file_.reset(std::fopen(path.c_str(), "ab"));
  if (!log.file_ || ftruncate(fileno(log.file_.get()), static_cast<off_t>(kept)) != 0)
    return fail(ErrorCode::kIo, "cannot write {}: {}", path, errno_text(errno));
  return log;
}

// Returns how many bytes are whole lines.
Result<std::size_t> CaseLog::read(const std::string& text) {
  std::size_t begin = 0;
  for (std::size_t line = 1;; ++line) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) return begin;
    auto json =
        nlohmann::ordered_json::parse(text.begin() + static_cast<std::ptrdiff_t>(begin),
                                      text.begin() + static_cast<std::ptrdiff_t>(end), nullptr, false);
    if (!json.is_object() || !json.contains("case") || !json.contains("result")) {
      return fail(ErrorCode::kCorrupt, "{}, line {}: no result of a case; name another file, or remove it",
                  path_, line);
    }
    results_[json["case"].dump()] = std::move(json["result"]);
    begin = end + 1;
  }
}

const nlohmann::ordered_json* CaseLog::find(const nlohmann::ordered_json& which) const {
  const auto found = results_.find(which.dump());
  return found == results_.end() ? nullptr : &found->second;
}

Status CaseLog::add(const nlohmann::ordered_json& which, nlohmann::ordered_json result) {
  if (file_) {
    const nlohmann::ordered_json line = {{"case", which}, {"result", result}};
    // An answer need not be whole UTF-8.
    const std::string text =
        line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    if (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size() ||
        std::fflush(file_.get()) != 0) {
      return fail(ErrorCode::kIo, "cannot write {}: {}", path_, errno_text(errno));
    }
  }
  results_[which.dump()] = std::move(result);
  return {};
}

}  // namespace dualdecoder
