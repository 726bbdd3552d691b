//! A device with its queues, and a guest's memory, for the tests.
#![allow(dead_code, reason = "not all tests need all of it")]

use ringroad_e1000::{
    Device, DeviceConfig, Effects, Interrupter, RxQueue, TxQueue, Vector,
    descriptor::rx::{DD, EOP},
    driver::Bus,
    registers::{self as reg, ctrl, rctl, tctl},
};
use ringroad_frame::{ALL, Burst, HEAD, HEADROOM, MAX_FRAME, Offload, PIECES, Sink, Source};
use ringroad_mem::{Hit, Pieces, Region, Table};
use std::sync::Arc;

pub const GUEST: u64 = 0x10_0000;
pub const SIZE: usize = 8 << 20;
pub const TX_RING: u64 = GUEST;
pub const RX_RING: u64 = GUEST + 0x1_0000;
pub const BUFFERS: u64 = GUEST + 0x2_0000;

/// A device on its bus, and what the host does with it.
pub struct Board {
    pub device: Device,
    pub tx: TxQueue,
    pub rx: RxQueue,
    pub interrupter: Interrupter,
    pub memory: Arc<Table>,
    pub now: u64,
    /// Effects of the accesses since they were last looked at.
    pub effects: Effects,
    pub interrupts: Vec<(u64, Vector)>,
    /// When the interrupts are to be settled again.
    pub at: Option<u64>,
    pub burst: Burst,
}

/// The command register: memory, I/O, bus master.
pub const COMMAND: u64 = 4;

pub fn board(config: DeviceConfig) -> Board {
    let memory = Arc::new(Table::default().with(Region::private(SIZE, GUEST).unwrap()).unwrap());
    let mut board = bare(config, Some(memory));
    board.device.config_write(COMMAND, &7u16.to_le_bytes(), 0);
    board
}

/// Before the system has set anything up.
pub fn bare(config: DeviceConfig, memory: Option<Arc<Table>>) -> Board {
    let (device, mut tx, mut rx) = Device::new(config).unwrap();
    tx.set_memory(memory.clone()).unwrap();
    rx.set_memory(memory.clone());
    Board {
        interrupter: device.interrupter(),
        device,
        tx,
        rx,
        memory: memory.unwrap_or_default(),
        now: 1_000_000_000,
        effects: Effects::empty(),
        interrupts: Vec::new(),
        at: None,
        burst: Burst::default(),
    }
}

impl Bus for Board {
    fn read(&mut self, register: u32) -> u32 {
        let mut data = [0; 4];
        let effects = self.device.read(register.into(), &mut data, self.now);
        self.act(effects);
        u32::from_le_bytes(data)
    }

    fn write(&mut self, register: u32, value: u32) {
        let effects = self.device.write(register.into(), &value.to_le_bytes(), self.now);
        self.act(effects);
    }
}

impl Board {
    /// What the host does after an access.
    pub fn act(&mut self, effects: Effects) {
        self.effects |= effects;
        if effects.contains(Effects::QUIESCE) {
            self.tx.quiesce();
            self.rx.quiesce();
        }
        if effects.contains(Effects::INTERRUPT) {
            self.settle();
        }
    }

    pub fn settle(&mut self) {
        let signal = self.interrupter.settle(self.now);
        self.at = signal.at;
        self.interrupts.extend(signal.raise.map(|vector| (self.now, vector)));
    }

    /// Sets up rings of this many descriptors, and enables both queues. Every receive descriptor has a buffer.
    pub fn start(&mut self, count: u32, bits: u32) {
        let rings = [(reg::TDBAL, TX_RING), (reg::RDBAL, RX_RING)];
        for (first, base) in rings {
            self.write(first, base as u32);
            self.write(first + 4, (base >> 32) as u32);
            self.write(first + 8, 16 * count);
        }
        for index in 0..count {
            self.set_word(RX_RING + u64::from(16 * index), self.rx_buffer(index));
            self.set_word(RX_RING + u64::from(16 * index) + 8, 0);
        }
        self.write(reg::CTRL, ctrl::SLU | ctrl::FD);
        self.write(reg::TCTL, tctl::EN);
        self.write(reg::RCTL, rctl::EN | bits);
        self.write(reg::RDT, count - 1);
    }

    pub fn rx_buffer(&self, index: u32) -> u64 {
        BUFFERS + 0x20_0000 + u64::from(index) * 0x4000
    }

    pub fn set(&self, address: u64, bytes: &[u8]) {
        self.memory.span(address, bytes.len(), &mut Hit::default()).unwrap().write(bytes);
    }

    pub fn get(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.span(address, len, &mut Hit::default()).unwrap().read(&mut bytes);
        bytes
    }

    pub fn set_word(&self, address: u64, word: u64) {
        self.set(address, &word.to_le_bytes());
    }

    pub fn word(&self, address: u64) -> u64 {
        u64::from_le_bytes(self.get(address, 8).try_into().unwrap())
    }

    /// Writes transmit descriptors from an index on, and the tail behind them.
    pub fn send(&mut self, first: u32, descriptors: &[[u64; 2]]) {
        for (index, words) in (first..).zip(descriptors) {
            self.set_word(TX_RING + u64::from(index) * 16, words[0]);
            self.set_word(TX_RING + u64::from(index) * 16 + 8, words[1]);
        }
        self.write(reg::TDT, first + descriptors.len() as u32);
    }

    pub fn tx_status(&self, index: u32) -> u64 {
        self.word(TX_RING + u64::from(index) * 16 + 8)
    }

    pub fn rx_status(&self, index: u32) -> u64 {
        self.word(RX_RING + u64::from(index) * 16 + 8)
    }

    /// Takes a burst; returns its frames with what is left to do to them.
    pub fn take(&mut self) -> Vec<(Vec<u8>, Offload)> {
        let taken = self.tx.take(&mut self.burst);
        if taken == 0 {
            return Vec::new();
        }
        let frames = contents(&self.burst);
        self.tx.done(&mut self.burst);
        self.settle();
        frames
    }

    /// Takes all there is.
    pub fn take_all(&mut self) -> Vec<(Vec<u8>, Offload)> {
        let mut all = Vec::new();
        while self.tx.take(&mut self.burst) > 0 {
            all.extend(contents(&self.burst));
            self.tx.done(&mut self.burst);
            self.settle();
        }
        all
    }

    /// Puts frames into the receive queue; returns how many were accepted.
    pub fn put(&mut self, frames: &[(Vec<u8>, Offload)]) -> usize {
        let pool = Pool::new(frames);
        let accepted = self.rx.put(&pool.burst, &ALL[..frames.len()]);
        self.settle();
        accepted
    }

    /// The same with back-pressure; returns how many were handled.
    pub fn offer(&mut self, frames: &[(Vec<u8>, Offload)]) -> usize {
        let pool = Pool::new(frames);
        let handled = self.rx.offer(&pool.burst, &ALL[..frames.len()]);
        self.settle();
        handled
    }
}

/// Frames of another port: as from a virtio queue, each behind a header, in one piece.
pub struct Pool {
    pub burst: Burst,
    memory: Arc<Table>,
}

const SLOT: usize = 70_000;

impl Pool {
    /// As a fast source hands them over, if none has anything special.
    pub fn new(frames: &[(Vec<u8>, Offload)]) -> Pool {
        let table = Pool::memory(frames);
        let mut burst = Burst::default();
        if frames.iter().any(|(frame, offload)| frame.len() < HEAD || !offload.is_none()) {
            burst.start_in(&table);
            for (index, (frame, offload)) in frames.iter().enumerate() {
                burst.push_at((index * SLOT) as u64, HEADROOM + frame.len(), *offload).unwrap();
            }
            return Pool { burst, memory: table };
        }
        let mut pieces = Pieces::new(PIECES.into());
        pieces.start(&table);
        for (index, (frame, _)) in frames.iter().enumerate() {
            pieces.push((index * SLOT) as u64, (HEADROOM + frame.len()) as u32, &mut Hit::default()).unwrap();
        }
        burst.start(MAX_FRAME, HEADROOM);
        burst.extend(pieces.list().iter().map(|&piece| Some(piece)));
        burst.exchange(&mut pieces);
        Pool { burst, memory: table }
    }

    /// Writes to a frame, as its sender may at any time.
    pub fn write(&self, index: usize, at: usize, bytes: &[u8]) {
        let region = &self.memory.regions()[0];
        region.span(index * SLOT + HEADROOM + at, bytes.len()).unwrap().write(bytes);
    }

    fn memory(frames: &[(Vec<u8>, Offload)]) -> Arc<Table> {
        let region = Region::private(frames.len().max(1) * SLOT, 0).unwrap();
        for (index, (frame, _)) in frames.iter().enumerate() {
            region.span(index * SLOT + HEADROOM, frame.len()).unwrap().write(frame);
        }
        Arc::new(Table::default().with(region).unwrap())
    }
}

pub fn contents(burst: &Burst) -> Vec<(Vec<u8>, Offload)> {
    let read = |index: usize| {
        let mut bytes = vec![0; burst.frames()[index].len()];
        assert_eq!(burst.copy(index, 0, &mut bytes), bytes.len());
        (bytes, burst.offload(index))
    };
    (0..burst.frames().len()).map(read).collect()
}

/// The frames in the ring from a descriptor on, each with its last second word; and the next descriptor.
pub fn received(board: &Board, mut index: u32, count: u32, size: usize) -> (Vec<(Vec<u8>, u64)>, u32) {
    let (mut frames, mut bytes) = (Vec::new(), Vec::new());
    loop {
        let word = board.rx_status(index);
        if word & DD == 0 {
            assert!(bytes.is_empty(), "a frame without end");
            return (frames, index);
        }
        let len = (word & 0xffff) as usize;
        assert!(len <= size);
        bytes.extend(board.get(board.rx_buffer(index), len));
        board.set_word(RX_RING + u64::from(16 * index) + 8, 0);
        if word & EOP != 0 {
            frames.push((std::mem::take(&mut bytes), word & !0xffff));
        } else {
            assert_eq!(word & !0xffff, DD);
        }
        index = (index + 1) % count;
    }
}

/// A frame of this length to a destination, with contents that tell frames apart.
pub fn frame(destination: [u8; 6], len: usize, seed: u8) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|at| (at as u8).wrapping_mul(7) ^ seed).collect();
    let head = [&destination[..], &[2, 0, 0, 0, 0, seed], &[0x08, 0x06]].concat();
    let count = head.len().min(len);
    frame[..count].copy_from_slice(&head[..count]);
    frame
}

pub const BROADCAST: [u8; 6] = [0xff; 6];
