//! Bytes on their way: those of a program, or of a packet in shared memory. Read from the front, copied once.

use ringroad_mem::Span;

/// What is left of a packet's payload, or of what a program sends.
#[derive(Clone)]
pub struct Payload<'a> {
    /// Private bytes come first; usually there are either these or spans.
    bytes: &'a [u8],
    /// What is left of the span whose turn it is.
    current: Span<'a>,
    spans: &'a [Span<'a>],
    len: usize,
}

impl<'a> Payload<'a> {
    /// None.
    pub const fn empty() -> Self {
        Payload { bytes: &[], current: Span::empty(), spans: &[], len: 0 }
    }

    /// Bytes of this process.
    pub fn bytes(bytes: &'a [u8]) -> Self {
        Payload { bytes, len: bytes.len(), ..Payload::empty() }
    }

    /// Bytes in shared memory.
    pub fn spans(spans: &'a [Span<'a>]) -> Self {
        let len = spans.iter().map(|span| span.len()).sum();
        Payload { spans, len, ..Payload::empty() }
    }

    /// How many bytes are left.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none are left.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Leaves at most `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// The private bytes that come first, at most so many; they are passed over.
    fn private_part(&mut self, most: usize) -> &'a [u8] {
        let (part, rest) = self.bytes.split_at_checked(most).unwrap_or((self.bytes, &[]));
        self.bytes = rest;
        part
    }

    /// Passes over `count` bytes.
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

    /// The span whose turn it is.
    fn turn(&mut self) -> Span<'a> {
        while self.current.is_empty()
            && let Some((&next, rest)) = self.spans.split_first()
        {
            (self.current, self.spans) = (next, rest);
        }
        self.current
    }

    /// Copies as much as the target holds, and passes over it; says how much.
    pub fn read(&mut self, target: &mut [u8]) -> usize {
        self.copy_out(target, Span::read)
    }

    /// The next `N` bytes, each read exactly once, so that what is checked is what is used, whatever the other side writes
    /// meanwhile; they are passed over. `None`: there are fewer.
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

    /// Copies as much as the target holds, and passes over it; says how much.
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

    /// The next `len` bytes as a list of their own, which they are passed over by.
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

    /// The private bytes that come first, if any.
    pub fn private(&self) -> &'a [u8] {
        self.bytes.get(..self.len).unwrap_or(self.bytes)
    }

    /// The spans that are left, for `writev`. (Private bytes are not among them.)
    pub fn rest(&self) -> impl Iterator<Item = Span<'a>> {
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
    fn is_read_from_the_front_wherever_it_lies() {
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
        assert_eq!(payload.rest().map(|span| span.len()).sum::<usize>(), 7);
        let target = region.span(1000, 4).unwrap();
        assert_eq!(payload.clone().read_once::<7>().as_ref(), Some(b"defghij"));
        assert_eq!(payload.clone().read_once::<8>(), None);
        assert_eq!(payload.copy_to(target), 4);
        assert_eq!(target.array::<4>(0).as_ref(), Some(b"defg"));
        payload.truncate(2);
        assert_eq!(payload.rest().map(|span| span.len()).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(payload.take(9), b"hi");
        assert!(payload.is_empty());
        assert_eq!(payload.rest().filter(|span| !span.is_empty()).count(), 0);

        let mut payload = Payload::bytes(b"hello");
        payload.skip(1);
        assert_eq!(payload.copy_to(target), 4);
        assert_eq!(target.array::<4>(0).as_ref(), Some(b"ello"));
        assert_eq!(payload.copy_to(target), 0);
    }
}
