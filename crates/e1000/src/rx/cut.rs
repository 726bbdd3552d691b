//! Frames whose sender left work to the receiver, which this driver cannot do: checksums are completed, and frames cut into segments,
//! on the way into its buffers. A guest that cannot take them whole still gets them in bursts, with checksums that it need not verify.

use super::{FRAME_BUFFERS, LONGEST_LPE, Refusal, RxQueue};
use crate::statistics::Tally;
use ringroad_frame::{
    Burst,
    offload::{
        Checksum, Gso, HEADERS, Offload, checksum,
        segment::{Checksums, Segmenter},
    },
};

impl RxQueue {
    /// Places a frame and what it becomes. `wait`: refuses a frame that is to be cut as long as there are too few buffers for all of
    /// it, or for half of the ring if it needs more; without, what there is no room for is dropped.
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
                if wait {
                    self.find_room(burst, index, offload, available)?;
                }
                self.place_cut(burst, index, gso, available, tally).map_err(|refusal| match refusal {
                    Refusal::Full => Refusal::Cut,
                    other => other,
                })
            }
            (Checksum::Partial { .. }, None) => self.place_completed(burst, index, offload, available, tally),
            _ => self.place(burst, index, available, tally),
        }
    }

    fn find_room(&mut self, burst: &Burst, index: u8, offload: Offload, available: u32) -> Result<(), Refusal> {
        let len = burst.frames().get(usize::from(index)).map_or(0, |frame| frame.len());
        let buffers = (offload.longest(len) + self.fcs).div_ceil(self.buffer.max(1)).min(FRAME_BUFFERS);
        let needed = (offload.frames(len) * buffers).min(self.ring.count() as usize / 2) as u32;
        if available - self.used < needed {
            self.short = needed;
            return Err(Refusal::Full);
        }
        Ok(())
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
        burst: &Burst,
        index: u8,
        gso: Gso,
        available: u32,
        tally: &mut Tally,
    ) -> Result<(), Refusal> {
        let len = burst.frames().get(usize::from(index)).map_or(0, |frame| frame.len());
        let mut head = [0; HEADERS];
        let read = burst.copy(index.into(), 0, &mut head);
        self.ident = self.ident.wrapping_add(1);
        let segments = Segmenter::new(gso, head.get(..read).unwrap_or_default(), len, Checksums::Complete, self.ident);
        let (Ok(mut segments), Some(mut reader)) = (segments, burst.reader(index.into())) else {
            return Err(Refusal::Offload);
        };
        if segments.longest() > LONGEST_LPE {
            return Err(Refusal::Oversize);
        }
        // A datagram's checksum is complete, too, but no fragment has all that it covers.
        let checksum = if gso.kind.is_fragments() { Checksum::Complete } else { Checksum::Valid };
        self.with_scratch(|queue, scratch| {
            while let Some(segment) = segments.next(scratch, |at, target| _ = reader.copy(at, target)) {
                queue.place_finished(scratch.get(..segment.len).unwrap_or_default(), checksum, available, tally)?;
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
