#!/usr/bin/env bash
# README's first commands, taken from its text: prepares the TAP interface, starts the daemon, pastes the QEMU line twice (N=1, N=2)
# and the guest's line into both guests, which pings the host, and pings from guest to guest. As root:
#
#   tests/readme.sh
#
# Only this is changed in them: no `sudo`, as it is root already; a folder of its own instead of /run/ringroad; no KVM and no disk
# image (-accel tcg, the kernel and initramfs of scripts/guests instead of -drive); QEMU runs in the chroot of scripts/peers. Prints
# "ok NAME" or "FAILED NAME", and finally "N passed, M failed" (the exit status).
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
ringroad=$(realpath -m "${RINGROAD:-${CARGO_TARGET_DIR:-target}/release/ringroad}")
die() { echo "readme.sh: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "needs root (network namespace, chroot, TAP); run it with sudo"
[ -x "$ringroad" ] || die "no program $ringroad: build it with 'cargo build --release', or set \$RINGROAD"
if [ -z "${RINGROAD_TEST_NETNS:-}" ]; then
  scripts/guests setup
  RINGROAD_TEST_NETNS=1 RINGROAD=$ringroad exec unshare --net -- "$0" "$@"
fi

cache=$(scripts/peers where)
state=$(mktemp -d /tmp/ringroad-readme.XXXXXX)
pids=() passed=0 failed=0
cleanup() {
  trap '' INT TERM
  [ ${#pids[@]} = 0 ] || kill -KILL "${pids[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$state"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

check() { # NAME COMMAND...
  local name=$1
  shift
  if "$@" >"$state/out" 2>&1; then
    passed=$((passed + 1))
    echo "ok $name"
  else
    failed=$((failed + 1))
    echo "FAILED $name"
    tail -n 15 "$state/out" "$state"/*.log
  fi
}

# Prints the code block of README in which a line begins like this, without its indentation.
block() {
  awk -v begins="$1" '
    /^    / { block = block substr($0, 5) "\n"; if (index($0, "    " begins) == 1) found = 1; next }
    /^$/ && block { block = block "\n"; next }
    { if (found) exit; block = "" }
    END { if (found) printf "%s", block }' README.md
}

until_true() { # SECONDS COMMAND...
  local end=$((SECONDS + $1))
  shift
  until "$@"; do [ $SECONDS -lt $end ] || return 1; sleep 0.1; done
}

prepare=$(block 'sudo ip tuntap' | sed -e 's/^sudo //' -e "s:/run/ringroad:$state:g" -e '/^cargo/d' -e "s:^target/release/ringroad:$ringroad:")
check_line=$(grep -e '--check' <<<"$prepare" | sed 's/#.*//')
serve_line=$(grep -e ' serve ' <<<"$prepare" | grep -v -e '--check')
[ -n "$check_line" ] && [ -n "$serve_line" ] || die "README has no commands as expected"
prepare=$(grep -v -e ' serve ' <<<"$prepare")
cd "$state"
check "what README prepares" env USER=root bash -euc "$prepare"
check "--check" bash -euc "$check_line"
bash -euc "exec $serve_line" >"$state/ringroad.log" 2>&1 &
pids+=($!)
check "serve" until_true 10 test -S "$state/vm2.sock"
cd "$root"

kernel=(-kernel "/boot/$(basename "$cache"/kernel/boot/vmlinuz-*)" -initrd /boot/initramfs-qemu.cpio.gz)
boot() { # N
  local line
  line=$(block 'qemu-system-x86_64' | sed -n '/^qemu-system/,/[^\\]$/p' | sed -e "s:/run/ringroad:$state:g" \
    -e 's/-accel kvm -cpu host/-accel tcg,thread=multi -cpu max/' \
    -e 's|-drive file=[^ ]*|$KERNEL -append "console=ttyS0 quiet rr.name=vm$N rr.net=none"|' -e 's/mac=/romfile=,mac=/')
  [[ $line == *'$KERNEL'* && $line == *tcg* ]] || die "README has no QEMU line as expected"
  mkfifo "$state/in$1"
  N=$1 KERNEL="${kernel[*]}" chroot "$cache/forky" bash -c "exec $line" 0<>"$state/in$1" >"$state/vm$1.log" 2>&1 &
  pids+=($!)
}
answered() { grep -qs "RR-DONE $2 0" "$state/vm$1.log"; }
number=0
in_guest() { # N COMMAND
  number=$((number + 1))
  printf '%s 60 %s\n' "$number" "$2" 1<>"$state/in$1"
  until_true 70 answered "$1" "$number"
}
guest_line=$(block 'dev=$(ls')
[ -n "$guest_line" ] || die "README has no line for guests as expected"

boot 1
boot 2
for n in 1 2; do
  check "guest $n boots" until_true 120 grep -qs 'RR-READY' "$state/vm$n.log"
done
check "guest 1: README's line" in_guest 1 "$guest_line"
check "guest 2: the same with .12" in_guest 2 "${guest_line/10.77.0.11/10.77.0.12}"
check "guest 1 pings guest 2" in_guest 1 "ping -c 3 10.77.0.12"
check "guest 2 pings guest 1" in_guest 2 "ping -c 3 10.77.0.11"

echo "$passed passed, $failed failed"
[ $failed = 0 ] && [ $passed -gt 0 ]
