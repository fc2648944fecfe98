// Model files: their metadata and tensor table, read or refused. libllama's reader of vocabularies is not
// ours, and is left out.
#include "base/check.h"
#include "fuzz.h"
#include "model/architecture.h"
#include "model/gguf_file.h"
#include "model/hyperparameters.h"
#include "model/log_capture.h"
#include "temporary_directory.h"

using namespace dualdecoder;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const TemporaryDirectory directory;
  static const std::string path = directory.file("model.gguf");
  const LogCapture log;
  write_file(path, as_text(data, size));
  const auto file = GgufFile::open(path);
  if (!file) {
    DD_CHECK(file.error().message.find(path) != std::string::npos, "{}", file.error().message);
    return 0;
  }
  for (const GgufTensor& tensor : (*file)->tensors())
    DD_CHECK(tensor.offset + tensor.bytes <= size, "{}", tensor.name);
  const std::string tokens = "tokenizer.ggml.tokens";
  if ((*file)->array_length(tokens, GGUF_TYPE_STRING)) static_cast<void>((*file)->first_repeated(tokens));
  static_cast<void>(read_hyperparameters(**file));
  return 0;
}
