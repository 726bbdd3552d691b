//! The vfio-user server against a client that sends anything: whole messages with any content and descriptors, and messages that
//! are not whole. The device writes wherever it is told to.
#![no_main]

use ringroad_host::vfio_user::{
    CONFIG_REGION, InterruptKind, Interrupts, Limits, PciRegion, Rate, Server, ServerConfig, VfioDevice,
};
use ringroad_mem::{Hit, Region, Table};
use std::{
    fs::File,
    io::Read,
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};
use vmm_sys_util::{
    eventfd::{EFD_NONBLOCK, EventFd},
    sock_ctrl_msg::ScmSocket,
};

/// A device that uses all that it has.
#[derive(Clone)]
struct Device {
    interrupts: Interrupts,
    memory: Arc<Mutex<Arc<Table>>>,
}

impl VfioDevice for Device {
    fn name(&self) -> &str {
        "fuzz"
    }
    fn region(&self, index: u32) -> PciRegion {
        match index {
            0 => PciRegion::new(128 << 10),
            2 => PciRegion { size: 64, read: false, write: true },
            CONFIG_REGION => PciRegion::new(256),
            _ => PciRegion::default(),
        }
    }
    fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        assert!(offset + data.len() as u64 <= self.region(region).size && region != 2);
        data.fill(offset as u8);
    }
    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        assert!(offset + data.len() as u64 <= self.region(region).size);
        let Some(&bytes) = data.first_chunk() else { return };
        let (address, memory) = (u64::from_ne_bytes(bytes), self.memory.lock().unwrap().clone());
        if let Some(source) = memory.readable(address, 64, &mut Hit::default()) {
            if let Some(target) = memory.span(address ^ 4096, 64, &mut Hit::default()) {
                source.copy_to(target);
            }
        }
        self.interrupts.set_line(address & 1 == 1);
        self.interrupts.signal(InterruptKind::Msi, offset as usize & 3);
    }
    fn set_memory(&self, memory: Arc<Table>) {
        *self.memory.lock().unwrap() = memory;
    }
    fn reset(&self) {}
}

struct Target {
    socket: PathBuf,
    memory: File,
    constant: Arc<Region>,
    constant_file: File,
    event: EventFd,
    _server: Server,
}

/// Limits on how often something happens would have the fuzzer wait.
const MUCH: Rate = Rate { burst: 1_000_000, rate: 1_000_000 };

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let socket = std::env::temp_dir().join(format!("ringroad-fuzz-vfio-{}.sock", std::process::id()));
    let device = Device { interrupts: Interrupts::new(true, 4, 8), memory: Arc::default() };
    let limits =
        Limits { mapped: 1 << 20, regions: 16, connects: MUCH, messages: MUCH, refusals: MUCH, ..Limits::default() };
    let poll = Duration::from_micros(20);
    let config = ServerConfig { limits, poll, ..ServerConfig::new("fuzz", &socket) };
    let _server = Server::start(config, device).unwrap();
    let (_, memory) = Region::create(65536, 0, false).unwrap();
    let (constant, constant_file) = Region::create(8192, 0, false).unwrap();
    Target { socket, memory, constant, constant_file, event: EventFd::new(EFD_NONBLOCK).unwrap(), _server }
});

fn message(command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = 16 + payload.len() as u32;
    let words = [u32::from(command) << 16 | 7, size, flags, 0];
    words.iter().flat_map(|word| word.to_ne_bytes()).chain(payload.iter().copied()).collect()
}

/// DMA_MAP.
fn map(flags: u32, offset: u64, address: u64, size: u64) -> Vec<u8> {
    let longs = [32 | u64::from(flags) << 32, offset, address, size];
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let target = &*TARGET;
    let Ok(stream) = UnixStream::connect(&target.socket) else { return };
    let _ = stream.set_write_timeout(Some(Duration::from_millis(20)));
    let mut input = data;
    let mut take = |n: usize| {
        let (head, rest) = input.split_at(n.min(input.len()));
        input = rest;
        let mut out = head.to_vec();
        out.resize(n, 0);
        out
    };
    let send = |bytes: &[u8], fds: &[RawFd]| stream.send_with_fds(&[bytes], fds).is_ok();
    // Most inputs should get somewhere. The last map is for reading only, and its bytes must stay.
    let start = take(1)[0];
    if start & 1 == 1 {
        send(&message(1, 0, b"\0\0\x01\0{\"capabilities\":{\"write_multiple\":true}}\0"), &[]);
        send(&message(2, 0, &map(3, 4096, 0x1000, 0x2000)), &[target.memory.as_raw_fd()]);
        send(&message(2, 0, &map(1, 0, 0x3000, 0x2000)), &[target.constant_file.as_raw_fd()]);
        let irqs: Vec<u8> = [20u32, 0x24, 1, 0, 1].iter().flat_map(|word| word.to_ne_bytes()).collect();
        send(&message(8, 0, &irqs), &[target.event.as_raw_fd()]);
    }
    let stamp = [start; 64];
    target.constant.span(0, 64).unwrap().write(&stamp);
    for _ in 0..32 {
        let head = take(4);
        let flags = if head[1] & 7 == 0 { u32::from(head[1]) } else { u32::from(head[1] & 16) };
        let mut payload = take(usize::from(head[2]) % 80);
        // Numbers that mean something: whole pages, the first of a kind, a count that fits.
        if head[3] & 1 == 1 {
            let small = |bytes: &mut [u8]| bytes.iter_mut().skip(1).for_each(|byte| *byte = 0);
            payload.chunks_mut(4).for_each(small);
        }
        if head[3] & 2 == 2 && payload.len() >= 16 {
            let count = payload.len() as u32 - 16;
            payload[12..16].copy_from_slice(&count.to_ne_bytes());
        }
        if head[3] & 3 == 3 && payload.len() >= 32 {
            let numbers = [payload[8], payload[16], payload[24]].map(|byte| u64::from(byte) << 12);
            payload = map(u32::from(payload[4] & 3), numbers[0], numbers[1], numbers[2]);
        }
        let mut bytes = message(u16::from(head[0] % 21), flags, &payload);
        if head[3] & 0xe0 == 0xe0 {
            bytes.truncate(bytes.len() / 2);
        }
        let fds = [target.memory.as_raw_fd(), target.event.as_raw_fd()];
        let fds = match head[3] >> 2 & 7 {
            0..3 => &fds[..0],
            3 | 4 => &fds[..1],
            5 | 6 => &fds[1..],
            _ => &fds[..],
        };
        if !send(&bytes, fds) {
            break;
        }
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    // Until the server has closed its end: then it has dealt with all of it. It has to, soon.
    let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
    match (&stream).take(1 << 24).read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the server has not closed a connection that its client closed: {error}"),
    }
    // And then it serves the next one, once the descriptors of this one are closed.
    let mut next = UnixStream::connect(&target.socket).unwrap();
    next.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    next.send_with_fds(&[&message(1, 0, &[0; 4])[..]], &[]).unwrap();
    next.read_exact(&mut [0; 20]).unwrap();
    assert_eq!(
        target.constant.span(0, 64).unwrap().array(0),
        Some(stamp),
        "memory that is for reading only was written"
    );
});
