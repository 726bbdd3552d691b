//! Which registers hold what is written to them, which of their bits, and their initial values (8254x Software Developer's
//! Manual, 13.2).

use crate::{
    filter::{ADDRESSES, TABLE},
    registers::*,
};

/// Number of registers in BAR 0.
pub(super) const WORDS: usize = (BAR / 4) as usize;

/// Initial values that are not zero.
pub(super) const INITIAL: [(u32, u32); 6] = [
    // Full duplex, 1000 Mb/s, link up: as the EEPROM may say.
    (CTRL, ctrl::FD | ctrl::SLU | 2 << 8),
    (LEDCTL, 0x0706_1302),
    // 48 KiB to receive, 16 KiB to transmit.
    (PBA, 0x0010_0030),
    (VET, 0x8100),
    (TXDCTL, 0),
    (RXDCTL, 0x0001_0000),
];

/// Registers with bits that can be written.
const MASKS: [(u32, u32); 38] = [
    (CTRL_EXT, 0x00ff_ffff),
    (FLA, u32::MAX),
    (FCAL, u32::MAX),
    (FCAH, 0xffff),
    (FCT, 0xffff),
    (VET, 0xffff),
    (RCTL, 0x06df_fffe),
    (FCTTV, 0xffff),
    (TXCW, u32::MAX),
    (TCTL, 0x03ff_fffa),
    (TIPG, 0x3fff_ffff),
    (TBT, u32::MAX),
    (AIT, 0xffff),
    (LEDCTL, u32::MAX),
    (PBA, 0x003f_003f),
    (FCRTL, 0x8000_fff8),
    (FCRTH, 0xfff8),
    (RDBAL, !0xf),
    (RDBAH, u32::MAX),
    (RDLEN, 0x000f_ff80),
    (RXDCTL, 0x013f_3f3f),
    (RSRPD, 0x0fff),
    (TDBAL, !0xf),
    (TDBAH, u32::MAX),
    (TDLEN, 0x000f_ff80),
    (TXDCTL, 0xff3f_3f3f),
    (TSPMT, u32::MAX),
    (RXCSUM, 0x0000_07ff),
    (WUC, 0xf),
    (WUFC, 0x000f_00ff),
    (WUS, 0x000f_00ff),
    (MANC, u32::MAX),
    (IPAV, 0x0001_000f),
    (WUPL, 0x0fff),
    // The FIFOs' own registers, for diagnosis.
    (RDFH, 0x1fff),
    (RDFH + 8, 0x1fff),
    (TDFH, 0x07ff),
    (TDFH + 8, 0x07ff),
];

/// Tables: first register, number of registers, bits.
const TABLES: [(u32, u32, u32); 9] = [
    (MTA, TABLE as u32, u32::MAX),
    (VFTA, TABLE as u32, u32::MAX),
    (IP4AT, 8, u32::MAX),
    (IP6AT, 4, u32::MAX),
    (WUPM, 32, u32::MAX),
    (FFLT, 8, 0x07ff),
    (FFMT, 256, 0xf),
    (FFVT, 256, u32::MAX),
    (PBM, 0x4000, u32::MAX),
];

/// Returns the bits of a register that can be written; `None` if none can, or there is no such register.
pub(super) fn writable(register: u32) -> Option<u32> {
    if (RA..RA + 8 * ADDRESSES as u32).contains(&register) {
        // The upper half of the high word has only the bits that say how and whether the address is used.
        return Some(if register.is_multiple_of(8) { u32::MAX } else { 0x8003_ffff });
    }
    let single = MASKS.iter().find(|&&(at, _)| at == register).map(|&(_, mask)| mask);
    single.or_else(|| {
        let table = TABLES.iter().find(|&&(first, count, _)| (first..first + 4 * count).contains(&register));
        table.map(|&(_, _, mask)| mask)
    })
}
