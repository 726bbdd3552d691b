//! Spans: bounds-checked pieces of shared memory.
//!
//! A span is `Copy` and `Sync`, and another process writes to the same bytes, so two copies may overlap in time. This is
//! sound because no reference to the bytes ever exists, only copies through raw pointers (`copy.rs`); any bit pattern is a
//! valid value of what is copied; and every value that a decision depends on is read once, by assembly
//! ([`Span::read_once`]), or is an atomic ([`crate::Words`]). The other copies are plain loads and stores; the compiler
//! cannot know who else has access to the memory, as a system call mapped it. Strictly speaking, two of them at once in two
//! threads of this process are a data race; the result is a mixture of both writers' bytes, in a buffer that the guest has
//! posted twice.

use crate::copy;
use std::{marker::PhantomData, ptr::NonNull};

/// A bounds-checked piece of shared memory. The other side may write to it at any time, so it can only be copied: there is
/// no `&[u8]` to it.
#[derive(Clone, Copy)]
pub struct Span<'m> {
    start: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'m ()>,
}

// SAFETY: a span is an address range of a mapping that outlives it; it is accessed only by copying, from any thread.
unsafe impl Send for Span<'_> {}
// SAFETY: as above; concurrent copies race only over bytes that no decision depends on.
unsafe impl Sync for Span<'_> {}

impl std::fmt::Debug for Span<'_> {
    /// Where it is and how long, not what is in it.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:?}+{}", self.start, self.len)
    }
}

impl<'m> Span<'m> {
    /// Returns the same span without its lifetime, for a list that keeps the memory mapped.
    ///
    /// # Safety
    /// The span must not be used once its memory may be unmapped.
    #[inline(always)]
    pub(crate) unsafe fn detach(self) -> Span<'static> {
        Span { start: self.start, len: self.len, memory: PhantomData }
    }

    /// # Safety
    /// `start` must be valid for reads and writes of `len` bytes for all of `'m`.
    pub(crate) unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        Span { start, len, memory: PhantomData }
    }

    /// Returns a span of length 0.
    pub const fn empty() -> Self {
        // It has no bytes, so the dangling pointer is never dereferenced.
        Span { start: NonNull::dangling(), len: 0, memory: PhantomData }
    }

    /// Length in bytes.
    #[inline(always)]
    pub fn len(self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the span without its first `n` bytes; empty if it has no more than `n`.
    #[inline(always)]
    #[must_use]
    pub fn skip(self, n: usize) -> Span<'m> {
        let n = n.min(self.len);
        // SAFETY: `n <= len`, so the rest lies within the same allocation.
        unsafe { Span::new(self.start.add(n), self.len - n) }
    }

    /// Returns the `len` bytes at `offset`; `None` if that range is empty or not within the span.
    #[inline(always)]
    pub(crate) fn part(self, offset: u64, len: u32) -> Option<Span<'m>> {
        let end = offset.wrapping_add(len.into());
        if offset < end && end <= self.len as u64 {
            // SAFETY: `offset < end`, so nothing has wrapped and `len > 0`; `end` is within the span, so the part is.
            Some(unsafe { Span::new(self.start.add(offset as usize), len as usize) })
        } else {
            None
        }
    }

    /// Returns the first `n` bytes, or all if there are fewer.
    #[inline(always)]
    #[must_use]
    pub fn first(self, n: usize) -> Span<'m> {
        Span { len: self.len.min(n), ..self }
    }

    /// Copies to private memory as many bytes as both sides have; returns the number copied.
    #[inline(always)]
    pub fn read(self, target: &mut [u8]) -> usize {
        // Usually the span is long enough and the length is a constant at the call site.
        if target.len() > self.len {
            return self.read_all(target);
        }
        // SAFETY: the span has at least as many bytes.
        unsafe { copy::bytes(self.start.as_ptr(), target.as_mut_ptr(), target.len()) };
        target.len()
    }

    #[cold]
    fn read_all(self, target: &mut [u8]) -> usize {
        let target = target.get_mut(..self.len).unwrap_or_default();
        // SAFETY: `target` was cut to the span's length.
        unsafe { copy::bytes(self.start.as_ptr(), target.as_mut_ptr(), target.len()) };
        target.len()
    }

    /// Returns the `N` bytes at `offset`; `None` if there are fewer.
    #[inline(always)]
    pub fn array<const N: usize>(self, offset: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let end = offset.checked_add(N).filter(|&end| end <= self.len)?;
        // SAFETY: `end` is within the span.
        unsafe { copy::bytes(self.start.as_ptr().add(end - N), bytes.as_mut_ptr(), N) };
        Some(bytes)
    }

    /// Returns the first `N` bytes (16 or 32), each read exactly once; `None` if there are fewer.
    #[inline(always)]
    pub fn read_once<const N: usize>(self) -> Option<[u8; N]> {
        // SAFETY: the span has at least `N` bytes.
        (self.len >= N).then(|| unsafe { copy::read_once(self.start.as_ptr()) })
    }

    /// Copies to private memory as many bytes as both sides have, each read exactly once; returns the number copied. For
    /// data of any length that is checked and then used.
    #[inline(always)]
    pub fn read_once_into(self, target: &mut [u8]) -> usize {
        let len = self.len.min(target.len());
        // SAFETY: `len` bytes are within the span and the target.
        unsafe { copy::bytes_once(self.start.as_ptr(), target.as_mut_ptr(), len) };
        len
    }

    /// Copies all of it to the end of a list. Nothing is allocated where the list has room, and nothing written twice.
    pub fn append_to(self, list: &mut Vec<u8>) {
        list.reserve(self.len);
        let target = list.spare_capacity_mut().as_mut_ptr().cast();
        // SAFETY: the span is readable, and the list has room for as many bytes behind its own, which are written here before they
        // count.
        unsafe {
            copy::bytes(self.start.as_ptr(), target, self.len);
            list.set_len(list.len() + self.len);
        }
    }

    /// Copies from private memory as many bytes as both sides have; returns the number copied.
    #[inline(always)]
    pub fn write(self, source: &[u8]) -> usize {
        if source.len() > self.len {
            return self.write_all(source);
        }
        // SAFETY: the span has at least as many bytes.
        unsafe { copy::bytes(source.as_ptr(), self.start.as_ptr(), source.len()) };
        source.len()
    }

    #[cold]
    fn write_all(self, source: &[u8]) -> usize {
        let source = source.get(..self.len).unwrap_or_default();
        // SAFETY: `source` was cut to the span's length.
        unsafe { copy::bytes(source.as_ptr(), self.start.as_ptr(), source.len()) };
        source.len()
    }

    /// Copies to another span as many bytes as both have; returns the number copied.
    #[inline(always)]
    pub fn copy_to(self, target: Span<'_>) -> usize {
        let len = self.len.min(target.len);
        // SAFETY: `len` is within both spans; overlap is allowed.
        unsafe { copy::bytes(self.start.as_ptr(), target.start.as_ptr(), len) };
        len
    }

    /// Copies the first `len` bytes to another span, but takes the leading `N * M` bytes from `head`. Returns `false` and
    /// writes nothing if the source, the target or `len` is too short. If `small` is not set, the platform's `memmove` is
    /// used whatever the length.
    #[inline(always)]
    pub fn copy_under<const N: usize, const M: usize>(
        self,
        head: [[u8; M]; N],
        target: Span<'_>,
        len: usize,
        small: bool,
    ) -> bool {
        if target.len < len || self.len < len || len < N * M {
            return false;
        }
        for (index, part) in head.iter().enumerate() {
            // SAFETY: all parts lie within the target, as checked above.
            unsafe { copy::bytes(part.as_ptr(), target.start.as_ptr().add(index * M), M) };
        }
        // SAFETY: `len` is within both spans and not less than the head; overlap is allowed.
        unsafe {
            let (source, target, rest) =
                (self.start.as_ptr().add(N * M), target.start.as_ptr().add(N * M), len - N * M);
            if small { copy::bytes(source, target, rest) } else { copy::memmove(source, target, rest) }
        }
        true
    }

    /// Writes `bytes` if they differ from what is there. Returns `false` and writes nothing if the span is too short.
    /// Skipping the store lets the line stay in the shared state in the caches of both sides.
    #[inline(always)]
    pub fn update<const N: usize>(self, bytes: [u8; N]) -> bool {
        match self.array(0) {
            Some(there) => {
                if there != bytes {
                    self.write(&bytes);
                }
                true
            }
            None => false,
        }
    }

    /// Returns whether the first `n` bytes end at a cache-line boundary.
    #[inline(always)]
    pub fn ends_line(self, n: usize) -> bool {
        (self.start.as_ptr() as usize).wrapping_add(n).is_multiple_of(64)
    }

    /// Prefetches the first `LINES` cache lines for reading.
    #[inline(always)]
    pub fn prefetch<const LINES: usize>(self) {
        (0..LINES).for_each(|line| copy::prefetch(self.start.as_ptr().wrapping_add(64 * line)));
    }

    /// Prefetches the first `LINES` cache lines for writing, so that the store does not wait for the other core to release
    /// them.
    #[inline(always)]
    pub fn prefetch_write<const LINES: usize>(self) {
        (0..LINES).for_each(|line| copy::prefetch_write(self.start.as_ptr().wrapping_add(64 * line)));
    }

    /// Moves the cache line of the first byte from this core's own caches to the shared one: another core that reads or writes it next
    /// finds it there sooner than here.
    #[inline(always)]
    pub fn demote(self) {
        copy::demote(self.start.as_ptr());
    }

    /// Returns the address, for system calls that access the memory themselves (`readv`, `writev`).
    pub fn as_ptr(self) -> *mut u8 {
        self.start.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use crate::Region;

    #[test]
    fn appends() {
        let region = Region::private(4096, 0).unwrap();
        region.span(0, 5).unwrap().write(b"hello");
        let mut list = b"say ".to_vec();
        region.span(0, 5).unwrap().append_to(&mut list);
        region.span(9, 0).unwrap().append_to(&mut list);
        region.span(4, 1).unwrap().append_to(&mut list);
        assert_eq!(list, b"say helloo");
    }

    #[test]
    fn copies_and_slices() {
        let region = Region::private(8192, 0).unwrap();
        let (a, b) = (region.span(0, 100).unwrap(), region.span(4096, 100).unwrap());
        assert_eq!(a.write(b"hello world"), 11);
        assert_eq!(a.skip(6).first(5).copy_to(b), 5);
        let mut out = [0; 5];
        assert_eq!(b.read(&mut out), 5);
        assert_eq!(&out, b"world");
        assert_eq!(a.first(16).read_once::<16>().unwrap(), *b"hello world\0\0\0\0\0");
        assert!(a.first(15).read_once::<16>().is_none());
        assert!(a.skip(101).is_empty());
    }
}
