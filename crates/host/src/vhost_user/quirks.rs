//! Workarounds for what the `vhost` crate (0.18) does not do, or does in a way that real frontends and devices do not expect. Each
//! says why it is needed; what remains of it after an update of the crate can be seen here.

use crate::sys;
use ringroad_ring::bits;
use std::{
    fs::File,
    io::{self, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
};
use vhost::{
    VhostBackend,
    vhost_user::{
        Error, Frontend, VhostUserFrontend, VhostUserProtocolFeatures as Protocol, message::VhostUserInflight,
    },
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Requests, and the version in the flags of each message.
const SET_VRING_BASE: u32 = 10;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const VERSION: u32 = 1;

/// Flags of messages.
const NEED_REPLY: u32 = 1 << 3;
const REPLY: u32 = 1 << 2;

/// Why a connection ends if a message is refused and the frontend cannot be told.
pub(super) const CANNOT_REFUSE: &str = "a message was refused, and without REPLY_ACK the frontend cannot be told";

/// What [`set_vring_enable`] and [`set_backend_req_fd`] need of a session.
pub(super) trait Early {
    /// Returns whether SET_VRING_ENABLE is accepted now although the crate would refuse it.
    fn is_early(&self, enable: bool) -> bool;
    /// Enables or disables a vring. Returns whether the message was refused.
    fn enable_early(&mut self, vring: u32, enable: bool) -> bool;
    /// Returns whether the frontend may hand over a channel for requests.
    fn takes_channel(&self) -> bool;
    /// Takes that channel. Returns whether the message was refused.
    fn set_channel(&mut self, file: Option<File>) -> bool;
    /// Returns whether a refused message is answered with an error.
    fn can_refuse(&self) -> bool;
}

/// Handles SET_VRING_ENABLE where the crate would refuse it: QEMU sends it right after the protocol features, but the crate
/// expects SET_FEATURES before it; and DPDK's driver, in server mode, first of all disables the vrings of a device that has
/// reconnected. Returns `false` if the next message is another one, or one for the crate.
pub(super) fn set_vring_enable(mut socket: &UnixStream, session: &mut impl Early) -> io::Result<bool> {
    if !session.is_early(false) {
        return Ok(false);
    }
    // Request, flags, payload size; vring, 0 or 1.
    let mut message = [[0; 4]; 5];
    let len = sys::peek(socket.as_fd(), message.as_flattened_mut())?;
    let [request, flags, size, vring, enable] = message.map(u32::from_ne_bytes);
    if len < size_of_val(&message)
        || request != SET_VRING_ENABLE
        || flags & !NEED_REPLY != VERSION
        || size != 8
        || enable > 1
    {
        return Ok(false);
    }
    if !session.is_early(enable == 1) {
        return Ok(false);
    }
    socket.read_exact(message.as_flattened_mut())?;
    let refused = session.enable_early(vring, enable == 1);
    acknowledge(socket, session, [SET_VRING_ENABLE, flags], refused)?;
    Ok(true)
}

/// Acknowledges a message, given by its request and flags, if the frontend asks for that.
fn acknowledge(
    mut socket: &UnixStream,
    session: &impl Early,
    [request, flags]: [u32; 2],
    refused: bool,
) -> io::Result<()> {
    if refused && !session.can_refuse() {
        return Err(io::Error::other(CANNOT_REFUSE));
    }
    if session.can_refuse() && flags & NEED_REPLY != 0 {
        let words = [request, VERSION | REPLY, 8, refused.into(), 0];
        socket.write_all(words.map(u32::to_ne_bytes).as_flattened())?;
    }
    Ok(())
}

/// Handles SET_BACKEND_REQ_FD: of the channel that the crate makes of it, only requests about shared objects and memory can be
/// sent. Returns `false` if the next message is another one.
pub(super) fn set_backend_req_fd(socket: &UnixStream, session: &mut impl Early) -> io::Result<bool> {
    if !session.takes_channel() {
        return Ok(false);
    }
    let mut header = [[0; 4]; 3];
    let len = sys::peek(socket.as_fd(), header.as_flattened_mut())?;
    let [request, flags, size] = header.map(u32::from_ne_bytes);
    if len < size_of_val(&header) || request != SET_BACKEND_REQ_FD || flags & !NEED_REPLY != VERSION || size != 0 {
        return Ok(false);
    }
    let (_, file) = socket.recv_with_fd(header.as_flattened_mut())?;
    let refused = session.set_channel(file);
    acknowledge(socket, session, [SET_BACKEND_REQ_FD, flags], refused)?;
    Ok(true)
}

/// Sends SET_VRING_BASE for a packed ring, whose base has 32 bits (both positions with their wrap counters): the crate sends 16.
pub(super) fn set_vring_base(mut socket: &UnixStream, index: u32, base: u32) -> vhost::Result<()> {
    let message = [SET_VRING_BASE, VERSION, 8, index, base].map(u32::to_ne_bytes);
    // No reply is requested, and the crate's own messages are sent by the same thread, so the order is kept.
    socket.write_all(message.as_flattened()).map_err(broken)
}

/// Returns the number of queue pairs of a device. Uses a separate `Frontend`: the crate takes the reply to GET_QUEUE_NUM as the
/// number of vrings that it may use, while devices reply with pairs.
pub(super) fn queue_pairs(socket: &UnixStream) -> vhost::Result<u64> {
    let mut frontend = Frontend::from_stream(socket.try_clone().map_err(broken)?, 2);
    if frontend.get_features()? & bits::PROTOCOL_FEATURES == 0 {
        return Ok(1);
    }
    let protocol = frontend.get_protocol_features()? & Protocol::MQ;
    if protocol.is_empty() {
        return Ok(1);
    }
    frontend.set_protocol_features(protocol)?;
    frontend.get_queue_num()
}

/// Returns the reply to GET_INFLIGHT_FD: the crate's structure has padding, so it is a copy of the request, whose padding is the
/// frontend's and not uninitialised stack.
pub(super) fn inflight(asked: &VhostUserInflight, len: u64) -> VhostUserInflight {
    let mut reply = *asked;
    (reply.mmap_size, reply.mmap_offset) = (len, 0);
    reply
}

fn broken(error: io::Error) -> vhost::Error {
    vhost::Error::VhostUserProtocol(Error::SocketBroken(error))
}

/// Returns whether an error of the `vhost` crate is a protocol violation, not just the end of the connection.
pub(super) fn is_violation(error: &Error) -> bool {
    !matches!(error, Error::Disconnected | Error::PartialMessage | Error::SocketBroken(_))
}

/// Describes an error of the `vhost` crate for the log, in the protocol's terms.
pub(super) fn explain(error: &Error) -> String {
    match error {
        Error::Disconnected => "it has closed the connection".into(),
        Error::PartialMessage => "it has closed the connection in the middle of a message".into(),
        Error::InvalidMessage => "malformed message, or one of a feature that was not offered".into(),
        Error::IncorrectFds => "message with the wrong number of file descriptors".into(),
        Error::SocketBroken(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            "it has closed the connection".into()
        }
        other => other.to_string(),
    }
}
