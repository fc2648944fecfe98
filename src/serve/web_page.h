// The web page: the files of web/, which CMake puts into the program. Constant; any thread.
#pragma once

#include <span>
#include <string_view>

#include "serve/http_server.h"

namespace dualdecoder {

struct WebFile {
  std::string_view path;  // "/" or "/web/NAME"
  std::string_view content_type;
  std::string_view etag;
  std::string_view body;
};

/// All of them; made by tools/embed_web.cmake.
std::span<const WebFile> web_files();
/// Null when `path` is none of them.
const WebFile* find_web_file(std::string_view path);
/// The file; 304 for a browser that has it. Nothing in it may run but scripts that are files of their own,
/// and it may ask no other host.
HttpReply web_reply(const WebFile& file, const HttpRequest& request);

}  // namespace dualdecoder
