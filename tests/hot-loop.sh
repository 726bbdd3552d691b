#!/usr/bin/env bash
# Checks that the polling loop makes no system calls (and so blocks on no lock): strace counts those of the worker thread for one
# second under full load, with two reflecting ports.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
ringroad=$(realpath -m "${RINGROAD:-${CARGO_TARGET_DIR:-$root/target}/release/ringroad}")
command -v strace >/dev/null || { echo "hot-loop.sh: strace is missing: apt-get install strace" >&2; exit 1; }
state=$(mktemp -d /tmp/ringroad-hot.XXXXXX)
daemon='' blasts=()
cleanup() {
  kill "${blasts[@]}" $daemon 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$state"
}
trap cleanup EXIT

{
  printf '[workers]\ncpus = [1]\npoll = "unlimited"\n'
  for port in a b; do
    printf '[[port]]\nname = "%s"\nkind = "vhost-user"\nsocket = "%s"\nmode = "reflect"\n' $port "$state/$port.sock"
  done
} >"$state/ringroad.toml"
"$ringroad" serve -c "$state/ringroad.toml" >/dev/null 2>"$state/log" &
daemon=$!
for _ in $(seq 100); do [ -S "$state/b.sock" ] && break; sleep 0.05; done
for port in a b; do
  "$ringroad" blast "$state/$port.sock" --cpu 0 --seconds 6 >"$state/$port.out" 2>&1 &
  blasts+=($!)
done
sleep 2
worker=$(grep -lx worker /proc/$daemon/task/*/comm | head -n 1 | xargs dirname | xargs basename)
timeout --signal=INT 1 strace -p "$worker" -o "$state/calls" 2>"$state/strace" || true
grep -q attached "$state/strace" || { echo "FAILED hot loop: strace could not attach: $(cat "$state/strace")"; exit 1; }
wait "${blasts[@]}"
calls=$(grep -vc '^strace: ' "$state/calls" || true)
frames=$(cat "$state"/*.out | awk '$1 == "received" { gsub(/[^0-9]/, "", $0); n += 1 } END { print n + 0 }')
if [ "$calls" != 0 ] || [ "$frames" -lt 2 ]; then
  echo "FAILED hot loop: $calls system calls in a second of polling under load, $frames of 2 drivers received"
  sort "$state/calls" | cut -d'(' -f1 | uniq -c | head
  cat "$state"/*.out | tail -20
  exit 1
fi
echo "ok hot loop  0 system calls in a second under load"
