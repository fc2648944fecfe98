// Where a model's weights lie and its layers are computed: this machine's CPU, or another of ggml's devices,
// whose memory the host need not be able to touch.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ggml-backend.h>

#include "base/error.h"

namespace dualdecoder {

struct DeviceMemory {  // bytes; 0: not told
  std::size_t free = 0;
  std::size_t total = 0;
};

class Device {
 public:
  /// The CPU.
  Device() = default;

  /// The CPU first, then what ggml was built with and what add_rpc_server() has added.
  static std::vector<Device> all();
  /// By its name() in upper or lower case. kInvalidArgument, with the names that there are, for any other.
  static Result<Device> find(const std::string& name);
  /// Makes the devices of a ggml RPC server ("HOST:PORT") known, as RPC0 and so on. kUnsupported when ggml
  /// was built without RPC; kIo when nobody answers. When such a server ends, ggml ends this process.
  static Status add_rpc_server(const std::string& endpoint);

  bool is_cpu() const { return handle_ == nullptr; }
  std::string name() const;
  std::string description() const;
  DeviceMemory memory() const;

  /// Null for the CPU.
  ggml_backend_dev_t handle() const { return handle_; }
  ggml_backend_buffer_type_t buffer_type() const {
    return is_cpu() ? nullptr : ggml_backend_dev_buffer_type(handle_);
  }

 private:
  explicit Device(ggml_backend_dev_t handle) : handle_(handle) {}

  ggml_backend_dev_t handle_ = nullptr;  // null: the CPU
};

/// Returns when all of it has been computed.
void compute_graph(ggml_backend_t backend, ggml_cgraph* graph);

}  // namespace dualdecoder
