//! Tests of a stack that need its private state.

use super::{FIRST_PORT, Settings, Stack};
use crate::{
    device::{DeviceSide, RxQueue},
    hub::Hub,
    payload::Payload,
    side::{Host, Inlet, NoRelay, OpenResult, Queue, Side, Taken},
    types::{Addr, Broken, Key, SocketType},
};
use ringroad_wire::vsock_hdr::VsockHdr;
use std::{
    any::Any,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
    thread,
    time::Instant,
};

struct NullHost;

impl Host<NoRelay> for NullHost {
    fn notify(&self, _: Queue) {}

    fn wake(&self) {}

    fn broken(&self, _: Queue, _: Broken) {}

    fn open(&self, _: Key, _: SocketType) -> OpenResult<NoRelay> {
        OpenResult::Refused
    }

    fn room(&self, _: Key) {}
}

#[test]
fn ephemeral_ports_wrap_around_and_skip_those_in_use() {
    let settings = Settings { connections: 8, ..Settings::default() };
    let stack = Stack::<DeviceSide<NoRelay>>::new(2, Some(3), settings, Box::new(NullHost));
    stack.set_socket_types(&[SocketType::Stream]);
    let ask = |peer| {
        stack
            .request_connection(Addr { cid: 3, port: peer }, SocketType::Stream, None, Instant::now())
            .map(|conn| conn.key.port)
    };
    let last = || stack.table.lock().next_port = u32::MAX - 2;
    let _listener = stack.add_listener(FIRST_PORT, SocketType::Stream, Waker::noop().clone()).unwrap();
    last();
    // `u32::MAX` is not a valid port, and the first one has a listener.
    let ports: Vec<_> = (0..4).map(|_| ask(80).unwrap()).collect();
    assert_eq!(ports, [u32::MAX - 2, u32::MAX - 1, FIRST_PORT + 1, FIRST_PORT + 2]);
    last();
    assert_eq!(ask(80).unwrap(), FIRST_PORT + 3, "the ports before it are in use");
    last();
    assert_eq!(ask(81).unwrap(), u32::MAX - 2, "free for another peer port");
    assert_eq!((ask(80).unwrap(), ask(80).unwrap()), (FIRST_PORT + 4, FIRST_PORT + 5));
    assert_eq!(ask(80).unwrap_err().kind(), io::ErrorKind::QuotaExceeded, "the connection limit is reached");
}

/// A ring of which only the notifications matter.
#[derive(Default)]
struct Ring {
    has_packets: bool,
    notifies: Arc<AtomicBool>,
}

impl Inlet for Ring {
    fn take(&mut self, _: impl FnMut(VsockHdr, Payload<'_>)) -> Result<Taken, Broken> {
        Ok(Taken::default())
    }

    fn wants_notification(&mut self) -> bool {
        false
    }

    fn enable_notification(&mut self) -> bool {
        self.notifies.store(true, Ordering::Relaxed);
        self.has_packets
    }

    fn disable_notification(&mut self) {
        self.notifies.store(false, Ordering::Relaxed);
    }
}

struct TestSide;

impl Side for TestSide {
    type Link = RxQueue;
    type Inlet = Ring;
    type Relay = NoRelay;
}

/// A leader that leaves, and a worker that goes idle, leave the notifications of the next leader alone: a packet may just have arrived
/// of which nobody but that leader would be notified.
#[test]
fn the_next_leader_is_notified() {
    for leaves in [true, false] {
        let stack = Arc::new(Stack::<TestSide>::new(2, Some(3), Settings::default(), Box::new(NullHost)));
        let notifies = Arc::new(AtomicBool::new(false));
        stack.set_inlet(Some(Ring { has_packets: false, notifies: notifies.clone() }));
        let mut incoming = stack.incoming.lock();
        assert!(!leaves || stack.take_lead());
        let other = thread::spawn({
            let stack = stack.clone();
            move || {
                if leaves {
                    stack.leave_lead();
                } else {
                    assert!(!stack.enable_notification());
                }
            }
        });
        // It waits for the lock, or, once in a while, has not got so far.
        thread::sleep(std::time::Duration::from_millis(50));
        while !stack.take_lead() {
            thread::yield_now();
        }
        // The next leader sleeps by the time a packet arrives.
        if let Some(inlet) = &mut incoming.inlet {
            assert!(!inlet.enable_notification());
            inlet.has_packets = true;
        }
        drop(incoming);
        other.join().unwrap();
        assert!(notifies.load(Ordering::Relaxed));
        assert!(stack.enable(true), "the next leader sees it");
    }
}

/// A host that panics when there is work for its guest, and notes what it is told of panics.
struct Spoilt(Arc<AtomicBool>);

impl Host<NoRelay> for Spoilt {
    fn notify(&self, _: Queue) {}

    fn wake(&self) {
        std::panic::resume_unwind(Box::new("a bug"));
    }

    fn broken(&self, _: Queue, _: Broken) {}

    fn panicked(&self, _: Box<dyn Any + Send>) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn open(&self, _: Key, _: SocketType) -> OpenResult<NoRelay> {
        OpenResult::Refused
    }

    fn room(&self, _: Key) {}
}

/// A panic in what is done for the receiver of a packet is the receiver's: its sender's turn goes on, and it is not blamed.
#[test]
fn a_panic_in_the_receivers_rings_is_not_the_senders() {
    let hub = Hub::new(8);
    let blamed = Arc::new(AtomicBool::new(false));
    let [one, other] = [0, 1].map(|index| {
        let host: Box<dyn Host<NoRelay>> = match index {
            0 => Box::new(Spoilt(blamed.clone())),
            _ => Box::new(NullHost),
        };
        let stack = Arc::new(Stack::<TestSide>::new(2, Some(3 + index), Settings::default(), host));
        stack.set_socket_types(&[SocketType::Stream]);
        hub.join(&stack, vec!["group".into()]);
        stack
    });
    let request = VsockHdr { src_cid: 4, dst_cid: 3, src_port: 7, dst_port: 7, kind: 1, op: 1, ..VsockHdr::default() };
    assert!(other.forward(&request, &mut Payload::empty()));
    assert!(blamed.load(Ordering::Relaxed));
    drop(one);
}
