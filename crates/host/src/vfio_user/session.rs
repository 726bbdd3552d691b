//! One connection of a client: carries out its commands on a [`VfioDevice`]. Every message is validated; an invalid one is refused
//! with an error and a log line. Called by `server.rs`.

use super::{
    InterruptKind, PciRegion, VfioDevice,
    memory::Memory,
    messages::{
        Access, DEVICE_PCI, DEVICE_RESET, DeviceInfo, DmaMap, DmaUnmap, ERROR, Header, IRQ_AUTOMASKED, IRQ_ERR,
        IRQ_EVENTFD, IRQ_MASKABLE, IRQ_REQ, IrqInfo, IrqSet, NO_REPLY, REGION_READ, REGION_WRITE, REGIONS, REPLY,
        RegionInfo, SmallWrite, TYPE, command, irq,
    },
    refusal::{Refusal, refuse},
    version::{self, FDS, TRANSFER},
};
use crate::{
    Quota,
    socket::{Call, CallFd, Disposal, Limits, Lines, MemoryFile, Peer, Refused, say},
};
use libc::{EINVAL, ENOTSUP};
use parking_lot::Mutex;
use std::{fs::File, sync::Arc};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of the longest message.
pub(super) const LONGEST: usize = size_of::<Header>() + size_of::<Access>() + TRANSFER as usize;

/// Returns what a payload begins with.
fn read<T: FromBytes + KnownLayout + Immutable>(payload: &[u8]) -> Result<(T, &[u8]), Refusal> {
    T::read_from_prefix(payload).map_err(|_| {
        Refusal::new(EINVAL, format!("{} bytes of payload, expected {} at least", payload.len(), size_of::<T>()))
    })
}

/// What a session shares with the thread that it runs in.
#[derive(Clone)]
pub(super) struct SessionContext {
    /// May change while the session runs.
    pub limits: Arc<Mutex<Limits>>,
    pub lines: Lines,
    /// Raised when the descriptor of an interrupt blocks.
    pub peer: Arc<Peer>,
    /// Closes refused descriptors.
    pub disposal: Disposal,
}

/// One connection.
pub(super) struct Session<D: VfioDevice> {
    device: D,
    context: SessionContext,
    /// How many more messages may be refused.
    refusals: Quota,
    /// VERSION has been agreed on.
    negotiated: bool,
    memory: Memory,
}

impl<D: VfioDevice> Session<D> {
    pub(super) fn new(device: D, context: SessionContext) -> Session<D> {
        let refusals = context.limits.lock().refusals.quota();
        Session { device, context, refusals, negotiated: false, memory: Memory::default() }
    }

    /// Carries out a command and puts the reply, if one is wanted, into `reply`. Fails if the connection cannot go on: with the
    /// reason.
    pub(super) fn handle(
        &mut self,
        header: &Header,
        payload: &[u8],
        files: &mut Vec<File>,
        reply: &mut Vec<u8>,
    ) -> Result<(), String> {
        reply.clear();
        reply.extend_from_slice(Header::default().as_bytes());
        let result = self.carry_out(header.command, payload, files, reply);
        // What no command has taken.
        self.context.disposal.close(files.drain(..));
        let (mut flags, mut error) = (REPLY, 0);
        let result = match result {
            Ok(()) => Ok(()),
            Err(refusal) => {
                reply.truncate(size_of::<Header>());
                (flags, error) = (REPLY | ERROR, refusal.errno.unsigned_abs());
                self.refused(header.command, &refusal)
            }
        };
        if header.flags & NO_REPLY != 0 {
            reply.clear();
            return result;
        }
        let Header { id, command, .. } = *header;
        let header = Header { id, command, size: reply.len() as u32, flags, error };
        if let Some(start) = reply.get_mut(..size_of::<Header>()) {
            start.copy_from_slice(header.as_bytes());
        }
        result
    }

    /// Logs and counts a refused command. Fails if that ends the connection.
    fn refused(&mut self, command: u16, refusal: &Refusal) -> Result<(), String> {
        let (device, lines) = (&self.device, &self.context.lines);
        let line = format!("{}: {} ({command}): {}; refused", device.name(), command::name(command), refusal.why);
        if refusal.is_answer {
            say!(lines, Debug, "{line}");
        } else {
            device.count_fault();
            say!(lines, Error, "{line}");
        }
        if !self.negotiated {
            return Err("no version was agreed on".to_owned());
        }
        match self.refusals.take() {
            Some(_) => Ok(()),
            None => Err("more refused messages than `limits.refusals` allows".to_owned()),
        }
    }

    fn carry_out(
        &mut self,
        command: u16,
        payload: &[u8],
        files: &mut Vec<File>,
        reply: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        if self.negotiated == (command == command::VERSION) {
            return refuse(EINVAL, "expected VERSION first, and once");
        }
        if !files.is_empty() && !command::has_descriptors(command) {
            return refuse(EINVAL, format!("{} descriptors, expected none", files.len()));
        }
        match command {
            command::REGION_READ => self.region_read(payload, reply),
            command::REGION_WRITE => self.region_write(payload, reply),
            command::REGION_WRITE_MULTI => self.region_write_multi(payload, reply),
            command::VERSION => self.version(payload, reply),
            command::DMA_MAP => self.dma_map(payload, files),
            command::DMA_UNMAP => self.dma_unmap(payload, reply),
            command::DEVICE_GET_INFO => {
                read::<DeviceInfo>(payload)?;
                let flags = DEVICE_RESET | DEVICE_PCI;
                let argsz = size_of::<DeviceInfo>() as u32;
                add(reply, &DeviceInfo { argsz, flags, regions: REGIONS, irqs: InterruptKind::COUNT });
                Ok(())
            }
            command::DEVICE_GET_REGION_INFO => self.region_info(payload, reply),
            command::DEVICE_GET_IRQ_INFO => self.irq_info(payload, reply),
            command::DEVICE_SET_IRQS => self.set_irqs(payload, files),
            command::DEVICE_RESET => {
                self.device.reset();
                Ok(())
            }
            // Regions have no descriptors, the device sends no commands, and it cannot be migrated.
            _ => Err(Refusal::answer(ENOTSUP, "not supported")),
        }
    }

    fn version(&mut self, payload: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let (minor, capabilities) = version::check(payload).map_err(|why| Refusal::new(EINVAL, why))?;
        self.negotiated = true;
        let regions = self.context.limits.lock().regions;
        reply.extend_from_slice(&version::payload(minor, regions, capabilities.write_multiple));
        Ok(())
    }

    fn dma_map(&mut self, payload: &[u8], files: &mut Vec<File>) -> Result<(), Refusal> {
        let (map, _) = read::<DmaMap>(payload)?;
        if files.len() > 1 {
            return refuse(EINVAL, format!("{} descriptors, expected one or none", files.len()));
        }
        let file = files.pop().map(MemoryFile::new).transpose();
        let file = file.map_err(|refused| self.refuse_file("memory", refused))?;
        let limits = *self.context.limits.lock();
        if self.memory.map(&map, file.as_ref(), &limits)? {
            self.device.set_memory(self.memory.table().clone());
        }
        Ok(())
    }

    fn dma_unmap(&mut self, payload: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let (unmap, _) = read::<DmaUnmap>(payload)?;
        if self.memory.unmap(&unmap)? {
            self.device.set_memory(self.memory.table().clone());
        }
        add(reply, &unmap);
        Ok(())
    }

    fn refuse_file(&self, what: &str, refused: Refused) -> Refusal {
        let refusal = Refusal::new(EINVAL, format!("the {what} descriptor {refused}"));
        self.context.disposal.close([refused.file]);
        refusal
    }

    fn region_info(&self, payload: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let (RegionInfo { index, .. }, _) = read(payload)?;
        if index >= REGIONS {
            return refuse(EINVAL, format!("region {index}, expected 0 to {}", REGIONS - 1));
        }
        let PciRegion { size, read, write } = self.device.region(index);
        let flags = if read { REGION_READ } else { 0 } | if write { REGION_WRITE } else { 0 };
        let argsz = size_of::<RegionInfo>() as u32;
        add(reply, &RegionInfo { argsz, flags, index, size, ..RegionInfo::default() });
        Ok(())
    }

    fn irq_info(&self, payload: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let (IrqInfo { index, .. }, _) = read(payload)?;
        if matches!(index, IRQ_ERR | IRQ_REQ) {
            return Err(Refusal::answer(EINVAL, "the device has no interrupts for errors or requests"));
        }
        let kind = self.interrupt_kind(index)?;
        let flags = if kind == InterruptKind::Intx { IRQ_MASKABLE | IRQ_AUTOMASKED } else { 0 };
        let count = self.device.interrupts().count(kind) as u32;
        add(reply, &IrqInfo { argsz: size_of::<IrqInfo>() as u32, flags: flags | IRQ_EVENTFD, index, count });
        Ok(())
    }

    fn interrupt_kind(&self, index: u32) -> Result<InterruptKind, Refusal> {
        let last = InterruptKind::COUNT - 1;
        let unknown = || Refusal::new(EINVAL, format!("interrupt index {index}, expected 0 to {last}"));
        InterruptKind::new(index).ok_or_else(unknown)
    }

    fn set_irqs(&mut self, payload: &[u8], files: &mut Vec<File>) -> Result<(), Refusal> {
        let (IrqSet { flags, index, start, count, .. }, bools) = read(payload)?;
        let kind = self.interrupt_kind(index)?;
        let interrupts = self.device.interrupts().clone();
        let (data, action) = (flags & irq::DATA, flags & irq::ACTION);
        if flags != data | action || !data.is_power_of_two() || !action.is_power_of_two() {
            return refuse(EINVAL, format!("flags {flags:#x}, expected one kind of data and one action"));
        }
        if !files.is_empty() && data != irq::DATA_EVENTFD {
            return refuse(EINVAL, format!("{} descriptors with flags {flags:#x}, expected none", files.len()));
        }
        if (data, action, start, count) == (irq::DATA_NONE, irq::TRIGGER, 0, 0) {
            interrupts.disable(kind);
            return Ok(());
        }
        let there = interrupts.count(kind);
        let (start, count) = (start as usize, count as usize);
        // As 64-bit numbers, 32-bit ones do not overflow.
        if count == 0 || start + count > there {
            return refuse(EINVAL, format!("{count} interrupts from {start}, expected some of {there}"));
        }
        let chosen = match data {
            irq::DATA_EVENTFD if action == irq::TRIGGER => return self.assign(kind, start, count, files),
            irq::DATA_EVENTFD => return refuse(ENOTSUP, "descriptors to mask or unmask by: not supported"),
            irq::DATA_BOOL if bools.len() != count => {
                return refuse(EINVAL, format!("{} bytes for {count} interrupts, expected as many", bools.len()));
            }
            irq::DATA_BOOL => Some(bools),
            _ => None,
        };
        let chosen = |at: usize| chosen.is_none_or(|bools| bools.get(at).is_some_and(|&chosen| chosen != 0));
        if action == irq::TRIGGER {
            (0..count).filter(|&at| chosen(at)).for_each(|at| {
                interrupts.signal(kind, start + at);
            });
        } else if kind != InterruptKind::Intx {
            return refuse(EINVAL, "message-signalled interrupts have no mask here; the device has");
        } else if chosen(0) {
            interrupts.mask(action == irq::MASK);
        }
        Ok(())
    }

    /// Sets the descriptors of interrupts; removes them, if there are none.
    fn assign(&self, kind: InterruptKind, start: usize, count: usize, files: &mut Vec<File>) -> Result<(), Refusal> {
        if !files.is_empty() && (files.len() != count || count > FDS) {
            let why = format!("{} descriptors for {count} interrupts, expected as many, at most {FDS}", files.len());
            return refuse(EINVAL, why);
        }
        let mut calls = Vec::with_capacity(files.len());
        while !files.is_empty() {
            let fd = CallFd::new(files.remove(0)).map_err(|refused| self.refuse_file("interrupt", refused))?;
            calls.push(Call::new(fd, &self.context.peer));
        }
        let mut calls = calls.into_iter();
        let interrupts = self.device.interrupts();
        (start..start + count).for_each(|index| interrupts.assign(kind, index, calls.next()));
        Ok(())
    }

    /// Returns the part of a region that an access is to; `None` if not all of it is there.
    fn within(&self, access: &Access, allowed: impl Fn(PciRegion) -> bool) -> Option<()> {
        let region = (access.region < REGIONS).then(|| self.device.region(access.region))?;
        let end = access.offset.checked_add(access.count.into())?;
        (end <= region.size && allowed(region)).then_some(())
    }

    fn region_read(&self, payload: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let (access, _) = read::<Access>(payload)?;
        let Access { offset, region, count } = access;
        if count > TRANSFER || self.within(&access, |region| region.read).is_none() {
            return refuse(EINVAL, format!("{count} bytes at {offset:#x} of region {region}, which is not all there"));
        }
        add(reply, &access);
        let start = reply.len();
        reply.resize(start + count as usize, 0);
        self.device.read(region, offset, reply.get_mut(start..).unwrap_or_default());
        Ok(())
    }

    fn region_write(&self, payload: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let (access, data) = read::<Access>(payload)?;
        if data.len() != access.count as usize {
            return refuse(EINVAL, format!("{} bytes for a count of {}", data.len(), access.count));
        }
        self.write(&access, data);
        add(reply, &access);
        Ok(())
    }

    fn region_write_multi(&self, payload: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let (count, mut rest) = read::<u64>(payload)?;
        let whole = rest.len().is_multiple_of(size_of::<SmallWrite>());
        if !whole || (rest.len() / size_of::<SmallWrite>()) as u64 != count {
            return refuse(EINVAL, format!("{} bytes for {count} writes of {}", rest.len(), size_of::<SmallWrite>()));
        }
        while let Ok((SmallWrite { access, data }, next)) = SmallWrite::read_from_prefix(rest) {
            let Some(data) = data.get(..access.count as usize) else {
                return refuse(EINVAL, format!("a write of {} bytes, expected at most 8", access.count));
            };
            self.write(&access, data);
            rest = next;
        }
        add(reply, &count);
        Ok(())
    }

    /// Writes to the device. A write to what is not there is ignored, as on a bus, but counted: it may be a posted one, of
    /// which the client expects no error.
    fn write(&self, access: &Access, data: &[u8]) {
        let &Access { offset, region, .. } = access;
        if self.within(access, |region| region.write).is_some() {
            return self.device.write(region, offset, data);
        }
        self.device.count_fault();
        let (name, count) = (self.device.name(), data.len());
        say!(self.context.lines, Warn, "{name}: a write of {count} bytes at {offset:#x} of region {region}; ignored");
    }
}

impl<D: VfioDevice> Drop for Session<D> {
    fn drop(&mut self) {
        self.device.interrupts().clear();
        self.device.set_memory(Arc::default());
    }
}

fn add(reply: &mut Vec<u8>, part: &(impl IntoBytes + Immutable)) {
    reply.extend_from_slice(part.as_bytes());
}

/// Checks a header. Fails if the connection cannot go on: with the reason.
pub(super) fn check(header: &Header) -> Result<(), String> {
    let Header { command, size, flags, .. } = *header;
    if flags & TYPE != 0 {
        return Err(format!("a message of type {} (flags {flags:#x}), expected a command", flags & TYPE));
    }
    if !(size_of::<Header>()..=LONGEST).contains(&(size as usize)) {
        let name = command::name(command);
        return Err(format!("{name} ({command}) with a size of {size}, expected 16 to {LONGEST}"));
    }
    Ok(())
}

/// Which accesses to whole registers are quick: region, offset, and whether it is written to.
pub(super) type Quick = fn(u32, u64, bool) -> bool;

/// Returns whether a message, whole and without descriptors, is nothing but quick accesses that a [`Session`] will carry out.
pub(super) fn is_quick(header: &Header, payload: &[u8], quick: Quick) -> bool {
    const WORD: usize = size_of::<u32>();
    let word = |access: &Access, write| access.count as usize == WORD && quick(access.region, access.offset, write);
    let one = |data: usize, write| {
        Access::read_from_prefix(payload).is_ok_and(|(access, rest)| rest.len() == data && word(&access, write))
    };
    match header.command {
        command::REGION_READ => one(0, false),
        command::REGION_WRITE => one(WORD, true),
        command::REGION_WRITE_MULTI => {
            let Ok((count, rest)) = u64::read_from_prefix(payload) else { return false };
            let writes = rest.chunks(size_of::<SmallWrite>());
            count == writes.len() as u64
                && writes.into_iter().all(|write| {
                    SmallWrite::read_from_bytes(write).is_ok_and(|SmallWrite { access, .. }| word(&access, true))
                })
        }
        _ => false,
    }
}
