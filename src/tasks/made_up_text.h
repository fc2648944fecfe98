// Text that a seed makes up, as long as wanted: sentences that say nothing in particular and contain no
// digits, and lines of a log. What planted facts are hidden in, and what is decoded where no text is given.
#pragma once

#include <string>

#include "base/random.h"

namespace dualdecoder {

/// One sentence with its full stop. Their order makes no story, so any may be left out.
std::string made_up_sentence(Random& random);

/// "brass lantern" and the like.
std::string made_up_thing(Random& random);

/// A line of a log, `second` seconds after midnight.
std::string made_up_log_line(Random& random, std::uint32_t second);

/// At least `bytes` of sentences in paragraphs.
std::string made_up_text(std::uint64_t seed, std::size_t bytes);

}  // namespace dualdecoder
