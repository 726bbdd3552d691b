//! What one guest may have in our memory: bytes that wait for somebody, what is needed to keep track of them, connections.
//!
//! Each guest pays for its connections with the host and for those with other guests that it has asked for, each out of an
//! [`Account`] of its own. Half of it is shared out: each direction of a connection may have an equal part, and no more than half
//! of what is left; that much credit its sender is told of. The other half guarantees each direction a little, so that none
//! stands still, and is there for what was promised before there were so many. What goes beyond the whole ends the connection
//! that it comes from: it is the guest's own.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

/// What a connection takes beside the bytes that wait: its state, places in tables.
pub(crate) const CONNECTION: usize = 1024;
/// What a packet in an outbox takes beside its bytes, and what the first one of a connection takes beside that.
pub(crate) const PACKET: usize = 128;
pub(crate) const FLOW: usize = 256;
/// What a message that nobody has read takes beside its bytes.
pub(crate) const MESSAGE: usize = 16;

/// What one guest may have in our memory.
#[derive(Debug)]
pub struct Account {
    limit: AtomicUsize,
    /// What each direction of a connection may have, whatever others do.
    floor: AtomicUsize,
    used: AtomicUsize,
    /// Directions of connections.
    directions: AtomicUsize,
    /// How often something was refused.
    refused: AtomicU64,
    /// This is a part of that: what is for one other guest.
    whole: Option<Arc<Account>>,
}

impl Account {
    /// For so many bytes, and so many connections.
    pub(crate) fn new(limit: usize, connections: usize) -> Arc<Account> {
        let account = Account::of(None);
        account.set(limit, connections);
        Arc::new(account)
    }

    fn of(whole: Option<Arc<Account>>) -> Account {
        Account {
            limit: AtomicUsize::new(0),
            floor: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            directions: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            whole,
        }
    }

    /// From now on for so many. What is in use stays.
    pub(crate) fn set(&self, limit: usize, connections: usize) {
        self.limit.store(limit, Relaxed);
        self.floor.store((limit / 4 / connections.max(1)).clamp(64, 64 << 10), Relaxed);
    }

    /// A part of it, which takes no more than it leaves: one that takes all it can leaves half to others.
    pub(crate) fn part(self: &Arc<Self>) -> Arc<Account> {
        Arc::new(Account::of(Some(self.clone())))
    }

    fn whole(&self) -> &Account {
        self.whole.as_deref().unwrap_or(self)
    }

    /// Bytes that are in use.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// How often something was refused that was too much.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// How many bytes one direction of a connection may have here.
    pub(crate) fn allowance(&self) -> usize {
        let whole = self.whole();
        let half = whole.limit.load(Relaxed) / 2;
        let share = half / whole.directions.load(Relaxed).max(1);
        let left = half.saturating_sub(whole.used());
        share.min(left / 2).max(whole.floor.load(Relaxed))
    }

    /// Whether so little is left that what is not needed at once should go.
    pub(crate) fn is_tight(&self) -> bool {
        self.whole().used() > self.whole().limit.load(Relaxed) / 4
    }

    fn has_room(&self, bytes: usize) -> bool {
        let whole = self.whole();
        let left = whole.limit.load(Relaxed).saturating_sub(whole.used());
        bytes <= left && (self.whole.is_none() || self.used().saturating_add(bytes) <= left)
    }

    fn add(&self, bytes: usize) {
        self.used.fetch_add(bytes, Relaxed);
        if let Some(whole) = &self.whole {
            whole.used.fetch_add(bytes, Relaxed);
        }
    }

    fn remove(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Relaxed);
        if let Some(whole) = &self.whole {
            whole.used.fetch_sub(bytes, Relaxed);
        }
    }

    /// Takes bytes, if there are so many. Several threads together may take a little more than there is.
    pub(crate) fn charge(self: &Arc<Self>, bytes: usize) -> Option<Charge> {
        if !self.has_room(bytes) {
            self.whole().refused.fetch_add(1, Relaxed);
            return None;
        }
        Some(self.charge_anyway(bytes))
    }

    /// Takes bytes whose number is limited otherwise.
    pub(crate) fn charge_anyway(self: &Arc<Self>, bytes: usize) -> Charge {
        self.add(bytes);
        Charge { account: Some(self.clone()), bytes }
    }

    /// A connection, both directions of it. `None`: there is no room for it.
    pub(crate) fn open(self: &Arc<Self>) -> Option<Opened> {
        let charge = self.charge(CONNECTION)?;
        self.whole().directions.fetch_add(2, Relaxed);
        Some(Opened { charge })
    }
}

/// Bytes taken out of an account, which go back when it is dropped.
#[derive(Debug, Default)]
pub struct Charge {
    account: Option<Arc<Account>>,
    bytes: usize,
}

impl Charge {
    /// Of nobody's account, for what keeps none.
    pub fn none() -> Charge {
        Charge::default()
    }

    /// Takes more of the same. `false`: there is not so much.
    pub(crate) fn grow(&mut self, more: usize) -> bool {
        if let Some(account) = &self.account {
            if !account.has_room(more) {
                account.whole().refused.fetch_add(1, Relaxed);
                return false;
            }
            account.add(more);
        }
        self.bytes = self.bytes.saturating_add(more);
        true
    }

    /// Takes over what another one of the same account has.
    pub(crate) fn absorb(&mut self, mut other: Charge) {
        self.bytes = self.bytes.saturating_add(std::mem::take(&mut other.bytes));
    }

    /// Whether so little is left that what is not needed at once should go.
    pub(crate) fn is_tight(&self) -> bool {
        self.account.as_ref().is_some_and(|account| account.is_tight())
    }

    /// Gives some back.
    pub(crate) fn shrink(&mut self, less: usize) {
        let less = less.min(self.bytes);
        self.bytes -= less;
        if let Some(account) = &self.account {
            account.remove(less);
        }
    }

    /// Gives all back.
    pub(crate) fn clear(&mut self) {
        self.shrink(self.bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.clear();
    }
}

/// A connection in an account.
#[derive(Debug)]
pub(crate) struct Opened {
    charge: Charge,
}

impl Opened {
    /// What it is part of.
    pub(crate) fn account(&self) -> Option<&Arc<Account>> {
        self.charge.account.as_ref()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(account) = &self.charge.account {
            account.whole().directions.fetch_sub(2, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_comes_back() {
        let account = Account::new(10_000, 2);
        let part = account.part();
        let mut charge = part.charge(1000).unwrap();
        assert!(charge.grow(500));
        charge.shrink(200);
        assert_eq!((account.used(), part.used()), (1300, 1300));
        let opened = part.open().unwrap();
        assert_eq!((account.used(), opened.account().unwrap().used()), (1300 + CONNECTION, 1300 + CONNECTION));
        drop(charge);
        drop(opened);
        assert_eq!((account.used(), part.used(), account.directions.load(Relaxed)), (0, 0, 0));
    }

    #[test]
    fn nobody_takes_more_than_there_is_and_a_part_leaves_half() {
        let account = Account::new(10_000, 2);
        let (one, other) = (account.part(), account.part());
        let first = one.charge(5000).unwrap();
        assert!(one.charge(1).is_none());
        let second = other.charge(2500).unwrap();
        assert!(other.charge(1).is_none());
        assert_eq!((account.refused(), account.used()), (2, 7500));
        let all = account.charge(2500).unwrap();
        assert!(account.charge(1).is_none());
        drop((first, second, all));
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn an_allowance_is_an_equal_share_and_half_of_what_is_left() {
        let account = Account::new(1 << 20, 64);
        assert_eq!(account.allowance(), 1 << 18, "half of the half that is shared out");
        let opened: Vec<_> = (0..8).map(|_| account.open().unwrap()).collect();
        assert_eq!(account.allowance(), (1 << 19) / 16);
        let _charge = account.charge((1 << 19) - 8 * CONNECTION - 100).unwrap();
        assert_eq!(account.allowance(), 4096, "the floor");
        drop(opened);
    }
}
