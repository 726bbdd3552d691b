//! A payload being moved: bytes of a program, or of a packet in shared memory. Read from the front, copied once. Used by sender
//! and receiver of both ends.

use ringroad_mem::Span;

/// The unread part of a packet's payload, or of the bytes a program sends.
#[derive(Clone)]
pub struct Payload<'a> {
    /// Private bytes, which come before the spans; usually there is only one of the two.
    bytes: &'a [u8],
    /// What is left of the current span.
    current: Span<'a>,
    spans: &'a [Span<'a>],
    len: usize,
}

impl std::fmt::Debug for Payload<'_> {
    /// How long it is, not what is in it.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Payload").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<'a> Payload<'a> {
    /// Returns a payload without bytes.
    pub const fn empty() -> Self {
        Payload { bytes: &[], current: Span::empty(), spans: &[], len: 0 }
    }

    /// Returns a payload of private bytes.
    pub fn bytes(bytes: &'a [u8]) -> Self {
        Payload { bytes, len: bytes.len(), ..Payload::empty() }
    }

    /// Returns a payload in shared memory.
    pub fn spans(spans: &'a [Span<'a>]) -> Self {
        let len = spans.iter().map(|span| span.len()).sum();
        Payload { spans, len, ..Payload::empty() }
    }

    /// Returns the number of bytes left.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no bytes are left.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Limits the payload to `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Takes up to `most` of the private bytes at the front.
    fn private_part(&mut self, most: usize) -> &'a [u8] {
        let (part, rest) = self.bytes.split_at_checked(most).unwrap_or((self.bytes, &[]));
        self.bytes = rest;
        part
    }

    /// Skips `count` bytes.
    pub fn skip(&mut self, count: usize) {
        let mut left = count.min(self.len);
        self.len -= left;
        left -= self.private_part(left).len();
        while left > 0 {
            let step = left.min(self.turn().len());
            self.current = self.current.skip(step);
            left -= step;
            if step == 0 {
                break;
            }
        }
    }

    /// Moves on to the next span if the current one is used up, and returns it.
    fn turn(&mut self) -> Span<'a> {
        while self.current.is_empty()
            && let Some((&next, rest)) = self.spans.split_first()
        {
            (self.current, self.spans) = (next, rest);
        }
        self.current
    }

    /// Copies as much as the target holds and advances; returns the number of bytes.
    pub fn read(&mut self, target: &mut [u8]) -> usize {
        self.copy_out(target, Span::read)
    }

    /// Takes the next `N` bytes, reading each exactly once, so that the values checked are the values used, whatever the other
    /// side writes meanwhile. Returns `None` if fewer are left.
    pub fn read_once<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        (self.len >= N && self.copy_out(&mut bytes, Span::read_once_into) == N).then_some(bytes)
    }

    fn copy_out(&mut self, target: &mut [u8], copy: impl Fn(Span<'a>, &mut [u8]) -> usize) -> usize {
        let wanted = target.len().min(self.len);
        let private = self.private_part(wanted);
        let Some((head, mut target)) = target.get_mut(..wanted).and_then(|all| all.split_at_mut_checked(private.len()))
        else {
            return 0;
        };
        head.copy_from_slice(private);
        while !target.is_empty() {
            let copied = copy(self.turn(), target);
            if copied == 0 {
                break;
            }
            self.current = self.current.skip(copied);
            target = target.get_mut(copied..).unwrap_or_default();
        }
        self.len -= wanted;
        wanted
    }

    /// Copies as much as the target holds and advances; returns the number of bytes.
    pub fn copy_to(&mut self, target: Span<'_>) -> usize {
        let wanted = target.len().min(self.len);
        let mut target = target.first(wanted);
        let bytes = target.write(self.private_part(wanted));
        target = target.skip(bytes);
        while !target.is_empty() {
            let copied = self.turn().copy_to(target);
            if copied == 0 {
                break;
            }
            self.current = self.current.skip(copied);
            target = target.skip(copied);
        }
        self.len -= wanted;
        wanted
    }

    /// Takes the next `len` bytes as a vector.
    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let wanted = len.min(self.len);
        let mut bytes = Vec::with_capacity(wanted);
        bytes.extend_from_slice(self.private_part(wanted));
        while bytes.len() < wanted {
            let turn = self.turn().first(wanted - bytes.len());
            if turn.is_empty() {
                break;
            }
            turn.append_to(&mut bytes);
            self.current = self.current.skip(turn.len());
        }
        self.len -= bytes.len();
        bytes
    }

    /// Returns the private bytes at the front.
    pub fn private(&self) -> &'a [u8] {
        self.bytes.get(..self.len).unwrap_or(self.bytes)
    }

    /// Returns the spans left, for `writev`. Private bytes are not included.
    pub fn remaining_spans(&self) -> impl Iterator<Item = Span<'a>> {
        let mut left = self.len;
        std::iter::once(self.current).chain(self.spans.iter().copied()).map_while(move |span| {
            let span = span.first(left);
            left -= span.len();
            (left > 0 || !span.is_empty()).then_some(span)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringroad_mem::Region;

    #[test]
    fn payloads_are_read_from_the_front_across_spans() {
        let region = Region::private(4096, 0).unwrap();
        let place = |at, bytes: &[u8]| {
            let span = region.span(at, bytes.len()).unwrap();
            span.write(bytes);
            span
        };
        let spans = [place(0, b"abc"), place(100, b""), place(200, b"defgh"), place(300, b"ij")];
        let mut payload = Payload::spans(&spans);
        assert_eq!(payload.len(), 10);
        payload.skip(1);
        let mut two = [0; 2];
        assert_eq!(payload.read(&mut two), 2);
        assert_eq!(&two, b"bc");
        assert_eq!(payload.remaining_spans().map(|span| span.len()).sum::<usize>(), 7);
        let target = region.span(1000, 4).unwrap();
        assert_eq!(payload.clone().read_once::<7>().as_ref(), Some(b"defghij"));
        assert_eq!(payload.clone().read_once::<8>(), None);
        assert_eq!(payload.copy_to(target), 4);
        assert_eq!(target.array::<4>(0).as_ref(), Some(b"defg"));
        payload.truncate(2);
        assert_eq!(payload.remaining_spans().map(|span| span.len()).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(payload.take(9), b"hi");
        assert!(payload.is_empty());
        assert_eq!(payload.remaining_spans().filter(|span| !span.is_empty()).count(), 0);

        let mut payload = Payload::bytes(b"hello");
        payload.skip(1);
        assert_eq!(payload.copy_to(target), 4);
        assert_eq!(target.array::<4>(0).as_ref(), Some(b"ello"));
        assert_eq!(payload.copy_to(target), 0);
    }
}
