//! Frames that try to reach another VLAN than their port's (VLAN hopping): IEEE 802.1Q, 8.6 and 9.6.

use ringroad_attacks::{
    Random, be_nice,
    daemon::Daemon,
    frontend::{features, wait},
    net::{BROADCAST, EXPERIMENT, HEADER, MAC, NetPort, RX, TX, frame},
    ring::Part,
    scene::Scene,
};
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

/// The EtherType of a tag, and that of a provider's.
const TAG: u16 = 0x8100;
const PROVIDER: u16 = 0x88a8;
/// VIRTIO_NET_F_CSUM, HOST_TSO4, HOST_TSO6 and HOST_UFO: what the header of a sent frame may ask for.
const OFFLOADS: u64 = 1 | 1 << 11 | 1 << 12 | 1 << 14;
/// Flag and types of struct virtio_net_hdr.
const NEEDS_CSUM: u8 = 1;
const GSO: [u8; 6] = [0, 1, 3, 4, 5, 0x81];

/// The attackers' ports, with the VLANs in which they may send.
const ATTACKERS: [(&str, &str, &[u16]); 3] =
    [("a1", "vlan = 10", &[10]), ("a2", "trunk = [10, 30]", &[10, 30]), ("a3", "trunk = [10]\nnative = 30", &[10, 30])];

/// The ports beside them, with the VLANs of the frames that they may get.
const WATCHERS: [(&str, &str, &[u16]); 6] = [
    ("w10", "vlan = 10", &[10]),
    ("w20", "vlan = 20", &[20]),
    ("w30", "vlan = 30", &[30]),
    ("t20", "trunk = [20, 40]", &[20, 40]),
    ("n20", "trunk = [40]\nnative = 20", &[20, 40]),
    ("all", "trunk = \"all\"", &[]),
];

/// A frame with these tags in front of its EtherType.
fn tagged(to: [u8; 6], from: [u8; 6], tags: &[(u16, u16)]) -> Vec<u8> {
    let mut bytes = frame(to, from, b"hop");
    for (kind, control) in tags.iter().rev() {
        bytes.splice(12..12, [kind.to_be_bytes(), control.to_be_bytes()].concat());
    }
    bytes
}

/// struct virtio_net_hdr with a checksum to complete, and perhaps a segmentation.
fn header(start: u16, offset: u16, gso: u8) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    (bytes[0], bytes[1]) = (NEEDS_CSUM, gso);
    bytes[4..6].copy_from_slice(&100u16.to_le_bytes());
    bytes[6..8].copy_from_slice(&start.to_le_bytes());
    bytes[8..10].copy_from_slice(&offset.to_le_bytes());
    bytes
}

/// Puts a frame with this header into the transmit queue, in two buffers if it is `cut` behind so many of its bytes. `false`: there is
/// no room.
fn put(port: &mut NetPort, header: [u8; HEADER], frame: &[u8], cut: usize) -> bool {
    let ring = &mut port.device.rings[TX];
    let (Some(id), true) = (ring.next_id(), ring.room() >= 2) else { return false };
    let at = NetPort::buffer(TX, id);
    let bytes = [&header[..], frame].concat();
    ring.mem.write(at, &bytes);
    let part = |from: usize, to: usize| Part { at: at + from as u64, len: (to - from) as u32, flags: 0 };
    let end = HEADER + cut;
    let parts = if (HEADER + 1..bytes.len()).contains(&end) {
        vec![part(0, end), part(end, bytes.len())]
    } else {
        vec![part(0, bytes.len())]
    };
    ring.add(&parts).is_some()
}

/// What every attacker tries, whatever its port: double tags, tags of no VLAN or of others, tags at the frame's end, checksums in the
/// tag. None of it is in VLAN 20 or 40.
fn known(from: [u8; 6], to: [u8; 6]) -> Vec<([u8; HEADER], Vec<u8>)> {
    let mut all = Vec::new();
    for outer in [0, 1, 10, 20, 30, 40, 0xfff, 0xe00a, 0xf014] {
        all.push(([0; HEADER], tagged(to, from, &[(TAG, outer)])));
        for inner in [(TAG, 20), (PROVIDER, 20), (TAG, 0), (TAG, 0xfff)] {
            all.push(([0; HEADER], tagged(to, from, &[(TAG, outer), inner])));
            all.push(([0; HEADER], tagged(to, from, &[inner, (TAG, outer)])));
            all.push(([0; HEADER], tagged(to, from, &[(TAG, outer), inner, (TAG, 20)])));
        }
        // It ends in the tag, or in the EtherType behind it.
        for len in 13..=18 {
            let mut short = tagged(to, from, &[(TAG, outer)]);
            short.truncate(len);
            all.push(([0; HEADER], short));
        }
        // What completes the checksum writes to the tag, if anything does; the sum comes out as VLAN 20.
        for (start, offset) in [(0, 12), (0, 14), (12, 0), (12, 2), (14, 0), (14, 2), (16, 0), (18, 0), (10, 4)] {
            let mut bytes = tagged(to, from, &[(TAG, outer)]);
            bytes[18..].fill(0);
            bytes[18..20].copy_from_slice(&(!20u16).wrapping_sub(outer).to_be_bytes());
            all.push((header(start, offset, 0), bytes.clone()));
            all.push((header(start, offset, GSO[1]), bytes));
        }
    }
    all
}

/// Anything with tags.
fn any(random: &mut Random, from: [u8; 6], to: [u8; 6]) -> ([u8; HEADER], Vec<u8>, usize) {
    let mut pick = |list: &[u16]| list[random.below(list.len() as u64) as usize];
    let mut tag = || (pick(&[TAG, TAG, TAG, PROVIDER, EXPERIMENT]), pick(&[0, 1, 10, 20, 30, 40, 0xfff, 0xe014]));
    let tags = [tag(), tag(), tag()];
    let count = random.below(4) as usize;
    let mut bytes = tagged(to, from, &tags[..count]);
    if random.below(4) == 0 {
        bytes.truncate(12 + random.below(16) as usize);
    }
    let gso = GSO[random.below(GSO.len() as u64) as usize];
    let header = match random.below(3) {
        0 => header(random.below(24) as u16, random.below(12) as u16, gso),
        _ => [0; HEADER],
    };
    (header, bytes, random.below(24) as usize)
}

/// What came to the watchers.
#[derive(Debug, Default)]
struct Seen {
    /// Frames of attackers in the VLANs that are theirs, by watcher and attacker.
    allowed: BTreeMap<(&'static str, &'static str), u64>,
    /// Others.
    hopped: Vec<String>,
}

impl Seen {
    /// Looks at what has come to the watchers.
    fn look(&mut self, watchers: &mut [NetPort], attackers: &[NetPort]) {
        for (port, (name, _, vlans)) in watchers.iter_mut().zip(WATCHERS) {
            port.receive(32, |bytes, len| {
                let Some(source) = bytes.get(6..12) else { return };
                let Some(index) = attackers.iter().position(|attacker| attacker.mac == source) else { return };
                let (from, _, may) = ATTACKERS[index];
                let word = |at: usize| bytes.get(at..at + 2).map_or(0, |two| u16::from_be_bytes([two[0], two[1]]));
                let tag = (word(12) == TAG && len >= 16).then(|| word(14) & 0xfff);
                let good = match name {
                    // All that come here name their VLAN.
                    "all" => tag.is_some_and(|vlan| may.contains(&vlan)),
                    // An access port gets no tag of this kind.
                    _ => tag.is_none() && vlans.iter().any(|vlan| may.contains(vlan)),
                };
                if good {
                    *self.allowed.entry((name, from)).or_default() += 1;
                } else if self.hopped.len() < 20 {
                    self.hopped.push(format!("{from} to {name}: {len} bytes, {bytes:02x?}"));
                }
            });
        }
    }
}

fn setup(config: &mut ringroad_attacks::daemon::Config) {
    for (name, keys, _) in ATTACKERS {
        config.port_with(name, &format!("{keys}\nlimits = {{ storm = \"unlimited\" }}"));
    }
    WATCHERS.iter().for_each(|(name, keys, _)| config.port_with(name, keys));
}

/// The ports of attackers and watchers, connected.
fn connect(daemon: &Daemon) -> (Vec<NetPort>, Vec<NetPort>) {
    let port = |name: &str, wanted: u64| {
        NetPort::connect_with(&daemon.socket(name), MAC | wanted, 4 << 20).expect("a port of the daemon")
    };
    let packed = |index: usize| if index.is_multiple_of(2) { features::RING_PACKED } else { 0 };
    let attackers = ATTACKERS.iter().enumerate().map(|(index, (name, ..))| port(name, OFFLOADS | packed(index)));
    // The switch finishes frames for those without offloads.
    let watchers = WATCHERS.iter().enumerate().map(|(index, (name, ..))| port(name, packed(index + 1)));
    (attackers.collect(), watchers.collect())
}

/// Frames that a port may send arrive in their VLANs, so that the watchers are not blind.
fn control(attackers: &mut [NetPort], watchers: &mut [NetPort], seen: &mut Seen) {
    for port in attackers.iter_mut() {
        port.reclaim();
        for tags in [&[][..], &[(TAG, 10)], &[(TAG, 30)]] {
            put(port, [0; HEADER], &tagged(BROADCAST, port.mac, tags), 0);
        }
        port.flush();
    }
    let end = Instant::now() + Duration::from_millis(200);
    while Instant::now() < end {
        wait(&watchers[0].device.calls[RX], Duration::from_millis(5));
        seen.look(watchers, attackers);
    }
}

/// Asserts what the watchers may have seen.
fn judge(scene: &mut Scene, seen: &Seen) {
    println!("{:?}", seen.allowed);
    scene.check(seen.hopped.is_empty(), format!("frames in VLANs of others: {:#?}", seen.hopped));
    let expected = [("w10", "a1"), ("w10", "a2"), ("w10", "a3"), ("w30", "a2"), ("w30", "a3"), ("all", "a1")];
    for pair in expected {
        scene.check(seen.allowed.contains_key(&pair), format!("no frame of {} came to {}", pair.1, pair.0));
    }
}

#[test]
fn tags_that_name_other_vlans() {
    let mut scene = Scene::new(setup);
    let seen = scene.attack(3.0, |daemon, until| {
        let (mut attackers, mut watchers) = connect(daemon);
        let mut seen = Seen::default();
        control(&mut attackers, &mut watchers, &mut seen);
        let targets: Vec<_> = [BROADCAST].into_iter().chain(watchers.iter().map(|port| port.mac)).collect();
        let (mut random, mut sent) = (Random::new(20), 0u64);
        let mut lists: Vec<Vec<_>> =
            attackers.iter().map(|port| targets.iter().flat_map(|&to| known(port.mac, to)).collect()).collect();
        while Instant::now() < until {
            for (port, list) in attackers.iter_mut().zip(&mut lists) {
                port.reclaim();
                // No more than a watcher has buffers for.
                for _ in 0..32 {
                    let to = targets[random.below(targets.len() as u64) as usize];
                    let (header, bytes, cut) = match list.pop() {
                        Some((header, bytes)) => (header, bytes, 0),
                        None => any(&mut random, port.mac, to),
                    };
                    sent += u64::from(put(port, header, &bytes, cut));
                }
                port.flush();
            }
            wait(&watchers[0].device.calls[RX], Duration::from_micros(500));
            seen.look(&mut watchers, &attackers);
        }
        assert!(lists.iter().all(Vec::is_empty), "not all was tried");
        control(&mut attackers, &mut watchers, &mut seen);
        println!("{sent} frames");
        seen
    });
    judge(&mut scene, &seen);
    scene.finish();
}

/// The tag changes in the sender's memory while the daemon reads the frame.
#[test]
fn a_tag_that_changes_meanwhile() {
    let mut scene = Scene::new(setup);
    let seen = scene.attack(2.5, |daemon, until| {
        let (mut attackers, mut watchers) = connect(daemon);
        let mut seen = Seen::default();
        control(&mut attackers, &mut watchers, &mut seen);
        let (stop, memory) = (AtomicBool::new(false), attackers[1].device.mem.clone());
        thread::scope(|scope| {
            scope.spawn(|| {
                be_nice();
                let tags = [10u16, 20, 30, 40].map(|vlan| [TAG.to_be_bytes(), vlan.to_be_bytes()].concat());
                for tag in tags.iter().cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                    // All of them: the ring takes their buffers in turn.
                    (0..256).for_each(|id| memory.write(NetPort::buffer(TX, id) + HEADER as u64 + 12, tag));
                }
            });
            while Instant::now() < until {
                let port = &mut attackers[1];
                port.reclaim();
                for number in 0..32 {
                    let tags = [(TAG, 10), (TAG, 20)];
                    put(port, [0; HEADER], &tagged(BROADCAST, port.mac, &tags[..1 + number % 2]), 0);
                }
                port.flush();
                wait(&watchers[0].device.calls[RX], Duration::from_micros(500));
                seen.look(&mut watchers, &attackers);
            }
            stop.store(true, Ordering::Relaxed);
        });
        seen
    });
    judge(&mut scene, &seen);
    scene.finish();
}
