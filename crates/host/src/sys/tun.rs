//! TAP interfaces (Linux, Documentation/networking/tuntap.rst), for `tap.rs`.

use ringroad_frame::offload::Support;
use ringroad_wire::vnet_hdr;
use std::{
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
};

/// TUN_F_USO4 and TUN_F_USO6 (linux/if_tun.h), which must be set together.
const TUN_F_USO: libc::c_uint = 0x60;
/// TUN_F_UDP_TUNNEL_GSO, and with TUN_F_UDP_TUNNEL_GSO_CSUM.
const TUN_F_TUNNEL: libc::c_uint = 0x80;
const TUN_F_TUNNELS: libc::c_uint = 0x180;

fn request(name: &str) -> io::Result<libc::ifreq> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() >= libc::IFNAMSIZ || bytes.contains(&0) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: ifreq is plain data; zeros are a valid value.
    let mut request = unsafe { std::mem::zeroed::<libc::ifreq>() };
    for (place, &byte) in request.ifr_name.iter_mut().zip(bytes) {
        *place = byte as libc::c_char;
    }
    Ok(request)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sets which offloads frames from the interface may have. A kernel without UDP segmentation (before 6.2) does without.
pub(crate) fn set_tap_offloads(file: &File, offloads: Support) -> io::Result<()> {
    let both = Support::UDP4.union(Support::UDP6);
    let all = [
        (Support::CHECKSUM, libc::TUN_F_CSUM),
        (Support::TCP4, libc::TUN_F_TSO4),
        (Support::TCP6, libc::TUN_F_TSO6),
        (Support::ECN, libc::TUN_F_TSO_ECN),
        (Support::FRAGMENTS, libc::TUN_F_UFO),
        (both, TUN_F_USO),
        (Support::TUNNEL, TUN_F_TUNNEL),
        (Support::TUNNELS, TUN_F_TUNNELS),
    ];
    // All others require the checksum.
    let offloads = if offloads.contains(Support::CHECKSUM) { offloads } else { Support::empty() };
    let flags = all.iter().filter(|(support, _)| offloads.contains(*support)).fold(0, |flags, (_, flag)| flags | flag);
    let set = |flags| set_offloads(file, flags);
    set(flags).or_else(|error| if flags & TUN_F_USO != 0 { set(flags & !TUN_F_USO) } else { Err(error) })
}

/// Sets whether an interface has a carrier.
pub(crate) fn set_carrier(file: &File, up: bool) -> io::Result<()> {
    let carrier = libc::c_int::from(up);
    // SAFETY: the request reads a c_int.
    unsafe { check(libc::ioctl(file.as_raw_fd(), libc::TUNSETCARRIER, &carrier)) }
}

fn set_offloads(file: &File, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: the request takes a number.
    unsafe { check(libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(flags))) }
}

/// Sets the length in bytes of the header of frames on all queues of an interface, 12 or 24. Returns whether the kernel knows of UDP
/// tunnels (6.17), which are described in the longer one.
pub(crate) fn set_tap_header(file: &File, len: usize) -> io::Result<bool> {
    let size = len as libc::c_int;
    // SAFETY: the request reads an int.
    unsafe { check(libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &size))? };
    let knows = set_offloads(file, libc::TUN_F_CSUM | libc::TUN_F_TSO4 | TUN_F_TUNNELS).is_ok();
    set_offloads(file, 0)?;
    Ok(knows)
}

/// Opens a TAP interface, and creates it if there is none of that name: frames with a 12-byte virtio-net header, without
/// packet information and offloads, in non-blocking mode. With `multiqueue`, each further call opens another queue.
pub(crate) fn open_tap(name: &str, multiqueue: bool) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    let mut request = request(name)?;
    let queues = if multiqueue { libc::IFF_MULTI_QUEUE } else { 0 };
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | queues) as libc::c_short;
    // SAFETY: the request reads and writes an ifreq.
    unsafe { check(libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request))? };
    set_tap_header(&file, vnet_hdr::SIZE)?;
    Ok(file)
}

/// Sets the MTU of an interface.
pub(crate) fn set_mtu(name: &str, mtu: u16) -> io::Result<()> {
    // Interface requests work on any socket.
    let socket = std::os::unix::net::UnixDatagram::unbound()?;
    let mut request = request(name)?;
    request.ifr_ifru.ifru_mtu = mtu.into();
    // SAFETY: the request reads an ifreq and the union field that it is defined with.
    unsafe { check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFMTU, &mut request)) }
}

/// Sets the MTU, if given, and brings the interface up.
pub(crate) fn set_link(name: &str, mtu: Option<u16>) -> io::Result<()> {
    if let Some(mtu) = mtu {
        set_mtu(name, mtu)?;
    }
    let socket = std::os::unix::net::UnixDatagram::unbound()?;
    let fd = socket.as_raw_fd();
    // SAFETY: the requests read and write an ifreq and the union fields that they are defined with.
    unsafe {
        let mut request = request(name)?;
        check(libc::ioctl(fd, libc::SIOCGIFFLAGS, &mut request))?;
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
        check(libc::ioctl(fd, libc::SIOCSIFFLAGS, &mut request))
    }
}

/// Returns the MTU of an interface.
pub(crate) fn mtu(name: &str) -> io::Result<usize> {
    let socket = std::os::unix::net::UnixDatagram::unbound()?;
    let mut request = request(name)?;
    // SAFETY: the request fills the union field that it is defined with.
    let mtu = unsafe {
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &mut request))?;
        request.ifr_ifru.ifru_mtu
    };
    usize::try_from(mtu).map_err(io::Error::other)
}
