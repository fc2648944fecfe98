#include "peer/libllama.h"

#include <algorithm>

#include <ggml-cpu.h>

#include "base/check.h"

namespace dualdecoder {
namespace {

constexpr std::int32_t kAllLayers = 9999;  // more than any model has

}  // namespace

void Libllama::ThreadpoolDeleter::operator()(ggml_threadpool* pool) const { ggml_threadpool_free(pool); }

Result<std::unique_ptr<Libllama>> Libllama::load(const std::string& path, const LibllamaOptions& options) {
  DD_CHECK(options.threads > 0 && options.sequences > 0 && options.batch > 0);
  std::unique_ptr<Libllama> peer(new Libllama());
  peer->options_ = options;
  llama_backend_init();
  llama_model_params model_params = llama_model_default_params();
  ggml_backend_dev_t devices[] = {options.device, nullptr};  // not, as by default, all that there are
  model_params.devices = devices;
  model_params.n_gpu_layers = options.device == nullptr ? 0 : kAllLayers;
  peer->model_.reset(llama_model_load_from_file(path.c_str(), model_params));
  if (!peer->model_) return fail(ErrorCode::kCorrupt, "libllama cannot load {}", path);

  std::uint32_t& context = peer->options_.context;
  if (context == 0) context = static_cast<std::uint32_t>(llama_model_n_ctx_train(peer->model_.get()));
  peer->options_.outputs = std::max(options.outputs, options.sequences);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = context * options.sequences;
  params.n_batch = std::max(options.batch, options.sequences);
  params.n_ubatch = params.n_batch;
  params.n_seq_max = options.sequences;
  params.n_outputs_max = peer->options_.outputs;
  params.n_threads = static_cast<std::int32_t>(options.threads);
  params.n_threads_batch = params.n_threads;
  params.flash_attn_type =
      options.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = GGML_TYPE_F16;
  params.type_v = GGML_TYPE_F16;
  params.kv_unified = false;
  params.swa_full = false;  // layers with a sliding window keep that window only
  params.no_perf = true;
  peer->context_.reset(llama_init_from_model(peer->model_.get(), params));
  if (!peer->context_) {
    return fail(ErrorCode::kOutOfMemory, "libllama cannot take {} sequences of {} tokens of {}",
                options.sequences, context, path);
  }
  ggml_threadpool_params pool_params = ggml_threadpool_params_default(params.n_threads);
  peer->threadpool_.reset(ggml_threadpool_new(&pool_params));
  llama_attach_threadpool(peer->context_.get(), peer->threadpool_.get(), nullptr);
  peer->tokens_.assign(options.sequences, 0);
  return peer;
}

Libllama::~Libllama() = default;

std::uint32_t Libllama::vocabulary() const {
  return static_cast<std::uint32_t>(llama_vocab_n_tokens(llama_model_get_vocab(model_.get())));
}

std::uint32_t Libllama::context() const { return llama_n_ctx_seq(context_.get()); }

Result<const float*> Libllama::append(std::uint32_t sequence, std::span<const std::int32_t> tokens,
                                      std::uint32_t wanted) {
  DD_CHECK(sequence < tokens_.size() && !tokens.empty() && tokens.size() <= options_.batch);
  DD_CHECK(wanted <= tokens.size() && wanted <= options_.outputs, "{} of {}", wanted, options_.outputs);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    add_row(tokens[i], sequence, tokens_[sequence] + static_cast<std::uint32_t>(i),
            i + wanted >= tokens.size());
  }
  auto logits = run(wanted);
  if (logits) tokens_[sequence] += static_cast<std::uint32_t>(tokens.size());
  return logits;
}

Result<const float*> Libllama::prefill(std::uint32_t sequence, std::span<const std::int32_t> tokens,
                                       const Progress& progress) {
  std::size_t done = 0;
  while (done < tokens.size()) {
    const std::size_t rows = std::min<std::size_t>(options_.batch, tokens.size() - done);
    const bool last = done + rows == tokens.size();
    auto logits = append(sequence, tokens.subspan(done, rows), last ? 1 : 0);
    if (!logits) return logits;
    done += rows;
    const bool go_on = !progress || progress(static_cast<std::uint32_t>(done));
    if (last) return logits;
    if (!go_on) break;
  }
  return nullptr;
}

Result<const float*> Libllama::decode(std::span<const std::int32_t> tokens) {
  DD_CHECK(!tokens.empty() && tokens.size() <= tokens_.size());
  for (std::uint32_t sequence = 0; sequence < tokens.size(); ++sequence) {
    add_row(tokens[sequence], sequence, tokens_[sequence], true);
  }
  auto logits = run(static_cast<std::uint32_t>(tokens.size()));
  if (logits) {
    for (std::size_t sequence = 0; sequence < tokens.size(); ++sequence) ++tokens_[sequence];
  }
  return logits;
}

Status Libllama::truncate(std::uint32_t sequence, std::uint32_t tokens) {
  DD_CHECK(sequence < tokens_.size() && tokens <= tokens_[sequence]);
  llama_memory_t memory = llama_get_memory(context_.get());
  const auto id = static_cast<llama_seq_id>(sequence);
  const auto window = static_cast<std::uint32_t>(llama_model_n_swa(model_.get()));
  const llama_pos oldest = llama_memory_seq_pos_min(memory, id);
  const std::uint32_t needed = window == 0 || tokens < window ? 0 : tokens - window + 1;
  if (tokens > 0 && tokens < tokens_[sequence] && oldest > static_cast<llama_pos>(needed)) {
    return fail(ErrorCode::kUnsupported,
                "libllama cannot go back to {} tokens: its sliding window needs those from {} on and keeps "
                "from {} on",
                tokens, needed, oldest);
  }
  if (!llama_memory_seq_rm(memory, id, static_cast<llama_pos>(tokens), -1)) {
    return fail(ErrorCode::kUnsupported, "libllama cannot go back to {} tokens with this model", tokens);
  }
  tokens_[sequence] = tokens;
  return {};
}

void Libllama::copy(std::uint32_t from, std::uint32_t to) {
  DD_CHECK(from < tokens_.size() && to < tokens_.size() && from != to);
  llama_memory_t memory = llama_get_memory(context_.get());
  llama_memory_seq_rm(memory, static_cast<llama_seq_id>(to), -1, -1);
  llama_memory_seq_cp(memory, static_cast<llama_seq_id>(from), static_cast<llama_seq_id>(to), -1, -1);
  tokens_[to] = tokens_[from];
}

void Libllama::add_row(std::int32_t token, std::uint32_t sequence, std::uint32_t position, bool wanted) {
  rows_.tokens.push_back(token);
  rows_.positions.push_back(static_cast<llama_pos>(position));
  rows_.sequence_counts.push_back(1);
  rows_.sequences.push_back(static_cast<llama_seq_id>(sequence));
  rows_.wanted.push_back(wanted ? 1 : 0);
}

Result<const float*> Libllama::run(std::uint32_t wanted) {
  rows_.sequence_lists.clear();
  for (llama_seq_id& sequence : rows_.sequences) rows_.sequence_lists.push_back(&sequence);
  const llama_batch batch{.n_tokens = static_cast<std::int32_t>(rows_.tokens.size()),
                          .token = rows_.tokens.data(),
                          .embd = nullptr,
                          .pos = rows_.positions.data(),
                          .n_seq_id = rows_.sequence_counts.data(),
                          .seq_id = rows_.sequence_lists.data(),
                          .logits = rows_.wanted.data()};
  const std::int32_t status = llama_decode(context_.get(), batch);
  llama_synchronize(context_.get());
  rows_.tokens.clear();
  rows_.positions.clear();
  rows_.sequence_counts.clear();
  rows_.sequences.clear();
  rows_.wanted.clear();
  if (status == 1)
    return fail(ErrorCode::kContextExceeded, "libllama's context of {} tokens is full", context());
  if (status != 0) return fail(ErrorCode::kInternal, "libllama's decode failed with status {}", status);
  return wanted == 0 ? nullptr : llama_get_logits(context_.get());
}

}  // namespace dualdecoder
