//! What each command does, and what is refused of it.

use crate::rig::*;
use std::sync::atomic::Ordering::Relaxed;

fn version(text: &str) -> Vec<u8> {
    [b"\0\0\x01\0", text.as_bytes(), b"\0"].concat()
}

#[test]
fn versions() {
    let rig = Rig::new("versions");
    for (payload, minor) in [(vec![0, 0, 0, 0], 0u16), (vec![0, 0, 9, 0], 1), (version("{}"), 1)] {
        let reply = rig.peer().ask(VERSION, &payload, &[]).unwrap();
        assert_eq!(reply[..4], [0u16.to_ne_bytes(), minor.to_ne_bytes()].concat()[..]);
        let text = String::from_utf8(reply[4..].to_vec()).unwrap();
        for part in ["\"max_msg_fds\":8", "\"max_data_xfer_size\":65536", "\"pgsizes\":4096", "\"max_dma_maps\":509"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("write_multiple"), "not proposed: {text}");
    }
    let faults = rig.faults();
    let deep = "[".repeat(60_000);
    let bad = [vec![], vec![1, 0, 0, 0], version("{"), version("7"), version(&deep), version("{\"capabilities\":[]}")];
    for (round, payload) in bad.iter().enumerate() {
        let mut peer = rig.peer();
        assert_eq!(peer.ask(VERSION, payload, &[]), Err(EINVAL), "{round}");
        assert!(peer.ends());
        rig.disconnected(3 + round as u64 + 1);
        assert!(rig.faults() > faults + round as u64);
    }
    // Something else first.
    let mut peer = rig.peer();
    assert_eq!(peer.ask(GET_INFO, &[0; 16], &[]), Err(EINVAL));
    assert!(peer.ends());
    logged(&rig.victim(), &["ERROR", "DEVICE_GET_INFO", "expected VERSION first"]);
    // And twice.
    let mut peer = rig.client(0);
    assert_eq!(peer.ask(VERSION, &version("{}"), &[]), Err(EINVAL));
    peer.works();
}

#[test]
fn information() {
    let rig = Rig::new("information");
    let mut peer = rig.client(0);
    assert_eq!(peer.ask(GET_INFO, &words(&[16, 0, 0, 0]), &[]), Ok(words(&[16, 3, 9, 3])));
    assert_eq!(peer.ask(GET_INFO, &[0; 15], &[]), Err(EINVAL));
    let region = |index| [words(&[32, 0, index, 0]), longs(&[0, 0])].concat();
    for (index, flags, size) in [(0, 3, 4096), (1, 1, 64), (2, 0, 0), (7, 3, 256), (8, 0, 0)] {
        let expected = [words(&[32, flags, index, 0]), longs(&[size, 0])].concat();
        assert_eq!(peer.ask(GET_REGION_INFO, &region(index), &[]), Ok(expected));
    }
    for index in [9, u32::MAX] {
        assert_eq!(peer.ask(GET_REGION_INFO, &region(index), &[]), Err(EINVAL));
        assert_eq!(peer.ask(GET_IRQ_INFO, &words(&[16, 0, index, 0]), &[]), Err(EINVAL));
    }
    let faults = rig.faults();
    for index in [3, 4] {
        assert_eq!(peer.ask(GET_IRQ_INFO, &words(&[16, 0, index, 0]), &[]), Err(EINVAL));
    }
    assert_eq!(rig.faults(), faults, "QEMU asks for these");
    // INTx: eventfd, maskable, masks itself.
    for (index, flags, count) in [(0, 7, 1), (1, 1, 4), (2, 1, 0)] {
        let reply = peer.ask(GET_IRQ_INFO, &words(&[16, 0, index, 0]), &[]);
        assert_eq!(reply, Ok(words(&[16, flags, index, count])));
    }
}

#[test]
fn registers() {
    let rig = Rig::new("registers");
    let mut peer = rig.client(0);
    peer.works();
    // The whole configuration space at once, and odd parts of it.
    let config = peer.ask(REGION_READ, &access(7, 0, 256), &[]).unwrap();
    assert_eq!(config[16..], (0..=255).collect::<Vec<u8>>());
    assert_eq!(peer.ask(REGION_READ, &access(7, 251, 3), &[]).unwrap()[16..], [251, 252, 253]);
    assert_eq!(peer.ask(REGION_READ, &access(0, 4096, 0), &[]).unwrap(), access(0, 4096, 0));
    for (region, offset, count) in [
        (0, 4090, 8),
        (0, 4097, 0),
        (0, 0, 4097),
        (0, 0, u32::MAX),
        (0, u64::MAX, 8),
        (0, u64::MAX - 3, u32::MAX),
        (2, 0, 1),
        (9, 0, 1),
        (u32::MAX, 0, 1),
        (7, 0, 0x1_0001),
    ] {
        assert_eq!(peer.ask(REGION_READ, &access(region, offset, count), &[]), Err(EINVAL), "{region} {offset:#x}");
    }
    for len in 0..16 {
        assert_eq!(peer.ask(REGION_READ, &vec![0; len], &[]), Err(EINVAL));
        assert_eq!(peer.ask(REGION_WRITE, &vec![0; len], &[]), Err(EINVAL));
    }
    peer.works();
}

#[test]
fn a_write_that_the_hardware_ignores_is_no_error() {
    let rig = Rig::new("ignored");
    let mut peer = rig.client(0);
    let outside = [(0, 4090), (0, u64::MAX), (1, 0), (2, 0), (9, 0), (u32::MAX, 0)];
    for (region, offset) in outside {
        let head = access(region, offset, 8);
        assert_eq!(peer.ask(REGION_WRITE, &[&head[..], &[0xff; 8]].concat(), &[]), Ok(head));
    }
    assert_eq!(rig.faults(), outside.len() as u64);
    assert_eq!(rig.seen().writes.load(Relaxed), 0);
    logged(&rig.victim(), &["WARN", "a write of 8 bytes at 0xffa of region 0", "ignored"]);
    // But one whose count is not that of its bytes is.
    for count in [0, 7, 9, u32::MAX] {
        assert_eq!(peer.ask(REGION_WRITE, &[&access(0, 0, count)[..], &[1; 8]].concat(), &[]), Err(EINVAL));
    }
    peer.works();
}

#[test]
fn posted_writes() {
    let rig = Rig::new("posted");
    let mut peer = rig.client(0);
    let mut bytes = Vec::new();
    for value in 0..1000u64 {
        bytes.extend(message(7, REGION_WRITE, NO_REPLY, &write(0x100, &value.to_ne_bytes())));
        // An error is not answered either.
        bytes.extend(message(7, REGION_WRITE, NO_REPLY, &access(0, 0, 9)));
        bytes.extend(message(7, REGION_READ, NO_REPLY, &access(0, 0, 8)));
    }
    peer.send(&bytes, &[]);
    assert_eq!(peer.get(0x100), 999);
    assert_eq!((rig.seen().writes.load(Relaxed), rig.faults()), (1000, 1000));
}

#[test]
fn several_writes_at_once() {
    let rig = Rig::new("multi");
    let mut peer = rig.client(0);
    let one = |offset, count, value: u64| [access(0, offset, count), longs(&[value])].concat();
    let writes = |count: u64, writes: &[Vec<u8>]| [longs(&[count]), writes.concat()].concat();
    let three = [one(0x100, 8, 1), one(0x104, 2, 2), one(0x106, 1, 0x333)];
    assert_eq!(peer.ask(REGION_WRITE_MULTI, &writes(3, &three), &[]), Ok(longs(&[3])));
    assert_eq!(peer.get(0x100), 0x0033_0002_0000_0001);
    assert_eq!(peer.ask(REGION_WRITE_MULTI, &writes(0, &[]), &[]), Ok(longs(&[0])));
    peer.send(&message(7, REGION_WRITE_MULTI, NO_REPLY, &writes(200, &vec![one(0x100, 8, 5); 200])), &[]);
    assert_eq!(peer.get(0x100), 5);
    assert_eq!(rig.faults(), 0);
    for (count, list) in [(2, &three[..]), (4, &three), (u64::MAX, &three), (u64::MAX / 24, &three), (1, &[])] {
        assert_eq!(peer.ask(REGION_WRITE_MULTI, &writes(count, list), &[]), Err(EINVAL), "{count}");
    }
    for payload in [vec![], vec![0; 7], [longs(&[1]), vec![0; 23]].concat(), writes(1, &[one(0x100, 9, 7)])] {
        assert_eq!(peer.ask(REGION_WRITE_MULTI, &payload, &[]), Err(EINVAL));
    }
    assert_eq!(peer.get(0x100), 5);
}

#[test]
fn what_is_not_supported() {
    let rig = Rig::new("unsupported");
    let mut peer = rig.client(0);
    // GET_REGION_IO_FDS, DMA_READ, DMA_WRITE, DIRTY_PAGES, DEVICE_FEATURE, MIG_DATA_READ, MIG_DATA_WRITE, and no commands.
    for command in [6, 11, 12, 14, 16, 17, 18, 0, 19, u16::MAX] {
        for len in [0, 1, 16, 5000, 65552] {
            assert_eq!(peer.ask(command, &vec![0xff; len], &[]), Err(ENOTSUP), "{command}");
        }
    }
    logged(&rig.victim(), &["DEBUG", "DEVICE_GET_REGION_IO_FDS (6)", "not supported"]);
    logged(&rig.victim(), &["DEBUG", "MIG_DATA_WRITE (18)", "not supported"]);
    assert_eq!(rig.faults(), 0, "a client may ask");
    peer.works();
}

#[test]
fn reset() {
    let rig = Rig::new("reset");
    let mut peer = rig.client(0);
    peer.works();
    assert_eq!(peer.ask(RESET, &[], &[]), Ok(vec![]));
    assert_eq!((peer.get(0x100), rig.seen().resets.load(Relaxed)), (0, 1));
}
