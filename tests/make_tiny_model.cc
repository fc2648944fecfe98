// make_tiny_model OUT [options]: writes one of the tests' small random models (tiny_model.h), for tests that
// start the program and for trying things out.
#include <map>
#include <string>

#include <CLI/CLI.hpp>

#include "tiny_model.h"

using namespace dualdecoder;

int main(int argc, char** argv) {
  const std::map<std::string, TinyScaling> scalings = {{"none", TinyScaling::kNone},
                                                       {"linear", TinyScaling::kLinear},
                                                       {"yarn", TinyScaling::kYarn},
                                                       {"llama3", TinyScaling::kLlama3}};
  const std::map<std::string, ggml_type> types = {
      {"f32", GGML_TYPE_F32}, {"f16", GGML_TYPE_F16}, {"q8_0", GGML_TYPE_Q8_0}, {"q4_0", GGML_TYPE_Q4_0}};
  CLI::App app("Writes a small GGUF model with random weights.");
  std::string path;
  TinyModelOptions options;
  std::vector<std::string> dropped;
  std::vector<std::string> scripts;
  app.add_option("out", path, "File to write")->required();
  app.add_option("--arch", options.architecture, "Architecture")
      ->check(CLI::IsMember({"llama", "qwen2", "qwen3", "gemma3"}));
  app.add_option("--arch-name", options.architecture_name, "Architecture that the file claims to have");
  app.add_option("--layers", options.layers, "Layers");
  app.add_option("--head-dim", options.head_dim, "Size of a head");
  app.add_option("--context", options.context, "Context in tokens");
  app.add_option("--window", options.window, "Sliding window in tokens (gemma3), 0: none");
  app.add_option("--scaling", options.scaling, "Rotary scaling")
      ->transform(CLI::CheckedTransformer(scalings));
  app.add_option("--type", options.type, "Type of the matrices")->transform(CLI::CheckedTransformer(types));
  app.add_option("--seed", options.seed, "Seed of the weights");
  app.add_option("--script", scripts, "Text that the model says by heart, its bytes in hex; may be repeated");
  app.add_flag("--tied", options.tied_output, "The output matrix is the embedding table");
  app.add_option("--drop-key", dropped, "Metadata key to leave out; may be repeated");
  CLI11_PARSE(app, argc, argv);

  for (const std::string& hex : scripts) {
    std::string& script = options.scripts.emplace_back();
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
      script.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  options.edit_keys = [&](gguf_context* gguf) {
    for (const std::string& key : dropped) gguf_remove_key(gguf, key.c_str());
  };
  if (Status status = write_tiny_model(path, options); !status) {
    fmt::print(stderr, "make_tiny_model: {}\n", status.error().message);
    return 1;
  }
  return 0;
}
