#!/usr/bin/env bash
# Runs the four examples (`make test`). As root, for the TAP interface:
#
#   tests/examples.sh
#
#   own_device and driver   the driver gets 256 random bytes
#   own_port                prints the addresses of the frames that `ringroad blast` sends
#   switch and driver       frames of `blast` at one guest's socket reach the driver at the other's, and frames of the TAP interface a guest
#
# $RINGROAD is the program (default target/release/ringroad). Prints "ok NAME" or "FAILED NAME" with what was seen, and
# finally "N passed, M failed" (the exit status).
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${RINGROAD_TEST_NETNS:-}" ]; then
  [ "$(id -u)" = 0 ] || { echo "examples.sh: needs root (network namespace, TAP); run it with sudo" >&2; exit 1; }
  cargo build --quiet -p ringroad --examples
  RINGROAD_TEST_NETNS=1 exec unshare --net -- "$0"
fi

target=${CARGO_TARGET_DIR:-target}
ringroad=${RINGROAD:-$target/release/ringroad}
work=$(mktemp -d /tmp/ringroad-examples.XXXXXX)
children=() passed=0 failed=0
cleanup() {
  kill "${children[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

start() { # NAME ARGUMENT…: starts an example, waits until it is ready; its output is in $work/NAME
  local name=$1 tries=0
  shift
  "$target/debug/examples/$name" "$@" >"$work/$name" 2>&1 &
  children+=($!)
  until grep -q ready "$work/$name"; do
    [ $((tries += 1)) -lt 100 ] || { echo "FAILED $name: expected a line 'ready' within 5 s, found:"; cat "$work/$name"; return 1; }
    sleep 0.05
  done
}

stop() {
  kill "${children[@]}" 2>/dev/null || true
  wait "${children[@]}" 2>/dev/null || true
  children=()
}

check() { # NAME PATTERN FILE: whether a line matches
  if grep -qE "$2" "$3"; then
    echo "ok $1"
    passed=$((passed + 1))
  else
    echo "FAILED $1: expected a line like '$2', found:"
    tail -n 5 "$3" | cut -c1-300
    failed=$((failed + 1))
  fi
}

start own_device "$work/rng.sock"
timeout 20 "$target/debug/examples/driver" "$work/rng.sock" >"$work/bytes" 2>&1 || true
check own_device '^256 bytes: \[([0-9a-f]{2}, ){255}' "$work/bytes"
timeout 20 "$target/debug/examples/driver" "$work/rng.sock" >"$work/more" 2>&1 || true
cmp -s "$work/bytes" "$work/more" && echo "the same bytes twice" >"$work/more"
check "own_device, again, other bytes" '^256 bytes: ' "$work/more"
stop

start own_port "$work/vm.sock"
timeout 20 "$ringroad" blast "$work/vm.sock" --mode tx --seconds 0.2 >"$work/blast" 2>&1 || true
check own_port '^([0-9a-f]{2}:){5}[0-9a-f]{2} -> .*, [0-9]+ bytes' "$work/own_port"
stop

start switch "$work/vm1.sock" "$work/vm2.sock" rrex0
timeout 20 "$target/debug/examples/driver" "$work/vm1.sock" >"$work/frame" 2>&1 &
children+=($!)
sleep 0.3
timeout 20 "$ringroad" blast "$work/vm2.sock" --mode tx --seconds 2 >"$work/blast" 2>&1 || true
check "switch: guest to guest" '^[0-9]+ bytes: \[00, 00' "$work/frame"
check "switch: TAP to guest" "^vm2: [0-9]+ frames received, [1-9][0-9]* sent" "$work/switch"
stop

echo "$passed passed, $failed failed"
exit $((failed > 0))
