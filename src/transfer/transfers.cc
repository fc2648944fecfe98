#include "transfer/transfers.h"

#include <algorithm>

#include "base/check.h"
#include "base/file.h"
#include "base/hash.h"

namespace dualdecoder {
namespace {

constexpr std::size_t kCompletionsAtOnce = 64;

constexpr std::array<const char*, kLanes> kLaneNames = {"demand", "predicted", "write"};

std::size_t index_of(Lane lane) { return static_cast<std::size_t>(lane); }

}  // namespace

Transfers::Transfers(FarTier& far, const TransferOptions& options)
    : far_(far), options_(options), completions_(kCompletionsAtOnce) {}

Transfers::~Transfers() {
  while (in_flight_ > 0 && wait()) {
  }
}

std::uint32_t Transfers::add(const Operation& operation) {
  if (free_operations_.empty()) {
    free_operations_.push_back(static_cast<std::uint32_t>(operations_.size()));
    operations_.emplace_back();
  }
  const std::uint32_t index = free_operations_.back();
  free_operations_.pop_back();
  operations_[index] = operation;
  operation.owner->note_transfer_begun();
  waiting_[index_of(operation.lane)].push_back(index);
  return index;
}

void Transfers::read(Residency& owner, LayerIndex layer, BlockIndex block, PageIndex page, Lane lane) {
  DD_CHECK(owner.state(layer, block) == SlotState::kLoading, "layer {} block {} is {}", layer.value,
           block.value, slot_state_name(owner.state(layer, block)));
  const std::uint32_t index = add({.owner = &owner,
                                   .layer = layer,
                                   .block = block,
                                   .page = page,
                                   .slot = owner.slot(layer, block),
                                   .lane = lane,
                                   .bytes = far_.geometry().slot_bytes()});
  owner.set_transfer(layer, block, index);
}

void Transfers::read_staged(Residency& owner, LayerIndex layer, PageIndex page, SlotIndex to, bool& done) {
  done = false;
  add({.owner = &owner,
       .layer = layer,
       .page = page,
       .slot = to,
       .staged_done = &done,
       .lane = Lane::kDemand,
       .bytes = far_.geometry().slot_bytes()});
}

void Transfers::write(Residency& owner, BlockIndex block, PageIndex page) {
  for (LayerIndex layer; layer.value < far_.geometry().layers; ++layer) owner.begin_write(layer, block);
  add({.owner = &owner,
       .block = block,
       .page = page,
       .lane = Lane::kWrite,
       .bytes = far_.geometry().page_bytes()});
}

void Transfers::promote(const Residency& owner, LayerIndex layer, BlockIndex block) {
  const std::uint32_t index = owner.transfer(layer, block);
  Operation& operation = operations_[index];
  DD_CHECK(operation.owner == &owner, "transfer {}", index);
  if (operation.started || operation.lane == Lane::kDemand) return;
  std::erase(waiting_[index_of(operation.lane)], index);
  operation.lane = Lane::kDemand;
  waiting_[index_of(Lane::kDemand)].push_back(index);
  ++stats_.promoted;
  const auto now = std::chrono::steady_clock::now();
  trace("promoted", operation, now, now);
}

void Transfers::poll() {
  while (true) {
    start_what_may();
    const std::size_t count = in_flight_ == 0 ? 0 : far_.port().poll(completions_);
    if (count == 0) return;
    for (std::size_t i = 0; i < count; ++i) end(completions_[i]);
  }
}

bool Transfers::wait() {
  start_what_may();
  if (in_flight_ == 0) return false;
  const std::size_t count = far_.port().wait(completions_, options_.deadline);
  for (std::size_t i = 0; i < count; ++i) end(completions_[i]);
  poll();
  return count > 0;
}

bool Transfers::drain(Residency& owner) {
  for (std::uint32_t index = 0; index < operations_.size(); ++index) {
    if (operations_[index].owner == &owner && !operations_[index].started) take_back(index);
  }
  return finish(owner);
}

bool Transfers::finish(Residency& owner) {
  while (owner.transfers() > 0) {
    if (!wait()) {
      ++stats_.deadlines_missed;
      return false;
    }
  }
  return true;
}

void Transfers::take_back(std::uint32_t index) {
  Operation& operation = operations_[index];
  std::erase(waiting_[index_of(operation.lane)], index);
  if (operation.staged_done != nullptr) {
    *operation.staged_done = true;
  } else if (operation.lane == Lane::kWrite) {
    for (LayerIndex layer; layer.value < far_.geometry().layers; ++layer)
      operation.owner->fail_write(layer, operation.block);
  } else {
    operation.owner->fail_read(operation.layer, operation.block);
  }
  release(operation);
}

void Transfers::start_what_may() {
  bool any = false;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    while (!waiting_[lane].empty() && in_flight_ < far_.port().depth()) {
      const std::uint32_t index = waiting_[lane].front();
      const std::uint64_t bytes = operations_[index].bytes;
      if (in_flight_bytes_[lane] > 0 && in_flight_bytes_[lane] + bytes > options_.in_flight_bytes_max[lane])
        break;
      waiting_[lane].pop_front();
      in_flight_bytes_[lane] += bytes;
      ++in_flight_;
      start(index);
      any = true;
    }
  }
  if (any) far_.port().flush();
}

void Transfers::start(std::uint32_t index) {
  Operation& operation = operations_[index];
  operation.started = true;
  operation.start = std::chrono::steady_clock::now();
  segments_.clear();
  if (operation.lane == Lane::kWrite) {
    start_write(operation, index);
  } else {
    start_read(operation, index);
  }
}

void Transfers::start_read(const Operation& operation, std::uint32_t index) {
  segments_.push_back({.iov_base = operation.owner->near().data(operation.slot), .iov_len = operation.bytes});
  far_.port().submit({.kind = CopyKind::kRead,
                      .far_offset = far_.offset(operation.page, operation.layer),
                      .segments = segments_,
                      .tag = index});
}

void Transfers::start_write(const Operation& operation, std::uint32_t index) {
  const std::size_t block_bytes = far_.geometry().slot_bytes();
  for (LayerIndex layer; layer.value < far_.geometry().layers; ++layer) {
    std::byte* const data = operation.owner->near().data(operation.owner->slot(layer, operation.block));
    if (far_.verify()) {
      far_.checksum(operation.page, layer) = hash_bytes(std::span(data, block_bytes));
    }
    if (!segments_.empty() &&
        static_cast<std::byte*>(segments_.back().iov_base) + segments_.back().iov_len == data) {
      segments_.back().iov_len += block_bytes;
    } else {
      segments_.push_back({.iov_base = data, .iov_len = block_bytes});
    }
  }
  far_.port().submit({.kind = CopyKind::kWrite,
                      .far_offset = far_.offset(operation.page, LayerIndex(0)),
                      .segments = segments_,
                      .tag = index});
}

void Transfers::end(const Completion& completion) {
  DD_CHECK(completion.tag < operations_.size(), "completion {}", completion.tag);
  Operation& operation = operations_[completion.tag];
  DD_CHECK(operation.owner != nullptr && operation.started, "completion {}", completion.tag);
  in_flight_bytes_[index_of(operation.lane)] -= operation.bytes;
  --in_flight_;
  TransferCounts& counts = operation.lane == Lane::kWrite ? stats_.writes : stats_.reads;
  const auto now = std::chrono::steady_clock::now();
  const auto spent = now - operation.start;
  const auto ns =
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
  ++counts.copies;
  counts.bytes += operation.bytes;
  counts.ns += ns;
  counts.ns_max = std::max(counts.ns_max, ns);
  trace(kLaneNames[index_of(operation.lane)], operation, operation.start, now);
  if (operation.lane == Lane::kWrite) {
    end_write(operation, completion.error);
  } else {
    end_read(operation, completion.error);
  }
  release(operation);
}

void Transfers::trace(const char* name, const Operation& operation, TraceEvent::Time start,
                      TraceEvent::Time end) const {
  if (options_.trace == nullptr) return;
  const bool writes = operation.lane == Lane::kWrite;
  options_.trace->add({.name = name,
                       .track = writes ? kWriteTrack : kReadTrack,
                       .start = start,
                       .end = end,
                       .step = -1,
                       .layer = writes ? -1 : static_cast<std::int64_t>(operation.layer.value),
                       .block = static_cast<std::int64_t>(operation.block.value)});
}

void Transfers::end_read(Operation& operation, int error) {
  Residency& owner = *operation.owner;
  const auto where = [&] {
    return fmt::format("{}: a block of layer {} at byte {}", far_.port().description(), operation.layer.value,
                       far_.offset(operation.page, operation.layer));
  };
  bool good = error == 0;
  if (error != 0) {
    ++stats_.read_errors;
    owner.set_error({ErrorCode::kIo, fmt::format("{} cannot be read: {}", where(), errno_text(error))});
  } else if (far_.verify()) {
    const std::uint64_t found = hash_bytes(std::span(owner.near().data(operation.slot), operation.bytes));
    const std::uint64_t wanted = far_.checksum(operation.page, operation.layer);
    good = found == wanted;
    if (!good) {
      ++stats_.checksum_errors;
      owner.set_error({ErrorCode::kCorrupt, fmt::format("{} is damaged: checksum {:016x}, wanted {:016x}",
                                                        where(), found, wanted)});
    }
  }
  if (operation.staged_done != nullptr) {
    *operation.staged_done = true;
  } else if (good) {
    owner.end_read(operation.layer, operation.block);
  } else {
    owner.fail_read(operation.layer, operation.block);
  }
}

void Transfers::end_write(Operation& operation, int error) {
  Residency& owner = *operation.owner;
  if (error != 0) {
    ++stats_.write_errors;
    owner.set_error(
        {ErrorCode::kIo, fmt::format("{}: a page at byte {} cannot be written: {}", far_.port().description(),
                                     far_.offset(operation.page, LayerIndex(0)), errno_text(error))});
  }
  for (LayerIndex layer; layer.value < far_.geometry().layers; ++layer) {
    if (error == 0) {
      owner.end_write(layer, operation.block);
    } else {
      owner.fail_write(layer, operation.block);
    }
  }
}

void Transfers::release(Operation& operation) {
  operation.owner->note_transfer_ended();
  operation.owner = nullptr;
  free_operations_.push_back(static_cast<std::uint32_t>(&operation - operations_.data()));
}

}  // namespace dualdecoder
