//! Which ids of a ring are free and which are in flight. Used by the driver end.

/// The ids of a ring in a circular list: first the free ones, starting at the one to use next, then those in flight, oldest
/// first. Ids that return in order leave the list unchanged, so a device that works in order reads descriptors in order.
pub(crate) struct Ids {
    ids: Box<[u16]>,
    next: usize,
    free: usize,
}

impl Ids {
    /// All ids are free.
    pub(crate) fn new(size: u16) -> Ids {
        Ids { ids: (0..size).collect(), next: 0, free: size.into() }
    }

    #[inline(always)]
    pub(crate) fn free(&self) -> usize {
        self.free
    }

    /// Returns the id to be used after `ahead` others.
    #[inline(always)]
    pub(crate) fn next(&self, ahead: usize) -> Option<u16> {
        (ahead < self.free).then(|| self.ids[self.wrap(self.next + ahead)])
    }

    /// Returns the ids to be used after `ahead` others: up to `count`, as many as are contiguous in the list.
    #[inline(always)]
    pub(crate) fn run(&self, ahead: usize, count: usize) -> &[u16] {
        let count = count.min(self.free.saturating_sub(ahead));
        let start = self.wrap(self.next + ahead.min(self.free));
        let run = self.ids.get(start..).unwrap_or_default();
        run.get(..count).unwrap_or(run)
    }

    /// With IN_ORDER: returns how many ids are in flight up to and including this one, oldest first; 0 if it is not in
    /// flight.
    #[inline(always)]
    pub(crate) fn count_up_to(&self, id: usize) -> usize {
        if !self.is_in_flight(id) {
            return 0;
        }
        let oldest = self.wrap(self.next + self.free);
        if id >= oldest { id - oldest + 1 } else { id + self.ids.len() - oldest + 1 }
    }

    /// With IN_ORDER: frees the oldest `count` ids in flight.
    #[inline(always)]
    pub(crate) fn put_back_oldest(&mut self, count: usize) {
        debug_assert!(self.free + count <= self.ids.len());
        self.free += count;
    }

    /// Marks the next `count` free ids as in flight.
    #[inline(always)]
    pub(crate) fn advance(&mut self, count: usize) {
        debug_assert!(count <= self.free);
        self.next = self.wrap(self.next + count);
        self.free -= count;
    }

    /// With IN_ORDER: returns the oldest id in flight.
    #[inline(always)]
    pub(crate) fn oldest(&self) -> Option<u16> {
        (self.free < self.ids.len()).then(|| self.ids[self.wrap(self.next + self.free)])
    }

    /// With IN_ORDER: returns the id in flight that is preceded by `ahead` older ones.
    pub(crate) fn in_flight(&self, ahead: usize) -> Option<u16> {
        let place =
            (ahead < self.ids.len() - self.free).then(|| self.wrap(self.wrap(self.next + self.free) + ahead))?;
        self.ids.get(place).copied()
    }

    /// With IN_ORDER: returns the oldest ids in flight, up to `count`, as many as are contiguous in the list.
    #[inline(always)]
    pub(crate) fn oldest_run(&self, count: usize) -> &[u16] {
        let count = count.min(self.ids.len() - self.free);
        let run = self.ids.get(self.wrap(self.next + self.free)..).unwrap_or_default();
        run.get(..count).unwrap_or(run)
    }

    /// With IN_ORDER: returns whether an id is in flight.
    #[inline(always)]
    pub(crate) fn is_in_flight(&self, id: usize) -> bool {
        // In order, each id stays at its own index of the list.
        let size = self.ids.len();
        let ahead = if id >= self.next { id - self.next } else { id + size - self.next };
        id < size && ahead >= self.free
    }

    /// Frees an id that was in flight.
    #[inline(always)]
    pub(crate) fn put_back(&mut self, id: u16) {
        debug_assert!(self.free < self.ids.len());
        let place = self.wrap(self.next + self.free);
        if self.ids[place] != id {
            self.ids[place] = id;
        }
        self.free += 1;
    }

    #[inline(always)]
    fn wrap(&self, at: usize) -> usize {
        if at >= self.ids.len() { at - self.ids.len() } else { at }
    }
}
