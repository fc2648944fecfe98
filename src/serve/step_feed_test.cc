#include "serve/step_feed.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

namespace dualdecoder {
namespace {

using nlohmann::json;
using std::chrono::microseconds;

StepSample sample_of(std::uint32_t layers, std::uint32_t blocks) {
  StepSample sample;
  sample.begin = StepSample::Time(microseconds(5'000'000));
  sample.end = sample.begin + microseconds(8000);
  sample.layers = layers;
  sample.blocks = blocks;
  sample.slot_bytes = 1000;
  sample.fates.assign(std::size_t{layers} * blocks, BlockFate::kFar);
  return sample;
}

json told(const StepSample& sample) {
  return json::parse(step_sample_json(sample, sample.end + microseconds(2000)));
}

TEST(StepSample, HasALetterForTheFateOfEachBlock) {
  StepSample sample = sample_of(2, 7);
  for (std::size_t i = 0; i < 7; ++i) sample.fates[7 + i] = static_cast<BlockFate>(i);
  const json map = told(sample)["sequence"]["map"];
  EXPECT_EQ(map["rows"], json({"-------", "-nasflm"}));
  EXPECT_EQ(map["blocks_per_column"], 1);
  // All but what is far, or only passes through staging.
  EXPECT_EQ(told(sample)["sequence"]["near_bytes"], 5 * 1000);
}

TEST(StepSample, PutsTheWorstOfSeveralBlocksIntoAColumnOfALongContext) {
  StepSample sample = sample_of(1, 2 * kMapColumns + 1);
  sample.fates[2] = BlockFate::kAttended;
  sample.fates[4] = BlockFate::kLate;
  sample.fates[5] = BlockFate::kAttended;
  sample.fates[2 * kMapColumns] = BlockFate::kNear;
  const json map = told(sample)["sequence"]["map"];
  EXPECT_EQ(map["blocks_per_column"], 3);
  const std::string row = map["rows"][0];
  EXPECT_EQ(row.size(), (2 * kMapColumns + 1 + 2) / 3);
  EXPECT_EQ(row.substr(0, 3), "al-");
  EXPECT_EQ(row.back(), 'n');
}

TEST(StepSample, TellsEventsFromTheBeginningOfTheStep) {
  StepSample sample = sample_of(1, 1);
  sample.events.push_back({.name = "attend",
                           .start = sample.begin + microseconds(10),
                           .end = sample.begin + microseconds(25),
                           .layer = 4});
  sample.events.push_back({.name = "demand",
                           .track = kReadTrack,
                           .start = sample.begin - microseconds(3),
                           .end = sample.begin + microseconds(4)});
  const json timeline = told(sample)["timeline"];
  EXPECT_EQ(timeline["names"], json({"attend", "demand"}));
  EXPECT_EQ(timeline["events"], json({{0, 0, 4, 10, 15}, {1, 1, -1, -3, 7}}));
  EXPECT_EQ(timeline["ms"], 8.0);
  EXPECT_EQ(told(sample)["age_ms"], 2.0);
}

}  // namespace
}  // namespace dualdecoder
