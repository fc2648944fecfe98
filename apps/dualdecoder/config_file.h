// A file of options: `--config FILE`. One `name = value` a line, named as in --help without the dashes; a
// flag is true or false; an option that may be repeated may be so here. Empty lines and lines that begin with
// # do not count. A value may stand in double quotes.
#pragma once

#include <CLI/CLI.hpp>

namespace dualdecoder {

/// Adds --config to a command that has no options yet: what the file says counts where neither the command
/// line nor the environment says anything, and passes the same checks.
void add_config_option(CLI::App& command);

}  // namespace dualdecoder
