//! A burst's way through the switch, from one guest to another, for callgrind to count: `scripts/instructions`.
//! Arguments: the ring's layout, and how many bursts.

#[path = "../../net/tests/common/mod.rs"]
mod common;

use ringroad_frame::{Burst, Sink, Source};
use ringroad_net::{Driver, RxQueue, TxQueue, bits};
use ringroad_ring::BURST;
use ringroad_switch::{Fdb, Port, Switch};
use ringroad_wire::ethernet::MacAddr;
use std::{
    hint::black_box,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

const SIZE: u32 = 256;
const FRAME: usize = 64;

/// A guest's queues, as a port.
struct Guest {
    tx: Arc<Mutex<TxQueue>>,
    rx: Mutex<RxQueue>,
}

struct From<'a>(MutexGuard<'a, TxQueue>);
struct To<'a>(MutexGuard<'a, RxQueue>);

impl Source for From<'_> {
    fn take(&mut self, burst: &mut Burst) -> usize {
        self.0.take(burst).expect("a good driver")
    }

    fn done(&mut self, burst: &mut Burst) {
        self.0.done(burst)
    }
}

impl Sink for To<'_> {
    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        self.0.put(burst, which).expect("a good driver")
    }
}

impl Port for Guest {
    type Lease = Arc<Mutex<TxQueue>>;
    type Source<'a> = From<'a>;
    type Sink<'a> = To<'a>;

    fn lease(&self, _: usize) -> Option<Self::Lease> {
        Some(self.tx.clone())
    }

    fn is_wanted(&self, _: usize) -> bool {
        false
    }

    fn source<'a>(&'a self, _: usize, lease: &'a mut Self::Lease) -> Option<From<'a>> {
        lease.try_lock().ok().map(From)
    }

    fn sink(&self, _: usize, _: usize) -> Option<To<'_>> {
        self.rx.try_lock().ok().map(To)
    }
}

fn guest(driver: &Driver, acked: u64) -> Arc<Guest> {
    let ((tx, _), (rx, _)) = (common::tx(driver, acked, SIZE), common::rx(driver, acked, SIZE));
    Arc::new(Guest { tx: Arc::new(Mutex::new(tx)), rx: Mutex::new(rx) })
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (layout, flows, bursts) = match &arguments[..] {
        [layout, flows, bursts] => (layout.as_str(), flows.parse::<u32>(), bursts.parse::<u32>()),
        _ => panic!("expected: split|packed FLOWS BURSTS"),
    };
    let (flows, bursts) = (flows.expect("a number of flows"), bursts.expect("a number of bursts"));
    let layout = if layout == "packed" { bits::RING_PACKED } else { 0 };
    let acked = bits::VERSION_1 | bits::IN_ORDER | bits::EVENT_IDX | bits::NET_F_MRG_RXBUF | layout;
    let (mut from, mut to) = (common::driver(acked, SIZE, 1518), common::driver(acked, SIZE, 1518));
    let mut switch = Switch::new(Fdb::new(4096, 300));
    for driver in [&from, &to] {
        switch.add(guest(driver, acked));
    }
    to.rx[0].refill();
    // The receiver has said where it is.
    for flow in 0..flows {
        send(&mut to, 1, |_| [MacAddr::BROADCAST.0, MacAddr::local(1000 + flow).0]);
        switch.carry(1, 0, CLOCK);
    }
    let mut received = 0;
    for number in 0..bursts {
        let flow = |index: usize| (number + index as u32) % flows;
        send(&mut from, BURST, |index| [MacAddr::local(1000 + flow(index)).0, MacAddr::local(flow(index)).0]);
        carry(&mut switch);
        received += to.rx[0].receive(true, |_| {}).expect("a good device");
    }
    assert_eq!(received, bursts as usize * BURST);
}

const CLOCK: Duration = Duration::from_secs(1);

fn send(driver: &mut Driver, count: usize, addresses: impl Fn(usize) -> [[u8; 6]; 2]) {
    let tx = &mut driver.tx[0];
    tx.reclaim().expect("a good device");
    let mut index = 0;
    tx.add(count, |_, place| {
        place.write(addresses(index).as_flattened());
        index += 1;
        FRAME
    });
    tx.publish();
}

/// All that the switch does with a burst.
#[inline(never)]
fn carry(switch: &mut Switch<Guest>) {
    black_box(switch.carry(0, 0, CLOCK));
}
