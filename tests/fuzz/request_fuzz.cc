// Bodies of requests: read or refused, whatever they are.
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "fuzz.h"
#include "serve/json_reader.h"
#include "serve/request.h"
#include "serve/response_format.h"

using namespace dualdecoder;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = as_text(data, size);
  const auto body = parse_json_object(text);
  if (!body) {
    DD_CHECK(body.error().status == 400 && !body.error().message.empty());
    return 0;
  }
  for (const Endpoint endpoint : {Endpoint::kChat, Endpoint::kCompletions}) {
    const auto request = read_completion_request(endpoint, *body);
    DD_CHECK(request || (request.error().status == 400 && !request.error().param.empty()));
    if (request) DD_CHECK(request->choices >= 1 && request->choices <= kChoicesMax);
  }
  const auto grammar = read_response_format(*body, text);
  DD_CHECK(grammar || (grammar.error().status == 400 && !grammar.error().param.empty()));
  return 0;
}
