// For tests of the far file: other processes, and small file systems.
#pragma once

#include <csignal>
#include <cstdio>
#include <string>

#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <temporary_directory.h>

#include "base/check.h"

namespace dualdecoder {

/// A copy of this process that runs `body(ready)`; body calls ready() once it is where the test wants it, and
/// must not return. Killed hard, at the latest with the object.
class ChildProcess {
 public:
  template <typename Body>
  explicit ChildProcess(Body body) {
    int ends[2];
    DD_CHECK(pipe(ends) == 0);
    std::fflush(nullptr);
    id_ = fork();
    DD_CHECK(id_ >= 0);
    if (id_ == 0) {
      close(ends[0]);
      body([&ends] { DD_CHECK(write(ends[1], "r", 1) == 1); });
      _exit(1);
    }
    close(ends[1]);
    ready_fd_ = ends[0];
  }
  ~ChildProcess() {
    kill_hard();
    close(ready_fd_);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// False when the child ended before it was ready.
  bool wait_until_ready() const {
    char byte = 0;
    return read(ready_fd_, &byte, 1) == 1;
  }
  void kill_hard() {
    if (id_ < 0) return;
    kill(id_, SIGKILL);
    waitpid(id_, nullptr, 0);
    id_ = -1;
  }

 private:
  pid_t id_ = -1;
  int ready_fd_ = -1;
};

/// A file system in memory with mount options such as "size=2m"; not there where mounting is refused.
class MountedFileSystem {
 public:
  explicit MountedFileSystem(const std::string& options, unsigned long flags = 0, const char* type = "tmpfs")
      : mounted_(mount(type, directory_.path().c_str(), type, flags, options.c_str()) == 0) {}
  ~MountedFileSystem() {
    if (mounted_) umount2(directory_.path().c_str(), MNT_DETACH);
  }
  MountedFileSystem(const MountedFileSystem&) = delete;
  MountedFileSystem& operator=(const MountedFileSystem&) = delete;

  bool mounted() const { return mounted_; }
  std::string path() const { return directory_.path(); }
  std::string file(const std::string& name) const { return directory_.file(name); }

 private:
  TemporaryDirectory directory_;
  bool mounted_;
};

}  // namespace dualdecoder
