//! A virtio-vsock driver: packets by hand.

use crate::{
    frontend::{Device, features, signal, wait},
    ring::{NEXT, Part, WRITE, descriptor},
};
use std::{
    io,
    path::Path,
    time::{Duration, Instant},
};

/// Index of the receive queue.
pub const RX: usize = 0;
/// Index of the transmit queue.
pub const TX: usize = 1;
/// Bytes of struct virtio_vsock_hdr.
pub const HEADER: usize = 44;
/// The host's context identifier.
pub const HOST: u64 = 2;
/// SOCK_STREAM.
pub const STREAM: u16 = 1;
/// SOCK_SEQPACKET.
pub const SEQPACKET: u16 = 2;
/// VIRTIO_VSOCK_F_STREAM, VIRTIO_VSOCK_F_SEQPACKET.
pub const KINDS: u64 = 3;

/// Operations.
#[allow(missing_docs, reason = "the specification's names and numbers")]
pub mod op {
    pub const REQUEST: u16 = 1;
    pub const RESPONSE: u16 = 2;
    pub const RST: u16 = 3;
    pub const SHUTDOWN: u16 = 4;
    pub const RW: u16 = 5;
    pub const CREDIT_UPDATE: u16 = 6;
    pub const CREDIT_REQUEST: u16 = 7;
}

/// A packet's header.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the specification's names")]
pub struct Header {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    pub len: u32,
    pub kind: u16,
    pub op: u16,
    pub flags: u32,
    pub buf_alloc: u32,
    pub fwd_cnt: u32,
}

impl Header {
    /// As it stands in the queue.
    pub fn bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        let words = [self.src_port, self.dst_port, self.len, u32::from(self.kind) | u32::from(self.op) << 16];
        let more = [self.flags, self.buf_alloc, self.fwd_cnt];
        for (word, place) in words.iter().chain(&more).zip(bytes[16..].chunks_mut(4)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// As it came.
    pub fn parse(bytes: &[u8; HEADER]) -> Header {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Header {
            src_cid: long(0),
            dst_cid: long(8),
            src_port: word(16),
            dst_port: word(20),
            len: word(24),
            kind: word(28) as u16,
            op: (word(28) >> 16) as u16,
            flags: word(32),
            buf_alloc: word(36),
            fwd_cnt: word(40),
        }
    }

    /// The way back of what came, with an operation.
    pub fn answer(&self, op: u16) -> Header {
        Header {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op,
            buf_alloc: 1 << 18,
            ..Header::default()
        }
    }
}

/// Entries of the transmit queue.
const ENTRIES: u16 = 512;
/// Packets that a flood has in the queue at once.
const BATCH: usize = 256;
/// Where headers of a flood lie, 64 bytes for each; the payload of all of them; and receive buffers.
const HEADERS: u64 = 0x4_0000;
/// Where a flood's payload lies, up to 64 KiB.
pub const PAYLOAD: u64 = 0x8_0000;
/// Where receive buffers begin.
pub const BUFFERS: u64 = 0x10_0000;

/// A guest's driver.
#[derive(Debug)]
pub struct VsockGuest {
    /// The device.
    pub device: Device,
    /// Its context identifier.
    pub cid: u64,
    buffer: u32,
    used: Vec<(u16, u32)>,
    /// What a flood has published.
    flooded: u16,
    /// Bytes of payload that the descriptors of a flood are prepared for.
    prepared: Option<u32>,
}

impl VsockGuest {
    /// Connects. `entries`: of the receive queue. No receive buffers are given yet; `buffer`: how long they are to be.
    pub fn connect(path: &Path, packed: bool, entries: u16, buffer: u32) -> io::Result<VsockGuest> {
        let wanted = KINDS | if packed { features::RING_PACKED } else { 0 };
        let memory = BUFFERS + u64::from(entries) * u64::from(buffer).next_multiple_of(64) + (1 << 20);
        let device = Device::connect(path, wanted, &[entries, ENTRIES, 64], memory)?;
        let config = device.frontend.config(8)?;
        let cid = u64::from_le_bytes(config[..8].try_into().expect("eight bytes"));
        (0..3).try_for_each(|queue| device.start(queue))?;
        Ok(VsockGuest { device, cid, buffer, used: Vec::new(), flooded: 0, prepared: None })
    }

    fn buffer(&self, id: u16) -> u64 {
        BUFFERS + u64::from(id) * u64::from(self.buffer).next_multiple_of(64)
    }

    /// Gives the device up to `count` receive buffers.
    pub fn give(&mut self, count: usize) {
        for _ in 0..count {
            let Some(id) = self.device.rings[RX].next_id() else { break };
            let part = Part { at: self.buffer(id), len: self.buffer, flags: WRITE };
            self.device.rings[RX].add(&[part]);
        }
        self.device.rings[RX].publish();
        if self.device.rings[RX].wants_kick() {
            signal(&self.device.kicks[RX]);
        }
    }

    /// How many receive buffers the device has used since they were last looked at.
    pub fn received(&mut self, mut each: impl FnMut(Header, &[u8])) -> usize {
        let mut used = std::mem::take(&mut self.used);
        self.device.rings[RX].take_used(&mut used);
        let mut bytes = vec![0; self.buffer as usize];
        for &(id, len) in &used {
            let len = (len as usize).clamp(HEADER, bytes.len());
            self.device.mem.read(self.buffer(id), &mut bytes[..len]);
            let (header, payload) = bytes[..len].split_at(HEADER);
            each(Header::parse(header.try_into().expect("a header")), payload);
        }
        let count = used.len();
        self.used = used;
        count
    }

    /// A header from one of its ports.
    pub fn header(&self, port: u32, to: (u64, u32), op: u16) -> Header {
        Header {
            src_cid: self.cid,
            dst_cid: to.0,
            src_port: port,
            dst_port: to.1,
            kind: STREAM,
            op,
            buf_alloc: 1 << 20,
            ..Header::default()
        }
    }

    /// Sends a packet, and waits until the device has taken it. `false`: it did not.
    pub fn send(&mut self, header: Header, payload: &[u8]) -> bool {
        let Some(id) = self.device.rings[TX].next_id() else { return false };
        // Of its own for each id, so that packets may be on their way while others are written.
        let at = HEADERS + u64::from(id) * 512;
        let header = Header { len: payload.len() as u32, ..header };
        self.device.mem.write(at, &[&header.bytes()[..], payload].concat());
        self.device.rings[TX].add(&[Part { at, len: (HEADER + payload.len()) as u32, flags: 0 }]);
        self.device.go(TX);
        self.settle(Duration::from_secs(1))
    }

    /// Waits until the device has taken all packets.
    fn settle(&mut self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        let mut used = Vec::new();
        loop {
            self.device.rings[TX].take_used(&mut used);
            if self.device.rings[TX].room() == self.device.rings[TX].size {
                return true;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            wait(&self.device.calls[TX], left.min(Duration::from_millis(2)));
        }
    }

    /// Sends many packets as fast as the device takes them, each with the same `payload` bytes at [`PAYLOAD`], until there are no
    /// more or a time is over. Only for split rings, and nothing else may be sent afterwards. Returns how many went.
    pub fn flood(&mut self, payload: u32, headers: &mut dyn Iterator<Item = Header>, until: Instant) -> u64 {
        self.prepare(payload);
        let ring = &self.device.rings[TX];
        let mut sent = 0;
        let mut block = Vec::with_capacity(64 * BATCH);
        loop {
            block.clear();
            for header in headers.take(BATCH) {
                block.extend_from_slice(&Header { len: payload, ..header }.bytes());
                block.resize(block.len().next_multiple_of(64), 0);
            }
            let count = (block.len() / 64) as u16;
            if count == 0 {
                return sent;
            }
            self.device.mem.write(HEADERS, &block);
            // Heads 0, 1, 2 … in each batch: the entries of the available ring from here on.
            let entries: Vec<u8> = (0..count).flat_map(u16::to_le_bytes).collect();
            let start = self.flooded % ENTRIES;
            let first = usize::from((ENTRIES - start).min(count)) * 2;
            let (early, late) = entries.split_at(first);
            self.device.mem.write(ring.driver + 4 + 2 * u64::from(start), early);
            self.device.mem.write(ring.driver + 4, late);
            self.flooded = self.flooded.wrapping_add(count);
            let mut word = [0; 8];
            self.device.mem.read(ring.driver, &mut word);
            word[2..4].copy_from_slice(&self.flooded.to_le_bytes());
            self.device.mem.write(ring.driver, &word);
            signal(&self.device.kicks[TX]);
            while self.device.mem.u16(ring.device + 2) != self.flooded {
                if Instant::now() >= until {
                    return sent;
                }
                wait(&self.device.calls[TX], Duration::from_millis(2));
            }
            sent += u64::from(count);
        }
    }

    /// Writes the descriptors of a flood: a header, followed by the payload that all share.
    fn prepare(&mut self, payload: u32) {
        let ring = &self.device.rings[TX];
        assert!(!ring.packed && payload <= 1 << 16);
        if self.prepared.is_none() {
            self.flooded = ring.next;
        }
        if self.prepared == Some(payload) {
            return;
        }
        for index in 0..BATCH as u64 {
            let (flags, next) = if payload > 0 { (NEXT, BATCH as u16 + index as u16) } else { (0, 0) };
            let head = descriptor(HEADERS + 64 * index, HEADER as u32, flags, next);
            self.device.mem.write(ring.desc + 16 * index, &head);
            self.device.mem.write(ring.desc + 16 * (BATCH as u64 + index), &descriptor(PAYLOAD, payload, 0, 0));
        }
        self.prepared = Some(payload);
    }
}

const _: () = assert!(HEADERS + ENTRIES as u64 * 512 <= PAYLOAD && PAYLOAD + (1 << 16) <= BUFFERS);
