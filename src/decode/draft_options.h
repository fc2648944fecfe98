// What a user chooses about guesses of the next token.
#pragma once

#include <string>

#include "base/error.h"

namespace dualdecoder {

class Model;

/// Where the guess of the next token comes from when there is none from the speculated row before: at the
/// start and after a wrong guess.
enum class DraftKind {
  kNone,   // no guesses
  kSelf,   // a pass that only finds one
  kNgram,  // what followed the newest tokens earlier in the text; else such a pass
  kKeep,   // the speculated row behind the wrong guess; such a pass at the start alone
  kModel,  // a smaller model of the same vocabulary
};

struct DraftOptions {
  DraftKind kind = DraftKind::kNone;
  /// A right guess and what is drawn behind it are committed in one step.
  bool accept = false;
  /// Also where every block is selected, and a guess has nothing to tell. For tests.
  bool even_if_all_selected = false;
  /// Of kModel: its file, and that loaded, which outlives the engine.
  std::string model_path = {};
  const Model* model = nullptr;
};
/// "none", "self", "ngram", "keep" or "model:PATH"; of the last one the model is still to be loaded.
Result<DraftOptions> parse_draft(const std::string& text);

}  // namespace dualdecoder
