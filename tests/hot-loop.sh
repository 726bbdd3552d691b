#!/usr/bin/env bash
# Checks that the polling loop makes no system calls (and so blocks on no lock): strace counts those of the worker thread for two
# seconds under full load, with two reflecting ports. In a whole second of that time, each port's driver must receive at least
# 100,000 frames: a loop that moves nothing proves nothing. $RINGROAD is the program (default target/release/ringroad).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
ringroad=$(realpath -m "${RINGROAD:-${CARGO_TARGET_DIR:-$root/target}/release/ringroad}")
least=100000
state=$(mktemp -d /tmp/ringroad-hot.XXXXXX)
daemon='' blasts=() tracer=''
cleanup() {
  kill $tracer "${blasts[@]}" $daemon 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$state"
}
trap cleanup EXIT
fail() { # MESSAGE
  echo "FAILED hot loop: $1"
  tail -n 5 "$state"/{log,strace,*.err} 2>/dev/null || true
  exit 1
}
within() { # SECONDS COMMAND…: waits until it succeeds
  local tries=$(($1 * 20))
  shift
  until "$@"; do [ $((tries -= 1)) -gt 0 ] || return 1; sleep 0.05; done
}
command -v strace >/dev/null || fail "strace is missing: apt-get install strace"
[ -x "$ringroad" ] || fail "no program $ringroad: build it with 'cargo build --release', or set \$RINGROAD"

{
  printf '[workers]\ncpus = [1]\npoll = "unlimited"\n'
  for port in a b; do
    printf '[[port]]\nname = "%s"\nkind = "vhost-user"\nsocket = "%s"\nmode = "reflect"\n' $port "$state/$port.sock"
  done
} >"$state/ringroad.toml"
"$ringroad" serve -c "$state/ringroad.toml" >/dev/null 2>"$state/log" &
daemon=$!
within 5 test -S "$state/b.sock" || fail "no socket of the daemon within 5 s"
for port in a b; do
  "$ringroad" blast "$state/$port.sock" --cpu 0 --seconds 60 --lines >"$state/$port.lines" 2>"$state/$port.err" &
  blasts+=($!)
done
# Each driver prints a line per second.
within 10 test -s "$state/a.lines" -a -s "$state/b.lines" || fail "no line of both drivers within 10 s"
mapfile -t workers < <(grep -lx worker /proc/$daemon/task/*/comm)
[ ${#workers[@]} = 1 ] || fail "expected one worker thread, found ${#workers[@]}"
worker=$(basename "$(dirname "${workers[0]}")")

strace -p "$worker" -o "$state/calls" 2>"$state/strace" &
tracer=$!
within 5 grep -qs attached "$state/strace" || fail "strace could not attach"
# The second line from now on is about a second that began after strace had attached.
declare -A line=()
for port in a b; do line[$port]=$(($(wc -l <"$state/$port.lines") + 2)); done
printed() { [ "$(wc -l <"$state/a.lines")" -ge "${line[a]}" ] && [ "$(wc -l <"$state/b.lines")" -ge "${line[b]}" ]; }
within 10 printed || fail "expected two more lines of both drivers within 10 s"
running() { # PID: false for a zombie, too
  local stat
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  [[ ${stat##*) } != Z* ]]
}
running $tracer || fail "strace has ended early"
for port in a b; do
  received=$(sed -n "${line[$port]}s/.*\"received\":\([0-9]*\).*/\1/p" "$state/$port.lines")
  [ "${received:-0}" -ge $least ] ||
    fail "expected at least $least frames in a second at port $port while strace counts, got '$received'"
done
kill -INT $tracer
wait $tracer || true
tracer=''
for pid in "${blasts[@]}" $daemon; do running "$pid" || fail "the daemon or a driver has exited"; done
[ -e "$state/calls" ] || fail "strace wrote no file"
calls=$(grep -vc '^strace: ' "$state/calls" || true)
if [ "$calls" != 0 ]; then
  sort "$state/calls" | cut -d'(' -f1 | uniq -c | head
  fail "expected no system calls in two seconds of polling under load, got $calls"
fi
echo "ok hot loop  0 system calls in two seconds under load"
