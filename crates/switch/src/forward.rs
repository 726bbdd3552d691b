//! A burst's way from its source to its destinations.

use crate::Fdb;
use ringroad_mem::{Region, Table};
use ringroad_net::{Burst, Frame, Sink, Source};
use ringroad_ring::ALL;
use ringroad_wire::{
    ethernet::{Addresses, MacAddr},
    vnet_hdr,
};
use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

/// What becomes of the frames that come from a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// They go where their destination address was last seen, or everywhere.
    #[default]
    Switch,
    /// Back out of the same port with their addresses swapped. For measuring.
    Reflect,
    /// Nothing. For measuring.
    Drop,
    /// Nothing, and it gets frames of the switch's own making, as many as it takes. For measuring.
    Generate,
}

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

    /// What becomes of its frames.
    fn mode(&self) -> Mode {
        Mode::Switch
    }

    /// Whether frames may go back out of it.
    fn hairpin(&self) -> bool {
        false
    }
}

/// Frames of a burst by index, in order.
struct Group {
    which: [u8; ringroad_ring::BURST],
    len: usize,
}

impl Group {
    const EMPTY: Group = Group { which: [0; ringroad_ring::BURST], len: 0 };

    #[inline(always)]
    fn push(&mut self, index: usize) {
        if let Some(place) = self.which.get_mut(self.len) {
            *place = index as u8;
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
        leases[queue] = Some(lease);
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
    /// What a generating port gets.
    made: Option<Burst>,
}

/// Bytes of the frames that a generating port gets, without FCS.
const MADE: usize = 64;

/// A burst of frames to everybody, of the type for experiments (IEEE 802, 0x88b5) and else zeros.
fn made() -> Option<Burst> {
    let memory = Arc::new(Table::default().with(Region::private(4096, 0).ok()?).ok()?);
    let mut frame = [0; vnet_hdr::SIZE + MADE];
    let header = [&MacAddr::BROADCAST.0[..], &MacAddr::local(0).0, &[0x88, 0xb5]].concat();
    frame[vnet_hdr::SIZE..][..header.len()].copy_from_slice(&header);
    memory.regions().first()?.span(0, frame.len())?.write(&frame);
    let mut burst = Burst::default();
    burst.start(&memory);
    ALL.iter().all(|_| burst.push_private(&memory, 0, frame.len() as u32)).then_some(burst)
}

impl<P: Port> Switch<P> {
    /// A switch without ports.
    pub fn new(fdb: Fdb) -> Self {
        Switch { ports: Vec::new(), fdb, burst: Burst::default(), poured: false, made: None }
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
        self.ports[number] = Some(Member { port, open: Cell::new(false), leases: RefCell::default() });
        number as u32
    }

    /// Removes a port and what was learned of it.
    pub fn remove(&mut self, number: u32) -> Option<Arc<P>> {
        self.fdb.forget(number);
        self.ports.get_mut(number as usize)?.take().map(|member| member.port)
    }

    /// Lets the memory go that the last burst was in, and all queues.
    pub fn release(&mut self) {
        self.burst.clear();
        self.let_go();
    }

    /// Lets all queues go that were kept for the next burst.
    fn let_go(&self) {
        self.ports.iter().flatten().for_each(|member| member.leases.borrow_mut().clear());
    }

    /// Forgets what was learned of a port.
    pub fn forget(&mut self, number: u32) {
        self.fdb.forget(number);
    }

    /// Changes the forwarding table's size and how fast it ages.
    pub fn set_table(&mut self, entries: usize, ageing: u32) {
        self.fdb.set(entries, ageing);
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
        let plain = |member: &Member<P>| member.port.mode() == Mode::Switch && !member.port.hairpin();
        (alone && plain(from) && plain(other)).then_some(other)
    }

    /// Lets all queues go, and sends the notifications that were left open, if they are wanted. To be called now and then
    /// under load, and before the worker sleeps. `false`: not all could be; once more, soon.
    pub fn settle(&self) -> bool {
        self.let_go();
        let open = self.ports.iter().flatten().filter(|member| member.open.get());
        open.fold(true, |settled, member| {
            member.open.set(!member.port.settle());
            settled && !member.open.get()
        })
    }

    /// Carries one burst from a port's queue to where it should go. Says how many buffers it took from there (and how many
    /// it made for a generating port); 0: there is nothing. `now` is in seconds.
    #[inline]
    pub fn carry(&mut self, from: u32, queue: usize, now: u32) -> usize {
        let Some(Some(member)) = self.ports.get(from as usize) else { return 0 };
        let port = &*member.port;
        let Some(mut lease) = member.lease(queue) else { return 0 };
        let Some(mut source) = port.source(queue, &mut lease) else { return 0 };
        if port.mode() == Mode::Generate {
            let taken = source.take(&mut self.burst);
            if taken > 0 {
                source.done(&mut self.burst);
            }
            drop(source);
            self.made = self.made.take().or_else(made);
            return taken + self.made.as_ref().map_or(0, |made| put(member, queue, made, &ALL, &mut None));
        }
        if source.pours()
            && let Some(only) = Self::only_other(&self.ports, from)
            && let Some(mut sink) = only.port.sink(from as usize + queue, 0)
            && let Some(poured) = source.pour(&mut sink)
        {
            only.open.set(true);
            self.poured |= poured > 0;
            return poured;
        }
        let taken = source.take(&mut self.burst);
        if taken == 0 {
            return 0;
        }
        // The last destination is let go after the source has published too: leaving a gate waits for all that was written
        // before, and so both wait together.
        let mut held = None;
        match port.mode() {
            Mode::Switch => forward(&self.ports, &mut self.fdb, &self.burst, self.poured, from, queue, now, &mut held),
            Mode::Reflect => {
                self.burst.frames_mut().iter_mut().for_each(Frame::reflect);
                let all = ALL.get(..self.burst.frames().len()).unwrap_or(&ALL);
                put(member, queue, &self.burst, all, &mut held);
            }
            Mode::Drop | Mode::Generate => {}
        }
        source.done(&mut self.burst);
        drop((held, source));
        member.open.set(true);
        member.keep(queue, lease);
        taken
    }
}

/// Puts frames of a burst into a port's queue, and keeps it; says how many it took.
fn put<'a, P: Port>(
    member: &'a Member<P>,
    hint: usize,
    burst: &Burst,
    which: &[u8],
    held: &mut Option<P::Sink<'a>>,
) -> usize {
    // First of all: it may be the same one.
    *held = None;
    let Some(sink) = member.port.sink(hint, which.len()) else { return 0 };
    member.open.set(true);
    held.insert(sink).put(burst, which)
}

/// Learns where frames come from, looks up where they go, and puts them there, destination by destination.
#[inline]
#[allow(
    clippy::too_many_arguments,
    reason = "the fields of a Switch, borrowed one by one, and where the burst is from"
)]
fn forward<'a, P: Port>(
    ports: &'a Members<P>,
    fdb: &mut Fdb,
    burst: &Burst,
    poured: bool,
    from: u32,
    queue: usize,
    now: u32,
    held: &mut Option<P::Sink<'a>>,
) {
    const FLOOD: u32 = u32::MAX;
    let hairpin = ports.get(from as usize).and_then(Option::as_ref).is_some_and(|member| member.port.hairpin());
    let mut destinations = [FLOOD; ringroad_ring::BURST];
    let mut left = Group::EMPTY;
    let mut last = None;
    for (index, frame) in burst.frames().iter().enumerate() {
        let Some(addresses) = Addresses::read(frame.ethernet()) else { continue };
        let to = match last {
            // Frames of one flow come together.
            Some((seen, to)) if seen == addresses => to,
            _ => {
                if !addresses.source.is_multicast() {
                    fdb.learn(addresses.source, from, now);
                }
                let known =
                    if addresses.destination.is_multicast() { None } else { fdb.lookup(addresses.destination, now) };
                let to = known.unwrap_or(FLOOD);
                last = Some((addresses, to));
                to
            }
        };
        let to = match to == from && !hairpin {
            true if poured => FLOOD,
            true => continue,
            false => to,
        };
        destinations[index] = to;
        left.push(index);
    }
    // Usually one round: all frames of the burst go to one port.
    while let Some(&first) = left.list().first() {
        let to = destinations[first as usize];
        let mut group = Group::EMPTY;
        let mut others = Group::EMPTY;
        for &index in left.list() {
            if destinations[index as usize] == to { &mut group } else { &mut others }.push(index.into());
        }
        if to == FLOOD {
            for (number, member) in ports.iter().enumerate() {
                if let Some(member) = member
                    && member.port.mode() == Mode::Switch
                    && (number as u32 != from || member.port.hairpin())
                {
                    put(member, from as usize + queue, burst, group.list(), held);
                }
            }
        } else if let Some(Some(member)) = ports.get(to as usize) {
            put(member, from as usize + queue, burst, group.list(), held);
        }
        left = others;
    }
}
