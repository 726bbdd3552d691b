//! The header that the kernel puts before each frame of an interface and expects there (linux/virtio_net.h): that of virtio-net, and
//! the longer one, which describes UDP tunnels, too.

use ringroad_frame::{
    HEAD, HEADROOM,
    offload::{Offload, Support},
};
use ringroad_net::offload;
use ringroad_wire::vnet_hdr;
use zerocopy::IntoBytes;

/// Length in bytes of a frame's head behind a header of [`vnet_hdr::TUNNELED`] bytes.
pub(super) const LONG_HEAD: usize = vnet_hdr::TUNNELED + HEAD - HEADROOM;

/// Returns how a frame with this head of `len` bytes begins for the kernel, with its header of `header` bytes. `long`: room for
/// a longer one.
pub(super) fn begin<'a>(
    head: &'a mut [u8; HEAD],
    len: usize,
    offload: Offload,
    header: usize,
    long: &'a mut [u8; LONG_HEAD],
) -> &'a [u8] {
    // num_buffers means nothing to the kernel.
    let start = offload::bytes(offload, Support::all(), 0);
    if header == vnet_hdr::SIZE {
        if let Some(headroom) = head.first_chunk_mut() {
            *headroom = start;
        }
        return head.get(..len).unwrap_or_default();
    }
    let tunnel = offload::write_tunnel(offload);
    let hash = [0; vnet_hdr::HASHED - vnet_hdr::SIZE];
    let frame = head.get(HEADROOM..len).unwrap_or_default();
    let bytes = start.iter().chain(&hash).chain(tunnel.as_bytes()).chain(frame);
    long.iter_mut().zip(bytes).for_each(|(place, &byte)| *place = byte);
    long.get(..vnet_hdr::TUNNELED + frame.len()).unwrap_or_default()
}

/// Returns the offloads that a header of this length describes. The kernel takes all of them.
pub(super) fn described(header: usize) -> Support {
    if header == vnet_hdr::TUNNELED { Support::all() } else { Support::all().difference(Support::TUNNELS) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringroad_frame::offload::{Claim, Kind, TunnelClaim};

    /// An Ethernet, IP and UDP header around 4 bytes and a TCP segment of 100 bytes over IPv4.
    fn tunneled() -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0x00, 0x45, 0, 0, 172, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0, 1, 0, 2, 0, 152, 0, 0, 1, 2, 3, 4]);
        frame.extend([0x45, 0, 0, 140, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 16, 0, 0, 0, 0, 0, 0]);
        frame.extend([7; 100]);
        frame
    }

    #[test]
    fn both_headers() {
        let frame = tunneled();
        let claim = Claim { kind: Kind::Tcp4, ecn: false, size: 60, checksum: (66, 16) };
        let tunnel = TunnelClaim { outer_transport: 34, inner_network: 46, checksum: false };
        let offload = Offload::tunneled(claim, tunnel, &frame, frame.len()).unwrap();
        assert!(described(vnet_hdr::TUNNELED).contains(offload.needs()));
        assert!(!described(vnet_hdr::SIZE).contains(offload.needs()));
        let head: [u8; HEAD] = std::array::from_fn(|at| at as u8);
        let mut long = [0; LONG_HEAD];
        let start = [1, 0x21, 86, 0, 60, 0, 66, 0, 16, 0, 0, 0];
        let begun = begin(&mut head.clone(), HEAD, offload, vnet_hdr::TUNNELED, &mut long).to_vec();
        assert_eq!(begun, [&start[..], &[0; 8], &[34, 0, 46, 0], &head[HEADROOM..]].concat());
        // A frame shorter than a head.
        let begun = begin(&mut head.clone(), HEADROOM + 14, Offload::NONE, vnet_hdr::TUNNELED, &mut long).to_vec();
        assert_eq!(begun, [&[0; 24], &head[HEADROOM..HEADROOM + 14]].concat());
        let begun = begin(&mut head.clone(), HEAD, Offload::NONE, vnet_hdr::SIZE, &mut long).to_vec();
        assert_eq!(begun, [&[0; 12], &head[HEADROOM..]].concat());
    }
}
