//! seccomp: the system calls that the process may make. `confine` in mod.rs installs filters for the whole process; the
//! worker adds a narrower one to its own thread. The kernel runs all of them, and the most restrictive result applies.
//!
//! - What only injected code would call ([`NEVER`]: executing programs, other processes, kernel settings) kills the process
//!   at once: it has been taken over already, and guests are better off without it.
//! - Any other call that is not on the list fails and is logged by the kernel; the daemon goes on. A later library version
//!   that makes a new call for an old purpose must not cut off all guests. It gets ENOSYS, so that it falls back to the old
//!   call.
//! - A listed call with arguments that are not allowed fails with EPERM.
//!
//! The kernel caches which calls are allowed whatever their arguments and runs no filter for them.

use crate::sys;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::{collections::BTreeMap, io, sync::OnceLock};

/// The worker's filter, once the process is confined.
static WORKER: OnceLock<BpfProgram> = OnceLock::new();

/// Installs the filters for the calling thread and all threads that it starts. Returns the numbers of calls allowed to the
/// process and to the worker. `tcp`: there are TCP addresses to connect to.
pub(super) fn install(tcp: bool) -> io::Result<(usize, usize)> {
    let (all, worker) = (general(tcp), worker());
    let counts = (all.len(), worker.len());
    let numbers: Rules = all.keys().map(|&call| (call, Vec::new())).collect();
    let never: Rules = NEVER.iter().chain(NEVER_HERE).map(|&call| (call, Vec::new())).collect();
    let refuse = |errno: libc::c_int| SeccompAction::Errno(errno.unsigned_abs());
    let worker = program(worker, refuse(libc::EPERM), SeccompAction::Allow)?;
    let programs = [
        program(never, SeccompAction::Allow, SeccompAction::KillProcess)?,
        program(all, refuse(libc::EPERM), SeccompAction::Allow)?,
        // Installed after the one above: if two filters return an errno, that of the newer one is used.
        program(numbers, refuse(libc::ENOSYS), SeccompAction::Allow)?,
    ];
    for program in &programs {
        sys::add_filter(program, true)?;
    }
    // The C library tries clone3 for each thread: not logged, unlike the other refusals.
    let threads = program([(libc::SYS_clone3, Vec::new())].into(), SeccompAction::Allow, refuse(libc::ENOSYS))?;
    sys::add_filter(&threads, false)?;
    let _ = WORKER.set(worker);
    Ok(counts)
}

/// Restricts the calling thread, a worker, to the calls that forwarding takes. Does nothing if the process is not confined.
pub(crate) fn narrow() -> io::Result<()> {
    WORKER.get().map_or(Ok(()), |program| sys::add_filter(program, true))
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn program(rules: Rules, other: SeccompAction, listed: SeccompAction) -> io::Result<BpfProgram> {
    let arch = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, other, listed, arch).map_err(io::Error::other)?;
    BpfProgram::try_from(filter).map_err(io::Error::other)
}

/// A condition on one argument.
#[derive(Clone, Copy)]
enum Arg {
    /// This 32-bit value.
    Is(u8, u64),
    /// These bits of a mask.
    Bits(u8, u64, u64),
}

impl Arg {
    fn condition(self) -> Option<SeccompCondition> {
        match self {
            Arg::Is(index, value) => SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value),
            Arg::Bits(index, mask, value) => {
                SeccompCondition::new(index, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(mask), value)
            }
        }
        .ok()
    }
}

/// Allows a call whose arguments match one of `cases`. A case that cannot be expressed allows nothing.
fn allow(rules: &mut Rules, call: i64, cases: &[&[Arg]]) {
    let rule = |case: &&[Arg]| {
        let conditions = case.iter().map(|arg| arg.condition()).collect::<Option<Vec<_>>>()?;
        SeccompRule::new(conditions).ok()
    };
    let cases: Vec<_> = cases.iter().filter_map(rule).collect();
    if !cases.is_empty() {
        rules.entry(call).or_default().extend(cases);
    }
}

/// Allows a call whose argument `index` is one of `values`.
fn allow_each(rules: &mut Rules, call: i64, index: u8, values: impl IntoIterator<Item = u64>) {
    values.into_iter().for_each(|value| allow(rules, call, &[&[Arg::Is(index, value)]]));
}

/// Calls of this architecture: old ones that newer architectures lack and that the C library prefers where they exist.
#[cfg(target_arch = "x86_64")]
const HERE: &[i64] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_unlink,
    libc::SYS_mkdir,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_readlink,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_time,
    libc::SYS_getrlimit,
    libc::SYS_poll,
    libc::SYS_epoll_wait,
];
#[cfg(target_arch = "aarch64")]
const HERE: &[i64] = &[
    // renameat, which the libc crate does not define for this architecture.
    38,
];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const HERE: &[i64] = &[];

/// What any thread needs: memory, time, locks, exit. Calls for memory and signals whose arguments matter are in `base`.
const BASE: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
];

/// Calls that move bytes or wait for them.
const DATA: &[i64] = &[
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_timerfd_settime,
    libc::SYS_write,
    libc::SYS_writev,
];

/// What control needs: sockets, files (limited by Landlock), descriptors.
const CONTROL: &[i64] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fallocate,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpeername,
    libc::SYS_getrusage,
    libc::SYS_getsockname,
    libc::SYS_getuid,
    libc::SYS_listen,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_mkdirat,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_openat,
    libc::SYS_pipe2,
    libc::SYS_readlinkat,
    libc::SYS_renameat2,
    libc::SYS_shutdown,
    libc::SYS_statfs,
    libc::SYS_sysinfo,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_uname,
    libc::SYS_unlinkat,
];

fn value(number: libc::c_int) -> u64 {
    u64::from(number.cast_unsigned())
}

/// Rules for every thread: no memory that is both written and executed, no signals to other processes.
fn base() -> Rules {
    let mut rules: Rules = BASE.iter().chain(DATA).map(|&call| (call, Vec::new())).collect();
    let no_code = Arg::Bits(2, value(libc::PROT_EXEC), 0);
    allow(&mut rules, libc::SYS_mmap, &[&[no_code]]);
    allow(&mut rules, libc::SYS_mprotect, &[&[no_code]]);
    // Used by a panic that aborts, and by the guard that interrupts a thread.
    allow(&mut rules, libc::SYS_tgkill, &[&[Arg::Is(0, u64::from(std::process::id()))]]);
    allow(&mut rules, libc::SYS_sched_setaffinity, &[&[Arg::Is(0, 0)]]);
    allow_each(&mut rules, libc::SYS_prctl, 0, PRCTL.iter().map(|&option| value(option)));
    rules
}

/// Names of threads, and of the C library's memory areas.
const PRCTL: &[libc::c_int] = &[libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];

/// Requests to TAP interfaces and sockets; the last two are how the standard library sets flags.
const IOCTL: &[u64] = &[
    libc::TUNSETIFF,
    libc::TUNSETVNETHDRSZ,
    libc::TUNSETOFFLOAD,
    libc::SIOCGIFFLAGS,
    libc::SIOCSIFFLAGS,
    libc::SIOCGIFMTU,
    libc::SIOCSIFMTU,
    // SIOCOUTQ (the same number), and isatty.
    libc::TIOCOUTQ,
    libc::TCGETS,
    libc::FIONBIO,
    libc::FIOCLEX,
];

const FCNTL: &[libc::c_int] = &[
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
];

/// Rules for the whole process.
fn general(tcp: bool) -> Rules {
    let mut rules = base();
    rules.extend(CONTROL.iter().chain(HERE).map(|&call| (call, Vec::new())));
    allow_each(&mut rules, libc::SYS_ioctl, 1, IOCTL.iter().copied());
    allow_each(&mut rules, libc::SYS_fcntl, 1, FCNTL.iter().map(|&command| value(command)));
    // Landlock has no rule for modes. Permissions only: root's programs must not be made to run as root for everybody.
    let bits = value(0o7000);
    allow(&mut rules, libc::SYS_fchmod, &[&[Arg::Bits(1, bits, 0)]]);
    allow(&mut rules, libc::SYS_fchmodat, &[&[Arg::Bits(2, bits, 0)]]);
    #[cfg(target_arch = "x86_64")]
    allow(&mut rules, libc::SYS_chmod, &[&[Arg::Bits(1, bits, 0)]]);
    allow(&mut rules, libc::SYS_socket, &[&[Arg::Is(0, value(libc::AF_UNIX))]]);
    if tcp {
        // TCP under both its protocol numbers and nothing else: Landlock restricts the ports of TCP, but not of MPTCP or UDP.
        for family in [libc::AF_INET, libc::AF_INET6] {
            for protocol in [0, libc::IPPROTO_TCP] {
                let stream = Arg::Bits(1, 0xf, value(libc::SOCK_STREAM));
                let case = [Arg::Is(0, value(family)), stream, Arg::Is(2, value(protocol))];
                allow(&mut rules, libc::SYS_socket, &[&case]);
            }
        }
    }
    allow(&mut rules, libc::SYS_socketpair, &[&[Arg::Is(0, value(libc::AF_UNIX))]]);
    // Other levels are excluded; they have options that change the host's packet filter, for instance (IPT_SO_SET_REPLACE).
    for call in [libc::SYS_setsockopt, libc::SYS_getsockopt] {
        allow_each(&mut rules, call, 1, [value(libc::SOL_SOCKET), value(libc::IPPROTO_TCP)]);
    }
    // Threads, but no processes or namespaces. clone3 keeps its flags in memory, where a filter cannot read them; it gets
    // ENOSYS, and the C library falls back to clone.
    let threads = value(libc::CLONE_VM | libc::CLONE_THREAD);
    let spaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWCGROUP;
    allow(&mut rules, libc::SYS_clone, &[&[Arg::Bits(0, threads | value(spaces), threads)]]);
    let own = Arg::Is(0, u64::from(std::process::id()));
    allow(&mut rules, libc::SYS_kill, &[&[own]]);
    for process in [Arg::Is(0, 0), own] {
        allow(&mut rules, libc::SYS_prlimit64, &[&[process]]);
    }
    // Another filter can only restrict further; user notification, which lets another process answer calls, is excluded.
    for flags in [0, libc::SECCOMP_FILTER_FLAG_LOG] {
        let more = [Arg::Is(0, u64::from(libc::SECCOMP_SET_MODE_FILTER)), Arg::Is(1, flags)];
        allow(&mut rules, libc::SYS_seccomp, &[&more]);
    }
    rules
}

/// Rules for a thread that forwards frames: rings are memory; TAP interfaces and eventfds are read and written.
fn worker() -> Rules {
    let mut rules = base();
    #[cfg(target_arch = "x86_64")]
    rules.extend([(libc::SYS_epoll_wait, Vec::new()), (libc::SYS_poll, Vec::new())]);
    // The MTU of an interface, through any socket, if a frame is longer than the last known MTU.
    allow(&mut rules, libc::SYS_ioctl, &[&[Arg::Is(1, libc::SIOCGIFMTU)], &[Arg::Is(1, libc::TUNSETOFFLOAD)]]);
    let datagram = Arg::Bits(1, 0xf, value(libc::SOCK_DGRAM));
    allow(&mut rules, libc::SYS_socket, &[&[Arg::Is(0, value(libc::AF_UNIX)), datagram]]);
    // A backtrace reads the program's own file.
    let writes = libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC;
    allow(&mut rules, libc::SYS_openat, &[&[Arg::Bits(2, value(writes), 0)]]);
    rules.extend([(libc::SYS_getcwd, Vec::new()), (libc::SYS_readlinkat, Vec::new())]);
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_readlink, Vec::new());
    rules
}

/// What neither this program nor its libraries ever call.
const NEVER: &[i64] = &[
    // Executing programs.
    libc::SYS_execve,
    libc::SYS_execveat,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    // Ways around these filters, or deep into the kernel.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_bpf,
    libc::SYS_userfaultfd,
    libc::SYS_perf_event_open,
    libc::SYS_add_key,
    libc::SYS_keyctl,
    libc::SYS_request_key,
    libc::SYS_personality,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    // Other privileges.
    libc::SYS_capset,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    // Mounts and namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    // The machine itself.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_syslog,
];

#[cfg(target_arch = "x86_64")]
const NEVER_HERE: &[i64] = &[
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_kexec_file_load,
];
#[cfg(not(target_arch = "x86_64"))]
const NEVER_HERE: &[i64] = &[];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workers_calls_are_a_subset() {
        let (all, few) = (general(true), worker());
        assert!(few.keys().all(|call| all.contains_key(call)), "{few:?}");
        assert!(few.len() < 2 * all.len() / 3, "{} of {}", few.len(), all.len());
        for call in [libc::SYS_connect, libc::SYS_bind, libc::SYS_clone, libc::SYS_unlinkat, libc::SYS_memfd_create] {
            assert!(all.contains_key(&call) && !few.contains_key(&call), "{call}");
        }
    }

    #[test]
    fn no_call_is_both_allowed_and_deadly() {
        let all = general(true);
        let both: Vec<_> = NEVER.iter().chain(NEVER_HERE).filter(|call| all.contains_key(call)).collect();
        assert_eq!(both, Vec::<&i64>::new());
    }

    #[test]
    fn filters_fit_the_kernels_size_limit() {
        for rules in [general(true), general(false), worker()] {
            let program = program(rules, SeccompAction::Errno(1), SeccompAction::Allow).unwrap();
            // BPF_MAXINSNS.
            assert!(program.len() <= 4096, "{}", program.len());
        }
    }

    #[test]
    fn calls_refused_to_the_worker() {
        // Filters belong to a thread: the other tests are not affected.
        let tried = std::thread::spawn(|| {
            let path = std::env::temp_dir().join(format!("ringroad-worker-{}", std::process::id()));
            sys::no_new_privileges().unwrap();
            let rules = program(worker(), SeccompAction::Errno(1), SeccompAction::Allow).unwrap();
            sys::add_filter(&rules, false).unwrap();
            assert!(vmm_sys_util::eventfd::EventFd::new(0).is_err(), "only control creates eventfds");
            // Calls that it may make.
            std::fs::read("/proc/self/status").unwrap();
            std::os::unix::net::UnixDatagram::unbound().unwrap();
            drop(vec![1u8; 8 << 20]);
            std::thread::yield_now();
            [
                std::fs::write(&path, "").err(),
                std::os::unix::net::UnixListener::bind(&path).err(),
                std::os::unix::net::UnixStream::connect(&path).err(),
                std::net::TcpStream::connect("127.0.0.1:1").err(),
                std::net::UdpSocket::bind("127.0.0.1:0").err(),
                std::fs::remove_file(&path).err(),
                std::thread::Builder::new().spawn(|| ()).err(),
            ]
        });
        for (index, error) in tried.join().unwrap().into_iter().enumerate() {
            assert_eq!(error.and_then(|error| error.raw_os_error()), Some(libc::EPERM), "{index}");
        }
    }
}
