//! Sockets for programs of this process, on either end of a device. All that blocks, polls or reads a clock is here; the stack below
//! takes the time as an argument and wakes programs by a [`std::task::Waker`].

mod listener;
mod socket;
mod wait;

pub use listener::Listener;
pub use socket::{SeqPacket, Stream};
