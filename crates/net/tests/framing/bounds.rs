//! Buffers anywhere in memory, and what a frame and a burst may have.

use super::*;

/// A sender and a receiver that have all their memory in common, the sender's under a second address too.
fn in_one_memory(sent: u64, got: u64) -> (Guest, Guest, TxQueue, RxQueue, [Arc<Counters>; 2]) {
    let (mut from, mut to) = (Guest::plain(sent), Guest::at(2 * GUEST, got, 64, 8, 1 << 16, None));
    let alias = Region::map(&from.file, 0, from.region.len() as u64, 3 * GUEST, 3 * GUEST).unwrap();
    let all = from.memory.with(to.memory.regions()[0].clone()).unwrap().with(alias).unwrap();
    from.memory = Arc::new(all);
    to.memory = from.memory.clone();
    let ((tx, tx_counters), (rx, rx_counters)) = (from.tx(), to.rx());
    (from, to, tx, rx, [tx_counters, rx_counters])
}

#[test]
fn a_frame_may_be_received_where_it_was_sent_from() {
    let mut burst = Burst::default();
    for layout in all_layouts() {
        for len in [14, 19, 20, 60, 300, 1518, 9000] {
            for shift in [0, 1, 8, 12, 100, 2 * GUEST] {
                let (mut from, mut to, mut tx, mut rx, _) = in_one_memory(layout, layout);
                let sent = [&NOISE[..], &frame(len, len)].concat();
                let buffers = from.buffers(&[sent.len()], &sent);
                let there = Buffer { address: buffers[0].address + shift, ..buffers[0] };
                from.ring.add(&buffers, &[]).unwrap();
                from.ring.publish();
                to.ring.add(&[], &[there]).unwrap();
                to.ring.publish();
                assert_eq!(tx.take(&mut burst), Ok(1));
                assert_eq!(rx.put(&burst, &[0]), Ok(1));
                tx.done(&mut burst);
                let there = Buffer { address: buffers[0].address + shift % GUEST, ..there };
                let (now, expected) = (from.read(&[there]), received(&frame(len, len), 1));
                // Where both are the same; else its first bytes, and of the rest what the guest has brought on itself.
                let certain = if shift % GUEST == 0 { now.len() } else { now.len().min(ringroad_frame::HEAD) };
                assert_eq!(now[..certain], expected[..certain], "{len} bytes, shift {shift}");
            }
        }
    }
}

/// An address in any of the memory, rings and all, and a length.
fn anywhere() -> impl Strategy<Value = Buffer> {
    let offset = prop_oneof![0..5000u64, 0..80_000u64];
    (1..=3u64, offset, prop_oneof![1..=100u32, 1..=2000u32, 1..=70_000u32])
        .prop_map(|(part, offset, len)| Buffer { address: part * GUEST + offset, len })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    /// The guests' frames and buffers overlap each other, the rings, and themselves.
    #[test]
    fn buffers_anywhere_do_no_harm(
        sender in any_acked(),
        receiver in any_acked(),
        rounds in prop::collection::vec(
            prop::collection::vec((anywhere(), prop::option::of(anywhere()), anywhere()), 1..=32),
            1..6,
        ),
    ) {
        let (mut from, mut to, mut tx, mut rx, [sent, got]) = in_one_memory(sender, receiver);
        let mut burst = Burst::default();
        let (mut chains, mut frames) = (0, 0);
        for round in rounds {
            for (source, more, target) in round {
                let sources: Vec<Buffer> = [source].into_iter().chain(more).collect();
                // What the device has written over the rings, the driver end may stumble over.
                let _ = from.ring.add(&sources, &[]);
                let _ = to.ring.add(&[], &[target]);
            }
            from.ring.publish();
            to.ring.publish();
            let Ok(taken) = tx.take(&mut burst) else { break };
            chains += taken as u64;
            prop_assert!(taken <= BURST && burst.frames().len() <= taken);
            let all: Vec<u8> = (0..burst.frames().len() as u8).collect();
            match rx.put(&burst, &all) {
                Ok(put) => {
                    prop_assert!(put <= all.len());
                    frames += all.len() as u64;
                }
                Err(_) => break,
            }
            tx.done(&mut burst);
            let _ = from.ring.take_used(&mut [Used::default(); BURST]);
            let _ = to.ring.take_used(&mut [Used::default(); BURST]);
        }
        let (sent, got) = (sent.snapshot(), got.snapshot());
        prop_assert_eq!(sent.frames + sent.dropped(), chains);
        prop_assert_eq!(got.frames + got.dropped(), frames);
    }
}

/// What a port may send and receive is bounded by its MTU, on both sides, whatever path a frame takes.
#[test]
fn frames_longer_than_an_mtu_are_dropped_at_either_end() {
    for acked in all_layouts() {
        for tuning in [Tuning::default(), Tuning::NONE] {
            let (mut from, mut to) = (Guest::plain(acked), Guest::plain(acked));
            let ((mut tx, tx_counters), (mut rx, rx_counters)) = (from.tx(), to.rx());
            tx.tune(tuning);
            rx.tune(tuning);
            tx.limit(1522);
            rx.limit(1022);
            let buffers: Vec<_> = (0..8).map(|_| to.offer(&[2048], 0)).collect();
            // Of each limit one just within and one beyond; in one piece and in several.
            let lens = [1022, 1023, 1522, 1523, 60, 5000];
            for (seed, &len) in lens.iter().enumerate() {
                let bytes = [&[0; HEADER][..], &frame(seed, len)].concat();
                if seed % 2 == 0 {
                    from.send(&bytes);
                } else {
                    let buffers = from.buffers(&[HEADER, 14, len - 14], &bytes);
                    from.ring.add(&buffers, &[]).unwrap();
                    from.ring.publish();
                }
            }
            let mut burst = Burst::default();
            assert_eq!(tx.take(&mut burst), Ok(6), "all of them go back to the driver");
            assert_eq!((burst.frames().len(), burst.bound()), (4, 1522));
            assert_eq!(rx.put(&burst, &[0, 1, 2, 3]), Ok(2));
            tx.done(&mut burst);
            let sent = tx_counters.snapshot();
            assert_eq!((sent.frames, sent.oversize), (4, 2));
            let got = rx_counters.snapshot();
            assert_eq!((got.frames, got.oversize, got.full), (2, 2, 0));
            let mut used = [Used::default(); 8];
            let count = to.ring.take_used(&mut used).unwrap();
            let lens: Vec<_> = used[..count].iter().map(|used| used.len as usize - HEADER).collect();
            assert_eq!(lens, [1022, 60]);
            assert_eq!(to.read(&buffers[0])[..HEADER + 1022], received(&frame(0, 1022), 1));
            // What is read straight into the buffers, too.
            let mut lens = [1022, 1023, 60].into_iter();
            let filled = rx.fill(HEADER + 1522, &mut |spans| {
                spans[0].write(&NOISE);
                lens.next().map(|len| HEADER + len)
            });
            assert_eq!(filled, Ok(Poured::Frames(2)));
            assert_eq!(rx_counters.snapshot().oversize, 3);
        }
    }
}

/// A burst of long frames would take the time of many: what is too much for one waits, and the next bursts begin small.
#[test]
fn a_burst_has_so_many_bytes_and_no_more() {
    for acked in all_layouts() {
        let mut from = Guest::new(acked, 256, 8, 20 << 20, None);
        let (mut tx, counters) = from.tx();
        let (long, short) = (frame(1, 60_000), frame(2, 60));
        let header = [0; HEADER];
        (0..128).for_each(|_| from.send(&[&header[..], &short].concat()));
        (0..128).for_each(|_| from.send(&[&header[..], &long].concat()));
        let mut burst = Burst::default();
        let mut bursts = Vec::new();
        let mut frames = 0;
        while frames < 256 {
            let taken = tx.take(&mut burst).unwrap();
            assert!(taken > 0);
            let bytes: usize = burst.frames().iter().map(|frame| frame.len()).sum();
            assert!(bytes <= (256 << 10) + 60_000 && burst.is_heavy() == (bytes > 128 << 10), "{bytes}");
            let expected = |index: usize| if frames + index < 128 { 60 } else { 60_000 };
            assert!(burst.frames().iter().enumerate().all(|(index, frame)| frame.len() == expected(index)));
            frames += taken;
            bursts.push(taken);
            tx.done(&mut burst);
        }
        assert_eq!(bursts[..2], [BURST, BURST]);
        assert!(bursts[2..].iter().all(|&taken| taken <= 5), "{bursts:?}");
        let snapshot = counters.snapshot();
        assert_eq!((snapshot.frames, snapshot.bytes), (256, 128 * (60 + 60_000)), "each is counted once");
        // Short frames make full bursts again.
        from.next = from.region.len() / 2;
        let mut used = [Used::default(); 256];
        assert!(tx.take(&mut burst) == Ok(0) && from.ring.take_used(&mut used).unwrap() > 0);
        let mut sizes = Vec::new();
        (0..200).for_each(|_| from.send(&[&header[..], &short].concat()));
        while sizes.iter().sum::<usize>() < 200 {
            sizes.push(tx.take(&mut burst).unwrap());
            tx.done(&mut burst);
        }
        assert!(sizes.contains(&BURST), "{sizes:?}");
    }
}

/// Receive buffers in a thousand pieces each cost their own guest frames, and nobody time.
#[test]
fn a_receiver_with_buffers_in_many_pieces_gets_so_many_of_a_burst() {
    for packed in [false, true] {
        let acked = acked(&[(packed, bits::RING_PACKED), (true, bits::INDIRECT_DESC)]);
        let (mut from, mut to) = (Guest::plain(acked), Guest::new(acked, 1024, 1024, 4 << 20, None));
        let ((mut tx, _), (mut rx, counters)) = (from.tx(), to.rx());
        (0..64).for_each(|_| drop(to.offer(&[2; 900], 0)));
        (0..64).for_each(|seed| from.send(&[&[0; HEADER][..], &frame(seed, 1000)].concat()));
        let mut burst = Burst::default();
        assert_eq!(tx.take(&mut burst), Ok(64));
        let all: Vec<u8> = (0..64).collect();
        let placed = rx.put(&burst, &all).unwrap();
        assert!((2..=4).contains(&placed), "{placed}");
        let snapshot = counters.snapshot();
        assert_eq!((snapshot.frames, snapshot.full), (placed as u64, 64 - placed as u64));
        // The next burst begins where this one has ended.
        assert_eq!(rx.put(&burst, &all[..1]), Ok(1));
    }
}
