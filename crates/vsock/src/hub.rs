//! Guests that may connect to each other: who may send to whom, and which connections there are between them. Decides what becomes
//! of each packet to another guest, and returns that; `stack/crossings.rs` asks and sends.

use crate::{
    account::Account,
    crossing::{Crossing, RequestSlot},
    types::Addr,
    wrong::Wrong,
};
use parking_lot::Mutex;
use ringroad_wire::vsock_hdr::{Op, VsockHdr};
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Weak, atomic::AtomicUsize},
};

/// What the hub needs of a guest's end of its device. Called with the hub's lock held.
pub trait End {
    /// Returns whether connections can be opened.
    fn is_running(&self) -> bool;

    /// Returns whether the guest may request a connection now.
    fn may_request(&self) -> bool;
}

struct Member<E> {
    end: Weak<E>,
    groups: Vec<String>,
    requested: Arc<AtomicUsize>,
    account: Arc<Account>,
    /// Sub-accounts by the other guest's CID; they live as long as there are connections with it.
    parts: HashMap<u64, Weak<Account>>,
    /// What the guest sends, by its port and the destination. Both directions of a connection are registered, each with its
    /// sender.
    crossings: HashMap<(u32, Addr), Crossing>,
}

impl<E> Member<E> {
    fn shares_group(&self, other: &Member<E>) -> bool {
        self.groups.iter().any(|group| other.groups.contains(group))
    }

    /// Opens a connection that the guest requests. Returns `None` if a limit is reached.
    fn open(&mut self, from: Addr, to: Addr, kind: u16, limit: usize) -> Option<Crossing> {
        let slot = RequestSlot::of(&self.requested, limit)?;
        let account = match self.parts.get(&to.cid).and_then(Weak::upgrade) {
            Some(account) => account,
            None => {
                let account = self.account.part();
                // `parts` holds at most one entry per guest ever requested.
                self.parts.insert(to.cid, Arc::downgrade(&account));
                account
            }
        };
        Crossing::open(from, to, kind, account, slot)
    }

    /// Removes a connection that the guest sends on, unless the entry belongs to a newer connection.
    fn remove(&mut self, crossing: &Crossing) {
        if let Entry::Occupied(there) = self.crossings.entry((crossing.from().port, crossing.to()))
            && there.get().is_same(crossing)
        {
            there.remove();
        }
    }
}

/// Guests that may connect to each other, with `E` as their ends.
pub struct Hub<E> {
    members: Mutex<HashMap<u64, Member<E>>>,
    /// Maximum number of connections that a guest may have requested.
    limit: usize,
}

impl<E> std::fmt::Debug for Hub<E> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Hub").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// What becomes of a packet from one guest to another.
pub(crate) enum Fate<E> {
    /// No such destination or connection: answer it with a reset.
    NoRoute,
    /// Drop it without an answer.
    Drop,
    /// Send it.
    Forward {
        /// The connection.
        crossing: Crossing,
        /// The sender's end.
        from: Arc<E>,
        /// The receiver's end.
        to: Arc<E>,
    },
    /// Reset the connection at both ends.
    Reset(Crossing, Wrong),
}

/// A connection that was closed: each direction, with the end where it has to be reset.
pub(crate) type Closed<E> = [(Crossing, Option<Arc<E>>); 2];

impl<E> Hub<E> {
    /// Creates an empty hub. `connections`: how many connections each guest may have requested, so that none uses up what others
    /// need.
    pub fn new(connections: usize) -> Arc<Hub<E>> {
        Arc::new(Hub { members: Mutex::default(), limit: connections })
    }

    /// Adds a guest, or changes its groups. `account` is charged for the connections that it requests. Returns its connections
    /// with guests that no longer share a group.
    pub(crate) fn insert(&self, cid: u64, end: &Arc<E>, account: &Arc<Account>, groups: Vec<String>) -> Vec<Crossing> {
        let mut members = self.members.lock();
        match members.get_mut(&cid).filter(|member| member.end.as_ptr() == Arc::as_ptr(end)) {
            Some(member) => member.groups = groups,
            None => {
                let member = Member {
                    end: Arc::downgrade(end),
                    groups,
                    requested: Arc::default(),
                    account: account.clone(),
                    parts: HashMap::new(),
                    crossings: HashMap::new(),
                };
                members.insert(cid, member);
            }
        }
        let Some(member) = members.get(&cid) else { return Vec::new() };
        let apart = |to: &Addr| members.get(&to.cid).is_none_or(|to| !member.shares_group(to));
        member.crossings.values().filter(|crossing| apart(&crossing.to())).cloned().collect()
    }

    /// Returns a guest's end.
    pub(crate) fn end(&self, cid: u64) -> Option<Arc<E>> {
        self.members.lock().get(&cid)?.end.upgrade()
    }

    /// Closes all connections of a guest, one with each step, so that others do not wait for all of them. Returns the ends where
    /// they have to be reset.
    pub(crate) fn close_all(&self, cid: u64) -> impl Iterator<Item = (Arc<E>, Crossing)> {
        let own = self.members.lock().get_mut(&cid).map(|member| std::mem::take(&mut member.crossings));
        own.unwrap_or_default().into_values().filter_map(move |crossing| {
            if !crossing.close() {
                return None;
            }
            let mut members = self.members.lock();
            let other = members.get_mut(&crossing.to().cid)?;
            other.remove(&crossing.reverse());
            let end = if crossing.to().cid == cid { None } else { other.end.upgrade() };
            Some((end?, crossing))
        })
    }

    /// Closes a connection, unless it is closed already. The first of the two ends is the one that sends on
    /// `crossing`.
    pub(crate) fn close(&self, crossing: &Crossing) -> Option<Closed<E>> {
        crossing.close().then(|| {
            [crossing.reverse(), crossing.clone()].map(|crossing| {
                let mut members = self.members.lock();
                if let Some(member) = members.get_mut(&crossing.from().cid) {
                    member.remove(&crossing);
                }
                let end = members.get(&crossing.to().cid).and_then(|member| member.end.upgrade());
                (crossing, end)
            })
        })
    }
}

impl<E: End> Hub<E> {
    /// Decides what becomes of a packet, and opens or closes its connection.
    pub(crate) fn decide(&self, packet: &VsockHdr, op: Op) -> Fate<E> {
        let from = Addr { cid: packet.src_cid, port: packet.src_port };
        let to = Addr { cid: packet.dst_cid, port: packet.dst_port };
        let members = &mut *self.members.lock();
        let Some([sender, receiver]) = route(members, from.cid, to.cid) else { return Fate::NoRoute };
        let Some(member) = members.get_mut(&from.cid) else { return Fate::NoRoute };
        let there = member.crossings.get(&(from.port, to)).filter(|crossing| !crossing.is_closed()).cloned();
        let crossing = match (there, op) {
            (Some(crossing), Op::Request) => return Fate::Reset(crossing, Wrong::SecondRequest),
            (Some(crossing), Op::Reset) => {
                crossing.close();
                member.remove(&crossing);
                if let Some(member) = members.get_mut(&to.cid) {
                    member.remove(&crossing.reverse());
                }
                crossing
            }
            (Some(crossing), _) => crossing,
            // A port connected to itself would be both ends of one connection.
            (None, Op::Request) if from == to || !sender.may_request() => return Fate::NoRoute,
            (None, Op::Request) => {
                let Some(forward) = member.open(from, to, packet.kind, self.limit) else { return Fate::NoRoute };
                member.crossings.insert((from.port, to), forward.clone());
                if let Some(member) = members.get_mut(&to.cid) {
                    member.crossings.insert((to.port, from), forward.reverse());
                }
                forward
            }
            // A reset is never answered.
            (None, Op::Reset) => return Fate::Drop,
            (None, _) => return Fate::NoRoute,
        };
        Fate::Forward { crossing, from: sender, to: receiver }
    }
}

/// Returns the ends of both guests if `from` may send to `to` and `to` is running.
fn route<E: End>(members: &HashMap<u64, Member<E>>, from: u64, to: u64) -> Option<[Arc<E>; 2]> {
    let (from, to) = (members.get(&from)?, members.get(&to)?);
    if !from.shares_group(to) {
        return None;
    }
    Some([from.end.upgrade()?, to.end.upgrade()?]).filter(|[_, to]| to.is_running())
}
