//! Which queue of a port a flow goes to. Used by `delivery.rs`.

use ringroad_frame::Flow;
use std::{
    cell::{Cell, OnceCell},
    hash::{BuildHasher, RandomState},
};

/// Flows that are remembered: a power of two.
const FLOWS: usize = 4096;

/// The receive queues of a port that has several: a flow goes to the queue whose transmit queue its frames last came from (virtio
/// 1.3, 5.1.6.5.6), as the driver has them on the CPU that works on the flow. A flow that nothing came from yet goes by its hash.
pub(crate) struct Steering {
    seed: u64,
    /// By flow: the upper part of its hash, and the queue in the lowest byte; zero: none. Allocated for ports with several queues.
    flows: OnceCell<Box<[Cell<u32>]>>,
}

impl Steering {
    pub fn new() -> Steering {
        Steering { seed: RandomState::new().hash_one(0u8), flows: OnceCell::new() }
    }

    fn place(&self, flow: u32) -> Option<&Cell<u32>> {
        let flows = self.flows.get_or_init(|| (0..FLOWS).map(|_| Cell::new(0)).collect());
        flows.get(flow as usize % FLOWS)
    }

    /// A frame of this flow came from the queue.
    pub fn note(&self, flow: &Flow, queue: usize) {
        self.note_hash(flow.hash(self.seed), queue);
    }

    fn note_hash(&self, flow: u32, queue: usize) {
        if let (Some(place), Ok(queue)) = (self.place(flow), u8::try_from(queue)) {
            place.set(flow & !0xff | u32::from(queue));
        }
    }

    /// Returns the queue for a flow, one of the first `queues`. Frames of no flow go to the first one.
    pub fn queue(&self, flow: Option<Flow>, queues: usize) -> u8 {
        flow.map_or(0, |flow| self.queue_of_hash(flow.hash(self.seed), queues))
    }

    fn queue_of_hash(&self, flow: u32, queues: usize) -> u8 {
        let noted = self.place(flow).map(Cell::get).filter(|noted| *noted != 0 && (noted ^ flow) & !0xff == 0);
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
        // Another flow with the same place takes it, and is not mistaken for the first.
        let other = flow ^ 0x8000_0000;
        assert_eq!(other as usize % FLOWS, flow as usize % FLOWS);
        assert_ne!(at(other, 4), 9);
        steering.note_hash(other, 3);
        assert_eq!((at(other, 4), at(flow, 4)), (3, ((u64::from(flow) * 4) >> 32) as usize));
        (0..=u32::MAX).step_by(65_537).for_each(|flow| assert!(at(flow, 3) < 3));
    }
}
