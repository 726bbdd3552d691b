//! The types in which the two layouts of a virtqueue, split and packed, differ. Implemented by `split` and `packed`, used by the
//! loops that both share (`device.rs`, `driver.rs`).

/// A place in a ring. Split: an index that runs freely. Packed: a slot and the wrap counter of the pass.
pub(crate) trait RingPosition: Copy + PartialEq {
    fn slot(self, size: u16) -> usize;
    fn advance(&mut self, slots: u16, size: u16);
    fn back(&mut self, slots: u16, size: u16);
    /// Returns the number of slots to a position that is at most one whole pass ahead.
    fn distance(self, to: Self, size: u16) -> u16;
    fn to_bits(self) -> u16;
}

/// A ring in memory with one of the layouts.
pub(crate) trait RingLayout {
    /// Descriptors of a chain are linked by index, and the head identifies the chain (split); else they follow each other, and
    /// the id in the last one identifies the chain (packed).
    const LINKED: bool;
    /// Used entries per cache line.
    const PER_LINE: usize;

    type Position: RingPosition;
    /// What only this layout's device end keeps.
    type DeviceState;
    /// What only this layout's driver end keeps.
    type DriverState;
    /// What the driver end keeps for each id beside the chain's size.
    type Written: Copy + Default + PartialEq;
    /// A used entry in memory.
    type Entry;
    /// Record of the chains in flight, for a successor.
    type Track;
    /// A chain from such a record.
    type Saved: Copy;

    fn size(&self) -> u16;

    /// Returns the used entries from a position to the end of the ring, and the bits that, beside its id, the tag of an entry
    /// that is used in this pass has. The tag of any other one has higher bits that differ.
    fn used_run(&self, from: Self::Position) -> (u32, &[Self::Entry]);

    /// Reads a used entry: its tag and the length written.
    fn load(entry: &Self::Entry) -> (u32, u32);
}
