#!/usr/bin/env bash
# Brings a fresh checkout to where CMake can configure: Debian packages (packages.debian), and a virtual environment
# in .venv (requirements.txt) that also holds libllama and ggml, built here for this CPU.
# When nothing has changed since the last time, it only compares and prints nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly log=build/setup.log
readonly llama_flags="-DGGML_NATIVE=ON -DGGML_RPC=ON -DLLAVA_BUILD=OFF"
readonly llama_build=build/llama
readonly built_here='^# Built here' # where requirements.txt goes from wheels to what is compiled
mkdir -p build
exec 3>&1 </dev/null # a step's own output goes to the log; what the user should see goes to 3

current_step=
on_exit() {
  local status=$?
  if ((status != 0)) && [[ -n $current_step ]]; then
    printf 'failed\n' >&3
    tail -n 30 "$log" >&2
    printf 'setup: "%s" failed; its last lines are above, all of them in %s\n' "$current_step" "$log" >&2
  fi
}
trap on_exit EXIT

step() {
  current_step=$1
  local start=$SECONDS
  printf 'setup: %s ... ' "$current_step" >&3
  shift
  printf '\n== %s, %(%F %T)T\n' "$current_step" >>"$log"
  "$@" >>"$log" 2>&1
  printf '%s s\n' "$((SECONDS - start))" >&3
  current_step=
}

die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# The lines of packages.debian whose package is not installed, in whatever version. With DUALDECODER_SETUP=build those
# that only tests want are left out.
missing_packages() {
  local pins names installed pin last='$q'
  [[ ${DUALDECODER_SETUP:-} == build ]] && last='/^# Tests/q'
  pins=$(sed "$last" packages.debian | grep -E '^[a-z0-9]')
  mapfile -t names < <(cut -d= -f1 <<<"$pins")
  # shellcheck disable=SC2016 # dpkg-query's own ${...}; it exits 1 when it does not know one of the names
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${names[@]}" 2>/dev/null || true)
  for pin in $pins; do
    grep -qxF "${pin%%=*} installed" <<<"$installed" || printf '%s\n' "$pin"
  done
}

install_packages() {
  local pin wanted=()
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600)
  "${apt[@]}" update
  for pin in "$@"; do
    if [[ -n $(apt-cache show "$pin" 2>/dev/null) ]]; then # it exits 0 for a version it does not have
      wanted+=("$pin")
    else # Debian removes a version once a security update has replaced it
      printf '\nsetup: warning: %s is gone from the archive; taking the current version ... ' "$pin" >&3
      wanted+=("${pin%%=*}")
    fi
  done
  "${apt[@]}" install -y --no-install-recommends "${wanted[@]}"
}

make_venv() {
  python3 -m venv --clear .venv
  .venv/bin/python -m pip install --require-hashes --no-deps --only-binary :all: \
    -r <(sed "/$built_here/,\$d" requirements.txt)
}

# pip unpacks a source archive into a folder with a random name, which ccache would take for other sources each time.
# Unpacked here and with paths relative to the checkout, a second build (a new clone, a changed requirement) is short.
build_llama() {
  local archive prefix pip=(.venv/bin/python -m pip)
  rm -rf "$llama_build"
  mkdir -p "$llama_build/source"
  "${pip[@]}" download --require-hashes --no-deps --no-build-isolation --no-binary :all: -d "$llama_build" \
    -r <(sed -n "/$built_here/,\$p" requirements.txt)
  archive=("$llama_build"/*.tar.gz)
  tar -xzf "${archive[0]}" -C "$llama_build/source" --strip-components=1 --no-same-owner
  # Without CC and CXX it would be the compiler that Python itself was built with, which need not be here.
  CC="${CC:-gcc}" CXX="${CXX:-g++}" \
    CMAKE_ARGS="$llama_flags '-DCMAKE_PROJECT_llama.cpp_INCLUDE=$PWD/tools/libllama_only.cmake'" \
    SKBUILD_BUILD_DIR="$PWD/$llama_build/objects" \
    CCACHE_BASEDIR="$PWD" CCACHE_NAMESPACE="$cpu" \
    "${pip[@]}" install -v --no-deps --no-build-isolation "./$llama_build/source"
  for prefix in .venv/lib/python3*/site-packages; do
    ls "$prefix"/lib/lib{llama,ggml}.so "$prefix"/include/{llama,ggml}.h \
      "$prefix"/lib/cmake/llama/llama-config.cmake "$prefix"/lib/cmake/ggml/ggml-config.cmake
  done
  rm -rf "$llama_build"
}

if command -v dpkg-query >/dev/null; then
  mapfile -t missing < <(missing_packages)
  if ((${#missing[@]})); then
    if ((EUID == 0)); then
      as_root=()
    elif sudo -n true 2>/dev/null; then
      as_root=(sudo -n)
    else
      die "these packages are missing, and installing them takes root: apt-get install ${missing[*]%%=*}"
    fi
    step "Debian packages (${#missing[@]} missing)" install_packages "${missing[@]}"
  fi
else
  printf 'setup: no dpkg here: the packages that packages.debian names must be installed already\n'
fi

# -march=native makes libllama fit for one kind of CPU, and ccache does not look at the CPU: a checkout or a cache
# that moves to another machine must not bring its objects along.
cpu=$(grep -m1 -E '^(flags|Features)' /proc/cpuinfo | sha256sum | cut -c1-16)
state=$({ echo "$cpu $llama_flags" && cat requirements.txt tools/libllama_only.cmake; } | sha256sum)
if [[ ! -x .venv/bin/python || $state != "$(cat .venv/setup-state 2>/dev/null)" ]]; then
  python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
    die "$(python3 -V) is not among those that requirements.txt has hashes for (3.11 to 3.13)"
  step "virtual environment with tests' packages and models" make_venv
  step "libllama from source (minutes the first time)" build_llama
  echo "$state" >.venv/setup-state
fi
