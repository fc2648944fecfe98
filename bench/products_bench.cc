// Our products of quantised weights against ggml_mul_mat on ggml's repacked buffers, both as nodes of a ggml
// graph on the same thread pool.
//
// One run is every matrix of a decode step of SmolLM2-135M once: Q, K, V, output, gate, up and down of 30
// layers, and the output matrix, all in one format. Formats of 256 inputs a block have no matrix of 576
// inputs; they take 512 instead. Matrices of one input are one node of ours, as in the engine. Each matrix
// has memory of its own, so that a step reads from memory and not from a cache. Runs alternate in pairs;
// printed are medians, and the median of the pairs' ratios. Ours includes quantising the activations. GB/s
// counts the weights read once; the share is of the rate at which the same threads read a large buffer in the
// same round.
//
//   products_bench [--quick] [--threads N] [--target NAME] [--rounds N] [--format NAME,...] [--rows N,...]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <CLI/CLI.hpp>

#include "base/anonymous_memory.h"
#include "base/check.h"
#include "base/statistics.h"
#include "model/graph_builder.h"
#include "products/products.h"

namespace dualdecoder {
namespace {

struct Format {
  const char* name;
  WeightFormat format;
  ggml_type type;
};
constexpr Format kFormats[] = {
    {"Q4_0", WeightFormat::kQ4_0, GGML_TYPE_Q4_0}, {"Q4_1", WeightFormat::kQ4_1, GGML_TYPE_Q4_1},
    {"Q5_0", WeightFormat::kQ5_0, GGML_TYPE_Q5_0}, {"Q5_1", WeightFormat::kQ5_1, GGML_TYPE_Q5_1},
    {"Q8_0", WeightFormat::kQ8_0, GGML_TYPE_Q8_0}, {"Q4_K", WeightFormat::kQ4_K, GGML_TYPE_Q4_K},
    {"Q5_K", WeightFormat::kQ5_K, GGML_TYPE_Q5_K}, {"Q6_K", WeightFormat::kQ6_K, GGML_TYPE_Q6_K},
};

struct Options {
  bool quick = false;
  std::uint32_t threads = 2;
  std::uint32_t rounds = 15;
  std::string target = product_targets().front();
  std::vector<std::string> formats;
  std::vector<std::uint32_t> rows;
};

/// Products that read the same activations.
struct Group {
  std::uint32_t inputs;
  std::vector<std::uint32_t> outputs;
};

std::vector<Group> step_groups(const Format& format, bool quick) {
  const std::uint32_t width = 576 / block_inputs(format.format) * block_inputs(format.format);
  std::vector<Group> groups;
  for (std::uint32_t layer = 0; layer < (quick ? 1u : 30u); ++layer) {
    groups.push_back({width, {576, 192, 192}});
    groups.push_back({width, {576}});
    groups.push_back({width, {1536, 1536}});
    groups.push_back({1536, {576}});
  }
  groups.push_back({width, {quick ? 1000u : 49152u}});
  return groups;
}

constexpr std::uint32_t kInputsMax = 1536;
constexpr std::uint32_t kDistinctOutputs = 64;

double seconds(auto&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// ggml's CPU backend with a thread pool that stays.
class Backend {
 public:
  explicit Backend(std::uint32_t threads) : backend_(ggml_backend_cpu_init()) {
    ggml_threadpool_params params = ggml_threadpool_params_default(static_cast<int>(threads));
    pool_.reset(ggml_threadpool_new(&params));
    ggml_backend_cpu_set_n_threads(backend_.get(), static_cast<int>(threads));
    ggml_backend_cpu_set_threadpool(backend_.get(), pool_.get());
  }
  void compute(ggml_cgraph* graph) {
    DD_CHECK(ggml_backend_graph_compute(backend_.get(), graph) == GGML_STATUS_SUCCESS);
  }
  /// libllama's rule: the first extra buffer type in which the backend supports the product.
  ggml_backend_buffer_type_t buffer_type(ggml_tensor* product) const {
    ggml_backend_dev_t device = ggml_backend_get_device(backend_.get());
    using GetExtraTypes = ggml_backend_buffer_type_t* (*)(ggml_backend_dev_t);
    const auto get = reinterpret_cast<GetExtraTypes>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
    for (auto* type = get == nullptr ? nullptr : get(device); type != nullptr && *type != nullptr; ++type) {
      const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(*type, 0));
      product->src[0]->buffer = empty.get();
      const bool supported = ggml_backend_dev_supports_op(device, product);
      product->src[0]->buffer = nullptr;
      if (supported) return *type;
    }
    return ggml_backend_cpu_buffer_type();
  }

 private:
  struct FreePool {
    void operator()(ggml_threadpool* pool) const { ggml_threadpool_free(pool); }
  };
  std::unique_ptr<ggml_threadpool, FreePool> pool_;
  ggml_backend_ptr backend_;
};

/// Random rows in a format; matrices repeat them.
class Rows {
 public:
  Rows(const Format& format, std::uint32_t inputs) : row_bytes_(ggml_row_size(format.type, inputs)) {
    std::mt19937 random(inputs);
    std::normal_distribution<float> normal;
    std::vector<float> values(std::size_t{inputs} * kDistinctOutputs);
    for (float& value : values) value = normal(random);
    bytes_.resize(kDistinctOutputs * row_bytes_);
    ggml_quantize_chunk(format.type, values.data(), bytes_.data(), 0, kDistinctOutputs, inputs, nullptr);
  }
  std::vector<std::byte> matrix(std::uint32_t outputs) const {
    std::vector<std::byte> result(outputs * row_bytes_);
    for (std::size_t done = 0; done < result.size(); done += bytes_.size()) {
      std::memcpy(result.data() + done, bytes_.data(), std::min(bytes_.size(), result.size() - done));
    }
    return result;
  }

 private:
  std::size_t row_bytes_;
  std::vector<std::byte> bytes_;
};

/// The weights of a step in both forms.
class BothWeights {
 public:
  BothWeights(const Format& of, const std::vector<Group>& groups_of, const Backend& backend) : format(of) {
    std::size_t count = 0;
    for (const Group& group : groups_of) count += group.outputs.size();
    context_.reset(ggml_init(
        {.mem_size = (count + 8) * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true}));
    for (const Group& group : groups_of) {
      for (const std::uint32_t outputs : group.outputs) {
        packed.push_back({.format = format.format, .inputs = group.inputs, .outputs = outputs});
        theirs.push_back(ggml_new_tensor_2d(context_.get(), format.type, group.inputs, outputs));
        bytes += packed.back().bytes();
      }
    }
    {
      const ggml_context_ptr probe(
          ggml_init({.mem_size = 4 * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true}));
      ggml_tensor* weight = ggml_new_tensor_2d(probe.get(), format.type, groups_of[0].inputs, 576);
      ggml_tensor* input = ggml_new_tensor_2d(probe.get(), GGML_TYPE_F32, groups_of[0].inputs, 512);
      ggml_backend_buffer_type_t type = backend.buffer_type(ggml_mul_mat(probe.get(), weight, input));
      buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), type));
      buffer_name = ggml_backend_buft_name(type);
    }
    ours_ = AnonymousMemory::map(bytes + 64 * packed.size());
    DD_CHECK(buffer_ && ours_.data() != nullptr);
    std::byte* to = ours_.data();
    for (std::size_t i = 0; i < packed.size(); ++i) {
      const std::vector<std::byte> raw = Rows(format, packed[i].inputs).matrix(packed[i].outputs);
      ggml_backend_tensor_set(theirs[i], raw.data(), 0, raw.size());
      pack_panels(packed[i], raw.data(), 0, packed[i].panels(), to);
      packed[i].data = to;
      to += (packed[i].bytes() + 63) / 64 * 64;
    }
    const PackedMatrix* next = packed.data();
    for (const Group& members : groups_of) {
      MatrixGroup& group = groups.emplace_back();
      for (std::size_t i = 0; i < members.outputs.size(); ++i) group.packed.push_back(next++);
    }
  }

  Format format;
  std::vector<PackedMatrix> packed;
  std::vector<MatrixGroup> groups;  // of these
  std::vector<ggml_tensor*> theirs;
  std::size_t bytes = 0;
  std::string buffer_name;

 private:
  ggml_context_ptr context_;
  ggml_backend_buffer_ptr buffer_;
  AnonymousMemory ours_;
};

/// One step as a graph: every product of `rows` rows, all results kept.
class Step {
 public:
  Step(const BothWeights& weights, const std::vector<Group>& groups, std::uint32_t rows, bool ours,
       Backend& backend)
      : backend_(backend) {
    const std::size_t nodes = 2 * weights.packed.size() + 2 * groups.size() + 8;
    context_.reset(
        ggml_init({.mem_size = nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false),
                   .mem_buffer = nullptr,
                   .no_alloc = true}));
    graph_ = ggml_new_graph_custom(context_.get(), nodes, false);
    std::vector<ggml_tensor*> inputs;
    const Hyperparameters none;
    GraphBuilder builder(context_.get(), none, nullptr, false, products_);
    std::size_t m = 0;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      ggml_tensor* input = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, groups[g].inputs, rows);
      inputs.push_back(input);
      const std::size_t count = groups[g].outputs.size();
      if (ours) {
        for (ggml_tensor* result : builder.products(weights.groups[g], input)) results.push_back(result);
      } else {
        for (std::size_t i = m; i < m + count; ++i) {
          results.push_back(ggml_mul_mat(context_.get(), weights.theirs[i], input));
        }
      }
      m += count;
      for (std::size_t i = results.size() - count; i < results.size(); ++i) {
        ggml_build_forward_expand(graph_, results[i]);
      }
    }
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), ggml_backend_cpu_buffer_type()));
    DD_CHECK(buffer_);
    std::mt19937 random(rows);
    std::normal_distribution<float> normal;
    std::vector<float> values(std::size_t{kInputsMax} * rows);
    for (float& value : values) value = normal(random);
    for (ggml_tensor* input : inputs) std::memcpy(input->data, values.data(), ggml_nbytes(input));
  }
  void run() { backend_.compute(graph_); }

  std::vector<ggml_tensor*> results;

 private:
  Backend& backend_;
  ggml_context_ptr context_;
  ggml_backend_buffer_ptr buffer_;
  ggml_cgraph* graph_ = nullptr;
  std::deque<PackedProduct> products_;
};

/// All threads together read a buffer larger than the caches, of 512 MiB.
class Reading {
 public:
  Reading(Backend& backend, bool quick) : backend_(backend) {
    memory_ = AnonymousMemory::map(std::size_t{quick ? 4u : 512u} << 20);
    DD_CHECK(memory_.data() != nullptr);
    std::memset(memory_.data(), 1, memory_.bytes());
    context_.reset(ggml_init({.mem_size = std::size_t{1} << 20, .mem_buffer = nullptr, .no_alloc = false}));
    ggml_tensor* node = ggml_custom_4d(context_.get(), GGML_TYPE_I64, 64, 1, 1, 1, nullptr, 0, read_part,
                                       GGML_N_TASKS_MAX, &memory_);
    graph_ = ggml_new_graph(context_.get());
    ggml_build_forward_expand(graph_, node);
  }
  void run() { backend_.compute(graph_); }
  std::size_t bytes() const { return memory_.bytes(); }

 private:
  static void read_part(ggml_tensor* to, int thread, int threads, void* user) {
    const AnonymousMemory& from = *static_cast<const AnonymousMemory*>(user);
    const std::size_t words = from.bytes() / 8 / static_cast<std::size_t>(threads);
    const auto* first =
        reinterpret_cast<const std::uint64_t*>(from.data()) + words * static_cast<std::size_t>(thread);
    std::uint64_t sums[8] = {};
    for (std::size_t i = 0; i + 8 <= words; i += 8) {
      for (std::size_t k = 0; k < 8; ++k) sums[k] += first[i + k];
    }
    for (const std::uint64_t sum : sums) static_cast<std::uint64_t*>(to->data)[thread % 64] += sum;
  }

  Backend& backend_;
  AnonymousMemory memory_;
  ggml_context_ptr context_;
  ggml_cgraph* graph_ = nullptr;
};

/// The largest difference of the two, as a share of the largest result.
double difference(const Step& ours, const Step& theirs) {
  double worst = 0.0;
  for (std::size_t i = 0; i < ours.results.size(); ++i) {
    const auto* a = static_cast<const float*>(ours.results[i]->data);
    const auto* b = static_cast<const float*>(theirs.results[i]->data);
    float largest = 0.0f;
    float apart = 0.0f;
    for (std::int64_t k = 0; k < ggml_nelements(ours.results[i]); ++k) {
      largest = std::max(largest, std::abs(b[k]));
      apart = std::max(apart, std::abs(a[k] - b[k]));
    }
    worst = std::max(worst, static_cast<double>(apart) / static_cast<double>(largest));
  }
  return worst;
}

/// Prints a line for each number of rows; false if the two disagree.
bool compare(const Format& format, const Options& options, Reading& reading, Backend& backend) {
  const std::vector<Group> groups = step_groups(format, options.quick);
  const BothWeights weights(format, groups, backend);
  bool agree = true;
  double one_row = 0.0;
  for (const std::uint32_t rows : options.rows) {
    Step ours(weights, groups, rows, true, backend);
    Step theirs(weights, groups, rows, false, backend);
    ours.run();
    theirs.run();
    std::vector<double> our_ms;
    std::vector<double> their_ms;
    std::vector<double> ratios;
    std::vector<double> shares;  // of the rate at which memory is read in the same round
    const std::uint32_t rounds = rows > 64 ? std::min(options.rounds, 5u) : options.rounds;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      their_ms.push_back(1e3 * seconds([&] { theirs.run(); }));
      our_ms.push_back(1e3 * seconds([&] { ours.run(); }));
      ratios.push_back(their_ms.back() / our_ms.back());
      const double read_ms = 1e3 * seconds([&] { reading.run(); });
      shares.push_back(static_cast<double>(weights.bytes) / static_cast<double>(reading.bytes()) * read_ms /
                       our_ms.back());
    }
    const double ms = median(our_ms);
    if (rows == 1) one_row = ms;
    const double rate = static_cast<double>(weights.bytes) / ms / 1e6;
    const double apart = difference(ours, theirs);
    agree = agree && apart < 0.02;
    std::printf("%-5s %5u %9.3f %9.3f %7.2f %8.2f %7.1f %6.0f%% %11.1e  %s\n", format.name, rows,
                median(their_ms), ms, median(ratios), one_row > 0.0 ? ms / one_row : 0.0, rate,
                100.0 * median(shares), apart, weights.buffer_name.c_str());
    std::fflush(stdout);
  }
  return agree;
}

int run(const Options& options) {
  force_product_target(options.target);
  Backend backend(options.threads);
  Reading reading(backend, options.quick);
  std::printf("%u threads, %s, medians of %u pairs\n", options.threads, options.target.c_str(),
              options.rounds);
  std::printf(
      "format  rows   ggml ms   ours ms   ratio  to 1 row   GB/s   share  difference  ggml's buffer\n");
  bool agree = true;
  for (const Format& format : kFormats) {
    if (!options.formats.empty() &&
        std::ranges::find(options.formats, format.name) == options.formats.end()) {
      continue;
    }
    agree = compare(format, options, reading, backend) && agree;
  }
  if (!agree) std::fprintf(stderr, "the two disagree by more than 2 %%\n");
  return agree ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace dualdecoder

int main(int argc, char** argv) {
  dualdecoder::Options options;
  CLI::App app("Our products of quantised weights against ggml's");
  app.add_flag("--quick", options.quick, "A small case of everything");
  app.add_option("--threads", options.threads)->check(CLI::PositiveNumber);
  CLI::Option* rounds = app.add_option("--rounds", options.rounds)->check(CLI::PositiveNumber);
  app.add_option("--target", options.target, "Instruction set");
  app.add_option("--format", options.formats, "Formats to measure; all if not given")->delimiter(',');
  app.add_option("--rows", options.rows, "Rows of a step")->delimiter(',')->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (options.quick && rounds->count() == 0) options.rounds = 3;
  if (options.rows.empty()) {
    options.rows = options.quick ? std::vector<std::uint32_t>{1, 3, 33}
                                 : std::vector<std::uint32_t>{1, 2, 4, 8, 16, 32, 512};
  }
  return dualdecoder::run(options);
}
