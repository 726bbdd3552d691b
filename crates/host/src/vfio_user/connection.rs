//! The server's end of a connection: takes whole messages from the stream, with their descriptors. Used by `server.rs`.
//!
//! A client posts many small writes, so it reads what is there at once. A read ends with the first bytes that had descriptors. They
//! belong to the last message in it whose command may have some, or else to the last one; until that is whole, nothing beyond it
//! is read. So they reach their message unless a client sends several with descriptors in one system call, which no client does.

use super::{
    messages::{Header, command, receive},
    session::{LONGEST, check},
    version::FDS,
};
use crate::Quota;
use std::{
    fs::File,
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    time::Instant,
};
use zerocopy::FromBytes;

/// Bytes that are read at once.
const INBOX: usize = 4096;

/// How a connection ended.
pub(super) enum End {
    /// The reason, for the log.
    Closed(String),
    /// The client did what it may not.
    Violation(String),
    /// Signalling an interrupt blocked.
    Excluded,
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> End {
        End::Closed(error.to_string())
    }
}

/// A connection and its buffers.
pub(super) struct Connection {
    pub stream: UnixStream,
    /// Until when no other client is turned away.
    pub accept: Option<Instant>,
    pub messages: Quota,
    /// What was read: the part from `start` to `end` is still to be taken.
    inbox: [u8; INBOX],
    start: usize,
    end: usize,
    /// Descriptors of a message in the inbox.
    arrived: Vec<File>,
    /// The message that was taken, without its header, and its descriptors.
    pub payload: Vec<u8>,
    pub files: Vec<File>,
    pub reply: Vec<u8>,
}

impl Connection {
    pub(super) fn new(stream: UnixStream, messages: Quota) -> Connection {
        let (payload, reply) = (Vec::new(), Vec::new());
        let (arrived, files) = (Vec::new(), Vec::new());
        Connection {
            stream,
            accept: None,
            messages,
            inbox: [0; INBOX],
            start: 0,
            end: 0,
            arrived,
            payload,
            files,
            reply,
        }
    }

    /// Returns whether something was read that is still to be taken.
    pub(super) fn has_more(&self) -> bool {
        self.start < self.end
    }

    /// Returns whether descriptors were read that are still to be taken.
    pub(super) fn has_descriptors(&self) -> bool {
        !self.arrived.is_empty()
    }

    /// Reads what has arrived. Returns whether there is something to take.
    pub(super) fn read_more(&mut self) -> Result<bool, End> {
        Ok(self.has_more() || self.read_now()?)
    }

    /// Returns the next message, if all of it was read and no descriptors were: header and payload. It is not checked.
    pub(super) fn peek(&self) -> Option<(Header, &[u8])> {
        let unread = self.inbox.get(self.start..self.end)?;
        let (header, rest) = Header::read_from_prefix(unread).ok()?;
        let payload = (header.size as usize).saturating_sub(size_of::<Header>());
        Some((header, rest.get(..payload)?)).filter(|_| !self.has_descriptors())
    }

    /// Reads what has arrived, also of a message that has begun. Never waits; returns whether there was something.
    pub(super) fn read_now(&mut self) -> Result<bool, End> {
        self.read(size_of::<Header>(), false)
    }

    /// Returns all descriptors that nobody has taken.
    pub(super) fn into_files(self) -> impl Iterator<Item = File> {
        self.arrived.into_iter().chain(self.files)
    }

    /// Takes a whole message. Returns `None` if there is none; waits for the rest of one that has begun.
    pub(super) fn take(&mut self) -> Result<Option<Header>, End> {
        loop {
            let unread = self.inbox.get(self.start..self.end).unwrap_or_default();
            let (len, header) = (unread.len(), Header::read_from_prefix(unread).ok());
            let mut size = size_of::<Header>();
            if let Some((header, _)) = header {
                check(&header).map_err(End::Violation)?;
                size = header.size as usize;
                if len >= size || size > INBOX {
                    self.take_payload(size.min(LONGEST) - size_of::<Header>())?;
                    self.take_files(header.command);
                    return Ok(Some(header));
                }
            }
            // Of a message that has begun the rest is waited for.
            if !self.read(size - len, len > 0)? {
                return Ok(None);
            }
        }
    }

    /// Reads more, but no more than is missing of a message that has descriptors. Returns `false` if there is nothing to read and it
    /// does not wait.
    fn read(&mut self, missing: usize, wait: bool) -> Result<bool, End> {
        self.inbox.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let room = self.inbox.get_mut(self.end..).unwrap_or_default();
        let most = if self.arrived.is_empty() { room.len() } else { missing.min(room.len()) };
        let begun = self.end > 0;
        match receive(self.stream.as_fd(), room.get_mut(..most).unwrap_or_default(), &mut self.arrived, wait) {
            Ok(0) => Err(closed(begun)),
            Ok(len) => {
                self.end += len;
                few(&self.arrived).map(|()| true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes the payload of the message at the start of the inbox. Waits for what is not there.
    fn take_payload(&mut self, len: usize) -> Result<(), End> {
        self.payload.clear();
        self.start += size_of::<Header>();
        let there = self.inbox.get(self.start..self.end).unwrap_or_default();
        let there = there.get(..len).unwrap_or(there);
        self.payload.extend_from_slice(there);
        self.start += there.len();
        let mut at = self.payload.len();
        self.payload.resize(len, 0);
        while at < len {
            let rest = self.payload.get_mut(at..).unwrap_or_default();
            match receive(self.stream.as_fd(), rest, &mut self.arrived, true)? {
                0 => return Err(closed(true)),
                more => at += more,
            }
            few(&self.arrived)?;
        }
        Ok(())
    }

    /// Takes the descriptors that have arrived, if they belong to the message that was just taken.
    fn take_files(&mut self, command: u16) {
        if self.arrived.is_empty() {
            return;
        }
        let mut later = self.inbox.get(self.start..self.end).unwrap_or_default();
        while !later.is_empty() {
            match Header::read_from_prefix(later) {
                Ok((header, _)) if command::has_descriptors(command) && !command::has_descriptors(header.command) => {
                    let size = (header.size as usize).max(size_of::<Header>());
                    later = later.get(size..).unwrap_or_default();
                }
                // They may be that message's.
                _ => return,
            }
        }
        self.files.append(&mut self.arrived);
    }
}

fn closed(begun: bool) -> End {
    End::Closed(format!("closed by the client{}", if begun { " in the middle of a message" } else { "" }))
}

/// Checks the number of descriptors, each time some have come: they may come with every byte.
fn few(files: &[File]) -> Result<(), End> {
    match files.len() {
        0..=FDS => Ok(()),
        count => Err(End::Violation(format!("{count} descriptors with one message, expected at most {FDS}"))),
    }
}
