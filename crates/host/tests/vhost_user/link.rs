//! The status field of the configuration space: a link that goes down and up, drivers that announce themselves, and frontends that
//! are told.

use crate::{
    LAYOUTS,
    common::{request::*, *},
};
use ringroad_host::vhost_user::{Attach, AttachedPort, Connection};
use ringroad_net::{Config, Features, bits, control::Command};
use std::{
    io::Read,
    os::{fd::AsRawFd, unix::net::UnixStream},
    time::Instant,
};

const TOLD: u64 = bits::NET_F_STATUS | bits::NET_F_CTRL_VQ | bits::NET_F_GUEST_ANNOUNCE;

fn space(connection: &mut Connection) -> (bool, bool) {
    let Config { link_up, announce, .. } = connection.config().unwrap().unwrap();
    (link_up, announce)
}

#[track_caller]
fn is_told(connection: &mut Connection) {
    assert!(within(PATIENCE, || connection.config_changed()), "the frontend was not told");
}

#[test]
fn frames_pass_while_the_link_is_up() {
    for layout in LAYOUTS {
        let rig = Rig::new(&format!("link{layout:x}"));
        let (mut guest, mut other) = (rig.guest(0, layout), rig.guest(1, SPLIT));
        exchange(&mut guest, &mut other);
        rig.servers[0].set_link(false);
        rig.servers[0].set_link(false);
        let (mine, theirs) = (guest.mac, other.mac);
        for _ in 0..5 {
            guest.send_to(theirs);
            other.send_to(mine);
        }
        let lost = || [rig.report(0).received.stopped, rig.report(0).sent.stopped];
        assert!(within(PATIENCE, || lost() == [5, 5]), "{:?}", lost());
        assert_eq!(rig.report(0).received.oversize + rig.report(0).sent.oversize, 0);
        // A queue that starts meanwhile is down, too.
        for index in 0..2 {
            let base = guest.peer.get_base(index);
            guest.prepare(index, base);
        }
        other.send_to(mine);
        assert!(within(PATIENCE, || lost() == [5, 6]), "{:?}", lost());
        rig.servers[0].set_link(true);
        exchange(&mut guest, &mut other);
        assert_eq!((lost(), rig.faults()), ([5, 6], 0));
    }
}

#[test]
fn the_driver_is_told_of_its_link_and_announces_itself() {
    for layout in LAYOUTS {
        let mut rig = Rig::new(&format!("link-told{layout:x}"));
        let mut connection = rig.connector(layout | TOLD).connect().unwrap();
        assert_eq!(space(&mut connection), (true, false));
        assert!(!connection.config_changed(), "nothing has changed");
        rig.servers[0].set_link(false);
        is_told(&mut connection);
        assert_eq!(space(&mut connection), (false, false));
        rig.servers[0].set_link(true);
        is_told(&mut connection);
        assert_eq!(space(&mut connection), (true, false), "first it learns that the link is up");
        is_told(&mut connection);
        assert_eq!(space(&mut connection), (true, true), "then it is asked");
        connection.command(&Command::Announced, PATIENCE).unwrap();
        assert_eq!(space(&mut connection), (true, false));
        assert!(!connection.config_changed());
        // It is asked after its device was away, too, but not when it starts over.
        connection.driver.tx[0].add(1, |_, place| place.write(&[2; 60]));
        connection.driver.tx[0].publish();
        connection.tx[0].kick();
        assert!(within(PATIENCE, || connection.driver.tx[0].reclaim().unwrap() == 1));
        rig.end_device();
        rig.start_device(Features::all());
        connection.reconnect(PATIENCE).unwrap();
        is_told(&mut connection);
        assert_eq!(space(&mut connection), (true, true));
        drop(connection);
        let mut connection = rig.connector(layout | TOLD).connect().unwrap();
        assert_eq!(space(&mut connection), (true, false));
        assert_eq!(rig.faults(), 0);
    }
}

#[test]
fn a_driver_without_the_feature_is_not_asked() {
    let rig = Rig::new("link-silent");
    let mut connection = rig.connector(SPLIT | TOLD).connect().unwrap();
    let mut without = {
        connection.stop();
        drop(connection);
        let mut peer = rig.peer(SPLIT | Features::STATUS.bits());
        let (ours, theirs) = UnixStream::pair().unwrap();
        peer.ok(SET_BACKEND_REQ_FD, &[], &[theirs.as_raw_fd()]);
        (Guest::on(peer, SPLIT, 64), ours)
    };
    without.0.start_all();
    let status =
        |guest: &mut Guest| guest.peer.ask(GET_CONFIG, &[&words(&[6, 2, 0])[..], &[0; 2]].concat())[12..].to_vec();
    assert_eq!(status(&mut without.0), [1, 0]);
    for up in [false, true] {
        rig.servers[0].set_link(up);
        let mut message = [0; 12];
        without.1.read_exact(&mut message).unwrap();
        assert_eq!(message, words(&[2, 1, 0])[..], "BACKEND_CONFIG_CHANGE_MSG, version 1, no payload");
        assert_eq!(status(&mut without.0), [u8::from(up), 0]);
    }
    without.1.set_nonblocking(true).unwrap();
    assert!(without.1.read(&mut [0]).is_err(), "it does not announce itself");
}

#[test]
fn a_port_that_drives_a_device_knows_its_link() {
    let rig = Rig::new("link-attached");
    rig.servers[0].set_link(false);
    let attach = Attach { socket: rig.socket(0), ..Attach::default() };
    let port = AttachedPort::connect(&attach).unwrap();
    assert!(!port.link());
    for up in [true, false, true] {
        rig.servers[0].set_link(up);
        assert!(within(PATIENCE, || port.link() == up));
        assert!(!port.is_closed());
    }
    drop(port);
    // Without the feature it is up, whatever the device says.
    let features = attach.features - Features::STATUS;
    let port = AttachedPort::connect(&Attach { features, ..attach }).unwrap();
    rig.servers[0].set_link(false);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(port.link());
    assert_eq!(rig.faults(), 0);
}

#[test]
fn a_frontend_that_does_not_read_is_not_waited_for() {
    let rig = Rig::new("link-deaf");
    let mut others = rig.others();
    let mut peer = rig.peer(SPLIT);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    // It could make a write block.
    set_blocking(&theirs);
    peer.ok(SET_BACKEND_REQ_FD, &[], &[theirs.as_raw_fd()]);
    let start = Instant::now();
    (0..10_000).for_each(|count| rig.servers[0].set_link(count % 2 == 1));
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    others.work();
    ours.set_nonblocking(true).unwrap();
    let mut bytes = [0; 64];
    assert_eq!(ours.read(&mut bytes).unwrap(), 12, "one message says all");
    rig.servers[0].set_link(false);
    assert!(within(PATIENCE, || ours.read(&mut bytes).is_ok_and(|len| len == 12)));
    // It can close its end, and hand over another one.
    drop((ours, theirs));
    rig.servers[0].set_link(true);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    peer.ok(SET_BACKEND_REQ_FD, &[], &[theirs.as_raw_fd()]);
    rig.servers[0].set_link(false);
    ours.read_exact(&mut bytes[..12]).unwrap();
    assert_eq!(rig.faults(), 0);
}

#[test]
fn channels_that_are_none() {
    let rig = Rig::new("link-channel");
    let mut peer = rig.peer(SPLIT);
    let (pipe, _writer) = std::io::pipe().unwrap();
    for file in [memory(4096), file_of(&eventfd()), file_of(&pipe)] {
        peer.refused(SET_BACKEND_REQ_FD, &[], &[file.as_raw_fd()]);
    }
    peer.refused(SET_BACKEND_REQ_FD, &[], &[]);
    rig.expect_faults(4);
    logged(&rig.victim(), &["ERROR", "the back-end request descriptor", "expected a Unix stream socket"]);
    // The channel ends with the connection.
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    peer.ok(SET_BACKEND_REQ_FD, &[], &[theirs.as_raw_fd()]);
    drop((peer, theirs));
    assert_eq!(ours.read(&mut [0]).unwrap(), 0);
    // Without the protocol feature the message is a violation.
    let mut peer = Peer::connect(&rig.socket(0));
    peer.send(&message(SET_OWNER, VERSION, 0, &[]), &[]);
    peer.send(&message(SET_BACKEND_REQ_FD, VERSION, 0, &[]), &[ours.as_raw_fd()]);
    assert!(peer.ends());
}
