#!/usr/bin/env bash
# Builds the crates for aarch64 and runs their tests under qemu-user (`make interop`): the code for other CPUs than x86-64, and
# a weaker memory model as far as an emulator has one. As root:
#
#   tests/aarch64.sh [ARGUMENT…]    (for cargo test; default: -p of mem, ring, frame, net and vsock)
#
# Rust, the linker and qemu-user are those of Debian forky, in the chroot of scripts/peers. The last line is
# "N passed, M failed"; the exit status is 0 if all passed.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
if [ "${1:-}" != --inside ]; then
  [ "$(id -u)" = 0 ] || { echo "aarch64.sh: needs root (chroot, mount); run it with sudo" >&2; exit 1; }
  "$root/scripts/peers" aarch64
  (cd "$root" && cargo fetch --locked --quiet)
  # The mounts below end with their namespace.
  exec unshare --mount -- "$0" --inside "$@"
fi
shift
[ $# -gt 0 ] || set -- -p ringroad-mem -p ringroad-ring -p ringroad-frame -p ringroad-net -p ringroad-vsock

forky=$("$root/scripts/peers" where)/forky
mkdir -p "$forky/mnt/source" "$forky/mnt/cargo" "$forky/var/cache/ringroad"
mount --bind "$root" "$forky/mnt/source"
mount --bind "${CARGO_HOME:-$HOME/.cargo}" "$forky/mnt/cargo"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# What the emulator does not do: it answers MADV_REMOVE with success and frees nothing, and leaves RLIMIT_DATA alone. These
# tests are of just that; the kernel's own part is the same on all CPUs.
skip=()
for test in words::tests::clearing_frees_whole_pages_and_nothing_beside_the_words \
  zeros::tests::a_truncation_is_survived_without_private_memory \
  zeros::tests::a_truncation_is_survived_without_shared_memory \
  zeros::tests::what_replaces_a_mapping_is_never_seen_in_another; do
  skip+=(--skip "$test")
done

emulator="qemu-aarch64 -L /usr/aarch64-linux-gnu"
status=0
chroot "$forky" env -u RUSTUP_TOOLCHAIN PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root CARGO_HOME=/mnt/cargo \
  CARGO_TARGET_DIR=/var/cache/ringroad CARGO_PROFILE_TEST_DEBUG=0 RINGROAD_RUNNER="$emulator" \
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$emulator" \
  cargo test --offline --locked --no-fail-fast --manifest-path /mnt/source/Cargo.toml \
  --target aarch64-unknown-linux-gnu "$@" -- "${skip[@]}" 2>&1 | tee "$log" || status=1

sum() { grep -oE "[0-9]+ $1" "$log" | awk '{ sum += $1 } END { print sum + 0 }'; }
passed=$(sum passed)
echo "$passed passed, $(sum failed) failed"
[ $status = 0 ] && [ "$passed" -gt 100 ]
