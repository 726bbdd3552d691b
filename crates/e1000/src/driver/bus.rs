//! How a driver reaches its device.

/// Access to the registers of BAR 0.
pub trait Bus {
    /// Reads a register.
    fn read(&mut self, register: u32) -> u32;

    /// Writes a register. The write may be posted: it need not have arrived when this returns.
    fn write(&mut self, register: u32, value: u32);
}
