//! One attack: a daemon, victims, two calm seconds, the attack, and the verdict.

use crate::{
    daemon::{Config, Daemon, Stderr},
    victim::{Figures, Victim, exchange},
};
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The least p99 that a victim's is compared with, and five times the least p50: below it a loaded machine's scheduler decides.
const FLOOR: Duration = Duration::from_millis(5);
/// By how much the daemon's own memory may grow.
pub const BUDGET: u64 = 256 << 20;
/// How long the daemon may take to end.
const END: Duration = Duration::from_secs(1);

/// One attack at a time: they share the machine.
static SERIAL: Mutex<()> = Mutex::new(());

/// Waits while another thread is busy, which yields to all others as an attacker does.
fn beside_a_spinner(time: Duration) {
    let end = Instant::now() + time;
    thread::scope(|scope| {
        scope.spawn(|| {
            crate::be_nice();
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        });
    });
}

/// A daemon with victims at work. Ports v1, v2 (victims), f1, f2x (free, for frontends that come later), vsock ve (cid 1000).
#[derive(Debug)]
pub struct Scene {
    /// The daemon under attack.
    pub daemon: Daemon,
    /// What was wrong so far.
    pub failures: Vec<String>,
    net: Option<Victim>,
    echo: Option<Victim>,
    /// What victims have without an attack: alone, or beside a thread that takes as much of the CPU as an attacker and does nothing
    /// with it, whichever is worse. What the scheduler costs is not the daemon's doing.
    calm: [Figures; 2],
    memory: u64,
    _serial: MutexGuard<'static, ()>,
}

impl Scene {
    /// Starts all, with more ports as `setup` says, and looks at the victims for two seconds.
    pub fn new(setup: impl FnOnce(&mut Config)) -> Scene {
        Scene::with(Stderr::File, setup)
    }

    /// The same with another standard error of the daemon.
    pub fn with(stderr: Stderr, setup: impl FnOnce(&mut Config)) -> Scene {
        let serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
        let daemon = Daemon::start_with(stderr, |config| {
            ["v1", "v2", "f1", "f2x"].iter().for_each(|name| config.port(name));
            config.vsock("ve", 1000, "");
            setup(config);
        });
        let net = Victim::net(&daemon, "v1", "v2", true).expect("victims connect");
        let echo = Victim::echo(&daemon, "ve", false).expect("an echo connects");
        thread::sleep(Duration::from_millis(200));
        net.figures();
        echo.figures();
        thread::sleep(Duration::from_secs(1));
        let quiet = [net.figures(), echo.figures()];
        println!("calm: frames {}; echo {}", quiet[0], quiet[1]);
        beside_a_spinner(Duration::from_secs(1));
        let busy = [net.figures(), echo.figures()];
        println!("beside a busy thread: frames {}; echo {}", busy[0], busy[1]);
        let calm = std::array::from_fn(|index| quiet[index].worse(&busy[index]));
        let memory = daemon.memory();
        assert!(calm[0].rate > 8000.0 && calm[1].rate > 300.0, "the machine is too busy to judge anything: {calm:?}");
        daemon.peak();
        Scene { daemon, failures: Vec::new(), net: Some(net), echo: Some(echo), calm, memory, _serial: serial }
    }

    /// Says what must hold; what does not is remembered, and the test fails at its end.
    pub fn check(&mut self, holds: bool, what: impl Into<String>) {
        let what = what.into();
        if !holds {
            println!("FAILED: {what}");
            self.failures.push(what);
        }
    }

    /// The victims' figures since this was asked last: frames, echo.
    pub fn figures(&self) -> [Option<Figures>; 2] {
        [&self.net, &self.echo].map(|victim| victim.as_ref().map(Victim::figures))
    }

    /// Attacks for a time, in a thread that yields to all others, and judges what the victims had meanwhile.
    pub fn attack<T: Send>(&mut self, seconds: f64, attack: impl FnOnce(&Daemon, Instant) -> T + Send) -> T {
        self.figures();
        let start = Instant::now();
        let until = start + Duration::from_secs_f64(seconds);
        let daemon = &self.daemon;
        let result = thread::scope(|scope| {
            let attacker = scope.spawn(|| {
                crate::be_nice();
                attack(daemon, until)
            });
            let result = attacker.join();
            // What it has left behind counts as well.
            thread::sleep(until.saturating_duration_since(Instant::now()));
            result
        });
        self.judge(start.elapsed());
        match result {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Judges the victims and the daemon over the time since the figures were asked last.
    pub fn judge(&mut self, took: Duration) {
        let now = self.figures();
        for (index, (name, figures)) in ["frames", "echo"].into_iter().zip(now).enumerate() {
            let (Some(now), calm) = (figures, self.calm[index]) else { continue };
            println!("during {took:.1?}: {name} {now}");
            self.check(now.rate >= 0.9 * calm.rate, format!("{name}: {:.0}/s, calm {:.0}/s", now.rate, calm.rate));
            let most = (5 * calm.p99).max(FLOOR);
            self.check(now.p99 <= most, format!("{name}: p99 {:.1?}, calm {:.1?}", now.p99, calm.p99));
            let most = (5 * calm.p50).max(FLOOR / 5);
            self.check(now.p50 <= most, format!("{name}: p50 {:.1?}, calm {:.1?}", now.p50, calm.p50));
            self.check(now.disorder == 0, format!("{name}: {} out of order", now.disorder));
        }
        let alive = self.daemon.is_alive();
        let end = self.daemon.end();
        self.check(alive, format!("the daemon ended: {end}\n{}", self.daemon.log()));
        let grown = self.daemon.peak().saturating_sub(self.memory);
        println!("memory: +{} KiB", grown >> 10);
        self.check(grown <= BUDGET, format!("the daemon's memory grew by {} MiB", grown >> 20));
    }

    /// New frontends get served, SIGTERM ends the daemon in time, and nothing was wrong before.
    pub fn finish(mut self) {
        if self.daemon.is_alive() {
            if let Err(why) = exchange(&self.daemon, "f1", "f2x", 100, Duration::from_secs(2)) {
                self.check(false, why);
            }
            let took = self.daemon.terminate(4 * END);
            println!("SIGTERM: {took:?}");
            self.check(took.is_some_and(|took| took <= END), format!("SIGTERM ended the daemon in {took:?}"));
        }
        (self.net, self.echo) = (None, None);
        assert!(self.failures.is_empty(), "{:#?}", self.failures);
    }
}
