//! Frames and buffers of one shape each: faults, frames that are dropped, frames in many pieces.

use super::*;

#[test]
fn a_header_in_a_line_of_its_own_is_written_when_it_differs() {
    for acked in all_layouts() {
        let (mut from, mut to) = (Guest::plain(acked), Guest::plain(acked));
        let ((mut tx, _), (mut rx, _)) = (from.tx(), to.rx());
        let mut places = Vec::new();
        for there in [received(&[], 1), vec![UNTOUCHED; HEADER], vec![0; HEADER]] {
            to.next = to.next.next_multiple_of(64) + 64 - HEADER;
            places.push(to.offer(&[200], 0));
            to.write(places[places.len() - 1][0].address, &there);
            from.send(&[&NOISE[..], &frame(places.len(), 100)].concat());
        }
        let mut burst = Burst::default();
        assert_eq!(tx.take(&mut burst), Ok(3));
        assert_eq!(rx.put(&burst, &[0, 1, 2]), Ok(3));
        for (index, place) in places.iter().enumerate() {
            assert_eq!(to.read(place)[..HEADER + 100], received(&frame(index + 1, 100), 1));
        }
    }
}

/// What becomes of a burst of three good frames and then a chain that is none.
fn take_after_good(guest: &mut Guest, bad: impl FnOnce(&mut Guest)) -> (Fault, Snapshot) {
    let (mut tx, counters) = guest.tx();
    for seed in 0..3 {
        guest.send(&[&NOISE[..], &frame(seed, 60)].concat());
    }
    bad(guest);
    guest.send(&[0; 100]);
    let mut burst = Burst::default();
    assert_eq!(tx.take(&mut burst), Ok(3));
    for (seed, taken) in burst.frames().iter().enumerate() {
        assert_eq!(taken.ethernet(), &frame(seed, 60)[..taken.ethernet().len()]);
    }
    tx.done(&mut burst);
    let fault = tx.take(&mut burst).unwrap_err();
    assert_eq!(guest.ring.take_used(&mut [Used::default(); BURST]), Ok(3));
    assert_eq!(tx.take(&mut burst), Err(fault), "it stays the first one");
    assert!(burst.frames().is_empty());
    drop(tx);
    assert_eq!(Arc::strong_count(&guest.memory), 1, "nothing of the memory is kept");
    (fault, counters.snapshot())
}

#[test]
fn a_header_that_is_too_short_is_a_fault_after_the_frames_before_it() {
    for acked in all_layouts() {
        for len in [1, 11] {
            let mut guest = Guest::plain(acked);
            let (fault, counters) = take_after_good(&mut guest, |guest| guest.send(&vec![0; len]));
            assert!(
                matches!(fault, Fault::Header { len: found, needed: 12, .. } if found == len as u32),
                "{fault:?}, {len} bytes"
            );
            assert_eq!((counters.frames, counters.bytes, counters.dropped()), (3, 180, 0));
        }
    }
}

#[test]
fn a_writable_buffer_in_a_transmit_queue_is_a_fault_after_the_frames_before_it() {
    for acked in all_layouts() {
        for readable in [0, 1] {
            let mut guest = Guest::plain(acked);
            let (fault, counters) = take_after_good(&mut guest, |guest| {
                guest.offer(&[100, 100], readable);
            });
            assert!(matches!(fault, Fault::Writable { .. }), "{fault:?}, {readable} readable");
            assert_eq!((counters.frames, counters.bytes, counters.dropped()), (3, 180, 0));
        }
    }
}

/// A burst of `count` frames of 60 bytes.
fn burst_of(count: usize, len: usize) -> (Guest, TxQueue, Burst, Vec<u8>) {
    let mut guest = Guest::plain(acked(&[]));
    let (mut tx, _) = guest.tx();
    (0..count).for_each(|seed| guest.send(&[vec![0; HEADER], frame(seed, len)].concat()));
    let mut burst = Burst::default();
    assert_eq!(tx.take(&mut burst), Ok(count));
    (guest, tx, burst, (0..count as u8).collect())
}

#[test]
fn a_readable_or_short_receive_buffer_is_a_fault_after_the_frames_before_it() {
    for layout in all_layouts() {
        for merge in [0, bits::NET_F_MRG_RXBUF] {
            for (lens, readable, needed) in [(&[100, 100][..], 1, None), (&[100], 1, None), (&[4, 7], 0, Some(11))] {
                let (_sender, _tx, burst, all) = burst_of(4, 60);
                let mut guest = Guest::plain(layout | merge);
                let (mut rx, counters) = guest.rx();
                let good = [guest.offer(&[72], 0), guest.offer(&[71, 1], 0)];
                guest.offer(lens, readable);
                guest.offer(&[100], 0);
                assert_eq!(rx.put(&burst, &all), Ok(2));
                let mut used = [Used::default(); BURST];
                assert_eq!(guest.ring.take_used(&mut used), Ok(2));
                for (seed, buffers) in good.iter().enumerate() {
                    assert_eq!((guest.read(buffers), used[seed].len), (received(&frame(seed, 60), 1), 72));
                }
                // The two frames that met the fault are counted, those of the next burst are the caller's.
                let before = counters.snapshot();
                assert_eq!((before.frames, before.dropped(), before.stopped), (2, 2, 2));
                let fault = rx.put(&burst, &all).unwrap_err();
                match needed {
                    None => assert!(matches!(fault, Fault::Readable { .. }), "{fault:?}"),
                    Some(sum) => assert!(matches!(fault, Fault::Header { len, needed: 12, .. } if len == sum)),
                }
                assert_eq!(counters.snapshot(), before);
                assert_eq!(guest.ring.take_used(&mut used), Ok(0));
            }
        }
    }
}

#[test]
fn a_fault_in_the_middle_of_a_merged_frame_leaves_no_part_of_it() {
    for layout in all_layouts() {
        let (_sender, _tx, burst, all) = burst_of(1, 1000);
        let mut guest = Guest::plain(layout | bits::NET_F_MRG_RXBUF);
        let (mut rx, counters) = guest.rx();
        let first = guest.offer(&[500], 0);
        guest.offer(&[600], 1);
        assert!(matches!(rx.put(&burst, &all), Err(Fault::Readable { .. })));
        assert_eq!(guest.ring.take_used(&mut [Used::default(); 2]), Ok(0));
        assert!(guest.read(&first).iter().all(|&byte| byte == UNTOUCHED));
        assert_eq!(counters.snapshot(), Snapshot::default());
    }
}

#[test]
fn runts_and_oversize_are_dropped_and_counted() {
    for acked in all_layouts() {
        let mut guest = Guest::plain(acked);
        let (mut tx, counters) = guest.tx();
        let mut burst = Burst::default();
        for len in 12..=25 {
            guest.send(&vec![0; len]);
        }
        guest.send(&[0; 26]);
        guest.send(&vec![0; HEADER + MAX_FRAME]);
        guest.send(&vec![0; HEADER + MAX_FRAME + 1]);
        assert_eq!(tx.take(&mut burst), Ok(17));
        assert_eq!(burst.frames().iter().map(|frame| frame.len()).collect::<Vec<_>>(), [14, MAX_FRAME]);
        tx.done(&mut burst);
        assert_eq!(guest.ring.take_used(&mut [Used::default(); BURST]), Ok(17));
        let counters = counters.snapshot();
        assert_eq!((counters.frames, counters.runt, counters.oversize), (2, 14, 1));
        assert_eq!((counters.bytes, counters.dropped()), (14 + MAX_FRAME as u64, 15));
    }
}

#[test]
fn a_frame_in_more_pieces_than_a_burst_holds_is_oversize() {
    for packed in [false, true] {
        let acked = acked(&[(packed, bits::RING_PACKED)]);
        let mut guest = Guest::new(acked, 4096, 0, 1 << 20, None);
        let (mut tx, counters) = guest.tx();
        let mut burst = Burst::default();
        let bytes = [vec![0; HEADER], frame(7, 1013)].concat();
        for pieces in [1, 512, 513, 3] {
            let buffers = guest.buffers(&cut(bytes.len(), &[1], pieces), &bytes);
            guest.ring.add(&buffers, &[]).unwrap();
            guest.ring.publish();
        }
        // The second and the third have to wait for a burst of their own.
        let mut lens = Vec::new();
        for _ in 0..4 {
            let taken = tx.take(&mut burst).unwrap();
            lens.push((taken, burst.frames().len()));
            tx.done(&mut burst);
        }
        assert_eq!(lens, [(1, 1), (1, 1), (2, 1), (0, 0)]);
        assert_eq!((counters.snapshot().frames, counters.snapshot().oversize), (3, 1));
        assert_eq!(guest.ring.take_used(&mut [Used::default(); BURST]), Ok(4));
    }
}

#[test]
fn receive_buffers_in_many_pieces_take_a_whole_burst() {
    for packed in [false, true] {
        // More pieces than the device's own list holds at once, in chains that are all good.
        let (_sender, _tx, burst, all) = burst_of(32, 60);
        let mut guest = Guest::new(acked(&[(packed, bits::RING_PACKED)]), 4096, 0, 1 << 20, None);
        let (mut rx, counters) = guest.rx();
        let offered: Vec<_> = (0..40).map(|_| guest.offer(&[1; 80], 0)).collect();
        assert_eq!(rx.put(&burst, &all), Ok(32));
        assert_eq!(guest.ring.take_used(&mut [Used::default(); 64]), Ok(32));
        for (seed, buffers) in offered[..32].iter().enumerate() {
            assert_eq!(guest.read(&buffers[..72]), received(&frame(seed, 60), 1));
        }
        assert_eq!((counters.snapshot().frames, counters.snapshot().dropped()), (32, 0));
    }
}

#[test]
fn large_frames_that_need_more_buffers_than_fit_into_one_list_all_arrive() {
    for layout in all_layouts() {
        let (_sender, _tx, burst, all) = burst_of(8, 6000);
        let mut guest = Guest::new(layout | bits::NET_F_MRG_RXBUF, 1024, 0, 1 << 20, None);
        let (mut rx, counters) = guest.rx();
        let offered: Vec<_> = (0..8 * 61).map(|_| guest.offer(&[100], 0).remove(0)).collect();
        assert_eq!(rx.put(&burst, &all), Ok(8));
        let mut used = [Used::default(); 1024];
        assert_eq!(guest.ring.take_used(&mut used), Ok(8 * 61));
        for (seed, buffers) in offered.chunks(61).enumerate() {
            assert_eq!(guest.read(buffers)[..6012], received(&frame(seed, 6000), 61));
        }
        assert_eq!((counters.snapshot().frames, counters.snapshot().dropped()), (8, 0));
    }
}

#[test]
fn a_receive_buffer_in_too_many_pieces_holds_nothing_and_is_not_lost() {
    for merge in [0, bits::NET_F_MRG_RXBUF] {
        let (_sender, _tx, burst, all) = burst_of(3, 60);
        let mut guest = Guest::new(acked(&[]) | merge, 2048, 0, 1 << 20, None);
        let (mut rx, counters) = guest.rx();
        guest.offer(&[1; 1025], 0);
        guest.offer(&[1000], 0);
        assert_eq!(rx.put(&burst, &all), Ok(0));
        assert_eq!(guest.ring.take_used(&mut [Used::default(); 2]), Ok(0));
        assert_eq!((counters.snapshot().oversize, counters.snapshot().dropped()), (3, 3));
    }
}
