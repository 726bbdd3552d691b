//! The receive queue: what the driver sees, and what it can do wrong.

mod common;

use common::{BROADCAST, Board, GUEST, RX_RING, SIZE, board, frame, received};
use proptest::{collection::vec, prelude::*};
use ringroad_e1000::{
    DeviceConfig, Effects,
    descriptor::rx::{DD, EOP, IPCS, IXSM, PIF, SPECIAL, TCPCS, VP},
    driver::Bus,
    registers::{self as reg, cause, ctrl, rctl, rxcsum, statistics},
};
use ringroad_frame::{Offload, Sink, offload::Support};
use ringroad_wire::ethernet::MacAddr;

const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

fn started(count: u32, bits: u32) -> Board {
    let mut board = board(DeviceConfig { mac: MacAddr(MAC), ..DeviceConfig::default() });
    board.start(count, bits);
    board
}

fn plain(frames: &[Vec<u8>]) -> Vec<(Vec<u8>, Offload)> {
    frames.iter().map(|frame| (frame.clone(), Offload::NONE)).collect()
}

#[test]
fn all_buffer_sizes() {
    let sizes = [
        (2048, 0),
        (1024, 1 << rctl::BSIZE),
        (512, 2 << rctl::BSIZE),
        (256, 3 << rctl::BSIZE),
        (16384, 1 << rctl::BSIZE | rctl::BSEX),
        (8192, 2 << rctl::BSIZE | rctl::BSEX),
        (4096, 3 << rctl::BSIZE | rctl::BSEX),
    ];
    for (size, bits) in sizes {
        for strip in [0, rctl::SECRC] {
            let mut board = started(256, bits | rctl::LPE | strip);
            let lens = [60, 64, 252, 253, 256, 257, 1514, 2044, 2048, 2049, 8192, 9000, 16380];
            let sent: Vec<_> = lens.iter().map(|&len| frame(MAC, len, len as u8)).collect();
            assert_eq!(board.put(&plain(&sent[..3])), 3);
            assert_eq!(board.put(&plain(&sent[3..])), 10);
            let fcs = if strip == 0 { 4 } else { 0 };
            let (frames, next) = received(&board, 0, 256, size);
            assert_eq!(board.read(reg::RDH), next);
            assert_eq!(frames.len(), sent.len());
            for ((found, word), sent) in frames.iter().zip(&sent) {
                assert_eq!((&found[..sent.len()], found.len()), (&sent[..], sent.len() + fcs), "{size}");
                assert_eq!(*word, DD | EOP | IXSM);
            }
            let buffers = lens.iter().map(|len| (len + fcs).div_ceil(size)).sum::<usize>();
            assert_eq!(buffers, next as usize);
            assert_eq!(board.read(statistics::GPRC), 13);
        }
    }
}

#[test]
fn round_the_ring_many_times() {
    let mut board = started(16, rctl::SECRC);
    let (mut next, mut all, mut seen) = (0, 0u32, 0);
    for round in 0..200u32 {
        let count = (round * 7 % 15) as usize + 1;
        let sent: Vec<_> = (0..count).map(|n| frame(MAC, 60 + n, (all + n as u32) as u8)).collect();
        let accepted = board.put(&plain(&sent));
        let (frames, end) = received(&board, next, 16, 2048);
        assert_eq!(frames.iter().map(|(frame, _)| frame.clone()).collect::<Vec<_>>(), sent[..accepted]);
        all += count as u32;
        seen += accepted as u32;
        next = end;
        // Sometimes the driver gives all of them back, sometimes all but some.
        let keep = 1 + round % 3 * 2;
        board.write(reg::RDT, (next + 16 - keep) % 16);
    }
    let missed = board.read(statistics::MPC);
    assert!(missed > 0 && seen + missed == all);
    assert_eq!(board.read(statistics::RNBC), missed);
    assert_eq!(board.rx.counters().snapshot().full, u64::from(missed));
    assert_ne!(board.read(reg::ICR) & cause::RXO, 0);
}

#[test]
fn back_pressure() {
    let mut board = started(8, rctl::SECRC);
    let sent = plain(&(0..10).map(|n| frame(MAC, 60, n)).collect::<Vec<_>>());
    assert!(board.rx.has_room(4));
    assert_eq!(board.offer(&sent), 7);
    assert!(!board.rx.has_room(1));
    assert_eq!(board.offer(&sent[7..]), 0);
    assert_eq!((board.read(statistics::MPC), board.read(reg::ICR) & cause::RXO), (0, 0), "nothing is lost");
    board.effects = Effects::empty();
    board.write(reg::RDT, 6);
    assert_eq!(board.effects, Effects::RECEIVE);
    assert_eq!(board.offer(&sent[7..]), 3);
}

#[test]
fn short_frames_are_padded() {
    let mut board = started(8, rctl::SECRC);
    board.set(board.rx_buffer(0), &[0xaa; 100]);
    let sent = frame(MAC, 42, 1);
    assert_eq!(board.put(&plain(&[sent.clone(), frame(MAC, 14, 2)])), 2);
    let (frames, _) = received(&board, 0, 8, 2048);
    assert_eq!(frames[0].0, [&sent[..], &[0; 18]].concat());
    assert_eq!(frames[1].0.len(), 60);
    assert_eq!(board.get(board.rx_buffer(0) + 60, 1), [0xaa]);
}

#[test]
fn long_packets() {
    let mut board = started(64, rctl::SECRC);
    let put = |board: &mut Board, len| board.put(&plain(&[frame(MAC, len, 1)]));
    assert_eq!([1518, 1519].map(|len| put(&mut board, len)), [1, 0]);
    board.write(reg::RCTL, rctl::EN | rctl::LPE | rctl::SECRC);
    assert_eq!([1519, 16380, 16381].map(|len| put(&mut board, len)), [1, 1, 0]);
    assert_eq!((board.read(statistics::ROC), board.rx.counters().snapshot().oversize), (2, 2));
    board.rx.limit(9018);
    assert_eq!([9018, 9019].map(|len| put(&mut board, len)), [1, 0]);
}

#[test]
fn the_threshold_interrupts_once() {
    for (bits, threshold) in [(0, 32), (1, 16), (2, 8)] {
        let mut board = started(64, bits << rctl::RDMTS | rctl::SECRC);
        let mut seen = Vec::new();
        for n in 0..63 {
            board.put(&plain(&[frame(MAC, 60, n)]));
            if board.read(reg::ICR) & cause::RXDMT0 != 0 {
                seen.push(62 - u32::from(n));
            }
        }
        assert_eq!(seen, [threshold], "free descriptors");
    }
}

#[test]
fn tags() {
    let mut board = started(64, rctl::SECRC);
    let bare = frame(MAC, 100, 1);
    let tagged = |tag: [u8; 2]| [&bare[..12], &[0x81, 0], &tag, &bare[12..]].concat();
    let put = |board: &mut Board, frame: &[u8]| board.put(&plain(&[frame.to_vec()]));
    assert_eq!(put(&mut board, &tagged([0x60, 5])), 1);
    assert_eq!(received(&board, 0, 64, 2048).0, [(tagged([0x60, 5]), DD | EOP | IXSM)]);
    board.write(reg::CTRL, ctrl::SLU | ctrl::VME);
    assert_eq!(put(&mut board, &tagged([0x60, 5])) + put(&mut board, &bare), 2);
    let stripped = DD | EOP | IXSM | VP | 0x6005 << SPECIAL;
    assert_eq!(received(&board, 1, 64, 2048).0, [(bare.clone(), stripped), (bare.clone(), DD | EOP | IXSM)]);
    board.write(reg::RCTL, rctl::EN | rctl::VFE | rctl::SECRC);
    board.write(reg::VFTA + 4, 1 << 2);
    assert_eq!(put(&mut board, &tagged([0, 5])), 0);
    assert_eq!(put(&mut board, &tagged([0xf0, 34])) + put(&mut board, &bare), 2);
    assert_eq!(board.rx.counters().snapshot().filtered, 1);
    // Another EtherType is none.
    board.write(reg::VET, 0x88a8);
    assert_eq!(put(&mut board, &tagged([0, 5])), 1);
}

#[test]
fn checksums_are_reported_if_they_are_known() {
    let mut ip = Vec::new();
    let builder = etherparse::PacketBuilder::ethernet2([2; 6], MAC).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
    builder.udp(1, 2).write(&mut ip, &[7; 60]).unwrap();
    let mut wrong = ip.clone();
    wrong[24] ^= 1;
    let v6 = {
        let mut v6 = Vec::new();
        let builder = etherparse::PacketBuilder::ethernet2([2; 6], MAC).ipv6([1; 16], [2; 16], 64);
        builder.udp(1, 2).write(&mut v6, &[7; 60]).unwrap();
        v6
    };
    let both = rxcsum::IPOFL | rxcsum::TUOFL;
    let cases = [
        (0, &ip, Offload::VALID, IXSM),
        (both, &ip, Offload::NONE, IXSM),
        (both, &ip, Offload::VALID, IPCS | TCPCS),
        (both, &wrong, Offload::VALID, TCPCS),
        (both, &v6, Offload::VALID, TCPCS),
        (rxcsum::TUOFL, &ip, Offload::VALID, TCPCS),
        (rxcsum::IPOFL, &ip, Offload::VALID, IPCS),
        (rxcsum::IPOFL, &wrong, Offload::VALID, IXSM),
    ];
    for (bits, frame, offload, expected) in cases {
        let mut board = started(8, rctl::SECRC);
        board.write(reg::RXCSUM, bits);
        assert_eq!(board.put(&[(frame.clone(), offload)]), 1);
        assert_eq!(received(&board, 0, 8, 2048).0, [(frame.clone(), DD | EOP | expected)], "{bits:#x}");
        assert_eq!(board.rx.support().contains(Support::VALID), bits != 0);
    }
}

#[test]
fn buffers_outside_memory_stop_the_queue() {
    for address in [0x7f00_0000_0000, GUEST + SIZE as u64 - 59, u64::MAX - 3] {
        let mut board = started(16, rctl::SECRC);
        board.set_word(RX_RING + 32, address);
        let sent = plain(&(0..5).map(|n| frame(MAC, 60, n)).collect::<Vec<_>>());
        assert_eq!(board.put(&sent), 2, "what comes before is received");
        assert_eq!(received(&board, 0, 16, 2048).0.len(), 2);
        let text = board.rx.take_fault().unwrap().to_string();
        assert!(text.starts_with(&format!("descriptor 2 at {address:#x} + 60 lies outside")), "{text}");
        assert_eq!((board.put(&sent), board.offer(&sent)), (0, 5), "dropped, and nobody waits");
        assert_eq!(board.rx.counters().snapshot().stopped, 3 + 10);
        board.write(reg::CTRL, ctrl::RST);
        board.start(16, rctl::SECRC);
        assert_eq!(board.put(&sent), 5);
    }
    // A frame that ends with the last byte of memory is fine.
    let mut board = started(16, rctl::SECRC);
    board.set_word(RX_RING, GUEST + SIZE as u64 - 60);
    assert_eq!(board.put(&plain(&[frame(MAC, 60, 1)])), 1);
    assert_eq!(board.get(GUEST + SIZE as u64 - 60, 60), frame(MAC, 60, 1));
}

#[test]
fn descriptors_without_a_buffer_are_skipped() {
    let mut board = started(16, rctl::SECRC);
    board.set_word(RX_RING, 0);
    board.set_word(RX_RING + 32, 0);
    assert_eq!(board.put(&plain(&[frame(MAC, 100, 0), frame(MAC, 100, 1)])), 2);
    let words: Vec<_> = (0..5).map(|index| board.rx_status(index)).collect();
    let (skipped, filled) = (DD, 100 | DD | EOP | IXSM);
    assert_eq!(words, [skipped, filled, skipped, filled, 0]);
}

#[test]
fn nothing_is_received_without_permission() {
    let mut board = started(16, rctl::SECRC);
    let sent = plain(&[frame(MAC, 60, 1)]);
    board.device.config_write(common::COMMAND, &[3, 0], 0);
    assert_eq!(board.put(&sent), 0);
    board.device.config_write(common::COMMAND, &[7, 0], 0);
    assert_eq!(board.put(&sent), 1);
    board.write(reg::RCTL, 0);
    assert_eq!((board.put(&sent), board.offer(&sent)), (0, 1));
    board.write(reg::RCTL, rctl::EN);
    board.device.set_link(false, 0);
    assert_eq!(board.put(&sent), 0);
    board.device.set_link(true, 0);
    assert_eq!(board.put(&sent), 1);
    board.rx.set_memory(None);
    assert_eq!(board.put(&sent), 0);
    assert_eq!(board.rx.counters().snapshot().stopped, 5);
}

/// Which frames pass, straight from the manual: 13.5 and 13.4.22.
fn model(bits: u32, addresses: &[([u8; 6], bool)], hash: &[u16], to: [u8; 6]) -> Option<bool> {
    let listed = addresses.iter().any(|&(address, valid)| valid && address == to);
    if to == BROADCAST && bits & (rctl::BAM | rctl::MPE) != 0 || listed {
        return Some(false);
    }
    if to[0] & 1 == 0 {
        return (bits & rctl::UPE != 0).then_some(false);
    }
    if to != BROADCAST && bits & rctl::MPE != 0 {
        return Some(false);
    }
    let high = u16::from_le_bytes([to[4], to[5]]);
    let index = match bits >> rctl::MO & 3 {
        0 => high >> 4,
        1 => high >> 3 & 0xfff,
        2 => high >> 2 & 0xfff,
        _ => high & 0xfff,
    };
    hash.contains(&index).then_some(true)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn filters(
        bits in any::<u32>(),
        addresses in vec((any::<[u8; 6]>(), any::<bool>()), 16),
        others in vec((any::<[u8; 6]>(), 0..8usize), 1..20),
        hashed in vec(0..4096u16, 0..200),
    ) {
        let bits = bits & (rctl::UPE | rctl::MPE | rctl::BAM | 3 << rctl::MO);
        let mut board = started(64, bits | rctl::SECRC);
        for (index, (address, valid)) in (0..).zip(&addresses) {
            let [a, b, c, d, e, f] = *address;
            board.write(reg::RA + 8 * index, u32::from_le_bytes([a, b, c, d]));
            let high = u32::from_le_bytes([e, f, 0, 0]) | if *valid { reg::rah::AV } else { 0 };
            board.write(reg::RA + 8 * index + 4, high);
        }
        let mut table = [0u32; 128];
        hashed.iter().for_each(|&index| table[usize::from(index / 32)] |= 1 << (index % 32));
        (0..).zip(table).for_each(|(index, word)| board.write(reg::MTA + 4 * index, word));
        let destinations = others.iter().map(|&(other, kind)| match kind {
            0 => BROADCAST,
            1..=3 => addresses[usize::from(other[0] % 16)].0,
            4 | 5 => [other[0] | 1, other[1], other[2], other[3], other[4], other[5]],
            _ => other,
        });
        let mut next = 0;
        for to in destinations {
            let expected = model(bits, &addresses, &hashed, to);
            let accepted = board.put(&plain(&[frame(to, 60, 1)]));
            prop_assert_eq!(accepted == 1, expected.is_some(), "{:x?}", to);
            if let Some(inexact) = expected {
                prop_assert_eq!(board.rx_status(next) & PIF != 0, inexact);
                next += 1;
            }
        }
    }
}
