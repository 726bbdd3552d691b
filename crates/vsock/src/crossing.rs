//! Connections between guests: their state, and the credit that each end is given. Used by `hub.rs`, which routes the packets.
//!
//! The credit that the two guests grant each other does not bound our memory: a receiver can advertise credit and take nothing.
//! So each connection is limited in what it may have in flight. The guest that requested it is charged for everything buffered
//! because of it, in both directions ([`Account`]). A sender is given the receiver's credit, but no more than may be buffered here,
//! so that whatever it sends can be carried. When our limit is the smaller of the two, the sender gets a credit update as soon as
//! buffered data has been delivered.

use crate::{
    account::{Account, Charge, Opened},
    credit::{PassedCredit, ROOM},
    outbox::Owner,
    sync::AtomicUsize,
    types::Addr,
};
use ringroad_wire::vsock_hdr::{self as wire, Op, VsockHdr};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicUsize as Count, Ordering},
};

/// A connection between two guests, or of a guest with itself.
struct Pair {
    /// The end that requested the connection, and the other one.
    initiator: Addr,
    responder: Addr,
    kind: u16,
    /// What each end sends: `forward` from the initiator, `backward` from the responder.
    forward: Direction,
    backward: Direction,
    /// The connection is closed; later packets belong to no connection.
    closed: AtomicBool,
    /// The initiator's sub-account for connections with this responder.
    account: Arc<Account>,
    _opened: Opened,
    _slot: RequestSlot,
}

/// State of one direction.
#[derive(Default)]
struct Direction {
    credit: PassedCredit,
    /// OP_SHUTDOWN flags passed on so far.
    shut: AtomicU32,
}

/// One direction of a connection between two guests.
#[derive(Clone)]
pub(crate) struct Crossing {
    pair: Arc<Pair>,
    /// From the responder to the initiator.
    is_backward: bool,
}

impl Crossing {
    /// Opens a connection that `from` requests from `to`. Returns `None` if the memory limit of `account` is reached.
    pub(crate) fn open(from: Addr, to: Addr, kind: u16, account: Arc<Account>, slot: RequestSlot) -> Option<Crossing> {
        let pair = Pair {
            initiator: from,
            responder: to,
            kind,
            forward: Direction::default(),
            backward: Direction::default(),
            closed: AtomicBool::new(false),
            _opened: account.open()?,
            account,
            _slot: slot,
        };
        Some(Crossing { pair: Arc::new(pair), is_backward: false })
    }

    pub(crate) fn from(&self) -> Addr {
        if self.is_backward { self.pair.responder } else { self.pair.initiator }
    }

    pub(crate) fn to(&self) -> Addr {
        if self.is_backward { self.pair.initiator } else { self.pair.responder }
    }

    fn direction(&self) -> &Direction {
        if self.is_backward { &self.pair.backward } else { &self.pair.forward }
    }

    /// Returns the credit of the sender.
    pub(crate) fn credit(&self) -> &PassedCredit {
        &self.direction().credit
    }

    /// Returns the credit of the receiver, for the opposite direction.
    pub(crate) fn opposite(&self) -> &PassedCredit {
        if self.is_backward { &self.pair.forward.credit } else { &self.pair.backward.credit }
    }

    /// Returns the opposite direction.
    pub(crate) fn reverse(&self) -> Crossing {
        Crossing { pair: self.pair.clone(), is_backward: !self.is_backward }
    }

    /// Returns whether both are directions of the same connection.
    pub(crate) fn is_same(&self, other: &Crossing) -> bool {
        Arc::ptr_eq(&self.pair, &other.pair)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.pair.closed.load(Ordering::Acquire)
    }

    /// Closes the connection. Returns `false` if it was closed already.
    pub(crate) fn close(&self) -> bool {
        !self.pair.closed.swap(true, Ordering::AcqRel)
    }

    /// Records OP_SHUTDOWN flags of the sender. Returns `false` if all of them were set already.
    pub(crate) fn shut(&self, flags: u32) -> bool {
        flags & !self.direction().shut.fetch_or(flags, Ordering::Relaxed) != 0
    }

    /// Returns how many bytes of the sender may be buffered in our memory.
    fn allowance(&self) -> u32 {
        u32::try_from(self.pair.account.allowance()).unwrap_or(ROOM).min(ROOM)
    }

    /// Returns whether the sender should get a credit update; see [`PassedCredit::is_due`].
    pub(crate) fn is_due(&self) -> bool {
        self.credit().is_due(self.allowance(), self.pair.kind != wire::TYPE_STREAM)
    }

    /// Returns a packet header from the sender to the receiver.
    pub(crate) fn header(&self, op: Op) -> VsockHdr {
        let (from, to) = (self.from(), self.to());
        VsockHdr {
            src_cid: from.cid,
            dst_cid: to.cid,
            src_port: from.port,
            dst_port: to.port,
            kind: self.pair.kind,
            op: op as u16,
            ..VsockHdr::default()
        }
    }
}

impl Owner for Crossing {
    fn key(&self) -> usize {
        // A `Pair` is aligned, so the lowest bit is free for the direction.
        Arc::as_ptr(&self.pair) as usize | usize::from(self.is_backward)
    }

    fn stamp(&self, header: &mut VsockHdr) {
        // Computed last, so that a packet that was queued carries the current credit of the opposite direction.
        self.opposite().stamp(header, self.allowance());
    }

    fn queued(&self) -> &AtomicUsize {
        &self.credit().queued
    }

    fn charge(&self, bytes: usize) -> Option<Charge> {
        self.pair.account.charge(bytes)
    }

    fn group(&self) -> u64 {
        self.from().cid
    }
}

/// One of the connections that a guest has requested; counted until dropped.
pub(crate) struct RequestSlot(Arc<Count>);

impl RequestSlot {
    /// Returns `None` if the guest has reached the limit.
    pub(crate) fn of(count: &Arc<Count>, limit: usize) -> Option<RequestSlot> {
        let next = |count| (count < limit).then_some(count + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        Some(RequestSlot(count.clone()))
    }
}

impl Drop for RequestSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
