//! What a VMM and its guest can do wrong over vfio-user, over real sockets against the server of this crate: their own device
//! refuses it, with a log line and a counter, or loses its connection; everything else goes on.

#[path = "vfio_user/attacks.rs"]
mod attacks;
#[path = "vfio_user/client.rs"]
mod client;
#[expect(dead_code, reason = "parts for other tests")]
mod common;
#[path = "vfio_user/connections.rs"]
mod connections;
#[path = "vfio_user/interrupts.rs"]
mod interrupts;
#[path = "vfio_user/memory.rs"]
mod memory;
#[path = "vfio_user/messages.rs"]
mod messages;
#[path = "vfio_user/rig.rs"]
mod rig;
