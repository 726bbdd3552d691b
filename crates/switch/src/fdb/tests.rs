use super::*;

#[test]
fn learns_moves_ages_and_forgets() {
    let mut fdb = Fdb::new(64, 300);
    let (a, b) = (MacAddr::local(1), MacAddr::local(2));
    assert_eq!(fdb.lookup(a, 0), None);
    assert_eq!((fdb.learn(a, 3, 10), fdb.learn(b, 4, 10)), (Learned::Known, Learned::Known));
    assert_eq!((fdb.lookup(a, 309), fdb.lookup(a, 310)), (Some(3), None));
    assert_eq!(fdb.learn(a, 5, 200), Learned::Moved(3));
    assert_eq!((fdb.lookup(a, 499), fdb.lookup(b, 11)), (Some(5), Some(4)));
    fdb.forget(5);
    assert_eq!((fdb.lookup(a, 200), fdb.lookup(b, 200)), (None, Some(4)));
    assert_eq!(MacAddr([0; 6]).to_u64(), 0);
    assert_eq!(fdb.lookup(MacAddr([0; 6]), 0), None, "an empty entry is no address");
}

#[test]
fn an_address_that_is_in_use_stays_and_its_first_port_gets_it_back() {
    let mut fdb = Fdb::new(64, 300).with_hold(2);
    let a = MacAddr::local(1);
    for now in 0..100 {
        assert_eq!(fdb.learn(a, 1, now), Learned::Known);
        assert_eq!(fdb.learn(a, 2, now), Learned::Held(1));
        assert_eq!(fdb.lookup(a, now), Some(1));
    }
    assert_eq!(fdb.learn(a, 2, 100), Learned::Held(1));
    assert_eq!(fdb.learn(a, 2, 101), Learned::Moved(1), "nothing came from the other one for two seconds");
    assert_eq!(fdb.learn(a, 3, 101), Learned::Held(2));
    assert_eq!(fdb.learn(a, 1, 101), Learned::Moved(2), "it was there first");
    // Once the first one is gone, or has been silent until the address aged, it is where it is.
    assert_eq!(fdb.learn(a, 2, 200), Learned::Moved(1));
    fdb.forget(1);
    assert_eq!(fdb.learn(a, 1, 200), Learned::Held(2));
    assert_eq!(fdb.learn(a, 3, 500), Learned::Known);
    assert_eq!(fdb.learn(a, 2, 500), Learned::Held(3));
}

#[test]
fn a_ports_own_address_never_leaves_it() {
    // One bucket, so that the fifth one makes the table grow.
    let mut fdb = Fdb::new(1, 300).with_hold(0);
    let own = MacAddr::local;
    assert_eq!(fdb.learn(own(1), 99, 0), Learned::Known);
    for port in 1..=20 {
        assert_eq!(fdb.admit(port, 1, Some(own(port))), Ok(()));
    }
    for now in [0, 1000, 1_000_000] {
        for port in 1..=20 {
            assert_eq!(fdb.learn(own(port), 99, now), Learned::Owned(port));
            fdb.forget(port);
            assert_eq!(fdb.lookup(own(port), now), Some(port));
            assert_eq!(fdb.learn(own(port), port, now), Learned::Known);
        }
    }
    assert_eq!(fdb.admit(99, 1, Some(own(3))), Err(3));
    fdb.remove(3);
    assert_eq!(fdb.lookup(own(3), 0), None);
    assert_eq!((fdb.admit(99, 1, Some(own(3))), fdb.lookup(own(3), 0)), (Ok(()), Some(99)));
    assert_eq!((fdb.admit(99, 1, None), fdb.lookup(own(3), 0)), (Ok(()), None));
}

#[test]
fn a_port_has_its_share_and_others_find_room_whatever_it_does() {
    for ports in [2, 10, 100] {
        let mut fdb = Fdb::new(64, 300);
        (0..ports).for_each(|port| fdb.admit(port, 256, None).unwrap());
        assert!(fdb.capacity() >= 512 * ports as usize);
        // All but the last one use all they can get.
        for number in 0..1000 {
            for port in 1..ports {
                fdb.learn(MacAddr::local(port << 16 | number), port, 0);
            }
        }
        let known = fdb.len(0);
        assert!(known <= 256 * (ports as usize - 1) && known >= 230 * (ports as usize - 1), "{known}");
        for number in 0..64 {
            let address = MacAddr::local(number);
            assert_eq!(fdb.learn(address, 0, 0), Learned::Known, "{number} of {ports}");
            assert_eq!(fdb.lookup(address, 0), Some(0));
        }
        // Nor does the others' noise push it out.
        for number in 1000..2000 {
            for port in 1..ports {
                fdb.learn(MacAddr::local(port << 16 | number), port, 1);
            }
        }
        assert!((0..64).all(|number| fdb.lookup(MacAddr::local(number), 1) == Some(0)));
    }
}

#[test]
fn a_share_that_was_used_up_is_there_again_when_it_has_aged() {
    let mut fdb = Fdb::new(4096, 300);
    fdb.admit(1, 256, None).unwrap();
    // More than its share, as both buckets of an address may be full.
    let fill = |fdb: &mut Fdb, from: u32, now| {
        (from..from + 400).filter(|&number| fdb.learn(MacAddr::local(number), 1, now) == Learned::Known).count()
    };
    assert_eq!(fill(&mut fdb, 0, 0), 256);
    assert_eq!(fdb.learn(MacAddr::local(500), 1, 299), Learned::Crowded);
    // A few places are looked at with each.
    let tries = (0..2000).take_while(|_| fdb.learn(MacAddr::local(600), 1, 300) == Learned::Crowded).count();
    assert!(tries < 100, "{tries}");
    fdb.forget(1);
    assert_eq!(fill(&mut fdb, 1000, 300), 256);
}

#[test]
fn is_bounded_and_an_attacker_pushes_nobody_out() {
    for entries in [1, 4, 100, 4096] {
        let mut fdb = Fdb::new(entries, 300);
        let friend = MacAddr::local(0xff_ffff);
        fdb.learn(friend, 1, 0);
        let refused = (0..100_000).filter(|&i| fdb.learn(MacAddr::local(i), 2, 1) == Learned::Crowded).count();
        assert_eq!(fdb.lookup(friend, 2), Some(1));
        assert!(fdb.len(2) <= entries.next_power_of_two().max(4));
        assert!(refused > 90_000);
        // Once they have aged, there is room again.
        fdb.learn(MacAddr::local(0xee_eeee), 3, 301);
        assert_eq!(fdb.lookup(MacAddr::local(0xee_eeee), 301), Some(3));
    }
}

#[test]
fn keeps_what_it_knows_when_it_is_changed() {
    let mut fdb = Fdb::new(4096, 300);
    (0..100).for_each(|i| _ = fdb.learn(MacAddr::local(i), i, i));
    fdb.set(4096, 150, 2);
    assert_eq!((fdb.len(99), fdb.lookup(MacAddr::local(7), 157)), (100, None));
    fdb.set(1 << 16, 300, 2);
    for i in 0..100 {
        assert_eq!(fdb.lookup(MacAddr::local(i), 100), Some(i));
        assert_eq!(fdb.lookup(MacAddr::local(i), i + 300), None, "it is as old as it was");
    }
    fdb.set(16, 300, 2);
    assert!((4..=16).contains(&fdb.len(100)), "{}", fdb.len(100));
}

#[test]
fn spreads() {
    let mut fdb = Fdb::new(4096, 300);
    for i in 0..1024 {
        fdb.learn(MacAddr::local(i), 1, 0);
    }
    assert!(fdb.len(0) > 900, "{}", fdb.len(0));
}

#[test]
fn addresses_in_sequence_find_room_whatever_the_seeds() {
    for _ in 0..2000 {
        let mut fdb = Fdb::new(4096, 300);
        for byte in 0..6 {
            let address = |number| {
                let mut address = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
                address[byte] = number;
                MacAddr(address)
            };
            let known = (0..12).all(|number| fdb.learn(address(number), 1, 0) == Learned::Known);
            assert!(known && fdb.len(0) == 12, "byte {byte}, seeds {:x?}", fdb.seeds);
            fdb.forget(1);
        }
    }
}
