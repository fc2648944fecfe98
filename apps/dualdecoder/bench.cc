// `dualdecoder bench`: speed of prefill and decoding, ours and libllama's measured alternately in one
// process.
//
// A test is `pp` (prefill of -p tokens) or `tg` (-n decode steps), at a depth of -d tokens already in each of
// -np sequences. The sequences are filled once per depth and cut back to it after each measurement. In every
// repetition each engine runs once, in turn, so that what disturbs the machine disturbs both; ratios are
// medians over these pairs.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <random>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/statistics.h"
#include "command.h"
#include "commit.h"
#include "contender.h"
#include "progress.h"

namespace dualdecoder {
namespace {

constexpr std::uint32_t kTokensMax = 1U << 24;

struct BenchOptions {
  ModelOptions model;
  TierChoices tiers;
  std::vector<std::string> far = {"none"};
  std::vector<std::string> policies = {"previous"};
  std::vector<std::string> attend = {TierChoices{}.attend};
  std::string fill = "prompt";
  std::string file;
  std::vector<std::uint32_t> prefill = {512};
  std::vector<std::uint32_t> decode = {64};
  std::vector<std::uint32_t> depth = {0};
  std::vector<std::uint32_t> sequences = {1};
  std::uint32_t repeats = 5;
  std::string peer = "none";
  std::string output = "md";
};

/// The measurements of one test with one engine.
struct Row {
  std::string engine = {};
  std::string far = {};
  std::string policy = {};
  bool attends_resident = false;
  std::string test = {};
  std::uint32_t depth = 0;
  std::uint32_t sequences = 1;
  std::uint32_t steps = 1;  // per measurement
  std::uint32_t tokens_per_step = 1;
  std::uint64_t near_kv_bytes = 0;
  TierTotals tiers = {};                // over all repetitions
  std::vector<double> seconds = {};     // one per repetition
  std::optional<double> speedup = {};   // over the peer, median of pairs
  std::optional<double> vs_first = {};  // over the first engine of the list, the same
};

double tokens_per_s(const Row& row) { return row.steps * row.tokens_per_step / median(row.seconds); }
double ms_per_step(const Row& row) { return median(row.seconds) / row.steps * 1e3; }
/// Half the distance between the slowest and the fastest repetition, as a share of the median.
double spread(const Row& row) {
  const auto [low, high] = std::minmax_element(row.seconds.begin(), row.seconds.end());
  return (*high - *low) / 2.0 / median(row.seconds);
}

/// Time of `a` by that of `b`, over the repetitions that both have been through.
std::optional<double> median_ratio(const Row& a, const Row& b) {
  std::vector<double> ratios;
  for (std::size_t r = 0; r < a.seconds.size() && r < b.seconds.size(); ++r)
    ratios.push_back(a.seconds[r] / b.seconds[r]);
  return ratios.empty() ? std::nullopt : std::optional(median(ratios));
}

double total_seconds(const Row& row) { return std::accumulate(row.seconds.begin(), row.seconds.end(), 0.0); }
double total_steps(const Row& row) { return static_cast<double>(row.steps * row.seconds.size()); }

/// What is put in: a text, repeated as often as needed, or tokens that stand for one, seeded and uniform over
/// the vocabulary, as llama-bench has them.
class TokenSource {
 public:
  static Result<TokenSource> create(const BenchOptions& options, const Vocabulary& vocabulary) {
    TokenSource source;
    source.vocabulary_ = static_cast<TokenId>(vocabulary.size());
    if (options.file.empty()) return source;
    const auto text = read_text_file(options.file);
    if (!text) return std::unexpected(text.error());
    source.text_ = vocabulary.tokenize(*text, false, false);
    if (source.text_.empty()) return fail(ErrorCode::kInvalidArgument, "{} is empty", options.file);
    return source;
  }
  /// Tokens [first, first + count) of the stream with this number.
  std::vector<TokenId> tokens(std::uint64_t stream, std::uint32_t first, std::uint32_t count) const {
    std::vector<TokenId> tokens(count);
    if (text_.empty()) {
      std::mt19937_64 random(stream * 1'000'003 + first);
      std::uniform_int_distribution<TokenId> token(0, vocabulary_ - 1);
      for (TokenId& t : tokens) t = token(random);
    } else {
      for (std::uint32_t i = 0; i < count; ++i) tokens[i] = text_[(stream * 997 + first + i) % text_.size()];
    }
    return tokens;
  }

 private:
  TokenId vocabulary_ = 0;
  std::vector<TokenId> text_;
};

class Bench {
 public:
  Bench(const BenchOptions& options, const Model& model, const EngineOptions& engine, TokenSource source)
      : options_(options), model_(model), engine_options_(engine), source_(std::move(source)) {}

  ~Bench() {
    contenders_.clear();
    std::error_code ignored;
    for (const std::string& directory : directories_) std::filesystem::remove(directory, ignored);
  }

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
    engine.context = most(options_.depth) +
                     std::max({most(options_.prefill), most(options_.decode), 2 * kWarmUpTokens}) + 1;
    for (const std::string& far : options_.far) {
      std::shared_ptr<OurEngine> shared;
      for (const std::string& policy : options_.policies) {
        if (far == "none" && policy != options_.policies.front()) continue;  // all near: no policy
        TierChoices choices = options_.tiers;
        choices.far = far;
        choices.policy = policy;
        if (Status status = choose_tiers(choices, engine); !status) return status;
        if (Status status = load_draft(engine, draft_model_); !status) return status;
        engine.outputs_max = 2 * sequences;  // as many for all, whether they guess or not
        std::shared_ptr<OurEngine> ours = shares_engine(engine.tiers.policy) ? shared : nullptr;
        if (ours == nullptr) {
          EngineOptions own = engine;
          if (own.tiers.far.kind == FarKind::kFile && options_.policies.size() > 1) {
            if (Status status = own_directory(own.tiers.far.directory, policy); !status) return status;
          }
          auto made = OurEngine::create(model_, own);
          if (!made) return std::unexpected(made.error());
          ours = *made;
          if (shares_engine(engine.tiers.policy)) shared = ours;
        }
        for (const std::string& attend : options_.attend) {
          engine.tiers.attend_resident = attend == "resident";
          contenders_.push_back(make_our_contender(ours, engine, far));
          if (far == "none") break;
        }
      }
    }
    if (options_.peer == "none") return {};
    auto llama = make_libllama_contender(model_, engine);
    if (!llama) return std::unexpected(llama.error());
    contenders_.push_back(std::move(*llama));
    return {};
  }

  /// `full` needs no digests, and `previous-layer` computes queries that the others do not need.
  static bool shares_engine(Policy policy) {
    return policy != Policy::kFull && policy != Policy::kPreviousLayer;
  }

  /// One engine at a time uses a directory: with several policies each gets one of its own below it.
  Status own_directory(std::string& directory, const std::string& policy) {
    directory += "/" + policy;
    std::error_code error;
    if (std::filesystem::create_directory(directory, error)) directories_.push_back(directory);
    if (!error) return {};
    return fail(ErrorCode::kIo, "cannot make the directory {}: {}", directory, error.message());
  }

  Status run_depth(std::uint32_t sequences, std::uint32_t depth) {
    for (const auto& contender : contenders_) {
      if (Status status = fill(*contender, sequences, depth); !status) return status;
      if (interrupted()) return {};
    }
    for (const std::uint32_t tokens : options_.prefill) {
      if (tokens == 0 || sequences > 1) continue;  // a prompt is computed alone
      const auto tokens_in = source_.tokens(0, depth, tokens);
      const auto work = [&](Contender& contender) { return contender.append(0, tokens_in); };
      const Row row{
          .test = fmt::format("pp{} @ d{}", tokens, depth), .depth = depth, .tokens_per_step = tokens};
      if (Status status = measure(row, work); !status) return status;
    }
    for (const std::uint32_t steps : options_.decode) {
      if (steps == 0) continue;
      const auto first = first_tokens(depth, sequences);
      const auto work = [&](Contender& contender) { return contender.decode(first, steps); };
      const Row row{.test = fmt::format("tg{} @ d{}", steps, depth),
                    .depth = depth,
                    .sequences = sequences,
                    .steps = steps,
                    .tokens_per_step = sequences};
      if (Status status = measure(row, work); !status) return status;
    }
    return {};
  }

  /// [sequence]: each goes on where its filling ended.
  std::vector<TokenId> first_tokens(std::uint32_t depth, std::uint32_t sequences) const {
    std::vector<TokenId> tokens(sequences);
    for (std::uint32_t s = 0; s < sequences; ++s) tokens[s] = source_.tokens(s, depth, 1).front();
    return tokens;
  }

  /// Brings every sequence to `depth` tokens and runs a little of everything, so that nothing is measured
  /// cold.
  Status fill(Contender& contender, std::uint32_t sequences, std::uint32_t depth) {
    ProgressLine line(fmt::format("filling {} {}", contender.engine(), contender.far()));
    constexpr std::uint32_t kPiece = 2048;
    for (std::uint32_t s = 0; s < sequences; ++s) {
      if (contender.depth(s) > depth) {
        if (Status status = contender.truncate(s, depth); !status) return status;
      }
      while (contender.depth(s) < depth && !interrupted()) {
        const std::uint32_t have = contender.depth(s);
        const std::uint32_t count = std::min(kPiece, depth - have);
        bool filled = false;
        if (options_.fill == "synthetic" || !contender.content_matters()) {
          const auto synthetic = contender.fill_synthetic(s, count);
          if (!synthetic) return std::unexpected(synthetic.error());
          filled = *synthetic;
        }
        if (!filled) {
          if (Status status = contender.append(s, source_.tokens(s, have, count)); !status) return status;
        }
        line.update((s + static_cast<double>(contender.depth(s)) / depth) / sequences,
                    fmt::format("{} of {} x {} tokens", s * depth + contender.depth(s), sequences, depth));
      }
    }
    if (interrupted()) return {};
    if (Status status = contender.append(0, source_.tokens(0, depth, kWarmUpTokens)); !status) return status;
    const auto first = first_tokens(depth, sequences);
    if (Status status = contender.decode(first, kWarmUpTokens); !status) return status;
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
        const TierTotals before = contender.totals();
        const Stopwatch watch;
        if (Status status = work(contender); !status) return status;
        rows[i].seconds.push_back(watch.seconds());
        rows[i].tiers = contender.totals() - (before - rows[i].tiers);
        rows[i].engine = contender.engine();
        rows[i].far = contender.far();
        rows[i].policy = contender.policy();
        rows[i].attends_resident = contender.attends_resident();
        rows[i].near_kv_bytes = contender.near_kv_bytes();
        if (Status status = cut_back(contender, test.sequences, test.depth); !status) return status;
      }
      line.update((repeat + 1.0) / options_.repeats, fmt::format("{:.1f} tokens/s", tokens_per_s(rows[0])));
    }
    line.clear();
    for (const auto& contender : contenders_) {
      if (!contender->choice().empty())
        fmt::print(stderr, "{} x {}, {}, auto: {}\n", test.test, test.sequences, contender->far(),
                   contender->choice());
    }
    if (rows[0].seconds.empty()) return {};
    const bool peer = options_.peer != "none";
    for (std::size_t i = 0; i + (peer ? 1 : 0) < rows.size(); ++i) {
      if (peer) rows[i].speedup = median_ratio(rows.back(), rows[i]);
      if (i > 0) rows[i].vs_first = median_ratio(rows.front(), rows[i]);
    }
    std::erase_if(rows, [](const Row& row) { return row.seconds.empty(); });
    rows_.insert(rows_.end(), rows.begin(), rows.end());
    return {};
  }

  static constexpr std::uint32_t kWarmUpTokens = 16;

  const BenchOptions& options_;
  const Model& model_;
  EngineOptions engine_options_;
  TokenSource source_;
  std::unique_ptr<Model> draft_model_;  // of all engines
  std::vector<std::unique_ptr<Contender>> contenders_;
  std::vector<std::string> directories_;  // that were made here
  std::vector<Row> rows_;
};

void print_json(const std::vector<Row>& rows, const BenchOptions& options, std::uint32_t threads) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    nlohmann::ordered_json json = {{"engine", row.engine},
                                   {"test", row.test},
                                   {"policy", row.policy},
                                   {"context", row.depth},
                                   {"sequences", row.sequences},
                                   {"threads", threads},
                                   {"tokens_per_s", tokens_per_s(row)},
                                   {"ms_per_step", ms_per_step(row)},
                                   {"spread", spread(row)},
                                   {"near_kv_bytes", row.near_kv_bytes},
                                   {"commit", DUALDECODER_COMMIT},
                                   {"far", row.far},
                                   {"fill", options.fill}};
    if (row.far != "none") {
      json["attend"] = row.attends_resident ? "resident" : "selected";
      json["budget"] = options.tiers.budget;
      json["block_tokens"] = options.model.block_tokens;
      json["stall_share"] = row.tiers.stall_s / total_seconds(row);
      json["select_share"] = row.tiers.select_s / total_seconds(row);
      json["far_read_bytes_per_step"] = row.tiers.read_bytes / total_steps(row);
      json["blocks_attended_per_step"] = row.tiers.blocks_attended / total_steps(row);
      json["blocks_missed_per_step"] = row.tiers.blocks_missed / total_steps(row);
      json["blocks_late_per_step"] = row.tiers.blocks_late / total_steps(row);
      json["blocks_wasted_per_step"] = row.tiers.blocks_wasted / total_steps(row);
      if (row.tiers.guesses > 0.0) json["guesses_right"] = row.tiers.guesses_right / row.tiers.guesses;
    }
    if (row.speedup) json["speedup"] = *row.speedup;
    if (row.vs_first) json["vs_first"] = *row.vs_first;
    list.push_back(std::move(json));
  }
  fmt::print("{}\n", list.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

std::string guesses_text(const TierTotals& tiers) {
  if (tiers.guesses == 0.0) return "";
  return fmt::format("{:.0f} %", tiers.guesses_right / tiers.guesses * 100.0);
}

void print_markdown(const std::vector<Row>& rows, const BenchOptions& options, const Model& model,
                    std::uint32_t threads) {
  fmt::print("{}, {} threads, commit {}", model.path(), threads, DUALDECODER_COMMIT);
  if (options.far != std::vector<std::string>{"none"}) {
    fmt::print(", budget {} in blocks of {}", options.tiers.budget, options.model.block_tokens);
  }
  if (options.fill == "synthetic") fmt::print(", filled with random KV (speed only)");
  fmt::print(
      "\n\n| test | sequences | engine | far | policy | tokens/s | ms/step | spread | near KV MiB | "
      "far MiB/step | stall | ranking | missed / late / wasted blocks/step | guesses right | vs first | vs "
      "libllama "
      "|\n");
  fmt::print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const Row& row : rows) {
    std::string tiers = "| | | |";
    if (row.far != "none") {
      tiers = fmt::format(
          "{:.2f} | {:.1f} % | {:.1f} % | {:.1f} / {:.1f} / {:.1f} | {}",
          row.tiers.read_bytes / total_steps(row) / 1048576.0, row.tiers.stall_s / total_seconds(row) * 100.0,
          row.tiers.select_s / total_seconds(row) * 100.0, row.tiers.blocks_missed / total_steps(row),
          row.tiers.blocks_late / total_steps(row), row.tiers.blocks_wasted / total_steps(row),
          guesses_text(row.tiers));
    }
    const char* const attends = row.attends_resident ? ", resident" : "";
    fmt::print("| {} | {} | {} | {} | {}{} | {:.1f} | {:.2f} | ±{:.0f} % | {:.1f} | {} | {} | {} |\n",
               row.test, row.sequences, row.engine, row.far, row.policy, attends, tokens_per_s(row),
               ms_per_step(row), spread(row) * 100.0, static_cast<double>(row.near_kv_bytes) / 1048576.0,
               tiers, row.vs_first ? fmt::format("{:.3f}x", *row.vs_first) : "",
               row.speedup ? fmt::format("{:.2f}x", *row.speedup) : "");
  }
}

Status run_bench(const BenchOptions& options) {
  const auto model = load_model(options.model);
  if (!model) return std::unexpected(model.error());
  const auto engine = engine_options(options.model, **model);
  if (!engine) return std::unexpected(engine.error());
  auto source = TokenSource::create(options, (*model)->vocabulary());
  if (!source) return std::unexpected(source.error());
  const auto rows = Bench(options, **model, *engine, std::move(*source)).run();
  if (!rows) return std::unexpected(rows.error());
  if (options.output == "json") {
    print_json(*rows, options, engine->threads);
  } else {
    print_markdown(*rows, options, **model, engine->threads);
  }
  return {};
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      app.add_subcommand("bench", "Measure prefill and decode speed, alone or against libllama");
  add_model_options(*command, options->model);
  add_tier_options(*command, options->tiers, false);
  command
      ->add_option("--far", options->far,
                   "Far tiers to measure: none (all KV near), host (memory), file:DIR (a file in DIR), "
                   "link:BANDWIDTH@MICROSECONDS (memory made as slow)")
      ->delimiter(',')
      ->capture_default_str()
      ->type_name("TIER,...");
  command->add_option("--policy", options->policies, "Policies to measure with each far tier")
      ->delimiter(',')
      ->capture_default_str()
      ->type_name("NAME,...");
  command->remove_option(command->get_option("--attend"));  // a list here
  command
      ->add_option("--attend", options->attend,
                   "What each policy attends to beside the window: selected, resident")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::IsMember({"selected", "resident"}))
      ->type_name("NAME,...");
  command
      ->add_option(
          "--fill", options->fill,
          "How our sequences reach a depth: prompt, or synthetic (random KV: shows speed alone); libllama "
          "computes one prompt and copies it")
      ->capture_default_str()
      ->check(CLI::IsMember({"prompt", "synthetic"}));
  command
      ->add_option("-f,--file", options->file, "Text to put in, repeated as needed; random tokens otherwise")
      ->type_name("FILE");
  const auto list = [&](const char* names, std::vector<std::uint32_t>& values, std::uint32_t least,
                        std::uint32_t most, const char* text) {
    command->add_option(names, values, text)
        ->delimiter(',')
        ->capture_default_str()
        ->check(CLI::Range(least, most))
        ->type_name("N,...");
  };
  list("-p,--prefill", options->prefill, 0, kTokensMax, "Prompt tokens to compute; 0: no such test");
  list("-n,--decode", options->decode, 0, kTokensMax,
       "Tokens that each sequence decodes, the likeliest each time; 0: no such test");
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
