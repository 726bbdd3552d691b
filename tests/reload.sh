#!/usr/bin/env bash
# Tests reloads (SIGHUP) with real guests: Linux 6.1 under QEMU and Linux 7 under User-Mode Linux on a running ringroad. As root:
#
#   tests/reload.sh [in-place] [card] [reconnects]     (which parts; default: all)
#
# It starts the daemon ($RINGROAD, default target/release/ringroad) in a network namespace, with two vhost-user ports, an e1000, a
# tap port and a vsock device, boots the guests with scripts/guests, and changes one key after the other.
#
# in-place: while each key changes, no ping from the host to either guest may be lost, a TCP stream from the host to each must
# continue (its lines are numbered, and none may be missing at the end), a vsock connection must survive, no frontend may
# disconnect, and the TAP interface must keep its index and address. The log must report "in place" for that key and no other.
# card: the same for a guest with an emulated card, and a key that disconnects it.
# reconnects: keys that must reconnect one guest, or recreate the interface, do so, and the others lose no pings meanwhile.
# Prints "ok NAME figure" or "FAILED NAME" with the end of the logs, and finally "N passed, M failed" (the exit status).
set -euo pipefail

# shellcheck source=tests/common.sh
source "$(dirname "$0")/common.sh"
guests=$root/scripts/guests

parts=()
for word; do
  case $word in
    in-place | card | reconnects) parts+=("$word") ;;
    *) usage ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(in-place card reconnects)
needs "network namespace, chroot, TAP"
command -v ip >/dev/null || die "no ip command: apt-get install iproute2"
if [ -z "${RINGROAD_TEST_NETNS:-}" ]; then
  "$guests" setup
  [[ " ${parts[*]} " != *" card "* ]] || "$guests" setup e1000
  RINGROAD_TEST_NETNS=1 RINGROAD=$ringroad exec unshare --net -- "$0" "$@"
fi

make_state reload
export RINGROAD_GUESTS=$state/guests
vsock=$("$root/scripts/peers" where)/vsock
# shellcheck disable=SC2034 # read as ${!name}
host=10.77.0.1 qemu=10.77.0.2 uml=10.77.0.3 e1000=10.77.0.4
daemon='' reloads=0 streams=() holder=''

# --- the daemon and its configuration -----------------------------------------------------------------------------------

# Additional lines: at the top, for each port, for the vsock device.
connected= head='' qemu_port='' uml_port='' card_port='' tap_port='' vsock_device=''

write_config() {
  cat >"$state/ringroad.toml" <<TOML
# For the forward that is added later: a confined daemon connects to no other TCP port.
[sandbox]
tcp = [80]
$head
[[port]]
name = "qemu"
kind = "vhost-user"
socket = "$state/qemu.sock"
$qemu_port
[[port]]
name = "uml"
kind = "vhost-user"
socket = "$state/uml.sock"
$uml_port
[[port]]
name = "card"
kind = "e1000"
socket = "$state/e1000.sock"
$card_port
[[port]]
name = "host"
kind = "tap"
interface = "rr0"
$tap_port
[[vsock]]
cid = 3
socket = "$state/qemu.vsock"
host = "$state/qemu.host"
$vsock_device
TOML
}

start_daemon() {
  write_config
  "$ringroad" serve -c "$state/ringroad.toml" >"$state/ringroad.log" 2>&1 &
  daemon=$!
  local tries=0
  until [ -S "$state/qemu.sock" ] && [ -S "$state/uml.sock" ] && [ -S "$state/e1000.sock" ] && [ -S "$state/qemu.vsock" ] && ip link show rr0 >/dev/null 2>&1; do
    running "$daemon" || return 1
    [ $((tries += 1)) -le 100 ] || return 1
    sleep 0.1
  done
  ip link set lo up
  give_address
  figure="4 ports and a vsock device"
}

give_address() {
  ip addr add $host/24 dev rr0
  ip link set rr0 up
}

reload() { # writes the configuration, reloads it and waits; the log lines of the reload are in $state/said
  local tries=0 before
  before=$(wc -l <"$state/ringroad.log")
  write_config
  kill -HUP "$daemon"
  reloads=$((reloads + 1))
  until [ "$(grep -c 'configuration reloaded' "$state/ringroad.log")" -ge $reloads ]; do
    running "$daemon" || { echo "the daemon has exited"; return 1; }
    [ $((tries += 1)) -le 100 ] || { echo "the configuration was not reloaded within 5 s"; return 1; }
    sleep 0.05
  done
  tail -n "+$((before + 1))" "$state/ringroad.log" >"$state/said"
}

stop_daemon() { # it must still be running, and exit within a second
  local tries=0 status=0 begun=${EPOCHREALTIME//[.,]/}
  running "$daemon" || { echo "the daemon had already exited"; return 1; }
  kill -TERM "$daemon"
  while running "$daemon"; do
    [ $((tries += 1)) -le 100 ] || { echo "the daemon did not exit within 1 s"; return 1; }
    sleep 0.01
  done
  wait "$daemon" || status=$?
  daemon=''
  [ $status = 0 ] || { echo "the daemon exited with status $status"; return 1; }
  ! grep -n 'panicked at' "$state/ringroad.log" || return 1
  figure="$(((${EPOCHREALTIME//[.,]/} - begun) / 1000)) ms"
}

cleanup() {
  kill "${streams[@]}" $holder 2>/dev/null
  [ ! -d "$RINGROAD_GUESTS" ] || "$guests" stop --all
  end "$daemon"
}

# --- checks: each sets $figure, or fails and prints its output ------------------------------------------------------------

report() { echo "--- the end of the daemon's log"; tail -n 20 "$state/ringroad.log"; }

in_guest() { "$guests" run "$1" --timeout 60 "$2"; }

boot() { # KIND, option…
  local kind=$1
  shift
  "$guests" boot "$kind" "$state/$kind.sock" --ip "${!kind}/24" "$@"
}

# Forty pings in two seconds from the host to a guest. All of them must be answered.
ping_start() { busybox ping -c 40 -i 0.05 -W 2 "${!1}" >"$state/ping-$1" 2>&1 & }

ping_ends() { # GUEST, PID
  wait "$2" || true
  grep -q ', 0% packet loss' "$state/ping-$1" || { tail -n 3 "$state/ping-$1"; return 1; }
}

pings() { # GUEST: the same as a check
  ping_start "$1"
  ping_ends "$1" $! || return
  figure=$(sed -n 's|.*min/avg/max = [^/]*/\([^/]*\)/.*|\1 ms|p' "$state/ping-$1")
}

stream_start() { # GUEST: sends numbered lines over TCP until killed
  in_guest "$1" 'rm -f /tmp/hold /tmp/lines; mkfifo /tmp/hold; nc -l -p 5002 0<>/tmp/hold >/tmp/lines 2>/dev/null & for i in $(seq 50); do netstat -ltn | grep -q :5002 && exit 0; sleep 0.1; done; exit 1' || return
  { n=0; while :; do echo $((n += 1)); sleep 0.02; done; } 2>/dev/null | busybox nc "${!1}" 5002 >/dev/null 2>&1 &
  streams+=($!)
}

stream_goes_on() { # GUEST: the stream makes progress and has no gaps
  local before after
  before=$(in_guest "$1" 'wc -l </tmp/lines')
  for _ in $(seq 30); do
    after=$(in_guest "$1" 'wc -l </tmp/lines')
    [ "$after" -le "$before" ] || break
    sleep 0.2
  done
  [ "$after" -gt "$before" ] || { echo "the TCP stream to $1 is stuck at line $before"; return 1; }
  in_guest "$1" "head -n $after /tmp/lines | awk '\$1 != NR { exit 1 }'" || { echo "the TCP stream to $1 has a gap"; return 1; }
  figure="$after lines"
}

vsock_start() { # opens a connection from the host to the guest, which echoes now and when it is closed
  in_guest qemu 'vsock listen 1000 echo --background' || return
  rm -f "$state/holding"
  mkfifo "$state/holding"
  # Its input stays open until the end of the test.
  "$vsock" connect "$state/qemu.host" 1000 hold 1 <"$state/holding" >"$state/held" 2>&1 &
  holder=$!
  exec 9>"$state/holding"
  sleep 1
  running $holder || { cat "$state/held"; return 1; }
}

vsock_ends() {
  local pid=$holder
  running "$pid" || { echo "the vsock connection was closed"; cat "$state/held"; return 1; }
  holder=''
  exec 9>&-
  wait "$pid" || { cat "$state/held"; return 1; }
  grep -q '^ok' "$state/held"
}

# The guest's interface has lost its link (0) or has it (1), and only that one's.
carrier() { # GUEST, 0 or 1
  local found
  for _ in $(seq 30); do
    found=$(in_guest "$1" 'cat /sys/class/net/[!l]*/carrier 2>/dev/null; ip link | grep -c NO-CARRIER') || true
    [ "$found" != "$2"$'\n'"$((1 - $2))" ] || return 0
    sleep 0.2
  done
  echo "carrier and number of interfaces without one, expected $2 and $((1 - $2)), found: $found"
  return 1
}

frontends() { grep -c "port $1: frontend connected" "$state/ringroad.log" || true; }

# --- in place ------------------------------------------------------------------------------------------------------------

index_of_tap() { ip -o link show rr0 | cut -d : -f 1; }

keeps() { # KEYS that must be reported "in place", separated by spaces; GUESTS that must not lose a ping
  local key guest pid index lines
  local -A pids=()
  index=$(index_of_tap)
  for guest in $2; do ping_start "$guest"; pids[$guest]=$!; done
  sleep 0.5
  reload || return
  for guest in $2; do ping_ends "$guest" "${pids[$guest]}" || { echo "pings to $guest were lost"; return 1; }; done
  for key in $1; do
    grep -q "reload: .*key \`$key\`: in place" "$state/said" || { echo "no log line about $key"; cat "$state/said"; return 1; }
  done
  lines=$(grep -c 'reload: ' "$state/said" || true)
  [ "$lines" = "$(wc -w <<<"$1")" ] || { echo "log lines about other keys:"; cat "$state/said"; return 1; }
  ! grep 'frontend disconnected' "$state/said" || return 1
  [ "$(index_of_tap)" = "$index" ] || { echo "the interface was recreated"; return 1; }
  # Not a pipe to grep -q: it ends at the first match, and under pipefail `ip` would fail then.
  [[ $(ip -o addr show dev rr0) = *"inet $host/24"* ]] || { echo "the interface has lost its address"; return 1; }
  for guest in $2; do stream_goes_on "$guest" || return; done
  [ "$(frontends qemu) $(frontends uml)" = "$connected" ] || { echo "a frontend has reconnected"; return 1; }
}

in_place() {
  local both="qemu uml" line section key
  check "tcp to qemu" stream_start qemu || return 0
  check "tcp to uml" stream_start uml || return 0
  check "vsock to qemu" vsock_start || return 0
  connected="$(frontends qemu) $(frontends uml)"
  # Keys of the program: each line is present for one reload and removed by the next.
  for line in 'log lines = 500' 'workers poll = "50us"' 'workers gather = "off"' 'workers turn = 1' 'workers cpus = [0]' \
    'switch ageing = "60s"' 'switch entries = 128'; do
    read -r section key _ <<<"$line"
    head="[$section]"$'\n'"${line#* }"
    check "$section.$key" keeps "$section.$key" "$both" || true
    head=''
    check "$section.$key back" keeps "$section.$key" "$both" || true
  done
  for line in 'poll = "50us"' 'poll = "0"' 'interrupt_delay = "0"' 'interrupt_delay = "5ms"' 'hairpin = true' 'gro = true' 'isolated = true' \
    'vlan = 1' $'trunk = [7]\nnative = 1' 'tuning = { prefetch = 0 }' 'tuning = { fast_path = false, small_copy = false }' \
    'limits = { rate = "2Gb/s" }'; do
    key=port.${line%% *}
    [ "$key" != port.limits ] || key=port.limits.rate
    qemu_port=$line
    check "qemu: $line" keeps "$key" "$both" || true
    qemu_port='' uml_port=$line
    check "uml: $line" keeps "$key $key" "$both" || true
    uml_port=''
    check "uml: $key back" keeps "$key" "$both" || true
  done
  for line in 'poll = "1ms"' 'hairpin = true' 'gro = true' 'mtu = 1400' 'mtu = 1500'; do
    key=port.${line%% *}
    tap_port=$line
    check "host: $line" keeps "$key" "$both" || true
    [ "$key" = port.mtu ] || { tap_port=''; check "host: $key back" keeps "$key" "$both" || true; }
  done
  tap_port=''
  check "host: port.mtu back" keeps port.mtu "$both" || true
  # A guest under User-Mode Linux learns that its link is down, and up again; pings then work at once.
  uml_port='link = false'
  check "uml: link = false" keeps port.link qemu || true
  check "uml: no carrier" carrier uml 0 || true
  uml_port=''
  check "uml: port.link back" keeps port.link qemu || true
  check "uml: carrier" carrier uml 1 || true
  check "uml: ping after link" pings uml || true
  # QEMU keeps the state of the link to itself, and its guest just receives nothing.
  qemu_port='link = false'
  check "qemu: link = false" keeps port.link uml || true
  qemu_port=''
  check "qemu: port.link back" keeps port.link uml || true
  check "qemu: ping after link" pings qemu || true
  # A port in mode "drop" does not answer; the other one is not affected, and the guest stays connected.
  for line in 'mode = "drop"' 'mode = "reflect"'; do
    uml_port=$line
    check "uml: $line" keeps port.mode qemu || true
    uml_port=''
    check "uml: port.mode back" keeps port.mode qemu || true
    check "uml: ping after $line" pings uml || true
  done
  for line in 'send = "queued"' 'buffer = 65536' 'connections = 100' 'poll = "50us"' 'groups = ["lab"]' 'forward = { 8080 = "127.0.0.1:80" }' \
    'memory = 33554432' 'connects = 50' 'socket_memory = 1048576' 'interrupt_delay = "0"'; do
    vsock_device=$line
    check "vsock: $line" keeps "vsock.${line%% *}" "$both" || true
    vsock_device=''
    check "vsock: ${line%% *} back" keeps "vsock.${line%% *}" "$both" || true
  done
  check "vsock connection through all of it" vsock_ends || true
  check "tcp stream to qemu through all of it" stream_goes_on qemu || true
  check "tcp stream to uml through all of it" stream_goes_on uml || true
}

# --- card ----------------------------------------------------------------------------------------------------------------

card() {
  local both="qemu e1000" line key
  check "boot e1000" boot e1000 || return 0
  [ ${#streams[@]} -gt 0 ] || check "tcp to qemu" stream_start qemu || return 0
  check "tcp to e1000" stream_start e1000 || return 0
  connected="$(frontends qemu) $(frontends uml)"
  for line in 'access_poll = "0"' 'access_poll = "5ms"' 'poll = "50us"' 'hairpin = true' 'gro = true' 'isolated = true' 'vlan = 1' \
    'mtu = 1400' 'limits = { rate = "2Gb/s" }'; do
    key=port.${line%% *}
    [ "$key" != port.limits ] || key=port.limits.rate
    card_port=$line
    check "e1000: $line" keeps "$key" "$both" || true
    card_port=''
    check "e1000: $key back" keeps "$key" "$both" || true
  done
  # Its driver is interrupted, and reads the new state from the PHY.
  card_port='link = false'
  check "e1000: link = false" keeps port.link qemu || true
  check "e1000: no carrier" carrier e1000 0 || true
  card_port=''
  check "e1000: port.link back" keeps port.link qemu || true
  check "e1000: carrier" carrier e1000 1 || true
  check "e1000: ping after link" pings e1000 || true
  check "tcp stream to e1000 through all of it" stream_goes_on e1000 || true
  # QEMU does not connect again: its card is gone, as if pulled. The next guest gets the new one.
  card_port='mitigation = "clamped"'
  check "e1000: mitigation" card_cut || true
  "$guests" stop e1000 || true
  check "e1000: boots again" boot e1000 || true
  check "e1000: ping" pings e1000 || true
  "$guests" stop e1000 || true
}

card_cut() { # the card's client is disconnected, the other guest loses no pings
  local pid
  ping_start qemu
  pid=$!
  sleep 0.5
  reload || return
  ping_ends qemu $pid || { echo "pings to qemu were lost"; return 1; }
  grep -q 'WARN .*reload: port card: key `port.mitigation`: reconnects the guest' "$state/said" || { cat "$state/said"; return 1; }
  grep -q 'port card: client disconnected' "$state/said" || { cat "$state/said"; return 1; }
}

# --- reconnects ------------------------------------------------------------------------------------------------------------

cuts() { # PORT, KEY, EFFECT, OTHER, COUNT: COUNT frontends disconnect, and the other guest loses no pings
  local pid
  ping_start "$4"
  pid=$!
  sleep 0.5
  reload || return
  ping_ends "$4" $pid || { echo "pings to $4 were lost"; return 1; }
  grep -q "WARN .*reload: port $1: key \`$2\`: $3" "$state/said" || { cat "$state/said"; return 1; }
  [ "$(grep -c 'frontend disconnected' "$state/said" || true)" = "$5" ] || { cat "$state/said"; return 1; }
}

again() { # GUEST: reboots it and pings it
  "$guests" reboot "$1" || return
  pings "$1"
}

is_new() { # the interface is a new one without an address; adds one
  [ "$(index_of_tap)" != "$1" ] || { echo "the interface is the same"; return 1; }
  [[ $(ip -o addr show dev rr0) != *"inet $host/24"* ]] || { echo "the interface has an address"; return 1; }
  give_address
}

reconnects() {
  local index
  uml_port='features = { in_order = false }'
  check "uml: features" cuts uml port.features "reconnects the guest" qemu 1 || true
  check "uml: boots again" again uml || true
  qemu_port='mtu = 1400'
  check "qemu: mtu" cuts qemu port.mtu "reconnects the guest" uml 1 || true
  check "qemu: boots again" again qemu || true
  # Pings between the guests: the host has no interface for a moment.
  index=$(index_of_tap)
  tap_port='queues = 2'
  check "host: queues" host_cut || true
  check "host: is new" is_new "$index" || true
  check "host: ping qemu" pings qemu || true
  check "host: ping uml" pings uml || true
}

host_cut() { # pings from guest to guest are not lost
  local pid
  in_guest qemu "ping -c 40 -i 0.05 -W 2 $uml" >"$state/ping-between" 2>&1 &
  pid=$!
  sleep 0.5
  reload || return
  wait $pid || true
  grep -q ', 0% packet loss' "$state/ping-between" || { tail -n 3 "$state/ping-between"; return 1; }
  grep -q 'WARN .*reload: port host: key `port.queues`: recreates the interface' "$state/said" || { cat "$state/said"; return 1; }
  ! grep 'frontend disconnected' "$state/said"
}

if check "daemon start" start_daemon && check "boot qemu" boot qemu --packed on --vsock "$state/qemu.vsock" && check "boot uml" boot uml; then
  check "ping qemu" pings qemu || true
  check "ping uml" pings uml || true
  for part in "${parts[@]}"; do
    case $part in
      in-place) in_place ;;
      card) card ;;
      reconnects) reconnects ;;
    esac
  done
  "$guests" stop --all || true
  check "daemon end" stop_daemon || true
fi
verdict
