#include "roofline.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "base/anonymous_memory.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/random.h"
#include "command.h"
#include "progress.h"
#include "transfer/file_port.h"

namespace dualdecoder {
namespace {

constexpr std::size_t kBytes = 512U << 20;  // more than any cache
constexpr int kMemoryRounds = 7;
constexpr std::size_t kDiskBytes = 256U << 20;
constexpr double kDiskSeconds = 2.0;

// Eight sums, so that no addition waits for the one before.
std::uint64_t sum(const std::uint64_t* values, std::size_t count) {
  std::array<std::uint64_t, 8> sums{};
  for (std::size_t i = 0; i + sums.size() <= count; i += sums.size()) {
    for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += values[i + k];
  }
  std::uint64_t all = 0;
  for (const std::uint64_t one : sums) all += one;
  return all;
}

/// The best of some rounds: what the machine can do, not what it does beside other work.
Result<double> measure_memory(std::uint32_t threads) {
  const AnonymousMemory memory = AnonymousMemory::map(kBytes);
  if (memory.data() == nullptr)
    return fail(ErrorCode::kOutOfMemory, "no {} bytes to read from: {}", kBytes, errno_text(errno));
  std::memset(memory.data(), 1, kBytes);
  const auto* values = reinterpret_cast<const std::uint64_t*>(memory.data());
  const std::size_t each = kBytes / sizeof(std::uint64_t) / threads;
  std::atomic<std::uint64_t> sums = 0;  // so that the reads are wanted
  double best = 0.0;
  ProgressLine line("memory");
  for (int round = 0; round < kMemoryRounds && !interrupted(); ++round) {
    const Stopwatch watch;
    {
      std::vector<std::jthread> readers;
      for (std::uint32_t t = 0; t < threads; ++t)
        readers.emplace_back([&, t] { sums += sum(values + t * each, each); });
    }
    best = std::max(best, static_cast<double>(each * threads * sizeof(std::uint64_t)) / watch.seconds());
    line.update((round + 1.0) / kMemoryRounds, fmt::format("{:.1f} GB/s", best * 1e-9));
  }
  return sums == 0 ? 0.0 : best;
}

class DiskReader {
 public:
  static Result<double> measure(const std::string& directory, const KvGeometry& geometry) {
    const auto pages = static_cast<std::uint32_t>(kDiskBytes / geometry.page_bytes() + 1);
    const auto file =
        FarFile::open(directory, {.weights_hash = 0, .geometry = geometry}, geometry.page_bytes(), pages);
    if (!file) return std::unexpected(file.error());
    if (Status status = (*file)->reserve(pages); !status) return std::unexpected(status.error());
    FilePortOptions options;
    const std::size_t buffer_bytes =
        std::max<std::size_t>(geometry.page_bytes(), options.depth * std::size_t{geometry.slot_bytes()});
    const AnonymousMemory buffer = AnonymousMemory::map(buffer_bytes);
    if (buffer.data() == nullptr)
      return fail(ErrorCode::kOutOfMemory, "no {} bytes to read to: {}", buffer_bytes, errno_text(errno));
    std::memset(buffer.data(), 1, buffer_bytes);
    auto port = make_file_port(**file, std::span(buffer.data(), buffer_bytes), options);
    if (!port) return std::unexpected(port.error());
    DiskReader reader(**file, **port, geometry, buffer.data());
    if (Status status = reader.write(pages); !status) return std::unexpected(status.error());
    return reader.read(pages);
  }

 private:
  DiskReader(const FarFile& file, Port& port, const KvGeometry& geometry, std::byte* buffer)
      : file_(file), port_(port), geometry_(geometry), buffer_(buffer) {}

  /// Space that was only promised reads as zeros without a disk.
  Status write(std::uint32_t pages) {
    ProgressLine line("disk: writing");
    for (std::uint32_t page = 0; page < pages && !interrupted(); ++page) {
      const iovec all{.iov_base = buffer_, .iov_len = geometry_.page_bytes()};
      port_.submit({.kind = CopyKind::kWrite, .far_offset = file_.page_offset(page), .segments = {&all, 1}});
      if (Status status = take_all(1); !status) return status;
      line.update((page + 1.0) / pages, "");
    }
    return {};
  }

  Result<double> read(std::uint32_t pages) {
    ProgressLine line("disk: reading blocks");
    Random random(1);
    std::uint64_t bytes = 0;
    const Stopwatch watch;
    while (watch.seconds() < kDiskSeconds && !interrupted()) {
      const std::uint32_t depth = port_.depth();
      for (std::uint32_t i = 0; i < depth; ++i) {
        const std::uint64_t offset = file_.page_offset(random.below(pages)) +
                                     std::uint64_t{random.below(geometry_.layers)} * geometry_.slot_bytes();
        const iovec block{.iov_base = buffer_ + i * std::size_t{geometry_.slot_bytes()},
                          .iov_len = geometry_.slot_bytes()};
        port_.submit({.kind = CopyKind::kRead, .far_offset = offset, .segments = {&block, 1}});
      }
      if (Status status = take_all(depth); !status) return std::unexpected(status.error());
      bytes += std::uint64_t{depth} * geometry_.slot_bytes();
      line.update(std::min(watch.seconds() / kDiskSeconds, 1.0),
                  fmt::format("{:.0f} MB/s", static_cast<double>(bytes) / watch.seconds() * 1e-6));
    }
    return static_cast<double>(bytes) / watch.seconds();
  }

  Status take_all(std::uint32_t copies) {
    std::array<Completion, 64> completions;
    for (std::uint32_t taken = 0; taken < copies;) {
      const std::size_t count = port_.wait(completions, std::chrono::seconds(30));
      if (count == 0) return fail(ErrorCode::kIo, "{}: a copy does not end", file_.path());
      for (std::size_t i = 0; i < count; ++i) {
        if (completions[i].error != 0)
          return fail(ErrorCode::kIo, "{}: {}", file_.path(), errno_text(completions[i].error));
      }
      taken += static_cast<std::uint32_t>(count);
    }
    return {};
  }

  const FarFile& file_;
  Port& port_;
  const KvGeometry& geometry_;
  std::byte* buffer_;
};

}  // namespace

Result<Roofline> measure_roofline(std::uint32_t threads, const std::string& directory,
                                  const KvGeometry& geometry) {
  const auto memory = measure_memory(threads);
  if (!memory) return std::unexpected(memory.error());
  Roofline roofline{.memory_bytes_per_s = *memory};
  if (directory.empty()) return roofline;
  const auto disk = DiskReader::measure(directory, geometry);
  if (!disk) return std::unexpected(disk.error());
  roofline.disk_bytes_per_s = *disk;
  roofline.disk_block_bytes = static_cast<std::uint32_t>(geometry.slot_bytes());
  return roofline;
}

}  // namespace dualdecoder
