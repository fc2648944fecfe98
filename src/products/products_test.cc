#include "products/products.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <gtest/gtest.h>

#include "products/format.h"
#include "products/kernel.h"

namespace dualdecoder {
namespace {

struct Format {
  WeightFormat format;
  ggml_type type;
};
constexpr Format kFormats[] = {
    {WeightFormat::kQ4_0, GGML_TYPE_Q4_0}, {WeightFormat::kQ4_1, GGML_TYPE_Q4_1},
    {WeightFormat::kQ5_0, GGML_TYPE_Q5_0}, {WeightFormat::kQ5_1, GGML_TYPE_Q5_1},
    {WeightFormat::kQ8_0, GGML_TYPE_Q8_0}, {WeightFormat::kQ4_K, GGML_TYPE_Q4_K},
    {WeightFormat::kQ5_K, GGML_TYPE_Q5_K}, {WeightFormat::kQ6_K, GGML_TYPE_Q6_K},
};
constexpr std::uint32_t kRowsMost = 33;
constexpr std::uint32_t kSeed = 20261130;

std::vector<float> normal(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

/// Activations as a model has them: rows of different size, a few outliers, a block of zeros.
std::vector<float> activations(std::uint32_t inputs, std::uint32_t rows, std::uint32_t seed) {
  std::vector<float> values = normal(std::size_t{inputs} * rows, seed);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] *= 1.0f + static_cast<float>(i / inputs) * 0.1f;
    if (i % 97 == 0) values[i] *= 20.0f;
    if (i < kBlockInputs) values[i] = 0.0f;
  }
  return values;
}

/// One matrix as in a file, and packed.
class Matrix {
 public:
  Matrix(const Format& format, std::uint32_t inputs, std::uint32_t outputs)
      : type(format.type), packed{.format = format.format, .inputs = inputs, .outputs = outputs} {
    const std::vector<float> values = normal(std::size_t{inputs} * outputs, kSeed + inputs + outputs);
    raw.resize(outputs * ggml_row_size(type, inputs));
    ggml_quantize_chunk(type, values.data(), raw.data(), 0, outputs, inputs, nullptr);
    pack();
  }
  Matrix(const Format& format, std::uint32_t inputs, std::uint32_t outputs, std::vector<std::byte> bytes)
      : raw(std::move(bytes)),
        type(format.type),
        packed{.format = format.format, .inputs = inputs, .outputs = outputs} {
    pack();
  }

  std::vector<float> dequantised(std::uint32_t output) const {
    std::vector<float> values(packed.inputs);
    ggml_get_type_traits(type)->to_float(raw.data() + output * ggml_row_size(type, packed.inputs),
                                         values.data(), packed.inputs);
    return values;
  }

  std::vector<std::byte> raw;
  ggml_type type;
  PackedMatrix packed;

 private:
  void pack() {
    storage_.resize(packed.bytes() + 64);
    std::byte* const data = storage_.data() + (64 - reinterpret_cast<std::uintptr_t>(storage_.data()) % 64);
    pack_panels(packed, raw.data(), 0, packed.panels(), data);
    packed.data = data;
  }
  std::vector<std::byte> storage_;
};

std::vector<ActivationBlock> quantised(const std::vector<float>& x) {
  std::vector<ActivationBlock> blocks(x.size() / kBlockInputs);
  quantise_activations(x.data(), blocks.size(), blocks.data());
  return blocks;
}

std::vector<float> product(const PackedMatrix& matrix, const ActivationBlock* x, std::uint32_t rows,
                           std::uint32_t parts = 1) {
  std::vector<float> out(std::size_t{rows} * matrix.outputs, std::nanf(""));
  const PackedMatrix* const one = &matrix;
  for (std::uint32_t part = 0; part < parts; ++part) multiply({&one, 1}, x, rows, part, parts, out.data());
  return out;
}

std::vector<float> ggml_product(const Matrix& matrix, std::vector<float> x, std::uint32_t rows) {
  const std::size_t outputs = matrix.packed.outputs;
  const std::unique_ptr<ggml_context, void (*)(ggml_context*)> context(
      ggml_init({.mem_size = std::size_t{1} << 20, .mem_buffer = nullptr, .no_alloc = true}), ggml_free);
  ggml_tensor* weights = ggml_new_tensor_2d(context.get(), matrix.type, matrix.packed.inputs, outputs);
  weights->data = const_cast<std::byte*>(matrix.raw.data());
  ggml_tensor* input = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, matrix.packed.inputs, rows);
  input->data = x.data();
  ggml_tensor* result = ggml_mul_mat(context.get(), weights, input);
  std::vector<float> out(outputs * rows);
  result->data = out.data();
  ggml_cgraph* graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, result);
  ggml_cplan plan = ggml_graph_plan(graph, 1, nullptr);
  std::vector<std::uint8_t> work(plan.work_size);
  plan.work_data = work.data();
  EXPECT_EQ(ggml_graph_compute(graph, &plan), GGML_STATUS_SUCCESS);
  return out;
}

/// Leaves the best instruction set behind.
class EveryTarget : public testing::Test {
 protected:
  ~EveryTarget() override { force_product_target(""); }
};

/// Sets that Highway gives no fused multiply-add.
bool rounds_twice(const std::string& target) {
  return target == "SSE4" || target == "SSSE3" || target == "EMU128";
}

TEST(PackedMatrix, TakesTheBytesOfTheOriginal) {
  for (const Format& format : kFormats) {
    const PackedMatrix matrix{.format = format.format, .inputs = 2304, .outputs = 640};
    EXPECT_EQ(matrix.bytes(), 640 * ggml_row_size(format.type, 2304)) << ggml_type_name(format.type);
    EXPECT_EQ(block_inputs(format.format), ggml_blck_size(format.type));
    EXPECT_EQ(block_bytes(format.format), ggml_type_size(format.type));
  }
}

TEST(PackedMatrix, IsTheSamePackedInOneOrInParts) {
  const Matrix matrix(kFormats[7], 512, 77);
  std::vector<std::byte> parts(matrix.packed.bytes());
  for (const auto& [first, last] : {std::pair{3u, 5u}, {0u, 1u}, {1u, 3u}}) {
    pack_panels(matrix.packed, matrix.raw.data(), first, last, parts.data());
  }
  EXPECT_TRUE(std::equal(parts.begin(), parts.end(), matrix.packed.data));
}

TEST(PackedMatrix, UnpacksToWhatWasPacked) {
  for (const Format& format : kFormats) {
    const Matrix matrix(format, 512, 37);
    const std::size_t bytes = block_bytes(format.format);
    const std::uint32_t blocks = 512 / block_inputs(format.format);
    for (std::uint32_t output = 0; output < 48; ++output) {
      const std::byte* const panel =
          matrix.packed.data + output / kPanelOutputs * matrix.packed.panel_bytes();
      for (std::uint32_t b = 0; b < blocks; ++b) {
        WeightBlock expected{};
        if (output < 37)
          read_block(format.format, matrix.raw.data() + (output * blocks + b) * bytes, expected);
        WeightBlock got;
        unpack_block(format.format, panel, b, output % kPanelOutputs, got);
        ASSERT_EQ(std::memcmp(&got, &expected, sizeof(got)), 0)
            << ggml_type_name(format.type) << " " << output;
      }
    }
  }
}

// Any bits that a file can hold, and each value of the integers in particular.
TEST(ReadBlock, GivesWhatGgmlDequantises) {
  std::mt19937 random(kSeed);
  for (const Format& format : kFormats) {
    const FormatTraits traits = format_traits(format.format);
    for (int round = 0; round < 200; ++round) {
      std::vector<std::byte> bytes(traits.bytes);
      for (std::byte& byte : bytes) byte = std::byte(random());
      const f16_bits scale = f16_from_float(0.75f);
      std::memcpy(bytes.data() + (format.type == GGML_TYPE_Q6_K ? 208 : 0), &scale, 2);
      if (traits.offset) std::memcpy(bytes.data() + 2, &scale, 2);
      std::vector<float> expected(traits.inputs);
      ggml_get_type_traits(format.type)->to_float(bytes.data(), expected.data(), traits.inputs);
      WeightBlock block{};
      read_block(format.format, bytes.data(), block);
      for (std::uint32_t i = 0; i < traits.inputs; ++i) {
        const float q = traits.bits == 8 ? static_cast<std::int8_t>(block.q[i])
                                         : static_cast<float>(block.q[i]) - static_cast<float>(traits.centre);
        const float s = traits.scaled == 0 ? 1.0f : block.scales[i / traits.scaled];
        float value = 0.75f * s * q;
        if (traits.offset && traits.scaled == 0) value += 0.75f;
        if (traits.offset && traits.scaled != 0) value -= 0.75f * block.offsets[i / 32];
        ASSERT_EQ(value, expected[i]) << ggml_type_name(format.type) << " value " << i;
      }
    }
  }
}

TEST_F(EveryTarget, QuantisesAsTheReference) {
  std::vector<float> x = activations(1536, 33, kSeed);
  x[100] = 1e-38f;
  std::fill_n(x.begin() + 128, 32, 1e-35f);
  std::fill_n(x.begin() + 160, 32, -3e38f);
  const std::size_t blocks = x.size() / kBlockInputs;
  std::vector<ActivationBlock> expected(blocks);
  quantise_reference(x.data(), blocks, expected.data());
  for (const std::string& target : product_targets()) {
    force_product_target(target);
    const std::vector<ActivationBlock> got = quantised(x);
    for (std::size_t b = 0; b < blocks; ++b) {
      ASSERT_EQ(std::memcmp(&got[b], &expected[b], sizeof(ActivationBlock)), 0) << target << " block " << b;
    }
  }
}

TEST_F(EveryTarget, GivesTheBitsOfTheReferenceOrRoundsTwice) {
  for (const Format& format : kFormats) {
    for (const auto& [inputs, outputs] : {std::pair{1536u, 48u}, {768u, 21u}, {256u, 1u}}) {
      const Matrix matrix(format, inputs, outputs);
      const std::vector<ActivationBlock> x = quantised(activations(inputs, kRowsMost, kSeed));
      std::vector<float> expected(std::size_t{kRowsMost} * outputs);
      multiply_reference(matrix.packed, x.data(), kRowsMost, 0, matrix.packed.panels(), expected.data());
      const float largest =
          std::abs(*std::ranges::max_element(expected, {}, [](float value) { return std::abs(value); }));
      for (const std::string& target : product_targets()) {
        force_product_target(target);
        const std::vector<float> got = product(matrix.packed, x.data(), kRowsMost);
        for (std::size_t i = 0; i < got.size(); ++i) {
          if (rounds_twice(target)) {
            ASSERT_NEAR(got[i], expected[i], 2e-6f * largest) << target << " " << ggml_type_name(format.type);
          } else {
            ASSERT_EQ(got[i], expected[i])
                << target << " " << ggml_type_name(format.type) << " element " << i;
          }
        }
      }
    }
  }
}

// The largest magnitudes of weights and activations, where sums of 16 bits come nearest to their limit.
TEST_F(EveryTarget, IsExactAtTheLimitsOfItsIntegers) {
  std::mt19937 random(kSeed);
  for (const Format& format : kFormats) {
    const FormatTraits traits = format_traits(format.format);
    for (int round = 0; round < 64; ++round) {
      std::vector<std::byte> bytes(kPanelOutputs * traits.bytes * (256 / traits.inputs));
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        const bool same = round < 4 || random() % 4 != 0;
        const std::byte extreme = std::byte(round % 2 == 0 ? 0x00 : 0xff);
        bytes[i] = same ? extreme : ~extreme;
        if (format.type == GGML_TYPE_Q8_0) bytes[i] = std::byte(bytes[i] == std::byte(0) ? 0x80 : 0x7f);
        if (format.type == GGML_TYPE_Q6_K && i % 210 >= 192)
          bytes[i] = std::byte(round % 3 == 0 ? 0x80 : 0x7f);
      }
      const f16_bits one = f16_from_float(1.0f);
      for (std::size_t block = 0; block < bytes.size(); block += traits.bytes) {
        std::memcpy(bytes.data() + block + (format.type == GGML_TYPE_Q6_K ? 208 : 0), &one, 2);
        if (traits.offset) std::memcpy(bytes.data() + block + 2, &one, 2);
      }
      const Matrix matrix(format, 256, kPanelOutputs, bytes);
      std::vector<float> x(256 * 5);
      for (float& value : x) value = (round < 8 ? round / 2 % 2 : random() % 2) == 0 ? 127.0f : -127.0f;
      const std::vector<ActivationBlock> blocks = quantised(x);
      std::vector<float> expected(5 * kPanelOutputs);
      multiply_reference(matrix.packed, blocks.data(), 5, 0, 1, expected.data());
      for (const std::string& target : product_targets()) {
        force_product_target(target);
        const std::vector<float> got = product(matrix.packed, blocks.data(), 5);
        for (std::size_t i = 0; i < got.size(); ++i) {
          // Every product is exact: rounding once or twice gives the same.
          ASSERT_EQ(got[i], expected[i])
              << target << " " << ggml_type_name(format.type) << " round " << round;
        }
      }
    }
  }
}

TEST_F(EveryTarget, GivesARowTheSameBitsInAnyCompanyAndDivision) {
  for (const Format& format : kFormats) {
    const Matrix matrix(format, 768, 133);
    const std::size_t stride = matrix.packed.inputs / kBlockInputs;
    const std::vector<ActivationBlock> x = quantised(activations(768, 70, kSeed));
    for (const std::string& target : product_targets()) {
      force_product_target(target);
      std::vector<float> alone;
      for (std::uint32_t row = 0; row < 70; ++row) {
        const std::vector<float> one = product(matrix.packed, x.data() + row * stride, 1);
        alone.insert(alone.end(), one.begin(), one.end());
      }
      for (const std::uint32_t rows :
           {2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 10u, 11u, 12u, 13u, 14u, 15u, 16u, 33u, 70u}) {
        for (const std::uint32_t parts : {1u, 2u, 3u, 16u}) {
          const std::vector<float> together = product(matrix.packed, x.data(), rows, parts);
          ASSERT_TRUE(std::equal(together.begin(), together.end(), alone.begin()))
              << target << " " << ggml_type_name(format.type) << ", " << rows << " rows, " << parts
              << " parts";
        }
      }
    }
  }
}

TEST_F(EveryTarget, GivesMatricesOfOneInputTheSameBitsTogether) {
  const Matrix matrices[] = {Matrix(kFormats[0], 768, 133), Matrix(kFormats[7], 768, 16),
                             Matrix(kFormats[5], 768, 50)};
  const std::vector<const PackedMatrix*> group{&matrices[0].packed, &matrices[1].packed, &matrices[2].packed};
  for (const std::uint32_t rows : {1u, 2u, 13u}) {
    const std::vector<ActivationBlock> x = quantised(activations(768, rows, kSeed));
    std::vector<float> alone;
    for (const Matrix& matrix : matrices) {
      const std::vector<float> one = product(matrix.packed, x.data(), rows);
      alone.insert(alone.end(), one.begin(), one.end());
    }
    for (const std::uint32_t parts : {1u, 2u, 3u, 40u}) {
      std::vector<float> together(alone.size(), std::nanf(""));
      for (std::uint32_t part = 0; part < parts; ++part) {
        multiply(group, x.data(), rows, part, parts, together.data());
      }
      ASSERT_EQ(together, alone) << rows << " rows, " << parts << " parts";
    }
  }
}

TEST_F(EveryTarget, AddsRowsOrABiasToTheProduct) {
  constexpr std::uint32_t kRows = 5;
  const Matrix matrix(kFormats[0], 256, 133);
  const std::vector<ActivationBlock> x = quantised(activations(256, kRows, kSeed));
  const std::vector<float> alone = product(matrix.packed, x.data(), kRows);
  const std::vector<float> addend = activations(133, kRows, kSeed + 1);
  for (const std::size_t stride : {std::size_t{0}, std::size_t{133}}) {
    for (const std::uint32_t parts : {1u, 2u, 3u, 40u}) {
      std::vector<float> sum(alone.size(), std::nanf(""));
      for (std::uint32_t part = 0; part < parts; ++part) {
        multiply_add(matrix.packed, x.data(), kRows, addend.data(), stride, part, parts, sum.data());
      }
      for (std::size_t row = 0; row < kRows; ++row) {
        for (std::size_t i = 0; i < 133; ++i) {
          ASSERT_EQ(sum[row * 133 + i], alone[row * 133 + i] + addend[row * stride + i])
              << parts << " parts, stride " << stride << ", row " << row << ", output " << i;
        }
      }
    }
  }
}

struct Error {
  double squares = 0.0;
  double largest = 0.0;
  void add(double difference) {
    squares += difference * difference;
    largest = std::max(largest, std::abs(difference));
  }
};

/// Against double precision on the dequantised weights: ours, and ggml's in the same product.
std::pair<Error, Error> errors(const Matrix& matrix, std::uint32_t rows, std::uint32_t outputs_checked) {
  const std::vector<float> x = activations(matrix.packed.inputs, rows, kSeed + rows);
  const std::vector<float> ours = product(matrix.packed, quantised(x).data(), rows);
  const std::vector<float> theirs = ggml_product(matrix, x, rows);
  std::pair<Error, Error> result;
  const std::uint32_t outputs = matrix.packed.outputs;
  for (std::uint32_t i = 0; i < outputs_checked; ++i) {
    const auto output = static_cast<std::uint32_t>(std::uint64_t{i} * (outputs - 1) / (outputs_checked - 1));
    const std::vector<float> weights = matrix.dequantised(output);
    for (std::uint32_t row = 0; row < rows; ++row) {
      double exact = 0.0;
      for (std::uint32_t k = 0; k < matrix.packed.inputs; ++k) {
        exact += static_cast<double>(weights[k]) * x[std::size_t{row} * matrix.packed.inputs + k];
      }
      result.first.add(ours[std::size_t{row} * outputs + output] - exact);
      result.second.add(theirs[std::size_t{row} * outputs + output] - exact);
    }
  }
  return result;
}

// Both round activations to 8 bits and make nearly the same errors; what differs is the precision of the
// scale, and how many values share it. Single products differ by chance; all of a format together must not be
// worse.
TEST(Multiply, IsNoFurtherFromDoublePrecisionThanGgml) {
  ggml_cpu_init();
  for (const Format& format : kFormats) {
    Error ours;
    Error theirs;
    for (const std::uint32_t inputs : {576u, 640u, 896u, 1024u, 1152u, 1536u, 2048u, 2304u}) {
      if (inputs % block_inputs(format.format) != 0) continue;
      for (const std::uint32_t outputs : {192u, 250u, 576u}) {
        const Matrix matrix(format, inputs, outputs);
        for (std::uint32_t rows = 1; rows <= kRowsMost; rows += outputs == 192 ? 1 : 8) {
          const auto [our, their] = errors(matrix, rows, 24);
          EXPECT_LE(std::sqrt(our.squares), 1.05 * std::sqrt(their.squares))
              << ggml_type_name(format.type) << " " << inputs << " x " << outputs << ", " << rows << " rows";
          ours.squares += our.squares;
          theirs.squares += their.squares;
          ours.largest = std::max(ours.largest, our.largest);
          theirs.largest = std::max(theirs.largest, their.largest);
        }
      }
    }
    EXPECT_LE(ours.squares, theirs.squares) << ggml_type_name(format.type);
    fmt::print("{:5} errors, ours / ggml's: {:.4f} in the mean square root, {:.4f} the largest\n",
               ggml_type_name(format.type), std::sqrt(ours.squares / theirs.squares),
               ours.largest / theirs.largest);
  }
}

// Output matrices, with places beyond 2^26 bytes.
TEST(Multiply, ReachesTheEndOfTheLargestMatrices) {
  ggml_cpu_init();
  for (const auto& [inputs, outputs] : {std::pair{576u, 49152u}, {640u, 262144u}}) {
    for (const Format& format : {kFormats[0], kFormats[4]}) {
      constexpr std::uint32_t kDistinct = 251;
      const Matrix pattern(format, inputs, kDistinct);
      const std::size_t row_bytes = pattern.raw.size() / kDistinct;
      std::vector<std::byte> raw;
      raw.reserve(outputs * row_bytes);
      for (std::uint32_t output = 0; output < outputs; ++output) {
        const auto from = pattern.raw.begin() + static_cast<std::ptrdiff_t>(output % kDistinct * row_bytes);
        raw.insert(raw.end(), from, from + static_cast<std::ptrdiff_t>(row_bytes));
      }
      const Matrix matrix(format, inputs, outputs, std::move(raw));
      const std::vector<ActivationBlock> x = quantised(activations(inputs, 2, kSeed));
      const std::vector<float> expected = product(pattern.packed, x.data(), 2);
      const std::vector<float> got = product(matrix.packed, x.data(), 2, 2);
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i], expected[i / outputs * kDistinct + i % outputs % kDistinct]) << i;
      }
    }
  }
}

}  // namespace
}  // namespace dualdecoder
