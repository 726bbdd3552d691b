#!/usr/bin/env bash
# UDP tunnels through the switch: VXLAN of the host's kernel in three network namespaces. As root, with ip and busybox, Linux 6.17
# or later:
#
#   tests/tunnels.sh
#
# Two namespaces are behind TAP ports with `tunnels`, between which frames are to pass whole. The third is behind `ringroad attach`, to
# which checksums are complete: the switch cuts its frames, and its kernel verifies each. TCP both ways with equal contents, over IPv4
# and IPv6, with and without outer checksums. Prints "ok NAME figure" or "FAILED NAME", and finally "N passed, M failed" (the exit
# status).
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
ringroad=$(realpath -m "${RINGROAD:-${CARGO_TARGET_DIR:-$root/target}/release/ringroad}")
die() { echo "tunnels.sh: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "needs root (network namespaces, TAP); run it with sudo"
[ -x "$ringroad" ] || die "no program $ringroad: build it with 'cargo build --release', or set \$RINGROAD"
for tool in ip busybox; do command -v $tool >/dev/null || die "no $tool command: apt-get install iproute2 busybox"; done
IFS=. read -r major minor _ < <(uname -r)
if [ $((major * 1000 + ${minor%%[!0-9]*})) -lt 6017 ]; then
  echo "SKIPPED: UDP tunnels on TAP interfaces need Linux 6.17, this is $(uname -r)"
  exit 0
fi

state=$(mktemp -d /tmp/ringroad-tunnels.XXXXXX)
# The switch's, and those of its ports: number 1 and 2 have interfaces of the switch, 3 that of a driver.
switch=rr-switch-$$ names=("" "rr-one-$$" "rr-two-$$" "rr-cut-$$")
passed=0 failed=0 figure='' daemon='' driver=''

# shellcheck disable=SC2317 # a trap
cleanup() {
  trap '' INT TERM
  set +e
  for pid in $driver $daemon; do kill "$pid"; wait "$pid"; done 2>/dev/null
  for name in "$switch" "${names[@]:1}"; do ip netns del "$name"; done
  rm -rf "$state"
}
trap cleanup EXIT
for name in "$switch" "${names[@]:1}"; do ip netns add "$name"; done

check() { # NAME, command…
  local name=$1
  shift
  figure=''
  if "$@" >"$state/out" 2>&1; then
    passed=$((passed + 1))
    echo "ok $name $figure"
  else
    failed=$((failed + 1))
    echo "FAILED $name"
    tail -n 15 "$state/out" "$state"/*.log | sed 's/^/    /'
    return 1
  fi
}

until_true() { # command…: within 5 s
  local tries=0
  until "$@"; do
    [ $((tries += 1)) -le 100 ] || return 1
    sleep 0.05
  done
}

start() {
  cat >"$state/ringroad.toml" <<TOML
[[port]]
name = "one"
kind = "tap"
interface = "rr1"
tunnels = true

[[port]]
name = "two"
kind = "tap"
interface = "rr2"
tunnels = true

[[port]]
name = "cut"
kind = "vhost-user"
socket = "$state/cut.sock"
features = { guest_csum = false }
TOML
  ip netns exec "$switch" "$ringroad" serve -c "$state/ringroad.toml" --json "$state/counters.json" >"$state/serve.log" 2>&1 &
  daemon=$!
  until_true test -S "$state/cut.sock" || return
  ip netns exec "${names[3]}" "$ringroad" attach "$state/cut.sock" --tap rr3 >"$state/attach.log" 2>&1 &
  driver=$!
  local port
  for port in 1 2; do
    until_true ip -n "$switch" link show rr$port || return
    ip -n "$switch" link set rr$port netns "${names[port]}" || return
  done
  until_true ip -n "${names[3]}" link show rr3 || return
  for port in 1 2 3; do
    ip -n "${names[port]}" link set rr$port up || return
    ip -n "${names[port]}" addr add 10.89.0.$port/24 dev rr$port || return
    ip -n "${names[port]}" addr add fd89::$port/64 dev rr$port nodad || return
    # A kernel may lack them.
    ip -n "${names[port]}" link add link rr$port name rr$port.5 type vlan id 5 || continue
    ip -n "${names[port]}" addr add 10.89.50.$port/24 dev rr$port.5 || return
    ip -n "${names[port]}" link set rr$port.5 up || return
  done
  ! grep 'needs Linux' "$state/serve.log"
}

connect() { # FAMILY, CHECKSUM (on or off), two ports, "" or ".5" for VLAN 5: an interface rrvx in each of their namespaces
  local family=$1 checksum=$2 from=$3 to=$4 vlan=$5 port peer local_peer options
  # In all of them: the third one would go on to send what the others now take for faulty.
  for port in 1 2 3; do ip -n "${names[port]}" link del rrvx 2>"$state/gone" || true; done
  for port in "$from" "$to"; do
    peer=$((from + to - port))
    if [ "$family" = 4 ]; then
      local_peer="local 10.89.${vlan#.}0.$port remote 10.89.${vlan#.}0.$peer"
      options=noudpcsum
      [ "$checksum" = off ] || options=udpcsum
    else
      local_peer="local fd89::$port remote fd89::$peer"
      options="udp6zerocsumtx udp6zerocsumrx"
      [ "$checksum" = off ] || options="noudp6zerocsumtx noudp6zerocsumrx"
    fi
    # shellcheck disable=SC2086 # lists of words
    ip -n "${names[port]}" link add rrvx type vxlan id 42 dstport 4789 $local_peer $options dev rr$port$vlan || return
    ip -n "${names[port]}" addr add 10.90.0.$port/24 dev rrvx || return
    ip -n "${names[port]}" addr add fd90::$port/64 dev rrvx nodad || return
    ip -n "${names[port]}" link set rrvx up || return
  done
  ip netns exec "${names[from]}" busybox ping -q -c 2 -i 0.1 -W 2 10.90.0.$to
}

count() { # port, counter of its interface
  ip netns exec "${names[$1]}" cat /sys/class/net/rr$1/statistics/$2
}

errors() { # port: checksum errors of TCP and UDP, over IPv4 and IPv6
  ip netns exec "${names[$1]}" awk '
    /^(Tcp|Udp):/ { if (fields[$1]++) { sum += $at[$1] } else { for (i = 2; i <= NF; i++) if ($i == "InCsumErrors") at[$1] = i } }
    /^Udp6InCsumErrors/ { sum += $2 }
    END { print sum + 0 }' /proc/net/snmp /proc/net/snmp6
}

transfer() { # from port, to port, its address; how frames are to arrive: "whole", "cut" by the switch, or as they were "sent"
  local from=$1 to=$2 listener sent packets bytes length wrong
  # What came before the other end was there counts, if it has no checksum over IPv6.
  wrong=$(errors "$to")
  sent=$(count "$from" tx_packets) packets=$(count "$to" rx_packets) bytes=$(count "$to" rx_bytes)
  ip netns exec "${names[to]}" busybox nc -l -p 5000 <>"$state/never" >"$state/came" &
  listener=$!
  sleep 0.2
  # In long writes: of short ones, a sender that never has to wait makes short frames.
  ip netns exec "${names[from]}" bash -c "cat '$state/data' >/dev/tcp/$3/5000" || return
  wait $listener || return
  cmp "$state/data" "$state/came" || return
  packets=$(($(count "$to" rx_packets) - packets)) bytes=$(($(count "$to" rx_bytes) - bytes))
  sent=$(($(count "$from" tx_packets) - sent)) length=$((bytes / packets))
  figure="$sent frames became $packets of $length bytes"
  wrong=$(($(errors "$to") - wrong))
  echo "$figure, $wrong checksum errors"
  [ $wrong = 0 ] || return
  # How long they are on average depends on who runs when; cut, none is longer than an Ethernet frame.
  case $4 in
    whole) [ $length -ge 2000 ] && [ "$sent" -le $((packets + 10)) ] && [ "$sent" -ge $((packets - 10)) ] ;;
    cut) [ $length -le 1514 ] && [ "$sent" -lt $((packets / 2)) ] ;;
    sent) [ $length -le 1514 ] && [ "$sent" -ge $((packets - 10)) ] ;;
  esac
}

nothing_refused() {
  kill -TERM "$daemon"
  wait "$daemon" || return
  daemon=''
  grep -E '"offload": *[0-9]' "$state/counters.json" || return
  ! grep -qE '"offload": *[1-9]' "$state/counters.json"
}

# A listener whose input ends would end the connection.
mkfifo "$state/never"
head -c 16777216 /dev/urandom >"$state/data"
if check "start" start; then
  for family in 4 6; do
    for checksum in off on; do
      outside="IPv$family, outer checksum $checksum"
      check "$outside: tunnel between interfaces" connect $family $checksum 1 2 "" || continue
      check "$outside: IPv4 whole" transfer 1 2 10.90.0.2 whole || true
      check "$outside: IPv6 whole, back" transfer 2 1 fd90::1 whole || true
      check "$outside: tunnel to a driver" connect $family $checksum 1 3 "" || continue
      check "$outside: IPv4 cut" transfer 1 3 10.90.0.3 cut || true
      check "$outside: IPv6 cut" transfer 1 3 fd90::3 cut || true
      check "$outside: IPv4 from a driver" transfer 3 1 10.90.0.1 sent || true
    done
  done
  # The kernel puts the tag into the frame.
  if ! ip -n "${names[1]}" link show rr1.5 >"$state/out" 2>&1; then
    echo "SKIPPED: tunnels in a VLAN, this kernel has none"
  elif check "VLAN: tunnel between interfaces" connect 4 on 1 2 .5; then
    check "VLAN: whole" transfer 1 2 10.90.0.2 whole || true
    check "VLAN: tunnel to a driver" connect 4 on 1 3 .5 || true
    check "VLAN: cut" transfer 1 3 10.90.0.3 cut || true
  fi
  check "no header is refused" nothing_refused || true
fi
echo "$passed passed, $failed failed"
[ $failed = 0 ]
