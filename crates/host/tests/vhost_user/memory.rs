//! Ring addresses, queue sizes and memory regions that are invalid or inconsistent.

use crate::{
    LAYOUTS, NOBODY,
    common::{request::*, *},
};
use ringroad_wire::ethernet::MacAddr;
use std::{
    fs::File,
    os::fd::{AsRawFd, RawFd},
    time::Duration,
};

#[test]
fn rings_outside_memory_or_misaligned() {
    let rig = Rig::new("rings");
    let mut others = rig.others();
    let mut faults = 0;
    for acked in LAYOUTS {
        for index in 0..2 {
            let mut guest = Guest::new(Peer::connect(&rig.socket(0)), acked, 64);
            guest.set_memory();
            guest.prepare(index, guest.fresh());
            let good = guest.addresses(index);
            let [guest_address, len, user, _] = guest.region();
            for area in 1..4 {
                // Just before and after memory, the last byte inside, null, the end of the address space, and a guest address
                // instead of a user address.
                for wrong in [user - 16, user + len, user + len - 16, 0, u64::MAX - 15, guest_address] {
                    let mut at = good;
                    at[area] = wrong;
                    if guest.is_packed() && area > 1 && wrong == user + len - 16 {
                        continue; // Four bytes fit in there.
                    }
                    guest.peer.ok(SET_VRING_ADDR, &longs(&at), &[]);
                    guest.peer.refused(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
                    assert!(guest.vrings[index as usize].failed());
                    faults += 1;
                    rig.expect_faults(faults);
                    let address = format!("{wrong:#x}");
                    let queue = format!("queue {index}:");
                    logged(&rig.victim(), &["ERROR", &queue, "area at", &address, "does not lie in one memory region"]);
                    // It stays stopped until the next kick descriptor.
                    guest.peer.ok(SET_VRING_ENABLE, &words(&[index, 0]), &[]);
                    let kick = guest.vrings[index as usize].kick.as_raw_fd();
                    guest.peer.ok(SET_VRING_KICK, &longs(&[index.into()]), &[kick]);
                }
            }
            // With the right addresses the same vring runs.
            guest.peer.ok(SET_VRING_ADDR, &longs(&good), &[]);
            guest.peer.ok(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
        }
        // An offset of two bytes passes the `vhost` crate's check for an available ring, but is refused for the event
        // suppression structure of a packed ring.
        for (area, off, ends) in [(1, 8, true), (2, 2, true), (3, 1, true), (3, 2, false)] {
            if !ends && acked == SPLIT {
                continue;
            }
            let mut guest = Guest::new(Peer::connect(&rig.socket(0)), acked, 64);
            guest.set_memory();
            guest.prepare(1, guest.fresh());
            let mut at = guest.addresses(1);
            at[area] += off;
            faults += 1;
            if ends {
                guest.peer.send(&message(SET_VRING_ADDR, VERSION, 40, &longs(&at)), &[]);
                assert!(guest.peer.ends(), "area {area} off by {off}");
                logged(&rig.victim(), &["ERROR", "malformed", "disconnected"]);
            } else {
                guest.peer.ok(SET_VRING_ADDR, &longs(&at), &[]);
                guest.peer.refused(SET_VRING_ENABLE, &words(&[1, 1]), &[]);
                logged(&rig.victim(), &["queue 1: the driver area at", "aligned to 4"]);
            }
            assert!(guest.vrings[1].failed());
            rig.expect_faults(faults);
        }
    }
    others.work();
    exchange(&mut rig.guest(0, SPLIT), &mut others.0);
}

#[test]
fn queue_sizes() {
    let rig = Rig::new("sizes");
    let mut others = rig.others();
    for (acked, good, wrong) in [
        (SPLIT, [1, 2, 32768], vec![0, 3, 200, 32769, 65536, u32::MAX]),
        (PACKED, [1, 200, 32767], vec![0, 32769, 65536, u32::MAX]),
    ] {
        let before = rig.faults();
        let mut guest = Guest::new(Peer::connect(&rig.socket(0)), acked, 64);
        guest.start_all();
        for (count, size) in (1..).zip(wrong) {
            guest.peer.refused(SET_VRING_NUM, &words(&[1, size]), &[]);
            assert!(guest.vrings[1].failed());
            rig.expect_faults(before + count);
            logged(&rig.victim(), &["ERROR", "queue 1:", &format!("invalid queue size {size}:")]);
        }
        // The refused messages have changed nothing.
        exchange(&mut guest, &mut others.0);
        drop(guest);
        for size in good {
            let mut guest = Guest::new(Peer::connect(&rig.socket(0)), acked, size);
            guest.start_all();
            exchange(&mut guest, &mut others.0);
        }
    }
    // A size that was valid before other features were acknowledged.
    let mut guest = Guest::new(Peer::connect(&rig.socket(0)), PACKED, 200);
    guest.set_memory();
    guest.prepare(1, guest.fresh());
    guest.peer.ok(SET_FEATURES, &longs(&[SPLIT]), &[]);
    guest.peer.refused(SET_VRING_ENABLE, &words(&[1, 1]), &[]);
    assert!(guest.vrings[1].failed());
    others.work();
}

#[test]
fn bases_outside_the_ring() {
    let rig = Rig::new("bases");
    let mut guest = rig.guest(0, PACKED);
    let kick = [guest.vrings[1].kick.as_raw_fd()];
    for base in [64, 0x8000_8000 | 64, 0x8000_8000 | 64 << 16, 0x7fff_7fff, u32::MAX] {
        let before = rig.faults();
        guest.peer.get_base(1);
        guest.peer.ok(SET_VRING_BASE, &words(&[1, base]), &[]);
        guest.peer.refused(SET_VRING_KICK, &longs(&[1]), &kick);
        assert!(guest.vrings[1].failed());
        rig.expect_faults(before + 1);
        logged(&rig.victim(), &["ERROR", "queue 1:", &format!("base {base:#x} lies outside a ring of 64")]);
    }
    guest.peer.ok(SET_VRING_BASE, &words(&[1, 0x8000_8000]), &[]);
    guest.peer.ok(SET_VRING_KICK, &longs(&[1]), &kick);
    exchange(&mut guest, &mut rig.guest(1, SPLIT));
}

#[test]
fn invalid_memory_regions() {
    let rig = Rig::new("lies");
    let mut others = rig.others();
    let mut guest = rig.guest(0, SPLIT);
    let [at, len, user, _] = guest.region();
    let (own, file, null) = (&guest.driver.file, memory(8192), File::open("/dev/null").unwrap());
    let (pipe, _end) = std::io::pipe().unwrap();
    let (own, file, null, pipe) = (own.as_raw_fd(), file.as_raw_fd(), null.as_raw_fd(), pipe.as_raw_fd());
    // A second region in addition to the guest's own; what the log says.
    let cases: [([u64; 4], RawFd, &str); 9] = [
        ([at, 4096, 0x1000, 0], file, "overlaps"),
        ([at + len - 1, 4096, 0x1000, 0], file, "overlaps"),
        ([at - 4095, 4096, 0x1000, 0], file, "overlaps"),
        ([0x1000, 4096, user + len - 4096, 0], file, "overlaps"),
        ([0x1000, 8193, 0x1000, 0], file, "needs 0x2001 bytes of its file, which has 0x2000"),
        ([0x1000, 4096, 0x1000, 4097], file, "needs 0x2001 bytes of its file, which has 0x2000"),
        ([0x1000, 4096, 0x1000, i64::MAX as u64 - 4096], file, "bytes of its file"),
        ([0x1000, 4096, 0x1000, 0], null, "the memory descriptor is /dev/null, expected a memfd"),
        ([0x1000, 4096, 0x1000, 0], pipe, "the memory descriptor is pipe:["),
    ];
    for (count, (region, fd, said)) in (0..).zip(cases) {
        guest.peer.refused(SET_MEM_TABLE, &mem_table(&[guest.region(), region]), &[own, fd]);
        rig.expect_faults(2 * count + 1);
        logged(&rig.victim(), &["ERROR", "memory ", said, "refused"]);
        guest.peer.refused(ADD_MEM_REG, &mem_reg(region), &[fd]);
        rig.expect_faults(2 * count + 2);
    }
    // The guest continues in its previous memory.
    exchange(&mut guest, &mut others.0);
    drop(guest);
    // Empty regions, or ones past the end of the address space: the `vhost` crate itself checks only tables.
    for region in [[0x1000, 0, 0x1000, 0], [u64::MAX, 2, 0, 0], [0, 2, u64::MAX, 0], [0, 2, 0, u64::MAX]] {
        let before = rig.faults();
        let mut peer = rig.peer(SPLIT);
        peer.refused(ADD_MEM_REG, &mem_reg(region), &[file]);
        rig.expect_faults(before + 1);
        let payload = mem_table(&[region]);
        peer.send(&message(SET_MEM_TABLE, VERSION, payload.len() as u32, &payload), &[file]);
        assert!(peer.ends(), "{region:x?}");
        rig.expect_faults(before + 2);
    }
    logged(&rig.victim(), &["ERROR", "memory region at guest address 0x1000 is empty", "refused"]);
    logged(&rig.victim(), &["ERROR", "run past the end of the address space", "refused"]);
    others.work();
}

#[test]
fn truncated_memory() {
    let rig = Rig::new("truncated");
    let mut others = rig.others();
    for acked in LAYOUTS {
        // The worker finds out while it takes frames, while it delivers some, or when a queue starts.
        for way in 0..3 {
            let before = (rig.faults(), log_of(&rig.victim()).len());
            let mut guest = if way < 2 {
                rig.guest(0, acked)
            } else {
                let mut guest = Guest::new(Peer::connect(&rig.socket(0)), acked, 64);
                guest.set_memory();
                guest
            };
            if way < 2 {
                exchange(&mut guest, &mut others.0);
            }
            while way == 0 && guest.add(NOBODY).is_some() {}
            // From here on only the daemon may touch the memory: this process would get the SIGBUS too.
            guest.driver.file.set_len(0).unwrap();
            match way {
                0 => drop(guest.vrings[1].kick.write(1)),
                1 => drop(others.0.send_to(MacAddr([0xff; 6]))),
                _ => {
                    guest.prepare(1, guest.fresh());
                    guest.peer.send(&message(SET_VRING_ENABLE, VERSION, 8, &words(&[1, 1])), &[]);
                }
            }
            assert!(guest.peer.ends(), "way {way}: {:#?}", log_of(&rig.victim()));
            assert!(guest.vrings[1].failed(), "way {way}");
            rig.expect_faults(before.0 + 1);
            let lines = log_of(&rig.victim()).split_off(before.1);
            assert!(
                lines.iter().any(|line| line.contains("ERROR") && line.contains("has truncated the guest's memory")),
                "way {way}: {lines:#?}"
            );
            others.work();
            let file = identity(&guest.driver.file);
            drop(guest);
            assert!(within(PATIENCE, || held(file) == (0, 0)), "still held: {:?}", held(file));
            exchange(&mut rig.guest(0, acked), &mut others.1);
        }
    }
}

#[test]
fn memory_of_a_disconnected_guest_is_unmapped() {
    let rig = Rig::new("letgo");
    let mut others = rig.others();
    let mut guest = rig.guest(0, PACKED);
    exchange(&mut guest, &mut others.0);
    // The worker's last action is to find this guest's queue empty.
    let sequence = guest.send_to(others.0.mac);
    assert!(others.0.receives(guest.mac, sequence));
    let file = identity(&guest.driver.file);
    assert!(held(file).0 >= 2, "one mapping here, one of the daemon");
    drop(guest);
    assert!(within(PATIENCE, || held(file) == (0, 0)), "mappings, descriptors: {:?}", held(file));
}

#[test]
fn memory_slots() {
    let rig = Rig::new("slots");
    let mut others = rig.others();
    let mut guest = rig.guest(0, PACKED);
    assert_eq!(guest.peer.ask_u64(GET_MAX_MEM_SLOTS), 509);
    let file = memory(4096);
    let fd = [file.as_raw_fd()];
    let region = |slot: u64| [slot << 20, 4096, slot << 20, 0];
    // One region is the guest's own. Its queues run all the while.
    for slot in 1..509 {
        guest.peer.ok(ADD_MEM_REG, &mem_reg(region(slot)), &fd);
        if slot % 64 == 0 {
            exchange(&mut guest, &mut others.0);
        }
    }
    guest.peer.refused(ADD_MEM_REG, &mem_reg(region(600)), &fd);
    rig.expect_faults(1);
    logged(&rig.victim(), &["ERROR", "more than 509 memory regions"]);
    exchange(&mut guest, &mut others.0);
    // Unknown regions: never added, or matching only in part.
    for wrong in [region(600), [1 << 20, 4095, 1 << 20, 0], [1 << 20, 4096, 0, 0], [0, 4096, 1 << 20, 0]] {
        let before = rig.faults();
        guest.peer.refused(REM_MEM_REG, &mem_reg(wrong), &[]);
        rig.expect_faults(before + 1);
        logged(&rig.victim(), &["ERROR", "no memory region at", &format!("{:#x} bytes", wrong[1])]);
    }
    // Frontends may attach a descriptor.
    guest.peer.ok(REM_MEM_REG, &mem_reg(region(1)), &fd);
    guest.peer.refused(REM_MEM_REG, &mem_reg(region(1)), &[]);
    guest.peer.ok(ADD_MEM_REG, &mem_reg(region(600)), &fd);
    for slot in (2..509).chain([600]) {
        guest.peer.ok(REM_MEM_REG, &mem_reg(region(slot)), &[]);
    }
    exchange(&mut guest, &mut others.0);
    assert!(within(PATIENCE, || held(identity(&file)) == (0, 1)), "only the descriptor here is left");
}

#[test]
fn a_region_with_a_running_ring_is_removed() {
    let rig = Rig::new("removed");
    let mut others = rig.others();
    for acked in LAYOUTS {
        let before = rig.faults();
        let mut guest = rig.guest(0, acked);
        exchange(&mut guest, &mut others.0);
        guest.peer.refused(REM_MEM_REG, &mem_reg(guest.region()), &[]);
        assert!(guest.vrings.iter().all(Vring::failed));
        rig.expect_faults(before + 2);
        for queue in ["queue 0: the d", "queue 1: the d"] {
            logged(&rig.victim(), &["ERROR", queue, "area at", "does not lie in one memory region"]);
        }
        let file = identity(&guest.driver.file);
        assert_eq!(held(file).0, 1, "the daemon must have unmapped it");
        others.work();
        // With its memory and a kick it runs again, where it was.
        guest.peer.ok(ADD_MEM_REG, &mem_reg(guest.region()), &[guest.driver.file.as_raw_fd()]);
        for index in 0..2 {
            let kick = guest.vrings[index].kick.as_raw_fd();
            guest.peer.ok(SET_VRING_KICK, &longs(&[index as u64]), &[kick]);
        }
        exchange(&mut guest, &mut others.0);
        // Another region at the same addresses: the ring contents are lost, but the table is valid.
        guest.set_memory();
        exchange(&mut guest, &mut others.0);
    }
}

#[test]
fn new_memory_does_not_restart_a_faulty_queue() {
    let rig = Rig::new("mend");
    let mut guest = rig.guest(0, SPLIT);
    guest.poke_descriptor(1, 0x10, 64, 0);
    guest.vrings[1].kick.write(1).unwrap();
    assert!(guest.vrings[1].failed());
    guest.peer.ok(ADD_MEM_REG, &mem_reg([0x1000, 4096, 0x1000, 0]), &[memory(4096).as_raw_fd()]);
    let _ = guest.vrings[1].kick.write(1);
    // Restarted, it would fail again at once.
    assert!(!within(Duration::from_millis(100), || rig.faults() != 1), "{:#?}", log_of(&rig.victim()));
    assert_eq!(guest.peer.get_base(1), 0);
}
