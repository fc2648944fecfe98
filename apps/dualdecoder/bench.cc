// `dualdecoder bench`: speed of prefill and decoding, ours and libllama's measured alternately in one
// process, and beside it how close decoding stayed to full attention over the same KV (--quality).
//
// Without an option that says what to measure, it is the canonical workload: eight sequences of 8,192 tokens,
// KV in a file, against libllama.
//
// With --peer URL it measures servers instead (load.h).
//
// A test is `pp` (prefill of -p tokens) or `tg` (-n decode steps), at a depth of -d tokens already in each of
// -np sequences. The sequences are filled once per depth and cut back to it after each measurement. In every
// repetition each engine runs once, in turn, so that what disturbs the machine disturbs both; ratios are
// medians over these pairs.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>

#include "base/file.h"
#include "base/statistics.h"
#include "bench_rows.h"
#include "command.h"
#include "contender.h"
#include "load.h"
#include "output_file.h"
#include "progress.h"
#include "roofline.h"
#include "tasks/made_up_text.h"

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
  std::vector<std::string> peers = {"none"};  // one, or servers
  std::vector<std::string> prefixes = {"unshared", "shared"};
  ServerChoices server;
  std::uint32_t quality = 0;  // positions
  bool roofline = false;
  bool canonical = false;  // nothing was said about what to measure
  std::string output = "md";
};

/// Time of `a` by that of `b`, over the repetitions that both have been through.
std::optional<double> median_ratio(const BenchRow& a, const BenchRow& b) {
  std::vector<double> ratios;
  for (std::size_t r = 0; r < a.seconds.size() && r < b.seconds.size(); ++r)
    ratios.push_back(a.seconds[r] / b.seconds[r]);
  return ratios.empty() ? std::nullopt : std::optional(median(ratios));
}

/// What is put in: a text, repeated as often as needed (in the canonical workload one that is made up), or
/// tokens that stand for one, seeded and uniform over the vocabulary, as llama-bench has them.
class TokenSource {
 public:
  static Result<TokenSource> create(const BenchOptions& options, const Vocabulary& vocabulary) {
    TokenSource source;
    source.vocabulary_ = static_cast<TokenId>(vocabulary.size());
    if (options.file.empty() && !options.canonical) return source;
    constexpr std::size_t kMadeUpBytes = 200'000;
    const auto text = options.file.empty() ? made_up_text(1, kMadeUpBytes) : read_text_file(options.file);
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

  Status run() {
    for (const std::uint32_t sequences : options_.sequences) {
      if (Status status = make_contenders(sequences); !status) return status;
      stages_ = options_.sequences.size() * options_.depth.size() * stages_per_depth();
      for (const std::uint32_t depth : options_.depth) {
        if (Status status = run_depth(sequences, depth); !status) return status;
        if (interrupted()) return {};
      }
    }
    return {};
  }

  /// Everything measured so far, also after an error or an interruption.
  const std::vector<BenchRow>& rows() const { return rows_; }

 private:
  Status make_contenders(std::uint32_t sequences) {
    contenders_.clear();
    const auto most = [](const std::vector<std::uint32_t>& values) {
      return values.empty() ? 0U : *std::max_element(values.begin(), values.end());
    };
    EngineOptions engine = engine_options_;
    engine.sequences = sequences;
    engine.context =
        most(options_.depth) +
        std::max({most(options_.prefill), most(options_.decode), 2 * kWarmUpTokens, options_.quality}) + 1;
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
    if (options_.peers.front() == "none") return {};
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

  std::size_t stages_per_depth() const {
    return contenders_.size() + options_.prefill.size() + options_.decode.size() + (options_.quality > 0);
  }

  /// "3/7 filling ...": a line's own time left is that of its stage.
  std::string stage(const std::string& what) {
    return fmt::format("{}/{} {}", std::min(++stage_, stages_), stages_, what);
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
      const BenchRow row{
          .test = fmt::format("pp{} @ d{}", tokens, depth), .depth = depth, .tokens_per_step = tokens};
      if (Status status = measure(row, work); !status) return status;
    }
    for (const std::uint32_t steps : options_.decode) {
      if (steps == 0) continue;
      const auto first = first_tokens(depth, sequences);
      const auto work = [&](Contender& contender) { return contender.decode(first, steps); };
      const BenchRow row{.test = fmt::format("tg{} @ d{}", steps, depth),
                         .depth = depth,
                         .sequences = sequences,
                         .steps = steps,
                         .tokens_per_step = sequences,
                         .weight_bytes = weight_bytes()};
      if (Status status = measure(row, work); !status) return status;
    }
    return options_.quality > 0 && !interrupted() ? measure_quality(sequences, depth) : Status{};
  }

  /// Every matrix once: packed or repacked where it was worth it, otherwise mapped. Tied to the output
  /// matrix, the embedding table is in both.
  std::uint64_t weight_bytes() const {
    const Weights& weights = model_.weights();
    return std::max(weights.repacked_bytes(), weights.mapped_bytes());
  }

  /// Of every policy, beside the speed that was measured at this depth.
  Status measure_quality(std::uint32_t sequences, std::uint32_t depth) {
    const auto tokens = source_.tokens(0, depth, options_.quality);
    ProgressLine line(stage("quality"));
    for (std::size_t i = 0; i < contenders_.size(); ++i) {
      const auto divergence = contenders_[i]->divergence(tokens);
      if (!divergence) return std::unexpected(divergence.error());
      for (BenchRow& row : rows_) {
        const bool same = row.far == contenders_[i]->far() && row.policy == contenders_[i]->policy() &&
                          row.attends_resident == contenders_[i]->attends_resident() &&
                          row.engine == contenders_[i]->engine();
        if (same && row.depth == depth && row.sequences == sequences && row.weight_bytes > 0)
          row.divergence = *divergence;
      }
      if (interrupted()) return {};
      line.update((i + 1.0) / static_cast<double>(contenders_.size()), contenders_[i]->policy());
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
    ProgressLine line(stage(fmt::format("filling {} {}", contender.engine(), contender.far())));
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
  Status measure(const BenchRow& test, const Work& work) {
    std::vector<BenchRow> rows(contenders_.size(), test);
    ProgressLine line(stage(fmt::format("{} x {}", test.test, test.sequences)));
    Status status;
    for (std::uint32_t repeat = 0; repeat < options_.repeats && !interrupted(); ++repeat) {
      for (std::size_t i = 0; i < contenders_.size() && status; ++i)
        status = measure_once(*contenders_[i], test, work, rows[i]);
      if (!status) break;
      if (!rows[0].seconds.empty())
        line.update((repeat + 1.0) / options_.repeats,
                    fmt::format("{:.1f} tokens/s", rows[0].tokens_per_s()));
    }
    line.clear();
    for (const auto& contender : contenders_) {
      if (!contender->choice().empty())
        fmt::print(stderr, "{} x {}, {}, auto: {}\n", test.test, test.sequences, contender->far(),
                   contender->choice());
    }
    const bool peer = options_.peers.front() != "none";
    for (std::size_t i = 0; i + (peer ? 1 : 0) < rows.size(); ++i) {
      if (peer) rows[i].speedup = median_ratio(rows.back(), rows[i]);
      if (i > 0) rows[i].vs_first = median_ratio(rows.front(), rows[i]);
    }
    std::erase_if(rows, [](const BenchRow& row) { return row.seconds.empty(); });
    rows_.insert(rows_.end(), rows.begin(), rows.end());
    return status;
  }

  template <typename Work>
  Status measure_once(Contender& contender, const BenchRow& test, const Work& work, BenchRow& row) {
    const TierTotals before = contender.totals();
    const Stopwatch watch;
    if (Status status = work(contender); !status) return status;
    const double seconds = watch.seconds();
    if (interrupted()) return {};  // perhaps not all of it
    row.seconds.push_back(seconds);
    row.tiers = contender.totals() - (before - row.tiers);
    row.engine = contender.engine();
    row.far = contender.far();
    row.policy = contender.policy();
    row.attends_resident = contender.attends_resident();
    row.near_kv_bytes = contender.near_kv_bytes();
    row.far_kv_bytes = contender.far_kv_bytes();
    row.token_hash = contender.token_hash();
    return cut_back(contender, test.sequences, test.depth);
  }

  static constexpr std::uint32_t kWarmUpTokens = 16;

  const BenchOptions& options_;
  const Model& model_;
  EngineOptions engine_options_;
  TokenSource source_;
  std::unique_ptr<Model> draft_model_;  // of all engines
  std::vector<std::unique_ptr<Contender>> contenders_;
  std::vector<std::string> directories_;  // that were made here
  std::vector<BenchRow> rows_;
  std::size_t stage_ = 0;
  std::size_t stages_ = 0;
};

/// A directory of this process for the far file, below the current one; gone with the object.
class ScratchDirectory {
 public:
  static Result<ScratchDirectory> make() {
    std::string path = "dualdecoder-bench-XXXXXX";
    if (mkdtemp(path.data()) != nullptr) return ScratchDirectory(path);
    return fail(ErrorCode::kIo,
                "cannot make a directory for the far file here: {}; name one with --far file:DIR",
                errno_text(errno));
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove(path_, ignored);
  }
  ScratchDirectory(ScratchDirectory&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  const std::string& path() const { return path_; }

 private:
  explicit ScratchDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

/// The directory that the disk's speed is measured in: that of the first far file.
std::string far_directory(const BenchOptions& options) {
  for (const std::string& far : options.far) {
    if (far.starts_with("file:")) return far.substr(std::string("file:").size());
  }
  return "";
}

BenchSetting setting_of(const BenchOptions& options, std::uint32_t threads) {
  return {.model = options.model.model,
          .threads = threads,
          .fill = options.fill,
          .text = !options.file.empty() ? options.file
                  : options.canonical   ? "made-up text"
                                        : "random tokens",
          .budget = options.tiers.budget,
          .block_tokens = options.model.block_tokens};
}

/// What has been measured is shown whatever comes after it.
Status measure(const BenchOptions& options, BenchSetting& setting, std::vector<BenchRow>& rows) {
  const auto model = load_model(options.model);
  if (!model) return std::unexpected(model.error());
  const auto engine = engine_options(options.model, **model);
  if (!engine) return std::unexpected(engine.error());
  setting = setting_of(options, engine->threads);
  if (options.roofline) {
    const KvGeometry geometry = (*model)->hyperparameters().geometry(engine->block_tokens);
    const auto roofline = measure_roofline(engine->threads, far_directory(options), geometry);
    if (!roofline) return std::unexpected(roofline.error());
    if (interrupted()) return {};
    setting.roofline = *roofline;
  }
  auto source = TokenSource::create(options, (*model)->vocabulary());
  if (!source) return std::unexpected(source.error());
  Bench bench(options, **model, *engine, std::move(*source));
  const Status status = bench.run();
  rows = bench.rows();
  return status;
}

/// --peer URL: what is not about servers is refused, what was not said is the load that all are measured by.
Result<LoadOptions> load_options(const BenchOptions& options, const CLI::App& command) {
  if (!std::all_of(options.peers.begin(), options.peers.end(), is_server))
    return fail(ErrorCode::kInvalidArgument, "--peer: servers are measured beside servers alone");
  if (Status status = refuse_options(
          command,
          {"model", "peer", "prefix", "api-key", "served-model", "file", "decode", "depth", "np", "repeats",
           "output"},
          true, "it is for engines in this process; with --peer URL, start the server with it");
      !status)
    return std::unexpected(status.error());
  const auto said = [&](const char* name) { return command.get_option(name)->count() > 0; };
  LoadOptions load;
  load.model = options.model.model;
  load.servers = options.peers;
  load.server = options.server;
  load.file = options.file;
  load.clients = options.sequences;
  load.prompts = options.depth;
  load.prefixes = options.prefixes;
  load.answer_tokens = options.decode.front();
  load.repeats = said("--repeats") ? options.repeats : 3;
  if (!said("--sequences")) load.clients = {1, 4, 8, 16};
  if (!said("--depth")) load.prompts = {2048, 7000};
  if (options.decode.size() > 1 || load.answer_tokens == 0)
    return fail(ErrorCode::kInvalidArgument, "--decode: with --peer URL, one number above 0");
  if (*std::min_element(load.prompts.begin(), load.prompts.end()) < 64)
    return fail(ErrorCode::kInvalidArgument, "--depth: with --peer URL, prompts of at least 64 tokens");
  return load;
}

Status run_load(const BenchOptions& options, const CLI::App& command) {
  const auto load = load_options(options, command);
  if (!load) return std::unexpected(load.error());
  std::vector<LoadRow> rows;
  const Status measured = measure_load(*load, rows);
  if (!measured && rows.empty()) return measured;
  const Status printed = print_result(format_load(rows, *load, options.output));
  return measured ? printed : measured;
}

Status run_bench(BenchOptions options) {
  std::optional<ScratchDirectory> scratch;
  for (std::string& far : options.far) {
    if (far != "file") continue;
    auto made = ScratchDirectory::make();
    if (!made) return std::unexpected(made.error());
    scratch.emplace(std::move(*made));
    far = "file:" + scratch->path();
  }
  BenchSetting setting;
  std::vector<BenchRow> rows;
  const Status measured = measure(options, setting, rows);
  if (!measured && rows.empty()) return measured;
  const Status printed = print_result(format_rows(rows, setting, options.output));
  return measured ? printed : measured;
}

Status check_no_server(const CLI::App& command, const BenchOptions& options) {
  if (Status status =
          refuse_options(command, {"prefix", "api-key", "served-model"}, false, "it goes with --peer URL");
      !status)
    return status;
  if (options.peers.size() > 1)
    return fail(ErrorCode::kInvalidArgument, "--peer: one engine in this process, or a list of servers");
  return {};
}

// An eighth of the canonical workload's context; at half of the default, what it costs shows beside it.
constexpr std::uint32_t kCanonicalBudget = 1024;

/// What was not said is that of the workload that everybody measures alike.
void complete(BenchOptions& options, const CLI::App& command) {
  const auto said = [&](const char* name) { return command.get_option(name)->count() > 0; };
  for (const char* name : {"--prefill", "--decode", "--depth", "--sequences", "--peer"}) {
    if (said(name)) return;
  }
  if (said("--roofline")) {
    options.prefill = options.decode = {0};
    if (!said("--far")) options.far = {"file"};
    return;
  }
  options.canonical = true;
  options.roofline = true;
  options.prefill = {0};
  options.decode = {32};
  options.depth = {8192};
  options.sequences = {8};
  options.peers = {"libllama"};
  if (!said("--far")) options.far = {"file"};
  if (!said("--policy")) options.policies = {"previous", "dual"};
  if (!said("--budget")) options.tiers.budget = kCanonicalBudget;
  if (!said("--quality")) options.quality = 64;
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench",
      "Measure prefill and decode speed, alone or against libllama, or servers under load. With -m "
      "alone: eight sequences of 8,192 tokens, KV in a file, against libllama (some minutes)");
  add_model_options(*command, options->model);
  add_tier_options(*command, options->tiers, false);
  command
      ->add_option(
          "--far", options->far,
          "Far tiers to measure: none (all KV near), host (memory), file:DIR (a file in DIR), file (in "
          "a directory that is made here for it), "
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
  command
      ->add_option(
          "--peer", options->peers,
          "Whom to compare with: libllama in this process, none; or measure servers that speak the "
          "OpenAI API over http (no https), in turn, as clients see them: URL or NAME=URL, several "
          "with commas. Then --np are clients (default 1,4,8,16), -d tokens of their prompts (default "
          "2048,7000), -n tokens of the answers, -r rounds (default 3)")
      ->delimiter(',')
      ->capture_default_str()
      ->check([](const std::string& peer) {
        if (peer == "none" || peer == "libllama" || is_server(peer)) return std::string();
        return fmt::format("'{}' is not libllama, none or the address of a server (http://HOST:PORT)", peer);
      })
      ->type_name("PEER,...");
  command
      ->add_option("--prefix", options->prefixes,
                   "With --peer URL: prompts of which nothing was seen before (unshared), or nine tenths, by "
                   "an earlier client (shared)")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::IsMember({"unshared", "shared"}))
      ->group("Servers")
      ->type_name("NAME,...");
  add_server_choices(*command, options->server);
  command
      ->add_option("--quality", options->quality,
                   "Positions behind the depth at which decoding is compared with full attention; 0: none")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 16))
      ->type_name("N");
  command->add_flag("--roofline", options->roofline,
                    "Measure what memory and disk can read first; alone, measure nothing else");
  command->add_option("-o,--output", options->output, "Format of the table")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "json", "csv"}));
  add_environment_names(*command);
  command->callback([options, command, &exit_code] {
    catch_interrupts();
    Status status;
    if (std::any_of(options->peers.begin(), options->peers.end(), is_server)) {
      status = run_load(*options, *command);
    } else {
      status = check_no_server(*command, *options);
      if (status) complete(*options, *command);
      if (status) status = run_bench(*options);
    }
    if (!status) exit_code = report(status.error());
    if (interrupted()) exit_code = kExitInterrupted;
  });
}

}  // namespace dualdecoder
