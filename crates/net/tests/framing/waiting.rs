//! Frames without room at their receiver stay with their sender.

use super::*;
use ringroad_net::control::Queues;

/// No command here depends on queues.
struct NoQueues;

impl Queues for NoQueues {
    fn runs(&self, _index: u16) -> bool {
        false
    }

    fn counted(&self, _index: u16) -> Snapshot {
        Snapshot::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Frames that wait arrive once and in order, and are counted once, as is what is no frame, too long, or not wanted.
    #[test]
    fn what_waits_arrives_once_and_in_order(
        [sender, receiver] in [any_acked(), any_acked()],
        lens in prop::collection::vec(prop_oneof![0..40usize, 60..3000usize], 1..150),
        rooms in prop::collection::vec((0..9usize, 60..2500usize), 1..20),
        pieces in 1..4usize,
        unicast_only in any::<bool>(),
    ) {
        const LIMIT: usize = 2500;
        let mut from = Guest::new(sender, 512, 8, 1 << 20, None);
        let mut to = Guest::new(receiver, 64, 8, 8 << 20, None);
        let ((mut tx, sent), (mut rx, got)) = (from.tx(), to.rx());
        rx.limit(LIMIT);
        if unicast_only {
            let mut control = Control::new(bits::NET_F_CTRL_RX | bits::NET_F_CTRL_RX_EXTRA, MacAddr::local(1), 1);
            for command in [Command::Promiscuous(false), Command::AllUnicast(true)] {
                control.command(&command.bytes(), &NoQueues).unwrap();
            }
            rx.control(control.filter(), rx.support());
        }
        for (seed, &len) in lens.iter().enumerate() {
            let bytes = [&NOISE[..], &frame(seed, len)].concat();
            let buffers = from.buffers(&cut(bytes.len(), &[bytes.len().div_ceil(pieces)], 3), &bytes);
            from.ring.add(&buffers, &[]).unwrap();
        }
        from.ring.publish();
        let merge = receiver & bits::NET_F_MRG_RXBUF != 0;
        let fits = |len: usize| (14..=LIMIT).contains(&len);
        // The first byte of a frame is its number.
        let wanted = |seed: usize| !unicast_only || seed.is_multiple_of(2);
        let arrives = |(seed, len): &(usize, &usize)| fits(**len) && wanted(*seed);
        let mut expected = lens.iter().enumerate().filter(arrives).map(|(seed, &len)| frame(seed, len));
        let (mut burst, mut offered, mut idle, mut refused) = (Burst::default(), VecDeque::new(), 0, 0);
        for (count, size) in rooms.into_iter().chain([(3, 1000)]).cycle() {
            for _ in 0..count {
                // Without mergeable buffers each must hold the longest frame.
                let size = HEADER + if merge { size } else { LIMIT };
                let buffers = to.buffers(&[size], &[]);
                if to.next + 4096 > to.region.len() || to.ring.add(&[], &buffers).is_err() {
                    break;
                }
                offered.push_back(buffers);
            }
            to.ring.publish();
            let taken = tx.take(&mut burst).unwrap();
            if taken == 0 {
                break;
            }
            refused += burst.refused();
            let which: Vec<u8> = (0..burst.frames().len() as u8).collect();
            let handled = if which.is_empty() { 0 } else { rx.offer(&burst, &which).unwrap() };
            idle = if handled == 0 && !which.is_empty() { idle + 1 } else { 0 };
            prop_assert!(idle < 300, "no progress");
            if handled < which.len() {
                prop_assert!(rx.is_short());
                tx.retain(&mut burst, handled);
            } else {
                tx.done(&mut burst);
            }
            let mut used = [Used::default()];
            while to.ring.take_used(&mut used).unwrap() > 0 {
                let mut bytes = to.read(&offered.pop_front().unwrap());
                bytes.truncate(used[0].len as usize);
                for _ in 1..u16::from_le_bytes([bytes[10], bytes[11]]) {
                    prop_assert_eq!(to.ring.take_used(&mut used).unwrap(), 1);
                    let more = to.read(&offered.pop_front().unwrap());
                    bytes.extend(&more[..used[0].len as usize]);
                }
                let frame = expected.next();
                prop_assert_eq!(Some(&bytes[HEADER..]), frame.as_deref());
            }
        }
        prop_assert_eq!(expected.next(), None);
        let (sent, got) = (sent.snapshot(), got.snapshot());
        let frames: Vec<usize> = lens.iter().copied().filter(|&len| len >= 14).collect();
        prop_assert_eq!((sent.frames, sent.bytes), (frames.len() as u64, frames.iter().sum::<usize>() as u64));
        prop_assert_eq!((sent.runt, refused), ((lens.len() - frames.len()) as u64, lens.len() - frames.len()));
        let long = frames.iter().filter(|&&len| len > LIMIT).count();
        let unwanted = lens.iter().enumerate().filter(|&(seed, &len)| fits(len) && !wanted(seed)).count();
        let delivered = (frames.len() - long - unwanted) as u64;
        prop_assert_eq!((got.frames, got.oversize, got.filtered), (delivered, long as u64, unwanted as u64));
        prop_assert_eq!(got.full, 0);
        let mut used = vec![Used::default(); 512];
        prop_assert_eq!(from.ring.take_used(&mut used).unwrap(), lens.len());
    }
}

/// The driver kicks when it adds buffers beyond those that did not suffice, and is asked to only if it has added none.
#[test]
fn the_driver_says_when_it_has_more_buffers() {
    for acked in all_layouts().flat_map(|layout| [layout, layout | bits::EVENT_IDX]) {
        let acked = acked | bits::NET_F_MRG_RXBUF;
        let (mut from, mut to) = (Guest::plain(acked), Guest::plain(acked));
        let ((mut tx, _), (mut rx, counters)) = (from.tx(), to.rx());
        let mut burst = Burst::default();
        from.send(&[&[0; HEADER][..], &frame(1, 1000)].concat());
        // Each look finds a buffer of 300 bytes more; four hold the frame.
        for buffers in 0..4 {
            assert_eq!(tx.take(&mut burst), Ok(1));
            assert_eq!((rx.offer(&burst, &[0]), rx.is_short()), (Ok(0), true), "{buffers}");
            tx.retain(&mut burst, 0);
            assert!(!rx.enable_notification() && !rx.is_short(), "{buffers}");
            to.offer(&[300], 0);
            assert!(to.ring.wants_notification(), "{acked:x}, {buffers}");
            rx.disable_notification();
            assert!(!to.ring.wants_notification());
        }
        assert_eq!((tx.take(&mut burst), rx.offer(&burst, &[0])), (Ok(1), Ok(1)));
        tx.done(&mut burst);
        assert_eq!((counters.snapshot().frames, counters.snapshot().full), (1, 0));
        // Buffers that were added after the look, but before the driver was asked.
        from.send(&[&[0; HEADER][..], &frame(1, 1000)].concat());
        assert_eq!((tx.take(&mut burst), rx.offer(&burst, &[0])), (Ok(1), Ok(0)));
        to.offer(&[300], 0);
        assert!(rx.enable_notification());
        assert!(!to.ring.wants_notification(), "the request is withdrawn");
        // For a source that reads straight into the buffers, too.
        let poured = |rx: &mut RxQueue| {
            rx.fill(HEADER + 1000, &mut |spans| {
                assert_eq!(spans[0].write(&NOISE), HEADER);
                Some(HEADER + 60)
            })
        };
        assert_eq!((poured(&mut rx), rx.is_short()), (Ok(Poured::Full), true));
        assert!(!rx.enable_notification());
        to.offer(&[2000], 0);
        assert!(to.ring.wants_notification());
        assert!(matches!(poured(&mut rx), Ok(Poured::Frames(1..))));
    }
}

/// A ring with most of its buffers available will hardly ever have more: frames go another way.
#[test]
fn a_small_ring_is_not_waited_for() {
    for acked in all_layouts().map(|layout| layout | bits::NET_F_MRG_RXBUF) {
        let mut to = Guest::new(acked, 8, 8, 1 << 20, None);
        let (mut rx, _) = to.rx();
        for offered in 0..=8 {
            let poured = rx.fill(20_000, &mut |_| unreachable!("it has no room"));
            assert_eq!(poured, Ok(if offered < 4 { Poured::Full } else { Poured::Unable }), "{offered}");
            assert_eq!(rx.has_room(100), offered >= 4);
            if offered < 8 {
                to.offer(&[1500], 0);
            }
        }
    }
}
