// Attention on a device, over KV blocks in its memory: the counterpart there of AttentionBatch and
// store_tokens(), made of ggml's operations.
//
// The blocks of a list lie anywhere in the near tier, and ggml's flash attention wants the keys of a sequence
// at one stride. So the blocks are first gathered, in the order of the list, into a run of tokens of this
// layer alone: one copy within the device's memory. What a row gets then depends on its list and not on where
// its blocks lie, so that near, streamed and ring blocks give the same bits; and no part has to be merged
// with another. Blocks have the layout KvLayout::kTokens.
//
// Used by the engine thread. Results are complete on return.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <ggml-backend.h>
#include <ggml-cpp.h>

#include "attention/attention.h"
#include "base/error.h"
#include "model/device.h"
#include "model/device_near_memory.h"

namespace dualdecoder {

/// Where Forward keeps the rows of a step: on the device, and the host's mirror, which groups point into.
struct DeviceRows {
  ggml_backend_t backend = nullptr;
  ggml_backend_buffer_t buffer = nullptr;
  std::byte* q = nullptr;          // f32 [rows, heads, head_dim]
  std::byte* k = nullptr;          // f32 [rows, kv_heads, head_dim]
  std::byte* v = nullptr;          // the same
  std::byte* attention = nullptr;  // f32 [rows, heads, head_dim]
  const float* host_q = nullptr;
};

struct DeviceAttentionOptions {
  AttentionShape shape = {};
  KvGeometry geometry = {};
  std::uint32_t slots = 0;
  std::uint32_t context = 0;   // tokens
  std::uint32_t rows_max = 0;  // of one step
};

class DeviceAttention {
 public:
  /// kUnsupported when the device has no attention of this shape, or the geometry does not fit its
  /// operations; kOutOfMemory.
  static Result<std::unique_ptr<DeviceAttention>> create(const Device& device, DeviceNearMemory& near,
                                                         const DeviceRows& rows,
                                                         const DeviceAttentionOptions& options);

  /// What it takes of the device.
  static std::size_t bytes_for(const KvGeometry& geometry, std::uint32_t context, std::uint32_t rows_max);

  struct TokenPlace {
    SlotIndex slot;
    std::uint32_t token = 0;  // of the block
  };
  /// Writes K and V of the step's rows, in order, as f16; nowhere where there is no place.
  void append(std::span<const std::optional<TokenPlace>> places);
  /// As AttentionBatch: every group's q is one of Forward's rows, its result goes to the same rows of
  /// `attention` on the device. No lse. A carry may continue only the last group of the call before.
  void attend(std::span<const AttentionGroup> groups);

  std::size_t device_bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

 private:
  struct Layout {  // of its buffer, in bytes
    std::uint32_t tokens = 0;
    std::size_t slots = 0;
    std::size_t mask = 0;
    std::size_t places = 0;
    std::size_t all = 0;
  };
  struct Run {                      // of tokens, one group's
    std::uint32_t first_token = 0;  // in gathered_
    std::uint32_t first_slot = 0;   // in slots_
    std::uint32_t blocks = 0;
    std::uint32_t gathered = 0;  // of these, in an earlier call
    std::uint32_t first_row = 0;
    std::uint32_t rows = 0;
    std::size_t mask = 0;  // in mask_
    bool complete = false;
  };

  DeviceAttention(const Device& device, DeviceNearMemory& near, const DeviceRows& rows,
                  const DeviceAttentionOptions& options);
  static Layout layout_for(const KvGeometry& geometry, std::uint32_t context, std::uint32_t rows_max);
  Status allocate();
  Status check_operations() const;
  std::uint32_t padded_tokens(std::uint32_t blocks) const;
  void begin_run(const AttentionGroup& group, std::uint32_t blocks);
  void add(const AttentionGroup& group);
  void add_mask(Run& run, const AttentionGroup& group);
  void compute();
  ggml_tensor* gather(ggml_context* context, const Run& run) const;
  ggml_tensor* attend(ggml_context* context, const Run& run) const;
  /// Values that live until compute_graph().
  void send(ggml_context* context, ggml_type type, std::span<const std::byte> values, std::byte* address);

  Device device_;
  DeviceNearMemory& near_;
  DeviceRows rows_;
  DeviceAttentionOptions options_;
  std::uint32_t tokens_max_ = 0;   // of gathered_
  std::size_t mask_elements_ = 0;  // of mask_on_device_
  ggml_backend_buffer_ptr buffer_;
  std::byte* gathered_ = nullptr;         // f16 [tokens_max_, K then V]
  std::byte* slots_on_device_ = nullptr;  // i32 [blocks]
  std::byte* mask_on_device_ = nullptr;   // f16 [rows, tokens] of each run
  std::byte* places_ = nullptr;           // i64 [2, rows_max]

  std::vector<Run> runs_;
  std::vector<std::int32_t> slots_;
  std::vector<KvBlockView> views_;  // of the last run, which is not complete
  std::vector<ggml_fp16_t> mask_;
  std::vector<ggml_fp16_t> mask_sent_;
  std::vector<std::int64_t> token_rows_;
};

}  // namespace dualdecoder
