#!/usr/bin/env bash
# Interoperability with DPDK, driver and device, and with OVS-DPDK (`make interop`; `make test` runs it with --quick). As root:
#
#   tests/dpdk.sh [--quick] [--seconds S] [22.11] [25.11] [driver] [reconnect] [device] [ovs]   (which parts; default: all)
#
#   driver     DPDK's driver (testpmd, virtio-user) on a ringroad port: {split, packed} × mrg_rxbuf × in_order × vectorized;
#              requests of features that are not offered; frames in several pieces. `ringroad blast --verify` on a second port
#              sends through the switch to testpmd, which reflects (macswap): no byte may be wrong, and the counters of blast,
#              of both ports and of testpmd must agree exactly
#   reconnect  testpmd is killed and restarted ten times (--quick: three) while frames arrive from the other port
#   device     our driver on DPDK's device (testpmd, net_vhost), with and without the features that select its code paths
#   ovs        our driver on OVS-DPDK, whose bridge reflects (not with --quick)
#
# DPDK 22.11 is that of Debian 12 (dpdk-testpmd in package dpdk-dev), 25.11 that of the chroot of scripts/peers (not with --quick).
# Each combination of `driver` takes 60 s, other checks 10 s (--quick: 3 s); --seconds sets both. In total: 35 minutes;
# --quick: 100 s. Uses CPUs 0 and 1 and leaves 1024 hugepages reserved. $RINGROAD is the program (default
# target/release/ringroad). Prints "ok NAME figures" or "FAILED NAME" with the end of the logs, and finally
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
all=in_order,mrg_rxbuf,event_idx,indirect # features that blast can leave out
ring=256 window=64 # entries of each ring; frames in flight, so that no ring is ever full

[ "$(id -u)" = 0 ] || die "needs root (hugepages, chroot); run it with sudo"
[ -x "$ringroad" ] || die "no program $ringroad: build it with 'cargo build --release', or set \$RINGROAD"
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
daemon='' testpmd='' blaster='' ovs_pids=() passed=0 failed=0 skipped=0 figure=''

# --- processes --------------------------------------------------------------------------------------------------------

running() { # PID: false for a zombie, too
  local stat
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  [[ ${stat##*) } != Z* ]]
}

gone() { ! running "$1"; }

await() { # SECONDS, description, command…: waits until the command succeeds
  local tries=0 limit=$(($1 * 20)) what="$2 after $1 s"
  shift 2
  until "$@"; do
    [ $((tries += 1)) -le "$limit" ] || { echo "no $what"; return 1; }
    sleep 0.05
  done
}

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

start_daemon() { # ports a, direct and plain are for testpmd, b for blast
  cat >"$state/ringroad.toml" <<TOML
[workers]
cpus = [1]
poll = "50us"

[[port]]
name = "a"
kind = "vhost-user"
socket = "$state/a.sock"
mtu = 9000

[[port]]
name = "b"
kind = "vhost-user"
socket = "$state/b.sock"
mtu = 9000

[[port]]
name = "direct"
kind = "vhost-user"
socket = "$state/direct.sock"
mtu = 9000
features = { indirect = false }

[[port]]
name = "plain"
kind = "vhost-user"
socket = "$state/plain.sock"
mtu = 9000
features = { packed = false, in_order = false, mrg_rxbuf = false, event_idx = false, indirect = false }
TOML
  : >"$state/counters"
  "$ringroad" serve -vv -c "$state/ringroad.toml" >>"$state/counters" 2>"$state/ringroad.log" &
  daemon=$!
  await 10 "line 'ready' of the daemon" grep -q ready "$state/ringroad.log" || return 1
  figure="4 ports"
}

stop_daemon() { # it must still be running, and exit with success
  local status=0
  running "$daemon" || { echo "the daemon had already exited"; return 1; }
  kill -TERM "$daemon"
  await 5 "exit of the daemon" gone "$daemon" || return 1
  wait "$daemon" || status=$?
  daemon=''
  [ $status = 0 ] || { echo "the daemon exited with status $status"; return 1; }
  ! grep -n 'panicked at' "$state/ringroad.log" || return 1
}

declare -A was=() is=()
counters() { # was|is: reads the counters of all ports: PORT.from, PORT.lost (dropped from it), PORT.to, PORT.dropped, PORT.faults
  # shellcheck disable=SC2178 # a reference to one of them
  local -n into=$1
  local port from lost to dropped faults
  : >"$state/counters"
  kill -USR1 "$daemon" || return 1
  await 5 "counters of the daemon" grep -q '^plain .*[0-9]$' "$state/counters" || return 1
  while read -r port from lost to dropped faults; do
    into+=([$port.from]=$from [$port.lost]=$lost [$port.to]=$to [$port.dropped]=$dropped [$port.faults]=$faults)
  done < <(awk -F '|' '
    function column(group, n, columns) { # digits are in groups of three
      sub(/^ +/, "", group); split(group, columns, /  +/); gsub(/ /, "", columns[n]); return columns[n] }
    NR > 2 { gsub(/ /, "", $1)
      print $1, column($2, 1), column($3, 1), column($4, 1), column($5, 1) + column($5, 2) + column($5, 3), column($6, 1) }' "$state/counters")
}

since() { echo $((${is[$1]} - ${was[$1]})); } # PORT.COUNTER: prints its increase

# --- testpmd ----------------------------------------------------------------------------------------------------------

start_testpmd() { # VERSION, CPU, VDEV: reflects frames with MAC addresses swapped
  local run=(stdbuf -oL)
  [ "$1" = 22.11 ] || run=(chroot "$forky" "${run[@]}")
  rm -f "$state/testpmd.in" "$state/testpmd.log"
  mkfifo "$state/testpmd.in"
  # In its own session: Ctrl-C must not reach it.
  setsid env -u TMPDIR "${run[@]}" dpdk-testpmd -v --lcores "0@$2,1@$2" --main-lcore 0 --no-pci --in-memory --no-telemetry \
    --file-prefix="ringroad-$$" -m 512 --single-file-segments --force-max-simd-bitwidth=512 \
    --log-level=pmd.net.virtio.init:debug --vdev "$3" -- \
    -i --nb-cores=1 --forward-mode=macswap --no-flush-rx --auto-start \
    0<>"$state/testpmd.in" >"$state/testpmd.log" 2>&1 &
  testpmd=$!
  disown $testpmd # no message from bash when it is killed
  await 20 "report of testpmd that it forwards" testpmd_settled || return 1
  running "$testpmd" || { echo "testpmd has exited"; return 1; }
  grep -q "RTE Version: 'DPDK ${1//./\\.}" "$state/testpmd.log" || { echo "this testpmd is not DPDK $1"; return 1; }
}

testpmd_settled() { gone "$testpmd" || grep -qs 'macswap packet forwarding - ports=1' "$state/testpmd.log"; }

tell() { echo "$1" 1<>"$state/testpmd.in"; } # COMMAND: sends it to testpmd's console

quit_testpmd() { # sets $rx, $rx_bad, $tx, $tx_bad to its counters
  tell 'show port stats 0'
  tell quit
  await 10 "exit of testpmd" gone "$testpmd" || return 1
  testpmd=''
  read -r rx rx_bad tx tx_bad < <(awk '
    function number(key) {
      return match($0, key ": *[0-9]+") ? substr($0, RSTART + length(key) + 1, RLENGTH - length(key) - 1) + 0 : 0
    }
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

# --- our generator ----------------------------------------------------------------------------------------------------

blast() { # SECONDS, argument…: verifies every byte of every returned frame; sets $sent and $received
  local status=0
  rm -f "$state/blast.json"
  timeout -k 5 $(($1 + 70)) "$ringroad" blast "${@:2}" --seconds "$1" --window $window --verify --json "$state/blast.json" &
  blaster=$!
  wait "$blaster" || status=$?
  blaster=''
  sent=$(result sent) received=$(result received) errors=$(result errors)
  [ $status = 0 ] || { echo "blast exited with status $status"; return 1; }
  [ "${errors:-1}" = 0 ] || { echo "$errors errors"; return 1; }
  # Ten times the ring size per second is low even for a busy machine.
  [ "$received" -ge $((10 * ring * $1)) ] || { echo "only $received frames in $1 s"; return 1; }
}

result() { [ ! -e "$state/blast.json" ] || sed -n "s/^ *\"$1\": \([0-9]*\),*\$/\1/p" "$state/blast.json"; }

# --- checks: each sets $figure, or fails and prints its output -------------------------------------------------------

check() { # NAME, command…
  local name=$1 begun=$SECONDS
  shift
  figure=''
  if "$@" >"$state/output" 2>&1; then
    passed=$((passed + 1))
    echo "ok $name${figure:+  $figure}"
    return 0
  fi
  failed=$((failed + 1))
  # To analyse a hang: what runs and what waits.
  [ -z "$daemon" ] || ps -L -o tid,comm,stat,time,pcpu,wchan:24 -p "$daemon${testpmd:+,$testpmd}" >>"$state/output" 2>&1 || true
  [ -z "$daemon" ] || { kill -USR1 "$daemon" && sleep 0.2 && cat "$state/counters" >>"$state/output"; } 2>/dev/null || true
  end "$blaster" "$testpmd"
  blaster='' testpmd=''
  echo "FAILED $name (after $((SECONDS - begun)) s: $*)"
  {
    tail -n 30 "$state/output"
    local log
    for log in ringroad testpmd ovs; do
      [ -s "$state/$log.log" ] || continue
      echo "--- the end of $log.log"
      tail -n 25 "$state/$log.log"
      echo # testpmd's prompt has no newline
    done
  } 2>&1 | sed 's/^/    /'
  return 1
}

equal() { # description, NUMBER, description, NUMBER
  [ "$2" = "$4" ] || { echo "$1: $2, but $3: $4"; return 1; }
}

at_most() { # description, NUMBER, LIMIT: 0 to LIMIT
  if [ "$2" -lt 0 ] || [ "$2" -gt "$3" ]; then echo "$1: $2, expected 0 to $3"; return 1; fi
}

# Bits: VIRTIO_NET_F_MRG_RXBUF 15, VIRTIO_F_INDIRECT_DESC 28, VIRTIO_F_EVENT_IDX 29, VIRTIO_F_RING_PACKED 34, VIRTIO_F_IN_ORDER 35
bit() { echo $(($1 >> $2 & 1)); } # FEATURES, NUMBER

names() { # FEATURES: prints the names of those that select code paths
  local names=split
  [ "$(bit "$1" 34)" = 0 ] || names=packed
  [ "$(bit "$1" 35)" = 0 ] || names+=' in_order'
  [ "$(bit "$1" 15)" = 0 ] || names+=' mrg_rxbuf'
  [ "$(bit "$1" 29)" = 0 ] || names+=' event_idx'
  [ "$(bit "$1" 28)" = 0 ] || names+=' indirect'
  echo "$names"
}

path() { sed -n "s/.*virtio: using \(.*\) $1 path on port 0.*/\1/p" "$state/testpmd.log" | tail -n 1; } # Rx|Tx: prints the name of testpmd's code path

driver() { # VERSION, PORT, split|packed, MRG_RXBUF, IN_ORDER, VECTORIZED, SECONDS, SIZES: testpmd as the driver of a port
  local version=$1 port=$2 layout=$3 mrg=$4 in_order=$5 vec=$6 seconds=$7 sizes=$8
  local packed=0 vdev features found rx rx_bad tx tx_bad sent received errors dropped address
  [ "$layout" = split ] || packed=1
  vdev="net_virtio_user0,path=$state/$port.sock,queues=1,packed_vq=$packed,mrg_rxbuf=$mrg,in_order=$in_order,vectorized=$vec"
  start_testpmd "$version" 0 "$vdev" || return 1
  if [ "$port" = plain ]; then layout=split packed=0 mrg=0 in_order=0; fi
  features=$(sed -n 's/.*features after negotiate = \([0-9a-f]*\).*/0x\1/p' "$state/testpmd.log" | tail -n 1)
  found="$(bit "$features" 34) $(bit "$features" 15) $(bit "$features" 35)"
  equal "features $features: packed, mrg_rxbuf and in_order" "$found" wanted "$packed $mrg $in_order" || return 1
  [ "$port" = a ] || equal "features $features: indirect" "$(bit "$features" 28)" wanted 0 || return 1
  if [ "$vec" = 1 ]; then
    # A split ring is vectorized only for receiving, a packed one with mrg_rxbuf only for sending.
    [[ "$(path Tx) $(path Rx)" == *vectorized* ]] || { echo "not vectorized: Rx '$(path Rx)', Tx '$(path Tx)'"; return 1; }
  else
    [[ "$(path Tx) $(path Rx)" != *vectorized* ]] || { echo "vectorized: Rx '$(path Rx)', Tx '$(path Tx)'"; return 1; }
  fi
  case $port in # a different address for each port: the switch learns where it last saw one
    a) address=02:00:00:00:00:0a ;;
    direct) address=02:00:00:00:00:0b ;;
    plain) address=02:00:00:00:00:0c ;;
  esac

  counters was || return 1
  blast "$seconds" "$state/b.sock" --event-driven --ring "$layout" --size "$sizes" --destination $address || return 1
  await 3 "return of the last frames" settled "$port" || true # the counters are checked below
  tell stop
  await 5 "stop of testpmd's forwarding" grep -q 'Accumulated forward statistics' "$state/testpmd.log" || return 1
  counters is || return 1
  quit_testpmd || return 1

  # Hop by hop: blast, port b, the port, testpmd, and back. Each drop must be in some counter.
  at_most "sent by blast and not seen by port b" $((sent - $(since b.from))) $ring || return 1
  equal "from port b" "$(since b.from)" \
    "to port $port and dropped there" $(($(since "$port.to") + $(since "$port.dropped"))) || return 1
  equal "to port $port" "$(since "$port.to")" "testpmd received" "$rx" || return 1
  equal "testpmd received" "$rx" "testpmd sent and dropped" $((tx + tx_bad)) || return 1
  equal "testpmd sent" "$tx" "from port $port" "$(since "$port.from")" || return 1
  equal "from port $port" "$(since "$port.from")" "to port b and dropped there" $(($(since b.to) + $(since b.dropped))) || return 1
  at_most "to port b and not seen by blast" $(($(since b.to) - received)) $ring || return 1
  equal "dropped as malformed" $(($(since "$port.lost") + $(since b.lost) + rx_bad)) expected 0 || return 1
  equal faults $(($(since "$port.faults") + $(since b.faults))) expected 0 || return 1
  running "$daemon" || { echo "the daemon has exited"; return 1; }
  # Frames that reach port b after blast has exited do not count.
  dropped=$(($(since "$port.dropped") + tx_bad))
  figure="$received frames, $errors errors, $dropped dropped ($(names "$features"); Rx $(path Rx), Tx $(path Tx))"
}

pieces() { # VERSION, SEGMENTS: testpmd sends frames in this many segments, each by an indirect table of a packed ring
  local rx rx_bad tx tx_bad
  start_testpmd "$1" 0 "net_virtio_user0,path=$state/a.sock,queues=1,packed_vq=1,mrg_rxbuf=1,in_order=0" || return 1
  counters was || return 1
  tell stop
  tell 'set fwd txonly'
  tell "set txpkts $2"
  tell start
  sleep 1
  tell stop
  await 5 "stop of testpmd's txonly" stopped_twice || return 1
  counters is || return 1
  quit_testpmd || return 1
  equal "testpmd sent" "$tx" "from port a" "$(since a.from)" || return 1
  equal "faults" "$(since a.faults)" expected 0 || return 1
  [ "$tx" -ge $((10 * ring)) ] || { echo "testpmd sent only $tx frames"; return 1; }
  figure="$tx frames"
}

stopped_twice() { [ "$(grep -c 'Accumulated forward statistics' "$state/testpmd.log")" -ge 2 ]; }

settled() { counters is && [ "$(since "$1.to")" = "$(since "$1.from")" ]; } # PORT: all frames sent to it were returned

vectorizable() { # NAME, split|packed, MRG_RXBUF, IN_ORDER: succeeds if testpmd has a vectorized path for it that this CPU can run
  case $2 in
    split) [ "$3$4" = 00 ] ;;
    packed)
      [ "$4" = 1 ] || return 1
      if grep -qw avx512f /proc/cpuinfo && grep -qw avx512bw /proc/cpuinfo; then return; fi
      skipped=$((skipped + 1))
      echo "SKIPPED $1: testpmd's vectorized path needs AVX-512 (avx512f, avx512bw), which this CPU does not have"
      return 1
      ;;
  esac
}

blasted() { # FILE, TO: prints the sum of frames received in the last seconds, and the errors at their end
  sed -n 's/^{.*"errors":\([0-9]*\).*"received":\([0-9]*\).*/\1 \2/p' "$1" | tail -n +$(($2 + 1)) |
    awk '{ errors = $1; sum += $2 } END { print sum + 0, errors + 0 }'
}

flows() { [ "$(blasted "$state/lines" "$1" | cut -d ' ' -f 1)" -ge $((10 * ring)) ]; } # SECOND: frames have arrived since then

reconnect() { # VERSION: kills and restarts testpmd with different settings while frames arrive from port b
  local version=$1 vdev number second count=0 errors settings begun
  begun=$(wc -l <"$state/ringroad.log")
  "$ringroad" blast "$state/b.sock" --event-driven --window $window --verify --size 64,594,1518 --seconds 1000 --lines \
    --destination 02:00:00:00:00:0a >"$state/lines" &
  blaster=$!
  for ((number = 0; number <= restarts; number++)); do
    case $((number % 4)) in
      0) settings=packed_vq=1,mrg_rxbuf=1,in_order=1,vectorized=0 ;;
      1) settings=packed_vq=0,mrg_rxbuf=1,in_order=0,vectorized=0 ;;
      2) settings=packed_vq=1,mrg_rxbuf=0,in_order=0,vectorized=0 ;;
      3) settings=packed_vq=0,mrg_rxbuf=0,in_order=1,vectorized=0 ;;
    esac
    vdev=net_virtio_user0,path=$state/a.sock,queues=1,$settings
    start_testpmd "$version" 0 "$vdev" || { echo "start $number ($settings)"; return 1; }
    running "$blaster" || { echo "blast has exited"; return 1; }
    second=$(wc -l <"$state/lines")
    await 10 "returned frames after start $number ($settings)" flows $((second + 1)) || { tail -n 5 "$state/lines"; return 1; }
    kill -KILL "$testpmd"
    await 5 "exit of the killed testpmd" gone "$testpmd" || return 1
    testpmd=''
  done
  read -r count errors <<<"$(blasted "$state/lines" 0)"
  running "$blaster" || { echo "blast has exited"; return 1; }
  end "$blaster"
  blaster=''
  [ "$errors" = 0 ] || { echo "$errors errors"; return 1; }
  ! tail -n +"$((begun + 1))" "$state/ringroad.log" | grep ERROR || return 1
  running "$daemon" || { echo "the daemon has exited"; return 1; }
  figure="$restarts restarts, $count frames, $errors errors"
}

negotiated() { # LOG: prints the features that DPDK's device negotiated last
  sed -n 's/.*negotiated Virtio features: \(0x[0-9a-f]*\).*/\1/p' "$1" | tail -n 1
}

foreign() { # LOG, SOCKET, split|packed, WITHOUT, blast argument…: our driver on another device
  local log=$1 socket=$2 layout=$3 without=$4 features name bit sent received errors
  shift 4
  [ -z "$without" ] || set -- "$@" --without "$without"
  blast "$short" "$socket" --ring "$layout" --cpu 0 "$@" || return 1
  features=$(negotiated "$log")
  [ -n "$features" ] || { echo "the log does not show the negotiated features"; return 1; }
  equal "features $features: packed" "$(bit "$features" 34)" wanted "$([ "$layout" = split ] && echo 0 || echo 1)" || return 1
  for name in in_order:35 mrg_rxbuf:15 event_idx:29 indirect:28; do
    bit=$(bit "$features" ${name#*:})
    [[ ,$without, != *,${name%:*},* ]] || equal "features $features: ${name%:*}" "$bit" wanted 0 || return 1
  done
  at_most "sent and never come back" $((sent - received)) $ring || return 1
  figure="$received frames, $errors errors ($(names "$features"))"
}

device() { # VERSION: starts DPDK's device once; blast connects to it repeatedly
  local version=$1 layout without variants=('' in_order mrg_rxbuf 'in_order,mrg_rxbuf' event_idx "$all")
  [ -z "$quick" ] || variants=('' "$all")
  for layout in split packed; do
    for without in "${variants[@]}"; do
      attach "$version" "$layout${without:+ without $without}" "$layout" "$without" --size 64,594,1518,4000 || return 0
    done
    attach "$version" "$layout event-driven" "$layout" '' --size 64,594,1518 --event-driven || return 0
  done
  [ -z "$testpmd" ] || check "dpdk-$version device end" end_device || true
}

attach() { # VERSION, NAME, argument of `foreign`…: one check of `device`; after a failure, the next one needs a new testpmd
  local version=$1 name=$2
  shift 2
  if [ -z "$testpmd" ]; then
    check "dpdk-$version device start" start_testpmd "$version" 1 "net_vhost0,iface=$state/dpdk.sock,queues=1" || return 1
  fi
  check "dpdk-$version device $name" foreign "$state/testpmd.log" "$state/dpdk.sock" "$@" || true
}

end_device() { # all frames that blast sent and testpmd accepted were returned
  local rx rx_bad tx tx_bad
  tell stop
  quit_testpmd || return 1
  equal "testpmd received" "$rx" "testpmd sent and dropped" $((tx + tx_bad)) || return 1
  equal "testpmd's errors" "$rx_bad" expected 0 || return 1
  [ "$rx" -gt 0 ] || { echo "testpmd received no frame, or its counters were not understood"; return 1; }
  figure="$rx frames received, $tx sent"
}

# --- OVS-DPDK -----------------------------------------------------------------------------------------------------------

vsctl() { OVS_RUNDIR=$state/ovs ovs-vsctl --timeout=15 --db="unix:$state/ovs/db.sock" "$@"; }

start_ovs() { # starts a private database and switch, whose bridge sends each frame back to its port
  local switch=/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk o=$state/ovs
  [ -x $switch ] || { echo "no $switch: apt-get install openvswitch-switch-dpdk"; return 1; }
  mkdir -p "$o"
  ovsdb-tool create "$o/conf.db" /usr/share/openvswitch/vswitch.ovsschema || return 1
  OVS_RUNDIR=$o setsid ovsdb-server "$o/conf.db" --remote="punix:$o/db.sock" --unixctl="$o/ovsdb.ctl" --pidfile="$o/ovsdb.pid" \
    >"$o/ovsdb.log" 2>&1 &
  ovs_pids+=($!)
  disown $!
  await 5 "database" test -S "$o/db.sock" || return 1
  vsctl --no-wait init -- set Open_vSwitch . other_config:dpdk-init=true other_config:dpdk-socket-mem=512 \
    other_config:dpdk-lcore-mask=0x2 other_config:pmd-cpu-mask=0x2 "other_config:vhost-sock-dir=." \
    "other_config:dpdk-extra=--no-pci --in-memory --no-telemetry --file-prefix=ringroad-ovs-$$" || return 1
  OVS_RUNDIR=$o OVS_LOGDIR=$o OVS_DBDIR=$o OVS_SYSCONFDIR=$o setsid "$switch" "unix:$o/db.sock" --unixctl="$o/vswitchd.ctl" \
    --pidfile="$o/vswitchd.pid" >"$state/ovs.log" 2>&1 &
  ovs_pids+=($!)
  disown $!
  vsctl add-br br0 -- set bridge br0 datapath_type=netdev -- \
    add-port br0 client -- set Interface client type=dpdkvhostuserclient "options:vhost-server-path=$state/client.sock" -- \
    add-port br0 server -- set Interface server type=dpdkvhostuser || return 1
  OVS_RUNDIR=$o ovs-ofctl add-flow "unix:$o/br0.mgmt" 'priority=1,actions=in_port' || return 1
  await 5 "socket of OVS" test -S "$o/server" || return 1
  figure=$($switch --version | sed -n '1s/.*) //p; s/^DPDK /with DPDK /p' | paste -sd ' ')
}

ovs() {
  local layout without variant
  check "ovs start" start_ovs || return 0
  for layout in split packed; do
    for without in '' "$all"; do
      for variant in client server; do
        running "${ovs_pids[1]}" || { check "ovs still runs" false || true; return 0; }
        if [ $variant = client ]; then # OVS connects, about once a second; blast listens on the socket
          set -- "$state/client.sock" "$layout" "$without" --listen
        else
          set -- "$state/ovs/server" "$layout" "$without"
        fi
        check "ovs $variant $layout${without:+ without $without}" foreign "$state/ovs.log" "$@" --size 64,594,1518 || true
      done
    done
    check "ovs server $layout event-driven" \
      foreign "$state/ovs.log" "$state/ovs/server" "$layout" '' --size 64,594,1518 --event-driven || true
  done
  end "${ovs_pids[1]}" "${ovs_pids[0]}"
  ovs_pids=()
}

# --- all of it ----------------------------------------------------------------------------------------------------------

has() { [[ " ${parts[*]} " == *" $1 "* ]]; }

if has driver || has reconnect; then
  if check "daemon start" start_daemon; then
    for version in "${versions[@]}"; do
      if has driver; then
        for layout in split packed; do
          for mrg in 0 1; do
            for in_order in 0 1; do
              for vec in 0 1; do
                name="dpdk-$version $layout mrg=$mrg in_order=$in_order vec=$vec"
                [ $vec = 0 ] || vectorizable "$name" $layout $mrg $in_order || continue
                check "$name" driver "$version" a $layout $mrg $in_order $vec "$long" 64,594,1518 || true
              done
            done
          done
        done
        check "dpdk-$version packed mrg=1 in_order=1 vec=0 wanted, none of it offered" \
          driver "$version" plain packed 1 1 0 "$short" 64,594,1518 || true
        # With two or three segments behind the header, other slots of the ring have entries that testpmd leaves marked as writable.
        for segments in 64,64 64,64,64; do check "dpdk-$version packed, frames of $segments" pieces "$version" $segments || true; done
        # Larger than testpmd's buffers: a frame takes two to be received, and an indirect table or a chain to be sent.
        for layout in split packed; do
          for port in a direct; do
            offered='indirect offered'
            [ $port = a ] || offered='indirect not offered'
            check "dpdk-$version $layout mrg=1 in_order=0 vec=0, frames in pieces, $offered" \
              driver "$version" $port $layout 1 0 0 "$short" 64,4000,1518,9000 || true
          done
        done
      fi
      if has reconnect; then check "dpdk-$version reconnect" reconnect "$version" || true; fi
    done
    check "daemon end" stop_daemon || true
  fi
fi
if has device; then for version in "${versions[@]}"; do device "$version"; done; fi
if has ovs; then ovs; fi
more=''
[ $skipped = 0 ] || more=", $skipped skipped"
echo "$passed passed, $failed failed$more"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
