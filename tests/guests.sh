#!/usr/bin/env bash
# Interoperability with real guests: Linux 6.1 under QEMU and Linux 7 under User-Mode Linux on a running ringroad
# (`make interop`; `make test` runs it with --quick). As root:
#
#   tests/guests.sh [--quick] [qemu-packed] [qemu-split] [e1000] [uml] [both]     (which parts; default: all of them)
#
# It starts the daemon ($RINGROAD, default target/release/ringroad) once, in a network namespace, with three vhost-user ports, an
# emulated card (e1000, driven by Linux 6.1's driver) and a tap port, and boots guests with scripts/guests. Checks for each guest: the virtqueue format, pings both ways, 64 MiB over TCP
# each way with equal SHA-256, and three reboots (by the guest itself, or by restarting its VMM) with pings after each; then both
# guests at once. Then what `ethtool` shows and sets, and whether the device does it; that checksums are right (tcpdump). --quick: 8 MiB
# and one reboot; about two minutes.
# Prints "ok NAME figure" or "FAILED NAME" with the end of the logs, and finally "N passed, M failed" (the exit status).
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
guests=$root/scripts/guests
forky=$("$root/scripts/peers" where)/forky
ringroad=$(realpath -m "${RINGROAD:-${CARGO_TARGET_DIR:-$root/target}/release/ringroad}")

say() { echo "guests.sh: $*" >&2; }
die() { say "$*"; exit 1; }

mib=64 reboots=(soft hard soft) reloads=20 parts=()
for word; do
  case $word in
    --quick) mib=8 reboots=(hard) reloads=2 ;;
    qemu-packed | qemu-split | e1000 | uml | both) parts+=("$word") ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(qemu-packed qemu-split e1000 uml both)
[ "$(id -u)" = 0 ] || die "needs root (network namespace, chroot, TAP); run it with sudo"
[ -x "$ringroad" ] || die "no program $ringroad: build it with 'cargo build --release', or set \$RINGROAD"
command -v ip >/dev/null || die "no ip command: apt-get install iproute2"
if [ -z "${RINGROAD_TEST_NETNS:-}" ]; then
  "$guests" setup
  [[ " ${parts[*]} " != *" e1000 "* ]] || "$guests" setup e1000
  RINGROAD_TEST_NETNS=1 RINGROAD=$ringroad exec unshare --net -- "$0" "$@"
fi

state=$(mktemp -d /tmp/ringroad-interop.XXXXXX)
export RINGROAD_GUESTS=$state/guests
# shellcheck disable=SC2034 # read as ${!name}
host=10.77.0.1 qemu=10.77.0.2 uml=10.77.0.3 e1000=10.77.0.4
daemon='' passed=0 failed=0 figure=''

# --- the daemon -------------------------------------------------------------------------------------------------------

running() { # PID: false for a zombie, too
  local stat
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  [[ ${stat##*) } != Z* ]]
}

start_daemon() {
  cat >"$state/ringroad.toml" <<TOML
[[port]]
name = "qemu"
kind = "vhost-user"
socket = "$state/qemu.sock"

# Without offloads: the switch finishes the frames that the others send to it.
[[port]]
name = "plain"
kind = "vhost-user"
socket = "$state/plain.sock"
features = { csum = false, guest_csum = false }

[[port]]
name = "uml"
kind = "vhost-user"
socket = "$state/uml.sock"
queues = 4
speed = "25Gb/s"

[[port]]
name = "e1000"
kind = "e1000"
socket = "$state/e1000.sock"

[[port]]
name = "host"
kind = "tap"
interface = "rr0"
TOML
  "$ringroad" serve -c "$state/ringroad.toml" >"$state/ringroad.log" 2>&1 &
  daemon=$!
  local tries=0
  until [ -S "$state/qemu.sock" ] && [ -S "$state/uml.sock" ] && ip link show rr0 >/dev/null 2>&1; do
    running "$daemon" || return 1
    [ $((tries += 1)) -le 100 ] || return 1
    sleep 0.1
  done
  ip link set lo up
  ip addr add $host/24 dev rr0
  ip link set rr0 up
  figure="5 ports"
}

stop_daemon() { # it must still be running, and exit with success
  local tries=0 status=0 begun=${EPOCHREALTIME//[.,]/}
  running "$daemon" || { echo "the daemon had already exited"; return 1; }
  kill -TERM "$daemon"
  while running "$daemon"; do
    [ $((tries += 1)) -le 100 ] || { echo "the daemon did not exit within 5 s"; return 1; }
    sleep 0.05
  done
  wait "$daemon" || status=$?
  daemon=''
  [ $status = 0 ] || { echo "the daemon exited with status $status"; return 1; }
  ! grep -n 'panicked at' "$state/ringroad.log" || return 1
  figure="$(((${EPOCHREALTIME//[.,]/} - begun) / 1000)) ms"
}

cleanup() {
  local tries=0 IFS=$' \t\n'
  trap '' INT TERM HUP
  set +e
  [ ! -d "$RINGROAD_GUESTS" ] || "$guests" stop --all
  if [ -n "$daemon" ]; then
    kill -TERM "$daemon" 2>/dev/null
    while running "$daemon"; do
      [ $((tries += 1)) != 60 ] || kill -KILL "$daemon"
      sleep 0.05
    done
  fi
  rm -rf "$state"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# --- checks: each sets $figure, or fails and prints its output ------------------------------------------------------------

check() { # NAME, command…
  local name=$1 guest begun=$SECONDS
  shift
  figure=''
  if "$@" >"$state/output" 2>&1; then
    passed=$((passed + 1))
    echo "ok $name${figure:+ $figure}"
    return 0
  fi
  failed=$((failed + 1))
  echo "FAILED $name (after $((SECONDS - begun)) s: $*)"
  {
    tail -n 30 "$state/output"
    echo "--- the end of the daemon's log"
    tail -n 20 "$state/ringroad.log"
    for guest in "$RINGROAD_GUESTS"/*/console.log; do
      [ -e "$guest" ] || continue
      guest=$(basename "$(dirname "$guest")")
      "$guests" logs "$guest" || true
      echo "--- the end of the kernel log of $guest"
      "$guests" run "$guest" --timeout 3 'dmesg | tail -n 12; ip -s link' 2>/dev/null || true
    done
  } 2>&1 | sed 's/^/    /'
  return 1
}

at() { # host|GUEST, COMMAND
  if [ "$1" = host ]; then
    timeout 60 busybox sh -c "$2"
  else
    "$guests" run "$1" --timeout 60 "$2"
  fi
}

boot() { # KIND, option…: on the port that $port names
  local kind=$1 begun=${EPOCHREALTIME//[.,]/} us
  shift
  "$guests" boot "$kind" "$state/${port:-$kind}.sock" --ip "${!kind}/24" "$@" || return
  us=$((${EPOCHREALTIME//[.,]/} - begun))
  figure="$((us / 1000000)).$((us / 100000 % 10)) s"
}

pings() { # FROM, TO: none of five may be lost
  local out
  out=$(at "$1" "ping -c 5 -i 0.2 -W 2 ${!2}" 2>&1) || { echo "$out"; return 1; }
  echo "$out"
  [[ $out == *", 0% packet loss"* ]] || return 1
  out=${out##*min/avg/max = }
  figure="$(cut -d / -f 2 <<<"$out") ms"
}

rings() { # GUEST, packed|split|any: checks the negotiated virtqueue format (VIRTIO_F_RING_PACKED, bit 34)
  local bits
  bits=$(at "$1" 'cat /sys/class/net/eth0/device/features') || return
  echo "features $bits, expected $2"
  [ ${#bits} -ge 64 ] || return 1
  if [ "${bits:34:1}" = 1 ]; then figure='packed'; else figure='split'; fi
  [ "$2" = any ] || [ "$2" = $figure ]
}

data() { # MIB: prints pseudo-random bytes, the same each time, no two mebibytes equal
  perl -e 'srand 1; my $b = pack "L*", map { int rand 4294967296 } 1 .. 262144;
    for my $i (0 .. $ARGV[0] - 1) { print $b ^ (pack("L", $i * 2654435761 & 0xffffffff) x 262144) }' "$1"
}

tcp() { # FROM, FILE, TO, FILE: copies over TCP; the SHA-256 of both files must be equal
  local listen dial begun us sent got size
  # dd writes 64 KiB at a time into the socket: nc itself writes 1 KiB at a time, and how TCP joins those writes depends on timing.
  # busybox nc exits when the peer shuts down, so the receiver's own input (a FIFO) must not end first.
  listen="kill \$(pidof nc) 2>/dev/null; rm -f $4 $4.hold; mkfifo $4.hold; nc -l -p 5001 0<>$4.hold >$4 2>/tmp/nc.err & for i in \$(seq 50); do netstat -ltn | grep -q :5001 && exit 0; sleep 0.1; done; exit 1"
  dial="nc ${!3} 5001 -e dd if=$2 bs=64k 2>/dev/null"
  if [ "$3" = host ]; then
    rm -f "$4" "$4.hold"
    mkfifo "$4.hold"
    timeout 60 busybox nc -l -p 5001 0<>"$4.hold" >"$4" &
    local receiver=$!
    for _ in $(seq 50); do busybox netstat -ltn | grep -q :5001 && break; sleep 0.1; done
  else
    at "$3" "$listen" || { echo "no listener in $3"; return 1; }
  fi
  begun=${EPOCHREALTIME//[.,]/}
  at "$1" "$dial" || { echo "sending from $1 failed: status $?"; [ "$3" != host ] || kill "$receiver"; return 1; }
  [ "$3" != host ] || wait "$receiver" || { echo "receiving on the host failed: status $?"; return 1; }
  us=$((${EPOCHREALTIME//[.,]/} - begun))
  size=$(at "$1" "stat -c %s $2") || return
  # What the sender has sent, the receiver may still have to write.
  at "$3" "for i in \$(seq 100); do [ \$(stat -c %s $4) = $size ] && break; sleep 0.05; done"
  sent=$(at "$1" "sha256sum <$2") || return
  got=$(at "$3" "sha256sum <$4") || return
  echo "sent $sent, received $got"
  [ "$sent" = "$got" ] || { at "$1" "ls -l $2"; at "$3" "ls -l $4"; return 1; }
  figure="$((size / 1048576)) MiB in $((us / 1000000)).$((us / 100000 % 10)) s, $((size * 8 / us)) Mb/s, SHA-256 ${got:0:12}…"
}

counts() { # rx|tx: bytes and packets of the interface so far (/proc/net/dev is that of this network namespace; /sys is not)
  awk -v way="$1" '$1 == "rr0:" { print way == "rx" ? $2 " " $3 : $10 " " $11 }' /proc/net/dev
}

offloads() { # GUEST: TCP goes in frames longer than the MTU both ways, whole to and from the interface of the host
  local sizes=() way from to file out bytes packets bytes_after packets_after
  for way in "host $state/data $1 /tmp/in tx" "$1 /tmp/in host $state/back rx"; do
    read -r from file to out way <<<"$way"
    read -r bytes packets <<<"$(counts "$way")"
    tcp "$from" "$file" "$to" "$out" || return
    read -r bytes_after packets_after <<<"$(counts "$way")"
    [ "$packets_after" -gt "$packets" ] || { echo "no packet has passed rr0 ($way)"; return 1; }
    sizes+=($(((bytes_after - bytes) / (packets_after - packets))))
  done
  rm -f "$state/back"
  figure="mean frame ${sizes[0]} bytes to it, ${sizes[1]} from it"
  echo "$figure, expected more than 1600"
  [ "${sizes[0]}" -gt 1600 ] && [ "${sizes[1]}" -gt 1600 ]
}

control() { # GUEST with a control queue: it gets frames to a group only while promiscuous, and frames to an address that it changes
  local bits mode before after rose=()
  bits=$(at "$1" 'cat /sys/class/net/eth0/device/features') || return
  [ "${bits:17:1}${bits:18:1}${bits:23:1}" = 111 ] || { echo "no control queue: features $bits"; return 1; }
  ip route replace 239.0.0.0/8 dev rr0
  for mode in off on off; do
    at "$1" "ip link set eth0 promisc $mode" || return
    before=$(at "$1" 'cat /sys/class/net/eth0/statistics/rx_packets') || return
    busybox ping -q -c 50 -i 0.01 -W 1 239.7.7.7 || true
    after=$(at "$1" 'cat /sys/class/net/eth0/statistics/rx_packets') || return
    rose+=($((after - before)))
  done
  echo "of 50 frames to a group it got ${rose[0]}, promiscuous ${rose[1]}, then ${rose[2]}"
  [ "${rose[0]}" -lt 20 ] && [ "${rose[1]}" -ge 50 ] && [ "${rose[2]}" -lt 20 ] || return
  at "$1" 'ip link set eth0 address 02:00:00:00:77:01' || return
  grep -q 'the guest has changed its address to 02:00:00:00:77:01' "$state/ringroad.log" || { echo "the device does not know"; return 1; }
  ip neigh flush dev rr0
  pings host "$1" || return
  figure="${rose[0]}, ${rose[1]} and ${rose[2]} of 50"
}

moderated() { # GUEST: its interrupts for received frames come as often as it asks for
  local bits
  bits=$(at "$1" 'cat /sys/class/net/eth0/device/features') || return
  [ "${bits:52:2}" = 11 ] || { echo "interrupts cannot be moderated: features $bits"; return 1; }
  at "$1" 'ethtool -C eth0 rx-usecs 10000 rx-frames 10000 && ethtool -c eth0' >"$state/ethtool" || return
  grep -qE '^rx-usecs:[[:space:]]*10000$' "$state/ethtool" && grep -qE '^rx-frames:[[:space:]]*10000$' "$state/ethtool" || return
  interrupts "$1" virtio 100 || return
  at "$1" 'ethtool -C eth0 rx-usecs 20000' || return
  interrupts "$1" virtio 50 || return
  figure="100 and 50 a second"
  at "$1" 'ethtool -C eth0 rx-usecs 0 rx-frames 0'
}

throttled() { # GUEST with an e1000: the same, as its driver has it (ethtool -C is not for this card)
  reload "$1" e1000 InterruptThrottleRate=100 || return
  interrupts "$1" eth0 100 || return
  reload "$1" e1000
}

interrupts() { # GUEST, NAME OF THE INTERRUPT, N: while it receives, there are N a second
  local before after ms rate sender
  at "$1" 'nc -u -l -p 9 >/dev/null 2>&1 &' || return
  # A frame every third of a millisecond.
  { exec 3<>"/dev/udp/${!1}/9" 4<> <(:); while :; do echo >&3; read -rt 0.0002 <&4; done; } 2>/dev/null &
  sender=$!
  # By the guest's clock, in ms: a command may take long to get there and back.
  count() { at "$1" "awk '/$2/ { sum += \$2 } FILENAME ~ /uptime/ { print sum, int(\$1 * 1000) }' /proc/interrupts /proc/uptime"; }
  sleep 0.3
  before=$(count "$@")
  sleep 4
  after=$(count "$@")
  kill $sender
  wait $sender || true
  ms=$((${after#* } - ${before#* }))
  rate=$(((${after% *} - ${before% *}) * 1000 / ms))
  figure="$rate a second, asked for $3"
  echo "$figure"
  [ $rate -ge $(($3 * 9 / 10)) ] && [ $rate -le $(($3 * 11 / 10)) ]
}

card() { # GUEST with an e1000: its driver uses offloads, and every checksum is right, by the kernel's own sums
  local out before mean
  at "$1" 'ethtool -k eth0; ethtool -i eth0; ethtool eth0' >"$state/ethtool" || return
  for out in 'tcp-segmentation-offload: on' 'tx-checksumming: on' 'rx-checksumming: ' 'driver: e1000' 'Speed: 1000Mb/s' 'Link detected: yes'; do
    grep -q "$out" "$state/ethtool" || { echo "expected '$out'"; cat "$state/ethtool"; return 1; }
  done
  # The guest sums what it receives itself, and is sent frames that the card cuts.
  at "$1" 'ethtool -K eth0 rx off' || return
  before=$(counts tx)
  tcp host "$state/data" "$1" /tmp/in || return
  out=$(counts tx)
  mean=$(((${out% *} - ${before% *}) / (${out#* } - ${before#* })))
  [ $mean -gt 1600 ] || { echo "mean frame to it $mean bytes, expected more than 1600"; return 1; }
  at "$1" 'ethtool -K eth0 rx on' || return
  before=$(counts rx)
  tcp "$1" /tmp/in host "$state/back" || return
  out=$(counts rx)
  rm -f "$state/back"
  figure="mean frame to it $mean bytes, from it $(((${out% *} - ${before% *}) / (${out#* } - ${before#* })))"
  [ $(((${out% *} - ${before% *}) / (${out#* } - ${before#* }))) -gt 1600 ] || { echo "$figure, expected more than 1600"; return 1; }
  out=$(at "$1" "awk '/^Tcp:/ { if (!n++) for (i = 1; i <= NF; i++) name[i] = \$i; else for (i = 1; i <= NF; i++) if (name[i] == \"InCsumErrors\") print \$i }' /proc/net/snmp")
  [ "$out" = 0 ] || { echo "$out segments with a wrong checksum"; return 1; }
}

reload() { # GUEST, DRIVER, argument…: the driver is unloaded and loaded again
  local tries=0 guest=$1 driver=$2
  shift 2
  at "$guest" "rmmod $driver && insmod /modules/*$driver.ko $* && ip link set eth0 up && ip addr add ${!guest}/24 dev eth0" || return
  # The link comes up after a few seconds.
  until busybox ping -q -c 1 -W 1 "${!guest}" >/dev/null; do
    [ $((tries += 1)) -le 15 ] || { echo "no answer after the driver was loaded again"; return 1; }
  done
}

reloads() { # GUEST, DRIVER, N
  local n
  for ((n = 1; n <= $3; n++)); do reload "$1" "$2" || { echo "reload $n"; return 1; }; done
  figure="loaded $3 times"
}

statistics() { # GUEST with a control queue: the device's own counters, as its driver reads them, are right
  local before after
  counted() { at "$1" "ethtool -S eth0 | awk '/ [rt]x_hw_packets:/ { print \$2 }' | xargs"; }
  read -ra before <<<"$(counted "$1")"
  busybox ping -q -c 50 -i 0.01 -W 2 "${!1}" || return
  read -ra after <<<"$(counted "$1")"
  figure="$((after[0] - before[0])) received and $((after[1] - before[1])) sent, of 50 pings"
  echo "$figure"
  # Neighbours may be looked for meanwhile.
  [ $((after[0] - before[0])) -ge 50 ] && [ $((after[0] - before[0])) -lt 70 ] &&
    [ $((after[1] - before[1])) -ge 50 ] && [ $((after[1] - before[1])) -lt 70 ]
}

per_queue() { # PORT: how many frames went to each of its queues, by the daemon's counters
  local lines tries=0
  lines=$(wc -l <"$state/ringroad.log")
  kill -USR1 "$daemon"
  # The last line of the table.
  until tail -n +$((lines + 1)) "$state/ringroad.log" | grep -q '^host '; do
    [ $((tries += 1)) -le 100 ] || return
    sleep 0.05
  done
  tail -n +$((lines + 1)) "$state/ringroad.log" | awk -F'|' -v port="$1:" 'index($1, port) == 1 {
    sub(/^ +/, "", $4); sub(/  .*/, "", $4); gsub(/[^0-9]/, "", $4); printf "%s ", $4 }'
}

queues() { # GUEST: it uses as many pairs of queues as it is told to, and flows go to all of them
  local port pairs used
  for pairs in 4 1 3; do
    at "$1" "ethtool -L eth0 combined $pairs && ethtool -l eth0" >"$state/ethtool" || return
    [ "$(awk '/^Combined:/ { print $2 }' "$state/ethtool" | xargs)" = "4 $pairs" ] || { cat "$state/ethtool"; return 1; }
    read -ra before <<<"$(per_queue "$1")"
    for port in {20000..20063}; do echo >"/dev/udp/${!1}/$port"; done
    sleep 0.3
    used=0
    read -ra after <<<"$(per_queue "$1")"
    for queue in "${!after[@]}"; do
      [ "${after[queue]}" -le "${before[queue]:-0}" ] || used=$((used + 1))
    done
    echo "of $pairs queues $used received frames: ${before[*]}; ${after[*]}"
    [ $used = "$pairs" ] || return
    pings host "$1" || return
  done
  # The guest's own choice, by the hash of a flow.
  at "$1" 'ethtool -L eth0 combined 4 && ethtool -X eth0 weight 0 1 0 1 && ethtool -x eth0' >"$state/ethtool" || return
  grep -qE '^ +0: +1' "$state/ethtool" && grep -qE '^ +64: +3' "$state/ethtool" || { cat "$state/ethtool"; return 1; }
  read -ra before <<<"$(per_queue "$1")"
  for port in {20000..20063}; do echo >"/dev/udp/${!1}/$port"; done
  sleep 0.3
  read -ra after <<<"$(per_queue "$1")"
  for queue in "${!after[@]}"; do used[queue]=$((after[queue] > before[queue])); done
  echo "with weights 0 1 0 1 frames went to: ${used[*]}"
  [ "${used[*]}" = "0 1 0 1" ] || return
  at "$1" 'ethtool eth0' >"$state/ethtool" || return
  grep -q 'Speed: 25000Mb/s' "$state/ethtool" || { cat "$state/ethtool"; return 1; }
  at "$1" 'ethtool -X eth0 default && ethtool -L eth0 combined 1' || return
  figure="4, 1 and 3 queues, and 2 by weights"
}

flows() { # GUEST: with 4 pairs of queues, four flows use all of them, and each stays on one; frames are sent on all
  local port queue rose fd sender before after
  local -A flow=()
  at "$1" 'ethtool -L eth0 combined 4' || return
  # A flow's hash says where it goes: flows until there is one for each queue.
  for port in {21000..21099}; do
    [ ${#flow[@]} -lt 4 ] || break
    exec {fd}<>"/dev/udp/${!1}/$port"
    read -ra before <<<"$(per_queue "$1")"
    for _ in {1..50}; do datagram "$fd"; done
    sleep 0.1
    read -ra after <<<"$(per_queue "$1")"
    [ ${#before[@]} = 4 ] && [ ${#after[@]} = 4 ] || { echo "no counters of 4 queues: ${before[*]}; ${after[*]}"; return 1; }
    for queue in 0 1 2 3; do
      [ $((after[queue] - before[queue])) -lt 40 ] || break
    done
    if [ -z "${flow[$queue]:-}" ]; then flow[$queue]=$fd; else exec {fd}>&-; fi
  done
  echo "of the flows to ports 21000 to $port, ${#flow[@]} go to queues of their own"
  [ ${#flow[@]} = 4 ] || return
  read -ra before <<<"$(per_queue "$1")"
  for _ in {1..500}; do
    for fd in "${flow[@]}"; do datagram "$fd"; done
  done
  sleep 0.3
  read -ra after <<<"$(per_queue "$1")"
  for fd in "${flow[@]}"; do exec {fd}>&-; done
  for queue in "${!after[@]}"; do rose+=" $((after[queue] - before[queue]))"; done
  echo "of 500 frames of each flow, the queues got$rose"
  for queue in $rose; do [ "$queue" -ge 450 ] && [ "$queue" -lt 550 ] || return; done
  # The way back: the guest chooses by the hash of a flow.
  read -ra before <<<"$(sent_per_queue "$1")"
  chroot "$forky" iperf3 -s -1 >/dev/null &
  sender=$!
  sleep 0.3
  at "$1" "iperf3 -u -P 32 -b 80K -t 1 -c $host" || { kill "$sender"; return 1; }
  wait "$sender" || return
  read -ra after <<<"$(sent_per_queue "$1")"
  echo "its queues sent ${before[*]} frames, then ${after[*]}"
  [ ${#before[@]} = 4 ] && [ ${#after[@]} = 4 ] || return
  for queue in 0 1 2 3; do [ "${after[queue]}" -gt "${before[queue]}" ] || return; done
  at "$1" 'ethtool -L eth0 combined 1' || return
  figure="each queue got$rose frames of four flows, 500 each"
}

datagram() { # DESCRIPTOR: nobody listens there, so now and then one fails because of the answer to an earlier one
  { echo >&"$1" || echo >&"$1" || true; } 2>/dev/null
}

sent_per_queue() { # GUEST: how many frames it has sent on each queue, as the device tells it
  at "$1" 'ethtool -S eth0' | awk '/^ *tx[0-9]+_hw_packets:/ { printf "%s ", $2 }'
}

received() { # GUEST: bytes and packets that its interface has received
  at "$1" 'cd /sys/class/net/eth0/statistics && echo $(cat rx_bytes rx_packets)'
}

mean() { # BYTES PACKETS before, the same after: sets $length, of a frame in bytes
  [ "$4" -gt "$2" ] || { echo "no packets"; return 1; }
  length=$((($3 - $1) / ($4 - $2)))
}

unsummed() { # GUEST: sends TCP to the host; sets $whole and $partial, how many of its segments have a checksum, and how many an unfinished one
  local dump
  chroot "$forky" tcpdump -Z root -i rr0 -n -vv "src ${!1} and tcp" >"$state/dump" 2>"$state/dump.log" &
  dump=$!
  until_line "$state/dump.log" 'listening on' || return
  tcp "$1" /tmp/small host "$state/back" || return
  sleep 0.5
  kill -INT $dump
  wait $dump || return
  whole=$(grep -c 'cksum .*(correct)' "$state/dump") || true
  partial=$(grep -c 'cksum .*(incorrect' "$state/dump") || true
  rm -f "$state/dump" "$state/back"
  echo "segments from $1 at rr0: $whole complete, $partial to be completed"
}

until_line() { # FILE, TEXT: within 5 s
  local tries=0
  until grep -q "$2" "$1"; do
    [ $((tries += 1)) -le 50 ] || { echo "no '$2' in $1"; return 1; }
    sleep 0.1
  done
}

toggles() { # GUEST, FEATURE…: `ethtool -k` has each on; without it the guest's frames are shorter, or complete, and with it as before
  local guest=$1 feature state_ line length whole partial figures=()
  shift
  at "$guest" "head -c 8388608 /tmp/in >/tmp/small" || return
  for feature; do
    for state_ in off on; do
      at "$guest" "ethtool -K eth0 $feature $state_ && ethtool -k eth0" >"$state/ethtool" || return
      case $feature in tso) line=tcp-segmentation-offload ;; tx) line=tx-checksumming ;; *) line=$feature ;; esac
      grep -qE "^[[:space:]]*$line: $state_" "$state/ethtool" || { echo "expected $line: $state_"; cat "$state/ethtool"; return 1; }
      case $feature in
        tso)
          line=$(counts rx)
          tcp "$guest" /tmp/small host "$state/back" || return
          # shellcheck disable=SC2046 # words
          mean $line $(counts rx) || return
          ;;
        rx-gro-hw)
          line=$(received "$guest")
          tcp host "$state/small" "$guest" /tmp/in || return
          # shellcheck disable=SC2046
          mean $line $(received "$guest") || return
          ;;
        tx) unsummed "$guest" || return ;;
      esac
      case $feature:$state_ in
        tx:off) [ "$whole" -gt 100 ] && [ "$partial" = 0 ] || return ;;
        tx:on) [ "$partial" -gt 100 ] || return ;;
        *:off) echo "frames of $length bytes without $feature"; [ "$length" -le 1514 ] || return ;;
        *:on) echo "frames of $length bytes with $feature"; [ "$length" -gt 1600 ] || return ;;
      esac
    done
    figures+=("$feature")
  done
  figure="off and on: ${figures[*]}"
}

sums() { # GUEST without offloads, GUEST with all: TCP both ways; every checksum that the former sees is right, by tcpdump
  local out
  out=$(at "$1" 'cat /sys/class/net/eth0/device/features') || return
  [ "${out:0:2}" = 00 ] || { echo "expected neither CSUM nor GUEST_CSUM: features $out"; return 1; }
  # What GRO makes of segments has no checksum any more.
  at "$1" 'ethtool -K eth0 gro off; tcpdump -Z root -i eth0 -n -vv -B 16384 tcp >/tmp/dump 2>/tmp/dump.log & sleep 2; grep "listening on" /tmp/dump.log' || return
  tcp "$2" /tmp/small "$1" /tmp/small || return
  tcp "$1" /tmp/small "$2" /tmp/back || return
  out=$(at "$1" "sleep 1; killall -INT tcpdump; sleep 1; ethtool -K eth0 gro on; grep 'cksum 0x' /tmp/dump >/tmp/sums; wc -l </tmp/sums; grep -c '(correct)' /tmp/sums; grep -c '^ *${!1}[.].*(correct)' /tmp/sums; grep -c 'bad cksum' /tmp/dump") || true
  # All of TCP, those that are right, of these the ones that it sent; and wrong ones of IPv4.
  read -ra out <<<"${out//$'\n'/ }"
  echo "sums: ${out[*]}"
  figure="$((out[1] - out[2])) segments received and ${out[2]} sent, $((out[0] - out[1] + out[3])) with a wrong checksum"
  [ $((out[1] - out[2])) -gt 1000 ] && [ "${out[2]}" -gt 1000 ] && [ "${out[0]}" = "${out[1]}" ] && [ "${out[3]}" = 0 ]
}

reboot() { # GUEST, soft|hard
  local begun=${EPOCHREALTIME//[.,]/} us soft=()
  [ "$2" = hard ] || soft=(--soft)
  "$guests" reboot "$1" "${soft[@]}" || return
  us=$((${EPOCHREALTIME//[.,]/} - begun))
  figure="$((us / 1000000)).$((us / 100000 % 10)) s"
}

# --- the parts ----------------------------------------------------------------------------------------------------------

guest() { # PART, KIND, virtqueue format, boot option…: runs all checks of one guest; leaves it running
  local part=$1 kind=$2 format=$3 number=0 how
  shift 3
  check "$part boot" boot "$kind" "$@" || return 0
  [ "$format" = none ] || check "$part virtqueues" rings "$kind" "$format" || true
  check "$part ping host->guest" pings host "$kind" || true
  check "$part ping guest->host" pings "$kind" host || true
  if check "$part tcp host->guest" tcp host "$state/data" "$kind" /tmp/in; then
    check "$part tcp guest->host" tcp "$kind" /tmp/in host "$state/back" || true
    rm -f "$state/back"
  fi
  for how in "${reboots[@]}"; do
    number=$((number + 1))
    check "$part reboot-$number ($how)" reboot "$kind" "$how" || return 0
    check "$part reboot-$number ping host->guest" pings host "$kind" || true
    check "$part reboot-$number ping guest->host" pings "$kind" host || true
  done
}

stop() { [ ! -d "$RINGROAD_GUESTS/$1" ] || "$guests" stop "$1"; }

data $mib >"$state/data"
head -c 8388608 "$state/data" >"$state/small"
if check "daemon start" start_daemon; then
  for part in "${parts[@]}"; do
    case $part in
      qemu-packed)
        guest "$part" qemu packed --packed on
        check "$part offloads" offloads qemu || true
        check "$part ethtool -K" toggles qemu tso tx || true
        stop qemu
        ;;
      qemu-split) port=plain guest "$part" qemu split --packed off; stop qemu ;;
      e1000)
        # VMMs and resets come and go: twenty times, without --quick.
        others=("${reboots[@]}")
        for ((n = ${#reboots[@]}; n > 1 && n < 20; n++)); do reboots+=(soft); done
        guest "$part" e1000 none
        reboots=("${others[@]}")
        check "e1000 offloads" card e1000 || true
        check "e1000 interrupts" throttled e1000 || true
        check "e1000 driver" reloads e1000 e1000 "$reloads" || true
        if check "e1000 and virtio" boot uml; then
          check "e1000 tcp to virtio" tcp e1000 /tmp/in uml /tmp/in || true
          check "e1000 tcp from virtio" tcp uml /tmp/in e1000 /tmp/back || true
          stop uml
        fi
        stop e1000
        ;;
      uml)
        guest "$part" uml any
        check "uml offloads" offloads uml || true
        check "uml control queue" control uml || true
        check "uml interrupts" moderated uml || true
        check "uml ethtool -K" toggles uml tso tx rx-gro-hw || true
        check "uml queues" queues uml || true
        check "uml flows" flows uml || true
        check "uml statistics" statistics uml || true
        stop uml
        ;;
      both)
        port=plain check "both boot qemu" boot qemu --packed on || continue
        check "both boot uml" boot uml || { stop qemu; continue; }
        for pair in "qemu uml" "uml qemu" "qemu host" "uml host" "host qemu" "host uml"; do
          read -r from to <<<"$pair"
          check "both ping $from->$to" pings "$from" "$to" || true
        done
        if check "both tcp host->qemu" tcp host "$state/small" qemu /tmp/in; then
          if check "both tcp qemu->uml" tcp qemu /tmp/in uml /tmp/in; then
            check "both tcp uml->qemu" tcp uml /tmp/in qemu /tmp/back || true
            check "both tcp uml->host" tcp uml /tmp/in host "$state/back" || true
            at uml 'cp /tmp/in /tmp/small' && check "both checksums" sums qemu uml || true
          fi
        fi
        stop qemu
        stop uml
        ;;
    esac
  done
  check "daemon end" stop_daemon || true
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
