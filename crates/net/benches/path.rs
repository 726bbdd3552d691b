//! What a frame costs the device end: take, put and done, in nanoseconds per frame. Both guests are in the same thread, so
//! that no line goes from core to core and what they do is not measured.

#[path = "../tests/common/mod.rs"]
mod common;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use ringroad_frame::Burst;
use ringroad_net::{Driver, RxQueue, TxQueue, bits};
use ringroad_ring::BURST;
use std::time::{Duration, Instant};

const SIZE: u32 = 256;

struct Path {
    from: Driver,
    to: Driver,
    tx: TxQueue,
    rx: RxQueue,
    burst: Burst,
}

impl Path {
    fn new(acked: u64, frame: usize) -> Path {
        let (from, mut to) = (common::driver(acked, SIZE, frame), common::driver(acked, SIZE, frame));
        let ((tx, _), (rx, _)) = (common::tx(&from, acked, SIZE), common::rx(&to, acked, SIZE));
        to.rx[0].refill();
        Path { from, to, tx, rx, burst: Burst::default() }
    }

    /// One burst of frames of `len` bytes; how long the device took.
    fn burst(&mut self, len: usize) -> Duration {
        self.from.tx[0].reclaim().unwrap();
        assert_eq!(self.from.tx[0].add(BURST, |_, _| len), BURST);
        self.from.tx[0].publish();
        let all: [u8; BURST] = std::array::from_fn(|index| index as u8);
        let start = Instant::now();
        let taken = self.tx.take(&mut self.burst).unwrap();
        let put = self.rx.put(&self.burst, &all[..taken]).unwrap();
        self.tx.done(&mut self.burst);
        let took = start.elapsed();
        assert_eq!(put, BURST);
        assert_eq!(self.to.rx[0].receive(true, |parts| assert_eq!(parts.len(), 1)).unwrap(), BURST);
        took
    }
}

fn device(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("device, per frame");
    for (layout, feature) in [("split", 0), ("packed", bits::RING_PACKED)] {
        for len in [64, 256, 1518] {
            let mut path = Path::new(bits::VERSION_1 | feature, 1518);
            group.bench_function(BenchmarkId::new(layout, len), |bencher| {
                bencher.iter_custom(|frames| {
                    let bursts = frames.div_ceil(BURST as u64);
                    let took: Duration = (0..bursts).map(|_| path.burst(len)).sum();
                    took.mul_f64(frames as f64 / (bursts * BURST as u64) as f64)
                });
            });
        }
    }
    group.finish();
}

fn nothing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("device, nothing to take");
    for (layout, feature) in [("split", 0), ("packed", bits::RING_PACKED)] {
        let mut path = Path::new(bits::VERSION_1 | feature, 1518);
        group.bench_function(layout, |bencher| bencher.iter(|| path.tx.take(&mut path.burst)));
    }
    group.finish();
}

criterion_group! {
    name = path;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    targets = device, nothing
}
criterion_main!(path);
