//! A worker: the thread that carries frames. It owns a [`Switch`] and asks its [`Schedule`] what to look at; control sends
//! it commands, which it takes up between bursts.

use crate::{
    port::{Kind, Port, PortSettings},
    sys,
};
use ringroad_switch::{Fdb, Gather, Poll, Port as _, Schedule, Switch, panic_message};
use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

/// How a worker is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// The CPU that it runs on; `None`: any.
    pub cpu: Option<usize>,
    /// Addresses that the forwarding table holds.
    pub addresses: usize,
    /// Seconds for which an address is remembered.
    pub ageing: u32,
    /// Seconds for which nothing must have come from an address before it can move to another port.
    pub hold: u32,
    /// For how long it leaves the only queue that it polls alone between bursts that are not full.
    pub gather: Gather,
    /// How many full bursts it carries from a queue before the others have their turn.
    pub turn: usize,
}

/// A queue of a port, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    port: u32,
    queue: u16,
}

impl Key {
    const WAKE: u64 = u64::MAX;

    fn to_data(self) -> u64 {
        u64::from(self.port) << 16 | u64::from(self.queue)
    }

    fn from_data(data: u64) -> Key {
        Key { port: (data >> 16) as u32, queue: data as u16 }
    }
}

enum Command {
    Add(Arc<Port>, mpsc::Sender<u32>),
    Remove(u32, mpsc::Sender<()>),
    Set(u32, PortSettings, mpsc::Sender<()>),
    Configure(WorkerConfig, mpsc::Sender<io::Result<()>>),
    Wake(Key),
    Rest(Key),
    Forget(u32),
    Stop,
}

struct Shared {
    epoll: Epoll,
    wake: EventFd,
    commands: Mutex<Vec<Command>>,
    /// There are commands: what the worker looks at between bursts.
    pending: AtomicBool,
}

impl Shared {
    fn commands(&self) -> MutexGuard<'_, Vec<Command>> {
        self.commands.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn send(&self, command: Command) {
        self.commands().push(command);
        self.pending.store(true, Ordering::Release);
        let _ = self.wake.write(1);
    }
}

/// A running worker.
pub struct Worker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread.
    pub fn start(config: WorkerConfig) -> io::Result<Worker> {
        let shared = Arc::new(Shared {
            epoll: Epoll::new()?,
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            commands: Mutex::default(),
            pending: AtomicBool::new(false),
        });
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, Key::WAKE);
        shared.epoll.ctl(ControlOperation::Add, shared.wake.as_raw_fd(), event)?;
        let (started, result) = mpsc::channel();
        let thread = {
            let shared = shared.clone();
            thread::Builder::new().name("worker".into()).spawn(move || {
                let pinned = config.cpu.map_or(Ok(()), sys::pin_current_thread);
                let go = pinned.is_ok();
                let _ = started.send(pinned);
                if go {
                    Loop::new(&shared, config).run();
                }
            })?
        };
        result.recv().unwrap_or_else(|_| Err(io::Error::other("the worker has ended")))?;
        Ok(Worker { shared, thread: Some(thread) })
    }

    /// Has it work like this from its next round on. The forwarding table keeps what it knows, as far as there is room.
    ///
    /// # Errors
    /// The CPU is not there or not allowed; all the rest is as it should be.
    pub fn set(&self, config: WorkerConfig) -> io::Result<()> {
        let (sender, done) = mpsc::channel();
        self.shared.send(Command::Configure(config, sender));
        done.recv().unwrap_or_else(|_| Err(io::Error::other("the worker has ended")))
    }

    /// Adds a port; a TAP interface is watched from now on, a guest's queues when they are started.
    pub fn add(&self, port: Arc<Port>) -> io::Result<PortHandle> {
        let (sender, number) = mpsc::channel();
        self.shared.send(Command::Add(port.clone(), sender));
        let number = number.recv().map_err(|_| io::Error::other("the worker has ended"))?;
        let handle = PortHandle { shared: self.shared.clone(), port: port.clone(), number };
        if let Kind::Tap(tap) = &port.kind {
            for (queue, file) in tap.files().iter().enumerate() {
                handle.watch(queue as u16, file.as_raw_fd())?;
            }
        }
        Ok(handle)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A port that a worker serves. Dropped, it is removed.
pub struct PortHandle {
    shared: Arc<Shared>,
    port: Arc<Port>,
    number: u32,
}

impl PortHandle {
    /// The port.
    pub fn port(&self) -> &Arc<Port> {
        &self.port
    }

    /// Has the port behave like this, from the next burst on; returns when it does. Its guest does not notice.
    pub fn set(&self, settings: PortSettings) {
        let before = self.port.settings();
        let (sender, done) = mpsc::channel();
        self.shared.send(Command::Set(self.number, settings, sender));
        let _ = done.recv();
        if settings.tuning != before.tuning {
            self.port.tune();
        }
    }

    /// From now on a readable descriptor means that the queue has something.
    pub(crate) fn watch(&self, queue: u16, fd: RawFd) -> io::Result<()> {
        let key = Key { port: self.number, queue };
        // Edge-triggered: each notification is one event, and nobody need read the counter back to zero.
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, key.to_data());
        self.shared.epoll.ctl(ControlOperation::Add, fd, event)
    }

    /// To be called before the descriptor is closed: the peer still has the same file open, so that closing does not end
    /// the watch.
    pub(crate) fn unwatch(&self, fd: &impl AsRawFd) {
        let _ = self.shared.epoll.ctl(ControlOperation::Delete, fd.as_raw_fd(), EpollEvent::default());
    }

    /// The queue has stopped: it is not polled any more.
    pub(crate) fn rest(&self, queue: u16) {
        self.shared.send(Command::Rest(Key { port: self.number, queue }));
    }

    /// Nobody is there any more: what was learned of the port is forgotten, so that a guest that turns up at another one is
    /// found there at once.
    pub(crate) fn forget(&self) {
        self.shared.send(Command::Forget(self.number));
    }

    /// The queue may have something now.
    pub(crate) fn wake(&self, queue: u16) {
        self.shared.send(Command::Wake(Key { port: self.number, queue }));
    }
}

impl Drop for PortHandle {
    fn drop(&mut self) {
        if let Kind::Tap(tap) = &self.port.kind {
            tap.files().iter().for_each(|file| self.unwatch(file));
        }
        let (sender, removed) = mpsc::channel();
        self.shared.send(Command::Remove(self.number, sender));
        let _ = removed.recv();
    }
}

/// Most rounds between looks at the clock and at the events of queues that are not polled.
const ROUNDS: u32 = 64;
/// How long these rounds should take at most: frames of a TAP port cost a system call each, and who has an event waits.
const LOOK: Duration = Duration::from_micros(100);

struct Loop<'a> {
    shared: &'a Shared,
    switch: Switch<Port>,
    schedule: Schedule<Key>,
    /// All queues that may get something. While each of them is polled, events say nothing new.
    known: Vec<Key>,
    ports: Vec<Option<Served>>,
    start: Instant,
    faults: u64,
    config: WorkerConfig,
}

/// A port, and for how long its queues are polled: asked for with each event.
struct Served {
    port: Arc<Port>,
    poll: Poll,
}

impl<'a> Loop<'a> {
    fn new(shared: &'a Shared, config: WorkerConfig) -> Self {
        Loop {
            shared,
            switch: Switch::new(Fdb::new(config.addresses, config.ageing).with_hold(config.hold)),
            schedule: Schedule::new(config.gather, config.turn),
            known: Vec::new(),
            ports: Vec::new(),
            start: Instant::now(),
            faults: ringroad_mem::faults(),
            config,
        }
    }

    fn run(mut self) {
        let mut events = [EpollEvent::default(); 64];
        let (mut rounds, mut limit) = (0, ROUNDS);
        let mut looked = Duration::ZERO;
        let mut settled = true;
        loop {
            if self.shared.pending.load(Ordering::Relaxed) && !self.obey() {
                return;
            }
            let idle = self.schedule.is_empty() && settled;
            if idle || rounds == 0 {
                // Before sleeping: what the last round has run into is not left until the next event.
                if ringroad_mem::faults() != self.faults {
                    self.check_memory();
                }
                let took = self.start.elapsed() - looked;
                limit = if took > LOOK { (limit / 2).max(1) } else { (limit * 2).min(ROUNDS) };
                if idle || self.schedule.len() < self.known.len() {
                    // Not for long while memory has yet to be looked at: control was in, which takes it a moment.
                    let timeout = if idle && ringroad_mem::faults() == self.faults { -1 } else { 0 };
                    self.wait(timeout, &mut events);
                }
                let before = looked.as_secs();
                looked = self.start.elapsed();
                if looked.as_secs() != before {
                    let seconds = looked.as_secs() as u32;
                    for Served { port, .. } in self.ports.iter().flatten() {
                        guarded(port, (), || port.check_deaf(seconds));
                    }
                }
            }
            rounds = (rounds + 1) % limit;
            let Loop { switch, schedule, ports, .. } = &mut self;
            let port = |key: Key| ports.get(key.port as usize).and_then(Option::as_ref);
            let any = schedule.round(
                Instant::now,
                |key| switch.carry(key.port, key.queue.into(), looked),
                |key| {
                    port(key).is_none_or(|served| guarded(&served.port, true, || served.port.sleep(key.queue.into())))
                },
            );
            if !any || rounds == 0 {
                settled = switch.settle();
                std::hint::spin_loop();
            }
        }
    }

    fn wait(&mut self, timeout: i32, events: &mut [EpollEvent]) {
        // Interrupted by a signal: the caller comes back.
        let count = self.shared.epoll.wait(timeout, events).unwrap_or(0);
        for event in events.iter().take(count) {
            if event.data() != Key::WAKE {
                self.wake(Key::from_data(event.data()));
            }
        }
    }

    fn wake(&mut self, key: Key) {
        if let Some(Some(Served { port, poll })) = self.ports.get(key.port as usize)
            && self.known.contains(&key)
            && self.schedule.wake(key, *poll)
        {
            guarded(port, (), || port.awake(key.queue.into()));
        }
    }

    /// Takes up what control wants. `false`: to stop.
    fn obey(&mut self) -> bool {
        self.shared.pending.store(false, Ordering::Relaxed);
        // A queue that has stopped should not keep its guest's memory.
        self.switch.release();
        let commands = std::mem::take(&mut *self.shared.commands());
        for command in commands {
            match command {
                Command::Add(port, reply) => {
                    let number = self.switch.add(port.clone());
                    let index = number as usize;
                    if let Kind::Tap(tap) = &port.kind {
                        let queues = 0..tap.files().len() as u16;
                        self.known.extend(queues.map(|queue| Key { port: number, queue }));
                    }
                    self.ports.resize_with(self.ports.len().max(index + 1), || None);
                    let poll = port.settings().poll;
                    if let Some(place) = self.ports.get_mut(index) {
                        *place = Some(Served { port, poll });
                    }
                    let _ = reply.send(number);
                }
                Command::Remove(number, reply) => {
                    self.switch.remove(number);
                    if let Some(port) = self.ports.get_mut(number as usize) {
                        *port = None;
                    }
                    self.schedule.forget(|key| key.port == number);
                    self.known.retain(|key| key.port != number);
                    let _ = reply.send(());
                }
                Command::Set(number, settings, reply) => {
                    self.set(number, settings);
                    let _ = reply.send(());
                }
                Command::Configure(config, reply) => {
                    let _ = reply.send(self.configure(config));
                }
                Command::Wake(key) => {
                    if !self.known.contains(&key) {
                        self.known.push(key);
                    }
                    self.wake(key);
                }
                Command::Forget(number) => self.switch.forget(number),
                Command::Rest(key) => {
                    self.schedule.forget(|other| other == key);
                    self.known.retain(|&other| other != key);
                }
                Command::Stop => return false,
            }
        }
        true
    }

    fn set(&mut self, number: u32, settings: PortSettings) {
        let Some(Some(served)) = self.ports.get_mut(number as usize) else { return };
        let before = served.port.settings();
        served.port.set(settings);
        served.poll = settings.poll;
        if settings.limits != before.limits {
            self.switch.limit(number, settings.limits);
        }
        if settings.mode != before.mode {
            // Of a port that is no part of the switch nothing is learned: frames for what was there go to all again.
            self.switch.forget(number);
        }
        self.schedule.set_poll(|key: Key| key.port == number, settings.poll);
        // Queues that are asleep: from now on they may have to be polled for ever, or be fed without a frame of their own.
        let queues: Vec<Key> = self.known.iter().copied().filter(|key| key.port == number).collect();
        queues.into_iter().for_each(|key| self.wake(key));
    }

    fn configure(&mut self, config: WorkerConfig) -> io::Result<()> {
        let before = std::mem::replace(&mut self.config, config);
        self.schedule.set(config.gather, config.turn);
        self.switch.set_table(config.addresses, config.ageing, config.hold);
        if config.cpu == before.cpu {
            return Ok(());
        }
        let moved = config.cpu.map_or_else(sys::unpin_current_thread, sys::pin_current_thread);
        if moved.is_err() {
            self.config.cpu = before.cpu;
        }
        moved
    }

    fn check_memory(&mut self) {
        self.switch.release();
        let faults = ringroad_mem::faults();
        let looked = |served: &Served| guarded(&served.port, true, || served.port.check_memory());
        // All of them, also after one that could not be looked at.
        let left = self.ports.iter().flatten().filter(|served| !looked(served)).count();
        if left == 0 {
            self.faults = faults;
        }
    }
}

/// Does something with a port. A panic there is that port's end and nobody else's; the answer is then `otherwise`.
fn guarded<T>(port: &Port, otherwise: T, what: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(what)).unwrap_or_else(|payload| {
        let told = catch_unwind(AssertUnwindSafe(|| port.panicked(panic_message(&*payload))));
        drop(told);
        otherwise
    })
}
