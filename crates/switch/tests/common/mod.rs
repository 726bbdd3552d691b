//! Ports of memory and a switch between them. Shared by the tests of this crate.
#![allow(dead_code, reason = "each test file uses a part")]

use ringroad_frame::{
    Burst, Poured, Sink, Source,
    offload::{Offload, Support},
};
use ringroad_mem::{Region, Span, Table};
use ringroad_ring::BURST;
use ringroad_switch::{Claim, Direction, Dropped, Fdb, Limits, Port, Switch, Vlans};
use ringroad_wire::{ethernet::MacAddr, vnet_hdr};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

/// Of one frame, in a port's memory.
pub const BUFFER: usize = 2048;
pub const AGEING: u32 = 300;
pub const HOLD: u32 = 2;

pub type Bytes = Vec<u8>;

/// A port that sends what it is told to and keeps what it gets.
pub struct Fake {
    pub memory: Arc<Table>,
    pub flooded: bool,
    pub hairpin: bool,
    /// Its frames are poured where they can be; how many bursts were.
    pub pours: AtomicBool,
    pub poured: AtomicUsize,
    pub to_send: Mutex<VecDeque<Vec<Bytes>>>,
    /// Whether it keeps frames that were not delivered, and the frames of its last burst.
    pub retains: AtomicBool,
    /// Whether its sender does not notice that they wait.
    pub heedless: AtomicBool,
    pub sent: Mutex<Vec<Bytes>>,
    /// How many buffers without a frame its next burst has.
    pub refused: AtomicUsize,
    /// For how many frames it has room, and how many it has dropped for lack of it.
    pub room: AtomicUsize,
    pub full: AtomicUsize,
    pub got: Mutex<Vec<Bytes>>,
    /// Among how many queues its flows are distributed; for each frame that it got, which was chosen; and those without room.
    pub queues: AtomicUsize,
    pub chosen: Mutex<Vec<usize>>,
    pub closed: Mutex<Vec<usize>>,
    /// Whether there is a sink, and what was meant for it while there was none.
    pub running: AtomicBool,
    pub missed: AtomicUsize,
    /// Chains that were given back.
    pub done: AtomicUsize,
    /// How often it was asked for notifications that were left open; it has to be asked again while it is not `running`.
    pub settled: AtomicUsize,
    /// Until when its notifications wait, in milliseconds, and whether its driver has said so.
    pub due: AtomicU64,
    pub timed: AtomicBool,
    /// Whether its queue is leased, how often it has been, and whether somebody else wants it.
    pub leased: Arc<AtomicBool>,
    pub leases: AtomicUsize,
    pub wanted: AtomicBool,
    /// How often its sink was asked for: each a lock.
    pub sinks: AtomicUsize,
    /// What it takes, what is left to do to a frame that it sends, and was to those that it got.
    pub support: Mutex<Support>,
    pub offload: Mutex<fn(&[u8]) -> Offload>,
    /// Whether segments to it become longer frames.
    pub coalesces: AtomicBool,
    pub got_offloads: Mutex<Vec<Offload>>,
    pub limits: Limits,
    pub vlans: Option<Vlans>,
    /// What the switch has dropped of its frames, what others have claimed, and how often there was no room for an address.
    pub dropped: Mutex<Vec<(Dropped, usize)>>,
    pub claims: Mutex<Vec<(MacAddr, Claim, bool)>>,
    pub crowded: AtomicUsize,
    /// Of what it was told to capture.
    pub captured: Mutex<Vec<(Direction, Bytes)>>,
    /// Where its code panics, and what was said of it.
    pub panics: Mutex<Option<Panics>>,
    pub fell: Mutex<Vec<String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panics {
    Lease,
    Take,
    Done,
    Put,
    Settle,
    Drop,
    /// Whatever is done about it, too.
    Always,
}

impl Fake {
    pub fn new(flooded: bool, hairpin: bool) -> Arc<Fake> {
        Self::limited(flooded, hairpin, Limits::default())
    }

    pub fn limited(flooded: bool, hairpin: bool, limits: Limits) -> Arc<Fake> {
        Self::made(flooded, hairpin, limits, None)
    }

    pub fn of_vlans(vlans: Option<Vlans>) -> Arc<Fake> {
        Self::made(true, false, Limits::default(), vlans)
    }

    fn made(flooded: bool, hairpin: bool, limits: Limits, vlans: Option<Vlans>) -> Arc<Fake> {
        let region = Region::private(BURST * BUFFER, 0).unwrap();
        Arc::new(Fake {
            memory: Arc::new(Table::default().with(region).unwrap()),
            flooded,
            hairpin,
            pours: AtomicBool::new(false),
            poured: AtomicUsize::new(0),
            to_send: Mutex::default(),
            retains: AtomicBool::new(false),
            heedless: AtomicBool::new(false),
            sent: Mutex::default(),
            refused: AtomicUsize::new(0),
            room: AtomicUsize::new(usize::MAX),
            full: AtomicUsize::new(0),
            got: Mutex::default(),
            queues: AtomicUsize::new(1),
            chosen: Mutex::default(),
            closed: Mutex::default(),
            running: AtomicBool::new(true),
            missed: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            settled: AtomicUsize::new(0),
            due: AtomicU64::new(0),
            timed: AtomicBool::new(false),
            leased: Arc::default(),
            leases: AtomicUsize::new(0),
            wanted: AtomicBool::new(false),
            sinks: AtomicUsize::new(0),
            support: Mutex::new(Support::empty()),
            offload: Mutex::new(|_| Offload::NONE),
            coalesces: AtomicBool::new(false),
            got_offloads: Mutex::default(),
            limits,
            vlans,
            dropped: Mutex::default(),
            claims: Mutex::default(),
            crowded: AtomicUsize::new(0),
            captured: Mutex::default(),
            panics: Mutex::default(),
            fell: Mutex::default(),
        })
    }

    pub fn panic_at(&self, place: Panics) {
        let now = *self.panics.lock().unwrap();
        if now == Some(place) || now == Some(Panics::Always) {
            panic!("a bug at {place:?}");
        }
    }

    /// What the switch has dropped of its frames.
    pub fn lost(&self, why: Dropped) -> usize {
        self.dropped.lock().unwrap().iter().filter(|(other, _)| *other == why).map(|(_, frames)| frames).sum()
    }

    pub fn got(&self) -> Vec<Bytes> {
        std::mem::take(&mut self.got.lock().unwrap())
    }

    pub fn stop(&self, stop: bool) {
        self.running.store(!stop, Relaxed);
    }
}

pub struct Lease(Arc<AtomicBool>, bool);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.store(false, Relaxed);
        if self.1 && !std::thread::panicking() {
            panic!("a bug at Drop");
        }
    }
}

pub struct FakeSource<'a>(&'a Fake);

impl Source for FakeSource<'_> {
    fn take(&mut self, burst: &mut Burst) -> usize {
        self.0.panic_at(Panics::Take);
        let frames = self.0.to_send.lock().unwrap().pop_front().unwrap_or_default();
        burst.start_in(&self.0.memory);
        let offload = *self.0.offload.lock().unwrap();
        for (index, frame) in frames.iter().enumerate() {
            // A header full of promises, which nobody should see.
            let bytes = [&[0xff; vnet_hdr::SIZE][..], frame].concat();
            self.0.memory.regions()[0].span(index * BUFFER, BUFFER).unwrap().write(&bytes);
            assert_eq!(burst.push_at((index * BUFFER) as u64, bytes.len(), offload(frame)), Ok(frame.len()));
        }
        let refused = self.0.refused.swap(0, Relaxed);
        burst.refuse(refused);
        let taken = frames.len() + refused;
        *self.0.sent.lock().unwrap() = frames;
        taken
    }

    fn retains(&self) -> bool {
        self.0.retains.load(Relaxed)
    }

    fn notices(&self) -> bool {
        !self.0.heedless.load(Relaxed)
    }

    fn retain(&mut self, burst: &mut Burst, first: usize) {
        assert!(first < burst.frames().len());
        let kept = self.0.sent.lock().unwrap().split_off(first);
        self.0.to_send.lock().unwrap().push_front(kept);
        self.0.done.fetch_add(first, Relaxed);
        burst.clear();
    }

    fn done(&mut self, burst: &mut Burst) {
        self.0.panic_at(Panics::Done);
        self.0.done.fetch_add(burst.frames().len(), Relaxed);
        burst.clear();
    }

    fn pours(&self) -> bool {
        self.0.pours.load(Relaxed)
    }

    fn pour(&mut self, sink: &mut impl Sink) -> Poured {
        let mut to_send = self.0.to_send.lock().unwrap();
        let Some(first) = to_send.front() else { return Poured::Unable };
        let mut frames = first.iter();
        let poured = sink.fill(BUFFER, &mut |spans| {
            let frame = frames.next()?;
            assert_eq!(spans[0].write(frame), frame.len());
            Some(frame.len())
        });
        if let Poured::Frames(count) = poured {
            to_send.pop_front();
            self.0.poured.fetch_add(1, Relaxed);
            self.0.done.fetch_add(count, Relaxed);
        }
        poured
    }
}

pub struct FakeSink<'a>(&'a Fake, usize);

impl FakeSink<'_> {
    fn fits(&self, which: &[u8]) -> usize {
        let closed = self.0.closed.lock().unwrap().contains(&self.1);
        if closed { 0 } else { which.len().min(self.0.room.load(Relaxed)) }
    }
}

impl Sink for FakeSink<'_> {
    fn support(&self) -> Support {
        *self.0.support.lock().unwrap()
    }

    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        self.0.panic_at(Panics::Put);
        assert!(!which.is_empty() && which.is_sorted_by(|a, b| a < b), "{which:?}");
        let accepted = self.fits(which);
        self.0.room.fetch_sub(accepted, Relaxed);
        self.0.chosen.lock().unwrap().extend(vec![self.1; accepted]);
        self.0.full.fetch_add(which.len() - accepted, Relaxed);
        for &index in &which[..accepted] {
            let frame = &burst.frames()[index as usize];
            let (head, head_len) = frame.head();
            let mut bytes = head[..head_len].to_vec();
            for piece in burst.rest(index.into()) {
                let at = bytes.len();
                bytes.resize(at + piece.len(), 0);
                piece.read(&mut bytes[at..]);
            }
            assert_eq!(bytes.len(), frame.extent());
            assert_eq!(bytes[..vnet_hdr::SIZE], [0; vnet_hdr::SIZE]);
            self.0.got.lock().unwrap().push(bytes.split_off(vnet_hdr::SIZE));
            self.0.got_offloads.lock().unwrap().push(burst.offload(index.into()));
        }
        accepted
    }

    fn offer(&mut self, burst: &Burst, which: &[u8]) -> usize {
        let fits = self.fits(which);
        if fits == 0 { 0 } else { self.put(burst, &which[..fits]) }
    }

    fn has_room(&mut self, frames: usize) -> bool {
        self.0.room.load(Relaxed) >= frames
    }

    fn fill(&mut self, room: usize, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Poured {
        if self.0.room.load(Relaxed) == 0 {
            return Poured::Full;
        }
        let place = self.0.memory.regions()[0].span(0, BUFFER).unwrap();
        assert!(place.len() >= room);
        let mut frames = 0;
        while let Some(len) = read(&[place]) {
            let mut bytes = vec![0; len];
            place.read(&mut bytes);
            self.0.got.lock().unwrap().push(bytes);
            frames += 1;
        }
        Poured::Frames(frames)
    }
}

impl Port for Fake {
    type Lease = Lease;
    type Source<'a> = FakeSource<'a>;
    type Sink<'a> = FakeSink<'a>;

    fn lease(&self, queue: usize) -> Option<Lease> {
        if queue >= self.queues.load(Relaxed) || self.wanted.load(Relaxed) {
            return None;
        }
        self.panic_at(Panics::Lease);
        assert!(!self.leased.swap(true, Relaxed), "two leases of one queue");
        self.leases.fetch_add(1, Relaxed);
        let panics = *self.panics.lock().unwrap() == Some(Panics::Drop);
        Some(Lease(self.leased.clone(), panics))
    }

    fn is_wanted(&self, _: usize) -> bool {
        self.wanted.load(Relaxed)
    }

    fn source<'a>(&'a self, _: usize, _: &'a mut Lease) -> Option<FakeSource<'a>> {
        Some(FakeSource(self))
    }

    fn queues(&self) -> usize {
        self.queues.load(Relaxed)
    }

    fn sink(&self, hint: usize, frames: usize) -> Option<FakeSink<'_>> {
        self.sinks.fetch_add(1, Relaxed);
        if self.running.load(Relaxed) {
            return Some(FakeSink(self, hint));
        }
        self.missed.fetch_add(frames, Relaxed);
        None
    }

    fn settle(&self, now: Duration) -> Option<Duration> {
        self.panic_at(Panics::Settle);
        self.settled.fetch_add(1, Relaxed);
        let again = (!self.running.load(Relaxed)).then_some(Duration::ZERO);
        let due = self.due.load(Relaxed);
        again.or((now < Duration::from_millis(due)).then(|| Duration::from_millis(due)))
    }

    fn is_timed(&self) -> bool {
        self.timed.load(Relaxed)
    }

    fn is_flooded(&self) -> bool {
        self.flooded
    }

    fn coalesces(&self) -> bool {
        self.coalesces.load(Relaxed)
    }

    fn hairpin(&self) -> bool {
        self.hairpin
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn vlans(&self) -> Option<Vlans> {
        self.vlans
    }

    fn dropped(&self, _: usize, why: Dropped, frames: usize) {
        assert!(self.leased.load(Relaxed) && frames > 0);
        self.dropped.lock().unwrap().push((why, frames));
    }

    fn capture(&self, direction: Direction, burst: &Burst, which: &[u8]) {
        for index in which.iter().map(|&index| usize::from(index)) {
            let mut bytes = vec![0; burst.frames()[index].len()];
            assert_eq!(burst.copy(index, 0, &mut bytes), bytes.len());
            self.captured.lock().unwrap().push((direction, bytes));
        }
    }

    fn crowded(&self, _: usize) {
        self.crowded.fetch_add(1, Relaxed);
    }

    fn claimed(&self, _: usize, address: MacAddr, claim: Claim, _: &Fake, tell: bool) {
        self.claims.lock().unwrap().push((address, claim, tell));
    }

    fn panicked(&self, message: &str) {
        self.fell.lock().unwrap().push(message.to_owned());
        self.panic_at(Panics::Always);
    }
}

/// A switch with its ports by number.
pub struct Net {
    pub switch: Switch<Fake>,
    pub ports: Vec<Arc<Fake>>,
    pub now: u32,
}

impl Net {
    pub fn new(ports: usize) -> Net {
        Net::of(vec![(true, false); ports])
    }

    pub fn of(ports: Vec<(bool, bool)>) -> Net {
        Net::made(ports.into_iter().map(|(flooded, hairpin)| Fake::new(flooded, hairpin)).collect())
    }

    /// Ports that each have their limits.
    pub fn limited(limits: &[Limits]) -> Net {
        Net::made(limits.iter().map(|&limits| Fake::limited(true, false, limits)).collect())
    }

    pub fn made(ports: Vec<Arc<Fake>>) -> Net {
        let mut switch = Switch::new(Fdb::new(4096, AGEING).with_hold(HOLD));
        for (number, port) in ports.iter().enumerate() {
            assert_eq!(switch.add(port.clone()), number as u32);
        }
        Net { switch, ports, now: 0 }
    }

    /// A burst comes from a port; who got what, by port.
    pub fn send(&mut self, from: usize, frames: &[Bytes]) -> Vec<Vec<Bytes>> {
        let before = self.ports[from].done.load(Relaxed);
        self.ports[from].to_send.lock().unwrap().push_back(frames.to_vec());
        assert_eq!(self.carry(from as u32, 0), frames.len());
        assert_eq!(self.ports[from].done.load(Relaxed) - before, frames.len());
        self.ports.iter().map(|port| port.got()).collect()
    }

    /// A burst, if there is one; says how many frames.
    pub fn carry(&mut self, from: u32, queue: usize) -> usize {
        self.switch.carry(from, queue, Duration::from_secs(self.now.into())).frames
    }

    /// The same with one frame: the ports that got it, whole.
    pub fn send_one(&mut self, from: usize, destination: MacAddr, source: MacAddr) -> Vec<usize> {
        let frame = frame(destination, source, 0);
        let got = self.send(from, std::slice::from_ref(&frame));
        assert!(got.iter().flatten().all(|bytes| *bytes == frame));
        let times = |frames: &Vec<Bytes>, port| std::iter::repeat_n(port, frames.len());
        got.iter().enumerate().flat_map(|(port, frames)| times(frames, port)).collect()
    }
}

/// A frame that a number tells from others; some of them are as short as frames get.
pub fn frame(destination: MacAddr, source: MacAddr, number: usize) -> Bytes {
    let mut bytes = [destination.0, source.0].concat();
    bytes.extend((number as u16).to_be_bytes());
    bytes.resize(14 + number * 37 % 1500, number as u8);
    bytes
}

/// The addresses of guests.
pub fn mac(number: usize) -> MacAddr {
    MacAddr::local(number as u32)
}

pub const GROUP: MacAddr = MacAddr([0x01, 0x00, 0x5e, 0, 0, 1]);
