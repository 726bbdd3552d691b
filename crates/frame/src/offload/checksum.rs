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
    if let Some(field) = frame.get_mut(start + offset..).and_then(<[u8]>::first_chunk_mut) {
        *field = field_of(sum).to_be_bytes();
    }
}

/// Returns the checksum of what was summed, as it is written. 0xffff and 0 are the same number, but 0 would mean that a UDP datagram
/// has no checksum (RFC 768). TCP takes either, so the protocol does not matter (Linux' skb_checksum_help does the same).
pub(super) fn field_of(sum: Sum) -> u16 {
    if sum.checksum() == 0 { 0xffff } else { sum.checksum() }
}

/// Verifies the checksum of a TCP or UDP frame. Returns [`Offload::VALID`], or [`Offload::NONE`] if the checksum is wrong or
/// absent, or the frame is of another protocol: the receiver verifies it.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// UDP over IPv4, its data one word; the field holds the sum of the pseudo header. Two bytes of padding follow.
    fn udp(word: u16) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0x00, 0x45, 0, 0, 30, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0, 1, 0, 2, 0, 10]);
        frame.extend((0x0a00u16 + 1 + 0x0a00 + 2 + 17 + 10).to_be_bytes());
        frame.extend(word.to_be_bytes());
        frame
    }

    #[test]
    fn udp_checksum_of_zero() {
        // All that is summed: pseudo header, ports and length.
        let rest = 0x0a00u16 + 1 + 0x0a00 + 2 + 17 + 10 + 1 + 2 + 10;
        for (word, expected) in [(!rest, 0xffff), (!rest - 1, 1), (0, !rest)] {
            let mut frame = udp(word);
            let len = frame.len();
            complete(&mut frame, Offload::NONE);
            assert_eq!(frame, udp(word));
            complete(&mut frame, Offload::partial(34, 6, len).unwrap());
            assert_eq!(frame[40..42], u16::to_be_bytes(expected));
            assert_eq!(verify(&frame), Offload::VALID);
            frame.extend([0xff; 3]);
            assert_eq!(verify(&frame), Offload::VALID, "padding does not count");
            frame[40..42].fill(0);
            assert_eq!(verify(&frame), Offload::NONE, "no checksum");
        }
    }

    #[test]
    fn what_cannot_be_verified() {
        let mut frame = udp(0);
        let len = frame.len();
        complete(&mut frame, Offload::partial(34, 6, len).unwrap());
        assert_eq!(verify(&frame), Offload::VALID);
        for len in 0..frame.len() {
            assert_eq!(verify(&frame[..len]), Offload::NONE);
        }
        // EtherType, version, fragment, protocol, address, port, checksum, data.
        for at in [13, 14, 21, 23, 27, 35, 41, 43] {
            let mut wrong = frame.clone();
            wrong[at] ^= 1;
            assert_eq!(verify(&wrong), Offload::NONE, "byte {at}");
        }
    }

    #[test]
    fn a_field_outside_the_frame_is_left_alone() {
        let mut frame = udp(7);
        finish(&mut frame, 34, 9);
        finish(&mut frame, 1000, 6);
        assert_eq!(frame, udp(7));
    }
}
