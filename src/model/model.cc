#include "model/model.h"

#include <algorithm>
#include <span>

#include "base/hash.h"

namespace dualdecoder {

Result<std::unique_ptr<Model>> Model::load(const std::string& path,
                                           const std::function<void(std::size_t, std::size_t)>& progress) {
  std::unique_ptr<Model> model(new Model());
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

  // The vocabulary first: it is quick and refuses bad files before any weight is touched.
  auto vocabulary = Vocabulary::load(*model->file_);
  if (!vocabulary) return std::unexpected(vocabulary.error());
  model->vocabulary_ = std::move(*vocabulary);

  model->weights_ = std::make_unique<Weights>(*model->file_);
  model->architecture_->bind(*model->weights_, model->hyperparameters_);
  if (Status status = model->weights_->load(progress); !status) return std::unexpected(status.error());
  return model;
}

std::uint64_t Model::weights_hash() const {
  const MappedFile& mapping = file_->mapping();
  std::size_t first = mapping.bytes();
  for (const GgufTensor& tensor : file_->tensors()) first = std::min(first, tensor.offset);
  return hash_bytes(std::span(mapping.data(), mapping.bytes()).subspan(first));
}

}  // namespace dualdecoder
