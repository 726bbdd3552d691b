#!/usr/bin/env bash
# Breaks the gates of `make test` on purpose, and requires that each fails with the expected message; and that it passes unbroken.
# `make test` calls it after the gates themselves. Under a minute.
#
#   tests/gates.sh
#
#   scripts/instructions   valgrind crashes, is killed, fails, prints no count or a wrong one, or 5.1 % more; paths and committed
#                          figures that do not match; each with every awk that is installed (mawk, gawk, busybox)
#   tests/hot-loop.sh      drivers that move nothing, or too little; a worker that sleeps; a daemon that dies
#   scripts/test           tools are missing, with and without CI=true; tests that fail, and runs of no test
#   scripts/fuzz           no targets; a target that executes nothing
#
# The gate of idle tests, and that benches report skipped cells, have Rust tests (`the_idle_gate_can_fail`,
# `skipped_cells_have_a_reason`). $RINGROAD is the program (default target/release/ringroad), with the examples of
# scripts/instructions beside it. Prints "ok NAME" or "FAILED NAME" with the output, and finally "N passed, M failed" (the exit
# status).
set -euo pipefail
cd "$(dirname "$0")/.."
ringroad=$(realpath -m "${RINGROAD:-${CARGO_TARGET_DIR:-target}/release/ringroad}")
examples=$(dirname "$ringroad")/examples # built by scripts/instructions
for program in "$ringroad" "$examples"/{instructions,forwarding} strace valgrind; do
  command -v "$program" >/dev/null || { echo "gates.sh: $program is missing" >&2; exit 1; }
done
work=$(mktemp -d /tmp/ringroad-gates.XXXXXX)
trap 'rm -rf "$work"; rm -f fuzz/gates-*.log' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
passed=0 failed=0

verdict() { # NAME, whether it is as expected, EXPECTED
  if [ "$2" = 0 ]; then
    passed=$((passed + 1))
    echo "ok $1"
  else
    failed=$((failed + 1))
    echo "FAILED $1: expected $3, got exit status $status and:"
    tail -n 10 "$work/output" | sed 's/^/    /'
  fi
}

run() { # COMMAND…: sets $status
  status=0
  timeout -k 5 60 "$@" >"$work/output" 2>&1 </dev/null || status=$?
}

refuses() { # NAME PATTERN COMMAND…: it must exit with 1 and print a line that matches
  run "${@:3}"
  local good=1
  [ $status != 1 ] || ! grep -qE -e "$2" "$work/output" || good=0
  verdict "$1" $good "exit status 1 and '$2'"
}

accepts() { # NAME PATTERN COMMAND…: it must exit with 0 and print a line that matches
  run "${@:3}"
  local good=1
  [ $status != 0 ] || ! grep -qE -e "$2" "$work/output" || good=0
  verdict "$1" $good "exit status 0 and '$2'"
}

program() { # NAME: makes a program of standard input
  { echo '#!/usr/bin/env bash'; cat; } >"$work/$1"
  chmod +x "$work/$1"
}

# --- scripts/instructions -----------------------------------------------------------------------------------------------

# Counts 100 instructions per frame; but for the last path, does what $HOW is.
program valgrind <<'SH'
count=12800000
case "$HOW $*" in
  "crash "*" packed 8 "*) kill -SEGV $$ ;;
  "killed "*" packed 8 "*) kill -KILL $$ ;;
  "fails "*" packed 8 "*) exit 3 ;;
  "silent "*" packed 8 "*) exit 0 ;;
  "zero "*" packed 8 "*) count=0 ;;
  "text "*" packed 8 "*) count=many ;;
  "twice "*" packed 8 "*) echo "==1== Collected : $count" >&2 ;;
  "more "*" packed 8 "*) count=13452800 ;; # 105.1
  "slightly "*" packed 8 "*) count=13427200 ;; # 104.9
esac
echo "==1== Collected : $count" >&2
SH

figures() { # [SED COMMAND]: prints committed figures, edited
  { echo '# fake'; printf '%s 100.0\n' {split,packed}\ {device,driver_send,driver_receive,switch_1,switch_8}; } | sed "${1:-}"
}

instructions() { # HOW: runs it with the figures in $work/figures
  HOW=$1 scripts/instructions --valgrind "$work/valgrind" --figures "$work/figures" --programs "$work"
}
export -f instructions
export work

instructions_part() { # AWK: one of its names
  local awk=$1 gate="instructions, $1:" how pattern edit
  mkdir -p "$work/$awk"
  ln -sf "$(command -v "$awk")" "$work/$awk/awk" # busybox runs the applet of the link's name
  local with=(env "PATH=$work/$awk:$PATH" bash -c 'instructions "$1"' bash)
  figures >"$work/figures"
  accepts "$gate as committed" '^packed switch_8 .* \+0\.0 %$' "${with[@]}" as-committed
  accepts "$gate 4.9 % more" '^packed switch_8 .* \+4\.9 %$' "${with[@]}" slightly
  while read -r how pattern; do
    refuses "$gate valgrind: $how" "$pattern" "${with[@]}" "$how"
  done <<'LIST'
crash packed switch_8: .* exited with status 139
killed packed switch_8: .* exited with status 137
fails packed switch_8: .* exited with status 3
silent packed switch_8: expected one line .* got ''
zero packed switch_8: expected one line .* got '0'
text packed switch_8: expected one line .* got 'many'
twice packed switch_8: expected one line
more packed switch_8 .* \+5\.1 %  TOO MANY
LIST
  while IFS='|' read -r how edit pattern; do
    figures "$edit" >"$work/figures"
    refuses "$gate committed: $how" "$pattern" "${with[@]}" as-committed
  done <<'LIST'
a path is missing|/split device/d|counted, but not committed: split device
the last path is missing|/packed switch_8/d|counted, but not committed: packed switch_8
a path too many|$a packed more 100.0|committed, but not counted: packed more
another path|s/split device/split gadget/|committed, but not counted: split gadget
a path twice|$a packed device 200.0|committed twice: packed device
no number|s/\(split device\) .*/\1/|expected LAYOUT PATH NUMBER.*got "split device"
not a number|s/\(split device\) .*/\1 many/|expected LAYOUT PATH NUMBER.*got "split device many"
zero|s/\(split device\) .*/\1 0.0/|expected LAYOUT PATH NUMBER.*got "split device 0.0"
only a comment|2,$d|counted, but not committed: split device
empty|d|no committed figures
LIST
  rm "$work/figures"
  refuses "$gate committed: no file" 'no committed figures' "${with[@]}" as-committed
}

for awk in mawk gawk busybox; do
  if command -v $awk >/dev/null; then instructions_part $awk; else echo "SKIPPED instructions, $awk: it is not installed"; fi
done
refuses "instructions: no valgrind" 'is missing' scripts/instructions --valgrind "$work/no-such-program"
accepts "instructions: unbroken" '^packed switch_8' scripts/instructions --programs "$examples"

# --- tests/hot-loop.sh ----------------------------------------------------------------------------------------------------

# The program; but the drivers or the daemon do what $HOW is.
program ringroad <<'SH'
case "$HOW $1" in
  "still blast") set -- "$@" --mode rx ;;
  "slow blast") set -- "$@" --rate 50k ;;
  "sleeps serve") sed -i 's/"unlimited"/"0"/' "$3" ;;
  "dies serve") (sleep 2.5; kill -KILL $$) & ;;
esac
exec "$program" "$@"
SH

hot_loop() { HOW=$1 program=$ringroad RINGROAD=$work/ringroad tests/hot-loop.sh; }
export -f hot_loop
export ringroad
accepts "hot loop: unbroken" '^ok hot loop' bash -c 'hot_loop unbroken'
refuses "hot loop: drivers that move nothing" "expected at least 100000 frames in a second at port a .* got '0'" bash -c 'hot_loop still'
refuses "hot loop: 50,000 frames per second" 'expected at least 100000 frames in a second at port a' bash -c 'hot_loop slow'
refuses "hot loop: a worker that sleeps" 'expected no system calls' bash -c 'hot_loop sleeps'
refuses "hot loop: a daemon that dies" 'FAILED hot loop' bash -c 'hot_loop dies'

# --- scripts/test and scripts/fuzz: with all programs of this machine, but for some --------------------------------------------

mkdir "$work/bin"
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}" /usr/sbin /sbin; do
  find "$folder/" -maxdepth 1 ! -type d -exec ln -s -t "$work/bin" {} + 2>/dev/null || true # the first one counts
done
rm -f "$work/bin"/{valgrind,strace,apt-get,dpkg-query,cargo,cargo-fuzz,id}
for name in apt-get dpkg-query; do program bin/$name <<<'exit 1'; done
program bin/cargo-fuzz <<<'exit 1'
program bin/id <<<'echo "${ID:-0}"'
# Its attacks, or all of its tests, do what $HOW is.
program bin/cargo <<'SH'
case "$HOW $*" in
  "fail test --workspace"*) echo "test result: FAILED. 7 passed; 1 failed"; exit 101 ;;
  "no-test test --workspace"*) echo "test result: ok. 0 passed; 0 failed; 0 ignored"; exit ;;
  "no-loom test "*"--test loom"*) echo "test result: ok. 0 passed; 0 failed; 0 ignored"; exit ;;
  "attack-fails test "*"-p ringroad-attacks "*) echo "---- a::test stdout ----"; exit 101 ;;
  "attack-aborts test "*"-p ringroad-attacks "*) echo "signal: 6, SIGABRT"; exit 101 ;;
  "no-attack test "*"-p ringroad-attacks "*) echo "test result: ok. 0 passed; 0 failed; 0 ignored"; exit ;;
  "no-repeat test "*--exact*) echo "test result: ok. 0 passed; 0 failed; 0 ignored; 1 filtered out"; exit ;;
  "no-repeat test "*"-p ringroad-attacks "*) echo "---- a::test stdout ----"; exit 101 ;;
  "broken-list fuzz list") exit 101 ;;
  "still fuzz list") echo gates-still ;;
  "still fuzz run "*) echo "stat::number_of_executed_units: 0" >&2 ;;
  "runs fuzz list") echo gates-runs ;;
  "runs fuzz run "*) echo "stat::number_of_executed_units: 80" >&2 ;;
esac
case $1 in test) echo "test result: ok. 7 passed; 0 failed; 0 ignored" ;; esac
SH

faked() { # HOW, CI, ID, COMMAND…
  env "PATH=$work/bin" "HOW=$1" "CI=$2" "ID=$3" "RINGROAD_CACHE=$work/cache" "${@:4}"
}
export -f faked
with() { echo "faked $* scripts/test"; }
accepts "test: an ordinary user without valgrind and strace" 'SKIPPED: all tests with real peers' bash -c "$(with ok '""' 1000)"
accepts "test: says that valgrind is missing" 'SKIPPED: valgrind is missing' bash -c "$(with ok '""' 1000)"
refuses "test: CI=true without valgrind" 'FAILED: valgrind is missing, and under CI' bash -c "$(with ok true 0)"
refuses "test: CI=true without root" 'FAILED: the tests with real peers .* need root' bash -c "$(with ok true 1000)"
refuses "test: no test runs" 'FAILED: no test ran: cargo test --workspace' bash -c "$(with no-test '""' 1000)"
refuses "test: no test of loom runs" 'FAILED: no test ran: .*--test loom' bash -c "$(with no-loom '""' 1000)"
refuses "test: a test fails" 'result: FAILED' bash -c "$(with fail '""' 1000)"
refuses "test: an attack fails" 'FAILED: attacks/.*: a::test' bash -c "$(with attack-fails '""' 0)"
refuses "test: the repeated attack does not exist" 'FAILED: attacks/.*: a::test' bash -c "$(with no-repeat '""' 0)"
refuses "test: an attack aborts" 'FAILED: attacks/' bash -c "$(with attack-aborts '""' 0)"
refuses "test: no attack runs" 'FAILED: no test ran: .*-p ringroad-attacks' bash -c "$(with no-attack '""' 0)"
program bin/valgrind <<<'exit 3'
refuses "test: a gate fails" 'FAILED instructions: split device: .* status 3' bash -c "$(with ok '""' 1000)"
accepts "fuzz: unbroken" '^ok gates-runs' bash -c "faked runs '' 0 scripts/fuzz"
refuses "fuzz: no targets" 'FAILED: cargo fuzz list has no targets' bash -c "faked none '' 0 scripts/fuzz"
refuses "fuzz: a target that executes nothing" 'FAILED: gates-still executed no input' bash -c "faked still '' 0 scripts/fuzz"

echo "$passed passed, $failed failed"
[ $failed = 0 ] && [ $passed -gt 0 ]
