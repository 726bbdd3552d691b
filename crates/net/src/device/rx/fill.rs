//! Frames that a source reads straight into the driver's buffers, before it can see them.

use super::{Refusal, RxQueue, acks, count_offload};
use crate::offload;
use ringroad_frame::{BURST, HEAD, HEADROOM, Poured, copy_some, offload::Offload};
use ringroad_mem::Span;
use ringroad_ring::Fault;
use ringroad_wire::{ethernet, vnet_hdr};

impl RxQueue {
    /// Receives up to a burst of frames straight into the driver's buffers and publishes them, for a source that cannot see a
    /// frame before reading it. `read` is called with spans of at least `room` bytes. It returns how many bytes it has written,
    /// counting a virtio-net header at the start (more than the spans hold if the frame was truncated), or `None` if
    /// there are no more frames.
    ///
    /// # Errors
    /// As for `put`.
    pub fn fill(&mut self, room: usize, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Result<Poured, Fault> {
        // What is read begins with a header of one length.
        if self.header == vnet_hdr::SIZE { self.pour(room, read) } else { Ok(Poured::Unable) }
    }

    fn pour(&mut self, room: usize, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Result<Poured, Fault> {
        self.ring.untake(&mut self.chains, 0);
        self.chains.start(&self.memory);
        let (mut used, mut frames, mut bytes, mut oversize, mut runts, mut refused, mut filtered) =
            (0, 0, 0, 0, 0, 0, 0);
        let mut refusal = None;
        for _ in 0..BURST {
            let count = match self.reserve(used, room) {
                Ok(count) => count,
                Err(found) => {
                    refusal = Some(found);
                    break;
                }
            };
            let Some(len) = read(self.chains.writable_range(used, count)) else { break };
            if len < vnet_hdr::SIZE + ethernet::HEADER {
                runts += 1;
                continue;
            }
            if !self.passes(used, count) {
                filtered += 1;
                continue;
            }
            // Written by the kernel to the driver's memory, which it may change meanwhile: it deceives itself at most.
            let Ok(offload) = offload::read_pieces(self.chains.writable_range(used, count), len, self.support) else {
                refused += 1;
                continue;
            };
            if offload.longest(len - vnet_hdr::SIZE) > self.limit {
                oversize += 1;
                continue;
            }
            match self.divide(used, count, len, offload) {
                Some(count) => {
                    used += count;
                    frames += 1;
                    bytes += len - vnet_hdr::SIZE;
                    if !offload.is_none() {
                        count_offload(&self.counters, offload, self.support, len - vnet_hdr::SIZE);
                    }
                }
                None => oversize += 1,
            }
        }
        self.give(&mut used);
        self.chains.clear();
        self.moderation.count(frames as usize, bytes as u64, 0);
        let counters = &self.counters;
        counters.frames.add(frames);
        counters.bytes.add(bytes as u64);
        (if self.limit == 0 { &counters.stopped } else { &counters.oversize }).add(oversize);
        counters.runt.add(runts);
        counters.offload.add(refused);
        counters.filtered.add(filtered);
        counters.bursts.add(u64::from(frames > 0));
        let nothing = frames + oversize + runts + refused + filtered == 0;
        match refusal {
            Some(Refusal::Fault(fault)) if frames == 0 => Err(fault),
            // With most of its ring available, the driver may never have room for the longest frame: shorter ones fit.
            Some(Refusal::Full) if nothing && self.short.is_none_or(|short| short < self.size / 2) => Ok(Poured::Full),
            Some(_) if nothing => Ok(Poured::Unable),
            _ => Ok(Poured::Frames(frames as usize)),
        }
    }

    /// Returns whether the driver's filter lets a frame pass that lies in these buffers.
    fn passes(&self, first: usize, count: usize) -> bool {
        let Some(filter) = &self.filter else { return true };
        let mut head = [0; HEAD - HEADROOM];
        let pieces = self.chains.writable_range(first, count).iter().copied();
        let len = copy_some(pieces, vnet_hdr::SIZE, &mut head);
        filter.passes(head.get(..len).unwrap_or_default())
    }

    /// Sets in up to `count` chains how many bytes a frame of `len` bytes takes of each, and writes its header. Returns the
    /// number of chains that it takes, or `None` if it is longer than all of them.
    fn divide(&mut self, first: usize, count: usize, len: usize, offload: Offload) -> Option<usize> {
        let mut left = len;
        let mut taken = 0;
        while left > 0 && taken < count {
            let chain = self.chains.list_mut().get_mut(first + taken)?;
            chain.written = chain.writable_len().min(left as u32);
            left -= chain.written as usize;
            taken += 1;
        }
        if left > 0 {
            return None;
        }
        let header = offload::bytes(offload, self.support, taken as u16);
        let mut header = &header[..];
        for piece in self.chains.writable_range(first, 1) {
            header = header.get(piece.write(header)..).unwrap_or_default();
        }
        let pieces = self.chains.writable_range(first, taken);
        self.acks.note(1, len.saturating_sub(vnet_hdr::SIZE) as u64, || acks::is_one(pieces, vnet_hdr::SIZE, len));
        Some(taken)
    }
}
