//! The device end of a ring against a driver that writes anything anywhere, between any two calls.

use ringroad_mem::{Region, Table};
use ringroad_net::{Burst, Counters, RxQueue, TxQueue, bits};
use ringroad_ring::Addresses;
use std::{cell::RefCell, sync::Arc};

const LEN: usize = 16384;
const GUEST: u64 = 0x10000;

thread_local! {
    static MEMORY: RefCell<Option<(Arc<Region>, Arc<Table>)>> = const { RefCell::new(None) };
}

/// Takes bytes from the front of the input.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let n = N.min(self.0.len());
        out[..n].copy_from_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        out
    }

    fn byte(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }
}

pub fn run(data: &[u8], packed: bool) {
    MEMORY.with_borrow_mut(|memory| {
        let (region, table) = memory.get_or_insert_with(|| {
            let region = Region::private(LEN, GUEST).unwrap();
            let table = Arc::new(Table::default().with(region.clone()).unwrap());
            (region, table)
        });
        one(Input(data), packed, region, table);
    });
}

fn one(mut input: Input<'_>, packed: bool, region: &Arc<Region>, table: &Arc<Table>) {
    region.span(0, LEN).unwrap().write(&[0; LEN]);
    let features = u64::from(input.byte());
    let mut acked = bits::VERSION_1 | if packed { bits::RING_PACKED } else { 0 };
    for (index, bit) in [bits::INDIRECT_DESC, bits::EVENT_IDX, bits::IN_ORDER, bits::NET_F_MRG_RXBUF].iter().enumerate() {
        acked |= if features >> index & 1 == 1 { *bit } else { 0 };
    }
    let size = if packed { u32::from(input.byte() % 64) + 1 } else { 1 << (input.byte() % 7) };
    let base = u32::from_le_bytes(input.take());
    // Transmit ring at 0, receive ring at 4096; buffers anywhere, the rings themselves included.
    let ring = |offset: u64| {
        let at = region.user() + offset;
        Addresses { descriptor: at, driver: at + 2048, device: at + 3072 }
    };
    let counters = Arc::new(Counters::default());
    let tx = TxQueue::start(table.clone(), acked, size, ring(0), base, counters.clone());
    let rx = RxQueue::start(table.clone(), acked, size, ring(4096), 0, counters);
    let (Ok(mut tx), Ok(mut rx)) = (tx, rx) else { return };
    let mut burst = Burst::default();
    while !input.0.is_empty() {
        match input.byte() % 8 {
            // A write of 1 to 16 bytes anywhere.
            0..=2 => {
                let at = input.word() as usize % LEN;
                let bytes: [u8; 16] = input.take();
                let len = (input.byte() as usize % 16 + 1).min(LEN - at);
                region.span(at, len).unwrap().write(&bytes);
            }
            // A descriptor that is nearly right, in either ring.
            3 => {
                let slot = u64::from(input.byte()) % u64::from(size);
                let offset = if input.byte() & 1 == 0 { 0 } else { 4096 } + slot * 16;
                let address = GUEST + u64::from(input.word()) % LEN as u64;
                let tail = u64::from(input.word()) | u64::from(input.byte()) << 16;
                let word = tail | u64::from_le_bytes(input.take()) << 32;
                let bytes = (u128::from(address) | u128::from(word) << 64).to_le_bytes();
                region.span(offset as usize, 16).unwrap().write(&bytes);
            }
            4 | 5 => {
                if tx.take(&mut burst).unwrap_or(0) > 0 {
                    let all: Vec<u8> = (0..burst.frames().len() as u8).collect();
                    let _ = rx.put(&burst, &all);
                    let _ = rx.wants_notification(true);
                    tx.done(&mut burst);
                }
                burst.clear();
            }
            6 => drop(tx.enable_notification()),
            _ => tx.disable_notification(),
        }
    }
    let _ = (tx.base(), rx.base());
}
