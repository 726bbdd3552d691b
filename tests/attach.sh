#!/usr/bin/env bash
# `ringroad attach` between two network namespaces: TAP, switch, device, rings, driver, TAP. As root, with ip and busybox:
#
#   tests/attach.sh
#
# For each policy of receive buffers: pings, TCP both ways with equal SHA-256, and what the buffers took. Then a device whose link goes
# down and up, one that dies, and one that is not there. Prints "ok NAME figure" or "FAILED NAME", and finally "N passed, M failed" (the exit status).
set -euo pipefail

# shellcheck source=tests/common.sh
source "$(dirname "$0")/common.sh"
[ $# = 0 ] || usage
needs "network namespaces, TAP"
for tool in ip busybox; do command -v $tool >/dev/null || die "no $tool command: apt-get install iproute2 busybox"; done

make_state attach
near=rr-near-$$ far=rr-far-$$
daemon='' driver=''

cleanup() {
  end "$driver" "$daemon"
  ip netns del "$near"
  ip netns del "$far"
}
ip netns add "$near"
ip netns add "$far"

report() { tail -n 15 "$state"/*.log; }

until_true() { # command…: within 5 s
  local tries=0
  until "$@"; do
    [ $((tries += 1)) -le 100 ] || return 1
    sleep 0.05
  done
}

configure() { # line…: of the device
  cat >"$state/ringroad.toml" <<TOML
[[port]]
name = "device"
kind = "vhost-user"
socket = "$state/device.sock"
$*

[[port]]
name = "host"
kind = "tap"
interface = "rr0"
TOML
}

start_daemon() {
  configure
  ip netns exec "$far" "$ringroad" serve -c "$state/ringroad.toml" >"$state/serve.log" 2>&1 &
  daemon=$!
  until_true test -S "$state/device.sock" || return
  until_true ip -n "$far" link show rr0 || return
  ip -n "$far" addr add 10.88.0.1/24 dev rr0
}

start_driver() { # option…
  [ -z "$driver" ] || stop_driver || true
  ! ip -n "$near" link show rr1 || return 1
  ip netns exec "$near" "$ringroad" attach "$state/device.sock" --tap rr1 --json "$state/figures.json" "$@" >"$state/attach.log" 2>&1 &
  driver=$!
  until_true ip -n "$near" link show rr1 || return
  ip -n "$near" addr add 10.88.0.2/24 dev rr1
}

stop_driver() {
  kill -TERM "$driver"
  wait "$driver" || return
  driver=''
}

ping() { ip netns exec "$1" busybox ping -q -c 3 -i 0.1 -W 2 "$2"; }

tcp() { # from namespace, to namespace, its address
  local listener
  ip netns exec "$2" busybox nc -l -p 5000 <>"$state/never" >"$state/came" &
  listener=$!
  sleep 0.2
  ip netns exec "$1" busybox nc "$3" 5000 <"$state/data" || return
  wait $listener || return
  cmp "$state/data" "$state/came"
}

transfer() { # both ways, with the buffers' memory between all and four times the bytes received
  tcp "$near" "$far" 10.88.0.1 || return
  tcp "$far" "$near" 10.88.0.2 || return
  stop_driver || return
  local overhead
  overhead=$(awk -F'[:,]' '/truesize_per_byte/ { printf "%d", $2 * 100 }' "$state/figures.json")
  figure="buffers of $overhead % of the bytes received"
  cat "$state/figures.json"
  [ "$overhead" -ge 100 ] && [ "$overhead" -le 400 ]
}

set_link() { # true|false: of the device; what its interface has then
  configure "link = $1"
  kill -HUP "$daemon"
  until_true carrier "$1"
}

carrier() { # true|false
  local state='NO-CARRIER'
  [ "$1" = false ] || state='LOWER_UP'
  ip -n "$near" link show rr1 | grep -q "$state"
}

link() { # down with the device's, and up again
  carrier true || return
  set_link false || return
  ! ping "$near" 10.88.0.1 || return
  set_link true || return
  # The kernel takes up to a second to use a carrier.
  until_true ping "$near" 10.88.0.1
}

device_dies() {
  kill -KILL "$daemon"
  wait "$daemon" || true
  daemon=''
  local status=0
  wait "$driver" || status=$?
  driver=''
  [ $status = 1 ] && grep -q 'has disconnected' "$state/attach.log"
}

no_device() {
  ! ip netns exec "$near" "$ringroad" attach "$state/nobody.sock" --tap rr1 2>"$state/attach.log" &&
    grep -q 'is a vhost-user device listening there?' "$state/attach.log"
}

# A listener whose input ends would end the connection.
mkfifo "$state/never"
head -c 33554432 /dev/urandom >"$state/data"
if check "daemon start" start_daemon; then
  for policy in mtu page auto; do
    check "$policy: driver start" start_driver --buffers $policy || continue
    check "$policy: ping to the device's side" ping "$near" 10.88.0.1 || true
    check "$policy: ping from the device's side" ping "$far" 10.88.0.2 || true
    check "$policy: tcp both ways" transfer || true
  done
  if check "driver start" start_driver; then
    check "the device's link" link || true
    check "a device that dies" device_dies || true
  fi
fi
check "no device" no_device || true
verdict
