//! The interface between a session and the PCI device behind it. Implemented by whoever brings a device.

use super::Interrupts;
use ringroad_mem::Table;
use std::sync::Arc;

/// Index of the configuration space among the regions (VFIO_PCI_CONFIG_REGION_INDEX); 0 to 5 are the BARs.
pub const CONFIG_REGION: u32 = 7;

/// One region of a device: a BAR, the ROM, the configuration space. Of size 0: there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PciRegion {
    /// Bytes.
    pub size: u64,
    /// It can be read.
    pub read: bool,
    /// It can be written.
    pub write: bool,
}

impl PciRegion {
    /// A region that can be read and written, of so many bytes.
    pub const fn new(size: u64) -> PciRegion {
        PciRegion { size, read: true, write: true }
    }
}

/// A PCI device. Cheap to clone: all clones are the same device.
///
/// All calls come from the thread of its socket, in the order of the client's messages. (Devices of this crate whose queues a worker polls
/// may have that worker make some of the calls instead, never two at a time.) No region is offered for mapping, so every
/// access is a call, and the client can post writes.
pub trait VfioDevice: Clone + Send + 'static {
    /// Returns its name in log lines, such as "port vm1".
    fn name(&self) -> &str;

    /// Returns a region, always the same: 0 to 5 are the BARs, 6 the ROM, [`CONFIG_REGION`] the configuration space.
    fn region(&self, index: u32) -> PciRegion;

    /// Returns its interrupts, always the same.
    fn interrupts(&self) -> &Interrupts;

    /// Reads from a region. The range lies within it, but has any offset and length.
    fn read(&self, region: u32, offset: u64, data: &mut [u8]);

    /// Writes to a region. The range lies within it, but has any offset and length. There is no error: an access that the
    /// hardware would ignore is ignored.
    fn write(&self, region: u32, offset: u64, data: &[u8]);

    /// Replaces the memory that the device may access. When this returns, the device uses nothing of the previous table any more and
    /// has dropped it: the client may unmap or reuse that memory.
    ///
    /// Memory that the client did not send as a file is not in the table: an access to it is an access to nothing, as is a
    /// write to memory that the client mapped for reading, which only [`Table::readable`] finds.
    fn set_memory(&self, memory: Arc<Table>);

    /// Resets the device (DEVICE_RESET). Its memory and the descriptors of its interrupts stay.
    fn reset(&self);

    /// Counts a fault of the client.
    fn count_fault(&self) {}

    /// The client has disconnected. The device has no memory and its interrupts no descriptors any more. The protocol asks for its
    /// registers to be kept until a new client resets it; a device that uses memory without being asked to stops here: the next
    /// client's memory may be mapped before that reset.
    fn disconnected(&self) {}
}
