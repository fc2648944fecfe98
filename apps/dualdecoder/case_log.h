// Results of single cases in a file of JSON lines, so that an evaluation goes on where it was interrupted: a
// case that is in the file is not run again. A line is {"case": {...}, "result": {...}}; a case is known by
// all of its settings, so evaluations with different ones can share a file. A last line that was cut off (a
// killed process, a full disk) is dropped.
#pragma once

#include <cstdio>
#include <map>
#include <memory>
#include <string>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace dualdecoder {

class CaseLog {
 public:
  /// An empty path: in memory only. kCorrupt when the file holds something else; nothing is changed then.
  static Result<CaseLog> open(const std::string& path);

  /// Null when the case has no result yet.
  const nlohmann::ordered_json* find(const nlohmann::ordered_json& which) const;
  /// The line is in the file when this returns.
  Status add(const nlohmann::ordered_json& which, nlohmann::ordered_json result);

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  Result<std::size_t> read(const std::string& text);

  std::string path_;
  std::unique_ptr<std::FILE, Closer> file_;  // null when in memory only
  std::map<std::string, nlohmann::ordered_json> results_;
};

}  // namespace dualdecoder
