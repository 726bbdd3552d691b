//! The test frames that `ringroad blast` sends. A receiver can tell a probe's flow, its sequence number, when it was sent,
//! and whether any byte was damaged.
//!
//! | bytes  | contents                                                                         |
//! |--------|----------------------------------------------------------------------------------|
//! | 0..14  | Ethernet II, EtherType IPv4                                                      |
//! | 14..34 | IPv4 with checksum, 198.18.0.1 to 198.18.0.2 (the benchmark range of RFC 2544)   |
//! | 34..42 | UDP: source port [`FLOW_PORT`] + flow, destination port [`MAGIC`], checksum 0     |
//! | 42..50 | sequence                                                                         |
//! | 50..58 | sent_ns                                                                          |
//! | 58..60 | check over flow, sequence and sent_ns                                            |
//! | 60..   | body: a pattern that depends on sequence and offset                              |
//!
//! Numbers are big-endian. Flow and magic are stored in the UDP ports, so that a probe fits the smallest Ethernet frame and
//! flows hash to different queues.

use ringroad_wire::ethernet::{Addresses, HEADER, ZLEN};
use thiserror::Error;

/// Size of the smallest probe in bytes, without the frame check sequence: the smallest Ethernet frame.
pub const MIN_SIZE: usize = ZLEN;

/// Size of the largest probe in bytes, limited by the length field of IPv4.
pub const MAX_SIZE: usize = HEADER + u16::MAX as usize;

/// UDP destination port that identifies a probe ("rr").
pub const MAGIC: u16 = 0x7272;

/// UDP source port of flow 0; flow n uses this port plus n, modulo 65536.
pub const FLOW_PORT: u16 = 1024;

const IP: usize = HEADER;
const UDP: usize = IP + 20;
const SEQUENCE: usize = UDP + 8;
const SENT_NS: usize = SEQUENCE + 8;
const CHECK: usize = SENT_NS + 8;
const _: () = assert!(CHECK + 2 == MIN_SIZE);

/// The fields of a test frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The flow that the frame belongs to.
    pub flow: u16,
    /// Sequence number within the flow.
    pub sequence: u64,
    /// Time of sending, in nanoseconds of the sender's clock.
    pub sent_ns: u64,
}

/// Why a frame is not the expected probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ProbeError {
    /// The frame is shorter than [`MIN_SIZE`] or longer than [`MAX_SIZE`].
    #[error("expected a frame of {MIN_SIZE} to {MAX_SIZE} bytes, found {0}")]
    Size(usize),
    /// Other traffic: IPv4 with options or not IPv4, not UDP, or not to port [`MAGIC`].
    #[error("expected IPv4 and UDP to port {MAGIC}, found another kind of frame")]
    Foreign,
    /// The lengths in the IPv4 and UDP headers do not match the frame.
    #[error("expected IPv4 and UDP lengths that match a frame of {0} bytes")]
    Length(usize),
    /// Flow, sequence, sent_ns or the check itself was damaged.
    #[error("expected check {expected:#06x} of the probe's fields, found {found:#06x}")]
    Check {
        /// The check computed from the frame's fields.
        expected: u16,
        /// The check stored in the frame.
        found: u16,
    },
    /// The checksum of the IPv4 header is wrong.
    #[error("the IPv4 header's checksum is wrong")]
    IpChecksum,
    /// An intact probe, but not the expected one.
    #[error("expected a different probe, found flow {} sequence {}", .0.flow, .0.sequence)]
    Other(Probe),
    /// A byte of the body was damaged.
    #[error("byte {at} of the frame is damaged")]
    Body {
        /// Offset of the first wrong byte from the start of the frame.
        at: usize,
    },
}

impl Probe {
    /// Writes this probe to all of `frame`, whose length is the frame size without check sequence.
    ///
    /// # Errors
    /// [`ProbeError::Size`] if the frame is too short or too long; it is not changed then.
    pub fn write(&self, addresses: &Addresses, frame: &mut [u8]) -> Result<(), ProbeError> {
        let size = frame.len();
        let (head, body) = match frame.split_first_chunk_mut::<MIN_SIZE>() {
            Some(parts) if size <= MAX_SIZE => parts,
            _ => return Err(ProbeError::Size(size)),
        };
        head[..6].copy_from_slice(&addresses.destination.0);
        head[6..12].copy_from_slice(&addresses.source.0);
        head[12..IP].copy_from_slice(&[0x08, 0x00]);
        head[IP..UDP].copy_from_slice(&ip_header(size));
        put(head, UDP + 2, MAGIC.to_be_bytes());
        put(head, UDP + 4, udp_length(size).to_be_bytes());
        put(head, UDP + 6, [0, 0]);
        put(head, UDP, self.flow.wrapping_add(FLOW_PORT).to_be_bytes());
        put(head, SEQUENCE, self.sequence.to_be_bytes());
        put(head, SENT_NS, self.sent_ns.to_be_bytes());
        put(head, CHECK, self.check().to_be_bytes());
        fill(self.sequence, body);
        Ok(())
    }

    /// Reads the probe in `frame`. Checks that it is a probe, its lengths and its fields, but not the addresses, the IPv4
    /// checksum or the body; [`Probe::verify`] checks the latter two.
    ///
    /// # Errors
    /// [`ProbeError::Size`], [`ProbeError::Foreign`], [`ProbeError::Length`] or [`ProbeError::Check`].
    #[inline]
    pub fn read(frame: &[u8]) -> Result<Probe, ProbeError> {
        let size = frame.len();
        let (head, _) = split(frame)?;
        let protocol = head[IP + 9];
        if get(head, 12) != [0x08, 0x00, 0x45] || protocol != 17 || get(head, UDP + 2) != MAGIC.to_be_bytes() {
            return Err(ProbeError::Foreign);
        }
        if get(head, IP + 2) != ip_length(size).to_be_bytes() || get(head, UDP + 4) != udp_length(size).to_be_bytes() {
            return Err(ProbeError::Length(size));
        }
        let probe = Probe {
            flow: u16::from_be_bytes(get(head, UDP)).wrapping_sub(FLOW_PORT),
            sequence: u64::from_be_bytes(get(head, SEQUENCE)),
            sent_ns: u64::from_be_bytes(get(head, SENT_NS)),
        };
        let (expected, found) = (probe.check(), u16::from_be_bytes(get(head, CHECK)));
        if found != expected {
            return Err(ProbeError::Check { expected, found });
        }
        Ok(probe)
    }

    /// Checks that `frame` is this probe and intact: everything that [`Probe::read`] checks, the IPv4 header checksum, and
    /// every byte of the body.
    ///
    /// # Errors
    /// Those of [`Probe::read`], [`ProbeError::IpChecksum`], [`ProbeError::Other`] or [`ProbeError::Body`].
    pub fn verify(&self, frame: &[u8]) -> Result<(), ProbeError> {
        let found = Probe::read(frame)?;
        let (head, body) = split(frame)?;
        if ip_checksum(&head[IP..UDP]) != 0 {
            return Err(ProbeError::IpChecksum);
        }
        if found != *self {
            return Err(ProbeError::Other(found));
        }
        match first_damaged(self.sequence, body) {
            Some(at) => Err(ProbeError::Body { at: MIN_SIZE + at }),
            None => Ok(()),
        }
    }

    /// The modulus is a prime above 255 * 256, so that every change within one byte is detected; the factors distinguish
    /// the fields.
    #[inline]
    fn check(&self) -> u16 {
        const PRIME: u64 = 65521;
        let sum = u64::from(MAGIC)
            + u64::from(self.flow)
            + 0x5a5b * (self.sequence % PRIME)
            + 0x6b6d * (self.sent_ns % PRIME);
        (sum % PRIME) as u16
    }
}

/// Splits off the part with the headers and fields from the body, and checks the frame size.
#[inline]
fn split(frame: &[u8]) -> Result<(&[u8; MIN_SIZE], &[u8]), ProbeError> {
    match frame.split_first_chunk() {
        Some(parts) if frame.len() <= MAX_SIZE => Ok(parts),
        _ => Err(ProbeError::Size(frame.len())),
    }
}

/// For constant offsets within the head only: compiles to one load without a bounds check.
#[inline(always)]
fn get<const N: usize>(head: &[u8; MIN_SIZE], at: usize) -> [u8; N] {
    head.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

/// Like [`get`], but one store.
#[inline(always)]
fn put<const N: usize>(head: &mut [u8; MIN_SIZE], at: usize, bytes: [u8; N]) {
    if let Some(place) = head.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *place = bytes;
    }
}

/// The IPv4 total length in a frame of `size` bytes, whose bounds [`split`] has checked.
#[inline]
fn ip_length(size: usize) -> u16 {
    (size - IP) as u16
}

#[inline]
fn udp_length(size: usize) -> u16 {
    (size - UDP) as u16
}

/// Version 4, no options, do not fragment, TTL 64, UDP.
fn ip_header(size: usize) -> [u8; 20] {
    let [high, low] = ip_length(size).to_be_bytes();
    let mut header = [0x45, 0, high, low, 0, 0, 0x40, 0, 64, 17, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2];
    let checksum = ip_checksum(&header).to_be_bytes();
    header[10..12].copy_from_slice(&checksum);
    header
}

/// The Internet checksum (RFC 1071) of a header of even length: 0 if the header already contains the right one.
fn ip_checksum(header: &[u8]) -> u16 {
    let mut sum: u32 = header.as_chunks().0.iter().map(|&word| u32::from(u16::from_be_bytes(word))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// The body, eight bytes at a time: an endless sequence of words, made by addition, shift and xor only so that it
/// vectorises.
fn pattern(sequence: u64) -> impl Iterator<Item = [u8; 8]> {
    // Odd, so that each sequence has a different pattern: 2^64 divided by the golden ratio, and a prime of xxHash.
    let first = sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..).map(move |index: u64| {
        let word = first.wrapping_add(index.wrapping_mul(0xc2b2_ae3d_27d4_eb4f));
        (word ^ (word >> 29)).to_le_bytes()
    })
}

fn fill(sequence: u64, body: &mut [u8]) {
    for (chunk, word) in body.chunks_mut(8).zip(pattern(sequence)) {
        match <&mut [u8; 8]>::try_from(&mut *chunk) {
            Ok(whole) => *whole = word,
            Err(_) => chunk.iter_mut().zip(word).for_each(|(place, byte)| *place = byte),
        }
    }
}

/// Offset within the body of the first byte that does not match the pattern.
fn first_damaged(sequence: u64, body: &[u8]) -> Option<usize> {
    let mut chunks = body.chunks(8).zip(pattern(sequence)).enumerate();
    chunks.find_map(|(index, (chunk, word))| {
        // Compares word by word, and byte by byte only within the first word that differs.
        if word.get(..chunk.len()) == Some(chunk) {
            return None;
        }
        let at = chunk.iter().zip(word).position(|(&found, expected)| found != expected)?;
        Some(8 * index + at)
    })
}

#[cfg(test)]
mod tests;
