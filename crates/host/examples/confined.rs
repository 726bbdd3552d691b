//! Confines itself like the daemon and then attempts one action, to see whether it is refused. `confined [--free] [--folder
//! F] [--tcp PORT] ACT [ARGUMENT]`; with `--free` it does not confine itself. Prints `done` or `refused: <why>`; some actions
//! end it by SIGSYS. Run by ringroad/tests/sandbox.rs.
//!
//! Its raw system calls are an attacker's: the only unsafe code outside `mem` and `host/sys`, in a program that is not part of the
//! product.
#![deny(unsafe_code)]

use ringroad_host::{
    sandbox::{Confinement, confine},
    vfio_user::{Client, ClientError, InterruptKind, Interrupts, PciRegion, Server, ServerConfig, VfioDevice},
};
use ringroad_mem::{Region, Table};
use socket2::Socket;
use std::{
    env, fs,
    io::{self, Read},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt,
        unix::{
            fs::PermissionsExt,
            net::{SocketAddr as UnixAddr, UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    process::Command,
    sync::Arc,
    thread,
    time::Duration,
};

type Try = io::Result<()>;

fn main() {
    let mut confinement = Confinement::default();
    let (mut free, mut rest) = (false, Vec::new());
    let mut arguments = env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().expect("a value");
        match argument.as_str() {
            "--free" => free = true,
            "--folder" => confinement.folders.push(value().into()),
            "--tcp" => confinement.tcp.push(value().parse().expect("a port")),
            _ => rest.push(argument),
        }
    }
    if !free {
        let in_force = confine(&confinement).expect("the only thread");
        assert_eq!(in_force.missing(), [""; 0], "some layers are not in force");
    }
    let act = rest.first().expect("an act");
    match run(act, rest.get(1).map_or("", String::as_str)) {
        Ok(()) => println!("done"),
        Err(error) => println!("refused: {error}"),
    }
}

fn run(act: &str, with: &str) -> Try {
    match act {
        // What the daemon does.
        "listen" => UnixListener::bind(with).map(drop),
        "connect" => TcpStream::connect(with).map(drop),
        "thread" => thread::Builder::new().spawn(|| ())?.join().map_err(|_| io::Error::other("it has failed")),
        "see-itself" => fs::read("/proc/self/fdinfo/0").map(drop),
        "memfd" => call(libc::SYS_memfd_create, [c"x".as_ptr() as usize, 0, 0, 0, 0, 0]),
        "serve-a-pci-device" => serve(with),
        // Other programs and processes.
        "exec" => Err(Command::new("/bin/true").exec()),
        "spawn" => Command::new("/bin/true").status().map(drop),
        "fork" => fork(0),
        "new-namespace" => fork(libc::CLONE_NEWUSER as usize),
        "ptrace" => call(libc::SYS_ptrace, [libc::PTRACE_TRACEME as usize, 0, 0, 0, 0, 0]),
        "read-memory-of-another" => {
            call(libc::SYS_process_vm_readv, [std::os::unix::process::parent_id() as usize, 0, 0, 0, 0, 0])
        }
        "signal-to-another" => {
            call(libc::SYS_kill, [std::os::unix::process::parent_id() as usize, libc::SIGCONT as usize, 0, 0, 0, 0])
        }
        // New executable code.
        "map-code" => memory(libc::PROT_READ | libc::PROT_EXEC).map(drop),
        "turn-into-code" => {
            let at = memory(libc::PROT_READ | libc::PROT_WRITE)?;
            call(libc::SYS_mprotect, [at, 4096, (libc::PROT_READ | libc::PROT_EXEC) as usize, 0, 0, 0])
        }
        "own-memory" => fs::OpenOptions::new().write(true).open("/proc/self/mem").map(drop),
        // Files.
        "read" => fs::read(with).map(drop),
        "write" => fs::write(with, "x"),
        "remove" => fs::remove_file(with),
        "folder" => fs::create_dir(with),
        "mode" | "setuid-file" | "setgid-file-at" | "setuid-memfd" => set_mode(act, with),
        "device" => {
            let path = std::ffi::CString::new(with)?;
            let mode = (libc::S_IFCHR | 0o600) as usize;
            call(libc::SYS_mknodat, [libc::AT_FDCWD as usize, path.as_ptr() as usize, mode, 0x103, 0, 0])
        }
        // Networks.
        "udp" => UdpSocket::bind("127.0.0.1:0").map(drop),
        "listen-tcp" => TcpListener::bind("127.0.0.1:0").map(drop),
        "netlink" => socket(libc::AF_NETLINK, libc::SOCK_RAW, 0),
        "packet" => socket(libc::AF_PACKET, libc::SOCK_RAW, 0),
        "mptcp" => socket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP),
        "raw" => socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP),
        "abstract" => UnixStream::connect_addr(&UnixAddr::from_abstract_name(with)?).map(drop),
        "port-by-number" => TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], with.parse().unwrap_or(0)))).map(drop),
        // Entry points into the kernel.
        "io-uring" => {
            let parameters = [0u8; 256];
            call(libc::SYS_io_uring_setup, [1, parameters.as_ptr() as usize, 0, 0, 0, 0])
        }
        "bpf" => call(libc::SYS_bpf, [usize::MAX, 0, 0, 0, 0, 0]),
        "userfaultfd" => call(libc::SYS_userfaultfd, [0; 6]),
        "perf" => call(libc::SYS_perf_event_open, [0; 6]),
        "keyring" => call(libc::SYS_keyctl, [0, usize::MAX - 2, 0, 0, 0, 0]),
        "mount" => call(libc::SYS_mount, [0; 6]),
        "unshare" => call(libc::SYS_unshare, [libc::CLONE_FS as usize, 0, 0, 0, 0, 0]),
        "personality" => call(libc::SYS_personality, [0xffff_ffff, 0, 0, 0, 0, 0]),
        "user" => call(libc::SYS_setuid, [rustix::process::getuid().as_raw() as usize, 0, 0, 0, 0, 0]),
        "handle" => call(libc::SYS_open_by_handle_at, [0; 6]),
        // TIOCSTI: input that the terminal's shell takes for typed characters.
        "type" => call(libc::SYS_ioctl, [0, libc::TIOCSTI as usize, c"x".as_ptr() as usize, 0, 0, 0]),
        // A system call that does not exist.
        "unknown" => call(1000, [0; 6]),
        _ => panic!("no act {act:?}"),
    }
}

/// Changes what may be done with a file, by each of the system calls for it.
fn set_mode(act: &str, with: &str) -> Try {
    match act {
        "mode" => fs::set_permissions(with, fs::Permissions::from_mode(0o660)),
        "setuid-file" => fs::set_permissions(with, fs::Permissions::from_mode(0o4755)),
        "setgid-file-at" => {
            let path = std::ffi::CString::new(with)?;
            call(libc::SYS_fchmodat, [libc::AT_FDCWD as usize, path.as_ptr() as usize, 0o2755, 0, 0, 0])
        }
        _ => {
            let (_, file) = Region::create(4096, 0, false).map_err(io::Error::other)?;
            file.set_permissions(fs::Permissions::from_mode(0o4755))
        }
    }
}

/// A PCI device without registers.
#[derive(Clone)]
struct Nothing(Interrupts);

impl VfioDevice for Nothing {
    fn name(&self) -> &str {
        "nothing"
    }
    fn region(&self, _: u32) -> PciRegion {
        PciRegion::new(256)
    }
    fn interrupts(&self) -> &Interrupts {
        &self.0
    }
    fn read(&self, _: u32, _: u64, _: &mut [u8]) {}
    fn write(&self, _: u32, _: u64, _: &[u8]) {
        self.0.set_line(true);
    }
    fn set_memory(&self, _: Arc<Table>) {}
    fn reset(&self) {}
}

/// Serves and drives a device over vfio-user: memory, interrupts, registers.
fn serve(path: &str) -> Try {
    let device = Nothing(Interrupts::new(true, 0, 0));
    let _server = Server::start(ServerConfig::new("nothing", path.as_ref()), device).map_err(io::Error::other)?;
    let (region, file) = Region::create(8192, 0, false).map_err(io::Error::other)?;
    let drive = || -> Result<(), ClientError> {
        let mut client = Client::connect(path.as_ref(), Duration::from_secs(5))?;
        client.map(&region, &file, true)?;
        client.unmap(&region)?;
        client.map(&region, &file, false)?;
        let (signalled, signal) = UnixStream::pair().expect("sockets");
        client.set_interrupts(InterruptKind::Intx, 0, &[signal.as_fd()])?;
        client.write(0, 0, &[1])?;
        assert_eq!((&signalled).read(&mut [0; 8]).ok(), Some(8));
        // Refused: it is no memory.
        assert!(client.map(&region, &fs::File::open("/proc/self/stat").expect("itself"), true).is_err());
        client.reset()
    };
    drive().map_err(io::Error::other)
}

#[expect(unsafe_code, reason = "safe wrappers leave out these calls, or refuse the arguments before the kernel can")]
fn call(number: libc::c_long, arguments: [usize; 6]) -> Try {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the arguments are numbers, or pointers to strings and arrays that outlive the call and are as long as it may
    // access.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn socket(family: i32, kind: i32, protocol: i32) -> Try {
    Socket::new_raw(family.into(), kind.into(), Some(protocol.into())).map(drop)
}

#[expect(unsafe_code, reason = "every library's mmap is unsafe, and `Region` maps no code")]
fn memory(protection: i32) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at as usize) }
}

/// Starts a process that exits at once, if that is allowed.
#[expect(unsafe_code, reason = "every library's fork is unsafe")]
fn fork(flags: usize) -> Try {
    // SAFETY: the child makes no call but the one that ends it; this process has one thread.
    let child = unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD as usize, 0, 0, 0, 0) };
    match child {
        // SAFETY: the child exits, and no code of the copied program runs any more.
        0 => unsafe { libc::_exit(0) },
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
