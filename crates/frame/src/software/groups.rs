//! What becomes of a burst's frames when TCP segments are coalesced: their heads, read once, and the plan. Used by `coalesced.rs`.

use crate::{
    BURST, Burst, MAX_FRAME, Offload,
    offload::{
        HEADERS, Support, checksum,
        coalesce::{Group, Head, Plan, is_tcp},
    },
};

/// What is known of the frames of a burst, and what becomes of them.
pub(crate) struct Coalescing {
    pub plan: Plan,
    /// The first bytes of each frame, read once.
    heads: Box<[[u8; HEADERS]; BURST]>,
    /// How many bytes of each are in use, the length of the frame, and what is left to do to it.
    known: [(usize, usize, Offload); BURST],
    count: usize,
}

impl Default for Coalescing {
    fn default() -> Coalescing {
        let heads = Box::new([[0; HEADERS]; BURST]);
        Coalescing { plan: Plan::default(), heads, known: [(0, 0, Offload::NONE); BURST], count: 0 }
    }
}

impl Coalescing {
    /// Reads these frames and plans for a receiver with this support. `scratch` has room for one frame. Returns whether any frames
    /// become one.
    pub fn plan(&mut self, burst: &Burst, which: &[u8], support: Support, scratch: &mut [u8]) -> bool {
        self.count = 0;
        for ((&index, head), known) in which.iter().zip(&mut *self.heads).zip(&mut self.known) {
            let index = usize::from(index);
            let (used, len) = (burst.copy(index, 0, head), burst.frames().get(index).map_or(0, |frame| frame.len()));
            let mut offload = burst.offload(index);
            if offload.is_none()
                && is_tcp(head.get(..used).unwrap_or_default())
                && let Some(frame) = scratch.get_mut(..len)
            {
                // Its receiver will not do it.
                burst.copy(index, 0, frame);
                offload = checksum::verify(frame);
            }
            *known = (used, len, offload);
            self.count += 1;
        }
        let Coalescing { plan, heads, known, count } = self;
        let all = list(heads, known);
        plan.make(all.get(..*count).unwrap_or_default(), support, MAX_FRAME);
        plan.groups().len() < *count
    }

    /// Writes the header of a merged group to `out`; see [`Plan::header`].
    pub fn header(&self, group: &Group, out: &mut [u8]) -> Option<(usize, Offload)> {
        let all = list(&self.heads, &self.known);
        self.plan.header(group, all.get(..self.count)?, out)
    }
}

/// The heads as a plan takes them.
fn list<'a>(heads: &'a [[u8; HEADERS]; BURST], known: &[(usize, usize, Offload); BURST]) -> [Head<'a>; BURST] {
    let mut known = heads.iter().zip(known);
    std::array::from_fn(|_| {
        let (head, &(used, len, offload)) = known.next().unwrap_or((&[0; HEADERS], &(0, 0, Offload::NONE)));
        Head { bytes: head.get(..used).unwrap_or_default(), len, offload }
    })
}
