//! Descriptors for notifying a frontend: SET_VRING_CALL and SET_VRING_ERR of vhost-user, SET_IRQS of vfio-user. Created by the
//! sessions, signalled by the devices. What a write may cost is the business of `peer.rs`.

use super::{
    descriptor::CallFd,
    peer::{Peer, Target},
};
use crate::sys;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    timerfd::TimerFd,
};

/// How long to wait for other threads that are signalling a descriptor: the guard interrupts a write that blocks sooner.
const RETIREMENT: Duration = Duration::from_millis(100);
const RECHECK: Duration = Duration::from_micros(100);

/// A frontend's descriptor for notifications, an eventfd or a socket. Cheap to clone, so that no lock is held while
/// signalling.
///
/// User-Mode Linux sends a socket and makes it raise a signal. It misses a signal that arrives just before its idle loop
/// sleeps, until its next timer tick (Linux 7.2: `os_idle_sleep` checks for pending timer signals only). To avoid that delay,
/// a socket that is still unread a moment later is written to again, and again.
#[derive(Clone)]
pub(crate) struct Call(Arc<Inner>);

struct Inner {
    target: Arc<Target>,
    /// Dropped with the last clone.
    _reminder: Option<Reminder>,
}

impl Call {
    /// A descriptor that a peer has sent.
    pub(crate) fn new(fd: CallFd, peer: &Arc<Peer>) -> Call {
        let timer = if fd.is_socket() { TimerFd::new().ok() } else { None };
        let target = Target::new(fd, timer, peer.clone());
        let reminder = Reminder::new(&target).unwrap_or(None);
        Call(Arc::new(Inner { target, _reminder: reminder }))
    }

    /// Notifies the frontend. A peer whose descriptor is full misses the notification; one that made a write block is not
    /// notified any more.
    pub(crate) fn signal(&self) {
        self.0.target.write();
    }

    #[cfg(test)]
    pub(super) fn target(&self) -> Arc<Target> {
        self.0.target.clone()
    }

    /// Closes the descriptor, for control. Waits until no other thread is signalling it, which would close it otherwise: a worker
    /// shall not, as a peer can make that slow.
    pub(crate) fn retire(self) {
        let start = Instant::now();
        while Arc::strong_count(&self.0) > 1 && start.elapsed() < RETIREMENT {
            thread::sleep(RECHECK);
        }
    }
}

/// A socket's entry at the [`Clock`].
struct Reminder {
    key: u64,
    clock: Arc<Clock>,
}

impl Reminder {
    /// Returns `None` if the target has no timer.
    fn new(target: &Arc<Target>) -> io::Result<Option<Reminder>> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let Some(timer) = &target.timer else { return Ok(None) };
        let clock = Clock::get()?;
        let key = NEXT.fetch_add(1, Ordering::Relaxed);
        clock.targets.lock().insert(key, target.clone());
        let reminder = Reminder { key, clock };
        // Edge-triggered, so that the timer need not be read.
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, key);
        reminder.clock.epoll.ctl(ControlOperation::Add, timer.lock().as_raw_fd(), event)?;
        Ok(Some(reminder))
    }
}

impl Drop for Reminder {
    fn drop(&mut self) {
        // Closed without the lock, which all notifications of sockets need.
        let _target = self.clock.targets.lock().remove(&self.key);
    }
}

/// The thread that writes again. It is started when a frontend first sends a socket.
struct Clock {
    epoll: Epoll,
    targets: Mutex<HashMap<u64, Arc<Target>>>,
}

impl Clock {
    fn get() -> io::Result<Arc<Clock>> {
        static CLOCK: LazyLock<io::Result<Arc<Clock>>> = LazyLock::new(|| {
            let clock = Arc::new(Clock { epoll: Epoll::new()?, targets: Mutex::default() });
            let running = clock.clone();
            thread::Builder::new().name("call-again".into()).spawn(move || running.run())?;
            Ok(clock)
        });
        CLOCK.as_ref().map(Arc::clone).map_err(|error| error.kind().into())
    }

    fn run(&self) {
        let mut events = [EpollEvent::default(); 16];
        loop {
            let count = self.epoll.wait(-1, &mut events).unwrap_or(0);
            for event in events.iter().take(count) {
                let target = self.targets.lock().get(&event.data()).cloned();
                if let Some(target) = target {
                    target.expired(|| sys::is_unread(target.fd.as_fd()).unwrap_or(false));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::peer::PATIENCE, *};
    use std::{
        fs::File,
        io::Read,
        os::{fd::OwnedFd, unix::net::UnixStream},
        sync::atomic::AtomicBool,
    };
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    fn call(file: File) -> Call {
        sys::guard::start().unwrap();
        let fd = CallFd::new(file).unwrap_or_else(|refused| panic!("{refused}"));
        Call::new(fd, &Arc::new(Peer::new().unwrap()))
    }

    fn socket() -> (Call, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        (call(OwnedFd::from(ours).into()), theirs)
    }

    #[test]
    fn an_eventfd_is_written_once() {
        let eventfd = EventFd::new(EFD_NONBLOCK).unwrap();
        let call = call(sys::duplicate(&eventfd).unwrap());
        call.signal();
        thread::sleep(10 * PATIENCE);
        assert_eq!(eventfd.read().unwrap(), 1);
        assert!(call.target().timer.is_none());
    }

    #[test]
    fn an_unread_socket_is_written_to_again() {
        let (call, mut theirs) = socket();
        call.signal();
        let (mut bytes, start) = ([0; 64], Instant::now());
        let peek = |bytes: &mut [u8]| sys::peek(theirs.as_fd(), bytes).unwrap_or(0);
        while peek(&mut bytes) < 32 {
            assert!(start.elapsed() < Duration::from_secs(5), "no fourth notification");
            thread::yield_now();
        }
        assert!(start.elapsed() > 7 * PATIENCE, "each wait is longer than the one before");
        assert_eq!(bytes[..32], [1u64; 4].map(u64::to_ne_bytes).concat());
        // Until it is read, but for one that is on its way.
        while theirs.read(&mut bytes).is_ok() {}
        thread::sleep(50 * PATIENCE);
        let _ = theirs.read(&mut bytes);
        thread::sleep(100 * PATIENCE);
        assert!(theirs.read(&mut bytes).is_err(), "it was read");
    }

    /// However many notifications there are, and whether the timer was set before them.
    #[test]
    fn a_socket_that_is_read_is_written_once_for_each_notification() {
        // Only known afterwards: whether this thread read the socket in time.
        let in_time = (0..100).any(|_| {
            let (call, mut theirs) = socket();
            let mut read_in_time = || {
                let start = Instant::now();
                call.signal();
                assert_eq!(theirs.read(&mut [0; 64]).unwrap(), 8);
                start.elapsed() < PATIENCE / 2
            };
            let in_time = (0..10).all(|_| {
                thread::sleep(PATIENCE / 4);
                read_in_time()
            });
            thread::sleep(10 * PATIENCE);
            assert!(!in_time || theirs.read(&mut [0; 64]).is_err());
            in_time
        });
        assert!(in_time, "never read within the time in 100 attempts");
    }

    /// Notifies the reader of a socket, which does not read it; returns the time until the second notification.
    fn second(call: &Call, theirs: &UnixStream) -> Duration {
        call.signal();
        let start = Instant::now();
        while sys::peek(theirs.as_fd(), &mut [0; 64]).unwrap_or(0) < 16 {
            assert!(start.elapsed() < Duration::from_secs(5), "no second notification");
            thread::yield_now();
        }
        start.elapsed()
    }

    #[test]
    fn the_last_of_many_notifications_is_repeated_if_unread() {
        let (call, mut theirs) = socket();
        let mut bytes = [0; 64];
        for _ in 0..40 {
            call.signal();
            while theirs.read(&mut bytes).is_ok() {}
            thread::sleep(PATIENCE / 4);
        }
        while theirs.read(&mut bytes).is_ok() {}
        let waited = second(&call, &theirs);
        assert!(waited >= PATIENCE, "the timer was set by a former notification");
    }

    /// Waits that have grown long are for what was unread before.
    #[test]
    fn a_notification_after_a_long_silence_is_repeated_soon() {
        let (call, mut theirs) = socket();
        call.signal();
        // Five times more, then the next wait is of 64 ms.
        thread::sleep(80 * PATIENCE);
        let mut bytes = [0; 256];
        while theirs.read(&mut bytes).is_ok() {}
        let waited = second(&call, &theirs);
        assert!(waited < 30 * PATIENCE, "{waited:?}");
    }

    #[test]
    fn a_dropped_call_closes_its_descriptors() {
        let (call, theirs) = socket();
        let clock = call.0._reminder.as_ref().unwrap().clock.clone();
        let key = call.0._reminder.as_ref().unwrap().key;
        assert!(clock.targets.lock().contains_key(&key));
        drop(call);
        assert!(!clock.targets.lock().contains_key(&key));
        assert_eq!({ &theirs }.read(&mut [0; 64]).unwrap(), 0, "the end of the stream: all copies are closed");
    }

    #[test]
    fn control_closes_a_descriptor_after_others_have_used_it() {
        let call = call(sys::duplicate(&EventFd::new(EFD_NONBLOCK).unwrap()).unwrap());
        let (other, used) = (call.clone(), Arc::new(AtomicBool::new(false)));
        let worker = thread::spawn({
            let used = used.clone();
            move || {
                thread::sleep(Duration::from_millis(20));
                used.store(true, Ordering::Relaxed);
                drop(other);
            }
        });
        call.retire();
        assert!(used.load(Ordering::Relaxed), "it was closed by the worker");
        worker.join().unwrap();
    }

    #[test]
    fn a_full_socket_does_not_block() {
        let (call, theirs) = socket();
        (0..100_000).for_each(|_| call.signal());
        drop(theirs);
        call.signal();
    }
}
