#include "decode/draft_options.h"

namespace dualdecoder {

Result<DraftKind> parse_draft(const std::string& name) {
  if (name == "none") return DraftKind::kNone;
  if (name == "self") return DraftKind::kSelf;
  if (name == "ngram") return DraftKind::kNgram;
  if (name == "keep") return DraftKind::kKeep;
  return fail(ErrorCode::kInvalidArgument, "--draft {}: there are none, self, ngram, keep", name);
}

}  // namespace dualdecoder
