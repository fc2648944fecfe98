#include "config_file.h"

#include <sstream>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace dualdecoder {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw CLI::ValidationError("--config", message); }

std::string unquoted(std::string value) {
  const bool quoted = value.size() >= 2 && value.front() == '"' && value.back() == '"';
  return quoted ? value.substr(1, value.size() - 2) : value;
}

CLI::Option* find_option(CLI::App& command, const std::string& name) {
  if (name == "config" || name == "help") return nullptr;
  for (CLI::Option* option : command.get_options()) {
    if (option->check_lname(name)) return option;
  }
  return nullptr;
}

void apply_file(CLI::App& command, const std::string& path) {
  const auto text = read_text_file(path);
  if (!text) refuse(text.error().message);
  std::vector<std::pair<CLI::Option*, std::string>> settings;
  std::istringstream lines(*text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    CLI::detail::trim(line);
    if (line.empty() || line.front() == '#') continue;
    const std::size_t equals = line.find('=');
    if (equals == line.npos) refuse(fmt::format("{}:{}: wanted is NAME = VALUE", path, number));
    const std::string name = CLI::detail::trim_copy(line.substr(0, equals));
    CLI::Option* option = find_option(command, name);
    if (option == nullptr) refuse(fmt::format("{}:{}: there is no option --{}", path, number, name));
    if (option->count() == 0)
      settings.emplace_back(option, unquoted(CLI::detail::trim_copy(line.substr(equals + 1))));
  }
  for (auto& [option, value] : settings) option->add_result(std::move(value));
}

}  // namespace

// An option's function runs when the command line and the environment have been read, and before those of the
// options that were added later.
void add_config_option(CLI::App& command) {
  command
      .add_option_function<std::string>(
          "--config", [&command](const std::string& path) { apply_file(command, path); },
          "File of these options, one NAME = VALUE a line; the command line and the environment come first")
      ->type_name("FILE");
}

}  // namespace dualdecoder
