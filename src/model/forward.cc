#include "model/forward.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include <ggml-alloc.h>
#include <ggml-cpu.h>
#include <pthread.h>
#include <sched.h>

#include "base/check.h"

namespace dualdecoder {
namespace {

constexpr std::size_t kGraphNodesMax = 128;  // of one layer's graph; the largest here (Gemma 3) has about 45
constexpr std::size_t kGraphsKept =
    16;  // distinct (rows, outputs); decoding uses a few, a prompt's end one more
constexpr std::size_t kAlignment = 64;

ggml_tensor* storage_of(ggml_tensor* tensor) {
  return tensor->view_src == nullptr ? tensor : tensor->view_src;
}

}  // namespace

// The fixed places in one buffer. `x` twice: a layer reads one and writes the other. Behind V there is room
// for what may be computed as one product with it, K and Q before their rotation.
struct Forward::Places {
  ggml_backend_buffer_ptr buffer;
  std::byte* x[2] = {};              // f32 [rows_max, embedding]
  std::byte* q = nullptr;            // f32 [rows_max, heads, head_dim]
  std::byte* q_next = nullptr;       // the same; null unless asked for
  std::byte* k = nullptr;            // f32 [rows_max, kv_heads, head_dim]
  std::byte* v = nullptr;            // f32 [rows_max, kv_heads, head_dim]
  std::byte* attention = nullptr;    // f32 [rows_max, heads, head_dim]
  std::byte* tokens = nullptr;       // i32 [rows_max]
  std::byte* positions = nullptr;    // i32 [rows_max]
  std::byte* output_rows = nullptr;  // i32 [outputs_max]
  std::byte* logits = nullptr;       // f32 [outputs_max, vocabulary]

  /// Null when there is not enough memory.
  static std::unique_ptr<Places> allocate(ggml_backend_buffer_type_t type, const Hyperparameters& shape,
                                          const ForwardOptions& options);

  void put(ggml_tensor* tensor, std::byte* place) const {
    ggml_tensor* storage = storage_of(tensor);
    DD_CHECK(ggml_is_contiguous(storage) && storage->data == nullptr && tensor->view_offs == 0, "{}",
             storage->name);
    const ggml_status status = ggml_backend_tensor_alloc(buffer.get(), storage, place);
    DD_CHECK(status == GGML_STATUS_SUCCESS);
  }
};

std::unique_ptr<Forward::Places> Forward::Places::allocate(ggml_backend_buffer_type_t type,
                                                           const Hyperparameters& shape,
                                                           const ForwardOptions& options) {
  auto places = std::make_unique<Places>();
  const std::size_t alignment = std::max(kAlignment, ggml_backend_buft_get_alignment(type));
  const std::size_t rows = options.rows_max;
  std::vector<std::pair<std::byte**, std::size_t>> offsets;
  std::size_t bytes = 0;
  const auto reserve = [&](std::byte*& place, std::size_t elements) {
    offsets.emplace_back(&place, bytes);
    bytes += (elements * 4 + alignment - 1) / alignment * alignment;
  };
  for (std::byte*& x : places->x) reserve(x, rows * shape.embedding);
  reserve(places->q, rows * shape.query_width());
  if (options.next_query) reserve(places->q_next, rows * shape.query_width());
  reserve(places->k, rows * shape.kv_width());
  reserve(places->v, rows * (shape.query_width() + 2 * shape.kv_width()));
  reserve(places->attention, rows * shape.query_width());
  reserve(places->tokens, rows);
  reserve(places->positions, rows);
  reserve(places->output_rows, options.outputs_max);
  reserve(places->logits, std::size_t{options.outputs_max} * shape.vocabulary);
  places->buffer.reset(ggml_backend_buft_alloc_buffer(type, bytes));
  if (!places->buffer) return nullptr;
  auto* base = static_cast<std::byte*>(ggml_backend_buffer_get_base(places->buffer.get()));
  for (const auto& [place, offset] : offsets) *place = base + offset;
  return places;
}

struct Forward::Graphs {
  std::uint32_t rows = 0;
  std::uint32_t outputs = 0;
  std::deque<PackedProduct> products;  // of their nodes
  ggml_context_ptr context;
  ggml_tensor* tokens = nullptr;
  ggml_tensor* positions = nullptr;
  ggml_tensor* output_rows = nullptr;
  ggml_tensor* attention = nullptr;
  ggml_tensor* x[2] = {};
  // With a device, what is copied to the host: leaves where the layers' results are.
  ggml_tensor* q = nullptr;
  ggml_tensor* q_next = nullptr;
  ggml_tensor* k = nullptr;
  ggml_tensor* v = nullptr;
  ggml_tensor* logits_leaf = nullptr;
  ggml_cgraph* embedding = nullptr;  // on the CPU; null where the first layer has it
  std::vector<ggml_cgraph*> layers;
  ggml_cgraph* logits = nullptr;  // null without outputs
};

Result<std::unique_ptr<Forward>> Forward::create(const Model& model, const ForwardOptions& options,
                                                 const Forward* beside) {
  std::unique_ptr<Forward> forward(new Forward(model, options));
  if (Status status = forward->allocate(beside); !status) return std::unexpected(status.error());
  return forward;
}

Forward::Forward(const Model& model, const ForwardOptions& options) : model_(model), options_(options) {}

Forward::~Forward() = default;

Status Forward::allocate(const Forward* beside) {
  DD_CHECK(options_.threads > 0 && options_.rows_max > 0 && options_.outputs_max > 0);
  options_.outputs_max = std::min(options_.outputs_max, options_.rows_max);
  if (Status status = open_backends(beside); !status) return status;
  ggml_backend_buffer_type_t host_type = ggml_backend_cpu_buffer_type();
  ggml_backend_buffer_type_t type = device_ ? model_.device().buffer_type() : host_type;
  places_ = Places::allocate(type, model_.hyperparameters(), options_);
  if (device_) mirror_ = Places::allocate(host_type, model_.hyperparameters(), options_);
  if (!places_ || (device_ && !mirror_)) {
    return fail(ErrorCode::kOutOfMemory, "not enough memory for the activations of {} rows",
                options_.rows_max);
  }
  temporaries_.reset(ggml_gallocr_new(type));
  if (device_) embedding_temporaries_.reset(ggml_gallocr_new(host_type));
  graphs_for(options_.rows_max, options_.outputs_max);  // the largest step sizes the temporaries
  make_parallel_graph();
  if (beside == nullptr) pin_threads();
  return {};
}

Status Forward::open_backends(const Forward* beside) {
  cpu_.reset(ggml_backend_cpu_init());
  if (!cpu_) return fail(ErrorCode::kInternal, "ggml has no CPU backend");
  const auto threads = static_cast<int>(options_.threads);
  if (beside != nullptr) {
    threadpool_ = beside->threadpool_;
  } else {
    ggml_threadpool_params pool_params = ggml_threadpool_params_default(threads);
    threadpool_.reset(ggml_threadpool_new(&pool_params), ggml_threadpool_free);
  }
  ggml_backend_cpu_set_n_threads(cpu_.get(), threads);
  ggml_backend_cpu_set_threadpool(cpu_.get(), threadpool_.get());
  if (model_.device().is_cpu()) return {};
  device_.reset(ggml_backend_dev_init(model_.device().handle(), nullptr));
  if (!device_) return fail(ErrorCode::kInternal, "{} cannot be opened", model_.device().name());
  return {};
}

void Forward::make_parallel_graph() {
  parallel_context_.reset(
      ggml_init({.mem_size = ggml_tensor_overhead() * 2 + ggml_graph_overhead_custom(8, false) + 64,
                 .mem_buffer = nullptr,
                 .no_alloc = false}));
  const ggml_custom_op_t call = [](ggml_tensor*, int thread, int, void* user) {
    (*static_cast<Forward*>(user)->parallel_fn_)(static_cast<std::uint32_t>(thread));
  };
  ggml_tensor* node = ggml_custom_4d(parallel_context_.get(), GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, call,
                                     GGML_N_TASKS_MAX, this);
  parallel_graph_ = ggml_new_graph_custom(parallel_context_.get(), 8, false);
  ggml_build_forward_expand(parallel_graph_, node);
}

// With a thread for every CPU, each gets one of its own. Left to itself the scheduler may wake a thread that
// slept at a barrier on the CPU of the one that wakes it, and keep both there: a step of two threads on two
// CPUs then takes five times as long, for minutes. With fewer threads than CPUs nothing is pinned: other
// processes need the choice.
void Forward::pin_threads() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  if (options_.threads < 2 || cpus.size() != options_.threads) return;
  parallel([&](std::uint32_t thread) {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cpus[thread], &own);
    pthread_setaffinity_np(pthread_self(), sizeof(own), &own);
  });
}

ggml_backend_t Forward::backend() const { return device_ ? device_.get() : cpu_.get(); }
const Forward::Places& Forward::host() const { return mirror_ ? *mirror_ : *places_; }

void Forward::begin(std::span<const TokenId> tokens, std::span<const std::uint32_t> positions,
                    std::span<const std::uint32_t> output_rows) {
  const std::size_t rows = tokens.size();
  DD_CHECK(rows > 0 && rows <= options_.rows_max, "{} rows of {}", rows, options_.rows_max);
  DD_CHECK(positions.size() == rows);
  DD_CHECK(output_rows.size() <= options_.outputs_max, "{} outputs of {}", output_rows.size(),
           options_.outputs_max);
  current_ = &graphs_for(static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(output_rows.size()));
  std::memcpy(host().tokens, tokens.data(), tokens.size_bytes());
  std::memcpy(host().positions, positions.data(), positions.size_bytes());
  if (!output_rows.empty()) std::memcpy(host().output_rows, output_rows.data(), output_rows.size_bytes());
}

LayerRows Forward::project(LayerIndex layer) {
  const bool last = layer.value + 1 == model_.hyperparameters().layers;
  if (device_) send_inputs(layer);
  compute_graph(backend(), current_->layers[layer.value]);
  if (device_) {
    const bool kv = !options_.attends_on_device;
    fetch({{current_->q, mirror_->q},
           {kv ? current_->k : nullptr, mirror_->k},
           {kv ? current_->v : nullptr, mirror_->v},
           {last ? nullptr : current_->q_next, mirror_->q_next}});
  }
  return {.q = reinterpret_cast<const float*>(host().q),
          .q_next = last ? nullptr : reinterpret_cast<const float*>(host().q_next),
          .k = reinterpret_cast<const float*>(host().k),
          .v = reinterpret_cast<const float*>(host().v),
          .attention = reinterpret_cast<float*>(host().attention)};
}

const float* Forward::logits() {
  DD_CHECK(current_->logits != nullptr, "begin() named no output rows");
  send_attention();
  compute_graph(backend(), current_->logits);
  if (device_) fetch({{current_->logits_leaf, mirror_->logits}});
  return reinterpret_cast<const float*>(host().logits);
}

void Forward::parallel(const std::function<void(std::uint32_t)>& fn) {
  parallel_fn_ = &fn;
  compute_graph(cpu_.get(), parallel_graph_);
  parallel_fn_ = nullptr;
}

// What a layer reads: the first one embeddings and positions, the others the attention of the one before.
void Forward::send_inputs(LayerIndex layer) {
  if (layer.value > 0) return send_attention();
  compute_graph(cpu_.get(), current_->embedding);
  send(current_->x[0], mirror_->x[0]);
  send(current_->positions, mirror_->positions);
  if (current_->output_rows != nullptr) send(current_->output_rows, mirror_->output_rows);
}

void Forward::send_attention() {
  if (device_ && !options_.attends_on_device) send(current_->attention, mirror_->attention);
}

DeviceRows Forward::device_rows() const {
  DD_CHECK(device_ != nullptr);
  return {.backend = device_.get(),
          .buffer = places_->buffer.get(),
          .q = places_->q,
          .k = places_->k,
          .v = places_->v,
          .attention = places_->attention,
          .host_q = reinterpret_cast<const float*>(mirror_->q)};
}

void Forward::send(ggml_tensor* to, const std::byte* from) {
  ggml_backend_tensor_set_async(device_.get(), to, from, 0, ggml_nbytes(to));
}

void Forward::fetch(std::initializer_list<std::pair<ggml_tensor*, std::byte*>> results) {
  for (const auto& [from, to] : results) {
    if (from != nullptr) ggml_backend_tensor_get_async(device_.get(), from, to, 0, ggml_nbytes(from));
  }
  ggml_backend_synchronize(device_.get());
}

std::size_t Forward::activation_bytes() const {
  const ggml_gallocr_ptr& temporaries = mirror_ ? embedding_temporaries_ : temporaries_;
  return ggml_backend_buffer_get_size(host().buffer.get()) +
         ggml_gallocr_get_buffer_size(temporaries.get(), 0);
}

std::size_t Forward::device_activation_bytes() const {
  if (!device_) return 0;
  return ggml_backend_buffer_get_size(places_->buffer.get()) +
         ggml_gallocr_get_buffer_size(temporaries_.get(), 0);
}

Forward::Graphs& Forward::graphs_for(std::uint32_t rows, std::uint32_t outputs) {
  const auto found = std::find_if(graphs_.begin(), graphs_.end(),
                                  [&](const auto& g) { return g->rows == rows && g->outputs == outputs; });
  if (found != graphs_.end()) {
    std::rotate(graphs_.begin(), found, found + 1);
    return *graphs_.front();
  }
  auto graphs = build(rows, outputs);
  if (!place_temporaries(*graphs)) {
    // The shared buffer had to grow, so the graphs placed in the old one are void. The largest step is placed
    // first, so this is rare.
    graphs_.clear();
    graphs = build(rows, outputs);
    DD_CHECK(place_temporaries(*graphs));
  }
  if (graphs_.size() == kGraphsKept) graphs_.pop_back();
  graphs_.insert(graphs_.begin(), std::move(graphs));
  return *graphs_.front();
}

std::unique_ptr<Forward::Graphs> Forward::build(std::uint32_t rows, std::uint32_t outputs) {
  const Hyperparameters& shape = model_.hyperparameters();
  auto graphs = std::make_unique<Graphs>();
  graphs->rows = rows;
  graphs->outputs = outputs;
  const std::size_t per_graph =
      ggml_graph_overhead_custom(kGraphNodesMax, false) + kGraphNodesMax * ggml_tensor_overhead();
  graphs->context.reset(
      ggml_init({.mem_size = (shape.layers + 3) * per_graph, .mem_buffer = nullptr, .no_alloc = true}));

  const auto leaf = [&](const Places& places, ggml_type type, std::int64_t width, std::int64_t count,
                        std::byte* place) {
    ggml_tensor* tensor = width == 0 ? ggml_new_tensor_1d(graphs->context.get(), type, count)
                                     : ggml_new_tensor_2d(graphs->context.get(), type, width, count);
    places.put(tensor, place);
    return tensor;
  };
  const auto indices = [&](const Places& places, std::int64_t count, std::byte* place) {
    return leaf(places, GGML_TYPE_I32, 0, count, place);
  };
  const auto floats = [&](std::int64_t width, std::int64_t count, std::byte* place) {
    return leaf(*places_, GGML_TYPE_F32, width, count, place);
  };
  graphs->tokens = indices(host(), rows, host().tokens);
  graphs->positions = indices(*places_, rows, places_->positions);
  graphs->attention = floats(shape.query_width(), rows, places_->attention);
  for (int i = 0; i < 2; ++i) graphs->x[i] = floats(shape.embedding, rows, places_->x[i]);
  if (outputs > 0) graphs->output_rows = indices(*places_, outputs, places_->output_rows);
  if (device_) {
    graphs->q = floats(shape.query_width(), rows, places_->q);
    if (options_.next_query) graphs->q_next = floats(shape.query_width(), rows, places_->q_next);
    graphs->k = floats(shape.kv_width(), rows, places_->k);
    graphs->v = floats(shape.kv_width(), rows, places_->v);
    if (outputs > 0) graphs->logits_leaf = floats(shape.vocabulary, outputs, places_->logits);
    build_embedding(*graphs);
  }
  for (LayerIndex layer; layer.value < shape.layers; ++layer) build_layer(*graphs, layer);
  if (outputs > 0) build_logits(*graphs);
  return graphs;
}

// Rows of the embedding table, which is mapped: looked up on the CPU.
void Forward::build_embedding(Graphs& graphs) {
  GraphBuilder builder(graphs.context.get(), model_.hyperparameters(), nullptr, false, graphs.products);
  ggml_tensor* x = model_.architecture().embed(builder, graphs.tokens);
  mirror_->put(x, mirror_->x[0]);
  graphs.embedding = ggml_new_graph_custom(graphs.context.get(), kGraphNodesMax, false);
  ggml_build_forward_expand(graphs.embedding, x);
}

void Forward::build_layer(Graphs& graphs, LayerIndex layer) {
  const Architecture& architecture = model_.architecture();
  const bool invariant = options_.batch_invariant && graphs.rows <= kInvariantRowsMax;
  GraphBuilder builder(graphs.context.get(), model_.hyperparameters(), graphs.positions, invariant,
                       graphs.products);
  const std::uint32_t out = layer.value % 2;
  ggml_tensor* x = graphs.x[0];
  if (layer.value > 0) {
    x = architecture.finish(builder, LayerIndex(layer.value - 1), graphs.attention, graphs.x[1 - out]);
  } else if (!device_) {
    x = architecture.embed(builder, graphs.tokens);
  }
  if (x != graphs.x[0]) places_->put(x, places_->x[out]);
  const Projection projection = architecture.project(builder, layer, x);
  places_->put(projection.q, places_->q);
  places_->put(projection.k, places_->k);
  places_->put(projection.v, places_->v);

  ggml_cgraph* graph = ggml_new_graph_custom(graphs.context.get(), kGraphNodesMax, false);
  for (ggml_tensor* result : {x, projection.q, projection.k, projection.v})
    ggml_build_forward_expand(graph, result);
  const LayerIndex next(layer.value + 1);
  if (options_.next_query && next.value < model_.hyperparameters().layers) {
    ggml_tensor* q_next = architecture.project(builder, next, x).q;
    places_->put(q_next, places_->q_next);
    ggml_build_forward_expand(graph, q_next);
  }
  graphs.layers.push_back(graph);
}

// Only the rows that want logits pass the last layer's tail and the output matrix.
void Forward::build_logits(Graphs& graphs) {
  const Hyperparameters& shape = model_.hyperparameters();
  const bool invariant = options_.batch_invariant && graphs.outputs <= kInvariantRowsMax;
  GraphBuilder builder(graphs.context.get(), shape, graphs.positions, invariant, graphs.products);
  const LayerIndex last(shape.layers - 1);
  ggml_tensor* attention = graphs.attention;
  ggml_tensor* x = graphs.x[last.value % 2];
  if (graphs.outputs < graphs.rows) {
    attention = ggml_get_rows(builder.context(), attention, graphs.output_rows);
    x = ggml_get_rows(builder.context(), x, graphs.output_rows);
  }
  ggml_tensor* logits =
      model_.architecture().logits(builder, model_.architecture().finish(builder, last, attention, x));
  places_->put(logits, places_->logits);
  graphs.logits = ggml_new_graph_custom(graphs.context.get(), kGraphNodesMax, false);
  ggml_build_forward_expand(graphs.logits, logits);
}

// Returns false when the shared buffer had to grow and other graphs lost their places. Twice over all graphs:
// the first round lets the buffer grow to what the largest needs, the second gives every tensor its final
// address.
bool Forward::place_temporaries(Graphs& graphs) {
  if (graphs.embedding != nullptr) {
    DD_CHECK(ggml_gallocr_reserve(embedding_temporaries_.get(), graphs.embedding));
    DD_CHECK(ggml_gallocr_alloc_graph(embedding_temporaries_.get(), graphs.embedding));
  }
  std::vector<ggml_cgraph*> all = graphs.layers;
  if (graphs.logits != nullptr) all.push_back(graphs.logits);
  const std::size_t before = ggml_gallocr_get_buffer_size(temporaries_.get(), 0);
  for (ggml_cgraph* graph : all) DD_CHECK(ggml_gallocr_reserve(temporaries_.get(), graph));
  if (!graphs_.empty() && ggml_gallocr_get_buffer_size(temporaries_.get(), 0) != before) return false;
  for (ggml_cgraph* graph : all) {
    // Reserved anew each time: the allocator compares only counts and sizes, and would use another graph's
    // lifetimes.
    DD_CHECK(ggml_gallocr_reserve(temporaries_.get(), graph));
    DD_CHECK(ggml_gallocr_alloc_graph(temporaries_.get(), graph));
  }
  return true;
}

}  // namespace dualdecoder
