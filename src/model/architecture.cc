#include "model/architecture.h"

#include <map>

#include <fmt/ranges.h>

namespace dualdecoder {
namespace {

std::map<std::string, ArchitectureRegistration::Factory>& registry() {
  static std::map<std::string, ArchitectureRegistration::Factory> factories;
  return factories;
}

}  // namespace

ArchitectureRegistration::ArchitectureRegistration(std::string name, Factory factory) {
  registry().emplace(std::move(name), factory);
}

Result<std::unique_ptr<Architecture>> make_architecture(const std::string& name) {
  const auto found = registry().find(name);
  if (found == registry().end()) {
    return fail(ErrorCode::kUnsupported, "the architecture \"{}\" is not supported; supported are {}", name,
                fmt::join(supported_architectures(), ", "));
  }
  return found->second();
}

std::vector<std::string> supported_architectures() {
  std::vector<std::string> names;
  for (const auto& [name, factory] : registry()) names.push_back(name);
  return names;
}

}  // namespace dualdecoder
