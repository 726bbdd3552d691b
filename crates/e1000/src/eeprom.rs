//! The EEPROM (8254x Software Developer's Manual, 5): 64 words on a microwire bus that software drives bit by bit through EECD,
//! as the 93C46 of real boards.

use crate::registers::{eecd, eerd};
use ringroad_wire::ethernet::MacAddr;

/// Number of words.
pub const WORDS: usize = 64;
/// What the sum of all words is (5.6.35).
pub const CHECKSUM: u16 = 0xbaba;

/// Opcodes, behind the start bit.
const READ: u16 = 2;
const WRITE: u16 = 1;
const ERASE: u16 = 3;
const EXTENDED: u16 = 0;

/// State of a transfer, since the chip was selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Transfer {
    /// Not selected, or before the start bit.
    #[default]
    Idle,
    /// The start bit has come, and so many bits of opcode and address.
    Command { bits: u8, value: u16 },
    /// Words are read, from this bit on: 16 times the address, and the bits that have left.
    Read { bit: u32 },
    /// A word is written.
    Write { address: u16, bits: u8, value: u16 },
    /// Done, until the chip is selected again.
    Done,
}

/// The EEPROM of one device.
#[derive(Clone, Debug)]
pub(crate) struct Eeprom {
    words: [u16; WORDS],
    /// EECD as written, only the bits that software drives.
    lines: u32,
    transfer: Transfer,
    /// DO.
    output: bool,
    writable: bool,
    eerd: u32,
}

impl Eeprom {
    /// Returns the contents of a board with this address.
    pub fn new(mac: MacAddr) -> Eeprom {
        let mut words = [0xffff; WORDS];
        let [a, b, c, d, e, f] = mac.0;
        let known = [
            (0x00, u16::from_le_bytes([a, b])),
            (0x01, u16::from_le_bytes([c, d])),
            (0x02, u16::from_le_bytes([e, f])),
            // Compatibility: a client's adapter on a plain board.
            (0x03, 0x0000),
            // Board assembly.
            (0x08, 0x0000),
            (0x09, 0x0000),
            // Initialization control 1: valid, identifiers are loaded.
            (0x0a, 0x4403),
            (0x0b, crate::pci::DEVICE),
            (0x0c, crate::pci::VENDOR),
            (0x0d, crate::pci::DEVICE),
            (0x0e, crate::pci::VENDOR),
            // Initialization control 2: pause frames both ways.
            (0x0f, 0x3040),
            // Initialization control 3: no wake up.
            (0x14, 0x0000),
            (0x24, 0x0000),
        ];
        for (at, word) in known {
            if let Some(place) = words.get_mut(at) {
                *place = word;
            }
        }
        let sum = words.iter().take(WORDS - 1).fold(0u16, |sum, &word| sum.wrapping_add(word));
        if let Some(last) = words.last_mut() {
            *last = CHECKSUM.wrapping_sub(sum);
        }
        Eeprom { words, lines: 0, transfer: Transfer::Idle, output: true, writable: false, eerd: 0 }
    }

    /// Returns the address that it holds now.
    pub fn mac(&self) -> MacAddr {
        let [first, second, third] = [0, 1, 2].map(|at| self.word(at).to_le_bytes());
        let ([a, b], [c, d], [e, f]) = (first, second, third);
        MacAddr([a, b, c, d, e, f])
    }

    fn word(&self, address: u32) -> u16 {
        self.words.get(address as usize % WORDS).copied().unwrap_or_default()
    }

    /// Resets the bus; the words stay.
    pub fn reset(&mut self) {
        (self.lines, self.transfer, self.output, self.writable, self.eerd) = (0, Transfer::Idle, true, false, 0);
    }

    /// Returns EECD. Access is granted to whoever asks, as nobody else does.
    pub fn eecd(&self) -> u32 {
        let grant = if self.lines & eecd::REQ != 0 { eecd::GNT } else { 0 };
        let output = if self.output { eecd::DO } else { 0 };
        self.lines | grant | output | eecd::PRES
    }

    /// Writes EECD: the lines of the bus. Data moves at the rising edge of the clock.
    pub fn set_eecd(&mut self, value: u32) {
        let before = self.lines;
        self.lines = value & (eecd::SK | eecd::CS | eecd::DI | eecd::REQ);
        if self.lines & eecd::CS == 0 {
            (self.transfer, self.output) = (Transfer::Idle, true);
            return;
        }
        if self.lines & !before & eecd::SK != 0 {
            let input = u16::from(self.lines & eecd::DI != 0);
            self.transfer = self.clock(input);
        }
    }

    /// Returns the state after a clock with this bit at DI.
    fn clock(&mut self, input: u16) -> Transfer {
        match self.transfer {
            Transfer::Idle if input == 1 => Transfer::Command { bits: 0, value: 0 },
            Transfer::Idle => Transfer::Idle,
            Transfer::Command { bits, value } if bits < 7 => {
                Transfer::Command { bits: bits + 1, value: value << 1 | input }
            }
            Transfer::Command { value, .. } => self.command(value << 1 | input),
            Transfer::Read { bit } => {
                self.output = self.word(bit / 16) >> (15 - bit % 16) & 1 != 0;
                Transfer::Read { bit: (bit + 1) % (16 * WORDS as u32) }
            }
            Transfer::Write { address, bits, value } if bits < 15 => {
                Transfer::Write { address, bits: bits + 1, value: value << 1 | input }
            }
            Transfer::Write { address, value, .. } => self.program(address, value << 1 | input),
            Transfer::Done => Transfer::Done,
        }
    }

    /// Carries out a command: two bits of opcode, six of address.
    fn command(&mut self, value: u16) -> Transfer {
        let address = value & 0x3f;
        match value >> 6 {
            READ => {
                // A zero precedes the first word.
                self.output = false;
                Transfer::Read { bit: 16 * u32::from(address) }
            }
            WRITE => Transfer::Write { address, bits: 0, value: 0 },
            ERASE => self.program(address, 0xffff),
            EXTENDED => {
                // Erase/write enable is 11xxxx, disable 00xxxx; the others concern the whole chip, which no driver does.
                match address >> 4 {
                    3 => self.writable = true,
                    0 => self.writable = false,
                    _ => {}
                }
                Transfer::Done
            }
            _ => Transfer::Done,
        }
    }

    fn program(&mut self, address: u16, value: u16) -> Transfer {
        if self.writable
            && let Some(word) = self.words.get_mut(usize::from(address))
        {
            *word = value;
        }
        // Programming takes no time: DO says ready when the chip is selected again.
        self.output = true;
        Transfer::Done
    }

    /// Returns EERD.
    pub fn eerd(&self) -> u32 {
        self.eerd
    }

    /// Writes EERD: reads a word at once.
    pub fn set_eerd(&mut self, value: u32) {
        self.eerd = value & 0xff00;
        if value & eerd::START != 0 {
            let word = self.words.get((value >> 8 & 0xff) as usize).copied().unwrap_or(0xffff);
            self.eerd |= eerd::DONE | u32::from(word) << 16;
        }
    }
}
