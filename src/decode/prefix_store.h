// The index of kept prefixes on disk, beside the far file: which page holds which tokens behind which others,
// its checksums and its digests. In SQLite, so that it is whole after the process was killed at any moment; a
// power cut may cost it, and then it begins empty. It says nothing that is not checked: what it leads to is
// verified by the checksums of its blocks.
//
// A row is there from when its page has been written until before the page is used for anything else. Owned
// by the engine's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "kv/geometry.h"
#include "model/vocabulary.h"

struct sqlite3;
struct sqlite3_stmt;

namespace dualdecoder {

struct KeptRoot {
  std::uint64_t id = 0;
  std::string salt;
};

struct KeptPage {
  std::uint64_t id = 0;
  std::uint64_t parent = 0;
  std::uint64_t used = 0;
  bool exact = true;
  PageIndex page;
  std::vector<TokenId> tokens;
  std::vector<std::uint64_t> checksums;  // [layer]
};

class PrefixStore {
 public:
  /// DIRECTORY/prefixes.sqlite, for pages of `identity`. What is of another one, or damaged, is begun anew,
  /// as all is when `fresh`. The directory is locked by the far file.
  static Result<std::unique_ptr<PrefixStore>> open(const std::string& directory, std::uint64_t identity,
                                                   bool fresh);
  ~PrefixStore();
  PrefixStore(const PrefixStore&) = delete;
  PrefixStore& operator=(const PrefixStore&) = delete;

  /// All that is there; parents before their children.
  Result<std::vector<KeptRoot>> load_roots();
  Result<std::vector<KeptPage>> load_pages();

  /// What changes between these two is there as a whole after a crash, or not at all.
  Status begin();
  Status commit();
  Status add_root(const KeptRoot& root);
  /// Also in the place of a page with the same id.
  Status add(const KeptPage& page, std::span<const std::byte> digests);
  Status remove(std::uint64_t id);
  Status set_used(std::uint64_t id, std::uint64_t used);
  /// The digests of a page.
  Result<std::vector<std::byte>> digests(std::uint64_t id);

 private:
  struct Closer {
    void operator()(sqlite3* database) const;
    void operator()(sqlite3_stmt* statement) const;
  };
  using Statement = std::unique_ptr<sqlite3_stmt, Closer>;

  explicit PrefixStore(std::string path) : path_(std::move(path)) {}
  Status connect();
  Status begin_anew(std::uint64_t identity);
  bool usable(std::uint64_t identity);
  Status execute(const char* sql);
  Statement prepare(const char* sql);
  Status run(sqlite3_stmt* statement);
  std::unexpected<Error> failed();

  std::string path_;
  std::unique_ptr<sqlite3, Closer> database_;
  Statement add_root_;
  Statement add_;
  Statement remove_;
  Statement set_used_;
  Statement digests_;
};

}  // namespace dualdecoder
