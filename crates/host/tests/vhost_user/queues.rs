//! Queues: their descriptors, faults of their drivers, stopping and resuming.

use crate::{
    LAYOUTS,
    common::{request::*, *},
};
use ringroad_net::bits;
use std::{
    fs::File,
    io::{ErrorKind, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
};

#[test]
fn a_call_descriptor_that_is_full() {
    let rig = Rig::new("call");
    let mut others = rig.others();
    // An eventfd and, as from User-Mode Linux, a socket.
    let eventfd = eventfd();
    eventfd.write(u64::MAX - 1).unwrap();
    let (_reader, writer) = UnixStream::pair().unwrap();
    writer.set_nonblocking(true).unwrap();
    while (&writer).write(&[0; 4096]).is_ok() {}
    assert_eq!((&writer).write(&[0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    let mut guest = rig.guest(0, SPLIT);
    let full = [eventfd.as_raw_fd(), writer.as_raw_fd()];
    for (index, fd) in full.into_iter().enumerate() {
        guest.peer.ok(SET_VRING_CALL, &longs(&[index as u64]), &[fd]);
    }
    // Makes the device's writes block as well, as both have the same open file description.
    writer.set_nonblocking(false).unwrap();
    let before = rig.report(0);
    for _ in 0..20 {
        exchange(&mut guest, &mut others.0);
    }
    others.work();
    let after = rig.report(0);
    assert!(after.received.notifications > before.received.notifications, "no notification was attempted");
    assert!(after.sent.notifications > before.sent.notifications, "no notification was attempted");
    // A socket whose other end is closed.
    let (reader, writer) = UnixStream::pair().unwrap();
    guest.peer.ok(SET_VRING_CALL, &longs(&[1]), &[writer.as_raw_fd()]);
    drop(reader);
    exchange(&mut guest, &mut others.0);
}

#[test]
fn a_kick_descriptor_of_the_wrong_kind() {
    let rig = Rig::new("kick");
    let mut others = rig.others();
    let file = File::create(rig.folder.file("file")).unwrap();
    let mut guest = rig.guest(0, SPLIT);
    exchange(&mut guest, &mut others.0);
    assert_eq!(rig.faults(), 0);
    guest.peer.refused(SET_VRING_KICK, &longs(&[1]), &[file.as_raw_fd()]);
    assert!(guest.vrings[1].failed());
    rig.expect_faults(1);
    logged(&rig.victim(), &["ERROR", "queue 1: the kick descriptor is ", "/file, expected an eventfd"]);
    others.work();
    // Stopped where it was, and it can be started again.
    let base = guest.peer.get_base(1);
    guest.peer.ok(SET_VRING_BASE, &words(&[1, base]), &[]);
    guest.peer.ok(SET_VRING_KICK, &longs(&[1]), &[guest.vrings[1].kick.as_raw_fd()]);
    exchange(&mut guest, &mut others.0);
    // The queue that did not start must not keep the guest's memory mapped.
    guest.peer.refused(SET_VRING_KICK, &longs(&[1]), &[file.as_raw_fd()]);
    let memory = identity(&guest.driver.file);
    drop(guest);
    assert!(within(PATIENCE, || held(memory) == (0, 0)), "mappings, descriptors: {:?}", held(memory));
}

#[test]
fn a_queue_without_kicks_is_polled() {
    let rig = Rig::new("nokick");
    let mut others = rig.others();
    for acked in LAYOUTS {
        let mut guest = rig.guest(0, acked);
        guest.peer.ok(SET_VRING_KICK, &longs(&[1 | NO_FD]), &[]);
        for _ in 0..3 {
            let sequence = guest.add(others.0.mac).unwrap();
            assert!(others.0.receives(guest.mac, sequence));
            others.work();
        }
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of faults")]
fn faults_of_the_driver() {
    const WRITE: u16 = 2;
    const INSIDE: u64 = 0x1_0000_0000;
    /// Vring; address, length and flags of its one descriptor; what the log says.
    type Case<'a> = (u32, u64, u32, u16, &'a [&'a str]);
    let cases: [Case; 8] = [
        (1, 0x10, 64, 0, &["descriptor 0 at 0x10 + 64 lies outside guest memory (1 regions)"]),
        (1, u64::MAX - 8, 64, 0, &["descriptor 0 at 0xfffffffffffffff7 + 64 lies outside guest memory"]),
        (1, INSIDE, u32::MAX, 0, &["descriptor 0 at 0x100000000 + 4294967295 lies outside guest memory"]),
        (1, INSIDE, 11, 0, &["the descriptor chain with buffer 0 has 11 bytes, fewer than the header's 12"]),
        (1, INSIDE, 64, WRITE, &["the descriptor chain with buffer 0 is device-writable"]),
        (1, INSIDE, 0, 0, &["descriptor 0 has length 0"]),
        (0, INSIDE, 1600, 0, &["the descriptor chain with buffer 0 is device-readable"]),
        (0, 0x20, 1600, WRITE, &["descriptor 0 at 0x20 + 1600 lies outside guest memory (1 regions)"]),
    ];
    let rig = Rig::new("driver");
    let mut others = rig.others();
    for acked in LAYOUTS {
        for (vring, address, len, flags, said) in cases {
            let before = (rig.report(0), log_of(&rig.victim()).len());
            let mut guest = Guest::new(Peer::connect(&rig.socket(0)), acked, 64);
            guest.set_memory();
            guest.poke_descriptor(vring, address, len, flags);
            for index in 0..2 {
                guest.prepare(index, guest.fresh());
                guest.peer.ok(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
            }
            if vring == 0 {
                others.0.send_to(guest.mac);
            } else {
                guest.vrings[1].kick.write(1).unwrap();
            }
            let name = format!("{acked:#x} {vring} {address:#x} {len} {flags}");
            assert!(guest.vrings[vring as usize].failed(), "{name}: {:#?}", log_of(&rig.victim()));
            let after = rig.report(0);
            let faults = [after.sent.faults - before.0.sent.faults, after.received.faults - before.0.received.faults];
            assert_eq!(faults, if vring == 0 { [1, 0] } else { [0, 1] }, "{name}");
            let lines = log_of(&rig.victim()).split_off(before.1);
            let line = lines.iter().find(|line| line.starts_with("ERROR")).unwrap();
            assert!(line.contains(&format!("port {} queue {vring}: ", rig.victim())), "{line}");
            assert!(said.iter().all(|said| line.contains(said)), "{line}");
            assert!(guest.vrings[1 - vring as usize].err.read().is_err(), "{name}: the other queue is not at fault");
            // More kicks and frames change nothing.
            let _ = guest.vrings[1].kick.write(1);
            others.work();
            assert_eq!(guest.peer.get_base(vring), guest.fresh(), "{name}: it stopped before the bad chain");
            let mut guest = if vring == 0 {
                let mut guest = guest;
                guest.peer.ok(RESET_DEVICE, &[], &[]);
                guest.again()
            } else {
                drop(guest);
                rig.guest(0, acked)
            };
            exchange(&mut guest, &mut others.0);
        }
    }
    // Only in split rings: an available index that jumps, a head that is not a descriptor.
    for (available, said) in [
        ([0, 65, 0, 0], "available index 65 is 65 ahead of 0, more than the queue's 64 entries"),
        ([0, 1, 64, 0], "descriptor 64 does not exist in a table of 64"),
    ] {
        let before = rig.faults();
        let mut guest = rig.guest(0, SPLIT);
        let [_, _, _, at, _] = guest.addresses(1);
        guest.poke(at, &available.map(u16::to_le_bytes).concat());
        guest.vrings[1].kick.write(1).unwrap();
        assert!(guest.vrings[1].failed());
        rig.expect_faults(before + 1);
        logged(&rig.victim(), &["ERROR", "queue 1:", said]);
        guest.peer.ok(RESET_DEVICE, &[], &[]);
        exchange(&mut guest.again(), &mut others.0);
    }
}

#[test]
fn reset_device() {
    let rig = Rig::new("reset");
    let mut others = rig.others();
    let mut guest = rig.guest(0, SPLIT);
    for round in 0..6 {
        exchange(&mut guest, &mut others.0);
        let old = identity(&guest.driver.file);
        guest.peer.ok(if round % 2 == 0 { RESET_DEVICE } else { RESET_OWNER }, &[], &[]);
        // No queue runs: this frame stays in the ring.
        guest.send_to(others.0.mac);
        others.work();
        assert!(others.0.received(guest.mac).is_empty());
        guest.acked = LAYOUTS[(round + 1) % 2];
        guest = guest.again();
        exchange(&mut guest, &mut others.0);
        assert_eq!(held(old), (0, 0), "the old memory must be unmapped");
    }
    assert_eq!(rig.faults(), 0);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario, each step of which starts from what those before it left")]
fn bases_are_saved_and_restored() {
    let layouts = [
        SPLIT,
        SPLIT | bits::EVENT_IDX,
        SPLIT | bits::IN_ORDER,
        PACKED,
        PACKED | bits::EVENT_IDX,
        PACKED | bits::IN_ORDER | bits::NET_F_MRG_RXBUF,
    ];
    for (number, acked) in layouts.into_iter().enumerate() {
        let rig = Rig::new(&format!("base{number}"));
        let (mut sender, mut receiver) = (rig.guest(0, acked), rig.guest(1, acked));
        exchange(&mut sender, &mut receiver);
        let mut restarts = 0;
        let mut restart = |guest: &mut Guest, index: u32| {
            restarts += 1;
            if restarts % 4 == 0 {
                guest.peer.ok(SET_VRING_ENABLE, &words(&[index, 0]), &[]);
                guest.peer.ok(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
                return;
            }
            let base = guest.peer.get_base(index);
            let kick = guest.vrings[index as usize].kick.as_raw_fd();
            guest.peer.ok(SET_VRING_BASE, &words(&[index, base]), &[]);
            guest.peer.ok(SET_VRING_KICK, &longs(&[index.into()]), &[kick]);
        };
        // While the sender's queue stops and resumes, no frame is lost or duplicated.
        let (mut sent, mut next, mut round) = (Vec::new(), 0, 0);
        let done = within(PATIENCE, || {
            while sent.len() < 3000 && sent.len() - next < 48 {
                sent.push(sender.send_to(receiver.mac));
            }
            round += 1;
            if round % 3 == 0 {
                restart(&mut sender, 1);
            }
            for sequence in receiver.received(sender.mac) {
                assert_eq!(Some(&sequence), sent.get(next), "{acked:#x}: lost, duplicated, or out of order");
                next += 1;
            }
            next == 3000
        });
        assert!(done, "{acked:#x}: {next} of {} frames arrived; {round} rounds", sent.len());
        // A receiver that stops misses frames, but they are counted, and none is duplicated or reordered.
        let before = rig.report(1).sent;
        let (mut came, mut last, from) = (0, None, sender.mac);
        let mut receive = |receiver: &mut Guest| {
            for sequence in receiver.received(from) {
                assert!(Some(sequence) > last, "{acked:#x}: {sequence} after {last:?}");
                last = Some(sequence);
                came += 1;
            }
            came
        };
        let mut taken = 0;
        for count in 0..1000 {
            within(PATIENCE, || sender.add(receiver.mac).is_some());
            let _ = sender.vrings[1].kick.write(1);
            if count % 7 == 0 {
                restart(&mut receiver, 0);
            }
            taken = receive(&mut receiver);
        }
        let missed = || {
            let now = rig.report(1).sent;
            now.dropped() - before.dropped()
        };
        let all = within(PATIENCE, || {
            taken = receive(&mut receiver);
            taken + missed() == 1000
        });
        assert!(all, "{acked:#x}: {taken} arrived, {} were counted as lost, of 1000", missed());
        assert!(taken > 0, "{acked:#x}");
        exchange(&mut sender, &mut receiver);
        assert_eq!(rig.faults(), 0, "{:#?}", log_of(&rig.victim()));
    }
}

#[test]
fn configuration_space() {
    let rig = Rig::new("config");
    let mut peer = rig.peer(SPLIT);
    // MAC address, status (link up), queue pairs, MTU 9001, an unknown speed, limits of RSS; the rest reads as zeros.
    let mut space = vec![0; 4096];
    space[..12].copy_from_slice(&[0x52, 0x54, 0, 0x12, 0x34, 0x56, 1, 0, 1, 0, 0x29, 0x23]);
    space[12..24].copy_from_slice(&[255, 255, 255, 255, 255, 40, 128, 0, 0x3f, 0, 0, 0]);
    let mut read = |offset: usize, size: usize| {
        let head = words(&[offset as u32, size as u32, 0]);
        let answer = peer.ask(GET_CONFIG, &[&head[..], &vec![0xff; size]].concat());
        assert_eq!(answer[..12], head, "offset {offset}, size {size}");
        assert_eq!(answer[12..], space[offset..offset + size], "offset {offset}, size {size}");
    };
    (0..16).for_each(|offset| (1..20).for_each(|size| read(offset, size)));
    for (offset, size) in [(0, 256), (0, 4084), (1, 4083), (11, 1), (11, 3), (12, 4084), (4095, 1)] {
        read(offset, size);
    }
    peer.refused(SET_CONFIG, &[words(&[0, 6, 0]), vec![2, 0, 0, 0, 0, 1]].concat(), &[]);
    logged(&rig.victim(), &["ERROR", "the configuration space is read-only"]);
    rig.expect_faults(1);
    let mut stream = UnixStream::connect(rig.socket(1)).unwrap();
    stream.write_all(&message(GET_CONFIG, VERSION, 16, &words(&[0, 4, 0, 0]))).unwrap();
    assert!(Peer::of(stream).ends(), "without the protocol feature the message is not accepted");
}
