//! The registers of the device, as the driver sees them over PCI: BAR 0, the I/O BAR, configuration space. Called by the thread
//! that serves the driver's accesses; the queues, which have threads of their own, learn of changes through `shared`.

mod layout;

use crate::{
    eeprom::Eeprom,
    filter::{ADDRESSES, TABLE},
    interrupts::{Mitigation, event},
    pci::{Config, Message},
    phy::Phy,
    registers::{self as reg, BAR, cause, ctrl, ctrl_ext, mdic, rctl, rdtr, statistics, status, tctl},
    rx::RxQueue,
    shared::{Shared, Signal},
    statistics::Readings,
    tx::TxQueue,
};
use bitflags::bitflags;
use ringroad_mem::Error as MemoryError;
use ringroad_wire::ethernet::MacAddr;
use std::sync::Arc;

bitflags! {
    /// What the host has to do after an access. In this order: `QUIESCE`, `INTERRUPT`, then the kicks.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Effects: u8 {
        /// There is something to transmit: call [`TxQueue::take`](ringroad_frame::Source::take) soon.
        const TRANSMIT = 1;
        /// There are new receive buffers: frames that have waited for them may go on.
        const RECEIVE = 1 << 1;
        /// Call [`Interrupter::settle`].
        const INTERRUPT = 1 << 2;
        /// The driver may now use its memory otherwise: before the next access is answered, wait for the bursts in flight,
        /// and call `quiesce` of both queues. Frames of others that wait for receive buffers are to be offered again: a queue
        /// that does not run drops them.
        const QUIESCE = 1 << 3;
    }
}

/// Configuration of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Address in the EEPROM.
    pub mac: MacAddr,
    /// How interrupts are moderated.
    pub mitigation: Mitigation,
    /// Whether there is a link at first.
    pub up: bool,
}

impl Default for DeviceConfig {
    /// Moderated as the registers say, and up, with the first of the locally administered addresses.
    fn default() -> DeviceConfig {
        DeviceConfig { mac: MacAddr::local(1), mitigation: Mitigation::default(), up: true }
    }
}

/// The registers of one device.
#[derive(Debug)]
pub struct Device {
    shared: Arc<Shared>,
    /// Registers that hold what was written to them.
    words: Box<[u32]>,
    eeprom: Eeprom,
    phy: Phy,
    config: Config,
    readings: Readings,
    /// The address that its EEPROM has at first.
    mac: MacAddr,
    /// IOADDR: the register that IODATA stands for.
    io_address: u32,
}

/// Interrupts of a device, for any thread.
#[derive(Clone, Debug)]
pub struct Interrupter(Arc<Shared>);

impl Interrupter {
    /// Decides whether to interrupt the driver. To be called after a burst, after an access with [`Effects::INTERRUPT`], and at
    /// the time that it has returned. `now`: nanoseconds since any fixed point, the same for all callers.
    pub fn settle(&self, now: u64) -> Signal {
        self.0.settle(now)
    }

    /// Returns whether INTA is asserted: what counts when a client unmasks it.
    pub fn is_line_asserted(&self) -> bool {
        self.0.level()
    }

    /// Returns the accesses and interrupts so far: what costs a virtual machine an exit each.
    pub fn exits(&self) -> Exits {
        Exits { reads: self.0.reads.get(), writes: self.0.writes.get(), interrupts: self.0.raised() }
    }
}

/// Numbers of accesses to registers, and of interrupts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exits {
    /// Reads, in BAR 0 and the I/O BAR.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Interrupts.
    pub interrupts: u64,
}

impl Device {
    /// Returns a device that was just turned on, with its queues.
    ///
    /// # Errors
    /// [`MemoryError::Map`] if there is no memory for the headers of frames.
    pub fn new(config: DeviceConfig) -> Result<(Device, TxQueue, RxQueue), MemoryError> {
        let shared = Arc::new(Shared::new(config.mitigation));
        let (tx, rx) = (TxQueue::new(shared.clone())?, RxQueue::new(shared.clone())?);
        let mut device = Device {
            shared,
            words: vec![0; layout::WORDS].into(),
            eeprom: Eeprom::new(config.mac),
            phy: Phy::new(config.up),
            config: Config::default(),
            readings: Readings::default(),
            mac: config.mac,
            io_address: 0,
        };
        device.reset_registers();
        Ok((device, tx, rx))
    }

    /// Returns the interrupts, for the threads that cause them.
    pub fn interrupter(&self) -> Interrupter {
        Interrupter(self.shared.clone())
    }

    /// Resets everything but the EEPROM, as when the machine is turned on. The driver's memory stays as it is.
    pub fn reset(&mut self) -> Effects {
        (self.config, self.io_address) = (Config::default(), 0);
        self.phy.reset();
        self.eeprom.reset();
        self.reset_registers();
        self.route(0);
        Effects::QUIESCE | Effects::INTERRUPT
    }

    /// Like `reset`, and the EEPROM has its first contents again: a new board in the same place, for another machine. The link
    /// stays as it is.
    pub fn renew(&mut self) -> Effects {
        self.eeprom = Eeprom::new(self.mac);
        self.reset()
    }

    /// Sets whether there is a link.
    pub fn set_link(&mut self, up: bool, now: u64) -> Effects {
        let before = self.has_link();
        self.phy.set_carrier(up);
        self.link_changed(before, false, now)
    }

    /// Returns the address that the driver has set to receive at first: that of the EEPROM, or another one. `None` if it is
    /// marked invalid.
    pub fn mac(&self) -> Option<MacAddr> {
        let (low, high) = (self.word(reg::RA), self.word(reg::RA + 4));
        let ([a, b, c, d], [e, f, _, _]) = (low.to_le_bytes(), high.to_le_bytes());
        (high & reg::rah::AV != 0).then_some(MacAddr([a, b, c, d, e, f]))
    }

    /// Reads registers of BAR 0, from a position in bytes on. Accesses of any size and alignment see the bytes of 32-bit registers,
    /// each of which is read once; all ones beyond the BAR. `now` as for [`Interrupter::settle`].
    pub fn read(&mut self, offset: u64, data: &mut [u8], now: u64) -> Effects {
        self.shared.reads.add(1);
        data.fill(0xff);
        let end = offset.saturating_add(data.len() as u64).min(BAR);
        let mut effects = Effects::empty();
        let mut register = offset & !3;
        while register < end {
            let (value, more) = self.read_register(register as u32, now);
            effects |= more;
            for (at, byte) in (register..).zip(value.to_le_bytes()) {
                if let Some(place) = at.checked_sub(offset).and_then(|at| data.get_mut(at as usize)) {
                    *place = byte;
                }
            }
            register += 4;
        }
        effects
    }

    /// Writes registers of BAR 0. As in the part, only whole, aligned registers can be written: anything else has no effect.
    pub fn write(&mut self, offset: u64, data: &[u8], now: u64) -> Effects {
        self.shared.writes.add(1);
        if !offset.is_multiple_of(4) {
            return Effects::empty();
        }
        let mut effects = Effects::empty();
        for (register, word) in (offset..BAR).step_by(4).zip(data.as_chunks::<4>().0) {
            effects |= self.write_register(register as u32, u32::from_le_bytes(*word), now);
        }
        effects
    }

    /// Returns whether an access to a whole register, at a position in bytes, is one that a driver makes while it sends or receives.
    /// It has no [`Effects::QUIESCE`].
    pub fn is_quick(offset: u64, write: bool) -> bool {
        let register = u32::try_from(offset).unwrap_or(u32::MAX);
        let written = || {
            let interrupts = matches!(register, reg::ICR..=reg::IMC | reg::RDTR | reg::RADV | reg::TIDV | reg::TADV);
            interrupts || matches!(register, reg::TDT | reg::RDT)
        };
        offset.is_multiple_of(4) && offset < BAR && (!write || written())
    }

    /// Reads from the I/O BAR: IOADDR at 0, IODATA at 4 (13.3); zeros elsewhere.
    pub fn io_read(&mut self, offset: u64, data: &mut [u8], now: u64) -> Effects {
        if offset == 4 && data.len() == 4 {
            return self.read(u64::from(self.io_address), data, now);
        }
        self.shared.reads.add(1);
        data.fill(0);
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.io_address.to_le_bytes());
        }
        Effects::empty()
    }

    /// Writes to the I/O BAR; only 32-bit accesses have an effect.
    pub fn io_write(&mut self, offset: u64, data: &[u8], now: u64) -> Effects {
        match (offset, data.first_chunk::<4>().filter(|_| data.len() == 4)) {
            (4, Some(word)) => return self.write(u64::from(self.io_address), word, now),
            (0, Some(&word)) => self.io_address = u32::from_le_bytes(word),
            _ => {}
        }
        self.shared.writes.add(1);
        Effects::empty()
    }

    /// Reads configuration space.
    pub fn config_read(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data, self.shared.asserted());
    }

    /// Writes configuration space.
    pub fn config_write(&mut self, offset: u64, data: &[u8], now: u64) -> Effects {
        let (awake, before) = (self.config.is_awake(), (self.config.has_line(), self.config.message()));
        self.config.write(offset, data);
        let mut effects = Effects::empty();
        if self.config.is_awake() && !awake {
            // As the part does on its way from D3 to D0.
            self.reset_registers();
            effects |= Effects::QUIESCE | Effects::INTERRUPT;
        }
        if before != (self.config.has_line(), self.config.message()) {
            self.route(now);
            effects |= Effects::INTERRUPT;
        }
        effects | self.run()
    }

    /// Returns the message to send for [`crate::Vector::Message`].
    pub fn message(&self) -> Option<Message> {
        self.config.message()
    }

    /// Tells the interrupts which way they take.
    fn route(&self, now: u64) {
        let (line, message) = (self.config.has_line(), self.config.message().is_some());
        self.shared.with_signals(now, |signals| (signals.line, signals.message) = (line && !message, message));
    }

    fn word(&self, register: u32) -> u32 {
        self.words.get(register as usize / 4).copied().unwrap_or_default()
    }

    fn set_word(&mut self, register: u32, value: u32) {
        if let Some(place) = self.words.get_mut(register as usize / 4) {
            *place = value;
        }
    }

    fn has_link(&self) -> bool {
        self.phy.has_link() && self.word(reg::CTRL) & ctrl::SLU != 0
    }

    /// CTRL.RST: all registers get their initial values, and the queues stop. Not the PHY.
    fn reset_registers(&mut self) {
        self.words.fill(0);
        layout::INITIAL.iter().for_each(|&(register, value)| self.set_word(register, value));
        self.load_address();
        self.readings.clear(&self.shared.statistics);
        let (addresses, vet) = (self.addresses(), self.word(reg::VET) as u16);
        self.shared.reset(vet, &addresses);
    }

    fn addresses(&self) -> [u32; 2 * ADDRESSES] {
        std::array::from_fn(|index| self.word(reg::RA + 4 * index as u32))
    }

    /// Loads the first receive address from the EEPROM.
    fn load_address(&mut self) {
        let [a, b, c, d, e, f] = self.eeprom.mac().0;
        self.set_word(reg::RA, u32::from_le_bytes([a, b, c, d]));
        self.set_word(reg::RA + 4, u32::from_le_bytes([e, f, 0, 0]) | reg::rah::AV);
    }

    /// Starts or stops the queues if what they depend on has changed.
    fn run(&mut self) -> Effects {
        let may = self.config.is_master() && self.has_link();
        let tx = may && self.word(reg::TCTL) & tctl::EN != 0;
        let rx = may && self.word(reg::RCTL) & rctl::EN != 0;
        let before = {
            let setup = self.shared.setup.lock();
            (setup.tx.runs, setup.rx.runs)
        };
        if before == (tx, rx) {
            return Effects::empty();
        }
        self.shared.configure(|setup| (setup.tx.runs, setup.rx.runs) = (tx, rx));
        let mut effects = Effects::empty();
        effects.set(Effects::QUIESCE, before.0 && !tx || before.1 && !rx);
        effects.set(Effects::TRANSMIT, tx && !before.0);
        effects.set(Effects::RECEIVE, rx && !before.1);
        effects
    }

    fn link_changed(&mut self, before: bool, renegotiated: bool, now: u64) -> Effects {
        if self.has_link() == before && !renegotiated {
            return Effects::empty();
        }
        self.post(cause::LSC, now) | self.run()
    }

    fn post(&self, causes: u32, now: u64) -> Effects {
        self.shared.with_signals(now, |signals| signals.interrupts.post(causes, now));
        Effects::INTERRUPT
    }

    fn read_register(&mut self, register: u32, now: u64) -> (u32, Effects) {
        let shared = &self.shared;
        let value = match register {
            reg::STATUS => {
                let link = if self.has_link() { status::LU } else { 0 };
                status::FD | status::SPEED_1000 | status::ASDV_1000 | link
            }
            reg::EECD => self.eeprom.eecd(),
            reg::EERD => self.eeprom.eerd(),
            reg::ICR => {
                let value = shared.with_signals(now, |signals| signals.interrupts.read_icr(now));
                return (value, Effects::INTERRUPT);
            }
            reg::ICS => shared.with_signals(now, |signals| signals.interrupts.causes(now)),
            reg::IMS => shared.with_signals(now, |signals| signals.interrupts.ims()),
            reg::TDH => shared.tx.head().0,
            reg::RDH => shared.rx.head().0,
            reg::TDT => shared.tx.tail(),
            reg::RDT => shared.rx.tail(),
            statistics::FIRST..statistics::END => self.readings.read(register, &shared.statistics),
            _ => self.word(register),
        };
        (value, Effects::empty())
    }

    fn write_register(&mut self, register: u32, value: u32, now: u64) -> Effects {
        match register {
            // Only the tail: whatever there is to do, the queue's own thread does.
            reg::TDT => {
                self.shared.tx.set_tail(value & 0xffff);
                return Effects::TRANSMIT;
            }
            reg::RDT => {
                self.shared.rx.set_tail(value & 0xffff);
                return Effects::RECEIVE;
            }
            reg::ICR..=reg::IMC | reg::RDTR | reg::RADV | reg::TIDV | reg::TADV => {
                return self.write_interrupts(register, value, now);
            }
            reg::CTRL => return self.write_ctrl(value, now),
            reg::EECD => self.eeprom.set_eecd(value),
            reg::EERD => self.eeprom.set_eerd(value),
            reg::MDIC => return self.write_mdic(value, now),
            reg::TDH => self.shared.tx.set_head(value & 0xffff),
            reg::RDH => self.shared.rx.set_head(value & 0xffff),
            _ => {
                let Some(mask) = layout::writable(register) else { return Effects::empty() };
                self.set_word(register, value & mask);
            }
        }
        self.apply(register)
    }

    /// Tells the queues of a register that concerns them.
    fn apply(&mut self, register: u32) -> Effects {
        let value = self.word(register);
        let at = |first: u32| (register.wrapping_sub(first) / 4) as usize;
        let table = 4 * TABLE as u32;
        match register {
            reg::RCTL => {
                self.shared.configure(|setup| {
                    setup.rctl = value;
                    setup.filter.set_rctl(value);
                });
                return self.run();
            }
            reg::TCTL => return self.run(),
            reg::CTRL_EXT if value & ctrl_ext::EE_RST != 0 => {
                self.set_word(reg::CTRL_EXT, value & !ctrl_ext::EE_RST);
                self.load_address();
                return self.apply(reg::RA);
            }
            reg::TDBAL | reg::TDBAH | reg::TDLEN | reg::TDH => {
                let (base, len) = self.ring(reg::TDBAL);
                self.shared.tx.renew();
                self.shared.configure(|setup| (setup.tx.base, setup.tx.len) = (base, len));
            }
            reg::RDBAL | reg::RDBAH | reg::RDLEN | reg::RDH => {
                let (base, len) = self.ring(reg::RDBAL);
                self.shared.rx.renew();
                self.shared.configure(|setup| (setup.rx.base, setup.rx.len) = (base, len));
            }
            reg::RXCSUM => self.shared.configure(|setup| setup.rxcsum = value),
            reg::VET => self.shared.configure(|setup| setup.vet = value as u16),
            _ if (reg::RA..reg::RA + 8 * ADDRESSES as u32).contains(&register) => {
                let addresses = self.addresses();
                self.shared.configure(|setup| setup.filter.set_addresses(&addresses));
            }
            _ if (reg::MTA..reg::MTA + table).contains(&register) => {
                self.shared.configure(|setup| setup.filter.set_multicast(at(reg::MTA), value));
            }
            _ if (reg::VFTA..reg::VFTA + table).contains(&register) => {
                self.shared.configure(|setup| setup.filter.set_vlans(at(reg::VFTA), value));
            }
            _ => {}
        }
        Effects::empty()
    }

    /// Returns base and length of the ring whose registers begin with this one.
    fn ring(&self, first: u32) -> (u64, u32) {
        (u64::from(self.word(first)) | u64::from(self.word(first + 4)) << 32, self.word(first + 8))
    }

    fn write_ctrl(&mut self, value: u32, now: u64) -> Effects {
        let before = self.has_link();
        let reset = value & ctrl::RST != 0;
        if value & ctrl::PHY_RST != 0 {
            self.phy.reset();
        }
        if reset {
            self.reset_registers();
        } else {
            let value = value & !ctrl::PHY_RST;
            self.set_word(reg::CTRL, value);
            self.shared.configure(|setup| setup.vme = value & ctrl::VME != 0);
        }
        let effects = if reset { Effects::QUIESCE | Effects::INTERRUPT } else { Effects::empty() };
        effects | self.link_changed(before, value & ctrl::PHY_RST != 0, now)
    }

    fn write_mdic(&mut self, value: u32, now: u64) -> Effects {
        let before = self.has_link();
        let (result, renegotiated) = self.phy.access(value);
        self.set_word(reg::MDIC, result);
        let effects = if value & mdic::INT_EN != 0 { self.post(cause::MDAC, now) } else { Effects::empty() };
        effects | self.link_changed(before, renegotiated, now)
    }

    fn write_interrupts(&mut self, register: u32, value: u32, now: u64) -> Effects {
        // Of these registers ITR and the delays can be read.
        if matches!(register, reg::ITR | reg::RDTR | reg::RADV | reg::TIDV | reg::TADV) {
            self.set_word(register, value & 0xffff);
        }
        self.shared.with_signals(now, |signals| {
            let interrupts = &mut signals.interrupts;
            match register {
                reg::ICR => interrupts.acknowledge(value, now),
                reg::ICS => interrupts.post(value & !(event::SENT | event::RECEIVED), now),
                reg::IMS => interrupts.unmask(value),
                reg::IMC => interrupts.mask(value),
                reg::ITR => interrupts.set_itr(value as u16),
                reg::RDTR => {
                    interrupts.set_rdtr(value as u16);
                    if value & rdtr::FPD != 0 {
                        interrupts.flush();
                    }
                }
                reg::RADV => interrupts.set_radv(value as u16),
                reg::TIDV => interrupts.set_tidv(value as u16),
                reg::TADV => interrupts.set_tadv(value as u16),
                _ => {}
            }
        });
        Effects::INTERRUPT
    }
}
