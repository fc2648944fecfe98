#include "decode/text_assembler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace dualdecoder {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

std::vector<std::uint32_t> make_borders(std::string_view pattern) {
  std::vector<std::uint32_t> border(pattern.size(), 0);
  std::uint32_t length = 0;
  for (std::size_t i = 1; i < pattern.size(); ++i) {
    while (length > 0 && pattern[i] != pattern[length]) length = border[length - 1];
    if (pattern[i] == pattern[length]) ++length;
    border[i] = length;
  }
  return border;
}

}  // namespace

Status validate_stop_strings(std::span<const std::string> stop_strings) {
  if (stop_strings.size() > kMaxStopStrings) {
    return fail(ErrorCode::kInvalidArgument, "{} stop strings given; at most {} are allowed",
                stop_strings.size(), kMaxStopStrings);
  }
  for (std::size_t i = 0; i < stop_strings.size(); ++i) {
    const std::string& stop = stop_strings[i];
    if (stop.empty()) {
      return fail(ErrorCode::kInvalidArgument, "stop string {} is empty; it would end every text at once", i);
    }
    if (stop.size() > std::numeric_limits<std::uint32_t>::max()) {
      return fail(ErrorCode::kInvalidArgument, "stop string {} has {} bytes; it must be below 4 GiB", i,
                  stop.size());
    }
    Utf8Stream characters;
    std::string text;
    characters.push(stop, text);
    if (characters.replaced() > 0 || characters.partial_bytes() > 0) {
      return fail(ErrorCode::kInvalidArgument, "stop string {} is not valid UTF-8; it could never match", i);
    }
  }
  return {};
}

void Utf8Stream::push(std::string_view bytes, std::string& text) {
  for (char c : bytes) {
    const auto byte = static_cast<std::uint8_t>(c);
    if (missing_ > 0) {
      if (byte >= next_low_ && byte <= next_high_) {
        partial_[partial_size_++] = c;
        next_low_ = 0x80;
        next_high_ = 0xBF;
        if (--missing_ == 0) {
          text.append(partial_, partial_size_);
          partial_size_ = 0;
        }
        continue;
      }
      replace(text);  // the bytes so far are a maximal subpart; this byte begins anew
    }
    begin(byte, text);
  }
}

// First bytes and the range of the second, by table 3-7 of the Unicode Standard.
void Utf8Stream::begin(std::uint8_t byte, std::string& text) {
  if (byte < 0x80) {
    text.push_back(static_cast<char>(byte));
    return;
  }
  if (byte < 0xC2 || byte > 0xF4) {  // a continuation byte alone, overlong, or above U+10FFFF
    replace(text);
    return;
  }
  missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  next_low_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  next_high_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
  partial_[0] = static_cast<char>(byte);
  partial_size_ = 1;
}

void Utf8Stream::replace(std::string& text) {
  text.append(kReplacement);
  partial_size_ = 0;
  missing_ = 0;
  ++replaced_;
}

TextAssembler::TextAssembler(std::vector<std::string> stop_strings) {
  const Status valid = validate_stop_strings(stop_strings);
  DD_CHECK(valid.has_value(), "{}", valid.error().message);
  stops_.reserve(stop_strings.size());
  for (std::string& stop : stop_strings) {
    std::vector<std::uint32_t> border = make_borders(stop);
    stops_.push_back({std::move(stop), std::move(border), 0});
  }
}

bool TextAssembler::StopMatcher::advance(char byte) {
  while (matched > 0 && byte != pattern[matched]) matched = border[matched - 1];
  if (byte == pattern[matched]) ++matched;
  return matched == pattern.size();
}

std::string TextAssembler::push(std::string_view piece) {
  if (stopped_ || finished_) return {};
  const std::size_t from = held_.size();
  characters_.push(piece, held_);
  match(from);
  std::size_t keep = 0;
  if (!stopped_) {
    for (const StopMatcher& stop : stops_) keep = std::max<std::size_t>(keep, stop.matched);
  }
  return release(held_.size() - keep);
}

std::string TextAssembler::finish() {
  if (stopped_ || finished_) return {};
  finished_ = true;
  return release(held_.size());
}

void TextAssembler::match(std::size_t from) {
  for (std::size_t i = from; i < held_.size(); ++i) {
    std::size_t longest = 0;
    for (StopMatcher& stop : stops_) {
      if (stop.advance(held_[i])) longest = std::max(longest, stop.pattern.size());
    }
    if (longest > 0) {
      held_.resize(i + 1 - longest);
      stopped_ = true;
      return;
    }
  }
}

std::string TextAssembler::release(std::size_t end) {
  std::string text = held_.substr(held_begin_, end - held_begin_);
  held_begin_ = end;
  // Moving what is still held to the front costs no more than what was released since the last time: linear
  // in all.
  if (held_begin_ >= held_.size() - held_begin_) {
    held_.erase(0, held_begin_);
    held_begin_ = 0;
  }
  return text;
}

}  // namespace dualdecoder
