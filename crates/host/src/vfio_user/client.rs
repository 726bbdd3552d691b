//! A client: drives any vfio-user device. For drivers in this process, and for tests. Does not trust its server: each reply is
//! checked, and waited for no longer than its patience.

use super::{
    InterruptKind, PciRegion,
    messages::{
        self, Access, DEVICE_PCI, DMA_READ, DMA_WRITE, DmaMap, DmaUnmap, ERROR, Header, IrqInfo, IrqSet, NO_REPLY,
        REGION_READ, REGION_WRITE, REPLY, RegionInfo, SmallWrite, TYPE, UNMAP_ALL, command, irq, receive, send,
    },
    version::{self, Capabilities},
};
use crate::socket;
use ringroad_mem::Region;
use std::{
    fs::File,
    io::{self, ErrorKind},
    mem::offset_of,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Interval between attempts to connect.
const RETRY: Duration = Duration::from_millis(10);

/// How long to look for a reply before sleeping.
const STALL: Duration = Duration::from_micros(50);

/// What is said of a device that is too slow.
const TIMEOUT: &str = "the device has not answered in time";

/// Why a device did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody serves the socket.
    #[error("cannot connect to {path}: {error}; is the device running?")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The error from the kernel.
        error: io::Error,
    },
    /// The device has refused a command.
    #[error("{command} was refused: {error}")]
    Refused {
        /// The command, as in the specification.
        command: &'static str,
        /// The error that the device has answered.
        error: io::Error,
    },
    /// The connection is over. All further calls fail.
    #[error("the connection to the device is over: {0}")]
    Over(String),
}

/// What a device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number of regions.
    pub regions: u32,
    /// Number of kinds of interrupts.
    pub interrupts: u32,
    /// It can be reset.
    pub reset: bool,
}

/// How often registers were accessed: what would be exits of a virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    /// Reads, each of which has waited for the device.
    pub reads: u64,
    /// Writes that have waited for the device.
    pub writes: u64,
    /// Posted writes, which have not.
    pub posted: u64,
}

/// A connection to a device.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    id: u16,
    capabilities: Capabilities,
    accesses: Accesses,
    /// How long a reply may take.
    patience: Duration,
    /// A message that is sent, then its reply.
    buffer: Vec<u8>,
    /// Why the connection is over, if it is.
    over: Option<String>,
}

impl Client {
    /// Connects to a device and agrees on a version. `patience`: how long it may take to appear, and later to answer.
    ///
    /// # Errors
    /// [`ClientError::Connect`] if nobody serves the socket in that time; the others if it is not served as the protocol asks.
    pub fn connect(path: &Path, patience: Duration) -> Result<Client, ClientError> {
        let start = Instant::now();
        let failed = |error| ClientError::Connect { path: path.to_owned(), error };
        let stream = loop {
            match socket::connect(path) {
                Ok(stream) => break stream,
                Err(error) if start.elapsed() >= patience => return Err(failed(error)),
                Err(_) => thread::sleep(RETRY),
            }
        };
        // Zero would be no limit.
        let patience = patience.max(Duration::from_millis(1));
        stream.set_nonblocking(false).map_err(failed)?;
        stream.set_read_timeout(Some(patience)).map_err(failed)?;
        stream.set_write_timeout(Some(patience)).map_err(failed)?;
        let capabilities = Capabilities { write_multiple: false, transfer: 0, fds: 0 };
        let (accesses, buffer) = (Accesses::default(), Vec::new());
        let mut client = Client { stream, id: 0, capabilities, accesses, patience, buffer, over: None };
        let proposal = version::proposal();
        let reply = client.ask(command::VERSION, &[&proposal], &[], 4096)?;
        let checked = version::check(reply);
        client.capabilities = checked.map_err(|why| client.end(why))?.1;
        Ok(client)
    }

    /// For tests that go on without the protocol.
    #[cfg(test)]
    pub(super) fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// Returns what the device has.
    ///
    /// # Errors
    /// The device refuses, is no PCI device, or is gone.
    pub fn info(&mut self) -> Result<DeviceInfo, ClientError> {
        type Info = messages::DeviceInfo;
        let info = Info { argsz: size_of::<Info>() as u32, ..Info::default() };
        let Info { flags, regions, irqs, .. } = self.ask_for(command::DEVICE_GET_INFO, &info)?;
        if flags & DEVICE_PCI == 0 {
            return Err(self.end(format!("flags {flags:#x} of a device, expected those of a PCI device")));
        }
        Ok(DeviceInfo { regions, interrupts: irqs, reset: flags & messages::DEVICE_RESET != 0 })
    }

    /// Returns a region: 0 to 5 are the BARs, 6 the ROM, [`super::CONFIG_REGION`] the configuration space.
    ///
    /// # Errors
    /// The device refuses or is gone.
    pub fn region(&mut self, index: u32) -> Result<PciRegion, ClientError> {
        let info = RegionInfo { argsz: size_of::<RegionInfo>() as u32, index, ..RegionInfo::default() };
        let RegionInfo { flags, size, .. } = self.ask_for(command::DEVICE_GET_REGION_INFO, &info)?;
        Ok(PciRegion { size, read: flags & REGION_READ != 0, write: flags & REGION_WRITE != 0 })
    }

    /// Returns the number of interrupts of a kind.
    ///
    /// # Errors
    /// The device refuses or is gone.
    pub fn interrupts(&mut self, kind: InterruptKind) -> Result<u32, ClientError> {
        let info = IrqInfo { argsz: size_of::<IrqInfo>() as u32, index: kind as u32, ..IrqInfo::default() };
        let IrqInfo { count, .. } = self.ask_for(command::DEVICE_GET_IRQ_INFO, &info)?;
        Ok(count)
    }

    /// Reads from a region and waits for the device.
    ///
    /// # Errors
    /// The range is not in the region or longer than one transfer, or the device is gone.
    pub fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), ClientError> {
        self.accesses.reads += 1;
        let access = self.access(command::REGION_READ, region, offset, data.len())?;
        let most = size_of::<Access>() + data.len();
        let reply = self.ask(command::REGION_READ, &[access.as_bytes()], &[], most)?;
        match reply.get(size_of::<Access>()..) {
            Some(read) if read.len() == data.len() => {
                data.copy_from_slice(read);
                Ok(())
            }
            _ => Err(self.end(format!("a reply without the {} bytes that were to be read", data.len()))),
        }
    }

    /// Writes to a region and waits for the device.
    ///
    /// # Errors
    /// The data is longer than one transfer, or the device refuses or is gone.
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        self.accesses.writes += 1;
        let access = self.access(command::REGION_WRITE, region, offset, data.len())?;
        self.ask(command::REGION_WRITE, &[access.as_bytes(), data], &[], size_of::<Access>()).map(|_| ())
    }

    /// Writes to a region without waiting for the device. A read that follows sees its effect.
    ///
    /// # Errors
    /// The data is longer than one transfer, or the device is gone, or so far behind that the socket stays full.
    pub fn post(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        self.accesses.posted += 1;
        let access = self.access(command::REGION_WRITE, region, offset, data.len())?;
        self.send(command::REGION_WRITE, NO_REPLY, &[access.as_bytes(), data], &[])
    }

    /// Posts several writes of up to eight bytes each, in one message if the device takes such (REGION_WRITE_MULTI): region, offset,
    /// data.
    ///
    /// # Errors
    /// As for [`Client::post`].
    pub fn post_all(&mut self, writes: &[(u32, u64, &[u8])]) -> Result<(), ClientError> {
        let small = writes.iter().all(|(_, _, data)| data.len() <= 8);
        let fits = writes.len() <= self.capabilities.transfer as usize / size_of::<SmallWrite>();
        if !small || !fits || !self.capabilities.write_multiple {
            return writes.iter().try_for_each(|&(region, offset, data)| self.post(region, offset, data));
        }
        self.accesses.posted += writes.len() as u64;
        self.begin(command::REGION_WRITE_MULTI, NO_REPLY)?;
        self.buffer.extend_from_slice((writes.len() as u64).as_bytes());
        for &(region, offset, data) in writes {
            let mut bytes = [0; 8];
            bytes.iter_mut().zip(data).for_each(|(byte, &data)| *byte = data);
            let access = Access { offset, region, count: data.len() as u32 };
            self.buffer.extend_from_slice(SmallWrite { access, data: bytes }.as_bytes());
        }
        self.finish(&[])
    }

    /// Lets the device access memory of [`Region::create`], with its file, at the region's guest address; or only read it.
    ///
    /// # Errors
    /// The device refuses: the memory overlaps other memory, is not made of whole pages, or is too much. Or it is gone.
    pub fn map(&mut self, region: &Region, file: &File, writable: bool) -> Result<(), ClientError> {
        let flags = DMA_READ | if writable { DMA_WRITE } else { 0 };
        let (argsz, size) = (size_of::<DmaMap>() as u32, region.len() as u64);
        let map = DmaMap { argsz, flags, offset: 0, address: region.guest(), size };
        self.ask(command::DMA_MAP, &[map.as_bytes()], &[file.as_fd()], 0).map(|_| ())
    }

    /// Takes memory from the device again. When this returns, it does not use it any more.
    ///
    /// # Errors
    /// It was not mapped, or the device is gone.
    pub fn unmap(&mut self, region: &Region) -> Result<(), ClientError> {
        self.unmap_with(0, region.guest(), region.len() as u64)
    }

    /// Takes all memory from the device.
    ///
    /// # Errors
    /// The device refuses or is gone.
    pub fn unmap_all(&mut self) -> Result<(), ClientError> {
        self.unmap_with(UNMAP_ALL, 0, 0)
    }

    fn unmap_with(&mut self, flags: u32, address: u64, size: u64) -> Result<(), ClientError> {
        let argsz = size_of::<DmaUnmap>() as u32;
        let unmap = DmaUnmap { argsz, flags, address, size };
        self.ask(command::DMA_UNMAP, &[unmap.as_bytes()], &[], size_of::<DmaUnmap>()).map(|_| ())
    }

    /// Has the device signal interrupts of a kind by eventfds, from the interrupt `start` on.
    ///
    /// # Errors
    /// The device has fewer, or is gone.
    pub fn set_interrupts(
        &mut self,
        kind: InterruptKind,
        start: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let mut start = start;
        for some in eventfds.chunks(self.capabilities.fds.max(1)) {
            let count = some.len() as u32;
            self.set_irqs(irq::DATA_EVENTFD | irq::TRIGGER, kind, start, count, some)?;
            start = start.saturating_add(count);
        }
        Ok(())
    }

    /// Disables all interrupts of a kind.
    ///
    /// # Errors
    /// The device refuses or is gone.
    pub fn disable_interrupts(&mut self, kind: InterruptKind) -> Result<(), ClientError> {
        self.set_irqs(irq::DATA_NONE | irq::TRIGGER, kind, 0, 0, &[])
    }

    /// Unmasks the interrupt pin, which masks itself each time it is signalled.
    ///
    /// # Errors
    /// The device has none, or is gone.
    pub fn unmask(&mut self) -> Result<(), ClientError> {
        self.set_irqs(irq::DATA_NONE | irq::UNMASK, InterruptKind::Intx, 0, 1, &[])
    }

    fn set_irqs(
        &mut self,
        flags: u32,
        kind: InterruptKind,
        start: u32,
        count: u32,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let set = IrqSet { argsz: size_of::<IrqSet>() as u32, flags, index: kind as u32, start, count };
        self.ask(command::DEVICE_SET_IRQS, &[set.as_bytes()], fds, 0).map(|_| ())
    }

    /// Resets the device.
    ///
    /// # Errors
    /// The device refuses or is gone.
    pub fn reset(&mut self) -> Result<(), ClientError> {
        self.ask(command::DEVICE_RESET, &[], &[], 0).map(|_| ())
    }

    /// Returns how often registers were accessed.
    pub fn accesses(&self) -> Accesses {
        self.accesses
    }

    fn access(&self, command: u16, region: u32, offset: u64, len: usize) -> Result<Access, ClientError> {
        match u32::try_from(len) {
            Ok(count) if count <= self.capabilities.transfer => Ok(Access { offset, region, count }),
            _ => Err(refused(command, libc::E2BIG)),
        }
    }

    /// Sends a command whose reply has the same form.
    fn ask_for<T: FromBytes + IntoBytes + Immutable + KnownLayout>(
        &mut self,
        command: u16,
        payload: &T,
    ) -> Result<T, ClientError> {
        let reply = self.ask(command, &[payload.as_bytes()], &[], size_of::<T>())?;
        let (len, read) = (reply.len(), T::read_from_bytes(reply).ok());
        read.ok_or_else(|| self.end(format!("a reply of {len} bytes, expected {}", size_of::<T>())))
    }

    /// Sends a command and returns the payload of its reply, which has `most` bytes at most.
    fn ask(
        &mut self,
        command: u16,
        payload: &[&[u8]],
        fds: &[BorrowedFd<'_>],
        most: usize,
    ) -> Result<&[u8], ClientError> {
        self.send(command, 0, payload, fds)?;
        let size = match self.reply(command, most) {
            Ok(Ok(size)) => size,
            Ok(Err(errno)) => return Err(refused(command, errno)),
            Err(why) => return Err(self.end(why)),
        };
        Ok(self.buffer.get(size_of::<Header>()..size).unwrap_or_default())
    }

    fn send(&mut self, command: u16, flags: u32, payload: &[&[u8]], fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.begin(command, flags)?;
        payload.iter().for_each(|part| self.buffer.extend_from_slice(part));
        self.finish(fds)
    }

    /// Begins a message in the buffer.
    fn begin(&mut self, command: u16, flags: u32) -> Result<(), ClientError> {
        if let Some(why) = &self.over {
            return Err(ClientError::Over(why.clone()));
        }
        self.id = self.id.wrapping_add(1);
        self.buffer.clear();
        self.buffer.extend_from_slice(Header { id: self.id, command, size: 0, flags, error: 0 }.as_bytes());
        Ok(())
    }

    /// Sends the message in the buffer.
    fn finish(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        const SIZE: usize = offset_of!(Header, size);
        let size = (self.buffer.len() as u32).to_ne_bytes();
        self.buffer.iter_mut().skip(SIZE).zip(size).for_each(|(place, byte)| *place = byte);
        // Part of a message may have been sent.
        send(self.stream.as_fd(), &self.buffer, fds).map_err(|error| self.end(explain(error)))
    }

    /// Reads a reply into the buffer. Returns its size, or the error in it. Fails if it is not what the protocol asks for.
    fn reply(&mut self, command: u16, most: usize) -> Result<Result<usize, i32>, String> {
        const HEADER: usize = size_of::<Header>();
        self.buffer.clear();
        self.buffer.resize(HEADER + most, 0);
        let (mut len, mut start) = (0, None);
        let mut files = Vec::new();
        loop {
            // The timeout of the socket is that of each part.
            if len > 0 && start.get_or_insert_with(Instant::now).elapsed() >= self.patience {
                return Err(TIMEOUT.to_owned());
            }
            let rest = self.buffer.get_mut(len..).unwrap_or_default();
            len += match receive_soon(self.stream.as_fd(), rest, &mut files) {
                Ok(0) => return Err("closed by the device".to_owned()),
                Ok(received) => received,
                Err(error) => return Err(explain(error)),
            };
            if len < HEADER {
                continue;
            }
            let Ok((header, _)) = Header::read_from_prefix(&self.buffer) else { return Err("no header".to_owned()) };
            let size = header.size as usize;
            if header.id != self.id || header.command != command || header.flags & TYPE != REPLY {
                return Err(format!("{header:?}, expected a reply to {command}, id {}", self.id));
            }
            if size < len || size > HEADER + most {
                return Err(format!("a reply of {size} bytes, expected {} at most", HEADER + most));
            }
            if len == size {
                let error = header.flags & ERROR != 0;
                return Ok(if error { Err(header.error.cast_signed()) } else { Ok(size) });
            }
        }
    }

    /// Ends the connection: what comes next on it is not known.
    fn end(&mut self, why: String) -> ClientError {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.over = Some(why.clone());
        ClientError::Over(why)
    }
}

/// Receives like [`receive`], but looks for a while before it sleeps, as a CPU stalls that reads a register: the device's answer takes
/// less time than a wakeup. Whoever else needs this CPU gets it.
fn receive_soon(socket: BorrowedFd<'_>, target: &mut [u8], files: &mut Vec<File>) -> io::Result<usize> {
    let start = Instant::now();
    while start.elapsed() < STALL {
        match receive(socket, target, files, false) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::yield_now(),
            result => return result,
        }
    }
    receive(socket, target, files, true)
}

fn refused(command: u16, errno: i32) -> ClientError {
    ClientError::Refused { command: command::name(command), error: io::Error::from_raw_os_error(errno) }
}

fn explain(error: io::Error) -> String {
    match error.kind() {
        ErrorKind::WouldBlock => TIMEOUT.to_owned(),
        _ => error.to_string(),
    }
}
