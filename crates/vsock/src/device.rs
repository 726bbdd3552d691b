//! The device end of virtio-vsock (virtio 1.3, 5.10.6): the receive queue (packets to the guest), the transmit queue (packets
//! from the guest) and the event queue. Used by a [`crate::Stack`], and set up by `host`.

mod run;

use crate::{
    payload::Payload,
    send::Link,
    side::{Inlet, Relay, Side, Taken},
    types::{Broken, MAX_PACKET},
};
use ringroad_mem::{Span, Table};
use ringroad_ring::{Addresses, Chains, DeviceRing, Fault, Features, Inflight, Journal, Resumed, SetupError};
use ringroad_wire::vsock_hdr::{self as wire, VsockHdr};
use run::{Run, SPANS};
use std::{io, marker::PhantomData, num::NonZeroUsize, sync::Arc};

/// Chains taken from the ring in one go.
const BURST: usize = 32;
/// Spans in those chains: enough for a packet of 64 KiB in pages, and more.
const PIECES: u16 = 1024;
/// Size of a packet header in bytes.
const HEADER: u32 = wire::SIZE as u32;
/// Bytes after which a burst ends, so that others get their turn; the packet that crosses the limit is included.
const BYTES: usize = 256 << 10;
/// A packet of this many bytes is returned to the driver at once, which may be waiting for its buffer.
const LARGE: usize = 8 << 10;

/// The device end, with `R` as the type of relays.
#[derive(Debug)]
pub struct DeviceSide<R>(PhantomData<fn() -> R>);

impl<R: Relay> Side for DeviceSide<R> {
    type Link = RxQueue;
    type Inlet = TxQueue;
    type Relay = R;
}

macro_rules! queue_calls {
    () => {
        /// Starts the queue with the negotiated feature bits.
        ///
        /// # Errors
        /// [`SetupError`] if the queue size or the base is invalid, or an area of the ring is not mapped.
        pub fn start(memory: Arc<Table>, acked: u64, size: u32, at: Addresses, base: u32) -> Result<Self, SetupError> {
            Ok(Self::resume(memory, acked, size, at, base, Journal::NONE, Inflight::NONE)?.0)
        }

        /// Starts the queue where a previous process left it, if the journal or the inflight region has a record of it.
        ///
        /// # Errors
        /// As for `start`, and [`SetupError::Inflight`] if the inflight region is invalid.
        pub fn resume(
            memory: Arc<Table>,
            acked: u64,
            size: u32,
            at: Addresses,
            base: u32,
            journal: Journal,
            inflight: Inflight,
        ) -> Result<(Self, Resumed), SetupError> {
            let features = Features::negotiated(acked);
            let (ring, resumed) = DeviceRing::resume(&memory, features, size, at, base, journal, inflight)?;
            Ok((Self::new(ring, memory, size), resumed))
        }

        /// Stops the queue for good and returns its position. Chains that a previous process had in flight and that have not been
        /// taken since are returned empty.
        pub fn stop(&mut self) -> u32 {
            self.base();
            self.ring.return_resubmits();
            self.ring.base()
        }

        /// Returns the driver's memory.
        pub fn memory(&self) -> &Arc<Table> {
            &self.memory
        }
    };
}

/// A receive queue: the device sends, the driver receives.
#[derive(Debug)]
pub struct RxQueue {
    ring: DeviceRing,
    memory: Arc<Table>,
    chains: Chains,
    /// How many of the chains are filled, and how many of those have been given back to the driver.
    used: usize,
    given: usize,
    /// Chains that data packets leave free for control packets.
    reserve: usize,
    /// The driver was asked to notify when there are more buffers.
    awaiting: bool,
}

impl RxQueue {
    queue_calls!();

    fn new(mut ring: DeviceRing, memory: Arc<Table>, size: u32) -> RxQueue {
        ring.disable_notification();
        let mut chains = Chains::new(2 * BURST, PIECES);
        chains.start(&memory);
        let reserve = (size as usize / 16).min(8);
        RxQueue { ring, memory, chains, used: 0, given: 0, reserve, awaiting: false }
    }

    /// Returns the ring position at which to continue after a stop.
    pub fn base(&mut self) -> u32 {
        self.give();
        self.ring.untake(&mut self.chains, self.used);
        self.ring.base()
    }

    fn give(&mut self) {
        self.ring.give(self.chains.list().get(self.given..self.used).unwrap_or_default());
        self.given = self.used;
    }

    /// Returns the number of chains taken and not used yet.
    fn ahead(&self) -> usize {
        self.chains.list().len().saturating_sub(self.used)
    }

    /// Returns whether the list of chains is full, in chains or in pieces.
    fn is_at_end(&self) -> bool {
        self.chains.room() < BURST || self.chains.is_full()
    }

    /// Takes chains until more than `count` are available, if the driver has that many. Returns whether there are.
    fn want(&mut self, count: usize) -> Result<bool, Fault> {
        if self.ahead() > count {
            return Ok(true);
        }
        if self.is_at_end() {
            // Start the list over and return the unused chains to the ring. They are taken again below, as the driver may have
            // changed them meanwhile.
            self.give();
            self.ring.untake(&mut self.chains, self.used);
            self.chains.start(&self.memory);
            (self.used, self.given) = (0, 0);
        }
        match self.ring.take(&self.memory, &mut self.chains, BURST) {
            Ok(0) => {}
            Ok(_) => {
                if std::mem::take(&mut self.awaiting) {
                    self.ring.disable_notification();
                }
            }
            // The chains taken before are valid; no more will follow that data could leave to control packets.
            Err(_) if self.ahead() > 0 => return Ok(true),
            Err(fault) => return Err(fault),
        }
        // The chains have so many pieces that the list is full; the ring has more.
        Ok(self.ahead() > count || self.ahead() > 0 && self.chains.is_full())
    }

    /// Returns the payload room of the chain `ahead` positions after the next one, `None` if it has not been taken.
    fn check(&self, ahead: usize) -> Result<Option<NonZeroUsize>, Fault> {
        let Some(chain) = self.chains.list().get(self.used.saturating_add(ahead)) else { return Ok(None) };
        let (id, len, needed) = (chain.id, chain.writable_len(), HEADER + 1);
        if chain.readable_len() > 0 {
            return Err(Fault::Readable { id });
        }
        if chain.clipped {
            return Err(Fault::Loop { index: id, size: PIECES });
        }
        let room = len.checked_sub(HEADER).and_then(|room| NonZeroUsize::new(room as usize));
        room.map(Some).ok_or(Fault::Header { id, len, needed })
    }

    /// Writes the header of the next chain and marks it used. Its payload has been written, or is in place already.
    fn head(&mut self, header: &VsockHdr) {
        let bytes = header.to_bytes();
        let Some(&chain) = self.chains.list().get(self.used) else { return };
        let mut left = &bytes[..];
        for span in self.chains.writable(&chain) {
            left = left.get(span.write(left)..).unwrap_or_default();
            if left.is_empty() {
                break;
            }
        }
        if let Some(chain) = self.chains.list_mut().get_mut(self.used) {
            chain.written = HEADER.saturating_add(header.len);
            self.used += 1;
        }
    }

    /// Returns the payload areas of the next chains, limited to these lengths.
    fn targets(&self, rooms: &[usize]) -> ([Span<'_>; SPANS], usize) {
        let (mut spans, mut count) = ([Span::empty(); SPANS], 0);
        for (chain, &room) in self.chains.list().iter().skip(self.used).zip(rooms) {
            let (mut skip, mut left) = (wire::SIZE, room);
            for &span in self.chains.writable(chain) {
                let target = span.skip(skip);
                skip = skip.saturating_sub(span.len() - target.len());
                let target = target.first(left);
                if target.is_empty() {
                    continue;
                }
                let Some(place) = spans.get_mut(count) else { break };
                left = left.saturating_sub(target.len());
                *place = target;
                count += 1;
            }
        }
        (spans, count)
    }
}

impl Link for RxQueue {
    fn room(&mut self, control: bool) -> Result<Option<NonZeroUsize>, Broken> {
        if !self.want(if control { 0 } else { self.reserve })? {
            return Ok(None);
        }
        Ok(self.check(0)?)
    }

    fn put(&mut self, header: &VsockHdr, payload: &mut Payload<'_>) {
        let Some(&chain) = self.chains.list().get(self.used) else { return };
        let (mut skip, mut left) = (wire::SIZE, header.len as usize);
        for &span in self.chains.writable(&chain) {
            if left == 0 {
                break;
            }
            let target = span.skip(skip);
            skip = skip.saturating_sub(span.len() - target.len());
            left = left.saturating_sub(payload.copy_to(target.first(left)));
        }
        self.head(header);
    }

    fn fill(
        &mut self,
        header: VsockHdr,
        stamp: &mut dyn FnMut(&mut VsockHdr),
        most: usize,
        read: &mut dyn FnMut(&[Span<'_>]) -> io::Result<usize>,
    ) -> Result<Option<(u64, io::Result<usize>)>, Broken> {
        let (mut count, mut total) = (0, 0);
        let mut rooms = [0; BURST];
        for place in &mut rooms {
            if total >= most || !self.want(self.reserve + count)? {
                break;
            }
            let room = match self.check(count) {
                Ok(Some(room)) => room.get().min(MAX_PACKET).min(most - total),
                Ok(None) => break,
                Err(_) if count > 0 => break,
                Err(fault) => return Err(fault.into()),
            };
            *place = room;
            total += room;
            count += 1;
            // `want` would start the list over and lose the chains counted so far.
            if self.ahead() <= self.reserve + count && self.is_at_end() {
                break;
            }
        }
        if count == 0 {
            return Ok(None);
        }
        let (spans, filled) = self.targets(rooms.get(..count).unwrap_or_default());
        let result = read(spans.get(..filled).unwrap_or_default());
        let mut left = *result.as_ref().unwrap_or(&0);
        let mut packets = 0;
        for room in rooms.into_iter().take(count) {
            if left == 0 {
                break;
            }
            let len = left.min(room);
            let mut header = VsockHdr { len: len as u32, ..header };
            stamp(&mut header);
            self.head(&header);
            left -= len;
            packets += 1;
        }
        Ok(Some((packets, result)))
    }

    fn publish(&mut self) -> bool {
        self.give();
        self.ring.wants_notification(true)
    }

    fn await_room(&mut self) -> bool {
        self.awaiting = true;
        self.ring.enable_notification()
    }
}

/// A transmit queue: the driver sends, the device receives.
#[derive(Debug)]
pub struct TxQueue {
    ring: DeviceRing,
    memory: Arc<Table>,
    chains: Chains,
    /// Number of entries.
    size: usize,
}

impl TxQueue {
    queue_calls!();

    fn new(ring: DeviceRing, memory: Arc<Table>, size: u32) -> TxQueue {
        TxQueue { ring, memory, chains: Chains::new(BURST, PIECES), size: size as usize }
    }

    /// Returns the ring position at which to continue after a stop.
    pub fn base(&mut self) -> u32 {
        self.ring.base()
    }
}

impl Inlet for TxQueue {
    fn take(&mut self, mut each: impl FnMut(VsockHdr, Payload<'_>)) -> Result<Taken, Broken> {
        self.chains.start(&self.memory);
        self.ring.take(&self.memory, &mut self.chains, BURST)?;
        let (mut given, mut fault) = (0, None);
        let (mut count, mut bytes) = (0, 0usize);
        let mut run = Run::default();
        let last = self.chains.list().len().saturating_sub(1);
        for (index, chain) in self.chains.list().iter().enumerate() {
            let (id, len, needed) = (chain.id, chain.readable_len(), HEADER);
            fault = if chain.writable_len() > 0 {
                Some(Fault::Writable { id })
            } else if len < needed {
                Some(Fault::Header { id, len, needed })
            } else if chain.clipped {
                Some(Fault::Loop { index: id, size: PIECES })
            } else {
                None
            };
            if fault.is_some() {
                break;
            }
            let mut payload = Payload::spans(self.chains.readable(chain));
            let Some(header) = payload.read_once::<{ wire::SIZE }>() else { break };
            let large = payload.len() >= LARGE;
            count = index + 1;
            bytes = bytes.saturating_add(payload.len());
            run.add(VsockHdr::from_bytes(&header), payload, &mut each);
            if large || index == last {
                run.pass(&mut each);
                self.ring.give(self.chains.list().get(given..count).unwrap_or_default());
                given = count;
                if bytes >= BYTES {
                    break;
                }
            }
        }
        run.pass(&mut each);
        // Return the packets left for the next turn.
        if fault.is_none() {
            self.ring.untake(&mut self.chains, count);
        }
        // Do not hold on to the memory table longer than needed.
        self.chains.empty();
        match fault {
            Some(fault) => Err(fault.into()),
            None => Ok(Taken { packets: count, bytes }),
        }
    }

    fn wants_notification(&mut self) -> bool {
        self.ring.wants_notification(true)
    }

    /// A quarter of the ring: without indirect descriptors, a packet has two and more.
    fn patience(&self) -> usize {
        self.size / 4
    }

    fn enable_notification(&mut self) -> bool {
        self.ring.enable_notification()
    }

    fn disable_notification(&mut self) {
        self.ring.disable_notification();
    }
}

/// The event queue, which tells the driver that all connections are closed (5.10.6.7).
#[derive(Debug)]
pub struct Events {
    ring: DeviceRing,
    memory: Arc<Table>,
    chains: Chains,
}

/// VIRTIO_VSOCK_EVENT_TRANSPORT_RESET, as struct virtio_vsock_event.
const TRANSPORT_RESET: [u8; 4] = 0u32.to_le_bytes();

impl Events {
    queue_calls!();

    fn new(mut ring: DeviceRing, memory: Arc<Table>, _size: u32) -> Events {
        ring.disable_notification();
        Events { ring, memory, chains: Chains::new(1, 4) }
    }

    /// Tells the driver that all connections are closed. Returns whether it wants to be notified, or `None` if it has no buffer
    /// available.
    ///
    /// # Errors
    /// [`Broken`] if the driver's next chain is invalid, too small for the event, or readable.
    pub fn transport_reset(&mut self) -> Result<Option<bool>, Broken> {
        self.chains.start(&self.memory);
        if self.ring.take(&self.memory, &mut self.chains, 1)? == 0 {
            return Ok(None);
        }
        let Some(&chain) = self.chains.list().first() else { return Ok(None) };
        let (id, len, needed) = (chain.id, chain.writable_len(), TRANSPORT_RESET.len() as u32);
        if len < needed || chain.readable_len() > 0 {
            return Err(Fault::Header { id, len, needed }.into());
        }
        let mut left = &TRANSPORT_RESET[..];
        for span in self.chains.writable(&chain) {
            left = left.get(span.write(left)..).unwrap_or_default();
        }
        self.chains.list_mut().iter_mut().for_each(|chain| chain.written = needed);
        self.ring.give(self.chains.list());
        self.chains.empty();
        Ok(Some(self.ring.wants_notification(true)))
    }

    /// Returns the ring position at which to continue after a stop.
    pub fn base(&mut self) -> u32 {
        self.ring.base()
    }
}
