//! Test fixture: both ends of a vsock device in one process, with their rings in shared memory and a worker thread each.
//! Notifications are sent only when asked for, so that a missing one makes a test hang.
#![allow(dead_code, reason = "each test uses some of it")]

pub mod raw;

use parking_lot::{Condvar, Mutex};
use ringroad_mem::{Region, Table};
use ringroad_vsock::{
    Broken, DeviceSide, Driver, DriverConfig, DriverSide, Host, Key, NoRelay, OpenResult, Queue, RxQueue, Settings,
    Side, SocketType, Stack, TxQueue, socket_types,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

pub const GUEST: u64 = 3;
pub const HOST: u64 = 2;

/// What a worker or a leader sleeps on.
#[derive(Default)]
pub struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock() = true;
        self.changed.notify_one();
    }

    fn clear(&self) {
        *self.rung.lock() = false;
    }

    fn wait(&self, timeout: Duration) {
        let mut rung = self.rung.lock();
        if !*rung {
            self.changed.wait_for(&mut rung, timeout);
        }
        *rung = false;
    }
}

/// The `Host` of one end.
#[derive(Clone)]
pub struct TestHost {
    pub own: Arc<Bell>,
    /// What the leader sleeps on; `None`: no leader is allowed.
    pub lead: Option<Arc<Bell>>,
    pub other: Arc<Bell>,
    pub other_lead: Option<Arc<Bell>>,
    pub broken: Arc<Mutex<Vec<(Queue, Broken)>>>,
    pub notified: Arc<AtomicU64>,
}

impl<R> Host<R> for TestHost {
    fn notify(&self, _: Queue) {
        self.notified.fetch_add(1, Ordering::Relaxed);
        self.other.ring();
        if let Some(lead) = &self.other_lead {
            lead.ring();
        }
    }

    fn wake(&self) {
        self.own.ring();
    }

    fn broken(&self, queue: Queue, why: Broken) {
        self.broken.lock().push((queue, why));
    }

    fn open(&self, _: Key, _: SocketType) -> OpenResult<R> {
        OpenResult::Refused
    }

    fn room(&self, _: Key) {}

    fn can_wait(&self) -> bool {
        self.lead.is_some()
    }

    fn clear(&self) {
        self.lead.as_ref().unwrap().clear();
    }

    fn wait(&self, until: Option<Instant>) {
        let patience = until.map_or(Duration::from_secs(60), |until| until.saturating_duration_since(Instant::now()));
        self.lead.as_ref().unwrap().wait(patience);
    }

    fn unwait(&self) {
        self.lead.as_ref().unwrap().ring();
    }
}

/// A stack's worker thread.
pub struct Worker {
    stop: Arc<AtomicBool>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub fn start<S: Side>(stack: &Arc<Stack<S>>, bell: &Arc<Bell>) -> Worker {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (stack, bell, stop) = (stack.clone(), bell.clone(), stop.clone());
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    if stack.work() || stack.enable_notification() {
                        continue;
                    }
                    let now = Instant::now();
                    let sleep = stack.next_deadline().map_or(Duration::from_secs(60), |time| time - now);
                    bell.wait(sleep);
                    stack.tick(Instant::now());
                }
            })
        };
        Worker { stop, bell: bell.clone(), thread: Some(thread) }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.bell.ring();
        let _ = self.thread.take().unwrap().join();
    }
}

pub type HostStack = Stack<DeviceSide<NoRelay>>;
pub type GuestStack = Stack<DriverSide>;

/// Configuration of a pair.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub acked: u64,
    pub queue_size: u32,
    pub receive: usize,
    pub settings: Settings,
    /// Whether a program may be the leader: wait for packets itself, in place of the worker.
    pub leads: bool,
}

impl Default for Setup {
    fn default() -> Self {
        let acked = ringroad_vsock::Features::all().bits();
        Setup { acked, queue_size: 64, receive: 4096, settings: Settings::default(), leads: true }
    }
}

/// Both ends of a device.
pub struct Pair {
    pub host: Arc<HostStack>,
    pub guest: Arc<GuestStack>,
    pub host_env: TestHost,
    pub guest_env: TestHost,
    pub memory: Arc<Table>,
    workers: Vec<Worker>,
}

impl Pair {
    pub fn new(setup: Setup) -> Pair {
        let Setup { acked, queue_size, receive, settings, leads } = setup;
        let Driver { region, file, rx, tx, .. } = Driver::new(DriverConfig { acked, queue_size, receive }).unwrap();
        // The device has its own mapping of the memory.
        let mapped = Region::map(&file, 0, region.len() as u64, region.guest(), region.user()).unwrap();
        let memory = Arc::new(Table::default().with(mapped).unwrap());
        let base = if acked & ringroad_vsock::bits::RING_PACKED != 0 { 0x8000_8000 } else { 0 };
        let receive = RxQueue::start(memory.clone(), acked, queue_size, rx.addresses(), base).unwrap();
        let transmit = TxQueue::start(memory.clone(), acked, queue_size, tx.addresses(), base).unwrap();
        let (ours, theirs) = (Arc::<Bell>::default(), Arc::<Bell>::default());
        let lead = || leads.then(Arc::<Bell>::default);
        let (our_lead, their_lead) = (lead(), lead());
        let env =
            |own: &Arc<Bell>, lead: &Option<Arc<Bell>>, other: &Arc<Bell>, other_lead: &Option<Arc<Bell>>| TestHost {
                own: own.clone(),
                lead: lead.clone(),
                other: other.clone(),
                other_lead: other_lead.clone(),
                broken: Arc::default(),
                notified: Arc::default(),
            };
        let host_env = env(&ours, &our_lead, &theirs, &their_lead);
        let guest_env = env(&theirs, &their_lead, &ours, &our_lead);
        let host = Arc::new(Stack::new(HOST, Some(GUEST), settings, Box::new(host_env.clone())));
        let guest = Arc::new(Stack::new(GUEST, None, settings, Box::new(guest_env.clone())));
        host.set_link(Some(receive));
        host.set_inlet(Some(transmit));
        guest.set_link(Some(tx));
        guest.set_inlet(Some(rx));
        host.set_socket_types(socket_types(acked));
        guest.set_socket_types(socket_types(acked));
        let workers = vec![Worker::start(&host, &ours), Worker::start(&guest, &theirs)];
        Pair { host, guest, host_env, guest_env, memory, workers }
    }

    /// Asserts that no queue was broken and no packet violated the protocol.
    pub fn assert_whole(&self) {
        assert_eq!(*self.host_env.broken.lock(), []);
        assert_eq!(*self.guest_env.broken.lock(), []);
        assert_eq!((self.host.report().wrong, self.guest.report().wrong), (0, 0));
    }
}

/// Fills `target` with bytes that depend on the seed and their offset in the stream.
pub fn pattern(seed: u64, offset: u64, target: &mut [u8]) {
    for (index, byte) in target.iter_mut().enumerate() {
        let at = offset + index as u64;
        *byte = (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 29) as u8;
    }
}
