#include "base/anonymous_memory.h"

#include <sys/mman.h>

namespace dualdecoder {

AnonymousMemory AnonymousMemory::map(std::size_t bytes) {
  AnonymousMemory memory;
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return memory;
  madvise(data, bytes, MADV_HUGEPAGE);  // only a hint
  memory.data_ = static_cast<std::byte*>(data);
  memory.bytes_ = bytes;
  return memory;
}

void AnonymousMemory::populate() const {
#ifdef MADV_POPULATE_WRITE
  if (data_ != nullptr) madvise(data_, bytes_, MADV_POPULATE_WRITE);
#endif
}

AnonymousMemory::~AnonymousMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace dualdecoder
