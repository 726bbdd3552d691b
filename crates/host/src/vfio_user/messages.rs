//! The messages of vfio-user (QEMU, docs/interop/vfio-user.rst), in host byte order as the protocol has them. Fields are not
//! validated here; the receiver does that.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::{
    fs::File,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::BorrowedFd,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Commands.
pub(super) mod command {
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const DEVICE_GET_INFO: u16 = 4;
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    pub const DEVICE_SET_IRQS: u16 = 8;
    pub const REGION_READ: u16 = 9;
    pub const REGION_WRITE: u16 = 10;
    pub const DEVICE_RESET: u16 = 13;
    pub const REGION_WRITE_MULTI: u16 = 15;

    /// Returns whether a command may come with descriptors.
    pub fn has_descriptors(command: u16) -> bool {
        matches!(command, DMA_MAP | DEVICE_SET_IRQS)
    }

    /// Returns the name of a command, for the log.
    pub fn name(command: u16) -> &'static str {
        match command {
            VERSION => "VERSION",
            DMA_MAP => "DMA_MAP",
            DMA_UNMAP => "DMA_UNMAP",
            DEVICE_GET_INFO => "DEVICE_GET_INFO",
            DEVICE_GET_REGION_INFO => "DEVICE_GET_REGION_INFO",
            6 => "DEVICE_GET_REGION_IO_FDS",
            DEVICE_GET_IRQ_INFO => "DEVICE_GET_IRQ_INFO",
            DEVICE_SET_IRQS => "DEVICE_SET_IRQS",
            REGION_READ => "REGION_READ",
            REGION_WRITE => "REGION_WRITE",
            11 => "DMA_READ",
            12 => "DMA_WRITE",
            DEVICE_RESET => "DEVICE_RESET",
            14 => "DIRTY_PAGES",
            REGION_WRITE_MULTI => "REGION_WRITE_MULTI",
            16 => "DEVICE_FEATURE",
            17 => "MIG_DATA_READ",
            18 => "MIG_DATA_WRITE",
            _ => "an unknown command",
        }
    }
}

/// Flags of a header: the message type, "no reply", and an error in a reply.
pub(super) const TYPE: u32 = 0xf;
pub(super) const REPLY: u32 = 1;
pub(super) const NO_REPLY: u32 = 1 << 4;
pub(super) const ERROR: u32 = 1 << 5;

/// Flags of DMA_MAP.
pub(super) const DMA_READ: u32 = 1;
pub(super) const DMA_WRITE: u32 = 1 << 1;
/// Flag of DMA_UNMAP: all maps (VFIO_DMA_UNMAP_FLAG_ALL).
pub(super) const UNMAP_ALL: u32 = 1 << 1;

/// Flags of DEVICE_GET_INFO: the device can be reset, and is a PCI device.
pub(super) const DEVICE_RESET: u32 = 1;
pub(super) const DEVICE_PCI: u32 = 1 << 1;

/// Flags of DEVICE_GET_REGION_INFO.
pub(super) const REGION_READ: u32 = 1;
pub(super) const REGION_WRITE: u32 = 1 << 1;

/// Flags of DEVICE_GET_IRQ_INFO.
pub(super) const IRQ_EVENTFD: u32 = 1;
pub(super) const IRQ_MASKABLE: u32 = 1 << 1;
pub(super) const IRQ_AUTOMASKED: u32 = 1 << 2;

/// Kinds of interrupts that devices here do not have, but QEMU asks for: for errors, and for the request to give the device back.
pub(super) const IRQ_ERR: u32 = 3;
pub(super) const IRQ_REQ: u32 = 4;

/// Flags of DEVICE_SET_IRQS.
pub(super) mod irq {
    pub const DATA_NONE: u32 = 1;
    pub const DATA_BOOL: u32 = 1 << 1;
    pub const DATA_EVENTFD: u32 = 1 << 2;
    pub const MASK: u32 = 1 << 3;
    pub const UNMASK: u32 = 1 << 4;
    pub const TRIGGER: u32 = 1 << 5;
    pub const DATA: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
    pub const ACTION: u32 = MASK | UNMASK | TRIGGER;
}

/// Regions of a PCI device: six BARs, the ROM, the configuration space, VGA.
pub(super) const REGIONS: u32 = 9;

/// What every message begins with.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Header {
    pub id: u16,
    pub command: u16,
    /// Bytes of the message, with the header.
    pub size: u32,
    pub flags: u32,
    /// An errno, in a reply with [`ERROR`].
    pub error: u32,
}

/// VERSION; followed by capabilities.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Version {
    pub major: u16,
    pub minor: u16,
}

/// DMA_MAP.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DmaMap {
    pub argsz: u32,
    pub flags: u32,
    /// In the file.
    pub offset: u64,
    pub address: u64,
    pub size: u64,
}

/// DMA_UNMAP, and its reply.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DmaUnmap {
    pub argsz: u32,
    pub flags: u32,
    pub address: u64,
    pub size: u64,
}

/// DEVICE_GET_INFO, and its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DeviceInfo {
    pub argsz: u32,
    pub flags: u32,
    pub regions: u32,
    pub irqs: u32,
}

/// DEVICE_GET_REGION_INFO, and its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RegionInfo {
    pub argsz: u32,
    pub flags: u32,
    pub index: u32,
    pub cap_offset: u32,
    pub size: u64,
    pub offset: u64,
}

/// DEVICE_GET_IRQ_INFO, and its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct IrqInfo {
    pub argsz: u32,
    pub flags: u32,
    pub index: u32,
    pub count: u32,
}

/// DEVICE_SET_IRQS; followed by a byte for each interrupt with [`irq::DATA_BOOL`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct IrqSet {
    pub argsz: u32,
    pub flags: u32,
    pub index: u32,
    pub start: u32,
    pub count: u32,
}

/// REGION_READ and REGION_WRITE, and their replies; followed by data.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Access {
    pub offset: u64,
    pub region: u32,
    pub count: u32,
}

/// One write of REGION_WRITE_MULTI, which begins with their number as 64 bits; its reply is that number.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct SmallWrite {
    pub access: Access,
    pub data: [u8; 8],
}

/// The most descriptors that the kernel passes at once (SCM_MAX_FD): none is lost for lack of room.
const MOST_FDS: usize = 253;

/// Reads what is there, at most `target`, and adds descriptors that came with it to `files`. Returns 0 at the end of the stream.
/// Does not read on beyond bytes that had descriptors.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    target: &mut [u8],
    files: &mut Vec<File>,
    wait: bool,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(target)], &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            result => break result?,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            files.extend(fds.map(File::from));
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("descriptors were lost: this process has too many open (RLIMIT_NOFILE)"));
    }
    Ok(received.bytes)
}

/// Sends all of `bytes`, the descriptors with the first of them. Blocks while the socket is full.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut rest = bytes;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    while !rest.is_empty() {
        let sent = if rest.len() == bytes.len() && !fds.is_empty() {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(io::Error::from(io::ErrorKind::InvalidInput));
            }
            sendmsg(socket, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL)
        } else {
            rustix::net::send(socket, rest, SendFlags::NOSIGNAL)
        };
        match sent {
            Ok(len) => rest = rest.get(len..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Sends as much of `bytes` as the socket takes at once. Never waits.
pub(super) fn send_now(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(0),
            result => return Ok(result?),
        }
    }
}
