//! A frontend that sends exactly the given messages.

use super::{PATIENCE, request::*, within};
use std::{
    io::{self, ErrorKind, Read},
    os::{
        fd::RawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Header flags: the version, and the request for a reply.
pub const VERSION: u32 = 1;
const NEED_REPLY: u32 = 8;
/// Flag of SET_VRING_KICK and the like: no descriptor is attached.
pub const NO_FD: u64 = 0x100;

/// Encodes 32-bit integers of a message.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Encodes 64-bit integers.
pub fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

/// Encodes a message.
pub fn message(request: u32, flags: u32, size: u32, payload: &[u8]) -> Vec<u8> {
    [&words(&[request, flags, size]), payload].concat()
}

/// The frontend's end of a vhost-user socket.
pub struct Peer(pub UnixStream);

impl Peer {
    pub fn connect(path: &Path) -> Peer {
        Peer::of(UnixStream::connect(path).unwrap())
    }

    pub fn of(stream: UnixStream) -> Peer {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Peer(stream)
    }

    /// Accepts the next connection.
    pub fn accept(listener: &UnixListener) -> Peer {
        listener.set_nonblocking(true).unwrap();
        let mut stream = None;
        within(PATIENCE, || {
            stream = listener.accept().ok();
            stream.is_some()
        });
        let (stream, _) = stream.expect("nobody connected");
        stream.set_nonblocking(false).unwrap();
        Peer::of(stream)
    }

    /// Sends raw bytes. Ignores that the other side has disconnected.
    pub fn send(&mut self, bytes: &[u8], fds: &[RawFd]) {
        let mut sent = 0;
        while sent < bytes.len() {
            match self.0.send_with_fds(&[&bytes[sent..]], if sent == 0 { fds } else { &[] }) {
                Ok(count) => sent += count,
                Err(error) if matches!(io::Error::from(error).kind(), ErrorKind::BrokenPipe) => return,
                Err(error) => panic!("cannot send: {error}"),
            }
        }
    }

    /// Sends a request and returns the payload of its reply.
    #[track_caller]
    pub fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.send(&message(request, VERSION, payload.len() as u32, payload), &[]);
        self.answer(request).unwrap_or_else(|error| panic!("no answer to request {request}: {error}"))
    }

    pub fn answer(&mut self, request: u32) -> io::Result<Vec<u8>> {
        let mut header = [0; 12];
        self.0.read_exact(&mut header)?;
        let word = |index: usize| u32::from_ne_bytes(header[4 * index..][..4].try_into().unwrap());
        assert_eq!((word(0), word(1)), (request, VERSION | 4), "the answer's request and flags");
        let mut payload = vec![0; word(2) as usize];
        self.0.read_exact(&mut payload)?;
        Ok(payload)
    }

    #[track_caller]
    pub fn ask_u64(&mut self, request: u32) -> u64 {
        u64::from_ne_bytes(self.ask(request, &[]).try_into().unwrap())
    }

    /// Sends a request with NEED_REPLY and returns whether it was accepted.
    #[track_caller]
    pub fn obeys(&mut self, request: u32, payload: &[u8], fds: &[RawFd]) -> bool {
        self.send(&message(request, VERSION | NEED_REPLY, payload.len() as u32, payload), fds);
        let answer = self.answer(request);
        let answer = answer.unwrap_or_else(|error| panic!("request {request} was not acknowledged: {error}"));
        u64::from_ne_bytes(answer.try_into().unwrap()) == 0
    }

    #[track_caller]
    pub fn ok(&mut self, request: u32, payload: &[u8], fds: &[RawFd]) {
        assert!(self.obeys(request, payload, fds), "request {request} was refused");
    }

    #[track_caller]
    pub fn refused(&mut self, request: u32, payload: &[u8], fds: &[RawFd]) {
        assert!(!self.obeys(request, payload, fds), "request {request} was accepted");
    }

    /// Returns whether the other side closes the connection.
    pub fn ends(&mut self) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match self.0.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
            }
        }
    }

    #[track_caller]
    pub fn negotiate(&mut self, acked: u64) {
        self.send(&message(SET_OWNER, VERSION, 0, &[]), &[]);
        let offered = self.ask_u64(GET_FEATURES);
        assert_eq!(acked & !offered, 0, "not offered");
        let protocol = self.ask_u64(GET_PROTOCOL_FEATURES);
        self.send(&message(SET_PROTOCOL_FEATURES, VERSION, 8, &longs(&[protocol])), &[]);
        self.ok(SET_FEATURES, &longs(&[acked]), &[]);
    }

    /// Stops a vring and returns its base.
    #[track_caller]
    pub fn get_base(&mut self, index: u32) -> u32 {
        let answer = self.ask(GET_VRING_BASE, &words(&[index, 0]));
        assert_eq!(answer[..4], index.to_ne_bytes());
        u32::from_ne_bytes(answer[4..].try_into().unwrap())
    }
}

/// Encodes the payload of SET_MEM_TABLE: guest address, size, user address, file offset of each region.
pub fn mem_table(regions: &[[u64; 4]]) -> Vec<u8> {
    [words(&[regions.len() as u32, 0]), longs(regions.as_flattened())].concat()
}

/// Encodes the payload of ADD_MEM_REG and REM_MEM_REG.
pub fn mem_reg(region: [u64; 4]) -> Vec<u8> {
    longs(&[&[0], &region[..]].concat())
}
