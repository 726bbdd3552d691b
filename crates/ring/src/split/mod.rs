//! The split virtqueue (virtio 1.3, 2.7).

mod device;
mod driver;
mod layout;
#[cfg(not(loom))]
mod tracked;

pub use device::Device;
pub use driver::Driver;
pub use layout::Layout;
