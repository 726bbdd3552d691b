#!/usr/bin/env bash
# Interop with DPDK, both ends, and with OVS-DPDK (`make interop`; `make test` runs it with --quick). As root:
#
#   tests/dpdk.sh [--quick] [--seconds S] [22.11] [25.11] [driver] [reconnect] [device] [ovs]   (which; default: all)
#
#   driver     DPDK's driver (testpmd, virtio-user) on a port of ours: {split, packed} × mrg_rxbuf × in_order × vectorized.
#              `ringroad blast --verify` on a second port sends through our switch to testpmd, which sends back (macswap):
#              no wrong byte, and the counts of blast, of our two ports and of testpmd must agree to the frame
#   reconnect  testpmd killed and started again ten times (--quick: three) while frames come from the other port
#   device     our driver on DPDK's device (testpmd, net_vhost), with and without the features that change its paths
#   ovs        our driver on OVS-DPDK, whose bridge sends back (not with --quick)
#
# DPDK 22.11 is Debian 12's (dpdk-testpmd of package dpdk-dev), 25.11 that of the chroot of scripts/peers (not with --quick).
# Each check of `driver` takes 60 s, of the others 10 s (--quick: 3 s); --seconds sets both. All of it: half an hour; --quick:
# about two minutes. Takes CPUs 0 and 1 and leaves 1024 hugepages reserved. $RINGROAD is the program (default
# target/release/ringroad). Prints "ok NAME figures" or "FAILED NAME" with the end of the logs, and at last
# "N passed, M failed" (the exit status).
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
peers=$root/scripts/peers
ringroad=$(realpath -m "${RINGROAD:-${CARGO_TARGET_DIR:-$root/target}/release/ringroad}")

say() { echo "dpdk.sh: $*" >&2; }
die() { say "$*"; exit 1; }
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }

quick='' seconds='' parts=() versions=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=1 ;;
    --seconds) [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--seconds: expected a whole number above 0, got '${2:-}'"; seconds=$2; shift ;;
    22.11 | 25.11) versions+=("$1") ;;
    driver | reconnect | device | ovs) parts+=("$1") ;;
    *) usage ;;
  esac
  shift
done
if [ -n "$quick" ]; then
  long=${seconds:-3} short=${seconds:-3} restarts=3
  [ ${#parts[@]} -gt 0 ] || parts=(driver reconnect device)
  [ ${#versions[@]} -gt 0 ] || versions=(22.11)
else
  long=${seconds:-60} short=${seconds:-10} restarts=10
  [ ${#parts[@]} -gt 0 ] || parts=(driver reconnect device ovs)
  [ ${#versions[@]} -gt 0 ] || versions=(22.11 25.11)
fi
window=64 # frames under way, so that no ring of 256 is ever full

[ "$(id -u)" = 0 ] || die "needs root (hugepages, chroot); run it with sudo"
[ -x "$ringroad" ] || die "no program $ringroad: 'cargo build --release' makes it, or name another in \$RINGROAD"
"$peers" dpdk
forky=$("$peers" where)/forky
for version in "${versions[@]}"; do
  case $version in
    22.11) command -v dpdk-testpmd >/dev/null || die "no dpdk-testpmd: apt-get install dpdk-dev" ;;
    25.11) "$peers" forky ;;
  esac
done
[ "$(cat /proc/sys/vm/nr_hugepages)" -ge 1024 ] || echo 1024 >/proc/sys/vm/nr_hugepages
[ "$(awk '/^HugePages_Free/ { print $2 }' /proc/meminfo)" -ge 300 ] || die "fewer than 300 hugepages of 2 MiB are free"

state=$(mktemp -d /tmp/ringroad-dpdk.XXXXXX)
daemon='' testpmd='' blaster='' ovs_pids=() passed=0 failed=0 figure=''

# --- processes --------------------------------------------------------------------------------------------------------

running() { # PID: also false for a zombie
  local stat
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  [[ ${stat##*) } != Z* ]]
}

gone() { ! running "$1"; }

await() { # SECONDS, what, command…: until it succeeds
  local tries=0 limit=$(($1 * 20)) what="$2 after $1 s"
  shift 2
  until "$@"; do
    [ $((tries += 1)) -le "$limit" ] || { echo "no $what"; return 1; }
    sleep 0.05
  done
}

end() { # PID…: ends processes of ours, those that do not obey within 3 s by force
  local pid tries
  for pid; do
    tries=0
    [ -n "$pid" ] && running "$pid" || continue
    kill -TERM "$pid" 2>/dev/null || true
    while running "$pid"; do
      [ $((tries += 1)) != 60 ] || kill -KILL "$pid" 2>/dev/null || true
      [ $tries -le 100 ] || break
      sleep 0.05
    done
  done
}

cleanup() {
  trap '' INT TERM HUP
  set +e
  end "$blaster" "$testpmd" "${ovs_pids[@]}" "$daemon"
  rm -rf "$state"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# --- the daemon -------------------------------------------------------------------------------------------------------

start_daemon() { # port a is for testpmd, b for blast; plain is like a, but offers none of the optional features
  cat >"$state/ringroad.toml" <<TOML
[workers]
cpus = [1]
poll = "50us"

[[port]]
name = "a"
kind = "vhost-user"
socket = "$state/a.sock"

[[port]]
name = "b"
kind = "vhost-user"
socket = "$state/b.sock"

[[port]]
name = "plain"
kind = "vhost-user"
socket = "$state/plain.sock"
features = { packed = false, in_order = false, mrg_rxbuf = false, event_idx = false, indirect = false }
TOML
  : >"$state/counters"
  "$ringroad" serve -vv -c "$state/ringroad.toml" >>"$state/counters" 2>"$state/ringroad.log" &
  daemon=$!
  await 10 "line 'ready' of the daemon" grep -q ready "$state/ringroad.log" || return 1
  figure="3 ports"
}

stop_daemon() { # it must still be the one that was started, and end well when asked to
  local status=0
  running "$daemon" || { echo "the daemon had ended before"; return 1; }
  kill -TERM "$daemon"
  await 5 "end of the daemon" gone "$daemon" || return 1
  wait "$daemon" || status=$?
  daemon=''
  [ $status = 0 ] || { echo "the daemon ended with status $status"; return 1; }
  ! grep -n 'panicked at' "$state/ringroad.log" || return 1
  ! grep -n 'ERROR' "$state/ringroad.log" || return 1
}

declare -A was=() is=()
counters() { # was|is: the daemon's counters of all ports, as PORT.from, PORT.lost, PORT.to, PORT.dropped, PORT.faults
  local -n into=$1
  local port from lost to dropped faults
  : >"$state/counters"
  kill -USR1 "$daemon" || return 1
  await 5 "counters of the daemon" grep -q '^plain .*[0-9]$' "$state/counters" || return 1
  while read -r port from lost to dropped faults; do
    into[$port.from]=$from into[$port.lost]=$lost into[$port.to]=$to
    into[$port.dropped]=$dropped into[$port.faults]=$faults
  done < <(awk -F '  +' 'NR > 1 { gsub(/ /, ""); print $1, $2, $4, $5, $7 + $8 + $9, $10 }' OFS=' ' FS='  +' "$state/counters")
}

since() { echo $((${is[$1]} - ${was[$1]})); } # PORT.COUNTER: how much it has grown

# --- testpmd ----------------------------------------------------------------------------------------------------------

start_testpmd() { # VERSION, CPU, VDEV: it sends back what comes, with the MAC addresses swapped
  local run=(stdbuf -oL)
  [ "$1" = 22.11 ] || run=(chroot "$forky" "${run[@]}")
  rm -f "$state/testpmd.in"
  mkfifo "$state/testpmd.in"
  # A session of its own: a Ctrl-C meant for us is not for it.
  setsid env -u TMPDIR "${run[@]}" dpdk-testpmd -v --lcores "0@$2,1@$2" --main-lcore 0 --no-pci --in-memory --no-telemetry \
    --file-prefix="ringroad-$$" -m 512 --single-file-segments --force-max-simd-bitwidth=512 \
    --log-level=pmd.net.virtio.init:debug --vdev "$3" -- \
    -i --nb-cores=1 --forward-mode=macswap --no-flush-rx --auto-start \
    0<>"$state/testpmd.in" >"$state/testpmd.log" 2>&1 &
  testpmd=$!
  disown $testpmd # no word from bash when it is killed
  await 20 "forwarding testpmd" testpmd_forwards || return 1
  grep -q "RTE Version: 'DPDK ${1//./\\.}" "$state/testpmd.log" || { echo "this testpmd is not DPDK $1"; return 1; }
}

testpmd_forwards() {
  ! grep -q 'macswap packet forwarding - ports=1' "$state/testpmd.log" || return 0
  running "$testpmd" || { echo "testpmd has ended"; exit_await; }
  return 1
}

tell() { echo "$1" 1<>"$state/testpmd.in"; } # COMMAND of testpmd's console

quit_testpmd() { # leaves its counts in $rx, $rx_bad, $tx, $tx_bad
  tell 'show port stats 0'
  tell quit
  await 10 "end of testpmd" gone "$testpmd" || return 1
  testpmd=''
  read -r rx rx_bad tx tx_bad < <(awk '
    function number(key) { return match($0, key ": *[0-9]+") ? substr($0, RSTART + length(key) + 1, RLENGTH - length(key) - 1) + 0 : 0 }
    /Forward statistics for port 0/ { forward = 1 }
    /Accumulated/ { forward = 0 }
    forward { rx_bad += number("RX-dropped"); tx_bad += number("TX-dropped") }
    /NIC statistics/ { nic = 1 }
    nic {
      rx += number("RX-packets"); rx_bad += number("RX-missed") + number("RX-errors") + number("RX-nombuf")
      tx += number("TX-packets"); tx_bad += number("TX-errors")
    }
    END { print rx + 0, rx_bad + 0, tx + 0, tx_bad + 0 }' "$state/testpmd.log")
}
