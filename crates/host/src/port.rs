//! The ports of this program: guests and TAP interfaces.

use crate::deaf::{Deaf, Said};
use crate::{
    tap::{Tap, TapLease, TapSink, TapSource},
    vhost_user::{VhostLease, VhostPort},
};
use parking_lot::Mutex;
use ringroad_frame::{Burst, Counters, Sink, Snapshot, Source};
use ringroad_mem::Span;
use ringroad_ring::Tuning;
use ringroad_switch::{Claim, Dropped, Limits, Mode, Poll};
use ringroad_wire::ethernet::MacAddr;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU8, Ordering},
};

/// What a port is made of.
pub(crate) enum Kind {
    Vhost(VhostPort),
    Tap(Tap),
}

/// How a port behaves: what can be changed while it runs, without its guest noticing. See [`crate::PortHandle::set`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortSettings {
    /// What becomes of its frames.
    pub mode: Mode,
    /// Whether frames may go back out of it.
    pub hairpin: bool,
    /// For how long its worker polls it.
    pub poll: Poll,
    /// What is turned off, for measuring; a TAP port has nothing of it.
    pub tuning: Tuning,
    /// What it may do to other ports.
    pub limits: Limits,
}

impl Default for PortSettings {
    /// As the configuration's: switched, event driven, everything on.
    fn default() -> PortSettings {
        PortSettings {
            mode: Mode::Switch,
            hairpin: false,
            poll: Poll::For(std::time::Duration::ZERO),
            tuning: Tuning::default(),
            limits: Limits::GUEST,
        }
    }
}

/// A port of the switch.
pub struct Port {
    pub(crate) kind: Kind,
    settings: Mutex<PortSettings>,
    /// What of these the worker asks for in each burst: loads without a lock. Written by the worker too, between bursts.
    mode: AtomicU8,
    hairpin: AtomicBool,
    /// See [`Limits::link_local`]: what is read past the switch is held to it too.
    link_local: AtomicBool,
    /// What was said of it already: things that a guest can do all the time are said once.
    told: [AtomicBool; 3],
    /// Of each queue that frames go to.
    deaf: Mutex<Vec<Deaf>>,
}

/// Each mode at its own number.
const MODES: [Mode; 4] = [Mode::Switch, Mode::Reflect, Mode::Drop, Mode::Generate];

/// Indices of what is said once.
const STORM: usize = 0;
const SPOOFED: usize = 1;
const CROWDED: usize = 2;

/// What happened at a port, seen from outside: `received` came from it, `sent` went to it.
#[derive(Clone, Debug, Default)]
pub struct PortReport {
    /// Its name in the configuration.
    pub name: String,
    /// Frames from the guest or interface.
    pub received: Snapshot,
    /// Frames to the guest or interface.
    pub sent: Snapshot,
}

impl Port {
    fn new(kind: Kind, settings: PortSettings) -> Port {
        let (mode, hairpin) = (AtomicU8::new(settings.mode as u8), AtomicBool::new(settings.hairpin));
        let link_local = AtomicBool::new(settings.limits.link_local);
        let (told, deaf) = (Default::default(), Mutex::default());
        Port { kind, settings: Mutex::new(settings), mode, hairpin, link_local, told, deaf }
    }

    /// A guest.
    pub fn vhost(port: VhostPort, settings: PortSettings) -> Port {
        Port::new(Kind::Vhost(port), settings)
    }

    /// An interface of the host.
    pub fn tap(tap: Tap, settings: PortSettings) -> Port {
        Port::new(Kind::Tap(tap), settings)
    }

    /// How it behaves now.
    pub fn settings(&self) -> PortSettings {
        *self.settings.lock()
    }

    /// For the worker, between two bursts: from the next one on it behaves like this. Queues are tuned by control, which
    /// waits for them.
    pub(crate) fn set(&self, settings: PortSettings) {
        *self.settings.lock() = settings;
        self.mode.store(settings.mode as u8, Ordering::Relaxed);
        self.hairpin.store(settings.hairpin, Ordering::Relaxed);
        self.link_local.store(settings.limits.link_local, Ordering::Relaxed);
    }

    /// For control: has the queues that run, and those that will be started, do this.
    pub(crate) fn tune(&self) {
        if let Kind::Vhost(port) = &self.kind {
            port.tune(self.settings().tuning);
        }
    }

    /// The MTU of a TAP interface, changed while it runs. A guest reads its own in the configuration space, once.
    pub fn set_mtu(&self, mtu: u16) -> std::io::Result<()> {
        match &self.kind {
            Kind::Vhost(_) => Err(std::io::ErrorKind::Unsupported.into()),
            Kind::Tap(tap) => tap.set_mtu(mtu),
        }
    }

    /// Counters of the queues that frames come from.
    fn from(&self) -> &[Arc<Counters>] {
        match &self.kind {
            Kind::Vhost(port) => &port.tx_counters,
            Kind::Tap(tap) => &tap.received,
        }
    }

    /// Whether something is said for the first time.
    fn first(&self, what: usize) -> bool {
        self.told.get(what).is_some_and(|told| !told.swap(true, Ordering::Relaxed))
    }

    /// Says which queues have stopped taking frames, and which take some again; `now` in seconds. To be called once a second,
    /// while there is something to do.
    pub(crate) fn check_deaf(&self, now: u32) {
        let Kind::Vhost(port) = &self.kind else { return };
        let mut deaf = self.deaf.lock();
        deaf.resize(port.rx_counters.len(), Deaf::default());
        for (queue, (deaf, counters)) in deaf.iter_mut().zip(&port.rx_counters).enumerate() {
            let (name, vring) = (port.name(), 2 * queue);
            match deaf.look(now, &counters.snapshot()) {
                None => {}
                Some(Said::Deaf { seconds, dropped }) => log::warn!(
                    "port {name} queue {vring}: the guest has taken no frame for {seconds} s, and {dropped} were dropped as \
                     its ring is full; see whether it runs, and whether its interface is up"
                ),
                Some(Said::Recovered { dropped }) => log::info!(
                    "port {name} queue {vring}: the guest takes frames again; {dropped} were dropped meanwhile"
                ),
            }
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Vhost(port) => port.name(),
            Kind::Tap(tap) => tap.name(),
        }
    }

    /// How often what has happened.
    pub fn report(&self) -> PortReport {
        let (received, sent) = match &self.kind {
            Kind::Vhost(port) => (&port.tx_counters, &port.rx_counters),
            Kind::Tap(tap) => (&tap.received, &tap.sent),
        };
        let mut report = PortReport { name: self.name().to_owned(), ..PortReport::default() };
        received.iter().for_each(|counters| report.received += counters.snapshot());
        sent.iter().for_each(|counters| report.sent += counters.snapshot());
        report
    }

    /// Turns a queue's notifications on. `true`: its worker may wait for one.
    pub(crate) fn sleep(&self, queue: usize) -> bool {
        match &self.kind {
            Kind::Vhost(port) => port.sleep(queue),
            // Edge-triggered: what comes after the interface was found empty is an event.
            Kind::Tap(_) => true,
        }
    }

    /// Turns a queue's notifications off.
    pub(crate) fn awake(&self, queue: usize) {
        if let Kind::Vhost(port) = &self.kind {
            port.awake(queue);
        }
    }

    /// Stops a guest whose memory is gone. `false`: could not look; once more, later.
    pub(crate) fn check_memory(&self) -> bool {
        match &self.kind {
            Kind::Vhost(port) => port.check_memory(),
            Kind::Tap(_) => true,
        }
    }
}

/// A queue that frames come from, kept from burst to burst.
pub struct PortLease(KindLease);

enum KindLease {
    Vhost(VhostLease),
    Tap(TapLease),
}

impl ringroad_switch::Port for Port {
    type Lease = PortLease;
    type Source<'a> = PortSource<'a>;
    type Sink<'a> = PortSink<'a>;

    fn lease(&self, queue: usize) -> Option<PortLease> {
        match &self.kind {
            Kind::Vhost(port) => port.lease(queue).map(KindLease::Vhost),
            Kind::Tap(tap) => tap.lease(queue).map(KindLease::Tap),
        }
        .map(PortLease)
    }

    #[inline]
    fn is_wanted(&self, queue: usize) -> bool {
        match &self.kind {
            Kind::Vhost(port) => port.is_wanted(queue),
            Kind::Tap(_) => false,
        }
    }

    #[inline]
    fn source<'a>(&'a self, queue: usize, lease: &'a mut PortLease) -> Option<PortSource<'a>> {
        match (&self.kind, &mut lease.0) {
            (Kind::Vhost(port), KindLease::Vhost(lease)) => port.source(queue, lease).map(PortSource::Vhost),
            (Kind::Tap(tap), KindLease::Tap(lease)) => {
                let link_local = self.link_local.load(Ordering::Relaxed);
                tap.source(queue, lease, link_local).map(PortSource::Tap)
            }
            _ => None,
        }
    }

    #[inline]
    fn sink(&self, hint: usize, frames: usize) -> Option<PortSink<'_>> {
        match &self.kind {
            Kind::Vhost(port) => port.sink(hint, frames).map(PortSink::Vhost),
            Kind::Tap(tap) => tap.sink(hint, frames).map(PortSink::Tap),
        }
    }

    fn settle(&self) -> bool {
        match &self.kind {
            Kind::Vhost(port) => port.settle(),
            Kind::Tap(_) => true,
        }
    }

    #[inline]
    fn mode(&self) -> Mode {
        MODES.get(usize::from(self.mode.load(Ordering::Relaxed))).copied().unwrap_or_default()
    }

    #[inline]
    fn hairpin(&self) -> bool {
        self.hairpin.load(Ordering::Relaxed)
    }

    fn limits(&self) -> Limits {
        self.settings().limits
    }

    #[inline]
    fn weight(&self) -> usize {
        match &self.kind {
            Kind::Vhost(_) => 1,
            // A system call for each frame.
            Kind::Tap(_) => 8,
        }
    }

    fn dropped(&self, queue: usize, why: Dropped, frames: usize) {
        let Some(counters) = self.from().get(queue) else { return };
        let (name, frames) = (self.name(), frames as u64);
        match why {
            Dropped::Storm => {
                counters.storm.add(frames);
                if self.first(STORM) {
                    log::warn!(
                        "port {name}: it sends more frames to everybody (broadcast, multicast, unknown addresses) than its \
                         `limits.storm` allows; the others are dropped and counted as `storm`, and nothing more is said of it"
                    );
                }
            }
            Dropped::Spoofed => {
                counters.spoofed.add(frames);
                if self.first(SPOOFED) {
                    log::warn!(
                        "port {name}: frames came with a source address that it may not use; they are dropped and counted as \
                         `spoofed`, and nothing more is said of it; with `addresses = \"fixed\"` the guest must use the port's `mac`"
                    );
                }
            }
            Dropped::LinkLocal => counters.link_local.add(frames),
        }
    }

    fn crowded(&self, queue: usize) {
        let Some(counters) = self.from().get(queue) else { return };
        counters.crowded.add(1);
        if self.first(CROWDED) {
            log::warn!(
                "port {}: it uses more source addresses than its `limits.addresses` ({}) allows, or than there is room for; \
                 further ones are not learned, and frames to them go to all ports",
                self.name(),
                self.settings().limits.addresses
            );
        }
    }

    fn claimed(&self, queue: usize, address: MacAddr, claim: Claim, from: &Self, tell: bool) {
        const ADVICE: &str = "give each guest an address of its own (QEMU's default is the same for all: mac=)";
        if let Some(counters) = self.from().get(queue) {
            counters.claimed.add(1);
        }
        if !tell {
            return;
        }
        let (name, other) = (self.name(), from.name());
        match claim {
            Claim::Moved => {
                log::warn!(
                    "port {name}: address {address} has moved here from port {other}; if it should not, {ADVICE}"
                );
            }
            Claim::Held => log::warn!(
                "port {name}: frames came from address {address}, which is in use at port {other} and stays there until that \
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
            self.name()
        );
        if let Some(counters) = self.from().first() {
            counters.panics.add(1);
        }
        if let Kind::Vhost(port) = &self.kind {
            port.abandon();
        }
    }
}

/// A queue that frames come from, told apart once per burst.
pub enum PortSource<'a> {
    #[doc(hidden)]
    Vhost(crate::vhost_user::VhostSource<'a>),
    #[doc(hidden)]
    Tap(TapSource<'a>),
}

impl Source for PortSource<'_> {
    #[inline]
    fn take(&mut self, burst: &mut Burst) -> usize {
        match self {
            PortSource::Vhost(source) => source.take(burst),
            PortSource::Tap(source) => source.take(burst),
        }
    }

    #[inline]
    fn done(&mut self, burst: &mut Burst) {
        match self {
            PortSource::Vhost(source) => source.done(burst),
            PortSource::Tap(source) => source.done(burst),
        }
    }

    #[inline]
    fn pours(&self) -> bool {
        matches!(self, PortSource::Tap(_))
    }

    fn pour(&mut self, sink: &mut impl Sink) -> Option<usize> {
        match self {
            PortSource::Vhost(_) => None,
            PortSource::Tap(source) => source.pour(sink),
        }
    }
}

/// A queue that frames go to, told apart once per burst.
pub enum PortSink<'a> {
    #[doc(hidden)]
    Vhost(crate::vhost_user::VhostSink<'a>),
    #[doc(hidden)]
    Tap(TapSink<'a>),
}

impl Sink for PortSink<'_> {
    #[inline]
    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        match self {
            PortSink::Vhost(sink) => sink.put(burst, which),
            PortSink::Tap(sink) => sink.put(burst, which),
        }
    }

    fn fill(&mut self, room: usize, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Option<usize> {
        match self {
            PortSink::Vhost(sink) => sink.fill(room, read),
            PortSink::Tap(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_comes_back_as_it_was_set() {
        for (index, mode) in MODES.into_iter().enumerate() {
            assert_eq!(mode as usize, index);
        }
    }
}
