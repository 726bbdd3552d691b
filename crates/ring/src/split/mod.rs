//! The split virtqueue (virtio 1.3, 2.7).

mod device;
mod driver;
mod layout;
mod tracked;

pub use layout::Layout;

use crate::{
    inflight,
    layout::{RingLayout, RingPosition},
};
use layout::ELEMENTS_PER_LINE;
use ringroad_mem::sync::{AtomicU32, Ordering};

impl RingLayout for Layout {
    const LINKED: bool = true;
    const PER_LINE: usize = ELEMENTS_PER_LINE;
    type Position = u16;
    type DeviceState = device::DeviceState;
    type DriverState = driver::DriverState;
    type Written = driver::Written;
    type Entry = [AtomicU32; 2];
    type Track = inflight::Split;
    type Saved = u16;

    #[inline(always)]
    fn size(&self) -> u16 {
        self.size
    }

    #[inline(always)]
    fn used_run(&self, from: u16) -> (u32, &[Self::Entry]) {
        (0, self.elements.as_chunks().0.get(from.slot(self.size)..).unwrap_or_default())
    }

    #[inline(always)]
    fn load([id, len]: &Self::Entry) -> (u32, u32) {
        (u32::from_le(id.load(Ordering::Relaxed)), u32::from_le(len.load(Ordering::Relaxed)))
    }
}
