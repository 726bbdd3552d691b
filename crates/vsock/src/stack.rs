//! One end of a vsock device: its connections and listeners, and the handling of each packet. `device.rs` and `driver.rs` supply
//! the rings, `edge/` serves programs of this process, and `host` supplies notifications, threads and host sockets. The
//! methods are in `stack/`: `packets.rs` (receive), `connections.rs`, `relays.rs` (host sockets), `rings.rs` (polling,
//! notifications).

mod connections;
mod crossings;
mod packets;
mod relays;
mod rings;
#[cfg(test)]
mod tests;

use crate::{
    account::{Account, Charge},
    connection::Conn,
    crossing::Crossing,
    hub::Hub,
    outbox::Owner,
    send::{Sender, Ways},
    side::{Host, Side},
    sync::AtomicUsize,
    types::{Key, SocketType},
};
use parking_lot::{Mutex, RwLock};
use ringroad_wire::vsock_hdr::VsockHdr;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::Waker,
    time::{Duration, Instant},
};

/// Configuration of a stack.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whether senders write to the ring themselves when they can.
    pub direct: bool,
    /// Bytes a connection buffers for a program that does not read.
    pub buffer: u32,
    /// How long a waiting program polls the ring before it sleeps.
    pub poll: Duration,
    /// Maximum number of connections.
    pub connections: usize,
    /// Memory limit for one guest in bytes: buffered data and the bookkeeping for it. It applies once to its connections with
    /// this end, and once more to the connections with other guests that it requested. Half of it is shared equally between the
    /// directions of all connections; the other half is reserved.
    pub memory: usize,
    /// Maximum number of connections waiting to be accepted, per listener.
    pub backlog: usize,
    /// How long a program waits for the response to its request.
    pub connect: Duration,
    /// How long a closed connection waits for the peer to close as well.
    pub linger: Duration,
    /// How long the interrupt for packets that a guest has sent may wait for more of them, until there are 64 KiB or a quarter of
    /// the ring. The packets themselves are not delayed.
    pub interrupt_delay: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            direct: true,
            buffer: 256 << 10,
            poll: Duration::ZERO,
            connections: 16384,
            memory: 64 << 20,
            backlog: 1024,
            connect: Duration::from_secs(2),
            linger: Duration::from_secs(8),
            interrupt_delay: Duration::ZERO,
        }
    }
}

/// Connections waiting to be accepted.
pub(crate) struct Backlog<R> {
    pub waiting: Mutex<VecDeque<Arc<Conn<R>>>>,
    /// Wakes a program that accepts.
    pub waker: Waker,
}

/// A connection in the table, and its entry in `deadlines`.
struct Slot<R> {
    conn: Arc<Conn<R>>,
    timer: Option<(Instant, u64)>,
}

struct Table<R> {
    conns: HashMap<Key, Slot<R>>,
    listeners: HashMap<(u32, SocketType), Arc<Backlog<R>>>,
    next_port: u32,
    /// Deadlines of connections in the table, at most one per connection.
    deadlines: BTreeMap<(Instant, u64), Key>,
    serial: u64,
    /// Connections whose inbox holds memory that can be released when they are idle.
    holders: VecDeque<Weak<Conn<R>>>,
}

/// The owner of packets in an outbox.
pub(crate) enum PacketOwner<R> {
    Conn(Arc<Conn<R>>),
    Crossing(Crossing),
}

impl<R> Clone for PacketOwner<R> {
    fn clone(&self) -> Self {
        match self {
            PacketOwner::Conn(conn) => PacketOwner::Conn(conn.clone()),
            PacketOwner::Crossing(crossing) => PacketOwner::Crossing(crossing.clone()),
        }
    }
}

impl<R> Owner for PacketOwner<R> {
    fn key(&self) -> usize {
        match self {
            PacketOwner::Conn(conn) => conn.key(),
            PacketOwner::Crossing(crossing) => crossing.key(),
        }
    }

    fn stamp(&self, header: &mut VsockHdr) {
        match self {
            PacketOwner::Conn(conn) => conn.stamp(header),
            PacketOwner::Crossing(crossing) => crossing.stamp(header),
        }
    }

    fn queued(&self) -> &AtomicUsize {
        match self {
            PacketOwner::Conn(conn) => conn.queued(),
            PacketOwner::Crossing(crossing) => crossing.queued(),
        }
    }

    fn charge(&self, bytes: usize) -> Option<Charge> {
        match self {
            PacketOwner::Conn(conn) => conn.charge(bytes),
            PacketOwner::Crossing(crossing) => crossing.charge(bytes),
        }
    }

    fn group(&self) -> u64 {
        match self {
            PacketOwner::Conn(conn) => conn.cid,
            PacketOwner::Crossing(crossing) => crossing.group(),
        }
    }
}

/// The ring that carries packets from the peer, and the number of programs that poll it.
struct Incoming<I> {
    inlet: Option<I>,
    pollers: usize,
    held: Held,
}

/// Buffers returned to the peer that it was not notified of.
#[derive(Default)]
struct Held {
    packets: usize,
    bytes: usize,
    /// When it is to be notified of them.
    due: Option<Instant>,
}

/// Event counters.
#[derive(Default)]
struct Counters {
    received: AtomicU64,
    opened: AtomicU64,
    refused: AtomicU64,
    limited: AtomicU64,
    wrong: AtomicU64,
    faults: AtomicU64,
}

/// A snapshot of a stack's counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Current number of connections.
    pub connections: usize,
    /// Connections opened so far.
    pub opened: u64,
    /// Requests refused.
    pub refused: u64,
    /// Requests refused because they exceeded a rate limit ([`Host::admit`]).
    pub limited: u64,
    /// Bytes charged for connections with this end; see [`Settings::memory`].
    pub memory: usize,
    /// Bytes charged for connections with other guests that the peer requested.
    pub crossing: usize,
    /// How often a charge failed because either limit was reached.
    pub exhausted: u64,
    /// Packets received.
    pub received: u64,
    /// Packets sent directly, packets queued, and answers dropped.
    pub ways: Ways,
    /// Packets that violated the protocol; their connections were reset.
    pub wrong: u64,
    /// Queues stopped because the peer broke the ring.
    pub faults: u64,
}

/// A connection's state.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionReport {
    /// The connection.
    pub key: Key,
    /// Its socket type.
    pub kind: SocketType,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
    /// Bytes of credit left: what may be sent now.
    pub credit: usize,
    /// Bytes in the outbox.
    pub queued: usize,
    /// Bytes received and not read yet.
    pub unread: usize,
}

/// Bursts the worker takes from a peer in one turn.
const BURSTS: usize = 4;
/// Bytes after which the worker's turn ends; the burst that crosses the limit is completed.
const TAKEN: usize = 128 << 10;
/// Bytes of packets whose buffers may wait for their notification.
const HELD: usize = 64 << 10;
/// Expired connections closed per tick, and connections checked per sweep for unused memory.
const DUE: usize = 256;
const SWEPT: usize = 4096;
/// Messages of a connection that may wait in the outbox.
const MESSAGES: usize = 1024;
/// First ephemeral port; those below are for well-known services.
const FIRST_PORT: u32 = 1 << 20;

/// One end of a vsock device.
pub struct Stack<S: Side> {
    /// Our context identifier.
    cid: u64,
    /// The only CID that packets may come from; `None`: any.
    peer: Option<u64>,
    settings: RwLock<Settings>,
    pub(crate) sender: Sender<S::Link, PacketOwner<S::Relay>>,
    incoming: Mutex<Incoming<S::Inlet>>,
    table: Mutex<Table<S::Relay>>,
    /// Memory of connections with this end (`account`) and with other guests (`crossings`).
    account: Arc<Account>,
    pub(crate) crossings: Arc<Account>,
    pub(crate) host: Arc<dyn Host<S::Relay>>,
    /// A program waits for packets itself, so the worker leaves the ring alone.
    led: AtomicBool,
    hub: OnceLock<Arc<Hub<Stack<S>>>>,
    /// Negotiated socket types, as a bit mask of their numbers. 0: the device is not running.
    socket_types: AtomicU32,
    counters: Counters,
}

impl<S: Side> std::fmt::Debug for Stack<S> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Stack")
            .field("cid", &self.cid)
            .field("peer", &self.peer)
            .field("running", &self.is_running())
            .finish_non_exhaustive()
    }
}

impl<S: Side> Stack<S> {
    /// Creates a stack whose rings are not running yet.
    pub fn new(cid: u64, peer: Option<u64>, settings: Settings, host: Box<dyn Host<S::Relay>>) -> Stack<S> {
        Stack {
            cid,
            peer,
            settings: RwLock::new(settings),
            sender: Sender::new(settings.direct),
            incoming: Mutex::new(Incoming { inlet: None, pollers: 0, held: Held::default() }),
            table: Mutex::new(Table {
                conns: HashMap::new(),
                listeners: HashMap::new(),
                next_port: FIRST_PORT,
                deadlines: BTreeMap::new(),
                serial: 0,
                holders: VecDeque::new(),
            }),
            account: Account::new(settings.memory, settings.connections),
            crossings: Account::new(settings.memory, settings.connections),
            host: host.into(),
            led: AtomicBool::new(false),
            hub: OnceLock::new(),
            socket_types: AtomicU32::new(0),
            counters: Counters::default(),
        }
    }

    /// Returns the current configuration.
    pub fn settings(&self) -> Settings {
        *self.settings.read()
    }

    /// Changes the configuration. Existing connections keep their credit, and stay open even if they exceed the new maximum.
    pub fn set(&self, settings: Settings) {
        *self.settings.write() = settings;
        self.sender.set_direct(settings.direct);
        self.account.set(settings.memory, settings.connections);
        self.crossings.set(settings.memory, settings.connections);
    }

    /// Returns our context identifier.
    pub fn cid(&self) -> u64 {
        self.cid
    }

    /// Returns the peer's context identifier if there is only one peer.
    pub fn peer(&self) -> Option<u64> {
        self.peer
    }

    /// Returns a snapshot of the counters.
    pub fn report(&self) -> Report {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Report {
            connections: self.table.lock().conns.len(),
            opened: count(&self.counters.opened),
            refused: count(&self.counters.refused),
            limited: count(&self.counters.limited),
            memory: self.account.used(),
            crossing: self.crossings.used(),
            exhausted: self.account.refused() + self.crossings.refused(),
            received: count(&self.counters.received),
            ways: self.sender.ways(),
            wrong: count(&self.counters.wrong),
            faults: count(&self.counters.faults),
        }
    }

    /// Returns a report on each open connection.
    pub fn connections(&self) -> Vec<ConnectionReport> {
        let conns: Vec<_> = self.table.lock().conns.values().map(|slot| slot.conn.clone()).collect();
        let report = |conn: &Arc<Conn<S::Relay>>| {
            let inner = conn.lock();
            ConnectionReport {
                key: conn.key,
                kind: conn.kind,
                sent: inner.credit.sent(),
                received: inner.received,
                credit: inner.credit.available(),
                queued: conn.waiting(),
                unread: inner.inbox.unread(),
            }
        };
        conns.iter().map(report).collect()
    }
}
