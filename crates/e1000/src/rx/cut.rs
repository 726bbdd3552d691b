//! Frames whose sender left work to the receiver, which this driver cannot do: checksums are completed, and frames cut into segments,
//! on the way into its buffers. A guest that cannot take them whole still gets them in bursts, with checksums that it need not verify. Their
//! sender is believed as by a virtio driver that gets them with VIRTIO_NET_HDR_F_NEEDS_CSUM: what it asks to be summed is its checksum.

use super::{BEGUN, Begun, FRAME_BUFFERS, LONGEST_LPE, Refusal, RxQueue};
use crate::statistics::Tally;
use ringroad_frame::{
    Burst,
    offload::{
        Checksum, HEADERS, Offload, checksum,
        segment::{Checksums, Segmenter},
    },
};

impl RxQueue {
    /// Places a frame and what it becomes. `wait`: without room for all segments of a frame, or for half of the ring, or for as many as
    /// the driver ever has buffers for, nothing is placed yet; what then finds no room waits, too. Otherwise it is dropped.
    pub(super) fn place_any(
        &mut self,
        burst: &Burst,
        index: u8,
        available: u32,
        wait: bool,
        tally: &mut Tally,
    ) -> Result<(), Refusal> {
        let offload = burst.offload(index.into());
        match (offload.checksum(), offload.gso()) {
            (_, Some(gso)) => {
                let mut head = [0; HEADERS];
                let read = burst.copy(index.into(), 0, &mut head);
                let len = burst.frames().get(usize::from(index)).map_or(0, |frame| frame.len());
                let is = |begun: &Begun| (begun.len, begun.gso, begun.head) == (len, gso, head);
                let known = self.begun.iter().position(is).map(|at| self.begun.swap_remove(at));
                let mut begun = known.unwrap_or_else(|| {
                    self.ident = self.ident.wrapping_add(1);
                    Begun { head, len, gso, ident: self.ident, segments: 0 }
                });
                let placed = if wait && !self.is_room(offload, &begun, available) {
                    Err(Refusal::Full)
                } else {
                    self.place_cut((burst, index), read, &mut begun, available, tally)
                };
                if placed == Err(Refusal::Full) && wait && begun.segments > 0 {
                    if self.begun.len() == BEGUN {
                        self.begun.remove(0);
                    }
                    self.begun.push(begun);
                }
                // Nobody may ask for the rest.
                placed.map_err(|refusal| if refusal == Refusal::Full && !wait { Refusal::Cut } else { refusal })
            }
            (Checksum::Partial { .. }, None) => self.place_completed(burst, index, offload, available, tally),
            _ => self.place(burst, index, available, tally),
        }
    }

    fn is_room(&mut self, offload: Offload, begun: &Begun, available: u32) -> bool {
        let buffers = (offload.longest(begun.len) + self.fcs).div_ceil(self.buffer.max(1)).min(FRAME_BUFFERS);
        let segments = offload.frames(begun.len).saturating_sub(begun.segments);
        let most = self.most.min(self.ring.count() / 2) as usize;
        let needed = (segments * buffers).min(most) as u32;
        if available - self.used < needed {
            self.short = needed;
        }
        available - self.used >= needed
    }

    fn place_completed(
        &mut self,
        burst: &Burst,
        index: u8,
        offload: Offload,
        available: u32,
        tally: &mut Tally,
    ) -> Result<(), Refusal> {
        let len = burst.frames().get(usize::from(index)).map_or(0, |frame| frame.len());
        self.with_scratch(|queue, scratch| {
            let frame = scratch.get_mut(..len).ok_or(Refusal::Oversize)?;
            burst.copy(index.into(), 0, frame);
            checksum::complete(frame, offload);
            queue.place_finished(frame, Checksum::Valid, available, tally)
        })
    }

    fn place_cut(
        &mut self,
        (burst, index): (&Burst, u8),
        read: usize,
        begun: &mut Begun,
        available: u32,
        tally: &mut Tally,
    ) -> Result<(), Refusal> {
        let gso = begun.gso;
        let head = begun.head.get(..read).unwrap_or_default();
        let segments = Segmenter::new(gso, head, begun.len, Checksums::Complete, begun.ident);
        let (Ok(mut segments), Some(mut reader)) = (segments, burst.reader(index.into())) else {
            return Err(Refusal::Offload);
        };
        if segments.longest() > LONGEST_LPE {
            return Err(Refusal::Oversize);
        }
        // A datagram's checksum is complete, too, but no fragment has all that it covers.
        let checksum = if gso.kind.is_fragments() { Checksum::Complete } else { Checksum::Valid };
        segments.skip(begun.segments);
        self.with_scratch(|queue, scratch| {
            while let Some(segment) = segments.next(scratch, |at, target| _ = reader.copy(at, target)) {
                queue.place_finished(scratch.get(..segment.len).unwrap_or_default(), checksum, available, tally)?;
                begun.segments += 1;
            }
            Ok(())
        })
    }

    fn place_finished(
        &mut self,
        frame: &[u8],
        checksum: Checksum,
        available: u32,
        tally: &mut Tally,
    ) -> Result<(), Refusal> {
        let status = self.checksums(checksum, |head| {
            let count = head.len().min(frame.len());
            head.iter_mut().zip(frame).for_each(|(place, &byte)| *place = byte);
            count
        });
        self.place_as((frame, None), frame.len(), status, available, tally)
    }

    fn with_scratch<R>(&mut self, act: impl FnOnce(&mut Self, &mut [u8]) -> R) -> R {
        let mut scratch = std::mem::take(&mut self.scratch);
        let result = act(self, &mut scratch);
        self.scratch = scratch;
        result
    }
}
