//! A connection's receive buffer: bytes in a ring buffer that grows up to the connection's limit, and the message boundaries.

use crate::{
    account::{Account, Charge, MESSAGE},
    payload::Payload,
};
use std::{collections::VecDeque, sync::Arc};

/// Initial size in bytes.
const START: usize = 4096;

/// Received and unread bytes, oldest first.
#[derive(Default)]
pub(crate) struct Inbox {
    ring: Vec<u8>,
    head: usize,
    len: usize,
    /// Complete messages: length, and whether it ends a record. Empty for streams.
    messages: VecDeque<(u32, bool)>,
    /// Bytes after the last complete message.
    partial: usize,
    /// Covers the buffer and the message list.
    charge: Charge,
}

/// The memory limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl Inbox {
    /// Creates an empty inbox whose memory is charged to `account`.
    pub(crate) fn new(account: &Arc<Account>) -> Inbox {
        Inbox { charge: account.charge_anyway(0), ..Inbox::default() }
    }

    /// Returns whether it holds memory that [`Inbox::release_unused`] could release.
    pub(crate) fn has_memory(&self) -> bool {
        !self.ring.is_empty() || self.messages.capacity() > 0
    }

    /// Returns the number of unread bytes.
    pub(crate) fn unread(&self) -> usize {
        self.len
    }

    /// Returns whether there is nothing to read, not even an empty message.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0 && self.messages.is_empty()
    }

    /// Appends the rest of a payload. The caller has checked it against the connection's credit.
    pub(crate) fn push(&mut self, payload: &mut Payload<'_>) -> Result<(), Full> {
        let needed = self.len.checked_add(payload.len()).ok_or(Full)?;
        if needed > self.ring.len() {
            self.grow(needed)?;
        }
        while !payload.is_empty() {
            let size = self.ring.len();
            let tail = (self.head + self.len) % size.max(1);
            let end = if tail < self.head { self.head } else { size };
            let copied = payload.read(self.ring.get_mut(tail..end).unwrap_or_default());
            if copied == 0 {
                return Err(Full);
            }
            self.len += copied;
            self.partial += copied;
        }
        Ok(())
    }

    /// Marks the end of a message.
    pub(crate) fn end_message(&mut self, record: bool) -> Result<(), Full> {
        if !self.charge.grow(MESSAGE) {
            return Err(Full);
        }
        self.messages.push_back((std::mem::take(&mut self.partial) as u32, record));
        Ok(())
    }

    /// Returns the number of complete messages.
    pub(crate) fn messages(&self) -> usize {
        self.messages.len()
    }

    fn grow(&mut self, needed: usize) -> Result<(), Full> {
        let before = self.ring.len();
        // Allocate more than needed if the account allows it.
        let roomy = needed.checked_next_power_of_two().unwrap_or(needed).max(START);
        let size =
            [roomy, needed].into_iter().find(|size| self.charge.grow(size.saturating_sub(before))).ok_or(Full)?;
        let mut ring = Vec::with_capacity(size);
        let (first, second) = self.slices();
        ring.extend_from_slice(first);
        ring.extend_from_slice(second);
        ring.resize(size, 0);
        (self.ring, self.head) = (ring, 0);
        Ok(())
    }

    fn slices(&self) -> (&[u8], &[u8]) {
        let (before, from_head) = self.ring.split_at_checked(self.head).unwrap_or_default();
        match from_head.get(..self.len) {
            Some(all) => (all, &[]),
            None => (from_head, before.get(..self.len.saturating_sub(from_head.len())).unwrap_or_default()),
        }
    }

    /// Returns the oldest bytes, up to where the buffer wraps.
    pub(crate) fn front(&self) -> &[u8] {
        self.slices().0
    }

    /// Removes the oldest bytes.
    pub(crate) fn consume(&mut self, count: usize) {
        let count = count.min(self.len);
        self.len -= count;
        self.partial = self.partial.min(self.len);
        self.head = if self.len == 0 { 0 } else { (self.head + count) % self.ring.len().max(1) };
        if self.len == 0 && self.charge.is_tight() {
            self.release_unused();
        }
    }

    /// Discards all data and releases the memory.
    pub(crate) fn clear(&mut self) {
        self.charge.clear();
        *self = Inbox { charge: std::mem::take(&mut self.charge), ..Inbox::default() };
    }

    /// Releases memory that is not in use, so that an idle connection does not keep what it once needed.
    pub(crate) fn release_unused(&mut self) {
        if self.len == 0 {
            self.charge.shrink(self.ring.len());
            self.ring = Vec::new();
        }
        if self.messages.is_empty() {
            self.messages = VecDeque::new();
        }
    }

    /// Reads bytes; returns how many.
    pub(crate) fn read(&mut self, mut target: &mut [u8]) -> usize {
        let mut done = 0;
        while !target.is_empty() && self.len > 0 {
            let front = self.front();
            let count = front.len().min(target.len());
            let (Some(source), Some((part, rest))) = (front.get(..count), target.split_at_mut_checked(count)) else {
                break;
            };
            if count == 0 {
                break;
            }
            part.copy_from_slice(source);
            target = rest;
            done += count;
            self.consume(count);
        }
        done
    }

    /// Reads a message; what the target does not hold is discarded. Returns the message's length, and whether it ends a record.
    pub(crate) fn read_message(&mut self, target: &mut [u8]) -> Option<(usize, bool)> {
        let (len, record) = self.messages.pop_front()?;
        self.charge.shrink(MESSAGE);
        let len = len as usize;
        let wanted = len.min(target.len());
        let read = self.read(target.get_mut(..wanted).unwrap_or_default());
        self.consume(len.saturating_sub(read));
        Some((len, record))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_are_read_in_order(steps in proptest::collection::vec((any::<bool>(), 0..9000usize), 1..60)) {
            let (mut inbox, mut model, mut next) = (Inbox::default(), VecDeque::new(), 0u8);
            for (push, count) in steps {
                if push {
                    let bytes: Vec<u8> = (0..count).map(|_| { next = next.wrapping_add(7); next }).collect();
                    inbox.push(&mut Payload::bytes(&bytes)).unwrap();
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
    fn all_memory_is_charged() {
        let account = Account::new(20_000, 1);
        let mut inbox = Inbox::new(&account);
        inbox.push(&mut Payload::bytes(&[1; 5000])).unwrap();
        assert_eq!(account.used(), 8192);
        inbox.end_message(false).unwrap();
        // Growing to the next power of two exceeds the limit; growing to just what is needed does not.
        inbox.push(&mut Payload::bytes(&[2; 14_000])).unwrap();
        assert_eq!(account.used(), 19_000 + MESSAGE);
        assert_eq!(inbox.push(&mut Payload::bytes(&[3; 1000])), Err(Full));
        for _ in 0..(1000 - MESSAGE) / MESSAGE {
            inbox.end_message(false).unwrap();
        }
        assert_eq!(inbox.end_message(false), Err(Full));
        assert_eq!(inbox.read_message(&mut []), Some((5000, false)));
        assert_eq!(inbox.read_message(&mut [0; 20_000]), Some((14_000, false)));
        assert_eq!(
            account.used(),
            (1000 - MESSAGE) / MESSAGE * MESSAGE - MESSAGE,
            "emptied while memory was scarce: the buffer was released"
        );
        inbox.clear();
        assert_eq!((account.used(), account.refused()), (0, 4));
    }

    #[test]
    fn message_boundaries_are_kept() {
        let mut inbox = Inbox::default();
        inbox.push(&mut Payload::bytes(b"hel")).unwrap();
        assert_eq!(inbox.read_message(&mut [0; 9]), None, "incomplete message");
        inbox.push(&mut Payload::bytes(b"lo")).unwrap();
        inbox.end_message(false).unwrap();
        inbox.end_message(true).unwrap();
        inbox.push(&mut Payload::bytes(b"truncated")).unwrap();
        inbox.end_message(true).unwrap();
        let mut target = [0; 5];
        assert_eq!(inbox.read_message(&mut target), Some((5, false)));
        assert_eq!(&target, b"hello");
        assert_eq!(inbox.read_message(&mut target), Some((0, true)));
        assert_eq!(inbox.read_message(&mut target), Some((9, true)));
        assert_eq!(&target, b"trunc");
        assert!(inbox.is_empty());
    }
}
