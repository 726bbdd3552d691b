//! Merges what a guest sends in small packets. Used by the transmit queue.

use crate::{payload::Payload, types::MAX_PACKET};
use ringroad_mem::Span;
use ringroad_wire::vsock_hdr::{self as wire, Op, VsockHdr};

/// Spans that a host socket is read into, or written from, with one system call.
pub(super) const SPANS: usize = 64;

/// Consecutive packets. Small packets of one stream are merged into one, so that their payload goes to a host socket with one
/// system call, or to another guest in one packet.
#[derive(Default)]
pub(super) struct Run<'a> {
    packet: Option<(VsockHdr, Payload<'a>)>,
    /// Payload spans of a merged packet, and their number.
    joined: Option<([Span<'a>; SPANS], usize)>,
}

impl<'a> Run<'a> {
    /// Adds a packet. If it cannot be merged, the packets before it are passed on first.
    pub(super) fn add(&mut self, header: VsockHdr, payload: Payload<'a>, each: &mut impl FnMut(VsockHdr, Payload<'_>)) {
        if !self.join(&header, &payload) {
            self.pass(each);
            self.packet = Some((header, payload));
        }
    }

    /// Merges a packet that continues the stream of the one before it. Returns `false` if it does not.
    fn join(&mut self, header: &VsockHdr, payload: &Payload<'a>) -> bool {
        let Some((packet, held)) = &mut self.packet else { return false };
        let len = packet.len.saturating_add(header.len);
        let next = VsockHdr { len: packet.len, buf_alloc: packet.buf_alloc, fwd_cnt: packet.fwd_cnt, ..*header };
        let is_stream = header.op == Op::Data as u16 && header.kind == wire::TYPE_STREAM;
        // A payload shorter than its header says is left for the connection to reject.
        let whole = |header: &VsockHdr, payload: &Payload<'_>| header.len > 0 && payload.len() >= header.len as usize;
        if next != *packet || !is_stream || len > MAX_PACKET as u32 || !whole(header, payload) {
            return false;
        }
        if self.joined.is_none() {
            if !whole(packet, held) {
                return false;
            }
            held.truncate(packet.len as usize);
        }
        let mut payload = payload.clone();
        payload.truncate(header.len as usize);
        let (spans, count) = self.joined.get_or_insert_with(|| ([Span::empty(); SPANS], 0));
        let held = (*count == 0).then(|| held.remaining_spans()).into_iter().flatten();
        let mut end = *count;
        for span in held.chain(payload.remaining_spans()).filter(|span| !span.is_empty()) {
            let Some(place) = spans.get_mut(end) else {
                // Too many spans. Those merged before stay.
                if *count == 0 {
                    self.joined = None;
                }
                return false;
            };
            *place = span;
            end += 1;
        }
        *count = end;
        *packet = VsockHdr { len, ..*header };
        true
    }

    /// Passes on the current packet, if any.
    pub(super) fn pass(&mut self, each: &mut impl FnMut(VsockHdr, Payload<'_>)) {
        let Some((header, payload)) = self.packet.take() else { return };
        match self.joined.take() {
            Some((spans, count)) => each(header, Payload::spans(spans.get(..count).unwrap_or_default())),
            None => each(header, payload),
        }
    }
}

#[cfg(test)]
mod tests;
