//! The device disconnects and returns: this project's driver resumes with everything in flight, and frontends that use
//! another order of messages find their rings where they were.

use crate::{
    LAYOUTS,
    common::{request::*, *},
};
use ringroad_host::vhost_user::{ConnectError, Connection, Connector, VhostConfig};
use ringroad_net::{Features, bits};
use ringroad_wire::ethernet::MacAddr;
use std::time::{Duration, Instant};

impl Rig {
    pub fn connector(&self, features: u64) -> Connector {
        Connector {
            socket: self.socket(0),
            listen: false,
            patience: PATIENCE,
            features,
            queue_pairs: 1,
            queue_size: 64,
            frame: 1518,
            huge: false,
        }
    }

    /// Stops port 0.
    pub fn end_device(&mut self) {
        drop(self.servers.remove(0));
    }

    /// Starts port 0 again, with these features.
    pub fn start_device(&mut self, features: Features) {
        let config = VhostConfig { features, ..config(&self.victim(), &self.socket(0)) };
        self.servers.insert(0, start_server(config, &self.worker).unwrap());
    }
}

const OURS: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x77]);

fn frame(to: MacAddr, number: u64) -> Vec<u8> {
    [&to.0[..], &OURS.0, &[0x88, 0xb5], &number.to_be_bytes(), &[7; 42]].concat()
}

/// Sends up to `count` frames, fewer if the ring is full.
fn send(connection: &mut Connection, to: MacAddr, next: &mut u64, count: usize) {
    let tx = &mut connection.driver.tx[0];
    while tx.reclaim().unwrap() > 0 {}
    tx.add(count, |_, place| {
        *next += 1;
        place.write(&frame(to, *next - 1))
    });
    tx.publish();
    connection.tx[0].kick();
}

/// Returns how many frames were received.
fn receive(connection: &mut Connection) -> usize {
    let mut frames = 0;
    while connection.driver.rx[0].receive(true, |_| frames += 1).unwrap() > 0 {}
    connection.rx[0].kick();
    frames
}

#[test]
fn the_driver_resumes_on_a_new_device() {
    for features in LAYOUTS.into_iter().flat_map(|layout| [layout, layout | bits::IN_ORDER | bits::EVENT_IDX]) {
        let mut rig = Rig::new(&format!("driver{features:x}"));
        let mut other = rig.guest(1, PACKED);
        let mut connection = rig.connector(features).connect().unwrap();
        assert_eq!(connection.acked, features);
        let (mut next, mut came) = (0, Vec::new());
        for round in 0..20 {
            // More frames than ring entries, so that the rings wrap and end at various positions.
            for _ in 0..1 + round % 3 {
                send(&mut connection, other.mac, &mut next, 50);
                assert!(within(PATIENCE, || {
                    came.extend(other.received(OURS));
                    came.last() == Some(&(next - 1))
                }));
                for _ in 0..7 {
                    other.send_to(OURS);
                }
                let mut frames = 0;
                assert!(within(PATIENCE, || {
                    frames += receive(&mut connection);
                    frames == 7
                }));
            }
            // It disconnects with frames in its rings that nobody has processed; more are added afterwards.
            let alive = round % 2 == 0;
            if alive {
                send(&mut connection, other.mac, &mut next, 16);
            }
            rig.end_device();
            assert!(within(PATIENCE, || connection.is_closed()));
            send(&mut connection, other.mac, &mut next, 16);
            rig.start_device(Features::all());
            connection.reconnect(PATIENCE).unwrap();
            assert!(!connection.is_closed());
            assert!(within(PATIENCE, || {
                let _ = connection.driver.tx[0].reclaim().unwrap();
                came.extend(other.received(OURS));
                connection.driver.tx[0].under_way() == 0 && came.last() == Some(&(next - 1))
            }));
        }
        // This device was stopped in an orderly way, so it has lost nothing either.
        assert_eq!(came, (0..next).collect::<Vec<_>>(), "{features:#x}");
        assert_eq!(connection.stop(), Some(0), "{features:#x}");
        assert_eq!(rig.faults(), 0);
    }
}

#[test]
fn a_device_that_lacks_features_in_use() {
    let mut rig = Rig::new("changed");
    let mut other = rig.guest(1, SPLIT);
    let mut connection = rig.connector(PACKED | bits::IN_ORDER).connect().unwrap();
    rig.end_device();
    rig.start_device(Features::all() - Features::IN_ORDER);
    let start = Instant::now();
    let error = connection.reconnect(PATIENCE).unwrap_err();
    assert!(start.elapsed() < PATIENCE, "waiting does not help, so it must fail at once");
    assert!(matches!(error, ConnectError::Changed { lacks: bits::IN_ORDER, .. }), "{error}");
    assert!(
        error.to_string().contains("start it with the same features as before, or open a new connection"),
        "{error}"
    );
    // The next device has them.
    rig.end_device();
    rig.start_device(Features::all());
    connection.reconnect(PATIENCE).unwrap();
    let mut next = 0;
    send(&mut connection, other.mac, &mut next, 16);
    assert!(other.receives(OURS, next - 1));
}

#[test]
fn a_device_that_does_not_return() {
    let mut rig = Rig::new("never");
    let mut connection = rig.connector(PACKED).connect().unwrap();
    rig.end_device();
    let start = Instant::now();
    let error = connection.reconnect(Duration::from_millis(100)).unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(100));
    assert!(matches!(error, ConnectError::Connect { .. }), "{error}");
    assert_eq!(connection.stop(), None, "no device reports what is missing");
}

/// As DPDK's driver in server mode: it disables vrings and asks for their bases before any negotiation; then it starts them
/// with the base of an unused ring.
#[test]
fn vrings_are_disabled_before_negotiation() {
    for features in LAYOUTS {
        let mut rig = Rig::new(&format!("early{features:x}"));
        let mut other = rig.guest(1, SPLIT);
        let mut guest = rig.guest(0, features);
        for _ in 0..5 {
            exchange(&mut guest, &mut other);
        }
        rig.end_device();
        rig.start_device(Features::all());
        guest.peer = Peer::connect(&rig.socket(0));
        for index in 0..2 {
            guest.peer.send(&message(SET_VRING_ENABLE, VERSION, 8, &words(&[index, 0])), &[]);
            guest.peer.get_base(index);
        }
        guest.peer.negotiate(features);
        guest.set_memory();
        for index in 0..2 {
            guest.prepare(index, guest.fresh());
            guest.peer.ok(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
        }
        exchange(&mut guest, &mut other);
        assert_eq!(rig.faults(), 0, "{:#?}", log_of(&rig.victim()));
        if features == PACKED {
            logged(&rig.victim(), &["INFO", "resumes at its recorded position"]);
        }
    }
    // A vring cannot be enabled before protocol features are negotiated.
    let rig = Rig::new("early");
    let mut peer = Peer::connect(&rig.socket(0));
    peer.send(&message(SET_VRING_ENABLE, VERSION, 8, &words(&[0, 1])), &[]);
    assert!(peer.ends());
}
