//! Writes to a peer's descriptor that cannot block forever, whatever the peer does to it. Called by `socket/call.rs`.
//!
//! A notification is a `write` to an eventfd (or socket) that a frontend has sent. The frontend shares the open file
//! description: at any time it can fill the counter up to 2⁶⁴ − 2 and clear O_NONBLOCK, and the next `write` blocks until the
//! frontend reads. The alternatives:
//!
//! - Checking first (the flags, `poll`, the counter in fdinfo) is a race that the frontend can win, and costs a system call.
//! - RWF_NOWAIT: `eventfd_write` checks only O_NONBLOCK of the file; `pwritev2` fails, as eventfd has no `write_iter`.
//! - `eventfd_signal` in the kernel never blocks, but only the completion of an asynchronous operation reaches it (io_submit
//!   with IOCB_FLAG_RESFD, io_uring with a registered eventfd): two to three times the cost of the `write` for every
//!   notification of every guest, through interfaces that many hosts disable.
//! - A private descriptor with a thread that forwards notifications costs a context switch per notification.
//! - A thread that watches the notifying threads and interrupts one that is stuck: this module. It costs two more stores per
//!   notification, and the frontend cannot win: only a `write` that blocks on an eventfd returns `EINTR`, so the caller knows
//!   that the frontend has misbehaved and disconnects it.
//!
//! A blocked `write` is interrupted at the next tick; there is one every 2 ms. A frontend that unblocks each `write` sooner is
//! caught by chance: of those that block for 0.2 ms, a tick hits one in ten. The thread ticks while notifications are sent and for 25
//! ticks more; then it sleeps until the next notification wakes it.

use rustix::{
    io::{ReadWriteFlags, preadv2},
    net::SendFlags,
    thread::gettid,
};
use std::{
    cell::OnceCell,
    io::{self, IoSliceMut},
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, Thread},
    time::Duration,
};

/// Interval between two checks.
const TICK: Duration = Duration::from_millis(2);
/// Checks without a notification before the guard sleeps.
const LINGER: u32 = 25;

/// Adds one to a peer's eventfd. `WouldBlock`: the counter is full, so the peer has a notification pending. `Interrupted`:
/// the call blocked, which only a misbehaving peer causes.
#[inline]
pub(crate) fn add_one(fd: BorrowedFd<'_>) -> io::Result<()> {
    guarded(|| rustix::io::write(fd, &1u64.to_ne_bytes()))?;
    Ok(())
}

/// Like [`add_one`], for a socket: sends eight bytes with the value one.
pub(crate) fn send_one(fd: BorrowedFd<'_>) -> io::Result<()> {
    send(fd, &1u64.to_ne_bytes())
}

/// Sends a short message on a peer's socket, or nothing if there is no room for it.
pub(crate) fn send(fd: BorrowedFd<'_>, message: &[u8]) -> io::Result<()> {
    guarded(|| rustix::net::send(fd, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Resets a peer's eventfd to zero; returns whether it was more. Never blocks: `eventfd_read` honours RWF_NOWAIT (Linux 5.8).
pub(crate) fn drain(fd: BorrowedFd<'_>) -> bool {
    // Offset -1: an eventfd has no file position.
    preadv2(fd, &mut [IoSliceMut::new(&mut [0; 8])], u64::MAX, ReadWriteFlags::NOWAIT).is_ok()
}

/// Starts the guard thread, if it is not running. Must be called before the first notification.
pub(crate) fn start() -> io::Result<()> {
    static STARTING: Mutex<()> = Mutex::new(());
    let _starting = lock(&STARTING);
    if GUARD.get().is_some() {
        return Ok(());
    }
    install_handler()?;
    let guard = thread::Builder::new().name("guard".into()).stack_size(64 << 10).spawn(watch)?;
    let _ = GUARD.set(guard.thread().clone());
    Ok(())
}

static GUARD: OnceLock<Thread> = OnceLock::new();
/// The guard sleeps: the next thread to notify a peer must wake it.
static ASLEEP: AtomicBool = AtomicBool::new(false);
static SLOTS: Mutex<Vec<Arc<Slot>>> = Mutex::new(Vec::new());

/// A thread that notifies peers.
struct Slot {
    thread: libc::pid_t,
    /// Odd while the thread is in a call.
    turn: AtomicU64,
    /// Value of `turn` at the guard's last check.
    seen: AtomicU64,
}

/// Owns a thread's slot. Dropped when the thread ends, so that a later thread with the same id is not interrupted.
struct Mine(Arc<Slot>);

impl Mine {
    fn new() -> Mine {
        unblock();
        let slot = Arc::new(Slot {
            thread: gettid().as_raw_nonzero().get(),
            turn: AtomicU64::new(0),
            seen: AtomicU64::new(0),
        });
        lock(&SLOTS).push(slot.clone());
        Mine(slot)
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        lock(&SLOTS).retain(|slot| !Arc::ptr_eq(slot, &self.0));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Makes a call that a peer can make block, and interrupts it if it does.
#[inline]
pub(crate) fn guarded<T>(call: impl FnOnce() -> T) -> T {
    thread_local!(static MINE: OnceCell<Mine> = const { OnceCell::new() });
    MINE.with(|mine| {
        let slot = &*mine.get_or_init(Mine::new).0;
        // Sequentially consistent, as is the guard's store to `ASLEEP` before its last check: either the guard sees this
        // call, or this thread sees that the guard sleeps.
        slot.turn.fetch_add(1, Ordering::SeqCst);
        if ASLEEP.load(Ordering::SeqCst) {
            wake();
        }
        let result = call();
        slot.turn.fetch_add(1, Ordering::Relaxed);
        result
    })
}

#[cold]
fn wake() {
    if ASLEEP.swap(false, Ordering::SeqCst)
        && let Some(guard) = GUARD.get()
    {
        guard.unpark();
    }
}

fn watch() {
    let mut idle = 0;
    loop {
        thread::sleep(TICK);
        if look() {
            idle = 0;
            continue;
        }
        idle += 1;
        if idle < LINGER {
            continue;
        }
        ASLEEP.store(true, Ordering::SeqCst);
        if look() {
            ASLEEP.store(false, Ordering::SeqCst);
        }
        while ASLEEP.load(Ordering::SeqCst) {
            thread::park();
        }
        idle = 0;
    }
}

/// Interrupts threads that are in a call, which only a blocking one notices. Returns whether any was made since the last check or is in
/// progress.
fn look() -> bool {
    let mut active = false;
    for slot in &*lock(&SLOTS) {
        let turn = slot.turn.load(Ordering::SeqCst);
        let seen = slot.seen.swap(turn, Ordering::Relaxed);
        let inside = !turn.is_multiple_of(2);
        active |= inside || turn != seen;
        if inside {
            // Repeated at each check: a signal that arrives just before the call blocks does not interrupt it.
            // SAFETY: no memory is involved; the thread is one of this process, as its slot is in the list.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), slot.thread, interruption()) };
        }
    }
    active
}

/// A signal that nothing else in the process uses.
fn interruption() -> libc::c_int {
    libc::SIGRTMIN() + 5
}

fn install_handler() -> io::Result<()> {
    extern "C" fn nothing(_signal: libc::c_int) {}
    // SAFETY: zeros are a valid sigaction; the handler has the signature for use without SA_SIGINFO, and does nothing.
    // Without SA_RESTART, so that the interrupted call returns EINTR.
    let result = unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(interruption(), &action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The thread may have inherited a mask that blocks all signals.
fn unblock() {
    // SAFETY: the set is initialised before it is read.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, interruption());
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::OFlags;
    use std::{io::ErrorKind, os::fd::AsFd, os::unix::net::UnixStream, time::Instant};
    use vmm_sys_util::eventfd::EventFd;

    fn full() -> EventFd {
        let eventfd = EventFd::new(0).unwrap();
        eventfd.write(u64::MAX - 1).unwrap();
        eventfd
    }

    #[test]
    fn a_write_that_blocks_is_interrupted_each_time() {
        start().unwrap();
        let eventfd = full();
        for round in 0..20 {
            // Also when the guard is asleep.
            thread::sleep(if round < 3 { TICK * (LINGER + 10) } else { Duration::ZERO });
            let begin = Instant::now();
            let error = add_one(crate::sys::borrow(&eventfd)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Interrupted);
            assert!(begin.elapsed() < Duration::from_millis(500), "{:?}", begin.elapsed());
        }
        assert_eq!(eventfd.read().unwrap(), u64::MAX - 1, "nothing was added");
        add_one(crate::sys::borrow(&eventfd)).unwrap();
        assert_eq!(eventfd.read().unwrap(), 1);
    }

    #[test]
    fn a_write_that_blocks_for_less_than_a_tick_is_found_out() {
        start().unwrap();
        let eventfd = Arc::new(full());
        let stop = Arc::new(AtomicBool::new(false));
        // The peer lets each write go on before the next tick but one.
        let peer = {
            let (eventfd, stop) = (eventfd.clone(), stop.clone());
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    thread::sleep(TICK / 2);
                    drain(crate::sys::borrow(&eventfd));
                    let _ = eventfd.write(u64::MAX - 1);
                }
            })
        };
        let begin = Instant::now();
        let caught = loop {
            match add_one(crate::sys::borrow(&eventfd)) {
                Err(error) => break error.kind() == ErrorKind::Interrupted,
                Ok(()) if begin.elapsed() > Duration::from_secs(20) => break false,
                // It may have been before the peer's write, which then blocks, and would let all others succeed.
                Ok(()) => _ = drain(crate::sys::borrow(&eventfd)),
            }
        };
        stop.store(true, Ordering::Relaxed);
        // It may be in a write of its own.
        while !peer.is_finished() {
            drain(crate::sys::borrow(&eventfd));
        }
        peer.join().unwrap();
        assert!(caught, "no write was interrupted");
    }

    #[test]
    fn several_threads_while_o_nonblock_is_toggled() {
        start().unwrap();
        let eventfd = Arc::new(full());
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let eventfd = eventfd.clone();
                thread::spawn(move || {
                    (0..50).for_each(|_| {
                        let kind = add_one(crate::sys::borrow(&eventfd)).unwrap_err().kind();
                        assert!(matches!(kind, ErrorKind::Interrupted | ErrorKind::WouldBlock));
                    });
                })
            })
            .collect();
        let begin = Instant::now();
        while !threads.iter().all(|thread| thread.is_finished()) {
            assert!(begin.elapsed() < Duration::from_secs(10));
            for flags in [OFlags::empty(), OFlags::NONBLOCK] {
                rustix::fs::fcntl_setfl(crate::sys::borrow(&eventfd), flags).unwrap();
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn an_empty_eventfd_and_a_full_socket_do_not_block() {
        start().unwrap();
        let eventfd = EventFd::new(0).unwrap();
        drain(crate::sys::borrow(&eventfd));
        eventfd.write(3).unwrap();
        drain(crate::sys::borrow(&eventfd));
        drain(crate::sys::borrow(&eventfd));
        // Both ends are in blocking mode, which a frontend can set at any time.
        let (ours, theirs) = UnixStream::pair().unwrap();
        let refused = (0..100_000).find_map(|_| send_one(ours.as_fd()).err()).unwrap();
        assert_eq!(refused.kind(), ErrorKind::WouldBlock);
        drop(theirs);
        assert_eq!(send_one(ours.as_fd()).unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
