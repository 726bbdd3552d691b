//! The thread that serves all vsock devices of a program: moves packets, reads the sockets of the host, keeps time. Guests
//! have turns; what is done in one is `member.rs`.

use super::{
    HostSide,
    guest::Guest,
    member::Member,
    shared::{Control, Shared, Token},
};
use crate::sys;
use log::Level;
use ringroad_switch::panic_message;
use ringroad_vsock::Hub;
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    io,
    os::{fd::AsRawFd, unix::net::UnixListener},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use vmm_sys_util::epoll::{Epoll, EpollEvent};

/// While there is something to do, events are looked for after so many rounds of turns, or this time.
const ROUNDS: u32 = 16;
const LOOK: Duration = Duration::from_micros(100);

/// A running worker for vsock devices.
pub struct VsockWorker {
    pub(super) shared: Arc<Shared>,
    pub(super) hub: Arc<Hub<HostSide>>,
    thread: Option<JoinHandle<()>>,
}

impl VsockWorker {
    /// Starts the thread, on a CPU or any. It looks for `poll` after the last packet before it sleeps. `connections`: how many
    /// each guest may have with others that it has asked for.
    pub fn start(cpu: Option<usize>, poll: Duration, connections: usize) -> io::Result<VsockWorker> {
        let shared = Arc::new(Shared::new()?);
        let (started, result) = mpsc::channel();
        let thread = {
            let shared = shared.clone();
            thread::Builder::new().name("vsock".into()).spawn(move || {
                shared.belongs_here();
                let pinned = cpu.map_or(Ok(()), sys::pin_current_thread);
                let go = pinned.is_ok();
                let _ = started.send(pinned);
                if go {
                    Loop::new(&shared, poll).run();
                }
                shared.end();
            })?
        };
        result.recv().unwrap_or_else(|_| Err(ended()))?;
        Ok(VsockWorker { shared, hub: Hub::new(connections), thread: Some(thread) })
    }

    /// Has it run on another CPU, or any, and look for `poll` after the last packet.
    ///
    /// # Errors
    /// The CPU is not there or not allowed; it stays where it was.
    pub fn set(&self, cpu: Option<usize>, poll: Duration) -> io::Result<()> {
        let (sender, done) = mpsc::channel();
        self.shared.control(Control::Configure(cpu, poll, sender));
        done.recv().unwrap_or_else(|_| Err(ended()))
    }

    pub(super) fn add(&self, guest: Arc<Guest>, listener: Option<UnixListener>) -> io::Result<()> {
        let (sender, added) = mpsc::channel();
        self.shared.control(Control::Add(guest, listener, sender));
        added.recv().unwrap_or_else(|_| Err(ended()))
    }
}

fn ended() -> io::Error {
    io::Error::other("the vsock worker has ended")
}

impl Drop for VsockWorker {
    fn drop(&mut self) {
        self.shared.control(Control::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Loop<'a> {
    shared: &'a Arc<Shared>,
    poll: Duration,
    members: HashMap<u32, Member>,
    /// Guests that have something to do, in turn.
    turns: VecDeque<u32>,
    /// When guests want a turn though nothing happens.
    deadlines: BTreeSet<(Instant, u32)>,
    faults: u64,
}

impl<'a> Loop<'a> {
    fn new(shared: &'a Arc<Shared>, poll: Duration) -> Self {
        Loop {
            shared,
            poll,
            members: HashMap::new(),
            turns: VecDeque::new(),
            deadlines: BTreeSet::new(),
            faults: ringroad_mem::faults(),
        }
    }

    fn run(mut self) {
        let mut events = [EpollEvent::default(); 128];
        let (mut rounds, mut looked) = (0u32, Instant::now());
        loop {
            if self.shared.is_pending() && !self.obey() {
                return;
            }
            let mut any = self.round();
            rounds = rounds.wrapping_add(1);
            if any && !rounds.is_multiple_of(ROUNDS) && looked.elapsed() < LOOK {
                continue;
            }
            if ringroad_mem::faults() != self.faults {
                self.faults = ringroad_mem::faults();
                self.members.values().for_each(|member| member.guest.check_memory());
            }
            if !any && !self.try_idle() {
                any = true;
            }
            let timeout = if any || self.shared.is_pending() { 0 } else { self.timeout() };
            let count = self.shared.wait(timeout, &mut events);
            for event in events.iter().take(count) {
                self.event(Token::from_data(event.data()));
            }
            looked = Instant::now();
            self.wake(looked);
        }
    }

    /// A turn for each guest that has something to do. Says whether there was anything.
    fn round(&mut self) -> bool {
        let mut any = false;
        for _ in 0..self.turns.len() {
            let Some(number) = self.turns.pop_front() else { break };
            let Some(member) = self.members.get_mut(&number) else { continue };
            let before = member.due;
            let poll = self.poll;
            match catch_unwind(AssertUnwindSafe(|| member.turn(poll))) {
                Ok(done) => any |= done,
                Err(payload) => {
                    self.panicked(number, panic_message(&*payload));
                    continue;
                }
            }
            if member.due != before {
                before.inspect(|&due| _ = self.deadlines.remove(&(due, number)));
                member.due.inspect(|&due| _ = self.deadlines.insert((due, number)));
            }
            member.listed = member.is_busy();
            if member.listed {
                self.turns.push_back(number);
            }
        }
        any
    }

    /// Leaves guests alone that had nothing to do for a while. `false`: not all of them.
    fn try_idle(&mut self) -> bool {
        for _ in 0..self.turns.len() {
            let Some(number) = self.turns.pop_front() else { break };
            let Some(member) = self.members.get_mut(&number) else { continue };
            let poll = self.poll;
            match catch_unwind(AssertUnwindSafe(|| member.try_idle(poll))) {
                Ok(rests) => member.listed = !rests,
                Err(payload) => {
                    self.panicked(number, panic_message(&*payload));
                    continue;
                }
            }
            if member.listed {
                self.turns.push_back(number);
            }
        }
        if !self.turns.is_empty() {
            // Programs of the host that it has just served may be waiting for this CPU.
            thread::yield_now();
        }
        self.turns.is_empty()
    }

    /// A panic in a guest's turn is that guest's end, and nobody else's: its frontend is disconnected, its sockets are closed, and
    /// it begins anew with its next frontend.
    #[cold]
    fn panicked(&mut self, number: u32, message: &str) {
        let Some(member) = self.members.remove(&number) else { return };
        member.due.inspect(|&due| _ = self.deadlines.remove(&(due, number)));
        let guest = member.guest.clone();
        log::error!(
            "{}: stopped by a bug in ringroad: {message}; please report it; a new connection starts it again",
            guest.name
        );
        let listener = catch_unwind(AssertUnwindSafe(|| {
            guest.abandon();
            member.end()
        }));
        let listener = listener.ok().flatten();
        if let Some(listener) = &listener {
            self.shared.unwatch(listener.as_raw_fd());
        }
        if let Err(error) = self.add(guest.clone(), listener) {
            log::error!("{}: cannot be served any more: {error}", guest.name);
        }
    }

    /// Gives a guest turns, after something has happened.
    fn list(&mut self, guest: u32, what: impl FnOnce(&mut Member)) {
        if let Some(member) = self.members.get_mut(&guest) {
            what(member);
            if !std::mem::replace(&mut member.listed, true) {
                self.turns.push_back(guest);
            }
        }
    }

    /// Gives turns to guests whose time has come.
    fn wake(&mut self, now: Instant) {
        while let Some(&(due, guest)) = self.deadlines.first()
            && due <= now
        {
            self.deadlines.pop_first();
            self.list(guest, |member| (member.due, member.late) = (None, true));
        }
    }

    /// Milliseconds to sleep.
    fn timeout(&self) -> i32 {
        let Some(&(next, _)) = self.deadlines.first() else { return -1 };
        let left = next.saturating_duration_since(Instant::now());
        // Rounded up: else it would wake just before, again and again.
        (left.as_millis() + 1).min(i32::MAX as u128) as i32
    }

    fn event(&mut self, token: Token) {
        match token {
            Token::Wake => {}
            Token::Kick(guest) => self.list(guest, Member::start_polling),
            Token::Listener(guest) => self.list(guest, |member| member.pending_accept = true),
            Token::Sockets(guest) => self.list(guest, |member| member.events = true),
        }
    }

    /// Takes up what others want. `false`: to stop.
    fn obey(&mut self) -> bool {
        let (control, posts) = self.shared.take();
        for control in control {
            match control {
                Control::Add(guest, listener, reply) => {
                    let _ = reply.send(self.add(guest, listener));
                }
                Control::Remove(number, reply) => {
                    let due = self.members.remove(&number).and_then(|member| member.due);
                    due.inspect(|&due| _ = self.deadlines.remove(&(due, number)));
                    let _ = reply.send(());
                }
                Control::Listen(number, listener, reply) => {
                    self.listen(number, listener);
                    let _ = reply.send(());
                }
                Control::Configure(cpu, poll, reply) => {
                    self.poll = poll;
                    let _ = reply.send(cpu.map_or_else(sys::unpin_current_thread, sys::pin_current_thread));
                }
                Control::Stop => return false,
            }
        }
        for guest in posts {
            self.list(guest, |member| member.mail = true);
        }
        true
    }

    /// Programs connect to this socket of a guest from now on; the one before, if there was one, is closed.
    fn listen(&mut self, guest: u32, listener: Option<UnixListener>) {
        let Some(member) = self.members.get_mut(&guest) else { return };
        let watched = listener
            .as_ref()
            .map_or(Ok(()), |listener| self.shared.watch(listener.as_raw_fd(), Token::Listener(guest)));
        if let Err(error) = watched {
            member.guest.say(Level::Error, format_args!("cannot wait for programs: {error}"));
        }
        member.listener = listener;
        self.list(guest, |member| member.pending_accept = true);
    }

    fn add(&mut self, guest: Arc<Guest>, listener: Option<UnixListener>) -> io::Result<()> {
        let (number, epoll) = (guest.mail.guest, Epoll::new()?);
        self.shared.watch(epoll.as_raw_fd(), Token::Sockets(number))?;
        if let Some(listener) = &listener {
            self.shared.watch(listener.as_raw_fd(), Token::Listener(number))?;
        }
        self.members.insert(number, Member::new(guest, listener, epoll));
        self.list(number, |_| {});
        Ok(())
    }
}
