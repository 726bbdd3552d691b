//! Tests of the probe frames.

use super::*;
use ringroad_wire::ethernet::MacAddr;

const ADDRESSES: Addresses = Addresses { destination: MacAddr::BROADCAST, source: MacAddr::local(7) };
const PROBE: Probe = Probe { flow: 3, sequence: 0x0102_0304_0506_0708, sent_ns: 0x1112_1314_1516_1718 };
const SIZES: [usize; 10] = [MIN_SIZE, 61, 64, 67, 68, 69, 512, 1514, 9014, MAX_SIZE];

fn frame(probe: &Probe, size: usize) -> Vec<u8> {
    let mut frame = vec![0xee; size];
    probe.write(&ADDRESSES, &mut frame).unwrap();
    frame
}

#[test]
fn layout() {
    let frame = frame(&PROBE, 68);
    let expected = [
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 7, 8, 0, // Ethernet
        0x45, 0, 0, 54, 0, 0, 0x40, 0, 64, 17, 0xae, 0x8f, 198, 18, 0, 1, 198, 18, 0, 2, // IPv4
        0x04, 0x03, 0x72, 0x72, 0, 34, 0, 0, // UDP
        1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, // fields
    ];
    assert_eq!(frame[..CHECK], expected);
    assert_eq!(Addresses::read(&frame), Some(ADDRESSES));
}

#[test]
fn round_trip_at_every_size() {
    for size in SIZES {
        let frame = frame(&PROBE, size);
        assert_eq!(Probe::read(&frame), Ok(PROBE), "size {size}");
        assert_eq!(PROBE.verify(&frame), Ok(()), "size {size}");
    }
}

#[test]
fn round_trip_of_extreme_values() {
    for flow in [0, 1, 0x7272, 64511, 64512, u16::MAX] {
        for number in [0, 1, 65520, 65521, 65522, u64::MAX - 1, u64::MAX] {
            for (sequence, sent_ns) in [(number, 0), (0, number), (number, u64::MAX)] {
                let probe = Probe { flow, sequence, sent_ns };
                let frame = frame(&probe, 75);
                assert_eq!(Probe::read(&frame), Ok(probe));
                assert_eq!(probe.verify(&frame), Ok(()));
            }
        }
    }
}

#[test]
fn invalid_sizes_are_rejected() {
    for size in (0..MIN_SIZE).chain([MAX_SIZE + 1, 100_000]) {
        let mut frame = vec![0xee; size];
        let error = Err(ProbeError::Size(size));
        assert_eq!(PROBE.write(&ADDRESSES, &mut frame), error);
        assert_eq!(PROBE.verify(&frame), error);
        assert_eq!(Probe::read(&frame), Err(ProbeError::Size(size)));
        assert!(frame.iter().all(|&byte| byte == 0xee));
    }
}

#[test]
fn every_damaged_byte_is_detected() {
    for size in [MIN_SIZE, 64, 1514] {
        let mut frame = frame(&PROBE, size);
        // All but the Ethernet addresses, and the UDP checksum, which another sender may compute.
        for at in (12..UDP + 6).chain(SEQUENCE..size) {
            let whole = frame[at];
            for flip in 1..=255 {
                frame[at] = whole ^ flip;
                let error = PROBE.verify(&frame).unwrap_err();
                match at {
                    UDP | 35 | SEQUENCE..MIN_SIZE => assert!(matches!(error, ProbeError::Check { .. })),
                    MIN_SIZE.. => assert_eq!(error, ProbeError::Body { at }),
                    _ => {}
                }
                assert_eq!(
                    Probe::read(&frame).is_err(),
                    !matches!(error, ProbeError::IpChecksum | ProbeError::Body { .. })
                );
            }
            frame[at] = whole;
        }
        assert_eq!(PROBE.verify(&frame), Ok(()));
    }
}

#[test]
fn truncated_and_padded_frames_are_detected() {
    let mut frame = frame(&PROBE, 100);
    assert_eq!(Probe::read(&frame[..99]), Err(ProbeError::Length(99)));
    frame.push(0);
    assert_eq!(Probe::read(&frame), Err(ProbeError::Length(101)));
}

#[test]
fn other_traffic_is_foreign() {
    assert_eq!(Probe::read(&[0; 64]), Err(ProbeError::Foreign));
    assert_eq!(Probe::read(&[0xff; 1514]), Err(ProbeError::Foreign));
}

#[test]
fn a_different_probe_is_reported() {
    let other = Probe { sequence: PROBE.sequence + 1, ..PROBE };
    assert_eq!(PROBE.verify(&frame(&other, 100)), Err(ProbeError::Other(other)));
}

#[test]
fn bodies_differ_by_sequence_and_offset() {
    let body = |sequence| frame(&Probe { sequence, ..PROBE }, 1514).split_off(MIN_SIZE);
    let (one, two) = (body(0), body(1));
    assert!(one.chunks(8).zip(two.chunks(8)).all(|(one, two)| one != two));
    let mut words: Vec<_> = one.chunks(8).collect();
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), one.chunks(8).len());
}

#[test]
fn known_ip_checksum() {
    let mut header = [
        0x45, 0x00, 0x00, 0x73, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0x00, 0x00, 0xc0, 0xa8, 0x00, 0x01, 0xc0, 0xa8,
        0x00, 0xc7,
    ];
    assert_eq!(ip_checksum(&header), 0xb861);
    header[10..12].copy_from_slice(&[0xb8, 0x61]);
    assert_eq!(ip_checksum(&header), 0);
}
