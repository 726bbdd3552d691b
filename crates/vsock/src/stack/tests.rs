//! Tests of a stack that need its private state.

use super::{FIRST_PORT, Settings, Stack};
use crate::{
    device::DeviceSide,
    side::{Host, NoRelay, OpenResult, Queue},
    types::{Addr, Broken, Key, SocketType},
};
use std::{io, task::Waker, time::Instant};

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
