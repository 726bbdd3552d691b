//! The main paths of a frame, each in a function of its own, for callgrind to count: `scripts/instructions`.
//! Arguments: the ring's layout, and how many bursts.

#[path = "../tests/common/mod.rs"]
mod common;

use ringroad_frame::{ALL, Burst};
use ringroad_net::{Driver, RxQueue, TxQueue, bits};
use ringroad_ring::BURST;
use std::hint::black_box;

const SIZE: u32 = 256;
const FRAME: usize = 64;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (layout, bursts) = match &arguments[..] {
        [layout, bursts] => (layout.as_str(), bursts.parse().expect("a number of bursts")),
        _ => panic!("expected: split|packed BURSTS"),
    };
    let layout = if layout == "packed" { bits::RING_PACKED } else { 0 };
    let acked = bits::VERSION_1 | bits::IN_ORDER | bits::EVENT_IDX | bits::NET_F_MRG_RXBUF | layout;
    let (mut from, mut to) = (common::driver(acked, SIZE, 1518), common::driver(acked, SIZE, 1518));
    let ((mut tx, _), (mut rx, _)) = (common::tx(&from, acked, SIZE), common::rx(&to, acked, SIZE));
    let mut burst = Burst::default();
    to.rx[0].refill();
    let mut received = 0;
    for number in 0..bursts {
        driver_send(&mut from, number);
        device(&mut tx, &mut rx, &mut burst);
        received += driver_receive(&mut to);
    }
    assert_eq!(received, bursts * BURST as u32);
}

/// Takes back what was sent, writes 4 bytes of each frame and sends a burst.
#[inline(never)]
fn driver_send(driver: &mut Driver, number: u32) {
    let tx = &mut driver.tx[0];
    black_box(tx.reclaim().expect("a good device"));
    tx.prefetch(BURST);
    tx.add(BURST, |_, place| {
        place.skip(42).write(&number.to_be_bytes());
        FRAME
    });
    tx.publish();
}

/// Takes a burst, swaps the addresses, puts it into receive buffers, and gives both kinds of buffers back.
#[inline(never)]
fn device(tx: &mut TxQueue, rx: &mut RxQueue, burst: &mut Burst) {
    burst.reflect(true);
    let taken = tx.take(burst).expect("a good driver");
    rx.put(burst, &ALL[..taken]).expect("a good driver");
    tx.done(burst);
}

/// Receives a burst, reads 4 bytes of each frame, and makes the buffers available again.
#[inline(never)]
fn driver_receive(driver: &mut Driver) -> u32 {
    let mut sum = 0u32;
    let count = driver.rx[0].receive(true, |pieces| {
        sum = sum.wrapping_add(pieces[0].array(42).map_or(0, u32::from_ne_bytes));
    });
    black_box(sum);
    count.expect("a good device") as u32
}
