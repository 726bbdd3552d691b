//! System calls of the sandbox (`sandbox/`) that its libraries lack.

use seccompiler::BpfProgramRef;
use std::io;

/// Sets no_new_privs: programs executed by this thread, or by threads that it starts, cannot gain privileges.
pub(crate) fn no_new_privileges() -> io::Result<()> {
    Ok(rustix::thread::set_no_new_privs(true)?)
}

/// Adds a seccomp filter to the calling thread, and to threads that it starts. `log`: refused calls are written to the
/// kernel's audit log, a flag that seccompiler's own call cannot set.
pub(crate) fn add_filter(program: BpfProgramRef<'_>, log: bool) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let flags = if log { libc::SECCOMP_FILTER_FLAG_LOG } else { 0 };
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast::<libc::sock_filter>().cast_mut() };
    // SAFETY: seccompiler's `sock_filter` has the layout of the kernel's (repr(C), the same four fields), `len` of them are
    // at the pointer, and the kernel only reads them.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
