//! A virtio-net driver: one pair of queues.

use crate::{
    frontend::{Device, features, signal},
    ring::{AREA, Part, WRITE},
};
use std::{
    io,
    path::Path,
    time::{Duration, Instant},
};

/// VIRTIO_NET_F_MAC.
pub const MAC: u64 = 1 << 5;
/// VIRTIO_NET_F_MRG_RXBUF.
pub const MRG_RXBUF: u64 = 1 << 15;
/// Index of the receive queue.
pub const RX: usize = 0;
/// Index of the transmit queue.
pub const TX: usize = 1;
/// Bytes of struct virtio_net_hdr as VERSION_1 has it.
pub const HEADER: usize = 12;
/// Bytes of a buffer.
pub const BUFFER: u64 = 2048;
/// Where buffers begin.
pub const BUFFERS: u64 = 0x10_0000;
/// Entries of each queue.
pub const ENTRIES: u16 = 256;
/// Everybody's address.
pub const BROADCAST: [u8; 6] = [0xff; 6];
/// An Ethernet type for local experiments.
pub const EXPERIMENT: u16 = 0x88b5;

/// A frame: destination, source, [`EXPERIMENT`], payload, padded to 60 bytes.
pub fn frame(to: [u8; 6], from: [u8; 6], payload: &[u8]) -> Vec<u8> {
    let mut bytes = [&to[..], &from[..], &EXPERIMENT.to_be_bytes()[..], payload].concat();
    bytes.resize(bytes.len().max(60), 0);
    bytes
}

/// A port's driver.
#[derive(Debug)]
pub struct NetPort {
    /// The device.
    pub device: Device,
    /// The address that the device's configuration space tells.
    pub mac: [u8; 6],
    used: Vec<(u16, u32)>,
}

impl NetPort {
    /// Connects with split or packed rings, and fills the receive queue.
    pub fn connect(path: &Path, packed: bool) -> io::Result<NetPort> {
        NetPort::connect_with(path, if packed { features::RING_PACKED } else { 0 } | MAC, 4 << 20)
    }

    /// The same with other features and another amount of memory.
    pub fn connect_with(path: &Path, wanted: u64, memory: u64) -> io::Result<NetPort> {
        let mut port = NetPort::prepare(path, wanted, memory)?;
        port.refill();
        port.device.start(RX)?;
        port.device.start(TX)?;
        Ok(port)
    }

    /// The same, without any queue started.
    pub fn prepare(path: &Path, wanted: u64, memory: u64) -> io::Result<NetPort> {
        let device = Device::connect(path, wanted, &[ENTRIES; 2], memory)?;
        let config = device.frontend.config(12)?;
        let mac = config[..6].try_into().expect("six bytes");
        Ok(NetPort { device, mac, used: Vec::new() })
    }

    /// Where the buffer of a chain lies.
    pub fn buffer(queue: usize, id: u16) -> u64 {
        BUFFERS + (queue as u64 * u64::from(ENTRIES) + u64::from(id)) * BUFFER
    }

    /// Gives the device all receive buffers that there are.
    pub fn refill(&mut self) {
        let ring = &mut self.device.rings[RX];
        while let Some(id) = ring.next_id() {
            let part = Part { at: NetPort::buffer(RX, id), len: BUFFER as u32, flags: WRITE };
            if ring.add(&[part]).is_none() {
                break;
            }
        }
        ring.publish();
        if ring.wants_kick() {
            signal(&self.device.kicks[RX]);
        }
    }

    /// Takes back what was transmitted.
    pub fn reclaim(&mut self) {
        self.device.rings[TX].take_used(&mut self.used);
    }

    /// Puts a frame into the transmit queue, to be seen with [`NetPort::flush`]. `false`: it is full.
    pub fn put(&mut self, frame: &[u8]) -> bool {
        let ring = &mut self.device.rings[TX];
        let Some(id) = ring.next_id() else { return false };
        let at = NetPort::buffer(TX, id);
        let mut bytes = vec![0; HEADER];
        bytes.extend_from_slice(frame);
        ring.mem.write(at, &bytes);
        ring.add(&[Part { at, len: bytes.len() as u32, flags: 0 }]).is_some()
    }

    /// Shows the device what was put.
    pub fn flush(&mut self) {
        let ring = &mut self.device.rings[TX];
        ring.publish();
        if ring.wants_kick() {
            signal(&self.device.kicks[TX]);
        }
    }

    /// Takes what has come: the first `head` bytes of each frame and its length. Returns how many there were.
    pub fn receive(&mut self, head: usize, mut each: impl FnMut(&[u8], usize)) -> usize {
        let ring = &mut self.device.rings[RX];
        ring.take_used(&mut self.used);
        let mut bytes = vec![0; HEADER + head];
        for &(id, len) in &self.used {
            let len = (len as usize).clamp(HEADER, BUFFER as usize);
            let there = len.min(bytes.len());
            ring.mem.read(NetPort::buffer(RX, id), &mut bytes[..there]);
            each(&bytes[HEADER..there], len - HEADER);
        }
        let count = self.used.len();
        if count > 0 {
            self.refill();
        }
        count
    }

    /// Stretches a transmit queue that is nothing but copies of one chain: `count` chains of these parts, again and again, until
    /// a time. What an attacker does who wants the worker's time. Returns how many chains went.
    pub fn storm(&mut self, parts: &[Part], until: Instant) -> u64 {
        let (mut sent, mut used) = (0, Vec::new());
        while Instant::now() < until {
            while self.device.rings[TX].add(parts).is_some() {}
            self.device.go(TX);
            crate::frontend::wait(&self.device.calls[TX], Duration::from_millis(5));
            self.device.rings[TX].take_used(&mut used);
            sent += used.len() as u64;
        }
        sent
    }

    /// The first guest address after rings and buffers.
    pub const FREE: u64 = BUFFERS + 2 * ENTRIES as u64 * BUFFER;
}

const _: () = assert!(BUFFERS >= 4 * AREA);
