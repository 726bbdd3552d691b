#!/usr/bin/env bash
# Kills the daemon (SIGKILL) under load and restarts it at once, a thousand times (`make interop`; `make test` runs it with
# --quick). As root:
#
#   tests/crash.sh [--quick] [--kills N] [ours] [dpdk] [qemu] [uml] [vsock]    (which parts; default: all of them)
#
#   ours    our driver at both ends (`ringroad blast --reconnect`, the other one reflects): {split, packed} × in_order ×
#           mrg_rxbuf, with a window and at full rate; and frames that span several buffers. Both ends check every byte and the
#           sequence number of every frame: none may arrive twice. After each kill, frames must arrive again at both ends within
#           2 s; at the end, all buffers of both queues must have been returned (the device's GET_VRING_BASE is compared with
#           what the driver received). N kills in total (default 1000, --quick 40)
#   dpdk    DPDK's driver (testpmd, virtio-user, server=1: it listens, and the daemon reconnects) reflects what blast sends:
#           {split, packed} × in_order. N/5 kills in total (--quick 12)
#   qemu    a Linux guest under QEMU with reconnect-ms=200, packed and split: two TCP connections with the host, one each way,
#           survive N/5 kills each (--quick 8), with equal SHA-256 at the end; measures the time until a ping is answered again
#   uml     User-Mode Linux does not reconnect to a device that has disconnected, but must survive it
#   vsock   our driver as the guest's end of a vsock device (`ringroad vsock echo --reconnect`): connections are reset, then an
#           echo works again. N/20 kills for each layout (--quick 2)
#
# Each kill happens at a random moment, up to 20 ms after frames flow. $RINGROAD is the program (default
# target/release/ringroad). Prints "ok NAME figures" or "FAILED NAME" with the end of the logs, and finally "N passed, M failed"
# (the exit status).
set -euo pipefail

# shellcheck source=tests/common.sh
source "$(dirname "$0")/common.sh"
guests=$root/scripts/guests
peers=$root/scripts/peers

arguments=("$@") kills=1000 quick='' parts=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=1 kills=40 ;;
    --kills) [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--kills: expected a whole number above 0, got '${2:-}'"; kills=$2; shift ;;
    ours | dpdk | qemu | uml | vsock) parts+=("$1") ;;
    *) usage ;;
  esac
  shift
done
[ ${#parts[@]} -gt 0 ] || parts=(ours dpdk qemu uml vsock)
wants() { [[ " ${parts[*]} " == *" $1 "* ]]; }
share() { echo $((($kills + $1 - 1) / $1)); } # N: one Nth of all kills, rounded up

needs "network namespace, chroot, hugepages, TAP"
if [ -z "${RINGROAD_TEST_NETNS:-}" ]; then
  if wants qemu || wants uml; then "$guests" setup; fi
  if wants vsock; then "$peers" initramfs; fi
  if wants dpdk; then "$peers" dpdk; fi
  RINGROAD_TEST_NETNS=1 RINGROAD=$ringroad exec unshare --net -- "$0" "${arguments[@]}"
fi

make_state crash
export RINGROAD_GUESTS=$state/guests
vsock=$("$peers" where)/vsock
host=10.79.0.1 guest=10.79.0.2 mac=52:54:00:79:00:02
# Time limit for frames to arrive after a kill, in seconds, with a margin for a busy machine.
patience=2
daemon='' ours=() all_kills=0

# --- processes --------------------------------------------------------------------------------------------------------

now() { echo "${EPOCHREALTIME//[.,]/}"; } # microseconds

await() { # SECONDS, description, command…: waits until the command succeeds
  local deadline=$(($(now) + $1 * 1000000)) what="$2 after $1 s"
  shift 2
  until "$@"; do
    [ "$(now)" -lt $deadline ] || { echo "no $what"; return 1; }
    sleep 0.01
  done
}

cleanup() {
  [ ! -d "$RINGROAD_GUESTS" ] || "$guests" stop --all
  end "${ours[@]}" "$daemon"
  [ ! -e "$state/notes" ] || sort -u "$state/notes" | xargs -r rm -f --
}

# --- the daemon, with the configuration $state/ringroad.toml ------------------------------------------------------------

spawn_daemon() {
  "$ringroad" serve -c "$state/ringroad.toml" >>"$state/ringroad.log" 2>&1 &
  daemon=$!
}

start_daemon() {
  : >"$state/ringroad.log"
  spawn_daemon
  await 10 "line 'ready' of the daemon" ready || return 1
  # Notes outlive the daemon by design; remove them when this script ends.
  sed -n 's|.* \(/dev/shm/ringroad-.*\.rings\)$|\1|p' "/proc/$daemon/maps" >>"$state/notes"
}

ready() { gone "$daemon" || grep -q 'ready: ' "$state/ringroad.log"; }

kill_daemon() { # fails if it has already exited
  running "$daemon" || { echo "the daemon exited by itself"; return 1; }
  kill -KILL "$daemon"
  { wait "$daemon" || true; } 2>/dev/null # no message from bash that it was killed
  all_kills=$((all_kills + 1))
}

some_time() { sleep "0.0$(printf %02d $((RANDOM % 20)))"; }

stop_daemon() {
  local status=0
  running "$daemon" || { echo "the daemon exited by itself"; return 1; }
  kill -TERM "$daemon"
  await 5 "exit of the daemon" gone "$daemon" || return 1
  wait "$daemon" || status=$?
  daemon=''
  [ $status = 0 ] || { echo "the daemon exited with status $status"; return 1; }
  ! grep -nE 'panicked at|^\[ERROR|its position is unknown' "$state/ringroad.log" || return 1
}

# --- checks: each sets $figure, or fails and prints its output -------------------------------------------------------------

whereabouts() { # PID: what each of its threads does: its name, where it waits in the kernel, its system call
  local thread
  if [ -z "$1" ] || ! running "$1"; then return 0; fi
  echo "--- threads of process $1: $(tr '\0' ' ' <"/proc/$1/cmdline" | cut -c1-80)"
  for thread in "/proc/$1/task"/*; do
    echo "$(cat "$thread/comm") $(cat "$thread/wchan") $(cat "$thread/syscall")"
  done
  ls -l "/proc/$1/fd" | sed -n 's/.* \([0-9]* ->\)/\1/p'
}

report() {
  local log
  for log in "${ours[@]}" "$daemon"; do whereabouts "$log"; done
  for log in "$state"/*.log "$RINGROAD_GUESTS"/*/console.log; do
    [ -s "$log" ] || continue
    echo "--- the end of $(basename "$log")"
    tail -n 25 "$log"
    echo
  done
}

try() { # NAME, command…: a check; if it fails, ends what it has left running, for the next one
  ! check "$@" || return 0
  [ ! -d "$RINGROAD_GUESTS" ] || "$guests" stop --all || true
  end "${ours[@]}" "$daemon"
  ours=() daemon=''
  rm -f "$state"/*.log
  return 1
}

port() { # NAME, line of TOML…
  printf '[[port]]\nname = "%s"\nkind = "vhost-user"\nsocket = "%s"\n' "$1" "$state/$1.sock"
  shift
  printf '%s\n' "$@"
}

spread() { sort -n | awk '{ v[NR] = $1 } END { if (NR) printf "%.0f/%.0f/%.0f", v[1], v[int((NR + 1) / 2)], v[NR] }'; } # min/median/max

# --- our driver -------------------------------------------------------------------------------------------------------

declare -A said=() # by name: a descriptor to read its log from
blast() { # NAME, argument…: starts our driver in the background, with its log in a FIFO
  local name=$1 fifo=$state/$1.fifo fd
  shift
  rm -f "$fifo" "$state/$name.json" "$state/$name.log"
  mkfifo "$fifo"
  exec {fd}<>"$fifo"
  said[$name]=$fd
  "$ringroad" -v blast "$state/$name.sock" --reconnect --verify --seconds 100000 --json "$state/$name.json" "$@" \
    >"$state/$name.out" 2>"$fifo" &
  ours+=($!)
  blasts+=($!)
}

again() { # NAME: waits until it reports that frames arrive again
  local line='' left deadline=$(($(now) + patience * 1000000))
  while left=$((deadline - $(now))); [ $left -gt 0 ]; do
    IFS= read -r -t "$((left / 1000000)).$(printf %06d $((left % 1000000)))" line <&"${said[$1]}" || break
    echo "$line" >>"$state/$1.log"
    [[ $line != *"frames again"* ]] || return 0
  done
  echo "$1: no frames within $patience s after kill $kill"
  return 1
}

heard() { # NAME: reads the rest of its log
  local line
  while IFS= read -r -t 0.001 line <&"${said[$1]}"; do echo "$line" >>"$state/$1.log"; done
}

value() { sed -n "s/^ *\"$2\": \([0-9]*\),*\$/\1/p" "$state/$1.json"; } # NAME, KEY of its JSON

kill_and_see() { # N, NAME…: kills the daemon N times; all of these must receive frames again each time
  local kill name number=$1
  shift
  for ((kill = 1; kill <= number; kill++)); do
    some_time
    for name; do heard "$name"; done
    kill_daemon || return 1
    spawn_daemon
    # Sometimes kill it again at once, while frontends reconnect.
    if ((kill % 8 == 0)); then
      some_time
      kill_daemon || return 1
      spawn_daemon
    fi
    for name; do again "$name" || return 1; done
  done
}

finish_blast() { # NAME, PID, N: stops it; there must be no duplicates or losses, and at least N reconnects
  local name=$1 status=0 key
  running "$2" || { echo "$name exited by itself"; cat "$state/$name.out"; heard "$name"; return 1; }
  kill -TERM "$2"
  wait "$2" || status=$?
  heard "$name"
  for key in errors duplicates not_returned missing; do
    [ "$(value "$name" $key)" = 0 ] || { echo "$name: $key is '$(value "$name" $key)', expected 0"; cat "$state/$name.out"; return 1; }
  done
  [ $status = 0 ] || { echo "$name exited with status $status"; return 1; }
  [ "$(value "$name" reconnects)" -ge "$3" ] || { echo "$name: $(value "$name" reconnects) reconnections, expected $3"; return 1; }
}

recoveries() { sed -n 's/.*frames again, \([0-9.]*\) ms.*/\1/p' "$state/$1.log" | spread; } # NAME

ours_one() { # N, LAYOUT, WITHOUT, window|flood|merged
  local number=$1 layout=$2 load=$4 options=(--event-driven --ring "$2") blasts=() both=(a b)
  [ -z "$3" ] || options+=(--without "$3")
  { port a; port b; } >"$state/ringroad.toml"
  start_daemon || return 1
  case $load in
    window) blast b --mode reflect "${options[@]}"; blast a --size imix --window 128 "${options[@]}" ;;
    flood) blast b --mode reflect "${options[@]}"; blast a --size 64,1518 "${options[@]}" ;;
    merged) blast b --mode rx --buffer 600 "${options[@]}"; blast a --size 64,1518,4000 --rate 100k "${options[@]}"; both=(b) ;;
  esac
  sleep 0.5
  kill_and_see "$number" "${both[@]}" || return 1
  sleep 0.1
  # Stop the sender first.
  finish_blast a "${blasts[1]}" "$number" || return 1
  finish_blast b "${blasts[0]}" "$number" || return 1
  ours=()
  stop_daemon || return 1
  local key=duplicates counts
  counts="$(value b received) frames, $(value a $key) + $(value b $key) twice, $(value a missing) + $(value b missing) buffers lost"
  figure="$number kills, $counts, back after $(recoveries b) ms"
}

ours_part() {
  local layout without load number=0 combinations=20 each
  each=$(share $combinations)
  for layout in split packed; do
    for without in '' in_order mrg_rxbuf in_order,mrg_rxbuf; do
      for load in window flood; do
        try "ours $layout ${without:+without $without }$load" ours_one "$each" $layout "$without" $load || true
      done
    done
    for without in '' in_order; do
      try "ours $layout ${without:+without $without }merged" ours_one "$each" $layout "$without" merged || true
    done
  done
}

# --- guests -----------------------------------------------------------------------------------------------------------

in_guest() { "$guests" run "$1" --timeout 30 "$2"; } # GUEST, COMMAND

guest_and_host() { # GUEST, boot option…: starts the daemon with a port for it and one for the host, and boots it
  local name=$1
  shift
  { port "$name"; printf '[[port]]\nname = "host"\nkind = "tap"\ninterface = "rr0"\n'; } >"$state/ringroad.toml"
  if [ ! -e "$state/tap" ]; then
    # A persistent interface, which keeps its addresses when the daemon dies.
    ip link set lo up
    ip tuntap add rr0 mode tap vnet_hdr
    ip addr add $host/24 dev rr0
    ip link set rr0 up
    # It loses its carrier with the daemon, and with that its neighbours; resolving them again would take a second.
    ip neigh replace $guest lladdr $mac dev rr0 nud permanent
    : >"$state/tap"
  fi
  start_daemon || return 1
  "$guests" boot "$name" "$state/$name.sock" --ip $guest/24 --mac $mac "$@"
}

moved() { # PID, COUNTER: prints the number of bytes it has read or written
  sed -n "s/^$2: //p" "/proc/$1/io"
}

moves() { # PID, COUNTER, BYTES: it has moved more than BYTES, or has exited, which is checked elsewhere
  gone "$1" || [ "$(moved "$1" "$2")" -gt $(($3 + 65536)) ]
}

pinged() { # SECONDS: pings the guest every 20 ms until a ping sent from now on is answered
  local answer deadline=$(($(now) + $1 * 1000000))
  exec {answer}<>"$state/pings"
  while [ "$(now)" -lt $deadline ]; do
    (busybox ping -c 1 -W 2 $guest >/dev/null 2>&1 && echo "$kill" >"$state/pings") &
    while IFS= read -r -t 0.02 line <&"$answer"; do
      [ "$line" != "$kill" ] || { exec {answer}<&-; return 0; }
    done
  done
  exec {answer}<&-
  echo "no answer to pings within $1 s after kill $kill"
  return 1
}

came() { [ "$(grep -c 'frontend connected' "$state/ringroad.log")" -ge "$1" ]; } # N: at least N frontends have connected so far

still_there() { # PID…: both TCP connections still exist
  local pid
  for pid; do running "$pid" || { echo "a TCP connection was closed after kill $kill"; return 1; }; done
}

# The data that both ends send until the file STOP exists: numbered blocks. Works in busybox's shell, too.
generator() { # STOP, BLOCK
  echo "i=0; while [ ! -e $1 ]; do i=\$((i+1)); echo \$i; cat $2; done"
}

qemu_one() { # N, packed on|off
  local number=$1 kill=0 sender receiver begun bits times=() came=() sums sent got
  guest_and_host qemu --packed "$2" --reconnect 200 || return 1
  bits=$(in_guest qemu 'cat /sys/class/net/eth0/device/features') || return 1
  [ "${bits:34:1}" = "$([ "$2" = on ] && echo 1 || echo 0)" ] || { echo "features $bits, wanted packed $2"; return 1; }

  # Two connections: 5001 to the guest, 5002 from it. busybox nc exits at the end of its input: the receivers' input never ends.
  head -c 65536 /dev/urandom >"$state/block"
  rm -f "$state"/{stop,in,out,hold,pings} "$state"/*.sum
  mkfifo "$state"/{in,hold,pings}
  in_guest qemu "cd /tmp; rm -f stop; mkfifo hold out; head -c 65536 /dev/urandom >block; (nc -l -p 5001 0<>hold | sha256sum >in.sum; echo >in.done) >/dev/null 2>&1 & sleep 1" || return 1
  busybox nc -l -p 5002 0<>"$state/hold" > >(sha256sum >"$state/out.sum") &
  receiver=$!
  ours+=($receiver)
  busybox nc $guest 5001 <"$state/in" >/dev/null &
  sender=$!
  ours+=($sender)
  busybox sh -c "$(generator "$state/stop" "$state/block")" | tee "$state/in" | sha256sum >"$state/in.sum" &
  in_guest qemu "cd /tmp; (sha256sum <out >out.sum) >/dev/null 2>&1 & ($(generator stop block)) | tee out | nc $host 5002 >/dev/null 2>&1 & sleep 1" || return 1
  pinged 10 || return 1

  for ((kill = 1; kill <= number; kill++)); do
    some_time
    kill_daemon || return 1
    begun=$(now)
    spawn_daemon
    sent=$(moved $sender wchar) got=$(moved $receiver rchar)
    await 10 "frontend after kill $kill" came $((kill + 1)) || return 1
    came+=($((($(now) - begun) / 1000)))
    pinged 10 || return 1
    times+=($((($(now) - begun) / 1000)))
    # TCP retransmits when its timer expires, not when the device is back.
    await 20 "progress of the connection to the guest after kill $kill" moves $sender wchar "$sent" || return 1
    await 20 "progress of the connection from the guest after kill $kill" moves $receiver rchar "$got" || return 1
    still_there $sender $receiver || return 1
  done
  sent=$(moved $sender wchar) got=$(moved $receiver rchar)
  : >"$state/stop"
  in_guest qemu 'touch /tmp/stop' || return 1
  await 30 "close of the connection to the guest" gone $sender || return 1
  await 30 "close of the connection from the guest" gone $receiver || return 1
  await 5 "digest of the received data" test -s "$state/out.sum" || return 1
  in_guest qemu 'cd /tmp; for i in $(seq 50); do [ -e in.done ] && [ -s out.sum ] && break; sleep 0.1; done; cat in.sum out.sum' >"$state/guest.sum" || return 1
  sums=$(cat "$state/in.sum" "$state/out.sum")
  [ "$sums" = "$(cat "$state/guest.sum")" ] || { echo "host: $sums"; echo "guest: $(cat "$state/guest.sum")"; return 1; }
  "$guests" stop qemu || return 1
  ours=()
  stop_daemon || return 1
  local where
  where=$(grep -c 'resumes at its recorded position' "$state/ringroad.log" || true)
  figure="$number kills, TCP $((sent >> 20)) MiB to the guest, $((got >> 20)) MiB from it, equal SHA-256"
  figure+=", QEMU is back after $(printf '%s\n' "${came[@]}" | spread) ms, pings after $(printf '%s\n' "${times[@]}" | spread) ms, $where queues went on by their notes alone"
}

qemu_part() {
  try "qemu packed" qemu_one "$(share 5)" on || true
  try "qemu split" qemu_one "$(share 5)" off || true
}

# Linux 7.2: virtio_uml treats a closed socket as removal of the device, and never reconnects.
uml_one() {
  guest_and_host uml || return 1
  busybox ping -c 2 -W 2 $guest || return 1
  kill_daemon || return 1
  spawn_daemon
  sleep 1
  in_guest uml 'echo alive' || return 1
  if busybox ping -c 2 -W 2 $guest; then echo "it has reconnected: it can be tested like the other guests now"; return 1; fi
  "$guests" reboot uml || return 1
  busybox ping -c 2 -W 2 $guest || return 1
  "$guests" stop uml || return 1
  stop_daemon || return 1
  figure="survives the disconnect, and has its device again after a reboot"
}

uml_part() { try uml uml_one || true; }

# --- DPDK -------------------------------------------------------------------------------------------------------------

start_testpmd() { # VDEV: reflects frames with MAC addresses swapped
  rm -f "$state/testpmd.in" "$state/testpmd.log" "$state/a.sock" # as a server it leaves its socket behind
  mkfifo "$state/testpmd.in"
  setsid stdbuf -oL dpdk-testpmd --lcores "0@0,1@0" --main-lcore 0 --no-pci --in-memory --no-telemetry \
    --file-prefix="ringroad-$$" -m 512 --single-file-segments --log-level=pmd.net.virtio.init:debug --vdev "$1" -- \
    -i --nb-cores=1 --forward-mode=macswap --no-flush-rx --auto-start \
    0<>"$state/testpmd.in" >"$state/testpmd.log" 2>&1 &
  testpmd=$!
  ours+=($testpmd)
  disown $testpmd
  await 20 "report of testpmd that it forwards" testpmd_settled || return 1
  running "$testpmd" || { echo "testpmd has exited"; return 1; }
}

testpmd_settled() { gone "$testpmd" || grep -qs 'macswap packet forwarding - ports=1' "$state/testpmd.log"; }

sent_back() { # sets $forwarded to the number of frames that testpmd has sent
  : >"$state/testpmd.seen"
  local lines
  lines=$(wc -l <"$state/testpmd.log")
  echo 'show port stats 0' 1<>"$state/testpmd.in"
  await 5 "counters of testpmd" told "$lines" || return 1
  forwarded=$(tail -n +"$lines" "$state/testpmd.log" | sed -n 's/.*TX-packets: *\([0-9]*\).*/\1/p' | tail -n 1)
}

told() { tail -n +"$1" "$state/testpmd.log" | grep -q 'TX-packets:.*'; } # LINE

dpdk_one() { # N, packed 0|1, in_order 0|1
  local number=$1 blasts=() testpmd forwarded before kill done
  { port a 'role = "client"'; port b; } >"$state/ringroad.toml"
  start_daemon || return 1
  start_testpmd "net_virtio_user0,path=$state/a.sock,server=1,queues=1,packed_vq=$2,mrg_rxbuf=1,in_order=$3,vectorized=0" || return 1
  blast b --event-driven --window 64 --size 64,594,1518
  sleep 1
  sent_back || return 1
  before=$forwarded
  # After each kill, frames must return to blast through both queues of testpmd.
  for ((done = 0; done < number; done++)); do
    kill_and_see 1 b || { echo "kill $((done + 1))"; return 1; }
    if ((done % 4 == 3)); then
      sent_back || return 1
      [ "$forwarded" -gt "$before" ] || { echo "testpmd has sent $forwarded frames, as before kill $((done - 2))"; return 1; }
      before=$forwarded
    fi
  done
  sleep 0.2
  finish_blast b "${blasts[0]}" "$number" || return 1
  running "$testpmd" || { echo "testpmd has exited"; return 1; }
  end "$testpmd"
  ours=()
  stop_daemon || return 1
  figure="$number kills, $(value b received) frames back, $(value b duplicates) twice, back after $(recoveries b) ms"
}

dpdk_part() {
  local packed in_order each
  each=$(($(share 5) / 4 + 1))
  command -v dpdk-testpmd >/dev/null || die "no dpdk-testpmd: apt-get install dpdk-dev"
  [ "$(cat /proc/sys/vm/nr_hugepages)" -ge 1024 ] || echo 1024 >/proc/sys/vm/nr_hugepages
  for packed in 0 1; do
    for in_order in 0 1; do
      try "dpdk packed_vq=$packed in_order=$in_order" dpdk_one "$each" $packed $in_order || true
    done
  done
}

# --- vsock ------------------------------------------------------------------------------------------------------------

echoes() { "$vsock" connect "$state/guest.host" 7 echo 10000 >/dev/null 2>&1; }

over() { # PID: a connection that existed when the device was killed must be reset
  await 5 "reset of a connection that was open at kill $kill" gone "$1" || return 1
  ! wait "$1" || { echo "a connection survived kill $kill"; return 1; }
}

vsock_one() { # N, LAYOUT
  local number=$1 kill=0 driver load begun times=()
  printf '[[vsock]]\ncid = 3\nsocket = "%s"\nhost = "%s"\n' "$state/guest.sock" "$state/guest.host" >"$state/ringroad.toml"
  start_daemon || return 1
  "$ringroad" -v vsock echo "$state/guest.sock" 7 --ring "$2" --reconnect >"$state/echo.log" 2>&1 &
  driver=$!
  ours+=($driver)
  await 5 "echo" echoes || return 1
  for ((kill = 1; kill <= number; kill++)); do
    # Far more than can be transferred before the kill.
    "$vsock" connect "$state/guest.host" 7 echo 100000000000 >"$state/load" 2>&1 &
    load=$!
    ours+=($load)
    some_time
    kill_daemon || return 1
    begun=$(now)
    spawn_daemon
    over $load || return 1
    await "$patience" "echo after kill $kill" echoes || return 1
    times+=($((($(now) - begun) / 1000)))
    running $driver || { echo "the driver has exited"; return 1; }
  done
  [ "$(grep -c 'is back after' "$state/echo.log")" = "$number" ] || { echo "the number of reconnects differs from that of kills"; return 1; }
  end $driver
  ours=()
  stop_daemon || return 1
  figure="$number kills, an echo after $(printf '%s\n' "${times[@]}" | spread) ms"
}

vsock_part() {
  local layout
  for layout in split packed; do
    try "vsock $layout" vsock_one "$(share 20)" $layout || true
  done
}

for part in "${parts[@]}"; do
  "${part}_part"
done
echo "$all_kills kills"
verdict
