//! Frames that a source reads straight into the receive buffers: the driver sees the same as of frames that are copied.

mod common;

use common::{BROADCAST, Board, COMMAND, GUEST, RX_RING, SIZE, bare, board, frame, received};
use proptest::{collection::vec, prelude::*};
use ringroad_e1000::{
    DeviceConfig,
    driver::Bus,
    registers::{self as reg, cause, ctrl, rctl, rxcsum, statistics},
};
use ringroad_frame::{HEADROOM, Offload, Poured, Sink};
use ringroad_mem::{Region, Span, Table};
use ringroad_wire::{
    ethernet::MacAddr,
    vnet_hdr::{F_DATA_VALID, F_NEEDS_CSUM, GSO_TCPV4},
};
use std::sync::Arc;

const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

fn started(count: u32, bits: u32) -> Board {
    let mut board = board(DeviceConfig { mac: MacAddr(MAC), ..DeviceConfig::default() });
    board.start(count, bits);
    board
}

/// A frame behind a virtio-net header with these flags and type.
fn behind([flags, gso_type]: [u8; 2], frame: &[u8]) -> Vec<u8> {
    [&[flags, gso_type][..], &[0xee; HEADROOM - 2], frame].concat()
}

/// Lets the queue read these messages, as a source with frames of up to `longest` bytes; also returns how many it has read.
fn fill(board: &mut Board, longest: usize, messages: &[Vec<u8>]) -> (Poured, usize) {
    let mut read = 0;
    let poured = board.rx.fill(HEADROOM + longest, &mut |spans| {
        assert!(spans.iter().map(|span| span.len()).sum::<usize>() >= HEADROOM + longest);
        let message = messages.get(read)?;
        read += 1;
        let mut left = &message[..];
        spans.iter().for_each(|span| left = &left[span.write(left)..]);
        Some(message.len())
    });
    board.settle();
    (poured, read)
}

#[derive(Clone, Debug)]
struct Sent {
    len: usize,
    to: usize,
    tag: Option<u16>,
    valid: bool,
    ip: bool,
}

impl Sent {
    fn bytes(&self, seed: u8) -> Vec<u8> {
        let to = [MAC, BROADCAST, [2, 0, 0, 0, 0, 9], [1, 0, 0x5e, 0, 0, 1]][self.to];
        let mut bytes = frame(to, self.len, seed);
        if self.ip && self.len > 60 {
            bytes.clear();
            let builder = etherparse::PacketBuilder::ethernet2([2; 6], to).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
            builder.udp(1, 2).write(&mut bytes, &vec![seed; self.len - 42]).unwrap();
        }
        if let Some(tag) = self.tag {
            bytes.splice(12..12, [0x81, 0].into_iter().chain(tag.to_be_bytes()));
        }
        bytes
    }
}

fn sent() -> impl Strategy<Value = Sent> {
    let len = prop_oneof![3 => 14..80usize, 3 => 60..1519usize, 1 => 1515..1600usize];
    let tag = prop_oneof![2 => Just(None), 1 => (0..8u16).prop_map(Some)];
    let parts = (len, 0..4usize, tag, any::<bool>(), any::<bool>());
    parts.prop_map(|(len, to, tag, valid, ip)| Sent { len, to, tag, valid, ip })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn as_frames_that_are_copied(
        bursts in vec(vec(sent(), 1..18), 1..4),
        size in 0..4u32,
        [strip, long, tags, vlans, multicast, sums] in any::<[bool; 6]>(),
        limit in 1000..3000usize,
    ) {
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        let bits = size << rctl::BSIZE | flag(strip, rctl::SECRC) | flag(long, rctl::LPE) | flag(vlans, rctl::VFE);
        let mut boards = [(); 2].map(|()| {
            let mut board = started(512, bits | rctl::BAM);
            board.write(reg::CTRL, ctrl::SLU | flag(tags, ctrl::VME));
            board.write(reg::VFTA, 0b1101);
            // 01:00:5e:00:00:01 by its upper twelve bits.
            board.write(reg::MTA, flag(multicast, 1 << (0x0100 >> 4)));
            board.write(reg::RXCSUM, flag(sums, rxcsum::IPOFL | rxcsum::TUOFL));
            board.rx.limit(limit);
            board
        });
        for (seed, frames) in bursts.iter().enumerate() {
            let offload = |sent: &Sent| if sent.valid { Offload::VALID } else { Offload::NONE };
            let copied: Vec<_> = frames.iter().map(|sent| (sent.bytes(seed as u8), offload(sent))).collect();
            let flags = |sent: &Sent| [if sent.valid { F_DATA_VALID } else { 0 }, 0];
            let read: Vec<_> = frames.iter().map(|sent| behind(flags(sent), &sent.bytes(seed as u8))).collect();
            let accepted = boards[0].put(&copied);
            prop_assert_eq!(fill(&mut boards[1], 1604, &read), (Poured::Frames(accepted), read.len()));
        }
        let size = 2048 >> size;
        let seen = boards.each_ref().map(|board| received(board, 0, 512, size));
        prop_assert_eq!(seen[0].1, seen[1].1);
        for ((copied, read), fcs) in seen[0].0.iter().zip(&seen[1].0).zip(std::iter::repeat(if strip { 0 } else { 4 })) {
            prop_assert_eq!((read.1, read.0.len()), (copied.1, copied.0.len()));
            let len = copied.0.len() - fcs;
            prop_assert!(read.0[..len] == copied.0[..len], "damaged");
        }
        for register in [reg::RDH, reg::ICR, statistics::GPRC, statistics::ROC, statistics::MPC, statistics::TORL] {
            let values = boards.each_mut().map(|board| board.read(register));
            prop_assert_eq!(values[0], values[1], "{:#x}", register);
        }
        let counters = boards.each_ref().map(|board| board.rx.counters().snapshot());
        prop_assert_eq!(counters[0], counters[1]);
    }
}

#[test]
fn what_this_driver_cannot_finish_and_what_is_no_frame_is_dropped() {
    let mut board = started(16, rctl::SECRC);
    let whole = frame(MAC, 100, 1);
    let messages = [
        behind([F_NEEDS_CSUM, 0], &whole),
        behind([F_NEEDS_CSUM, GSO_TCPV4], &whole),
        behind([0, GSO_TCPV4], &whole),
        behind([0, 0], &whole[..13]),
        vec![0; HEADROOM - 1],
        Vec::new(),
        behind([F_DATA_VALID, 0], &whole),
    ];
    assert_eq!(fill(&mut board, 1514, &messages), (Poured::Frames(1), 7));
    let (frames, next) = received(&board, 0, 16, 2048);
    assert_eq!((frames.len(), &frames[0].0, next), (1, &whole, 1));
    let counters = board.rx.counters().snapshot();
    assert_eq!((counters.offload, counters.runt, counters.frames, counters.bursts), (3, 3, 1, 1));
    // Of a frame that was cut off, the source says how long it was.
    let mut longer = |spans: &[Span<'_>]| {
        spans[0].write(&[0; HEADROOM]);
        spans[1].write(&whole);
        Some(spans.iter().map(|span| span.len()).sum::<usize>() + 1)
    };
    assert_eq!(board.rx.fill(HEADROOM + 1400, &mut longer), Poured::Frames(0));
    assert_eq!(board.rx.counters().snapshot().oversize, 64);
    assert_eq!(board.read(reg::RDH), 1);
}

#[test]
fn nothing_to_read_leaves_no_trace() {
    let mut board = started(16, rctl::SECRC);
    assert_eq!(fill(&mut board, 1514, &[]), (Poured::Frames(0), 0));
    let causes = board.read(reg::ICR) & (cause::RXT0 | cause::RXDMT0);
    assert_eq!((board.read(reg::RDH), causes, board.rx.counters().snapshot().bursts), (0, 0, 0));
}

/// Nothing is read that might not fit, and no waiting sender is notified of room that is too small.
#[test]
fn back_pressure() {
    let mut board = started(16, 3 << rctl::BSIZE | rctl::SECRC);
    let messages = vec![behind([0, 0], &frame(MAC, 1500, 1)); 4];
    // Six buffers of 256 bytes each, of fifteen.
    assert_eq!(fill(&mut board, 1514, &messages), (Poured::Frames(2), 2));
    assert_eq!(fill(&mut board, 1514, &messages[2..]), (Poured::Full, 0));
    assert!(!board.rx.has_room(1), "three are left");
    board.write(reg::RDT, 0);
    assert!(board.rx.has_room(1), "four: to be tried again");
    assert_eq!(fill(&mut board, 1514, &messages[2..]), (Poured::Full, 0));
    assert!(!board.rx.has_room(1));
    board.write(reg::RDT, 2);
    assert_eq!(fill(&mut board, 1514, &messages[2..]), (Poured::Frames(1), 1));
    assert_eq!((board.read(statistics::MPC), board.rx.counters().snapshot().full), (0, 0), "nothing is lost");
    // The same for frames that are copied.
    let copied = vec![(frame(MAC, 1500, 1), Offload::NONE)];
    assert_eq!((board.offer(&copied), board.rx.has_room(1)), (0, false));
    board.write(reg::RDT, 7);
    assert_eq!((board.rx.has_room(1), board.offer(&copied)), (true, 0));
    board.write(reg::RDT, 11);
    assert_eq!((board.rx.has_room(1), board.offer(&copied)), (true, 1));
}

#[test]
fn buffers_that_do_not_suit_are_left_to_the_other_way() {
    let message = [behind([0, 0], &frame(MAC, 60, 1))];
    let copied = [(frame(MAC, 60, 1), Offload::NONE)];
    // The whole ring does not hold the longest frame, but shorter ones.
    let mut board = started(8, 3 << rctl::BSIZE | rctl::SECRC);
    assert_eq!(fill(&mut board, 2000, &message), (Poured::Unable, 0));
    assert_eq!(board.put(&copied), 1);
    // In more pieces than a source takes.
    let mut board = started(128, 3 << rctl::BSIZE | rctl::SECRC | rctl::LPE);
    assert_eq!(fill(&mut board, 9018, &message), (Poured::Unable, 0));
    // The second frame would be: one of its 31 buffers crosses into another region. No descriptor is lost for that.
    let regions = [GUEST, GUEST + SIZE as u64].map(|at| Region::private(SIZE, at).unwrap());
    let memory = regions.into_iter().fold(Table::default(), |table, region| table.with(region).unwrap());
    let mut board = bare(DeviceConfig { mac: MacAddr(MAC), ..DeviceConfig::default() }, Some(Arc::new(memory)));
    board.device.config_write(COMMAND, &7u16.to_le_bytes(), 0);
    board.start(128, 3 << rctl::BSIZE | rctl::SECRC | rctl::LPE);
    board.set_word(RX_RING + 16 * 31, GUEST + SIZE as u64 - 100);
    assert_eq!(fill(&mut board, 31 * 256, &[&message[..], &message].concat()), (Poured::Frames(1), 1));
    assert_eq!((board.read(reg::RDH), fill(&mut board, 31 * 256, &message)), (1, (Poured::Unable, 0)));
    // At the end of memory: enough for this frame.
    let mut board = started(16, rctl::SECRC);
    board.set_word(RX_RING, GUEST + SIZE as u64 - 60);
    assert_eq!(fill(&mut board, 1514, &message), (Poured::Unable, 0));
    assert_eq!((board.put(&copied), board.rx.take_fault()), (1, None));
    // Nowhere: it is the other way that stops the queue.
    board.set_word(RX_RING + 16, 1 << 50);
    assert_eq!(fill(&mut board, 1514, &message), (Poured::Unable, 0));
    assert!(board.rx.take_fault().is_none());
    assert_eq!(board.put(&copied), 0);
    assert!(board.rx.take_fault().is_some());
    assert_eq!(fill(&mut board, 1514, &message), (Poured::Unable, 0));
    // Behind a good one, it is the next burst's.
    let mut board = started(16, rctl::SECRC);
    board.set_word(RX_RING + 16, 1 << 50);
    assert_eq!(fill(&mut board, 1514, &[&message[..], &message].concat()), (Poured::Frames(1), 1));
    // Without a buffer, they are skipped.
    let mut board = started(16, rctl::SECRC);
    board.set_word(RX_RING, 0);
    assert_eq!(fill(&mut board, 1514, &message), (Poured::Frames(1), 1));
    assert_eq!(board.read(reg::RDH), 2);
}

#[test]
fn nothing_is_read_without_permission() {
    let message = [behind([0, 0], &frame(MAC, 60, 1))];
    let mut board = started(16, rctl::SECRC);
    board.write(reg::RCTL, 0);
    assert_eq!(fill(&mut board, 1514, &message), (Poured::Unable, 0));
    board.write(reg::RCTL, rctl::EN);
    assert_eq!(fill(&mut board, 1514, &message), (Poured::Frames(1), 1));
    board.rx.set_memory(None);
    assert_eq!(fill(&mut board, 1514, &message), (Poured::Unable, 0));
}

/// A tag is taken out of a frame of several buffers.
#[test]
fn tags_are_stripped_across_buffers() {
    let mut board = started(16, 3 << rctl::BSIZE | rctl::SECRC);
    board.write(reg::CTRL, ctrl::SLU | ctrl::VME);
    let bare = frame(MAC, 1400, 1);
    let tagged = [&bare[..12], &[0x81, 0, 0x60, 5], &bare[12..]].concat();
    assert_eq!(fill(&mut board, 1518, &[behind([0, 0], &tagged)]), (Poured::Frames(1), 1));
    assert_eq!(received(&board, 0, 16, 256).0[0].0, bare);
}
