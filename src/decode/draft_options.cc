#include "decode/draft_options.h"

namespace dualdecoder {

Result<DraftOptions> parse_draft(const std::string& text) {
  if (text == "none") return DraftOptions{.kind = DraftKind::kNone};
  if (text == "self") return DraftOptions{.kind = DraftKind::kSelf};
  if (text == "ngram") return DraftOptions{.kind = DraftKind::kNgram};
  if (text == "keep") return DraftOptions{.kind = DraftKind::kKeep};
  const std::string model = "model:";
  if (text.starts_with(model) && text.size() > model.size())
    return DraftOptions{.kind = DraftKind::kModel, .model_path = text.substr(model.size())};
  return fail(ErrorCode::kInvalidArgument, "--draft {}: there are none, self, ngram, keep, model:FILE", text);
}

}  // namespace dualdecoder
