//! What a port can do instead of forwarding, for measuring: reflect, drop, generate. The key `mode` of a port in the
//! configuration.

use ringroad_frame::{
    ALL, BURST, Burst, Counters, HEADROOM, Poured, Sink, Software, Source,
    offload::{Offload, Support},
};
use ringroad_host::{PortKind, PortSettings, e1000::Exits};
use ringroad_mem::{Region, Table};
use ringroad_wire::ethernet::MacAddr;
use std::{
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

/// What happens to the frames that come from a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// They are forwarded.
    #[default]
    Switch,
    /// They go back out of the same port with their addresses swapped.
    Reflect,
    /// They are dropped.
    Drop,
    /// They are dropped, and the port gets as many generated frames as it takes.
    Generate,
}

/// Each mode at its own number.
const MODES: [Mode; 4] = [Mode::Switch, Mode::Reflect, Mode::Drop, Mode::Generate];

/// A port of another kind with a [`Mode`].
#[derive(Debug)]
pub struct Measured<K> {
    kind: K,
    mode: AtomicU8,
    /// What a generating port gets.
    generated: Option<Burst>,
    /// Finishes reflected frames for a guest that does not take what it sends.
    software: Mutex<Option<Software>>,
}

impl<K: PortKind> Measured<K> {
    /// Returns a port in this mode.
    pub fn new(kind: K, mode: Mode) -> Measured<K> {
        Measured { kind, mode: AtomicU8::new(mode as u8), generated: generated(), software: Mutex::default() }
    }

    /// Returns the other kind.
    pub fn kind(&self) -> &K {
        &self.kind
    }

    /// Changes the mode, from the next burst on.
    pub fn set_mode(&self, mode: Mode) {
        self.mode.store(mode as u8, Ordering::Relaxed);
    }

    /// Returns the mode.
    #[inline]
    pub fn mode(&self) -> Mode {
        MODES.get(usize::from(self.mode.load(Ordering::Relaxed))).copied().unwrap_or_default()
    }
}

/// Bytes of a generated frame, without FCS.
const GENERATED: usize = 64;

/// Returns a burst of broadcast frames of the EtherType for experiments (IEEE 802, 0x88b5), else zeros.
fn generated() -> Option<Burst> {
    let memory = Arc::new(Table::default().with(Region::private(4096, 0).ok()?).ok()?);
    let mut frame = [0; HEADROOM + GENERATED];
    let header = [&MacAddr::BROADCAST.0[..], &MacAddr::local(0).0, &[0x88, 0xb5]].concat();
    frame.iter_mut().skip(HEADROOM).zip(header).for_each(|(place, byte)| *place = byte);
    memory.regions().first()?.span(0, frame.len())?.write(&frame);
    let mut burst = Burst::default();
    burst.start_in(&memory);
    ALL.iter().all(|_| burst.push_at(0, frame.len(), Offload::NONE).is_ok()).then_some(burst)
}

/// A queue of a [`Measured`] port for one burst.
pub struct MeasuredSource<'a, K: PortKind> {
    source: K::Source<'a>,
    port: &'a Measured<K>,
    queue: usize,
    mode: Mode,
    /// Kept until the source has published: leaving the queue's lock waits for all stores before, so both wait together.
    sink: Option<K::Sink<'a>>,
}

impl<K: PortKind> std::fmt::Debug for MeasuredSource<'_, K> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("MeasuredSource").field("queue", &self.queue).field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl<K: PortKind> MeasuredSource<'_, K> {
    fn put(&mut self, burst: &Burst) -> usize {
        let count = burst.frames().len();
        self.sink = self.port.kind.sink(self.queue, count);
        let (Some(sink), which) = (self.sink.as_mut(), ALL.get(..count).unwrap_or(&ALL)) else { return 0 };
        if !burst.has_offloads() {
            return sink.put(burst, which);
        }
        let mut software = self.port.software.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Software::put_finished(&mut software, sink, burst, which).0
    }

    /// What happens to a burst that is not forwarded. Returns how much work it was, in frames. The frames count towards the port's
    /// rate, like forwarded ones, but as the shortest: the burst no longer has their lengths.
    #[inline(never)]
    fn consume(&mut self, burst: &mut Burst, taken: usize) -> usize {
        let (frames, mut generated) = (burst.frames().len(), 0);
        match self.mode {
            Mode::Switch => return taken,
            Mode::Drop => {}
            Mode::Reflect => {
                self.put(burst);
            }
            Mode::Generate => {
                if taken > 0 {
                    self.source.done(burst);
                }
                generated = self.port.generated.as_ref().map_or(0, |generated| self.put(generated));
            }
        }
        burst.refuse(frames + generated);
        burst.remove_frames();
        taken + generated
    }
}

impl<K: PortKind> Source for MeasuredSource<'_, K> {
    #[inline]
    fn take(&mut self, burst: &mut Burst) -> usize {
        if self.mode == Mode::Switch {
            return self.source.take(burst);
        }
        burst.reflect(self.mode == Mode::Reflect);
        let taken = self.source.take(burst);
        burst.reflect(false);
        if taken == 0 && self.mode != Mode::Generate { 0 } else { self.consume(burst, taken) }
    }

    #[inline]
    fn done(&mut self, burst: &mut Burst) {
        if self.mode != Mode::Generate {
            self.source.done(burst);
        }
    }

    #[inline]
    fn pours(&self) -> bool {
        self.mode == Mode::Switch && self.source.pours()
    }

    fn pour(&mut self, sink: &mut impl Sink) -> Poured {
        self.source.pour(sink)
    }

    #[inline]
    fn retains(&self) -> bool {
        self.mode == Mode::Switch && self.source.retains()
    }

    fn notices(&self) -> bool {
        self.source.notices()
    }

    fn retain(&mut self, burst: &mut Burst, first: usize) {
        self.source.retain(burst, first);
    }
}

impl<K: PortKind> PortKind for Measured<K> {
    type Lease = K::Lease;
    type Source<'a> = MeasuredSource<'a, K>;
    type Sink<'a> = K::Sink<'a>;

    #[inline]
    fn source<'a>(&'a self, queue: usize, lease: &'a mut K::Lease) -> Option<MeasuredSource<'a, K>> {
        let source = self.kind.source(queue, lease)?;
        Some(MeasuredSource { source, port: self, queue, mode: self.mode(), sink: None })
    }

    #[inline]
    fn is_flooded(&self) -> bool {
        self.mode() == Mode::Switch && self.kind.is_flooded()
    }

    // Everything else is the other kind's.

    fn name(&self) -> &str {
        self.kind.name()
    }
    fn received(&self) -> &[Arc<Counters>] {
        self.kind.received()
    }
    fn sent(&self) -> &[Arc<Counters>] {
        self.kind.sent()
    }
    #[inline]
    fn lease(&self, queue: usize) -> Option<K::Lease> {
        self.kind.lease(queue)
    }
    #[inline]
    fn is_wanted(&self, queue: usize) -> bool {
        self.kind.is_wanted(queue)
    }
    #[inline]
    fn sink(&self, hint: usize, frames: usize) -> Option<K::Sink<'_>> {
        self.kind.sink(hint, frames)
    }
    #[inline]
    fn queues(&self) -> usize {
        self.kind.queues()
    }
    fn steer(&self, burst: &Burst, which: &[u8], queues: &mut [u8; BURST]) -> bool {
        self.kind.steer(burst, which, queues)
    }
    fn takes(&self) -> Support {
        self.kind.takes()
    }
    fn others_take(&self, support: Support) {
        self.kind.others_take(support);
    }
    fn settle(&self, now: Duration) -> Option<Duration> {
        self.kind.settle(now)
    }
    fn is_timed(&self) -> bool {
        self.kind.is_timed()
    }
    #[inline]
    fn weight(&self) -> usize {
        self.kind.weight()
    }
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.kind.descriptors()
    }
    fn room_descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.kind.room_descriptors()
    }
    fn enable_notification(&self, queue: usize) -> bool {
        self.kind.enable_notification(queue)
    }
    fn exits(&self) -> Option<Exits> {
        self.kind.exits()
    }
    fn stop_polling(&self, queue: usize) {
        self.kind.stop_polling(queue);
    }
    fn disable_notification(&self, queue: usize) {
        self.kind.disable_notification(queue);
    }
    fn enable_room(&self) -> bool {
        self.kind.enable_room()
    }
    fn disable_room(&self) {
        self.kind.disable_room();
    }
    fn set(&self, settings: &PortSettings) {
        self.kind.set(settings);
    }
    fn tune(&self, settings: &PortSettings) {
        self.kind.tune(settings);
    }
    fn check_memory(&self) -> bool {
        self.kind.check_memory()
    }
    fn tick(&self, now: u32) {
        self.kind.tick(now);
    }
    fn abandon(&self) {
        self.kind.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringroad_frame::BURST;
    use ringroad_host::Port;
    use ringroad_switch::{Fdb, Limits, Rate, Switch};
    use std::{sync::atomic::AtomicU16, time::Duration};

    /// A port that sends one burst of frames and keeps what it gets.
    struct Fake {
        memory: Arc<Table>,
        sends: Mutex<usize>,
        done: AtomicU8,
        got: Mutex<Vec<Vec<u8>>>,
        others_take: AtomicU16,
    }

    impl Fake {
        fn new(sends: usize) -> Fake {
            let memory = Arc::new(Table::default().with(Region::private(4096, 0).unwrap()).unwrap());
            let header: Vec<u8> = (0..HEADROOM as u8 + 60).collect();
            memory.regions()[0].span(0, header.len()).unwrap().write(&header);
            let (sends, others_take) = (Mutex::new(sends), AtomicU16::new(0));
            Fake { memory, sends, done: AtomicU8::new(0), got: Mutex::default(), others_take }
        }
    }

    impl Source for &Fake {
        fn take(&mut self, burst: &mut Burst) -> usize {
            burst.start_in(&self.memory);
            let count = std::mem::take(&mut *self.sends.lock().unwrap());
            let offload = Offload::partial(34, 16, 60).unwrap();
            (0..count).for_each(|_| _ = burst.push_at(0, HEADROOM + 60, offload).unwrap());
            count
        }
        fn done(&mut self, burst: &mut Burst) {
            self.done.fetch_add(1, Ordering::Relaxed);
            burst.clear();
        }
    }

    impl Sink for &Fake {
        fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
            let head = |&index: &u8| burst.frames()[usize::from(index)].head().0[HEADROOM..HEADROOM + 14].to_vec();
            assert!(which.iter().all(|&index| burst.offload(index.into()).is_none()), "its sink takes no offloads");
            self.got.lock().unwrap().extend(which.iter().map(head));
            which.len()
        }
    }

    impl PortKind for Fake {
        type Lease = ();
        type Source<'a> = &'a Fake;
        type Sink<'a> = &'a Fake;
        fn name(&self) -> &str {
            "fake"
        }
        fn received(&self) -> &[Arc<Counters>] {
            &[]
        }
        fn sent(&self) -> &[Arc<Counters>] {
            &[]
        }
        fn lease(&self, _: usize) -> Option<()> {
            Some(())
        }
        fn source<'a>(&'a self, _: usize, (): &'a mut ()) -> Option<&'a Fake> {
            Some(self)
        }
        fn sink(&self, _: usize, _: usize) -> Option<&Fake> {
            Some(self)
        }
        fn takes(&self) -> Support {
            Support::TCP6
        }
        fn others_take(&self, support: Support) {
            self.others_take.store(support.bits(), Ordering::Relaxed);
        }
    }

    /// Carries one burst of three frames from a port in this mode. Returns the work, what the port got, what another one got,
    /// and how many addresses were learned.
    fn carried(mode: Mode, sends: usize) -> (usize, Vec<Vec<u8>>, usize, usize) {
        let port = |sends, mode| Arc::new(Port::new(Measured::new(Fake::new(sends), mode), PortSettings::default()));
        let (from, other) = (port(sends, mode), port(0, Mode::Switch));
        let mut switch = Switch::new(Fdb::new(64, 300));
        assert_eq!((switch.add(from.clone()), switch.add(other.clone())), (0, 1));
        let work = switch.carry(0, 0, Duration::ZERO);
        let fake = |port: &Arc<Port<Measured<Fake>>>| std::mem::take(&mut *port.kind().kind().got.lock().unwrap());
        assert_eq!(from.kind().kind().done.load(Ordering::Relaxed), u8::from(sends > 0));
        (work.frames, fake(&from), fake(&other).len(), switch.fdb().len(0))
    }

    #[test]
    fn each_mode_does_what_it_says() {
        let head: Vec<u8> = (HEADROOM as u8..).take(14).collect();
        let swapped = [&head[6..12], &head[..6], &head[12..]].concat();
        let generated = [&MacAddr::BROADCAST.0[..], &MacAddr::local(0).0, &[0x88, 0xb5]].concat();
        assert_eq!(carried(Mode::Switch, 3), (3, vec![], 3, 1));
        assert_eq!(carried(Mode::Drop, 3), (3, vec![], 0, 0));
        assert_eq!(carried(Mode::Reflect, 3), (3, vec![swapped; 3], 0, 0));
        assert_eq!(carried(Mode::Generate, 3), (3 + BURST, vec![generated.clone(); BURST], 0, 0));
        assert_eq!(carried(Mode::Generate, 0), (BURST, vec![generated; BURST], 0, 0));
    }

    /// Frames that are not forwarded count towards the port's rate, too.
    #[test]
    fn each_mode_keeps_to_the_rate() {
        let limits = Limits { rate: Rate { frames: 1000, ..Rate::NONE }, ..Limits::default() };
        for (mode, frames) in [(Mode::Drop, 10), (Mode::Reflect, 10), (Mode::Generate, BURST)] {
            let settings = PortSettings { limits, ..PortSettings::default() };
            let port = Arc::new(Port::new(Measured::new(Fake::new(0), mode), settings));
            let mut switch = Switch::new(Fdb::new(64, 300));
            assert_eq!(switch.add(port.clone()), 0);
            let mut sent = 0;
            for millis in 0..1000 {
                if mode != Mode::Generate {
                    *port.kind().kind().sends.lock().unwrap() = frames;
                }
                sent += switch.carry(0, 0, Duration::from_secs(5) + Duration::from_millis(millis)).frames;
            }
            assert!((1000..=1000 + BURST).contains(&sent), "{mode:?}: {sent} frames in a second");
        }
    }

    #[test]
    fn offloads_are_those_of_the_other_kind() {
        let port = Measured::new(Fake::new(0), Mode::Switch);
        assert_eq!(port.takes(), Support::TCP6);
        port.others_take(Support::UDP4);
        assert_eq!(port.kind().others_take.load(Ordering::Relaxed), Support::UDP4.bits());
    }

    /// What is forgotten here has the trait's default, and no port of the program has it.
    #[test]
    fn every_method_is_forwarded() {
        let declared = include_str!("../../host/src/port.rs").split_once("pub trait PortKind").unwrap().1;
        let declared = declared.split_once("\n}\n").unwrap().0;
        let names = |code: &'static str| {
            let lines = code.lines().filter_map(|line| line.strip_prefix("    fn "));
            lines.map(|line| line.split(['(', '<']).next().unwrap()).collect::<Vec<_>>()
        };
        let here = include_str!("ports.rs").split_once("PortKind for Measured<K> {").unwrap().1;
        let here = names(here.split_once("\n}\n").unwrap().0);
        let missing: Vec<_> = names(declared).into_iter().filter(|name| !here.contains(name)).collect();
        assert!(here.len() > 20 && missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn each_mode_is_returned_as_it_was_set() {
        for (index, mode) in MODES.into_iter().enumerate() {
            assert_eq!(mode as usize, index);
        }
    }
}
