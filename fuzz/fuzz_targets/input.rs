//! What a fuzz target makes of its bytes.

/// Takes bytes from the front of the input; zeros, once it is used up.
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let (bytes, rest) = self.0.split_at(N.min(self.0.len()));
        out[..bytes.len()].copy_from_slice(bytes);
        self.0 = rest;
        out
    }

    pub fn byte(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    pub fn word(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Usually small, sometimes anything.
    #[allow(dead_code, reason = "not all targets need it")]
    pub fn number(&mut self) -> u32 {
        match self.byte() {
            255 => u32::from_le_bytes(self.take()),
            254 => u32::MAX,
            byte if byte >= 128 => u32::from(self.word()),
            byte => byte.into(),
        }
    }
}
