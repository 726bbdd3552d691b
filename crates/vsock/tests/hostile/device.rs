//! A device that breaks the rules, against a driver's stack.

use crate::common::{
    GUEST, HOST, TestHost,
    raw::{PACKED, PORT, Packet, SPLIT, base, env, reset_of},
};
use ringroad_mem::{Region, Table};
use ringroad_ring::{Addresses, DriverFault};
use ringroad_vsock::{
    Broken, Driver, DriverConfig, DriverSide, Inlet, Link, Listener, Payload, Queue, RxQueue, Settings, SocketType,
    Stack, TxQueue, socket_types,
};
use ringroad_wire::vsock_hdr::{Op, SIZE, TYPE_STREAM, VsockHdr};
use std::{
    io::{ErrorKind, Read, Write},
    sync::Arc,
    time::Duration,
};

/// A device that obeys no rules, with the memory of its driver, whose stack is well-behaved.
struct HostileDevice {
    guest: Arc<crate::common::GuestStack>,
    env: TestHost,
    region: Arc<Region>,
    /// Addresses of the driver's rings.
    at: [Addresses; 2],
    rx: RxQueue,
    tx: TxQueue,
}

impl HostileDevice {
    fn new(acked: u64) -> HostileDevice {
        let config = DriverConfig { acked, queue_size: 64, receive: 4096 };
        let Driver { region, file, rx, tx, .. } = Driver::new(config).unwrap();
        let mapped = Region::map(&file, 0, region.len() as u64, region.guest(), region.user()).unwrap();
        let memory = Arc::new(Table::default().with(mapped).unwrap());
        let at = [rx.addresses(), tx.addresses()];
        let env = env();
        let guest = Arc::new(Stack::<DriverSide>::new(GUEST, None, Settings::default(), Box::new(env.clone())));
        guest.set_link(Some(tx));
        guest.set_inlet(Some(rx));
        guest.set_socket_types(socket_types(acked));
        let rx = RxQueue::start(memory.clone(), acked, 64, at[0], base(acked)).unwrap();
        let tx = TxQueue::start(memory, acked, 64, at[1], base(acked)).unwrap();
        HostileDevice { guest, env, region, at, rx, tx }
    }

    fn exchange(&mut self, header: VsockHdr, payload: &[u8]) -> Vec<Packet> {
        assert!(self.rx.room(true).unwrap().unwrap().get() >= payload.len());
        self.rx.put(&header, &mut Payload::bytes(payload));
        self.rx.publish();
        self.guest.work();
        let mut packets = Vec::new();
        let mut each = |mut header: VsockHdr, mut payload: Payload<'_>| {
            if header.op == Op::Reset as u16 {
                (header.buf_alloc, header.fwd_cnt) = (0, 0);
            }
            let len = payload.len();
            packets.push(Packet { header, payload: payload.take(len) });
        };
        while self.tx.take(&mut each).unwrap().packets > 0 {}
        packets
    }

    fn header(&self, op: Op) -> VsockHdr {
        VsockHdr {
            src_cid: HOST,
            dst_cid: GUEST,
            src_port: 5,
            dst_port: PORT,
            kind: TYPE_STREAM,
            op: op as u16,
            buf_alloc: 1000,
            ..VsockHdr::default()
        }
    }

    /// Writes to the rings.
    fn write(&self, user: u64, bytes: &[u8]) {
        self.region.span((user - self.region.user()) as usize, bytes.len()).unwrap().write(bytes);
    }

    /// Marks a buffer as used (split ring).
    fn used(&self, queue: usize, index: u16, id: u32, len: u32) {
        let at = self.at[queue].device;
        self.write(at + 4 + 8 * u64::from(index), &[id.to_le_bytes(), len.to_le_bytes()].concat());
        self.write(at + 2, &(index + 1).to_le_bytes());
    }
}

#[test]
fn a_driver_answers_invalid_packets_the_same_way() {
    for acked in [SPLIT, PACKED] {
        let mut device = HostileDevice::new(acked);
        let listener = Listener::bind(&device.guest, PORT, SocketType::Stream).unwrap();
        let (request, plain) = (device.header(Op::Request), device.header(Op::CreditRequest));
        let mut bad = Vec::new();
        bad.extend([0, 8, 65535].map(|op| VsockHdr { op, ..plain }));
        bad.extend([0, 2, 3].map(|kind| VsockHdr { kind, ..plain }));
        bad.extend([Op::Request, Op::Response].map(|op| VsockHdr { op: op as u16, ..plain }));
        for header in bad {
            assert_eq!(device.exchange(request, &[])[0].header.op, Op::Response as u16);
            let stream = listener.accept_within(Some(Duration::ZERO)).unwrap();
            let reset = reset_of(plain);
            assert_eq!(device.exchange(header, &[]), [reset], "{header:?}");
            assert_eq!((&stream).read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        }
        for dst_cid in [0, 2, 4, u64::MAX] {
            let header = VsockHdr { dst_cid, ..plain };
            assert_eq!(device.exchange(header, &[]), [reset_of(header)]);
        }
        assert_eq!(device.guest.report().connections, 0);
        assert_eq!(*device.env.broken.lock(), []);
    }
}

#[test]
fn a_driver_skips_packets_without_a_header() {
    let device = HostileDevice::new(SPLIT);
    for index in 0..44 {
        device.used(0, index, u32::from(index), index.into());
    }
    device.guest.work();
    assert_eq!((device.guest.report().received, device.guest.report().wrong), (44, 0));
    assert_eq!(device.guest.report().ways.direct, 0, "no answers may be sent");
    assert_eq!(*device.env.broken.lock(), []);
}

#[test]
fn a_driver_rejects_a_payload_shorter_than_its_header_says() {
    let mut device = HostileDevice::new(SPLIT);
    let listener = Listener::bind(&device.guest, PORT, SocketType::Stream).unwrap();
    device.exchange(device.header(Op::Request), &[]);
    let stream = listener.accept_within(Some(Duration::ZERO)).unwrap();
    // The header is written by hand into the second buffer, and claims 10 bytes more than there are.
    let data = VsockHdr { len: 15, ..device.header(Op::Data) };
    let (mut address, mut len) = ([0; 8], 0);
    let descriptor = device.at[0].descriptor - device.region.user() + 16;
    device.region.span(descriptor as usize, 8).unwrap().read(&mut address);
    let at = u64::from_le_bytes(address) - device.region.guest();
    for bytes in [&data.to_bytes()[..], b"there"] {
        device.region.span(at as usize + len, bytes.len()).unwrap().write(bytes);
        len += bytes.len();
    }
    device.used(0, 1, 1, len as u32);
    device.guest.work();
    assert_eq!((&stream).read(&mut [0; 20]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(device.guest.report().wrong, 1);
    assert_eq!(*device.env.broken.lock(), []);
}

#[test]
fn a_device_that_returns_invalid_used_buffers_is_stopped() {
    let room = 4096 + SIZE as u32;
    let (jump, outstanding) = (DriverFault::UsedJump { index: 101, next: 0, ahead: 101, outstanding: 64 }, 64);
    let lies = [
        (0, 64, SIZE as u32, DriverFault::Id { id: 64 }),
        (0, u32::MAX, SIZE as u32, DriverFault::Id { id: u32::MAX }),
        (0, 3, room + 1, DriverFault::Length { id: 3, len: room + 1, room }),
        (0, 3, u32::MAX, DriverFault::Length { id: 3, len: u32::MAX, room }),
        (100, 0, SIZE as u32, jump),
    ];
    for (index, id, len, fault) in lies {
        let device = HostileDevice::new(SPLIT);
        device.used(0, index, id, len);
        device.guest.work();
        assert_eq!(*device.env.broken.lock(), [(Queue::In, Broken::Device(fault))]);
        assert_eq!(device.guest.report().faults, 1);
    }
    // The transmit queue is polled when it has run out of room. Its first buffer has been used already.
    let lies = [(1, 64, DriverFault::Id { id: 64 }), (1, 0, DriverFault::Id { id: 0 }), (100, 0, jump)];
    for (index, id, fault) in lies {
        let mut device = HostileDevice::new(SPLIT);
        let listener = Listener::bind(&device.guest, PORT, SocketType::Stream).unwrap();
        device.exchange(VsockHdr { buf_alloc: u32::MAX, ..device.header(Op::Request) }, &[]);
        let stream = listener.accept_within(Some(Duration::ZERO)).unwrap();
        stream.set_nonblocking(true);
        device.used(1, index, id, 0);
        for _ in 0..200 {
            let _ = (&stream).write(&[0; 100]);
            device.guest.work();
        }
        let broken = device.env.broken.lock().clone();
        let [(Queue::Out, Broken::Device(mut got))] = broken[..] else { panic!("{broken:?}") };
        if let DriverFault::UsedJump { outstanding: under_way, .. } = &mut got {
            // Some are reserved for control packets.
            assert!((60..=64).contains(under_way));
            *under_way = outstanding;
        }
        assert_eq!(got, fault);
        assert_eq!(device.guest.report().faults, 1);
        // The receive queue still works.
        let data = VsockHdr { len: 5, ..device.header(Op::Data) };
        device.rx.put(&data, &mut Payload::bytes(b"hello"));
        device.rx.publish();
        device.guest.work();
        assert_eq!((&stream).read(&mut [0; 9]).unwrap(), 5);
    }
}
