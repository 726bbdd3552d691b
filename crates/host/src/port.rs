//! A port of the switch: a [`PortKind`] with its settings and what is logged of it. Kinds are in files of their own (`tap.rs`,
//! `vhost_user/port.rs`, or whoever embeds this crate); [`ports!`](crate::ports) makes several kinds one.

use crate::capture::Capture;
use parking_lot::Mutex;
use ringroad_e1000::Exits;
use ringroad_frame::{BURST, Burst, Counters, Sink, Snapshot, Source, offload::Support};
use ringroad_ring::Tuning;
use ringroad_switch::{Claim, Direction, Dropped, Limits, Poll, Vlans};
use ringroad_wire::ethernet::MacAddr;
use std::{
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// What a port is made of: queues that frames come from and queues that they go to. The worker calls it, never two calls for
/// one queue at once; calls must not block.
pub trait PortKind: Send + Sync + 'static {
    /// Exclusive use of a queue that frames come from, which the worker keeps from burst to burst.
    type Lease;
    /// The same for one burst.
    type Source<'a>: Source
    where
        Self: 'a;
    /// A queue that frames go to, for one burst.
    type Sink<'a>: Sink
    where
        Self: 'a;

    /// Returns the port's name, for the log.
    fn name(&self) -> &str;

    /// Returns the counters of each queue that frames come from.
    fn received(&self) -> &[Arc<Counters>];

    /// Returns the counters of each queue that frames go to.
    fn sent(&self) -> &[Arc<Counters>];

    /// Returns a queue that frames come from; `None` if it does not exist or control uses it.
    fn lease(&self, queue: usize) -> Option<Self::Lease>;

    /// Returns whether control waits for a queue: its lease must be dropped.
    #[inline]
    fn is_wanted(&self, _queue: usize) -> bool {
        false
    }

    /// Returns a leased queue for one burst; `None` if it has stopped.
    fn source<'a>(&'a self, queue: usize, lease: &'a mut Self::Lease) -> Option<Self::Source<'a>>;

    /// Returns a queue for `frames` frames, the one that `hint` selects; `None` if they are dropped, which it has counted.
    fn sink(&self, hint: usize, frames: usize) -> Option<Self::Sink<'_>>;

    /// Returns among how many queues the switch distributes flows now. If it is more than one, the `hint` of [`PortKind::sink`] is
    /// the index of one of them.
    #[inline]
    fn queues(&self) -> usize {
        1
    }

    /// Chooses the queues of these frames of a burst, if the port does that itself; returns `false` if not: then a flow goes to the
    /// queue that its frames last came from. `queues`: the queue of each frame of the burst, by index.
    fn steer(&self, _burst: &Burst, _which: &[u8], _queues: &mut [u8; BURST]) -> bool {
        false
    }

    /// Returns whether flooded frames go here: broadcast, multicast, and those to unknown addresses.
    #[inline]
    fn is_flooded(&self) -> bool {
        true
    }

    /// Sends notifications that were left open: for lack of certainty, or because they may wait. Returns when to be called again,
    /// in terms of `now`; zero: at once; `None`: only after another burst.
    fn settle(&self, _now: Duration) -> Option<Duration> {
        None
    }

    /// Returns whether a driver has set the times that `settle` returns: then the worker keeps them exactly, busy or asleep, and calls
    /// `settle` after each burst. Always the same.
    fn is_timed(&self) -> bool {
        false
    }

    /// Returns what a frame costs, in units of a copy between two guests.
    #[inline]
    fn weight(&self) -> usize {
        1
    }

    /// Returns the descriptors that become readable when queues have frames, from queue 0 on. They are watched, edge-triggered,
    /// as long as the port is part of the switch. A kind whose queues start and stop watches them itself, by its
    /// [`PortHandle`](crate::PortHandle).
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Returns descriptors that become readable when the port may have room for frames; see [`PortKind::enable_room`]. They are watched
    /// as [`PortKind::descriptors`] are.
    fn room_descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Asks queues that recently had no room for a frame to notify when they have, through the descriptors given to
    /// [`PortHandle::watch_room`](crate::PortHandle::watch_room) or [`PortKind::room_descriptors`]. Returns `false` if there is room already, or they cannot: the
    /// worker tries again at once.
    fn enable_room(&self) -> bool {
        false
    }

    /// Withdraws that.
    fn disable_room(&self) {}

    /// Turns a queue's notifications on. Returns whether it is empty, so that the worker may wait for one.
    fn enable_notification(&self, _queue: usize) -> bool {
        true
    }

    /// The worker stops polling a queue although it may have frames: they wait for room at another port, or for their time.
    fn stop_polling(&self, _queue: usize) {}

    /// Turns a queue's notifications off: the worker polls it.
    fn disable_notification(&self, _queue: usize) {}

    /// Applies changed settings, between two bursts.
    fn set(&self, _settings: &PortSettings) {}

    /// Applies changed settings to queues that run; called by control, which may wait for them.
    fn tune(&self, _settings: &PortSettings) {}

    /// Stops the port if its memory is lost. Returns `false` if it could not check, to be called again.
    fn check_memory(&self) -> bool {
        true
    }

    /// Returns accesses to the registers of an emulated device and its interrupts, so far: each cost a virtual machine an exit.
    fn exits(&self) -> Option<Exits> {
        None
    }

    /// Called about once a second while there is something to do; `now` in seconds.
    fn tick(&self, _now: u32) {}

    /// Returns the offloads of frames that the port takes now; none while it takes no frames.
    fn takes(&self) -> Support {
        Support::empty()
    }

    /// Tells the port which offloads at least one other port takes: it may send such frames. The switch does the work for those
    /// that do not take them. Called when that changes.
    fn others_take(&self, _support: Support) {}

    /// Stops all queues after a panic in the port's code.
    fn abandon(&self) {}
}

/// The default of [`PortSettings::interrupt_delay`].
pub const INTERRUPT_DELAY: Duration = Duration::from_micros(300);

/// How a port behaves: what can be changed while it runs, without its guest noticing. See [`crate::PortHandle::set`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortSettings {
    /// Whether frames may go back out of it.
    pub hairpin: bool,
    /// Whether TCP segments to it become longer frames, if it takes those (GRO).
    pub gro: bool,
    /// For how long its worker polls it.
    pub poll: Poll,
    /// What is turned off, for measuring; only guests have it.
    pub tuning: Tuning,
    /// What it may do to other ports.
    pub limits: Limits,
    /// The VLANs that it belongs to. As long as any port has VLANs, those without are access ports of VLAN 1.
    pub vlans: Option<Vlans>,
    /// How long a guest's interrupt for sent frames may wait for more of them, and for TCP's acknowledgements as it goes on sending,
    /// unless its driver sets that; zero: not at all.
    pub interrupt_delay: Duration,
}

impl Default for PortSettings {
    /// Event driven, everything on, the limits of a guest.
    fn default() -> PortSettings {
        PortSettings {
            hairpin: false,
            gro: false,
            poll: Poll::For(Duration::ZERO),
            tuning: Tuning::default(),
            limits: Limits::GUEST,
            vlans: None,
            interrupt_delay: INTERRUPT_DELAY,
        }
    }
}

/// A port of the switch.
#[derive(Debug)]
pub struct Port<K> {
    kind: K,
    settings: Mutex<PortSettings>,
    /// Of the settings, what the worker needs in each burst.
    hairpin: AtomicBool,
    gro: AtomicBool,
    capture: Mutex<Option<Arc<Capture>>>,
    /// Which warnings were logged: what a guest can cause all the time is logged once.
    warned: [AtomicBool; 4],
}

/// Indices of warnings that are logged once.
const STORM: usize = 0;
const SPOOFED: usize = 1;
const CROWDED: usize = 2;
const VLAN: usize = 3;

/// The counters of a port: `received` came from it, `sent` went to it.
#[derive(Clone, Debug, Default)]
pub struct PortReport {
    /// Its name in the configuration.
    pub name: String,
    /// Frames from the guest or interface.
    pub received: Snapshot,
    /// Frames to the guest or interface.
    pub sent: Snapshot,
    /// The same, received and sent, of each of its queues, if it has several.
    pub queues: Vec<[Snapshot; 2]>,
    /// Of an emulated device.
    pub exits: Option<Exits>,
}

impl<K: PortKind> Port<K> {
    /// Returns a port with these settings.
    pub fn new(kind: K, settings: PortSettings) -> Port<K> {
        kind.set(&settings);
        let (hairpin, gro) = (AtomicBool::new(settings.hairpin), AtomicBool::new(settings.gro));
        let (capture, warned) = Default::default();
        Port { kind, settings: Mutex::new(settings), hairpin, gro, capture, warned }
    }

    /// Returns what it is made of.
    #[inline]
    pub fn kind(&self) -> &K {
        &self.kind
    }

    /// Returns the current settings.
    pub fn settings(&self) -> PortSettings {
        *self.settings.lock()
    }

    /// Changes the settings, between two bursts. Queues are tuned by control, which waits for them.
    pub(crate) fn set(&self, settings: PortSettings) {
        *self.settings.lock() = settings;
        self.hairpin.store(settings.hairpin, Ordering::Relaxed);
        self.gro.store(settings.gro, Ordering::Relaxed);
        self.kind.set(&settings);
    }

    /// Sets where the port's frames are captured.
    pub(crate) fn set_capture(&self, capture: Option<Arc<Capture>>) {
        // The former one may take a while to end.
        let _former = std::mem::replace(&mut *self.capture.lock(), capture);
    }

    /// Returns the sum of the counters of all queues.
    pub fn report(&self) -> PortReport {
        let sum = |counters: &[Arc<Counters>]| {
            let mut sum = Snapshot::default();
            counters.iter().for_each(|counters| sum += counters.snapshot());
            sum
        };
        let (received, sent) = (self.kind.received(), self.kind.sent());
        let both = received.iter().zip(sent).filter(|_| received.len() > 1);
        let queues = both.map(|(received, sent)| [received.snapshot(), sent.snapshot()]).collect();
        let (name, exits) = (self.kind.name().to_owned(), self.kind.exits());
        PortReport { name, received: sum(received), sent: sum(sent), queues, exits }
    }

    /// Returns whether a warning was not logged before.
    fn first(&self, what: usize) -> bool {
        self.warned.get(what).is_some_and(|warned| !warned.swap(true, Ordering::Relaxed))
    }
}

impl<K: PortKind> ringroad_switch::Port for Port<K> {
    type Lease = K::Lease;
    type Source<'a> = K::Source<'a>;
    type Sink<'a> = K::Sink<'a>;

    #[inline]
    fn lease(&self, queue: usize) -> Option<K::Lease> {
        self.kind.lease(queue)
    }

    #[inline]
    fn is_wanted(&self, queue: usize) -> bool {
        self.kind.is_wanted(queue)
    }

    #[inline]
    fn source<'a>(&'a self, queue: usize, lease: &'a mut K::Lease) -> Option<K::Source<'a>> {
        self.kind.source(queue, lease)
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

    fn settle(&self, now: Duration) -> Option<Duration> {
        self.kind.settle(now)
    }

    fn is_timed(&self) -> bool {
        self.kind.is_timed()
    }

    #[inline]
    fn is_flooded(&self) -> bool {
        self.kind.is_flooded()
    }

    #[inline]
    fn hairpin(&self) -> bool {
        self.hairpin.load(Ordering::Relaxed)
    }

    #[inline]
    fn coalesces(&self) -> bool {
        self.gro.load(Ordering::Relaxed)
    }

    fn limits(&self) -> Limits {
        self.settings().limits
    }

    fn vlans(&self) -> Option<Vlans> {
        self.settings().vlans
    }

    #[inline]
    fn weight(&self) -> usize {
        self.kind.weight()
    }

    fn dropped(&self, queue: usize, why: Dropped, frames: usize) {
        let Some(counters) = self.kind.received().get(queue) else { return };
        let (name, frames) = (self.kind.name(), frames as u64);
        match why {
            Dropped::Storm => {
                counters.storm.add(frames);
                if self.first(STORM) {
                    log::warn!(
                        "port {name}: more broadcast, multicast and unknown-unicast frames than its `limits.storm` allows; the \
                         excess is dropped and counted as `storm`; not logged again"
                    );
                }
            }
            Dropped::Spoofed => {
                counters.spoofed.add(frames);
                if self.first(SPOOFED) {
                    log::warn!(
                        "port {name}: frames with a source address that it may not use are dropped and counted as `spoofed`; not \
                         logged again; with `addresses = \"fixed\"` the guest must use the port's `mac`"
                    );
                }
            }
            Dropped::LinkLocal => counters.link_local.add(frames),
            Dropped::Isolated => counters.isolated.add(frames),
            Dropped::Vlan => {
                counters.vlan.add(frames);
                if self.first(VLAN) {
                    log::warn!(
                        "port {name}: frames of VLANs that the port does not belong to, or with tags that are wrong, are dropped and \
                         counted as `vlan`; not logged again; keys `vlan`, `trunk` and `native` say which VLANs it belongs to, and \
                         without them it is VLAN 1"
                    );
                }
            }
        }
    }

    fn capture(&self, direction: Direction, burst: &Burst, which: &[u8]) {
        // Locked only while it is changed. Not cloned: whoever drops the last one waits for its thread.
        let capture = self.capture.try_lock();
        let capture = capture.as_ref().and_then(|capture| capture.as_ref());
        let missed = capture.map_or(which.len(), |capture| capture.add(direction, burst, which));
        if let Some(counters) = self.kind.received().first() {
            counters.uncaptured.add(missed as u64);
        }
    }

    fn crowded(&self, queue: usize) {
        let Some(counters) = self.kind.received().get(queue) else { return };
        counters.crowded.add(1);
        if self.first(CROWDED) {
            log::warn!(
                "port {}: more source addresses than its `limits.addresses` ({}) allows, or than the table has room for; \
                 further ones are not learned, and frames to them are flooded",
                self.kind.name(),
                self.settings().limits.addresses
            );
        }
    }

    fn claimed(&self, queue: usize, address: MacAddr, claim: Claim, from: &Self, tell: bool) {
        const ADVICE: &str = "give each guest an address of its own (QEMU's default is the same for all: mac=)";
        if let Some(counters) = self.kind.received().get(queue) {
            counters.claimed.add(1);
        }
        if !tell {
            return;
        }
        let (name, other) = (self.kind.name(), from.kind.name());
        match claim {
            Claim::Moved => {
                log::warn!("port {name}: address {address} has moved here from port {other}; if unexpected, {ADVICE}");
            }
            Claim::Held => log::warn!(
                "port {name}: frames from address {address}, which is in use at port {other} and stays there until that port \
                 is silent; {ADVICE}"
            ),
            Claim::Owned => log::warn!(
                "port {name}: it uses address {address}, which is the `mac` of port {other} and stays there; {ADVICE}"
            ),
        }
    }

    #[cold]
    fn panicked(&self, message: &str) {
        log::error!(
            "port {}: stopped by a bug in ringroad: {message}; please report it; a new connection starts the port again",
            self.kind.name()
        );
        if let Some(counters) = self.kind.received().first() {
            counters.panics.add(1);
        }
        self.kind.abandon();
    }
}

/// Makes an enum of several kinds of ports, which is a [`PortKind`] itself. Which kind it is, is decided once per call, so once
/// per burst.
///
/// ```
/// use ringroad_host::{TapPort, vhost_user::VhostPort};
///
/// ringroad_host::ports! {
///     /// Guests and interfaces.
///     pub enum Ports {
///         /// A guest.
///         Vhost(VhostPort),
///         /// An interface of the host.
///         Tap(TapPort),
///     }
/// }
/// let worker = ringroad_host::Worker::<Ports>::start(Default::default()).unwrap();
/// ```
#[macro_export]
macro_rules! ports {
    ($(#[$doc:meta])* $vis:vis enum $name:ident { $($(#[$kind_doc:meta])* $variant:ident($kind:ty)),+ $(,)? }) => {
        // With other parameters, the same enum holds what the kinds return: leases, sources, sinks.
        $(#[$doc])*
        $vis enum $name<$($variant = $kind),+> { $($(#[$kind_doc])* $variant($variant)),+ }

        const _: () = {
            use $crate::embed::{
                Arc, BURST, BorrowedFd, Burst, Counters, Duration, PortKind, PortSettings, Poured, Sink, Source, Span, Support,
            };

            impl<$($variant: Source),+> Source for $name<$($variant),+> {
                #[inline]
                fn take(&mut self, burst: &mut Burst) -> usize {
                    match self { $($name::$variant(source) => source.take(burst)),+ }
                }
                #[inline]
                fn done(&mut self, burst: &mut Burst) {
                    match self { $($name::$variant(source) => source.done(burst)),+ }
                }
                #[inline]
                fn pours(&self) -> bool {
                    match self { $($name::$variant(source) => source.pours()),+ }
                }
                fn pour(&mut self, sink: &mut impl Sink) -> Poured {
                    match self { $($name::$variant(source) => source.pour(sink)),+ }
                }
                #[inline]
                fn retains(&self) -> bool {
                    match self { $($name::$variant(source) => source.retains()),+ }
                }
                fn notices(&self) -> bool {
                    match self { $($name::$variant(source) => source.notices()),+ }
                }
                fn retain(&mut self, burst: &mut Burst, first: usize) {
                    match self { $($name::$variant(source) => source.retain(burst, first)),+ }
                }
            }

            impl<$($variant: Sink),+> Sink for $name<$($variant),+> {
                #[inline]
                fn support(&self) -> Support {
                    match self { $($name::$variant(sink) => sink.support()),+ }
                }
                #[inline]
                fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
                    match self { $($name::$variant(sink) => sink.put(burst, which)),+ }
                }
                #[inline]
                fn offer(&mut self, burst: &Burst, which: &[u8]) -> usize {
                    match self { $($name::$variant(sink) => sink.offer(burst, which)),+ }
                }
                fn cuts(&self) -> bool {
                    match self { $($name::$variant(sink) => sink.cuts()),+ }
                }
                fn has_room(&mut self, frames: usize) -> bool {
                    match self { $($name::$variant(sink) => sink.has_room(frames)),+ }
                }
                fn fill(&mut self, room: usize, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Poured {
                    match self { $($name::$variant(sink) => sink.fill(room, read)),+ }
                }
            }

            impl PortKind for $name {
                type Lease = $name<$(<$kind as PortKind>::Lease),+>;
                type Source<'a> = $name<$(<$kind as PortKind>::Source<'a>),+>;
                type Sink<'a> = $name<$(<$kind as PortKind>::Sink<'a>),+>;

                fn name(&self) -> &str {
                    match self { $($name::$variant(kind) => kind.name()),+ }
                }
                fn received(&self) -> &[Arc<Counters>] {
                    match self { $($name::$variant(kind) => kind.received()),+ }
                }
                fn sent(&self) -> &[Arc<Counters>] {
                    match self { $($name::$variant(kind) => kind.sent()),+ }
                }
                #[inline]
                fn lease(&self, queue: usize) -> Option<Self::Lease> {
                    match self { $($name::$variant(kind) => kind.lease(queue).map($name::$variant)),+ }
                }
                #[inline]
                fn is_wanted(&self, queue: usize) -> bool {
                    match self { $($name::$variant(kind) => kind.is_wanted(queue)),+ }
                }
                #[inline]
                #[allow(unreachable_patterns, reason = "there may be one kind only")]
                fn source<'a>(&'a self, queue: usize, lease: &'a mut Self::Lease) -> Option<Self::Source<'a>> {
                    match (self, lease) {
                        $(($name::$variant(kind), $name::$variant(lease)) => kind.source(queue, lease).map($name::$variant),)+
                        _ => None,
                    }
                }
                #[inline]
                fn sink(&self, hint: usize, frames: usize) -> Option<Self::Sink<'_>> {
                    match self { $($name::$variant(kind) => kind.sink(hint, frames).map($name::$variant)),+ }
                }
                #[inline]
                fn queues(&self) -> usize {
                    match self { $($name::$variant(kind) => kind.queues()),+ }
                }
                fn steer(&self, burst: &Burst, which: &[u8], queues: &mut [u8; BURST]) -> bool {
                    match self { $($name::$variant(kind) => kind.steer(burst, which, queues)),+ }
                }
                #[inline]
                fn is_flooded(&self) -> bool {
                    match self { $($name::$variant(kind) => kind.is_flooded()),+ }
                }
                fn settle(&self, now: Duration) -> Option<Duration> {
                    match self { $($name::$variant(kind) => kind.settle(now)),+ }
                }
                fn is_timed(&self) -> bool {
                    match self { $($name::$variant(kind) => kind.is_timed()),+ }
                }
                #[inline]
                fn weight(&self) -> usize {
                    match self { $($name::$variant(kind) => kind.weight()),+ }
                }
                fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
                    match self { $($name::$variant(kind) => kind.descriptors()),+ }
                }
                fn room_descriptors(&self) -> Vec<BorrowedFd<'_>> {
                    match self { $($name::$variant(kind) => kind.room_descriptors()),+ }
                }
                fn enable_room(&self) -> bool {
                    match self { $($name::$variant(kind) => kind.enable_room()),+ }
                }
                fn disable_room(&self) {
                    match self { $($name::$variant(kind) => kind.disable_room()),+ }
                }
                fn enable_notification(&self, queue: usize) -> bool {
                    match self { $($name::$variant(kind) => kind.enable_notification(queue)),+ }
                }
                fn exits(&self) -> Option<$crate::e1000::Exits> {
                    match self { $($name::$variant(kind) => kind.exits()),+ }
                }

                fn stop_polling(&self, queue: usize) {
                    match self { $($name::$variant(kind) => kind.stop_polling(queue)),+ }
                }

                fn disable_notification(&self, queue: usize) {
                    match self { $($name::$variant(kind) => kind.disable_notification(queue)),+ }
                }
                fn set(&self, settings: &PortSettings) {
                    match self { $($name::$variant(kind) => kind.set(settings)),+ }
                }
                fn tune(&self, settings: &PortSettings) {
                    match self { $($name::$variant(kind) => kind.tune(settings)),+ }
                }
                fn check_memory(&self) -> bool {
                    match self { $($name::$variant(kind) => kind.check_memory()),+ }
                }
                fn tick(&self, now: u32) {
                    match self { $($name::$variant(kind) => kind.tick(now)),+ }
                }
                fn takes(&self) -> Support {
                    match self { $($name::$variant(kind) => kind.takes()),+ }
                }
                fn others_take(&self, support: Support) {
                    match self { $($name::$variant(kind) => kind.others_take(support)),+ }
                }
                fn abandon(&self) {
                    match self { $($name::$variant(kind) => kind.abandon()),+ }
                }
            }
        };
    };
}
