//! Normal path of transmission: frames of several descriptors, with checksums to insert, to be cut, or with a VLAN tag.

mod headers;

use super::{BURST_BYTES, BURST_DESCRIPTORS, FRAME_DESCRIPTORS, FRAME_PARTS, Part, SLOT, Start, State, TxQueue};
use crate::{
    descriptor::{
        Context,
        tx::{DEXT, DTYP, DTYP_DATA, EOP, IC, IFCS, IXSM, RPS, RS, SPECIAL, TSE, TXSM, VLE},
    },
    fault::Fault,
    registers::statistics::{TSCTC, TSCTFC},
    shared::STAGING,
    statistics::FCS,
};
use headers::{Headers, Work};
use ringroad_frame::{BURST, Burst, HEADROOM, MAX_FRAME, NotAFrame, Offload};
use ringroad_mem::{Hit, PushError};

/// What the descriptors of a frame say.
#[derive(Clone, Copy, Debug, Default)]
struct Assembly {
    descriptors: u32,
    /// Total length in bytes.
    len: usize,
    /// Second word of the first descriptor, of the last one, and of the last one with a VLAN tag.
    first: u64,
    last: u64,
    tagged: Option<u64>,
    /// Longer than any frame.
    oversize: bool,
}

/// What became of the next descriptors.
enum Next {
    /// A frame of so many bytes was added.
    Frame(usize),
    /// They held none. So many bytes were read to find that out.
    Consumed(usize),
    /// They stay: the frame is not complete, or does not fit into this burst.
    Nothing,
}

/// Why a frame is not added.
enum Why {
    NotAFrame(NotAFrame),
    /// Its offload does not fit.
    Refused,
    /// The burst has no room for its pieces.
    Full,
    /// A buffer outside memory.
    Fault(Fault),
}

impl TxQueue {
    /// Takes the frames behind the plain ones, which have this many bytes. Returns the bytes of all.
    pub(super) fn take_rest(&mut self, burst: &mut Burst, available: u32, mut bytes: u64) -> u64 {
        let mut work = bytes;
        while self.used < available && work <= BURST_BYTES && self.used < BURST_DESCRIPTORS {
            if burst.frames().len() == BURST {
                break;
            }
            let start = Start { used: self.used, reports: self.reports.len(), state: self.state };
            let index = burst.frames().len();
            match self.next(burst, available, start) {
                Next::Frame(len) => {
                    bytes += len as u64;
                    work += burst.work(index);
                    if let Some(place) = self.starts.get_mut(index) {
                        *place = start;
                    }
                }
                // Dropped, or no frame at all; counted before if they were put back.
                Next::Consumed(read) => {
                    work += read as u64;
                    burst.refuse(usize::from(start.used >= self.counted));
                }
                Next::Nothing => break,
            }
        }
        bytes
    }

    /// Reads descriptors up to the next end of packet.
    fn next(&mut self, burst: &mut Burst, available: u32, start: Start) -> Next {
        self.parts.clear();
        let mut assembly = Assembly::default();
        let end = available.min(start.used + FRAME_DESCRIPTORS);
        for ahead in start.used..end {
            let Some([first, word]) = self.ring.read(ahead) else { return Next::Nothing };
            let index = self.ring.index(ahead);
            if word & (RS | RPS) != 0 {
                self.reports.push((index, word));
            }
            if word & (DEXT | DTYP) == DEXT {
                let context = Context::read([first, word]);
                *(if word & TSE != 0 { &mut self.state.segment } else { &mut self.state.checksum }) = context;
                continue;
            }
            assembly.add(word);
            if !self.state.skipping {
                self.add_part(&mut assembly, Part { address: first, len: length(word), index });
            }
            if word & EOP != 0 {
                return self.end_of_packet(burst, start, &assembly, ahead + 1);
            }
        }
        if assembly.descriptors == 0 || self.state.skipping {
            // Contexts for a frame that is still to come, or the middle of a dropped one.
            self.used = end;
            return Next::Consumed(0);
        }
        // With the whole ring full the rest of it can never come.
        let never = start.used == 0 && available >= self.ring.count() - 1 || end < available;
        if !never {
            return self.put_back(start);
        }
        self.used = end;
        self.state.skipping = true;
        self.drop_frame(start, Why::NotAFrame(NotAFrame::Oversize), 0)
    }

    fn add_part(&mut self, assembly: &mut Assembly, part: Part) {
        assembly.len += part.len as usize;
        assembly.oversize |= assembly.len > MAX_FRAME + FCS || self.parts.len() >= FRAME_PARTS;
        if part.len > 0 && !assembly.oversize {
            self.parts.push(part);
        }
    }

    /// The descriptors of a frame are complete: adds it, or drops it.
    fn end_of_packet(&mut self, burst: &mut Burst, start: Start, assembly: &Assembly, end: u32) -> Next {
        self.used = end;
        if std::mem::take(&mut self.state.skipping) {
            return Next::Consumed(0);
        }
        let first = self.pieces.list().len();
        match self.assemble(burst, assembly, first) {
            Ok(len) => Next::Frame(len),
            Err(why) => {
                self.pieces.truncate(first);
                match why {
                    // The burst ends here; alone in a burst it has too many pieces.
                    Why::Full if start.used > 0 => self.put_back(start),
                    Why::Full => self.drop_frame(start, Why::NotAFrame(NotAFrame::Oversize), assembly.len),
                    Why::Fault(fault) => {
                        // Frames before it are valid; the next burst begins with it.
                        if start.used == 0 {
                            self.stop(fault);
                        }
                        self.put_back(start)
                    }
                    why => self.drop_frame(start, why, assembly.len),
                }
            }
        }
    }

    fn put_back(&mut self, Start { used, reports, state }: Start) -> Next {
        (self.used, self.state) = (used, state);
        self.reports.truncate(reports);
        Next::Nothing
    }

    /// Counts a frame that is not sent, unless that was done before it was put back.
    fn drop_frame(&self, start: Start, why: Why, read: usize) -> Next {
        if start.used >= self.counted {
            match why {
                Why::NotAFrame(NotAFrame::Runt) => self.counters.runt.add(1),
                Why::Refused => self.counters.offload.add(1),
                _ => self.counters.oversize.add(1),
            }
        }
        Next::Consumed(read)
    }

    /// Adds the frame of these parts to the burst. Returns its length in bytes.
    fn assemble(&mut self, burst: &mut Burst, assembly: &Assembly, first: usize) -> Result<usize, Why> {
        if assembly.oversize {
            return Err(Why::NotAFrame(NotAFrame::Oversize));
        }
        // Without IFCS the last four bytes are the frame check sequence.
        let fcs = if assembly.last & IFCS != 0 { 0 } else { FCS };
        let len = assembly.len.saturating_sub(fcs);
        if len < ringroad_wire::ethernet::HEADER {
            return Err(Why::NotAFrame(NotAFrame::Runt));
        }
        let tag = assembly.tagged.filter(|_| self.vme).map(|word| (self.vet, (word >> SPECIAL) as u16));
        let work = assembly.work(&self.state, tag);
        let Some(work) = work else {
            self.place(0, len, None)?;
            return self.push(burst, first, len, Offload::NONE);
        };
        if let Some(offload) = work.offload_only(len) {
            self.place(0, len, None)?;
            return self.push(burst, first, len, offload);
        }
        if matches!(work.context, Some((_, true))) {
            self.shared.statistics.add(TSCTC, 1);
        }
        // The parts as they are, to read the headers and sum what is behind them.
        self.place(0, len, None)?;
        let mut headers = Headers::read(self.pieces.list().get(first..).unwrap_or_default(), len);
        let finished = headers.finish(&work, len, self.pieces.list().get(first..).unwrap_or_default());
        self.pieces.truncate(first);
        let Some(offload) = finished else {
            self.shared.statistics.add(TSCTFC, 1);
            return Err(Why::Refused);
        };
        let slot = burst.frames().len();
        self.place(headers.taken(), len, Some((slot, headers)))?;
        self.push(burst, first, len + headers.grown(), offload)
    }

    fn push(&mut self, burst: &mut Burst, first: usize, len: usize, offload: Offload) -> Result<usize, Why> {
        let pieces = self.pieces.list().get(first..).unwrap_or_default();
        burst.push(pieces, first, HEADROOM + len, offload).map_err(Why::NotAFrame)
    }

    /// Adds the pieces of a frame of `len` bytes to the list, with the gap in front: its private headers, if it has some, and the
    /// parts without their first `skip` bytes.
    fn place(&mut self, mut skip: usize, len: usize, headers: Option<(usize, Headers)>) -> Result<(), Why> {
        let mut left = len - skip;
        let parts = std::mem::take(&mut self.parts);
        let placed = self.place_start(&parts, len, headers.as_ref()).and_then(|mut done| {
            for part in &parts {
                let before = skip.min(part.len as usize);
                skip -= before;
                let len = (part.len as usize - before).min(left);
                left -= len;
                if std::mem::take(&mut done) || len == 0 {
                    continue;
                }
                self.place_part(part, part.address.wrapping_add(before as u64), len)?;
            }
            Ok(())
        });
        self.parts = parts;
        placed
    }

    /// Adds the start of a frame: the staged headers; or the first part with the bytes in front of it, or else an empty gap.
    /// Returns whether that was the first part.
    fn place_start(&mut self, parts: &[Part], len: usize, headers: Option<&(usize, Headers)>) -> Result<bool, Why> {
        if let Some((slot, headers)) = headers {
            let at = slot * SLOT;
            let staged = headers.bytes();
            if let Some(place) = self.staging.span(at + HEADROOM, staged.len()) {
                place.write(staged);
            }
            return self.place_staging(at, HEADROOM + staged.len()).map(|()| false);
        }
        let lead = HEADROOM as u64;
        if let Some(part) = parts.first()
            && part.address >= lead
            && part.address < STAGING
            && let Some(whole) = (part.len.min(len as u32)).checked_add(HEADROOM as u32)
            && let Some(memory) = &self.memory
            && memory.span(part.address - lead, whole as usize, &mut self.hit).is_some()
        {
            let pushed = self.pieces.push(part.address - lead, whole, &mut self.hit);
            return pushed.map(|()| true).map_err(|_| Why::Full);
        }
        self.place_staging(0, HEADROOM).map(|()| false)
    }

    fn place_staging(&mut self, at: usize, len: usize) -> Result<(), Why> {
        // The cache is for the guest's regions.
        let mut hit = Hit::NONE;
        self.pieces.push(STAGING + at as u64, len as u32, &mut hit).map_err(|_| Why::Full)
    }

    fn place_part(&mut self, part: &Part, address: u64, len: usize) -> Result<(), Why> {
        let inside = address.checked_add(len as u64).is_some_and(|end| end <= STAGING);
        let pushed =
            if inside { self.pieces.push(address, len as u32, &mut self.hit) } else { Err(PushError::Unmapped) };
        pushed.map_err(|error| match error {
            PushError::Full => Why::Full,
            PushError::Unmapped => Why::Fault(Fault::Buffer {
                index: part.index,
                address: part.address,
                len: part.len,
                regions: self.memory.as_deref().map_or(0, super::regions),
            }),
        })
    }
}

/// Returns the length of the buffer of a legacy or a data descriptor.
fn length(word: u64) -> u32 {
    let mask = if word & DEXT == 0 { 0xffff } else { 0xf_ffff };
    (word & mask) as u32
}

impl Assembly {
    fn add(&mut self, word: u64) {
        if self.descriptors == 0 {
            self.first = word;
        }
        self.descriptors += 1;
        self.last = word;
        if word & VLE != 0 {
            self.tagged = Some(word);
        }
    }

    /// Returns what is left to do to the frame; `None`: nothing.
    fn work(&self, state: &State, tag: Option<(u16, u16)>) -> Option<Work> {
        let is_data = self.first & (DEXT | DTYP) == DEXT | DTYP_DATA;
        let (segment, options) = (is_data && self.first & TSE != 0, self.first & (IXSM | TXSM));
        let context = if segment { state.segment } else { state.checksum };
        let mut work = Work { tag, context: None, ip: false, transport: false };
        if is_data && (segment || options != 0) {
            work.context = Some((context, segment));
            work.ip = options & IXSM != 0;
            work.transport = segment || options & TXSM != 0;
        } else if !is_data && self.last & IC != 0 {
            // The checksum of a legacy descriptor: from CSS to the end, at CSO.
            let (tucss, tucso) = ((self.last >> 40) as u8, (self.last >> 16) as u8);
            work.context = Some((Context { tucss, tucso, ..Context::default() }, false));
            work.transport = true;
        }
        (work.context.is_some() || tag.is_some()).then_some(work)
    }
}
