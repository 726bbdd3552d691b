//! What FreeBSD's and Linux's drivers do before they use the device: reset, EEPROM over microwire, PHY over MDIO, link.

use super::{Bus, Driver};
use crate::{
    eeprom::{CHECKSUM, WORDS},
    phy,
    registers::{self as reg, cause, ctrl, eecd, mdic, status, tctl},
};
use ringroad_wire::ethernet::MacAddr;

/// Times that a register is read until it says that something is done.
const TRIES: u32 = 1000;

/// Identifiers of the PHY, without its revision.
const PHY_ID: u32 = 0x0141_0c20;
const PHY_REVISION: u32 = 0xf;

/// Why a device is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// Access to the EEPROM is not granted.
    #[error("expected a grant for the EEPROM in EECD, found {found:#x}; is this an 82540EM?")]
    Grant {
        /// EECD.
        found: u32,
    },
    /// The EEPROM's checksum is wrong.
    #[error("expected an EEPROM checksum of {CHECKSUM:#06x}, found {found:#06x}; is this an 82540EM?")]
    Checksum {
        /// Sum of all words.
        found: u16,
    },
    /// MDIC does not become ready, or reports an error.
    #[error("expected an answer of PHY register {register}, found MDIC {found:#010x}")]
    Mdic {
        /// Register of the PHY.
        register: u32,
        /// MDIC.
        found: u32,
    },
    /// It is another PHY.
    #[error("expected PHY {PHY_ID:#010x}, found {found:#010x}")]
    Phy {
        /// Its identifiers.
        found: u32,
    },
}

impl Driver {
    /// Resets the device and reads what it is: returns its address. Afterwards [`Driver::start`].
    ///
    /// # Errors
    /// [`ProbeError`] if it is not an 82540EM, or damaged.
    pub fn probe(&mut self, bus: &mut impl Bus) -> Result<MacAddr, ProbeError> {
        reset(bus);
        let words = read_eeprom(bus)?;
        let found = words.iter().fold(0u16, |sum, &word| sum.wrapping_add(word));
        if found != CHECKSUM {
            return Err(ProbeError::Checksum { found });
        }
        let [first, second, third, ..] = words.map(u16::to_le_bytes);
        let ([a, b], [c, d], [e, f]) = (first, second, third);
        self.mac = MacAddr([a, b, c, d, e, f]);
        let found = u32::from(read_phy(bus, 2)?) << 16 | u32::from(read_phy(bus, 3)?);
        if found & !PHY_REVISION != PHY_ID {
            return Err(ProbeError::Phy { found });
        }
        set_up_link(bus)?;
        // Addresses and tables, which nobody clears.
        (0..16).for_each(|index| bus.write(reg::RA + 8 * index + 4, 0));
        (0..128).for_each(|index| bus.write(reg::MTA + 4 * index, 0));
        (0..128).for_each(|index| bus.write(reg::VFTA + 4 * index, 0));
        self.set_address(bus);
        Ok(self.mac)
    }
}

fn reset(bus: &mut impl Bus) {
    bus.write(reg::IMC, u32::MAX);
    bus.write(reg::RCTL, 0);
    bus.write(reg::TCTL, tctl::PSP);
    bus.read(reg::STATUS);
    let value = bus.read(reg::CTRL);
    bus.write(reg::CTRL, value | ctrl::RST);
    // A posted write: a read waits for it.
    let _ = (0..TRIES).any(|_| bus.read(reg::CTRL) & ctrl::RST == 0);
    bus.write(reg::IMC, u32::MAX);
    bus.read(reg::ICR);
}

/// Reads all words, bit by bit: start bit, opcode, address, then 16 bits of data.
fn read_eeprom(bus: &mut impl Bus) -> Result<[u16; WORDS], ProbeError> {
    let idle = bus.read(reg::EECD) & !(eecd::SK | eecd::CS | eecd::DI);
    let mut lines = idle | eecd::REQ;
    bus.write(reg::EECD, lines);
    let granted = (0..TRIES).any(|_| bus.read(reg::EECD) & eecd::GNT != 0);
    if !granted {
        return Err(ProbeError::Grant { found: bus.read(reg::EECD) });
    }
    let mut words = [0; WORDS];
    for (address, word) in words.iter_mut().enumerate() {
        lines |= eecd::CS;
        bus.write(reg::EECD, lines);
        // Start bit and opcode of a read: 110.
        let command = 6 << 6 | address as u32;
        for bit in (0..9).rev() {
            let input = if command >> bit & 1 != 0 { eecd::DI } else { 0 };
            bus.write(reg::EECD, lines | input);
            bus.write(reg::EECD, lines | input | eecd::SK);
            bus.write(reg::EECD, lines | input);
        }
        for _ in 0..16 {
            bus.write(reg::EECD, lines | eecd::SK);
            *word = *word << 1 | u16::from(bus.read(reg::EECD) & eecd::DO != 0);
            bus.write(reg::EECD, lines);
        }
        lines &= !eecd::CS;
        bus.write(reg::EECD, lines);
    }
    bus.write(reg::EECD, idle & !eecd::REQ);
    Ok(words)
}

fn access_phy(bus: &mut impl Bus, register: u32, command: u32) -> Result<u32, ProbeError> {
    bus.write(reg::MDIC, register << mdic::REGISTER | phy::ADDRESS << mdic::PHY | command);
    let mut found = 0;
    for _ in 0..TRIES {
        found = bus.read(reg::MDIC);
        if found & mdic::READY != 0 {
            break;
        }
    }
    if found & (mdic::READY | mdic::ERROR) == mdic::READY {
        Ok(found)
    } else {
        Err(ProbeError::Mdic { register, found })
    }
}

fn read_phy(bus: &mut impl Bus, register: u32) -> Result<u16, ProbeError> {
    access_phy(bus, register, mdic::READ).map(|value| value as u16)
}

/// Powers the PHY up, negotiates anew, and tells the MAC to use the link.
fn set_up_link(bus: &mut impl Bus) -> Result<(), ProbeError> {
    let value = bus.read(reg::CTRL);
    bus.write(reg::CTRL, value | ctrl::SLU | ctrl::ASDE);
    access_phy(bus, 0, mdic::WRITE | 0x1340)?;
    // Complete, and with a link. Without one it will come later, with an interrupt.
    for _ in 0..TRIES {
        if read_phy(bus, 1)? & 0x24 == 0x24 || bus.read(reg::STATUS) & status::LU == 0 {
            break;
        }
    }
    bus.write(reg::ICS, cause::LSC);
    Ok(())
}
