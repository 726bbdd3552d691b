//! What a client has mapped: DMA_MAP and DMA_UNMAP. Called by `session.rs`.

use super::{
    messages::{DMA_READ, DMA_WRITE, DmaMap, DmaUnmap, UNMAP_ALL},
    refusal::{Refusal, refuse},
    version::PAGE,
};
use crate::socket::{Limits, MemoryFile};
use libc::{EEXIST, EINVAL, ENOENT, ENOMEM, ENOSPC, ENOTSUP};
use ringroad_mem::{Error, Region, Table};
use std::{collections::BTreeMap, sync::Arc};

/// The maps of a client.
#[derive(Default)]
pub(super) struct Memory {
    /// Those that came with a file: what the device can access.
    table: Arc<Table>,
    /// Addresses and sizes of those that came without one, such as ROMs.
    unbacked: BTreeMap<u64, u64>,
}

/// Checks that a range has a size, is made of whole pages and ends within 64 bits.
fn check(address: u64, size: u64, offset: u64) -> Result<(), Refusal> {
    let what = format_args!("{size:#x} bytes at {address:#x}, offset {offset:#x}").to_string();
    if size == 0 || [address, size, offset].iter().any(|number| !number.is_multiple_of(PAGE)) {
        return refuse(EINVAL, format!("DMA_MAP of {what}, expected whole pages of {PAGE} bytes"));
    }
    if address.checked_add(size).is_none() || offset.checked_add(size).is_none() {
        return refuse(EINVAL, format!("DMA_MAP of {what}, which end beyond 64 bits"));
    }
    Ok(())
}

impl Memory {
    /// Returns the memory that the device can access.
    pub(super) fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Adds a map. Returns whether the table has changed.
    pub(super) fn map(&mut self, map: &DmaMap, file: Option<&MemoryFile>, limits: &Limits) -> Result<bool, Refusal> {
        let &DmaMap { flags, offset, address, size, .. } = map;
        if flags & !(DMA_READ | DMA_WRITE) != 0 || flags == 0 {
            return refuse(EINVAL, format!("DMA_MAP with flags {flags:#x}, expected 1 to 3"));
        }
        check(address, size, offset)?;
        if self.table.all().count() + self.unbacked.len() >= limits.regions {
            let most = limits.regions;
            return refuse(ENOSPC, format!("more than {most} maps, the limit (`limits.regions`)"));
        }
        if let Some((other, other_size)) = self.overlap(address, size) {
            let what = format!("DMA_MAP of {size:#x} bytes at {address:#x}");
            return refuse(EEXIST, format!("{what}, where {other_size:#x} bytes at {other:#x} are mapped"));
        }
        let Some(file) = file else {
            self.unbacked.insert(address, size);
            return Ok(false);
        };
        let there: u64 = self.table.all().map(|region| region.mapped() as u64).sum();
        // Checked before mapping, and again with the mapped size, which is rounded up to pages of up to a gigabyte.
        budget(there, size, limits)?;
        // A device that may write may read.
        let region = if flags & DMA_WRITE != 0 {
            file.map(offset, size, address, address)
        } else {
            file.map_read_only(offset, size, address, address)
        };
        let region: Arc<Region> = region.map_err(refused)?;
        budget(there, region.mapped() as u64, limits)?;
        self.table = Arc::new(self.table.with(region).map_err(refused)?);
        Ok(true)
    }

    /// Removes a map, or all. Returns whether the table has changed.
    pub(super) fn unmap(&mut self, unmap: &DmaUnmap) -> Result<bool, Refusal> {
        let &DmaUnmap { flags, address, size, .. } = unmap;
        match flags {
            0 => {}
            UNMAP_ALL if address == 0 && size == 0 => {
                let changed = self.table.all().next().is_some();
                *self = Memory::default();
                return Ok(changed);
            }
            UNMAP_ALL => return refuse(EINVAL, "DMA_UNMAP of all with an address or size, expected 0"),
            _ => return refuse(ENOTSUP, format!("DMA_UNMAP with flags {flags:#x}, expected 0 or 2 (all)")),
        }
        if self.unbacked.get(&address) == Some(&size) {
            self.unbacked.remove(&address);
            return Ok(false);
        }
        // `refused` would speak of user addresses.
        let unknown =
            |_| Refusal::new(ENOENT, format!("DMA_UNMAP of {size:#x} bytes at {address:#x}, which are no map"));
        self.table = Arc::new(self.table.without(address, address, size).map_err(unknown)?);
        Ok(true)
    }

    /// Returns a map that overlaps a range.
    fn overlap(&self, address: u64, size: u64) -> Option<(u64, u64)> {
        let regions = self.table.all().map(|region| (region.guest(), region.len() as u64));
        let unbacked = self.unbacked.iter().map(|(&address, &size)| (address, size));
        // All ends were checked to be within 64 bits.
        regions.chain(unbacked).find(|&(other, other_size)| address < other + other_size && other < address + size)
    }
}

fn budget(there: u64, more: u64, limits: &Limits) -> Result<(), Refusal> {
    let most = limits.mapped;
    if there.saturating_add(more) <= most {
        return Ok(());
    }
    let what = format!("DMA_MAP of {more:#x} bytes in addition to {there:#x}");
    refuse(ENOMEM, format!("{what}, expected {most:#x} at most in all (`limits.mapped`)"))
}

fn refused(error: Error) -> Refusal {
    let errno = match &error {
        Error::Map(error) => error.raw_os_error().unwrap_or(EINVAL),
        Error::TooMany => ENOSPC,
        Error::Overlap { .. } => EEXIST,
        _ => EINVAL,
    };
    Refusal::new(errno, error.to_string())
}
