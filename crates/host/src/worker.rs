//! A worker: the thread that forwards frames. It owns a [`Switch`] and asks its [`Schedule`] which queue is next; control sends
//! it commands, which it takes between bursts.

use crate::{
    capture::Capture,
    event_loop::{EventLoop, Events, pin},
    port::{Port, PortKind, PortSettings},
    sandbox, sys,
};
use ringroad_frame::offload::Support;
use ringroad_switch::{Direction, Fdb, Gather, Mirror, Poll, Port as _, Schedule, Switch, Turn, Wait, panic_message};
use std::{
    cell::RefCell,
    io,
    os::fd::AsRawFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
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
    /// Seconds for which an address must have been silent before it can move to another port.
    pub hold: u32,
    /// How long it leaves the only queue that it polls alone between bursts that are not full.
    pub gather: Gather,
    /// How many full bursts a queue may send before the others have their turn.
    pub turn: usize,
}

impl Default for WorkerConfig {
    /// Any CPU, 4096 addresses for five minutes, turns of four bursts.
    fn default() -> WorkerConfig {
        WorkerConfig { cpu: None, addresses: 4096, ageing: 300, hold: 2, gather: Gather::default(), turn: 4 }
    }
}

/// A queue of a port, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    port: u32,
    queue: u16,
}

impl Key {
    /// In place of a queue's number: the port may have room for frames again.
    const ROOM: u16 = 1 << 15;

    fn to_token(self) -> u64 {
        u64::from(self.port) << 16 | u64::from(self.queue)
    }

    fn from_token(token: u64) -> Key {
        Key { port: (token >> 16) as u32, queue: token as u16 }
    }
}

/// A change of a port's kind, made between two bursts.
type Change<K> = Box<dyn FnOnce(&K) + Send>;

enum Command<K> {
    Add(Arc<Port<K>>, mpsc::Sender<u32>),
    Remove(u32, mpsc::Sender<()>),
    Mirror(u32, Mirror, mpsc::Sender<()>),
    Set(Vec<(u32, PortSettings)>, mpsc::Sender<()>),
    Change(u32, Change<K>, mpsc::Sender<()>),
    Configure(WorkerConfig, mpsc::Sender<io::Result<()>>),
    Start(Key),
    Stop(Key),
    Room,
    Forget(u32),
    Settle(u32),
    Offloads,
    End,
}

/// A running worker.
pub struct Worker<K: PortKind> {
    events: Arc<EventLoop<Command<K>>>,
    thread: Option<JoinHandle<()>>,
}

impl<K: PortKind> std::fmt::Debug for Worker<K> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Worker").finish_non_exhaustive()
    }
}

impl<K: PortKind> Worker<K> {
    /// Starts the thread.
    ///
    /// # Errors
    /// The CPU does not exist or is not allowed, or the system has no more threads or descriptors.
    pub fn start(config: WorkerConfig) -> io::Result<Worker<K>> {
        let events = Arc::new(EventLoop::new()?);
        let running = events.clone();
        let prepare = move || sandbox::narrow().and_then(|()| config.cpu.map_or(Ok(()), |cpu| pin(Some(cpu))));
        let thread = events.spawn("worker", prepare, move || Loop::new(&running, config).run())?;
        Ok(Worker { events, thread: Some(thread) })
    }

    /// Changes the configuration. The forwarding table keeps the addresses that it has room for.
    ///
    /// # Errors
    /// The CPU does not exist or is not allowed; everything else is in effect.
    pub fn set(&self, config: WorkerConfig) -> io::Result<()> {
        self.events.ask(|reply| Command::Configure(config, reply))?
    }

    /// Changes the settings of several of its ports between two bursts: no frame finds some of them changed and others not.
    pub fn set_ports(&self, changes: &[(&PortHandle<K>, PortSettings)]) {
        set_ports(&self.events, changes);
    }

    /// Adds a port to the worker's switch.
    ///
    /// # Errors
    /// Its descriptors cannot be watched.
    pub fn add(&self, port: Port<K>) -> io::Result<PortHandle<K>> {
        let port = Arc::new(port);
        let number = self.events.ask(|reply| Command::Add(port.clone(), reply))?;
        let handle = PortHandle { events: self.events.clone(), port, number };
        for (queue, fd) in (0..).zip(handle.port.kind().descriptors()) {
            handle.watch(queue, &fd)?;
            handle.start(queue);
        }
        for (queue, fd) in (0..).zip(handle.port.kind().room_descriptors()) {
            handle.watch_room(queue, &fd)?;
        }
        Ok(handle)
    }
}

/// Changes the settings of ports in one command. Queues are tuned afterwards, as that waits for them.
fn set_ports<K: PortKind>(events: &EventLoop<Command<K>>, changes: &[(&PortHandle<K>, PortSettings)]) {
    let before: Vec<_> = changes.iter().map(|(handle, _)| handle.port.settings()).collect();
    let numbered = changes.iter().map(|(handle, settings)| (handle.number, *settings)).collect();
    let _ = events.ask(|reply| Command::Set(numbered, reply));
    for (&(handle, settings), before) in changes.iter().zip(before) {
        if (settings.tuning, settings.interrupt_delay) != (before.tuning, before.interrupt_delay) {
            handle.port.kind().tune(&settings);
            handle.settle();
        }
    }
}

impl<K: PortKind> Drop for Worker<K> {
    fn drop(&mut self) {
        self.events.send(Command::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A port that a worker serves. Dropped, it is removed from the switch.
pub struct PortHandle<K: PortKind> {
    events: Arc<EventLoop<Command<K>>>,
    port: Arc<Port<K>>,
    number: u32,
}

impl<K: PortKind> std::fmt::Debug for PortHandle<K> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("PortHandle").field("number", &self.number).finish_non_exhaustive()
    }
}

impl<K: PortKind> PortHandle<K> {
    /// Returns the port.
    pub fn port(&self) -> &Arc<Port<K>> {
        &self.port
    }

    /// Changes the port's settings, from the next burst on. Its guest does not notice. See [`Worker::set_ports`] for several ports.
    pub fn set(&self, settings: PortSettings) {
        set_ports(&self.events, &[(self, settings)]);
    }

    /// Copies the frames of the port in these directions to another port of the same worker, which has no other traffic then, and to a
    /// file; `None`: to none. The former ends when the other port is removed.
    pub fn mirror(&self, target: Option<&PortHandle<K>>, capture: Option<Arc<Capture>>, frames: &[Direction]) {
        let (from, to) = (frames.contains(&Direction::From), frames.contains(&Direction::To));
        let mirror = Mirror { port: target.map(|target| target.number), captures: capture.is_some(), from, to };
        self.port.set_capture(capture);
        let _ = self.events.ask(|reply| Command::Mirror(self.number, mirror, reply));
    }

    /// Changes something in the port's kind between two bursts. Addresses learned from the port are forgotten.
    pub fn change(&self, change: impl FnOnce(&K) + Send + 'static) {
        let _ = self.events.ask(|reply| Command::Change(self.number, Box::new(change), reply));
    }

    /// Watches a descriptor: when it becomes readable, the queue has frames.
    ///
    /// # Errors
    /// It cannot be watched.
    pub fn watch(&self, queue: u16, fd: &impl AsRawFd) -> io::Result<()> {
        self.events.watch(fd, Key { port: self.number, queue }.to_token())
    }

    /// Watches a descriptor: when it becomes readable, the port may have room for frames; see
    /// [`PortKind::enable_room`].
    ///
    /// # Errors
    /// It cannot be watched.
    pub fn watch_room(&self, queue: u16, fd: &impl AsRawFd) -> io::Result<()> {
        self.watch(queue | Key::ROOM, fd)
    }

    /// Queues that frames go to have started or stopped: senders that wait for room try again.
    pub fn room(&self) {
        self.events.send(Command::Room);
    }

    /// To be called before the descriptor is closed: the peer has the same file open, so closing does not end the watch.
    pub fn unwatch(&self, fd: &impl AsRawFd) {
        self.events.unwatch(fd);
    }

    /// The queue has started and may have frames.
    pub fn start(&self, queue: u16) {
        self.events.send(Command::Start(Key { port: self.number, queue }));
    }

    /// The queue has stopped; it is no longer polled.
    pub fn stop(&self, queue: u16) {
        self.events.send(Command::Stop(Key { port: self.number, queue }));
    }

    /// The offloads that the port takes have changed: tells the other ports.
    pub fn offloads_changed(&self) {
        self.events.send(Command::Offloads);
    }

    /// How long interrupts may wait has changed, which may be less than they have waited.
    pub fn settle(&self) {
        self.events.send(Command::Settle(self.number));
    }

    /// Forgets the addresses learned from the port: its guest has disconnected, and may turn up at another port.
    pub fn forget(&self) {
        self.events.send(Command::Forget(self.number));
    }
}

/// What the other threads of a port tell its worker, whatever the kinds of its ports are.
pub(crate) trait Tell: Send + Sync {
    /// See [`PortHandle::settle`].
    fn settle(&self);

    /// See [`PortHandle::forget`].
    fn forget(&self);
}

impl<K: PortKind> Tell for PortHandle<K> {
    fn settle(&self) {
        PortHandle::settle(self);
    }

    fn forget(&self) {
        PortHandle::forget(self);
    }
}

impl<K: PortKind> Drop for PortHandle<K> {
    fn drop(&mut self) {
        let kind = self.port.kind();
        kind.descriptors().iter().chain(&kind.room_descriptors()).for_each(|fd| self.unwatch(fd));
        let _ = self.events.ask(|reply| Command::Remove(self.number, reply));
    }
}

/// Maximum rounds between looks at the clock and at the events of queues that are not polled.
const ROUNDS: u32 = 64;
/// How long these rounds may take: frames of a TAP port cost a system call each, and queues with an event wait.
const LOOK: Duration = Duration::from_micros(50);

struct Loop<'a, K: PortKind> {
    control: &'a EventLoop<Command<K>>,
    switch: Switch<Port<K>>,
    schedule: Schedule<Key>,
    /// All queues that run. While each of them is polled, events carry no information.
    known: Vec<Key>,
    /// Queues whose frames wait for room at another port.
    blocked: Blocked,
    ports: Vec<Option<Served<K>>>,
    start: Instant,
    faults: u64,
    /// Whether it pays to hand lines over to a driver on this CPU.
    hands_over: bool,
    config: WorkerConfig,
}

/// Queues whose frames wait for room at another port, each with what it waits for. There are few.
#[derive(Default)]
struct Blocked(Vec<(Key, Wait)>);

impl Blocked {
    #[inline]
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn get(&self, key: Key) -> Option<Wait> {
        self.0.iter().find(|(other, _)| *other == key).map(|&(_, wait)| wait)
    }

    /// Sets what a queue waits for.
    #[cold]
    fn set(&mut self, key: Key, wait: Option<Wait>) {
        self.0.retain(|&(other, _)| other != key);
        self.0.extend(wait.map(|wait| (key, wait)));
    }

    /// Removes one of these queues and returns it.
    fn take(&mut self, which: impl Fn(Key, Wait) -> bool) -> Option<Key> {
        let at = self.0.iter().position(|&(key, wait)| which(key, wait))?;
        Some(self.0.swap_remove(at).0)
    }

    /// Returns when the first one is to be tried again, as time since the worker started.
    fn until(&self) -> Option<Duration> {
        self.0.iter().map(|(_, wait)| wait.until).min()
    }
}

/// A port, and for how long its queues are polled, which is needed with each event.
struct Served<K> {
    port: Arc<Port<K>>,
    poll: Poll,
}

impl<'a, K: PortKind> Loop<'a, K> {
    fn new(control: &'a EventLoop<Command<K>>, config: WorkerConfig) -> Self {
        Loop {
            control,
            switch: Switch::new(Fdb::new(config.addresses, config.ageing).with_hold(config.hold)),
            schedule: Schedule::new(config.gather, config.turn),
            known: Vec::new(),
            blocked: Blocked::default(),
            ports: Vec::new(),
            start: Instant::now(),
            faults: ringroad_mem::faults(),
            hands_over: ringroad_mem::reads_take_lines(),
            config,
        }
    }

    fn run(mut self) {
        let mut events = Events::default();
        let (mut rounds, mut limit, mut worked) = (0, ROUNDS, false);
        let mut looked = Duration::ZERO;
        // When notifications that wait are due.
        let mut again = None;
        loop {
            if self.control.is_pending() {
                if !self.obey() {
                    return;
                }
                again = Some(Duration::ZERO);
            }
            let idle = self.schedule.is_empty() && again.is_none_or(|due| due > looked);
            if idle || rounds == 0 {
                // Before sleeping: a fault of the last round is not left until the next event.
                if ringroad_mem::faults() != self.faults {
                    self.check_memory();
                }
                let took = self.start.elapsed() - looked;
                limit = if took > LOOK { (limit / 2).max(1) } else { (limit * 2).min(ROUNDS) };
                if idle || self.schedule.len() < self.known.len() {
                    // Not while memory has yet to be checked: control held a queue, which takes a moment.
                    let sleeps = idle && ringroad_mem::faults() == self.faults;
                    let until = self.blocked.until().into_iter().chain(again).min();
                    let until = || until.map(|until| until.saturating_sub(self.start.elapsed()));
                    self.control.wait(if sleeps { until() } else { Some(Duration::ZERO) }, &mut events);
                    events.tokens().for_each(|token| self.notified(Key::from_token(token)));
                }
                // Polling should not keep others from this CPU.
                if !idle && !std::mem::take(&mut worked) && self.schedule.shares() {
                    self.give_way();
                }
                let before = looked.as_secs();
                looked = self.start.elapsed();
                if !self.blocked.is_empty() {
                    self.unblock(|_, wait| wait.until <= looked);
                }
                if looked.as_secs() != before {
                    let seconds = looked.as_secs() as u32;
                    for Served { port, .. } in self.ports.iter().flatten() {
                        guarded(port, (), || port.kind().tick(seconds));
                    }
                }
            }
            let any = self.round(looked);
            rounds = if self.schedule.is_long() { 0 } else { (rounds + 1) % limit };
            worked |= any;
            if !any || rounds == 0 {
                let now = if self.switch.is_timed() { self.start.elapsed() } else { looked };
                again = self.switch.settle(now);
                // Whoever was just woken may be waiting for this CPU. A thread that is about to sleep need not yield.
                if sys::take_woken() && !self.schedule.is_empty() && self.schedule.shares() {
                    self.give_way();
                }
                std::hint::spin_loop();
            }
        }
    }

    /// Lets others have this CPU who may need it.
    fn give_way(&mut self) {
        let before = Instant::now();
        thread::yield_now();
        let now = Instant::now();
        self.schedule.yielded(now, now.saturating_duration_since(before));
    }

    /// Gives polled queues their turn; returns whether any work was done.
    #[inline(always)]
    fn round(&mut self, now: Duration) -> bool {
        let Loop { switch, schedule, ports, blocked, start, hands_over, .. } = self;
        let port = |number: u32| ports.get(number as usize).and_then(Option::as_ref);
        let blocked = RefCell::new(blocked);
        switch.set_spare(*hands_over && schedule.has_spare());
        schedule.round(
            Instant::now,
            |key| {
                let work = switch.carry(key.port, key.queue.into(), now);
                switch.settle_timed(|| start.elapsed());
                let waiting = switch.take_waiting();
                if waiting.is_some() || !blocked.borrow().is_empty() {
                    blocked.borrow_mut().set(key, waiting);
                }
                work
            },
            |key| {
                let waiting = blocked.borrow().get(key);
                if let Some(Wait { port: full, .. }) = waiting {
                    // What the queue waits for is room, or time.
                    let sleeps = full.is_none_or(|full| {
                        port(full).is_some_and(|Served { port, .. }| guarded(port, false, || port.kind().enable_room()))
                    });
                    if sleeps && let Some(Served { port, .. }) = port(key.port) {
                        guarded(port, (), || port.kind().stop_polling(key.queue.into()));
                    }
                    return sleeps;
                }
                port(key.port).is_none_or(|Served { port, .. }| {
                    guarded(port, true, || port.kind().enable_notification(key.queue.into()))
                })
            },
        )
    }

    /// A queue's descriptor has become readable.
    fn notified(&mut self, key: Key) {
        if let Some(Some(Served { port, .. })) = self.ports.get(key.port as usize) {
            let room = key.queue & Key::ROOM != 0;
            let counters = if room { port.kind().sent() } else { port.kind().received() };
            if let Some(counters) = counters.get(usize::from(key.queue & !Key::ROOM)) {
                counters.kicks.add(1);
            }
        }
        self.wake(key, Turn::Next);
    }

    fn wake(&mut self, key: Key, turn: Turn) {
        if key.queue & Key::ROOM != 0 {
            return self.room(key.port);
        }
        if let Some(Some(Served { port, poll })) = self.ports.get(key.port as usize)
            && self.known.contains(&key)
            && self.schedule.wake(key, *poll, turn, Instant::now)
        {
            guarded(port, (), || port.kind().disable_notification(key.queue.into()));
        }
    }

    /// A port may have room: queues whose frames wait for that are polled again.
    fn room(&mut self, number: u32) {
        if self.blocked.is_empty() {
            return;
        }
        if let Some(Some(Served { port, .. })) = self.ports.get(number as usize) {
            guarded(port, (), || port.kind().disable_room());
        }
        self.unblock(|_, wait| wait.port == Some(number));
    }

    /// Polls queues again whose frames wait.
    fn unblock(&mut self, which: impl Fn(Key, Wait) -> bool) {
        while let Some(key) = self.blocked.take(&which) {
            self.wake(key, Turn::Last);
        }
    }

    /// Executes control's commands. Returns `false` to stop.
    fn obey(&mut self) -> bool {
        // A queue that has stopped should not keep its guest's memory.
        self.switch.release();
        // Ports, limits and queues change: what waits for one of them tries again.
        self.unblock(|_, _| true);
        for command in self.control.take() {
            match command {
                Command::Add(port, reply) => {
                    let number = self.switch.add(port.clone());
                    let index = number as usize;
                    self.ports.resize_with(self.ports.len().max(index + 1), || None);
                    let poll = port.settings().poll;
                    if let Some(place) = self.ports.get_mut(index) {
                        *place = Some(Served { port, poll });
                    }
                    self.tell_offloads();
                    let _ = reply.send(number);
                }
                Command::Remove(number, reply) => {
                    self.remove(number);
                    let _ = reply.send(());
                }
                Command::Set(changes, reply) => {
                    changes.into_iter().for_each(|(number, settings)| self.set(number, settings));
                    let _ = reply.send(());
                }
                Command::Mirror(number, mirror, reply) => {
                    self.switch.set_mirror(number, mirror);
                    let _ = reply.send(());
                }
                Command::Change(number, change, reply) => {
                    if let Some(Some(Served { port, .. })) = self.ports.get(number as usize) {
                        change(port.kind());
                    }
                    self.switch.forget(number);
                    self.wake_all(number);
                    let _ = reply.send(());
                }
                Command::Configure(config, reply) => {
                    let _ = reply.send(self.configure(config));
                }
                Command::Start(key) => {
                    if !self.known.contains(&key) {
                        self.known.push(key);
                    }
                    self.wake(key, Turn::Last);
                }
                // Done above.
                Command::Room => {}
                Command::Offloads => self.tell_offloads(),
                Command::Forget(number) => self.switch.forget(number),
                Command::Settle(number) => self.switch.reopen(number),
                Command::Stop(key) => {
                    self.schedule.forget(|other| other == key);
                    self.known.retain(|&other| other != key);
                }
                Command::End => return false,
            }
        }
        true
    }

    fn remove(&mut self, number: u32) {
        self.switch.remove(number);
        if let Some(port) = self.ports.get_mut(number as usize) {
            *port = None;
        }
        self.schedule.forget(|key| key.port == number);
        self.known.retain(|key| key.port != number);
        self.tell_offloads();
    }

    /// Tells each port which offloads at least one other port takes.
    fn tell_offloads(&self) {
        for (number, Served { port, .. }) in
            self.ports.iter().enumerate().filter_map(|(n, port)| Some((n, port.as_ref()?)))
        {
            let others = self.ports.iter().enumerate().filter(|&(other, _)| other != number);
            let takes = others.filter_map(|(_, other)| Some(other.as_ref()?.port.kind().takes()));
            let takes = takes.fold(Support::empty(), Support::union);
            guarded(port, (), || port.kind().others_take(takes));
        }
    }

    fn set(&mut self, number: u32, settings: PortSettings) {
        let Some(Some(served)) = self.ports.get_mut(number as usize) else { return };
        let before = served.port.settings();
        served.port.set(settings);
        served.poll = settings.poll;
        if settings.limits != before.limits {
            self.switch.limit(number, settings.limits);
        }
        if settings.vlans != before.vlans {
            self.switch.set_vlans(number, settings.vlans);
        }
        self.schedule.set_poll(|key: Key| key.port == number, settings.poll);
        self.wake_all(number);
    }

    /// Wakes queues that are idle: they may have to be polled from now on.
    fn wake_all(&mut self, number: u32) {
        let queues: Vec<Key> = self.known.iter().copied().filter(|key| key.port == number).collect();
        queues.into_iter().for_each(|key| self.wake(key, Turn::Last));
    }

    fn configure(&mut self, config: WorkerConfig) -> io::Result<()> {
        let before = std::mem::replace(&mut self.config, config);
        self.schedule.set(config.gather, config.turn);
        self.switch.set_table(config.addresses, config.ageing, config.hold);
        if config.cpu == before.cpu {
            return Ok(());
        }
        let moved = pin(config.cpu);
        if moved.is_err() {
            self.config.cpu = before.cpu;
        }
        moved
    }

    fn check_memory(&mut self) {
        self.switch.release();
        let faults = ringroad_mem::faults();
        let looked = |served: &Served<K>| guarded(&served.port, true, || served.port.kind().check_memory());
        // All of them, also after one that could not be checked.
        let left = self.ports.iter().flatten().filter(|served| !looked(served)).count();
        if left == 0 {
            self.faults = faults;
        }
    }
}

/// Calls something of a port. A panic there stops that port only; `otherwise` is returned then.
fn guarded<K: PortKind, T>(port: &Port<K>, otherwise: T, what: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(what)).unwrap_or_else(|payload| {
        let told = catch_unwind(AssertUnwindSafe(|| port.panicked(panic_message(&*payload))));
        drop(told);
        otherwise
    })
}
