//! Limits on the memory and time that one guest can use up, whatever it does, and their effect on honest guests.
#![cfg(not(loom))]

mod common;

use allocation_counter::measure;
use common::{
    GUEST,
    raw::{Guest, PACKED, PORT, Packet, SPLIT, Shape, Side, listener},
};
use ringroad_mem::Span;
use ringroad_vsock::{
    Addr, Broken, DeviceSide, Host, Hub, Key, Link, Listener, MAX_PACKET, NoRelay, OpenResult, Owner, Payload, Queue,
    Relay, Sender, Settings, SocketType, Stack, Stream,
};
use ringroad_wire::vsock_hdr::{HOST_CID, Op, SEQ_EOM, SIZE, TYPE_SEQPACKET, VsockHdr};
use std::{
    collections::HashMap,
    io::{self, ErrorKind, Write},
    num::NonZeroUsize,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

const MEMORY: usize = 4 << 20;
/// Allowance for memory that is not accounted: this test's own rings, and spare capacity of hash tables.
const SLACK: usize = 3 << 20;

fn small() -> Settings {
    Settings { memory: MEMORY, ..Settings::default() }
}

/// Creates a guest in the group "x" with `buffers` receive buffers.
fn member(hub: &Arc<Hub<Side>>, cid: u64, acked: u64, buffers: usize, settings: Settings) -> Guest {
    let buffers = vec![vec![4096 + SIZE as u32]; buffers];
    let guest = Guest::bare(Shape { cid, acked, settings, buffers, ..Shape::default() });
    hub.join(&guest.host, vec!["x".into()]);
    guest
}

/// Returns a header from a port of a guest to a port of another guest, or of the same one.
fn across(from: (&Guest, u32), op: Op, to: (u64, u32)) -> VsockHdr {
    VsockHdr { dst_cid: to.0, buf_alloc: 1 << 20, ..from.0.header(op, from.1, to.1) }
}

/// Returns how many bytes more are in use after `run` than before.
fn kept(run: impl FnOnce()) -> usize {
    usize::try_from(measure(run).bytes_current).unwrap_or(0)
}

// --- memory -----------------------------------------------------------------------------------------------------------

#[test]
fn a_guest_that_sends_to_itself_and_takes_nothing_stays_within_its_memory_limit() {
    for acked in [SPLIT, PACKED] {
        let hub = Hub::new(16384);
        let mut guest = member(&hub, GUEST, acked, 0, small());
        let bytes = kept(|| {
            for port in 0..100 {
                guest.send(across((&guest, port), Op::Request, (GUEST, 1000 + port)), &[]);
                guest.send(across((&guest, 1000 + port), Op::Response, (GUEST, port)), &[]);
                for _ in 0..16 {
                    let data = VsockHdr { len: 60_000, ..across((&guest, port), Op::Data, (GUEST, 1000 + port)) };
                    guest.send(data, &[7; 60_000]);
                    guest.host.work();
                }
            }
        });
        assert!(bytes < MEMORY + SLACK, "{bytes} bytes");
        let report = guest.host.report();
        assert!(report.crossing <= MEMORY && report.exhausted > 0, "{report:?}");
        guest.host.reset();
        assert_eq!(guest.host.report().crossing, 0);
    }
}

#[test]
fn a_port_cannot_connect_to_itself() {
    let hub = Hub::new(16384);
    let mut guest = member(&hub, GUEST, SPLIT, 32, small());
    let bytes = kept(|| {
        for port in 0..50_000 {
            let request = across((&guest, port), Op::Request, (GUEST, port));
            guest.send(request, &[]);
            let answers = guest.receive();
            assert_eq!(answers.len(), 1);
            assert_eq!((answers[0].header.op, answers[0].header.dst_port), (Op::Reset as u16, port));
        }
    });
    assert!(bytes < 1 << 20, "{bytes} bytes");
    assert_eq!(guest.host.report().wrong, 50_000);
}

#[test]
fn empty_messages_are_charged() {
    // Messages that a program does not read.
    let mut guest = Guest::bare(Shape { settings: small(), ..Shape::default() });
    let listener = Listener::bind(&guest.host, PORT, SocketType::SeqPacket).unwrap();
    let mut programs = Vec::new();
    let empty = |guest: &Guest, port| VsockHdr { kind: TYPE_SEQPACKET, flags: SEQ_EOM, ..guest.data(port, PORT, 0) };
    let bytes = kept(|| {
        for port in 0..6 {
            guest.exchange(VsockHdr { op: Op::Request as u16, ..empty(&guest, port) }, &[]);
            // With all memory in use, no further connection can be opened.
            programs.extend(listener.accept_messages_within(Some(Duration::ZERO)));
            for _ in 0..250_000 {
                guest.send(empty(&guest, port), &[]);
            }
            guest.receive();
        }
    });
    assert!(bytes < MEMORY + SLACK, "{bytes} bytes");
    drop(programs);

    // Messages that a program sends to a guest without buffers.
    let mut guest = Guest::bare(Shape::default());
    let listener = Listener::bind(&guest.host, PORT, SocketType::SeqPacket).unwrap();
    guest.exchange(VsockHdr { op: Op::Request as u16, ..empty(&guest, 5) }, &[]);
    let program = listener.accept_messages_within(Some(Duration::ZERO)).unwrap();
    program.set_nonblocking(true);
    let sent = (0..100_000).take_while(|_| program.send(&[], false).is_ok()).count();
    assert!(sent < 2000, "{sent} messages");
    assert_eq!(program.send(&[], false).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(guest.receive().len(), sent);
    program.send(&[], false).unwrap();

    // Messages between guests.
    let hub = Hub::new(100);
    let mut guest = member(&hub, GUEST, SPLIT, 0, small());
    let bytes = kept(|| {
        for port in 0..4 {
            let kind = TYPE_SEQPACKET;
            guest.send(VsockHdr { kind, ..across((&guest, port), Op::Request, (GUEST, 50 + port)) }, &[]);
            guest.send(VsockHdr { kind, ..across((&guest, 50 + port), Op::Response, (GUEST, port)) }, &[]);
            for _ in 0..60_000 {
                let data = across((&guest, port), Op::Data, (GUEST, 50 + port));
                guest.send(VsockHdr { kind, flags: SEQ_EOM, ..data }, &[]);
            }
            guest.host.work();
        }
        while guest.host.work() {}
    });
    assert!(bytes < MEMORY + SLACK, "{bytes} bytes");
}

#[test]
fn data_between_programs_and_a_guest_that_nobody_reads_stays_within_the_memory_limit() {
    for acked in [SPLIT, PACKED] {
        let mut guest = Guest::bare(Shape { acked, settings: small(), ..Shape::default() });
        let listener = listener(&guest);
        let mut streams = Vec::new();
        let bytes = kept(|| {
            for port in 0..100 {
                let request = VsockHdr { buf_alloc: u32::MAX, ..guest.header(Op::Request, port, PORT) };
                guest.send(request, &[]);
                let answer = guest.receive().pop().unwrap().header;
                let stream = listener.accept_within(Some(Duration::ZERO)).unwrap();
                stream.set_nonblocking(true);
                // Use up all the credit.
                let mut left = answer.buf_alloc as usize;
                while left > 0 {
                    let len = left.min(60_000);
                    guest.send(guest.data(port, PORT, len), &vec![1; len]);
                    guest.host.work();
                    left -= len;
                }
                streams.push(stream);
            }
            // From here on the guest takes nothing.
            for stream in &streams {
                while (&*stream).write(&[2; 10_000]).is_ok() {}
            }
        });
        assert!(bytes < MEMORY + SLACK, "{bytes} bytes");
        let report = guest.host.report();
        assert!(report.memory <= MEMORY, "{report:?}");
        assert_eq!((report.connections, report.wrong), (100, 0), "a guest that respects its credit is not reset");
        assert!(guest.host.connections().iter().all(|one| one.queued > 0), "each connection has a minimum");
        drop(streams);
        guest.host.reset();
        assert_eq!(guest.host.report().memory, 0);
    }
}

/// A host socket that takes nothing.
struct StuckSocket;

impl Relay for StuckSocket {
    fn opened(&mut self, _: Key) {}
    fn deliver(&mut self, _: &mut Payload<'_>) -> io::Result<()> {
        Ok(())
    }
    fn finish(&mut self) {}
    fn close(&mut self, _: bool) {}
}

struct SocketHost;

impl Host<StuckSocket> for SocketHost {
    fn notify(&self, _: Queue) {}
    fn wake(&self) {}
    fn broken(&self, _: Queue, _: Broken) {}
    fn open(&self, _: Key, _: SocketType) -> OpenResult<StuckSocket> {
        OpenResult::Connected(StuckSocket)
    }
    fn room(&self, _: Key) {}
}

#[test]
fn data_between_host_sockets_and_a_guest_that_nobody_reads_stays_within_the_memory_limit() {
    let mut guest = Guest::bare(Shape::default());
    // The same rings, with a stack whose connections end in host sockets.
    let stack = Stack::<DeviceSide<StuckSocket>>::new(HOST_CID, Some(GUEST), small(), Box::new(SocketHost));
    stack.set_link(guest.host.set_link(None));
    stack.set_inlet(guest.host.set_inlet(None));
    stack.set_socket_types(&[SocketType::Stream, SocketType::SeqPacket]);
    let ask = |guest: &mut Guest, header: VsockHdr| {
        guest.send(header, &[]);
        stack.work();
        guest.take().pop().unwrap().header
    };
    let messages = VsockHdr { kind: TYPE_SEQPACKET, ..guest.header(Op::Request, 1, PORT) };
    assert_eq!(ask(&mut guest, messages).op, Op::Reset as u16, "host sockets support streams only");
    let bytes = kept(|| {
        for port in 0..200 {
            let request = VsockHdr { buf_alloc: u32::MAX, ..guest.header(Op::Request, port, PORT) };
            let mut left = ask(&mut guest, request).buf_alloc as usize;
            while left > 0 {
                let len = left.min(60_000);
                guest.send(guest.data(port, PORT, len), &vec![1; len]);
                stack.work();
                left -= len;
            }
        }
        for port in 0..200 {
            let key = Key { port: PORT, peer: Addr { cid: GUEST, port } };
            // The socket always has a little more to send.
            while let Ok(Some(_)) =
                stack.send_from(key, MAX_PACKET, &mut |_| Ok(1), &mut |bytes| Ok(bytes.len().min(100)))
            {}
        }
    });
    let report = stack.report();
    assert!(bytes < MEMORY + SLACK && report.memory <= MEMORY, "{bytes} bytes, {report:?}");
    assert_eq!((report.connections, report.wrong), (200, 0));
    assert!(stack.connections().iter().all(|one| one.queued > 0 && one.unread > 0));
}

/// Sender's state of a connection at an honest guest.
#[derive(Default)]
struct Sending {
    sent: u32,
    edge: u32,
}

/// Receiver's state of a connection at an honest guest.
#[derive(Default)]
struct Receiving {
    received: u32,
    advertised: u32,
}

const BUFFER: u32 = 256 << 10;

/// Runs many connections between two honest guests that advertise more credit than our memory limit allows, and checks that all
/// data arrives. Returns the number of credit updates.
fn honest(memory: usize, connections: u32, each: u32) -> usize {
    let settings = Settings { memory, ..Settings::default() };
    let hub = Hub::new(16384);
    let mut a = member(&hub, GUEST, SPLIT, 32, settings);
    let mut b = member(&hub, 4, PACKED, 32, settings);
    let mut sending: HashMap<u32, Sending> = HashMap::new();
    let mut receiving: HashMap<u32, Receiving> = HashMap::new();
    for port in 0..connections {
        a.send(VsockHdr { buf_alloc: BUFFER, ..across((&a, port), Op::Request, (4, 80)) }, &[]);
        sending.insert(port, Sending::default());
    }
    let (mut updates, mut idle) = (0, 0);
    while receiving.len() < connections as usize || receiving.values().any(|one| one.received < each) {
        let mut any = false;
        a.host.work();
        for Packet { header, .. } in a.take() {
            any = true;
            assert_ne!(header.op, Op::Reset as u16, "{header:?}");
            let one = sending.get_mut(&header.dst_port).unwrap();
            let edge = header.fwd_cnt.wrapping_add(header.buf_alloc);
            assert!(edge >= one.edge, "credit must not be reduced");
            one.edge = edge;
            updates += usize::from(header.op == Op::CreditUpdate as u16);
        }
        for port in 0..connections {
            let one = sending.get_mut(&port).unwrap();
            let len = (one.edge - one.sent).min(each - one.sent).min(16 << 10);
            if len > 0 {
                one.sent += len;
                any = true;
                let data = VsockHdr { buf_alloc: BUFFER, len, ..across((&a, port), Op::Data, (4, 80)) };
                a.send(data, &vec![port as u8; len as usize]);
            }
        }
        a.host.work();
        b.host.work();
        for Packet { header, payload } in b.take() {
            any = true;
            let port = header.src_port;
            if header.op == Op::Request as u16 {
                receiving.insert(port, Receiving { received: 0, advertised: BUFFER });
                b.send(VsockHdr { buf_alloc: BUFFER, ..across((&b, 80), Op::Response, (GUEST, port)) }, &[]);
            }
            if header.op == Op::Data as u16 {
                let one = receiving.get_mut(&port).unwrap();
                assert!(payload.iter().all(|&byte| byte == port as u8));
                one.received += header.len;
                // Linux sends an update when the sender has less than 64 KiB of credit left.
                if one.advertised - one.received < 64 << 10 {
                    one.advertised = one.received + BUFFER;
                    let update = across((&b, 80), Op::CreditUpdate, (GUEST, port));
                    b.send(VsockHdr { buf_alloc: BUFFER, fwd_cnt: one.received, ..update }, &[]);
                }
            }
        }
        idle = if any { 0 } else { idle + 1 };
        assert!(idle < 10, "stalled: no credit, and data is missing");
        let report = a.host.report();
        assert!(report.crossing <= memory, "{report:?}");
    }
    assert_eq!((a.host.report().exhausted, a.host.report().wrong, b.host.report().wrong), (0, 0, 0));
    updates
}

#[test]
fn honest_guests_with_many_connections_are_not_reset_and_do_not_stall() {
    honest(1 << 20, 40, 300_000);
    honest(4 << 20, 400, 30_000);
}

#[test]
fn honest_guests_with_few_connections_get_the_full_credit_at_once() {
    // No more updates than the receiver's own: one per 192 KiB.
    let updates = honest(64 << 20, 20, 1_000_000);
    assert!(updates <= 20 * 6, "{updates} updates");
}

#[test]
fn a_guest_that_takes_nothing_does_not_block_traffic_between_others() {
    let hub = Hub::new(16384);
    let mut honest = member(&hub, GUEST, SPLIT, 32, small());
    let _deaf = member(&hub, 4, SPLIT, 0, small());
    let mut third = member(&hub, 5, SPLIT, 8, small());
    for port in 0..1000 {
        honest.send(across((&honest, port), Op::Request, (4, 80)), &[]);
        honest.send(VsockHdr { len: 30_000, ..across((&honest, port), Op::Data, (4, 80)) }, &[1; 30_000]);
    }
    while honest.host.work() {}
    honest.receive();
    let kept = honest.host.report().crossing;
    assert!(kept <= MEMORY / 2 + 64 * 1024, "half of the memory must be left for others, not {}", MEMORY - kept);
    honest.send(across((&honest, 5000), Op::Request, (5, 80)), &[]);
    honest.host.work();
    assert_eq!(third.receive().len(), 1);
    third.send(across((&third, 80), Op::Response, (GUEST, 5000)), &[]);
    third.host.work();
    let answer = honest.receive().pop().unwrap().header;
    assert_eq!(answer.op, Op::Response as u16);
    // More than it has buffers for.
    let len = 60_000;
    honest.send(VsockHdr { len, ..across((&honest, 5000), Op::Data, (5, 80)) }, &vec![5; len as usize]);
    honest.host.work();
    assert_eq!(third.receive().iter().map(|packet| packet.payload.len()).sum::<usize>(), len as usize);
}

// --- requests ---------------------------------------------------------------------------------------------------------

/// Admits a fixed number of requests.
struct LimitedHost(AtomicUsize);

impl Host<NoRelay> for LimitedHost {
    fn notify(&self, _: Queue) {}
    fn wake(&self) {}
    fn broken(&self, _: Queue, _: Broken) {}
    fn open(&self, _: Key, _: SocketType) -> OpenResult<NoRelay> {
        panic!("open must not be called")
    }
    fn room(&self, _: Key) {}
    fn admit(&self) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }
}

#[test]
fn requests_that_the_host_does_not_admit_are_refused_first() {
    let hub = Hub::new(100);
    let mut guest = member(&hub, GUEST, SPLIT, 32, Settings::default());
    // The same rings, with a host that counts requests.
    let stack = Stack::new(HOST_CID, Some(GUEST), Settings::default(), Box::new(LimitedHost(AtomicUsize::new(3))));
    stack.set_link(guest.host.set_link(None));
    stack.set_inlet(guest.host.set_inlet(None));
    stack.set_socket_types(&[SocketType::Stream]);
    guest.host = Arc::new(stack);
    hub.join(&guest.host, vec!["x".into()]);
    let _listener = listener(&guest);
    let mut ask = |header| guest.exchange(header, &[]).pop().map(|packet| packet.header.op);
    let header = |port, to| VsockHdr {
        src_cid: GUEST,
        dst_cid: to,
        src_port: port,
        dst_port: PORT,
        kind: 1,
        op: Op::Request as u16,
        ..VsockHdr::default()
    };
    let answers: Vec<_> = (0..3).map(|port| ask(header(port, if port == 1 { GUEST } else { HOST_CID }))).collect();
    assert_eq!(answers, [Some(Op::Response as u16), Some(Op::Request as u16), Some(Op::Response as u16)]);
    let reset = Some(Op::Reset as u16);
    assert_eq!((ask(header(3, HOST_CID)), ask(header(4, GUEST))), (reset, reset));
    // To a port without a listener: `Host::open` is not even called.
    assert_eq!(ask(VsockHdr { dst_port: 7, ..header(5, HOST_CID) }), reset);
    assert_eq!((guest.host.report().limited, guest.host.report().connections), (3, 2));
}

// --- time -------------------------------------------------------------------------------------------------------------

/// A ring with room for a given number of packets.
#[derive(Clone, Default)]
struct Ring {
    room: Arc<AtomicUsize>,
    each: usize,
    puts: Arc<AtomicUsize>,
    sources: Arc<Mutex<Vec<u32>>>,
}

impl Link for Ring {
    fn room(&mut self, _: bool) -> Result<Option<NonZeroUsize>, Broken> {
        Ok(if self.room.load(Ordering::Relaxed) > 0 { NonZeroUsize::new(self.each) } else { None })
    }

    fn put(&mut self, header: &VsockHdr, payload: &mut Payload<'_>) {
        self.room.fetch_sub(1, Ordering::Relaxed);
        self.puts.fetch_add(1, Ordering::Relaxed);
        payload.skip(header.len as usize);
        self.sources.lock().unwrap().push(header.src_port);
    }

    fn fill(
        &mut self,
        _: VsockHdr,
        _: &mut dyn FnMut(&mut VsockHdr),
        _: usize,
        _: &mut dyn FnMut(&[Span<'_>]) -> io::Result<usize>,
    ) -> Result<Option<(u64, io::Result<usize>)>, Broken> {
        Ok(None)
    }

    fn publish(&mut self) -> bool {
        false
    }

    fn await_room(&mut self) -> bool {
        self.room.load(Ordering::Relaxed) > 0
    }
}

#[derive(Clone)]
struct Flow(usize, u64, Arc<AtomicUsize>);

impl Owner for Flow {
    fn key(&self) -> usize {
        self.0
    }
    fn stamp(&self, _: &mut VsockHdr) {}
    fn queued(&self) -> &AtomicUsize {
        &self.2
    }
    fn group(&self) -> u64 {
        self.1
    }
}

fn flow(key: usize, group: u64) -> Flow {
    Flow(key, group, Arc::default())
}

fn data(port: u32) -> VsockHdr {
    VsockHdr { src_port: port, kind: 1, op: Op::Data as u16, ..VsockHdr::default() }
}

/// Returns a sender over a full ring, with `count` flows in its outbox.
fn crowded(count: usize) -> (Sender<Ring, Flow>, Ring, Vec<Flow>) {
    let ring = Ring { each: MAX_PACKET, ..Ring::default() };
    let sender = Sender::new(true);
    sender.replace(Some(ring.clone()));
    let flows: Vec<_> = (0..count).map(|key| flow(key, 0)).collect();
    for flow in &flows {
        let update = VsockHdr { op: Op::CreditUpdate as u16, ..data(flow.0 as u32) };
        assert!(sender.send(flow, data(flow.0 as u32), &mut Payload::bytes(&[1; 10]), 100).1.wake);
        assert!(sender.send_control(Some(flow), update).wake);
    }
    (sender, ring, flows)
}

#[test]
fn a_hundred_thousand_flows_are_sent_and_removed_quickly() {
    const COUNT: usize = 100_000;
    let (sender, ring, _flows) = crowded(COUNT);
    let start = Instant::now();
    ring.room.store(2 * COUNT, Ordering::Relaxed);
    let mut calls = 0;
    while sender.is_waiting() {
        let before = ring.puts.load(Ordering::Relaxed);
        let effect = sender.flush(|_| {});
        let moved = ring.puts.load(Ordering::Relaxed) - before;
        assert!(moved <= 640, "{moved} packets in one flush");
        assert_eq!(effect.more, sender.is_waiting());
        calls += 1;
    }
    assert!(calls > 100);
    assert_eq!(ring.puts.load(Ordering::Relaxed), 2 * COUNT);
    // Remove the flows one by one, in reverse order.
    let (sender, _ring, flows) = crowded(COUNT);
    for flow in flows.iter().rev() {
        let _ = sender.forget(flow);
    }
    assert!(!sender.is_waiting());
    // An emulator takes longer (tests/aarch64.sh).
    let limit = if std::env::var_os("RINGROAD_RUNNER").is_some() { 90 } else { 3 };
    assert!(start.elapsed() < Duration::from_secs(limit), "{:?}", start.elapsed());
}

#[test]
fn a_sender_fills_a_limited_number_of_tiny_buffers_per_call() {
    let ring = Ring { each: 1, room: Arc::new(AtomicUsize::new(usize::MAX)), ..Ring::default() };
    let sender = Sender::new(true);
    sender.replace(Some(ring.clone()));
    let one = flow(1, 0);
    let (sent, effect) = sender.send(&one, data(1), &mut Payload::bytes(&[1; MAX_PACKET]), MAX_PACKET);
    assert_eq!((sent, effect.wake), (MAX_PACKET, true));
    assert!(ring.puts.load(Ordering::Relaxed) <= 128);
    let before = ring.puts.load(Ordering::Relaxed);
    assert!(sender.flush(|_| {}).more);
    assert!(ring.puts.load(Ordering::Relaxed) - before <= 640);
    while sender.flush(|_| {}).more {}
    assert_eq!(ring.puts.load(Ordering::Relaxed), MAX_PACKET);
}

#[test]
fn a_guest_with_a_thousand_flows_gets_the_same_share_as_one_with_one_flow() {
    let ring = Ring { each: MAX_PACKET, ..Ring::default() };
    let sender = Sender::new(true);
    sender.replace(Some(ring.clone()));
    let crowd: Vec<_> = (0..1000).map(|key| flow(10 + key, 7)).collect();
    let victim = flow(1, 2);
    for flow in &crowd {
        let _ = sender.send(flow, data(7), &mut Payload::bytes(&[1; 60_000]), MAX_PACKET);
    }
    for _ in 0..10 {
        let _ = sender.send(&victim, data(2), &mut Payload::bytes(&[1; 60_000]), usize::MAX);
    }
    ring.room.store(40, Ordering::Relaxed);
    let _ = sender.flush(|_| {});
    while sender.flush(|_| {}).more {}
    let sources = ring.sources.lock().unwrap();
    let own = sources.iter().filter(|&&source| source == 2).count();
    assert!(own >= 10, "{own} packets of {}", sources.len());
}

#[test]
fn a_guest_with_few_resets_may_add_more_when_another_has_used_up_the_limit() {
    const RESETS: u64 = 1 << 16;
    let ring = Ring { each: MAX_PACKET, ..Ring::default() };
    let sender = Sender::new(true);
    sender.replace(Some(ring.clone()));
    let reset =
        |group| sender.send_control(Some(&flow(1, group)), VsockHdr { op: Op::Reset as u16, ..data(group as u32) });
    assert!((0..RESETS).all(|_| reset(7).wake));
    assert!(!reset(7).wake);
    // Its share is half of the limit, and a third when there is one more.
    let queued = |group| (0..RESETS).filter(|_| reset(group).wake).count() as u64;
    assert_eq!(queued(2), RESETS / 2);
    assert_eq!(queued(3), RESETS / 3);
    assert!(![7, 2, 3].map(|group| reset(group).wake).contains(&true));
    ring.room.store(usize::MAX / 2, Ordering::Relaxed);
    while sender.flush(|_| {}).more {}
    assert!(!sender.is_waiting());
}

#[test]
fn a_burst_is_limited_in_bytes() {
    for acked in [SPLIT, PACKED] {
        let settings = Settings { buffer: 8 << 20, ..Settings::default() };
        let mut guest = Guest::bare(Shape { acked, settings, ..Shape::default() });
        let listener = listener(&guest);
        let request = guest.header(Op::Request, 5, PORT);
        guest.exchange(request, &[]);
        let stream: Stream<Side> = listener.accept_within(Some(Duration::ZERO)).unwrap();
        for _ in 0..16 {
            guest.send(guest.data(5, PORT, 400_000), &[7; 400_000]);
        }
        let mut calls = 0;
        let mut before = 0;
        while guest.host.work() {
            let unread = guest.host.connections()[0].unread;
            assert!(unread - before <= (512 << 10) + 400_000, "{} bytes at once", unread - before);
            before = unread;
            calls += 1;
        }
        assert_eq!(before, 16 * 400_000);
        assert!(calls >= 8);
        assert_eq!(stream.peer_addr(), Addr { cid: GUEST, port: 5 });
    }
}

/// While the many connections of a guest that disconnects are torn down, the others are not blocked.
#[test]
fn a_guest_that_disconnects_with_many_connections_does_not_block_others() {
    let hub = Hub::new(16384);
    let leaver = member(&hub, GUEST, SPLIT, 32, Settings::default());
    let mut leaver = leaver;
    let deaf = member(&hub, 4, SPLIT, 0, Settings::default());
    for port in 0..16_000 {
        leaver.send(across((&leaver, port), Op::Request, (4, 80)), &[]);
    }
    while leaver.host.work() {}
    let (done, longest) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let thread = {
        let (hub, done, longest) = (hub.clone(), done.clone(), longest.clone());
        std::thread::spawn(move || {
            let mut one = member(&hub, 5, SPLIT, 32, Settings::default());
            let mut two = member(&hub, 6, SPLIT, 32, Settings::default());
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) || rounds < 10 {
                let start = Instant::now();
                one.send(across((&one, 5), Op::Request, (6, 80)), &[]);
                one.host.work();
                assert_eq!(two.receive().len(), 1);
                one.send(across((&one, 5), Op::Reset, (6, 80)), &[]);
                one.host.work();
                assert_eq!(two.receive().len(), 1);
                longest.fetch_max(start.elapsed().as_millis() as u32, Ordering::Relaxed);
                rounds += 1;
            }
        })
    };
    let start = Instant::now();
    leaver.host.reset();
    let took = start.elapsed();
    done.store(true, Ordering::Relaxed);
    thread.join().unwrap();
    assert_eq!(leaver.host.report().crossing, 0);
    // No reset was queued for connections whose request was never delivered.
    assert!(!deaf.host.is_waiting());
    assert!(took < Duration::from_secs(2), "{took:?}");
}
