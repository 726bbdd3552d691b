//! The Intel 82540EM network controller ("e1000"; PCI/PCI-X Family of Gigabit Ethernet Controllers Software Developer's Manual),
//! device and driver end, for guests without drivers of virtio.
//!
//! Both ends are state machines over registers, rings and time. Sockets, threads and clocks are in `host`. The device has three
//! parts, for two threads: [`Device`], the registers, is called by whoever serves the driver's accesses; [`TxQueue`] and
//! [`RxQueue`] by a worker that moves frames; each queue under a lock that the worker tries and the other thread waits for when an
//! access says so ([`Effects::QUIESCE`]). [`Interrupter`] is for both.
#![forbid(unsafe_code)]
#![cfg_attr(loom, allow(dead_code))]
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo
    )
)]

pub mod descriptor;
mod device;
#[cfg(not(loom))]
pub mod driver;
mod eeprom;
mod fault;
mod filter;
mod interrupts;
mod pci;
mod phy;
pub mod registers;
mod ring;
mod rx;
mod shared;
mod statistics;
mod sync;
mod tx;

pub use device::{Device, DeviceConfig, Effects, Exits, Interrupter};
pub use fault::Fault;
pub use interrupts::{DELAY_UNIT, ITR_UNIT, Interrupts, Mitigation, Settled, event};
pub use pci::{CONFIG, DEVICE, IO_BAR, Message, VENDOR};
pub use rx::RxQueue;
pub use shared::{Bell, Signal, Vector};
pub use tx::TxQueue;
