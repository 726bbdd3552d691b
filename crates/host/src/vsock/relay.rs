//! Sockets of the host behind connections of a guest. A connection owns the writing end of its socket; the worker reads.

use super::worker::{Command, Shared};
use crate::sys;
use ringroad_vsock::{Key, Payload, Relay};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use std::{
    io,
    net::{Shutdown, SocketAddr},
    os::fd::AsFd,
    path::Path,
    sync::Arc,
};

/// A socket of the host, Unix or TCP, behind a connection.
pub struct HostRelay {
    pub(super) socket: Arc<Socket>,
    /// Its number at the worker.
    pub(super) slot: u64,
    pub(super) guest: u32,
    pub(super) worker: Arc<Shared>,
    /// Its program has asked for the connection and waits for "OK".
    pub(super) asked: bool,
}

impl Relay for HostRelay {
    fn opened(&mut self, key: Key) {
        if std::mem::take(&mut self.asked) {
            let line = format!("OK {}\n", key.port);
            // A socket that nothing was written to has room for a line. A program that is gone is noticed by the worker.
            let _ = self.socket.send(line.as_bytes());
        }
    }

    fn deliver(&mut self, payload: &mut Payload<'_>) -> io::Result<()> {
        while !payload.is_empty() {
            let private = payload.private();
            let sent = if private.is_empty() {
                sys::send_spans(self.socket.as_fd(), payload.rest())
            } else {
                self.socket.send_with_flags(private, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            };
            match sent {
                Ok(sent) => payload.skip(sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.worker.send(Command::Failed(self.slot, is_reset(&self.socket, error.kind())));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    fn close(&mut self, reset: bool) {
        if reset && is_tcp(&self.socket) {
            // A TCP connection is reset too.
            let _ = SockRef::from(&*self.socket).set_linger(Some(std::time::Duration::ZERO));
        }
        self.worker.close(self.guest, self.slot);
    }
}

/// What the kernel keeps for a program that does not read: as much as it allows to anybody, so that less is kept here, which
/// takes a copy more.
pub(super) fn enlarge(socket: &Socket) {
    let _ = socket.set_send_buffer_size(BUFFER);
}

/// The usual net.core.wmem_max.
const BUFFER: usize = 212_992;

fn is_tcp(socket: &Socket) -> bool {
    socket.domain().is_ok_and(|domain| domain != Domain::UNIX)
}

/// Whether an error says that the program has reset its connection. A Unix socket says so of a program that just ended with
/// something unread.
pub(super) fn is_reset(socket: &Socket, error: io::ErrorKind) -> bool {
    error == io::ErrorKind::ConnectionReset && is_tcp(socket)
}

/// Connects to a Unix socket without waiting: where nobody accepts, that is an error.
pub(super) fn connect_unix(path: &Path) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    enlarge(&socket);
    Ok(socket)
}

/// Connects to a TCP port; `false`: it is not known yet whether there is one.
pub(super) fn connect_tcp(address: SocketAddr) -> io::Result<(Socket, bool)> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    let _ = socket.set_tcp_nodelay(true);
    match socket.connect(&address.into()) {
        Ok(()) => Ok((socket, true)),
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok((socket, false)),
        Err(error) => Err(error),
    }
}

/// The longest line that asks for a connection: "CONNECT 4294967295\r\n".
pub(super) const LINE: usize = 20;

/// The port that a line asks for: `CONNECT <port>`, as Firecracker has it. `None`: the line is not finished yet.
pub(super) fn parse(line: &[u8]) -> Option<Result<(u32, usize), &'static str>> {
    const EXPECTED: &str = "expected \"CONNECT <port>\" and a line feed";
    let Some(end) = line.iter().position(|&byte| byte == b'\n') else {
        return (line.len() >= LINE).then_some(Err(EXPECTED));
    };
    let text = line[..end].strip_suffix(b"\r").unwrap_or(&line[..end]);
    let port = text.strip_prefix(b"CONNECT ").or_else(|| text.strip_prefix(b"connect "));
    let digits = port.filter(|port| !port.is_empty() && port.iter().all(u8::is_ascii_digit));
    let number = digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    Some(number.map(|port| (port, end + 1)).ok_or(EXPECTED))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn a_line_asks_for_a_port() {
        assert_eq!(parse(b"CONNECT 1024\n"), Some(Ok((1024, 13))));
        assert_eq!(parse(b"CONNECT 4294967295\r\n"), Some(Ok((u32::MAX, 20))));
        assert_eq!(parse(b"CONNECT 1\nhello"), Some(Ok((1, 10))), "what follows is the program's");
        for unfinished in [&b""[..], b"CONN", b"CONNECT 42949672951"] {
            assert_eq!(parse(unfinished), None);
        }
        for wrong in [
            &b"\n"[..],
            b"CONNECT\n",
            b"CONNECT \n",
            b"CONNECT -1\n",
            b"CONNECT +1\n",
            b"CONNECT 4294967296\n",
            b"CONNECT 1 \n",
            b"GET / HTTP/1.1\r\n",
            b"xxxxxxxxxxxxxxxxxxxx",
        ] {
            assert!(matches!(parse(wrong), Some(Err(_))), "{wrong:?}");
        }
    }
}
