//! Once they run, neither end of a queue allocates anything, whatever comes.

mod common;

use allocation_counter::measure;
use ringroad_frame::Burst;
use ringroad_net::bits;
use ringroad_ring::BURST;
use std::{hint::black_box, time::Duration};

const BURSTS: u64 = 10_000;

/// Frames of `len` bytes from one guest to another, whose buffers are made for `frame` bytes: how many arrive, in how
/// many buffers, and how many allocations that takes.
fn carry(acked: u64, frame: usize, len: usize) -> (u64, u64, u64) {
    const SIZE: u32 = 512;
    let (mut from, mut to) = (common::driver(acked, SIZE, 1518), common::driver(acked, SIZE, frame));
    let (mut tx, _) = common::tx(&from, acked, SIZE);
    let (mut rx, _) = common::rx(&to, acked, SIZE);
    let mut burst = Burst::default();
    let all: Vec<u8> = (0..BURST as u8).collect();
    to.rx[0].refill();
    let (mut frames, mut buffers) = (0, 0);
    let mut round = || {
        from.tx[0].reclaim().unwrap();
        from.tx[0].add(BURST, |_, place| place.write(&[7; 1518][..len]));
        from.tx[0].publish();
        from.tx[0].wants_notification();
        let taken = tx.take(&mut burst).unwrap();
        rx.put(&burst, &all[..taken]).unwrap();
        tx.done(&mut burst);
        rx.settle(Duration::ZERO);
        assert_eq!(tx.take(&mut burst), Ok(0));
        let mut receive = || {
            let count = to.rx[0].receive(true, |parts| {
                frames += 1;
                buffers += parts.len() as u64;
            });
            count.unwrap()
        };
        while receive() > 0 {}
    };
    round();
    let allocations = measure(|| (0..BURSTS).for_each(|_| round())).count_total;
    (frames, buffers, allocations)
}

#[test]
fn no_allocation_per_frame() {
    let sent = (BURSTS + 1) * BURST as u64;
    for packed in [0, bits::RING_PACKED] {
        for more in [0, bits::IN_ORDER | bits::EVENT_IDX] {
            let acked = bits::VERSION_1 | packed | more;
            assert_eq!(carry(acked, 1518, 64), (sent, sent, 0), "{acked:#x}");
            // Shorter than the head that is read at once.
            assert_eq!(carry(acked, 1518, 15), (sent, sent, 0), "{acked:#x}");
            // 312 bytes in buffers of 64.
            assert_eq!(carry(acked | bits::NET_F_MRG_RXBUF, 14, 300), (sent, 5 * sent, 0), "{acked:#x}");
        }
    }
}

#[test]
fn the_counter_counts() {
    assert_eq!(measure(|| drop(black_box(vec![0u8; 100]))).count_total, 1);
}
