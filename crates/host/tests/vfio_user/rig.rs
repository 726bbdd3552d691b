//! A device with a few registers, and a client that sends exactly the given messages.

pub use crate::common::{
    Folder, GENEROUS, PATIENCE, ends_soon, eventfd, held, identity, keep_log, log_of, logged, longs, memory,
    set_blocking, within, words,
};
use ringroad_host::vfio_user::{
    CONFIG_REGION, InterruptKind, Interrupts, Limits, PciRegion, Server, ServerConfig, VfioDevice,
};
use ringroad_mem::{Hit, Table};
use std::{
    io::{self, ErrorKind, Read},
    os::{fd::RawFd, unix::net::UnixStream},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Commands by their numbers in the specification.
pub const VERSION: u16 = 1;
pub const DMA_MAP: u16 = 2;
pub const DMA_UNMAP: u16 = 3;
pub const GET_INFO: u16 = 4;
pub const GET_REGION_INFO: u16 = 5;
pub const GET_IRQ_INFO: u16 = 7;
pub const SET_IRQS: u16 = 8;
pub const REGION_READ: u16 = 9;
pub const REGION_WRITE: u16 = 10;
pub const RESET: u16 = 13;
pub const REGION_WRITE_MULTI: u16 = 15;

pub const NO_REPLY: u32 = 1 << 4;

pub const EINVAL: u32 = 22;
pub const ENOENT: u32 = 2;
pub const ENOMEM: u32 = 12;
pub const EEXIST: u32 = 17;
pub const ENOSPC: u32 = 28;
pub const ENOTSUP: u32 = 95;

/// Registers of BAR 0, which has 4096 bytes. All can be read and written; these do something when written:
/// reads 8 bytes of memory at the address, adds one, and writes them behind it.
pub const DMA: u64 = 0x20;
/// How that went: one of the values below.
pub const STATUS: u64 = 0x28;
/// Sets the interrupt pin.
pub const LINE: u64 = 0x30;
/// Signals an MSI.
pub const MSI: u64 = 0x38;
/// A bug in the device.
pub const PANIC: u64 = 0x40;

pub const DONE: u64 = 1;
pub const READ_FAULT: u64 = 2;
pub const WRITE_FAULT: u64 = 3;

/// What a [`Toy`] has seen.
#[derive(Default)]
pub struct Seen {
    pub registers: Mutex<Vec<u8>>,
    pub memory: Mutex<Arc<Table>>,
    pub writes: AtomicU64,
    pub resets: AtomicU64,
    pub faults: AtomicU64,
    pub disconnects: AtomicU64,
}

/// The device.
#[derive(Clone)]
pub struct Toy {
    name: String,
    interrupts: Interrupts,
    pub seen: Arc<Seen>,
}

impl Toy {
    fn dma(&self, address: u64) -> u64 {
        let memory = self.seen.memory.lock().unwrap();
        let Some(source) = memory.readable(address, 8, &mut Hit::default()) else { return READ_FAULT };
        let number = u64::from_ne_bytes(source.array(0).unwrap()) + 1;
        match memory.span(address.wrapping_add(8), 8, &mut Hit::default()) {
            Some(target) => target.write(&number.to_ne_bytes()),
            None => return WRITE_FAULT,
        };
        DONE
    }
}

impl VfioDevice for Toy {
    fn name(&self) -> &str {
        &self.name
    }
    fn region(&self, index: u32) -> PciRegion {
        match index {
            0 => PciRegion::new(4096),
            1 => PciRegion { size: 64, read: true, write: false },
            CONFIG_REGION => PciRegion::new(256),
            _ => PciRegion::default(),
        }
    }
    fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        if region == CONFIG_REGION {
            data.iter_mut().zip(offset..).for_each(|(byte, at)| *byte = at as u8);
        } else {
            let at = offset as usize;
            data.copy_from_slice(&self.seen.registers.lock().unwrap()[at..at + data.len()]);
        }
    }
    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        self.seen.writes.fetch_add(1, Relaxed);
        if region == CONFIG_REGION {
            return;
        }
        let at = offset as usize;
        self.seen.registers.lock().unwrap()[at..at + data.len()].copy_from_slice(data);
        let Ok(value) = data.try_into().map(u64::from_ne_bytes) else { return };
        match offset {
            DMA => {
                let status = self.dma(value).to_ne_bytes();
                self.seen.registers.lock().unwrap()[STATUS as usize..][..8].copy_from_slice(&status);
            }
            LINE => drop(self.interrupts.set_line(value != 0)),
            MSI => drop(self.interrupts.signal(InterruptKind::Msi, value as usize)),
            PANIC => panic!("a panic provoked by this test"),
            _ => {}
        }
    }
    fn set_memory(&self, memory: Arc<Table>) {
        *self.seen.memory.lock().unwrap() = memory;
    }
    fn reset(&self) {
        self.seen.resets.fetch_add(1, Relaxed);
        self.seen.registers.lock().unwrap().fill(0);
    }
    fn count_fault(&self) {
        self.seen.faults.fetch_add(1, Relaxed);
    }
    fn disconnected(&self) {
        self.seen.disconnects.fetch_add(1, Relaxed);
    }
}

/// How long the first device's thread polls for messages.
pub const POLL: Duration = Duration::from_millis(2);

/// Devices, each with its socket.
pub struct Rig {
    name: String,
    folder: Folder,
    pub toys: Vec<Toy>,
    pub servers: Vec<Server>,
}

impl Rig {
    /// Two devices: one to attack, one that must not notice.
    pub fn new(name: &str) -> Rig {
        Rig::with(name, Limits { connects: GENEROUS.connects, ..GENEROUS })
    }

    pub fn with(name: &str, limits: Limits) -> Rig {
        keep_log();
        let mut rig = Rig { name: name.to_owned(), folder: Folder::new(name), toys: vec![], servers: vec![] };
        for index in 0..2 {
            let seen = Arc::new(Seen { registers: Mutex::new(vec![0; 4096]), ..Seen::default() });
            let name = format!("port {}", rig.port(index));
            let toy = Toy { name: name.clone(), interrupts: Interrupts::new(true, 4, 0), seen };
            let path = rig.socket(index);
            // The one under attack polls for messages too.
            let poll = if index == 0 { POLL } else { Duration::ZERO };
            let config = ServerConfig { limits, poll, ..ServerConfig::new(&name, &path) };
            rig.servers.push(Server::start(config, toy.clone()).unwrap());
            rig.toys.push(toy);
        }
        rig
    }

    fn port(&self, index: usize) -> String {
        format!("{}{index}", self.name)
    }

    /// Name of the port under attack.
    pub fn victim(&self) -> String {
        self.port(0)
    }

    pub fn socket(&self, index: usize) -> PathBuf {
        self.folder.file(&format!("{index}.sock"))
    }

    /// A connection without a version.
    pub fn peer(&self) -> Peer {
        Peer::of(UnixStream::connect(self.socket(0)).unwrap())
    }

    /// A connection to one of the devices.
    pub fn client(&self, index: usize) -> Peer {
        let mut peer = Peer::of(UnixStream::connect(self.socket(index)).unwrap());
        peer.negotiate();
        peer
    }

    pub fn seen(&self) -> &Seen {
        &self.toys[0].seen
    }

    pub fn faults(&self) -> u64 {
        self.seen().faults.load(Relaxed)
    }

    /// Waits until the device under attack has lost so many clients.
    #[track_caller]
    pub fn disconnected(&self, count: u64) {
        let is = || self.seen().disconnects.load(Relaxed) == count;
        assert!(within(PATIENCE, is), "{:#?}", log_of(&self.victim()));
    }
}

/// Encodes a message.
pub fn message(id: u16, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = 16 + payload.len() as u32;
    [&id.to_ne_bytes()[..], &command.to_ne_bytes(), &words(&[size, flags, 0]), payload].concat()
}

/// Encodes DMA_MAP.
pub fn dma_map(flags: u32, offset: u64, address: u64, size: u64) -> Vec<u8> {
    [words(&[32, flags]), longs(&[offset, address, size])].concat()
}

/// Encodes DMA_UNMAP.
pub fn dma_unmap(flags: u32, address: u64, size: u64) -> Vec<u8> {
    [words(&[24, flags]), longs(&[address, size])].concat()
}

/// Encodes the start of REGION_READ and REGION_WRITE.
pub fn access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    [longs(&[offset]), words(&[region, count])].concat()
}

/// Encodes REGION_WRITE to BAR 0.
pub fn write(offset: u64, data: &[u8]) -> Vec<u8> {
    [access(0, offset, data.len() as u32), data.to_vec()].concat()
}

/// Encodes SET_IRQS.
pub fn set_irqs(flags: u32, index: u32, start: u32, count: u32) -> Vec<u8> {
    words(&[20, flags, index, start, count])
}

/// The client's end of a socket.
pub struct Peer {
    pub stream: UnixStream,
    id: u16,
}

impl Peer {
    pub fn of(stream: UnixStream) -> Peer {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Peer { stream, id: 0x1234 }
    }

    pub fn send(&mut self, bytes: &[u8], fds: &[RawFd]) {
        let mut sent = 0;
        while sent < bytes.len() {
            let fds = if sent == 0 { fds } else { &[] };
            sent += self.stream.send_with_fds(&[&bytes[sent..]], fds).unwrap();
        }
    }

    /// Sends a command and returns the payload of its reply, or the error in it.
    pub fn ask(&mut self, command: u16, payload: &[u8], fds: &[RawFd]) -> Result<Vec<u8>, u32> {
        self.id = self.id.wrapping_add(1);
        let message = message(self.id, command, 0, payload);
        self.send(&message, fds);
        self.answer(self.id, command).unwrap_or_else(|error| panic!("no reply to {command}: {error}"))
    }

    /// Reads a reply.
    pub fn answer(&mut self, id: u16, command: u16) -> io::Result<Result<Vec<u8>, u32>> {
        let mut header = [0; 16];
        (&self.stream).read_exact(&mut header)?;
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!(header[..4], [id.to_ne_bytes(), command.to_ne_bytes()].concat()[..]);
        let mut payload = vec![0; word(4) as usize - 16];
        (&self.stream).read_exact(&mut payload)?;
        match word(8) {
            1 => Ok(Ok(payload)),
            0x21 if payload.is_empty() => Ok(Err(word(12))),
            flags => panic!("flags {flags:#x} and {} bytes", payload.len()),
        }
    }

    pub fn negotiate(&mut self) {
        let reply = self.ask(VERSION, b"\0\0\x01\0{\"capabilities\":{\"write_multiple\":true}}\0", &[]).unwrap();
        let text = String::from_utf8(reply[4..].to_vec()).unwrap();
        assert!(text.contains("\"write_multiple\":true") && text.ends_with("}}\0"), "{text}");
    }

    /// Reads a register of BAR 0.
    pub fn get(&mut self, offset: u64) -> u64 {
        let reply = self.ask(REGION_READ, &access(0, offset, 8), &[]).unwrap();
        assert_eq!(reply[..16], access(0, offset, 8)[..]);
        u64::from_ne_bytes(reply[16..].try_into().unwrap())
    }

    /// Writes a register of BAR 0.
    pub fn set(&mut self, offset: u64, value: u64) {
        let reply = self.ask(REGION_WRITE, &write(offset, &value.to_ne_bytes()), &[]).unwrap();
        assert_eq!(reply, access(0, offset, 8));
    }

    /// Has the device read memory at an address and write behind it.
    pub fn dma(&mut self, address: u64) -> u64 {
        self.set(DMA, address);
        self.get(STATUS)
    }

    /// Checks that the device works.
    pub fn works(&mut self) {
        self.set(0x100, 0x1234_5678);
        assert_eq!(self.get(0x100), 0x1234_5678);
    }

    /// Waits for the end of the connection. Returns `false` if it does not end.
    pub fn ends(&mut self) -> bool {
        let mut rest = Vec::new();
        match (&self.stream).read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }

    /// Returns whether the connection ends within a moment.
    pub fn is_open(&mut self) -> bool {
        self.stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let open = (&self.stream).read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        self.stream.set_read_timeout(Some(PATIENCE)).unwrap();
        open
    }
}
