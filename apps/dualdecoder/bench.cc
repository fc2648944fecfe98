// `dualdecoder bench`: speed of prefill and decoding, ours and libllama's measured alternately in one
// process.
//
// A test is `pp` (prefill of -p tokens) or `tg` (-n decode steps), at a depth of -d tokens already in each of
// -np sequences. The sequences are filled once per depth and cut back to it after each measurement. In every
// repetition each engine runs once, in turn, so that what disturbs the machine disturbs both; ratios are
// medians over these pairs.
#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <random>

#include <nlohmann/json.hpp>

#include "command.h"
#include "commit.h"
#include "peer/libllama.h"
#include "progress.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kTokensMax = 1U << 24;

struct BenchOptions {
  ModelOptions model;
  std::vector<std::uint32_t> prefill = {512};
  std::vector<std::uint32_t> decode = {64};
  std::vector<std::uint32_t> depth = {0};
  std::vector<std::uint32_t> sequences = {1};
  std::uint32_t repeats = 5;
  std::string peer = "none";
  std::string output = "md";
};

/// An engine under measurement: some sequences that can be filled, advanced and cut back.
class Contender {
 public:
  virtual ~Contender() = default;
  virtual const char* name() const = 0;
  virtual std::uint32_t depth(std::uint32_t sequence) const = 0;
  virtual Status append(std::uint32_t sequence, std::span<const TokenId> tokens) = 0;
  /// One token for each sequence.
  virtual Status decode(std::span<const TokenId> tokens) = 0;
  virtual Status truncate(std::uint32_t sequence, std::uint32_t tokens) = 0;
  virtual std::size_t near_kv_bytes() const = 0;
};

class Ours final : public Contender {
 public:
  static Result<std::unique_ptr<Ours>> create(const Model& model, const EngineOptions& options) {
    auto engine = Engine::create(model, options);
    if (!engine) return std::unexpected(engine.error());
    auto ours = std::make_unique<Ours>();
    ours->engine_ = std::move(*engine);
    for (std::uint32_t i = 0; i < options.sequences; ++i) {
      auto sequence = ours->engine_->new_sequence();
      if (!sequence) return std::unexpected(sequence.error());
      ours->sequences_.push_back(std::move(*sequence));
    }
    return ours;
  }
  const char* name() const override { return "dualdecoder"; }
  std::uint32_t depth(std::uint32_t sequence) const override { return sequences_[sequence]->tokens(); }
  Status append(std::uint32_t sequence, std::span<const TokenId> tokens) override {
    const auto logits = engine_->prefill(*sequences_[sequence], tokens);
    return logits ? Status{} : std::unexpected(logits.error());
  }
  Status decode(std::span<const TokenId> tokens) override {
    groups_.clear();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      groups_.push_back({sequences_[i].get(), tokens.subspan(i, 1), LogitsWanted::kLast});
    }
    const auto logits = engine_->step(groups_);
    if (!logits) return std::unexpected(logits.error());
    for (const auto& sequence : sequences_) {
      if (sequence->error()) return std::unexpected(*sequence->error());
    }
    return {};
  }
  Status truncate(std::uint32_t sequence, std::uint32_t tokens) override {
    return sequences_[sequence]->truncate(tokens);
  }
  std::size_t near_kv_bytes() const override { return engine_->near().bytes_in_use(); }

 private:
  std::unique_ptr<Engine> engine_;
  std::vector<std::unique_ptr<Sequence>> sequences_;  // before engine_'s memory goes
  std::vector<StepGroup> groups_;
};

class Peer final : public Contender {
 public:
  Peer(std::unique_ptr<Libllama> llama, std::size_t token_bytes, std::uint32_t sequences)
      : llama_(std::move(llama)), token_bytes_(token_bytes), sequences_(sequences) {}
  const char* name() const override { return "libllama"; }
  std::uint32_t depth(std::uint32_t sequence) const override { return llama_->tokens(sequence); }
  Status append(std::uint32_t sequence, std::span<const TokenId> tokens) override {
    const auto logits = llama_->prefill(sequence, tokens);
    return logits ? Status{} : std::unexpected(logits.error());
  }
  Status decode(std::span<const TokenId> tokens) override {
    const auto logits = llama_->decode(tokens);
    return logits ? Status{} : std::unexpected(logits.error());
  }
  Status truncate(std::uint32_t sequence, std::uint32_t tokens) override {
    return llama_->truncate(sequence, tokens);
  }
  std::size_t near_kv_bytes() const override {
    std::size_t tokens = 0;
    for (std::uint32_t i = 0; i < sequences_; ++i) tokens += llama_->tokens(i);
    return tokens * token_bytes_;
  }

 private:
  std::unique_ptr<Libllama> llama_;
  std::size_t token_bytes_;
  std::uint32_t sequences_;
};

/// The measurements of one test with one engine.
struct Row {
  std::string engine = {};
  std::string test = {};
  std::uint32_t depth = 0;
  std::uint32_t sequences = 1;
  std::uint32_t steps = 1;  // per measurement
  std::uint32_t tokens_per_step = 1;
  std::size_t near_kv_bytes = 0;
  std::vector<double> seconds = {};    // one per repetition
  std::optional<double> speedup = {};  // over the peer, median of pairs
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2.0;
}

double tokens_per_s(const Row& row) { return row.steps * row.tokens_per_step / median(row.seconds); }
double ms_per_step(const Row& row) { return median(row.seconds) / row.steps * 1e3; }
/// Half the distance between the slowest and the fastest repetition, as a share of the median.
double spread(const Row& row) {
  const auto [low, high] = std::minmax_element(row.seconds.begin(), row.seconds.end());
  return (*high - *low) / 2.0 / median(row.seconds);
}

/// Tokens that stand for text: seeded, uniform over the vocabulary, as llama-bench has them.
std::vector<TokenId> random_tokens(std::uint32_t count, std::uint32_t vocabulary, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<TokenId> token(0, static_cast<TokenId>(vocabulary) - 1);
  std::vector<TokenId> tokens(count);
  for (TokenId& t : tokens) t = token(random);
  return tokens;
}

class Bench {
 public:
  Bench(const BenchOptions& options, const Model& model, const EngineOptions& engine)
      : options_(options), model_(model), engine_options_(engine) {}

  Result<std::vector<Row>> run() {
    for (const std::uint32_t sequences : options_.sequences) {
      if (Status status = make_contenders(sequences); !status) return std::unexpected(status.error());
      for (const std::uint32_t depth : options_.depth) {
        if (Status status = run_depth(sequences, depth); !status) return std::unexpected(status.error());
        if (interrupted()) return std::move(rows_);
      }
    }
    return std::move(rows_);
  }

 private:
  Status make_contenders(std::uint32_t sequences) {
    contenders_.clear();
    const auto most = [](const std::vector<std::uint32_t>& values) {
      return values.empty() ? 0U : *std::max_element(values.begin(), values.end());
    };
    EngineOptions engine = engine_options_;
    engine.sequences = sequences;
    engine.context =
        most(options_.depth) + std::max({most(options_.prefill), most(options_.decode), kWarmUpTokens}) + 1;
    auto ours = Ours::create(model_, engine);
    if (!ours) return std::unexpected(ours.error());
    contenders_.push_back(std::move(*ours));
    if (options_.peer == "none") return {};
    auto llama = Libllama::load(model_.path(), {.threads = engine.threads,
                                                .context = engine.context,
                                                .sequences = sequences,
                                                .batch = engine.prefill_chunk,
                                                .outputs = sequences});
    if (!llama) return std::unexpected(llama.error());
    const std::size_t token_bytes = model_.hyperparameters().geometry(engine.block_tokens).token_bytes();
    contenders_.push_back(std::make_unique<Peer>(std::move(*llama), token_bytes, sequences));
    return {};
  }

  Status run_depth(std::uint32_t sequences, std::uint32_t depth) {
    for (const auto& contender : contenders_) {
      if (Status status = fill(*contender, sequences, depth); !status) return status;
      if (interrupted()) return {};
    }
    for (const std::uint32_t tokens : options_.prefill) {
      if (tokens == 0 || sequences > 1) continue;  // a prompt is computed alone
      const auto tokens_in = random_tokens(tokens, model_.vocabulary().size(), 2);
      const auto work = [&](Contender& contender) { return contender.append(0, tokens_in); };
      const Row row{
          .test = fmt::format("pp{} @ d{}", tokens, depth), .depth = depth, .tokens_per_step = tokens};
      if (Status status = measure(row, work); !status) return status;
    }
    for (const std::uint32_t steps : options_.decode) {
      if (steps == 0) continue;
      const auto tokens_in = random_tokens(steps * sequences, model_.vocabulary().size(), 3);
      const auto work = [&](Contender& contender) -> Status {
        for (std::uint32_t step = 0; step < steps; ++step) {
          const auto tokens = std::span(tokens_in).subspan(std::size_t{step} * sequences, sequences);
          if (Status status = contender.decode(tokens); !status) return status;
        }
        return {};
      };
      const Row row{.test = fmt::format("tg{} @ d{}", steps, depth),
                    .depth = depth,
                    .sequences = sequences,
                    .steps = steps,
                    .tokens_per_step = sequences};
      if (Status status = measure(row, work); !status) return status;
    }
    return {};
  }

  /// Brings every sequence to `depth` tokens and runs a little of everything, so that nothing is measured
  /// cold.
  Status fill(Contender& contender, std::uint32_t sequences, std::uint32_t depth) {
    ProgressLine line(fmt::format("filling {}", contender.name()));
    constexpr std::uint32_t kPiece = 2048;
    for (std::uint32_t s = 0; s < sequences; ++s) {
      if (contender.depth(s) > depth) {
        if (Status status = contender.truncate(s, depth); !status) return status;
      }
      while (contender.depth(s) < depth && !interrupted()) {
        const std::uint32_t have = contender.depth(s);
        const auto tokens =
            random_tokens(std::min(kPiece, depth - have), model_.vocabulary().size(), s * 1000 + have);
        if (Status status = contender.append(s, tokens); !status) return status;
        line.update((s + static_cast<double>(contender.depth(s)) / depth) / sequences,
                    fmt::format("{} of {} x {} tokens", s * depth + contender.depth(s), sequences, depth));
      }
    }
    if (interrupted()) return {};
    if (Status status = contender.append(0, random_tokens(kWarmUpTokens, model_.vocabulary().size(), 1));
        !status) {
      return status;
    }
    if (Status status = contender.decode(random_tokens(sequences, model_.vocabulary().size(), 1)); !status)
      return status;
    return cut_back(contender, sequences, depth);
  }

  Status cut_back(Contender& contender, std::uint32_t sequences, std::uint32_t depth) {
    for (std::uint32_t s = 0; s < sequences; ++s) {
      if (Status status = contender.truncate(s, depth); !status) return status;
    }
    return {};
  }

  template <typename Work>
  Status measure(const Row& test, const Work& work) {
    std::vector<Row> rows(contenders_.size(), test);
    ProgressLine line(fmt::format("{} x {}", test.test, test.sequences));
    for (std::uint32_t repeat = 0; repeat < options_.repeats && !interrupted(); ++repeat) {
      for (std::size_t i = 0; i < contenders_.size(); ++i) {
        Contender& contender = *contenders_[i];
        const Stopwatch watch;
        if (Status status = work(contender); !status) return status;
        rows[i].seconds.push_back(watch.seconds());
        rows[i].engine = contender.name();
        rows[i].near_kv_bytes = contender.near_kv_bytes();
        if (Status status = cut_back(contender, test.sequences, test.depth); !status) return status;
      }
      line.update((repeat + 1.0) / options_.repeats, fmt::format("{:.1f} tokens/s", tokens_per_s(rows[0])));
    }
    if (rows[0].seconds.empty()) return {};
    if (rows.size() == 2) {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < rows[0].seconds.size(); ++i)
        ratios.push_back(rows[1].seconds[i] / rows[0].seconds[i]);
      rows[0].speedup = median(ratios);
    }
    rows_.insert(rows_.end(), rows.begin(), rows.end());
    return {};
  }

  static constexpr std::uint32_t kWarmUpTokens = 16;

  const BenchOptions& options_;
  const Model& model_;
  EngineOptions engine_options_;
  std::vector<std::unique_ptr<Contender>> contenders_;
  std::vector<Row> rows_;
};

void print_json(const std::vector<Row>& rows, std::uint32_t threads) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    nlohmann::ordered_json json = {{"engine", row.engine},
                                   {"test", row.test},
                                   {"policy", "dense"},
                                   {"context", row.depth},
                                   {"sequences", row.sequences},
                                   {"threads", threads},
                                   {"tokens_per_s", tokens_per_s(row)},
                                   {"ms_per_step", ms_per_step(row)},
                                   {"spread", spread(row)},
                                   {"near_kv_bytes", row.near_kv_bytes},
                                   {"commit", DUALDECODER_COMMIT}};
    if (row.speedup) json["speedup"] = *row.speedup;
    list.push_back(std::move(json));
  }
  fmt::print("{}\n", list.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

void print_markdown(const std::vector<Row>& rows, const Model& model, std::uint32_t threads) {
  fmt::print("{}, {} threads, commit {}\n\n", model.path(), threads, DUALDECODER_COMMIT);
  fmt::print("| test | sequences | engine | tokens/s | ms/step | spread | near KV MiB | vs libllama |\n");
  fmt::print("|---|---|---|---|---|---|---|---|\n");
  for (const Row& row : rows) {
    fmt::print("| {} | {} | {} | {:.1f} | {:.2f} | ±{:.0f} % | {:.1f} | {} |\n", row.test, row.sequences,
               row.engine, tokens_per_s(row), ms_per_step(row), spread(row) * 100.0,
               static_cast<double>(row.near_kv_bytes) / 1048576.0,
               row.speedup ? fmt::format("{:.2f}x", *row.speedup) : "");
  }
}

Status run_bench(const BenchOptions& options) {
  const auto model = load_model(options.model);
  if (!model) return std::unexpected(model.error());
  const auto engine = engine_options(options.model, **model);
  if (!engine) return std::unexpected(engine.error());
  const auto rows = Bench(options, **model, *engine).run();
  if (!rows) return std::unexpected(rows.error());
  if (options.output == "json") {
    print_json(*rows, engine->threads);
  } else {
    print_markdown(*rows, **model, engine->threads);
  }
  return {};
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      app.add_subcommand("bench", "Measure prefill and decode speed, alone or against libllama");
  add_model_options(*command, options->model);
  const auto list = [&](const char* names, std::vector<std::uint32_t>& values, std::uint32_t least,
                        std::uint32_t most, const char* text) {
    command->add_option(names, values, text)
        ->delimiter(',')
        ->capture_default_str()
        ->check(CLI::Range(least, most))
        ->type_name("N,...");
  };
  list("-p,--prefill", options->prefill, 0, kTokensMax, "Prompt tokens to compute; 0: no such test");
  list("-n,--decode", options->decode, 0, kTokensMax, "Decode steps; 0: no such test");
  list("-d,--depth", options->depth, 0, kTokensMax, "Tokens that are in each sequence before the test");
  list("--np,--sequences", options->sequences, 1, 4096, "Sequences decoded together; -np as well");
  command->add_option("-r,--repeats", options->repeats, "Repetitions of each test, engines in turn")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000))
      ->type_name("N");
  command->add_option("--peer", options->peer, "Engine to compare with")
      ->capture_default_str()
      ->check(CLI::IsMember({"none", "libllama"}));
  command->add_option("-o,--output", options->output, "Format of the table")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "json"}));
  add_environment_names(*command);
  command->callback([options, &exit_code] {
    catch_interrupts();
    if (Status status = run_bench(*options); !status) exit_code = report(status.error());
    if (interrupted()) exit_code = kExitInterrupted;
  });
}

}  // namespace dualdecoder
