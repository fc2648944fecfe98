#include "model/model.h"

#include <algorithm>
#include <future>
#include <span>

#include "base/hash.h"

namespace dualdecoder {

Result<std::unique_ptr<Model>> Model::load(const std::string& path,
                                           const std::function<void(std::size_t, std::size_t)>& progress,
                                           const Device& device) {
  std::unique_ptr<Model> model(new Model());
  model->device_ = device;
  auto file = GgufFile::open(path);
  if (!file) return std::unexpected(file.error());
  model->file_ = std::move(*file);

  const auto name = model->file_->string("general.architecture");
  if (!name) return std::unexpected(name.error());
  auto architecture = make_architecture(*name);
  if (!architecture) return fail(architecture.error().code, "{}: {}", path, architecture.error().message);
  model->architecture_ = std::move(*architecture);

  auto hyperparameters = read_hyperparameters(*model->file_);
  if (!hyperparameters) return std::unexpected(hyperparameters.error());
  model->hyperparameters_ = std::move(*hyperparameters);
  if (Status status = model->architecture_->complete(*model->file_, model->hyperparameters_); !status) {
    return std::unexpected(status.error());
  }

  // For a small model the vocabulary takes longer than the weights: both at once.
  auto vocabulary = std::async(std::launch::async, [&] { return Vocabulary::load(*model->file_); });
  model->weights_ = std::make_unique<Weights>(*model->file_, device);
  model->architecture_->bind(*model->weights_, model->hyperparameters_);
  const Status weights = model->weights_->load(progress);
  auto loaded = vocabulary.get();
  if (!loaded) return std::unexpected(loaded.error());
  if (!weights) return std::unexpected(weights.error());
  model->vocabulary_ = std::move(*loaded);
  return model;
}

std::uint64_t Model::weights_hash() const {
  const MappedFile& mapping = file_->mapping();
  std::size_t first = mapping.bytes();
  for (const GgufTensor& tensor : file_->tensors()) first = std::min(first, tensor.offset);
  // Packed weights are not read from the file again: their pages go as soon as they have been read.
  constexpr std::size_t kPieceBytes = std::size_t{4} << 20;
  const auto drop_packed = [&](std::size_t begin, std::size_t end) {
    for (const GgufTensor& tensor : file_->tensors()) {
      const std::size_t from = std::max(tensor.offset, first + begin);
      const std::size_t to = std::min(tensor.offset + tensor.bytes, first + end);
      if (from < to && !weights_->is_mapped(tensor)) mapping.drop_pages(from, to - from);
    }
  };
  return hash_bytes(std::span(mapping.data(), mapping.bytes()).subspan(first), kPieceBytes, drop_packed);
}

}  // namespace dualdecoder
