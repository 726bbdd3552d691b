//! virtio-vsock (virtio 1.3, 5.10): the device end and the driver end.
//!
//! # The protocol in brief
//!
//! **Addresses.** vsock carries socket connections between a guest and its host without a network. An address is a context
//! identifier (CID) and a port. CID 2 is the host; each guest has a CID of its own from 3 on, which it reads from the device's
//! configuration space (5.10.4). A connection is identified by the addresses of both ends ([`Addr`], [`Key`]).
//!
//! **Socket types.** A stream carries bytes; seqpacket carries messages, which may span several packets: the last packet of a
//! message has the flag SEQ_EOM, and also SEQ_EOR if the message ends a record. Feature bits select the types ([`socket_types`]).
//!
//! **Queues** (5.10.2). Vring 0, receive, carries packets to the guest; vring 1, transmit, packets from the guest; vring 2,
//! event, carries notices about the device as a whole. The only event is TRANSPORT_RESET (5.10.6.7): the device has lost all
//! connections, for example in a migration; the driver has to close them and read its CID again.
//!
//! **Packets** (5.10.6). Each packet is one buffer: a header of 44 bytes, then `len` bytes of payload. All fields are
//! little-endian; `ringroad_wire::vsock_hdr` parses them:
//!
//! ```text
//! src_cid, dst_cid: u64    src_port, dst_port: u32    len: u32    type: u16 (1 stream, 2 seqpacket)
//! op: u16    flags: u32 (of SHUTDOWN and RW)    buf_alloc, fwd_cnt: u32 (credit, see below)
//! ```
//!
//! **Operations and states.** The initiator sends REQUEST and is `Connecting`. The responder is `Accepting` until its socket is
//! ready, then answers RESPONSE, and the connection is `Open` at both ends; or it answers RST, which refuses the connection. RW
//! carries data. SHUTDOWN states in its flags that its sender will send no more, receive no more, or both, and cannot be revoked.
//! An end that gets SHUTDOWN for both directions answers RST once everything is read; this orderly RST frees the ports
//! (5.10.6.5). RST at any other time aborts the connection, and answers every packet that belongs to none; a RST itself is never
//! answered. CREDIT_UPDATE has no content besides the credit fields of its header, and CREDIT_REQUEST asks for one. Packets in the
//! wrong state are protocol violations ([`Wrong`]) and reset the connection.
//!
//! **Credit** (5.10.6.3). Each packet advertises its sender's receive buffer: `buf_alloc` is the buffer's size in bytes,
//! `fwd_cnt` the number of bytes consumed so far, modulo 2³². With `tx_cnt` bytes sent, an end may send `buf_alloc - (tx_cnt -
//! fwd_cnt)` more bytes, using the peer's latest fields. So a receiver never has to buffer more than it advertised, per
//! connection. Over all connections of a guest, [`Account`] bounds the memory by advertising a `buf_alloc` that shrinks as the
//! guest uses more, though never below what was advertised before. Only payload needs credit. Packets without payload must get
//! through even when data fills the queue, so some buffers are reserved for them (5.10.6.1).
//!
//! # The crate
//!
//! Both ends are a [`Stack`]: the connections of one end of a device, over the two rings of a [`Side`], with sockets for programs
//! of this process ([`Listener`], [`Stream`], [`SeqPacket`]). The device end also has connections to host sockets ([`Relay`]) and
//! between guests ([`Hub`]). The protocol does no I/O: it takes the time as an argument, returns what is to be done, and wakes by
//! a [`std::task::Waker`] or by its [`Host`]; all that waits, polls, reads a clock or logs is in `edge/` or in the host crate.
//!
//! In reading order; each file imports only those before it:
//!
//! - `types.rs`, `wrong.rs` (violations), `sync.rs` (locks, or loom's), `payload.rs` (the bytes being moved)
//! - `account.rs`: a guest's memory limits; `credit.rs`: what each end may send
//! - `outbox.rs`, `send.rs`: sending, directly or through the outbox
//! - `side.rs`: what surrounds a stack: rings, host sockets, notifications
//! - `inbox.rs`, `connection.rs`: one connection, from packets to verdicts
//! - `crossing.rs`, `hub.rs`: connections between guests, from packets to fates
//! - `stack.rs`, which does what those have decided, with `stack/packets.rs` (receiving), `stack/connections.rs` (opening,
//!   timeouts, closing), `stack/relays.rs` (host sockets), `stack/crossings.rs` (between guests), `stack/rings.rs` (polling and
//!   notifications)
//! - `edge/`: sockets for programs, which block
//! - `features.rs`: feature bits, configuration space; `device.rs`, `driver.rs`: the rings of either end
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::unimplemented
    )
)]

mod account;
mod outbox;
mod payload;
mod send;
mod sync;
mod types;

#[cfg(not(loom))]
mod connection;
#[cfg(not(loom))]
mod credit;
#[cfg(not(loom))]
mod crossing;
#[cfg(not(loom))]
mod device;
#[cfg(not(loom))]
mod driver;
#[cfg(not(loom))]
mod edge;
#[cfg(not(loom))]
mod features;
#[cfg(not(loom))]
mod hub;
#[cfg(not(loom))]
mod inbox;
#[cfg(not(loom))]
mod side;
#[cfg(not(loom))]
mod stack;
#[cfg(not(loom))]
mod wrong;

pub use account::{Account, Charge};
pub use outbox::Owner;
pub use payload::Payload;
pub use send::{Effect, Link, Sender, Ways};
pub use types::{Addr, Broken, Key, MAX_PACKET, SocketType};

#[cfg(not(loom))]
pub use {
    device::{DeviceSide, Events, RxQueue, TxQueue},
    driver::{Driver, DriverConfig, DriverError, DriverEvents, DriverRx, DriverSide, DriverTx},
    edge::{Listener, SeqPacket, Stream},
    features::{Config, Features, bits, socket_types},
    side::{Host, Inlet, NoRelay, OpenResult, Queue, Relay, Side, Taken},
    stack::{ConnectionReport, Report, Settings, Stack},
    wrong::{Violation, Wrong},
};

/// Guests that may connect to each other, each with a [`Stack`] of the host's end.
#[cfg(not(loom))]
pub type Hub<S> = hub::Hub<Stack<S>>;
