#!/usr/bin/env bash
# The canonical comparison, about a quarter of an hour on two cores: bench.sh MODEL DIR. Each measurement is a file
# DIR/NAME.json with its command in DIR/NAME.command; tools/report.py makes DIR/report.html of them. What is there already
# from the same build is not measured again, so a run that was interrupted goes on. Nothing else should run meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."

(($# == 2)) || { printf 'usage: tools/bench.sh MODEL DIR\n' >&2; exit 2; }
readonly model=$1 out=$2 program=build/release/dualdecoder
readonly text=tests/data/prose.txt
[[ -x $program ]] || { printf 'bench: %s is missing; make build makes it\n' "$program" >&2; exit 1; }
mkdir -p "$out/kv"
version=$("$program" --version)
{
  grep -m1 'model name' /proc/cpuinfo | sed 's/.*: //' || uname -m
  printf '%s cores, %s GiB, %s, %s\n' "$(nproc)" "$(awk '/MemTotal/ {print int($2 / 1048576)}' /proc/meminfo)" \
    "$version" "$(date +%F)"
} | paste -sd ',' | sed 's/,/, /' >"$out/machine.txt"

# measure NAME ARGUMENT...: the program's JSON becomes DIR/NAME.json once it has ended well.
measure() {
  local name=$1 start=$SECONDS
  shift
  local command="dualdecoder $*"
  if [[ -s $out/$name.json && "$(cat "$out/$name.command" 2>/dev/null)" == "$command" && "$(cat "$out/$name.version" 2>/dev/null)" == "$version" ]]; then
    printf 'bench: %s: done before\n' "$name" >&2
    return
  fi
  printf 'bench: %s: %s\n' "$name" "$command" >&2
  if ! "$program" "$@" >"$out/$name.partial"; then
    printf 'bench: %s failed; what it had measured is in %s\n' "$name" "$out/$name.partial" >&2
    exit 1
  fi
  mv "$out/$name.partial" "$out/$name.json"
  printf '%s\n' "$command" >"$out/$name.command"
  printf '%s\n' "$version" >"$out/$name.version"
  printf 'bench: %s: %s s\n' "$name" "$((SECONDS - start))" >&2
}

readonly far="file:$out/kv" policies=previous,reactive,dual budget=1024
measure canonical bench -m "$model" -r 3 --far "$far" -o json
measure context bench -m "$model" --budget $budget -p 0 -n 32 -d 1024,2048,4096 -r 3 --far "$far" --policy $policies -f $text --peer libllama -o json
measure concurrency bench -m "$model" --budget $budget -p 0 -n 32 -d 2048 --np 2,4,8 -r 3 --far "$far" --policy $policies -f $text --peer libllama \
  -o json
measure frontier-ring bench -m "$model" --budget $budget -p 0 -n 32 -d 8192 -r 2 --far "$far" --policy $policies -f $text --residency none -o json
for slots in 1024 4096; do
  measure frontier-$slots bench -m "$model" --budget $budget -p 0 -n 32 -d 8192 -r 2 --far "$far" --policy $policies -f $text --near-slots $slots -o json
done
measure divergence eval -m "$model" --kl --ppl -f $text -c 6000 -n 64 --policy $policies --budget 256,512,1024,2048,4096 -o json
measure recall eval -m "$model" --kl -f $text -c 6000 -n 64 --policy last-set,previous,previous-layer,dual --budget $budget \
  --correct miss -o json
measure needle eval -m "$model" --needle single --lengths 2048,4096 --seeds 2 --policy dual --budget $budget \
  --results "$out/needle.jsonl" -o json
if [[ ! -s $out/trace.json ]]; then
  command="dualdecoder run -m $model -f demo/lighthouse-logbook.md -n 24 --temp 0 --raw -c 8192 --ignore-eos --policy dual --budget $budget --far $far"
  # shellcheck disable=SC2086 # words on purpose
  "$program" ${command#dualdecoder } --trace "$out/trace.partial" >/dev/null
  mv "$out/trace.partial" "$out/trace.json"
  printf '%s --trace trace.json\n' "$command" >"$out/trace.command"
fi
