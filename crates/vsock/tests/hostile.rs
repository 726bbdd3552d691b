//! A guest that breaks every rule, packet by packet and descriptor by descriptor, against a device's stack: each violation gets
//! exactly the expected answer, and another connection of the same device keeps working without loss. Also a device that breaks
//! the rules against a driver's stack. Single-threaded, and nothing sleeps.
#![cfg(not(loom))]

mod common;

#[path = "hostile/device.rs"]
mod device;
#[path = "hostile/guests.rs"]
mod guests;
#[path = "hostile/limits.rs"]
mod limits;
#[path = "hostile/packets.rs"]
mod packets;
#[path = "hostile/queues.rs"]
mod queues;
#[path = "hostile/random.rs"]
mod random;
