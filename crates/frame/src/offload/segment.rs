//! Cuts a frame into segments (GSO) for receivers that cannot take it whole: TCP segments, UDP datagrams, or IP fragments of one
//! datagram. What Linux does in `tcp_offload.c`, `udp_offload.c`, `ip6_offload.c`.
//!
//! The headers are a private copy; the data stays where it is, and is copied once into each segment.

use super::{
    Checksum, Gso, HEADERS, Offload, Refused, checksum,
    headers::{Headers, change_v4, header_mut},
    tunnel::Layers,
};
use ringroad_wire::{
    checksum::{Sum, add},
    ip::{Fragment, Ipv4, Ipv6, Version, protocol},
    l4::{Tcp, Udp, flags},
};

/// What the segments' checksums are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksums {
    /// Complete.
    Complete,
    /// Partial, for a receiver that completes them; those of fragments are always complete.
    Partial,
}

/// A segment that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Length in bytes.
    pub len: usize,
    /// What is left to do.
    pub offload: Offload,
}

/// Writes the segments of one frame, one after the other; may be left for later at any time.
#[derive(Clone, Debug)]
pub struct Segmenter {
    /// The headers of the frame.
    head: [u8; HEADERS],
    headers: Headers,
    /// Those of a tunnel.
    outer: Option<Headers>,
    gso: Gso,
    checksums: Checksums,
    /// Identification of IPv6 fragments.
    ident: u32,
    /// The data to be divided begins here, in bytes from the start of the frame.
    data: usize,
    /// The data of the next segment begins here.
    at: usize,
    /// Segments still to be written: one at least, for a frame of headers alone.
    left: usize,
    /// Length of the frame.
    len: usize,
}

impl Segmenter {
    /// Starts with a frame of `len` bytes with this `gso`, whose first [`HEADERS`] bytes, or all, are `head`. `ident` identifies
    /// IPv6 fragments: it should be unpredictable, and not repeat soon (RFC 8200, 4.5).
    ///
    /// # Errors
    /// [`Refused`] if `gso` is not of this frame.
    pub fn new(gso: Gso, head: &[u8], len: usize, checksums: Checksums, ident: u32) -> Result<Segmenter, Refused> {
        let (headers, outer) = match gso.tunnel {
            Some(tunnel) => {
                let Layers { outer, inner } = Layers::read(gso.kind, tunnel.claim(), head, len)?;
                (inner, Some(outer))
            }
            None => (Headers::read(gso.kind, head, len)?, None),
        };
        let data = headers.data(gso.kind);
        let mut copy = [0; HEADERS];
        copy.iter_mut().zip(head).for_each(|(place, byte)| *place = *byte);
        let mut segmenter =
            Segmenter { head: copy, headers, outer, gso, checksums, ident, data, at: data, left: 0, len };
        segmenter.left = (len - data).div_ceil(segmenter.size()).max(1);
        Ok(segmenter)
    }

    /// Returns the length of the longest segment in bytes: the room that [`Segmenter::next`] needs.
    pub fn longest(&self) -> usize {
        let fragment = matches!((self.gso.kind.is_fragments(), self.headers.ip.version), (true, Version::V6));
        self.data + if fragment { Fragment::LEN } else { 0 } + self.size().min(self.len - self.data)
    }

    /// Returns the number of segments still to be written.
    pub fn remaining(&self) -> usize {
        self.left
    }

    /// Leaves out so many segments, which were written before, but not the last one.
    pub fn skip(&mut self, segments: usize) {
        let count = segments.min(self.left.saturating_sub(1));
        // The checksum of a datagram, which is completed with its first fragment, is in that one.
        self.at += count * self.size();
        self.left -= count;
    }

    /// Writes the next segment to the start of `out`. `copy` copies bytes of the frame, from the given position on; it is not
    /// called for the headers. `None` if there are no more, or if `out` is shorter than [`Segmenter::longest`].
    ///
    /// A datagram is read twice if it becomes fragments: first to complete its checksum.
    pub fn next(&mut self, out: &mut [u8], mut copy: impl FnMut(usize, &mut [u8])) -> Option<Segment> {
        if self.left == 0 || out.len() < self.longest() {
            return None;
        }
        let count = self.size().min(self.len - self.at);
        let segment = if self.gso.kind.is_fragments() {
            if self.at == self.data {
                self.complete(out, &mut copy)?;
            }
            self.fragment(out, count, &mut copy)
        } else {
            self.segment(out, count, &mut copy)
        };
        self.at += count;
        self.left -= 1;
        segment
    }

    /// Data of each segment but the last, in bytes.
    fn size(&self) -> usize {
        let size = self.gso.size.get();
        self.gso.kind.whole(size).max(self.gso.kind.least()).into()
    }

    /// Writes a TCP segment or UDP datagram with `count` bytes of data.
    fn segment(&self, out: &mut [u8], count: usize, copy: &mut impl FnMut(usize, &mut [u8])) -> Option<Segment> {
        let (transport, len) = (self.headers.transport, self.data + count);
        let out = out.get_mut(..len)?;
        self.read(0, out.get_mut(..self.data)?, copy);
        copy(self.at, out.get_mut(self.data..)?);
        let index = (self.at - self.data) / self.size();
        write_ip(&self.headers, out, |ip| ip.id.set(ip.id.get().wrapping_add(index as u16)))?;
        // The field holds the sum of the pseudo header with the length of the whole: only the length changes.
        let (old, new) = ((self.len - transport) as u16, (len - transport) as u16);
        let partial = |field: u16| add(add(field, !old), new);
        let (offset, inner) = if self.gso.kind.is_tcp() {
            let tcp: &mut Tcp = header_mut(out, transport)?;
            tcp.seq.set(tcp.seq.get().wrapping_add((self.at - self.data) as u32));
            if self.at + count < self.len {
                tcp.flags &= !(flags::FIN | flags::PSH);
            }
            if index > 0 {
                tcp.flags &= !flags::CWR;
            }
            tcp.checksum.set(partial(tcp.checksum.get()));
            (Tcp::CHECKSUM, tcp.checksum.get())
        } else {
            let udp: &mut Udp = header_mut(out, transport)?;
            udp.length.set(new);
            udp.checksum.set(partial(udp.checksum.get()));
            (Udp::CHECKSUM, udp.checksum.get())
        };
        if let Some(outer) = &self.outer {
            self.write_outer(outer, out, index, inner)?;
        }
        let checksum = match self.checksums {
            Checksums::Complete => {
                checksum::finish(out, transport, offset.into());
                Checksum::Complete
            }
            Checksums::Partial => Checksum::Partial { start: transport as u16, offset },
        };
        Some(Segment { len, offload: Offload { checksum, gso: None } })
    }

    /// Writes the outer headers of segment number `index`. `inner`: what the field of its inner checksum holds while that is partial.
    fn write_outer(&self, outer: &Headers, out: &mut [u8], index: usize, inner: u16) -> Option<()> {
        write_ip(outer, out, |ip| ip.id.set(ip.id.get().wrapping_add(index as u16)))?;
        let (old, new) = ((self.len - outer.transport) as u16, (out.len() - outer.transport) as u16);
        let udp: &mut Udp = header_mut(out, outer.transport)?;
        udp.length.set(new);
        if !self.gso.tunnel?.checksum {
            return Some(());
        }
        udp.checksum.set(add(add(udp.checksum.get(), !old), new));
        // What the inner checksum covers sums to the complement of its pseudo header once it is complete: the data is not read again
        // (Linux calls it local checksum offload).
        let mut sum = Sum::default();
        sum.add(out.get(outer.transport..self.headers.transport)?);
        sum.add(&(!inner).to_be_bytes());
        header_mut::<Udp>(out, outer.transport)?.checksum.set(checksum::field_of(sum));
        Some(())
    }

    /// Writes an IP fragment with `count` bytes of the datagram. IPv4 options are repeated in each, as Linux does.
    fn fragment(&self, out: &mut [u8], count: usize, copy: &mut impl FnMut(usize, &mut [u8])) -> Option<Segment> {
        let (done, more) = (self.at - self.data, self.at + count < self.len);
        let extra = if self.headers.ip.version == Version::V6 { Fragment::LEN } else { 0 };
        let len = self.data + extra + count;
        let out = out.get_mut(..len)?;
        self.read(0, out.get_mut(..self.data)?, copy);
        self.read(self.at, out.get_mut(self.data + extra..)?, copy);
        let mf = if more { Ipv4::MF } else { 0 };
        write_ip(&self.headers, out, |ip| ip.fragment.set((done / 8) as u16 | mf))?;
        if extra > 0 {
            let next = out.get_mut(self.headers.network + self.headers.ip.next_header_at)?;
            let next_header = std::mem::replace(next, protocol::FRAGMENT);
            let offset = (done as u16 | u16::from(more)).into();
            *header_mut(out, self.data)? = Fragment { next_header, reserved: 0, offset, id: self.ident.into() };
        }
        Some(Segment { len, offload: Offload::NONE })
    }

    /// Completes the checksum of the whole datagram, in our copy of its header.
    fn complete(&mut self, scratch: &mut [u8], copy: &mut impl FnMut(usize, &mut [u8])) -> Option<()> {
        let (mut sum, mut at) = (Sum::default(), self.headers.transport);
        while at < self.len {
            let part = scratch.len().min(self.len - at);
            let part = scratch.get_mut(..part)?;
            self.read(at, part, copy);
            sum.add(part);
            at += part.len();
        }
        let udp: &mut Udp = header_mut(&mut self.head, self.headers.transport)?;
        udp.checksum.set(checksum::field_of(sum));
        Some(())
    }

    /// Copies bytes of the frame from `at` on: headers from our copy, all else with `copy`.
    fn read(&self, at: usize, out: &mut [u8], copy: &mut impl FnMut(usize, &mut [u8])) {
        let head = self.head.get(at..self.headers.end).unwrap_or_default();
        let ours = head.len().min(out.len());
        if let Some((start, rest)) = out.split_at_mut_checked(ours) {
            start.copy_from_slice(head.get(..ours).unwrap_or_default());
            if !rest.is_empty() {
                copy(at + ours, rest);
            }
        }
    }
}

/// Sets the length of the IP packet with these headers in `out`; for IPv4 also makes this change, and the checksum.
fn write_ip(headers: &Headers, out: &mut [u8], change: impl FnOnce(&mut Ipv4)) -> Option<()> {
    let Headers { network, ip, .. } = headers;
    let len = out.len() - network;
    match ip.version {
        Version::V4 => change_v4(out.get_mut(*network..network + ip.header_len)?, |ip| {
            ip.total_len.set(len as u16);
            change(ip);
        }),
        Version::V6 => {
            let ip: &mut Ipv6 = header_mut(out, *network)?;
            ip.payload_len.set((len - Ipv6::LEN) as u16);
            Some(())
        }
    }
}
