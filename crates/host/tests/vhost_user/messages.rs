//! Messages that are malformed, not offered, for vrings that do not exist, or out of order.

use crate::{
    LAYOUTS,
    common::{request::*, *},
};
use ringroad_net::bits;
use std::os::fd::{AsRawFd, RawFd};

#[test]
fn features_that_were_not_offered() {
    let rig = Rig::new("features");
    let mut others = rig.others();
    let mut guest = rig.guest(0, SPLIT);
    for bit in [4, 6, 22, 24, 26, 33, 36, 63] {
        let before = rig.faults();
        guest.peer.refused(SET_FEATURES, &longs(&[SPLIT | 1 << bit]), &[]);
        rig.expect_faults(before + 1);
        logged(&rig.victim(), &["ERROR", &format!("features {:#x} acknowledged but not offered", 1u64 << bit)]);
    }
    let protocol = guest.peer.ask_u64(GET_PROTOCOL_FEATURES);
    for bit in [1, 2, 6, 7, 14, 63] {
        let before = rig.faults();
        guest.peer.refused(SET_PROTOCOL_FEATURES, &longs(&[protocol | 1 << bit]), &[]);
        rig.expect_faults(before + 1);
        logged(&rig.victim(), &["ERROR", &format!("protocol features {:#x} acknowledged", 1u64 << bit)]);
    }
    exchange(&mut guest, &mut others.0);
}

#[test]
fn version_1_not_acknowledged() {
    let rig = Rig::new("legacy");
    let mut others = rig.others();
    let mut guest = Guest::new(Peer::connect(&rig.socket(0)), bits::PROTOCOL_FEATURES, 64);
    guest.set_memory();
    for index in 0..2 {
        guest.prepare(index, 0);
        guest.peer.refused(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
        assert!(guest.vrings[index as usize].failed());
        rig.expect_faults(u64::from(index) + 1);
        logged(&rig.victim(), &["ERROR", &format!("queue {index}:"), "VIRTIO_F_VERSION_1"]);
    }
    others.work();
    let mut guest = guest.again_with(SPLIT);
    exchange(&mut guest, &mut others.0);
}

#[test]
#[expect(clippy::too_many_lines, reason = "a list of cases")]
fn malformed_messages() {
    let rig = Rig::new("malformed");
    let mut others = rig.others();
    let state = words(&[1, 64]);
    let mut cases: Vec<(String, Vec<u8>)> = Vec::new();
    let mut case = |name: &str, request, flags, size, payload: &[u8]| {
        cases.push((format!("{name}, request {request}"), message(request, flags, size, payload)));
    };
    for request in [0, 45, 999, u32::MAX] {
        case("unknown", request, VERSION, 0, &[]);
    }
    for flags in [0, 2, 3, VERSION | 16, VERSION | 1 << 31, u32::MAX, VERSION | 4] {
        case("wrong version, flags, or a reply", GET_FEATURES, flags, 0, &[]);
        case("wrong version, flags, or a reply", SET_VRING_NUM, flags, 8, &state);
    }
    for request in [GET_FEATURES, SET_OWNER, RESET_OWNER, RESET_DEVICE, GET_PROTOCOL_FEATURES, GET_MAX_MEM_SLOTS] {
        case("too long", request, VERSION, 8, &[0; 8]);
    }
    for request in [SET_VRING_NUM, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_ENABLE, SET_FEATURES] {
        case("empty", request, VERSION, 0, &[]);
        case("too short", request, VERSION, 4, &[0; 4]);
        case("too long", request, VERSION, 12, &[0; 12]);
        case("shorter than it says", request, VERSION, 8, &[0; 4]);
        case("longer than any message", request, VERSION, 4097, &[0; 4097]);
        case("longer than any message", request, VERSION, u32::MAX, &[0; 8]);
    }
    for request in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
        case("too short", request, VERSION, 4, &[0; 4]);
        case("without its descriptor", request, VERSION, 8, &longs(&[1]));
    }
    let [_, descriptor, used, available, _] = [1, 4096, 8192, 12288, 0];
    let address = |flags| [words(&[1, flags]), longs(&[descriptor, used, available, 0])].concat();
    case("too short", SET_VRING_ADDR, VERSION, 36, &address(0)[..36]);
    case("flags", SET_VRING_ADDR, VERSION, 40, &address(2));
    case("enable 2", SET_VRING_ENABLE, VERSION, 8, &words(&[1, 2]));
    for (name, count, regions) in
        [("no regions", 0, 0), ("fewer regions than it says", 2, 1), ("more", 1, 2), ("33", 33, 33)]
    {
        let payload = [words(&[count, 0]), vec![0; 32 * regions]].concat();
        case(name, SET_MEM_TABLE, VERSION, payload.len() as u32, &payload);
    }
    case("half a header", SET_MEM_TABLE, VERSION, 4, &[0; 4]);
    case("without its descriptors", SET_MEM_TABLE, VERSION, 40, &mem_table(&[[0, 4096, 0, 0]]));
    case("without its descriptor", ADD_MEM_REG, VERSION, 40, &mem_reg([0, 4096, 0, 0]));
    case("too short", REM_MEM_REG, VERSION, 32, &[0; 32]);
    for (name, payload) in [
        ("nothing asked", words(&[0, 0, 0])),
        ("less room than asked", words(&[0, 8, 0])),
        ("more room than asked", words(&[0, 4, 0, 0, 0])),
        ("past the end", [words(&[4093, 4, 0]), vec![0; 4]].concat()),
        ("past the end of numbers", [words(&[u32::MAX, 4, 0]), vec![0; 4]].concat()),
        ("flags", [words(&[0, 4, 4]), vec![0; 4]].concat()),
        ("too short", words(&[0, 4])),
    ] {
        case(name, GET_CONFIG, VERSION, payload.len() as u32, &payload);
        case(name, SET_CONFIG, VERSION, payload.len() as u32, &payload);
    }
    // Requests of features that were not offered.
    for request in [GET_QUEUE_NUM, 7, 19, 20, 22, 23, 26, 27, 28, 29, 30, 35, 39, 40, 44] {
        case("not offered", request, VERSION, 0, &[]);
    }
    case("more queues than there can be", GET_INFLIGHT_FD, VERSION, 24, &[1; 24]);
    case("not offered", 41, VERSION, 16, &[0; 16]);

    for (count, (name, bytes)) in (1..).zip(&cases) {
        let mut guest = rig.guest(0, SPLIT);
        guest.peer.send(bytes, &[]);
        assert!(guest.peer.ends(), "{name}: {:#?}", log_of(&rig.victim()).pop());
        assert!(
            guest.vrings.iter().all(Vring::failed),
            "{name}: its queues are stopped and their err descriptors signalled"
        );
        rig.expect_faults(count);
        let errors = log_of(&rig.victim()).into_iter().filter(|line| line.starts_with("ERROR"));
        assert_eq!(errors.filter(|line| line.ends_with("disconnected")).count() as u64, count, "{name}");
    }
    others.work();
    exchange(&mut rig.guest(0, SPLIT), &mut others.0);
}

#[test]
fn wrong_descriptors_with_messages() {
    let rig = Rig::new("fds");
    let mut others = rig.others();
    let file = memory(4096);
    let identity = identity(&file);
    let fds = vec![file.as_raw_fd(); 64];
    let region = [0x1000, 4096, 0x1000, 0];
    let cases: Vec<(&str, u32, Vec<u8>, usize)> = vec![
        ("one too many", GET_FEATURES, vec![], 1),
        ("one too many", SET_FEATURES, longs(&[SPLIT]), 1),
        ("one too many", SET_VRING_NUM, words(&[1, 64]), 1),
        ("one too many", SET_VRING_KICK, longs(&[1]), 2),
        ("one too many", SET_VRING_CALL, longs(&[1]), 2),
        ("one too many", SET_VRING_ERR, longs(&[1]), 32),
        ("one although it says none", SET_VRING_KICK, longs(&[1 | NO_FD]), 1),
        ("fewer than regions", SET_MEM_TABLE, mem_table(&[region, [0x2000, 4096, 0x2000, 0]]), 1),
        ("more than regions", SET_MEM_TABLE, mem_table(&[region]), 2),
        ("as many as fit, and no region", SET_MEM_TABLE, mem_table(&[]), 32),
        ("one too many", ADD_MEM_REG, mem_reg(region), 2),
        ("not offered", SET_LOG_BASE, longs(&[4096, 0]), 1),
        ("not a socket", GPU_SET_SOCKET, vec![], 1),
    ];
    for (name, request, payload, count) in &cases {
        let before = rig.faults();
        let mut guest = rig.guest(0, SPLIT);
        guest.peer.send(&message(*request, VERSION, payload.len() as u32, payload), &fds[..*count]);
        assert!(guest.peer.ends(), "{name}, request {request}");
        assert!(guest.vrings.iter().all(Vring::failed), "{name}, request {request}");
        rig.expect_faults(before + 1);
        assert!(within(PATIENCE, || held(identity) == (0, 1)), "{name}, request {request}: {:?}", held(identity));
    }
    logged(&rig.victim(), &["ERROR", "disconnected"]);
    // More descriptors than any receiver accepts: the kernel discards them, and the message with them; what follows is
    // malformed.
    for (request, payload) in [(SET_MEM_TABLE, mem_table(&[region; 32])), (SET_VRING_KICK, longs(&[1]))] {
        let mut peer = rig.peer(SPLIT);
        peer.send(&message(request, VERSION, payload.len() as u32, &payload), &fds);
        peer.send(&[0; 12], &[]);
        assert!(peer.ends(), "request {request}");
        assert!(within(PATIENCE, || held(identity) == (0, 1)), "request {request}: {:?}", held(identity));
    }
    others.work();
    exchange(&mut rig.guest(0, SPLIT), &mut others.0);
}

#[test]
fn vrings_out_of_range() {
    let rig = Rig::new("range");
    let mut others = rig.others();
    let kick = eventfd();
    for index in [3, 4, 255] {
        let mut guest = rig.guest(0, SPLIT);
        let address = longs(&[index, 4096, 8192, 12288, 0]);
        let state = words(&[index as u32, 1]);
        for (request, payload, fds) in [
            (SET_VRING_NUM, &state, vec![]),
            (SET_VRING_BASE, &state, vec![]),
            (SET_VRING_ENABLE, &state, vec![]),
            (SET_VRING_ADDR, &address, vec![]),
            (SET_VRING_KICK, &longs(&[index]), vec![kick.as_raw_fd()]),
            (SET_VRING_CALL, &longs(&[index]), vec![kick.as_raw_fd()]),
            (SET_VRING_ERR, &longs(&[index]), vec![kick.as_raw_fd()]),
            (SET_VRING_KICK, &longs(&[index | NO_FD]), vec![]),
        ] {
            let before = rig.faults();
            guest.peer.refused(request, payload, &fds);
            rig.expect_faults(before + 1);
            logged(&rig.victim(), &["ERROR", &format!("a message for vring {index}, expected 0 to 2")]);
        }
        exchange(&mut guest, &mut others.0);
        // GET_VRING_BASE has no error reply: the frontend would wait forever, so the connection ends.
        guest.peer.send(&message(GET_VRING_BASE, VERSION, 8, &state), &[]);
        assert!(guest.peer.ends());
    }
    let before = rig.faults();
    let mut peer = rig.peer(SPLIT);
    peer.refused(SET_VRING_NUM, &words(&[u32::MAX, 64]), &[]);
    rig.expect_faults(before + 1);
    others.work();
}

#[test]
fn refusals_without_reply_ack_end_the_connection() {
    let rig = Rig::new("untold");
    let mut others = rig.others();
    let mut peer = Peer::connect(&rig.socket(0));
    assert_ne!(peer.ask_u64(GET_FEATURES), 0);
    peer.send(&message(SET_FEATURES, VERSION, 8, &longs(&[1 << 63])), &[]);
    assert!(peer.ends());
    logged(&rig.victim(), &["ERROR", "not offered; refused"]);
    logged(&rig.victim(), &["frontend disconnected: a message was refused", "REPLY_ACK"]);
    rig.expect_faults(1);
    others.work();
}

#[test]
fn an_old_refusal_does_not_excuse_a_malformed_message() {
    let rig = Rig::new("excuse");
    let mut peer = rig.peer(SPLIT);
    assert_eq!(peer.ask_u64(CHECK_DEVICE_STATE), 1);
    peer.send(&message(SET_VRING_NUM, VERSION, 4, &[0; 4]), &[]);
    assert!(peer.ends());
}

#[test]
#[expect(clippy::too_many_lines, reason = "a list of cases")]
fn messages_out_of_order() {
    let rig = Rig::new("order");
    let mut others = rig.others();
    let kick = eventfd();
    let fd = kick.as_raw_fd();
    type Step = fn(&mut Peer, RawFd);
    // On a connection that has only negotiated features; it can be set up normally afterwards.
    let harmless: [(&str, Step); 8] = [
        ("kick before memory and addresses", |peer, fd| peer.ok(SET_VRING_KICK, &longs(&[1]), &[fd])),
        ("enable before anything", |peer, _| peer.ok(SET_VRING_ENABLE, &words(&[1, 1]), &[])),
        ("disable before anything", |peer, _| peer.ok(SET_VRING_ENABLE, &words(&[1, 0]), &[])),
        ("base of a ring that never ran", |peer, _| assert_eq!((peer.get_base(1), peer.get_base(1)), (0, 0))),
        ("base before memory", |peer, _| peer.ok(SET_VRING_BASE, &words(&[0, 7]), &[])),
        ("reset before anything", |peer, _| {
            peer.ok(RESET_DEVICE, &[], &[]);
            peer.ok(RESET_OWNER, &[], &[]);
            peer.ok(SET_OWNER, &[], &[]);
        }),
        ("addresses, size and kick, no memory", |peer, fd| {
            peer.ok(SET_VRING_ADDR, &longs(&[1, 4096, 8192, 12288, 0]), &[]);
            peer.ok(SET_VRING_NUM, &words(&[1, 64]), &[]);
            peer.ok(SET_VRING_KICK, &longs(&[1]), &[fd]);
            peer.refused(SET_VRING_ENABLE, &words(&[1, 1]), &[]);
        }),
        ("addresses and kick, no size", |peer, fd| {
            peer.ok(SET_VRING_ADDR, &longs(&[0, 4096, 8192, 12288, 0]), &[]);
            peer.ok(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
            peer.refused(SET_VRING_KICK, &longs(&[0]), &[fd]);
        }),
    ];
    for (name, step) in harmless {
        for acked in LAYOUTS {
            let mut peer = rig.peer(acked);
            step(&mut peer, fd);
            let mut guest = Guest::on(peer, acked, 64).again();
            eprintln!("{name}");
            exchange(&mut guest, &mut others.0);
        }
    }
    logged(&rig.victim(), &["ERROR", "queue 1: the descriptor area at 0x1000"]);
    logged(&rig.victim(), &["ERROR", "queue 0: invalid queue size 0"]);
    // On a fresh connection without features, these messages are not part of the protocol yet.
    for (request, payload) in [
        (SET_VRING_ENABLE, words(&[1, 1])),
        (RESET_DEVICE, vec![]),
        (GET_CONFIG, words(&[0, 4, 0, 0])),
        (GET_MAX_MEM_SLOTS, vec![]),
        (REM_MEM_REG, mem_reg([0; 4])),
    ] {
        let before = rig.faults();
        let mut peer = Peer::connect(&rig.socket(0));
        peer.send(&message(request, VERSION, payload.len() as u32, &payload), &[]);
        assert!(peer.ends(), "request {request}");
        rig.expect_faults(before + 1);
    }
    let mut peer = Peer::connect(&rig.socket(0));
    assert_eq!(peer.get_base(1), 0, "stopped, and no base was set");
    // Features and memory while queues run.
    let mut guest = {
        drop(peer);
        rig.guest(0, PACKED)
    };
    guest.peer.ok(SET_OWNER, &[], &[]);
    guest.peer.ok(SET_FEATURES, &longs(&[PACKED]), &[]);
    guest.set_memory();
    exchange(&mut guest, &mut others.0);
    others.work();
}
