# shellcheck shell=bash
# What tests with real peers have in common. Sourced after `set -euo pipefail`, with its options still in "$@".
#
# $root is the project, $ringroad the program under test. A test makes a folder $state for its files and defines `cleanup`, and
# `report`, which prints logs after a failed check.

# shellcheck disable=SC2034 # used by the tests
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ringroad=$(realpath -m "${RINGROAD:-${CARGO_TARGET_DIR:-$root/target}/release/ringroad}")
passed=0 failed=0 figure=''

say() { echo "$(basename "$0"): $*" >&2; }
die() { say "$*"; exit 1; }
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; } # the comment at the top of the test

needs() { # WHAT ROOT IS FOR: root, and the program
  [ "$(id -u)" = 0 ] || die "needs root ($1); run it with sudo"
  [ -x "$ringroad" ] || die "no program $ringroad: build it with 'cargo build --release', or set \$RINGROAD"
}

make_state() { # NAME: the folder, and the traps that end the test
  state=$(mktemp -d "/tmp/ringroad-$1.XXXXXX")
  trap finish EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
}

finish() {
  local IFS=$' \t\n'
  trap '' INT TERM HUP
  set +e
  cleanup
  rm -rf "$state"
}

running() { # PID: false for a zombie, too
  local stat
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  [[ ${stat##*) } != Z* ]]
}

gone() { ! running "$1"; }

end() { # PID…: terminates processes; kills those that have not exited after 3 s
  local pid tries
  for pid; do
    tries=0
    if [ -z "$pid" ] || ! running "$pid"; then continue; fi
    kill -TERM "$pid" 2>/dev/null || true
    while running "$pid"; do
      [ $((tries += 1)) != 60 ] || kill -KILL "$pid" 2>/dev/null || true
      [ $tries -le 100 ] || break
      sleep 0.05
    done
    wait "$pid" 2>/dev/null || true
  done
}

check() { # NAME, command…: the command may set $figure; if it fails, it prints why
  local name=$1 begun=$SECONDS
  shift
  figure=''
  if "$@" >"$state/output" 2>&1; then
    passed=$((passed + 1))
    echo "ok $name${figure:+ $figure}"
    return 0
  fi
  failed=$((failed + 1))
  echo "FAILED $name (after $((SECONDS - begun)) s: $*)"
  { tail -n 30 "$state/output"; report; } 2>&1 | sed 's/^/    /'
  return 1
}

verdict() { # the last line; the exit status is that of the whole test
  echo "$passed passed, $failed failed"
  [ "$failed" = 0 ] && [ "$passed" -gt 0 ]
}
