#include "model/forward.h"

#include <algorithm>
#include <cstring>

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

// The fixed places in one host buffer. `x` twice: a layer reads one and writes the other.
struct Forward::Places {
  std::shared_ptr<ggml_threadpool> threadpool;  // outlives the graphs that run on it
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

  void put(ggml_tensor* tensor, std::byte* place) const {
    ggml_tensor* storage = storage_of(tensor);
    DD_CHECK(ggml_is_contiguous(storage) && storage->data == nullptr, "{}", storage->name);
    const ggml_status status = ggml_backend_tensor_alloc(buffer.get(), storage, place);
    DD_CHECK(status == GGML_STATUS_SUCCESS);
  }
};

struct Forward::Graphs {
  std::uint32_t rows = 0;
  std::uint32_t outputs = 0;
  ggml_context_ptr context;
  ggml_tensor* tokens = nullptr;
  ggml_tensor* positions = nullptr;
  ggml_tensor* output_rows = nullptr;
  ggml_tensor* attention = nullptr;
  ggml_tensor* x[2] = {};
  std::vector<ggml_cgraph*> layers;
  ggml_cgraph* logits = nullptr;  // null without outputs
};

Result<std::unique_ptr<Forward>> Forward::create(const Model& model, const ForwardOptions& options,
                                                 const Forward* beside) {
  std::unique_ptr<Forward> forward(new Forward(model, options));
  if (Status status = forward->allocate(beside); !status) return std::unexpected(status.error());
  return forward;
}

Forward::Forward(const Model& model, const ForwardOptions& options)
    : model_(model), options_(options), places_(std::make_unique<Places>()) {}

Forward::~Forward() {
  graphs_.clear();
  temporaries_.reset();
  backend_.reset();
}

Status Forward::allocate(const Forward* beside) {
  DD_CHECK(options_.threads > 0 && options_.rows_max > 0 && options_.outputs_max > 0);
  options_.outputs_max = std::min(options_.outputs_max, options_.rows_max);
  backend_.reset(ggml_backend_cpu_init());
  if (!backend_) return fail(ErrorCode::kInternal, "ggml has no CPU backend");
  const auto threads = static_cast<int>(options_.threads);
  if (beside != nullptr) {
    places_->threadpool = beside->places_->threadpool;
  } else {
    ggml_threadpool_params pool_params = ggml_threadpool_params_default(threads);
    places_->threadpool.reset(ggml_threadpool_new(&pool_params), ggml_threadpool_free);
  }
  ggml_backend_cpu_set_n_threads(backend_.get(), threads);
  ggml_backend_cpu_set_threadpool(backend_.get(), places_->threadpool.get());

  const Hyperparameters& shape = model_.hyperparameters();
  const std::size_t rows = options_.rows_max;
  std::size_t bytes = 0;
  const auto reserve = [&](std::size_t elements) {
    const std::size_t offset = bytes;
    bytes += (elements * 4 + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  };
  const std::size_t x0 = reserve(rows * shape.embedding);
  const std::size_t x1 = reserve(rows * shape.embedding);
  const std::size_t q = reserve(rows * shape.query_width());
  const std::size_t q_next = reserve(options_.next_query ? rows * shape.query_width() : 0);
  const std::size_t k = reserve(rows * shape.kv_width());
  const std::size_t v = reserve(rows * shape.kv_width());
  const std::size_t attention = reserve(rows * shape.query_width());
  const std::size_t tokens = reserve(rows);
  const std::size_t positions = reserve(rows);
  const std::size_t output_rows = reserve(options_.outputs_max);
  const std::size_t logits = reserve(std::size_t{options_.outputs_max} * shape.vocabulary);

  places_->buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), bytes));
  if (!places_->buffer)
    return fail(ErrorCode::kOutOfMemory, "not enough memory for {} bytes of activations", bytes);
  auto* base = static_cast<std::byte*>(ggml_backend_buffer_get_base(places_->buffer.get()));
  places_->x[0] = base + x0;
  places_->x[1] = base + x1;
  places_->q = base + q;
  places_->q_next = options_.next_query ? base + q_next : nullptr;
  places_->k = base + k;
  places_->v = base + v;
  places_->attention = base + attention;
  places_->tokens = base + tokens;
  places_->positions = base + positions;
  places_->output_rows = base + output_rows;
  places_->logits = base + logits;

  temporaries_.reset(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
  graphs_for(options_.rows_max, options_.outputs_max);  // the largest step sizes the temporaries

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
  if (beside == nullptr) pin_threads();
  return {};
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

void Forward::begin(std::span<const TokenId> tokens, std::span<const std::uint32_t> positions,
                    std::span<const std::uint32_t> output_rows) {
  const std::size_t rows = tokens.size();
  DD_CHECK(rows > 0 && rows <= options_.rows_max, "{} rows of {}", rows, options_.rows_max);
  DD_CHECK(positions.size() == rows);
  DD_CHECK(output_rows.size() <= options_.outputs_max, "{} outputs of {}", output_rows.size(),
           options_.outputs_max);
  current_ = &graphs_for(static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(output_rows.size()));
  std::memcpy(places_->tokens, tokens.data(), tokens.size_bytes());
  std::memcpy(places_->positions, positions.data(), positions.size_bytes());
  if (!output_rows.empty()) std::memcpy(places_->output_rows, output_rows.data(), output_rows.size_bytes());
}

LayerRows Forward::project(LayerIndex layer) {
  run(current_->layers[layer.value]);
  const bool last = layer.value + 1 == model_.hyperparameters().layers;
  return {.q = reinterpret_cast<const float*>(places_->q),
          .q_next = last ? nullptr : reinterpret_cast<const float*>(places_->q_next),
          .k = reinterpret_cast<const float*>(places_->k),
          .v = reinterpret_cast<const float*>(places_->v),
          .attention = reinterpret_cast<float*>(places_->attention)};
}

const float* Forward::logits() {
  DD_CHECK(current_->logits != nullptr, "begin() named no output rows");
  run(current_->logits);
  return reinterpret_cast<const float*>(places_->logits);
}

void Forward::parallel(const std::function<void(std::uint32_t)>& fn) {
  parallel_fn_ = &fn;
  run(parallel_graph_);
  parallel_fn_ = nullptr;
}

void Forward::run(ggml_cgraph* graph) {
  const ggml_status status = ggml_backend_graph_compute(backend_.get(), graph);
  DD_CHECK(status == GGML_STATUS_SUCCESS, "ggml status {}", static_cast<int>(status));
}

std::size_t Forward::activation_bytes() const {
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
      ggml_init({.mem_size = (shape.layers + 2) * per_graph, .mem_buffer = nullptr, .no_alloc = true}));

  const auto leaf = [&](ggml_type type, std::int64_t width, std::int64_t count, std::byte* place) {
    ggml_tensor* tensor = width == 0 ? ggml_new_tensor_1d(graphs->context.get(), type, count)
                                     : ggml_new_tensor_2d(graphs->context.get(), type, width, count);
    places_->put(tensor, place);
    return tensor;
  };
  graphs->tokens = leaf(GGML_TYPE_I32, 0, rows, places_->tokens);
  graphs->positions = leaf(GGML_TYPE_I32, 0, rows, places_->positions);
  graphs->attention = leaf(GGML_TYPE_F32, shape.query_width(), rows, places_->attention);
  for (int i = 0; i < 2; ++i) graphs->x[i] = leaf(GGML_TYPE_F32, shape.embedding, rows, places_->x[i]);
  if (outputs > 0) graphs->output_rows = leaf(GGML_TYPE_I32, 0, outputs, places_->output_rows);

  for (LayerIndex layer; layer.value < shape.layers; ++layer) build_layer(*graphs, layer);
  if (outputs > 0) build_logits(*graphs);
  return graphs;
}

void Forward::build_layer(Graphs& graphs, LayerIndex layer) {
  const Architecture& architecture = model_.architecture();
  const bool invariant = options_.batch_invariant && graphs.rows <= kInvariantRowsMax;
  GraphBuilder builder(graphs.context.get(), model_.hyperparameters(), graphs.positions, invariant);
  const std::uint32_t out = layer.value % 2;
  ggml_tensor* x = layer.value == 0 ? architecture.embed(builder, graphs.tokens)
                                    : architecture.finish(builder, LayerIndex(layer.value - 1),
                                                          graphs.attention, graphs.x[1 - out]);
  places_->put(x, places_->x[out]);
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
  GraphBuilder builder(graphs.context.get(), shape, graphs.positions, invariant);
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
