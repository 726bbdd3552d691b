//! A guest with many queues: it changes how many it uses, where flows go and how long interrupts wait, all the time, and sends garbage
//! on all of them.

use ringroad_attacks::{
    Random,
    frontend::{Device, features, signal, wait},
    net::{BROADCAST, HEADER, MAC, frame},
    ring::{AREA, Part, WRITE},
    scene::Scene,
};
use std::{
    io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Pairs of queues of each port.
const PAIRS: usize = 16;
/// Index of the control queue.
const CONTROL: usize = 2 * PAIRS;
/// Entries of each queue.
const ENTRIES: u16 = 64;
/// Bytes of a buffer.
const BUFFER: u64 = 2048;
/// Where buffers begin: behind all rings.
const BUFFERS: u64 = (CONTROL as u64 + 1) * AREA;
/// Where commands lie: behind all buffers, each with its reply.
const COMMANDS: u64 = BUFFERS + CONTROL as u64 * ENTRIES as u64 * BUFFER;
/// Bytes of a command and its reply.
const COMMAND: u64 = 4096;
/// VIRTIO_NET_F_CSUM, GUEST_CSUM, GUEST_TSO4, HOST_TSO4, HOST_TSO6 and HOST_UFO: what a header may ask for.
const OFFLOADS: u64 = 1 | 1 << 1 | 1 << 7 | 1 << 11 | 1 << 12 | 1 << 14;
/// VIRTIO_NET_F_CTRL_VQ, CTRL_RX, MQ, DEVICE_STATS, VQ_NOTF_COAL, NOTF_COAL and RSS.
const COMMANDS_OF: u64 = 1 << 17 | 1 << 18 | 1 << 22 | 1 << 50 | 1 << 52 | 1 << 53 | 1 << 60;

/// What an attacker has done.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    /// Frames that the device took.
    sent: u64,
    /// Frames that it brought.
    received: u64,
    /// Commands that it carried out, and that it refused.
    commands: [u64; 2],
}

/// A guest with all queues of a port.
struct Attacker {
    device: Device,
    random: Random,
    /// Whom it sends to, beside everybody: itself, and the other one.
    macs: [[u8; 6]; 2],
    used: Vec<(u16, u32)>,
    done: Done,
}

impl Attacker {
    fn connect(path: &Path, packed: bool) -> io::Result<Attacker> {
        let layout = if packed { features::RING_PACKED } else { 0 };
        let wanted = layout | MAC | OFFLOADS | COMMANDS_OF;
        let memory = COMMANDS + u64::from(ENTRIES) * COMMAND;
        let device = Device::connect(path, wanted, &[ENTRIES; CONTROL + 1], memory)?;
        assert_eq!(device.features & COMMANDS_OF, COMMANDS_OF, "a device with several queues");
        (0..=CONTROL).try_for_each(|queue| device.start(queue))?;
        let config = device.frontend.config(12)?;
        let mac = config[..6].try_into().expect("six bytes");
        let random = Random::new(u64::from(packed) + 5);
        Ok(Attacker { device, random, macs: [mac; 2], used: Vec::new(), done: Done::default() })
    }

    fn buffer(queue: usize, id: u16) -> u64 {
        BUFFERS + (queue as u64 * u64::from(ENTRIES) + u64::from(id)) * BUFFER
    }

    /// Takes back what the device has used of a pair of queues, and makes all receive buffers available.
    fn collect(&mut self, pair: usize) {
        let Attacker { device, used, done, .. } = self;
        device.rings[2 * pair].take_used(used);
        done.received += used.len() as u64;
        while let Some(id) = device.rings[2 * pair].next_id() {
            let part = Part { at: Attacker::buffer(2 * pair, id), len: BUFFER as u32, flags: WRITE };
            if device.rings[2 * pair].add(&[part]).is_none() {
                break;
            }
        }
        device.go(2 * pair);
        device.rings[2 * pair + 1].take_used(used);
        done.sent += used.len() as u64;
    }

    /// Fills a transmit queue with frames whose headers, addresses, lengths and contents mean nothing.
    fn send(&mut self, pair: usize) {
        let Attacker { device, random, macs, .. } = self;
        let ring = &mut device.rings[2 * pair + 1];
        while let Some(id) = ring.next_id() {
            let at = Attacker::buffer(2 * pair + 1, id);
            let to = [BROADCAST, macs[0], macs[1], [2, 0, 0, 0, 0, 9]][random.below(4) as usize];
            let mut bytes = [vec![0; HEADER], frame(to, macs[0], &[])].concat();
            bytes.resize(HEADER + 1 + random.below(1600) as usize, 0);
            match random.below(4) {
                0 => random.fill(&mut bytes[..HEADER]),
                1 => random.fill(&mut bytes[HEADER..]),
                2 => {
                    // IP and TCP of both versions, with lengths and offloads that lie.
                    let version = if random.below(2) == 0 { [8, 0, 0x45] } else { [0x86, 0xdd, 0x60] };
                    let types = [1, 4, 3, 0x81, 5];
                    random.fill(bytes.get_mut(HEADER + 15..).unwrap_or_default());
                    (bytes[0], bytes[1]) = (1, types[random.below(5) as usize]);
                    random.fill(&mut bytes[2..HEADER]);
                    bytes.iter_mut().skip(HEADER + 12).zip(version).for_each(|(place, byte)| *place = byte);
                }
                _ => {}
            }
            ring.mem.write(at, &bytes);
            let cut = 1 + random.below(bytes.len() as u64 - 1);
            let rest = Part { at: at + cut, len: bytes.len() as u32 - cut as u32, flags: 0 };
            let whole = Part { at, len: bytes.len() as u32, flags: 0 };
            let parts = if random.below(2) == 0 { vec![whole] } else { vec![Part { len: cut as u32, ..whole }, rest] };
            if ring.add(&parts).is_none() {
                break;
            }
        }
        device.go(2 * pair + 1);
    }

    /// A command that changes something, or nearly one.
    fn command(random: &mut Random) -> Vec<u8> {
        let mut bytes = match random.below(7) {
            0 | 1 => [&[4, 0][..], &(random.below(PAIRS as u64 + 2) as u16).to_le_bytes()].concat(),
            2 => {
                let entries = 1u16 << random.below(8);
                let mut bytes =
                    [&[4, 1][..], &[random.below(64) as u8, 0, 0, 0], &(entries - 1).to_le_bytes()].concat();
                // The queue of what is not hashed, the table, the number of transmit queues.
                for _ in 0..entries + 2 {
                    bytes.extend([1 + random.below(PAIRS as u64 - 1) as u8, 0]);
                }
                bytes.push(40);
                bytes.resize(bytes.len() + 40, random.number() as u8);
                bytes
            }
            3 => {
                let limits = random.below(1 << 7) | random.below(1 << 20) << 32;
                [&[6, random.below(2) as u8][..], &limits.to_le_bytes()].concat()
            }
            4 => {
                let limits = random.below(1 << 7) | random.below(1 << 21) << 32;
                [&[6, 2, random.below(CONTROL as u64 + 2) as u8, 0, 0, 0][..], &limits.to_le_bytes()].concat()
            }
            5 => {
                let mut bytes = vec![8, 1];
                for queue in 0..=CONTROL as u8 {
                    bytes.extend([queue, 0, 0, 0, 0, 0, 0, 0]);
                    bytes.extend((if queue % 2 == 0 { 1u64 } else { 1 << 16 }).to_le_bytes());
                }
                bytes.truncate(2 + 16 * random.below(CONTROL as u64 + 2) as usize);
                bytes
            }
            _ => vec![0, random.below(2) as u8, random.below(2) as u8],
        };
        match random.below(12) {
            0 => random.fill(&mut bytes[2..]),
            1 => bytes.truncate(random.below(bytes.len() as u64 + 1) as usize),
            2 => bytes.resize(random.below(COMMAND / 2) as usize, 0xff),
            _ => {}
        }
        if bytes.is_empty() { vec![0xff] } else { bytes }
    }

    /// Looks at the replies and fills the control queue.
    fn control(&mut self) {
        let Attacker { device, random, used, done, .. } = self;
        let ring = &mut device.rings[CONTROL];
        ring.take_used(used);
        for &(id, _) in used.iter() {
            let mut ack = [0];
            ring.mem.read(COMMANDS + u64::from(id) * COMMAND + COMMAND / 2, &mut ack);
            done.commands[usize::from(ack[0] != 0)] += 1;
        }
        while let Some(id) = ring.next_id() {
            let (at, bytes) = (COMMANDS + u64::from(id) * COMMAND, Attacker::command(random));
            ring.mem.write(at, &bytes);
            ring.mem.write(at + COMMAND / 2, &[0xee]);
            let reply = Part { at: at + COMMAND / 2, len: 1 + random.below(COMMAND / 2) as u32, flags: WRITE };
            if ring.add(&[Part { at, len: bytes.len() as u32, flags: 0 }, reply]).is_none() {
                break;
            }
        }
        ring.publish();
        signal(&device.kicks[CONTROL]);
    }

    fn run(mut self, until: Instant) -> Done {
        while Instant::now() < until {
            self.control();
            for _ in 0..PAIRS {
                let pair = self.random.below(PAIRS as u64) as usize;
                self.collect(pair);
                self.send(pair);
            }
            wait(&self.device.calls[CONTROL], Duration::from_millis(1));
        }
        self.done
    }
}

#[test]
fn queues_that_change_all_the_time_under_garbage() {
    let keys = format!("queues = {PAIRS}");
    let mut scene = Scene::new(move |config| ["a1", "a2"].iter().for_each(|name| config.port_with(name, &keys)));
    let all = scene.attack(4.0, |daemon, until| {
        let connect = |name, packed| Attacker::connect(&daemon.socket(name), packed).expect("it connects");
        let (mut one, mut other) = (connect("a1", false), connect("a2", true));
        (one.macs[1], other.macs[1]) = (other.macs[0], one.macs[0]);
        thread::scope(|scope| {
            let split = scope.spawn(|| one.run(until));
            [other.run(until), split.join().expect("no panic")]
        })
    });
    for done in all {
        println!("{done:?}");
        scene.check(done.sent > 1000 && done.received > 100, "hardly any frames were carried");
        scene.check(done.commands.iter().all(|&count| count > 10), "hardly any commands were carried out, or refused");
    }
    scene.finish();
}
