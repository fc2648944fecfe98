#include "serve/web_page.h"

#include <algorithm>

namespace dualdecoder {
namespace {

constexpr const char* kContentSecurityPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

}  // namespace

const WebFile* find_web_file(std::string_view path) {
  const auto files = web_files();
  const auto file = std::ranges::find(files, path, &WebFile::path);
  return file == files.end() ? nullptr : &*file;
}

HttpReply web_reply(const WebFile& file, const HttpRequest& request) {
  HttpReply reply{.content_type = std::string(file.content_type),
                  .headers = {{"Content-Security-Policy", kContentSecurityPolicy},
                              {"X-Content-Type-Options", "nosniff"},
                              {"Referrer-Policy", "no-referrer"},
                              {"Cross-Origin-Opener-Policy", "same-origin"},
                              {"Cross-Origin-Resource-Policy", "same-origin"},
                              // Asked for again each time, so that a new version of the server has its own.
                              {"Cache-Control", "no-cache"},
                              {"ETag", std::string(file.etag)}}};
  if (request.if_none_match.find(file.etag) != std::string::npos) {
    reply.status = 304;
  } else {
    reply.body = file.body;
  }
  return reply;
}

}  // namespace dualdecoder
