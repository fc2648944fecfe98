#include "transfer/file_port.h"

#include "transfer/file_port_kinds.h"

namespace dualdecoder {

Result<std::unique_ptr<Port>> make_file_port(const FarFile& file, std::span<std::byte> near_memory,
                                             const FilePortOptions& options) {
  if (!options.allow_uring) return make_thread_port(file, options, "");
  auto port = make_uring_port(file, near_memory, options);
  if (port) return port;
  return make_thread_port(file, options, port.error().message);
}

}  // namespace dualdecoder
