//! A card: registers, queues and interrupts, shared by the thread of its socket and the worker, and the PCI device that a client
//! sees of them. Made by `port.rs`.

use crate::{
    gate::Gate,
    socket::{Lines, say},
    vfio_user::{CONFIG_REGION, InterruptKind, Interrupts, Lending, PciRegion, VfioDevice},
    worker::Tell,
};
use parking_lot::Mutex;
use ringroad_e1000::{Bell, CONFIG, Device, Effects, IO_BAR, Interrupter, RxQueue, TxQueue, Vector, registers::BAR};
use ringroad_frame::Counters;
use ringroad_mem::Table;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Index of the BAR with the registers, and of the one with the window to them.
const REGISTERS: u32 = 0;
const WINDOW: u32 = 2;

/// Wakes the worker when a tail has moved, if it asked for that.
#[derive(Debug)]
pub(super) struct Kick {
    pub eventfd: EventFd,
    pub bell: Bell,
}

impl Kick {
    fn new() -> io::Result<Kick> {
        Ok(Kick { eventfd: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?, bell: Bell::default() })
    }

    /// After a tail was stored.
    #[inline]
    fn tail_moved(&self) {
        if self.bell.ring() {
            let _ = self.eventfd.write(1);
        }
    }
}

/// A card. The worker has the queues, and the registers as long as the client is lent to it; else the thread of its socket has them.
pub(super) struct Card {
    pub name: String,
    registers: Mutex<Device>,
    pub lending: Arc<Lending<Pci>>,
    pub tx: Gate<TxQueue>,
    pub rx: Gate<RxQueue>,
    pub interrupter: Interrupter,
    interrupts: Interrupts,
    /// Of its clock.
    start: Instant,
    /// Counters of frames from the guest, and of those to it.
    pub counters: [Vec<Arc<Counters>>; 2],
    pub transmit: Kick,
    pub room: Kick,
    /// A frame found no room, and none has found any since.
    pub short: AtomicBool,
    /// The worker was told to settle, and has not done so yet.
    pub told: AtomicBool,
    pub lines: Lines,
}

impl Card {
    pub(super) fn new(
        name: &str,
        (device, tx, rx): (Device, TxQueue, RxQueue),
        interrupts: Interrupts,
        lines: Lines,
    ) -> io::Result<Card> {
        let counters = [vec![tx.counters().clone()], vec![rx.counters().clone()]];
        Ok(Card {
            name: name.to_owned(),
            interrupter: device.interrupter(),
            registers: Mutex::new(device),
            lending: Arc::new(Lending::new(is_quick)?),
            tx: Gate::new(tx),
            rx: Gate::new(rx),
            interrupts,
            start: Instant::now(),
            counters,
            transmit: Kick::new()?,
            room: Kick::new()?,
            short: AtomicBool::new(false),
            told: AtomicBool::new(false),
            lines,
        })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// For the thread that serves the client: an access to the registers, and what follows from it. Returns whether the worker must
    /// be told that an interrupt waits for a timer; not more often than it looks at it.
    fn access(&self, access: impl FnOnce(&mut Device, u64) -> Effects) -> bool {
        let effects = access(&mut self.registers.lock(), self.now());
        if effects.contains(Effects::QUIESCE) {
            self.tx.enter().quiesce();
            self.rx.enter().quiesce();
            // A queue that has stopped keeps nobody waiting.
            self.room.tail_moved();
        }
        if effects.contains(Effects::TRANSMIT) {
            self.transmit.tail_moved();
        }
        if effects.contains(Effects::RECEIVE) {
            self.room.tail_moved();
        }
        if !effects.contains(Effects::INTERRUPT) {
            return false;
        }
        let after = self.settle();
        self.tell_line();
        after.is_some() && !self.told.swap(true, Ordering::Relaxed)
    }

    /// For control: an access that is not the client's. The worker serves no client meanwhile, so it never waits for the registers.
    pub fn control(&self, access: impl FnOnce(&mut Device, u64) -> Effects) -> bool {
        let _paused = self.lending.pause();
        self.access(access)
    }

    /// Interrupts the driver if it is time. Returns after how long to ask again.
    pub fn settle(&self) -> Option<Duration> {
        let now = self.now();
        let signal = self.interrupter.settle(now);
        match signal.raise {
            Some(Vector::Message) => {
                self.interrupts.signal(InterruptKind::Msi, 0);
            }
            Some(Vector::Line) => self.tell_line(),
            None => {}
        }
        signal.at.map(|at| Duration::from_nanos(at.saturating_sub(now)))
    }

    /// Asserts or deasserts the pin. It rises in either thread, and falls in the one that serves the client.
    fn tell_line(&self) {
        loop {
            let asserted = self.interrupter.is_line_asserted();
            self.interrupts.set_line(asserted);
            // The last one to change the level must be the last one to tell it.
            if self.interrupter.is_line_asserted() == asserted {
                return;
            }
        }
    }

    /// For control: replaces the memory, once the bursts that use it are over.
    pub fn set_memory(&self, memory: &Arc<Table>) {
        let memory = Some(memory).filter(|memory| !memory.regions().is_empty());
        // Both or none: truncation is looked for in the memory of one.
        let set = self.tx.enter().set_memory(memory.cloned());
        if let Err(error) = &set {
            say!(self.lines, Error, "port {}: {error}; the card has no memory", self.name);
        }
        self.rx.enter().set_memory(memory.filter(|_| set.is_ok()).cloned());
        // There may be descriptors that could not be read before.
        self.transmit.tail_moved();
        self.room.tail_moved();
    }

    /// Sets the longest frame, in bytes.
    pub fn limit(&self, frame: usize) {
        self.tx.enter().limit(frame);
        self.rx.enter().limit(frame);
    }

    /// Counts a fault of the client.
    pub fn count_fault(&self) {
        // Counters have one writer at a time.
        let _queue = self.tx.enter();
        if let Some(counters) = self.counters[0].first() {
            counters.faults.add(1);
        }
    }

    /// A queue has stopped for a fault of its driver.
    #[cold]
    pub fn tell(&self, queue: &str, fault: ringroad_e1000::Fault) {
        say!(self.lines, Error, "port {} {queue} queue: {fault}", self.name);
    }
}

/// The device behind the socket.
#[derive(Clone)]
pub(super) struct Pci {
    name: String,
    card: Arc<Card>,
    worker: Arc<dyn Tell>,
}

/// Returns whether an access is one of a driver that sends or receives. Such an access stops no queue.
fn is_quick(region: u32, offset: u64, write: bool) -> bool {
    region == REGISTERS && Device::is_quick(offset, write)
}

impl Pci {
    pub fn new(card: Arc<Card>, worker: Arc<dyn Tell>) -> Pci {
        Pci { name: format!("port {}", card.name), card, worker }
    }

    fn access(&self, access: impl FnOnce(&mut Device, u64) -> Effects) {
        if self.card.access(access) {
            self.worker.settle();
        }
    }
}

impl VfioDevice for Pci {
    fn name(&self) -> &str {
        &self.name
    }

    fn region(&self, index: u32) -> PciRegion {
        match index {
            REGISTERS => PciRegion::new(BAR),
            WINDOW => PciRegion::new(IO_BAR),
            CONFIG_REGION => PciRegion::new(CONFIG as u64),
            _ => PciRegion::default(),
        }
    }

    fn interrupts(&self) -> &Interrupts {
        &self.card.interrupts
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        self.access(|device, now| match region {
            REGISTERS => device.read(offset, data, now),
            WINDOW => device.io_read(offset, data, now),
            _ => {
                device.config_read(offset, data);
                Effects::empty()
            }
        });
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        self.access(|device, now| match region {
            REGISTERS => device.write(offset, data, now),
            WINDOW => device.io_write(offset, data, now),
            _ => device.config_write(offset, data, now),
        });
    }

    fn set_memory(&self, memory: Arc<Table>) {
        self.card.set_memory(&memory);
    }

    fn reset(&self) {
        self.access(|device, _| device.reset());
    }

    fn count_fault(&self) {
        self.card.count_fault();
    }

    /// The next client finds a new card: with the registers of the last one, it would use the next guest's memory as soon as that
    /// is mapped.
    fn disconnected(&self) {
        self.access(|device, _| device.renew());
        self.worker.forget();
    }
}
