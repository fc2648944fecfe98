// Turns the byte pieces of generated tokens into text that may be shown: whole UTF-8 characters, ended by
// stop strings.
//
// Characters: every string handed out is valid UTF-8 by itself. A character spread over tokens comes out
// whole with its last byte. Bytes that cannot be UTF-8 become U+FFFD, one for each maximal subpart of an
// ill-formed sequence (Unicode Standard, section 3.9, "U+FFFD Substitution of Maximal Subparts", table 3-7;
// the practice of the W3C decoders too). A character that the end of generation cuts off is left out.
//
// Stop strings are looked for in this text (whole characters, after substitution; the prompt is never part of
// it). The match that ends first ends the text where it starts; of several that end together, the longest
// counts. Held back is the longest suffix that is a proper prefix of some stop string, nothing more: no part
// of a stop string is ever shown, and a false start is released with the character that refutes it.
//
// Cost: linear in the bytes pushed, times the number of stop strings, however the bytes are cut into pieces.
// Pure: no I/O, no model. A plain value with one owner, the sequence; no thread rule beyond that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace dualdecoder {

inline constexpr std::size_t kMaxStopStrings = 16;

/// Whether the strings can be used as stop strings: at most kMaxStopStrings, none empty, all valid UTF-8.
Status validate_stop_strings(std::span<const std::string> stop_strings);

/// Decodes a stream of bytes to valid UTF-8, with U+FFFD for what is ill-formed.
class Utf8Stream {
 public:
  /// Appends to `text` every character that is complete now.
  void push(std::string_view bytes, std::string& text);

  /// Bytes of a character that is begun and not complete: 0 to 3.
  std::size_t partial_bytes() const { return partial_size_; }
  /// Number of U+FFFD put in the place of ill-formed bytes so far.
  std::size_t replaced() const { return replaced_; }

 private:
  void begin(std::uint8_t byte, std::string& text);
  void replace(std::string& text);

  char partial_[4] = {};
  std::uint8_t partial_size_ = 0;
  std::uint8_t missing_ = 0;  // continuation bytes to come; 0 between characters
  // Range of the next continuation byte: rules out overlong forms, surrogates and what lies above U+10FFFF.
  std::uint8_t next_low_ = 0x80;
  std::uint8_t next_high_ = 0xBF;
  std::size_t replaced_ = 0;
};

class TextAssembler {
 public:
  /// `stop_strings` have passed validate_stop_strings().
  explicit TextAssembler(std::vector<std::string> stop_strings);

  /// Takes the next token's bytes (any number, none too) and returns the text that has become final, often
  /// "". After stopped() or finish() it returns "" and ignores the bytes.
  std::string push(std::string_view piece);

  /// A stop string has ended the text; everything before it has been returned.
  bool stopped() const { return stopped_; }

  /// The generation ends for another reason (length, end token): returns what was held back as the possible
  /// beginning of a stop string. A character that is not complete is left out. "" when called again or after
  /// stopped().
  std::string finish();

 private:
  // One Knuth-Morris-Pratt automaton per stop string: 4 bytes per byte of stop string, against a kilobyte per
  // byte for the transition table of one Aho-Corasick automaton over them all.
  struct StopMatcher {
    std::string pattern;
    std::vector<std::uint32_t> border;  // [n]: length of the longest proper border of pattern[0 .. n]
    std::uint32_t matched = 0;          // longest suffix of the text that is a prefix of the pattern

    bool advance(char byte);  // true: the pattern ends with this byte
  };

  // Runs the matchers over held_[from, end). At a match cuts the stop string and what follows it off.
  void match(std::size_t from);
  std::string release(std::size_t end);

  std::vector<StopMatcher> stops_;
  Utf8Stream characters_;
  std::string held_;  // bytes before held_begin_ have been released already
  std::size_t held_begin_ = 0;
  bool stopped_ = false;
  bool finished_ = false;
};

}  // namespace dualdecoder
