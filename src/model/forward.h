// Runs a model's layers for the rows of one step. Each layer is one ggml graph: the tail of the layer before
// (output projection, feed-forward) and the head of this one (norm, Q, K, V, rotary). Between two graphs the
// caller attends.
//
//   forward.begin(tokens, positions, output_rows);
//   for each layer: { LayerRows rows = forward.project(layer); ... write rows.attention ...; }
//   const float* logits = forward.logits();
//
// Graphs are built once per (rows, outputs) and kept; their temporaries share one buffer, sized at start for
// the largest step. What passes from graph to graph (x, Q, K, V, attention) lies in fixed places that the
// graphs read and write directly, without copies. Owned by the engine thread; only parallel() runs code on
// other threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ggml-backend.h>
#include <ggml-cpp.h>

#include "base/error.h"
#include "model/device_attention.h"
#include "model/model.h"

namespace dualdecoder {

struct ForwardOptions {
  std::uint32_t threads = 1;
  std::uint32_t rows_max = 512;     // of one step
  std::uint32_t outputs_max = 512;  // rows of one step that want logits
  bool batch_invariant = false;
  bool next_query = false;         // LayerRows::q_next
  bool attends_on_device = false;  // DeviceAttention reads K and V there and writes attention
};

/// In host memory, valid until the next begin(). Rows in the order of begin(). With attention on the device,
/// K and V are not brought here, and `attention` is not read.
struct LayerRows {
  const float* q = nullptr;  // [rows, heads, head_dim]
  /// The next layer's query weights on this layer's input: a guess of that layer's q. Null in the last layer.
  const float* q_next = nullptr;
  const float* k = nullptr;    // [rows, kv_heads, head_dim]
  const float* v = nullptr;    // [rows, kv_heads, head_dim]
  float* attention = nullptr;  // [rows, heads, head_dim], to be written before the next project() or logits()
};

class Forward {
 public:
  /// `beside`: one whose threads it uses too, when it is its turn; both belong to one engine thread.
  static Result<std::unique_ptr<Forward>> create(const Model& model, const ForwardOptions& options,
                                                 const Forward* beside = nullptr);
  ~Forward();

  /// `output_rows`: indices of the rows that want logits, ascending; may be empty.
  void begin(std::span<const TokenId> tokens, std::span<const std::uint32_t> positions,
             std::span<const std::uint32_t> output_rows);
  /// Layers in order, each once.
  LayerRows project(LayerIndex layer);
  /// [outputs, vocabulary], valid until the next begin(). After all layers, when there are output rows.
  const float* logits();

  /// Runs fn(thread) for thread = 0 .. threads - 1 on ggml's threads and returns when all are done.
  void parallel(const std::function<void(std::uint32_t)>& fn);

  /// Only with a device.
  DeviceRows device_rows() const;

  std::uint32_t rows_max() const { return options_.rows_max; }
  std::uint32_t threads() const { return options_.threads; }
  /// Steps of at most this many rows are batch-invariant when asked for; larger ones use ggml's products for
  /// many rows.
  static constexpr std::uint32_t kInvariantRowsMax = 32;
  /// Bytes of activations in host memory: fixed places and temporaries.
  std::size_t activation_bytes() const;
  /// The same in the memory of the model's device; 0 on the CPU.
  std::size_t device_activation_bytes() const;

 private:
  struct Graphs;
  struct Places;

  Forward(const Model& model, const ForwardOptions& options);
  Status allocate(const Forward* beside);
  Status open_backends(const Forward* beside);
  void make_parallel_graph();
  void pin_threads();
  ggml_backend_t backend() const;  // of the layers
  const Places& host() const;
  Graphs& graphs_for(std::uint32_t rows, std::uint32_t outputs);
  std::unique_ptr<Graphs> build(std::uint32_t rows, std::uint32_t outputs);
  void build_layer(Graphs& graphs, LayerIndex layer);
  void build_embedding(Graphs& graphs);
  void build_logits(Graphs& graphs);
  bool place_temporaries(Graphs& graphs);
  void send_inputs(LayerIndex layer);
  void send_attention();
  void send(ggml_tensor* to, const std::byte* from);
  void fetch(std::initializer_list<std::pair<ggml_tensor*, std::byte*>> results);

  const Model& model_;
  ForwardOptions options_;
  std::shared_ptr<ggml_threadpool> threadpool_;  // outlives the graphs that run on it
  ggml_backend_ptr cpu_;
  ggml_backend_ptr device_;  // null: the CPU
  ggml_gallocr_ptr temporaries_;
  ggml_gallocr_ptr embedding_temporaries_;       // in host memory; only with a device
  std::unique_ptr<Places> places_;               // where the layers are computed
  std::unique_ptr<Places> mirror_;               // of these, in host memory; only with a device
  std::vector<std::unique_ptr<Graphs>> graphs_;  // most recently used first
  Graphs* current_ = nullptr;

  ggml_context_ptr parallel_context_;
  ggml_cgraph* parallel_graph_ = nullptr;
  const std::function<void(std::uint32_t)>* parallel_fn_ = nullptr;
};

}  // namespace dualdecoder
