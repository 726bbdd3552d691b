use super::*;

/// The key and the results that Microsoft publishes for receive-side scaling ("Verifying the RSS Hash Calculation").
const MICROSOFT: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b,
    0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac,
    0x01, 0xfa,
];

fn config() -> Rss {
    let table = (0..8).map(|entry| entry % 3).collect();
    Rss { types: HashTypes::all(), unclassified: 2, table, transmit: 4, key: MICROSOFT.to_vec() }
}

/// TCP from one address and port to another.
fn tcp(source: (&str, u16), destination: (&str, u16)) -> Flow {
    use std::net::IpAddr;
    let address = |text: &str| match text.parse().unwrap() {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let addresses = [address(source.0), address(destination.0)].concat();
    let ports = [source.1, destination.1].map(u16::to_be_bytes).concat();
    let header = if addresses.len() == 8 {
        [&[8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol::TCP, 0, 0], &addresses[..]].concat()
    } else {
        [&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, protocol::TCP, 64], &addresses[..]].concat()
    };
    Flow::parse(&[&[2; 12], &header[..], &ports].concat()).unwrap()
}

#[test]
fn the_published_vectors() {
    let (v4, v6) = (HashTypes::IPV4, HashTypes::IPV6);
    let vectors = [
        (("66.9.149.187", 2794), ("161.142.100.80", 1766), 0x323e_8fc2, 0x51cc_c178, v4),
        (("199.92.111.2", 14230), ("65.69.140.83", 4739), 0xd718_262a, 0xc626_b0ea, v4),
        (("24.19.198.95", 12898), ("12.22.207.184", 38024), 0xd2d0_a5de, 0x5c2b_394a, v4),
        (("38.27.205.30", 48228), ("209.142.163.6", 2217), 0x8298_9176, 0xafc7_327f, v4),
        (("153.39.163.191", 44251), ("202.188.127.2", 1303), 0x5d18_09c5, 0x10e8_28a2, v4),
        (("3ffe:2501:200:1fff::7", 2794), ("3ffe:2501:200:3::1", 1766), 0x2cc1_8cd5, 0x4020_7d3d, v6),
        (("3ffe:501:8::260:97ff:fe40:efab", 14230), ("ff02::1", 4739), 0x0f0c_461c, 0xdde5_1bbf, v6),
        (
            ("3ffe:1900:4545:3:200:f8ff:fe21:67cf", 44251),
            ("fe80::200:f8ff:fe21:67cf", 38024),
            0x4b61_e985,
            0x02d1_feef,
            v6,
        ),
    ];
    for (source, destination, addresses, ports, version) in vectors {
        let flow = tcp(source, destination);
        assert_eq!(config().hash(&flow), Some(ports), "{source:?} to {destination:?}");
        let by_addresses = Rss { types: version, ..config() };
        assert_eq!(by_addresses.hash(&flow), Some(addresses), "{source:?} to {destination:?}");
        let other = Rss { types: HashTypes::UDPV4 | HashTypes::UDPV6, ..config() };
        assert_eq!((other.hash(&flow), other.queue(Some(&flow))), (None, 2));
        assert_eq!(config().queue(Some(&flow)), ports as u16 % 8 % 3);
    }
    assert_eq!(config().queue(None), 2);
}

#[test]
fn a_configuration_as_the_driver_sends_it() {
    let bytes = config().bytes();
    assert_eq!(bytes[..10], [0x3f, 0, 0, 0, 7, 0, 2, 0, 0, 0]);
    assert_eq!(bytes.len(), 4 + 2 + 2 + 16 + 2 + 1 + 40);
    assert_eq!(Rss::from_bytes(&bytes, 4), Ok(config()));
    assert_eq!(config().pairs(), 3);
    let short = Rss { key: vec![], table: vec![0], unclassified: 0, ..config() };
    assert_eq!((Rss::from_bytes(&short.bytes(), 4), short.pairs()), (Ok(short.clone()), 1));
    assert_eq!(short.hash(&tcp(("1.2.3.4", 1), ("1.2.3.5", 2))), Some(0));
    let long = Rss { table: vec![3; TABLE], ..config() };
    assert_eq!(Rss::from_bytes(&long.bytes(), 4), Ok(long));
}

#[test]
fn what_lies_or_goes_too_far_is_refused() {
    let good = config().bytes();
    for len in 0..good.len() {
        assert_eq!(Rss::from_bytes(&good[..len], 4), Err(Wrong::Length), "{len} bytes");
    }
    assert_eq!(Rss::from_bytes(&[&good[..], &[0]].concat(), 4), Ok(config()), "Linux 7 sends a byte more");
    let table = |len: usize| Rss { table: vec![0; len], ..config() }.bytes();
    assert_eq!(Rss::from_bytes(&table(3), 4), Err(Wrong::Value(2)), "not a power of two");
    assert_eq!(Rss::from_bytes(&table(2 * TABLE), 4), Err(Wrong::Value(255)));
    assert_eq!(Rss::from_bytes(&table(65536), 4), Err(Wrong::Value(65535)));
    let with = |change: fn(&mut Rss)| {
        let mut rss = config();
        change(&mut rss);
        Rss::from_bytes(&rss.bytes(), 4)
    };
    assert_eq!(with(|rss| rss.table[5] = 4), Err(Wrong::Value(4)));
    assert_eq!(with(|rss| rss.table[5] = 0x8001), Err(Wrong::Value(0x8001)), "the reserved bit");
    assert_eq!(with(|rss| rss.unclassified = 9), Err(Wrong::Value(9)));
    assert_eq!(with(|rss| rss.transmit = 0), Err(Wrong::Value(0)));
    assert_eq!(with(|rss| rss.transmit = 5), Err(Wrong::Value(5)));
    assert_eq!(with(|rss| rss.key = vec![1; 41]), Err(Wrong::Value(41)));
    assert_eq!(with(|rss| rss.types = HashTypes::from_bits_retain(1 << 6)), Err(Wrong::Value(64)));
}

#[test]
fn reports_as_in_a_header() {
    for (at, types) in HashTypes::all().iter().enumerate() {
        let report = HashReport { value: 0x0403_0201, types };
        assert_eq!(report.bytes(), [1, 2, 3, 4, at as u8 + 1, 0, 0, 0]);
        assert_eq!(HashReport::from_bytes(report.bytes()), report);
    }
    assert_eq!(HashReport::NONE.bytes(), [0; 8]);
    // Types with extension headers are not computed here, and there are no others.
    for kind in [0, 7, 9, 10, 33, 255] {
        assert_eq!(HashReport::from_bytes([1, 2, 3, 4, kind, 0, 0, 0]), HashReport::NONE);
    }
    assert_eq!(HashReport::from_bytes([1, 2, 3, 4, 1, 1, 0, 0]), HashReport::NONE);
}
