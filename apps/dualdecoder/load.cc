#include "load.h"

#include <algorithm>

#include "base/file.h"
#include "base/statistics.h"
#include "peer/openai_client.h"
#include "progress.h"
#include "tasks/made_up_text.h"

namespace dualdecoder {
namespace {

struct NamedServer {
  std::string name;
  OpenAiServer server;
};

bool go_on() { return !interrupted(); }
bool take_all(std::size_t, const OpenAiAnswer&) { return true; }

/// Texts of so many tokens, each number one of its own from its first words on.
class PromptSource {
 public:
  static Result<PromptSource> create(const LoadOptions& options) {
    PromptSource source;
    auto vocabulary = load_vocabulary(options.model);
    if (!vocabulary) return std::unexpected(vocabulary.error());
    source.vocabulary_ = std::move(*vocabulary);
    if (options.file.empty()) return source;
    const auto text = read_text_file(options.file);
    if (!text) return std::unexpected(text.error());
    source.text_ = source.vocabulary_->tokenize(*text, false, false);
    if (source.text_.empty()) return fail(ErrorCode::kInvalidArgument, "{} is empty", options.file);
    return source;
  }

  std::string text(std::uint64_t number, std::uint32_t tokens) const {
    const std::string head = fmt::format("Story {}. ", number);
    std::vector<TokenId> all = vocabulary_->tokenize(head, false, false);
    std::vector<TokenId> made_up;
    if (text_.empty()) {
      for (std::size_t bytes = 6 * std::size_t{tokens} + 64; made_up.size() < tokens; bytes *= 2)
        made_up = vocabulary_->tokenize(made_up_text(number, bytes), false, false);
    }
    const std::vector<TokenId>& from = text_.empty() ? made_up : text_;
    const std::size_t begin = text_.empty() ? 0 : number * 997;
    for (std::size_t i = 0; all.size() < tokens; ++i) all.push_back(from[(begin + i) % from.size()]);
    std::string text;
    for (const TokenId token : all) text += vocabulary_->piece(token);
    return text;
  }

 private:
  std::unique_ptr<Vocabulary> vocabulary_;
  std::vector<TokenId> text_;
};

/// A load: so many clients with prompts of such a length.
struct Cell {
  std::string prefix;
  std::uint32_t prompt_tokens = 0;
  std::uint32_t clients = 0;

  bool shared() const { return prefix == "shared"; }
};

class Load {
 public:
  Load(const LoadOptions& options, std::vector<NamedServer> servers, PromptSource source,
       std::vector<LoadRow>& rows)
      : options_(options), servers_(std::move(servers)), source_(std::move(source)), rows_(rows) {
    for (const std::string& prefix : options.prefixes) {
      for (const std::uint32_t tokens : options.prompts) {
        for (const std::uint32_t clients : options.clients)
          cells_.push_back({.prefix = prefix, .prompt_tokens = tokens, .clients = clients});
      }
    }
    for (const Cell& cell : cells_) work_ += work(cell) * options.repeats * servers_.size();
  }

  Status run() {
    if (Status status = warm_up(); !status) return status;
    for (std::size_t i = 0; i < cells_.size() && !interrupted(); ++i) {
      if (Status status = run_cell(i); !status) return status;
    }
    return {};
  }

 private:
  /// In tokens of a prompt; one that is decoded takes about ten times as long.
  double work(const Cell& cell) const {
    return static_cast<double>(cell.clients) * (cell.prompt_tokens + 20.0 * options_.answer_tokens);
  }

  Status warm_up() {
    for (const NamedServer& one : servers_) {
      const OpenAiRequest request{.text = source_.text(0, 64), .max_tokens = 8};
      const auto answers = ask_openai(one.server, std::span(&request, 1), take_all, go_on);
      if (interrupted()) return {};
      if (answers.front().error) return std::unexpected(*answers.front().error);
    }
    return {};
  }

  Status run_cell(std::size_t number) {
    const Cell& cell = cells_[number];
    std::vector<LoadRow> rows;
    for (const NamedServer& one : servers_) {
      LoadRow row;
      row.name = one.name;
      row.url = one.server.url.text();
      row.served_model = one.server.model;
      row.prefix = cell.prefix;
      row.clients = cell.clients;
      row.prompt_tokens = cell.prompt_tokens;
      row.answer_tokens = options_.answer_tokens;
      rows.push_back(std::move(row));
    }
    Status status;
    for (std::uint32_t round = 0; round < options_.repeats && status && !interrupted(); ++round) {
      for (std::size_t i = 0; i < servers_.size() && status && !interrupted(); ++i) {
        stage_ = fmt::format("{}/{} {}", number + 1, cells_.size(), servers_[i].name);
        status = run_round(servers_[i].server, cell, number * 1000 + round, rows[i]);
        done_ += work(cell);
      }
    }
    line_.clear();
    for (LoadRow& row : rows) {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < row.tokens_per_s.size() && i < rows.front().tokens_per_s.size(); ++i) {
        if (row.tokens_per_s[i] && rows.front().tokens_per_s[i])
          ratios.push_back(*row.tokens_per_s[i] / *rows.front().tokens_per_s[i]);
      }
      if (&row != &rows.front() && !ratios.empty()) row.vs_first = median(ratios);
    }
    for (const LoadRow& row : rows) {
      if (row.rounds > 0) rows_.push_back(row);
    }
    return status;
  }

  /// `number`: prompts of no other round and load are like these.
  std::vector<OpenAiRequest> requests_of(const Cell& cell, std::uint64_t number) const {
    const std::uint64_t first = number * (kClientsMax + 1) + 1;
    const std::uint32_t own = cell.shared() ? std::max(16U, cell.prompt_tokens / 10) : cell.prompt_tokens;
    const std::string common = cell.shared() ? source_.text(first, cell.prompt_tokens - own) + "\n" : "";
    std::vector<OpenAiRequest> requests;
    for (std::uint32_t i = 0; i < cell.clients; ++i) {
      requests.push_back({.text = common + source_.text(first + 1 + i, own),
                          .max_tokens = options_.answer_tokens,
                          .ignore_end = true});
    }
    return requests;
  }

  Status run_round(const OpenAiServer& server, const Cell& cell, std::uint64_t number, LoadRow& row) {
    std::vector<OpenAiRequest> requests = requests_of(cell, number);
    const auto show = [&](double share) {
      const std::string details =
          fmt::format("{} x {} tokens, {}", cell.clients, cell.prompt_tokens, cell.prefix);
      line_.update((done_ + share * work(cell)) / work_, stage_ + ", " + details);
      return !interrupted();
    };
    if (cell.shared()) {
      OpenAiRequest common = requests.front();
      common.max_tokens = 1;
      ask_openai(server, std::span(&common, 1), take_all, [&] { return show(0.0); });
    }
    std::size_t texts = 0;
    const double texts_wanted = 2.0 * cell.clients * options_.answer_tokens;
    const auto count = [&](std::size_t, const OpenAiAnswer&) {
      ++texts;
      return true;
    };
    const auto progress = [&] { return show(std::min(1.0, static_cast<double>(texts) / texts_wanted)); };
    const auto arrived = ask_openai(server, requests, count, progress);
    if (interrupted()) return {};

    // Enough for those that come first to go on until all are there.
    for (OpenAiRequest& request : requests) request.max_tokens = 4 * options_.answer_tokens + 64;
    std::vector<bool> begun(requests.size(), false);
    std::size_t begun_count = 0;
    std::size_t together = 0;
    const auto until_enough = [&](std::size_t i, const OpenAiAnswer&) {
      ++texts;
      if (!begun[i]) ++begun_count;
      begun[i] = true;
      if (begun_count == begun.size()) ++together;
      return together <= requests.size() * options_.answer_tokens;
    };
    const auto decoded = ask_openai(server, requests, until_enough, progress);
    if (interrupted()) return {};
    note_arrived(arrived, row);
    note_decoded(decoded, tokens_per_text(arrived), row);
    ++row.rounds;
    const bool all_failed = std::all_of(decoded.begin(), decoded.end(),
                                        [](const OpenAiAnswer& answer) { return answer.times.empty(); });
    if (!all_failed) return {};
    if (decoded.front().error) return std::unexpected(*decoded.front().error);
    return fail(ErrorCode::kIo, "{}: not one answer has a text", server.url.text());
  }

  static void note_errors(const std::vector<OpenAiAnswer>& answers, LoadRow& row) {
    for (const OpenAiAnswer& answer : answers) {
      ++row.requests;
      if (!answer.error) continue;
      ++row.errors;
      if (row.first_error.empty()) row.first_error = answer.error->message;
    }
  }

  static void note_arrived(const std::vector<OpenAiAnswer>& answers, LoadRow& row) {
    note_errors(answers, row);
    for (const OpenAiAnswer& answer : answers) {
      if (answer.error || answer.times.empty()) continue;
      row.first_s.push_back(answer.times.front());
      for (std::size_t i = 1; i < answer.times.size(); ++i)
        row.busy_gaps_s.push_back(answer.times[i] - answer.times[i - 1]);
      if (answer.prompt_tokens > 0) row.counted_prompt_tokens.push_back(answer.prompt_tokens);
    }
  }

  /// A text is mostly a token, but a character may take several.
  static double tokens_per_text(const std::vector<OpenAiAnswer>& answers) {
    double tokens = 0.0;
    double texts = 0.0;
    for (const OpenAiAnswer& answer : answers) {
      if (answer.error || answer.answer_tokens == 0) continue;
      tokens += answer.answer_tokens;
      texts += static_cast<double>(answer.times.size());
    }
    return texts > 0.0 ? tokens / texts : 1.0;
  }

  /// From the first text of the last answer that begins, to the last text of the first that ends.
  void note_decoded(const std::vector<OpenAiAnswer>& answers, double tokens_each, LoadRow& row) const {
    note_errors(answers, row);
    row.tokens_per_s.emplace_back();
    double begin = 0.0;
    double end = 1e30;
    for (const OpenAiAnswer& answer : answers) {
      if (answer.error || answer.times.empty()) return;
      begin = std::max(begin, answer.times.front());
      end = std::min(end, answer.times.back());
    }
    std::size_t texts = 0;
    std::vector<double> gaps;
    for (const OpenAiAnswer& answer : answers) {
      for (std::size_t i = 1; i < answer.times.size(); ++i) {
        if (answer.times[i] <= begin || answer.times[i] > end) continue;
        ++texts;
        if (answer.times[i - 1] >= begin) gaps.push_back(answer.times[i] - answer.times[i - 1]);
      }
    }
    constexpr double kLeastShare = 0.25;  // of what was to be decoded; less is not worth a figure
    if (static_cast<double>(texts) <
        kLeastShare * static_cast<double>(answers.size()) * options_.answer_tokens)
      return;
    row.gaps_s.insert(row.gaps_s.end(), gaps.begin(), gaps.end());
    row.tokens_per_s.back() = static_cast<double>(texts) * tokens_each / (end - begin);
  }

  static constexpr std::uint64_t kClientsMax = 4096;

  const LoadOptions& options_;
  std::vector<NamedServer> servers_;
  PromptSource source_;
  std::vector<LoadRow>& rows_;
  std::vector<Cell> cells_;
  double work_ = 0.0;
  double done_ = 0.0;
  std::string stage_;
  ProgressLine line_{"load"};
};

}  // namespace

bool is_server(const std::string& peer) { return peer.find("://") != std::string::npos; }

Status measure_load(const LoadOptions& options, std::vector<LoadRow>& rows) {
  std::vector<NamedServer> servers;
  for (const std::string& text : options.servers) {
    const std::size_t equals = text.find('=');
    const bool named = equals < text.find("://");
    const std::string url = named ? text.substr(equals + 1) : text;
    auto server = find_openai_server(url, options.server.api_key, options.server.model, go_on);
    if (interrupted()) return {};
    if (!server) return std::unexpected(server.error());
    servers.push_back({.name = named ? text.substr(0, equals) : url, .server = std::move(*server)});
  }
  auto source = PromptSource::create(options);
  if (!source) return std::unexpected(source.error());
  return Load(options, std::move(servers), std::move(*source), rows).run();
}

}  // namespace dualdecoder
