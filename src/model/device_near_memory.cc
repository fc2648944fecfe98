#include "model/device_near_memory.h"

#include <vector>

#include "base/check.h"
#include "base/units.h"

namespace dualdecoder {

Result<std::unique_ptr<DeviceNearMemory>> DeviceNearMemory::create(const Device& device, std::size_t bytes) {
  DD_CHECK(!device.is_cpu() && bytes > 0);
  std::unique_ptr<DeviceNearMemory> memory(new DeviceNearMemory());
  memory->device_ = device;
  memory->buffer_.reset(ggml_backend_buft_alloc_buffer(device.buffer_type(), bytes_for(bytes)));
  if (!memory->buffer_) {
    return fail(ErrorCode::kOutOfMemory,
                "{} has no room for a near tier of {}; lower --near-memory, -c or the number of sequences",
                device.name(), format_bytes(static_cast<double>(bytes)));
  }
  ggml_backend_buffer_clear(memory->buffer_.get(), 0);
  auto* base = static_cast<std::byte*>(ggml_backend_buffer_get_base(memory->buffer_.get()));
  memory->data_ = base + (kBlockAlignment - reinterpret_cast<std::uintptr_t>(base) % kBlockAlignment);
  memory->copies_.reset(ggml_backend_dev_init(device.handle(), nullptr));
  if (!memory->copies_) return fail(ErrorCode::kInternal, "{} cannot be opened", device.name());
  memory->context_.reset(
      ggml_init({.mem_size = 2 * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true}));
  memory->all_ = ggml_new_tensor_1d(memory->context_.get(), GGML_TYPE_I8, static_cast<std::int64_t>(bytes));
  const ggml_status status = ggml_backend_tensor_alloc(memory->buffer_.get(), memory->all_, memory->data_);
  DD_CHECK(status == GGML_STATUS_SUCCESS);
  return memory;
}

void DeviceNearMemory::copy(std::span<const NearCopy> copies) {
  const std::lock_guard lock(mutex_);
  for (const NearCopy& copy : copies) {
    const auto offset = static_cast<std::size_t>(copy.near - data_);
    if (copy.into_near) {
      ggml_backend_tensor_set_async(copies_.get(), all_, copy.host, offset, copy.bytes);
    } else {
      ggml_backend_tensor_get_async(copies_.get(), all_, copy.host, offset, copy.bytes);
    }
  }
  ggml_backend_synchronize(copies_.get());
}

// Rare (a sequence is forked), so by way of the host.
void DeviceNearMemory::copy_within(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::vector<std::byte> host(bytes);
  const NearCopy out{
      .near = const_cast<std::byte*>(from), .host = host.data(), .bytes = bytes, .into_near = false};
  copy({&out, 1});
  const NearCopy in{.near = to, .host = host.data(), .bytes = bytes, .into_near = true};
  copy({&in, 1});
}

void DeviceNearMemory::fill(std::byte* to, std::uint8_t value, std::size_t bytes) {
  std::vector<std::byte> host(bytes, std::byte(value));
  const NearCopy in{.near = to, .host = host.data(), .bytes = bytes, .into_near = true};
  copy({&in, 1});
}

std::byte* DeviceNearMemory::take_host_memory(std::size_t bytes) {
  ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device_.handle());
  if (type == nullptr) type = ggml_backend_cpu_buffer_type();
  ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(type, bytes));
  if (!buffer) return nullptr;
  host_.push_back(std::move(buffer));
  return static_cast<std::byte*>(ggml_backend_buffer_get_base(host_.back().get()));
}

}  // namespace dualdecoder
