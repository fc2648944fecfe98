// What an earlier process has left in the folder of a far tier. The first byte of the input chooses: the
// header of the file of kept pages, the file of their index, or rows of such an index.
#include <algorithm>
#include <array>

#include "base/check.h"
#include "decode/plan.h"
#include "decode/prefix_cache.h"
#include "decode/prefix_store.h"
#include "decode/tiers.h"
#include "fuzz.h"
#include "temporary_directory.h"
#include "transfer/far_file.h"

using namespace dualdecoder;

namespace {

constexpr std::uint64_t kWeightsHash = 7;
constexpr std::uint64_t kIdentity = 11;
constexpr std::uint32_t kPages = 8;

Hyperparameters small_model() {
  Hyperparameters model;
  model.layers = 2;
  model.heads = 1;
  model.kv_heads = 1;
  model.head_dim = 16;
  model.window = {0, 0};
  return model;
}

EngineOptions options_in(const std::string& directory) {
  EngineOptions options;
  options.context = 128;
  options.prefill_chunk = 16;
  options.block_tokens = 16;
  options.tiers.far.kind = FarKind::kFile;
  options.tiers.far.directory = directory;
  options.tiers.keep_prefixes = true;
  options.tiers.policy = Policy::kFull;
  options.tiers.sink_tokens = 16;
  options.tiers.recent_tokens = 16;
  options.tiers.budget_tokens = 16;
  options.tiers.staging_tokens = 16;
  return options;
}

std::unique_ptr<Tiers> open_tiers(const std::string& directory) {
  const EngineOptions options = options_in(directory);
  const auto plan = plan_memory(small_model(), options);
  DD_CHECK(plan, "{}", plan.error().message);
  auto tiers = Tiers::create(*plan, options.tiers, kWeightsHash);
  return tiers ? std::move(*tiers) : nullptr;
}

// All pages of the file: what is only kept must make room.
void take_all_pages(Tiers& tiers) {
  std::vector<PageIndex> taken;
  for (std::uint32_t page = 0; page < tiers.far().pages_max(); ++page) {
    const auto index = tiers.far().take_page();
    DD_CHECK(index, "{}", index.error().message);
    DD_CHECK(std::ranges::find(taken, *index) == taken.end());
    taken.push_back(*index);
  }
  for (const PageIndex page : taken) tiers.far().release(page);
}

void load(Tiers& tiers, const std::string& directory) {
  auto store = PrefixStore::open(directory, kIdentity, false);
  if (!store) return;
  const PrefixCache cache(tiers, std::move(*store));
  take_all_pages(tiers);
}

// Ids are small, so that they meet, but for the largest ones.
void add_rows(PrefixStore& store, Input input) {
  const auto id = [&input] {
    const std::uint8_t byte = input.byte();
    return byte < 250 ? std::uint64_t{byte} % 16 : UINT64_MAX - byte % 3;
  };
  while (!input.empty()) {
    if (input.byte() % 4 == 0) {
      const std::uint64_t root = id();
      static_cast<void>(store.add_root({.id = root, .salt = std::string(input.take(input.byte() % 4))}));
      continue;
    }
    KeptPage page;
    page.id = id();
    page.parent = id();
    page.used = id();
    page.exact = input.byte() % 2 == 0;
    page.page = PageIndex(input.byte() % (kPages + 2));
    page.tokens.assign(input.byte() % 8 == 0 ? 15 : 16, input.byte());
    page.checksums.assign(input.byte() % 8 == 0 ? 3 : 2, input.byte());
    static_cast<void>(store.add(page, {}));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const TemporaryDirectory directory;
  static const std::string pages = directory.file("prefixes.dualdecoder");
  static const std::string index = directory.file("prefixes.sqlite");
  Input input(as_text(data, size));
  const std::uint8_t kind = input.byte() % 3;
  if (kind == 0) {
    const auto bytes = input.take(size);
    write_file(pages, bytes);
    if (open_tiers(directory.path()) == nullptr) std::filesystem::remove(pages);
    return 0;
  }
  // A file with pages that an earlier process has used.
  if (const auto tiers = open_tiers(directory.path())) take_all_pages(*tiers);
  const auto tiers = open_tiers(directory.path());
  DD_CHECK(tiers != nullptr && tiers->file()->taken_up());
  if (kind == 1) {
    for (const char* suffix : {"-wal", "-shm"}) std::filesystem::remove(index + suffix);
    write_file(index, input.take(size));
  } else {
    auto store = PrefixStore::open(directory.path(), kIdentity, true);
    DD_CHECK(store, "{}", store.error().message);
    DD_CHECK((*store)->begin());
    add_rows(**store, input);
    DD_CHECK((*store)->commit());
  }
  load(*tiers, directory.path());
  return 0;
}
