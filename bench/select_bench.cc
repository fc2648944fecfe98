// Choosing blocks by their digests: the exact scan against the groups, in f16 and int8; and what a block's
// digests take to make.
//
// The shape is SmolLM2-135M's: 9 query heads, 3 KV heads of 64, 30 layers with digests of their own, 32
// blocks chosen. Keys wander smoothly from token to token, queries stand near some of them and are new in
// each round. Before each round as much memory is read as a model's weights take, so that digests come from
// memory as they do between two steps. Printed are medians over the rounds, per layer and for all layers;
// recall is that of the exact scan's blocks. Several threads take layer after layer, as in a step that ranks
// many layers, and compete for the memory.
//
//   select_bench [--quick] [--target NAME] [--digest minmax|mean|principal] [--rounds N] [--count N]
//                [--threads N] [--blocks N,...]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/check.h"
#include "base/f16.h"
#include "base/statistics.h"
#include "select/score.h"
#include "select/select.h"

namespace dualdecoder {
namespace {

struct Options {
  bool quick = false;
  std::uint32_t rounds = 15;
  std::uint32_t count = 32;
  std::uint32_t threads = 1;
  std::vector<std::uint32_t> blocks = {256, 1024, 4096, 8192};
  std::string target = score_targets().front();
  std::string digest = "principal";

  DigestKind kind() const {
    return digest == "minmax" ? DigestKind::kMinMax
           : digest == "mean" ? DigestKind::kMean
                              : DigestKind::kPrincipal;
  }
};

constexpr std::uint32_t kHeads = 9;
constexpr std::uint32_t kKvHeads = 3;
constexpr std::uint32_t kHeadDim = 64;
constexpr std::uint32_t kBlockTokens = 32;
constexpr float kCorrelation = 0.998f;  // of a key with that of the token before
constexpr float kNoise = 0.5f;          // of a query around its key
constexpr std::size_t kWeightBytes = std::size_t{128} << 20;

/// Digests of all layers, and one key of each block to ask for.
class Data {
 public:
  Data(std::uint32_t layers, std::uint32_t blocks, const DigestOptions& options)
      : layers_(layers), blocks_(blocks) {
    const KvGeometry geometry = {
        .layers = layers, .kv_heads = kKvHeads, .head_dim = kHeadDim, .block_tokens = kBlockTokens};
    auto created = Digests::create(geometry, options, blocks);
    DD_CHECK(created.has_value(), "{}", created.error().message);
    digests = std::move(*created);
    constexpr std::size_t kVectors = kKvHeads * kHeadDim;
    keys_.resize(std::size_t{layers} * blocks * kVectors);
    std::vector<f16_bits> k(geometry.half_block_elements());
    std::vector<float> walk(kVectors);
    // A table of normal numbers: drawing each would take longer than all measurements.
    std::vector<float> noise(std::size_t{1} << 16);
    for (float& x : noise) x = normal_(random_);
    const float step = std::sqrt(1 - kCorrelation * kCorrelation);
    for (LayerIndex layer(0); layer.value < layers; ++layer) {
      for (float& x : walk) x = normal_(random_);
      for (std::uint32_t block = 0; block < blocks; ++block) {
        for (std::uint32_t t = 0; t < kBlockTokens; ++t) {
          const std::size_t at = random_() % (noise.size() - kVectors);
          for (std::size_t d = 0; d < kVectors; ++d) {
            walk[d] = kCorrelation * walk[d] + step * noise[at + d];
            k[d * kBlockTokens + t] = f16_from_float(walk[d]);
          }
        }
        std::copy(walk.begin(), walk.end(), key(layer, block));
        digests->add(layer, k.data());
      }
    }
  }

  std::unique_ptr<Digests> digests;
  std::vector<float> q;  // [layer, heads, head_dim]

  void draw_queries() {
    q.clear();
    for (LayerIndex layer(0); layer.value < layers_; ++layer) {
      for (std::uint32_t head = 0; head < kHeads; ++head) {
        const float* const from = key(layer, random_() % blocks_) + head / (kHeads / kKvHeads) * kHeadDim;
        for (std::uint32_t d = 0; d < kHeadDim; ++d) q.push_back(from[d] + kNoise * normal_(random_));
      }
    }
  }

 private:
  float* key(LayerIndex layer, std::uint32_t block) {
    return keys_.data() + (std::size_t{layer.value} * blocks_ + block) * kKvHeads * kHeadDim;
  }

  std::uint32_t layers_;
  std::uint32_t blocks_;
  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
  std::vector<float> keys_;  // [layer, block, kv_head, head_dim]
};

using Choice = void (Selector::*)(const Digests&, const SelectRequest&, std::vector<BlockIndex>&);

struct Run {
  double milliseconds = 0;  // all layers
  double bytes = 0;
  std::vector<std::vector<BlockIndex>> blocks;  // [layer]
};

/// Milliseconds from when all threads are there until the last of them has finished body(thread).
template <typename Body>
double time_on_threads(std::uint32_t threads, const Body& body) {
  std::atomic<std::uint32_t> there = 0;
  const auto begin = [&](std::uint32_t thread) {
    for (++there; there < threads;) {  // spins, as the threads of a step do
    }
    body(thread);
  };
  std::vector<std::jthread> others;
  for (std::uint32_t thread = 1; thread < threads; ++thread) others.emplace_back(begin, thread);
  while (there + 1 < threads) {
  }
  const auto start = std::chrono::steady_clock::now();
  begin(0);
  others.clear();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void choose(const Data& data, std::span<Selector> selectors, Choice choice, std::uint32_t count, Run& run) {
  const std::uint32_t layers = data.digests->geometry().layers;
  run.blocks.resize(layers);
  std::atomic<std::uint32_t> next = 0;
  std::atomic<std::size_t> bytes = 0;
  run.milliseconds = time_on_threads(static_cast<std::uint32_t>(selectors.size()), [&](std::uint32_t thread) {
    Selector& selector = selectors[thread];
    for (LayerIndex layer(next++); layer.value < layers; layer = LayerIndex(next++)) {
      const SelectRequest request = {.layer = layer,
                                     .q = data.q.data() + std::size_t{layer.value} * kHeads * kHeadDim,
                                     .heads = kHeads,
                                     .scale = 1.0f / std::sqrt(float{kHeadDim}),
                                     .end = BlockIndex(data.digests->blocks(layer)),
                                     .count = count};
      (selector.*choice)(*data.digests, request, run.blocks[layer.value]);
      bytes += selector.bytes_read();
    }
  });
  run.bytes = static_cast<double>(bytes);
}

double recall(const Run& found, const Run& wanted) {
  std::size_t both = 0;
  std::size_t all = 0;
  for (std::size_t layer = 0; layer < wanted.blocks.size(); ++layer) {
    for (const BlockIndex block : wanted.blocks[layer]) {
      both += std::binary_search(found.blocks[layer].begin(), found.blocks[layer].end(), block) ? 1 : 0;
    }
    all += wanted.blocks[layer].size();
  }
  return static_cast<double>(both) / static_cast<double>(all);
}

/// Prints two lines; false if the groups find less than half of the blocks.
bool compare(std::uint32_t layers, std::uint32_t blocks, const DigestOptions& digest, const Options& options,
             std::span<std::uint64_t> weights) {
  Data data(layers, blocks, digest);
  std::vector<Selector> selectors(options.threads);
  Run flat;
  Run groups;
  std::vector<double> flat_ms;
  std::vector<double> group_ms;
  std::vector<double> recalls;
  for (std::uint32_t round = 0; round <= options.rounds; ++round) {
    data.draw_queries();
    for (std::uint64_t& x : weights) ++x;
    choose(data, selectors, &Selector::select, options.count, groups);
    for (std::uint64_t& x : weights) ++x;
    choose(data, selectors, &Selector::select_flat, options.count, flat);
    if (round == 0) continue;  // grows the scratch memory
    flat_ms.push_back(flat.milliseconds);
    group_ms.push_back(groups.milliseconds);
    recalls.push_back(recall(groups, flat));
  }
  const double found = std::accumulate(recalls.begin(), recalls.end(), 0.0) / options.rounds;
  const auto print = [&](const char* name, const std::vector<double>& times, double bytes, double part) {
    const double ms = median(times);
    std::printf("%6u %5s %7s %9.1f %8.3f %8.3f %8.2f %6.1f %7.3f\n", blocks,
                digest.type == DigestType::kF16 ? "f16" : "int8", name, 1e3 * ms / layers, ms,
                *std::min_element(times.begin(), times.end()), bytes / 1e6, bytes / ms / 1e6, part);
  };
  print("flat", flat_ms, flat.bytes, 1);
  print("groups", group_ms, groups.bytes, found);
  std::fflush(stdout);
  return found > 0.5;
}

void measure_add(const DigestOptions& digest, const Options& options) {
  const KvGeometry geometry = {
      .layers = 1, .kv_heads = kKvHeads, .head_dim = kHeadDim, .block_tokens = kBlockTokens};
  constexpr std::uint32_t kBlocks = 256;
  auto digests = Digests::create(geometry, digest, kBlocks);
  DD_CHECK(digests.has_value(), "{}", digests.error().message);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<f16_bits> k(geometry.half_block_elements());
  for (f16_bits& x : k) x = f16_from_float(normal(random));
  std::vector<double> microseconds;
  for (std::uint32_t round = 0; round <= options.rounds; ++round) {
    (*digests)->truncate(0);
    const auto start = std::chrono::steady_clock::now();
    for (std::uint32_t block = 0; block < kBlocks; ++block) (*digests)->add(LayerIndex(0), k.data());
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    if (round > 0) microseconds.push_back(time.count() / kBlocks);
  }
  std::printf("add, %s: %.2f us per block and layer\n", digest.type == DigestType::kF16 ? "f16" : "int8",
              median(microseconds));
}

int run(const Options& options) {
  force_score_target(options.target);
  std::printf("threads: %u, %s, %s, %u blocks chosen, medians of %u rounds\n", options.threads,
              options.target.c_str(), options.digest.c_str(), options.count, options.rounds);
  std::printf("blocks  type    scan  us/layer   all ms    least  MB read   GB/s  recall\n");
  std::vector<std::uint64_t> weights((options.quick ? kWeightBytes / 32 : kWeightBytes) / 8);
  const std::uint32_t layers = options.quick ? 2 : 30;
  bool agree = true;
  for (const DigestType type : {DigestType::kF16, DigestType::kInt8}) {
    for (const std::uint32_t blocks : options.blocks) {
      agree = compare(layers, blocks, {.kind = options.kind(), .type = type}, options, weights) && agree;
    }
  }
  for (const DigestType type : {DigestType::kF16, DigestType::kInt8}) {
    measure_add({.kind = options.kind(), .type = type}, options);
  }
  if (!agree) std::fprintf(stderr, "the groups find less than half of the blocks\n");
  return agree ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace dualdecoder

int main(int argc, char** argv) {
  dualdecoder::Options options;
  CLI::App app("Choosing blocks by their digests");
  app.add_flag("--quick", options.quick, "A small case of everything");
  app.add_option("--target", options.target, "Instruction set");
  app.add_option("--digest", options.digest)->check(CLI::IsMember({"minmax", "mean", "principal"}));
  CLI::Option* rounds = app.add_option("--rounds", options.rounds)->check(CLI::PositiveNumber);
  app.add_option("--count", options.count, "Blocks chosen")->check(CLI::PositiveNumber);
  app.add_option("--threads", options.threads)->check(CLI::Range(1, 64));
  CLI::Option* blocks = app.add_option("--blocks", options.blocks, "Blocks to choose from")->delimiter(',');
  CLI11_PARSE(app, argc, argv);
  if (options.quick && rounds->count() == 0) options.rounds = 3;
  if (options.quick && blocks->count() == 0) options.blocks = {1024};
  return dualdecoder::run(options);
}
