//! What is copied of a port's frames, for another port and for whoever captures them. Applied by `delivery.rs`.

/// The way of a frame, as its port sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// It came from the port.
    From,
    /// It goes to the port.
    To,
}

/// What is copied of a port's frames, and where to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mirror {
    /// The number of a port that gets copies, if it has room, and has no other traffic: it gets nothing else, and what comes from it
    /// is dropped.
    pub port: Option<u32>,
    /// [`Port::capture`](crate::Port::capture) is called.
    pub captures: bool,
    /// Frames that come from the port are copied as they came, when it is decided where they go, or that they go nowhere.
    pub from: bool,
    /// Frames that go to the port are copied, also those for which it has no room.
    pub to: bool,
}

impl Mirror {
    /// Returns whether nothing is copied.
    pub fn is_none(&self) -> bool {
        self.port.is_none() && !self.captures || !self.from && !self.to
    }
}
