//! A switch between ports of memory: who gets which frames, in which order, and how often. Beside it a model.

use proptest::prelude::*;
use ringroad_frame::{Burst, Sink, Source};
use ringroad_mem::{Region, Span, Table};
use ringroad_ring::BURST;
use ringroad_switch::{Claim, Dropped, Fdb, Limits, Port, Switch};
use ringroad_wire::{ethernet::MacAddr, vnet_hdr};
use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

/// Of one frame, in a port's memory.
const BUFFER: usize = 2048;
const AGEING: u32 = 300;
const HOLD: u32 = 2;

type Bytes = Vec<u8>;

/// A port that sends what it is told to and keeps what it gets.
struct Fake {
    memory: Arc<Table>,
    flooded: bool,
    hairpin: bool,
    /// Its frames are poured where they can be; how many bursts were.
    pours: AtomicBool,
    poured: AtomicUsize,
    to_send: Mutex<VecDeque<Vec<Bytes>>>,
    got: Mutex<Vec<Bytes>>,
    /// Whether there is a sink, and what was meant for it while there was none.
    running: AtomicBool,
    missed: AtomicUsize,
    /// Chains that were given back.
    done: AtomicUsize,
    /// How often it was asked for notifications that were left open; it has to be asked again while it is not `running`.
    settled: AtomicUsize,
    /// Whether its queue is leased, how often it has been, and whether somebody else wants it.
    leased: Arc<AtomicBool>,
    leases: AtomicUsize,
    wanted: AtomicBool,
    /// How often its sink was asked for: each a lock.
    sinks: AtomicUsize,
    limits: Limits,
    /// What the switch has dropped of its frames, what others have claimed, and how often there was no room for an address.
    dropped: Mutex<Vec<(Dropped, usize)>>,
    claims: Mutex<Vec<(MacAddr, Claim, bool)>>,
    crowded: AtomicUsize,
    /// Where its code panics, and what was said of it.
    panics: Mutex<Option<Panics>>,
    fell: Mutex<Vec<String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Panics {
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
    fn new(flooded: bool, hairpin: bool) -> Arc<Fake> {
        Self::limited(flooded, hairpin, Limits::default())
    }

    fn limited(flooded: bool, hairpin: bool, limits: Limits) -> Arc<Fake> {
        let region = Region::private(BURST * BUFFER, 0).unwrap();
        Arc::new(Fake {
            memory: Arc::new(Table::default().with(region).unwrap()),
            flooded,
            hairpin,
            pours: AtomicBool::new(false),
            poured: AtomicUsize::new(0),
            to_send: Mutex::default(),
            got: Mutex::default(),
            running: AtomicBool::new(true),
            missed: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            settled: AtomicUsize::new(0),
            leased: Arc::default(),
            leases: AtomicUsize::new(0),
            wanted: AtomicBool::new(false),
            sinks: AtomicUsize::new(0),
            limits,
            dropped: Mutex::default(),
            claims: Mutex::default(),
            crowded: AtomicUsize::new(0),
            panics: Mutex::default(),
            fell: Mutex::default(),
        })
    }

    fn panic_at(&self, place: Panics) {
        let now = *self.panics.lock().unwrap();
        if now == Some(place) || now == Some(Panics::Always) {
            panic!("a bug at {place:?}");
        }
    }

    /// What the switch has dropped of its frames.
    fn lost(&self, why: Dropped) -> usize {
        self.dropped.lock().unwrap().iter().filter(|(other, _)| *other == why).map(|(_, frames)| frames).sum()
    }

    fn got(&self) -> Vec<Bytes> {
        std::mem::take(&mut self.got.lock().unwrap())
    }

    fn stop(&self, stop: bool) {
        self.running.store(!stop, Relaxed);
    }
}

struct Lease(Arc<AtomicBool>, bool);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.store(false, Relaxed);
        if self.1 && !std::thread::panicking() {
            panic!("a bug at Drop");
        }
    }
}

struct FakeSource<'a>(&'a Fake);

impl Source for FakeSource<'_> {
    fn take(&mut self, burst: &mut Burst) -> usize {
        self.0.panic_at(Panics::Take);
        let frames = self.0.to_send.lock().unwrap().pop_front().unwrap_or_default();
        burst.start_in(&self.0.memory);
        for (index, frame) in frames.iter().enumerate() {
            // A header full of promises, which nobody should see.
            let bytes = [&[0xff; vnet_hdr::SIZE][..], frame].concat();
            self.0.memory.regions()[0].span(index * BUFFER, BUFFER).unwrap().write(&bytes);
            assert_eq!(burst.push_at((index * BUFFER) as u64, bytes.len()), Ok(frame.len()));
        }
        frames.len()
    }

    fn done(&mut self, burst: &mut Burst) {
        self.0.panic_at(Panics::Done);
        self.0.done.fetch_add(burst.frames().len(), Relaxed);
        burst.clear();
    }

    fn pours(&self) -> bool {
        self.0.pours.load(Relaxed)
    }

    fn pour(&mut self, sink: &mut impl Sink) -> Option<usize> {
        let mut to_send = self.0.to_send.lock().unwrap();
        let mut frames = to_send.front()?.iter();
        let poured = sink.fill(BUFFER, &mut |spans| {
            let frame = frames.next()?;
            assert_eq!(spans[0].write(frame), frame.len());
            Some(frame.len())
        })?;
        to_send.pop_front();
        self.0.poured.fetch_add(1, Relaxed);
        self.0.done.fetch_add(poured, Relaxed);
        Some(poured)
    }
}

struct FakeSink<'a>(&'a Fake);

impl Sink for FakeSink<'_> {
    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        self.0.panic_at(Panics::Put);
        assert!(!which.is_empty() && which.is_sorted_by(|a, b| a < b), "{which:?}");
        for &index in which {
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
        }
        which.len()
    }

    fn fill(&mut self, room: usize, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Option<usize> {
        let place = self.0.memory.regions()[0].span(0, BUFFER).unwrap();
        assert!(place.len() >= room);
        let mut frames = 0;
        while let Some(len) = read(&[place]) {
            let mut bytes = vec![0; len];
            place.read(&mut bytes);
            self.0.got.lock().unwrap().push(bytes);
            frames += 1;
        }
        Some(frames)
    }
}

impl Port for Fake {
    type Lease = Lease;
    type Source<'a> = FakeSource<'a>;
    type Sink<'a> = FakeSink<'a>;

    fn lease(&self, queue: usize) -> Option<Lease> {
        if queue > 0 || self.wanted.load(Relaxed) {
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

    fn sink(&self, _: usize, frames: usize) -> Option<FakeSink<'_>> {
        self.sinks.fetch_add(1, Relaxed);
        if self.running.load(Relaxed) {
            return Some(FakeSink(self));
        }
        self.missed.fetch_add(frames, Relaxed);
        None
    }

    fn settle(&self) -> bool {
        self.panic_at(Panics::Settle);
        self.settled.fetch_add(1, Relaxed);
        self.running.load(Relaxed)
    }

    fn is_flooded(&self) -> bool {
        self.flooded
    }

    fn hairpin(&self) -> bool {
        self.hairpin
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn dropped(&self, _: usize, why: Dropped, frames: usize) {
        assert!(self.leased.load(Relaxed) && frames > 0);
        self.dropped.lock().unwrap().push((why, frames));
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
struct Net {
    switch: Switch<Fake>,
    ports: Vec<Arc<Fake>>,
    now: u32,
}

impl Net {
    fn new(ports: usize) -> Net {
        Net::of(vec![(true, false); ports])
    }

    fn of(ports: Vec<(bool, bool)>) -> Net {
        Net::made(ports.into_iter().map(|(flooded, hairpin)| Fake::new(flooded, hairpin)).collect())
    }

    /// Ports that each have their limits.
    fn limited(limits: &[Limits]) -> Net {
        Net::made(limits.iter().map(|&limits| Fake::limited(true, false, limits)).collect())
    }

    fn made(ports: Vec<Arc<Fake>>) -> Net {
        let mut switch = Switch::new(Fdb::new(4096, AGEING).with_hold(HOLD));
        for (number, port) in ports.iter().enumerate() {
            assert_eq!(switch.add(port.clone()), number as u32);
        }
        Net { switch, ports, now: 0 }
    }

    /// A burst comes from a port; who got what, by port.
    fn send(&mut self, from: usize, frames: &[Bytes]) -> Vec<Vec<Bytes>> {
        let before = self.ports[from].done.load(Relaxed);
        self.ports[from].to_send.lock().unwrap().push_back(frames.to_vec());
        assert_eq!(self.carry(from as u32, 0), frames.len());
        assert_eq!(self.ports[from].done.load(Relaxed) - before, frames.len());
        self.ports.iter().map(|port| port.got()).collect()
    }

    /// A burst, if there is one; says how many frames.
    fn carry(&mut self, from: u32, queue: usize) -> usize {
        self.switch.carry(from, queue, Duration::from_secs(self.now.into())).frames
    }

    /// The same with one frame: the ports that got it, whole.
    fn send_one(&mut self, from: usize, destination: MacAddr, source: MacAddr) -> Vec<usize> {
        let frame = frame(destination, source, 0);
        let got = self.send(from, std::slice::from_ref(&frame));
        assert!(got.iter().flatten().all(|bytes| *bytes == frame));
        let times = |frames: &Vec<Bytes>, port| std::iter::repeat_n(port, frames.len());
        got.iter().enumerate().flat_map(|(port, frames)| times(frames, port)).collect()
    }
}

/// A frame that a number tells from others; some of them are as short as frames get.
fn frame(destination: MacAddr, source: MacAddr, number: usize) -> Bytes {
    let mut bytes = [destination.0, source.0].concat();
    bytes.extend((number as u16).to_be_bytes());
    bytes.resize(14 + number * 37 % 1500, number as u8);
    bytes
}

/// The addresses of guests.
fn mac(number: usize) -> MacAddr {
    MacAddr::local(number as u32)
}

const GROUP: MacAddr = MacAddr([0x01, 0x00, 0x5e, 0, 0, 1]);

#[test]
fn learns_by_source_and_follows_moves() {
    let mut net = Net::new(4);
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1, 2, 3], "unknown: everywhere but back");
    assert_eq!(net.send_one(1, mac(0), mac(1)), [0]);
    assert_eq!(net.send_one(2, mac(1), mac(2)), [1]);
    assert_eq!(net.switch.fdb().len(0), 3);
    // The first one moves.
    net.now += HOLD;
    assert_eq!(net.send_one(3, mac(2), mac(0)), [2]);
    assert_eq!(*net.ports[3].claims.lock().unwrap(), [(mac(0), Claim::Moved, true)]);
    assert_eq!(net.send_one(1, mac(0), mac(1)), [3]);
    assert_eq!(net.switch.fdb().len(net.now), 3);
}

#[test]
fn moves_within_a_burst() {
    let mut net = Net::new(3);
    net.send_one(1, mac(0), mac(1));
    net.now += HOLD;
    // 1 is at port 1, then, by the second frame, at port 0, where the third one would go back to.
    let frames = [frame(mac(1), mac(0), 1), frame(mac(9), mac(1), 2), frame(mac(1), mac(0), 3)];
    let got = net.send(0, &frames);
    assert_eq!(got, [vec![], frames[..2].to_vec(), frames[1..2].to_vec()]);
}

#[test]
fn an_address_that_nobody_confirms_ages() {
    let mut net = Net::new(3);
    net.send_one(1, mac(0), mac(1));
    net.now = AGEING - 1;
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
    net.now = AGEING;
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1, 2]);
    // As destination it is not confirmed, as source it is.
    assert_eq!(net.send_one(1, mac(9), mac(1)), [0, 2]);
    net.now = 2 * AGEING - 1;
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
}

#[test]
fn broadcast_and_multicast_go_everywhere_but_back() {
    let mut net = Net::new(4);
    for destination in [MacAddr::BROADCAST, GROUP, MacAddr([0x33, 0x33, 0, 0, 0, 1])] {
        assert_eq!(net.send_one(2, destination, mac(2)), [0, 1, 3]);
    }
}

#[test]
fn a_multicast_source_is_never_learned() {
    let mut net = Net::new(3);
    for source in [GROUP, MacAddr::BROADCAST] {
        assert_eq!(net.send_one(1, mac(9), source), [0, 2]);
        assert_eq!(net.send_one(0, source, mac(0)), [1, 2]);
    }
    assert_eq!(net.switch.fdb().len(0), 1);
}

#[test]
fn no_frame_goes_back_unless_the_port_is_a_hairpin() {
    for hairpin in [false, true] {
        let mut net = Net::of(vec![(true, hairpin), (true, false)]);
        net.send_one(0, mac(9), mac(0));
        // Two guests behind one port.
        assert_eq!(net.send_one(0, mac(0), mac(1)), if hairpin { vec![0] } else { vec![] });
        assert_eq!(net.send_one(0, MacAddr::BROADCAST, mac(0)), if hairpin { vec![0, 1] } else { vec![1] });
        assert_eq!(net.send_one(1, MacAddr::BROADCAST, mac(5)), [0]);
    }
}

#[test]
fn frames_with_a_vlan_tag_are_not_touched() {
    let mut net = Net::new(3);
    net.send_one(1, mac(0), mac(1));
    for len in [18, 19, 20, 21, 60, 1522] {
        for tag in [&[0x81, 0x00, 0x6f, 0xff][..], &[0x88, 0xa8, 0x00, 0x02, 0x81, 0x00, 0x00, 0x03]] {
            let mut tagged = [&mac(1).0[..], &mac(0).0, tag].concat();
            tagged.resize(len.max(tagged.len()), 0x5a);
            assert_eq!(net.send(0, std::slice::from_ref(&tagged)), [vec![], vec![tagged], vec![]]);
        }
    }
}

#[test]
fn each_of_many_destinations_gets_its_frame() {
    let mut net = Net::new(BURST + 1);
    for port in 1..=BURST {
        net.send_one(port, MacAddr::BROADCAST, mac(port));
    }
    let frames: Vec<_> = (1..=BURST).rev().map(|port| frame(mac(port), mac(0), port)).collect();
    let got = net.send(0, &frames);
    assert_eq!(got[0], Vec::<Bytes>::new());
    for (port, frame) in (1..=BURST).zip(frames.iter().rev()) {
        assert_eq!(got[port], std::slice::from_ref(frame), "port {port}");
    }
}

#[test]
fn frames_to_one_destination_stay_in_order() {
    let mut net = Net::new(4);
    (1..3).for_each(|port| drop(net.send_one(port, mac(0), mac(port))));
    // To 1, to 2, to nobody known, to 1 again, and so on.
    let frames: Vec<_> = (0..BURST).map(|number| frame(mac([1, 2, 9, 1][number % 4]), mac(0), number)).collect();
    let got = net.send(0, &frames);
    let to = |wanted: usize| frames.iter().filter(|frame| frame[..6] == mac(wanted).0).cloned().collect::<Vec<_>>();
    let only =
        |port: usize, wanted| got[port].iter().filter(|frame| frame[..6] == mac(wanted).0).cloned().collect::<Vec<_>>();
    assert_eq!((only(1, 1), only(2, 2)), (to(1), to(2)));
    for port in 1..4 {
        assert_eq!(only(port, 9), to(9), "port {port}");
    }
    assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [0, BURST / 2 + BURST / 4, BURST / 2, BURST / 4]);
}

#[test]
fn flooded_frames_skip_a_port_that_does_not_take_them() {
    let mut net = Net::of(vec![(true, false), (false, false), (true, false)]);
    assert_eq!(net.send_one(0, MacAddr::BROADCAST, mac(0)), [2]);
    assert_eq!(net.send_one(0, mac(1), mac(0)), [2]);
}

#[test]
fn a_burst_takes_one_lock_and_its_source_is_kept() {
    let mut net = Net::new(3);
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    let locks = |net: &Net| net.ports.iter().map(|port| port.leases.load(Relaxed) + port.sinks.load(Relaxed)).sum();
    let before: usize = locks(&net);
    let frames: Vec<_> = (0..BURST).map(|number| frame(mac(1), mac(0), number)).collect();
    (0..100).for_each(|_| drop(net.send(0, &frames)));
    assert_eq!(locks(&net) - before, 1 + 100, "one for the lease, and one for each burst's destination");
    let (held, leases) = (|net: &Net| net.ports[0].leased.load(Relaxed), net.ports[0].leases.load(Relaxed));
    assert!(held(&net));
    // Whoever wants it gets it at the next look.
    net.ports[0].wanted.store(true, Relaxed);
    assert_eq!(net.carry(0, 0), 0);
    assert!(!held(&net));
    net.ports[0].wanted.store(false, Relaxed);
    // Nor is it kept when there is nothing, when the worker settles, or releases what it has.
    net.send(0, &frames);
    assert!(held(&net));
    assert_eq!(net.carry(0, 0), 0);
    assert!(!held(&net));
    net.send(0, &frames);
    net.switch.settle();
    assert!(!held(&net));
    net.send(0, &frames);
    net.switch.release();
    assert!(!held(&net));
    assert_eq!(net.ports[0].leases.load(Relaxed), leases + 3);
}

#[test]
fn what_a_removed_port_had_is_forgotten() {
    let mut net = Net::new(4);
    (0..3).for_each(|port| drop(net.send_one(port, MacAddr::BROADCAST, mac(port))));
    assert!(Arc::ptr_eq(&net.switch.remove(1).unwrap(), &net.ports[1]));
    assert!(net.switch.remove(1).is_none() && net.switch.remove(99).is_none());
    assert_eq!(net.send_one(0, mac(1), mac(0)), [2, 3]);
    assert_eq!(net.send_one(0, mac(2), mac(0)), [2]);
    assert_eq!(net.carry(1, 0), 0);
    assert_eq!(Arc::strong_count(&net.ports[1]), 1);
    // Its number is free for another one, which gets nothing of its frames.
    net.ports[1] = Fake::new(true, false);
    assert_eq!(net.switch.add(net.ports[1].clone()), 1);
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1, 2, 3]);
    assert_eq!(net.send_one(1, mac(2), mac(7)), [2]);
}

#[test]
fn what_was_learned_of_a_port_can_be_forgotten() {
    let mut net = Net::new(3);
    (0..2).for_each(|port| drop(net.send_one(port, MacAddr::BROADCAST, mac(port))));
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
    net.switch.forget(1);
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1, 2]);
}

#[test]
fn ports_of_a_burst_are_settled_once() {
    let mut net = Net::new(3);
    let settled = |net: &Net| net.ports.iter().map(|port| port.settled.load(Relaxed)).collect::<Vec<_>>();
    assert!(net.switch.settle());
    assert_eq!(settled(&net), [0, 0, 0], "nothing has happened");
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    net.send_one(0, mac(1), mac(0));
    assert!(net.switch.settle() && net.switch.settle());
    assert_eq!(settled(&net), [1, 1, 1]);
    // Where it came from and where it went to; again, until it can be done.
    net.send_one(0, mac(1), mac(0));
    net.ports[1].stop(true);
    assert!(!net.switch.settle() && !net.switch.settle());
    net.ports[1].stop(false);
    assert!(net.switch.settle());
    assert_eq!(settled(&net), [2, 4, 1]);
}

#[test]
fn a_port_that_cannot_take_frames_keeps_nobody_else_from_them() {
    let mut net = Net::new(4);
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    net.ports[1].stop(true);
    let frames = [frame(mac(1), mac(0), 1), frame(mac(9), mac(0), 2), frame(mac(1), mac(0), 3)];
    let flooded = frames[1..2].to_vec();
    assert_eq!(net.send(0, &frames), [vec![], vec![], flooded.clone(), flooded]);
    assert_eq!(net.ports[1].missed.load(Relaxed), 3);
    // Still known, not flooded instead.
    assert_eq!(net.send_one(0, mac(1), mac(0)), [] as [usize; 0]);
    net.ports[1].stop(false);
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
    assert_eq!(net.ports[1].missed.load(Relaxed), 4);
}

#[test]
fn nothing_comes_from_where_there_is_nothing() {
    let mut net = Net::new(2);
    assert_eq!(net.carry(0, 0), 0);
    assert_eq!(net.carry(0, 1), 0, "no such queue");
    assert_eq!(net.carry(2, 0), 0, "no such port");
    assert!(net.ports.iter().all(|port| port.got().is_empty()));
}

#[test]
fn frames_are_poured_only_where_all_go_to_one_port() {
    let plain = (true, false);
    let cases = [
        (vec![plain, plain], true),
        (vec![plain], false),
        (vec![plain, plain, plain], false),
        (vec![plain, (true, true)], false),
        (vec![(true, true), plain], false),
        (vec![plain, (false, false)], false),
        (vec![(false, false), plain], false),
    ];
    for (ports, expected) in cases {
        let mut net = Net::of(ports.clone());
        net.ports[0].pours.store(true, Relaxed);
        net.send(0, &[frame(mac(1), mac(0), 0)]);
        assert_eq!(net.ports[0].poured.load(Relaxed) == 1, expected, "{ports:?}");
    }
    let mut net = Net::new(2);
    net.ports[0].pours.store(true, Relaxed);
    let frames: Vec<_> = (0..BURST).map(|number| frame(mac(number % 3), mac(0), number)).collect();
    assert_eq!(net.send(0, &frames), [vec![], frames.clone()]);
    // A port that is not running: the usual way, which counts them.
    net.ports[1].stop(true);
    assert_eq!(net.send(0, &frames), vec![Vec::<Bytes>::new(); 2]);
    assert_eq!((net.ports[0].poured.load(Relaxed), net.ports[1].missed.load(Relaxed)), (1, BURST));
}

#[test]
fn an_address_that_moves_to_a_port_that_pours_can_be_reached_there() {
    let mut net = Net::new(2);
    net.ports[0].pours.store(true, Relaxed);
    assert_eq!(net.send_one(1, mac(9), mac(7)), [0]);
    assert_eq!(net.send_one(0, mac(1), mac(7)), [1]);
    assert_eq!(net.send_one(1, mac(7), mac(1)), [0]);
    // A third port finds nothing stale.
    net.ports.push(Fake::new(true, false));
    assert_eq!(net.switch.add(net.ports[2].clone()), 2);
    assert_eq!(net.send_one(2, mac(7), mac(2)), [0, 1]);
    assert_eq!(net.send_one(0, mac(2), mac(7)), [2]);
    assert_eq!(net.send_one(1, mac(7), mac(1)), [0]);
    assert_eq!(net.ports[0].poured.load(Relaxed), 1);
}

/// Ports that may do what is usual, and one more.
fn limits(changes: impl Fn(&mut Limits)) -> Limits {
    let mut limits = Limits::default();
    changes(&mut limits);
    limits
}

#[test]
fn an_address_in_use_is_not_taken_by_who_sends_with_it() {
    let mut net = Net::new(4);
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    // Port 2 sends with the address of port 1, again and again, while port 1 is heard now and then.
    for now in 0..100 {
        net.now = now;
        net.send_one(1, mac(9), mac(1));
        assert_eq!(net.send_one(2, MacAddr::BROADCAST, mac(1)), [0, 1, 3]);
        assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
    }
    let claims = std::mem::take(&mut *net.ports[2].claims.lock().unwrap());
    assert_eq!(claims.len(), 100);
    assert!(claims.iter().all(|&(address, claim, _)| (address, claim) == (mac(1), Claim::Held)));
    assert_eq!(claims.iter().filter(|(_, _, tell)| *tell).count(), 5, "a few, and one a minute");
    // It waits until port 1 is silent: that one has it back as soon as it speaks.
    net.now += HOLD;
    net.send_one(2, MacAddr::BROADCAST, mac(1));
    assert_eq!(net.send_one(0, mac(1), mac(0)), [2]);
    net.send_one(1, mac(9), mac(1));
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
}

#[test]
fn a_ports_own_address_is_nobody_elses() {
    let own = limits(|limits| limits.own = Some(mac(1)));
    let mut net = Net::limited(&[Limits::default(), own, Limits::default(), own]);
    assert_eq!(*net.ports[3].claims.lock().unwrap(), [(mac(1), Claim::Owned, true)], "two ports with one address");
    for now in [0, 1000, 100_000] {
        net.now = now;
        assert_eq!(net.send_one(0, mac(1), mac(0)), [1], "known before it has sent anything");
        assert_eq!(net.send_one(2, mac(0), mac(1)), [] as [usize; 0]);
        assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
        net.switch.forget(1);
    }
    assert_eq!(net.ports[2].lost(Dropped::Spoofed), 3);
    // It may have others, which are not its own.
    assert_eq!(net.send_one(1, mac(0), mac(7)), [0]);
    // When the port is gone, so is its claim.
    net.switch.remove(1);
    assert_eq!(net.send_one(2, mac(0), mac(1)), [0]);
}

#[test]
fn a_fixed_port_sends_from_its_own_address_only() {
    let fixed = limits(|limits| (limits.fixed, limits.own) = (true, Some(mac(1))));
    let nameless = limits(|limits| limits.fixed = true);
    let mut net = Net::limited(&[Limits::default(), fixed, nameless]);
    let frames = [mac(1), mac(2), mac(1), GROUP, mac(0)].map(|source| frame(MacAddr::BROADCAST, source, 0));
    let good = vec![frames[0].clone(), frames[2].clone()];
    assert_eq!(net.send(1, &frames), [good.clone(), vec![], good]);
    assert_eq!(net.ports[1].lost(Dropped::Spoofed), 3);
    assert_eq!(net.send_one(2, mac(1), mac(2)), [] as [usize; 0]);
    assert_eq!(net.switch.fdb().len(0), 1);
    // Other limits hold from now on.
    net.switch.limit(1, Limits::default());
    assert_eq!(net.send_one(1, MacAddr::BROADCAST, mac(2)), [0, 2]);
}

#[test]
fn a_port_that_invents_addresses_takes_nobody_elses_room() {
    let mut net = Net::new(4);
    // As many addresses as there are frames, for a while.
    for round in 0..2000 {
        let frames: Vec<_> = (0..BURST).map(|number| frame(mac(9), mac(1000 + round * BURST + number), 0)).collect();
        net.now = round as u32 / 500;
        net.send(3, &frames);
    }
    assert!(net.switch.fdb().len(3) <= 256, "{}", net.switch.fdb().len(3));
    assert!(net.ports[3].crowded.load(Relaxed) >= 2000 * BURST - 256);
    // The others are learned as ever, and nobody sees what is for them.
    for port in 0..3 {
        net.send_one(port, MacAddr::BROADCAST, mac(port));
    }
    for port in 0..3 {
        assert_eq!(net.send_one((port + 1) % 3, mac(port), mac((port + 1) % 3)), [port]);
    }
}

#[test]
fn so_many_frames_to_everybody_and_no_more() {
    let few = limits(|limits| limits.storm = 1000);
    let none = limits(|limits| limits.storm = 0);
    let mut net = Net::limited(&[few, none, Limits::default()]);
    net.send_one(2, MacAddr::BROADCAST, mac(2));
    let second = |net: &mut Net, from: usize, destination| -> usize {
        net.now += 1;
        let frames: Vec<_> = (0..BURST).map(|number| frame(destination, mac(from), number)).collect();
        (0..50).map(|_| net.send(from, &frames)[2].len()).sum()
    };
    for destination in [MacAddr::BROADCAST, GROUP, mac(77)] {
        assert_eq!(second(&mut net, 0, destination), BURST, "the clock stands still within a second: a burst's worth");
        assert_eq!(second(&mut net, 1, destination), 50 * BURST);
    }
    assert_eq!(net.ports[0].lost(Dropped::Storm), 3 * 49 * BURST);
    assert_eq!(net.ports[1].lost(Dropped::Storm), 0);
    // What is addressed to somebody is no storm; nor is what goes to one port only.
    assert_eq!(second(&mut net, 0, mac(2)), 50 * BURST);
    net.switch.remove(1);
    assert_eq!(second(&mut net, 0, MacAddr::BROADCAST), 50 * BURST);
}

#[test]
fn link_local_frames_go_where_both_ends_let_them() {
    let open = limits(|limits| limits.link_local = true);
    let mut net = Net::limited(&[Limits::default(), open, open, Limits::default()]);
    for last in 0..=0x10 {
        let group = MacAddr([0x01, 0x80, 0xc2, 0, 0, last]);
        let (shut, open) = if last < 0x10 { (vec![], vec![2]) } else { (vec![1, 2, 3], vec![0, 2, 3]) };
        assert_eq!(net.send_one(0, group, mac(0)), shut, "{group}");
        assert_eq!(net.send_one(1, group, mac(1)), open, "{group}");
    }
    assert_eq!([0, 1].map(|port| net.ports[port].lost(Dropped::LinkLocal)), [16, 0]);
}

#[test]
fn a_burst_that_goes_to_many_ports_is_heavy() {
    for (ports, heavy) in [(3, false), (4, false), (5, true)] {
        let mut net = Net::new(ports);
        let frames: Vec<_> = (0..BURST).map(|number| frame(MacAddr::BROADCAST, mac(0), number)).collect();
        net.ports[0].to_send.lock().unwrap().push_back(frames);
        let work = net.switch.carry(0, 0, Duration::ZERO);
        assert_eq!((work.frames, work.heavy), (BURST, heavy), "{ports} ports");
    }
}

#[test]
fn a_panic_of_a_port_is_that_ports_end() {
    for place in [Panics::Lease, Panics::Take, Panics::Done, Panics::Put, Panics::Settle, Panics::Drop, Panics::Always]
    {
        let mut net = Net::new(4);
        (0..4).for_each(|port| drop(net.send_one(port, MacAddr::BROADCAST, mac(port))));
        net.switch.settle();
        *net.ports[3].panics.lock().unwrap() = Some(place);
        // It sends and is sent to; the others do not notice.
        let done = net.ports[0].done.load(Relaxed);
        for round in 0..10 {
            net.ports[3].to_send.lock().unwrap().push_back(vec![frame(mac(0), mac(3), round)]);
            net.carry(3, 0);
            net.ports[0].got();
            net.switch.settle();
            assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
            let mut flooded = net.send_one(0, MacAddr::BROADCAST, mac(0));
            flooded.retain(|&port| port < 3);
            assert_eq!(flooded, [1, 2]);
            net.switch.settle();
        }
        assert_eq!(net.ports[0].done.load(Relaxed) - done, 20, "who sent to it has its buffers back");
        let fell = std::mem::take(&mut *net.ports[3].fell.lock().unwrap());
        assert!(fell.len() == 1 && fell[0].starts_with("a bug at "), "{place:?}: {fell:?}");
        assert!(!net.ports[3].leased.load(Relaxed));
        assert!((0..3).all(|port| net.ports[port].fell.lock().unwrap().is_empty()));
        // It takes no part until it begins anew.
        let puts = net.ports[3].sinks.load(Relaxed);
        net.send_one(0, mac(3), mac(0));
        assert_eq!((net.carry(3, 0), net.ports[3].sinks.load(Relaxed)), (0, puts));
        *net.ports[3].panics.lock().unwrap() = None;
        net.ports[3].to_send.lock().unwrap().clear();
        net.switch.forget(3);
        assert_eq!(net.send_one(3, mac(0), mac(3)), [0]);
        assert_eq!(net.send_one(0, mac(3), mac(0)), [3]);
    }
}

/// What is done to a switch. Ports are modulo their number, addresses are small.
#[derive(Clone, Debug)]
enum Op {
    Send { from: usize, frames: Vec<(usize, usize)> },
    Wait(u32),
    Stop { port: usize, stop: bool },
    Replace { port: usize, flooded: bool, hairpin: bool },
}

fn kind() -> impl Strategy<Value = (bool, bool)> {
    (prop::bool::weighted(0.8), prop::bool::weighted(0.3))
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        10 => (0..8usize, prop::collection::vec((0..12usize, 0..12usize), 1..=BURST))
            .prop_map(|(from, frames)| Op::Send { from, frames }),
        2 => prop_oneof![0..10u32, AGEING - 2..AGEING + 2].prop_map(Op::Wait),
        1 => (0..8usize, any::<bool>()).prop_map(|(port, stop)| Op::Stop { port, stop }),
        1 => (0..8usize, kind()).prop_map(|(port, (flooded, hairpin))| Op::Replace { port, flooded, hairpin }),
    ]
}

/// A few guests, and two groups.
fn some_mac(number: usize) -> MacAddr {
    match number {
        10 => GROUP,
        11 => MacAddr::BROADCAST,
        _ => mac(number),
    }
}

/// What each port gets, and whether it was flooded.
type Expected = Vec<Vec<(Bytes, bool)>>;

/// A switch that is plain and slow.
#[derive(Default)]
struct Model {
    /// Where each address is, which port had it first, and when it was heard there.
    seen: HashMap<MacAddr, (usize, usize, u32)>,
}

impl Model {
    fn send(&mut self, ports: &[Arc<Fake>], from: usize, frames: &[(MacAddr, MacAddr, Bytes)], now: u32) -> Expected {
        let mut expected = vec![Vec::new(); ports.len()];
        for (destination, source, bytes) in frames {
            if !source.is_multicast() {
                match self.seen.get_mut(source).filter(|(_, _, seen)| now - *seen < AGEING) {
                    Some((at, home, seen)) => {
                        if *at == from || *home == from || now - *seen >= HOLD {
                            (*at, *seen) = (from, now);
                        }
                    }
                    None => {
                        self.seen.insert(*source, (from, from, now));
                    }
                }
            }
            let known = self.seen.get(destination).filter(|(_, _, seen)| now - seen < AGEING).map(|(port, ..)| *port);
            for (number, port) in ports.iter().enumerate() {
                let wanted = known.map_or(port.flooded, |known| known == number);
                if wanted && (number != from || port.hairpin) {
                    expected[number].push((bytes.clone(), known.is_none()));
                }
            }
        }
        expected
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn does_what_the_model_does(
        kinds in prop::collection::vec(kind(), 1..=8),
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let mut net = Net::of(kinds);
        let mut model = Model::default();
        let mut number = 0;
        for op in ops {
            let count = net.ports.len();
            match op {
                Op::Send { from, frames } => {
                    let from = from % count;
                    let frames: Vec<_> = frames
                        .into_iter()
                        .map(|(destination, source)| {
                            number += 1;
                            let (destination, source) = (some_mac(destination), some_mac(source));
                            (destination, source, frame(destination, source, number))
                        })
                        .collect();
                    let missed: Vec<_> = net.ports.iter().map(|port| port.missed.swap(0, Relaxed)).collect();
                    prop_assert!(missed.iter().all(|&missed| missed == 0), "counted twice");
                    let expected = model.send(&net.ports, from, &frames, net.now);
                    let bytes: Vec<_> = frames.into_iter().map(|(_, _, bytes)| bytes).collect();
                    let got = net.send(from, &bytes);
                    for ((port, got), expected) in net.ports.iter().zip(got).zip(expected) {
                        if !port.running.load(Relaxed) {
                            prop_assert_eq!((got.len(), port.missed.swap(0, Relaxed)), (0, expected.len()));
                            continue;
                        }
                        // In order among those for this port, and among those for all.
                        let part = |flooded: bool| -> Vec<&Bytes> {
                            expected.iter().filter(|(_, all)| *all == flooded).map(|(bytes, _)| bytes).collect()
                        };
                        let (all, own) = (part(true), part(false));
                        let is_flooded = |bytes: &&Bytes| all.contains(bytes);
                        prop_assert_eq!(got.iter().filter(is_flooded).collect::<Vec<_>>(), all.clone());
                        prop_assert_eq!(got.iter().filter(|bytes| !is_flooded(bytes)).collect::<Vec<_>>(), own);
                    }
                }
                Op::Wait(seconds) => net.now += seconds,
                Op::Stop { port, stop } => net.ports[port % count].stop(stop),
                Op::Replace { port, flooded, hairpin } => {
                    let port = port % count;
                    prop_assert!(net.switch.remove(port as u32).is_some());
                    net.ports[port] = Fake::new(flooded, hairpin);
                    prop_assert_eq!(net.switch.add(net.ports[port].clone()), port as u32);
                    model.seen.retain(|_, (at, ..)| *at != port);
                    for (at, home, _) in model.seen.values_mut().filter(|(_, home, _)| *home == port) {
                        *home = *at;
                    }
                }
            }
            let live = model.seen.values().filter(|(_, _, seen)| net.now - seen < AGEING).count();
            prop_assert_eq!(net.switch.fdb().len(net.now), live);
        }
    }
}
