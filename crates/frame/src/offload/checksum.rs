//! Checksums of whole frames in private memory: completed for receivers that do not do it, verified for coalescing.

use super::{Checksum, Offload, headers};
use ringroad_wire::{
    checksum::Sum,
    ethernet,
    ip::{Packet, protocol},
    l4::{Tcp, Udp},
};

/// Completes the checksum of a frame if it is partial. Segmentation is not considered: see `segment`.
#[inline]
pub fn complete(frame: &mut [u8], offload: Offload) {
    if let Checksum::Partial { start, offset } = offload.checksum() {
        finish(frame, start.into(), offset.into());
    }
}

/// Computes the checksum over all bytes from `start` on; its field, `offset` bytes behind, holds the sum of the pseudo header.
pub(super) fn finish(frame: &mut [u8], start: usize, offset: usize) {
    let mut sum = Sum::default();
    sum.add(frame.get(start..).unwrap_or_default());
    // 0xffff and 0 are the same number, but 0 would mean that a UDP datagram has no checksum (RFC 768).
    let checksum = if sum.checksum() == 0 { 0xffff } else { sum.checksum() };
    if let Some(field) = frame.get_mut(start + offset..).and_then(<[u8]>::first_chunk_mut) {
        *field = checksum.to_be_bytes();
    }
}

/// Verifies the checksum of a TCP or UDP frame. Returns [`Offload::VALID`], or [`Offload::NONE`] if the checksum is wrong, absent,
/// or not known how to verify: the receiver has to look.
pub fn verify(frame: &[u8]) -> Offload {
    if is_valid(frame) == Some(true) { Offload::VALID } else { Offload::NONE }
}

fn is_valid(frame: &[u8]) -> Option<bool> {
    let (ethertype, network) = ethernet::payload(frame)?;
    let version = headers::version(ethertype)?;
    let packet = frame.get(network..)?;
    let ip = Packet::read(version, packet).ok()?;
    // Short frames are padded.
    let transport = packet.get(ip.header_len..ip.total_len).filter(|_| !ip.is_fragment)?;
    let (least, field) = match ip.protocol {
        protocol::TCP => (Tcp::LEN, Tcp::CHECKSUM),
        protocol::UDP => (Udp::LEN, Udp::CHECKSUM),
        _ => return None,
    };
    if transport.len() < least
        || (ip.protocol == protocol::UDP && transport.get(field.into()..)?.first_chunk() == Some(&[0, 0]))
    {
        return None;
    }
    let mut sum = Sum::default();
    sum.add(transport);
    sum.add_word(ip.pseudo_header(packet, transport.len())?);
    Some(sum.get() == 0xffff)
}
