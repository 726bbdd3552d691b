//! A guest that obeys no rules: a test writes its rings packet by packet and descriptor by descriptor, with a device's stack at
//! the other end. Single-threaded, and nothing sleeps.

use super::{GUEST, HOST, HostStack, TestHost, pattern};
use ringroad_mem::{Region, Span, Table};
use ringroad_ring::{Addresses, Buffer, DriverRing, Features as RingFeatures, Used};
use ringroad_vsock::{Addr, Listener, RxQueue, Settings, SocketType, Stack, Stream, TxQueue, bits, socket_types};
use ringroad_wire::vsock_hdr::{Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SIZE, TYPE_STREAM, VsockHdr};
use std::{
    collections::HashMap,
    io::{ErrorKind, Read, Write},
    sync::Arc,
    time::Duration,
};

pub type Side = ringroad_vsock::DeviceSide<ringroad_vsock::NoRelay>;

/// Guest address of the guest's memory.
pub const BASE: u64 = 0x10_0000_0000;
/// Size in bytes of the area for outgoing packets, which is reused cyclically.
pub const ARENA: usize = 24 << 20;
/// Port of the well-behaved connection of each guest, at both ends.
pub const GOOD: u32 = 7777;
/// Port that programs of the host listen on in most tests.
pub const PORT: u32 = 1000;
/// First ephemeral port.
pub const FIRST_PORT: u32 = 1 << 20;
pub const BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
pub const SPLIT: u64 = bits::VERSION_1 | bits::VSOCK_F_STREAM | bits::VSOCK_F_SEQPACKET;
pub const PACKED: u64 = SPLIT | bits::RING_PACKED;

/// Configuration of a raw guest.
pub struct Shape {
    pub cid: u64,
    pub acked: u64,
    pub queue_size: u32,
    /// Receive buffers, each given as the lengths of its descriptors.
    pub buffers: Vec<Vec<u32>>,
    pub settings: Settings,
}

impl Default for Shape {
    fn default() -> Self {
        let buffers = vec![vec![4096 + SIZE as u32]; 32];
        Shape { cid: GUEST, acked: SPLIT, queue_size: 64, buffers, settings: Settings::default() }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Packet {
    pub header: VsockHdr,
    pub payload: Vec<u8>,
}

/// A guest that obeys no rules: just rings, with a device's stack at the other end.
pub struct Guest {
    pub cid: u64,
    pub host: Arc<HostStack>,
    pub env: TestHost,
    pub region: Arc<Region>,
    pub rx: DriverRing,
    pub tx: DriverRing,
    /// Receive buffers the device holds, by id.
    pub posted: HashMap<u16, Vec<Buffer>>,
    /// Addresses of the next receive buffer, of the packet area, and of the next packet in it.
    pub free: u64,
    pub arena: u64,
    pub next: u64,
    pub good: Option<Good>,
}

/// A connection that obeys all rules.
pub struct Good {
    pub program: Stream<Side>,
    pub sent: u64,
    pub received: u64,
}

pub fn ring(region: &Arc<Region>, offset: usize, size: u32, acked: u64) -> (DriverRing, Addresses) {
    DriverRing::start(region, offset, RingFeatures::negotiated(acked), size).unwrap()
}

pub fn env() -> TestHost {
    TestHost {
        own: Arc::default(),
        lead: None,
        other: Arc::default(),
        other_lead: None,
        broken: Arc::default(),
        notified: Arc::default(),
    }
}

pub fn base(acked: u64) -> u32 {
    if acked & bits::RING_PACKED != 0 { 0x8000_8000 } else { 0 }
}

impl Guest {
    /// Creates a guest with a well-behaved connection.
    pub fn new(shape: Shape) -> Guest {
        let mut guest = Guest::bare(shape);
        let listener = Listener::bind(&guest.host, GOOD, SocketType::Stream).unwrap();
        assert_eq!(
            guest.exchange(guest.header(Op::Request, GOOD, GOOD), &[]),
            [guest.answer(Op::Response, GOOD, GOOD)]
        );
        let program = listener.accept_within(Some(Duration::ZERO)).unwrap();
        program.set_nonblocking(true);
        guest.good = Some(Good { program, sent: 0, received: 0 });
        guest
    }

    pub fn bare(Shape { cid, acked, queue_size, buffers, settings }: Shape) -> Guest {
        let ring_len = DriverRing::bytes(RingFeatures::negotiated(acked), queue_size).next_multiple_of(4096);
        let receive: usize = buffers.iter().flatten().map(|&len| len as usize).sum();
        let arena = 2 * ring_len + receive + (1 << 20);
        let (region, file) = Region::create(arena + ARENA, BASE, false).unwrap();
        let (rx, rx_at) = ring(&region, 0, queue_size, acked);
        let (tx, tx_at) = ring(&region, ring_len, queue_size, acked);
        let mapped = Region::map(&file, 0, region.len() as u64, BASE, region.user()).unwrap();
        let memory = Arc::new(Table::default().with(mapped).unwrap());
        let env = env();
        let host = Arc::new(Stack::new(HOST, Some(cid), settings, Box::new(env.clone())));
        host.set_link(Some(RxQueue::start(memory.clone(), acked, queue_size, rx_at, base(acked)).unwrap()));
        host.set_inlet(Some(TxQueue::start(memory, acked, queue_size, tx_at, base(acked)).unwrap()));
        host.set_socket_types(socket_types(acked));
        let (free, arena) = (BASE + 2 * ring_len as u64, BASE + arena as u64);
        let (posted, next, good) = (HashMap::new(), arena, None);
        let mut guest = Guest { cid, host, env, region, rx, tx, posted, free, arena, next, good };
        buffers.iter().for_each(|lens| guest.post(lens));
        guest
    }

    pub fn span(&self, buffer: Buffer) -> Span<'_> {
        self.region.span((buffer.address - BASE) as usize, buffer.len as usize).unwrap()
    }

    /// Makes a receive buffer available, with descriptors of these lengths.
    pub fn post(&mut self, lens: &[u32]) {
        let mut free = self.free;
        let buffer = |&len: &u32| {
            free += u64::from(len);
            Buffer { address: free - u64::from(len), len }
        };
        let chain: Vec<_> = lens.iter().map(buffer).collect();
        self.free = free;
        let id = self.rx.add(&[], &chain).unwrap();
        self.rx.publish();
        self.posted.insert(id, chain);
    }

    /// Returns a header from a port of the guest to a port of the host.
    pub fn header(&self, op: Op, from: u32, to: u32) -> VsockHdr {
        VsockHdr {
            src_cid: self.cid,
            dst_cid: HOST,
            src_port: from,
            dst_port: to,
            kind: TYPE_STREAM,
            op: op as u16,
            buf_alloc: 1 << 18,
            ..VsockHdr::default()
        }
    }

    /// Returns the header of a data packet.
    pub fn data(&self, from: u32, to: u32, len: usize) -> VsockHdr {
        VsockHdr { len: len as u32, ..self.header(Op::Data, from, to) }
    }

    /// Returns the answer expected from the host's port; a reset carries no credit.
    pub fn answer(&self, op: Op, from: u32, to: u32) -> Packet {
        let header = VsockHdr {
            src_cid: HOST,
            dst_cid: self.cid,
            src_port: to,
            dst_port: from,
            buf_alloc: if op == Op::Reset { 0 } else { self.host_buffer() },
            ..self.header(op, from, to)
        };
        Packet { header, payload: vec![] }
    }

    pub fn host_buffer(&self) -> u32 {
        Settings::default().buffer
    }

    /// Makes a chain available: `bytes` split into readable descriptors of the lengths in `cuts` and one for the rest, and then a
    /// writable one of `writable` bytes.
    pub fn send_chain(&mut self, bytes: &[u8], cuts: &[usize], writable: u32) {
        if self.next + (bytes.len() as u64) + u64::from(writable) > BASE + self.region.len() as u64 {
            self.next = self.arena;
        }
        let mut chain = Vec::new();
        let mut rest = bytes;
        for cut in cuts.iter().copied().chain([usize::MAX]) {
            let (part, more) = rest.split_at(cut.min(rest.len()));
            if !part.is_empty() {
                let buffer = Buffer { address: self.next, len: part.len() as u32 };
                self.span(buffer).write(part);
                self.next += part.len() as u64;
                chain.push(buffer);
            }
            rest = more;
        }
        let target = Buffer { address: self.next, len: writable };
        let writable: &[Buffer] = if writable > 0 { &[target] } else { &[] };
        self.next += u64::from(target.len);
        if self.tx.add(&chain, writable).is_err() {
            self.host.work();
            let mut used = [Used::default(); 64];
            while self.tx.take_used(&mut used).unwrap() > 0 {}
            self.tx.add(&chain, writable).unwrap();
        }
        self.tx.publish();
    }

    pub fn send(&mut self, header: VsockHdr, payload: &[u8]) {
        self.send_chain(&[&header.to_bytes(), payload].concat(), &[], 0);
    }

    /// Returns the packets the device has sent so far, with their buffers.
    pub fn collect(&mut self) -> Vec<(Packet, Vec<Buffer>)> {
        let (mut packets, mut used) = (Vec::new(), [Used::default(); 64]);
        loop {
            let count = self.rx.take_used(&mut used).unwrap();
            if count == 0 {
                return packets;
            }
            for used in &used[..count] {
                let chain = self.posted.remove(&used.id).unwrap();
                let mut bytes = Vec::new();
                for &buffer in &chain {
                    let mut part = vec![0; buffer.len as usize];
                    self.span(buffer).read(&mut part);
                    bytes.extend(part);
                }
                bytes.truncate(used.len as usize);
                let mut header = VsockHdr::from_bytes(bytes[..SIZE].try_into().unwrap());
                if header.op == Op::Reset as u16 {
                    // The credit fields of a reset mean nothing.
                    (header.buf_alloc, header.fwd_cnt) = (0, 0);
                }
                assert_eq!(header.len as usize, bytes.len() - SIZE, "{header:?}");
                packets.push((Packet { header, payload: bytes.split_off(SIZE) }, chain));
            }
        }
    }

    /// Returns the packets the device has sent so far, and makes their buffers available again.
    pub fn take(&mut self) -> Vec<Packet> {
        let taken = self.collect();
        let mut again = |(packet, chain): (Packet, Vec<Buffer>)| {
            let id = self.rx.add(&[], &chain).unwrap();
            self.posted.insert(id, chain);
            packet
        };
        let packets = taken.into_iter().map(&mut again).collect();
        self.rx.publish();
        packets
    }

    /// Lets the device work until it sends nothing more; returns its packets.
    pub fn receive(&mut self) -> Vec<Packet> {
        let mut packets = Vec::new();
        loop {
            self.host.work();
            let more = self.take();
            if more.is_empty() {
                return packets;
            }
            packets.extend(more);
        }
    }

    /// Sends a packet; returns all packets that come back.
    pub fn exchange(&mut self, header: VsockHdr, payload: &[u8]) -> Vec<Packet> {
        self.send(header, payload);
        self.receive()
    }

    /// Connects from a port of the guest to a program of the host.
    pub fn connect(&mut self, listener: &Listener<Side>, from: u32, to: u32) -> Stream<Side> {
        assert_eq!(self.exchange(self.header(Op::Request, from, to), &[]), [self.answer(Op::Response, from, to)]);
        let stream = listener.accept_within(Some(Duration::ZERO)).unwrap();
        assert_eq!(stream.peer_addr(), Addr { cid: self.cid, port: from });
        stream.set_nonblocking(true);
        stream
    }

    /// Checks that the well-behaved connection still works, with 5000 bytes each way. Returns other packets the device sent.
    #[track_caller]
    pub fn check(&mut self) -> Vec<Packet> {
        const LEN: usize = 5000;
        let Good { program, mut sent, mut received } = self.good.take().unwrap();
        let (mut bytes, mut target) = ([0; LEN], [0; LEN + 1]);
        pattern(1, sent, &mut bytes);
        let header = VsockHdr { fwd_cnt: received as u32, ..self.data(GOOD, GOOD, LEN) };
        self.send(header, &bytes);
        self.host.work();
        assert_eq!((&program).read(&mut target).unwrap(), LEN);
        assert!(target[..LEN] == bytes);
        sent += LEN as u64;
        pattern(2, received, &mut bytes);
        (&program).write_all(&bytes).unwrap();
        let (own, others): (Vec<_>, Vec<_>) =
            self.receive().into_iter().partition(|packet| packet.header.dst_port == GOOD);
        let mut got = Vec::new();
        for Packet { header, payload } in own {
            assert!(header.op == Op::Data as u16 || header.op == Op::CreditUpdate as u16, "{header:?}");
            got.extend(payload);
        }
        assert!(got == bytes, "{} bytes", got.len());
        received += LEN as u64;
        assert_eq!(*self.env.broken.lock(), []);
        self.good = Some(Good { program, sent, received });
        others
    }
}

/// The guests of a test: one for each ring layout.
pub fn guests() -> impl Iterator<Item = Guest> {
    [SPLIT, PACKED].map(|acked| Guest::new(Shape { acked, ..Shape::default() })).into_iter()
}

#[track_caller]
pub fn is_reset(stream: &Stream<Side>) {
    let mut stream = stream;
    assert_eq!(stream.read(&mut [0; 9]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(stream.write(&[0; 9]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

pub fn listener(guest: &Guest) -> Listener<Side> {
    Listener::bind(&guest.host, PORT, SocketType::Stream).unwrap()
}

pub fn reset_of(header: VsockHdr) -> Packet {
    let header = VsockHdr {
        src_cid: header.dst_cid,
        dst_cid: header.src_cid,
        src_port: header.dst_port,
        dst_port: header.src_port,
        kind: header.kind,
        op: Op::Reset as u16,
        ..VsockHdr::default()
    };
    Packet { header, payload: vec![] }
}
