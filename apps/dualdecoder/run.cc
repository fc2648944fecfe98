// `dualdecoder run`: one prompt, one answer. stdout carries the generated text alone.
#include <charconv>
#include <cstdio>
#include <optional>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/hash.h"
#include "base/units.h"
#include "command.h"
#include "decode/generation.h"
#include "output_file.h"
#include "progress.h"

namespace dualdecoder {
namespace {

struct RunOptions {
  ModelOptions model;
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
};

struct Outcome {
  double load_s = 0.0;
  double prefill_s = 0.0;
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
  if (prompt.empty())
    return fail(ErrorCode::kInvalidArgument, "the prompt is empty; give one with -p TEXT or -f FILE");
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
  const auto rendered = vocabulary.apply_chat_template(messages, options.chat_template);
  if (!rendered) return std::unexpected(rendered.error());
  return vocabulary.tokenize(*rendered, true, true);
}

void show(Generation& generation, Outcome& outcome) {
  const std::string text = generation.take_text();
  if (text.empty()) return;
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
  outcome.text += text;
}

Status generate(Generator& generator, Generation& generation, Outcome& outcome) {
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

void print_closing_line(const Generation& generation, const Outcome& outcome, const Engine& engine,
                        std::uint64_t seed) {
  fmt::print(
      stderr,
      "prompt {} tokens in {:.1f} s, {:.0f} tokens/s | answer {} tokens, {:.1f} tokens/s ({}) | near KV {} | "
      "tokens {}{}\n",
      generation.prompt().size(), outcome.prefill_s, rate(generation.prompt().size(), outcome.prefill_s),
      generation.tokens().size(), rate(decoded_tokens(generation), outcome.decode_s),
      finish_reason_name(generation.finish_reason()),
      format_bytes(static_cast<double>(engine.near().bytes_in_use())), token_hash(generation),
      seed == 0 ? "" : fmt::format(" | seed {}", seed));
}

std::string json_report(const Generation& generation, const Outcome& outcome, const Engine& engine,
                        std::uint64_t seed) {
  const nlohmann::ordered_json json = {
      {"model", engine.model().path()},
      {"architecture", engine.model().hyperparameters().architecture},
      {"version", DUALDECODER_VERSION},
      {"commit", DUALDECODER_COMMIT},
      {"threads", engine.options().threads},
      {"context", engine.context()},
      {"seed", seed},
      {"finish_reason", finish_reason_name(generation.finish_reason())},
      {"load_s", outcome.load_s},
      {"prefill_s", outcome.prefill_s},
      {"decode_s", outcome.decode_s},
      {"prompt_tokens_per_s", rate(generation.prompt().size(), outcome.prefill_s)},
      {"decode_tokens_per_s", rate(decoded_tokens(generation), outcome.decode_s)},
      {"near_kv_bytes", engine.near().bytes_in_use()},
      {"token_hash", token_hash(generation)},
      {"prompt_tokens", generation.prompt()},
      {"generated_tokens", generation.tokens()},
      {"text", outcome.text},
  };
  return json.dump(2) + "\n";
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

// Everything that can be refused is refused before the prompt is computed.
Status run(const RunOptions& options, FinishReason& finish_reason) {
  auto generation_setup = generation_options(options);
  if (!generation_setup) return std::unexpected(generation_setup.error());
  const auto prompt = read_prompt(options);
  if (!prompt) return std::unexpected(prompt.error());
  std::optional<OutputFile> json_file;
  if (!options.json_path.empty()) {
    auto file = OutputFile::create(options.json_path);
    if (!file) return std::unexpected(file.error());
    json_file = std::move(*file);
  }

  Outcome outcome;
  const Stopwatch load_watch;
  const auto model = load_model(options.model);
  if (!model) return std::unexpected(model.error());
  const auto setup = engine_options(options.model, **model);
  if (!setup) return std::unexpected(setup.error());
  const auto engine = Engine::create(**model, *setup);
  if (!engine) return std::unexpected(engine.error());
  outcome.load_s = load_watch.seconds();

  std::optional<NpyWriter> logits_file;
  Status logits_status;
  if (!options.logits_path.empty()) {
    auto writer = NpyWriter::create(options.logits_path, (*model)->vocabulary().size());
    if (!writer) return std::unexpected(writer.error());
    logits_file = std::move(*writer);
    generation_setup->on_logits = [&](std::span<const float> row) {
      if (logits_status) logits_status = logits_file->add_row(row);
    };
  }

  auto tokens = tokenize_prompt(options, (*model)->vocabulary(), *prompt);
  if (!tokens) return std::unexpected(tokens.error());
  const std::uint64_t seed =
      generation_setup->sampling.temperature > 0.0f ? generation_setup->sampling.seed : 0;
  Generator generator(**engine);
  const auto generation = generator.start(std::move(*tokens), std::move(*generation_setup));
  if (!generation) return std::unexpected(generation.error());
  if (Status status = generate(generator, **generation, outcome); !status) return status;

  print_closing_line(**generation, outcome, **engine, seed);
  finish_reason = (*generation)->finish_reason();
  if (json_file) {
    if (Status status = json_file->write(json_report(**generation, outcome, **engine, seed)); !status)
      return status;
    if (Status status = json_file->close(); !status) return status;
  }
  if (!logits_status) return logits_status;
  return logits_file ? logits_file->close() : Status{};
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
  command->add_option("-p,--prompt", options->prompt, "Prompt; after the file's text when both are given")
      ->type_name("TEXT");
  command->add_option("-f,--file", options->file, "File with the prompt or the document; -: standard input")
      ->type_name("FILE");
  CLI::Option* chat = command->add_flag(
      "--chat", options->chat, "Wrap the prompt in the model's chat template (default if it has one)");
  command->add_flag("--raw", options->raw, "Continue the prompt as it is")->excludes(chat);
  command->add_option("--system", options->system, "System message of the chat")->type_name("TEXT");
  command
      ->add_option("--chat-template", options->chat_template,
                   "One of libllama's templates, e.g. chatml, llama3, gemma")
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
