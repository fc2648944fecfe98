// `dualdecoder devices`: what --device can name.
#include <nlohmann/json.hpp>

#include "base/units.h"
#include "command.h"
#include "model/device.h"

namespace dualdecoder {
namespace {

struct DevicesOptions {
  std::vector<std::string> rpc_servers;
  std::string output = "text";
};

void print_text(const std::vector<Device>& devices) {
  for (const Device& device : devices) {
    const DeviceMemory memory = device.memory();
    fmt::print("{:<10} {:<50}", device.name(), device.description());
    if (memory.total > 0) {
      fmt::print(" {} free of {}", format_bytes(static_cast<double>(memory.free)),
                 format_bytes(static_cast<double>(memory.total)));
    }
    fmt::print("\n");
  }
}

void print_json(const std::vector<Device>& devices) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Device& device : devices) {
    const DeviceMemory memory = device.memory();
    list.push_back({{"name", device.name()},
                    {"description", device.description()},
                    {"memory_free_bytes", memory.free},
                    {"memory_total_bytes", memory.total}});
  }
  fmt::print("{}\n", list.dump(2));
}

}  // namespace

void add_devices_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<DevicesOptions>();
  CLI::App* command = app.add_subcommand("devices", "What --device can name");
  add_rpc_option(*command, options->rpc_servers);
  command->add_option("-o,--output", options->output, "Format")
      ->capture_default_str()
      ->check(CLI::IsMember({"text", "json"}));
  add_environment_names(*command);
  command->callback([options, &exit_code] {
    if (Status status = add_rpc_servers(options->rpc_servers); !status) {
      exit_code = report(status.error());
      return;
    }
    const std::vector<Device> devices = Device::all();
    options->output == "json" ? print_json(devices) : print_text(devices);
  });
}

}  // namespace dualdecoder
