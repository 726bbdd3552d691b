//! A guest's driver, on a connection that the test controls.

use super::{
    PATIENCE, eventfd,
    frontend::{Peer, longs, mem_table, words},
    request::*,
    within,
};
use ringroad_mem::Span;
use ringroad_net::{Driver, DriverConfig, bits};
use ringroad_wire::ethernet::MacAddr;
use std::os::fd::AsRawFd;
use vmm_sys_util::eventfd::EventFd;

/// The descriptors of a vring.
pub struct Vring {
    pub kick: EventFd,
    pub call: EventFd,
    pub err: EventFd,
}

impl Vring {
    /// Returns whether the device signals that a fault has stopped the vring.
    pub fn failed(&self) -> bool {
        within(PATIENCE, || self.err.read().is_ok())
    }
}

/// A guest's driver with its own memory and rings, on a connection controlled by the test.
pub struct Guest {
    pub peer: Peer,
    pub driver: Driver,
    pub acked: u64,
    pub size: u32,
    pub mac: MacAddr,
    /// Receive and transmit queue.
    pub vrings: [Vring; 2],
    next: u64,
    came: Vec<Vec<u8>>,
}

impl Guest {
    /// Negotiates features; nothing runs yet.
    pub fn new(mut peer: Peer, acked: u64, size: u32) -> Guest {
        peer.negotiate(acked);
        Guest::on(peer, acked, size)
    }

    /// The same on a connection that has negotiated features.
    pub fn on(peer: Peer, acked: u64, size: u32) -> Guest {
        let config = DriverConfig { acked, queue_pairs: 1, queue_size: size, frame: 1518, huge: false };
        let vring = || Vring { kick: eventfd(), call: eventfd(), err: eventfd() };
        let driver = Driver::new(config).unwrap();
        let mac = MacAddr::local(1);
        Guest { peer, driver, acked, size, mac, vrings: [vring(), vring()], next: 0, came: Vec::new() }
    }

    pub fn is_packed(&self) -> bool {
        self.acked & bits::RING_PACKED != 0
    }

    /// Returns the base of a ring that was never used.
    pub fn fresh(&self) -> u32 {
        if self.is_packed() { 0x8000_8000 } else { 0 }
    }

    /// Returns its memory region as in messages.
    pub fn region(&self) -> [u64; 4] {
        let region = &self.driver.region;
        [region.guest(), region.len() as u64, region.user(), 0]
    }

    #[track_caller]
    pub fn set_memory(&mut self) {
        let region = self.region();
        self.peer.ok(SET_MEM_TABLE, &mem_table(&[region]), &[self.driver.file.as_raw_fd()]);
    }

    /// Returns the payload of SET_VRING_ADDR: index and flags, descriptor, device ("used"), driver ("available") area, log.
    pub fn addresses(&self, index: u32) -> [u64; 5] {
        let at = if index == 0 { self.driver.rx[0].addresses() } else { self.driver.tx[0].addresses() };
        [index.into(), at.descriptor, at.device, at.driver, 0]
    }

    /// Sets up a vring completely, except for enabling it.
    #[track_caller]
    pub fn prepare(&mut self, index: u32, base: u32) {
        let addresses = longs(&self.addresses(index));
        let Vring { kick, call, err } = &self.vrings[index as usize];
        let peer = &mut self.peer;
        peer.ok(SET_VRING_NUM, &words(&[index, self.size]), &[]);
        peer.ok(SET_VRING_BASE, &words(&[index, base]), &[]);
        peer.ok(SET_VRING_ADDR, &addresses, &[]);
        peer.ok(SET_VRING_CALL, &longs(&[index.into()]), &[call.as_raw_fd()]);
        peer.ok(SET_VRING_ERR, &longs(&[index.into()]), &[err.as_raw_fd()]);
        peer.ok(SET_VRING_KICK, &longs(&[index.into()]), &[kick.as_raw_fd()]);
    }

    #[track_caller]
    pub fn start_all(&mut self) {
        self.set_memory();
        self.driver.rx[0].refill();
        for index in 0..2 {
            self.prepare(index, self.fresh());
            self.peer.ok(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
        }
    }

    /// The same guest after a reset: new memory and rings, same connection.
    pub fn again(self) -> Guest {
        let acked = self.acked;
        self.again_with(acked)
    }

    /// The same with other features.
    #[track_caller]
    pub fn again_with(self, acked: u64) -> Guest {
        let Guest { mut peer, size, mac, .. } = self;
        peer.ok(SET_FEATURES, &longs(&[acked]), &[]);
        let mut guest = Guest { mac, ..Guest::on(peer, acked, size) };
        guest.start_all();
        guest
    }

    /// Adds a frame to the transmit queue, without a kick, and returns its sequence number.
    pub fn add(&mut self, to: MacAddr) -> Option<u64> {
        let sequence = self.next;
        let frame = [&to.0[..], &self.mac.0, &[0x88, 0xb5], &sequence.to_be_bytes(), &[7; 42]].concat();
        let added = self.add_frame(&frame);
        self.next += u64::from(added);
        added.then_some(sequence)
    }

    /// Adds any frame, without a kick. Returns `false` if there is no free buffer.
    pub fn add_frame(&mut self, frame: &[u8]) -> bool {
        let tx = &mut self.driver.tx[0];
        let _ = tx.reclaim().unwrap();
        let added = tx.add(1, |_, place| place.write(frame));
        tx.publish();
        added > 0
    }

    /// Sends a frame. Waits for a free buffer: a frame arrives a moment before its buffer is returned.
    #[track_caller]
    pub fn send_to(&mut self, to: MacAddr) -> u64 {
        let mut sequence = None;
        within(PATIENCE, || {
            sequence = self.add(to);
            sequence.is_some()
        });
        let sequence = sequence.expect("the transmit queue stays full");
        let _ = self.vrings[1].kick.write(1);
        sequence
    }

    /// Returns the sequence numbers of frames received from an address since the last call.
    pub fn received(&mut self, from: MacAddr) -> Vec<u64> {
        let came = &mut self.came;
        let mut receive = |pieces: &[Span<'_>]| {
            let mut frame = vec![0; pieces.iter().map(|piece| piece.len()).sum()];
            let mut at = 0;
            pieces.iter().for_each(|piece| at += piece.read(&mut frame[at..]));
            came.push(frame);
        };
        while self.driver.rx[0].receive(true, &mut receive).unwrap() > 0 {}
        let _ = self.vrings[0].call.read();
        let number = |frame: &Vec<u8>| {
            assert_eq!((frame.len(), &frame[12..14], &frame[22..]), (64, &[0x88, 0xb5][..], &[7; 42][..]), "damaged");
            u64::from_be_bytes(frame[14..22].try_into().unwrap())
        };
        let frames = self.came.extract_if(.., |frame| frame.get(6..12) == Some(&from.0[..]));
        frames.map(|frame| number(&frame)).collect()
    }

    /// Returns whether the next frame from an address has this sequence number.
    pub fn receives(&mut self, from: MacAddr, sequence: u64) -> bool {
        within(PATIENCE, || self.received(from).contains(&sequence))
    }

    /// Writes to its memory at a user address, as a malicious driver could.
    pub fn poke(&self, address: u64, bytes: &[u8]) {
        let offset = (address - self.driver.region.user()) as usize;
        assert_eq!(self.driver.region.span(offset, bytes.len()).unwrap().write(bytes), bytes.len());
    }

    /// Makes one descriptor available in a ring that was not used yet.
    pub fn poke_descriptor(&self, index: u32, address: u64, len: u32, flags: u16) {
        let [_, descriptor, _, available, _] = self.addresses(index);
        let (flags, tail) = if self.is_packed() { (0, flags | 1 << 7) } else { (flags, 0) };
        self.poke(descriptor, &address.to_le_bytes());
        self.poke(descriptor + 8, &[&len.to_le_bytes()[..], &flags.to_le_bytes(), &tail.to_le_bytes()].concat());
        if !self.is_packed() {
            self.poke(available, &[0, 0, 1, 0, 0, 0]);
        }
    }
}
