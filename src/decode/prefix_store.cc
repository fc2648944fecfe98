#include "decode/prefix_store.h"

#include <cstring>
#include <filesystem>

#include <sqlite3.h>

#include "base/check.h"

namespace dualdecoder {
namespace {

// Raised when the tables change: others are begun anew.
constexpr std::int64_t kVersion = 1;

constexpr const char* kTables = R"(
  CREATE TABLE about (version INTEGER, identity INTEGER);
  CREATE TABLE root (id INTEGER PRIMARY KEY, salt TEXT);
  CREATE TABLE page (id INTEGER PRIMARY KEY, parent INTEGER, used INTEGER, exact INTEGER, page INTEGER,
                     tokens BLOB, checksums BLOB, digests BLOB);
)";

std::int64_t stored(std::uint64_t value) { return static_cast<std::int64_t>(value); }

template <typename T>
void bind_values(sqlite3_stmt* statement, int index, std::span<const T> values) {
  sqlite3_bind_blob64(statement, index, values.data(), values.size_bytes(), SQLITE_STATIC);
}

template <typename T>
std::vector<T> column_values(sqlite3_stmt* statement, int column) {
  const auto bytes = static_cast<std::size_t>(sqlite3_column_bytes(statement, column));
  std::vector<T> values(bytes / sizeof(T));
  if (!values.empty())
    std::memcpy(values.data(), sqlite3_column_blob(statement, column), values.size() * sizeof(T));
  return values;
}

}  // namespace

void PrefixStore::Closer::operator()(sqlite3* database) const { sqlite3_close_v2(database); }
void PrefixStore::Closer::operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }

Result<std::unique_ptr<PrefixStore>> PrefixStore::open(const std::string& directory, std::uint64_t identity,
                                                       bool fresh) {
  std::unique_ptr<PrefixStore> store(
      new PrefixStore((std::filesystem::path(directory) / "prefixes.sqlite").string()));
  if (fresh || !store->connect() || !store->usable(identity)) {
    if (Status status = store->begin_anew(identity); !status) return std::unexpected(status.error());
  }
  store->add_root_ = store->prepare("INSERT INTO root VALUES (?, ?)");
  store->add_ = store->prepare("INSERT OR REPLACE INTO page VALUES (?, ?, ?, ?, ?, ?, ?, ?)");
  store->remove_ = store->prepare("DELETE FROM page WHERE id = ?");
  store->set_used_ = store->prepare("UPDATE page SET used = ? WHERE id = ?");
  store->digests_ = store->prepare("SELECT digests FROM page WHERE id = ?");
  for (const Statement* statement :
       {&store->add_root_, &store->add_, &store->remove_, &store->set_used_, &store->digests_}) {
    if (*statement == nullptr) return store->failed();
  }
  return store;
}

PrefixStore::~PrefixStore() = default;

std::unexpected<Error> PrefixStore::failed() {
  return fail(ErrorCode::kIo, "{}: {}; if it is damaged, remove it", path_,
              database_ ? sqlite3_errmsg(database_.get()) : "out of memory");
}

Status PrefixStore::execute(const char* sql) {
  if (sqlite3_exec(database_.get(), sql, nullptr, nullptr, nullptr) == SQLITE_OK) return {};
  return failed();
}

PrefixStore::Statement PrefixStore::prepare(const char* sql) {
  sqlite3_stmt* statement = nullptr;
  sqlite3_prepare_v2(database_.get(), sql, -1, &statement, nullptr);
  return Statement(statement);
}

// No fsync: a killed process leaves what it wrote to the system, and that is all that is promised.
Status PrefixStore::connect() {
  sqlite3* database = nullptr;
  const int result =
      sqlite3_open_v2(path_.c_str(), &database, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr);
  database_.reset(database);
  if (result != SQLITE_OK) return failed();
  return execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;");
}

bool PrefixStore::usable(std::uint64_t identity) {
  const Statement check = prepare("PRAGMA quick_check(1)");
  const bool sound =
      check && sqlite3_step(check.get()) == SQLITE_ROW &&
      std::strcmp(reinterpret_cast<const char*>(sqlite3_column_text(check.get(), 0)), "ok") == 0;
  if (!sound) return false;
  const Statement about = prepare("SELECT version, identity FROM about");
  return about && sqlite3_step(about.get()) == SQLITE_ROW &&
         sqlite3_column_int64(about.get(), 0) == kVersion &&
         sqlite3_column_int64(about.get(), 1) == stored(identity);
}

Status PrefixStore::begin_anew(std::uint64_t identity) {
  database_.reset();
  for (const char* suffix : {"", "-wal", "-shm"}) {
    std::error_code ignored;
    std::filesystem::remove(path_ + suffix, ignored);
  }
  if (Status status = connect(); !status) return status;
  if (Status status = execute(kTables); !status) return status;
  const Statement about = prepare("INSERT INTO about VALUES (?, ?)");
  if (!about) return failed();
  sqlite3_bind_int64(about.get(), 1, kVersion);
  sqlite3_bind_int64(about.get(), 2, stored(identity));
  return run(about.get());
}

Status PrefixStore::run(sqlite3_stmt* statement) {
  const int result = sqlite3_step(statement);
  const Status status = result == SQLITE_DONE || result == SQLITE_ROW ? Status{} : Status(failed());
  sqlite3_reset(statement);
  sqlite3_clear_bindings(statement);
  return status;
}

Result<std::vector<KeptRoot>> PrefixStore::load_roots() {
  std::vector<KeptRoot> roots;
  const Statement select = prepare("SELECT id, salt FROM root ORDER BY id");
  if (!select) return failed();
  int result = SQLITE_ROW;
  while ((result = sqlite3_step(select.get())) == SQLITE_ROW) {
    roots.push_back({.id = static_cast<std::uint64_t>(sqlite3_column_int64(select.get(), 0)),
                     .salt = {reinterpret_cast<const char*>(sqlite3_column_text(select.get(), 1)),
                              static_cast<std::size_t>(sqlite3_column_bytes(select.get(), 1))}});
  }
  if (result != SQLITE_DONE) return failed();
  return roots;
}

Result<std::vector<KeptPage>> PrefixStore::load_pages() {
  std::vector<KeptPage> pages;
  const Statement select =
      prepare("SELECT id, parent, used, exact, page, tokens, checksums FROM page ORDER BY id");
  if (!select) return failed();
  int result = SQLITE_ROW;
  while ((result = sqlite3_step(select.get())) == SQLITE_ROW) {
    sqlite3_stmt* const row = select.get();
    pages.push_back({.id = static_cast<std::uint64_t>(sqlite3_column_int64(row, 0)),
                     .parent = static_cast<std::uint64_t>(sqlite3_column_int64(row, 1)),
                     .used = static_cast<std::uint64_t>(sqlite3_column_int64(row, 2)),
                     .exact = sqlite3_column_int(row, 3) != 0,
                     .page = PageIndex(static_cast<std::uint32_t>(sqlite3_column_int64(row, 4))),
                     .tokens = column_values<TokenId>(row, 5),
                     .checksums = column_values<std::uint64_t>(row, 6)});
  }
  if (result != SQLITE_DONE) return failed();
  return pages;
}

Status PrefixStore::begin() { return execute("BEGIN"); }
Status PrefixStore::commit() { return execute("COMMIT"); }

Status PrefixStore::add_root(const KeptRoot& root) {
  sqlite3_bind_int64(add_root_.get(), 1, stored(root.id));
  sqlite3_bind_text64(add_root_.get(), 2, root.salt.data(), root.salt.size(), SQLITE_STATIC, SQLITE_UTF8);
  return run(add_root_.get());
}

Status PrefixStore::add(const KeptPage& page, std::span<const std::byte> digests) {
  sqlite3_stmt* const row = add_.get();
  sqlite3_bind_int64(row, 1, stored(page.id));
  sqlite3_bind_int64(row, 2, stored(page.parent));
  sqlite3_bind_int64(row, 3, stored(page.used));
  sqlite3_bind_int(row, 4, page.exact ? 1 : 0);
  sqlite3_bind_int64(row, 5, page.page.value);
  bind_values(row, 6, std::span<const TokenId>(page.tokens));
  bind_values(row, 7, std::span<const std::uint64_t>(page.checksums));
  bind_values(row, 8, digests);
  return run(row);
}

Status PrefixStore::remove(std::uint64_t id) {
  sqlite3_bind_int64(remove_.get(), 1, stored(id));
  return run(remove_.get());
}

Status PrefixStore::set_used(std::uint64_t id, std::uint64_t used) {
  sqlite3_bind_int64(set_used_.get(), 1, stored(used));
  sqlite3_bind_int64(set_used_.get(), 2, stored(id));
  return run(set_used_.get());
}

Result<std::vector<std::byte>> PrefixStore::digests(std::uint64_t id) {
  sqlite3_bind_int64(digests_.get(), 1, stored(id));
  if (sqlite3_step(digests_.get()) != SQLITE_ROW) {
    sqlite3_reset(digests_.get());
    return failed();
  }
  auto bytes = column_values<std::byte>(digests_.get(), 0);
  sqlite3_reset(digests_.get());
  return bytes;
}

}  // namespace dualdecoder
