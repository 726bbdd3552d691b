//! vhost-user messages by hand, after QEMU's docs/interop/vhost-user.rst, and a device that was set up with them.

use crate::ring::{AREA, Memory, Ring, USER};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
    net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
        sendmsg, socket_with,
    },
};
use std::{
    io::{self, IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::{Duration, Instant},
};

/// Requests of a frontend, by their names in the specification.
#[allow(missing_docs, reason = "the specification's names and numbers")]
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const GET_CONFIG: u32 = 24;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const LAST: u32 = 44;
}
use request::*;

/// Feature bits.
#[allow(missing_docs, reason = "the specification's names and numbers")]
pub mod features {
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
}

const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// REPLY_ACK, CONFIG, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
const PROTOCOL: u64 = 1 << 3 | 1 << 9 | 1 << 13 | 1 << 15;
/// How long the daemon may take for anything.
const PATIENCE: Duration = Duration::from_secs(2);

/// A connection to a vhost-user socket.
#[derive(Debug)]
pub struct Frontend {
    stream: UnixStream,
}

impl Frontend {
    /// Connects.
    pub fn connect(path: &Path) -> io::Result<Frontend> {
        let stream = connect(path, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Frontend { stream })
    }

    /// The socket.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a message with any flags beside the version.
    pub fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut bytes = [request, VERSION | flags, payload.len() as u32].map(u32::to_ne_bytes).as_flattened().to_vec();
        bytes.extend_from_slice(payload);
        if fds.is_empty() {
            return { &self.stream }.write_all(&bytes);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(fds));
        sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Receives a reply's payload.
    pub fn receive(&self) -> io::Result<(u32, Vec<u8>)> {
        let mut header = [0; 12];
        { &self.stream }.read_exact(&mut header)?;
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let mut payload = vec![0; word(8).min(1 << 16) as usize];
        { &self.stream }.read_exact(&mut payload)?;
        if word(4) & REPLY == 0 {
            return Err(io::Error::other("not a reply"));
        }
        Ok((word(0), payload))
    }

    /// A message that is answered with a payload.
    pub fn ask(&self, request: u32, payload: &[u8]) -> io::Result<Vec<u8>> {
        self.send(request, 0, payload, &[])?;
        let (answered, payload) = self.receive()?;
        if answered == request { Ok(payload) } else { Err(io::Error::other("the reply to something else")) }
    }

    /// A message that is answered with a number only. An error: it was refused, or the connection is over.
    pub fn tell(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send(request, NEED_REPLY, payload, fds)?;
        let (answered, payload) = self.receive()?;
        match (answered == request, number(&payload)) {
            (true, Some(0)) => Ok(()),
            (true, Some(code)) => Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("refused: {code}"))),
            _ => Err(io::Error::other("the reply to something else")),
        }
    }

    /// Negotiates all that a driver wants of what is offered. Returns the feature bits.
    pub fn negotiate(&self, wanted: u64) -> io::Result<u64> {
        let number = |payload: Vec<u8>| number(&payload).ok_or_else(|| io::Error::other("expected eight bytes"));
        let offered = number(self.ask(GET_FEATURES, &[])?)?;
        let protocol = number(self.ask(GET_PROTOCOL_FEATURES, &[])?)? & PROTOCOL;
        self.send(SET_PROTOCOL_FEATURES, 0, &protocol.to_ne_bytes(), &[])?;
        self.tell(SET_OWNER, &[], &[])?;
        let acked = offered & (wanted | features::VERSION_1 | features::PROTOCOL_FEATURES);
        self.tell(SET_FEATURES, &acked.to_ne_bytes(), &[])?;
        Ok(acked)
    }

    /// Shares a region. `guest`, `user`: its addresses.
    pub fn add_region(&self, file: BorrowedFd<'_>, guest: u64, len: u64, user: u64, offset: u64) -> io::Result<()> {
        let words = [0, guest, len, user, offset].map(u64::to_ne_bytes);
        self.tell(ADD_MEM_REG, words.as_flattened(), &[file])
    }

    /// Shares one region in the place of all.
    pub fn set_memory(&self, mem: &Memory) -> io::Result<()> {
        let mut payload = [1u32, 0].map(u32::to_ne_bytes).as_flattened().to_vec();
        payload.extend_from_slice([0, mem.len(), USER, 0].map(u64::to_ne_bytes).as_flattened());
        self.tell(SET_MEM_TABLE, &payload, &[mem.file().as_fd()])
    }

    /// A message about a vring with a number.
    pub fn vring(&self, request: u32, index: usize, value: u32) -> io::Result<()> {
        self.tell(request, [index as u32, value].map(u32::to_ne_bytes).as_flattened(), &[])
    }

    /// SET_VRING_ADDR.
    pub fn addresses(&self, index: usize, ring: &Ring) -> io::Result<()> {
        let mut payload = [index as u32, 0].map(u32::to_ne_bytes).as_flattened().to_vec();
        let words = [USER + ring.desc, USER + ring.device, USER + ring.driver, 0];
        payload.extend_from_slice(words.map(u64::to_ne_bytes).as_flattened());
        self.tell(SET_VRING_ADDR, &payload, &[])
    }

    /// SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR.
    pub fn fd(&self, request: u32, index: usize, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.tell(request, &(index as u64).to_ne_bytes(), &[fd])
    }

    /// The configuration space.
    pub fn config(&self, len: u32) -> io::Result<Vec<u8>> {
        let mut payload = [0, len, 0].map(u32::to_ne_bytes).as_flattened().to_vec();
        payload.resize(12 + len as usize, 0);
        let answer = self.ask(GET_CONFIG, &payload)?;
        answer.get(12..).map(<[u8]>::to_vec).ok_or_else(|| io::Error::other("a short configuration space"))
    }
}

/// Connects to a Unix socket. Where its queue stays full until the time is over, that is an error, not a wait for ever.
pub fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let (address, end) = (SocketAddrUnix::new(path)?, Instant::now() + patience);
    loop {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(Errno::AGAIN) if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => return Err(error.into()),
        }
    }
}

fn number(payload: &[u8]) -> Option<u64> {
    Some(u64::from_ne_bytes(payload.try_into().ok()?))
}

/// A new eventfd that does not block.
pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

/// Adds one to an eventfd.
pub fn signal(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Waits for an eventfd, and empties it. `false`: the time is over.
pub fn wait(fd: &OwnedFd, timeout: Duration) -> bool {
    let time = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let there = poll(&mut fds, Some(&time)).is_ok_and(|count| count > 0);
    if there {
        let _ = rustix::io::read(fd, &mut [0; 8]);
    }
    there
}

/// A device that was set up: memory, rings, notifications.
#[derive(Debug)]
pub struct Device {
    /// The connection.
    pub frontend: Frontend,
    /// The guest's memory. Rings lie at its beginning, [`AREA`] bytes each.
    pub mem: Memory,
    /// The queues.
    pub rings: Vec<Ring>,
    /// Tell the device of each queue.
    pub kicks: Vec<OwnedFd>,
    /// The device tells of each queue.
    pub calls: Vec<OwnedFd>,
    /// What was negotiated.
    pub features: u64,
}

impl Device {
    /// Connects and sets all up; rings run when they are started.
    pub fn connect(path: &Path, wanted: u64, sizes: &[u16], memory: u64) -> io::Result<Device> {
        let frontend = Frontend::connect(path)?;
        let features = frontend.negotiate(wanted)?;
        let mem = Memory::new(memory);
        frontend.set_memory(&mem)?;
        let packed = features & features::RING_PACKED != 0;
        let ring = |(index, &size)| Ring::new(&mem, packed, size, index as u64 * AREA);
        let rings: Vec<_> = sizes.iter().enumerate().map(ring).collect();
        let events = || sizes.iter().map(|_| event()).collect();
        Ok(Device { frontend, rings, kicks: events(), calls: events(), features, mem })
    }

    /// Starts a queue at its beginning.
    pub fn start(&self, index: usize) -> io::Result<()> {
        self.prepare(index)?;
        self.frontend.fd(SET_VRING_CALL, index, self.calls[index].as_fd())?;
        self.frontend.fd(SET_VRING_KICK, index, self.kicks[index].as_fd())?;
        self.frontend.vring(SET_VRING_ENABLE, index, 1)
    }

    /// All that a queue needs but its descriptors.
    pub fn prepare(&self, index: usize) -> io::Result<()> {
        self.frontend.vring(SET_VRING_NUM, index, self.rings[index].size.into())?;
        self.frontend.vring(SET_VRING_BASE, index, if self.rings[index].packed { 0x8000_8000 } else { 0 })?;
        self.frontend.addresses(index, &self.rings[index])
    }

    /// Publishes what was added to a queue and kicks.
    pub fn go(&mut self, index: usize) {
        self.rings[index].publish();
        signal(&self.kicks[index]);
    }
}
