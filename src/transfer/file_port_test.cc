#include "transfer/file_port.h"

#include <cerrno>
#include <cstring>
#include <filesystem>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "transfer/far_file_testing.h"
#include "transfer/port_testing.h"

namespace dualdecoder {
namespace {

constexpr std::uint64_t kPage = 16 << 10;
constexpr std::uint32_t kPages = 64;

std::unique_ptr<FarFile> far_file(const TemporaryDirectory& directory) {
  auto file = FarFile::open(directory.path(), {}, kPage, kPages);
  EXPECT_TRUE(file) << file.error().message;
  EXPECT_TRUE((*file)->reserve(kPages));
  return std::move(*file);
}

/// With io_uring where the system has it, and with threads.
class FilePort : public testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<Port> make_port(std::span<std::byte> near) {
    auto port = make_file_port(*file_, near, {.depth = kPages, .allow_uring = GetParam()});
    EXPECT_TRUE(port) << port.error().message;
    return std::move(*port);
  }

  TemporaryDirectory directory_;
  AlignedMemory near_{kPages * kPage};
  std::unique_ptr<FarFile> file_ = far_file(directory_);
};

TEST_P(FilePort, ReportsWhatATruncationTookAsEio) {
  fill_random(near_.span(), 1);
  const auto port = make_port(near_.span());
  ASSERT_EQ(copy_now(*port, CopyKind::kWrite, file_->page_offset(0), near_.span()), 0);
  AlignedMemory back(kPages * kPage);
  // In the middle of a page, and of a sector.
  const std::uint64_t end = file_->page_offset(3) + kPortAlignment + 100;
  ASSERT_EQ(truncate(file_->path().c_str(), static_cast<off_t>(end)), 0);
  EXPECT_EQ(copy_now(*port, CopyKind::kRead, file_->page_offset(0), back.span().first(3 * kPage)), 0);
  EXPECT_TRUE(std::ranges::equal(back.span().first(3 * kPage), near_.span().first(3 * kPage)));
  for (const std::uint32_t page : {3U, 4U, kPages - 1}) {
    EXPECT_EQ(copy_now(*port, CopyKind::kRead, file_->page_offset(page), back.span().first(kPage)), EIO)
        << page;
  }
  EXPECT_EQ(copy_now(*port, CopyKind::kRead, file_->page_offset(0), back.span()), EIO);
  const std::array<iovec, 2> pieces = {segment_of(back.unit(0)), segment_of(back.unit(2))};
  port->submit({.kind = CopyKind::kRead, .far_offset = file_->page_offset(3), .segments = pieces, .tag = 1});
  EXPECT_EQ(wait_for_one(*port), EIO);
}

TEST_P(FilePort, GoesOnWhenTheFileIsRemoved) {
  fill_random(near_.span(), 2);
  const auto port = make_port(near_.span());
  const std::span<std::byte> first = near_.span().first(kPage);
  ASSERT_EQ(copy_now(*port, CopyKind::kWrite, file_->page_offset(0), first), 0);
  std::filesystem::remove_all(directory_.path());
  const std::span<std::byte> second = near_.span().subspan(kPage, kPage);
  ASSERT_EQ(copy_now(*port, CopyKind::kWrite, file_->page_offset(1), second), 0);
  AlignedMemory back(2 * kPage);
  ASSERT_EQ(copy_now(*port, CopyKind::kRead, file_->page_offset(0), back.span()), 0);
  EXPECT_TRUE(std::ranges::equal(back.span(), near_.span().first(2 * kPage)));
}

TEST_P(FilePort, FinishesWhatIsInFlightBeforeItGoes) {
  fill_random(near_.span(), 3);
  auto port = make_port(near_.span());
  for (std::uint32_t page = 0; page < kPages; ++page) {
    submit(*port, CopyKind::kWrite, file_->page_offset(page), near_.span().subspan(page * kPage, kPage),
           page);
  }
  port.reset();
  const std::string on_disk = *read_text_file(file_->path());
  ASSERT_EQ(on_disk.size(), file_->bytes());
  EXPECT_EQ(std::memcmp(on_disk.data() + kFarHeaderBytes, near_.span().data(), kPages * kPage), 0);
}

TEST_P(FilePort, ReachesPagesReservedLater) {
  file_.reset();
  file_ = std::move(*FarFile::open(directory_.path(), {}, kPage, 8192));  // 128 MiB: two extents
  const auto port = make_port(near_.span());
  const std::uint64_t far_offset = file_->page_offset(5000);
  EXPECT_EQ(copy_now(*port, CopyKind::kWrite, far_offset, near_.span().first(kPage)), EIO);
  EXPECT_EQ(std::filesystem::file_size(file_->path()), kFarHeaderBytes) << "a write never grows the file";
  ASSERT_TRUE(file_->reserve(5001));
  EXPECT_EQ(copy_now(*port, CopyKind::kWrite, far_offset, near_.span().first(kPage)), 0);
}

TEST_P(FilePort, LeavesADirectoryThatTheNextStartCanUseWhenKilledInTheMiddleOfWrites) {
  file_.reset();
  ChildProcess writer([&](auto ready) {
    file_ = far_file(directory_);
    const auto port = make_port(near_.span());
    std::array<Completion, 16> completions;
    for (std::uint32_t page = 0; page < kPages; ++page) {
      submit(*port, CopyKind::kWrite, file_->page_offset(page), near_.span().subspan(page * kPage, kPage),
             page);
    }
    port->flush();
    ready();
    while (true) {
      const std::size_t count = port->wait(completions, std::chrono::seconds(60));
      for (const Completion& completion : std::span(completions).first(count)) {
        const auto near = near_.span().subspan(completion.tag * kPage, kPage);
        submit(*port, CopyKind::kWrite, file_->page_offset(static_cast<std::uint32_t>(completion.tag)), near,
               completion.tag);
      }
    }
  });
  ASSERT_TRUE(writer.wait_until_ready());
  writer.kill_hard();
  file_ = far_file(directory_);
  EXPECT_EQ(file_->leftover_bytes(), file_->bytes_max());
  // Nothing of the dead writer arrives in the new file: it holds zeros until we write.
  const auto port = make_port(near_.span());
  fill_random(near_.span(), 4);
  ASSERT_EQ(copy_now(*port, CopyKind::kRead, file_->page_offset(0), near_.span()), 0);
  EXPECT_TRUE(std::ranges::all_of(near_.span(), [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST_P(FilePort, WorksWhereTheFileSystemHasNeitherDirectIoNorPreallocation) {
  const MountedFileSystem plain("", 0, "ramfs");
  if (!plain.mounted()) GTEST_SKIP() << "mounting is refused";
  file_ = std::move(*FarFile::open(plain.path(), {}, kPage, kPages));
  EXPECT_FALSE(file_->direct());
  ASSERT_TRUE(file_->reserve(kPages));
  EXPECT_EQ(std::filesystem::file_size(file_->path()), file_->bytes_max());
  {
    const auto port = make_port(near_.span());
    EXPECT_NE(port->description().find(", page cache"), std::string::npos) << port->description();
    fill_random(near_.span(), 5);
    ASSERT_EQ(copy_now(*port, CopyKind::kWrite, file_->page_offset(0), near_.span()), 0);
    AlignedMemory back(kPages * kPage);
    ASSERT_EQ(copy_now(*port, CopyKind::kRead, file_->page_offset(0), back.span()), 0);
    EXPECT_TRUE(std::ranges::equal(back.span(), near_.span()));
  }
  file_.reset();  // before its file system goes
}

INSTANTIATE_TEST_SUITE_P(Uring, FilePort, testing::Values(true));
INSTANTIATE_TEST_SUITE_P(Threads, FilePort, testing::Values(false));

/// What container runtimes do: io_uring_setup fails with EPERM, for this process, for ever.
void forbid_uring() {
  std::array<sock_filter, 4> program = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{.len = program.size(), .filter = program.data()};
  DD_CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  DD_CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
}

TEST(FilePortChoice, FallsBackToThreadsAndSaysWhy) {
  const TemporaryDirectory directory;
  const auto file = far_file(directory);
  AlignedMemory near(kPage);
  ChildProcess container([&](auto ready) {
    forbid_uring();
    const auto port = make_file_port(*file, {}, {.threads = 2});
    DD_CHECK(port.has_value());
    const std::string description = (*port)->description();
    DD_CHECK(description.find(" (2 threads, ") != std::string::npos, "{}", description);
    DD_CHECK(description.ends_with("; no io_uring: Operation not permitted)"), "{}", description);
    DD_CHECK(copy_now(**port, CopyKind::kRead, file->page_offset(0), near.span()) == 0);
    ready();
    pause();
  });
  EXPECT_TRUE(container.wait_until_ready());
}

TEST(FilePortChoice, WorksUnregisteredWhereMemoryMayNotBeLocked) {
  if (geteuid() != 0) GTEST_SKIP() << "needs another user to become";
  const TemporaryDirectory directory;
  const auto file = far_file(directory);
  constexpr std::size_t kNearBytes = 1 << 20;
  AlignedMemory near(kNearBytes);
  // The limit does not hold for root.
  ChildProcess limited([&](auto ready) {
    const rlimit none{.rlim_cur = 4096, .rlim_max = 4096};
    DD_CHECK(setrlimit(RLIMIT_MEMLOCK, &none) == 0);
    DD_CHECK(setresuid(65534, 65534, 65534) == 0);
    const auto port = make_file_port(*file, near.span(), {});
    DD_CHECK(port.has_value());
    DD_CHECK((*port)->description().find(", registered") == std::string::npos, "{}", (*port)->description());
    DD_CHECK(copy_now(**port, CopyKind::kRead, file->page_offset(0), near.span().first(kPage)) == 0);
    ready();
    pause();
  });
  EXPECT_TRUE(limited.wait_until_ready());
}

TEST(FilePortChoice, LetsItsThreadsRunOnEveryProcessor) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  if (CPU_COUNT(&before) < 2) GTEST_SKIP() << "one processor";
  const TemporaryDirectory directory;
  const auto file = far_file(directory);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const auto port = make_file_port(*file, {}, {.allow_uring = false, .threads = 3});
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
  ASSERT_TRUE(port) << port.error().message;
  int helpers = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (*read_text_file(task.path() / "comm") != "far-file\n") continue;
    const pid_t thread = std::stoi(task.path().filename());
    cpu_set_t allowed;
    ASSERT_EQ(sched_getaffinity(thread, sizeof(allowed), &allowed), 0);
    EXPECT_GE(CPU_COUNT(&allowed), CPU_COUNT(&before));
    ++helpers;
  }
  EXPECT_EQ(helpers, 3);
}

}  // namespace
}  // namespace dualdecoder
