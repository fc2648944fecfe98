// A loaded model: its file, shape, weights, architecture and vocabulary. Immutable after load; shared by all
// who decode.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/error.h"
#include "model/architecture.h"
#include "model/device.h"
#include "model/gguf_file.h"
#include "model/hyperparameters.h"
#include "model/vocabulary.h"
#include "model/weights.h"

namespace dualdecoder {

class Model {
 public:
  /// `progress` is called with bytes done of bytes in all while weights are brought in. `device`: where they
  /// lie, and layers are computed.
  static Result<std::unique_ptr<Model>> load(const std::string& path,
                                             const std::function<void(std::size_t, std::size_t)>& progress,
                                             const Device& device = {});

  const Hyperparameters& hyperparameters() const { return hyperparameters_; }
  const Architecture& architecture() const { return *architecture_; }
  const Vocabulary& vocabulary() const { return *vocabulary_; }
  const Weights& weights() const { return *weights_; }
  const Device& device() const { return device_; }
  /// XXH3 of the file's tensor data. Reads all of it.
  std::uint64_t weights_hash() const;
  const std::string& path() const { return file_->path(); }

 private:
  Model() = default;

  Device device_;
  std::unique_ptr<GgufFile> file_;
  Hyperparameters hyperparameters_;
  std::unique_ptr<Architecture> architecture_;
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<Vocabulary> vocabulary_;
};

}  // namespace dualdecoder
