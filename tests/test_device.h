// The device on which tests load their models: the CPU, or with DD_TEST_DEVICE=rpc that of a server process
// of their own (rpc_device.cc).
#pragma once

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "model/model.h"

namespace dualdecoder {

inline sockaddr_in on_loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

inline std::uint16_t free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = on_loopback(0);
  socklen_t size = sizeof(address);
  DD_CHECK(bind(socket, reinterpret_cast<sockaddr*>(&address), size) == 0);
  DD_CHECK(getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  close(socket);
  return ntohs(address.sin_port);
}

/// Starts a server and makes its device known.
inline Device start_rpc_device() {
  const std::string port = std::to_string(free_port());
  std::string program = DUALDECODER_RPC_DEVICE;
  std::string argument = port;
  char* const arguments[] = {program.data(), argument.data(), nullptr};
  pid_t process = 0;
  DD_CHECK(posix_spawn(&process, program.c_str(), nullptr, nullptr, arguments, environ) == 0, "{}", program);
  Status added = fail(ErrorCode::kIo, "not tried");
  for (int tries = 0; !added && tries < 1000; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    added = Device::add_rpc_server("127.0.0.1:" + port);
  }
  DD_CHECK(added, "{}", added.error().message);
  const auto device = Device::find("RPC0");
  DD_CHECK(device, "{}", device.error().message);
  return *device;
}

inline Device test_device() {
  const char* name = std::getenv("DD_TEST_DEVICE");
  if (name == nullptr || std::string(name) != "rpc") return {};
  static const Device device = start_rpc_device();
  return device;
}

inline Result<std::unique_ptr<Model>> load_on_test_device(const std::string& path) {
  return Model::load(
      path, [](std::size_t, std::size_t) {}, test_device());
}

}  // namespace dualdecoder
