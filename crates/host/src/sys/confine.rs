//! What the libraries of the sandbox leave out.

use seccompiler::BpfProgramRef;
use std::io;

/// From now on no program that this thread, or one that it starts, executes has more rights than it has itself.
pub(crate) fn no_new_privileges() -> io::Result<()> {
    // SAFETY: no memory is involved.
    let result = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1 as libc::c_ulong, 0, 0, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Puts one more seccomp filter over the calling thread, and those that it starts from now on. `log`: what it refuses is in the
/// kernel's log (audit), which seccompiler's own call does not ask for.
pub(crate) fn add_filter(program: BpfProgramRef<'_>, log: bool) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let flags = if log { libc::SECCOMP_FILTER_FLAG_LOG } else { 0 };
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast::<libc::sock_filter>().cast_mut() };
    // SAFETY: `sock_filter` of seccompiler is the kernel's structure (repr(C), the same four fields), `len` of them lie at the
    // pointer, and the kernel only reads them.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
