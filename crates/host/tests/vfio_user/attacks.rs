//! Bytes that are no messages, and descriptors that nobody asked for.

use crate::rig::*;
use std::{fs::File, io::Write, os::fd::AsRawFd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// A generator of bytes that look random (xorshift).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[test]
fn garbage() {
    let rig = Rig::new("garbage");
    let mut other = rig.client(1);
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    for round in 0..200 {
        let mut peer = if round % 2 == 0 { rig.peer() } else { rig.client(0) };
        let bytes: Vec<u8> = (0..noise.next() % 4096).map(|_| noise.next() as u8).collect();
        // The server may hang up before all is sent.
        let _ = (&peer.stream).write_all(&bytes);
        let _ = peer.stream.shutdown(std::net::Shutdown::Write);
        assert!(peer.ends());
        rig.disconnected(round + 1);
    }
    other.works();
    rig.client(0).works();
}

#[test]
fn headers_that_cannot_be() {
    let rig = Rig::new("headers");
    let mut disconnects = 0;
    let mut refused = |size: u32, flags: u32, words_logged: &[&str]| {
        let mut peer = rig.client(0);
        let mut bytes = message(1, REGION_READ, flags, &[0; 64]);
        bytes[4..8].copy_from_slice(&size.to_ne_bytes());
        peer.send(&bytes, &[]);
        assert!(peer.ends(), "{size} {flags:#x}");
        disconnects += 1;
        rig.disconnected(disconnects);
        logged(&rig.victim(), words_logged);
    };
    for size in [0, 1, 15, 65569, 1 << 31, u32::MAX] {
        refused(
            size,
            0,
            &["ERROR", &format!("REGION_READ (9) with a size of {size}, expected 16 to 65568"), "disconnected"],
        );
    }
    for kind in [1, 2, 15] {
        refused(80, kind, &["ERROR", &format!("a message of type {kind}"), "disconnected"]);
    }
    assert_eq!(rig.faults(), disconnects);
    rig.client(0).works();
}

#[test]
fn descriptors_where_none_are_expected() {
    let rig = Rig::new("unwanted");
    let mut peer = rig.client(0);
    let file = memory(4096);
    let own = held(identity(&file));
    let fds = [file.as_raw_fd(); 8];
    for command in (3..=20).filter(|&command| command != SET_IRQS) {
        for count in [1, 8] {
            assert!(peer.ask(command, &[0; 32], &fds[..count]).is_err(), "{command}");
        }
    }
    logged(&rig.victim(), &["ERROR", "REGION_READ", "8 descriptors, expected none"]);
    assert!(within(PATIENCE, || held(identity(&file)) == own), "they are closed: {:?}", held(identity(&file)));
    peer.works();
    assert!(rig.peer().ends(), "still connected");
    drop(peer);
    let mut peer = rig.peer();
    assert_eq!(peer.ask(VERSION, &[0; 4], &fds), Err(EINVAL));
    assert!(peer.ends());
    assert!(within(PATIENCE, || held(identity(&file)) == own));
}

#[test]
fn too_many_descriptors() {
    let rig = Rig::new("many");
    let file = memory(4096);
    let own = held(identity(&file));
    let fds = vec![file.as_raw_fd(); 253];
    // With each part of a message: they would add up until it is whole.
    for with in [1, 3, 48] {
        let mut peer = rig.client(0);
        let map = message(1, DMA_MAP, 0, &dma_map(3, 0, 0, 0x1000));
        for part in map.chunks(with) {
            if peer.stream.send_with_fds(&[part], &fds).is_err() {
                break;
            }
        }
        assert!(peer.ends());
        assert!(within(PATIENCE, || held(identity(&file)) == own), "{:?}", held(identity(&file)));
    }
    logged(&rig.victim(), &["ERROR", "descriptors with one message, expected at most 8", "disconnected"]);
    let mut peer = rig.client(0);
    assert_eq!(peer.ask(DMA_MAP, &dma_map(3, 0, 0, 0x1000), &fds[..8]), Err(EINVAL));
    assert!(within(PATIENCE, || held(identity(&file)) == own));
    let null = File::open("/dev/null").unwrap();
    assert_eq!(peer.ask(SET_IRQS, &set_irqs(0x24, 0, 0, 1), &[null.as_raw_fd(); 8]), Err(EINVAL));
    peer.works();
}
