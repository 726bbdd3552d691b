//! A burst's way from its source to its destinations, within each port's limits; a panic on the way ends at the port whose
//! queue it came from.

use crate::{
    Claim, Dropped, Fdb, Learned, Limits, Work,
    limits::{Notices, Storm},
};
use ringroad_frame::{ALL, BURST, Burst, Sink, Source};
use ringroad_wire::ethernet::{Addresses, MacAddr};
use std::{
    any::Any,
    cell::{Cell, RefCell},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

/// A port of the switch, shared by its worker and by control, which sets it up and takes it down. Neither waits for the
/// other: a queue that control is at work on has no frames and takes none.
pub trait Port: Send + Sync {
    /// Exclusive use of a queue that frames come from, which the worker keeps from burst to burst: locks cost.
    type Lease;
    /// The same for one burst.
    type Source<'a>: Source
    where
        Self: 'a;
    /// Exclusive use of a queue that frames go to, for one burst.
    type Sink<'a>: Sink
    where
        Self: 'a;

    /// The queue with this index that frames come from, if nobody else has it.
    fn lease(&self, queue: usize) -> Option<Self::Lease>;

    /// Whether somebody else wants that queue: a lease is to be let go now.
    fn is_wanted(&self, queue: usize) -> bool;

    /// The queue for one burst, if it is running.
    fn source<'a>(&'a self, queue: usize, lease: &'a mut Self::Lease) -> Option<Self::Source<'a>>;

    /// The queue that frames of this worker go to, if it is running and nobody else has it; `hint` spreads senders over
    /// several queues. `frames` is how many will not arrive if there is none, to be counted.
    fn sink(&self, hint: usize, frames: usize) -> Option<Self::Sink<'_>>;

    /// Sends the notifications that were left open in the last bursts, when it would have cost too much to find out
    /// whether they are wanted. `false`: not now.
    fn settle(&self) -> bool {
        true
    }

    /// Returns whether flooded frames go here: broadcast, multicast, and those to unknown addresses.
    #[inline]
    fn is_flooded(&self) -> bool {
        true
    }

    /// Whether frames may go back out of it.
    fn hairpin(&self) -> bool {
        false
    }

    /// What it may do to the others; asked when it is added.
    fn limits(&self) -> Limits {
        Limits::default()
    }

    /// What a frame from or to it costs, where copying one to a guest costs 1: a system call each is more.
    fn weight(&self) -> usize {
        1
    }

    /// Frames of a queue were dropped on their way from it. Called by whoever has the queue's lease.
    fn dropped(&self, _queue: usize, _why: Dropped, _frames: usize) {}

    /// It has more addresses than are learned of it: one was not. Called by whoever has the queue's lease.
    fn crowded(&self, _queue: usize) {}

    /// It has sent a frame with a source address that is another port's. `tell`: somebody should be told; that is not always
    /// so, whatever the port does. Called by whoever has the queue's lease.
    fn claimed(&self, _queue: usize, _address: MacAddr, _claim: Claim, _from: &Self, _tell: bool) {}

    /// Its code has panicked: none of its queues is used any more until [`Switch::forget`] is called for it.
    fn panicked(&self, _message: &str) {}
}

/// What a panic said.
pub fn panic_message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Frames of a burst by index, in order.
struct Group {
    which: [u8; BURST],
    len: usize,
}

impl Group {
    const EMPTY: Group = Group { which: [0; BURST], len: 0 };

    #[inline(always)]
    fn push(&mut self, index: u8) {
        if let Some(place) = self.which.get_mut(self.len) {
            *place = index;
            self.len += 1;
        }
    }

    #[inline(always)]
    fn list(&self) -> &[u8] {
        self.which.get(..self.len).unwrap_or_default()
    }
}

/// A port and what the switch remembers of it.
struct Member<P: Port> {
    port: Arc<P>,
    limits: Limits,
    storm: Cell<Storm>,
    notices: Cell<Notices>,
    /// Its code has panicked.
    broken: Cell<bool>,
    /// It may have notifications left open.
    open: Cell<bool>,
    /// The queues that the last burst came from, or some of them. Kept only while frames come.
    leases: RefCell<Vec<Option<P::Lease>>>,
}

impl<P: Port> Member<P> {
    /// A queue's lease: the one that was kept, or a new one.
    #[inline]
    fn lease(&self, queue: usize) -> Option<P::Lease> {
        let kept = self.leases.borrow_mut().get_mut(queue).and_then(Option::take);
        kept.filter(|_| !self.port.is_wanted(queue)).or_else(|| self.port.lease(queue))
    }

    /// Keeps a lease for the next burst.
    #[inline]
    fn keep(&self, queue: usize, lease: P::Lease) {
        let mut leases = self.leases.borrow_mut();
        if leases.len() <= queue {
            leases.resize_with(queue + 1, || None);
        }
        if let Some(place) = leases.get_mut(queue) {
            *place = Some(lease);
        }
    }

    /// Its code has panicked: it takes no more part.
    #[cold]
    fn fell(&self, payload: &(dyn Any + Send)) {
        self.broken.set(true);
        self.open.set(false);
        // Whatever else it does wrong now, nobody else is hurt.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            if let Ok(mut leases) = self.leases.try_borrow_mut() {
                leases.clear();
            }
            self.port.panicked(panic_message(payload));
        }));
    }

    /// Drops frames of a queue.
    #[cold]
    fn dropped(&self, queue: usize, why: Dropped, frames: usize) {
        self.port.dropped(queue, why, frames);
    }
}

type Members<P> = [Option<Member<P>>];

/// Carries bursts between ports. One for each worker.
pub struct Switch<P: Port> {
    ports: Vec<Option<Member<P>>>,
    fdb: Fdb,
    burst: Burst,
    /// Frames were poured since the ports are these two, so that the table may not have seen an address move.
    poured: bool,
}

impl<P: Port> Switch<P> {
    /// A switch without ports.
    pub fn new(fdb: Fdb) -> Self {
        Switch { ports: Vec::new(), fdb, burst: Burst::default(), poured: false }
    }

    /// Adds a port; returns its number.
    pub fn add(&mut self, port: Arc<P>) -> u32 {
        if std::mem::take(&mut self.poured) {
            (0..self.ports.len() as u32).for_each(|number| self.fdb.forget(number));
        }
        let free = self.ports.iter().position(Option::is_none);
        let number = free.unwrap_or(self.ports.len());
        if free.is_none() {
            self.ports.push(None);
        }
        let limits = port.limits();
        if let Some(place) = self.ports.get_mut(number) {
            *place = Some(Member {
                port,
                limits,
                storm: Cell::default(),
                notices: Cell::new(Notices::new()),
                broken: Cell::new(false),
                open: Cell::new(false),
                leases: RefCell::default(),
            });
        }
        self.limit(number as u32, limits);
        number as u32
    }

    /// Holds a port to other limits from now on. What was learned of it stays.
    pub fn limit(&mut self, number: u32, limits: Limits) {
        let Some(Some(member)) = self.ports.get_mut(number as usize) else { return };
        member.limits = limits;
        if let (Err(owner), Some(address)) = (self.fdb.admit(number, limits.addresses, limits.own), limits.own)
            && let Some(Some(member)) = self.ports.get(number as usize)
            && let Some(Some(owner)) = self.ports.get(owner as usize)
        {
            member.port.claimed(0, address, Claim::Owned, &owner.port, true);
        }
    }

    /// Removes a port and what was learned of it.
    pub fn remove(&mut self, number: u32) -> Option<Arc<P>> {
        self.fdb.remove(number);
        self.ports.get_mut(number as usize)?.take().map(|member| member.port)
    }

    /// Lets the memory go that the last burst was in, and all queues.
    pub fn release(&mut self) {
        self.burst.clear();
        self.let_go();
    }

    /// Lets all queues go that were kept for the next burst.
    fn let_go(&self) {
        for member in self.ports.iter().flatten() {
            let dropped = catch_unwind(AssertUnwindSafe(|| member.leases.borrow_mut().clear()));
            dropped.unwrap_or_else(|payload| member.fell(&*payload));
        }
    }

    /// Forgets what was learned of a port, and that its code has panicked: it begins anew.
    pub fn forget(&mut self, number: u32) {
        self.fdb.forget(number);
        if let Some(Some(member)) = self.ports.get(number as usize) {
            member.broken.set(false);
        }
    }

    /// Changes the forwarding table's size, how fast it ages, and how long an address stays where it is.
    pub fn set_table(&mut self, entries: usize, ageing: u32, hold: u32) {
        self.fdb.set(entries, ageing, hold);
    }

    /// The forwarding table.
    pub fn fdb(&self) -> &Fdb {
        &self.fdb
    }

    /// The port that all frames of another one go to, known or unknown: the only other one. Nothing need be learned of them,
    /// if no frame from there is kept back because its destination was once seen there.
    fn only_other(ports: &Members<P>, from: u32) -> Option<&Member<P>> {
        let mut others = ports.iter().enumerate().filter(|&(number, _)| number as u32 != from);
        let other = others.find_map(|(_, member)| member.as_ref())?;
        let from = ports.get(from as usize)?.as_ref()?;
        let alone = others.all(|(_, member)| member.is_none());
        let plain = |member: &Member<P>| member.port.is_flooded() && !member.port.hairpin();
        // Where they come from, link-local frames are sorted out without us.
        let link_local = !from.limits.link_local || other.limits.link_local;
        (alone && link_local && plain(from) && plain(other)).then_some(other)
    }

    /// Lets all queues go, and sends the notifications that were left open, if they are wanted. To be called now and then
    /// under load, and before the worker sleeps. `false`: not all could be; once more, soon.
    pub fn settle(&self) -> bool {
        self.let_go();
        let open = self.ports.iter().flatten().filter(|member| member.open.get());
        open.fold(true, |settled, member| {
            match catch_unwind(AssertUnwindSafe(|| member.port.settle())) {
                Ok(done) => member.open.set(!done),
                Err(payload) => member.fell(&*payload),
            }
            settled && !member.open.get()
        })
    }

    /// Carries one burst from a port's queue to where it should go. Says how many buffers it took from there (and how many
    /// it made for a generating port), none if there is nothing, and whether that was a lot of work. `now`: since the switch
    /// was made; it need not be more than about right.
    ///
    /// A panic in the code of a port's queue stops that port: [`Port::panicked`].
    #[inline]
    pub fn carry(&mut self, from: u32, queue: usize, now: Duration) -> Work {
        let carried = catch_unwind(AssertUnwindSafe(|| self.carry_burst(from, queue, now)));
        carried.unwrap_or_else(|payload| self.fell(from, &*payload))
    }

    /// What was half done is gone: the burst, the lease (with the unwound stack), and the source.
    #[cold]
    fn fell(&mut self, from: u32, payload: &(dyn Any + Send)) -> Work {
        self.burst = Burst::default();
        if let Some(Some(member)) = self.ports.get(from as usize) {
            member.fell(payload);
        }
        Work::default()
    }

    #[inline]
    fn carry_burst(&mut self, from: u32, queue: usize, now: Duration) -> Work {
        const NONE: Work = Work { frames: 0, heavy: false };
        let Some(Some(member)) = self.ports.get(from as usize) else { return NONE };
        if member.broken.get() {
            return NONE;
        }
        let port = &*member.port;
        let Some(mut lease) = member.lease(queue) else { return NONE };
        let Some(mut source) = port.source(queue, &mut lease) else { return NONE };
        if source.pours()
            && let Some(only) = Self::only_other(&self.ports, from)
            && !only.broken.get()
            && let Some(mut sink) = only.port.sink(from as usize + queue, 0)
            && let Some(poured) = source.pour(&mut sink)
        {
            only.open.set(true);
            self.poured |= poured > 0;
            return Work { frames: poured, heavy: true };
        }
        let taken = source.take(&mut self.burst);
        if taken == 0 {
            return NONE;
        }
        // The last destination is let go after the source has published too: leaving a gate waits for all that was written
        // before, and so both wait together.
        let mut way = Way::new();
        let origin = Origin { number: from, queue, member, poured: self.poured, now };
        forward(&self.ports, &mut self.fdb, &self.burst, &origin, &mut way);
        let weight = way.weight + taken * port.weight();
        let heavy = weight > HEAVY || self.burst.is_heavy();
        source.done(&mut self.burst);
        drop((way, source));
        member.open.set(true);
        member.keep(queue, lease);
        Work { frames: taken, heavy }
    }
}

/// A burst that costs as much as so many frames' copies is a turn by itself.
const HEAVY: usize = 4 * BURST;

/// Where a burst comes from.
struct Origin<'a, P: Port> {
    number: u32,
    queue: usize,
    member: &'a Member<P>,
    /// See [`Switch`].
    poured: bool,
    now: Duration,
}

/// What a burst has come to on its way.
struct Way<'a, P: Port + 'a> {
    /// The last destination.
    held: Option<P::Sink<'a>>,
    /// What the copies have cost.
    weight: usize,
}

impl<'a, P: Port> Way<'a, P> {
    fn new() -> Self {
        Way { held: None, weight: 0 }
    }

    /// Puts frames of a burst into a port's queue, and keeps it; says how many it took. A panic there is that port's: the others
    /// get their frames, and the source its buffers.
    fn put(&mut self, member: &'a Member<P>, hint: usize, burst: &Burst, which: &[u8]) -> usize {
        // First of all: it may be the same one.
        self.held = None;
        if member.broken.get() {
            return 0;
        }
        let held = &mut self.held;
        let put = catch_unwind(AssertUnwindSafe(|| {
            let Some(sink) = member.port.sink(hint, which.len()) else { return 0 };
            member.open.set(true);
            held.insert(sink).put(burst, which)
        }));
        self.weight += which.len() * member.port.weight();
        put.unwrap_or_else(|payload| {
            self.held = None;
            member.fell(&*payload);
            0
        })
    }
}

/// The ports that get a frame for everybody from one of them.
fn receivers<P: Port>(ports: &Members<P>, from: u32, link_local: bool) -> impl Iterator<Item = &Member<P>> {
    ports.iter().enumerate().filter_map(move |(number, member)| {
        let member = member.as_ref()?;
        let wanted = member.port.is_flooded()
            && (number as u32 != from || member.port.hairpin())
            && (!link_local || member.limits.link_local);
        wanted.then_some(member)
    })
}

/// In the place of a port's number: to everybody; to those that forward link-local frames; to nobody, as the source may not use
/// its address, or as link-local frames do not leave there.
const FLOOD: u32 = u32::MAX;
const LOCAL: u32 = FLOOD - 1;
const SPOOFED: u32 = FLOOD - 2;
const FILTERED: u32 = FLOOD - 3;
/// Or as they are there already.
const NOWHERE: u32 = FLOOD - 4;

/// Learns where a frame comes from, and looks up where it goes: once for frames of one flow that come together.
#[inline(always)]
fn decide<P: Port>(ports: &Members<P>, fdb: &mut Fdb, addresses: Addresses, from: &Origin<'_, P>) -> u32 {
    let now = from.now.as_secs() as u32;
    let Addresses { source, destination } = addresses;
    let limits = &from.member.limits;
    if limits.fixed && Some(source) != limits.own {
        return SPOOFED;
    }
    if !source.is_multicast() {
        let learned = fdb.learn(source, from.number, now);
        if learned != Learned::Known && is_refused(ports, source, learned, from) {
            return SPOOFED;
        }
    }
    if !destination.is_multicast() {
        return match fdb.lookup(destination, now) {
            None => FLOOD,
            Some(at) if at != from.number || from.member.port.hairpin() => at,
            // The table may not have seen it move.
            Some(_) if from.poured => FLOOD,
            Some(_) => NOWHERE,
        };
    }
    match (destination.is_link_local(), limits.link_local) {
        (false, _) => FLOOD,
        (true, true) => LOCAL,
        (true, false) => FILTERED,
    }
}

/// An address was not simply learned: tells the port. Says whether its frames are dropped.
#[cold]
fn is_refused<P: Port>(ports: &Members<P>, address: MacAddr, learned: Learned, from: &Origin<'_, P>) -> bool {
    let (claim, at) = match learned {
        Learned::Known => return false,
        Learned::Crowded => {
            from.member.port.crowded(from.queue);
            return false;
        }
        Learned::Moved(at) => (Claim::Moved, at),
        Learned::Held(at) => (Claim::Held, at),
        Learned::Owned(at) => (Claim::Owned, at),
    };
    if let Some(Some(other)) = ports.get(at as usize) {
        let mut notices = from.member.notices.get();
        let tell = notices.take(from.now.as_secs() as u32);
        from.member.notices.set(notices);
        from.member.port.claimed(from.queue, address, claim, &other.port, tell);
    }
    claim == Claim::Owned
}

/// Learns where frames come from, looks up where they go, and puts them there, destination by destination.
#[inline]
fn forward<'a, P: Port>(
    ports: &'a Members<P>,
    fdb: &mut Fdb,
    burst: &Burst,
    from: &Origin<'_, P>,
    way: &mut Way<'a, P>,
) {
    let mut destinations = [NOWHERE; BURST];
    let frames = burst.frames();
    let Some(first) = frames.first() else { return };
    let mut flow = first.addresses();
    let first = decide(ports, fdb, Addresses::from_words(flow), from);
    let (mut to, mut mixed) = (first, false);
    for (frame, place) in frames.iter().zip(&mut destinations) {
        // Frames of one flow come together.
        if frame.addresses() != flow {
            flow = frame.addresses();
            to = decide(ports, fdb, Addresses::from_words(flow), from);
            mixed |= to != first;
        }
        *place = to;
    }
    let all = ALL.get(..frames.len()).unwrap_or(&ALL);
    if !mixed {
        // All frames of the burst go to one port, as usual.
        return put(ports, burst, from, first, all, way);
    }
    let mut left = Group::EMPTY;
    all.iter().for_each(|&index| left.push(index));
    while let Some(&first) = left.list().first() {
        let destination = |index: u8| destinations.get(usize::from(index)).copied().unwrap_or(NOWHERE);
        let to = destination(first);
        let mut group = Group::EMPTY;
        let mut others = Group::EMPTY;
        for &index in left.list() {
            if destination(index) == to { &mut group } else { &mut others }.push(index);
        }
        put(ports, burst, from, to, group.list(), way);
        left = others;
    }
}

/// Puts frames where they all go.
#[inline(always)]
fn put<'a, P: Port>(
    ports: &'a Members<P>,
    burst: &Burst,
    from: &Origin<'_, P>,
    to: u32,
    which: &[u8],
    way: &mut Way<'a, P>,
) {
    if let Some(Some(member)) = ports.get(to as usize) {
        way.put(member, from.number as usize + from.queue, burst, which);
    } else {
        spread(ports, burst, from, to, which, way);
    }
}

/// Frames that go to everybody, or to nobody.
#[cold]
fn spread<'a, P: Port>(
    ports: &'a Members<P>,
    burst: &Burst,
    from: &Origin<'_, P>,
    to: u32,
    which: &[u8],
    way: &mut Way<'a, P>,
) {
    let member = from.member;
    let local = match to {
        FLOOD => false,
        LOCAL => true,
        SPOOFED => return member.dropped(from.queue, Dropped::Spoofed, which.len()),
        FILTERED => return member.dropped(from.queue, Dropped::LinkLocal, which.len()),
        // They are there already, or that port is gone.
        _ => return,
    };
    let mut storm = member.storm.get();
    // One to a single port costs no more than if it were addressed to it.
    let granted = match receivers(ports, from.number, local).nth(1) {
        Some(_) => storm.take(which.len(), member.limits.storm, from.now),
        None => which.len(),
    };
    member.storm.set(storm);
    if granted < which.len() {
        member.dropped(from.queue, Dropped::Storm, which.len() - granted);
    }
    let which = which.get(..granted).unwrap_or_default();
    if !which.is_empty() {
        for receiver in receivers(ports, from.number, local) {
            way.put(receiver, from.number as usize + from.queue, burst, which);
        }
    }
}
