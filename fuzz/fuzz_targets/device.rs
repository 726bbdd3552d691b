//! The device end of a ring against a driver that writes anything anywhere, between any two calls.

use crate::input::Input;
use ringroad_frame::{ALL, Burst, Counters};
use ringroad_mem::{Region, Table};
use ringroad_net::{RxQueue, TxQueue, bits};
use ringroad_ring::{Addresses, Inflight, Journal};
use std::{cell::RefCell, sync::Arc, time::Duration};

const LEN: usize = 16384;
const GUEST: u64 = 0x10000;
const LARGEST: u16 = 64;

/// Transmit ring at 0, receive ring at 4096; buffers anywhere, the rings themselves included.
const RINGS: [u64; 2] = [0, 4096];

/// Memory of the guest, an inflight region of its frontend, and notes of our own.
struct Memory {
    region: Arc<Region>,
    table: Arc<Table>,
    inflight: Arc<Region>,
    notes: Arc<Region>,
}

thread_local! {
    static MEMORY: RefCell<Option<Memory>> = const { RefCell::new(None) };
}

/// What may happen beside what a guest does.
#[allow(dead_code, reason = "each target has one of them")]
#[derive(Clone, Copy, PartialEq)]
pub enum Deaths {
    /// The device lives on.
    None,
    /// It is killed at any time; its successor goes on with its notes and with what the frontend has made of the inflight region.
    Any,
}

pub fn run(data: &[u8], packed: bool, deaths: Deaths) {
    MEMORY.with_borrow_mut(|memory| {
        let memory = memory.get_or_insert_with(|| {
            let region = Region::private(LEN, GUEST).unwrap();
            let table = Arc::new(Table::default().with(region.clone()).unwrap());
            let inflight = Region::private(2 * Inflight::bytes(true, LARGEST), 0).unwrap();
            let notes = Region::private(2 * Journal::BYTES, 0).unwrap();
            Memory { region, table, inflight, notes }
        });
        one(Input(data), packed, deaths, memory);
    });
}

/// A device, as it starts at some base.
struct Device<'a> {
    memory: &'a Memory,
    acked: u64,
    size: u32,
    /// Notes are kept, and the frontend has an inflight region.
    noted: bool,
    tracked: bool,
}

impl Device<'_> {
    fn start(&self, bases: [u32; 2]) -> Option<(TxQueue, RxQueue)> {
        let Self { memory: Memory { region, table, inflight, notes }, acked, size, noted, tracked } = *self;
        let counters = Arc::new(Counters::default());
        let at = |queue: usize| {
            let at = region.user() + RINGS[queue];
            Addresses { descriptor: at, driver: at + 2048, device: at + 3072 }
        };
        let note = |queue| if noted { Journal::new(notes, queue) } else { Journal::NONE };
        let packed = acked & bits::RING_PACKED != 0;
        let track =
            |queue| if tracked { Inflight::new(inflight, queue, LARGEST, packed).unwrap() } else { Inflight::NONE };
        let tx = TxQueue::resume(table.clone(), acked, size, at(0), bases[0], counters.clone(), note(0), track(0));
        let rx = RxQueue::resume(table.clone(), acked, size, at(1), bases[1], counters, note(1), track(1));
        Some((tx.ok()?.0, rx.ok()?.0))
    }
}

fn write(region: &Region, input: &mut Input<'_>) {
    let len = region.len();
    let at = input.word() as usize % len;
    let bytes: [u8; 16] = input.take();
    let count = (input.byte() as usize % 16 + 1).min(len - at);
    region.span(at, count).unwrap().write(&bytes);
}

fn one(mut input: Input<'_>, packed: bool, deaths: Deaths, memory: &Memory) {
    let Memory { region, inflight, notes, .. } = memory;
    for region in [region, inflight, notes] {
        region.span(0, region.len()).unwrap().write(&[0; LEN][..region.len()]);
    }
    let features = u64::from(input.byte());
    let mut acked = bits::VERSION_1 | if packed { bits::RING_PACKED } else { 0 };
    for (index, bit) in [bits::INDIRECT_DESC, bits::EVENT_IDX, bits::IN_ORDER, bits::NET_F_MRG_RXBUF].iter().enumerate()
    {
        acked |= if features >> index & 1 == 1 { *bit } else { 0 };
    }
    let size = if packed { u32::from(input.byte() % 64) + 1 } else { 1 << (input.byte() % 7) };
    let base = u32::from_le_bytes(input.take());
    let mortal = deaths == Deaths::Any;
    let (noted, tracked) = (mortal && features & 0x10 != 0, mortal && features & 0x20 != 0);
    let device = Device { memory, acked, size, noted, tracked };
    let Some((mut tx, mut rx)) = device.start([base, 0]) else { return };
    let mut burst = Burst::default();
    while !input.is_empty() {
        match input.byte() % if mortal { 12 } else { 8 } {
            // A write of 1 to 16 bytes anywhere.
            0..=2 => write(region, &mut input),
            // A descriptor that is nearly right, in either ring.
            3 => {
                let slot = u64::from(input.byte()) % u64::from(size);
                let offset = RINGS[usize::from(input.byte() & 1)] + slot * 16;
                let address = GUEST + u64::from(input.word()) % LEN as u64;
                let tail = u64::from(input.word()) | u64::from(input.byte()) << 16;
                let word = tail | u64::from_le_bytes(input.take()) << 32;
                let bytes = (u128::from(address) | u128::from(word) << 64).to_le_bytes();
                region.span(offset as usize, 16).unwrap().write(&bytes);
            }
            // Frames that find no room wait at their sender.
            4 => {
                if tx.take(&mut burst).unwrap_or(0) > 0 {
                    let count = burst.frames().len();
                    match rx.offer(&burst, ALL.get(..count).unwrap()) {
                        Ok(handled) if handled < count => {
                            tx.retain(&mut burst, handled);
                            let _ = rx.enable_notification();
                        }
                        _ => tx.done(&mut burst),
                    }
                }
                burst.clear();
            }
            5 => {
                if tx.take(&mut burst).unwrap_or(0) > 0 {
                    let _ = rx.put(&burst, ALL.get(..burst.frames().len()).unwrap());
                    let _ = rx.settle(Duration::ZERO);
                    tx.done(&mut burst);
                }
                burst.clear();
            }
            6 => drop(tx.enable_notification()),
            7 => {
                tx.disable_notification();
                rx.disable_notification();
            }
            8 => write(inflight, &mut input),
            // A note is never anybody else's to write, but a disk or an older version may have made anything of it.
            9 if input.byte() > 240 => write(notes, &mut input),
            // Taken, and killed before anything became of it.
            9 => drop(tx.take(&mut burst)),
            _ => {
                burst.clear();
                let bases = if input.byte() & 1 == 0 { [u32::from(input.word()); 2] } else { [tx.base(), rx.base()] };
                drop((tx, rx));
                match device.start(bases) {
                    Some(queues) => (tx, rx) = queues,
                    None => return,
                }
            }
        }
    }
    let _ = (tx.stop(), rx.stop());
}
