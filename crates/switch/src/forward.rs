//! Carries a burst from its source to its destinations, within each port's limits. A panic in a port's code stops that port only.
//! Called by the worker in `host`.

use crate::{
    Claim, Dropped, Fdb, Limits, Mirror, Vlans, Work,
    decide::{NOWHERE, Origin, SPOOFED, admits, is_port, locate, receivers},
    delivery::{Delivery, Group, STEERING, Wait, before},
    member::{AT_ONCE, Member, Members},
    port::Port,
    tagged,
};
use ringroad_frame::{ALL, BURST, Burst, Poured, Software, Source};
use ringroad_wire::ethernet::Addresses;
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

/// Carries bursts between ports. Each worker has one.
pub struct Switch<P: Port> {
    ports: Vec<Option<Member<P>>>,
    fdb: Fdb,
    burst: Burst,
    /// Finishes frames for receivers without offloads; allocated when it is first needed.
    software: Option<Software>,
    /// Frames were poured since there are just these two ports, so the table may have missed that an address moved.
    poured: bool,
    /// Some port has VLANs. Then each port belongs to VLANs, and the table is kept by VLAN.
    vlans: bool,
    /// Some port has VLANs, or frames of some port are copied.
    special: bool,
    /// What the queue waits for that was carried last.
    waiting: Option<Wait>,
    /// Some port is timed.
    timed: bool,
}

impl<P: Port> std::fmt::Debug for Switch<P> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Switch")
            .field("ports", &self.ports.iter().flatten().count())
            .field("fdb", &self.fdb)
            .finish_non_exhaustive()
    }
}

impl<P: Port> Switch<P> {
    /// Creates a switch without ports.
    pub fn new(fdb: Fdb) -> Self {
        Switch {
            ports: Vec::new(),
            fdb,
            burst: Burst::default(),
            software: None,
            poured: false,
            vlans: false,
            special: false,
            waiting: None,
            timed: false,
        }
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
        let (limits, vlans) = (port.limits(), port.vlans());
        if let Some(place) = self.ports.get_mut(number) {
            *place = Some(Member::new(port, limits));
        }
        self.limit(number as u32, limits);
        self.set_vlans(number as u32, vlans);
        self.note_timed();
        number as u32
    }

    /// Sets a port's limits. Addresses learned from it are kept.
    pub fn limit(&mut self, number: u32, limits: Limits) {
        let Some(Some(member)) = self.ports.get_mut(number as usize) else { return };
        member.limit(limits);
        if let (Err(owner), Some(address)) = (self.fdb.admit(number, limits.addresses, limits.own), limits.own)
            && let Some(Some(member)) = self.ports.get(number as usize)
            && let Some(Some(owner)) = self.ports.get(owner as usize)
        {
            member.port.claimed(0, address, Claim::Owned, &owner.port, true);
        }
    }

    /// Sets a port's VLANs. Addresses learned from it in others are forgotten. As long as any port has VLANs, those without are access
    /// ports of VLAN 1; if none has, tags are payload.
    pub fn set_vlans(&mut self, number: u32, vlans: Option<Vlans>) {
        let Some(Some(member)) = self.ports.get_mut(number as usize) else { return };
        member.vlans = vlans.map(Box::new);
        self.key_by_vlan();
        if let (true, Some(Some(member))) = (self.vlans, self.ports.get(number as usize)) {
            self.fdb.forget_vlans(number, |vlan| member.vlans().has(vlan));
        }
    }

    /// When the first port gets VLANs, or the last one loses them, addresses are learned anew.
    fn key_by_vlan(&mut self) {
        let vlans = self.ports.iter().flatten().any(|member| member.vlans.is_some());
        if std::mem::replace(&mut self.vlans, vlans) != vlans {
            (0..self.ports.len() as u32).for_each(|number| self.fdb.forget(number));
        }
        self.special = vlans || self.ports.iter().flatten().any(|member| !member.mirror.is_none());
    }

    /// Sets which of a port's frames are copied, and where to. Addresses learned from a port that gets copies are forgotten.
    pub fn set_mirror(&mut self, number: u32, mirror: Mirror) {
        if let Some(Some(member)) = self.ports.get_mut(number as usize) {
            member.mirror = Mirror { port: mirror.port.filter(|&port| port != number), ..mirror };
        }
        self.note_mirrors();
    }

    /// Tells each port whether others are mirrored to it.
    fn note_mirrors(&mut self) {
        let mirrors = self.ports.iter().flatten().map(|member| member.mirror).filter(|mirror| !mirror.is_none());
        let targets: Vec<u32> = mirrors.filter_map(|mirror| mirror.port).collect();
        for (number, member) in (0..).zip(&mut self.ports) {
            let Some(member) = member else { continue };
            member.is_mirror = targets.contains(&number);
            member.is_mirrored = member.is_mirror || !member.mirror.is_none();
            if member.is_mirror {
                self.fdb.forget(number);
            }
        }
        self.key_by_vlan();
    }

    /// Removes a port and the addresses learned from it.
    pub fn remove(&mut self, number: u32) -> Option<Arc<P>> {
        self.fdb.remove(number);
        let member = self.ports.get_mut(number as usize)?.take();
        for other in self.ports.iter_mut().flatten().filter(|other| other.mirror.port == Some(number)) {
            other.mirror.port = None;
        }
        self.note_mirrors();
        self.note_timed();
        member.map(|member| member.port)
    }

    fn note_timed(&mut self) {
        self.timed = self.ports.iter().flatten().any(|member| member.timed);
    }

    /// Releases the memory of the last burst and all leases.
    pub fn release(&mut self) {
        self.burst.clear();
        self.release_leases();
    }

    /// Releases the leases that were kept for the next burst.
    fn release_leases(&self) {
        for member in self.ports.iter().flatten() {
            let dropped = catch_unwind(AssertUnwindSafe(|| member.leases.borrow_mut().clear()));
            dropped.unwrap_or_else(|payload| member.panicked(&*payload));
        }
    }

    /// Removes the addresses learned from a port, and includes it again after a panic.
    pub fn forget(&mut self, number: u32) {
        self.fdb.forget(number);
        if let Some(Some(member)) = self.ports.get(number as usize) {
            member.broken.set(false);
        }
    }

    /// Sets the forwarding table's size, ageing time and hold time, in seconds.
    pub fn set_table(&mut self, entries: usize, ageing: u32, hold: u32) {
        self.fdb.set(entries, ageing, hold);
    }

    /// Returns the forwarding table.
    pub fn fdb(&self) -> &Fdb {
        &self.fdb
    }

    /// Returns why frames stayed with their sender, if they did, when a queue was carried last; once.
    #[inline]
    pub fn take_waiting(&mut self) -> Option<Wait> {
        // Looked at first: a load of all of it soon after a store to a part of it would stall.
        self.waiting.as_ref()?;
        self.waiting.take()
    }

    /// Returns the only other port and its number, if all frames from this one go there, whether their destination is known or not. Then nothing
    /// need be learned from them, provided that no frame is held back because its destination was once seen at its source.
    fn only_other(ports: &Members<P>, from: u32) -> Option<(u32, &Member<P>)> {
        let mut others = ports.iter().enumerate().filter(|&(number, _)| number as u32 != from);
        let (number, other) = others.find_map(|(number, member)| Some((number as u32, member.as_ref()?)))?;
        let from = ports.get(from as usize)?.as_ref()?;
        let alone = others.all(|(_, member)| member.is_none());
        let plain = |member: &Member<P>| member.port.is_flooded() && !member.port.hairpin();
        // A source that pours drops link-local frames itself, unless its own limits allow them.
        let link_local = !from.limits.link_local || other.limits.link_local;
        let apart = from.limits.isolated && other.limits.isolated;
        (alone && link_local && !apart && plain(from) && plain(other)).then_some((number, other))
    }

    /// Releases all leases, and sends pending notifications that are wanted and due. To be called now and then under load, and
    /// before the worker sleeps. Returns when it must be repeated, in terms of `now`; zero: at once; `None`: only after a burst.
    /// `now`: time since the switch was created; it need not be exact.
    pub fn settle(&self, now: Duration) -> Option<Duration> {
        self.release_leases();
        let members = self.ports.iter().flatten();
        members.filter_map(|member| self.settle_port(member, now)).min()
    }

    /// Returns whether some port is timed ([`Port::is_timed`]): then the `now` of [`Switch::settle`] should be exact.
    pub fn is_timed(&self) -> bool {
        self.timed
    }

    /// Sends those pending notifications whose time a driver has set, if it has come. To be called after each burst; without such a
    /// port it does nothing. `now` is called only if some are pending.
    #[inline]
    pub fn settle_timed(&self, now: impl FnOnce() -> Duration) {
        if self.timed && self.timed_members().any(|member| member.open.get().is_some()) {
            let now = now();
            self.timed_members().for_each(|member| _ = self.settle_port(member, now));
        }
    }

    fn timed_members(&self) -> impl Iterator<Item = &Member<P>> {
        self.ports.iter().flatten().filter(|member| member.timed)
    }

    /// The next [`Switch::settle`] asks this port, whether its notifications are due or not.
    pub fn reopen(&self, number: u32) {
        if let Some(Some(member)) = self.ports.get(number as usize)
            && !member.broken.get()
        {
            member.open.set(AT_ONCE);
        }
    }

    /// Sends a port's pending notifications, if it is time. Returns when to do that again.
    fn settle_port(&self, member: &Member<P>, now: Duration) -> Option<Duration> {
        if member.open.get()? <= now {
            match catch_unwind(AssertUnwindSafe(|| member.port.settle(now))) {
                Ok(again) => member.open.set(again),
                Err(payload) => member.panicked(&*payload),
            }
        }
        member.open.get()
    }

    /// Sets whether there is time to spare for what makes a driver faster: see [`Burst::set_spare`].
    #[inline]
    pub fn set_spare(&mut self, on: bool) {
        self.burst.set_spare(on);
    }

    /// Carries one burst from a port's queue to its destinations. Returns how many buffers were taken, 0 if the queue is empty,
    /// and whether that was a lot of work. `now`: time since the switch was created; it need not be exact.
    ///
    /// A panic in the code of a port's queue stops that port: [`Port::panicked`].
    #[inline]
    pub fn carry(&mut self, from: u32, queue: usize, now: Duration) -> Work {
        let carried = catch_unwind(AssertUnwindSafe(|| self.carry_burst(from, queue, now)));
        carried.unwrap_or_else(|payload| self.abandon(from, &*payload))
    }

    /// Abandons a burst after a panic at its source: drops the burst; the lease was dropped by unwinding.
    #[cold]
    fn abandon(&mut self, from: u32, payload: &(dyn Any + Send)) -> Work {
        self.burst = Burst::default();
        if let Some(Some(member)) = self.ports.get(from as usize) {
            member.panicked(payload);
        }
        Work::default()
    }

    /// Lets a source read frames straight into the buffers of their only possible destination, if there is just one and its buffers
    /// suit. Returns how many; as an error, the number of that port, which is full.
    #[inline]
    fn pour(ports: &Members<P>, from: u32, queue: usize, source: &mut P::Source<'_>) -> Option<Result<usize, u32>> {
        let (number, only) = Self::only_other(ports, from)?;
        // Flows that go to several queues must be read first, and so must segments that become longer frames.
        if only.broken.get() || only.port.queues() > 1 || only.port.coalesces() {
            return None;
        }
        let poured = match source.pour(&mut only.port.sink(from as usize + queue, 0)?) {
            Poured::Frames(frames) => Ok(frames),
            // No other traffic is behind these frames: what they come from has its own limit.
            Poured::Full if !only.limits.wait.is_zero() => Err(number),
            Poured::Full | Poured::Unable => return None,
        };
        only.open.set(AT_ONCE);
        Some(poured)
    }

    #[inline]
    fn carry_burst(&mut self, from: u32, queue: usize, now: Duration) -> Work {
        const NONE: Work = Work { frames: 0, heavy: false, early: false };
        let Some(Some(member)) = self.ports.get(from as usize) else { return NONE };
        if member.broken.get() {
            return NONE;
        }
        let paced = !member.limits.rate.is_none();
        if paced && let Some(until) = member.paused(queue, now) {
            self.waiting = Some(Wait { port: None, until });
            return Work { early: true, ..NONE };
        }
        let port = &*member.port;
        let Some(mut lease) = member.lease(queue) else { return NONE };
        let Some(mut source) = port.source(queue, &mut lease) else { return NONE };
        let pours = source.pours() && !paced && !self.special;
        match pours.then(|| Self::pour(&self.ports, from, queue, &mut source)).flatten() {
            Some(Ok(frames)) => {
                self.poured |= frames > 0;
                return Work { frames, heavy: true, ..NONE };
            }
            Some(Err(port)) => {
                self.waiting = Some(Wait { port: Some(port), until: now + POUR_AGAIN });
                return NONE;
            }
            None => {}
        }
        let taken = source.take(&mut self.burst);
        if taken == 0 {
            return NONE;
        }
        // Release the last destination after the source has published: releasing a gate waits for all earlier stores, so both
        // waits overlap.
        let mut delivery = Delivery::new(&self.ports, &mut self.software, &source, now);
        if paced && source.retains() {
            delivery.admit(&self.burst, member);
        }
        let origin = Origin { number: from, queue, member, poured: self.poured, now };
        if port.queues() > 1 {
            origin.note_flows(&self.burst);
            delivery.weight += taken * STEERING;
        }
        let special = self.special.then_some(self.vlans);
        forward_any(special, &mut self.fdb, &mut self.burst, &origin, &mut delivery);
        let weight = delivery.weight + taken * port.weight();
        let heavy = weight > HEAVY || self.burst.is_heavy();
        if paced {
            member.paces(queue, &self.burst, delivery.end, now);
        }
        let mut frames = taken;
        if delivery.end < self.burst.frames().len() {
            (frames, self.waiting) = (delivery.end, delivery.waiting);
            source.retain(&mut self.burst, delivery.end);
        } else {
            source.done(&mut self.burst);
        }
        drop(delivery);
        drop(source);
        member.open.set(AT_ONCE);
        member.keep(queue, lease);
        Work { frames, heavy, ..NONE }
    }
}

/// When to look again at a port without room to which frames are poured, in case it does not say that it has some.
const POUR_AGAIN: Duration = Duration::from_secs(1);

/// A burst that costs as much as copying this many frames is a whole turn.
const HEAVY: usize = 4 * BURST;

/// Forwards a burst. `special`: ports have VLANs or are mirrored; whether they have VLANs.
#[inline(always)]
fn forward_any<'a, P: Port>(
    special: Option<bool>,
    fdb: &mut Fdb,
    burst: &mut Burst,
    from: &Origin<'_, P>,
    delivery: &mut Delivery<'a, P>,
) {
    match special {
        None => forward(delivery.ports, fdb, burst, from, delivery),
        Some(vlans) => forward_special(vlans, fdb, burst, from, delivery),
    }
}

/// As `forward`, where ports have VLANs or are mirrored.
#[cold]
fn forward_special<'a, P: Port>(
    vlans: bool,
    fdb: &mut Fdb,
    burst: &mut Burst,
    from: &Origin<'_, P>,
    delivery: &mut Delivery<'a, P>,
) {
    let ports = delivery.ports;
    if from.member.is_mirror {
        let count = burst.frames().len().min(delivery.end);
        if count > 0 {
            from.member.dropped(from.queue, Dropped::Isolated, count);
        }
        return;
    }
    // Frames are copied as they came, but only now that it is known which stay: until they come again, a guest may change them.
    if vlans {
        let came = from.member.mirror.from.then(|| burst.heads());
        tagged::forward(ports, fdb, burst, from, delivery);
        came.inspect(|heads| burst.restore(heads));
    } else {
        forward(ports, fdb, burst, from, delivery);
    }
    delivery.mirror_from(from.member, burst);
}

/// Learns a frame's source and looks up its destination. `last`: the last source, and whether the port may use it; frames of one mostly
/// come together, whatever their destinations.
#[inline(always)]
fn decide<P: Port>(
    ports: &Members<P>,
    fdb: &mut Fdb,
    last: &mut (u64, bool),
    flow: (u64, u32),
    from: &Origin<'_, P>,
) -> u32 {
    let Addresses { source, destination } = Addresses::from_words(flow);
    let word = flow.0 >> 48 | u64::from(flow.1) << 16;
    if word != last.0 {
        *last = (word, admits::<P, false>(ports, fdb, 0, source, from));
    }
    if last.1 { locate::<P, false>(ports, fdb, 0, destination, from) } else { SPOOFED }
}

/// Learns sources, looks up destinations, and puts the frames there, destination by destination.
#[inline(always)]
fn forward<'a, P: Port>(
    ports: &'a Members<P>,
    fdb: &mut Fdb,
    burst: &Burst,
    from: &Origin<'_, P>,
    delivery: &mut Delivery<'a, P>,
) {
    let mut destinations = [NOWHERE; BURST];
    let frames = burst.frames();
    let Some(first) = frames.first() else { return };
    let mut flow = first.addresses();
    // More than 48 bits: none yet.
    let mut source = (u64::MAX, false);
    let first = decide(ports, fdb, &mut source, flow, from);
    let (mut to, mut mixed) = (first, false);
    for (frame, place) in frames.iter().zip(&mut destinations) {
        // Frames of one flow mostly come together.
        if frame.addresses() != flow {
            flow = frame.addresses();
            to = decide(ports, fdb, &mut source, flow, from);
            mixed |= to != first;
        }
        *place = to;
    }
    let all = ALL.get(..frames.len()).unwrap_or(&ALL);
    if !mixed {
        // All frames of the burst have one destination, as usual.
        return put(ports, burst, from, first, all, delivery);
    }
    let destination = |index: u8| destinations.get(usize::from(index)).copied().unwrap_or(NOWHERE);
    // What is flooded or dropped comes last, when it is known which frames stay with their sender and come again.
    let (single, others) = Group::of(all).split(|index| is_port(destination(index)));
    for mut left in [single, others] {
        while let Some(&first) = left.list().first() {
            let to = destination(first);
            let group;
            (group, left) = left.split(|index| destination(index) == to);
            put(ports, burst, from, to, group.list(), delivery);
        }
    }
}

/// Puts frames to their common destination.
#[inline(always)]
fn put<'a, P: Port>(
    ports: &'a Members<P>,
    burst: &Burst,
    from: &Origin<'_, P>,
    to: u32,
    which: &[u8],
    delivery: &mut Delivery<'a, P>,
) {
    let which = if delivery.end == BURST { which } else { before(which, delivery.end) };
    if which.is_empty() {
        return;
    }
    if let Some(Some(member)) = ports.get(to as usize) {
        delivery.put_waiting(to, from.to(member), burst, which);
    } else {
        spread(ports, burst, from, to, which, delivery);
    }
}

/// Floods or drops frames.
#[cold]
fn spread<'a, P: Port>(
    ports: &'a Members<P>,
    burst: &Burst,
    from: &Origin<'_, P>,
    to: u32,
    which: &[u8],
    delivery: &mut Delivery<'a, P>,
) {
    let Some(local) = from.floods(to, which.len()) else { return };
    let several = receivers(ports, from.number, local).nth(1).is_some();
    let which = from.granted(burst, which, several);
    if !which.is_empty() {
        for receiver in receivers(ports, from.number, local) {
            delivery.put_dropping(from.to(receiver), burst, which);
        }
    }
}
