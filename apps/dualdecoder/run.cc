// `dualdecoder run`: one prompt, one answer. stdout carries the generated text alone.
#include <charconv>
#include <cstdio>
#include <optional>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/hash.h"
#include "base/trace.h"
#include "base/units.h"
#include "command.h"
#include "commit.h"
#include "decode/generation.h"
#include "output_file.h"
#include "progress.h"

namespace dualdecoder {
namespace {

constexpr std::size_t kPromptBytesMax = 1U << 30;  // libllama counts bytes in 32 bits

constexpr std::size_t kTraceEventsMax = 400'000;  // 27 MiB

struct RunOptions {
  ModelOptions model;
  TierChoices tiers;
  std::string prompt;
  std::string file;
  std::string system;
  std::string chat_template;
  bool chat = false;
  bool raw = false;
  std::int64_t tokens_max = -1;
  std::string seed = "-1";
  std::vector<std::string> logit_bias;
  std::vector<std::string> stop;
  SamplingOptions sampling;
  std::string json_path;
  std::string logits_path;
  std::string trace_path;
};

struct Outcome {
  std::optional<std::uint64_t> seed;  // none when greedy
  double load_s = 0.0;
  double prefill_s = 0.0;
  std::uint32_t prefilled = 0;  // tokens of the prompt; fewer than all when interrupted
  double decode_s = 0.0;
  std::string text;
};

// The parser's own conversion to 64 bits stops at the largest number without a word.
std::string check_tokens_max(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= -1) return {};
  return fmt::format("{} is not in the range -1 to {}", text, INT64_MAX);
}

// "-1": a random seed. Otherwise all 64 bits count, so nothing is cut off in silence.
Result<std::uint64_t> parse_seed(const std::string& text) {
  if (text == "-1") return random_seed();
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error == std::errc() && end == text.data() + text.size()) return seed;
  return fail(ErrorCode::kInvalidArgument, "--seed {}: wanted 0 to {}, or -1 for a random one", text,
              UINT64_MAX);
}

// "ID=BIAS", or llama.cpp's "ID+BIAS" and "ID-BIAS".
Status parse_logit_bias(const std::string& text, std::map<std::int32_t, float>& bias) {
  std::int32_t token = 0;
  const char* end_of_text = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data(), end_of_text, token);
  const bool has_value =
      error == std::errc() && after != end_of_text && (*after == '=' || *after == '+' || *after == '-');
  if (has_value) {
    const std::string value(after + (*after == '-' ? 0 : 1), end_of_text);
    char* end = nullptr;
    const float number = std::strtof(value.c_str(), &end);
    if (!value.empty() && *end == '\0') {
      bias[token] = number;
      return {};
    }
  }
  return fail(ErrorCode::kInvalidArgument, "--logit-bias {}: wanted TOKEN=BIAS, for example 42=-5 or 42=-inf",
              text);
}

Result<std::string> read_prompt(const RunOptions& options) {
  std::string prompt;
  if (!options.file.empty()) {
    auto text = read_text_file(options.file);
    if (!text) return std::unexpected(text.error());
    prompt = std::move(*text);
    if (!options.prompt.empty()) prompt += "\n\n";
  }
  prompt += options.prompt;
  if (prompt.empty()) {
    return fail(ErrorCode::kInvalidArgument, "the prompt is empty; give one with -p TEXT or -f FILE");
  }
  if (prompt.size() > kPromptBytesMax) {
    return fail(ErrorCode::kInvalidArgument,
                "the prompt has {} bytes, more than the {} that can be tokenised", prompt.size(),
                kPromptBytesMax);
  }
  return prompt;
}

Result<std::vector<TokenId>> tokenize_prompt(const RunOptions& options, const Vocabulary& vocabulary,
                                             const std::string& prompt) {
  const bool chat =
      options.chat || !options.chat_template.empty() || (!options.raw && vocabulary.has_chat_template());
  if (!chat) return vocabulary.tokenize(prompt, true, false);
  std::vector<ChatMessage> messages;
  if (!options.system.empty()) messages.push_back({"system", options.system});
  messages.push_back({"user", prompt});
  return vocabulary.tokenize_chat(messages, options.chat_template);
}

void show(Generation& generation, Outcome& outcome) {
  const std::string text = generation.take_text();
  if (text.empty()) return;
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
  outcome.text += text;
}

Status prefill(Generator& generator, Generation& generation, Outcome& outcome) {
  const Stopwatch prefill_watch;
  {
    ProgressLine line("prompt");
    const auto total = static_cast<double>(generation.prompt().size());
    const Status prefilled = generator.prefill(generation, [&](std::uint32_t done) {
      line.update(done / total, fmt::format("{:.0f} tokens/s", done / prefill_watch.seconds()));
      return !interrupted();
    });
    if (!prefilled) return prefilled;
  }
  outcome.prefill_s = prefill_watch.seconds();
  outcome.prefilled = generation.sequence().tokens();
  return {};
}

Status decode(Generator& generator, Generation& generation, Outcome& outcome) {
  const Stopwatch decode_watch;
  show(generation, outcome);
  while (generation.running()) {
    if (interrupted()) generation.abort();
    if (generation.running()) {
      Generation* one = &generation;
      if (Status status = generator.step(std::span(&one, 1)); !status) return status;
    }
    show(generation, outcome);
  }
  outcome.decode_s = decode_watch.seconds();
  if (!outcome.text.empty() && outcome.text.back() != '\n') std::fputc('\n', stdout);
  return {};
}

double rate(std::size_t tokens, double seconds) {
  return seconds > 0.0 ? static_cast<double>(tokens) / seconds : 0.0;
}

// The first token comes with the prompt, so decoding made one less.
std::size_t decoded_tokens(const Generation& generation) {
  return generation.tokens().empty() ? 0 : generation.tokens().size() - 1;
}

std::string token_hash(const Generation& generation) {
  return fmt::format("{:016x}", hash_values(std::span(generation.tokens())));
}

// With a far tier all of it is taken at start; otherwise what the context fills.
std::uint64_t near_bytes(const Engine& engine) {
  return engine.plan().tiered() ? engine.plan().near_bytes() : engine.near().bytes_in_use();
}

std::string far_figures(const Engine& engine) {
  if (!engine.plan().tiered()) return "";
  return fmt::format(", far KV {}", format_bytes(static_cast<double>(engine.tiers().far().bytes_in_use())));
}

std::string draft_figures(const DraftStats& draft) {
  if (draft.guesses == 0) return "";
  const std::string accepted = draft.accepted == 0 ? "" : fmt::format(", {} accepted", draft.accepted);
  return fmt::format(" | guesses {} of {} right{}", draft.right, draft.guesses, accepted);
}

nlohmann::ordered_json tiers_report(const Engine& engine) {
  if (!engine.plan().tiered()) return nullptr;
  const StepStats& step = engine.stats();
  const TransferStats& transfers = engine.tiers().transfers().stats();
  return {{"far", engine.tiers().far_description()},
          {"policy", policy_name(engine.options().tiers.policy)},
          {"budget_tokens", engine.options().tiers.budget_tokens},
          {"block_tokens", engine.options().block_tokens},
          {"near_slots", engine.plan().near_slots},
          {"resident_layers", engine.plan().resident_layers},
          {"ring_set_slots", engine.plan().ring_set_slots},
          {"digest_bytes", engine.plan().digest_bytes},
          {"blocks_attended", step.blocks_attended},
          {"blocks_missed", step.blocks_missed},
          {"blocks_late", step.blocks_late},
          {"blocks_predicted", step.blocks_predicted},
          {"blocks_predicted_used", step.blocks_used},
          {"corrections", step.corrections},
          {"bytes_streamed", step.bytes_streamed},
          {"stall_s", static_cast<double>(step.stall_ns) * 1e-9},
          {"reads", transfers.reads.copies},
          {"read_bytes", transfers.reads.bytes},
          {"read_s", static_cast<double>(transfers.reads.ns) * 1e-9},
          {"writes", transfers.writes.copies},
          {"write_bytes", transfers.writes.bytes},
          {"write_s", static_cast<double>(transfers.writes.ns) * 1e-9},
          {"read_errors", transfers.read_errors},
          {"checksum_errors", transfers.checksum_errors},
          {"write_errors", transfers.write_errors}};
}

std::string choice_figures(const Generator& generator) {
  return generator.chooser() == nullptr ? "" : fmt::format(" | auto: {}", generator.chooser()->reason());
}

void print_closing_line(const Generator& generator, const Generation& generation, const Outcome& outcome,
                        const Engine& engine) {
  fmt::print(stderr,
             "prompt {} tokens in {:.1f} s, {:.0f} tokens/s | answer {} tokens, {:.1f} tokens/s ({}) | near "
             "KV {}{}{}{} | "
             "tokens {}{}\n",
             outcome.prefilled, outcome.prefill_s, rate(outcome.prefilled, outcome.prefill_s),
             generation.tokens().size(), rate(decoded_tokens(generation), outcome.decode_s),
             finish_reason_name(generation.finish_reason()),
             format_bytes(static_cast<double>(near_bytes(engine))), far_figures(engine),
             draft_figures(generation.draft_stats()), choice_figures(generator), token_hash(generation),
             outcome.seed ? fmt::format(" | seed {}", *outcome.seed) : "");
}

std::string json_report(const Generation& generation, const Outcome& outcome, const Engine& engine) {
  nlohmann::ordered_json pass_s;
  for (std::size_t i = 0; i < kPasses; ++i) {
    pass_s[kPassNames[i]] = static_cast<double>(engine.pass_ns()[i]) * 1e-9;
  }
  const DraftStats& draft = generation.draft_stats();
  nlohmann::ordered_json json = {
      {"model", engine.model().path()},
      {"architecture", engine.model().hyperparameters().architecture},
      {"version", DUALDECODER_VERSION},
      {"commit", DUALDECODER_COMMIT},
      {"threads", engine.options().threads},
      {"context", engine.context()},
      {"seed", nullptr},
      {"finish_reason", finish_reason_name(generation.finish_reason())},
      {"load_s", outcome.load_s},
      {"prefill_s", outcome.prefill_s},
      {"decode_s", outcome.decode_s},
      {"pass_s", pass_s},
      {"prompt_tokens_per_s", rate(outcome.prefilled, outcome.prefill_s)},
      {"decode_tokens_per_s", rate(decoded_tokens(generation), outcome.decode_s)},
      {"near_kv_bytes", near_bytes(engine)},
      {"far_kv_bytes", engine.plan().tiered() ? engine.tiers().far().bytes_in_use() : 0},
      {"tiers", tiers_report(engine)},
      {"draft",
       {{"guesses", draft.guesses},
        {"right", draft.right},
        {"primings", draft.primings},
        {"accepted", draft.accepted}}},
      {"device", engine.model().device().name()},
      {"weights_device_bytes", engine.model().weights().device_bytes()},
      {"device_activation_bytes", engine.device_activation_bytes()},
      {"device_attention_bytes", engine.device_attention_bytes()},
      {"device_near_bytes", engine.device_near_bytes()},
      {"weights_mapped_bytes", engine.model().weights().mapped_bytes()},
      {"weights_repacked_bytes", engine.model().weights().repacked_bytes()},
      {"activation_bytes", engine.activation_bytes()},
      {"draft_weights_bytes", engine.draft() == nullptr ? 0 : engine.draft()->model().weights().bytes()},
      {"draft_kv_bytes", engine.plan().draft_bytes},
      {"token_hash", token_hash(generation)},
      {"prompt_tokens", generation.prompt()},
      {"generated_tokens", generation.tokens()},
      {"text", outcome.text},
  };
  if (outcome.seed) json["seed"] = *outcome.seed;
  // A path need not be UTF-8.
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

Result<GenerationOptions> generation_options(const RunOptions& options) {
  GenerationOptions generation;
  generation.sampling = options.sampling;
  generation.stop = options.stop;
  if (options.tokens_max >= 0) {
    generation.tokens_max =
        static_cast<std::uint32_t>(std::min<std::int64_t>(options.tokens_max, UINT32_MAX));
  }
  const auto seed = parse_seed(options.seed);
  if (!seed) return std::unexpected(seed.error());
  generation.sampling.seed = *seed;
  for (const std::string& bias : options.logit_bias) {
    if (Status status = parse_logit_bias(bias, generation.sampling.logit_bias); !status) {
      return std::unexpected(status.error());
    }
  }
  return generation;
}

struct OutputFiles {
  std::optional<OutputFile> json;
  std::optional<OutputFile> trace_file;
  std::optional<Trace> trace;  // of decoding
  std::optional<NpyWriter> logits;
  Status logits_status;  // of the rows so far
};

Result<OutputFiles> open_outputs(const RunOptions& options) {
  OutputFiles files;
  if (!options.json_path.empty()) {
    auto file = OutputFile::create(options.json_path);
    if (!file) return std::unexpected(file.error());
    files.json = std::move(*file);
  }
  if (!options.trace_path.empty()) {
    auto file = OutputFile::create(options.trace_path);
    if (!file) return std::unexpected(file.error());
    files.trace_file = std::move(*file);
    files.trace.emplace(kTraceEventsMax);
  }
  if (!options.logits_path.empty()) {
    auto file = NpyWriter::create(options.logits_path);
    if (!file) return std::unexpected(file.error());
    files.logits = std::move(*file);
  }
  return files;
}

Status close_outputs(OutputFiles& files, const Generation& generation, const Outcome& outcome,
                     const Engine& engine) {
  if (files.json) {
    if (Status status = files.json->write(json_report(generation, outcome, engine)); !status) return status;
    if (Status status = files.json->close(); !status) return status;
  }
  if (files.trace_file) {
    if (Status status = files.trace_file->write(files.trace->json({"step", "reads", "writes"})); !status)
      return status;
    if (Status status = files.trace_file->close(); !status) return status;
  }
  if (!files.logits_status) return files.logits_status;
  return files.logits ? files.logits->close() : Status{};
}

// Everything that can be refused is refused before the prompt is computed.
Status run(const RunOptions& options, FinishReason& finish_reason) {
  auto generation_setup = generation_options(options);
  if (!generation_setup) return std::unexpected(generation_setup.error());
  const auto prompt = read_prompt(options);
  if (!prompt) return std::unexpected(prompt.error());
  auto files = open_outputs(options);
  if (!files) return std::unexpected(files.error());

  Outcome outcome;
  const Stopwatch load_watch;
  const auto model = load_model(options.model);
  if (!model) return std::unexpected(model.error());
  auto setup = engine_options(options.model, **model);
  if (!setup) return std::unexpected(setup.error());
  if (Status status = choose_tiers(options.tiers, *setup); !status) return status;
  std::unique_ptr<Model> draft;
  if (Status status = load_draft(*setup, draft); !status) return status;
  if (files->trace) setup->tiers.transfers.trace = &*files->trace;
  const auto engine = Engine::create(**model, *setup);
  if (!engine) return std::unexpected(engine.error());
  print_short_plan(**engine);
  outcome.load_s = load_watch.seconds();

  auto tokens = tokenize_prompt(options, (*model)->vocabulary(), *prompt);
  if (!tokens) return std::unexpected(tokens.error());
  if (generation_setup->sampling.temperature > 0.0f) outcome.seed = generation_setup->sampling.seed;
  if (files->logits) {
    generation_setup->on_token = [&](TokenId, std::span<const float> row) {
      if (files->logits_status) files->logits_status = files->logits->add_row(row);
    };
  }
  Generator generator(**engine);
  const auto generation = generator.start(std::move(*tokens), std::move(*generation_setup));
  if (!generation) return std::unexpected(generation.error());
  if (Status status = prefill(generator, **generation, outcome); !status) return status;
  if (files->trace) files->trace->clear();
  if (Status status = decode(generator, **generation, outcome); !status) return status;

  print_closing_line(generator, **generation, outcome, **engine);
  finish_reason = (*generation)->finish_reason();
  if (Status status = close_outputs(*files, **generation, outcome, **engine); !status) return status;
  if (finish_reason == FinishReason::kError) return std::unexpected((*generation)->error());
  return {};
}

void add_sampling_options(CLI::App& command, RunOptions& options) {
  SamplingOptions& sampling = options.sampling;
  const std::string group = "Sampling";
  const auto number = [&](const char* names, auto& value, const char* text) {
    command.add_option(names, value, text)->capture_default_str()->group(group)->type_name("N");
  };
  number("--temp", sampling.temperature, "Temperature; 0: always the likeliest token");
  number("--top-k", sampling.top_k, "Draw from the k likeliest tokens; 0: off");
  number("--top-p", sampling.top_p, "Draw from the likeliest tokens that make up this probability; 1: off");
  number("--min-p", sampling.min_p, "Drop tokens less likely than this share of the likeliest; 0: off");
  number("--repeat-penalty", sampling.repeat_penalty, "Penalty on tokens that occurred; 1: off");
  number("--frequency-penalty", sampling.frequency_penalty, "Penalty for each time a token occurred; 0: off");
  number("--presence-penalty", sampling.presence_penalty, "Penalty on tokens that occurred at all; 0: off");
  number("--repeat-last-n", sampling.penalty_last_n,
         "Tokens that the penalties look back at; 0: none, -1: all");
  command.add_option("-s,--seed", options.seed, "Seed, 64 bits; -1: a random one, named in the closing line")
      ->capture_default_str()
      ->group(group)
      ->type_name("N");
  command
      .add_option("--logit-bias", options.logit_bias,
                  "Add to a token's logit, e.g. 42=-5; -inf bans it; repeatable")
      ->group(group)
      ->type_name("TOKEN=BIAS");
  command.add_flag("--ignore-eos", sampling.ignore_eos, "Never end by the model's own end token")
      ->group(group);
}

}  // namespace

void add_run_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command =
      app.add_subcommand("run", "Answer one prompt; the text goes to stdout, progress and figures to stderr");
  add_model_options(*command, options->model);
  add_context_option(*command, options->model);
  add_tier_options(*command, options->tiers);
  command->add_option("-p,--prompt", options->prompt, "Prompt; after the file's text when both are given")
      ->type_name("TEXT");
  command->add_option("-f,--file", options->file, "File with the prompt or the document; -: standard input")
      ->type_name("FILE");
  CLI::Option* chat = command->add_flag(
      "--chat", options->chat, "Wrap the prompt in the model's chat template (default if it has one)");
  CLI::Option* raw = command->add_flag("--raw", options->raw, "Continue the prompt as it is")->excludes(chat);
  command->add_option("--system", options->system, "System message of the chat")
      ->excludes(raw)
      ->type_name("TEXT");
  command
      ->add_option("--chat-template", options->chat_template,
                   "One of libllama's templates, e.g. chatml, llama3, gemma")
      ->excludes(raw)
      ->type_name("NAME");
  command
      ->add_option("-n,--predict", options->tokens_max,
                   "Most tokens to generate; -1: until the end or the context is full")
      ->capture_default_str()
      ->check(check_tokens_max)
      ->type_name("TOKENS");
  command->add_option("--stop", options->stop, "Text that ends the answer and is left out of it; repeatable")
      ->type_name("TEXT");
  add_sampling_options(*command, *options);
  command->add_option("--json", options->json_path, "Write figures and token ids to this file")
      ->type_name("FILE");
  command
      ->add_option("--logits", options->logits_path,
                   "Write the logits of every generated position, .npy [tokens, vocabulary]")
      ->type_name("FILE");
  command
      ->add_option("--trace", options->trace_path,
                   "Write what each pass, layer and transfer of decoding took, as Perfetto reads it")
      ->type_name("FILE");
  add_environment_names(*command);
  command->callback([options, &exit_code] {
    catch_interrupts();
    FinishReason reason = FinishReason::kRunning;
    if (Status status = run(*options, reason); !status) {
      exit_code = report(status.error());
    } else if (reason == FinishReason::kAbort) {
      exit_code = kExitInterrupted;
    }
  });
}

}  // namespace dualdecoder
