#include "model/device_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace dualdecoder {
namespace {

/// Tokens of a run are filled up to a multiple: the kernels of some devices want whole tiles.
constexpr std::uint32_t kRunTokens = 256;
constexpr std::size_t kPartAlignment = 256;
constexpr std::size_t kRunsMax = 256;    // of one graph
constexpr std::size_t kTensorsRun = 16;  // of one run

ggml_context_ptr make_context(std::size_t runs) {
  const std::size_t tensors = (runs + 1) * kTensorsRun;
  return ggml_context_ptr(
      ggml_init({.mem_size = tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(tensors, false),
                 .mem_buffer = nullptr,
                 .no_alloc = true}));
}

ggml_cgraph* make_graph(ggml_context* context, std::size_t runs) {
  return ggml_new_graph_custom(context, (runs + 1) * kTensorsRun, false);
}

std::size_t part_bytes(std::size_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

/// Of K and V of one token.
std::size_t elements(const KvGeometry& geometry) {
  return std::size_t{2} * geometry.kv_heads * geometry.head_dim;
}

std::uint32_t whole_runs(std::uint32_t tokens) { return (tokens + kRunTokens - 1) / kRunTokens * kRunTokens; }

ggml_tensor* at(ggml_tensor* tensor, ggml_backend_buffer_t buffer, std::byte* address) {
  DD_CHECK(ggml_backend_tensor_alloc(buffer, tensor, address) == GGML_STATUS_SUCCESS);
  return tensor;
}

/// A view of what lies in a buffer already.
ggml_tensor* placed(ggml_tensor* view) {
  DD_CHECK(ggml_backend_view_init(view) == GGML_STATUS_SUCCESS);
  return view;
}

}  // namespace

Result<std::unique_ptr<DeviceAttention>> DeviceAttention::create(const Device& device, DeviceNearMemory& near,
                                                                 const DeviceRows& rows,
                                                                 const DeviceAttentionOptions& options) {
  std::unique_ptr<DeviceAttention> attention(new DeviceAttention(device, near, rows, options));
  if (Status status = attention->allocate(); !status) return std::unexpected(status.error());
  if (Status status = attention->check_operations(); !status) return std::unexpected(status.error());
  return attention;
}

DeviceAttention::DeviceAttention(const Device& device, DeviceNearMemory& near, const DeviceRows& rows,
                                 const DeviceAttentionOptions& options)
    : device_(device), near_(near), rows_(rows), options_(options) {}

std::uint32_t DeviceAttention::padded_tokens(std::uint32_t blocks) const {
  return whole_runs(blocks * options_.geometry.block_tokens);
}

// The speculated row may begin a block behind the context.
DeviceAttention::Layout DeviceAttention::layout_for(const KvGeometry& geometry, std::uint32_t context,
                                                    std::uint32_t rows_max) {
  Layout layout{.tokens = whole_runs((geometry.blocks_for(context) + 1) * geometry.block_tokens)};
  layout.slots = part_bytes(layout.tokens * elements(geometry) * sizeof(f16_bits));
  layout.mask = layout.slots + part_bytes(layout.tokens / geometry.block_tokens * sizeof(std::int32_t));
  layout.places = layout.mask + part_bytes(std::size_t{layout.tokens} * rows_max * sizeof(ggml_fp16_t));
  layout.all = layout.places + part_bytes(std::size_t{2} * rows_max * sizeof(std::int64_t));
  return layout;
}

std::size_t DeviceAttention::bytes_for(const KvGeometry& geometry, std::uint32_t context,
                                       std::uint32_t rows_max) {
  return layout_for(geometry, context, rows_max).all;
}

Status DeviceAttention::allocate() {
  const KvGeometry& geometry = options_.geometry;
  DD_CHECK(geometry.layout == KvLayout::kTokens);
  if (geometry.slot_bytes() % (elements(geometry) * sizeof(f16_bits) / 2) != 0) {
    return fail(ErrorCode::kUnsupported,
                "{}: keys of {} x {} do not fit blocks on a device; take a larger --block-size",
                device_.name(), geometry.kv_heads, geometry.head_dim);
  }
  const Layout layout = layout_for(geometry, options_.context, options_.rows_max);
  tokens_max_ = layout.tokens;
  mask_elements_ = std::size_t{tokens_max_} * options_.rows_max;
  buffer_.reset(ggml_backend_buft_alloc_buffer(device_.buffer_type(), layout.all));
  if (!buffer_) {
    return fail(ErrorCode::kOutOfMemory, "{} has no room for attention over {} tokens; lower -c or -b",
                device_.name(), options_.context);
  }
  ggml_backend_buffer_clear(buffer_.get(), 0);  // what fills a run up is multiplied by 0, and must not be NaN
  gathered_ = static_cast<std::byte*>(ggml_backend_buffer_get_base(buffer_.get()));
  slots_on_device_ = gathered_ + layout.slots;
  mask_on_device_ = gathered_ + layout.mask;
  places_ = gathered_ + layout.places;
  return {};
}

Status DeviceAttention::check_operations() const {
  const ggml_context_ptr context = make_context(1);
  const Run run{.blocks = kRunTokens / options_.geometry.block_tokens, .rows = 1, .complete = true};
  for (const ggml_tensor* operation : {gather(context.get(), run), attend(context.get(), run)}) {
    if (ggml_backend_dev_supports_op(device_.handle(), operation)) continue;
    return fail(ErrorCode::kUnsupported, "{} has no {} for {} heads of {}", device_.name(),
                ggml_op_name(operation->op), options_.shape.heads, options_.shape.head_dim);
  }
  return {};
}

// ---- append

void DeviceAttention::append(std::span<const std::optional<TokenPlace>> places) {
  const KvGeometry& geometry = options_.geometry;
  const std::size_t width = elements(geometry) / 2;
  const auto half_rows = static_cast<std::int64_t>(geometry.slot_bytes() / (width * sizeof(f16_bits)));
  const auto rows = static_cast<std::int64_t>(places.size());
  // Behind the last slot there is one that nobody reads.
  token_rows_.assign(places.size() * 2, options_.slots * half_rows);
  for (std::size_t r = 0; r < places.size(); ++r) {
    if (!places[r]) continue;
    const std::int64_t row = places[r]->slot.value * half_rows + 2 * std::int64_t{places[r]->token};
    token_rows_[r] = row;
    token_rows_[places.size() + r] = row + 1;
  }
  const ggml_context_ptr context = make_context(1);
  ggml_cgraph* graph = make_graph(context.get(), 1);
  const auto columns = static_cast<std::int64_t>(width);
  ggml_tensor* to = at(ggml_new_tensor_2d(context.get(), GGML_TYPE_F16, columns,
                                          (std::int64_t{options_.slots} + 1) * half_rows),
                       near_.buffer(), near_.data());
  for (const std::size_t half : {0, 1}) {
    ggml_tensor* from = at(ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, columns, rows), rows_.buffer,
                           half == 0 ? rows_.k : rows_.v);
    const std::size_t offset = half * places.size();
    ggml_tensor* index = at(ggml_new_tensor_1d(context.get(), GGML_TYPE_I64, rows), buffer_.get(),
                            places_ + offset * sizeof(std::int64_t));
    ggml_backend_tensor_set_async(rows_.backend, index, token_rows_.data() + offset, 0, ggml_nbytes(index));
    ggml_build_forward_expand(graph, placed(ggml_set_rows(context.get(), to, from, index)));
  }
  compute_graph(rows_.backend, graph);
}

// ---- attend

void DeviceAttention::attend(std::span<const AttentionGroup> groups) {
  for (const AttentionGroup& group : groups) add(group);
  compute();
}

void DeviceAttention::begin_run(const AttentionGroup& group, std::uint32_t blocks) {
  if (!runs_.empty() && !runs_.back().complete) {  // its sequence failed, and it was not gone on with
    runs_.clear();
    slots_.clear();
  }
  views_.clear();
  Run run{.rows = group.rows};
  run.first_row =
      static_cast<std::uint32_t>(group.q - rows_.host_q) / (options_.shape.heads * options_.shape.head_dim);
  if (!runs_.empty()) {
    const Run& before = runs_.back();
    run.first_token = before.first_token + padded_tokens(before.blocks);
    run.mask = before.mask + std::size_t{padded_tokens(before.blocks)} * before.rows;
    const std::uint32_t tokens = padded_tokens(blocks);
    if (runs_.size() == kRunsMax || run.first_token + tokens > tokens_max_ ||
        run.mask + std::size_t{tokens} * group.rows > mask_elements_) {
      compute();
      run.first_token = 0;
      run.mask = 0;
    }
  }
  run.first_slot = static_cast<std::uint32_t>(slots_.size());
  runs_.push_back(run);
}

void DeviceAttention::add(const AttentionGroup& group) {
  DD_CHECK(group.lse == nullptr && (!group.carry.resume || (!runs_.empty() && !runs_.back().complete)));
  const auto blocks = static_cast<std::uint32_t>(
      std::ranges::count_if(group.blocks, [](const KvBlockView& view) { return view.k != nullptr; }));
  if (!group.carry.resume) begin_run(group, blocks);
  Run& run = runs_.back();
  for (const KvBlockView& view : group.blocks) {
    if (view.k == nullptr) continue;
    const std::ptrdiff_t offset = reinterpret_cast<const std::byte*>(view.k) - near_.data();
    slots_.push_back(
        static_cast<std::int32_t>(offset / static_cast<std::ptrdiff_t>(options_.geometry.slot_bytes())));
    views_.push_back(view);
  }
  run.blocks += blocks;
  DD_CHECK(run.first_token + padded_tokens(run.blocks) <= tokens_max_, "{} blocks", run.blocks);
  if (group.carry.more) return;
  add_mask(run, group);
  run.complete = true;
}

void DeviceAttention::add_mask(Run& run, const AttentionGroup& group) {
  const std::size_t tokens = padded_tokens(run.blocks);
  mask_.resize(run.mask + tokens * run.rows);
  const ggml_fp16_t hidden = ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity());
  const ggml_fp16_t visible = ggml_fp32_to_fp16(0.0f);
  for (std::uint32_t r = 0; r < run.rows; ++r) {
    ggml_fp16_t* to = mask_.data() + run.mask + r * tokens;
    std::fill_n(to, tokens, hidden);
    const std::uint32_t end = group.first_row_position + r + 1;
    const std::uint32_t begin = group.window != 0 && end > group.window ? end - group.window : 0;
    for (const KvBlockView& view : views_) {
      const std::uint32_t first = std::clamp(begin, view.first_position, view.first_position + view.tokens);
      const std::uint32_t last = std::clamp(end, first, view.first_position + view.tokens);
      std::fill(to + (first - view.first_position), to + (last - view.first_position), visible);
      to += options_.geometry.block_tokens;
    }
  }
}

void DeviceAttention::compute() {
  if (runs_.empty()) return;
  const ggml_context_ptr context = make_context(runs_.size());
  ggml_cgraph* graph = make_graph(context.get(), runs_.size());
  if (!slots_.empty()) send(context.get(), GGML_TYPE_I32, std::as_bytes(std::span(slots_)), slots_on_device_);
  for (Run& run : runs_) {
    if (run.gathered < run.blocks) ggml_build_forward_expand(graph, gather(context.get(), run));
    run.gathered = run.blocks;
  }
  if (!mask_.empty() && mask_ != mask_sent_) {  // the same for many layers
    std::swap(mask_, mask_sent_);
    send(context.get(), GGML_TYPE_F16, std::as_bytes(std::span(mask_sent_)), mask_on_device_);
  }
  for (const Run& run : runs_) {
    if (run.complete && run.blocks > 0) ggml_build_forward_expand(graph, attend(context.get(), run));
  }
  compute_graph(rows_.backend, graph);
  slots_.clear();
  mask_.clear();
  if (runs_.back().complete) {
    runs_.clear();
  } else {  // it goes on, at the beginning of what is to be sent
    Run open = runs_.back();
    open.first_slot = 0;
    runs_.assign(1, open);
  }
}

void DeviceAttention::send(ggml_context* context, ggml_type type, std::span<const std::byte> values,
                           std::byte* address) {
  const auto count = static_cast<std::int64_t>(values.size() / ggml_type_size(type));
  ggml_tensor* to = at(ggml_new_tensor_1d(context, type, count), buffer_.get(), address);
  ggml_backend_tensor_set_async(rows_.backend, to, values.data(), 0, values.size());
}

// Whole blocks, as 32-bit words that are only moved.
ggml_tensor* DeviceAttention::gather(ggml_context* context, const Run& run) const {
  const KvGeometry& geometry = options_.geometry;
  const auto words = [](std::size_t bytes) { return static_cast<std::int64_t>(bytes / sizeof(float)); };
  ggml_tensor* all =
      at(ggml_new_tensor_2d(context, GGML_TYPE_F32, words(geometry.slot_bytes()), options_.slots),
         near_.buffer(), near_.data());
  ggml_tensor* blocks = placed(
      ggml_view_2d(context, all, words(geometry.block_bytes()), options_.slots, geometry.slot_bytes(), 0));
  ggml_tensor* slots = at(ggml_new_tensor_1d(context, GGML_TYPE_I32, run.blocks - run.gathered),
                          buffer_.get(), slots_on_device_ + run.first_slot * sizeof(std::int32_t));
  const std::size_t token = run.first_token + std::size_t{run.gathered} * geometry.block_tokens;
  return at(ggml_get_rows(context, blocks, slots), buffer_.get(),
            gathered_ + token * elements(geometry) * sizeof(f16_bits));
}

ggml_tensor* DeviceAttention::attend(ggml_context* context, const Run& run) const {
  const AttentionShape& shape = options_.shape;
  const auto head_dim = static_cast<std::int64_t>(shape.head_dim);
  const std::int64_t tokens = padded_tokens(run.blocks);
  const std::size_t token_width = elements(options_.geometry);
  const std::size_t token_bytes = token_width * sizeof(f16_bits);
  const std::size_t head_bytes = shape.head_dim * sizeof(f16_bits);
  ggml_tensor* kv =
      at(ggml_new_tensor_2d(context, GGML_TYPE_F16, static_cast<std::int64_t>(token_width), tokens),
         buffer_.get(), gathered_ + run.first_token * token_bytes);
  const auto half = [&](std::size_t offset) {
    return placed(
        ggml_view_3d(context, kv, head_dim, tokens, shape.kv_heads, token_bytes, head_bytes, offset));
  };
  const std::size_t row_offset = run.first_row * std::size_t{shape.heads} * shape.head_dim * sizeof(float);
  ggml_tensor* q = at(ggml_new_tensor_3d(context, GGML_TYPE_F32, head_dim, shape.heads, run.rows),
                      rows_.buffer, rows_.q + row_offset);
  ggml_tensor* mask = at(ggml_new_tensor_2d(context, GGML_TYPE_F16, tokens, run.rows), buffer_.get(),
                         mask_on_device_ + run.mask * sizeof(ggml_fp16_t));
  ggml_tensor* result = ggml_flash_attn_ext(context, placed(ggml_permute(context, q, 0, 2, 1, 3)), half(0),
                                            half(token_bytes / 2), mask, shape.scale, 0.0f, 0.0f);
  ggml_prec_set_acc(result, GGML_PREC_F32);
  return at(result, rows_.buffer, rows_.attention + row_offset);
}

}  // namespace dualdecoder
