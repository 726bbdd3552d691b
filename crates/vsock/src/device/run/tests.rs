use super::*;
use proptest::prelude::*;
use ringroad_mem::Region;

/// Runs packets, given with their payload length and the length of its pieces, and returns what is passed on.
fn run(packets: &[(VsockHdr, usize, usize)]) -> Vec<(VsockHdr, Vec<u8>)> {
    let region = Region::private(1 << 20, 0).unwrap();
    let mut at = 0;
    let spans: Vec<Vec<Span<'_>>> = packets
        .iter()
        .enumerate()
        .map(|(index, &(_, there, piece))| {
            let whole = region.span(at, there).unwrap();
            whole.write(&content(index, there));
            at += there;
            let mut spans = Vec::new();
            let mut rest = whole;
            while !rest.is_empty() {
                spans.push(rest.first(piece));
                rest = rest.skip(piece);
            }
            spans
        })
        .collect();
    let mut got = Vec::new();
    let mut each = |header: VsockHdr, mut payload: Payload<'_>| {
        got.push((header, payload.take(header.len as usize)));
    };
    let mut run = Run::default();
    for ((header, ..), spans) in packets.iter().zip(&spans) {
        run.add(*header, Payload::spans(spans), &mut each);
    }
    run.pass(&mut each);
    run.pass(&mut each);
    got
}

fn content(index: usize, len: usize) -> Vec<u8> {
    (0..len).map(|byte| (byte * 7 + index * 31) as u8).collect()
}

fn data(port: u32, len: u32, fwd_cnt: u32) -> VsockHdr {
    VsockHdr { src_port: port, kind: wire::TYPE_STREAM, op: Op::Data as u16, len, fwd_cnt, ..VsockHdr::default() }
}

#[test]
fn small_packets_of_one_stream_are_merged() {
    let packets = [(data(1, 10, 5), 10, 10), (data(1, 20, 6), 25, 3), (data(1, 30, 7), 30, 30)];
    let all = [content(0, 10), content(1, 20), content(2, 30)].concat();
    assert_eq!(run(&packets), [(data(1, 60, 7), all)], "with the latest credit, and without bytes after a payload");
}

#[test]
fn other_packets_are_not_merged() {
    let first = (data(1, 10, 0), 10, 10);
    let message = |header| VsockHdr { kind: wire::TYPE_SEQPACKET, ..header };
    let update = VsockHdr { op: Op::CreditUpdate as u16, len: 0, ..data(1, 0, 0) };
    for (second, third) in [
        (data(2, 10, 0), data(1, 10, 0)),
        (message(data(1, 10, 0)), message(data(1, 10, 0))),
        (VsockHdr { flags: 1, ..data(1, 10, 0) }, data(1, 10, 0)),
        (update, data(1, 10, 0)),
        (data(1, 0, 0), data(1, 10, 0)),
        // Shorter than the header says.
        (data(1, 11, 0), data(1, 11, 0)),
        (data(1, MAX_PACKET as u32 - 9, 0), data(1, u32::MAX, 0)),
    ] {
        let there = |header: VsockHdr| (header, if header.len < 11 { header.len as usize } else { 10 }, 10);
        let packets = [first, there(second), there(third)];
        let headers: Vec<_> = run(&packets).into_iter().map(|(header, _)| header).collect();
        assert_eq!(headers, packets.map(|(header, ..)| header));
    }
}

#[test]
fn a_packet_with_too_many_pieces_is_not_merged() {
    for (pieces, count) in [([SPANS, 1], 2), ([SPANS - 1, 1], 1), ([1, SPANS], 2), ([SPANS + 5, 1], 2)] {
        let packets = pieces.map(|pieces| (data(1, pieces as u32, 0), pieces, 1));
        assert_eq!(run(&packets).len(), count, "{pieces:?}");
    }
    let packets = [SPANS / 2; 5].map(|pieces| (data(1, pieces as u32, 0), pieces, 1));
    assert_eq!(run(&packets).iter().map(|(header, _)| header.len).collect::<Vec<_>>(), [64, 64, 32]);
}

proptest! {
    #[test]
    fn every_stream_keeps_its_bytes_and_their_order(
        packets in proptest::collection::vec((0..3u32, 0..3000u32, 1..2000usize, 0..10u8), 0..40)
    ) {
        let packets: Vec<_> = packets
            .into_iter()
            .map(|(port, len, piece, special)| {
                let mut header = data(port, len, 0);
                match special {
                    0 => header.kind = wire::TYPE_SEQPACKET,
                    1 => header.op = Op::CreditUpdate as u16,
                    _ => {}
                }
                (header, len as usize, piece)
            })
            .collect();
        let got = run(&packets);
        let stream = |port: u32, list: &mut dyn Iterator<Item = (VsockHdr, Vec<u8>)>| -> Vec<u8> {
            list.filter(|(header, _)| header.src_port == port).flat_map(|(_, bytes)| bytes).collect()
        };
        for port in 0..3 {
            let sent = &mut packets.iter().enumerate().map(|(index, p)| (p.0, content(index, p.1)));
            prop_assert_eq!(stream(port, sent), stream(port, &mut got.iter().cloned()));
        }
        prop_assert!(got.iter().all(|(header, bytes)| header.len as usize == bytes.len() && bytes.len() <= MAX_PACKET));
    }
}
