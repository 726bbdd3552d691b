//! DEVICE_SET_IRQS: eventfds, masks, and what is refused.

use crate::rig::*;
use std::{
    os::fd::AsRawFd,
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

const NONE: u32 = 1;
const BOOL: u32 = 2;
const EVENTFD: u32 = 4;
const MASK: u32 = 8;
const UNMASK: u32 = 16;
const TRIGGER: u32 = 32;

const INTX: u32 = 0;
const MSI_INDEX: u32 = 1;

/// Returns how often an eventfd was signalled.
fn count(eventfd: &EventFd) -> u64 {
    eventfd.read().unwrap_or(0)
}

#[test]
fn the_pin() {
    let rig = Rig::new("pin");
    let mut peer = rig.client(0);
    let event = eventfd();
    peer.set(LINE, 1);
    assert_eq!(peer.ask(SET_IRQS, &set_irqs(EVENTFD | TRIGGER, INTX, 0, 1), &[event.as_raw_fd()]), Ok(vec![]));
    assert_eq!(count(&event), 1, "asserted before");
    let unmask = set_irqs(NONE | UNMASK, INTX, 0, 1);
    for expected in [1, 1] {
        assert_eq!(peer.ask(SET_IRQS, &unmask, &[]), Ok(vec![]));
        assert_eq!(count(&event), expected, "still asserted");
    }
    peer.set(LINE, 0);
    peer.set(LINE, 1);
    assert_eq!(count(&event), 0, "masked");
    peer.set(LINE, 0);
    peer.ask(SET_IRQS, &unmask, &[]).unwrap();
    assert_eq!(count(&event), 0);
    peer.set(LINE, 1);
    assert_eq!(count(&event), 1);
    peer.set(LINE, 0);
    peer.ask(SET_IRQS, &unmask, &[]).unwrap();
    peer.ask(SET_IRQS, &[set_irqs(BOOL | MASK, INTX, 0, 1), vec![1]].concat(), &[]).unwrap();
    peer.set(LINE, 1);
    assert_eq!(count(&event), 0, "masked by the client");
    peer.ask(SET_IRQS, &[set_irqs(BOOL | UNMASK, INTX, 0, 1), vec![0]].concat(), &[]).unwrap();
    assert_eq!(count(&event), 0, "not chosen");
    // Off, in both ways.
    peer.ask(SET_IRQS, &set_irqs(NONE | TRIGGER, INTX, 0, 0), &[]).unwrap();
    peer.ask(SET_IRQS, &unmask, &[]).unwrap();
    assert_eq!(count(&event), 0);
    peer.ask(SET_IRQS, &set_irqs(EVENTFD | TRIGGER, INTX, 0, 1), &[event.as_raw_fd()]).unwrap();
    assert_eq!(count(&event), 1);
    peer.ask(SET_IRQS, &set_irqs(EVENTFD | TRIGGER, INTX, 0, 1), &[]).unwrap();
    peer.ask(SET_IRQS, &unmask, &[]).unwrap();
    assert_eq!(count(&event), 0);
    assert_eq!(rig.faults(), 0);
}

#[test]
fn messages() {
    let rig = Rig::new("msi");
    let mut peer = rig.client(0);
    let events: Vec<_> = (0..4).map(|_| eventfd()).collect();
    let fds: Vec<_> = events.iter().map(|event| event.as_raw_fd()).collect();
    let counts = |peer: &mut Peer| {
        (0..4).for_each(|vector| peer.set(MSI, vector));
        events.iter().map(count).collect::<Vec<_>>()
    };
    peer.ask(SET_IRQS, &set_irqs(EVENTFD | TRIGGER, MSI_INDEX, 1, 3), &fds[1..]).unwrap();
    assert_eq!(counts(&mut peer), [0, 1, 1, 1]);
    peer.ask(SET_IRQS, &set_irqs(EVENTFD | TRIGGER, MSI_INDEX, 0, 1), &fds[..1]).unwrap();
    peer.ask(SET_IRQS, &set_irqs(EVENTFD | TRIGGER, MSI_INDEX, 2, 1), &[]).unwrap();
    assert_eq!(counts(&mut peer), [1, 1, 0, 1]);
    // The client itself triggers some.
    peer.ask(SET_IRQS, &set_irqs(NONE | TRIGGER, MSI_INDEX, 0, 4), &[]).unwrap();
    peer.ask(SET_IRQS, &[set_irqs(BOOL | TRIGGER, MSI_INDEX, 0, 4), vec![0, 1, 1, 0]].concat(), &[]).unwrap();
    assert_eq!(events.iter().map(count).collect::<Vec<_>>(), [1, 2, 0, 1]);
    peer.ask(SET_IRQS, &set_irqs(NONE | TRIGGER, MSI_INDEX, 0, 0), &[]).unwrap();
    assert_eq!(counts(&mut peer), [0; 4]);
    // A client that is gone is not signalled, and its descriptors are closed.
    peer.ask(SET_IRQS, &set_irqs(EVENTFD | TRIGGER, MSI_INDEX, 0, 4), &fds).unwrap();
    drop(peer);
    rig.disconnected(1);
    assert_eq!(counts(&mut rig.client(0)), [0; 4]);
    assert_eq!(rig.faults(), 0);
}

#[test]
fn what_is_refused() {
    let rig = Rig::new("badirqs");
    let mut peer = rig.client(0);
    let event = eventfd();
    let fd = event.as_raw_fd();
    let cases: [(u32, u32, u32, u32, &[i32]); 21] = [
        // Flags, index, start, count.
        (0, INTX, 0, 1, &[]),
        (NONE, INTX, 0, 1, &[]),
        (TRIGGER, INTX, 0, 1, &[]),
        (NONE | EVENTFD | TRIGGER, INTX, 0, 1, &[fd]),
        (NONE | TRIGGER | MASK, INTX, 0, 1, &[]),
        (u32::MAX, INTX, 0, 1, &[]),
        (EVENTFD | TRIGGER | 64, INTX, 0, 1, &[fd]),
        (EVENTFD | TRIGGER, 3, 0, 1, &[fd]),
        (EVENTFD | TRIGGER, u32::MAX, 0, 1, &[fd]),
        (EVENTFD | TRIGGER, 2, 0, 1, &[fd]),
        (EVENTFD | TRIGGER, INTX, 1, 1, &[fd]),
        (EVENTFD | TRIGGER, INTX, 0, 0, &[]),
        (EVENTFD | TRIGGER, MSI_INDEX, 0, 2, &[fd]),
        (EVENTFD | TRIGGER, MSI_INDEX, 0, 1, &[fd, fd]),
        (EVENTFD | TRIGGER, MSI_INDEX, 1, 4, &[]),
        (EVENTFD | TRIGGER, MSI_INDEX, u32::MAX, 2, &[fd, fd]),
        (EVENTFD | TRIGGER, MSI_INDEX, 1, u32::MAX, &[fd]),
        (NONE | TRIGGER, MSI_INDEX, 1, 0, &[]),
        (NONE | TRIGGER, MSI_INDEX, 0, 1, &[fd]),
        (BOOL | TRIGGER, MSI_INDEX, 0, 1, &[]),
        (NONE | MASK, MSI_INDEX, 0, 1, &[]),
    ];
    for (flags, index, start, count, fds) in cases {
        let result = peer.ask(SET_IRQS, &set_irqs(flags, index, start, count), fds);
        assert_eq!(result, Err(EINVAL), "{flags:#x} {index} {start} {count}");
    }
    for action in [MASK, UNMASK] {
        assert_eq!(peer.ask(SET_IRQS, &set_irqs(EVENTFD | action, INTX, 0, 1), &[fd]), Err(ENOTSUP));
    }
    for len in 0..20 {
        assert_eq!(peer.ask(SET_IRQS, &vec![0; len], &[]), Err(EINVAL));
    }
    // A good one with a bad one changes nothing.
    let file = memory(4096);
    let pair = set_irqs(EVENTFD | TRIGGER, MSI_INDEX, 0, 2);
    assert_eq!(peer.ask(SET_IRQS, &pair, &[fd, file.as_raw_fd()]), Err(EINVAL));
    logged(&rig.victim(), &["ERROR", "the interrupt descriptor is /memfd:ringroad", "expected an eventfd"]);
    peer.set(MSI, 0);
    assert_eq!(count(&event), 0);
    assert!(within(PATIENCE, || held(identity(&file)) == (1, 1) || held(identity(&file)) == (0, 1)), "it is closed");
    peer.works();
}

#[test]
fn an_eventfd_that_blocks() {
    let rig = Rig::new("blocks");
    let mut other = rig.client(1);
    let mut peer = rig.client(0);
    let full = EventFd::new(EFD_CLOEXEC).unwrap();
    full.write(u64::MAX - 1).unwrap();
    peer.ask(SET_IRQS, &set_irqs(EVENTFD | TRIGGER, MSI_INDEX, 0, 1), &[full.as_raw_fd()]).unwrap();
    // Full, but it does not block.
    peer.set(MSI, 0);
    peer.works();
    set_blocking(&full);
    let start = Instant::now();
    peer.send(&message(1, REGION_WRITE, NO_REPLY, &write(MSI, &[0; 8])), &[]);
    assert!(peer.ends());
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    logged(&rig.victim(), &["ERROR", "the descriptor of an interrupt blocked", "no new connection for 1s"]);
    other.works();
    // It may come back later.
    rig.client(0).works();
}

#[test]
fn the_daemon_stops_though_an_eventfd_blocks() {
    let rig = Rig::new("blocksall");
    let full = EventFd::new(EFD_CLOEXEC).unwrap();
    full.write(u64::MAX - 1).unwrap();
    let mut peers = [rig.client(0), rig.client(1)];
    for peer in &mut peers {
        peer.ask(SET_IRQS, &set_irqs(EVENTFD | TRIGGER, MSI_INDEX, 0, 1), &[full.as_raw_fd()]).unwrap();
        set_blocking(&full);
        peer.send(&message(1, REGION_WRITE, NO_REPLY, &write(MSI, &[0; 8])).repeat(1000), &[]);
    }
    ends_soon(rig);
}
