//! One end of a vsock device: its connections and listeners, and what becomes of each packet. `device.rs` and `driver.rs`
//! bring the rings, `socket.rs` the programs of this process, `host` notifications, threads and sockets of the host.

use crate::{
    Addr, Broken, Effect, Hub, Key, Kind, Link, Owner, Payload, Sender, Ways, Wrong,
    connection::{Conn, Over, Phase, Verdict, Wanted},
    hub::Crossing,
    send::MAX_PACKET,
    sync::AtomicUsize,
};
use parking_lot::{Condvar, Mutex};
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

struct Table<R> {
    conns: HashMap<Key, Arc<Conn<R>>>,
    listeners: HashMap<(u32, Kind), Arc<Backlog<R>>>,
    next_port: u32,
    /// Connections of which something is expected until then.
    deadlines: BTreeMap<(Instant, u64), Weak<Conn<R>>>,
    serial: u64,
}

/// What packets in an outbox belong to.
pub(crate) enum Who<R> {
    Conn(Arc<Conn<R>>),
    Crossing(Arc<Crossing>),
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
    pub(crate) settings: Settings,
    pub(crate) sender: Sender<S::Link, Who<S::Relay>>,
    incoming: Mutex<Incoming<S::Inlet>>,
    table: Mutex<Table<S::Relay>>,
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
            settings,
            sender: Sender::new(settings.direct),
            incoming: Mutex::new(Incoming { inlet: None, pollers: 0 }),
            table: Mutex::new(Table {
                conns: HashMap::new(),
                listeners: HashMap::new(),
                next_port: FIRST_PORT,
                deadlines: BTreeMap::new(),
                serial: 0,
            }),
            host: host.into(),
            led: AtomicBool::new(false),
            hub: OnceLock::new(),
            kinds: AtomicU32::new(0),
            counters: Counters::default(),
            lines: AtomicU32::new(LINES),
        }
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

    // --- the rings ----------------------------------------------------------------------------------------------------

    /// Starts or stops the ring that packets go to. Connections go on when there is one again, unless [`Stack::reset`] ends
    /// them.
    pub fn set_link(&self, link: Option<S::Link>) -> Option<S::Link> {
        self.sender.replace(link)
    }

    /// Starts or stops the ring that packets come from.
    pub fn set_inlet(&self, inlet: Option<S::Inlet>) -> Option<S::Inlet> {
        let mut incoming = self.incoming.lock();
        std::mem::replace(&mut incoming.inlet, inlet)
    }

    /// Kinds of sockets that were negotiated; none: nothing can be connected.
    pub fn set_kinds(&self, kinds: &[Kind]) {
        self.kinds.store(kinds.iter().fold(0, |all, kind| all | 1 << kind.number()), Ordering::Release);
    }

    fn has(&self, kind: Kind) -> bool {
        self.kinds.load(Ordering::Acquire) & 1 << kind.number() != 0
    }

    /// Whether peers can be connected to.
    pub fn is_running(&self) -> bool {
        self.kinds.load(Ordering::Acquire) != 0
    }

    /// The peer is gone, or has lost its state: all connections are over.
    pub fn reset(&self) {
        let conns: Vec<_> = {
            let mut table = self.table.lock();
            table.deadlines.clear();
            table.conns.drain().map(|(_, conn)| conn).collect()
        };
        for conn in conns {
            let _ = conn.end(&mut conn.lock(), Over::Reset);
        }
        self.sender.clear();
        if let Some(hub) = self.hub.get() {
            hub.left(self.peer.unwrap_or_default());
        }
    }

    /// This end goes away: peers hear that all connections are over, and there are no new ones.
    pub fn close(&self) {
        self.set_kinds(&[]);
        let conns: Vec<_> = self.table.lock().conns.values().cloned().collect();
        conns.iter().for_each(|conn| self.abort(conn));
        self.flush();
    }

    /// Whether connections that are closed at this end wait for the peer to close them too.
    pub fn is_lingering(&self) -> bool {
        let conns: Vec<_> = self.table.lock().conns.values().cloned().collect();
        conns.iter().any(|conn| {
            let inner = conn.lock();
            inner.done && inner.deaf
        })
    }

    /// Does what there is to do: packets that came, packets that wait. For the worker, when it is woken. Says whether it
    /// found anything.
    pub fn work(&self) -> bool {
        let mut any = false;
        if !self.led.load(Ordering::SeqCst) {
            let mut incoming = self.incoming.lock();
            // Not all that a peer may send: others want to be served too.
            for _ in 0..BURSTS {
                if self.take(&mut incoming, None) == 0 {
                    break;
                }
                any = true;
            }
        }
        any | self.flush()
    }

    /// Turns notifications on. `true`: there is more to do already.
    pub fn rest(&self) -> bool {
        !self.led.load(Ordering::SeqCst) && self.enable()
    }

    pub(crate) fn enable(&self) -> bool {
        let mut incoming = self.incoming.lock();
        let Incoming { inlet: Some(inlet), pollers: 0 } = &mut *incoming else { return false };
        if !inlet.enable_notification() {
            return false;
        }
        inlet.disable_notification();
        true
    }

    /// Turns notifications off: the worker looks by itself.
    pub fn awake(&self) {
        let mut incoming = self.incoming.lock();
        // A program that waits by itself turns them on under the same lock.
        if !self.led.load(Ordering::SeqCst)
            && let Some(inlet) = &mut incoming.inlet
        {
            inlet.disable_notification();
        }
    }

    /// Moves what waits in the outbox.
    pub fn flush(&self) -> bool {
        if !self.sender.is_waiting() {
            return false;
        }
        let mut effect = self.sender.flush(|who| {
            if let Who::Conn(conn) = who {
                let inner = conn.lock();
                conn.wake(&inner);
                let relay = inner.relay.is_some();
                drop(inner);
                if relay {
                    self.host.room(conn.key);
                }
            }
        });
        let moved = effect.notify;
        effect.wake = false;
        self.effect(effect);
        moved
    }

    /// Whether packets wait for room.
    pub fn is_waiting(&self) -> bool {
        self.sender.is_waiting()
    }

    /// Looks at the ring, if nobody else does. Says how many packets there were.
    pub(crate) fn pump(&self, wanted: Option<&mut Wanted<'_>>) -> usize {
        self.incoming.try_lock().map_or(0, |mut incoming| self.take(&mut incoming, wanted))
    }

    /// A program will wait for packets itself, if no other one does.
    pub(crate) fn lead(&self) -> Option<Leader<'_, S>> {
        if !self.host.can_wait() {
            return None;
        }
        self.led.compare_exchange(false, true, Ordering::SeqCst, Ordering::Relaxed).ok()?;
        // Before anybody is told to end the wait.
        self.host.clear();
        Some(Leader(self))
    }

    /// A program will look at the ring by itself for a while: no notifications.
    pub(crate) fn poll(&self) -> Poller<'_, S> {
        let mut incoming = self.incoming.lock();
        incoming.pollers += 1;
        if incoming.pollers == 1
            && let Some(inlet) = &mut incoming.inlet
        {
            inlet.disable_notification();
        }
        Poller(self)
    }

    fn take(&self, incoming: &mut Incoming<S::Inlet>, mut wanted: Option<&mut Wanted<'_>>) -> usize {
        let Some(inlet) = &mut incoming.inlet else { return 0 };
        match inlet.take(|header, payload| self.receive(&header, payload, wanted.as_deref_mut())) {
            Ok(taken) => {
                if taken.notify {
                    self.host.notify(Queue::In);
                }
                self.counters.received.fetch_add(taken.packets as u64, Ordering::Relaxed);
                taken.packets
            }
            Err(broken) => {
                incoming.inlet = None;
                self.counters.faults.fetch_add(1, Ordering::Relaxed);
                self.host.broken(Queue::In, broken);
                0
            }
        }
    }

    pub(crate) fn effect(&self, effect: Effect) {
        let Effect { notify, wake, broken } = effect;
        if notify {
            self.host.notify(Queue::Out);
        }
        if let Some(broken) = broken {
            self.sender.replace(None);
            self.counters.faults.fetch_add(1, Ordering::Relaxed);
            self.host.broken(Queue::Out, broken);
        } else if wake {
            self.host.wake();
        }
    }

    // --- packets ------------------------------------------------------------------------------------------------------

    /// A packet from the peer. Nothing in it is known to be right.
    fn receive(&self, header: &VsockHdr, mut payload: Payload<'_>, wanted: Option<&mut Wanted<'_>>) {
        let there = payload.len();
        payload.truncate(header.len as usize);
        if self.peer.is_some_and(|peer| peer != header.src_cid) {
            return self.reject(header, format_args!("source context identifier {}", header.src_cid));
        }
        if header.dst_cid != self.cid {
            if let Some(hub) = self.hub.get()
                && there >= header.len as usize
                && hub.carry(header, &mut payload)
            {
                return;
            }
            return self.reject(header, format_args!("no way to context identifier {}", header.dst_cid));
        }
        let key = Key { port: header.dst_port, peer: Addr { cid: header.src_cid, port: header.src_port } };
        let conn = self.table.lock().conns.get(&key).cloned();
        let Some(kind) = Kind::new(header.kind).filter(|&kind| self.has(kind)) else {
            return self.fail(conn, header, Wrong::Type { kind: header.kind });
        };
        let Some(op) = Op::new(header.op) else {
            return self.fail(conn, header, Wrong::Operation { op: header.op });
        };
        let Some(conn) = conn else {
            return match op {
                Op::Request => self.request(key, kind, header),
                // The last word about a connection that is not there any more.
                Op::Reset => {}
                // So are those that were under way when it ended.
                _ => self.answer(header, Op::Reset),
            };
        };
        if kind != conn.kind {
            return self.fail(Some(conn), header, Wrong::Type { kind: header.kind });
        }
        if op == Op::Data && there < header.len as usize {
            return self.fail(Some(conn), header, Wrong::Short { len: header.len, there });
        }
        let verdict = conn.receive(&mut conn.lock(), op, header, &mut payload, wanted);
        self.carry_out(&conn, verdict);
    }

    /// Does what a connection has decided.
    pub(crate) fn carry_out(&self, conn: &Arc<Conn<S::Relay>>, verdict: Verdict) {
        if verdict == Verdict::default() {
            return;
        }
        if let Some(wrong) = verdict.wrong {
            self.count_wrong(&conn.key, wrong);
        }
        if verdict.over {
            self.remove(conn);
        }
        if let Some(op) = verdict.reply {
            self.send_control(conn, op);
        }
        if verdict.room && !verdict.over {
            self.host.room(conn.key);
        }
    }

    /// A packet that breaks the rules: its connection is over, if it has one.
    fn fail(&self, conn: Option<Arc<Conn<S::Relay>>>, header: &VsockHdr, wrong: Wrong) {
        let Some(conn) = conn else {
            return self.reject(header, format_args!("{wrong}"));
        };
        let _ = conn.end(&mut conn.lock(), Over::Reset);
        // A reset is never answered with one.
        let reply = (header.op != Op::Reset as u16).then_some(Op::Reset);
        let verdict = Verdict { reply, over: true, wrong: Some(wrong), room: false };
        self.carry_out(&conn, verdict);
    }

    pub(crate) fn count_wrong(&self, key: &Key, why: impl std::fmt::Display) {
        self.counters.wrong.fetch_add(1, Ordering::Relaxed);
        if self.may_log() {
            log::warn!("{}: {} to port {}: {why}; connection reset", self.name, key.peer, key.port);
        }
    }

    fn reject(&self, header: &VsockHdr, why: std::fmt::Arguments<'_>) {
        self.counters.wrong.fetch_add(1, Ordering::Relaxed);
        if self.may_log() {
            let VsockHdr { src_cid, src_port, dst_cid, dst_port, .. } = header;
            log::warn!(
                "{}: a packet from {src_cid}:{src_port} to {dst_cid}:{dst_port}: {why}; answered with a reset",
                self.name
            );
        }
        if header.op != Op::Reset as u16 {
            self.answer(header, Op::Reset);
        }
    }

    fn may_log(&self) -> bool {
        self.lines.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |lines| lines.checked_sub(1)).is_ok()
    }

    /// Answers a packet that belongs to no connection.
    fn answer(&self, header: &VsockHdr, op: Op) {
        let answer = VsockHdr {
            src_cid: header.dst_cid,
            dst_cid: header.src_cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            kind: header.kind,
            op: op as u16,
            ..VsockHdr::default()
        };
        self.effect(self.sender.send_control(None, answer));
    }

    pub(crate) fn send_control(&self, conn: &Arc<Conn<S::Relay>>, op: Op) {
        let who = Who::Conn(conn.clone());
        self.effect(self.sender.send_control(Some(&who), conn.header(op)));
    }

    // --- connections --------------------------------------------------------------------------------------------------

    fn remove(&self, conn: &Arc<Conn<S::Relay>>) {
        {
            let mut table = self.table.lock();
            if table.conns.get(&conn.key).is_some_and(|there| Arc::ptr_eq(there, conn)) {
                table.conns.remove(&conn.key);
            }
        }
        self.sender.forget(&Who::Conn(conn.clone()));
    }

    fn request(&self, key: Key, kind: Kind, header: &VsockHdr) {
        let listener = {
            let table = self.table.lock();
            if table.conns.len() >= self.settings.connections {
                drop(table);
                return self.refuse(header);
            }
            table.listeners.get(&(key.port, kind)).cloned()
        };
        let phase = if listener.is_some() { Phase::Open } else { Phase::Accepting };
        let conn = Arc::new(Conn::new(self.cid, key, kind, self.settings.buffer, phase));
        // What the request says of the peer's room.
        conn.announce(&mut conn.lock(), header);
        if let Some(listener) = listener {
            let mut waiting = listener.waiting.lock();
            if waiting.len() >= self.settings.backlog {
                drop(waiting);
                return self.refuse(header);
            }
            self.table.lock().conns.insert(key, conn.clone());
            self.opened(&conn);
            waiting.push_back(conn);
            listener.changed.notify_one();
            return;
        }
        self.table.lock().conns.insert(key, conn.clone());
        match self.host.open(key, kind) {
            Door::Open(relay) => {
                {
                    let mut inner = conn.lock();
                    inner.relay = Some(relay);
                    inner.phase = Phase::Open;
                }
                self.opened(&conn);
                self.host.room(key);
            }
            Door::Later(relay) => {
                conn.lock().relay = Some(relay);
                self.expect(&conn, self.settings.connect);
            }
            Door::Shut => {
                self.remove(&conn);
                self.refuse(header);
            }
        }
    }

    fn opened(&self, conn: &Arc<Conn<S::Relay>>) {
        self.counters.opened.fetch_add(1, Ordering::Relaxed);
        self.send_control(conn, Op::Response);
    }

    fn refuse(&self, header: &VsockHdr) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        self.answer(header, Op::Reset);
    }

    /// A connection that was opened [`Door::Later`] is there now, or will never be.
    pub fn settle(&self, key: Key, there: bool) {
        let Some(conn) = self.find(key) else { return };
        let mut inner = conn.lock();
        if inner.phase != Phase::Accepting {
            return;
        }
        if there {
            (inner.phase, inner.deadline) = (Phase::Open, None);
            drop(inner);
            self.opened(&conn);
            return self.host.room(key);
        }
        let verdict = conn.end(&mut inner, Over::Refused);
        drop(inner);
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        self.carry_out(&conn, Verdict { reply: Some(Op::Reset), ..verdict });
    }

    pub(crate) fn find(&self, key: Key) -> Option<Arc<Conn<S::Relay>>> {
        self.table.lock().conns.get(&key).cloned()
    }

    /// Something has to happen to a connection until then.
    fn expect(&self, conn: &Arc<Conn<S::Relay>>, time: Duration) {
        let until = Instant::now() + time;
        conn.lock().deadline = Some(until);
        let mut table = self.table.lock();
        table.serial += 1;
        let serial = table.serial;
        if table.deadlines.len() > 2 * table.conns.len() + 1024 {
            // Of connections that were over before their time.
            table.deadlines.retain(|_, conn| conn.strong_count() > 0);
        }
        table.deadlines.insert((until, serial), Arc::downgrade(conn));
    }

    /// When [`Stack::tick`] should be called next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.table.lock().deadlines.keys().next().map(|&(time, _)| time)
    }

    /// Gives up what has taken too long.
    pub fn tick(&self, now: Instant) {
        let due: Vec<_> = {
            let mut table = self.table.lock();
            let later = table.deadlines.split_off(&(now, u64::MAX));
            std::mem::replace(&mut table.deadlines, later).into_values().collect()
        };
        for conn in due.iter().filter_map(Weak::upgrade) {
            let mut inner = conn.lock();
            if inner.deadline.is_none_or(|deadline| deadline > now) {
                continue;
            }
            let how = if inner.phase == Phase::Open { Over::Done } else { Over::TimedOut };
            let verdict = conn.end(&mut inner, how);
            drop(inner);
            self.carry_out(&conn, Verdict { reply: Some(Op::Reset), ..verdict });
        }
    }

    /// Once a second or so, if anything has happened: lets memory go that connections do not need now, and allows new log
    /// lines.
    pub fn sweep(&self) {
        self.lines.store(LINES, Ordering::Relaxed);
        let conns: Vec<_> = self.table.lock().conns.values().cloned().collect();
        for conn in conns {
            let mut inner = conn.lock();
            if std::mem::replace(&mut inner.resting, true) {
                inner.inbox.rest();
            }
        }
    }

    /// Asks a peer for a connection; its phase tells what came of it. `relay`: the socket of the host that it is for.
    pub(crate) fn request_connection(
        &self,
        peer: Addr,
        kind: Kind,
        relay: Option<S::Relay>,
    ) -> io::Result<Arc<Conn<S::Relay>>> {
        if !self.is_running() {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the other end of the vsock device is not there"));
        }
        if !self.has(kind) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the peer does not have this kind of socket"));
        }
        let conn = {
            let mut table = self.table.lock();
            if table.conns.len() >= self.settings.connections {
                let why = format!("there are {} connections already", self.settings.connections);
                return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
            }
            // As there are fewer connections than ports, one is free.
            let port = loop {
                let port = table.next_port;
                table.next_port = if port >= u32::MAX - 1 { FIRST_PORT } else { port + 1 };
                let key = Key { port, peer };
                if !table.conns.contains_key(&key) && !table.listeners.keys().any(|&(taken, _)| taken == port) {
                    break port;
                }
            };
            let key = Key { port, peer };
            let conn = Arc::new(Conn::new(self.cid, key, kind, self.settings.buffer, Phase::Connecting));
            conn.lock().relay = relay;
            table.conns.insert(key, conn.clone());
            conn
        };
        self.counters.opened.fetch_add(1, Ordering::Relaxed);
        self.expect(&conn, self.settings.connect);
        self.send_control(&conn, Op::Request);
        // The worker has a new deadline.
        self.host.wake();
        Ok(conn)
    }

    pub(crate) fn add_listener(&self, port: u32, kind: Kind) -> io::Result<Arc<Backlog<S::Relay>>> {
        let mut table = self.table.lock();
        if table.listeners.contains_key(&(port, kind)) {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("port {port} has a listener already")));
        }
        let backlog = Arc::new(Backlog { waiting: Mutex::default(), changed: Condvar::new() });
        table.listeners.insert((port, kind), backlog.clone());
        Ok(backlog)
    }

    pub(crate) fn remove_listener(&self, port: u32, kind: Kind, backlog: &Backlog<S::Relay>) {
        self.table.lock().listeners.remove(&(port, kind));
        let waiting = std::mem::take(&mut *backlog.waiting.lock());
        waiting.iter().for_each(|conn| self.abort(conn));
    }

    /// Ends a connection at once.
    pub(crate) fn abort(&self, conn: &Arc<Conn<S::Relay>>) {
        let verdict = conn.end(&mut conn.lock(), Over::Reset);
        if verdict.over {
            self.carry_out(conn, Verdict { reply: Some(Op::Reset), ..verdict });
        }
    }

    /// We send no more, or receive no more, or neither.
    pub(crate) fn shut(&self, conn: &Arc<Conn<S::Relay>>, sending: bool, receiving: bool) {
        let mut inner = conn.lock();
        match inner.phase {
            Phase::Open => {}
            Phase::Closed(_) => return,
            Phase::Connecting | Phase::Accepting => {
                drop(inner);
                if sending && receiving {
                    self.abort(conn);
                }
                return;
            }
        }
        let news = sending && !inner.done || receiving && !inner.deaf;
        inner.done |= sending;
        inner.deaf |= receiving;
        let flags =
            if inner.deaf { wire::SHUTDOWN_RECEIVE } else { 0 } | if inner.done { wire::SHUTDOWN_SEND } else { 0 };
        let both = inner.done && inner.deaf;
        if inner.deaf {
            inner.inbox.clear();
        }
        let verdict = conn.maybe_over(&mut inner);
        // Whoever is in the middle of sending gives up now.
        conn.wake(&inner);
        drop(inner);
        if verdict.over {
            return self.carry_out(conn, verdict);
        }
        if news {
            let header = VsockHdr { flags, ..conn.header(Op::Shutdown) };
            let who = Who::Conn(conn.clone());
            let effect = {
                // After what was sent before.
                let _sending = conn.sending.lock();
                self.sender.send(&who, header, &mut Payload::empty(), 0).1
            };
            if both {
                self.expect(conn, self.settings.linger);
                self.host.wake();
            }
            self.effect(effect);
        }
    }

    /// Sends bytes of a program, as many as there is credit for, of which `room` may wait in the outbox; says how many.
    /// `flags` go with the last of them. The caller holds the connection's `sending`.
    pub(crate) fn send(&self, conn: &Arc<Conn<S::Relay>>, bytes: &[u8], flags: u32, room: usize) -> io::Result<usize> {
        let len = {
            let mut inner = conn.lock();
            self.may_send(&inner)?;
            let len = bytes.len().min(conn.credit(&inner));
            conn.promise(&mut inner, len);
            len
        };
        if len == 0 && !bytes.is_empty() {
            return Ok(0);
        }
        let flags = if len == bytes.len() { flags } else { 0 };
        let header = VsockHdr { flags, ..conn.header(Op::Data) };
        let who = Who::Conn(conn.clone());
        let (sent, effect) = self.sender.send(&who, header, &mut Payload::bytes(&bytes[..len]), room);
        if sent < len {
            conn.take_back(&mut conn.lock(), len - sent);
        }
        self.effect(effect);
        Ok(sent)
    }

    /// How many more bytes of a connection may wait in the outbox.
    pub(crate) fn room(&self, conn: &Conn<S::Relay>) -> usize {
        (self.settings.buffer as usize).max(MAX_PACKET).saturating_sub(conn.waiting())
    }

    pub(crate) fn may_send(&self, inner: &crate::connection::Inner<S::Relay>) -> io::Result<()> {
        match inner.phase {
            Phase::Closed(over) => Err(over.error()),
            _ if inner.done || inner.peer_deaf => Err(io::ErrorKind::BrokenPipe.into()),
            Phase::Open => Ok(()),
            Phase::Connecting | Phase::Accepting => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    // --- relays -------------------------------------------------------------------------------------------------------

    /// Connects a socket of the host to a peer. [`Relay::finish`] and [`Relay::close`] tell its fate, and [`Host::room`] when it
    /// is connected.
    pub fn connect_relay(&self, peer: Addr, kind: Kind, relay: S::Relay) -> io::Result<Key> {
        Ok(self.request_connection(peer, kind, Some(relay))?.key)
    }

    /// Whether a connection is there, both ends.
    pub fn is_open(&self, key: Key) -> bool {
        self.find(key).is_some_and(|conn| conn.lock().phase == Phase::Open)
    }

    /// Sends what `read` gets from a connection's relay straight into the peer's buffers, up to `most` bytes. `read` is called
    /// once at most, with room for at least a byte. `Ok(None)`: not now, there is no credit or no room; [`Host::room`] tells
    /// when. `Ok(Some(0))`: `read` said that there is no more.
    pub fn send_from(
        &self,
        key: Key,
        most: usize,
        read: &mut dyn FnMut(&[Span<'_>]) -> io::Result<usize>,
        copy: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Option<usize>> {
        let Some(conn) = self.find(key) else { return Err(io::ErrorKind::ConnectionReset.into()) };
        let _sending = conn.sending.lock();
        let len = {
            let mut inner = conn.lock();
            self.may_send(&inner)?;
            let room = self.room(&conn);
            let len = most.min(conn.credit(&inner)).min(room);
            conn.promise(&mut inner, len);
            len
        };
        if len == 0 {
            return Ok(None);
        }
        let who = Who::Conn(conn.clone());
        let (result, effect) = self.sender.fill(&who, conn.header(Op::Data), len, read, copy);
        let sent = result.as_ref().map_or(0, |&sent| sent.unwrap_or(0));
        if sent < len {
            conn.take_back(&mut conn.lock(), len - sent);
        }
        self.effect(effect);
        result
    }

    /// A relay can take more now.
    pub fn drain(&self, key: Key) {
        if let Some(conn) = self.find(key) {
            let verdict = conn.drain(&mut conn.lock());
            self.carry_out(&conn, verdict);
        }
    }

    /// A relay's program sends no more, or is gone altogether.
    pub fn shut_relay(&self, key: Key, gone: bool) {
        if let Some(conn) = self.find(key) {
            self.shut(&conn, true, gone);
        }
    }

    /// A relay's program reads no more: the peer is told.
    pub fn deafen_relay(&self, key: Key) {
        if let Some(conn) = self.find(key) {
            self.shut(&conn, false, true);
        }
    }

    /// A relay's socket was reset.
    pub fn reset_relay(&self, key: Key) {
        if let Some(conn) = self.find(key) {
            self.abort(&conn);
        }
    }

    // --- reports ------------------------------------------------------------------------------------------------------

    /// What has happened so far.
    pub fn report(&self) -> Report {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Report {
            connections: self.table.lock().conns.len(),
            opened: count(&self.counters.opened),
            refused: count(&self.counters.refused),
            received: count(&self.counters.received),
            ways: self.sender.ways(),
            wrong: count(&self.counters.wrong),
            faults: count(&self.counters.faults),
        }
    }

    /// The connections that there are.
    pub fn connections(&self) -> Vec<ConnectionReport> {
        let conns: Vec<_> = self.table.lock().conns.values().cloned().collect();
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

/// A program that waits for packets itself, and takes them. When it stops, the worker does.
pub(crate) struct Leader<'a, S: Side>(&'a Stack<S>);

impl<S: Side> Leader<'_, S> {
    /// Waits, unless there is a packet already.
    pub(crate) fn wait(&self, until: Option<Instant>) {
        if !self.0.enable() {
            self.0.host.wait(until);
        }
    }
}

impl<S: Side> Drop for Leader<'_, S> {
    fn drop(&mut self) {
        // The worker has seen this, or what it has left alone is seen here.
        self.0.led.store(false, Ordering::SeqCst);
        if self.0.enable() {
            self.0.host.wake();
        }
    }
}

/// A program that looks at the ring by itself. When the last one stops, notifications are on again.
pub(crate) struct Poller<'a, S: Side>(&'a Stack<S>);

impl<S: Side> Drop for Poller<'_, S> {
    fn drop(&mut self) {
        let more = {
            let mut incoming = self.0.incoming.lock();
            incoming.pollers -= 1;
            incoming.pollers == 0 && incoming.inlet.as_mut().is_some_and(Inlet::enable_notification)
        };
        if more {
            // The worker takes what came in between; or who waits in its place, without a notification so far.
            self.0.host.wake();
            if self.0.led.load(Ordering::SeqCst) {
                self.0.host.unwait();
            }
        }
    }
}
