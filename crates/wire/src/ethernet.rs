//! Ethernet addresses and the 14-byte Ethernet II header, which the switch forwards by.
//!
//! The switch calls [`Addresses::read`] once per frame; a reflecting port also calls [`swap_addresses`].

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Size of an Ethernet II header in bytes: destination, source, EtherType.
pub const HEADER: usize = 14;

/// Size of the smallest frame in bytes, without its frame check sequence.
pub const ZLEN: usize = 60;

/// Size of a VLAN tag in bytes: its EtherType and the tag control information.
pub const TAG: usize = 4;

/// Size of two VLAN tags in bytes.
pub const TAGS: usize = 2 * TAG;

/// EtherType of a customer's VLAN tag (IEEE 802.1Q, table 9-1).
pub const C_TAG: u16 = 0x8100;

/// EtherType of a provider's VLAN tag, the outer of two (IEEE 802.1Q, table 9-1).
pub const S_TAG: u16 = 0x88a8;

/// EtherTypes of VLAN tags.
const TAG_TYPES: [u16; 2] = [C_TAG, S_TAG];

/// Returns the EtherType of the frame that starts with `head`, behind up to two VLAN tags, and the position in bytes of what
/// follows it. A third tag counts as the payload's type. `None` if `head` is too short.
pub fn payload(head: &[u8]) -> Option<(u16, usize)> {
    let mut at = HEADER;
    loop {
        let ethertype = u16::from_be_bytes(*head.get(at - 2..)?.first_chunk()?);
        if !TAG_TYPES.contains(&ethertype) || at == HEADER + TAGS {
            return Some((ethertype, at));
        }
        at += TAG;
    }
}

/// Returns the size in bytes of the longest frame on a link with this MTU, from the destination address to the end of the
/// payload. Up to two VLAN tags do not count towards the MTU.
#[inline]
pub const fn longest_frame(mtu: u16) -> usize {
    mtu as usize + HEADER + TAGS
}

/// An Ethernet address, in wire order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddr(pub [u8; 6]);

/// Error from parsing an Ethernet address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected six pairs of hexadecimal digits, such as 52:54:00:12:34:56, found {found:?}")]
pub struct MacAddrError {
    /// The text that was parsed.
    pub found: String,
}

impl MacAddr {
    /// The broadcast address, ff:ff:ff:ff:ff:ff.
    pub const BROADCAST: MacAddr = MacAddr([0xff; 6]);

    /// Returns the locally administered unicast address 02:00 followed by the four bytes of `number`.
    #[inline]
    pub const fn local(number: u32) -> MacAddr {
        let [a, b, c, d] = number.to_be_bytes();
        MacAddr([0x02, 0x00, a, b, c, d])
    }

    /// Returns the address whose lower four bytes, as a number, are `n` higher, modulo 2^32.
    #[inline]
    pub const fn plus(self, n: u32) -> MacAddr {
        let [a, b, rest @ ..] = self.0;
        let [c, d, e, f] = u32::from_be_bytes(rest).wrapping_add(n).to_be_bytes();
        MacAddr([a, b, c, d, e, f])
    }

    /// Returns whether the group bit is set, as it is in multicast and broadcast addresses.
    #[inline]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Returns whether it is one of the sixteen link-local group addresses 01-80-C2-00-00-00 to -0F, whose frames bridges
    /// never forward (IEEE 802.1Q, 8.6.3).
    #[inline]
    pub const fn is_link_local(self) -> bool {
        matches!(self.0, [0x01, 0x80, 0xc2, 0, 0, 0..=0x0f])
    }

    /// Returns whether all bytes are zero, which is not a valid station address.
    #[inline]
    pub const fn is_zero(self) -> bool {
        self.to_u64() == 0
    }

    /// Returns the address as a number; the first byte on the wire is the highest of the low 48 bits.
    #[inline]
    pub const fn to_u64(self) -> u64 {
        let [a, b, c, d, e, f] = self.0;
        u64::from_be_bytes([0, 0, a, b, c, d, e, f])
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(out, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

impl FromStr for MacAddr {
    type Err = MacAddrError;

    /// Parses `52:54:00:12:34:56`: exactly six pairs of hexadecimal digits, upper or lower case.
    ///
    /// # Errors
    /// [`MacAddrError`] for any other text.
    fn from_str(text: &str) -> Result<MacAddr, MacAddrError> {
        parse(text).ok_or_else(|| MacAddrError { found: text.to_owned() })
    }
}

/// Destination and source address of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Addresses {
    /// Address of the receiver.
    pub destination: MacAddr,
    /// Address of the sender.
    pub source: MacAddr,
}

impl Addresses {
    /// Builds the addresses from the first twelve bytes of a frame, passed as two little-endian numbers of eight and four
    /// bytes.
    #[inline]
    pub const fn from_words(words: (u64, u32)) -> Addresses {
        let [a, b, c, d, e, f, u, v] = words.0.to_le_bytes();
        let [w, x, y, z] = words.1.to_le_bytes();
        Addresses { destination: MacAddr([a, b, c, d, e, f]), source: MacAddr([u, v, w, x, y, z]) }
    }

    /// Reads the addresses of the frame that starts with `head`; `None` if `head` is shorter than an Ethernet header.
    #[inline]
    pub fn read(head: &[u8]) -> Option<Addresses> {
        let &[a, b, c, d, e, f, u, v, w, x, y, z, _, _] = head.first_chunk::<HEADER>()?;
        Some(Addresses { destination: MacAddr([a, b, c, d, e, f]), source: MacAddr([u, v, w, x, y, z]) })
    }
}

/// Swaps destination and source of the frame that starts with `head`; does nothing if `head` is shorter than 12 bytes.
#[inline]
pub fn swap_addresses(head: &mut [u8]) {
    if let Some(addresses) = head.first_chunk_mut::<12>() {
        let [a, b, c, d, e, f, u, v, w, x, y, z] = *addresses;
        *addresses = [u, v, w, x, y, z, a, b, c, d, e, f];
    }
}

fn parse(text: &str) -> Option<MacAddr> {
    let mut bytes = [0; 6];
    let mut pairs = text.split(':');
    for byte in &mut bytes {
        let pair = pairs.next()?;
        // from_str_radix alone would accept a sign and a single digit.
        if pair.len() != 2 || !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    pairs.next().is_none().then_some(MacAddr(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: MacAddr = MacAddr([0x52, 0x54, 0x00, 0x12, 0x34, 0xab]);

    #[test]
    fn longest_frame_for_an_mtu() {
        assert_eq!([68, 1500, 65535].map(longest_frame), [90, 1522, 65557]);
    }

    #[test]
    fn payload_behind_tags() {
        let (addresses, ipv4) = ([1; 12], [0x08, 0x00]);
        let tags: [(&[u8], _); 4] = [
            (&[], (0x0800, 14)),
            (&[0x81, 0x00, 0, 1], (0x0800, 18)),
            (&[0x88, 0xa8, 0, 1, 0x81, 0x00, 0, 1], (0x0800, 22)),
            (&[0x81, 0x00, 0, 1, 0x81, 0x00, 0, 1, 0x81, 0x00, 0, 1], (0x8100, 22)),
        ];
        for (tags, expected) in tags {
            let frame = [&addresses[..], tags, &ipv4].concat();
            assert_eq!(payload(&frame), Some(expected));
            for size in 0..expected.1 {
                assert_eq!(payload(&frame[..size]), None);
            }
        }
    }

    #[test]
    fn text_round_trip() {
        assert_eq!(GUEST.to_string(), "52:54:00:12:34:ab");
        assert_eq!(format!("{GUEST:?}"), "52:54:00:12:34:ab");
        assert_eq!("52:54:00:12:34:ab".parse(), Ok(GUEST));
        assert_eq!("52:54:00:12:34:AB".parse(), Ok(GUEST));
    }

    #[test]
    fn invalid_text_is_rejected() {
        let broken = [
            "",
            ":",
            ":::::",
            "52:54:00:12:34",
            "52:54:00:12:34:",
            "52:54:00:12:34:56:78",
            "52:54:00:12:34:5",
            "52:54:00:12:34:567",
            "52:54:00:12:34:+5",
            "52:54:00:12:34:5g",
            "52-54-00-12-34-56",
            "525400123456",
            " 52:54:00:12:34:56",
            "52:54:00:12:34:é",
        ];
        for text in broken {
            assert_eq!(text.parse::<MacAddr>(), Err(MacAddrError { found: text.to_owned() }));
        }
        assert_eq!(
            "x".parse::<MacAddr>().unwrap_err().to_string(),
            "expected six pairs of hexadecimal digits, such as 52:54:00:12:34:56, found \"x\""
        );
    }

    #[test]
    fn kinds_of_address() {
        assert!(MacAddr::BROADCAST.is_multicast());
        assert!(MacAddr([0x33, 0x33, 0, 0, 0, 1]).is_multicast());
        assert!(!GUEST.is_multicast());
        for last in 0..=0xff {
            assert_eq!(MacAddr([0x01, 0x80, 0xc2, 0, 0, last]).is_link_local(), last < 16);
            assert!(!MacAddr([0x01, 0x80, 0xc2, 0, 1, last]).is_link_local());
        }
        assert!(!GUEST.is_link_local() && !MacAddr::BROADCAST.is_link_local());
        assert!(MacAddr([0; 6]).is_zero());
        assert!(!GUEST.is_zero());
        assert!(!MacAddr([0, 0, 0, 0, 0, 1]).is_zero());
    }

    #[test]
    fn addresses_as_numbers() {
        assert_eq!(GUEST.to_u64(), 0x5254_0012_34ab);
        assert_eq!(MacAddr::BROADCAST.to_u64(), 0xffff_ffff_ffff);
        assert_eq!(MacAddr::local(0x0102_0304).to_string(), "02:00:01:02:03:04");
        for number in [0, 1, u32::MAX] {
            let local = MacAddr::local(number);
            assert!(!local.is_multicast() && !local.is_zero());
            assert_eq!(local.to_u64() as u32, number);
        }
        assert!(MacAddr::local(1) < MacAddr::local(256));
    }

    #[test]
    fn addresses_of_a_frame() {
        let frame: Vec<u8> = (0..60).collect();
        let expected = Addresses { destination: MacAddr([0, 1, 2, 3, 4, 5]), source: MacAddr([6, 7, 8, 9, 10, 11]) };
        assert_eq!(Addresses::read(&frame), Some(expected));
        assert_eq!(Addresses::from_words((0x0706_0504_0302_0100, 0x0b0a_0908)), expected);
        assert_eq!(Addresses::read(&frame[..HEADER]), Some(expected));
        for size in 0..HEADER {
            assert_eq!(Addresses::read(&frame[..size]), None);
        }
    }

    #[test]
    fn swapped_addresses() {
        let frame: Vec<u8> = (0..60).collect();
        let mut swapped = frame.clone();
        swap_addresses(&mut swapped);
        assert_eq!(swapped[..6], frame[6..12]);
        assert_eq!(swapped[6..12], frame[..6]);
        assert_eq!(swapped[12..], frame[12..]);
        for size in 0..12 {
            let mut short = frame[..size].to_vec();
            swap_addresses(&mut short);
            assert_eq!(short, frame[..size]);
        }
    }
}
