//! A second driver, simple on purpose, against which the first one ([`Traffic`](crate::Traffic)) and all devices are checked: fixed
//! buffers, bursts of [`PLAIN_BURST`], one frame after the other, no prefetch, nothing held back. Rings and queue code are its own
//! (virtio 1.3, 2.7 and 2.8); only the handshake and the memory are those of [`Connection`].

use crate::{
    Settings, Totals,
    driver::{WORD, put},
    probe::Probe,
};
use ringroad_host::vhost_user::Connection;
use ringroad_mem::{
    Region, Table, Words,
    sync::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence},
};
use ringroad_net::bits;
use ringroad_ring::{Addresses, DriverFault, Used};
use ringroad_wire::vnet_hdr;
use std::{
    collections::VecDeque,
    fmt, hint,
    sync::Arc,
    time::{Duration, Instant},
};

/// Frames that the plain driver sends or receives at once, at most.
pub const PLAIN_BURST: usize = 32;
/// Rounds between looks at the clock.
const ROUNDS: u64 = 64;

/// The plain driver, on the first pair of queues of its connection.
pub struct Plain {
    connection: Connection,
    ends: Ends,
    settings: Settings,
}

impl fmt::Debug for Plain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plain").field("settings", &self.settings).finish_non_exhaustive()
    }
}

enum Ends {
    Split(Pair<Split>),
    Packed(Pair<Packed>),
}

impl Plain {
    /// Takes a fresh connection over: its receive buffers are available, nothing was sent. Of the settings, only sizes, addresses,
    /// and how much is touched count, [`Touch::All`](crate::Touch::All) as [`Touch::Word`](crate::Touch::Word). `None`: its rings
    /// are no larger than a burst, or it has none.
    pub fn new(mut connection: Connection, settings: Settings) -> Option<Plain> {
        let memory = Table::default().with(connection.driver.region.clone()).ok()?;
        let (rx, tx) = (connection.driver.rx.first_mut()?, connection.driver.tx.first_mut()?);
        rx.disable_notification();
        tx.disable_notification();
        let mut scratch = vec![0; settings.longest()];
        tx.prepare(|id, place| {
            let probe = Probe { flow: id % settings.flows, sequence: 0, sent_ns: 0 };
            put(&probe, &settings, settings.size(id.into()), &mut scratch, place);
        });
        let addresses = [rx.addresses(), tx.addresses()];
        let buffers = [
            (0..).map_while(|id| rx.buffer(id)).collect::<Box<[u64]>>(),
            (0..).map_while(|id| tx.buffer(id)).collect(),
        ];
        let room = rx.buffer_len() as u32;
        let size = u16::try_from(buffers.iter().map(|list| list.len()).min()?)
            .ok()
            .filter(|&size| usize::from(size) > PLAIN_BURST)?;
        let in_order = connection.acked & bits::IN_ORDER != 0;
        let region = connection.driver.region.clone();
        let ends = if connection.acked & bits::RING_PACKED != 0 {
            let [rx, tx] = addresses.map(|at| Packed::new(&memory, at, size, in_order));
            Ends::Packed(Pair::new(rx?, tx?, region, buffers, room))
        } else {
            let [rx, tx] = addresses.map(|at| Split::new(&memory, at, size, in_order));
            Ends::Split(Pair::new(rx?, tx?, region, buffers, room))
        };
        Some(Plain { connection, ends, settings })
    }

    /// Sends and receives until the time is over, it is stopped, or the device disconnects. Calls `tick` every second.
    ///
    /// # Errors
    /// The device broke a rule of the rings.
    pub fn run(&mut self, time: Duration, tick: impl FnMut(&Totals)) -> Result<Totals, DriverFault> {
        let Plain { connection, ends, settings } = self;
        match ends {
            Ends::Split(pair) => pair.run(settings, connection, time, tick),
            Ends::Packed(pair) => pair.run(settings, connection, time, tick),
        }
    }

    /// Returns whether the device has disconnected.
    pub fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }
}

/// What the driver needs of a ring.
trait Ring {
    /// Appends the used chains, up to `max`, or more where a batch ends only later (2.7.9).
    fn take(&mut self, used: &mut Vec<Used>, max: usize) -> Result<(), DriverFault>;
    /// Adds a buffer.
    fn add(&mut self, id: u16, address: u64, len: u32, writable: bool);
    /// Makes what was added available.
    fn publish(&mut self);
    /// Sets that all buffers, with an id each in the ring's order, were made available before.
    fn filled(&mut self);
}

/// Both rings and their buffers.
struct Pair<R> {
    rx: R,
    tx: R,
    region: Arc<Region>,
    /// Guest addresses of the buffers, by id.
    rx_buffers: Box<[u64]>,
    tx_buffers: Box<[u64]>,
    /// Length of each receive buffer.
    room: u32,
    /// Transmit buffers that are not in flight.
    free: VecDeque<u16>,
    used: Vec<Used>,
    sent: u64,
}

impl<R: Ring> Pair<R> {
    fn new(mut rx: R, tx: R, region: Arc<Region>, [rx_buffers, tx_buffers]: [Box<[u64]>; 2], room: u32) -> Pair<R> {
        rx.filled();
        let free = (0..tx_buffers.len() as u16).collect();
        let used = Vec::with_capacity(tx_buffers.len());
        Pair { rx, tx, region, rx_buffers, tx_buffers, room, free, used, sent: 0 }
    }

    fn run(
        &mut self,
        settings: &Settings,
        connection: &Connection,
        time: Duration,
        mut tick: impl FnMut(&Totals),
    ) -> Result<Totals, DriverFault> {
        let (start, mut totals) = (Instant::now(), Totals::default());
        let mut next_tick = Duration::from_secs(1);
        loop {
            totals.time = start.elapsed();
            if totals.time >= time || settings.stop.load(Ordering::Relaxed) {
                return Ok(totals);
            }
            if totals.time >= next_tick {
                next_tick += Duration::from_secs(1);
                tick(&totals);
                if connection.is_closed() {
                    return Ok(totals);
                }
            }
            let before = totals.empty_rounds;
            for _ in 0..ROUNDS {
                let moved = self.receive(settings, &mut totals)? + self.send(settings, &mut totals)?;
                totals.rounds += 1;
                if moved == 0 {
                    totals.empty_rounds += 1;
                    hint::spin_loop();
                }
            }
            // A device that polls needs no notification; one that sleeps gets it as soon as nothing moves.
            if totals.empty_rounds - before == ROUNDS {
                connection.rx.iter().chain(&connection.tx).for_each(|notifier| notifier.kick());
            }
        }
    }

    fn receive(&mut self, settings: &Settings, totals: &mut Totals) -> Result<usize, DriverFault> {
        self.used.clear();
        self.rx.take(&mut self.used, PLAIN_BURST)?;
        for &Used { id, len } in &self.used {
            let address = self.rx_buffers.get(usize::from(id)).copied().ok_or(DriverFault::Id { id: id.into() })?;
            if settings.touch.reads() {
                hint::black_box(word(&self.region, address).and_then(|word| word.array::<4>(0)));
            }
            totals.received += 1;
            totals.received_bytes += u64::from(len).saturating_sub(vnet_hdr::SIZE as u64);
            self.rx.add(id, address, self.room, true);
        }
        if !self.used.is_empty() {
            self.rx.publish();
        }
        Ok(self.used.len())
    }

    fn send(&mut self, settings: &Settings, totals: &mut Totals) -> Result<usize, DriverFault> {
        if self.free.len() < PLAIN_BURST {
            self.used.clear();
            self.tx.take(&mut self.used, PLAIN_BURST)?;
            self.free.extend(self.used.iter().map(|used| used.id));
        }
        let count = self.free.len().min(PLAIN_BURST);
        for _ in 0..count {
            let Some(id) = self.free.pop_front() else { break };
            let address = self.tx_buffers.get(usize::from(id)).copied().ok_or(DriverFault::Id { id: id.into() })?;
            if settings.touch.writes()
                && let Some(word) = word(&self.region, address)
            {
                word.write(&(self.sent as u32 & 0x7fff_ffff).to_be_bytes());
            }
            let size = settings.size(id.into());
            self.tx.add(id, address, (vnet_hdr::SIZE + size) as u32, false);
            self.sent += 1;
            totals.sent += 1;
            totals.sent_bytes += size as u64;
        }
        if count > 0 {
            self.tx.publish();
        }
        Ok(count)
    }
}

/// Returns the word of the payload that is touched.
fn word(region: &Region, address: u64) -> Option<ringroad_mem::Span<'_>> {
    region.span(address.checked_sub(region.guest())? as usize + vnet_hdr::SIZE + WORD, 4)
}

/// A split ring (2.7).
struct Split {
    descriptors: Words<AtomicU64>,
    /// Flags, index, entries.
    available: Words<AtomicU16>,
    /// Flags, index.
    used: Words<AtomicU16>,
    /// Id and length of each used element.
    elements: Words<AtomicU32>,
    size: u16,
    in_order: bool,
    next: u16,
    next_used: u16,
}

impl Split {
    fn new(memory: &Table, at: Addresses, size: u16, in_order: bool) -> Option<Split> {
        let entries = usize::from(size);
        Some(Split {
            descriptors: memory.user_words(at.descriptor, 2 * entries)?,
            available: memory.user_words(at.driver, 2 + entries)?,
            used: memory.user_words(at.device, 2)?,
            elements: memory.user_words(at.device + 4, 2 * entries)?,
            size,
            in_order,
            next: 0,
            next_used: 0,
        })
    }
}

impl Ring for Split {
    fn take(&mut self, used: &mut Vec<Used>, max: usize) -> Result<(), DriverFault> {
        // Pairs with the device's release store of the index: elements and buffers before it are visible.
        let index = u16::from_le(load(&self.used, 1, Ordering::Acquire));
        while self.next_used != index && used.len() < max {
            let slot = usize::from(self.next_used % self.size);
            let element =
                |at: usize| self.elements.get(at).map_or(0, |word| u32::from_le(word.load(Ordering::Relaxed)));
            let (id, len) = (element(2 * slot), element(2 * slot + 1));
            if id >= self.size.into() {
                return Err(DriverFault::Id { id });
            }
            // In order, an element stands for all chains up to its own, and ids are slots.
            while self.in_order && u32::from(self.next_used % self.size) != id {
                used.push(Used { id: self.next_used % self.size, len });
                self.next_used = self.next_used.wrapping_add(1);
            }
            used.push(Used { id: id as u16, len });
            self.next_used = self.next_used.wrapping_add(1);
        }
        Ok(())
    }

    fn add(&mut self, id: u16, address: u64, len: u32, writable: bool) {
        let word = u64::from(len) | u64::from(writable) << 33;
        store(&self.descriptors, 2 * usize::from(id), address.to_le());
        store(&self.descriptors, 2 * usize::from(id) + 1, word.to_le());
        store(&self.available, 2 + usize::from(self.next % self.size), id.to_le());
        self.next = self.next.wrapping_add(1);
    }

    fn publish(&mut self) {
        // Pairs with the device's acquire load of the index: descriptors, entries and buffers are visible before it.
        fence(Ordering::Release);
        store(&self.available, 1, self.next.to_le());
    }

    fn filled(&mut self) {
        self.next = self.size;
    }
}

/// A packed ring (2.8).
struct Packed {
    descriptors: Words<AtomicU64>,
    size: u16,
    in_order: bool,
    /// Where the next buffer goes, and its wrap counter.
    next: (u16, bool),
    next_used: (u16, bool),
    /// Slot and second word of the first unpublished descriptor: written last.
    first: Option<(u16, u64)>,
}

impl Packed {
    fn new(memory: &Table, at: Addresses, size: u16, in_order: bool) -> Option<Packed> {
        let descriptors = memory.user_words(at.descriptor, 2 * usize::from(size))?;
        Some(Packed { descriptors, size, in_order, next: (0, true), next_used: (0, true), first: None })
    }

    fn advance((slot, wrap): &mut (u16, bool), size: u16) {
        *slot += 1;
        if *slot == size {
            (*slot, *wrap) = (0, !*wrap);
        }
    }
}

const AVAILABLE: u64 = 1 << (48 + 7);
const USED: u64 = 1 << (48 + 15);
const WRITE: u64 = 2 << 48;

impl Ring for Packed {
    fn take(&mut self, used: &mut Vec<Used>, max: usize) -> Result<(), DriverFault> {
        while used.len() < max {
            let (slot, wrap) = self.next_used;
            // Pairs with the device's release store of the flags: the buffer is visible.
            let word = u64::from_le(load(&self.descriptors, 2 * usize::from(slot) + 1, Ordering::Acquire));
            // Without chains in flight, the descriptor behind the last one may look used from the pass before: then `next` is there.
            let is_used = word & (AVAILABLE | USED) == if wrap { AVAILABLE | USED } else { 0 };
            if !is_used || self.next_used == self.next {
                break;
            }
            let (id, len) = ((word >> 32) as u16, word as u32);
            if id >= self.size {
                return Err(DriverFault::Id { id: id.into() });
            }
            // In order, a descriptor stands for all up to the one with its id, and ids are slots.
            while self.in_order && self.next_used.0 != id {
                used.push(Used { id: self.next_used.0, len });
                Self::advance(&mut self.next_used, self.size);
            }
            used.push(Used { id, len });
            Self::advance(&mut self.next_used, self.size);
        }
        Ok(())
    }

    fn add(&mut self, id: u16, address: u64, len: u32, writable: bool) {
        let (slot, wrap) = self.next;
        let flags = if wrap { AVAILABLE } else { USED } | if writable { WRITE } else { 0 };
        let word = (u64::from(len) | u64::from(id) << 32 | flags).to_le();
        store(&self.descriptors, 2 * usize::from(slot), address.to_le());
        if self.first.is_some() {
            store(&self.descriptors, 2 * usize::from(slot) + 1, word);
        } else {
            self.first = Some((slot, word));
        }
        Self::advance(&mut self.next, self.size);
    }

    fn publish(&mut self) {
        let Some((slot, word)) = self.first.take() else { return };
        // Pairs with the device's acquire load of the flags: the descriptors behind it and all buffers are visible before it.
        fence(Ordering::Release);
        store(&self.descriptors, 2 * usize::from(slot) + 1, word);
    }

    fn filled(&mut self) {
        self.next = (0, false);
    }
}

/// An atomic integer of a ring.
trait Atomic: ringroad_mem::Word {
    type Value;
    fn load(&self, ordering: Ordering) -> Self::Value;
    fn store(&self, value: Self::Value);
}

macro_rules! atomic {
    ($atomic:ty, $value:ty) => {
        impl Atomic for $atomic {
            type Value = $value;
            #[inline(always)]
            fn load(&self, ordering: Ordering) -> $value {
                self.load(ordering)
            }
            #[inline(always)]
            fn store(&self, value: $value) {
                self.store(value, Ordering::Relaxed);
            }
        }
    };
}
atomic!(AtomicU16, u16);
atomic!(AtomicU64, u64);

fn load<T: Atomic<Value: Default>>(words: &Words<T>, at: usize, ordering: Ordering) -> T::Value {
    words.get(at).map_or_else(T::Value::default, |word| Atomic::load(word, ordering))
}

fn store<T: Atomic>(words: &Words<T>, at: usize, value: T::Value) {
    if let Some(word) = words.get(at) {
        Atomic::store(word, value);
    }
}
