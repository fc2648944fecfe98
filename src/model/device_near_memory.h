// Near memory in a buffer of one of ggml's devices. Copies go through a backend of their own, which on a GPU
// is a stream of its own: they run beside what the layers compute.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <ggml-backend.h>
#include <ggml-cpp.h>

#include "base/error.h"
#include "kv/geometry.h"
#include "kv/near_memory.h"
#include "model/device.h"

namespace dualdecoder {

class DeviceNearMemory final : public NearMemory {
 public:
  /// kOutOfMemory when the device has no room. Reads as zeros.
  static Result<std::unique_ptr<DeviceNearMemory>> create(const Device& device, std::size_t bytes);

  ggml_backend_buffer_t buffer() const { return buffer_.get(); }
  /// What `bytes` take of the device, with what aligning them costs.
  static std::size_t bytes_for(std::size_t bytes) { return bytes + kBlockAlignment; }
  std::size_t device_bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

  std::byte* data() const override { return data_; }
  bool on_host() const override { return false; }
  void populate() const override {}
  void copy(std::span<const NearCopy> copies) override;
  void copy_within(std::byte* to, const std::byte* from, std::size_t bytes) override;
  void fill(std::byte* to, std::uint8_t value, std::size_t bytes) override;
  std::byte* take_host_memory(std::size_t bytes) override;

 private:
  DeviceNearMemory() = default;

  Device device_;
  std::byte* data_ = nullptr;
  ggml_backend_buffer_ptr buffer_;
  ggml_context_ptr context_;
  ggml_tensor* all_ = nullptr;  // I8 [bytes]
  std::vector<ggml_backend_buffer_ptr> host_;
  std::mutex mutex_;  // of copies_
  ggml_backend_ptr copies_;
};

}  // namespace dualdecoder
