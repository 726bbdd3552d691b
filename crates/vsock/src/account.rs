//! Memory accounting for one guest: buffered bytes, the bookkeeping for them, and connections.
//!
//! A guest has one [`Account`] for its connections with the host, and one for the connections with other guests that it
//! requested. Half of an account is handed out as credit: each direction of a connection may use an equal share of that half, but
//! no more than half of what is left of it. The other half guarantees each direction a minimum, so that none stalls, and covers
//! credit advertised earlier, when there were fewer connections. Data beyond the limit ends the connection it arrives on: only
//! the guest that caused it is affected.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

/// Bytes charged for a connection, not counting buffered data: its state and table entries.
pub(crate) const CONNECTION: usize = 1024;
/// Bytes charged for a packet in an outbox in addition to its payload, and for the first packet of a connection on top of
/// that.
pub(crate) const PACKET: usize = 128;
pub(crate) const FLOW: usize = 256;
/// Bytes charged for an unread message in addition to its payload.
pub(crate) const MESSAGE: usize = 16;

/// The memory account of one guest.
#[derive(Debug)]
pub struct Account {
    limit: AtomicUsize,
    /// Minimum allowance of each direction of a connection, regardless of other connections.
    floor: AtomicUsize,
    used: AtomicUsize,
    /// Number of connection directions: two per connection.
    directions: AtomicUsize,
    /// Number of charges refused.
    refused: AtomicU64,
    /// The account that this one is a sub-account of. A sub-account covers the connections with one other guest.
    whole: Option<Arc<Account>>,
}

impl Account {
    /// Creates an account for `limit` bytes and up to `connections` connections.
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

    /// Changes the limits. Existing charges are kept.
    pub(crate) fn set(&self, limit: usize, connections: usize) {
        self.limit.store(limit, Relaxed);
        self.floor.store((limit / 4 / connections.max(1)).clamp(64, 64 << 10), Relaxed);
    }

    /// Creates a sub-account. It cannot use more than what remains of the account, so one that takes all it can leaves half to
    /// others.
    pub(crate) fn part(self: &Arc<Self>) -> Arc<Account> {
        Arc::new(Account::of(Some(self.clone())))
    }

    fn whole(&self) -> &Account {
        self.whole.as_deref().unwrap_or(self)
    }

    /// Returns the bytes in use.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Returns how many charges were refused because the limit was reached.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Returns how many bytes one direction of a connection may buffer.
    pub(crate) fn allowance(&self) -> usize {
        let whole = self.whole();
        let half = whole.limit.load(Relaxed) / 2;
        let share = half / whole.directions.load(Relaxed).max(1);
        let left = half.saturating_sub(whole.used());
        share.min(left / 2).max(whole.floor.load(Relaxed))
    }

    /// Returns whether the account is more than a quarter used, so that memory not needed now should be released.
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

    /// Charges `bytes` if that many are left. Concurrent callers may together exceed the limit slightly.
    pub(crate) fn charge(self: &Arc<Self>, bytes: usize) -> Option<Charge> {
        if !self.has_room(bytes) {
            self.whole().refused.fetch_add(1, Relaxed);
            return None;
        }
        Some(self.charge_anyway(bytes))
    }

    /// Charges `bytes` without checking the limit, for what is limited by other means.
    pub(crate) fn charge_anyway(self: &Arc<Self>, bytes: usize) -> Charge {
        self.add(bytes);
        Charge { account: Some(self.clone()), bytes }
    }

    /// Charges a connection and counts both of its directions. Returns `None` if the limit is reached.
    pub(crate) fn open(self: &Arc<Self>) -> Option<Opened> {
        let charge = self.charge(CONNECTION)?;
        self.whole().directions.fetch_add(2, Relaxed);
        Some(Opened { charge })
    }
}

/// Bytes charged to an account; returned when dropped.
#[derive(Debug, Default)]
pub struct Charge {
    account: Option<Arc<Account>>,
    bytes: usize,
}

impl Charge {
    /// An empty charge on no account, for owners without accounting.
    pub fn none() -> Charge {
        Charge::default()
    }

    /// Charges `more` bytes on top. Returns `false` if the limit is reached.
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

    /// Takes over the bytes of another charge on the same account.
    pub(crate) fn absorb(&mut self, mut other: Charge) {
        self.bytes = self.bytes.saturating_add(std::mem::take(&mut other.bytes));
    }

    /// Returns whether memory not needed now should be released; see [`Account::is_tight`].
    pub(crate) fn is_tight(&self) -> bool {
        self.account.as_ref().is_some_and(|account| account.is_tight())
    }

    /// Returns up to `less` bytes to the account.
    pub(crate) fn shrink(&mut self, less: usize) {
        let less = less.min(self.bytes);
        self.bytes -= less;
        if let Some(account) = &self.account {
            account.remove(less);
        }
    }

    /// Returns all bytes to the account.
    pub(crate) fn clear(&mut self) {
        self.shrink(self.bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.clear();
    }
}

/// The charge for an open connection.
#[derive(Debug)]
pub(crate) struct Opened {
    charge: Charge,
}

impl Opened {
    /// Returns the account that is charged.
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
    fn charges_are_returned() {
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
    fn charges_respect_the_limit_and_a_sub_account_leaves_half() {
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
    fn an_allowance_is_an_equal_share_and_at_most_half_of_what_is_left() {
        let account = Account::new(1 << 20, 64);
        assert_eq!(account.allowance(), 1 << 18, "half of the half handed out as credit");
        let opened: Vec<_> = (0..8).map(|_| account.open().unwrap()).collect();
        assert_eq!(account.allowance(), (1 << 19) / 16);
        let _charge = account.charge((1 << 19) - 8 * CONNECTION - 100).unwrap();
        assert_eq!(account.allowance(), 4096, "the floor");
        drop(opened);
    }
}
