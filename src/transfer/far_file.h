// The file behind `--far file:DIR`: DIR/kv.dualdecoder, a header of 4 KiB, then page slots of equal size.
//
// One process uses a file at a time: it is locked as long as the object lives. Its pages are scratch: what a
// process that ended hard left behind is removed at the next start, and the file goes with the object. Unless
// it is to be kept: then it is DIR/prefixes.dualdecoder, stays, and is taken up again by the next object of
// the same identity; what its pages hold is for others to know (decode/prefix_store.h). A file that is not
// ours is never touched. The file holds disk blocks for every page that was reserved (where the file system
// can promise them), so a full disk is an error of reserve() and not of a later write; it never exceeds
// bytes_max().
//
// The lock is held by a descriptor of its own, which is never given to io_uring: the kernel lets go of a
// killed process's ring some time after the process, and the next start need not wait for that. Writes that
// were under way then end in the removed file.
//
// Used by the thread that uses its port, and outlives the port.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/file.h"
#include "kv/geometry.h"

namespace dualdecoder {

/// What pages must have in common to be readable by this engine.
struct FarIdentity {
  std::uint64_t weights_hash = 0;
  KvGeometry geometry;
};

/// The header as it is on disk: little endian, zeros up to kFarHeaderBytes.
struct FarFileHeader {
  char magic[8];
  std::uint32_t layout_version;
  std::uint32_t kv_type;
  std::uint64_t weights_hash;
  std::uint32_t layers;
  std::uint32_t kv_heads;
  std::uint32_t head_dim;
  std::uint32_t block_tokens;
  std::uint64_t page_bytes;
  std::uint64_t checksum;  // XXH3 of all fields before it
};
inline constexpr char kFarFileMagic[] = "DDecKV\r\n";
inline constexpr std::size_t kFarHeaderBytes = 4096;
inline constexpr std::uint32_t kFarLayoutVersion = 1;
inline constexpr std::uint32_t kFarKvTypeF16 = 1;

class FarFile {
 public:
  /// `page_bytes` is a multiple of kPortAlignment.
  static Result<std::unique_ptr<FarFile>> open(const std::string& directory, const FarIdentity& identity,
                                               std::uint64_t page_bytes, std::uint32_t pages_max,
                                               bool keep = false);
  ~FarFile();
  FarFile(const FarFile&) = delete;
  FarFile& operator=(const FarFile&) = delete;

  /// Makes room for `pages` (<= pages_max) in all. An error (kIo: disk full) changes nothing; the same call
  /// can succeed later.
  Status reserve(std::uint32_t pages);
  std::uint32_t pages_reserved() const { return pages_reserved_; }
  std::uint32_t pages_max() const { return pages_max_; }
  std::uint64_t page_offset(std::uint32_t page) const { return kFarHeaderBytes + page * page_bytes_; }
  std::uint64_t bytes() const { return page_offset(pages_reserved_); }
  std::uint64_t bytes_max() const { return page_offset(pages_max_); }

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  /// Reads and writes go past the page cache.
  bool direct() const { return direct_; }
  /// An earlier object's pages are still there.
  bool taken_up() const { return taken_up_; }
  /// Bytes that an earlier process had left behind and that were removed; 0 normally.
  std::uint64_t leftover_bytes() const { return leftover_bytes_; }

 private:
  FarFile(std::string path, std::uint64_t page_bytes, std::uint32_t pages_max, bool keep)
      : path_(std::move(path)), page_bytes_(page_bytes), pages_max_(pages_max), keep_(keep) {}
  FarFileHeader header_for(const FarIdentity& identity) const;
  Status lock(const FarFileHeader& header);
  bool take_up(int fd, const FarFileHeader& header, std::uint64_t bytes);
  Status open_for_copies();
  Status write_header(const FarFileHeader& header);
  int try_grow(std::uint32_t pages);

  std::string path_;
  std::uint64_t page_bytes_;
  std::uint32_t pages_max_;
  bool keep_;
  bool taken_up_ = false;
  std::uint32_t pages_reserved_ = 0;
  std::uint64_t leftover_bytes_ = 0;
  bool direct_ = false;
  FileDescriptor lock_fd_;
  FileDescriptor fd_;
};

}  // namespace dualdecoder
