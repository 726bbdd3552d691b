//! What a frontend and its guest can do wrong, over real sockets against the server and worker of this crate: their queue or
//! port stops with a log line, a counter and the vring's err descriptor; everything else goes on.

mod common;
#[path = "vhost_user/connections.rs"]
mod connections;
#[path = "vhost_user/control.rs"]
mod control;
#[path = "vhost_user/descriptors.rs"]
mod descriptors;
#[path = "vhost_user/devices.rs"]
mod devices;
#[path = "vhost_user/inflight.rs"]
mod inflight;
#[path = "vhost_user/interrupts.rs"]
mod interrupts;
#[path = "vhost_user/limits.rs"]
mod limits;
#[path = "vhost_user/link.rs"]
mod link;
#[path = "vhost_user/memory.rs"]
mod memory;
#[path = "vhost_user/messages.rs"]
mod messages;
#[path = "vhost_user/neighbours.rs"]
mod neighbours;
#[path = "vhost_user/pairs.rs"]
mod pairs;
#[path = "vhost_user/queues.rs"]
mod queues;
#[path = "vhost_user/reconnect.rs"]
mod reconnect;
#[path = "vhost_user/vlans.rs"]
mod vlans;
#[path = "vhost_user/waiting.rs"]
mod waiting;

use ringroad_wire::ethernet::MacAddr;

/// Feature bits for each ring layout.
const LAYOUTS: [u64; 2] = [common::SPLIT, common::PACKED];

/// An address that no port has.
const NOBODY: MacAddr = MacAddr([2, 0, 0, 0, 0xff, 0xff]);
