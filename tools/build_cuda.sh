#!/usr/bin/env bash
# DualDecoder with ggml's CUDA backend: build/cuda/dualdecoder. libllama and ggml are those of requirements.txt, compiled
# for one kind of GPU: CUDA_ARCHITECTURE, 90a (H100, H200) if not given. Wants the CUDA toolkit (nvcc) and no GPU. Half an
# hour on two cores; a build that was interrupted goes on.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly architecture=${CUDA_ARCHITECTURE:-90a} out=build/cuda-llama python=.venv/bin/python
readonly built_here='^# Built here' # as in setup.sh

die() {
  printf 'build_cuda: %s\n' "$*" >&2
  exit 1
}

command -v nvcc >/dev/null || die "there is no nvcc on PATH: install the CUDA toolkit (12 or 13), and put its bin folder there"
[[ -x $python ]] || die "$python is missing; make setup makes it"

if [[ ! -f $out/source/vendor/llama.cpp/CMakeLists.txt ]]; then
  mkdir -p "$out/unpacked"
  "$python" -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps --no-build-isolation --no-binary :all: \
    -d "$out" -r <(sed -n "/$built_here/,\$p" requirements.txt)
  tar -xzf "$out"/*.tar.gz -C "$out/unpacked" --strip-components=1 --no-same-owner
  rm -rf "$out/source"
  mv "$out/unpacked" "$out/source"
fi
# Not for this CPU (GGML_NATIVE): the machine with the GPU is likely to be another. Without a driver here the linker takes the
# toolkit's stub of it.
cmake -S "$out/source/vendor/llama.cpp" -B "$out/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
  -DCMAKE_INSTALL_PREFIX="$PWD/$out/prefix" -DCMAKE_INSTALL_RPATH="\$ORIGIN" -DCMAKE_CUDA_ARCHITECTURES="$architecture-real" \
  -DGGML_CUDA=ON -DGGML_CUDA_NCCL=OFF -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_RPC=ON \
  -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
  >"$out/configure.log" 2>&1 || { tail -n 20 "$out/configure.log" >&2; die "CMake failed; all of its output is in $out/configure.log"; }
cmake --build "$out/build"
cmake --install "$out/build" >"$out/install.log"
cmake --preset cuda -DCMAKE_PREFIX_PATH="$PWD/$out/prefix"
cmake --build --preset cuda
