use super::*;
use crate::{RxQueue, TxQueue};
use ringroad_ring::{Inflight, Journal};
use ringroad_wire::ethernet::HEADER;

const LAYOUTS: [u64; 2] = [bits::VERSION_1, bits::VERSION_1 | bits::RING_PACKED];

/// A driver, the receive queue of its device, and bursts in both directions.
struct Rig {
    driver: SizedDriver,
    device: RxQueue,
    sender: Burst,
    receiver: Burst,
    memory: Arc<Table>,
    counters: Arc<Counters>,
}

impl Rig {
    fn new(acked: u64, queue_size: u32, sizing: Sizing) -> Rig {
        let driver = SizedDriver::new(SizedConfig { acked, queue_size, mtu: 1500, sizing }).unwrap();
        let memory = Arc::new(Table::default().with(driver.region.clone()).unwrap());
        let at = driver.rx.addresses();
        let base = RingFeatures::negotiated(acked).fresh_base();
        let device =
            RxQueue::resume(memory, acked, queue_size, at, base, Arc::default(), Journal::NONE, Inflight::NONE);
        let region = Region::private(BURST << 16, 0).unwrap();
        Rig {
            driver,
            device: device.unwrap().0,
            sender: Burst::default(),
            receiver: Burst::default(),
            memory: Arc::new(Table::default().with(region).unwrap()),
            counters: Arc::default(),
        }
    }

    /// The device sends frames of these lengths; returns how many it had buffers for.
    fn send(&mut self, frames: &[Vec<u8>]) -> usize {
        self.sender.start_in(&self.memory);
        for (index, frame) in frames.iter().enumerate() {
            let span = self.memory.regions()[0].span(index << 16, vnet_hdr::SIZE + frame.len()).unwrap();
            span.skip(vnet_hdr::SIZE).write(frame);
            self.sender.push_at((index << 16) as u64, span.len(), Default::default()).unwrap();
        }
        let all: Vec<u8> = (0..frames.len() as u8).collect();
        self.device.put(&self.sender, &all).unwrap()
    }

    /// The driver receives a burst, and keeps what is behind the first `keep` frames.
    fn receive_some(&mut self, keep: usize) -> Vec<Vec<u8>> {
        let rx = &mut self.driver.rx;
        let taken = rx.take(&mut self.receiver, &self.counters).unwrap();
        let frames = self.receiver.frames().len();
        let copy = |index: usize| {
            let mut bytes = vec![0; self.receiver.frames()[index].len()];
            assert_eq!(self.receiver.copy(index, 0, &mut bytes), bytes.len());
            bytes
        };
        let got = (0..frames.min(keep)).map(copy).collect();
        match taken {
            0 => rx.abandon(&mut self.receiver),
            _ if frames > keep => rx.retain(&mut self.receiver, keep, &self.counters),
            _ => rx.done(&mut self.receiver, &self.counters),
        }
        got
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.receive_some(usize::MAX)
    }
}

fn frame(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (number + at * 7) as u8).collect()
}

#[test]
fn frames_arrive_as_they_were_sent_whatever_the_buffers() {
    for layout in LAYOUTS {
        for sizing in [Sizing::Mtu, Sizing::Page, Sizing::Auto] {
            let mut rig = Rig::new(layout | bits::NET_F_MRG_RXBUF, 256, sizing);
            let mut number = 0;
            for round in 0..400 {
                let lens = [60, 1514, 64, HEADER, 9000, 20_000, 65_000, 300];
                let frames: Vec<_> = (0..1 + round % 5)
                    .map(|_| {
                        number += 1;
                        frame(number, lens[number * number % 8])
                    })
                    .collect();
                assert_eq!(rig.send(&frames), frames.len());
                assert_eq!(rig.receive(), frames, "round {round}, {sizing:?}");
                assert_eq!(rig.receive(), Vec::<Vec<u8>>::new());
            }
            let (held, counted) = (rig.driver.rx.held(), rig.counters.snapshot());
            assert_eq!((held.frames, held.bytes), (number as u64, counted.bytes));
            assert!(held.truesize >= held.bytes && counted.frames == held.frames && counted.dropped() == 0);
        }
    }
}

#[test]
fn buffers_follow_the_frames() {
    for layout in LAYOUTS {
        let lens = |sizing| {
            let mut rig = Rig::new(layout | bits::NET_F_MRG_RXBUF, 256, sizing);
            let least = rig.driver.rx.buffer_len();
            let mut after = |len: usize, count: usize| {
                for number in 0..count {
                    assert_eq!(rig.send(&[frame(number, len)]), 1);
                    assert_eq!(rig.receive().len(), 1);
                }
                rig.driver.rx.buffer_len()
            };
            (least, [after(1514, 100), after(60_000, 256), after(60, 300), after(2500, 600)])
        };
        assert_eq!(lens(Sizing::Mtu), (1536, [1536; 4]));
        assert_eq!(lens(Sizing::Page), (4096, [4096; 4]));
        let (least, [mtu, large, small, between]) = lens(Sizing::Auto);
        assert_eq!((least, mtu, large, small), (1536, 1536, PAGE, 1536), "within 256 frames");
        assert!((2432..=2624).contains(&between), "{between}");
    }
}

#[test]
fn the_average_follows_within_256_frames_and_settles() {
    let mut average = Average::new(1536);
    (0..256).for_each(|_| average.add(64_000));
    assert!(average.get() > 60_000);
    (0..256).for_each(|_| average.add(100));
    assert!(average.get() < 1536, "{}", average.get());
    (0..10_000).for_each(|_| average.add(1500));
    assert!((1490..=1500).contains(&average.get()), "{}", average.get());
}

#[test]
fn what_was_not_delivered_comes_again_in_order() {
    for layout in LAYOUTS {
        let mut rig = Rig::new(layout | bits::NET_F_MRG_RXBUF, 64, Sizing::Auto);
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for round in 0..500 {
            let frames: Vec<_> = (0..round % 4).map(|part| frame(round * 4 + part, 60 + round * 97 % 6000)).collect();
            let count = rig.send(&frames);
            sent.extend(frames.into_iter().take(count));
            got.extend(rig.receive_some(round % 3));
        }
        while got.len() < sent.len() {
            let more = rig.receive();
            assert!(!more.is_empty());
            got.extend(more);
        }
        assert!(got == sent && got.len() > 400, "{} of {}", got.len(), sent.len());
        assert_eq!(rig.counters.snapshot().frames, sent.len() as u64);
        assert_eq!(rig.driver.rx.held().frames, sent.len() as u64);
    }
}

#[test]
fn a_device_that_lies_harms_nobody() {
    // A header that promises more buffers than the ring has, none at all, and one that was never sent.
    for (claimed, arrive) in [(0, true), (1, true), (u16::MAX, false), (3, false)] {
        let mut rig = Rig::new(bits::VERSION_1 | bits::NET_F_MRG_RXBUF, 16, Sizing::Auto);
        assert_eq!(rig.send(&[frame(1, 100)]), 1);
        let place = rig.driver.rx.places[0].at + rig.driver.rx.base;
        rig.driver.region.span(place + 10, 2).unwrap().write(&claimed.to_le_bytes());
        assert_eq!(rig.receive().len(), usize::from(arrive), "{claimed}");
        assert!(!rig.driver.rx.enable_notification());
    }
    // Runts and offloads that were not negotiated are counted, also if they come twice because a frame before them stays.
    let mut rig = Rig::new(bits::VERSION_1 | bits::NET_F_MRG_RXBUF, 16, Sizing::Auto);
    assert_eq!(rig.send(&[frame(1, 100), frame(2, 100), frame(3, 100)]), 3);
    let place = rig.driver.rx.places[1].at + rig.driver.rx.base;
    rig.driver.region.span(place, 2).unwrap().write(&[1, 1]);
    assert_eq!(rig.receive_some(0).len(), 0);
    assert_eq!(rig.receive(), [frame(1, 100), frame(3, 100)]);
    let counted = rig.counters.snapshot();
    assert_eq!((counted.offload, counted.frames), (1, 2));
    // All buffers are available again.
    let many: Vec<_> = (0..16).map(|number| frame(number, 80)).collect();
    assert_eq!(rig.send(&many), 16);
    assert_eq!(rig.receive(), many);
}

#[test]
fn sent_frames_arrive_with_their_offloads() {
    for layout in LAYOUTS {
        let acked = layout | bits::NET_F_CSUM | bits::NET_F_HOST_TSO4;
        let mut rig = Rig::new(acked, 64, Sizing::Auto);
        let at = rig.driver.tx.addresses();
        let memory = Arc::new(Table::default().with(rig.driver.region.clone()).unwrap());
        let base = RingFeatures::negotiated(acked).fresh_base();
        let resumed =
            TxQueue::resume(memory, acked, 64, at, base, Arc::default(), Journal::NONE, Inflight::NONE).unwrap();
        let mut device = resumed.0;
        for round in 0..100 {
            let frames: Vec<_> = (0..10).map(|number| frame(round + number, 60 + number * 6000)).collect();
            rig.send(&[]);
            rig.sender.start_in(&rig.memory);
            for (index, frame) in frames.iter().enumerate() {
                let span = rig.memory.regions()[0].span(index << 16, vnet_hdr::SIZE + frame.len()).unwrap();
                span.skip(vnet_hdr::SIZE).write(frame);
                rig.sender.push_at((index << 16) as u64, span.len(), Default::default()).unwrap();
            }
            let all: Vec<u8> = (0..10).collect();
            assert_eq!(rig.driver.tx.put(&rig.sender, &all, Support::empty()), 10);
            rig.driver.tx.publish();
            assert_eq!(device.take(&mut rig.receiver).unwrap(), 10);
            for (index, frame) in frames.iter().enumerate() {
                let mut bytes = vec![0; rig.receiver.frames()[index].len()];
                rig.receiver.copy(index, 0, &mut bytes);
                assert_eq!(bytes, *frame);
            }
            device.done(&mut rig.receiver);
            device.take(&mut rig.receiver).unwrap();
            assert_eq!(rig.driver.tx.reclaim().unwrap(), 10);
        }
    }
}
