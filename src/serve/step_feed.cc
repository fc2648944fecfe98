#include "serve/step_feed.h"

#include <algorithm>
#include <map>
#include <utility>

#include <boost/asio/post.hpp>
#include <nlohmann/json.hpp>

namespace dualdecoder {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

constexpr const char* kFateLetters = "-nasflm";  // of BlockFate

double milliseconds(std::chrono::nanoseconds duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

double milliseconds(std::uint64_t ns) { return static_cast<double>(ns) * 1e-6; }

ordered_json map_json(const StepSample& sample) {
  const std::uint32_t each = std::max(1U, (sample.blocks + kMapColumns - 1) / kMapColumns);
  ordered_json rows = ordered_json::array();
  for (std::uint32_t layer = 0; layer < sample.layers; ++layer) {
    const auto row = std::span(sample.fates).subspan(std::size_t{layer} * sample.blocks, sample.blocks);
    std::string letters;
    for (std::size_t first = 0; first < row.size(); first += each) {
      const auto cell = row.subspan(first, std::min<std::size_t>(each, row.size() - first));
      letters += kFateLetters[static_cast<std::size_t>(*std::ranges::max_element(cell))];
    }
    rows.push_back(std::move(letters));
  }
  return {{"blocks", sample.blocks}, {"blocks_per_column", each}, {"rows", std::move(rows)}};
}

ordered_json sequence_json(const StepSample& sample) {
  const auto near = std::ranges::count_if(
      sample.fates, [](BlockFate fate) { return fate != BlockFate::kFar && fate != BlockFate::kStreamed; });
  return {{"id", sample.job},
          {"tokens", sample.sequence_tokens},
          {"block_tokens", sample.block_tokens},
          {"policy", policy_name(sample.policy)},
          {"budget_tokens", sample.budget_tokens},
          {"near_bytes", static_cast<std::uint64_t>(near) * sample.slot_bytes},
          {"guesses", sample.draft.guesses},
          {"guesses_right", sample.draft.right},
          {"map", map_json(sample)}};
}

// Names once, and each event as [name, track, layer, start in us, us].
ordered_json timeline_json(const StepSample& sample) {
  std::map<std::string, std::size_t> numbers;
  ordered_json names = ordered_json::array();
  ordered_json events = ordered_json::array();
  for (const TraceEvent& event : sample.events) {
    const auto [name, is_new] = numbers.emplace(event.name, numbers.size());
    if (is_new) names.push_back(event.name);
    const auto us = [](auto duration) {
      return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
    };
    events.push_back({name->second, event.track, event.layer, us(event.start - sample.begin),
                      us(event.end - event.start)});
  }
  return {{"ms", milliseconds(sample.end - sample.begin)},
          {"names", std::move(names)},
          {"events", std::move(events)},
          {"dropped", sample.events_dropped}};
}

ordered_json totals_json(const StepSample& sample) {
  ordered_json passes = ordered_json::object();
  for (std::size_t i = 0; i < kPasses; ++i) passes[kPassNames[i]] = milliseconds(sample.pass_ns[i]);
  const StepStats& stats = sample.stats;
  return {{"tokens", sample.tokens},
          {"steps", stats.steps},
          {"blocks_attended", stats.blocks_attended},
          {"blocks_missed", stats.blocks_missed},
          {"blocks_late", stats.blocks_late},
          {"blocks_predicted", stats.blocks_predicted},
          {"blocks_predicted_used", stats.blocks_used},
          {"stall_ms", milliseconds(stats.stall_ns)},
          {"rank_ms", milliseconds(stats.rank_ns)},
          {"read_bytes", sample.transfers.reads.bytes},
          {"write_bytes", sample.transfers.writes.bytes},
          {"pass_ms", std::move(passes)}};
}

}  // namespace

std::string step_sample_json(const StepSample& sample, StepSample::Time now) {
  const ordered_json object = {
      {"time_ms", milliseconds(sample.end.time_since_epoch())},
      {"age_ms", milliseconds(now - sample.end)},
      {"running", sample.running},
      {"waiting", sample.waiting},
      {"near", {{"bytes", sample.near_bytes}, {"bytes_used", sample.near_bytes_used}}},
      {"far", {{"bytes", sample.far_bytes}, {"bytes_used", sample.far_bytes_used}}},
      {"auto", sample.choice.empty() ? ordered_json(nullptr) : ordered_json(sample.choice)},
      {"totals", totals_json(sample)},
      {"sequence", sequence_json(sample)},
      {"timeline", timeline_json(sample)},
      {"sampling_us", milliseconds(sample.cost) * 1e3}};
  return object.dump();
}

// ---- Those who listen

StepFeed::Listener::Listener(std::shared_ptr<StepFeed> feed, const boost::asio::any_io_executor& executor)
    : feed_(std::move(feed)), mailbox_(std::make_shared<Mailbox>(executor)) {
  const std::lock_guard lock(feed_->mutex_);
  mailbox_->latest = feed_->latest_;
  feed_->mailboxes_.push_back(mailbox_);
  feed_->heard_ = true;
}

StepFeed::Listener::~Listener() {
  const std::lock_guard lock(feed_->mutex_);
  std::erase(feed_->mailboxes_, mailbox_);
  feed_->heard_ = !feed_->mailboxes_.empty();
}

std::shared_ptr<const StepSample> StepFeed::Listener::take() {
  const std::lock_guard lock(feed_->mutex_);
  return std::exchange(mailbox_->latest, nullptr);
}

// The lock is held while they are woken: who has left is told nothing more.
void StepFeed::publish(std::shared_ptr<const StepSample> sample) {
  const std::lock_guard lock(mutex_);
  latest_ = std::move(sample);
  for (const auto& mailbox : mailboxes_) {
    mailbox->latest = latest_;
    boost::asio::post(mailbox->timer.get_executor(), [mailbox] { mailbox->timer.cancel(); });
  }
}

// ---- The engine's thread

StepFeed::StepFeed() : trace_(kEventsMax) { trace_.pause(true); }

bool StepFeed::begin_step(Engine& engine, std::uint64_t job, const Generation& generation) {
  if (!heard_.load(std::memory_order_relaxed)) return false;
  const StepSample::Time now = Clock::now();
  if (now - last_ < kPeriod) return false;
  last_ = now;
  const Sequence& sequence = generation.sequence();
  sample_ = std::make_shared<StepSample>();
  sample_->job = job;
  sample_->sequence_tokens = sequence.tokens();
  sample_->block_tokens = sequence.geometry().block_tokens;
  sample_->slot_bytes = sequence.geometry().slot_bytes();
  const bool selects = engine.plan().tiered();
  sample_->policy = selects ? sequence.rule().policy : Policy::kFull;
  sample_->budget_tokens = selects ? sequence.rule().budget_blocks * sample_->block_tokens : 0;
  watch_.begin(sequence);
  engine.set_watch(&watch_);
  trace_.clear();
  trace_.pause(false);
  sample_->begin = Clock::now();
  sample_->cost = sample_->begin - now;
  return true;
}

void StepFeed::end_step(Engine& engine, const Generator& generator, const Generation& generation,
                        const Load& load) {
  StepSample& sample = *sample_;
  sample.end = Clock::now();
  trace_.pause(true);
  engine.set_watch(nullptr);
  watch_.end();
  sample.tokens = static_cast<std::uint64_t>(load.tokens);
  sample.running = load.running;
  sample.waiting = load.waiting;
  sample.stats = engine.stats();
  sample.pass_ns = engine.pass_ns();
  sample.near_bytes = engine.plan().near_bytes();
  sample.near_bytes_used = engine.near().bytes_in_use();
  if (engine.plan().tiered()) {
    sample.transfers = engine.tiers().transfers().stats();
    sample.far_bytes = engine.tiers().far().bytes_max();
    sample.far_bytes_used = engine.tiers().far().bytes_in_use();
  }
  if (generator.chooser() != nullptr) sample.choice = generator.chooser()->reason();
  sample.draft = generation.draft_stats();
  sample.layers = watch_.layers();
  sample.blocks = watch_.blocks();
  sample.fates.assign(watch_.fates().begin(), watch_.fates().end());
  sample.events = trace_.list();
  sample.events_dropped = trace_.dropped();
  sample.cost += Clock::now() - sample.end;
  publish(std::exchange(sample_, nullptr));
}

}  // namespace dualdecoder
