//! Model checking of [`Sender`]: sending threads, the worker and the peer, in every order that loom explores. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p ringroad-vsock --test loom --release`.
//!
//! The ring is a list of packets with limited room that can be asked to report room. The worker behaves like the real one: it
//! runs when its bell is rung, by a sender that got `Effect::wake`, or by the peer if it was asked to. Once all threads are done,
//! the worker runs only while the bell is rung, so packets that wait with nobody to wake the worker are detected.
//!
//! What a thread does between two accesses to loom's locks and atomics is one atomic step. So the list can use an ordinary lock,
//! and its order is the order of events.
#![cfg(loom)]

#[path = "loom/world.rs"]
mod world;

use loom::sync::{Mutex, atomic::Ordering::Release};
use std::sync::Arc as StdArc;
use world::*;

/// Two connections send two packets each, one of them read from a host socket, while the worker flushes and the peer takes
/// packets. `queued`: numbers of packets sent through the outbox that must be observed.
fn all_arrive(direct: bool, room: usize, given: usize, preemptions: usize, queued: &[u32]) {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(preemptions), move || {
        let world = World::new(direct, room, 0);
        let conns = [Conn::new(1), Conn::new(2)];
        let [first, second] = conns.clone();
        let mut threads = vec![
            world.spawn(move |world| (0..2).for_each(|serial| world.send(&first, serial))),
            world.spawn(move |world| (0..2).for_each(|serial| world.fill(&second, serial))),
        ];
        if given > 0 {
            threads.push(world.spawn(move |world| world.give(given)));
        }
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish(&[&conns[0], &conns[1]]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1], vec![0, 1]));
        seen_in.add(world.0.sender.ways().queued as u32);
    });
    seen.assert(queued);
}

#[test]
fn all_arrive_with_enough_room() {
    all_arrive(true, 4, 0, 4, &[0, 1, 2, 3]);
}

#[test]
fn all_arrive_through_the_outbox() {
    all_arrive(false, 4, 0, 3, &[4]);
}

#[test]
fn all_arrive_with_room_for_one() {
    all_arrive(true, 1, 0, 3, &[3]);
}

#[test]
fn all_arrive_with_room_for_two() {
    all_arrive(true, 2, 0, 3, &[2, 3]);
}

#[test]
fn all_arrive_while_the_peer_makes_room() {
    all_arrive(true, 1, 2, 2, &[1, 2, 3]);
}

/// The first packet of a connection is queued behind another connection's, or not; the second one could be sent directly.
#[test]
fn a_connection_does_not_overtake_itself() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(4), move || {
        let world = World::new(true, 0, 0);
        let (one, other) = (Conn::new(1), Conn::new(2));
        world.send(&other, 0);
        world.give(3);
        let thread = {
            let one = one.clone();
            world.spawn(move |world| (0..2).for_each(|serial| world.send(&one, serial)))
        };
        world.work();
        thread.join().unwrap();
        world.finish(&[&one, &other]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1], vec![0]));
        seen_in.add(world.0.sender.ways().queued as u32);
    });
    // A packet is sent directly only if the worker has emptied the outbox before.
    seen.assert(&[1, 2, 3]);
}

/// What does not fit is queued while more is sent and the peer takes packets.
#[test]
fn split_packets_keep_their_order() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(3), move || {
        let world = World::new(true, 1, 0);
        let conns = [Conn::new(1), Conn::new(2)];
        let threads = [
            {
                let conn = conns[0].clone();
                world.spawn(move |world| {
                    world.send_all(&conn, &[0, 1]);
                    world.send_all(&conn, &[2, 3]);
                })
            },
            {
                let conn = conns[1].clone();
                world.spawn(move |world| {
                    world.give(1);
                    world.send_all(&conn, &[0, 1]);
                })
            },
        ];
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish(&[&conns[0], &conns[1]]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1, 2, 3], vec![0, 1]));
        seen_in.add(world.0.sender.ways().direct as u32);
    });
    seen.assert(&[1, 2]);
}

/// Two threads take turns sending packets of one connection, as threads of a program may.
#[test]
fn two_threads_of_a_connection_do_not_overtake_each_other() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(3), move || {
        let world = World::new(true, 0, 0);
        let (one, other) = (Conn::new(1), Conn::new(2));
        world.send(&other, 0);
        world.give(3);
        let sending = StdArc::new(Mutex::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (one, sending) = (one.clone(), sending.clone());
                world.spawn(move |world| {
                    let mut next = sending.lock().unwrap();
                    world.send(&one, *next);
                    *next += 1;
                })
            })
            .collect();
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish(&[&one, &other]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1], vec![0]));
        seen_in.add(world.0.sender.ways().queued as u32);
    });
    seen.assert(&[1, 2, 3]);
}

/// A queued control packet is sent before the queued data, except for the packet being moved at the time.
#[test]
fn control_packets_are_sent_before_data() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(None, move || {
        let world = World::new(true, 0, 0);
        let conn = Conn::new(1);
        (0..3).for_each(|serial| world.send(&conn, serial));
        world.give(3);
        let thread = {
            let conn = conn.clone();
            world.spawn(move |world| {
                world.send_control(Some(&conn), 0);
                world.ring().data(1).len()
            })
        };
        world.work();
        let before = thread.join().unwrap();
        world.finish(&[&conn]);
        let list = world.ring().list();
        let at = list.iter().position(|packet| packet.control).expect("the control packet was lost");
        assert!(at <= before + 1, "{} data packets before the control packet, but only {before} when it was sent", at);
        assert_eq!((list.len(), world.ring().data(1)), (4, vec![0, 1, 2]));
        seen_in.add(at as u32);
    });
    seen.assert(&[0, 1, 2, 3]);
}

/// A control packet is not queued twice, even if the worker puts one back after another was queued.
#[test]
fn a_control_packet_is_queued_once() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(None, move || {
        let world = World::new(true, 0, 0);
        let conn = Conn::new(1);
        world.send_control(Some(&conn), 0);
        let thread = {
            let conn = conn.clone();
            world.spawn(move |world| {
                world.ring().turn();
                world.send_control(Some(&conn), 1);
            })
        };
        world.work();
        thread.join().unwrap();
        world.finish(&[&conn]);
        let list = world.ring().list();
        assert_eq!(list.len(), 1, "{list:?}");
        seen_in.add(list[0].serial);
    });
    // The second one is kept only if it was queued while the worker held the first.
    seen.assert(&[0, 1]);
}

/// Data packets leave the last buffer to control packets, which do not wait for more buffers.
#[test]
fn control_packets_have_reserved_buffers() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(3), move || {
        let world = World::new(true, 1, 1);
        let conn = Conn::new(1);
        let threads = [
            {
                let conn = conn.clone();
                world.spawn(move |world| world.send(&conn, 0))
            },
            world.spawn(|world| world.send_control(None, 7)),
        ];
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.run();
        assert_eq!(world.ring().list(), [Packet { conn: 0, serial: 7, control: true, advertised: 0 }]);
        seen_in.add(world.0.sender.ways().direct as u32);
        world.finish(&[&conn]);
        assert_eq!(world.ring().data(1), [0]);
    });
    seen.assert(&[0, 1]);
}

/// Advertised credit never decreases in ring order, whichever thread puts the packets there.
#[test]
fn advertised_credit_never_decreases() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(4), move || {
        let world = World::new(true, 3, 0);
        let conn = Conn::with_credit(1);
        let read = |conn: &Conn| conn.0.advertised.as_ref().unwrap().fetch_add(1, Release);
        let threads = [
            {
                let conn = conn.clone();
                world.spawn(move |world| {
                    world.send(&conn, 0);
                    world.send(&conn, 1);
                })
            },
            {
                let conn = conn.clone();
                // A program that reads, and sends credit updates.
                world.spawn(move |world| {
                    read(&conn);
                    world.send_control(Some(&conn), 0);
                    read(&conn);
                })
            },
        ];
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish(&[&conn]);
        let list = world.ring().list();
        assert!(list.is_sorted_by_key(|packet| packet.advertised), "{list:?}");
        let update = list.iter().find(|packet| packet.control).expect("the control packet was lost");
        assert!(update.advertised > 0, "it was sent after the first read");
        seen_in.add(list[0].advertised);
        seen_in.add(3 + list[2].advertised - list[0].advertised);
    });
    seen.assert(&[0, 1, 2, 3, 4, 5]);
}

/// A connection is removed while the worker moves its packets and, if `sends`, another thread sends on it: packets of other
/// connections survive.
fn forget(room: usize, sends: bool, preemptions: Option<usize>) {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(preemptions, move || {
        let world = World::new(true, 0, 0);
        let (one, other) = (Conn::new(1), Conn::new(2));
        world.send(&one, 0);
        world.send(&other, 0);
        world.send(&one, 1);
        world.send_control(Some(&one), 0);
        world.give(room);
        let mut threads = vec![{
            let one = one.clone();
            world.spawn(move |world| {
                world.ring().turn();
                world.0.sender.forget(&one);
            })
        }];
        if sends {
            let one = one.clone();
            threads.push(world.spawn(move |world| {
                world.send(&one, 2);
                world.send_control(Some(&one), 1);
            }));
        }
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish(&[&other]);
        assert_eq!(world.ring().data(2), [0]);
        let data = world.ring().data(1);
        assert!(data.is_sorted_by(|a, b| a < b) && !data.starts_with(&[1]), "{data:?}");
        seen_in.add(data.len() as u32);
    });
    seen.assert(if sends { &[0, 1, 2, 3] } else { &[0, 1, 2] });
}

#[test]
fn a_connection_is_forgotten_while_the_ring_has_room() {
    forget(5, false, None);
}

#[test]
fn a_connection_is_forgotten_while_it_sends() {
    forget(5, true, Some(3));
}

#[test]
fn a_connection_is_forgotten_while_the_ring_is_full() {
    check(None, move || {
        let world = World::new(true, 0, 0);
        let (one, other) = (Conn::new(1), Conn::new(2));
        world.send(&one, 0);
        world.send(&other, 0);
        let thread = {
            let one = one.clone();
            world.spawn(move |world| {
                world.ring().turn();
                world.0.sender.forget(&one);
            })
        };
        // The worker takes the packet out, finds no room, and puts it back.
        world.work();
        thread.join().unwrap();
        world.finish(&[&other]);
        assert_eq!(world.ring().data(2), [0]);
        // The packet was removed from the outbox, or the worker held it and did not put it back.
        assert_eq!(world.ring().data(1), []);
    });
}

/// The outbox is cleared while the worker moves packets; packets sent later arrive.
fn clear(room: usize) {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(3), move || {
        let world = World::new(true, 0, 0);
        let (one, other, third) = (Conn::new(1), Conn::new(2), Conn::new(3));
        world.send(&one, 0);
        world.send(&one, 1);
        world.send_control(None, 0);
        world.give(room);
        let clears = {
            let other = other.clone();
            world.spawn(move |world| {
                world.ring().turn();
                world.0.sender.clear();
                let before = world.ring().list().len();
                world.send(&other, 0);
                before
            })
        };
        let sends = {
            let third = third.clone();
            world.spawn(move |world| world.send(&third, 0))
        };
        world.work();
        let before = clears.join().unwrap();
        sends.join().unwrap();
        world.finish(&[&other]);
        assert_eq!(world.ring().data(2), [0]);
        let later = world.ring().list().split_off(before);
        assert!(later.iter().all(|packet| packet.conn >= 2), "should have been dropped: {later:?}");
        let data = world.ring().data(1);
        assert!([0, 1].starts_with(&data), "{data:?}");
        assert!(world.ring().data(3).len() <= 1);
        seen_in.add(data.len() as u32);
        seen_in.add(3 + world.ring().data(3).len() as u32);
    });
    // All data packets or none: the worker holds the ring's lock for a whole flush.
    seen.assert(if room == 1 { &[0, 3, 4] } else { &[0, 2, 3, 4] });
}

#[test]
fn the_outbox_is_cleared_while_the_ring_has_room() {
    clear(5);
}

#[test]
fn the_outbox_is_cleared_while_the_ring_is_full() {
    clear(1);
}
