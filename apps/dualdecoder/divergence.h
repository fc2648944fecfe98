// How far one way of decoding is from another: a text put in token by token (teacher-forced), and the
// distributions of the next token compared.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "decode/draft.h"
#include "decode/engine.h"

namespace dualdecoder {

using LogProbabilities = std::vector<float>;  // [vocabulary]

LogProbabilities log_softmax(std::span<const float> logits);
/// Of q from p, in nats.
double kl_divergence(const LogProbabilities& p, const LogProbabilities& q);

/// Decodes `tokens` at the end of `sequence`, which holds `context`, and calls body(i, distribution of what
/// follows tokens[i]) for each. False from it stops. The guesses that were made count for nothing but the
/// selection: none is accepted, whatever `guesses` says. `follower`: as Draft takes it.
Result<DraftStats> decode_forced(Engine& engine, Sequence& sequence, DraftOptions guesses,
                                 std::span<const TokenId> context, std::span<const TokenId> tokens,
                                 const std::function<bool(std::size_t i, LogProbabilities row)>& body,
                                 std::shared_ptr<Follower> follower = nullptr);

}  // namespace dualdecoder
