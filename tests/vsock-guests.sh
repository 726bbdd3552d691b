#!/usr/bin/env bash
# Interoperability of a vsock device with real guests: Linux 7 under User-Mode Linux and Linux 6.1 under QEMU. As root:
#
#   tests/vsock-guests.sh [--quick] [--device ringroad|vhost-device-vsock] [--size MIB] [--seconds S] [PART...]
#
# The parts, all of them if none is named:
#
# uml, qemu    starts the device, boots the guest on it, and runs tests/guest/vsock.c in the guest and, over the device's Unix
#              sockets, on the host: connections each way, refused connections, echo, bulk data each way with equal SHA-256 (1 GiB;
#              64 MiB with --quick), 500 concurrent connections, round trips, SOCK_SEQPACKET, and connections whose peer or device
#              is killed; then again with crates/host/examples/vsock_services.rs as the device: a million messages each way
#              (--quick: 20000, QEMU 2000)
# siblings     guests of one device process in a common group: two of UML, UML and QEMU; one not in the group; one that is killed
# restart      the device is killed and restarted: what guests see, and how they recover
# fio          fio's ping-pong between two UML guests, one CPU for each, S seconds (2) per size
# stream       writes of 64 KiB for S seconds, five times each way, between a program in a UML guest and one on the host (the guest
#              on one CPU, the device and that program on the other), and from a second guest (on the device's CPU) to the first
# sending      round trips of 64 bytes between a program on the host and one in a UML guest (placed as for stream), five pairs of S
#              seconds (--quick: one pair) each way: `send = "queued"` against "direct", changed in place by a reload
# Prints "ok NAME figure" or "FAILED NAME" with the end of the logs, and finally "N passed, M failed" (the exit status).
#
# ringroad is $RINGROAD, default target/release/ringroad. Known limitations of a device are not tested (see `lacks`).
# $RINGROAD_SERVICES, default examples/vsock_services beside it, is built by `cargo build --release --example vsock_services`.
# $RINGROAD_VSOCK are additional lines of TOML for each [[vsock]] table. Other devices support parts uml, qemu and stream only.
set -euo pipefail

# shellcheck source=tests/common.sh
source "$(dirname "$0")/common.sh"
guests=$root/scripts/guests
cache=$("$root/scripts/peers" where)
vsock=$cache/vsock
services=$(realpath -m "${RINGROAD_SERVICES:-$(dirname "$ringroad")/examples/vsock_services}")

device=ringroad mib='' quick='' seconds=2 parts=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=1 ;;
    --device | --size | --seconds)
      [ $# -ge 2 ] || die "$1 needs a value"
      case $1 in --device) device=$2 ;; --size) mib=$2 ;; *) seconds=$2 ;; esac
      shift
      ;;
    uml | qemu | siblings | restart | fio | stream | sending) parts+=("$1") ;;
    *) usage ;;
  esac
  shift
done
[ -n "$mib" ] || { [ -n "$quick" ] && mib=64 || mib=1024; }
[[ $mib =~ ^[1-9][0-9]*$ ]] || die "--size: expected a whole number of MiB above 0, got '$mib'"
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "--seconds: expected a whole number above 0, got '$seconds'"
[ ${#parts[@]} -gt 0 ] || { [ "$device" = ringroad ] && parts=(uml qemu siblings restart fio stream sending) || parts=(uml qemu stream); }
[ "$(id -u)" = 0 ] || die "needs root (chroot); run it with sudo"
case $device in
  ringroad)
    [ -x "$ringroad" ] || die "no program $ringroad: build it with 'cargo build --release', or set \$RINGROAD"
    [ -x "$services" ] || die "no program $services: build it with 'cargo build --release -p ringroad-host --example vsock_services'"
    ;;
  vhost-device-vsock) [[ ! " ${parts[*]} " =~ \ (siblings|restart|fio|sending)\  ]] || die "parts siblings, restart, fio and sending are for ringroad only" ;;
  *) die "--device: expected ringroad or vhost-device-vsock, got '$device'" ;;
esac
"$guests" setup

make_state vsock
export RINGROAD_GUESTS=$state/guests
bytes=$((mib * 1048576))
peer=2 # the CID that guests connect to
limit=20 long=$((60 + mib / 4)) # timeouts of one command, in seconds
packets=20000
[ -z "$quick" ] || packets=2000
declare -A cid=([uml]=3 [qemu]=4 [uml2]=5 [uml3]=6) groups=() messages=([uml]=1000000 [qemu]=1000000)
[ -z "$quick" ] || messages=([uml]=20000 [qemu]=2000)
on_cpu=() daemon='' orders='' listeners=()

# vhost-device-vsock 0.3.0 does not report a guest's half-close to the host, and closes both directions when the host closes one;
# loses connections when Linux >= 6.6 sends packets that span several descriptors; sends no reset for ports without a listener,
# nor when it exits; and hangs under load in both directions.
lacks() { # WHAT, KIND
  [ "$device" = vhost-device-vsock ] || return 1
  case $1 in half-close | refusal-of-guests | reset-at-its-end | bulk-both-ways) ;; bulk-from-guest) [ "$2" = uml ] ;; *) return 1 ;; esac
}

# --- the device and the host's end ----------------------------------------------------------------------------------------

start_device() { # GUEST…
  local tries=0 name
  if [ "$device" = ringroad ]; then
    for name; do
      cat <<TOML
[[vsock]]
cid = ${cid[$name]}
socket = "$state/$name.sock"
host = "$state/$name.host"
groups = [${groups[$name]:-}]
${RINGROAD_VSOCK:-}
TOML
    done >"$state/ringroad.toml"
    "${on_cpu[@]}" "$ringroad" serve -c "$state/ringroad.toml" >"$state/device.log" 2>&1 &
  else
    rm -f "$state/$1.sock" "$state/$1.host"
    setsid "${on_cpu[@]}" chroot "$cache/forky" vhost-device-vsock --guest-cid "${cid[$1]}" --socket "$state/$1.sock" --uds-path "$state/$1.host" \
      >"$state/device.log" 2>&1 &
  fi
  daemon=$!
  until [ -S "$state/$1.sock" ] && { [ "$device" != ringroad ] || grep -q ready "$state/device.log"; }; do
    running "$daemon" || { echo "the device exited at once"; return 1; }
    [ $((tries += 1)) -le 100 ] || { echo "no socket $state/$1.sock after 10 s"; return 1; }
    sleep 0.1
  done
}

kill_device() {
  kill -KILL "$daemon"
  wait "$daemon" 2>/dev/null || true
  daemon=''
}

start_services() { # KIND: starts vsock_services as the device; it reads commands from $orders
  local tries=0
  rm -f "$state/$1.sock" "$state/orders"
  mkfifo "$state/orders"
  "$services" "${cid[$1]}" "$state/$1.sock" echo=1001 sink=1002 "source=1003:$bytes" packets=1004 \
    <"$state/orders" >"$state/services.log" 2>"$state/device.log" &
  daemon=$!
  sleep infinity >"$state/orders" & # guests would inherit a descriptor of this shell and keep it open
  orders=$!
  until grep -q ^serving "$state/services.log"; do
    running "$daemon" || { echo "vsock_services exited at once"; return 1; }
    [ $((tries += 1)) -le 100 ] || { echo "no socket $state/$1.sock after 10 s"; return 1; }
    sleep 0.1
  done
}

order() { # COMMAND: vsock_services executes it and must answer "ok"
  local tries=0 said line
  said=$(wc -l <"$state/services.log")
  echo "$1" >"$state/orders"
  until line=$(tail -n "+$((said + 1))" "$state/services.log") && [ -n "$line" ]; do
    running "$daemon" || { echo "vsock_services has exited"; return 1; }
    [ $((tries += 1)) -le $((long * 10)) ] || { echo "no answer after $long s"; return 1; }
    sleep 0.1
  done
  echo "$line"
  [[ $line == "ok "* ]] || return 1
  figure=${line#ok }
}

end_orders() { # closes the input of vsock_services, which ends it
  end "$orders"
  orders=''
  local tries=0 status=0
  while running "$daemon"; do
    [ $((tries += 1)) -le 100 ] || { echo "vsock_services did not exit within 5 s"; return 1; }
    sleep 0.05
  done
  wait "$daemon" || status=$?
  daemon=''
  [ $status = 0 ] || { echo "it exited with status $status"; return 1; }
}

stop_device() { # it must still be running, and exit with success
  local status=0 begun=${EPOCHREALTIME//[.,]/} pid=$daemon tries=0
  daemon=''
  running "$pid" || { echo "the device had already exited"; return 1; }
  kill -TERM "$pid"
  while running "$pid"; do
    [ $((tries += 1)) -le 100 ] || { kill -KILL "$pid"; echo "the device did not exit within 5 s"; return 1; }
    sleep 0.05
  done
  wait "$pid" || status=$?
  [ $status = 0 ] || [ "$device $status" = "vhost-device-vsock 143" ] || { echo "the device exited with status $status"; return 1; }
  ! grep -n 'panicked at' "$state/device.log" || return 1
  figure="$(((${EPOCHREALTIME//[.,]/} - begun) / 1000)) ms"
}

host_listens() { # KIND, PORT, SERVICE: listens on the Unix socket of a host port, for connections from the guest
  local path=$state/$1.host_$2 tries=0
  # shellcheck disable=SC2086 # words
  "${on_cpu[@]}" "$vsock" listen "$path" $3 ${options[@]+"${options[@]}"} >>"$state/host.log" 2>&1 &
  listeners+=($!)
  until [ -S "$path" ]; do
    [ $((tries += 1)) -le 50 ] || { echo "no socket $path after 5 s"; return 1; }
    sleep 0.1
  done
}

end_listeners() {
  end ${listeners[@]+"${listeners[@]}"}
  listeners=()
}

cleanup() {
  [ ! -d "$RINGROAD_GUESTS" ] || "$guests" stop --all
  end_listeners
  end "$orders" "$daemon"
}

# --- checks: each sets $figure, or fails and prints its output ------------------------------------------------------------

report() {
  local guest
  echo "--- the end of the device's log"
  tail -n 20 "$state/device.log"
  echo "--- the end of the output of the host's listeners"
  tail -n 5 "$state/host.log"
  for guest in "$RINGROAD_GUESTS"/*/console.log; do
    [ -e "$guest" ] || continue
    guest=$(basename "$(dirname "$guest")")
    "$guests" logs "$guest" || true
    echo "--- the end of the kernel log of $guest and of the output of its listeners"
    "$guests" run "$guest" --timeout 3 'dmesg | tail -n 12; tail -n 5 /tmp/vsock.log' 2>/dev/null || true
  done
}

in_guest() { "$guests" run "$1" --timeout "$limit" "$2"; } # GUEST, COMMAND

on() { # host|guest, KIND, PORT, arguments of `vsock connect`… or ping BYTES SECONDS: connects to a port of the peer
  local from=$1 kind=$2 port=$3 verb=connect
  shift 3
  [ "$1" != ping ] || { verb=ping; shift; }
  if [ "$from" = host ]; then
    timeout "$limit" "${on_cpu[@]}" "$vsock" $verb "$state/$kind.host" "$port" "$@" </dev/null
  else
    in_guest "$kind" "vsock $verb $peer $port $*"
  fi
}

connect() { # the same, and it must print "ok"
  local out status=0
  out=$(on "$@" 2>&1) || status=$?
  echo "$out"
  [ $status = 0 ] || { echo "status $status"; return 1; }
  [[ $out == "ok "* ]] || return 1
  figure=${out#ok }
  figure=${figure% sha256 *}
}

bulk() { # the same, with the long timeout
  local limit=$long
  connect "$@"
}

refused() { # host|guest, KIND, PORT: the connect must fail at once
  local out begun=${EPOCHREALTIME//[.,]/} ms
  if out=$(on "$1" "$2" "${3:-7}" echo 1 2>&1); then echo "it connected: $out"; return 1; fi
  ms=$(((${EPOCHREALTIME//[.,]/} - begun) / 1000))
  echo "$out (after $ms ms)"
  if [ "$1" = guest ]; then [[ $out == *"Connection reset by peer"* ]]; else [[ $out == *"got the end"* ]]; fi || return 1
  [ $ms -lt 1500 ] || { echo "expected it within 1.5 s (Linux itself gives up after 2 s)"; return 1; }
  figure="$ms ms"
}

boot() { # GUEST (its kind, with an optional number), CPU
  local begun=${EPOCHREALTIME//[.,]/} us pin=()
  [ "$(nproc)" = 1 ] || [ -z "${2:-}" ] || pin=(taskset -c "$2")
  "${pin[@]}" "$guests" boot "${1%%[0-9]*}" none --name "$1" --vsock "$state/$1.sock" || return
  us=$((${EPOCHREALTIME//[.,]/} - begun))
  figure="$((us / 1000000)).$((us / 100000 % 10)) s"
}

kill_guest() { # GUEST: kills all its processes
  local pid
  read -r pid _ <"$RINGROAD_GUESTS/$1/pid"
  kill -KILL -- "-$pid"
}

local_cid() { # KIND
  figure=$(in_guest "$1" 'vsock cid') || return
  echo "expected CID ${cid[$1]}, got $figure"
  [ "$figure" = "${cid[$1]}" ]
}

guest_listens() { # KIND, PORT, SERVICE…
  local out
  out=$(in_guest "$1" "touch /tmp/vsock.log; vsock listen ${*:2} ${options[*]-} --background >>/tmp/vsock.log; tail -n 1 /tmp/vsock.log") || return
  echo "$out"
  [ "$out" = "listening $2" ]
}

guest_listens_everywhere() { # GUEST
  local what
  # shellcheck disable=SC2086 # words
  for what in "1001 echo" "1002 sink $bytes" "1003 source $bytes" "1004 packets"; do guest_listens "$1" $what || return; done
}

listen_everywhere() { # KIND
  local what port=1000
  for what in echo "sink $bytes" "source $bytes"; do
    port=$((port + 1)) # 1001 echo, 1002 sink, 1003 source, on both sides
    host_listens "$1" $port "$what" || return
    # shellcheck disable=SC2086 # words
    guest_listens "$1" $port $what || return
  done
  guest_listens "$1" 1004 packets
}

round_the_guest() { # KIND: SOCK_SEQPACKET within the guest, over vsock_loopback
  local out
  out=$(in_guest "$1" "insmod /modules/*vsock_loopback.ko && vsock connect 1 1004 packets $packets") || { echo "$out"; return 1; }
  echo "$out"
  figure=${out#ok }
}

blocked() { # KIND, command…: a program in the guest is blocked in a read; the command must release it within 5 s
  local kind=$1 tries=0 out
  shift
  # shellcheck disable=SC2016 # for the guest's shell
  in_guest "$kind" 'rm -f /tmp/reset; vsock wait-reset '"$peer"' 1001 >/tmp/reset 2>&1 & for i in $(seq 50); do grep -q connected /tmp/reset && exit 0; usleep 100000; done; cat /tmp/reset; exit 1' || return
  "$@" || return
  until out=$(in_guest "$kind" 'grep reset /tmp/reset'); do
    [ $((tries += 1)) -le 25 ] || { echo "5 s later the guest is still blocked"; return 1; }
    sleep 0.2
  done
  figure=$out
}

writer_blocked() { # GUEST, command…: the same for a program that is blocked in a write
  local kind=$1 tries=0 out
  shift
  in_guest "$kind" "rm -f /tmp/writer; vsock connect $peer 1002 source 1000000000 >/tmp/writer 2>&1 & sleep 1; cat /tmp/writer; test ! -s /tmp/writer" ||
    { echo "it is not blocked in a write"; return 1; }
  "$@" || return
  until out=$(in_guest "$kind" 'grep ^FAILED.connection /tmp/writer'); do
    [ $((tries += 1)) -le 25 ] || { echo "5 s later the guest is still blocked in a write"; return 1; }
    sleep 0.2
  done
  figure+=", ${out##* }"
}

# --- the parts ----------------------------------------------------------------------------------------------------------

part() { # KIND
  local kind=$1 from
  options=()
  ! lacks half-close "$kind" || options=(--no-half-close)
  check "$kind device start" start_device "$kind" || return 0
  check "$kind boot" boot "$kind" || return 0
  check "$kind cid" local_cid "$kind" || return 0
  check "$kind listeners" listen_everywhere "$kind" || return 0
  for from in guest host; do
    if [ $from = host ] || ! lacks refusal-of-guests "$kind"; then
      check "$kind refused, from $from" refused $from "$kind" || true
    fi
    check "$kind echo, from $from" connect $from "$kind" 1001 echo 10000 "${options[@]}" || true
    if [ $from = host ] || ! lacks bulk-from-guest "$kind"; then
      check "$kind bulk $from sends, by its own connection" bulk $from "$kind" 1002 source $bytes "${options[@]}" || true
    fi
    if [ $from = guest ] || ! lacks bulk-from-guest "$kind"; then
      check "$kind bulk $from gets, by its own connection" bulk $from "$kind" 1003 sink $bytes "${options[@]}" || true
    fi
    if ! lacks bulk-both-ways "$kind"; then
      check "$kind bulk echo, from $from" bulk $from "$kind" 1001 echo $((bytes / 4)) "${options[@]}" || true
    fi
    check "$kind 500 connections at once, from $from" connect $from "$kind" 1001 echo 16384 --connections 500 "${options[@]}" || true
    check "$kind round trips, from $from" connect $from "$kind" 1001 ping 64 2 || true
  done
  check "$kind messages round the guest" round_the_guest "$kind" || true
  check "$kind the host's program is killed" blocked "$kind" end "${listeners[0]}" || true
  end_listeners
  rm -f "$state/$kind.host_1001" # the socket file outlives its listener
  check "$kind listener restarted" host_listens "$kind" 1001 echo || return 0
  check "$kind echo after that" connect guest "$kind" 1001 echo 10000 "${options[@]}" || true
  if lacks reset-at-its-end "$kind"; then
    check "$kind the device ends" stop_device || true
  else
    check "$kind the device ends" blocked "$kind" stop_device || true
  fi
}

services_part() { # KIND: a program that embeds the host's side
  local kind=$1 limit=$long options=()
  check "$kind services start" start_services "$kind" || return 0
  check "$kind services boot" boot "$kind" || return 0
  check "$kind services listeners" guest_listens "$kind" 1004 packets || return 0
  check "$kind services echo, from guest" connect guest "$kind" 1001 echo $((bytes / 16)) || true
  check "$kind services 500 connections at once, from guest" connect guest "$kind" 1001 echo 16384 --connections 500 || true
  check "$kind services bulk guest sends" connect guest "$kind" 1002 source $bytes || true
  check "$kind services bulk guest gets" connect guest "$kind" 1003 sink $bytes || true
  check "$kind services messages, guest to host" connect guest "$kind" 1004 packets "${messages[$kind]}" || true
  check "$kind services messages, host to guest" order "packets 1004 ${messages[$kind]}" || true
  check "$kind services end" blocked "$kind" end_orders || true
}

between() { # GUEST, GUEST: the first one connects to the second
  local peer=${cid[$2]} name="siblings, $1 to $2:"
  check "$name echo" connect guest "$1" 1001 echo 10000 || true
  check "$name bulk" bulk guest "$1" 1002 source $bytes || true
  check "$name bulk back" bulk guest "$1" 1003 sink $bytes || true
  check "$name bulk both ways" bulk guest "$1" 1001 echo $((bytes / 4)) || true
  check "$name messages" bulk guest "$1" 1004 packets $packets || true
  check "$name 500 connections at once" connect guest "$1" 1001 echo 16384 --connections 500 || true
  check "$name round trips" connect guest "$1" 1001 ping 64 2 || true
  check "$name refused" refused guest "$1" 7 || true
}

no_way() { # GUEST, CID: the connect must fail even if there is a listener
  local peer=$2
  refused guest "$1" 1001
}

sees_end() { # GUEST, GUEST, command…: the first one is reading from the second when the command runs
  local peer=${cid[$2]}
  blocked "$1" "${@:3}"
}

with_silent() { # GUEST, GUEST, command…: a program in the first one does not read; the second one reads from it and writes to it
  local peer=${cid[$1]}
  in_guest "$1" 'killall -STOP vsock' || return
  writer_blocked "$2" blocked "$2" "${@:3}"
}

again() { # GUEST: reboots it
  local begun=$SECONDS
  "$guests" reboot "$1" || return
  guest_listens_everywhere "$1" || return
  figure="$((SECONDS - begun)) s"
}

siblings_part() {
  local name options=()
  groups=([uml]='"g"' [uml2]='"other", "g"' [qemu]='"g", "h"' [uml3]='"h"')
  check "siblings device start" start_device uml uml2 uml3 qemu || return 0
  for name in uml uml2 uml3 qemu; do
    check "siblings $name boot" boot $name || return 0
    check "siblings $name listeners" guest_listens_everywhere $name || return 0
  done
  between uml uml2
  between uml2 uml
  between uml qemu
  between qemu uml
  check "siblings, uml3 to qemu: another group" sibling_echo uml3 qemu || true
  check "siblings, uml to uml3: no common group" no_way uml "${cid[uml3]}" || true
  check "siblings, uml3 to uml: no common group" no_way uml3 "${cid[uml]}" || true
  check "siblings, uml to an unused CID" no_way uml 99 || true
  check "siblings, uml2 is killed" with_silent uml2 uml kill_guest uml2 || true
  check "siblings, uml to uml2, which was killed" no_way uml "${cid[uml2]}" || true
  check "siblings, uml2 again" again uml2 || return 0
  check "siblings, uml to uml2: echo after that" sibling_echo uml uml2 || true
  check "siblings, qemu is killed" sees_end uml qemu kill_guest qemu || true
  check "siblings, uml to uml2: echo after that too" sibling_echo uml uml2 || true
  check "siblings, the device ends" sees_end uml uml2 stop_device || true
}

sibling_echo() { # GUEST, GUEST
  local peer=${cid[$2]}
  connect guest "$1" 1001 echo 10000
}

# When the device disconnects, Linux under UML removes it and resets all its connections; only a reboot brings it back. QEMU 11.1
# neither notifies the guest nor reconnects (docs/vsock-restart.md): the guest can unbind its driver by itself.
restart_part() {
  local kind options=()
  groups=()
  for kind in uml qemu; do
    check "restart $kind device start" start_device "$kind" || return 0
    check "restart $kind boot" boot "$kind" || return 0
    check "restart $kind listeners" listen_everywhere "$kind" || return 0
    check "restart $kind echo" connect guest "$kind" 1001 echo 10000 || true
    kill -STOP "${listeners[1]}"
    if [ "$kind" = uml ]; then
      check "restart uml the device is killed" writer_blocked uml reset_by uml kill_device || true
      check "restart uml no device" no_device uml || true
    else
      check "restart qemu the device is killed, and the driver taken off" writer_blocked qemu reset_by qemu kill_and_unbind qemu || true
    fi
    kill -CONT "${listeners[1]}"
    check "restart $kind device start again" start_device "$kind" || return 0
    check "restart $kind boot again" again "$kind" || return 0
    check "restart $kind echo, from guest" connect guest "$kind" 1001 echo 10000 || true
    check "restart $kind echo, from host" connect host "$kind" 1001 echo 10000 || true
    end_part
  done
}

reset_by() { # GUEST, command…: a reset, not just end of stream
  blocked "$@" && [[ $figure == *ECONNRESET* ]]
}

no_device() { # GUEST
  local out
  if out=$(on guest "$1" 1001 echo 1 2>&1); then echo "it connected: $out"; return 1; fi
  echo "$out"
  [[ $out == *"No such device"* ]]
}

kill_and_unbind() { # GUEST
  kill_device
  # shellcheck disable=SC2016 # for the guest's shell
  in_guest "$1" 'cd /sys/bus/virtio/drivers/vmw_vsock_virtio_transport && for device in virtio*; do echo "$device" >unbind; done'
}

fio_part() {
  local size options=() rows=()
  groups=([uml]='"g"' [uml2]='"g"')
  check "fio device start" start_device uml uml2 || return 0
  check "fio uml boot" boot uml 0 || return 0
  check "fio uml2 boot" boot uml2 1 || return 0
  for size in 64 512 4096; do
    check "fio ping-pong of $size bytes" ping_pong "$size" && rows+=("$size $figure")
  done
  [ ${#rows[@]} = 0 ] || printf '%-6s %12s %12s %10s %10s %10s\n' bytes 'round trips' 'mean, us' 'p1' 'p50' 'p99'
  for size in ${rows[@]+"${rows[@]}"}; do
    # shellcheck disable=SC2086 # words
    printf '%-6s %12s %12s %10s %10s %10s\n' $size
  done
}

ping_pong() { # BYTES: fio in uml pings, fio in uml2 answers; sets round trips, mean, p1, p50 and p99 in microseconds
  local common="--ioengine=net --protocol=vsock --port=8888 --pingpong=1 --bs=$1 --size=1g --time_based --minimal" out
  in_guest uml2 "hostfs-usr; cd /tmp; (fio --name=pong $common --listen --rw=read --runtime=$((seconds + 5)) >/tmp/pong 2>&1 &) ; sleep 1" || return
  out=$(limit=$((seconds + 20)) && in_guest uml "hostfs-usr; cd /tmp; fio --name=ping $common --hostname=${cid[uml2]} --rw=write --runtime=$seconds") ||
    { echo "$out"; in_guest uml2 'cat /tmp/pong'; return 1; }
  echo "$out"
  figure=$(awk -F ';' '$3 == "ping" && $5 == 0 {
    for (i = 59; i <= 78; i++) { split($i, p, "%="); at[p[1] + 0] = p[2] }
    if ($47 > 0) printf "%d %.1f %s %s %s", $47 * 1024 / '"$1"', $57, at[1], at[50], at[99] }' <<<"$out")
  in_guest uml2 'killall -q -KILL fio; true'
  [ -n "$figure" ]
}

stream_part() {
  local options=()
  [ "$(nproc)" = 1 ] || on_cpu=(taskset -c 1)
  if [ "$device" = ringroad ]; then
    groups=([uml]='"g"' [uml2]='"g"')
    check "stream device start" start_device uml uml2 || return 0
  else
    check "stream device start" start_device uml || return 0
  fi
  check "stream boot" boot uml 0 || return 0
  lacks bulk-from-guest uml || check "stream to the host" five_times pour_to_host || true
  check "stream to the guest" five_times pour_to_guest || true
  if [ "$device" = ringroad ]; then
    check "stream boot of another guest" boot uml2 1 || return 0
    check "stream from guest to guest" five_times pour_to_sibling || true
  fi
  on_cpu=()
}

five_times() { # COMMAND, which sets $rate in Gb/s: sets minimum, median and maximum of five runs
  local rate rates=()
  while [ ${#rates[@]} -lt 5 ]; do "$1" && rates+=("$rate") || return; done
  mapfile -t rates < <(printf '%s\n' "${rates[@]}" | sort -n)
  figure="${rates[0]} – ${rates[2]} – ${rates[4]} Gb/s"
}

rate_of() { # OUTPUT of a drain
  echo "$1"
  rate=$(sed -n 's/^ok drain .* \([0-9.]*\) Gb.s$/\1/p' <<<"$1")
  [ -n "$rate" ]
}

pour_to_host() {
  local tries=0 pid
  "${on_cpu[@]}" "$vsock" drain "$state/uml.host_1005" >"$state/drain" 2>&1 &
  pid=$!
  listeners+=("$pid")
  until grep -q listening "$state/drain"; do [ $((tries += 1)) -le 50 ] || return 1; sleep 0.1; done
  limit=$((seconds + 10)) in_guest uml "vsock pour $peer 1005 $seconds" || return
  timeout 10 tail --pid="$pid" -f /dev/null || { echo "the stream did not end"; return 1; }
  rate_of "$(cat "$state/drain")"
}

pour_to_guest() {
  into_guest timeout $((seconds + 10)) "${on_cpu[@]}" "$vsock" pour "$state/uml.host" 1005 "$seconds"
}

pour_to_sibling() {
  limit=$((seconds + 10)) into_guest in_guest uml2 "vsock pour ${cid[uml]} 1005 $seconds"
}

into_guest() { # COMMAND, which sends
  in_guest uml 'rm -f /tmp/drain; vsock drain 1005 --background >/tmp/drain; cat /tmp/drain' || return
  "$@" || return
  # shellcheck disable=SC2016 # for the guest's shell
  rate_of "$(in_guest uml 'for i in $(seq 50); do grep -q -e ok -e FAILED /tmp/drain && break; usleep 100000; done; cat /tmp/drain')"
}

sending_part() {
  local options=()
  [ "$(nproc)" = 1 ] || on_cpu=(taskset -c 1)
  groups=()
  check "sending device start" start_device uml || return 0
  check "sending boot" boot uml 0 || return 0
  check "sending listeners" listen_everywhere uml || return 0
  check "sending, round trips from host" both_ways_of_sending host || true
  check "sending, round trips from guest" both_ways_of_sending guest || true
  on_cpu=()
}

both_ways_of_sending() { # host|guest: sets p50 queued, direct, and the ratio: median (minimum–maximum)
  local pair way p50 before count=5 pairs=()
  [ -z "$quick" ] || count=1
  for pair in $(seq $count); do
    local -A of=()
    for way in $([ $((pair % 2)) = 1 ] && echo queued direct || echo direct queued); do
      sed -i '/^send = /d' "$state/ringroad.toml"
      echo "send = \"$way\"" >>"$state/ringroad.toml"
      before=$(grep -c reloaded "$state/device.log" || true)
      kill -HUP "$daemon"
      until [ "$(grep -c reloaded "$state/device.log")" -gt "$before" ]; do sleep 0.05; done
      connect "$1" uml 1001 ping 64 "$seconds" || return
      p50=$(sed 's/.* p50 \([0-9.]*\) .*/\1/' <<<"$figure")
      of[$way]=$p50
    done
    pairs+=("$(awk -v q="${of[queued]}" -v d="${of[direct]}" 'BEGIN { printf "%.3f %.1f %.1f", q / d, q, d }')")
  done
  figure="p50 queued $(middle 2) us, direct $(middle 3) us; queued/direct $(middle 1) ($(middle 1 1)–$(middle 1 $count))"
}

middle() { # COLUMN of the $pairs, [WHICH of them in order, or the median]
  printf '%s\n' "${pairs[@]}" | sort -n -k "$1,$1" | awk -v which="${2:-$((${#pairs[@]} / 2 + 1))}" -v column="$1" 'NR == which { print $column }'
}

end_part() { # cleans up after a part
  end_listeners
  end "$orders" "$daemon"
  orders='' daemon=''
  "$guests" stop --all
}

for name in "${parts[@]}"; do
  case $name in
    uml | qemu)
      part "$name"
      if [ "$device" = ringroad ]; then
        end_part
        services_part "$name"
      fi
      ;;
    *) "${name}_part" ;;
  esac
  end_part
done
verdict
