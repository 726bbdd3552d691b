//! An address to prefetch later.

use crate::{Span, copy};

/// Where something begins that will be read soon. It outlives the memory that it points to: all that can be done with it is a prefetch,
/// which never faults.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hint(usize);

impl Hint {
    /// Of the start of a span.
    #[inline(always)]
    pub fn of(span: Span<'_>) -> Hint {
        Hint(span.as_ptr().addr())
    }

    /// Prefetches the cache line, to the second level.
    #[inline(always)]
    pub fn fetch(self) {
        copy::prefetch_far(std::ptr::without_provenance(self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::Hint;
    use crate::Region;

    #[test]
    fn outlives_what_it_points_to() {
        let region = Region::private(4096, 0).unwrap();
        let hint = Hint::of(region.span(64, 64).unwrap());
        hint.fetch();
        drop(region);
        hint.fetch();
        Hint::default().fetch();
    }
}
