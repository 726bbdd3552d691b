//! What a connection has received and nobody has read yet: bytes in a ring that grows up to the connection's limit, and where
//! messages end.

use crate::Payload;
use std::collections::VecDeque;

/// The smallest ring.
const START: usize = 4096;

/// Received bytes, oldest first.
#[derive(Default)]
pub(crate) struct Inbox {
    ring: Vec<u8>,
    head: usize,
    len: usize,
    /// Messages that are complete: length, and whether each ends a record. Streams have none.
    messages: VecDeque<(u32, bool)>,
    /// Bytes behind the last complete message.
    partial: usize,
}

impl Inbox {
    /// How many bytes there are.
    pub(crate) fn unread(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to read, not even an empty message.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0 && self.messages.is_empty()
    }

    /// Adds the rest of a payload. Who calls has seen that it is within the connection's limit.
    pub(crate) fn push(&mut self, payload: &mut Payload<'_>) {
        let needed = self.len + payload.len();
        if needed > self.ring.len() {
            self.grow(needed);
        }
        while !payload.is_empty() {
            let size = self.ring.len();
            let tail = (self.head + self.len) % size;
            let end = if tail < self.head { self.head } else { size };
            let copied = payload.read(&mut self.ring[tail..end]);
            self.len += copied;
            self.partial += copied;
        }
    }

    /// A message ends here.
    pub(crate) fn end_message(&mut self, record: bool) {
        self.messages.push_back((std::mem::take(&mut self.partial) as u32, record));
    }

    /// How many messages there are.
    pub(crate) fn messages(&self) -> usize {
        self.messages.len()
    }

    fn grow(&mut self, needed: usize) {
        let mut ring = vec![0; needed.next_power_of_two().max(START)];
        let (first, second) = self.slices();
        ring[..first.len()].copy_from_slice(first);
        ring[first.len()..first.len() + second.len()].copy_from_slice(second);
        (self.ring, self.head) = (ring, 0);
    }

    fn slices(&self) -> (&[u8], &[u8]) {
        let first = self.len.min(self.ring.len() - self.head);
        (&self.ring[self.head..self.head + first], &self.ring[..self.len - first])
    }

    /// The oldest bytes, in a row.
    pub(crate) fn front(&self) -> &[u8] {
        self.slices().0
    }

    /// Removes the oldest bytes.
    pub(crate) fn consume(&mut self, count: usize) {
        self.len -= count;
        self.partial = self.partial.min(self.len);
        self.head = if self.len == 0 { 0 } else { (self.head + count) % self.ring.len() };
    }

    /// Forgets everything: nobody will read it.
    pub(crate) fn clear(&mut self) {
        *self = Inbox::default();
    }

    /// Lets memory go that is not in use: a connection that rests should not keep what it once needed.
    pub(crate) fn rest(&mut self) {
        if self.len == 0 {
            self.ring = Vec::new();
        }
    }

    /// Reads bytes; says how many.
    pub(crate) fn read(&mut self, target: &mut [u8]) -> usize {
        let mut done = 0;
        while done < target.len() && self.len > 0 {
            let front = self.front();
            let count = front.len().min(target.len() - done);
            target[done..done + count].copy_from_slice(&front[..count]);
            done += count;
            self.consume(count);
        }
        done
    }

    /// Reads a message; what the target does not hold is lost. Says how long it was, and whether it ends a record.
    pub(crate) fn read_message(&mut self, target: &mut [u8]) -> Option<(usize, bool)> {
        let (len, record) = self.messages.pop_front()?;
        let len = len as usize;
        let wanted = len.min(target.len());
        let read = self.read(&mut target[..wanted]);
        let mut left = len - read;
        while left > 0 {
            let count = self.front().len().min(left);
            self.consume(count);
            left -= count;
        }
        Some((len, record))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_come_out_as_they_went_in(steps in proptest::collection::vec((any::<bool>(), 0..9000usize), 1..60)) {
            let (mut inbox, mut model, mut next) = (Inbox::default(), VecDeque::new(), 0u8);
            for (push, count) in steps {
                if push {
                    let bytes: Vec<u8> = (0..count).map(|_| { next = next.wrapping_add(7); next }).collect();
                    inbox.push(&mut Payload::bytes(&bytes));
                    model.extend(bytes);
                } else {
                    let mut target = vec![0; count];
                    let read = inbox.read(&mut target);
                    prop_assert_eq!(read, count.min(model.len()));
                    prop_assert!(target[..read].iter().copied().eq(model.drain(..read)));
                }
                prop_assert_eq!(inbox.unread(), model.len());
            }
        }
    }

    #[test]
    fn messages_keep_their_ends() {
        let mut inbox = Inbox::default();
        inbox.push(&mut Payload::bytes(b"hel"));
        assert_eq!(inbox.read_message(&mut [0; 9]), None, "not complete");
        inbox.push(&mut Payload::bytes(b"lo"));
        inbox.end_message(false);
        inbox.end_message(true);
        inbox.push(&mut Payload::bytes(b"truncated"));
        inbox.end_message(true);
        let mut target = [0; 5];
        assert_eq!(inbox.read_message(&mut target), Some((5, false)));
        assert_eq!(&target, b"hello");
        assert_eq!(inbox.read_message(&mut target), Some((0, true)));
        assert_eq!(inbox.read_message(&mut target), Some((9, true)));
        assert_eq!(&target, b"trunc");
        assert!(inbox.is_empty());
    }
}
