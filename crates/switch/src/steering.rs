//! Which queue of a port a flow goes to. Used by `delivery.rs`.

use ringroad_frame::Flow;
use std::{
    cell::{Cell, OnceCell},
    hash::{BuildHasher, RandomState},
};

/// Flows that are remembered: this many sets of so many, one set in one cache line.
const SETS: usize = 1024;
const WAYS: usize = 4;

/// The part of an entry that tells flows of one set apart; the rest of it is the queue.
const TAG: u32 = !0xff;

/// The receive queues of a port that has several: a flow goes to the queue whose transmit queue its frames last came from (virtio
/// 1.3, 5.1.6.5.6), as the driver has them on the CPU that works on the flow. A flow that nothing came from yet goes by its hash,
/// and so does one whose entry four others of its set have taken since.
pub(crate) struct Steering {
    seed: u64,
    /// By flow: the upper part of its hash, and the queue in the lowest byte; of a set, that which was noted last first. Zero: none,
    /// or what the hash would say as well. Allocated for ports with several queues.
    flows: OnceCell<Box<[[Cell<u32>; WAYS]]>>,
}

impl Steering {
    pub fn new() -> Steering {
        Steering { seed: RandomState::new().hash_one(0u8), flows: OnceCell::new() }
    }

    fn set(&self, flow: u32) -> impl Iterator<Item = &Cell<u32>> {
        let flows = self.flows.get_or_init(|| (0..SETS).map(|_| Default::default()).collect());
        flows.get(flow as usize % SETS).into_iter().flatten()
    }

    /// A frame of this flow came from the queue.
    pub fn note(&self, flow: &Flow, queue: usize) {
        self.note_hash(flow.hash(self.seed), queue);
    }

    fn note_hash(&self, flow: u32, queue: usize) {
        let Ok(queue) = u8::try_from(queue) else { return };
        let mut entry = flow & TAG | u32::from(queue);
        // To the front; others move back by one, as far as its place was, or a free one is.
        for place in self.set(flow) {
            let before = place.replace(entry);
            if before == 0 || (before ^ flow) & TAG == 0 {
                break;
            }
            entry = before;
        }
    }

    /// Returns the queue for a flow, one of the first `queues`. Frames of no flow go to the first one.
    pub fn queue(&self, flow: Option<Flow>, queues: usize) -> u8 {
        flow.map_or(0, |flow| self.queue_of_hash(flow.hash(self.seed), queues))
    }

    fn queue_of_hash(&self, flow: u32, queues: usize) -> u8 {
        let noted = self.set(flow).map(Cell::get).find(|noted| (noted ^ flow) & TAG == 0);
        match noted.map(|noted| noted as u8) {
            Some(queue) if usize::from(queue) < queues => queue,
            // In proportion to the hash.
            _ => ((u64::from(flow) * queues.min(256) as u64) >> 32) as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_stay_and_return_to_where_they_came_from() {
        let steering = Steering::new();
        assert_eq!(steering.queue(None, 4), 0);
        let flows = || (1..=1000u32).map(|flow| flow.wrapping_mul(0x9e37_79b9));
        let at = |flow: u32, queues| usize::from(steering.queue_of_hash(flow, queues));
        let mut counts = [0; 4];
        flows().for_each(|flow| counts[at(flow, 4)] += 1);
        assert!(counts.iter().all(|&count| count > 200), "{counts:?}");
        let flow = flows().next().unwrap();
        let elsewhere = (at(flow, 4) + 1) % 4;
        steering.note_hash(flow, elsewhere);
        assert_eq!(at(flow, 4), elsewhere);
        // Not if the driver has fewer queues by now.
        assert_eq!(at(flow, 1), 0);
    }

    #[test]
    fn a_set_remembers_the_last_four_flows_that_were_noted() {
        let steering = Steering::new();
        // All of one set, and none by its hash at the queue that is noted for it.
        let flows: Vec<u32> = (0..6).map(|index| 0x40 + index * 0x1000_0000).collect();
        let by_hash = |flow: u32| ((u64::from(flow) * 4) >> 32) as u8;
        let elsewhere = |flow: u32| (by_hash(flow) + 1) % 4;
        let remembered = || -> Vec<usize> {
            (0..flows.len()).filter(|&index| steering.queue_of_hash(flows[index], 4) != by_hash(flows[index])).collect()
        };
        let note = |index: usize| steering.note_hash(flows[index], elsewhere(flows[index]).into());
        (0..4).for_each(note);
        assert_eq!(remembered(), [0, 1, 2, 3]);
        // The one that was noted longest ago makes room, whether it came first or not.
        note(0);
        note(4);
        assert_eq!(remembered(), [0, 2, 3, 4]);
        note(2);
        note(5);
        assert_eq!(remembered(), [0, 2, 4, 5]);
        remembered().iter().for_each(|&index| {
            assert_eq!(steering.queue_of_hash(flows[index], 4), elsewhere(flows[index]), "flow {index}");
        });
        // From another queue by now: one entry, not two.
        (0..4).for_each(|_| steering.note_hash(flows[5], by_hash(flows[5]).into()));
        assert_eq!(remembered(), [0, 2, 4]);
    }

    #[test]
    fn every_hash_has_a_queue() {
        let steering = Steering::new();
        let at = |flow: u32, queues| usize::from(steering.queue_of_hash(flow, queues));
        (0..=u32::MAX).step_by(65_537).for_each(|flow| assert!(at(flow, 3) < 3));
    }
}
