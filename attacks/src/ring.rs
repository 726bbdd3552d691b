//! Guest memory, and the driver's end of a virtqueue in it, split or packed, over pwrite and pread.
//!
//! The kernel copies small writes byte by byte if it likes to, and the device may look in between. So what publishes is written
//! last and such that each byte for itself is right: the low byte of a packed descriptor's flags; in a split ring the aligned word
//! of eight bytes that holds the available index, which is copied as one.

use rustix::fs::{MemfdFlags, memfd_create};
use std::{fs::File, os::unix::fs::FileExt, sync::Arc};

/// Where guest address 0 lies in the address space that the frontend claims to have.
pub const USER: u64 = 0x1000_0000_0000;

/// NEXT of a descriptor's flags.
pub const NEXT: u16 = 1;
/// WRITE of a descriptor's flags.
pub const WRITE: u16 = 2;
/// INDIRECT of a descriptor's flags.
pub const INDIRECT: u16 = 4;
/// AVAIL of a packed descriptor's flags.
pub const AVAIL: u16 = 1 << 7;
/// USED of a packed descriptor's flags.
pub const USED: u16 = 1 << 15;

/// A guest's memory: guest address 0 is offset 0 of the file.
#[derive(Clone, Debug)]
pub struct Memory {
    file: Arc<File>,
    len: u64,
}

impl Memory {
    /// A memfd of so many bytes.
    pub fn new(len: u64) -> Memory {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd"));
        file.set_len(len).expect("a size");
        Memory { file: Arc::new(file), len }
    }

    /// The file behind it.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Bytes that it was made with.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Writes bytes to a guest address.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        // An attack may have truncated it.
        let _ = self.file.write_all_at(bytes, at);
    }

    /// Reads bytes from a guest address; zeros where there are none.
    pub fn read(&self, at: u64, bytes: &mut [u8]) {
        let read = self.file.read_at(bytes, at).unwrap_or(0);
        bytes[read..].fill(0);
    }

    /// Reads a number of two bytes, until it is the same twice: never half of one and half of the next.
    pub fn u16(&self, at: u64) -> u16 {
        let read = || {
            let mut bytes = [0; 2];
            self.read(at, &mut bytes);
            u16::from_le_bytes(bytes)
        };
        let mut last = read();
        loop {
            let now = read();
            if now == last {
                return now;
            }
            last = now;
        }
    }

    /// Writes a number of two bytes, in no certain order.
    pub fn put_u16(&self, at: u64, value: u16) {
        self.write(at, &value.to_le_bytes());
    }
}

/// One buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Guest address.
    pub at: u64,
    /// Bytes.
    pub len: u32,
    /// [`WRITE`], [`INDIRECT`], or nothing.
    pub flags: u16,
}

/// A descriptor as both layouts have it: address, length, and two numbers of two bytes.
pub fn descriptor(at: u64, len: u32, a: u16, b: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&at.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&a.to_le_bytes());
    bytes[14..].copy_from_slice(&b.to_le_bytes());
    bytes
}

/// Bytes of guest memory for a ring of up to 1024 entries.
pub const AREA: u64 = 0x1_0000;

/// The driver's end of a queue. Its fields are open to whoever wants to break it.
#[derive(Debug)]
pub struct Ring {
    /// Where it lies.
    pub mem: Memory,
    /// Its layout.
    pub packed: bool,
    /// Entries.
    pub size: u16,
    /// Descriptor table or ring.
    pub desc: u64,
    /// Available ring, or the driver's event suppression.
    pub driver: u64,
    /// Used ring, or the device's event suppression.
    pub device: u64,
    /// Split: the available index that is published next. Packed: the slot that is written next.
    pub next: u16,
    wrap: bool,
    /// Split: the used index up to which buffers were taken back. Packed: the slot that is looked at next.
    pub used: u16,
    used_wrap: bool,
    /// Descriptors (split) or slots (packed) that are free.
    room: u16,
    free: Vec<u16>,
    /// By id, what a chain occupies. Split: its descriptors, packed: as many slots.
    chains: Vec<Vec<u16>>,
    /// Split: the first two entries of the available ring, which lie in the same word as its index.
    first: [u16; 2],
    /// Packed: where the first descriptor's flags go that publish, and what they are.
    held: Option<(u64, u16)>,
}

impl Ring {
    /// A fresh ring in [`AREA`] bytes from `at` on.
    pub fn new(mem: &Memory, packed: bool, size: u16, at: u64) -> Ring {
        assert!(size <= 1024);
        mem.write(at, &vec![0; AREA as usize]);
        Ring::at(mem, packed, size, [at, at + 0x8000, at + 0xc000])
    }

    /// A ring whose three areas (descriptors, driver, device), all zeros, lie anywhere: one of any size.
    pub fn at(mem: &Memory, packed: bool, size: u16, [desc, driver, device]: [u64; 3]) -> Ring {
        Ring {
            mem: mem.clone(),
            packed,
            size,
            desc,
            driver,
            device,
            next: 0,
            wrap: true,
            used: 0,
            used_wrap: true,
            room: size,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); size.into()],
            first: [0; 2],
            held: None,
        }
    }

    /// Chains of one buffer that can be added.
    pub fn room(&self) -> u16 {
        self.room
    }

    /// The id of the next chain. `None`: the ring is full.
    pub fn next_id(&self) -> Option<u16> {
        if self.room == 0 { None } else { self.free.last().copied() }
    }

    /// Adds a chain, which the device sees when it is published. Returns its id; `None`: no room.
    pub fn add(&mut self, parts: &[Part]) -> Option<u16> {
        if parts.is_empty() || parts.len() > usize::from(self.room) {
            return None;
        }
        self.room -= parts.len() as u16;
        Some(if self.packed { self.add_packed(parts) } else { self.add_split(parts) })
    }

    fn add_split(&mut self, parts: &[Part]) -> u16 {
        let taken: Vec<u16> = self.free.drain(self.free.len() - parts.len()..).rev().collect();
        for (index, (part, &slot)) in parts.iter().zip(&taken).enumerate() {
            let (flags, next) = taken.get(index + 1).map_or((part.flags, 0), |&next| (part.flags | NEXT, next));
            self.mem.write(self.desc + u64::from(slot) * 16, &descriptor(part.at, part.len, flags, next));
        }
        let (id, slot) = (taken[0], self.next % self.size);
        match self.first.get_mut(usize::from(slot)) {
            Some(first) => *first = id,
            None => self.mem.put_u16(self.driver + 4 + 2 * u64::from(slot), id),
        }
        self.next = self.next.wrapping_add(1);
        self.chains[usize::from(id)] = taken;
        id
    }

    fn add_packed(&mut self, parts: &[Part]) -> u16 {
        let id = self.free.pop().expect("as many ids as slots");
        for (index, part) in parts.iter().enumerate() {
            let more = if index + 1 < parts.len() { NEXT } else { 0 };
            let flags = part.flags | more | if self.wrap { AVAIL } else { USED };
            let at = self.desc + u64::from(self.next) * 16;
            if self.held.is_none() {
                self.mem.write(at, &descriptor(part.at, part.len, id, flags)[..14]);
                self.held = Some((at + 14, flags));
            } else {
                self.mem.write(at, &descriptor(part.at, part.len, id, flags));
            }
            self.next += 1;
            if self.next == self.size {
                (self.next, self.wrap) = (0, !self.wrap);
            }
        }
        self.chains[usize::from(id)] = vec![0; parts.len()];
        id
    }

    /// Shows the device what was added.
    pub fn publish(&mut self) {
        if self.packed {
            if let Some((at, flags)) = self.held.take() {
                // The high byte, with USED, has been right since the device gave the slot back.
                self.mem.write(at + 1, &flags.to_le_bytes()[1..]);
                self.mem.write(at, &flags.to_le_bytes()[..1]);
            }
            return;
        }
        self.put_index(self.next);
    }

    /// Writes the available index of a split ring, whatever it is.
    pub fn put_index(&self, index: u16) {
        let words = [0, index, self.first[0], self.first[1]].map(u16::to_le_bytes);
        self.mem.write(self.driver, words.as_flattened());
    }

    /// Whether the device wants to be notified of what was published.
    pub fn wants_kick(&self) -> bool {
        if self.packed { self.mem.u16(self.device + 2) & 3 != 1 } else { self.mem.u16(self.device) & 1 == 0 }
    }

    /// Takes back what the device has used: ids, and bytes written.
    pub fn take_used(&mut self, each: &mut Vec<(u16, u32)>) {
        each.clear();
        if self.packed {
            self.take_packed(each);
        } else {
            self.take_split(each);
        }
        for &(id, _) in each.iter() {
            let slots = std::mem::take(&mut self.chains[usize::from(id)]);
            self.room += slots.len() as u16;
            if self.packed {
                self.free.push(id);
            } else {
                self.free.extend(slots.into_iter().rev());
            }
        }
    }

    fn take_split(&mut self, each: &mut Vec<(u16, u32)>) {
        let index = self.mem.u16(self.device + 2);
        while self.used != index && each.len() < usize::from(self.size) {
            let mut entry = [0; 8];
            self.mem.read(self.device + 4 + 8 * u64::from(self.used % self.size), &mut entry);
            self.used = self.used.wrapping_add(1);
            let [id, len] = [0, 4].map(|at| u32::from_le_bytes(entry[at..at + 4].try_into().expect("four bytes")));
            if id < u32::from(self.size) && !self.chains[id as usize].is_empty() {
                each.push((id as u16, len));
            }
        }
    }

    fn take_packed(&mut self, each: &mut Vec<(u16, u32)>) {
        let mut bytes = [0; 16];
        loop {
            let at = self.desc + u64::from(self.used) * 16;
            let flags = self.mem.u16(at + 14);
            if (flags & AVAIL != 0) != self.used_wrap || (flags & USED != 0) != self.used_wrap {
                return;
            }
            self.mem.read(at, &mut bytes);
            let id = u16::from_le_bytes([bytes[12], bytes[13]]);
            let len = u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes"));
            let Some(chain) = self.chains.get(usize::from(id)).filter(|chain| !chain.is_empty()) else { return };
            self.used += chain.len() as u16;
            if self.used >= self.size {
                (self.used, self.used_wrap) = (self.used - self.size, !self.used_wrap);
            }
            if each.iter().any(|&(other, _)| other == id) {
                return;
            }
            each.push((id, len));
            if each.len() == usize::from(self.size) {
                return;
            }
        }
    }
}
