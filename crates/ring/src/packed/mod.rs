//! The packed virtqueue (virtio 1.3, 2.8).

mod device;
mod driver;
mod layout;
mod recover;
mod saved;
mod tracked;

pub(crate) use layout::Position;
pub use layout::{Base, Layout};

use crate::{inflight, layout::RingLayout};
use layout::{AVAILABLE, LINE, USED, used_flags};
use ringroad_mem::sync::{AtomicU64, Ordering};

impl RingLayout for Layout {
    const LINKED: bool = false;
    const PER_LINE: usize = LINE as usize;
    type Position = Position;
    type DeviceState = device::DeviceState;
    type DriverState = driver::DriverState;
    type Written = ();
    type Entry = [AtomicU64; 2];
    type Track = inflight::Packed;
    type Saved = inflight::Saved;

    #[inline(always)]
    fn size(&self) -> u16 {
        self.size
    }

    #[inline(always)]
    fn used_run(&self, from: Position) -> (u32, &[Self::Entry]) {
        let bits = u32::from(used_flags(from.wrap)) << 16;
        (bits, self.pairs().get(usize::from(from.slot)..).unwrap_or_default())
    }

    #[inline(always)]
    fn load([_, word]: &Self::Entry) -> (u32, u32) {
        // Pairs with the device's release store of this word: the buffers and the used descriptors behind it are visible.
        let word = u64::from_le(word.load(Ordering::Acquire));
        ((word >> 32) as u32 & (u32::from(AVAILABLE | USED) << 16 | 0xffff), word as u32)
    }
}
