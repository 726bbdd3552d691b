# What one can do here. `make test` is what CI runs.
.PHONY: demo test unit bench interop guests fuzz attacks soak lint

demo: ## a switch and two drivers, 5 seconds of traffic: no root, no guests
	cargo run --release --quiet --bin ringroad -- demo

test: ## everything that a change must pass, with short runs of the real peers
	scripts/test

unit: ## the tests in Rust alone
	cargo test --workspace

bench: ## PvP against DPDK, where it is installed
	cargo run --release --quiet --bin ringroad -- bench pvp

interop: ## the real peers at full length: DPDK 22.11 and 25.11, OVS-DPDK, Linux guests under QEMU and UML; aarch64
	scripts/peers all
	cargo build --release
	cargo build --release -p ringroad-host --example vsock_services
	tests/dpdk.sh
	tests/guests.sh
	tests/readme.sh
	tests/attach.sh
	tests/tunnels.sh
	tests/examples.sh
	tests/crash.sh
	tests/reload.sh
	tests/vsock-guests.sh
	tests/aarch64.sh

guests: ## two Linux guests on a running switch: ping, TCP, figures
	scripts/guests demo

fuzz: ## ten minutes of each fuzz target (FUZZ_SECONDS=600)
	scripts/fuzz

attacks: ## an independent client attacks the daemon over its sockets, victims beside it; root, for FUSE
	cargo build --release
	cargo test --release -p ringroad-attacks -- --test-threads=1

soak: ## an hour of 64 ports that connect, break and are killed (SOAK_SECONDS=3600)
	cargo build --release
	cargo run --release -p ringroad-attacks --bin soak -- --ports 64 --seconds $${SOAK_SECONDS:-3600}

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
