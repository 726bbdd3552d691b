//! Ethernet addresses and the first 14 bytes of a frame: what the switch decides by.
//!
//! The switch calls [`Addresses::read`] once for each frame, a reflecting port also [`swap_addresses`].

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Bytes of an Ethernet II header: destination, source, EtherType.
pub const HEADER: usize = 14;

/// Bytes of the smallest frame, without its check sequence.
pub const ZLEN: usize = 60;

/// Bytes of two VLAN tags.
pub const TAGS: usize = 8;

/// Bytes of the longest frame on a link whose packets have `mtu` bytes at most, from the destination address to the end of
/// the payload. Two VLAN tags do not count as payload.
#[inline]
pub const fn longest_frame(mtu: u16) -> usize {
    mtu as usize + HEADER + TAGS
}

/// An Ethernet address, in the order of the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddr(pub [u8; 6]);

/// A text that is no Ethernet address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected six pairs of hexadecimal digits, such as 52:54:00:12:34:56, found {found:?}")]
pub struct MacAddrError {
    /// The text in question.
    pub found: String,
}

impl MacAddr {
    /// The address of every station: ff:ff:ff:ff:ff:ff.
    pub const BROADCAST: MacAddr = MacAddr([0xff; 6]);

    /// A locally administered unicast address that holds `number`: 02:00, then its four bytes.
    #[inline]
    pub const fn local(number: u32) -> MacAddr {
        let [a, b, c, d] = number.to_be_bytes();
        MacAddr([0x02, 0x00, a, b, c, d])
    }

    /// Whether the group bit is set; so it is for the broadcast address too.
    #[inline]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether it is one of the sixteen group addresses 01-80-C2-00-00-00 to -0F, for protocols between neighbours on a link:
    /// no bridge forwards their frames (IEEE 802.1Q, 8.6.3).
    #[inline]
    pub const fn is_link_local(self) -> bool {
        matches!(self.0, [0x01, 0x80, 0xc2, 0, 0, 0..=0x0f])
    }

    /// Whether all bytes are zero, which is no station's address.
    #[inline]
    pub const fn is_zero(self) -> bool {
        self.to_u64() == 0
    }

    /// The address as a number: the first byte of the wire is the highest of the low 48 bits.
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

    /// Reads `52:54:00:12:34:56`: exactly six pairs, digits of either case.
    ///
    /// # Errors
    /// [`MacAddrError`] on any other text.
    fn from_str(text: &str) -> Result<MacAddr, MacAddrError> {
        parse(text).ok_or_else(|| MacAddrError { found: text.to_owned() })
    }
}

/// The two addresses of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Addresses {
    /// Who it is for.
    pub destination: MacAddr,
    /// Who sent it.
    pub source: MacAddr,
}

impl Addresses {
    /// The addresses from their twelve bytes, the first eight and the last four as little-endian numbers.
    #[inline]
    pub const fn from_words(words: (u64, u32)) -> Addresses {
        let [a, b, c, d, e, f, u, v] = words.0.to_le_bytes();
        let [w, x, y, z] = words.1.to_le_bytes();
        Addresses { destination: MacAddr([a, b, c, d, e, f]), source: MacAddr([u, v, w, x, y, z]) }
    }

    /// The addresses of the frame that begins with `head`; `None` if that is less than an Ethernet header.
    #[inline]
    pub fn read(head: &[u8]) -> Option<Addresses> {
        let &[a, b, c, d, e, f, u, v, w, x, y, z, _, _] = head.first_chunk::<HEADER>()?;
        Some(Addresses { destination: MacAddr([a, b, c, d, e, f]), source: MacAddr([u, v, w, x, y, z]) })
    }
}

/// Swaps destination and source of the frame that begins with `head`; nothing happens to less than 12 bytes.
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
        // from_str_radix would take a sign, and one digit.
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
    fn frames_of_an_mtu() {
        assert_eq!([68, 1500, 65535].map(longest_frame), [90, 1522, 65557]);
    }

    #[test]
    fn text_round_trip() {
        assert_eq!(GUEST.to_string(), "52:54:00:12:34:ab");
        assert_eq!(format!("{GUEST:?}"), "52:54:00:12:34:ab");
        assert_eq!("52:54:00:12:34:ab".parse(), Ok(GUEST));
        assert_eq!("52:54:00:12:34:AB".parse(), Ok(GUEST));
    }

    #[test]
    fn text_that_is_no_address() {
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
    fn numbers() {
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
