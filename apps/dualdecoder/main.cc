#include <algorithm>

#include "command.h"
#include "commit.h"
#include "model/log_capture.h"

namespace dualdecoder {
namespace {

// llama.cpp's short names of two letters, which the parser would take for two flags.
std::vector<std::string> arguments(int argc, char** argv) {
  std::vector<std::string> list(argv + 1, argv + argc);
  for (std::string& argument : list) {
    if (argument == "-np") argument = "--np";
  }
  std::reverse(list.begin(), list.end());  // as CLI11 takes them
  return list;
}

int run_main(int argc, char** argv) {
  CLI::App app(
      "DualDecoder: decode long contexts with the KV cache in a far tier and a small near working set");
  app.name("dualdecoder");
  app.set_version_flag("--version",
                       fmt::format("dualdecoder {} ({})", DUALDECODER_VERSION, DUALDECODER_COMMIT));
  app.require_subcommand(1);
  app.footer("Every flag can also be set as DUALDECODER_<NAME>, e.g. DUALDECODER_CTX_SIZE=32k.");

  int exit_code = kExitSuccess;
  add_run_command(app, exit_code);
  add_serve_command(app, exit_code);
  add_bench_command(app, exit_code);
  add_eval_command(app, exit_code);
  add_plan_command(app, exit_code);
  add_devices_command(app, exit_code);
  quiet_library_logs();
  try {
    app.parse(arguments(argc, argv));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    fmt::print(stderr, "dualdecoder: {}; see dualdecoder --help\n", error.what());
    return kExitUsage;
  }
  return exit_code;
}

}  // namespace
}  // namespace dualdecoder

int main(int argc, char** argv) {
  try {
    return dualdecoder::run_main(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "dualdecoder: unexpected failure: {}\n", error.what());
    return dualdecoder::kExitFailure;
  }
}
