//! How the thread of a socket lends its client to the thread that polls the device's queues. While a driver's writes
//! follow each other and the queues are polled anyway, that thread finds them by itself: the client's system call wakes nobody, and the
//! effect of a write comes at once. It carries out accesses that are quick, and gives the client back for anything else. Used by `server.rs`,
//! and by devices whose queues are polled.

use super::{
    VfioDevice,
    connection::{Connection, End},
    messages::{NO_REPLY, send_now},
    poller::Poller,
    session::{Quick, Session, is_quick},
};
use crate::gate::Gate;
use parking_lot::MutexGuard;
use std::{
    io,
    os::fd::AsFd,
    sync::atomic::{AtomicBool, AtomicU64, Ordering, fence},
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Messages of a client that the poller handles at each look, which is part of the client's turn: as few as frames of a burst.
const MOST: usize = 16;

/// A client and its connection.
pub(super) struct Client<D: VfioDevice> {
    pub connection: Connection,
    pub session: Session<D>,
    /// For both threads.
    pub poller: Poller,
    /// What is left of a reply in the connection's buffer is still to be sent.
    pub unsent: bool,
    /// Why the connection ended while it was lent.
    pub end: Option<End>,
    /// The other thread is in a call, or has panicked in it.
    pub called: bool,
    idle: Option<Idle>,
}

/// Since when the poller has found nothing, and when it last looked.
#[derive(Clone, Copy)]
struct Idle {
    start: Instant,
    last: Instant,
}

impl<D: VfioDevice> Client<D> {
    pub(super) fn new(connection: Connection, session: Session<D>) -> Client<D> {
        let (poller, unsent, end, called, idle) = Default::default();
        Client { connection, session, poller, unsent, end, called, idle }
    }

    /// Carries out what has arrived. Returns `false` if the client needs its own thread.
    fn serve(&mut self, quick: Quick) -> bool {
        if std::mem::replace(&mut self.called, true) {
            return false;
        }
        let served = self.serve_quick(quick);
        self.called = false;
        served.unwrap_or_else(|end| {
            self.end = Some(end);
            false
        })
    }

    fn serve_quick(&mut self, quick: Quick) -> Result<bool, End> {
        let Client { connection, session, .. } = self;
        // Nothing is read behind a message with descriptors until they have reached it.
        if connection.has_descriptors() {
            return Ok(false);
        }
        if connection.peek().is_none() && !connection.read_now()? {
            // The rest of a message that has begun is waited for, which is not for this thread.
            return Ok(!connection.has_more());
        }
        self.idle = None;
        for _ in 0..MOST {
            let Some((header, payload)) = connection.peek() else { break };
            if !is_quick(&header, payload, quick) {
                return Ok(false);
            }
            let Some(header) = connection.take()? else { break };
            let Connection { stream, payload, files, reply, .. } = connection;
            session.handle(&header, payload, files, reply).map_err(End::Violation)?;
            if header.flags & NO_REPLY == 0 {
                let sent = send_now(stream.as_fd(), reply)?;
                reply.drain(..sent);
                if !reply.is_empty() {
                    self.unsent = true;
                    return Ok(false);
                }
                // A client that gets a reply has waited for it.
                break;
            }
        }
        Ok(!connection.has_descriptors())
    }

    /// Returns whether to go on polling, of a thread that has nothing else to do.
    fn lingers(&mut self, most: Duration) -> bool {
        let now = Instant::now();
        let Idle { start, last } = *self.idle.get_or_insert(Idle { start: now, last: now });
        self.idle = Some(Idle { start, last: now });
        let goes_on = self.poller.goes_on(most, now - start, [last, now]);
        if !goes_on {
            self.idle = None;
        }
        goes_on
    }
}

/// The place where a client is while it is lent.
pub(crate) struct Lending<D: VfioDevice> {
    client: Gate<Option<Box<Client<D>>>>,
    /// There is one.
    lent: AtomicBool,
    /// The poller looks at it.
    open: AtomicBool,
    /// Wakes the socket's thread when the poller gives the client back.
    back: EventFd,
    quick: Quick,
    /// [`super::ServerConfig::poll`] in ns.
    poll: AtomicU64,
}

impl<D: VfioDevice> Lending<D> {
    /// Nobody polls yet. `quick`: which accesses to whole registers the poller may carry out, by region, offset, and whether they
    /// write. For them the device waits for nothing and nobody.
    pub(crate) fn new(quick: Quick) -> io::Result<Lending<D>> {
        let (client, lent, open, poll) = Default::default();
        Ok(Lending { client, lent, open, back: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?, quick, poll })
    }

    /// For the poller, with each look at a queue: carries out the quick accesses that have arrived.
    #[inline]
    pub(crate) fn serve(&self) {
        if !self.open.load(Ordering::Relaxed) {
            self.open.store(true, Ordering::Relaxed);
        }
        if self.lent.load(Ordering::Relaxed) {
            self.serve_client();
        }
    }

    #[inline(never)]
    fn serve_client(&self) {
        // The socket's thread wants it back, or control has the device.
        let Some(mut place) = self.client.try_enter() else { return };
        if let Some(client) = &mut *place
            && !client.serve(self.quick)
        {
            self.give_back(place);
        }
    }

    /// For the poller, before it stops because the queue is empty. Returns `false` if it is to go on: the client may send more soon.
    pub(crate) fn close(&self) -> bool {
        if self.lent.load(Ordering::Relaxed) {
            let Some(mut place) = self.client.try_enter() else { return false };
            if let Some(client) = &mut *place {
                if client.lingers(self.poll()) {
                    return false;
                }
                self.give_back(place);
            }
        }
        self.open.store(false, Ordering::Relaxed);
        // Pairs with `lend`: either the socket's thread sees that nobody polls, or this one sees the client.
        fence(Ordering::SeqCst);
        !self.lent.load(Ordering::Relaxed)
    }

    /// For the poller, which stops whatever the client does.
    pub(crate) fn withdraw(&self) {
        self.open.store(false, Ordering::Relaxed);
        // As in `close`.
        fence(Ordering::SeqCst);
        if self.lent.load(Ordering::Relaxed) {
            // Without the lock, which control may have: the socket's thread waits for it.
            let _ = self.back.write(1);
        }
    }

    fn give_back(&self, place: MutexGuard<'_, Option<Box<Client<D>>>>) {
        self.lent.store(false, Ordering::Relaxed);
        drop(place);
        let _ = self.back.write(1);
    }

    /// For control: keeps the poller from the device. It carries out nothing more when this returns, until the guard is dropped.
    pub(crate) fn pause(&self) -> impl Sized + '_ {
        self.client.enter()
    }

    /// For the socket's thread: lends the client. It comes back by `recall`.
    pub(super) fn lend(&self, client: Box<Client<D>>) {
        // Of the last time, if it was recalled just then.
        let _ = self.back.read();
        *self.client.enter() = Some(client);
        self.lent.store(true, Ordering::Relaxed);
        // Pairs with `close`.
        fence(Ordering::SeqCst);
        if !self.open.load(Ordering::Relaxed) {
            let _ = self.back.write(1);
        }
    }

    /// For the socket's thread: takes the client, given back or not.
    pub(super) fn recall(&self) -> Option<Box<Client<D>>> {
        let mut place = self.client.enter();
        self.lent.store(false, Ordering::Relaxed);
        place.take()
    }

    /// Returns whether anybody polls.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Returns what becomes readable when the client is to be recalled.
    pub(super) fn back(&self) -> &EventFd {
        &self.back
    }

    /// Returns whether a message is an access that a poller may carry out.
    pub(super) fn quick(&self) -> Quick {
        self.quick
    }

    /// Returns for how long to poll.
    pub(super) fn poll(&self) -> Duration {
        Duration::from_nanos(self.poll.load(Ordering::Relaxed))
    }

    pub(super) fn set_poll(&self, time: Duration) {
        self.poll.store(time.as_nanos() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
