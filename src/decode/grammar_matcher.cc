#include "decode/grammar_matcher.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/check.h"

namespace dualdecoder {
namespace {

constexpr std::size_t kStatesMax = 2048;      // kept, a kilobyte each
constexpr std::size_t kWorkMax = 20'000'000;  // for one token; about a second

}  // namespace

TokenTexts::TokenTexts(const Vocabulary& vocabulary) {
  for (TokenId token = 0; token < static_cast<TokenId>(vocabulary.size()); ++token)
    add(vocabulary.piece(token), vocabulary.is_end(token));
}

TokenTexts::TokenTexts(std::span<const std::string> texts, std::span<const TokenId> ends) {
  for (const std::string& text : texts) add(text, false);
  for (const TokenId token : ends) is_end_[static_cast<std::size_t>(token)] = true;
}

void TokenTexts::add(std::string_view text, bool is_end) {
  bytes_ += text;
  begin_.push_back(static_cast<std::uint32_t>(bytes_.size()));
  is_end_.push_back(is_end);
}

GrammarMatcher::GrammarMatcher(std::shared_ptr<const Grammar> grammar,
                               std::shared_ptr<const TokenTexts> texts)
    : grammar_(std::move(grammar)), texts_(std::move(texts)) {
  intern({});
  std::vector<Stack> begin;
  for (const std::uint32_t first : grammar_->alternatives(grammar_->root()))
    begin.push_back(grammar_->is_end(first) ? Stack{} : Stack{first});
  current_ = intern(expand(std::move(begin)));
}

bool GrammarMatcher::allows(TokenId token) {
  if (texts_->is_end(token)) return complete() && !exhausted_;
  const std::string_view text = texts_->text(token);
  return !text.empty() && walk(text) != kDead;
}

void GrammarMatcher::accept(TokenId token) {
  work_ = 0;
  if (texts_->is_end(token)) return;
  const std::uint32_t reached = walk(texts_->text(token));
  DD_CHECK(reached != kDead, "token {} is not one that the grammar allows", token);
  current_ = reached;
}

// From the text read so far. States may be numbered anew on the way.
std::uint32_t GrammarMatcher::walk(std::string_view text) {
  std::uint32_t state = current_;
  for (const char c : text) {
    if (state == kDead || exhausted_) return kDead;
    state = next(state, static_cast<std::uint8_t>(c));
  }
  return state;
}

std::uint32_t GrammarMatcher::next(std::uint32_t from, std::uint8_t byte) {
  if (const std::uint32_t known = states_[from].next[byte]; known != kUnknown) return known;
  Stacks stacks = advance(*stacks_[from], byte);
  if (states_.size() >= kStatesMax) {
    forget();
    return intern(std::move(stacks));
  }
  const std::uint32_t to = intern(std::move(stacks));
  states_[from].next[byte] = to;
  return to;
}

GrammarMatcher::Stacks GrammarMatcher::advance(const Stacks& stacks, std::uint8_t byte) {
  std::vector<Stack> todo;
  for (const Stack& stack : stacks) {
    if (stack.empty()) continue;
    const std::uint32_t position = stack.back();
    if (!grammar_->bytes(grammar_->symbol(position).index).test(byte)) continue;
    Stack rest(stack.begin(), stack.end() - 1);
    if (!grammar_->is_end(position + 1)) rest.push_back(position + 1);
    todo.push_back(std::move(rest));
  }
  return expand(std::move(todo));
}

// Every way in which the stacks can come to bytes, or to the end.
GrammarMatcher::Stacks GrammarMatcher::expand(std::vector<Stack> todo) {
  std::set<Stack> seen;
  Stacks result;
  while (!todo.empty()) {
    const auto [found, is_new] = seen.insert(std::move(todo.back()));
    todo.pop_back();
    if (!is_new) continue;
    const Stack& stack = *found;
    work_ += stack.size() + 1;
    if (seen.size() > kStacksMax || work_ > kWorkMax) {
      exhausted_ = true;
      return {};
    }
    if (stack.empty() || grammar_->symbol(stack.back()).kind == Grammar::Symbol::Kind::kBytes) {
      result.push_back(stack);
      continue;
    }
    Stack rest(stack.begin(), stack.end() - 1);
    if (!grammar_->is_end(stack.back() + 1)) rest.push_back(stack.back() + 1);
    for (const std::uint32_t first : grammar_->alternatives(grammar_->symbol(stack.back()).index)) {
      todo.push_back(rest);
      if (!grammar_->is_end(first)) todo.back().push_back(first);
    }
  }
  std::sort(result.begin(), result.end());
  return result;
}

std::uint32_t GrammarMatcher::intern(Stacks stacks) {
  const auto [found, is_new] =
      ids_.try_emplace(std::move(stacks), static_cast<std::uint32_t>(states_.size()));
  if (!is_new) return found->second;
  stacks_.push_back(&found->first);
  State& state = states_.emplace_back();
  state.next.fill(kUnknown);
  state.complete = !found->first.empty() && found->first.front().empty();
  return found->second;
}

// All states but the one that the text has reached.
void GrammarMatcher::forget() {
  Stacks reached = *stacks_[current_];
  ids_.clear();
  stacks_.clear();
  states_.clear();
  intern({});
  current_ = intern(std::move(reached));
}

}  // namespace dualdecoder
