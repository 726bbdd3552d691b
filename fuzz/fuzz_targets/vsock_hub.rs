//! Device ends of virtio-vsock whose guests talk to each other, to themselves and to sockets of the host: no guest may make them
//! panic, hang, or keep more than its memory, whatever it writes to its rings, and whenever.
#![no_main]

mod input;

use input::Input;
use ringroad_mem::{Region, Span, Table};
use ringroad_ring::{Addresses, Buffer, DriverRing, Features, Used};
use ringroad_vsock::{
    Addr, Broken, DeviceSide, Host, Hub, Key, OpenResult, Payload, Queue, Relay, RxQueue, Settings, SocketType, Stack,
    TxQueue, bits, socket_types,
};
use ringroad_wire::vsock_hdr::{Op, VsockHdr};
use std::{
    cell::RefCell,
    io,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// Of each guest: transmit ring at 0, receive ring at 4096, buffers anywhere, the rings themselves included.
const LEN: usize = 65536;
const BUFFERS: u64 = 8192;
const BASE: u64 = 0x10000;
const SIZE: u32 = 64;
const GUESTS: usize = 3;
const CONNECTIONS: usize = 16;
const MEMORY: usize = 256 << 10;

type Side = DeviceSide<Sink>;
type Memory = Vec<(Arc<Region>, Arc<Table>)>;

thread_local! {
    static MEMORIES: RefCell<Memory> = const { RefCell::new(Vec::new()) };
}

/// A socket of the host that takes so many bytes, and then says that it is full, or gone.
struct Sink {
    takes: usize,
    gone: bool,
}

impl Relay for Sink {
    fn opened(&mut self, _: Key) {}

    fn deliver(&mut self, payload: &mut Payload<'_>) -> io::Result<()> {
        let count = self.takes.min(payload.len());
        self.takes -= count;
        payload.skip(count);
        if self.gone && self.takes == 0 { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }

    fn finish(&mut self) {}

    fn close(&mut self, _: bool) {}
}

/// Grants so many requests, and leads to sockets of every kind.
struct FuzzHost {
    requests: Mutex<usize>,
    keys: Arc<Mutex<Vec<Key>>>,
}

impl Host<Sink> for FuzzHost {
    fn notify(&self, _: Queue) {}
    fn wake(&self) {}
    fn broken(&self, _: Queue, _: Broken) {}

    fn open(&self, key: Key, _: SocketType) -> OpenResult<Sink> {
        let sink = Sink { takes: key.port as usize % 7 * 300, gone: key.port % 2 == 1 };
        let mut keys = self.keys.lock().unwrap();
        if keys.len() > 64 {
            keys.remove(0);
        }
        keys.push(key);
        match key.port % 5 {
            0 => OpenResult::Refused,
            1 | 2 => OpenResult::Pending(sink, Instant::now()),
            _ => OpenResult::Connected(sink),
        }
    }

    fn room(&self, _: Key) {}

    fn admit(&self) -> bool {
        let mut left = self.requests.lock().unwrap();
        let may = *left > 0;
        *left = left.saturating_sub(1);
        may
    }
}

impl Input<'_> {
    /// From a guest: to the host, to itself, to others, and seldom to or from nobody.
    fn header(&mut self, cid: u64) -> VsockHdr {
        let odd = self.byte();
        VsockHdr {
            src_cid: if odd & 0xf != 1 { cid } else { self.number().into() },
            dst_cid: u64::from(self.byte() % 6) + 1,
            src_port: u32::from(self.byte() % 8),
            dst_port: u32::from(self.byte() % 8),
            kind: if odd & 0xf != 2 { 1 + u16::from(odd >> 7) } else { self.word() },
            op: if odd & 0xf != 3 { u16::from(self.byte() % 8) } else { self.word() },
            len: self.number(),
            flags: u32::from(self.byte()),
            buf_alloc: if odd & 0x10 == 0 { 1 << 18 } else { self.number() },
            fwd_cnt: self.number(),
        }
    }
}

struct Guest {
    cid: u64,
    stack: Arc<Stack<Side>>,
    keys: Arc<Mutex<Vec<Key>>>,
    region: Arc<Region>,
    table: Arc<Table>,
    acked: u64,
    tx: DriverRing,
    rx: DriverRing,
    tx_at: Addresses,
    rx_at: Addresses,
}

fn driver(region: &Arc<Region>, offset: usize, features: Features) -> (DriverRing, Addresses) {
    DriverRing::start(region, offset, features, SIZE).unwrap()
}

impl Guest {
    fn new(cid: u64, chosen: u8, (region, table): &(Arc<Region>, Arc<Table>)) -> Guest {
        region.span(0, LEN).unwrap().write(&[0; LEN]);
        let mut acked = bits::VERSION_1 | bits::VSOCK_F_STREAM;
        let optional =
            [bits::RING_PACKED, bits::INDIRECT_DESC, bits::EVENT_IDX, bits::IN_ORDER, bits::VSOCK_F_SEQPACKET];
        for (index, bit) in optional.iter().enumerate() {
            acked |= if chosen >> index & 1 == 1 { *bit } else { 0 };
        }
        let settings = Settings {
            direct: chosen & 32 == 0,
            buffer: 8192,
            connections: CONNECTIONS,
            memory: MEMORY,
            ..Settings::default()
        };
        let keys = Arc::<Mutex<Vec<Key>>>::default();
        let host = FuzzHost { requests: Mutex::new(200), keys: keys.clone() };
        let stack = Arc::new(Stack::<Side>::new(2, Some(cid), settings, Box::new(host)));
        stack.set_socket_types(socket_types(acked));
        let features = Features::negotiated(acked);
        let ((tx, tx_at), (rx, rx_at)) = (driver(region, 0, features), driver(region, 4096, features));
        let (region, table) = (region.clone(), table.clone());
        let mut guest = Guest { cid, stack, keys, region, table, acked, tx, rx, tx_at, rx_at };
        guest.start();
        guest
    }

    /// The rings begin anew.
    fn start(&mut self) {
        self.region.span(0, BUFFERS as usize).unwrap().write(&[0; BUFFERS as usize]);
        let features = Features::negotiated(self.acked);
        (self.tx, self.rx) = (driver(&self.region, 0, features).0, driver(&self.region, 4096, features).0);
        let base = if features.packed { 0x8000_8000 } else { 0 };
        let (table, acked) = (&self.table, self.acked);
        self.stack.set_inlet(Some(TxQueue::start(table.clone(), acked, SIZE, self.tx_at, base).unwrap()));
        self.stack.set_link(Some(RxQueue::start(table.clone(), acked, SIZE, self.rx_at, base).unwrap()));
    }

    fn send(&mut self, header: VsockHdr, at: u64, cut: u32) {
        self.region.span(at as usize, 44).unwrap().write(&header.to_bytes());
        let total = 44 + header.len.min(9000);
        let part = |part| Buffer { address: BASE + at + u64::from(part * cut), len: cut.min(total - part * cut) };
        let chain: Vec<_> = (0..total.div_ceil(cut)).map(part).collect();
        let _ = self.tx.add(&chain, &[]);
        self.tx.publish();
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 20 {
            // A write of 1 to 16 bytes anywhere.
            0 => {
                let at = input.word() as usize % LEN;
                let bytes: [u8; 16] = input.take();
                let len = (input.byte() as usize % 16 + 1).min(LEN - at);
                self.region.span(at, len).unwrap().write(&bytes);
            }
            // An available index, or a descriptor's flags, of either ring.
            1 | 2 => {
                let which = input.byte();
                let ring = if which & 1 == 0 { 0 } else { 4096 };
                let index = usize::from(input.byte()) % SIZE as usize;
                let at = match which >> 1 & 3 {
                    0 => SIZE as usize * 16 + 2,
                    1 => index * 16 + 8,
                    2 => index * 16 + 12,
                    _ => index * 16 + 14,
                };
                let word = input.word();
                let word = if which & 8 == 0 { word } else { word % 80 };
                self.region.span(ring + at, 2).unwrap().write(&word.to_le_bytes());
            }
            3..=8 => {
                let header = input.header(self.cid);
                let at = BUFFERS + u64::from(input.word()) % (LEN as u64 - BUFFERS - 9044);
                let cut = u32::from(input.byte()) * 64 + 4;
                self.send(header, at, cut);
            }
            // A connection to itself or another guest, both ends, and data.
            9 => {
                let (from, to, len) = (input.byte() % 8, input.byte(), input.word());
                let header = VsockHdr {
                    src_cid: self.cid,
                    dst_cid: u64::from(to >> 4) % GUESTS as u64 + 3,
                    src_port: from.into(),
                    dst_port: u32::from(to % 8),
                    kind: 1,
                    op: Op::Request as u16,
                    buf_alloc: 1 << 18,
                    ..VsockHdr::default()
                };
                self.send(header, BUFFERS, 9044);
                let data = VsockHdr { op: Op::Data as u16, len: u32::from(len) % 9000, ..header };
                self.send(data, BUFFERS + 64, 9044);
            }
            // Any chain in either ring.
            10 => {
                let which = input.byte();
                let mut chain = Vec::new();
                for _ in 0..input.byte() % 70 {
                    let address = BASE + u64::from(input.word()) % LEN as u64;
                    chain.push(Buffer { address, len: input.number().max(1) });
                }
                let (readable, writable) = chain.split_at(if which & 2 == 0 { 0 } else { chain.len() / 2 });
                let ring = if which & 1 == 0 { &mut self.tx } else { &mut self.rx };
                let _ = if which & 4 == 0 { ring.add(readable, writable) } else { ring.add(writable, readable) };
                ring.publish();
            }
            // Good receive buffers, often as small as they may be.
            11 | 12 => {
                for _ in 0..input.byte() % 48 {
                    let address = BASE + BUFFERS + u64::from(input.word()) % (LEN as u64 - BUFFERS - 4200);
                    let len = 45 + u32::from(input.byte() & 0xf0) * 16;
                    let _ = self.rx.add(&[], &[Buffer { address, len }]);
                }
                self.rx.publish();
            }
            // What sockets of the host do.
            13 | 14 => {
                let (which, what, len) = (input.byte(), input.byte(), usize::from(input.word()));
                let keys = self.keys.lock().unwrap().clone();
                let Some(&key) = usize::from(which).checked_rem(keys.len()).and_then(|index| keys.get(index)) else {
                    let sink = Sink { takes: len, gone: which & 1 == 0 };
                    let peer = Addr { cid: self.cid, port: u32::from(what % 8) };
                    if let Ok(key) = self.stack.connect_relay(peer, SocketType::Stream, sink, Instant::now()) {
                        self.keys.lock().unwrap().push(key);
                    }
                    return;
                };
                match what % 9 {
                    0 => self.stack.finish_open(key, true),
                    1 => self.stack.finish_open(key, false),
                    2 => self.stack.drain(key),
                    3 => self.stack.shut_relay(key, len & 1 == 0, Instant::now()),
                    4 => self.stack.shut_relay_read(key, Instant::now()),
                    5 => self.stack.reset_relay(key),
                    _ => {
                        let mut read = |spans: &[Span<'_>]| {
                            let room = spans.iter().map(|span| span.len()).sum::<usize>();
                            assert!(room > 0);
                            if what > 250 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(room.min(len)) }
                        };
                        let mut copy = |bytes: &mut [u8]| Ok(bytes.len().min(len));
                        let _ = self.stack.send_from(key, len.max(1), &mut read, &mut copy);
                    }
                }
            }
            15 => match input.byte() % 8 {
                0 => self.stack.reset(),
                1 => drop(self.stack.tick(Instant::now() + Duration::from_secs(5))),
                2 => self.stack.sweep(),
                3 => drop(self.stack.enable_notification()),
                4 => {
                    self.stack.set_link(None);
                }
                _ => self.start(),
            },
            _ => {
                self.stack.work();
                let mut used = [Used::default(); 64];
                let _ = (self.tx.take_used(&mut used), self.rx.take_used(&mut used));
            }
        }
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    MEMORIES.with_borrow_mut(|memories| {
        while memories.len() < GUESTS {
            let region = Region::private(LEN, BASE).unwrap();
            let table = Arc::new(Table::default().with(region.clone()).unwrap());
            memories.push((region, table));
        }
        one(Input(data), memories);
    });
});

fn one(mut input: Input<'_>, memories: &Memory) {
    let hub = Hub::new(CONNECTIONS);
    let mut guests: Vec<Guest> =
        (3..).zip(memories).map(|(cid, memory)| Guest::new(cid, input.byte(), memory)).collect();
    for guest in &guests {
        hub.join(&guest.stack, vec!["x".into()]);
    }
    while !input.is_empty() {
        let which = usize::from(input.byte()) % GUESTS;
        guests[which].step(&mut input);
        for guest in &guests {
            let report = guest.stack.report();
            assert!(report.connections <= CONNECTIONS, "{report:?}");
            // What is promised to each connection, whatever the others have, may come on top.
            assert!(report.memory <= MEMORY + CONNECTIONS * (128 << 10), "{report:?}");
            assert!(report.crossing <= MEMORY, "{report:?}");
        }
    }
    // Nothing stays of it, neither at the guest nor at the others.
    guests.iter().for_each(|guest| guest.stack.reset());
    for guest in &guests {
        let report = guest.stack.report();
        assert_eq!((report.connections, report.memory, report.crossing), (0, 0, 0), "{report:?}");
    }
}
