//! Compares routines that copy long frames from one pool of buffers to another, in the order of a ring of 256. This
//! benchmark decided what `copy.rs` does above 256 bytes: the platform's `memmove`, as nothing is faster.
//!
//!     cargo bench -p ringroad-mem --bench copy

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::{hint::black_box, time::Duration};

const BUFFERS: usize = 256;
const STRIDE: usize = 1600;

type Routine = unsafe fn(*const u8, *mut u8, usize);

unsafe fn platform(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy(source, target, len) }
}

/// Copies blocks of `N` bytes, which the compiler vectorises as the caller's target features allow; the last block
/// overlaps.
#[inline(always)]
unsafe fn blocks<const N: usize>(source: *const u8, target: *mut u8, len: usize) {
    let mut at = 0;
    while at < len {
        let from = at.min(len - N);
        // SAFETY: `from + N <= len`, as the caller guarantees `N <= len`.
        unsafe { target.add(from).cast::<[u8; N]>().write(source.add(from).cast::<[u8; N]>().read()) };
        at += N;
    }
}

unsafe fn portable(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { blocks::<16>(source, target, len) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Routine, blocks};

    #[target_feature(enable = "avx2")]
    unsafe fn avx2(source: *const u8, target: *mut u8, len: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { blocks::<32>(source, target, len) }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn avx512(source: *const u8, target: *mut u8, len: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { blocks::<64>(source, target, len) }
    }

    unsafe fn rep_movsb(source: *const u8, target: *mut u8, len: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            std::arch::asm!("rep movsb", inout("rcx") len => _, inout("rsi") source => _, inout("rdi") target => _,
                            options(nostack, preserves_flags));
        }
    }

    /// Returns the routines that this CPU supports.
    pub fn routines() -> Vec<(&'static str, Routine)> {
        let mut all: Vec<(&'static str, Routine)> = vec![("rep movsb", rep_movsb)];
        if is_x86_feature_detected!("avx2") {
            all.push(("avx2", avx2));
        }
        if is_x86_feature_detected!("avx512f") {
            all.push(("avx512", avx512));
        }
        all
    }
}

fn copies(criterion: &mut Criterion) {
    let mut routines: Vec<(&str, Routine)> = vec![("memmove", platform), ("16 bytes", portable)];
    #[cfg(target_arch = "x86_64")]
    routines.extend(x86::routines());
    let source = vec![1u8; BUFFERS * STRIDE];
    let mut target = vec![2u8; BUFFERS * STRIDE];
    for len in [300, 594, 1518] {
        let mut group = criterion.benchmark_group(format!("{len} bytes"));
        group.throughput(Throughput::Elements(BUFFERS as u64)).measurement_time(Duration::from_secs(2));
        for &(name, routine) in &routines {
            group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
                bencher.iter(|| {
                    for buffer in 0..BUFFERS {
                        let at = (buffer * 97 % BUFFERS) * STRIDE;
                        // SAFETY: `len` is less than a buffer, and the pools do not overlap.
                        unsafe { routine(source.as_ptr().add(at), target.as_mut_ptr().add(at), black_box(len)) };
                    }
                });
            });
            assert_eq!(target[..len], source[..len], "{name}");
        }
        group.finish();
    }
}

criterion_group!(benches, copies);
criterion_main!(benches);
