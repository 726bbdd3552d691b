//! A bug in the code of a ring, met while packets are moved: what is counted then is right again after a reset.
#![cfg(not(loom))]

use ringroad_mem::Span;
use ringroad_vsock::{Broken, Link, Owner, Payload, Sender};
use ringroad_wire::vsock_hdr::{Op, VsockHdr};
use std::{
    io,
    num::NonZeroUsize,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// A ring with room for everything, whose code panics if `broken`.
#[derive(Clone, Default)]
struct Ring {
    broken: Arc<AtomicBool>,
}

impl Link for Ring {
    fn room(&mut self, _: bool) -> Result<Option<NonZeroUsize>, Broken> {
        assert!(!self.broken.load(Ordering::Relaxed), "a panic provoked by this test");
        Ok(NonZeroUsize::new(4096))
    }

    fn put(&mut self, header: &VsockHdr, payload: &mut Payload<'_>) {
        payload.skip(header.len as usize);
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
        false
    }
}

#[derive(Clone, Default)]
struct Connection(Arc<AtomicUsize>);

impl Owner for Connection {
    fn key(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    fn stamp(&self, _: &mut VsockHdr) {}

    fn queued(&self) -> &AtomicUsize {
        &self.0
    }
}

#[test]
fn a_panic_leaves_no_packet_counted_as_waiting() {
    let (ring, owner) = (Ring::default(), Connection::default());
    let sender = Sender::<Ring, Connection>::new(true);
    let data = VsockHdr { op: Op::Data as u16, ..VsockHdr::default() };
    let send = || sender.send(&owner, data, &mut Payload::bytes(b"hello"), 1000).0;
    assert_eq!(send(), 5);
    let _ = sender.send_control(None, VsockHdr { op: Op::Reset as u16, ..VsockHdr::default() });
    sender.replace(Some(ring.clone()));
    ring.broken.store(true, Ordering::Relaxed);
    assert!(catch_unwind(AssertUnwindSafe(|| sender.flush(drop))).is_err());
    assert!(sender.is_waiting());
    // What the worker does after a panic.
    sender.replace(None);
    sender.clear();
    assert!(!sender.is_waiting(), "the packet that was in the worker's hands is gone, too");
    ring.broken.store(false, Ordering::Relaxed);
    sender.replace(Some(ring));
    assert_eq!((send(), sender.ways().direct), (5, 1), "written to the ring by the sender");
}
