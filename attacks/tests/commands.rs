//! The control queue of a network device: commands without end, and kicks that keep a thread awake.

use ringroad_attacks::{
    daemon::Daemon,
    frontend::{Device, features, request::*, wait},
    net::{BUFFERS, ENTRIES, MAC, RX, TX},
    ring::{INDIRECT, NEXT, Part, WRITE, descriptor},
    scene::Scene,
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    fs, io,
    os::fd::AsFd,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Index of the control queue.
const CONTROL: usize = 2;
/// VIRTIO_NET_F_GUEST_CSUM and GUEST_TSO4.
const OFFLOADS: u64 = 1 << 1 | 1 << 7;
/// VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, CTRL_VQ, CTRL_RX, CTRL_VLAN, CTRL_MAC_ADDR.
const COMMANDS: u64 = 1 << 2 | 1 << 17 | 1 << 18 | 1 << 19 | 1 << 23;
/// The largest share of a CPU that the thread of a guest's control queue may take.
const SHARE: f64 = 0.2;

fn connect(path: &Path, packed: bool) -> io::Result<Device> {
    let layout = if packed { features::RING_PACKED } else { 0 } | features::INDIRECT_DESC;
    let device = Device::connect(path, layout | MAC | OFFLOADS | COMMANDS, &[ENTRIES, ENTRIES, ENTRIES], 4 << 20)?;
    [RX, TX, CONTROL].into_iter().try_for_each(|queue| device.start(queue))?;
    Ok(device)
}

/// CPU time of the threads of a port's control queue.
fn busy(daemon: &Daemon, port: &str) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.pid())).expect("threads");
    let read = |file: std::path::PathBuf| fs::read_to_string(file).unwrap_or_default();
    let time = tasks.flatten().filter(|task| read(task.path().join("comm")).trim() == format!("port {port} {CONTROL}"));
    let nanoseconds = |stat: String| stat.split(' ').next().and_then(|time| time.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_nanos(time.map(|task| nanoseconds(read(task.path().join("schedstat")))).sum())
}

/// Attacks two ports, one of each layout, and judges what their threads took as well.
fn attack(keeps_busy: impl Fn(&mut Device, Instant) -> u64 + Sync) {
    let mut scene = Scene::new(|config| ["a1", "a2"].iter().for_each(|name| config.port(name)));
    let results = scene.attack(2.5, |daemon, until| {
        let one = |port: &str, packed| {
            let mut device = connect(&daemon.socket(port), packed).expect("it connects");
            let start = Instant::now();
            let done = keeps_busy(&mut device, until);
            (done, busy(daemon, port).as_secs_f64() / start.elapsed().as_secs_f64())
        };
        thread::scope(|scope| {
            let split = scope.spawn(|| one("a1", false));
            [one("a2", true), split.join().expect("no panic")]
        })
    });
    for (done, share) in results {
        println!("{done} times, {:.1} % of a CPU", 100.0 * share);
        scene.check(done > 100, "the attack has done nothing");
        scene.check(share < SHARE, format!("the thread of a control queue took {:.0} % of a CPU", 100.0 * share));
    }
    scene.finish();
}

/// Keeps the queue full of these commands, in turn. Returns how many were answered.
fn flood(device: &mut Device, until: Instant, commands: &[Vec<Part>]) -> u64 {
    let (mut answered, mut used, mut next) = (0, Vec::new(), 0);
    while Instant::now() < until {
        while device.rings[CONTROL].add(&commands[next % commands.len()]).is_some() {
            next += 1;
        }
        device.go(CONTROL);
        wait(&device.calls[CONTROL], Duration::from_millis(5));
        device.rings[CONTROL].take_used(&mut used);
        answered += used.len() as u64;
    }
    answered
}

/// Writes a command to memory; returns its chain.
fn command(device: &Device, at: u64, bytes: &[u8]) -> Vec<Part> {
    device.mem.write(at, bytes);
    let ack = Part { at: at + bytes.len() as u64, len: 1, flags: WRITE };
    vec![Part { at, len: bytes.len() as u32, flags: 0 }, ack]
}

/// Each change of the offloads reaches the worker and every other port.
#[test]
fn offloads_that_change_all_the_time() {
    attack(|device, until| {
        let set = |at, offloads: u64| command(device, at, &[&[5, 0][..], &offloads.to_le_bytes()].concat());
        let commands = [set(BUFFERS, 0), set(BUFFERS + 64, OFFLOADS)];
        flood(device, until, &commands)
    });
}

#[test]
fn the_longest_tables() {
    attack(|device, until| {
        // Both tables just as long as there is no shortcut for, and one as long as a command may be.
        let table =
            |count: u32| [&count.to_le_bytes()[..], &(0..6 * count).map(|n| n as u8).collect::<Vec<_>>()].concat();
        let both = [&[1, 0][..], &table(256), &table(256)].concat();
        let long = [&[1, 0][..], &table(2700), &table(0)].concat();
        let commands = [command(device, BUFFERS, &both), command(device, BUFFERS + 0x8000, &long)];
        flood(device, until, &commands)
    });
}

/// Tables of descriptors that say nothing.
#[test]
fn commands_in_very_many_pieces() {
    attack(|device, until| {
        let packed = device.rings[CONTROL].packed;
        let entry = |index: u16| match packed {
            true => descriptor(BUFFERS, 1, 0, 0),
            false => descriptor(BUFFERS, 1, if index < 255 { NEXT } else { 0 }, index + 1),
        };
        let table: Vec<u8> = (0..256).flat_map(entry).collect();
        device.mem.write(BUFFERS + 0x1000, &table);
        let chain = vec![Part { at: BUFFERS + 0x1000, len: table.len() as u32, flags: INDIRECT }];
        flood(device, until, &[chain])
    });
}

/// A counter of kicks that reads do not clear, but lower by one. Before: 89 to 91 % of a CPU.
#[test]
fn a_kick_that_is_a_semaphore() {
    attack(|device, until| {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let kick = eventfd(0, flags).expect("an eventfd");
        rustix::io::write(&kick, &(u64::MAX - 1).to_ne_bytes()).expect("room");
        device.frontend.fd(SET_VRING_KICK, CONTROL, kick.as_fd()).expect("it is accepted");
        thread::sleep(until.saturating_duration_since(Instant::now()));
        u64::MAX
    });
}

/// Before: 51 to 60 % of a CPU.
#[test]
fn kicks_without_commands() {
    attack(|device, until| {
        let mut kicks = 0;
        while Instant::now() < until {
            for _ in 0..100 {
                ringroad_attacks::frontend::signal(&device.kicks[CONTROL]);
            }
            kicks += 100;
            thread::yield_now();
        }
        kicks
    });
}
