//! PCI configuration space (8254x Software Developer's Manual, 4; PCI 2.3): 256 bytes with BARs, INTA and two capabilities, power
//! management and MSI.

/// Intel.
pub const VENDOR: u16 = 0x8086;
/// 82540EM.
pub const DEVICE: u16 = 0x100e;
/// Size of the I/O BAR in bytes.
pub const IO_BAR: u64 = 64;
/// Size of configuration space in bytes.
pub const CONFIG: usize = 256;

use crate::registers::BAR;

/// Bits of the command register.
const COMMAND_MASTER: u16 = 1 << 2;
const COMMAND_INTX_OFF: u16 = 1 << 10;
/// Bit of the status register: the line is asserted.
const STATUS_INTX: u8 = 1 << 3;

/// Positions.
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BARS: usize = 0x10;
const POWER: usize = 0xdc;
const MSI: usize = 0xf0;

/// Bits of the registers of power management and MSI.
const POWER_STATE: u8 = 3;
const MSI_ENABLE: u8 = 1;

/// What the registers hold when the device is turned on: position and bytes.
const INITIAL: [(usize, &[u8]); 12] = [
    (0x00, &VENDOR.to_le_bytes()),
    (0x02, &DEVICE.to_le_bytes()),
    // Capabilities; parity and back-to-back as the part has them.
    (STATUS, &[0x30, 0x02]),
    // Revision 3; Ethernet controller.
    (0x08, &[0x03, 0x00, 0x00, 0x02]),
    (0x0c, &[0x10, 0x00, 0x00, 0x00]),
    // Memory; none; I/O.
    (BARS, &[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]),
    (0x2c, &VENDOR.to_le_bytes()),
    (0x2e, &DEVICE.to_le_bytes()),
    (0x34, &[POWER as u8]),
    // INTA; grant and latency.
    (0x3c, &[0x00, 0x01, 0xff, 0x00]),
    // Power management 1.1, D0 and D3 only; next is MSI.
    (POWER, &[0x01, MSI as u8, 0x02, 0x00]),
    // MSI with a 64-bit address, one message.
    (MSI, &[0x05, 0x00, 0x80, 0x00]),
];

/// Bits that software can change: position and mask of each byte.
const WRITABLE: [(usize, &[u8]); 9] = [
    (COMMAND, &[0x57, 0x05]),
    (0x0c, &[0xff, 0xf8]),
    (BARS, &((BAR as u32 - 1) ^ u32::MAX).to_le_bytes()),
    (BARS + 8, &((IO_BAR as u32 - 1) ^ u32::MAX).to_le_bytes()),
    (0x3c, &[0xff]),
    (POWER + 4, &[POWER_STATE]),
    (MSI + 2, &[MSI_ENABLE]),
    (MSI + 4, &[0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
    (MSI + 12, &[0xff, 0xff]),
];

/// An MSI message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Where it is written to.
    pub address: u64,
    /// What is written.
    pub data: u16,
}

/// Configuration space of one device.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    bytes: [u8; CONFIG],
    writable: [u8; CONFIG],
}

impl Default for Config {
    fn default() -> Config {
        let (mut bytes, mut writable) = ([0; CONFIG], [0; CONFIG]);
        INITIAL.iter().for_each(|&(at, value)| put(&mut bytes, at, value));
        WRITABLE.iter().for_each(|&(at, value)| put(&mut writable, at, value));
        Config { bytes, writable }
    }
}

fn put(space: &mut [u8; CONFIG], at: usize, bytes: &[u8]) {
    space.iter_mut().skip(at).zip(bytes).for_each(|(place, &byte)| *place = byte);
}

impl Config {
    /// Reads from a position on; all ones beyond the end. `asserted`: the interrupt is.
    pub fn read(&self, at: u64, data: &mut [u8], asserted: bool) {
        for (index, byte) in data.iter_mut().enumerate() {
            let at = usize::try_from(at).unwrap_or(CONFIG).saturating_add(index);
            *byte = self.bytes.get(at).copied().unwrap_or(0xff);
            if at == STATUS && asserted {
                *byte |= STATUS_INTX;
            }
        }
    }

    /// Writes the bits that can be changed.
    pub fn write(&mut self, at: u64, data: &[u8]) {
        let at = usize::try_from(at).unwrap_or(CONFIG);
        for ((place, mask), &byte) in self.bytes.iter_mut().zip(&self.writable).skip(at).zip(data) {
            *place = *place & !mask | byte & mask;
        }
    }

    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        self.bytes.get(at..).and_then(|bytes| bytes.first_chunk()).copied().unwrap_or([0; N])
    }

    fn command(&self) -> u16 {
        u16::from_le_bytes(self.array(COMMAND))
    }

    /// Returns whether the device has power: it is in D0.
    pub fn is_awake(&self) -> bool {
        self.array::<1>(POWER + 4) == [0]
    }

    /// Returns whether the device may access memory.
    pub fn is_master(&self) -> bool {
        self.command() & COMMAND_MASTER != 0 && self.is_awake()
    }

    /// Returns whether the device may assert its line.
    pub fn has_line(&self) -> bool {
        self.command() & COMMAND_INTX_OFF == 0
    }

    /// Returns the message to send instead of asserting the line, if it is enabled.
    pub fn message(&self) -> Option<Message> {
        let enabled = self.array::<1>(MSI + 2) != [0x80];
        let message = Message {
            address: u64::from_le_bytes(self.array(MSI + 4)),
            data: u16::from_le_bytes(self.array(MSI + 12)),
        };
        enabled.then_some(message)
    }
}
