#include "transfer/far_file.h"

#include <cstring>
#include <filesystem>
#include <fstream>

#include <fcntl.h>
#include <sys/stat.h>

#include <gmock/gmock.h>

#include "base/hash.h"
#include "transfer/far_file_testing.h"

namespace dualdecoder {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kPage = 64 << 10;
constexpr FarIdentity kIdentity{
    .weights_hash = 0x1234'5678'9abc'def0,
    .geometry = {.layers = 3, .kv_heads = 2, .head_dim = 16, .block_tokens = 16},
};

Result<std::unique_ptr<FarFile>> open_in(const std::string& directory, std::uint32_t pages_max = 160) {
  return FarFile::open(directory, kIdentity, kPage, pages_max);
}

std::uint64_t bytes_on_disk(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(stat(path.c_str(), &status), 0) << path;
  return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TEST(FarFile, BeginsWithAHeaderThatNamesItsOwner) {
  const TemporaryDirectory directory;
  const auto file = open_in(directory.path());
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ((*file)->path(), directory.file("kv.dualdecoder"));
  EXPECT_EQ((*file)->leftover_bytes(), 0U);
  EXPECT_EQ(std::filesystem::file_size((*file)->path()), kFarHeaderBytes);
  FarFileHeader header{};
  std::ifstream((*file)->path(), std::ios::binary).read(reinterpret_cast<char*>(&header), sizeof(header));
  EXPECT_EQ(std::memcmp(header.magic, kFarFileMagic, sizeof(header.magic)), 0);
  EXPECT_EQ(header.layout_version, kFarLayoutVersion);
  EXPECT_EQ(header.kv_type, kFarKvTypeF16);
  EXPECT_EQ(header.weights_hash, kIdentity.weights_hash);
  EXPECT_EQ(header.layers, 3U);
  EXPECT_EQ(header.kv_heads, 2U);
  EXPECT_EQ(header.head_dim, 16U);
  EXPECT_EQ(header.block_tokens, 16U);
  EXPECT_EQ(header.page_bytes, kPage);
  const auto hashed = std::as_bytes(std::span(&header, 1)).first(offsetof(FarFileHeader, checksum));
  EXPECT_EQ(header.checksum, hash_bytes(hashed));
}

TEST(FarFile, IsGoneWithItsObject) {
  const TemporaryDirectory directory;
  for (int round = 0; round < 3; ++round) {
    const auto file = open_in(directory.path());
    ASSERT_TRUE(file) << file.error().message;
    ASSERT_TRUE((*file)->reserve(10));
    EXPECT_EQ((*file)->leftover_bytes(), 0U);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(FarFile, GrowsAheadButNeverBeyondItsCap) {
  const TemporaryDirectory directory;
  constexpr std::uint32_t kPagesMax = 1500;  // 94 MiB: more than one extent, less than two
  const auto file = open_in(directory.path(), kPagesMax);
  ASSERT_TRUE(file) << file.error().message;
  ASSERT_TRUE((*file)->reserve(0));
  EXPECT_EQ((*file)->pages_reserved(), 0U);
  for (const std::uint32_t pages : {1U, 1024U, 1025U, kPagesMax}) {
    ASSERT_TRUE((*file)->reserve(pages));
    EXPECT_EQ((*file)->pages_reserved(), pages <= 1024 ? 1024U : kPagesMax);
    EXPECT_EQ(std::filesystem::file_size((*file)->path()), (*file)->bytes());
    EXPECT_LE(bytes_on_disk((*file)->path()), kFarHeaderBytes + kPagesMax * kPage);
    EXPECT_GE(bytes_on_disk((*file)->path()), pages * kPage) << "room must be real";
  }
  EXPECT_EQ((*file)->bytes(), (*file)->bytes_max());
}

TEST(FarFile, PutsPagesBehindTheHeaderWithoutGaps) {
  const TemporaryDirectory directory;
  const auto file = FarFile::open(directory.path(), kIdentity, std::uint64_t{1} << 32, UINT32_MAX >> 2);
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ((*file)->page_offset(0), 4096U);
  EXPECT_EQ((*file)->page_offset(UINT32_MAX >> 2), 4096 + (std::uint64_t{UINT32_MAX >> 2} << 32));
  const auto too_large = FarFile::open(directory.path(), kIdentity, std::uint64_t{1} << 32, UINT32_MAX);
  ASSERT_FALSE(too_large);
  EXPECT_EQ(too_large.error().code, ErrorCode::kInvalidArgument);
}

TEST(FarFile, SaysWhatIsWrongWithTheDirectory) {
  const TemporaryDirectory directory;
  const auto missing = open_in(directory.file("missing"));
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr("missing\" for the far tier: No such file or directory"));

  write_file(directory.file("file"), "text");
  const auto not_a_directory = open_in(directory.file("file"));
  ASSERT_FALSE(not_a_directory);
  EXPECT_EQ(not_a_directory.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(not_a_directory.error().message, HasSubstr("file\" is not a directory"));
  EXPECT_FALSE(open_in(""));

  const auto not_writable = open_in("/proc/self");
  ASSERT_FALSE(not_writable);
  EXPECT_EQ(not_writable.error().code, ErrorCode::kIo);
  EXPECT_THAT(not_writable.error().message, HasSubstr("cannot create /proc/self/kv.dualdecoder"));
}

TEST(FarFile, SaysThatTheDirectoryIsReadOnly) {
  const MountedFileSystem read_only("size=1m", MS_RDONLY);
  if (!read_only.mounted()) GTEST_SKIP() << "mounting is refused";
  const auto file = open_in(read_only.path());
  ASSERT_FALSE(file);
  EXPECT_EQ(file.error().code, ErrorCode::kIo);
  EXPECT_THAT(file.error().message, HasSubstr("Read-only file system"));
}

TEST(FarFile, LeavesFilesOfOthersAlone) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("kv.dualdecoder");
  for (const std::string& text : {std::string("x"), std::string(8192, '\0'), std::string("DDecKV")}) {
    write_file(path, text);
    const auto file = open_in(directory.path());
    ASSERT_FALSE(file);
    EXPECT_EQ(file.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(file.error().message, HasSubstr(path + " exists and is not a file of dualdecoder"));
    EXPECT_EQ(*read_text_file(path), text);
  }
  std::filesystem::remove(path);
  write_file(directory.file("other"), "text");
  std::filesystem::create_symlink("other", path);
  EXPECT_FALSE(open_in(directory.path())) << "a link would lead out of the directory";
  EXPECT_EQ(*read_text_file(directory.file("other")), "text");
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_FALSE(open_in(directory.path()));
  std::filesystem::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(open_in(directory.path()));
}

TEST(FarFile, StartsAnewOverWhatAnEarlierProcessLeft) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("kv.dualdecoder");
  const std::string magic = kFarFileMagic;
  const std::string damaged_header = magic + std::string(5000, '\xee');
  for (const std::string& text : {magic, damaged_header, std::string()}) {
    write_file(path, text);
    const auto file = open_in(directory.path());
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_EQ((*file)->leftover_bytes(), text.size());
    EXPECT_EQ(std::filesystem::file_size(path), kFarHeaderBytes);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(FarFile, LocksTheSecondUserOut) {
  const TemporaryDirectory directory;
  ChildProcess first([&](auto ready) {
    const auto file = open_in(directory.path());
    if (!file || !(*file)->reserve(3)) return;
    ready();
    pause();
  });
  ASSERT_TRUE(first.wait_until_ready());
  const auto second = open_in(directory.path());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kIo);
  EXPECT_EQ(second.error().message,
            "another dualdecoder uses " + directory.path() + "; stop it or name another directory");
  EXPECT_TRUE(std::filesystem::exists(directory.file("kv.dualdecoder")));

  first.kill_hard();
  const auto third = open_in(directory.path());
  ASSERT_TRUE(third) << third.error().message;
  EXPECT_EQ((*third)->leftover_bytes(), kFarHeaderBytes + 160 * kPage);
  EXPECT_FALSE(open_in(directory.path())) << "nor twice in one process";
}

TEST(FarFile, RemovesNobodyElsesFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("kv.dualdecoder");
  {
    const auto removed = open_in(directory.path());
    ASSERT_TRUE(removed);
    std::filesystem::remove(path);
    ASSERT_TRUE((*removed)->reserve(4));
    write_file(path, "text");
  }
  EXPECT_EQ(*read_text_file(path), "text");
}

TEST(FarFile, ReportsAFullDiskAndGoesOnWhenThereIsSpace) {
  const MountedFileSystem disk("size=2m");
  if (!disk.mounted()) GTEST_SKIP() << "mounting is refused";
  const auto file = open_in(disk.path());  // cap 10 MiB
  ASSERT_TRUE(file) << file.error().message;
  ASSERT_TRUE((*file)->reserve(8)) << "an extent does not fit, what is needed does";
  EXPECT_EQ((*file)->pages_reserved(), 8U);
  write_file(disk.file("ballast"), std::string(1 << 20, 'x'));

  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto full = (*file)->reserve(20);
    ASSERT_FALSE(full);
    EXPECT_EQ(full.error().code, ErrorCode::kIo);
    EXPECT_THAT(full.error().message,
                HasSubstr("cannot grow " + (*file)->path() + " by 768 KiB: No space left"));
    EXPECT_THAT(full.error().message, HasSubstr(" KiB free); free space there"));
    EXPECT_EQ((*file)->pages_reserved(), 8U);
    EXPECT_EQ(bytes_on_disk((*file)->path()), (*file)->bytes());
  }
  std::filesystem::remove(disk.file("ballast"));
  EXPECT_TRUE((*file)->reserve(20));
}

TEST(FarFile, ReportsADiskTooFullToBegin) {
  const MountedFileSystem disk("size=64k");
  if (!disk.mounted()) GTEST_SKIP() << "mounting is refused";
  write_file(disk.file("ballast"), std::string(64 << 10, 'x'));
  const auto file = open_in(disk.path());
  ASSERT_FALSE(file);
  EXPECT_THAT(file.error().message, HasSubstr("No space left on device"));
  EXPECT_FALSE(std::filesystem::exists(disk.file("kv.dualdecoder")));
}

}  // namespace
}  // namespace dualdecoder
