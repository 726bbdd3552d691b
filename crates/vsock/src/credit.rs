//! Credit arithmetic (virtio 1.3, 5.10.6.3): how much each end of a connection may send. Used by `connection.rs` for connections
//! that end here, and by `crossing.rs` for connections between guests. Positions in a stream are counted modulo 2³².

use crate::{account::Account, sync::AtomicUsize, types::MAX_PACKET};
use ringroad_wire::vsock_hdr::VsockHdr;
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// Largest credit passed on between guests: what may be buffered here if the receiver takes nothing.
pub(crate) const ROOM: u32 = 1 << 20;

/// Returns the later of two stream positions.
fn further(one: u32, other: u32) -> u32 {
    if other.wrapping_sub(one) as i32 > 0 { other } else { one }
}

/// What this end may send: the peer's receive buffer, as last advertised.
#[derive(Default)]
pub(crate) struct SendCredit {
    /// Bytes sent or about to be sent. Modulo 2³², this is the specification's `tx_cnt`.
    sent: u64,
    buf_alloc: u32,
    fwd_cnt: u32,
}

impl SendCredit {
    /// Records the credit fields of a packet from the peer.
    pub(crate) fn update(&mut self, header: &VsockHdr) {
        (self.buf_alloc, self.fwd_cnt) = (header.buf_alloc, header.fwd_cnt);
    }

    /// Returns how many bytes may be sent now.
    pub(crate) fn available(&self) -> usize {
        let in_flight = (self.sent as u32).wrapping_sub(self.fwd_cnt);
        self.buf_alloc.saturating_sub(in_flight) as usize
    }

    /// Returns the size of the largest message the peer can take.
    pub(crate) fn largest(&self) -> usize {
        self.buf_alloc as usize
    }

    /// Reserves credit for `count` bytes about to be sent.
    pub(crate) fn reserve(&mut self, count: usize) {
        self.sent = self.sent.wrapping_add(count as u64);
    }

    /// Returns reserved credit that was not used.
    pub(crate) fn give_back(&mut self, count: usize) {
        self.sent = self.sent.wrapping_sub(count as u64);
    }

    /// Returns the total bytes sent.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }
}

/// What the peer may send: the receive buffer of this end. Readers, senders and the worker use it at the same time.
pub(crate) struct ReceiveCredit {
    /// Size of the receive buffer in bytes.
    size: u32,
    /// Bytes received and consumed.
    fwd_cnt: AtomicU32,
    /// Position up to which the peer has been told it may send.
    advertised: AtomicU32,
    account: Arc<Account>,
}

impl ReceiveCredit {
    /// Creates the credit of a buffer of up to `size` bytes, whose memory is charged to `account`.
    pub(crate) fn new(size: u32, account: Arc<Account>) -> Self {
        let credit = ReceiveCredit { size, fwd_cnt: AtomicU32::new(0), advertised: AtomicU32::new(0), account };
        // The credit that the first packet carries.
        credit.advertised.store(credit.window(), Ordering::Relaxed);
        credit
    }

    /// Returns the size of the receive buffer in bytes.
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// Returns the receive window in bytes: the buffer size, or the share of the guest's memory if that is smaller.
    fn window(&self) -> u32 {
        self.size.min(u32::try_from(self.account.allowance()).unwrap_or(u32::MAX))
    }

    /// Writes the credit fields of a packet to the peer. Called in the order of packets in the ring, under the ring's lock, so that
    /// an older value never follows a newer one. What was advertised before is never reduced.
    pub(crate) fn stamp(&self, header: &mut VsockHdr) {
        let fwd_cnt = self.fwd_cnt.load(Ordering::Acquire);
        let edge = further(fwd_cnt.wrapping_add(self.window()), self.advertised.load(Ordering::Acquire));
        self.advertised.store(edge, Ordering::Release);
        header.fwd_cnt = fwd_cnt;
        header.buf_alloc = edge.wrapping_sub(fwd_cnt);
    }

    /// Returns how many bytes the peer may send, of which `received` have arrived: up to what was advertised, or to the current
    /// window if that is further.
    pub(crate) fn available(&self, received: u64) -> u32 {
        let now = self.fwd_cnt.load(Ordering::Acquire).wrapping_add(self.window());
        further(self.advertised.load(Ordering::Acquire), now).wrapping_sub(received as u32)
    }

    /// Records that received bytes have been consumed, which frees buffer space.
    pub(crate) fn consume(&self, count: usize) {
        self.fwd_cnt.fetch_add(count as u32, Ordering::AcqRel);
    }

    /// Returns whether the peer should get a credit update: either half of the window has become free; or the peer's credit is
    /// low, and some space has become free or there is nothing left to read (not `readable`), so that the reader is about to
    /// block.
    pub(crate) fn is_due(&self, received: u64, readable: bool) -> bool {
        let (advertised, window) = (self.advertised.load(Ordering::Acquire), self.window());
        let edge = self.fwd_cnt.load(Ordering::Acquire).wrapping_add(window);
        // Negative if the window has shrunk since.
        let gain = u32::try_from(edge.wrapping_sub(advertised) as i32).unwrap_or(0);
        let believed = advertised.wrapping_sub(received as u32);
        let low = (MAX_PACKET as u32).min(window / 2);
        gain > 0 && (gain >= window / 2 || believed < low && (gain >= low / 2 || !readable))
    }
}

/// Credit passed on from one guest, the receiver, to another, the sender: the receiver's own, but no more than may be buffered
/// here.
#[derive(Default)]
pub(crate) struct PassedCredit {
    /// The receiver's credit fields, from its last packet.
    buf_alloc: AtomicU32,
    fwd_cnt: AtomicU32,
    /// Bytes sent.
    tx_cnt: AtomicU32,
    /// Position up to which the sender has been told it may send.
    advertised: AtomicU32,
    /// Bytes buffered here on the way to the receiver.
    pub queued: AtomicUsize,
}

/// The credit a sender may be given.
struct Grant {
    /// The receiver's count of consumed bytes.
    fwd_cnt: u32,
    /// Positions: up to where the sender may send now, up to what was last advertised to it, and up to where the receiver alone
    /// would let it.
    edge: u32,
    advertised: u32,
    desired: u32,
}

impl PassedCredit {
    /// Records the credit fields of a packet from the receiver.
    pub(crate) fn update(&self, header: &VsockHdr) {
        self.buf_alloc.store(header.buf_alloc.min(ROOM), Ordering::Release);
        self.fwd_cnt.store(header.fwd_cnt, Ordering::Release);
    }

    fn queued(&self) -> u32 {
        self.queued.load(Ordering::Relaxed) as u32
    }

    /// Returns how many bytes the sender may send now. The receiver alone could advertise enough credit to fill our memory.
    pub(crate) fn available(&self) -> u32 {
        let in_flight = self.tx_cnt.load(Ordering::Relaxed).wrapping_sub(self.fwd_cnt.load(Ordering::Acquire));
        let credit = self.buf_alloc.load(Ordering::Acquire).saturating_sub(in_flight);
        credit.min(ROOM.saturating_sub(self.queued()))
    }

    /// Counts bytes sent.
    pub(crate) fn send(&self, len: u32) {
        self.tx_cnt.fetch_add(len, Ordering::Relaxed);
    }

    /// Writes the credit fields of a packet to the sender. Called in the order of packets in the ring, under the ring's lock.
    /// `allowance`: bytes that may be buffered here.
    pub(crate) fn stamp(&self, header: &mut VsockHdr, allowance: u32) {
        let Grant { fwd_cnt, edge, .. } = self.grant(allowance);
        self.advertised.store(edge, Ordering::Release);
        header.buf_alloc = edge.wrapping_sub(fwd_cnt);
        header.fwd_cnt = fwd_cnt;
    }

    /// Computes the credit that the sender may be given now.
    fn grant(&self, allowance: u32) -> Grant {
        let (buf_alloc, fwd_cnt) = (self.buf_alloc.load(Ordering::Acquire), self.fwd_cnt.load(Ordering::Acquire));
        let delivered = self.tx_cnt.load(Ordering::Acquire).wrapping_sub(self.queued());
        // Bytes already delivered occupy none of our memory. The difference is negative if the receiver claims to have consumed
        // more than it was sent.
        let taken = i64::from(delivered.wrapping_sub(fwd_cnt) as i32);
        let window = (taken + i64::from(allowance)).clamp(0, buf_alloc.into()) as u32;
        let desired = fwd_cnt.wrapping_add(buf_alloc);
        let advertised = self.advertised.load(Ordering::Acquire);
        // Never reduce what was advertised, unless the receiver itself reduces it: the sender may have used it already.
        let mut edge = further(fwd_cnt.wrapping_add(window), advertised);
        if further(edge, desired) == edge {
            edge = desired;
        }
        Grant { fwd_cnt, edge, advertised, desired }
    }

    /// Returns whether the sender is, or soon will be, waiting for credit that the receiver has granted and only our memory limit
    /// has held back. `messages`: it sends messages, not a stream.
    pub(crate) fn is_due(&self, allowance: u32, messages: bool) -> bool {
        let Grant { edge, advertised, desired, .. } = self.grant(allowance);
        let gain = edge.wrapping_sub(advertised) as i32;
        if advertised == desired || gain <= 0 {
            return false;
        }
        let believed = advertised.wrapping_sub(self.tx_cnt.load(Ordering::Acquire));
        // A message may need more than half of the largest credit there can be.
        let low = if messages { allowance } else { allowance / 2 }.min(MAX_PACKET as u32);
        (believed as i32) < low as i32 && gain as u32 >= allowance / 4
    }
}

#[cfg(test)]
pub(crate) const STARTS: [u32; 7] = [0, 1, 1 << 31, u32::MAX - 150, u32::MAX - 99, u32::MAX - 1, u32::MAX];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl SendCredit {
        pub(crate) fn advance_to(&mut self, count: u32) {
            (self.sent, self.fwd_cnt) = (count.into(), count);
        }

        /// Returns a header with the credit fields of the peer's last packet.
        pub(crate) fn last_update(&self) -> VsockHdr {
            VsockHdr { buf_alloc: self.buf_alloc, fwd_cnt: self.fwd_cnt, ..VsockHdr::default() }
        }
    }

    impl ReceiveCredit {
        pub(crate) fn advance_to(&self, count: u32) {
            self.fwd_cnt.store(count, Ordering::Relaxed);
            self.advertised.store(count.wrapping_add(self.size), Ordering::Relaxed);
        }

        pub(crate) fn consumed(&self) -> u32 {
            self.fwd_cnt.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn credit_survives_counter_wraparound() {
        for start in STARTS {
            let mut credit = SendCredit::default();
            credit.advance_to(start);
            let update = |credit: &mut SendCredit, buf_alloc, sent: u32| {
                credit.update(&VsockHdr { buf_alloc, fwd_cnt: start.wrapping_add(sent), ..VsockHdr::default() });
            };
            assert_eq!(credit.available(), 0, "no credit advertised yet");
            update(&mut credit, 100, 0);
            assert_eq!((credit.available(), credit.largest()), (100, 100));
            credit.reserve(60);
            assert_eq!(credit.available(), 40);
            credit.give_back(10);
            assert_eq!(credit.available(), 50);
            credit.reserve(50);
            assert_eq!(credit.available(), 0);
            update(&mut credit, 100, 30);
            assert_eq!(credit.available(), 30);
            // Less credit than before, even less than is in flight; then more.
            update(&mut credit, 50, 30);
            assert_eq!(credit.available(), 0);
            update(&mut credit, u32::MAX, 30);
            assert_eq!(credit.available(), u32::MAX as usize - 70);
            update(&mut credit, 100, 100);
            assert_eq!(credit.available(), 100);
            // The peer claims to have received more than was sent.
            update(&mut credit, 100, 101);
            assert_eq!(credit.available(), 0);
            assert_eq!(credit.sent(), u64::from(start) + 100);
        }
    }

    proptest! {
        /// Credit passed on is never more than the receiver grants, and is never reduced. A sender that keeps to it never makes more
        /// wait here than the largest allowance so far.
        #[test]
        fn passed_credit_is_bounded_by_the_receiver_and_by_our_memory(
            start in prop_oneof![Just(0), Just(u32::MAX), any::<u32>()],
            buf_alloc in 1..200_000u32,
            steps in proptest::collection::vec((0..4u8, 0..100_000u32, 64..150_000u32), 1..100),
        ) {
            let credit = PassedCredit::default();
            for position in [&credit.fwd_cnt, &credit.tx_cnt, &credit.advertised] {
                position.store(start, Ordering::Relaxed);
            }
            let update = |fwd_cnt| credit.update(&VsockHdr { buf_alloc, fwd_cnt, ..VsockHdr::default() });
            update(start);
            // Bytes sent, delivered and consumed since the start; the credit edge; the largest allowance so far.
            let (mut sent, mut delivered, mut consumed, mut edge, mut most) = (0u32, 0u32, 0u32, 0u32, 0u32);
            for (step, amount, allowance) in steps {
                most = most.max(allowance);
                match step {
                    0 => {
                        let len = amount.min(edge - sent).min(credit.available());
                        credit.send(len);
                        credit.queued.fetch_add(len as usize, Ordering::Relaxed);
                        sent += len;
                    }
                    1 => {
                        let len = amount.min(sent - delivered);
                        credit.queued.fetch_sub(len as usize, Ordering::Relaxed);
                        delivered += len;
                    }
                    2 => {
                        consumed += amount.min(delivered - consumed);
                        update(start.wrapping_add(consumed));
                    }
                    _ => {
                        let mut header = VsockHdr::default();
                        credit.stamp(&mut header, allowance);
                        let now = header.fwd_cnt.wrapping_add(header.buf_alloc).wrapping_sub(start);
                        prop_assert!(now >= edge, "{now} after {edge}");
                        prop_assert!(now <= consumed + buf_alloc);
                        prop_assert!(now <= edge.max(delivered + allowance));
                        edge = now;
                    }
                }
                prop_assert!(sent - delivered <= most, "{} bytes wait", sent - delivered);
                // Asked again after a stamp with the same allowance, nothing is due.
                if step == 3 {
                    prop_assert!(!credit.is_due(allowance, false) && !credit.is_due(allowance, true));
                }
            }
        }
    }
}
