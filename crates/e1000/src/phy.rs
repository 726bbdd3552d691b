//! The PHY behind MDIC: an M88E1011, as in the 82540EM (8254x Software Developer's Manual, 13.4.6, and IEEE 802.3, 22.2.4). A link
//! partner that can do everything is always there, unless the port is down.

use crate::registers::mdic;

/// Address of the PHY.
pub const ADDRESS: u32 = 1;
/// Number of registers.
const REGISTERS: usize = 32;

/// Registers.
const CONTROL: usize = 0;
const STATUS: usize = 1;
const LINK_PARTNER: usize = 5;
const EXPANSION: usize = 6;
const STATUS_1000: usize = 10;
const SPECIFIC_STATUS: usize = 17;

/// Bits of the control register.
const RESET: u16 = 1 << 15;
const AUTONEGOTIATE: u16 = 1 << 12;
const POWER_DOWN: u16 = 1 << 11;
const RESTART: u16 = 1 << 9;

/// Bits of the status register.
const LINK: u16 = 1 << 2;
const NEGOTIATED: u16 = 1 << 5;

/// Registers and values after reset; all others are 0.
const INITIAL: [(usize, u16); 15] = [
    // Autonegotiation, 1000 Mb/s, full duplex.
    (CONTROL, 0x1140),
    // 10 and 100 Mb/s in both duplexes, extended status, preamble suppression, able to negotiate, extended registers.
    (STATUS, 0x7949),
    // M88E1011, as Linux and FreeBSD expect of an 82540EM.
    (2, 0x0141),
    (3, 0x0c20),
    // 10 and 100 Mb/s in both duplexes, pause frames.
    (4, 0x0de1),
    // The partner: the same, acknowledged.
    (LINK_PARTNER, 0x4de1),
    // The partner negotiates, a page has come.
    (EXPANSION, 0x0003),
    // 1000 Mb/s, full duplex.
    (9, 0x0200),
    // The partner: 1000 Mb/s, full duplex; both receivers are well.
    (STATUS_1000, 0x3800),
    (15, 0x3000),
    // Automatic crossover.
    (16, 0x0068),
    // 1000 Mb/s, full duplex, resolved, link.
    (SPECIFIC_STATUS, 0xac00),
    (18, 0x0000),
    (20, 0x0d60),
    (21, 0x0000),
];

/// Registers that software cannot change.
const READ_ONLY: [usize; 9] = [STATUS, 2, 3, LINK_PARTNER, EXPANSION, STATUS_1000, 15, SPECIFIC_STATUS, 21];

/// The PHY of one device.
#[derive(Clone, Debug)]
pub(crate) struct Phy {
    registers: [u16; REGISTERS],
    /// The port is up.
    carrier: bool,
}

impl Phy {
    pub fn new(carrier: bool) -> Phy {
        let mut registers = [0; REGISTERS];
        for (at, value) in INITIAL {
            if let Some(place) = registers.get_mut(at) {
                *place = value;
            }
        }
        Phy { registers, carrier }
    }

    pub fn reset(&mut self) {
        *self = Phy::new(self.carrier);
    }

    pub fn set_carrier(&mut self, up: bool) {
        self.carrier = up;
    }

    /// Returns whether there is a link: the port is up, and software has not turned the PHY off.
    pub fn has_link(&self) -> bool {
        self.carrier && self.register(CONTROL) & POWER_DOWN == 0
    }

    fn register(&self, at: usize) -> u16 {
        self.registers.get(at).copied().unwrap_or_default()
    }

    /// Returns a register as software reads it.
    pub fn read(&self, at: usize) -> u16 {
        let (value, link) = (self.register(at), self.has_link());
        match at {
            STATUS if link && self.register(CONTROL) & AUTONEGOTIATE != 0 => value | LINK | NEGOTIATED,
            STATUS if link => value | LINK,
            LINK_PARTNER | EXPANSION | STATUS_1000 | SPECIFIC_STATUS if !link => 0,
            _ => value,
        }
    }

    /// Writes a register. Returns whether the link was negotiated anew, which takes no time here.
    fn write(&mut self, at: usize, value: u16) -> bool {
        if at == CONTROL && value & RESET != 0 {
            self.reset();
            return true;
        }
        let Some(place) = self.registers.get_mut(at).filter(|_| !READ_ONLY.contains(&at)) else { return false };
        *place = if at == CONTROL { value & !RESTART } else { value };
        at == CONTROL && value & RESTART != 0
    }

    /// Carries out a write to MDIC. Returns the register's new value, and whether the link was negotiated anew.
    pub fn access(&mut self, value: u32) -> (u32, bool) {
        let register = (value >> mdic::REGISTER & 0x1f) as usize;
        let value = value & !(mdic::READY | mdic::ERROR);
        if value >> mdic::PHY & 0x1f != ADDRESS {
            return (value | mdic::READY | mdic::ERROR, false);
        }
        match value & (mdic::READ | mdic::WRITE) {
            mdic::READ => (value & !0xffff | u32::from(self.read(register)) | mdic::READY, false),
            mdic::WRITE => (value | mdic::READY, self.write(register, value as u16)),
            _ => (value | mdic::READY | mdic::ERROR, false),
        }
    }
}
