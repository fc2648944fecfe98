#include "decode/follower.h"

#include <algorithm>

#include "base/check.h"

namespace dualdecoder {

std::optional<std::span<const float>> Follower::next(std::span<const TokenId> text) {
  if (text.empty()) return std::nullopt;
  if (!sequence_) {
    auto created = draft_.new_sequence();
    if (!created) return std::nullopt;
    sequence_ = std::move(*created);
  }
  // The last token is put in again if need be: logits are those of a pass.
  const std::size_t most = std::min(tokens_.size(), text.size() - 1);
  const auto differs = std::mismatch(tokens_.begin(), tokens_.begin() + most, text.begin()).first;
  tokens_.erase(differs, tokens_.end());
  const Status cut = sequence_->truncate(static_cast<std::uint32_t>(tokens_.size()));
  DD_CHECK(cut, "{}", cut.error().message);  // all of it is near
  const std::span<const TokenId> added = text.subspan(tokens_.size());
  const auto logits = draft_.prefill(*sequence_, added);
  if (!logits) return std::nullopt;
  tokens_.insert(tokens_.end(), added.begin(), added.end());
  return std::span(*logits, draft_.model().vocabulary().size());
}

void Follower::rest() {
  sequence_.reset();
  tokens_.clear();
}

Status check_same_vocabulary(const Model& model, const Model& draft) {
  const Vocabulary& ours = model.vocabulary();
  const Vocabulary& theirs = draft.vocabulary();
  if (ours.size() != theirs.size()) {
    return fail(ErrorCode::kInvalidArgument,
                "--draft model: {} has {} tokens and {} has {}; a draft model needs the same vocabulary",
                draft.path(), theirs.size(), model.path(), ours.size());
  }
  for (TokenId token = 0; token < static_cast<TokenId>(ours.size()); ++token) {
    const std::string own = ours.piece(token, true);
    const std::string other = theirs.piece(token, true);
    if (own == other) continue;
    return fail(ErrorCode::kInvalidArgument,
                "--draft model: token {} is \"{}\" in {} and \"{}\" in {}; a draft model needs the same "
                "vocabulary",
                token, other, draft.path(), own, model.path());
  }
  return {};
}

}  // namespace dualdecoder
