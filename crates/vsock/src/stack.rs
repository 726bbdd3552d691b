//! One end of a vsock device: its connections and listeners, and what becomes of each packet. `device.rs` and `driver.rs`
//! bring the rings, `socket.rs` the programs of this process, `host` notifications, threads and sockets of the host.

mod connections;
mod packets;
mod relays;
mod rings;

pub(crate) use rings::Poller;

use crate::{
    Account, Addr, Broken, Charge, Effect, Hub, Key, Kind, Link, Owner, Payload, Sender, Ways, Wrong,
    connection::{Conn, Over, Phase, Verdict, Wanted},
    hub::Crossing,
    send::MAX_PACKET,
    sync::AtomicUsize,
};
use parking_lot::{Condvar, Mutex, RwLock};
use ringroad_mem::Span;
use ringroad_wire::vsock_hdr::{self as wire, Op, VsockHdr};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The rings of an end of a device, and what its connections may lead to.
pub trait Side: Send + Sync + Sized + 'static {
    /// The ring that packets go to.
    type Link: Link + Send;
    /// The ring that they come from.
    type Inlet: Inlet + Send;
    /// A socket of the host.
    type Relay: Relay;
}

/// What an [`Inlet`] has taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct Taken {
    /// Packets, good or not.
    pub packets: usize,
    /// Bytes of their payload.
    pub bytes: usize,
    /// The peer wants to be notified of the buffers that it got back.
    pub notify: bool,
}

/// The ring that packets come from.
pub trait Inlet {
    /// Takes a burst of packets and calls `each` for every one, with the payload that there is; then gives their buffers back.
    fn take(&mut self, each: impl FnMut(VsockHdr, Payload<'_>)) -> Result<Taken, Broken>;

    /// Asks the peer to notify us of packets. `true`: there are some already.
    fn enable_notification(&mut self) -> bool;

    /// Asks the peer not to notify us: we look by ourselves.
    fn disable_notification(&mut self);
}

/// A socket of the host behind a connection.
pub trait Relay: Send + 'static {
    /// The peer has accepted it.
    fn opened(&mut self, key: Key);

    /// Passes on what it can take without waiting. An error: it will never take more, and [`Stack::deafen_relay`] or
    /// [`Stack::reset_relay`] will be called soon.
    fn deliver(&mut self, payload: &mut Payload<'_>) -> io::Result<()>;

    /// The peer sends no more.
    fn finish(&mut self);

    /// The connection is over; `reset`: not in an orderly way.
    fn close(&mut self, reset: bool);
}

/// There are none.
pub enum NoRelay {}

impl Relay for NoRelay {
    fn opened(&mut self, _: Key) {
        match *self {}
    }

    fn deliver(&mut self, _: &mut Payload<'_>) -> io::Result<()> {
        match *self {}
    }

    fn finish(&mut self) {
        match *self {}
    }

    fn close(&mut self, _: bool) {
        match *self {}
    }
}

/// One of the two rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// Packets to the peer.
    Out,
    /// Packets from it.
    In,
}

/// Where a peer's request leads that nobody in this process listens for.
pub enum Door<R> {
    /// There.
    Open(R),
    /// There, but it takes a while to know; see [`Stack::settle`].
    Later(R),
    /// Nowhere.
    Shut,
}

/// What a stack needs of its surroundings. Called without any lock of a ring, but perhaps with one of a connection.
pub trait Host<R>: Send + Sync {
    /// Notifies the peer of a queue.
    fn notify(&self, queue: Queue);

    /// There is something for [`Stack::work`] to do.
    fn wake(&self);

    /// The peer has broken a queue, which is not used any more.
    fn broken(&self, queue: Queue, why: Broken);

    /// A peer wants to connect to a port that nobody in this process listens at.
    fn open(&self, key: Key, kind: Kind) -> Door<R>;

    /// A connection with a relay can be sent to again.
    fn room(&self, key: Key);

    /// Whether a peer's request may be granted now, before anything is done for it; if not, it is answered with a reset and
    /// counted ([`Report::limited`]). For who limits how many there may be in a time. Called with locks held: it only decides.
    fn admit(&self) -> bool {
        true
    }

    /// Whether there is a [`Host::wait`] now.
    fn can_wait(&self) -> bool {
        false
    }

    /// Forgets notifications of packets that have come, and of [`Host::unwait`].
    fn clear(&self) {}

    /// Waits until the peer notifies us of packets, or [`Host::unwait`] was called since [`Host::clear`], or the time is over:
    /// in place of the worker, as who waits for a packet is there sooner than one who has to be woken.
    fn wait(&self, _until: Option<Instant>) {}

    /// Ends a [`Host::wait`].
    fn unwait(&self) {}
}

/// How a stack behaves.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whether senders use the ring themselves where they can.
    pub direct: bool,
    /// Bytes that a connection keeps for a program that does not read.
    pub buffer: u32,
    /// For how long a program that waits looks at the ring itself.
    pub poll: Duration,
    /// Connections there may be at once.
    pub connections: usize,
    /// Bytes that are kept for a guest, at most, whatever waits there and what is needed to keep track of it: so many for its
    /// connections with this end, and as many again for those with other guests that it has asked for. Each direction of a
    /// connection may have an equal share of half of that; the rest is reserved.
    pub memory: usize,
    /// Connections that wait to be accepted, for each listener.
    pub backlog: usize,
    /// How long a program waits for an answer to its request.
    pub connect: Duration,
    /// How long a closed connection waits for the peer to close too.
    pub linger: Duration,
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
        }
    }
}

/// Connections that wait to be accepted.
pub(crate) struct Backlog<R> {
    pub waiting: Mutex<VecDeque<Arc<Conn<R>>>>,
    pub changed: Condvar,
}

/// A connection in the table, and its place among the deadlines.
struct Slot<R> {
    conn: Arc<Conn<R>>,
    timer: Option<(Instant, u64)>,
}

struct Table<R> {
    conns: HashMap<Key, Slot<R>>,
    listeners: HashMap<(u32, Kind), Arc<Backlog<R>>>,
    next_port: u32,
    /// Connections of which something is expected until then: of those in the table, each once at most.
    deadlines: BTreeMap<(Instant, u64), Key>,
    serial: u64,
    /// Connections that have memory which they may let go of when they rest.
    holders: VecDeque<Weak<Conn<R>>>,
}

/// What packets in an outbox belong to.
pub(crate) enum Who<R> {
    Conn(Arc<Conn<R>>),
    Crossing(Crossing),
}

impl<R> Clone for Who<R> {
    fn clone(&self) -> Self {
        match self {
            Who::Conn(conn) => Who::Conn(conn.clone()),
            Who::Crossing(crossing) => Who::Crossing(crossing.clone()),
        }
    }
}

impl<R> Owner for Who<R> {
    fn key(&self) -> usize {
        match self {
            Who::Conn(conn) => conn.key(),
            Who::Crossing(crossing) => crossing.key(),
        }
    }

    fn stamp(&self, header: &mut VsockHdr) {
        match self {
            Who::Conn(conn) => conn.stamp(header),
            Who::Crossing(crossing) => crossing.stamp(header),
        }
    }

    fn queued(&self) -> &AtomicUsize {
        match self {
            Who::Conn(conn) => conn.queued(),
            Who::Crossing(crossing) => crossing.queued(),
        }
    }

    fn charge(&self, bytes: usize) -> Option<Charge> {
        match self {
            Who::Conn(conn) => conn.charge(bytes),
            Who::Crossing(crossing) => crossing.charge(bytes),
        }
    }

    fn group(&self) -> u64 {
        match self {
            Who::Conn(conn) => conn.cid,
            Who::Crossing(crossing) => crossing.group(),
        }
    }
}

/// The ring that packets come from, and how many programs look at it by themselves.
struct Incoming<I> {
    inlet: Option<I>,
    pollers: usize,
}

/// What has happened, in packets and connections.
#[derive(Default)]
struct Counters {
    received: AtomicU64,
    opened: AtomicU64,
    refused: AtomicU64,
    limited: AtomicU64,
    wrong: AtomicU64,
    faults: AtomicU64,
}

/// What has happened at a stack so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Connections there are.
    pub connections: usize,
    /// Connections there have been.
    pub opened: u64,
    /// Requests that were not granted.
    pub refused: u64,
    /// Of these, those that came too soon after others ([`Host::admit`]).
    pub limited: u64,
    /// Bytes that are kept for connections with this end; see [`Settings::memory`].
    pub memory: usize,
    /// Bytes that are kept for connections with other guests that the peer has asked for.
    pub crossing: usize,
    /// How often there was no memory for what should have been kept, of both.
    pub exhausted: u64,
    /// Packets received.
    pub received: u64,
    /// Packets sent, by their way.
    pub ways: Ways,
    /// Packets that broke the rules: their connections were reset.
    pub wrong: u64,
    /// Queues that the peer has broken.
    pub faults: u64,
}

/// A connection's state.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionReport {
    /// Which one.
    pub key: Key,
    /// What it carries.
    pub kind: Kind,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
    /// Bytes that may be sent now.
    pub credit: usize,
    /// Bytes that wait to be sent.
    pub queued: usize,
    /// Bytes received that nobody has read.
    pub unread: usize,
}

/// Bursts of packets that are taken from a peer at once.
const BURSTS: usize = 4;
/// Bytes that are taken from a peer at once, and the burst that is more.
const TAKEN: usize = 128 << 10;
/// Connections that are given up at once, and those that are looked at at once, whether they still need their memory.
const DUE: usize = 256;
const SWEPT: usize = 4096;
/// Messages of a program that wait to be sent, for each connection.
const MESSAGES: usize = 1024;
/// What is moved at once when this end goes away, in turns of the worker.
const LAST_TURNS: usize = 64;
/// Log lines about peers that do wrong, until the next second.
const LINES: u32 = 10;
/// The ports of programs that do not care begin here; below are those of well-known services.
const FIRST_PORT: u32 = 1 << 20;

/// One end of a vsock device.
pub struct Stack<S: Side> {
    /// In log lines.
    name: String,
    /// Our context identifier.
    cid: u64,
    /// The only one that packets may come from; `None`: any.
    peer: Option<u64>,
    settings: RwLock<Settings>,
    pub(crate) sender: Sender<S::Link, Who<S::Relay>>,
    incoming: Mutex<Incoming<S::Inlet>>,
    table: Mutex<Table<S::Relay>>,
    /// Of connections with this end, and of those with other guests.
    account: Arc<Account>,
    pub(crate) crossings: Arc<Account>,
    pub(crate) host: Arc<dyn Host<S::Relay>>,
    /// A program waits for packets itself: the worker leaves them alone.
    led: AtomicBool,
    hub: OnceLock<Arc<Hub<S>>>,
    /// Kinds of sockets that were negotiated, as bits of their numbers; 0: the device does not run.
    kinds: AtomicU32,
    counters: Counters,
    lines: AtomicU32,
}

impl<S: Side> Stack<S> {
    /// A stack whose rings do not run yet.
    pub fn new(name: &str, cid: u64, peer: Option<u64>, settings: Settings, host: Box<dyn Host<S::Relay>>) -> Stack<S> {
        Stack {
            name: name.to_owned(),
            cid,
            peer,
            settings: RwLock::new(settings),
            sender: Sender::new(settings.direct),
            incoming: Mutex::new(Incoming { inlet: None, pollers: 0 }),
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
            kinds: AtomicU32::new(0),
            counters: Counters::default(),
            lines: AtomicU32::new(LINES),
        }
    }

    /// How it behaves now.
    pub fn settings(&self) -> Settings {
        *self.settings.read()
    }

    /// Has it behave like this. Connections that there are keep their credit; they are not ended if there are more than there
    /// may be now.
    pub fn set(&self, settings: Settings) {
        *self.settings.write() = settings;
        self.sender.set_direct(settings.direct);
        self.account.set(settings.memory, settings.connections);
        self.crossings.set(settings.memory, settings.connections);
    }

    /// Our context identifier.
    pub fn cid(&self) -> u64 {
        self.cid
    }

    /// The peer's, if there is just one.
    pub fn peer(&self) -> Option<u64> {
        self.peer
    }

    /// Packets for other guests go there.
    pub(crate) fn join(&self, hub: Arc<Hub<S>>) {
        let _ = self.hub.set(hub);
    }

    /// Whether it was ever in a [`Hub`].
    pub fn has_joined(&self) -> bool {
        self.hub.get().is_some()
    }

    /// What has happened so far.
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

    /// The connections that there are.
    pub fn connections(&self) -> Vec<ConnectionReport> {
        let conns: Vec<_> = self.table.lock().conns.values().map(|slot| slot.conn.clone()).collect();
        let report = |conn: &Arc<Conn<S::Relay>>| {
            let inner = conn.lock();
            let (sent, received) = conn.traffic();
            ConnectionReport {
                key: conn.key,
                kind: conn.kind,
                sent,
                received,
                credit: conn.credit(&inner),
                queued: conn.waiting(),
                unread: inner.inbox.unread(),
            }
        };
        conns.iter().map(report).collect()
    }
}
