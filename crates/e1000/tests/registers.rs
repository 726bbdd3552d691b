//! Registers, EEPROM, PHY and configuration space.

mod common;

use common::{Board, bare, board};
use proptest::{collection::vec, prelude::*};
use ringroad_e1000::{
    Device, DeviceConfig, Effects, IO_BAR, Message,
    driver::Bus,
    registers::{self as reg, BAR, cause, ctrl, ctrl_ext, eecd, eerd, mdic, status},
};
use ringroad_wire::ethernet::MacAddr;

const MAC: MacAddr = MacAddr([0x52, 0x54, 0, 0x12, 0x34, 0x56]);

fn with_mac() -> Board {
    board(DeviceConfig { mac: MAC, ..DeviceConfig::default() })
}

/// The EEPROM's pins, as a driver moves them.
struct Microwire<'a>(&'a mut Board);

impl Microwire<'_> {
    fn select(&mut self) {
        self.0.write(reg::EECD, eecd::REQ);
        self.0.write(reg::EECD, eecd::REQ | eecd::CS);
    }

    fn send(&mut self, bits: u32, count: u32) {
        for bit in (0..count).rev() {
            let lines = eecd::REQ | eecd::CS | if bits >> bit & 1 != 0 { eecd::DI } else { 0 };
            [lines, lines | eecd::SK, lines].into_iter().for_each(|lines| self.0.write(reg::EECD, lines));
        }
    }

    fn data(&mut self) -> bool {
        self.0.read(reg::EECD) & eecd::DO != 0
    }

    fn word(&mut self) -> u16 {
        (0..16).fold(0, |word, _| {
            self.send(0, 1);
            word << 1 | u16::from(self.data())
        })
    }
}

#[test]
fn eeprom_by_microwire() {
    let mut board = with_mac();
    assert_eq!(board.read(reg::EECD) & (eecd::GNT | eecd::PRES), eecd::PRES);
    let mut wire = Microwire(&mut board);
    wire.select();
    assert_ne!(wire.0.read(reg::EECD) & eecd::GNT, 0);
    // Leading zeros are not yet a command. A zero comes before the first word; then one word follows the other.
    wire.send(0, 3);
    wire.send(0b110 << 6, 9);
    assert!(!wire.data());
    let words: Vec<_> = (0..64).map(|_| wire.word()).collect();
    assert_eq!(words[..3], [0x5452, 0x1200, 0x5634]);
    assert_eq!(words.iter().fold(0u16, |sum, &word| sum.wrapping_add(word)), 0xbaba);
    assert_eq!(wire.word(), words[0]);
    let by_eerd = (0..64).map(|address| {
        board.write(reg::EERD, address << 8 | eerd::START);
        let value = board.read(reg::EERD);
        assert_ne!(value & eerd::DONE, 0);
        (value >> 16) as u16
    });
    assert_eq!(by_eerd.collect::<Vec<_>>(), words);
    board.write(reg::EERD, 64 << 8 | eerd::START);
    assert_eq!(board.read(reg::EERD) >> 16, 0xffff);
}

#[test]
fn eeprom_is_written_if_that_is_enabled() {
    let mut board = with_mac();
    let mut wire = Microwire(&mut board);
    for enabled in [false, true] {
        wire.select();
        if enabled {
            wire.send(0b1_0011_0000, 9);
            wire.select();
        }
        wire.send(0b101 << 6 | 1, 9);
        wire.send(0xabcd, 16);
        wire.select();
        assert!(wire.data(), "ready");
        wire.send(0b110 << 6 | 1, 9);
        assert_eq!(wire.word(), if enabled { 0xabcd } else { 0x1200 });
    }
    wire.select();
    wire.send(0b1_0000_0000, 9);
    wire.select();
    wire.send(0b111 << 6 | 1, 9);
    wire.select();
    wire.send(0b110 << 6 | 1, 9);
    assert_eq!(wire.word(), 0xabcd, "erasing is disabled");
    // The device loads its address again on request.
    board.write(reg::CTRL_EXT, ctrl_ext::EE_RST);
    assert_eq!(board.device.mac(), Some(MacAddr([0x52, 0x54, 0xcd, 0xab, 0x34, 0x56])));
    assert_eq!(board.read(reg::CTRL_EXT), 0);
}

#[test]
fn a_new_board_has_nothing_of_the_last_one() {
    let mut board = with_mac();
    let mut wire = Microwire(&mut board);
    wire.select();
    wire.send(0b1_0011_0000, 9);
    wire.select();
    wire.send(0b101 << 6 | 1, 9);
    wire.send(0xabcd, 16);
    board.device.reset();
    assert_eq!(board.device.mac(), Some(MacAddr([0x52, 0x54, 0xcd, 0xab, 0x34, 0x56])), "a reset does not write");
    board.device.config_write(4, &7u16.to_le_bytes(), 0);
    for (register, value) in [(reg::RCTL, 2), (reg::TCTL, 2), (reg::IMS, 4), (reg::RDT, 9)] {
        board.write(register, value);
    }
    board.device.set_link(false, 0);
    assert_eq!(board.device.renew(), Effects::QUIESCE | Effects::INTERRUPT);
    assert_eq!(board.device.mac(), Some(MAC));
    let mut command = [0xff; 2];
    board.device.config_read(4, &mut command);
    assert_eq!(command, [0; 2]);
    assert_eq!([reg::RCTL, reg::TCTL, reg::IMS, reg::RDT].map(|register| board.read(register)), [0; 4]);
    assert_eq!(board.read(reg::STATUS) & status::LU, 0, "the cable is as it was");
}

fn phy(board: &mut Board, register: u32) -> u16 {
    board.write(reg::MDIC, register << 16 | 1 << 21 | mdic::READ);
    let value = board.read(reg::MDIC);
    assert_eq!(value & (mdic::READY | mdic::ERROR), mdic::READY);
    value as u16
}

#[test]
fn phy_reports_the_link() {
    let mut board = with_mac();
    assert_eq!((phy(&mut board, 2), phy(&mut board, 3) & 0xfff0), (0x0141, 0x0c20));
    // Link, autonegotiation complete; 1000 Mb/s in full duplex by both; resolved.
    assert_eq!(phy(&mut board, 1) & 0x24, 0x24);
    assert_eq!((phy(&mut board, 9) & 0x200, phy(&mut board, 10) & 0x800), (0x200, 0x800));
    assert_eq!(phy(&mut board, 17), 0xac00);
    assert_eq!(board.read(reg::STATUS), status::FD | status::LU | status::SPEED_1000 | status::ASDV_1000);
    let now = board.now;
    let effects = board.device.set_link(false, now);
    assert!(effects.contains(Effects::INTERRUPT));
    assert_eq!((phy(&mut board, 1) & 0x24, phy(&mut board, 10), phy(&mut board, 5)), (0, 0, 0));
    assert_eq!(board.read(reg::STATUS) & status::LU, 0);
    assert_eq!(board.read(reg::ICR), cause::LSC);
    assert_eq!(board.device.set_link(false, now), Effects::empty());
    board.device.set_link(true, now);
    assert_eq!(board.read(reg::ICR), cause::LSC);
    // Turned off by the driver, as Linux does while the interface is down.
    board.write(reg::MDIC, 1 << 21 | mdic::WRITE | 0x0800);
    assert_eq!((board.read(reg::STATUS) & status::LU, board.read(reg::ICR)), (0, cause::LSC));
    // Its reset turns it on, and clears itself.
    board.write(reg::MDIC, 1 << 21 | mdic::WRITE | 0x8000);
    assert_eq!((phy(&mut board, 0), board.read(reg::STATUS) & status::LU), (0x1140, status::LU));
    // Negotiating anew changes nothing, but the driver hears of it.
    board.read(reg::ICR);
    board.write(reg::MDIC, 1 << 21 | mdic::WRITE | mdic::INT_EN | 0x1340);
    assert_eq!((phy(&mut board, 0), board.read(reg::ICR)), (0x1140, cause::LSC | cause::MDAC));
    // The MAC has to be told to use the link.
    board.write(reg::CTRL, 0);
    assert_eq!(board.read(reg::STATUS) & status::LU, 0);
}

#[test]
fn phys_that_are_not_there() {
    let mut board = with_mac();
    for value in [2 << 21 | mdic::READ, 31 << 21 | mdic::WRITE, 1 << 21, 1 << 21 | mdic::READ | mdic::WRITE] {
        board.write(reg::MDIC, value);
        assert_eq!(board.read(reg::MDIC) & (mdic::READY | mdic::ERROR), mdic::READY | mdic::ERROR, "{value:#x}");
    }
    // Registers that nobody can write.
    for register in [1, 2, 3, 5, 10, 17] {
        let before = phy(&mut board, register);
        board.write(reg::MDIC, register << 16 | 1 << 21 | mdic::WRITE | 0xffff);
        assert_eq!(phy(&mut board, register), before);
    }
}

#[test]
fn odd_accesses() {
    let mut board = with_mac();
    let mut whole = [0; 8];
    board.device.read(reg::RA.into(), &mut whole, 0);
    assert_eq!(whole, [0x52, 0x54, 0, 0x12, 0x34, 0x56, 0, 0x80]);
    for (offset, len) in [(0, 1), (1, 1), (1, 2), (3, 2), (2, 4), (1, 7), (0, 3)] {
        let mut part = vec![0; len];
        board.device.read(u64::from(reg::RA) + offset as u64, &mut part, 0);
        assert_eq!(part, whole[offset..offset + len]);
        // Only whole registers are written, and those that are part of the access.
        board.device.write(u64::from(reg::VFTA) + offset as u64, &vec![0xff; len], 0);
    }
    assert_eq!(board.read(reg::VFTA), 0);
    board.device.write(reg::VFTA.into(), &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0], 0);
    assert_eq!([0, 4, 8].map(|at| board.read(reg::VFTA + at)), [1, 2, 0]);
    // Beyond the BAR.
    for offset in [BAR, BAR + 4, u64::MAX - 3, u64::MAX] {
        let mut data = [0; 8];
        assert_eq!(board.device.read(offset, &mut data, 0), Effects::empty());
        assert_eq!(data, [0xff; 8]);
        assert_eq!(board.device.write(offset, &data, 0), Effects::empty());
    }
    let mut data = [0; 8];
    board.device.read(BAR - 4, &mut data, 0);
    assert_eq!(data, [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    assert_eq!(board.device.read(0, &mut [], 0), Effects::empty());
    // A byte of ICR acknowledges all of it.
    board.write(reg::ICS, cause::LSC | cause::RXO);
    board.device.read(u64::from(reg::ICR) + 3, &mut [0], 0);
    assert_eq!(board.read(reg::ICR), 0);
}

#[test]
fn the_io_window() {
    let mut board = with_mac();
    let mut data = [0; 4];
    board.device.io_write(0, &reg::VET.to_le_bytes(), 0);
    board.device.io_read(0, &mut data, 0);
    assert_eq!(u32::from_le_bytes(data), reg::VET);
    board.device.io_write(4, &0x1234u32.to_le_bytes(), 0);
    board.device.io_read(4, &mut data, 0);
    assert_eq!((u32::from_le_bytes(data), board.read(reg::VET)), (0x1234, 0x1234));
    for (offset, len) in [(4, 1), (4, 2), (5, 4), (0, 2), (8, 4), (IO_BAR, 4), (u64::MAX, 8)] {
        board.device.io_write(offset, &vec![0xff; len], 0);
        let mut data = vec![1; len];
        board.device.io_read(offset, &mut data, 0);
        assert_eq!(data, vec![0; len]);
    }
    assert_eq!(board.read(reg::VET), 0x1234);
    // Linux resets this part through the window.
    board.device.io_write(0, &reg::CTRL.to_le_bytes(), 0);
    let effects = board.device.io_write(4, &ctrl::RST.to_le_bytes(), 0);
    assert_eq!(effects, Effects::QUIESCE | Effects::INTERRUPT);
    assert_eq!(board.read(reg::VET), 0x8100);
    board.device.io_write(0, &u32::MAX.to_le_bytes(), 0);
    board.device.io_read(4, &mut data, 0);
    assert_eq!(data, [0xff; 4]);
}

/// The thread that polls the queues may make such an access itself: it must not have to wait for its own queue to stop.
#[test]
fn quick_accesses_stop_no_queue() {
    let mut board = with_mac();
    let mut quick = [0, 0];
    for register in (0..2 * BAR).step_by(2) {
        for (write, value) in [(false, 0), (true, 0), (true, u32::MAX)] {
            board.start(64, 0);
            if Device::is_quick(register, write) {
                board.effects = Effects::empty();
                quick[usize::from(write)] += 1;
                match write {
                    true => board.write(register as u32, value),
                    false => drop(board.read(register as u32)),
                }
                assert!(!board.effects.contains(Effects::QUIESCE), "{register:#x} {write} {value:#x}");
            }
        }
    }
    assert!(quick[0] as u64 == BAR / 4 && (10..=30).contains(&quick[1]), "{quick:?}");
    for register in [reg::TCTL, reg::RCTL, reg::CTRL, reg::TDBAL, reg::TDLEN, reg::MDIC] {
        assert!(!Device::is_quick(register.into(), true), "{register:#x}");
    }
}

#[test]
fn reset() {
    let mut board = with_mac();
    board.start(64, 0);
    board.write(reg::IMS, cause::ALL);
    board.write(reg::RA, 0x1234);
    board.write(reg::ICS, cause::LSC);
    assert!(board.interrupter.is_line_asserted());
    board.effects = Effects::empty();
    board.write(reg::CTRL, ctrl::RST);
    assert!(board.effects.contains(Effects::QUIESCE | Effects::INTERRUPT));
    assert!(!board.interrupter.is_line_asserted());
    let registers = [reg::TDBAL, reg::TDLEN, reg::TDT, reg::RDT, reg::RDH, reg::RCTL, reg::TCTL, reg::IMS, reg::ICR];
    assert_eq!(registers.map(|register| board.read(register)), [0; 9]);
    assert_eq!(board.device.mac(), Some(MAC));
    assert_eq!(board.read(reg::PBA), 0x0010_0030);
    // As when the machine is turned on: BARs and commands too.
    board.device.config_write(0x10, &0xfebc_0000u32.to_le_bytes(), 0);
    board.device.reset();
    let mut data = [0xff; 4];
    board.device.config_read(0x10, &mut data);
    assert_eq!(data, [0; 4]);
}

#[test]
fn configuration_space() {
    let mut board = bare(DeviceConfig::default(), None);
    let mut all = [0; 300];
    board.device.config_read(0, &mut all);
    assert_eq!(all[..12], [0x86, 0x80, 0x0e, 0x10, 0, 0, 0x30, 0x02, 3, 0, 0, 2]);
    assert_eq!(all[256..], [0xff; 44]);
    // The list of capabilities: power management, MSI, end.
    let list: Vec<_> = std::iter::successors(Some(0x34), |&at| Some(usize::from(all[at + usize::from(at != 0x34)])))
        .skip(1)
        .take_while(|&at| at != 0)
        .map(|at| all[at])
        .collect();
    assert_eq!(list, [1, 5]);
    // Sizes of the BARs: 128 KiB of memory, nothing, 64 bytes of I/O.
    for (at, expected) in [(0x10, 0xfffe_0000), (0x14, 0), (0x18, 0xffff_ffc1), (0x1c, 0), (0x30, 0u32)] {
        board.device.config_write(at, &[0xff; 4], 0);
        let mut data = [0; 4];
        board.device.config_read(at, &mut data);
        assert_eq!(u32::from_le_bytes(data), expected, "{at:#x}");
    }
    // Identifiers stay what they are, whatever is written.
    board.device.config_write(0, &[0xff; 256], 0);
    board.device.config_read(0, &mut all);
    assert_eq!((&all[..4], all[0x3d]), (&[0x86, 0x80, 0x0e, 0x10][..], 1));
    board.device.config_write(250, &[0xff; 100], 0);
    board.device.config_write(u64::MAX, &[0xff; 100], 0);
}

#[test]
fn interrupts_take_the_way_that_is_configured() {
    use ringroad_e1000::Vector::{Line, Message as Msi};
    let mut board = with_mac();
    board.write(reg::IMS, cause::LSC);
    let raise = |board: &mut Board| {
        board.interrupts.clear();
        board.read(reg::ICR);
        board.write(reg::ICS, cause::LSC);
        board.interrupts.iter().map(|&(_, vector)| vector).collect::<Vec<_>>()
    };
    assert_eq!(raise(&mut board), [Line]);
    let status = |board: &Board| {
        let mut data = [0; 1];
        board.device.config_read(6, &mut data);
        data[0] & 8 != 0
    };
    assert!(board.interrupter.is_line_asserted() && status(&board));
    // The line is turned off: it says in its status what it would do.
    let now = board.now;
    let effects = board.device.config_write(common::COMMAND, &[7, 4], now);
    board.act(effects);
    assert!(!board.interrupter.is_line_asserted() && status(&board));
    assert_eq!(raise(&mut board), []);
    board.interrupts.clear();
    let effects = board.device.config_write(common::COMMAND, &[7, 0], now);
    board.act(effects);
    assert_eq!(board.interrupts, [(now, Line)], "asserted already");
    // MSI.
    board.device.config_write(0xf4, &0xfee0_1000u64.to_le_bytes(), now);
    board.device.config_write(0xfc, &[0x31, 0x40], now);
    assert_eq!(board.device.message(), None);
    let effects = board.device.config_write(0xf2, &[0x81, 0x00], now);
    board.act(effects);
    assert_eq!(board.device.message(), Some(Message { address: 0xfee0_1000, data: 0x4031 }));
    assert_eq!(raise(&mut board), [Msi]);
    assert!(!board.interrupter.is_line_asserted());
    let exits = board.interrupter.exits();
    assert_eq!(exits.interrupts, 3);
    assert!(exits.reads > 0 && exits.writes > 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Any accesses at all: no panic, no effect on the next driver.
    #[test]
    fn any_accesses(accesses in vec((0..5u8, any::<u32>(), 0..20usize, any::<u32>()), 0..200)) {
        let mut board = with_mac();
        for (kind, at, len, value) in accesses {
            // Mostly near registers that there are.
            let at = u64::from(if at % 4 == 0 { at } else { (at % 0x6000) & !(at % 2 * 3) });
            let mut data = value.to_le_bytes().repeat(5);
            data.truncate(len);
            let effects = match kind {
                0 => board.device.read(at, &mut data, board.now),
                1 => board.device.write(at, &data, board.now),
                2 => board.device.io_read(at % 80, &mut data, board.now),
                3 => board.device.io_write(at % 12, &data, board.now),
                _ => board.device.config_write(at % 300, &data, board.now),
            };
            board.act(effects);
            board.now += u64::from(value >> 12);
            let taken = board.take();
            prop_assert!(taken.len() <= 64);
            board.put(&[(common::frame(common::BROADCAST, 60, 1), Default::default())]);
        }
        let effects = board.device.reset();
        board.act(effects);
        board.device.config_write(common::COMMAND, &[7, 0], board.now);
        board.start(8, reg::rctl::BAM);
        prop_assert_eq!(board.put(&[(common::frame(common::BROADCAST, 60, 1), Default::default())]), 1);
    }
}
