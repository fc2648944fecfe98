// A device whose memory this machine's other processes cannot touch: ggml's RPC server over the CPU, on
// loopback. Usage: rpc_device PORT. Ends with the process that started it.
#include <csignal>
#include <cstdio>
#include <string>

#include <ggml-backend.h>
#include <sys/prctl.h>

int main(int argc, char** argv) {
  using StartServer = void (*)(const char*, const char*, std::size_t, std::size_t, ggml_backend_dev_t*);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
  const auto start = rpc == nullptr ? nullptr
                                    : reinterpret_cast<StartServer>(ggml_backend_reg_get_proc_address(
                                          rpc, "ggml_backend_rpc_start_server"));
  if (argc != 2 || start == nullptr) {
    std::fputs("usage: rpc_device PORT, with a ggml that was built with GGML_RPC=ON\n", stderr);
    return 2;
  }
  ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  const std::string endpoint = std::string("127.0.0.1:") + argv[1];
  std::freopen("/dev/null", "w", stdout);  // it tells about every connection
  start(endpoint.c_str(), nullptr, 1, 1, &cpu);
  return 1;
}
