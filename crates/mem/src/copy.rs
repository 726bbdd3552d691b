//! Copies to and from memory that another process may be writing to. Called only by `span.rs`.

use std::ptr;

/// Copies up to this many bytes use inline 16-byte loads and stores; above that the platform's `memmove` is faster.
const INLINE: usize = 256;

/// Copies `len` bytes. The ranges may overlap (a driver may pass the same buffer twice); the result is then a mixture of
/// both, which only harms that driver.
///
/// # Safety
/// `source` must be readable and `target` writable for `len` bytes.
#[inline(always)]
pub(crate) unsafe fn bytes(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: every access below lies within `len` bytes of the two pointers, which the caller guarantees to be valid.
    // Values pass through registers and any bit pattern is a valid integer, so neither overlap nor a concurrent writer
    // matters.
    unsafe {
        if len > INLINE {
            memmove(source, target, len);
        } else if len > 64 {
            let mut at = 0;
            while at + 32 <= len {
                unit::<u128>(source, target, at);
                unit::<u128>(source, target, at + 16);
                at += 32;
            }
            if at < len {
                unit::<u128>(source, target, len - 32);
                unit::<u128>(source, target, len - 16);
            }
        } else if len > 32 {
            unit::<u128>(source, target, 0);
            unit::<u128>(source, target, 16);
            unit::<u128>(source, target, len - 32);
            unit::<u128>(source, target, len - 16);
        } else if len >= 16 {
            unit::<u128>(source, target, 0);
            unit::<u128>(source, target, len - 16);
        } else if len >= 8 {
            unit::<u64>(source, target, 0);
            unit::<u64>(source, target, len - 8);
        } else if len > 4 {
            unit::<u32>(source, target, 0);
            unit::<u32>(source, target, len - 4);
        } else if len == 4 {
            unit::<u32>(source, target, 0);
        } else if len == 2 {
            unit::<u16>(source, target, 0);
        } else {
            for at in 0..len {
                unit::<u8>(source, target, at);
            }
        }
    }
}

/// Copies `len` bytes with the platform's `memmove`.
///
/// # Safety
/// Same as for `bytes`.
#[inline(always)]
pub(crate) unsafe fn memmove(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { ptr::copy(source, target, len) }
}

/// # Safety
/// `source + at` must be readable and `target + at` writable for the size of `T`.
#[inline(always)]
unsafe fn unit<T>(source: *const u8, target: *mut u8, at: usize) {
    // SAFETY: guaranteed by the caller; the unaligned forms need no alignment.
    unsafe { ptr::write_unaligned(target.add(at).cast::<T>(), ptr::read_unaligned(source.add(at).cast::<T>())) }
}

/// Reads `N` bytes (16 or 32), each exactly once, so that the values the caller checks are the values it uses.
///
/// # Safety
/// `source` must be readable for `N` bytes.
#[inline(always)]
pub(crate) unsafe fn read_once<const N: usize>(source: *const u8) -> [u8; N] {
    const { assert!(N == 16 || N == 32) };
    let mut out = [0; N];
    // SAFETY: the caller guarantees `N` bytes to be readable: 16, and with the second half 32.
    unsafe {
        out[..16].copy_from_slice(&read_once_16::<0>(source));
        if N == 32 {
            out[16..].copy_from_slice(&read_once_16::<16>(source));
        }
    }
    out
}

/// Copies `len` bytes to private memory, reading each exactly once.
///
/// # Safety
/// `source` must be readable and `target` writable for `len` bytes; they must not overlap.
#[inline(always)]
pub(crate) unsafe fn bytes_once(source: *const u8, target: *mut u8, len: usize) {
    let mut at = 0;
    while len - at >= 16 {
        // SAFETY: 16 bytes from `at` lie within `len`, which the caller guarantees.
        unsafe { target.add(at).cast::<[u8; 16]>().write_unaligned(read_once_16::<0>(source.add(at))) };
        at += 16;
    }
    while at < len {
        // SAFETY: `at` is within `len`. Volatile, so that the compiler cannot load it again later.
        unsafe { target.add(at).write(ptr::read_volatile(source.add(at))) };
        at += 1;
    }
}

/// Reads the 16 bytes at `AT` with one load and returns them for one store: a 16-byte load after two 8-byte stores would miss
/// store-to-load forwarding and wait for both to reach the cache.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn read_once_16<const AT: usize>(source: *const u8) -> [u8; 16] {
    let value: std::arch::x86_64::__m128i;
    // SAFETY: loads 16 bytes of any alignment, which the caller guarantees to be readable; inline assembly executes exactly
    // once.
    unsafe {
        std::arch::asm!(
            "movdqu {}, [{} + {}]", out(xmm_reg) value, in(reg) source, const AT, options(nostack, preserves_flags, readonly)
        );
        std::mem::transmute(value)
    }
}

#[cfg(not(target_arch = "x86_64"))]
use read_once_16_portable as read_once_16;

/// Portable fallback. The tests compare the two.
#[cfg(any(test, not(target_arch = "x86_64")))]
#[inline(always)]
unsafe fn read_once_16_portable<const AT: usize>(source: *const u8) -> [u8; 16] {
    #[repr(C, packed)]
    #[derive(Clone, Copy)]
    struct Unaligned([u64; 2]);
    // SAFETY: the caller guarantees 16 readable bytes; a packed type has alignment 1. Volatile, so that the compiler cannot
    // load it again later.
    let words = unsafe { ptr::read_volatile(source.add(AT).cast::<Unaligned>()) }.0;
    let value = u128::from(words[0]) | u128::from(words[1]) << 64;
    value.to_ne_bytes()
}

/// Prefetches a cache line for reading. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches a cache line for reading, but only to the second level: the first has few misses outstanding at a time, which are left to
/// what is needed sooner. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch_far(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches a cache line for writing. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint and never faults; CPUs without PREFETCHW treat it as a no-op.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Moves a cache line from the core's own caches to the shared one, where another core finds it sooner. Any address is allowed.
#[inline(always)]
pub(crate) fn demote(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which accesses nothing and never faults; CPUs without CLDEMOTE treat it as a no-op.
    unsafe {
        std::arch::asm!("cldemote [{}]", in(reg) address, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Returns whether a core that reads a line which another core has written takes it away from that core, as Intel's do (seen on
/// Emerald Rapids): the writer then misses it when it reads it again, and once more when it writes it, unless it was fetched for
/// writing in between. It may trap: not for the data path.
pub fn reads_take_lines() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // Intel SDM, CPUID leaf 0: "GenuineIntel".
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_every_length() {
        let source: Vec<u8> = (0..600).map(|i| (i % 251) as u8).collect();
        for len in 0..600 {
            let mut target = vec![0xee; 616];
            // SAFETY: both vectors are longer than `len`.
            unsafe { bytes(source.as_ptr(), target.as_mut_ptr().add(8), len) };
            assert_eq!(target[8..8 + len], source[..len], "{len}");
            assert!(target[..8].iter().chain(&target[8 + len..]).all(|&b| b == 0xee), "{len}");
        }
    }

    #[test]
    fn reads_once() {
        let source: Vec<u8> = (0..64).collect();
        // SAFETY: the vector holds at least 1 + 32 bytes.
        let got: [u8; 32] = unsafe { read_once(source.as_ptr().add(1)) };
        assert_eq!(got[..], source[1..33]);
        for len in 0..63 {
            let mut target = [0xee; 64];
            // SAFETY: both buffers are longer than `1 + len`.
            unsafe { bytes_once(source.as_ptr().add(1), target.as_mut_ptr(), len) };
            assert_eq!(target[..len], source[1..1 + len]);
            assert!(target[len..].iter().all(|&byte| byte == 0xee), "{len}");
        }
        for at in 0..32 {
            // SAFETY: 32 bytes from `at` lie within the vector.
            let (usual, portable) = unsafe {
                (read_once_16::<16>(source.as_ptr().add(at)), read_once_16_portable::<16>(source.as_ptr().add(at)))
            };
            assert_eq!((usual.as_slice(), usual), (&source[at + 16..at + 32], portable));
        }
    }
}
