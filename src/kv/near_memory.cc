#include "kv/near_memory.h"

#include <cstring>
#include <utility>
#include <vector>

#include "base/anonymous_memory.h"

namespace dualdecoder {
namespace {

class HostNearMemory final : public NearMemory {
 public:
  explicit HostNearMemory(AnonymousMemory memory) : memory_(std::move(memory)) {}

  std::byte* data() const override { return memory_.data(); }
  bool on_host() const override { return true; }
  void populate() const override { memory_.populate(); }

  void copy(std::span<const NearCopy> copies) override {
    for (const NearCopy& copy : copies) {
      std::memcpy(copy.into_near ? copy.near : copy.host, copy.into_near ? copy.host : copy.near, copy.bytes);
    }
  }
  void copy_within(std::byte* to, const std::byte* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void fill(std::byte* to, std::uint8_t value, std::size_t bytes) override { std::memset(to, value, bytes); }
  std::byte* take_host_memory(std::size_t bytes) override {
    taken_.push_back(AnonymousMemory::map(bytes));
    return taken_.back().data();
  }

 private:
  AnonymousMemory memory_;
  std::vector<AnonymousMemory> taken_;
};

}  // namespace

std::unique_ptr<NearMemory> make_host_near_memory(std::size_t bytes) {
  AnonymousMemory memory = AnonymousMemory::map(bytes);
  if (memory.data() == nullptr) return nullptr;
  return std::make_unique<HostNearMemory>(std::move(memory));
}

}  // namespace dualdecoder
