//! The entrance of a device: lets peers in, one at a time and no faster than its limits allow. Used by the thread of its socket.

use super::{
    limits::{Lines, say},
    place::connect,
};
use crate::{Quota, sys};
use std::{
    io,
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::EventFd;

/// Interval between attempts to accept, or to connect.
pub(crate) const RETRY: Duration = Duration::from_millis(250);

/// A socket, and the eventfd that ends all waiting at it.
pub(crate) struct Door {
    /// Name of the device in log lines.
    pub(crate) name: String,
    /// What its peers are called there.
    pub(crate) peer: &'static str,
    /// The listening socket, as a server.
    pub(crate) listener: Option<UnixListener>,
    /// The path of the socket.
    pub(crate) path: PathBuf,
    pub(crate) stop: EventFd,
    pub(crate) connects: Arc<Quota>,
    pub(crate) lines: Lines,
}

impl Door {
    /// Sleeps for `time`; returns `true` at once if the thread is to stop.
    pub(crate) fn stops_within(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match sys::wait_readable([Some(sys::borrow(&self.stop))], Some(left)) {
                Ok([true]) | Err(_) => return true,
                // poll's timeout is in whole milliseconds.
                Ok([false]) if left < Duration::from_millis(1) => return false,
                Ok([false]) => {}
            }
        }
    }

    /// Waits until a peer has connected, or until it can be connected to. Returns `None` if the thread is to stop.
    pub(crate) fn next(&self) -> Option<UnixStream> {
        let Door { name, peer, .. } = self;
        let mut said = false;
        loop {
            let connected = match &self.listener {
                Some(listener) => {
                    match sys::wait_readable([Some(sys::borrow(&self.stop)), Some(listener.as_fd())], None) {
                        Ok([false, true]) => {}
                        Ok([false, false]) => continue,
                        Ok([true, _]) => return None,
                        Err(error) => {
                            log::error!("{name}: cannot wait for a {peer}: {error}; device stopped");
                            return None;
                        }
                    }
                    if !self.may_connect() {
                        return None;
                    }
                    listener.accept().map(|(stream, _)| stream)
                }
                None => connect(&self.path),
            };
            match connected {
                Ok(stream) if stream.set_nonblocking(false).is_ok() => return Some(stream),
                // The peer has closed its connection already.
                Err(error) if self.listener.is_some() && error.kind() == io::ErrorKind::WouldBlock => continue,
                // Mostly EMFILE: the peer stays in the backlog, so the listener stays readable; retry after a pause.
                Err(error) if self.listener.is_some() && !std::mem::replace(&mut said, true) => {
                    log::error!("{name}: cannot accept a {peer}: {error}; retrying");
                }
                _ => {}
            }
            if self.stops_within(RETRY) {
                return None;
            }
        }
    }

    /// Waits until the connection rate allows another one. Returns `false` if the thread is to stop.
    fn may_connect(&self) -> bool {
        while self.connects.take().is_none() {
            let until = self.connects.until().unwrap_or_else(|| Instant::now() + RETRY);
            if self.stops_within(until.saturating_duration_since(Instant::now())) {
                return false;
            }
        }
        true
    }

    /// Turns away a second peer: the socket has one device. Returns until when further ones stay in the backlog; `None`: no limit.
    pub(crate) fn turn_away(&self) -> Option<Instant> {
        let listener = self.listener.as_ref()?;
        if self.connects.take().is_none() {
            return self.connects.until().or_else(|| Some(Instant::now() + RETRY));
        }
        match listener.accept() {
            Ok((stream, _)) => {
                // Guarded, as in `serving::close`.
                sys::guard::guarded(|| drop(stream));
                let Door { name, peer, .. } = self;
                say!(
                    self.lines,
                    Warn,
                    "{name}: a second {peer} was turned away: the first one is still connected, expected to disconnect first"
                );
                None
            }
            // Not accepted; it is still in the backlog.
            Err(_) => Some(Instant::now() + RETRY),
        }
    }
}
