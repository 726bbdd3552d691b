//! What the forwarding table costs for each frame, by how many addresses there are.

use criterion::{Criterion, criterion_group, criterion_main};
use ringroad_switch::Fdb;
use ringroad_wire::ethernet::MacAddr;
use std::time::Duration;

/// Addresses in an order that no prefetcher guesses; those of another `kind` are different ones.
fn addresses(kind: u32, count: u32) -> Vec<MacAddr> {
    (0..count).map(|i| MacAddr::local(kind << 24 | i.wrapping_mul(0x9e37_79b1) >> 8)).collect()
}

fn fdb(criterion: &mut Criterion) {
    for count in [2, 1000, 16_000] {
        let (known, unknown) = (addresses(1, count), addresses(2, count));
        let mut fdb = Fdb::new(65_536, 300).with_hold(0);
        for &address in &known {
            fdb.learn(address, 1, 0);
        }
        let mut group = criterion.benchmark_group(format!("{count} addresses"));
        let (mut known, mut unknown) = (known.iter().cycle(), unknown.iter().cycle());
        let mut next = || *known.next().unwrap();
        group.bench_function("lookup, known", |bencher| bencher.iter(|| fdb.lookup(next(), 1)));
        group.bench_function("lookup, unknown", |bencher| bencher.iter(|| fdb.lookup(*unknown.next().unwrap(), 1)));
        group.bench_function("learn, confirmed", |bencher| bencher.iter(|| fdb.learn(next(), 1, 0)));
        let mut port = 0u32;
        group.bench_function("learn, moved", |bencher| {
            bencher.iter(|| {
                port = (port + 1) % 1024;
                fdb.learn(next(), port, 0)
            })
        });
        group.finish();
    }
}

criterion_group! {
    name = table;
    config = Criterion::default().warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    targets = fdb
}
criterion_main!(table);
