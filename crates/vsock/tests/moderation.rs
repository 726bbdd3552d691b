//! Interrupt moderation: when a guest is notified of the buffers of packets that it has sent.
#![cfg(not(loom))]

mod common;

use common::{
    GUEST, HOST,
    raw::{Guest, PACKED, PORT, SPLIT, Shape, Side},
};
use ringroad_ring::Used;
use ringroad_vsock::{Broken, Host, Key, NoRelay, OpenResult, Queue, Settings, SocketType, Stack, bits};
use ringroad_wire::vsock_hdr::Op;
use std::{
    sync::{Arc, OnceLock, Weak, atomic::Ordering, mpsc},
    thread,
    time::{Duration, Instant},
};

const DELAY: Duration = Duration::from_micros(300);
const SIZE: u32 = 64;

struct Rig {
    guest: Guest,
    start: Instant,
    /// Notifications so far.
    seen: u64,
}

impl Rig {
    fn new(acked: u64) -> Rig {
        let settings = Settings { interrupt_delay: DELAY, ..Settings::default() };
        let mut guest = Guest::bare(Shape { acked, queue_size: SIZE, settings, ..Shape::default() });
        guest.tx.enable_notification();
        Rig { guest, start: Instant::now(), seen: 0 }
    }

    /// Sends packets that have no answer, and lets the device take them at a time.
    fn send(&mut self, packets: usize, payload: &[u8], at: Duration) {
        for _ in 0..packets {
            let mut header = self.guest.header(Op::Reset, PORT, PORT);
            header.len = payload.len() as u32;
            self.guest.send(header, payload);
        }
        while self.guest.host.work_at(self.start + at) {}
    }

    fn tick(&self, at: Duration) {
        self.guest.host.tick(self.start + at);
    }

    /// Returns the number of notifications since the last call. The guest takes its buffers back, as its handler does.
    fn notified(&mut self) -> u64 {
        let now = self.guest.env.notified.load(Ordering::Relaxed);
        let count = now - std::mem::replace(&mut self.seen, now);
        if count > 0 {
            let mut used = [Used::default(); SIZE as usize];
            while self.guest.tx.take_used(&mut used).unwrap() > 0 || self.guest.tx.enable_notification() {}
        }
        count
    }

    fn due(&self) -> Option<Duration> {
        self.guest.host.next_deadline().map(|due| due - self.start)
    }
}

fn rigs() -> impl Iterator<Item = Rig> {
    [SPLIT, PACKED].into_iter().flat_map(|acked| [acked, acked | bits::EVENT_IDX]).map(Rig::new)
}

#[test]
fn few_packets_wait_and_the_deadline_ends_that() {
    for mut rig in rigs() {
        let at = Duration::from_micros;
        rig.send(1, &[], at(0));
        rig.send(2, &[], at(100));
        assert_eq!((rig.notified(), rig.due()), (0, Some(DELAY)), "counted from the first one");
        rig.tick(at(299));
        assert_eq!(rig.notified(), 0);
        rig.tick(at(300));
        assert_eq!((rig.notified(), rig.due()), (1, None));
        rig.tick(at(10_000));
        assert_eq!(rig.notified(), 0, "nothing waits");
        rig.send(1, &[], at(20_000));
        assert_eq!((rig.notified(), rig.due()), (0, Some(at(20_300))));
    }
}

#[test]
fn a_quarter_of_the_ring_and_64_kib_do_not_wait() {
    for mut rig in rigs() {
        rig.send(SIZE as usize / 4 - 1, &[], Duration::ZERO);
        assert_eq!(rig.notified(), 0);
        rig.send(1, &[], Duration::ZERO);
        assert_eq!((rig.notified(), rig.due()), (1, None));
        let half = vec![0; 32 << 10];
        rig.send(1, &half, Duration::ZERO);
        assert_eq!(rig.notified(), 0);
        rig.send(1, &half, Duration::ZERO);
        assert_eq!((rig.notified(), rig.due()), (1, None));
    }
}

#[test]
fn without_a_delay_or_a_time_nothing_waits() {
    for mut rig in rigs() {
        rig.guest.host.set(Settings::default());
        rig.send(1, &[], Duration::ZERO);
        assert_eq!((rig.notified(), rig.due()), (1, None));
        rig.guest.host.set(Settings { interrupt_delay: DELAY, ..Settings::default() });
        rig.send(1, &[], Duration::ZERO);
        assert_eq!(rig.notified(), 0);
        // A worker that keeps no deadlines, or a program that polls: what has waited is notified, too.
        rig.guest.send(rig.guest.header(Op::Reset, PORT, PORT), &[]);
        rig.guest.host.work();
        assert_eq!((rig.notified(), rig.due()), (1, None));
    }
}

#[test]
fn a_queue_that_stops_leaves_nothing_unsaid() {
    for mut rig in rigs() {
        rig.send(1, &[], Duration::ZERO);
        assert_eq!(rig.notified(), 0);
        assert!(rig.guest.host.set_inlet(None).is_some());
        assert_eq!((rig.notified(), rig.due()), (1, None));
    }
}

/// Checks at each notification that another thread can use the ring: a write to a descriptor of a hostile frontend may block.
#[derive(Clone, Default)]
struct Probe {
    stack: Arc<OnceLock<Weak<Stack<Side>>>>,
    /// Whether it could, for each notification so far.
    free: Arc<parking_lot::Mutex<Vec<bool>>>,
}

impl Host<NoRelay> for Probe {
    fn notify(&self, _: Queue) {
        let stack = self.stack.get().and_then(Weak::upgrade).unwrap();
        let (sender, used) = mpsc::channel();
        thread::spawn(move || {
            stack.disable_notification();
            let _ = sender.send(());
        });
        self.free.lock().push(used.recv_timeout(Duration::from_secs(1)).is_ok());
    }

    fn wake(&self) {}

    fn broken(&self, _: Queue, _: Broken) {}

    fn open(&self, _: Key, _: SocketType) -> OpenResult<NoRelay> {
        OpenResult::Refused
    }

    fn room(&self, _: Key) {}
}

#[test]
fn the_ring_is_free_while_a_guest_is_notified() {
    let settings = Settings { interrupt_delay: DELAY, ..Settings::default() };
    let mut guest = Guest::bare(Shape { queue_size: SIZE, settings, ..Shape::default() });
    let (probe, start) = (Probe::default(), Instant::now());
    // The same rings, with another host.
    let stack = Arc::new(Stack::<Side>::new(HOST, Some(GUEST), settings, Box::new(probe.clone())));
    probe.stack.set(Arc::downgrade(&stack)).unwrap();
    stack.set_inlet(guest.host.set_inlet(None));
    let mut send = |packets: usize| {
        (0..packets).for_each(|_| guest.send(guest.header(Op::Reset, PORT, PORT), &[]));
        while stack.work_at(start) {}
    };
    send(SIZE as usize / 4);
    assert_eq!(*probe.free.lock(), [true], "a burst");
    send(1);
    stack.tick(start + DELAY);
    assert_eq!(*probe.free.lock(), [true; 2], "the deadline");
    send(1);
    let queue = stack.set_inlet(None);
    assert_eq!(*probe.free.lock(), [true; 3], "the end of the queue");
    assert!(queue.is_some());
}
