#include "model/device.h"

#include <algorithm>
#include <cctype>

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fmt/ranges.h>

#include "base/check.h"

namespace dualdecoder {
namespace {

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

ggml_backend_dev_t cpu() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

ggml_backend_dev_t ggml_device(const Device& device) { return device.is_cpu() ? cpu() : device.handle(); }

// ggml's own call ends the process when nobody listens.
Status check_that_somebody_listens(const std::string& endpoint) {
  const std::size_t colon = endpoint.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == endpoint.size()) {
    return fail(ErrorCode::kInvalidArgument, "--rpc {}: wanted is HOST:PORT, as in 127.0.0.1:50052",
                endpoint);
  }
  const std::string host = endpoint.substr(0, colon);
  const std::string port = endpoint.substr(colon + 1);
  addrinfo* addresses = nullptr;
  const addrinfo hints{.ai_flags = AI_NUMERICSERV,
                       .ai_family = AF_UNSPEC,
                       .ai_socktype = SOCK_STREAM,
                       .ai_protocol = 0,
                       .ai_addrlen = 0,
                       .ai_addr = nullptr,
                       .ai_canonname = nullptr,
                       .ai_next = nullptr};
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &addresses); error != 0)
    return fail(ErrorCode::kIo, "--rpc {}: {}", endpoint, gai_strerror(error));
  bool connected = false;
  for (const addrinfo* one = addresses; one != nullptr && !connected; one = one->ai_next) {
    const int socket = ::socket(one->ai_family, one->ai_socktype, one->ai_protocol);
    if (socket < 0) continue;
    connected = connect(socket, one->ai_addr, one->ai_addrlen) == 0;
    close(socket);
  }
  freeaddrinfo(addresses);
  if (!connected) return fail(ErrorCode::kIo, "--rpc {}: nobody listens there; start rpc-server", endpoint);
  return {};
}

}  // namespace

std::vector<Device> Device::all() {
  std::vector<Device> devices = {Device()};
  for (std::size_t i = 0; i < ggml_backend_dev_count(); ++i) {
    const ggml_backend_dev_t handle = ggml_backend_dev_get(i);
    if (handle != cpu()) devices.push_back(Device(handle));
  }
  return devices;
}

Result<Device> Device::find(const std::string& name) {
  std::vector<std::string> names;
  for (const Device& device : all()) {
    if (lower(device.name()) == lower(name)) return device;
    names.push_back(lower(device.name()));
  }
  return fail(ErrorCode::kInvalidArgument, "--device {}: there is no such device; there is {}", name,
              fmt::join(names, ", "));
}

Status Device::add_rpc_server(const std::string& endpoint) {
  using AddServer = ggml_backend_reg_t (*)(const char*);
  ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
  const auto add = rpc == nullptr ? nullptr
                                  : reinterpret_cast<AddServer>(ggml_backend_reg_get_proc_address(
                                        rpc, "ggml_backend_rpc_add_server"));
  if (add == nullptr)
    return fail(ErrorCode::kUnsupported, "--rpc {}: ggml was built without RPC (GGML_RPC=ON)", endpoint);
  if (Status status = check_that_somebody_listens(endpoint); !status) return status;
  ggml_backend_reg_t server = add(endpoint.c_str());
  if (server == nullptr) return fail(ErrorCode::kIo, "--rpc {}: this is no ggml RPC server", endpoint);
  ggml_backend_register(server);
  return {};
}

std::string Device::name() const { return ggml_backend_dev_name(ggml_device(*this)); }
std::string Device::description() const { return ggml_backend_dev_description(ggml_device(*this)); }

void compute_graph(ggml_backend_t backend, ggml_cgraph* graph) {
  const ggml_status status = ggml_backend_graph_compute(backend, graph);
  DD_CHECK(status == GGML_STATUS_SUCCESS, "ggml status {}", static_cast<int>(status));
}

DeviceMemory Device::memory() const {
  DeviceMemory memory;
  ggml_backend_dev_memory(ggml_device(*this), &memory.free, &memory.total);
  return memory;
}

}  // namespace dualdecoder
