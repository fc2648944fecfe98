// quantize_models SOURCE DIRECTORY: makes the other quantisations that tests use from one GGUF model, next to
// each other in DIRECTORY. What is there and newer than the source stays.
#include <filesystem>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <llama.h>

#include "model/log_capture.h"

namespace {

struct Target {
  const char* suffix;
  llama_ftype type;
};

bool quantize(const std::string& source, const std::string& target, llama_ftype type) {
  const std::string part = target + ".part";
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = type;
  params.nthread = static_cast<int>(std::thread::hardware_concurrency());
  params.allow_requantize = true;
  if (llama_model_quantize(source.c_str(), part.c_str(), &params) != 0) return false;
  std::filesystem::rename(part, target);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  if (argc != 3) {
    fmt::print(stderr, "usage: quantize_models SOURCE DIRECTORY\n");
    return 2;
  }
  const fs::path source = argv[1];
  const fs::path directory = argv[2];
  if (!fs::exists(source)) {
    fmt::print(stderr, "quantize_models: there is no {}; `make models` brings it\n", source.string());
    return 1;
  }
  dualdecoder::quiet_library_logs();
  fs::create_directories(directory);
  const std::string base = source.stem().stem().string();  // without .Q4_1.gguf
  for (const Target& target :
       {Target{"Q8_0", LLAMA_FTYPE_MOSTLY_Q8_0}, Target{"Q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},
        Target{"F16", LLAMA_FTYPE_MOSTLY_F16}}) {
    const fs::path path = directory / fmt::format("{}.{}.gguf", base, target.suffix);
    if (fs::exists(path) && fs::last_write_time(path) >= fs::last_write_time(source)) continue;
    if (!quantize(source.string(), path.string(), target.type)) {
      fmt::print(stderr, "quantize_models: cannot make {}\n", path.string());
      return 1;
    }
  }
  return 0;
}
