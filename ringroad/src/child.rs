//! Programs that `demo` and `bench` start: the daemon itself, drivers, DPDK.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A program that ends with its owner.
pub struct Program {
    child: Child,
    name: String,
}

impl Program {
    /// Starts it; what it prints on standard error goes to the file `log`.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> Result<Program, String> {
        let failed = |error: io::Error| format!("cannot start {name}: {error}");
        let log = fs::File::create(log).map_err(failed)?;
        let child = command.stdin(Stdio::null()).stderr(log).spawn().map_err(failed)?;
        Ok(Program { child, name: name.to_owned() })
    }

    /// The process.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits until a path exists.
    pub fn wait_for(&mut self, path: &Path, patience: Duration, log: &Path) -> Result<(), String> {
        let start = Instant::now();
        while !path.exists() {
            if let Ok(Some(status)) = self.child.try_wait() {
                let said = fs::read_to_string(log).unwrap_or_default();
                return Err(format!("{} ended with {status}:\n{said}", self.name));
            }
            if start.elapsed() > patience {
                return Err(format!("{} has not made {} within {patience:?}", self.name, path.display()));
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Asks it to end, and waits for that.
    pub fn end(&mut self) {
        ringroad_host::signal(self.child.id(), ringroad_host::Signal::Terminate);
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if start.elapsed() > Duration::from_secs(5) {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Holds it still, or lets it go on: while one is measured, others may not even poll.
    pub fn hold(&self, still: bool) {
        use ringroad_host::Signal::{Continue, Stop};
        ringroad_host::signal(self.child.id(), if still { Stop } else { Continue });
    }

    /// The CPU time that it has used.
    pub fn cpu_time(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // The second field, the name, may have spaces in it, but ends with the last parenthesis.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
        // Fields 14 and 15, in ticks of 10 ms on every Linux that we know.
        Duration::from_millis((ticks(11) + ticks(12)) * 10)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.hold(false);
        self.end();
    }
}

/// A folder for sockets and logs that goes with its owner.
pub struct Folder(PathBuf);

impl Folder {
    /// Makes one of a name of its own.
    pub fn new(what: &str) -> Result<Folder, String> {
        let path = std::env::temp_dir().join(format!("ringroad-{what}-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        Ok(Folder(path))
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// This program, to start it again.
pub fn ourselves() -> Result<Command, String> {
    std::env::current_exe().map(Command::new).map_err(|error| format!("cannot find our own program: {error}"))
}
