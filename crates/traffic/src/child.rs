//! Child processes of `demo` and `bench` (the daemon, drivers, DPDK) and their temporary directory.

use ringroad_host::{Signal, signal};
use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A child process, terminated when dropped.
#[derive(Debug)]
pub struct Program {
    child: Child,
    name: String,
    /// What it has printed, if that is kept.
    printed: Option<PathBuf>,
}

impl Program {
    /// Starts it, with stderr redirected to the file `log`.
    ///
    /// # Errors
    /// The file cannot be created, or the process cannot be started.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> Result<Program, String> {
        let failed = |error: io::Error| format!("cannot start {name}: {error}");
        let log = fs::File::create(log).map_err(failed)?;
        let child = command.stdin(Stdio::null()).stderr(log).spawn().map_err(failed)?;
        Ok(Program { child, name: name.to_owned(), printed: None })
    }

    /// Starts `ringroad serve` with a configuration and further arguments, and waits until its sockets exist. `name`
    /// distinguishes its files from those of others in the folder.
    ///
    /// # Errors
    /// It cannot be started, or has exited, or a socket does not exist after 5 s.
    pub fn serve<'a>(
        folder: &Folder,
        name: &str,
        config: &str,
        arguments: &[&OsStr],
        sockets: impl IntoIterator<Item = &'a PathBuf>,
    ) -> Result<Program, String> {
        Program::serve_by(ourselves()?, folder, name, config, arguments, sockets)
    }

    /// As [`Program::serve`], of another program: `command` starts `ringroad`.
    ///
    /// # Errors
    /// As for [`Program::serve`].
    pub fn serve_by<'a>(
        mut command: Command,
        folder: &Folder,
        name: &str,
        config: &str,
        arguments: &[&OsStr],
        sockets: impl IntoIterator<Item = &'a PathBuf>,
    ) -> Result<Program, String> {
        let (file, log) = (folder.file(&format!("{name}.toml")), folder.file(&format!("{name}.log")));
        fs::write(&file, config).map_err(|error| format!("cannot write {}: {error}", file.display()))?;
        let printed = folder.file(&format!("{name}.out"));
        let out =
            fs::File::create(&printed).map_err(|error| format!("cannot create {}: {error}", printed.display()))?;
        command.arg("serve").arg("-c").arg(&file).args(arguments).stdout(out);
        let mut program = Program::start("ringroad serve", &mut command, &log)?;
        program.printed = Some(printed);
        for socket in sockets {
            program.wait_for(socket, Duration::from_secs(5), &log)?;
        }
        Ok(program)
    }

    /// Returns the process.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits until `path` exists.
    ///
    /// # Errors
    /// The process has exited (the message contains its log), or `patience` is over.
    pub fn wait_for(&mut self, path: &Path, patience: Duration, log: &Path) -> Result<(), String> {
        let start = Instant::now();
        while !path.exists() {
            if let Ok(Some(status)) = self.child.try_wait() {
                let log = fs::read_to_string(log).unwrap_or_default();
                return Err(format!("{} exited with {status}:\n{log}", self.name));
            }
            if start.elapsed() > patience {
                return Err(format!("{} did not create {} within {patience:?}", self.name, path.display()));
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Sends SIGTERM and waits; SIGKILL after 5 s.
    pub fn end(&mut self) {
        signal(self.child.id(), Signal::Terminate);
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

    /// Stops (SIGSTOP) or continues the process: while one is being measured, others must not even poll.
    pub fn hold(&self, still: bool) {
        signal(self.child.id(), if still { Signal::Stop } else { Signal::Continue });
    }

    /// Has it read its configuration again (SIGHUP).
    pub fn reload(&self) {
        signal(self.child.id(), Signal::Hangup);
    }

    /// Has `ringroad serve` print its counters (SIGUSR1), and returns them.
    ///
    /// # Errors
    /// It has not printed them within 2 s.
    pub fn counters(&self) -> Result<String, String> {
        let Some(printed) = &self.printed else { return Err(format!("what {} prints is not kept", self.name)) };
        let text = || fs::read_to_string(printed).unwrap_or_default();
        let before = text().len();
        signal(self.child.id(), Signal::User1);
        let start = Instant::now();
        loop {
            // It is printed in one piece.
            if let Some(new) = text().get(before..).filter(|new| new.ends_with('\n')) {
                return Ok(new.to_owned());
            }
            if start.elapsed() > Duration::from_secs(2) {
                return Err(format!("{} has not printed its counters within 2 s of SIGUSR1", self.name));
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Returns its CPU time, user and system.
    pub fn cpu_time(&self) -> Duration {
        cpu_time(self.child.id())
    }
}

/// Returns the CPU time of a process, user and system.
pub fn cpu_time(process: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The second field, the name, may contain spaces, but ends at the last parenthesis.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    // Fields 14 and 15, utime and stime, in ticks of 10 ms (USER_HZ is 100).
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

impl Drop for Program {
    fn drop(&mut self) {
        self.hold(false);
        self.end();
    }
}

/// A temporary directory for sockets and logs, removed when dropped.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Creates it, with a name that is unique to this process.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn new(what: &str) -> Result<Folder, String> {
        let path = std::env::temp_dir().join(format!("ringroad-{what}-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        Ok(Folder(path))
    }

    /// Returns the path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the `[[port]]` section of a vhost-user port for frames of any size, with further lines.
pub fn port(name: &str, socket: &Path, more: &str) -> String {
    let socket = socket.display();
    format!("[[port]]\nname = \"{name}\"\nkind = \"vhost-user\"\nsocket = \"{socket}\"\nmtu = 65535\n{more}\n")
}

/// Returns a command that starts this program.
///
/// # Errors
/// The executable cannot be found.
pub fn ourselves() -> Result<Command, String> {
    std::env::current_exe().map(Command::new).map_err(|error| format!("cannot find the ringroad executable: {error}"))
}
