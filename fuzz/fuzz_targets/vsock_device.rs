//! Device end of virtio-vsock: no guest may make it panic, hang, or keep more than it should, whatever it writes to its rings.
#![no_main]

mod input;

use input::Input;
use ringroad_mem::{Region, Table};
use ringroad_ring::{Addresses, Buffer, DriverRing, Features, Used};
use ringroad_vsock::{
    Broken, DeviceSide, Host, Key, Listener, MAX_PACKET, NoRelay, OpenResult, Queue, RxQueue, SeqPacket, Settings,
    SocketType, Stack, Stream, TxQueue, bits, socket_types,
};
use ringroad_wire::vsock_hdr::VsockHdr;
use std::{
    cell::RefCell,
    io::{Read, Write},
    sync::Arc,
    time::{Duration, Instant},
};

/// Transmit ring at 0, receive ring at 4096, buffers anywhere, the rings themselves included.
const LEN: usize = 32768;
const BUFFERS: u64 = 8192;
const BASE: u64 = 0x10000;
const SIZE: u32 = 64;
const BUFFER: u32 = 8192;
const CONNECTIONS: usize = 8;

type Side = DeviceSide<NoRelay>;

thread_local! {
    static MEMORY: RefCell<Option<(Arc<Region>, Arc<Table>)>> = const { RefCell::new(None) };
}

struct Nobody;

impl Host<NoRelay> for Nobody {
    fn notify(&self, _: Queue) {}
    fn wake(&self) {}
    fn broken(&self, _: Queue, _: Broken) {}
    fn open(&self, _: Key, _: SocketType) -> OpenResult<NoRelay> {
        OpenResult::Refused
    }
    fn room(&self, _: Key) {}
}

impl Input<'_> {
    fn header(&mut self) -> VsockHdr {
        let odd = self.byte();
        VsockHdr {
            src_cid: if odd & 1 == 0 { 3 } else { self.number().into() },
            dst_cid: if odd & 2 == 0 { 2 } else { self.number().into() },
            src_port: u32::from(self.byte() % 4),
            dst_port: if odd & 4 == 0 { 1 + u32::from(odd >> 7) } else { self.number() },
            kind: if odd & 8 == 0 { 1 + u16::from(odd >> 7) } else { self.word() },
            op: if odd & 16 == 0 { u16::from(self.byte() % 8) } else { self.word() },
            len: self.number(),
            flags: self.number(),
            buf_alloc: self.number(),
            fwd_cnt: self.number(),
        }
    }
}

enum Program {
    Stream(Stream<Side>),
    Messages(SeqPacket<Side>),
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    MEMORY.with_borrow_mut(|memory| {
        let (region, table) = memory.get_or_insert_with(|| {
            let region = Region::private(LEN, BASE).unwrap();
            let table = Arc::new(Table::default().with(region.clone()).unwrap());
            (region, table)
        });
        one(Input(data), region, table);
    });
});

fn driver(region: &Arc<Region>, offset: usize, features: Features) -> (DriverRing, Addresses) {
    DriverRing::start(region, offset, features, SIZE).unwrap()
}

fn one(mut input: Input<'_>, region: &Arc<Region>, table: &Arc<Table>) {
    region.span(0, LEN).unwrap().write(&[0; LEN]);
    let chosen = input.byte();
    let mut acked = bits::VERSION_1 | bits::VSOCK_F_STREAM;
    let optional = [bits::RING_PACKED, bits::INDIRECT_DESC, bits::EVENT_IDX, bits::IN_ORDER, bits::VSOCK_F_SEQPACKET];
    for (index, bit) in optional.iter().enumerate() {
        acked |= if chosen >> index & 1 == 1 { *bit } else { 0 };
    }
    let features = Features::negotiated(acked);
    let base = if features.packed { 0x8000_8000 } else { 0 };
    let settings = Settings {
        direct: chosen & 32 == 0,
        buffer: BUFFER,
        connections: CONNECTIONS,
        backlog: 3,
        ..Settings::default()
    };
    let host = Arc::new(Stack::<Side>::new(2, Some(3), settings, Box::new(Nobody)));
    host.set_socket_types(socket_types(acked));
    let (mut tx, tx_at) = driver(region, 0, features);
    let (mut rx, rx_at) = driver(region, 4096, features);
    host.set_inlet(Some(TxQueue::start(table.clone(), acked, SIZE, tx_at, base).unwrap()));
    host.set_link(Some(RxQueue::start(table.clone(), acked, SIZE, rx_at, base).unwrap()));
    let streams = Listener::bind(&host, 1, SocketType::Stream).unwrap();
    let messages = Listener::bind(&host, 2, SocketType::SeqPacket).unwrap();
    let mut programs: Vec<Program> = Vec::new();
    let mut used = [Used::default(); 64];
    while !input.is_empty() {
        match input.byte() % 16 {
            // A write of 1 to 16 bytes anywhere.
            0 => {
                let at = input.word() as usize % LEN;
                let bytes: [u8; 16] = input.take();
                let len = (input.byte() as usize % 16 + 1).min(LEN - at);
                region.span(at, len).unwrap().write(&bytes);
            }
            // A packet, in as many descriptors as it takes.
            1..=6 => {
                let header = input.header();
                let at = BUFFERS + u64::from(input.word()) % (LEN as u64 - BUFFERS - 4096);
                region.span(at as usize, 44).unwrap().write(&header.to_bytes());
                let (total, cut) =
                    (44 + header.len.min(2000) - u32::from(input.byte() == 0), u32::from(input.byte()) * 8 + 4);
                let chain: Vec<_> = (0..total.div_ceil(cut))
                    .map(|part| Buffer { address: BASE + at + u64::from(part * cut), len: cut.min(total - part * cut) })
                    .collect();
                let _ = tx.add(&chain, &[]);
                tx.publish();
            }
            // Any chain in either ring.
            7 => {
                let which = input.byte();
                let mut chain = Vec::new();
                for _ in 0..input.byte() % 70 {
                    let address = BASE + u64::from(input.word()) % LEN as u64;
                    chain.push(Buffer { address, len: input.number().max(1) });
                }
                let (readable, writable) = chain.split_at(if which & 2 == 0 { 0 } else { chain.len() / 2 });
                let ring = if which & 1 == 0 { &mut tx } else { &mut rx };
                let _ = if which & 4 == 0 { ring.add(readable, writable) } else { ring.add(writable, readable) };
                ring.publish();
            }
            // Good receive buffers.
            8 => {
                for _ in 0..input.byte() % 8 {
                    let address = BASE + BUFFERS + u64::from(input.word()) % (LEN as u64 - BUFFERS - 4096);
                    let _ = rx.add(&[], &[Buffer { address, len: 45 + u32::from(input.byte()) * 16 }]);
                }
                rx.publish();
            }
            9 | 10 => {
                host.work();
                let _ = (tx.take_used(&mut used), rx.take_used(&mut used));
            }
            11 => {
                if let Ok(stream) = streams.accept_within(Some(Duration::ZERO)) {
                    stream.set_nonblocking(true);
                    programs.push(Program::Stream(stream));
                }
                if let Ok(messages) = messages.accept_messages_within(Some(Duration::ZERO)) {
                    messages.set_nonblocking(true);
                    programs.push(Program::Messages(messages));
                }
            }
            12 | 13 => {
                let (number, len) = (input.byte(), input.word() as usize);
                if let Some(program) =
                    usize::from(number >> 2).checked_rem(programs.len()).map(|index| &programs[index])
                {
                    match (program, number & 1) {
                        (Program::Stream(stream), 0) => drop((&*stream).write(&vec![1; len])),
                        (Program::Stream(stream), _) => drop((&*stream).read(&mut vec![0; len])),
                        (Program::Messages(messages), 0) => drop(messages.send(&vec![1; len], number & 2 == 0)),
                        (Program::Messages(messages), _) => drop(messages.receive(&mut vec![0; len])),
                    }
                }
            }
            14 => {
                let number = input.byte();
                if let Some(index) = usize::from(number).checked_rem(programs.len()) {
                    drop(programs.swap_remove(index));
                }
            }
            _ => match input.byte() % 8 {
                0 => host.reset(),
                1 => drop(host.tick(Instant::now() + Duration::from_secs(5))),
                2 => host.sweep(),
                3 => drop(host.enable_notification()),
                // The rings start anew.
                _ => {
                    region.span(0, BUFFERS as usize).unwrap().write(&[0; BUFFERS as usize]);
                    (tx, rx) = (driver(region, 0, features).0, driver(region, 4096, features).0);
                    host.set_inlet(Some(TxQueue::start(table.clone(), acked, SIZE, tx_at, base).unwrap()));
                    host.set_link(Some(RxQueue::start(table.clone(), acked, SIZE, rx_at, base).unwrap()));
                }
            },
        }
        for connection in host.connections() {
            assert!(connection.unread <= BUFFER as usize && connection.queued <= MAX_PACKET, "{connection:?}");
        }
        assert!(host.report().connections <= CONNECTIONS);
    }
    drop((programs, streams, messages));
    host.tick(Instant::now() + Duration::from_secs(60));
    assert_eq!(host.report().connections, 0);
}
