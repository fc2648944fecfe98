// Our attention kernel against ggml_flash_attn_ext, both as nodes of a ggml graph on the same thread pool.
//
// The shape is SmolLM2-135M's: 9 query heads, 3 KV heads of 64, f16, 30 layers with KV of their own, so that
// decoding reads from memory and not from a cache. Runs alternate in pairs; printed are medians, and the
// median of the pairs' ratios. Ours includes planning. GB/s counts K and V read once.
//
//   attention_bench [--quick] [--block-tokens N] [--threads N] [--target NAME] [--rounds N]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <ggml-cpu.h>
#include <ggml.h>
#include <CLI/CLI.hpp>

#include "attention/attention.h"
#include "base/check.h"
#include "base/statistics.h"

namespace dualdecoder {
namespace {

struct Options {
  bool quick = false;
  std::uint32_t block_tokens = 32;
  std::uint32_t threads = 2;
  std::uint32_t rounds = 15;
  std::string target = attention_targets().front();
};

struct Case {
  std::uint32_t rows;
  std::uint32_t keys;  // the rows' own included
  std::uint32_t layers;
};

constexpr std::uint32_t kHeads = 9;
constexpr std::uint32_t kKvHeads = 3;
constexpr std::uint32_t kHeadDim = 64;
constexpr std::size_t kTokenElements = kKvHeads * kHeadDim;

/// The KV of all layers in both layouts, and the queries.
class Data {
 public:
  Data(const Case& test, const Options& options) : test_(test) {
    geometry_ = {.layers = test.layers,
                 .kv_heads = kKvHeads,
                 .head_dim = kHeadDim,
                 .block_tokens = options.block_tokens};
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const std::size_t layer_elements = test.keys * kTokenElements;
    std::vector<float> k(layer_elements);
    std::vector<float> v(layer_elements);
    for (float& x : k) x = normal(random);
    for (float& x : v) x = normal(random);
    q.resize(std::size_t{test.rows} * kHeads * kHeadDim);
    for (float& x : q) x = normal(random);

    // Blocks lie in the arena in random order, as in a near tier that has been in use for a while.
    const std::uint32_t blocks = geometry_.blocks_for(test.keys);
    std::vector<std::size_t> slots(std::size_t{test.layers} * blocks);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    arena_.resize(slots.size() * 2 * geometry_.half_block_elements());
    dense_k.resize(test.layers * layer_elements);
    dense_v.resize(test.layers * layer_elements);
    views.resize(test.layers);
    for (std::uint32_t layer = 0; layer < test.layers; ++layer) {
      ggml_cpu_fp32_to_fp16(k.data(), dense_k.data() + layer * layer_elements,
                            static_cast<std::int64_t>(layer_elements));
      ggml_cpu_fp32_to_fp16(v.data(), dense_v.data() + layer * layer_elements,
                            static_cast<std::int64_t>(layer_elements));
      for (std::uint32_t block = 0; block < blocks; ++block) {
        views[layer].push_back(store_block(k, v, block, slots[std::size_t{layer} * blocks + block]));
      }
    }
  }

  std::vector<float> q;                         // [rows, heads, head_dim]
  std::vector<ggml_fp16_t> dense_k;             // [layer, token, kv_head, head_dim]
  std::vector<ggml_fp16_t> dense_v;             // the same
  std::vector<std::vector<KvBlockView>> views;  // [layer]

 private:
  KvBlockView store_block(const std::vector<float>& k, const std::vector<float>& v, std::uint32_t block,
                          std::size_t slot) {
    KvBlockView view;
    view.first_position = block * geometry_.block_tokens;
    view.tokens = std::min(geometry_.block_tokens, test_.keys - view.first_position);
    f16_bits* const block_k = arena_.data() + slot * 2 * geometry_.half_block_elements();
    f16_bits* const block_v = block_k + geometry_.half_block_elements();
    const std::size_t from = view.first_position * kTokenElements;
    store_tokens(geometry_, k.data() + from, v.data() + from, view.tokens, 0, block_k, block_v);
    view.k = block_k;
    view.v = block_v;
    return view;
  }

  Case test_;
  KvGeometry geometry_;
  std::vector<f16_bits> arena_;
};

/// A ggml graph with one attention node per layer.
class Graph {
 public:
  Graph(std::uint32_t threads, ggml_threadpool* pool) : threads_(threads), pool_(pool) {
    const ggml_init_params params = {
        .mem_size = std::size_t{1} << 20, .mem_buffer = nullptr, .no_alloc = true};
    context_.reset(ggml_init(params));
    graph_ = ggml_new_graph(context_.get());
  }

  ggml_context* context() { return context_.get(); }
  /// A tensor over memory of the caller.
  ggml_tensor* tensor(ggml_type type, std::initializer_list<std::int64_t> extents, void* data) {
    ggml_tensor* result = ggml_new_tensor(context(), type, static_cast<int>(extents.size()), extents.begin());
    result->data = data;
    return result;
  }
  void add(ggml_tensor* node) { ggml_build_forward_expand(graph_, node); }

  void compute() {
    ggml_cplan plan = ggml_graph_plan(graph_, static_cast<int>(threads_), pool_);
    if (work_.size() < plan.work_size) work_.resize(plan.work_size);
    plan.work_data = work_.data();
    DD_CHECK(ggml_graph_compute(graph_, &plan) == GGML_STATUS_SUCCESS);
  }

 private:
  struct Free {
    void operator()(ggml_context* context) const { ggml_free(context); }
  };
  std::uint32_t threads_;
  ggml_threadpool* pool_;
  std::unique_ptr<ggml_context, Free> context_;
  ggml_cgraph* graph_ = nullptr;
  std::vector<std::uint8_t> work_;
};

/// Flash attention as libllama builds it: K and V as views into a cache [token, kv_head, head_dim].
class TheirAttention {
 public:
  TheirAttention(const Case& test, Data& data, const Options& options, ggml_threadpool* pool)
      : out(data.q.size()), graph_(options.threads, pool), mask_(std::size_t{test.rows} * test.keys) {
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    const ggml_fp16_t visible = ggml_fp32_to_fp16(0.0f);
    for (std::uint32_t row = 0; row < test.rows; ++row) {
      const std::uint32_t position = test.keys - test.rows + row;
      for (std::uint32_t key = 0; key < test.keys; ++key) {
        mask_[std::size_t{row} * test.keys + key] = key <= position ? visible : hidden;
      }
    }
    ggml_context* context = graph_.context();
    ggml_tensor* q = ggml_permute(
        context, graph_.tensor(GGML_TYPE_F32, {kHeadDim, kHeads, test.rows}, data.q.data()), 0, 2, 1, 3);
    ggml_tensor* mask = graph_.tensor(GGML_TYPE_F16, {test.keys, test.rows}, mask_.data());
    for (std::uint32_t layer = 0; layer < test.layers; ++layer) {
      const std::size_t offset = layer * test.keys * kTokenElements;
      ggml_tensor* k =
          graph_.tensor(GGML_TYPE_F16, {kHeadDim, kKvHeads, test.keys}, data.dense_k.data() + offset);
      ggml_tensor* v =
          graph_.tensor(GGML_TYPE_F16, {kHeadDim, kKvHeads, test.keys}, data.dense_v.data() + offset);
      ggml_tensor* node = ggml_flash_attn_ext(context, q, ggml_permute(context, k, 0, 2, 1, 3),
                                              ggml_permute(context, v, 0, 2, 1, 3), mask,
                                              1.0f / std::sqrt(float{kHeadDim}), 0.0f, 0.0f);
      ggml_prec_set_acc(node, GGML_PREC_F32);
      node->data = out.data();
      graph_.add(node);
    }
  }
  void run() { graph_.compute(); }

  std::vector<float> out;  // [rows, heads, head_dim] of the last layer

 private:
  Graph graph_;
  std::vector<ggml_fp16_t> mask_;  // [row, key]
};

class OurAttention {
 public:
  OurAttention(const Case& test, const Data& data, const Options& options, ggml_threadpool* pool)
      : out(data.q.size()),
        threads_(options.threads),
        batches_(std::make_unique<AttentionBatch[]>(test.layers)),
        graph_(options.threads, pool) {
    shape_ = {.heads = kHeads,
              .kv_heads = kKvHeads,
              .head_dim = kHeadDim,
              .block_tokens = options.block_tokens,
              .scale = 1.0f / std::sqrt(float{kHeadDim})};
    for (std::uint32_t layer = 0; layer < test.layers; ++layer) {
      groups_.push_back({.blocks = data.views[layer],
                         .rows = test.rows,
                         .first_row_position = test.keys - test.rows,
                         .q = data.q.data(),
                         .out = out.data()});
      ggml_tensor* node = ggml_custom_4d(
          graph_.context(), GGML_TYPE_F32, kHeadDim, kHeads, test.rows, 1, nullptr, 0,
          [](ggml_tensor*, int thread, int, void* batch) {
            static_cast<AttentionBatch*>(batch)->run(static_cast<std::uint32_t>(thread));
          },
          GGML_N_TASKS_MAX, &batches_[layer]);
      node->data = out.data();
      graph_.add(node);
    }
  }
  void run() {
    for (std::size_t layer = 0; layer < groups_.size(); ++layer) {
      batches_[layer].plan(shape_, std::span(&groups_[layer], 1), threads_);
    }
    graph_.compute();
  }

  std::vector<float> out;  // [rows, heads, head_dim] of the last layer

 private:
  AttentionShape shape_;
  std::uint32_t threads_;
  std::unique_ptr<AttentionBatch[]> batches_;  // [layer]
  std::vector<AttentionGroup> groups_;         // [layer]
  Graph graph_;
};

template <typename Attention>
double milliseconds(Attention& attention) {
  const auto start = std::chrono::steady_clock::now();
  attention.run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double least(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

/// Prints one line; false if the two disagree.
bool compare(const Case& test, const Options& options, ggml_threadpool* pool) {
  Data data(test, options);
  TheirAttention theirs(test, data, options, pool);
  OurAttention ours(test, data, options, pool);
  std::vector<double> their_ms;
  std::vector<double> our_ms;
  std::vector<double> ratios;
  theirs.run();
  ours.run();
  for (std::uint32_t round = 0; round < options.rounds; ++round) {
    their_ms.push_back(milliseconds(theirs));
    our_ms.push_back(milliseconds(ours));
    ratios.push_back(their_ms.back() / our_ms.back());
  }
  float difference = 0;
  float largest = 0;
  for (std::size_t i = 0; i < ours.out.size(); ++i) {
    difference = std::max(difference, std::abs(ours.out[i] - theirs.out[i]));
    largest = std::max(largest, std::abs(theirs.out[i]));
  }
  const double bytes = static_cast<double>(test.layers) * test.keys * kTokenElements * 2 * sizeof(f16_bits);
  std::printf("%5u %6u %7u %9.3f %9.3f %9.3f %9.3f %7.2f %9.1f %8.1f %11.1e\n", test.rows, test.keys,
              test.layers, median(their_ms), least(their_ms), median(our_ms), least(our_ms), median(ratios),
              bytes / median(their_ms) / 1e6, bytes / median(our_ms) / 1e6, difference / largest);
  std::fflush(stdout);
  // ggml sums the values of few rows in f16; the reference for ours is in the unit tests.
  return difference <= 0.05f * largest;
}

int run(const Options& options) {
  std::vector<Case> cases;
  if (options.quick) {
    cases = {{1, 1024, 4}, {2, 1000, 4}, {64, 512, 2}};
  } else {
    for (const std::uint32_t rows : {1u, 2u}) {
      for (const std::uint32_t keys : {1024u, 2048u, 4096u, 8192u}) cases.push_back({rows, keys, 30});
    }
    cases.push_back({512, 512, 4});
    cases.push_back({512, 4096, 4});
  }

  force_attention_target(options.target);
  ggml_cpu_init();
  ggml_threadpool_params params = ggml_threadpool_params_default(static_cast<int>(options.threads));
  ggml_threadpool* pool = ggml_threadpool_new(&params);
  std::printf("%u threads, blocks of %u tokens, %s, medians of %u pairs\n", options.threads,
              options.block_tokens, options.target.c_str(), options.rounds);
  std::printf(
      " rows   keys  layers   ggml ms     least   ours ms     least   ratio ggml GB/s     ours  "
      "difference\n");
  bool agree = true;
  for (const Case& test : cases) agree = compare(test, options, pool) && agree;
  ggml_threadpool_free(pool);
  if (!agree) std::fprintf(stderr, "the two disagree by more than 5 %%\n");
  return agree ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace dualdecoder

int main(int argc, char** argv) {
  dualdecoder::Options options;
  CLI::App app("Our attention kernel against ggml's");
  app.add_flag("--quick", options.quick, "A small case of everything");
  app.add_option("--block-tokens", options.block_tokens, "Tokens of one KV block")
      ->check(CLI::PositiveNumber);
  app.add_option("--threads", options.threads)->check(CLI::PositiveNumber);
  CLI::Option* rounds = app.add_option("--rounds", options.rounds)->check(CLI::PositiveNumber);
  app.add_option("--target", options.target, "Instruction set");
  CLI11_PARSE(app, argc, argv);
  if (options.quick && rounds->count() == 0) options.rounds = 3;
  return dualdecoder::run(options);
}
