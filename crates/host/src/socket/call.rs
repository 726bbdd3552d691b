//! Descriptors for notifying a frontend: SET_VRING_CALL and SET_VRING_ERR of vhost-user, SET_IRQS of vfio-user. Created by the
//! sessions, signalled by the devices.

use super::descriptor::CallFd;
use crate::sys;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::EventFd,
    timerfd::TimerFd,
};

/// How long an unread socket waits for its second write: usually longer than User-Mode Linux takes to read it, much shorter
/// than its tick of 10 ms.
const PATIENCE: Duration = Duration::from_micros(100);

/// A frontend's descriptor for notifications, an eventfd or a socket. Cheap to clone, so that no lock is held while
/// signalling.
///
/// User-Mode Linux sends a socket and makes it raise a signal. It misses a signal that arrives just before its idle loop
/// sleeps, until its next timer tick (Linux 7.2: `os_idle_sleep` checks for pending timer signals only). To avoid that delay,
/// a socket that is still unread a moment later is written to a second time.
#[derive(Clone)]
pub(crate) struct Call(Arc<Inner>);

struct Inner {
    fd: CallFd,
    reminder: Option<Reminder>,
    /// A write blocked: it is not written to again.
    spoilt: AtomicBool,
    alarm: Arc<Alarm>,
}

impl Call {
    /// `alarm` is raised if a write blocks.
    pub(crate) fn new(fd: CallFd, alarm: Arc<Alarm>) -> Call {
        let reminder = if fd.is_socket() { Reminder::new(&fd).ok() } else { None };
        Call(Arc::new(Inner { fd, reminder, spoilt: AtomicBool::new(false), alarm }))
    }

    /// Notifies the frontend. A peer whose descriptor is full misses the notification; one that makes the write block is
    /// disconnected.
    pub(crate) fn signal(&self) {
        let Inner { fd, reminder, spoilt, alarm } = &*self.0;
        if spoilt.load(Ordering::Relaxed) {
            return;
        }
        if fd.add_one().is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
            spoilt.store(true, Ordering::Relaxed);
            alarm.raise();
        }
        if let Some(reminder) = reminder {
            let _ = reminder.timer.lock().reset(PATIENCE, None);
        }
    }
}

/// Reports a descriptor that blocks from the notifying thread to the socket's thread.
pub(crate) struct Alarm {
    raised: AtomicBool,
    attention: EventFd,
}

impl Alarm {
    /// `attention` wakes the socket's thread.
    pub(crate) fn new(attention: EventFd) -> Alarm {
        Alarm { raised: AtomicBool::new(false), attention }
    }

    fn raise(&self) {
        self.raised.store(true, Ordering::Release);
        let _ = self.attention.write(1);
    }

    /// Returns whether it was raised since the last call.
    pub(crate) fn take(&self) -> bool {
        self.raised.swap(false, Ordering::AcqRel)
    }
}

/// A timer for one socket, restarted by each notification.
struct Reminder {
    key: u64,
    timer: Mutex<TimerFd>,
    clock: Arc<Clock>,
}

impl Reminder {
    fn new(fd: &CallFd) -> io::Result<Reminder> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let clock = Clock::get()?;
        let timer = TimerFd::new()?;
        let key = NEXT.fetch_add(1, Ordering::Relaxed);
        clock.files.lock().insert(key, fd.try_clone()?);
        let reminder = Reminder { key, timer: Mutex::new(timer), clock };
        // Edge-triggered, so that the timer need not be read. The timer is closed, and leaves the epoll, before its key is
        // removed.
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, key);
        reminder.clock.epoll.ctl(ControlOperation::Add, reminder.timer.lock().as_raw_fd(), event)?;
        Ok(reminder)
    }
}

impl Drop for Reminder {
    fn drop(&mut self) {
        self.clock.files.lock().remove(&self.key);
    }
}

/// The thread that writes a second time. It is started when a frontend first sends a socket.
struct Clock {
    epoll: Epoll,
    files: Mutex<HashMap<u64, CallFd>>,
}

impl Clock {
    fn get() -> io::Result<Arc<Clock>> {
        static CLOCK: LazyLock<io::Result<Arc<Clock>>> = LazyLock::new(|| {
            let clock = Arc::new(Clock { epoll: Epoll::new()?, files: Mutex::default() });
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
                // These are sockets, written to with MSG_DONTWAIT: the lock is not held for long.
                if let Some(fd) = self.files.lock().get(&event.data())
                    && sys::is_unread(fd.as_fd()).unwrap_or(false)
                {
                    let _ = fd.add_one();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs::File,
        io::Read,
        os::{fd::OwnedFd, unix::net::UnixStream},
        time::Instant,
    };
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    fn call(file: File) -> Call {
        sys::guard::start().unwrap();
        let fd = CallFd::new(file).unwrap_or_else(|refused| panic!("{refused}"));
        Call::new(fd, Arc::new(Alarm::new(EventFd::new(EFD_NONBLOCK).unwrap())))
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
        thread::sleep(20 * PATIENCE);
        assert_eq!(eventfd.read().unwrap(), 1);
        assert!(call.0.reminder.is_none());
    }

    #[test]
    fn an_unread_socket_is_written_twice() {
        let (call, theirs) = socket();
        call.signal();
        let (mut bytes, start) = ([0; 64], Instant::now());
        let peek = |bytes: &mut [u8]| sys::peek(theirs.as_fd(), bytes).unwrap_or(0);
        while peek(&mut bytes) < 16 {
            assert!(start.elapsed() < Duration::from_secs(5), "no second notification");
            thread::yield_now();
        }
        thread::sleep(20 * PATIENCE);
        assert_eq!(peek(&mut bytes), 16, "expected no third notification");
        assert_eq!(bytes[..16], [1u64, 1].map(u64::to_ne_bytes).concat());
    }

    #[test]
    fn a_socket_that_is_read_is_written_once() {
        // Only known afterwards: whether this thread read the socket in time.
        let in_time = (0..1000).any(|_| {
            let (call, mut theirs) = socket();
            let start = Instant::now();
            call.signal();
            assert_eq!(theirs.read(&mut [0; 64]).unwrap(), 8);
            let in_time = start.elapsed() < PATIENCE;
            thread::sleep(10 * PATIENCE);
            assert!(!in_time || theirs.read(&mut [0; 64]).is_err());
            in_time
        });
        assert!(in_time, "never read within the time in 1000 attempts");
    }

    #[test]
    fn a_dropped_call_closes_its_descriptors() {
        let (call, theirs) = socket();
        let clock = call.0.reminder.as_ref().unwrap().clock.clone();
        let key = call.0.reminder.as_ref().unwrap().key;
        assert!(clock.files.lock().contains_key(&key));
        drop(call);
        assert!(!clock.files.lock().contains_key(&key));
        assert_eq!({ &theirs }.read(&mut [0; 64]).unwrap(), 0, "the end of the stream: all copies are closed");
    }

    #[test]
    fn a_full_socket_does_not_block() {
        let (call, theirs) = socket();
        (0..100_000).for_each(|_| call.signal());
        drop(theirs);
        call.signal();
    }

    #[test]
    fn a_descriptor_that_blocks_does_so_once() {
        let eventfd = EventFd::new(0).unwrap();
        eventfd.write(u64::MAX - 1).unwrap();
        let call = call(sys::duplicate(&eventfd).unwrap());
        // Full, but non-blocking: no alarm.
        call.signal();
        assert!(!call.0.alarm.take());
        sys::set_blocking(sys::borrow(&eventfd));
        let start = Instant::now();
        (0..1000).for_each(|_| call.signal());
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        assert!(call.0.alarm.take() && !call.0.alarm.take());
        assert_eq!(call.0.alarm.attention.read().unwrap(), 1);
    }
}
