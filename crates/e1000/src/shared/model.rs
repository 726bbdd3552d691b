//! Model checking of what registers and queues share, in every interleaving and with every value that a load may return. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p ringroad-e1000 --lib --release model`.

use super::*;
use crate::{filter::ADDRESSES, registers::cause};
use loom::{sync::Arc, thread};

const OLD: u64 = 0x1000;
const NEW: u64 = 0x2000;

fn shared() -> Arc<Shared> {
    Arc::new(Shared::new(Mitigation::default()))
}

/// The registers' part of a ring that starts.
fn start(shared: &Shared, base: u64) {
    shared.configure(|setup| setup.tx = RingSetup { base, len: 128, runs: true });
}

/// What a queue knows of the registers: as `TxQueue` and `RxQueue`, which differ in nothing of this.
#[derive(Default)]
struct Queue {
    generation: u32,
    ring: RingSetup,
    head: (u32, u32),
}

impl Queue {
    /// Returns the tail that belongs to what it knows.
    fn look(&mut self, shared: &Shared) -> u32 {
        loop {
            match shared.tail(&shared.tx, self.generation) {
                Some(tail) => return tail,
                None => {
                    self.generation = shared.generation();
                    self.ring = shared.setup.lock().tx;
                    self.head = shared.tx.head();
                }
            }
        }
    }
}

/// Explores all interleavings with up to so many preemptions.
fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// The driver resets the device and sets up another ring while the queue works: no tail and no head is taken for those of the other
/// ring, and a burst of the old one does not move the new one's head.
#[test]
fn tails_and_heads_belong_to_the_ring() {
    check(2, || {
        let shared = shared();
        start(&shared, OLD);
        shared.tx.set_head(3);
        shared.tx.set_tail(5);
        let registers = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.reset(0, &[0; 2 * ADDRESSES]);
                start(&shared, NEW);
                shared.tx.set_tail(2);
            })
        };
        let mut queue = Queue::default();
        let tail = queue.look(&shared);
        let (head, epoch) = queue.head;
        match queue.ring {
            RingSetup { base: OLD, runs: true, .. } => {
                assert_eq!((head, tail), (3, 5));
                shared.tx.publish(epoch, 3, 5);
            }
            RingSetup { base: NEW, runs: true, .. } => assert!(head == 0 && (tail == 0 || tail == 2)),
            _ => {}
        }
        registers.join().unwrap();
        assert_eq!(shared.tx.head().0, 0);
        assert_eq!((queue.look(&shared), queue.head.0, queue.ring.base), (2, 0, NEW));
    });
}

/// The worker goes to sleep while the driver writes a tail, twice.
#[test]
fn a_tail_that_moves_is_seen_or_wakes_the_worker() {
    check(4, || {
        let (shared, bell) = (shared(), Arc::new(Bell::default()));
        let woken = Arc::new(AtomicU32::new(0));
        let registers = {
            let (shared, bell, woken) = (shared.clone(), bell.clone(), woken.clone());
            thread::spawn(move || {
                for tail in [1, 2] {
                    shared.tx.set_tail(tail);
                    if bell.ring() {
                        woken.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        };
        bell.unwant();
        let mut seen = shared.tx.tail();
        bell.want();
        // Once it has asked, what it sees now is the last that it sees without being woken.
        seen = seen.max(shared.tx.tail());
        registers.join().unwrap();
        let woken = woken.load(Ordering::Relaxed);
        assert!(seen == 2 || woken > 0, "tail {seen}, and nobody is awake");
    });
}

/// A queue reports causes while the driver's handler reads ICR: each is read, or interrupts.
#[test]
fn no_cause_is_lost() {
    check(4, || {
        let shared = shared();
        shared.with_signals(0, |signals| signals.interrupts.unmask(cause::ALL));
        let worker = {
            let shared = shared.clone();
            thread::spawn(move || {
                for cause in [cause::TXDW, cause::RXT0] {
                    shared.report(cause);
                    shared.settle(1);
                }
            })
        };
        let mut read = 0;
        for _ in 0..2 {
            read |= shared.with_signals(1, |signals| signals.interrupts.read_icr(1));
            shared.settle(1);
        }
        worker.join().unwrap();
        let causes = shared.with_signals(1, |signals| signals.interrupts.causes(1));
        assert_eq!(read | causes, cause::TXDW | cause::RXT0);
        assert_eq!(shared.asserted(), causes != 0, "what is left interrupts, without anybody's help");
    });
}
