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

/// How much worse a victim's latencies may be than without the attack.
const TIMES: u32 = 5;
/// How often an attack whose victims fared worse is compared with the same on another daemon.
const ROUNDS: usize = 3;
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

/// What the victims had.
type Pair = [Figures; 2];
const NAMES: [&str; 2] = ["frames", "echo"];

/// A daemon with victims at work. Ports v1, v2 (victims), f1, f2x (free, for frontends that come later), vsock ve (cid 1000).
#[expect(missing_debug_implementations, reason = "a function has none")]
pub struct Scene {
    /// The daemon under attack.
    pub daemon: Daemon,
    /// What was wrong so far.
    pub failures: Vec<String>,
    victims: [Victim; 2],
    /// What victims have without an attack: alone, or beside a thread that takes as much of the CPU as an attacker and does nothing
    /// with it, whichever is worse. What the scheduler costs is not the daemon's doing.
    calm: Pair,
    setup: Box<dyn Fn(&mut Config)>,
    stderr: Stderr,
    memory: u64,
    _serial: MutexGuard<'static, ()>,
}

impl Scene {
    /// Starts all, with more ports as `setup` says, and looks at the victims for two seconds.
    pub fn new(setup: impl Fn(&mut Config) + 'static) -> Scene {
        Scene::with(Stderr::File, setup)
    }

    /// The same with another standard error of the daemon.
    pub fn with(stderr: Stderr, setup: impl Fn(&mut Config) + 'static) -> Scene {
        let serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
        let setup: Box<dyn Fn(&mut Config)> = Box::new(move |config| {
            ["v1", "v2", "f1", "f2x"].iter().for_each(|name| config.port(name));
            config.vsock("ve", 1000, "");
            setup(config);
        });
        let daemon = Daemon::start_with(stderr, &setup);
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
        let victims = [net, echo];
        Scene { daemon, failures: Vec::new(), victims, calm, setup, stderr, memory, _serial: serial }
    }

    /// Says what must hold; what does not is remembered, and the test fails at its end.
    pub fn check(&mut self, holds: bool, what: impl Into<String>) {
        let what = what.into();
        if !holds {
            println!("FAILED: {what}");
            self.failures.push(what);
        }
    }

    /// Attacks for a time, in a thread that yields to all others, and judges what the victims had meanwhile: against what they
    /// have without an attack, and if that was better by more than five times, against the same attack on another daemon beside
    /// theirs, which takes as much of the machine but nothing of their daemon.
    pub fn attack<T: Send>(&mut self, seconds: f64, attack: impl Fn(&Daemon, Instant) -> T + Sync) -> T {
        let (result, mut seen) = suffer(&self.victims, &self.daemon, seconds, &attack);
        println!("during {seconds:.1} s: frames {}; echo {}", seen[0], seen[1]);
        let mut least = self.calm;
        if late(&seen, &least).next().is_some() {
            let decoy = Daemon::start_with(self.stderr, &self.setup);
            let (mut here, mut beside) = (vec![seen], Vec::new());
            loop {
                beside.push(suffer(&self.victims, &decoy, seconds, &attack).1);
                seen = median(&here);
                let other = median(&beside);
                println!("attacks {}: frames {}; echo {}", here.len(), seen[0], seen[1]);
                println!("the same on another daemon: frames {}; echo {}", other[0], other[1]);
                least = [0, 1].map(|index| self.calm[index].worse(&other[index]));
                if late(&seen, &least).next().is_none() || beside.len() == ROUNDS {
                    break;
                }
                here.push(suffer(&self.victims, &self.daemon, seconds, &attack).1);
            }
        }
        let late: Vec<String> = late(&seen, &least).collect();
        late.into_iter().for_each(|what| self.check(false, what));
        self.judge(&seen);
        result
    }

    /// Judges the victims' rates, and the daemon.
    fn judge(&mut self, seen: &Pair) {
        for (index, name) in NAMES.into_iter().enumerate() {
            let (now, calm) = (seen[index], self.calm[index]);
            self.check(now.rate >= 0.9 * calm.rate, format!("{name}: {:.0}/s, calm {:.0}/s", now.rate, calm.rate));
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
        drop(self.victims);
        assert!(self.failures.is_empty(), "{:#?}", self.failures);
    }
}

/// Attacks a daemon for a time, and says what the victims had meanwhile.
fn suffer<T: Send>(
    victims: &[Victim; 2],
    daemon: &Daemon,
    seconds: f64,
    attack: &(impl Fn(&Daemon, Instant) -> T + Sync),
) -> (T, Pair) {
    let _ = victims.each_ref().map(Victim::figures);
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let result = thread::scope(|scope| {
        let attacker = scope.spawn(|| {
            crate::be_nice();
            attack(daemon, until)
        });
        attacker.join()
    });
    // What it has left behind counts as well.
    thread::sleep(until.saturating_duration_since(Instant::now()));
    let seen = victims.each_ref().map(Victim::figures);
    (result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)), seen)
}

/// What came too late, compared with what is the least that can be had.
fn late<'a>(seen: &'a Pair, least: &'a Pair) -> impl Iterator<Item = String> + 'a {
    let figures = [("p50", (|figures| figures.p50) as fn(&Figures) -> Duration), ("p99", |figures| figures.p99)];
    let all =
        NAMES.into_iter().enumerate().flat_map(move |(index, name)| figures.map(|(what, of)| (index, name, what, of)));
    all.filter_map(move |(index, name, what, of)| {
        let (now, least) = (of(&seen[index]), of(&least[index]));
        (now > TIMES * least).then(|| format!("{name}: {what} {now:.1?}, without the attack {least:.1?}"))
    })
}

/// The median of each latency over some rounds, the least rate and all disorder.
fn median(rounds: &[Pair]) -> Pair {
    [0, 1].map(|index| {
        let middle = |of: fn(&Figures) -> Duration| {
            let mut all: Vec<Duration> = rounds.iter().map(|round| of(&round[index])).collect();
            all.sort_unstable();
            all[(all.len() - 1) / 2]
        };
        Figures {
            rate: rounds.iter().map(|round| round[index].rate).fold(f64::INFINITY, f64::min),
            p50: middle(|figures| figures.p50),
            p99: middle(|figures| figures.p99),
            max: middle(|figures| figures.max),
            disorder: rounds.iter().map(|round| round[index].disorder).sum(),
        }
    })
}
