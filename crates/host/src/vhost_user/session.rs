//! One connection of a frontend: what it has told us so far, and the queues that run by it. Called by `server.rs` through
//! the `vhost` crate, message by message. Everything in here may be wrong; what is, is refused with a log line.

use super::{
    Call, Device, Kick, Limits, Ring,
    call::Alarm,
    descriptor::{CallFd, Disposal, MemoryFile, Refused},
    inflight::InflightRegion,
    limits::{Lines, say},
};
use crate::Quota;
use parking_lot::Mutex;
use ringroad_mem::Table;
use ringroad_ring::{Addresses, SetupError, bits};
use std::{fs::File, io, sync::Arc};
use vhost::vhost_user::{
    Backend, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures as Protocol,
    message::{
        VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
        VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion,
        VhostUserVringAddrFlags, VhostUserVringState,
    },
};

/// An address in the frontend, in replies that only postcopy migration has.
type UserAddress = u64;

/// What the frontend has said about one vring.
#[derive(Default)]
struct Vring {
    size: u32,
    addresses: Option<Addresses>,
    base: u32,
    /// `Some(None)`: it will not kick, we have to poll.
    kick: Option<Option<Kick>>,
    /// `None`: it has not said; then PROTOCOL_FEATURES decide.
    enabled: Option<bool>,
    running: bool,
    /// It has run on this connection: its base is known, whatever was noted of it.
    ran: bool,
}

/// What a session needs of the thread that it runs in.
#[derive(Clone)]
pub(crate) struct Surroundings {
    /// Can be changed while it runs.
    pub limits: Arc<Mutex<Limits>>,
    pub lines: Lines,
    /// Raised by whoever notifies the frontend and is made to wait.
    pub alarm: Arc<Alarm>,
    /// Where descriptors go that are refused.
    pub disposal: Disposal,
}

/// One connection.
pub(crate) struct Session<D: Device> {
    device: D,
    around: Surroundings,
    /// Refusals that are still answered.
    refusals: Quota,
    acked: u64,
    protocol: Protocol,
    memory: Arc<Table>,
    vrings: Vec<Vring>,
    inflight: Option<InflightRegion>,
    /// The channel for requests of ours. There are none yet, but a frontend takes its end for the end of the device
    /// (User-Mode Linux removes it), so that it has to stay open.
    backend: Option<Backend>,
    /// The last message was refused, as the log says, but the connection can go on.
    pub(crate) refused: bool,
    /// More messages were refused than a frontend can have a reason for.
    pub(crate) exhausted: bool,
}

impl<D: Device> Session<D> {
    pub(crate) fn new(device: D, around: Surroundings) -> Session<D> {
        let vrings = (0..device.vrings()).map(|_| Vring::default()).collect();
        let refusals = around.limits.lock().refusals.quota();
        Session {
            device,
            around,
            refusals,
            acked: 0,
            protocol: Protocol::empty(),
            memory: Arc::default(),
            vrings,
            inflight: None,
            backend: None,
            refused: false,
            exhausted: false,
        }
    }

    fn protocol_features(&self) -> Protocol {
        let always = Protocol::REPLY_ACK
            | Protocol::CONFIG
            | Protocol::CONFIGURE_MEM_SLOTS
            | Protocol::BACKEND_REQ
            | Protocol::RESET_DEVICE
            | Protocol::INFLIGHT_SHMFD;
        // With a single pair nobody need ask.
        if self.device.queue_num() > 1 { always | Protocol::MQ } else { always }
    }

    /// Whether a message that could not be obeyed was answered with an error, so that the frontend knows.
    pub(crate) fn can_refuse(&self) -> bool {
        self.protocol.contains(Protocol::REPLY_ACK)
    }

    /// Whether SET_VRING_ENABLE may come though PROTOCOL_FEATURES is not acknowledged: once protocol features are negotiated;
    /// what does not run yet may be disabled in any case.
    pub(crate) fn is_early(&self, enable: bool) -> bool {
        self.acked & bits::PROTOCOL_FEATURES == 0 && (!self.protocol.is_empty() || self.acked == 0 && !enable)
    }

    fn refuse<T>(&mut self, why: impl std::fmt::Display) -> Result<T> {
        say!(self.around.lines, Error, "{}: {why}; refused", self.device.name());
        self.device.count_fault(None);
        self.count_refusal()
    }

    /// The same for what concerns one vring, whose err descriptor tells it too.
    fn refuse_vring<T>(&mut self, index: usize, why: impl std::fmt::Display) -> Result<T> {
        say!(self.around.lines, Error, "{} queue {index}: {why}; refused", self.device.name());
        self.device.count_fault(Some(index));
        self.count_refusal()
    }

    fn count_refusal<T>(&mut self) -> Result<T> {
        self.refused = true;
        self.exhausted |= self.refusals.take().is_none();
        Err(Error::InvalidParam)
    }

    /// The same for a descriptor, which is closed elsewhere.
    fn refuse_file<T>(&mut self, index: Option<usize>, what: &str, refused: Refused) -> Result<T> {
        let why = format!("the {what} descriptor {refused}");
        self.around.disposal.close([refused.file]);
        match index {
            Some(index) => self.refuse_vring(index, why),
            None => self.refuse(why),
        }
    }

    /// The frontend does not keep to the protocol: the connection cannot go on.
    pub(crate) fn violated(&mut self, why: impl std::fmt::Display) {
        say!(self.around.lines, Error, "{}: {why}; disconnected", self.device.name());
        self.device.count_fault(None);
        (0..self.vrings.len()).for_each(|index| self.device.signal_err(index));
    }

    /// The vring with this index, or the error for a message about one that there is not.
    fn vring(&mut self, index: u32) -> Result<usize> {
        if (index as usize) < self.vrings.len() {
            return Ok(index as usize);
        }
        let last = self.vrings.len().saturating_sub(1);
        self.refuse(format_args!("a message about vring {index}, expected 0 to {last}"))
    }

    /// Starts a vring if all is there that it needs. If that fails it stays stopped until there is a new kick, so that
    /// the frontend can put it right message by message.
    fn start(&mut self, index: usize) -> Result<()> {
        let result = self.try_start(index);
        if result.is_err()
            && let Some(vring) = self.vrings.get_mut(index)
        {
            vring.kick = None;
        }
        result
    }

    fn try_start(&mut self, index: usize) -> Result<()> {
        let Some(vring) = self.vrings.get(index) else { return Ok(()) };
        let enabled = vring.enabled.unwrap_or(self.acked & bits::PROTOCOL_FEATURES == 0);
        let (Some(addresses), Some(kick), true, false) = (vring.addresses, &vring.kick, enabled, vring.running) else {
            return Ok(());
        };
        let kick = kick.as_ref();
        if self.acked & bits::VERSION_1 == 0 {
            let why = "the driver does not speak virtio 1.0 (VIRTIO_F_VERSION_1 not acknowledged)";
            return self.refuse_vring(index, why);
        }
        let (memory, acked, size, base) = (self.memory.clone(), self.acked, vring.size, vring.base);
        let region = self.inflight.as_mut().map(|region| region.start(index, acked & bits::RING_PACKED != 0));
        let inflight = match region.transpose() {
            Ok(part) => part.unwrap_or_default(),
            Err(why) => return self.refuse_vring(index, why),
        };
        match self.device.start(index, Ring { memory, acked, size, addresses, base, inflight }, kick) {
            Ok(base) => log::debug!("{}: queue {index} runs, {size} entries, base {base:#x}", self.device.name()),
            Err(why) => return self.refuse_vring(index, why),
        }
        if let Some(vring) = self.vrings.get_mut(index) {
            (vring.running, vring.ran) = (true, true);
        }
        Ok(())
    }

    /// Stops a vring; it can go on where it was.
    fn stop(&mut self, index: usize) {
        let Some(vring) = self.vrings.get_mut(index) else { return };
        if !std::mem::take(&mut vring.running) {
            return;
        }
        vring.base = self.device.stop(index, vring.kick.as_ref().and_then(Option::as_ref));
        log::debug!("{}: queue {index} stopped, base {:#x}", self.device.name(), vring.base);
    }

    /// Stops a vring, changes what is known of it, and starts it again, if it now has all that it needs.
    fn change(&mut self, index: usize, change: impl FnOnce(&mut Vring)) -> Result<()> {
        self.stop(index);
        self.vrings.get_mut(index).map(change);
        self.start(index)
    }

    /// Whether a vring is in use: what it was set up with does not change.
    fn is_running(&self, index: usize) -> bool {
        self.vrings.get(index).is_some_and(|vring| vring.running) && !self.device.has_fault(index)
    }

    /// One more region in a table, within the limits.
    fn add(&mut self, table: &Table, file: &MemoryFile, [guest, len, user, offset]: [u64; 4]) -> Result<Table> {
        let Limits { mapped, regions, .. } = *self.around.limits.lock();
        if table.regions().len() >= regions {
            return self.refuse(format_args!("more than {regions} memory regions (`limits.regions`)"));
        }
        let there: u64 = table.regions().iter().map(|region| region.mapped() as u64).sum();
        let too_much = |len: u64| {
            let more = there.saturating_add(len) > mapped;
            more.then(|| {
                format!("a memory region of {len:#x} bytes beside {there:#x}, expected {mapped:#x} at most (`limits.mapped`)")
            })
        };
        // Before anything is mapped, and once more with its pages, which may be of a gigabyte.
        if let Some(why) = too_much(len) {
            return self.refuse(why);
        }
        let region = match file.map(offset, len, guest, user) {
            Ok(region) => region,
            Err(error) => return self.refuse(error),
        };
        if let Some(why) = too_much(region.mapped() as u64) {
            return self.refuse(why);
        }
        match table.with(region) {
            Ok(table) => Ok(table),
            Err(error) => self.refuse(error),
        }
    }

    /// Puts new memory in the place of the old one. Running queues go on in it where they were; the old one is unmapped
    /// before this returns.
    fn replace_memory(&mut self, memory: Table) -> Result<()> {
        let vrings = self.vrings.iter().enumerate();
        let mut running: Vec<usize> = vrings.filter(|(_, vring)| vring.running).map(|(index, _)| index).collect();
        running.iter().for_each(|&index| self.stop(index));
        // New memory does not mend what the driver has broken.
        running.retain(|&index| !self.device.has_fault(index));
        self.memory = Arc::new(memory);
        // One that cannot go on is refused; the others do.
        let mut result = Ok(());
        for index in running {
            result = result.and(self.start(index));
        }
        result
    }

    fn set_fd(&mut self, index: u8, file: Option<File>, err: bool) -> Result<()> {
        let index = match self.vring(index.into()) {
            Ok(index) => index,
            Err(error) => {
                self.around.disposal.close(file);
                return Err(error);
            }
        };
        let call = match file.map(CallFd::new).transpose() {
            Ok(fd) => fd.map(|fd| Call::new(fd, self.around.alarm.clone())),
            Err(refused) => return self.refuse_file(Some(index), if err { "err" } else { "call" }, refused),
        };
        self.device.set_fd(index, call, err);
        Ok(())
    }

    /// Back to how a connection begins, but for what is not the driver's: memory and the descriptors for notifications. QEMU
    /// resets the device when the guest does, and counts on those.
    fn reset(&mut self) {
        for index in 0..self.vrings.len() {
            self.stop(index);
            if let Some(vring) = self.vrings.get_mut(index) {
                *vring = Vring::default();
            }
        }
        self.acked = 0;
        self.device.reset();
    }
}

impl<D: Device> Session<D> {
    /// The driver begins anew: where its rings were means nothing any more.
    fn end_all_notes(&self) {
        (0..self.vrings.len()).for_each(|index| self.end_notes(index));
    }

    /// The same for a vring; or the frontend knows where it is.
    fn end_notes(&self, index: usize) {
        self.device.end_notes(index);
        self.inflight.iter().for_each(|region| region.end(index));
    }
}

impl<D: Device> Drop for Session<D> {
    fn drop(&mut self) {
        self.reset();
        for index in 0..self.vrings.len() {
            self.device.set_fd(index, None, false);
            self.device.set_fd(index, None, true);
        }
    }
}

impl<D: Device> VhostUserBackendReqHandlerMut for Session<D> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        self.end_all_notes();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        self.end_all_notes();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.device.offer() | bits::PROTOCOL_FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !(self.device.offer() | bits::PROTOCOL_FEATURES);
        if unknown != 0 {
            return self.refuse(format_args!("features {unknown:#x} acknowledged that were not offered"));
        }
        // Rings run by what was acknowledged when they started. QEMU says the same again when a migration begins and ends; what
        // differs has to come while they are stopped.
        if features != self.acked
            && let Some(index) = (0..self.vrings.len()).find(|&index| self.is_running(index))
        {
            let before = self.acked;
            return self.refuse(format_args!(
                "features {features:#x} while queue {index} runs with {before:#x}; expected after GET_VRING_BASE"
            ));
        }
        self.acked = features;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<UserAddress>>> {
        if regions.len() != files.len() {
            let (regions, count) = (regions.len(), files.len());
            self.around.disposal.close(files);
            return self.refuse(format_args!("{regions} memory regions with {count} descriptors"));
        }
        // All of them first: after one that is refused nothing is done with the others but closing them.
        let mut memory = Vec::new();
        let mut files = files.into_iter();
        for file in files.by_ref() {
            match MemoryFile::new(file) {
                Ok(file) => memory.push(file),
                Err(refused) => {
                    self.around.disposal.close(files);
                    return self.refuse_file(None, "memory", refused);
                }
            }
        }
        let mut table = Table::default();
        for (region, file) in regions.iter().zip(&memory) {
            // The structure is packed: fields are copied out.
            let at = [region.guest_phys_addr, region.memory_size, region.user_addr, region.mmap_offset];
            table = self.add(&table, file, at)?;
        }
        self.replace_memory(table)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> Result<()> {
        let index = self.vring(index)?;
        let packed = self.acked & bits::RING_PACKED != 0;
        if size == 0 || size > ringroad_ring::MAX_SIZE || !packed && !size.is_power_of_two() {
            return self.refuse_vring(index, SetupError::Size { size, packed });
        }
        let before = self.vrings.get(index).map_or(0, |vring| vring.size);
        if size != before && self.is_running(index) {
            let why = format!("size {size} while it runs with {before}; expected after GET_VRING_BASE");
            return self.refuse_vring(index, why);
        }
        if let Some(vring) = self.vrings.get_mut(index) {
            vring.size = size;
        }
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let index = self.vring(index)?;
        let addresses = Addresses { descriptor, driver: available, device: used };
        self.change(index, |vring| vring.addresses = Some(addresses))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let index = self.vring(index)?;
        self.change(index, |vring| vring.base = base)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let vring = self.vring(index).inspect_err(|_| {
            // Its only answer is a base; without one the frontend would wait for ever.
            self.refused = false;
        })?;
        self.stop(vring);
        let (base, ran) = self.vrings.get_mut(vring).map_or((0, false), |vring| {
            // The ring stays stopped until there is a new kick.
            vring.kick = None;
            (vring.base, vring.ran)
        });
        // DPDK's driver asks a device that has come back at once; that knows nothing yet but what its predecessor has noted.
        if ran {
            self.end_notes(vring);
        }
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = match self.vring(index.into()) {
            Ok(index) => index,
            Err(error) => {
                self.around.disposal.close(fd);
                return Err(error);
            }
        };
        match fd.map(Kick::new).transpose() {
            Ok(kick) => self.change(index, |vring| vring.kick = Some(kick)),
            Err(refused) => {
                // As if there was none: the old one is not what the frontend counts on.
                self.stop(index);
                if let Some(vring) = self.vrings.get_mut(index) {
                    vring.kick = None;
                }
                self.refuse_file(Some(index), "kick", refused)
            }
        }
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.set_fd(index, fd, false)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.set_fd(index, fd, true)
    }

    fn get_protocol_features(&mut self) -> Result<Protocol> {
        Ok(self.protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.protocol_features().bits();
        if unknown != 0 {
            return self.refuse(format_args!("protocol features {unknown:#x} acknowledged that were not offered"));
        }
        self.protocol = Protocol::from_bits_truncate(features);
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.device.queue_num())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let index = self.vring(index)?;
        if let Some(vring) = self.vrings.get_mut(index) {
            vring.enabled = Some(enable);
        }
        if !enable {
            self.stop(index);
            return Ok(());
        }
        self.start(index)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        // Frontends ask for the space that they know of; what we do not have reads as zeros.
        let bytes = self.device.config();
        let at = |index: u32| bytes.get(index as usize).copied().unwrap_or(0);
        Ok((0..size).map(|index| at(offset.saturating_add(index))).collect())
    }

    fn set_config(&mut self, _offset: u32, _buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        self.refuse("the configuration space is read-only")
    }

    fn set_backend_req_fd(&mut self, backend: Backend) {
        self.backend = Some(backend);
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        self.refuse("not a GPU")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        self.refuse("there are no shared objects")
    }

    fn get_inflight_fd(&mut self, inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        match InflightRegion::make(inflight, self.vrings.len()) {
            Ok((region, message, file)) => {
                self.inflight = Some(region);
                Ok((message, file))
            }
            Err(why) => {
                // Its only answer is a region: without one the frontend would wait for ever, so that the connection ends.
                say!(self.around.lines, Error, "{}: {why}", self.device.name());
                Err(Error::InvalidParam)
            }
        }
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let file = match MemoryFile::new(file) {
            Ok(file) => file,
            Err(refused) => return self.refuse_file(None, "inflight", refused),
        };
        match InflightRegion::take(inflight, &file, self.vrings.len()) {
            Ok(region) => {
                self.inflight = Some(region);
                Ok(())
            }
            Err(why) => self.refuse(why),
        }
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(self.around.limits.lock().regions.min(ringroad_mem::SLOTS) as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<UserAddress>> {
        let file = match MemoryFile::new(file) {
            Ok(file) => file,
            Err(refused) => return self.refuse_file(None, "memory", refused),
        };
        let memory = self.memory.clone();
        let at = [region.guest_phys_addr, region.memory_size, region.user_addr, region.mmap_offset];
        let table = self.add(&memory, &file, at)?;
        drop(memory);
        self.replace_memory(table).map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (len, guest, user) = (region.memory_size, region.guest_phys_addr, region.user_addr);
        match self.memory.without(guest, user, len) {
            Ok(table) => self.replace_memory(table),
            Err(error) => self.refuse(error),
        }
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        self.refuse("DEVICE_STATE was not offered")
    }

    fn check_device_state(&mut self) -> Result<()> {
        self.refuse("DEVICE_STATE was not offered")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        self.refuse("SHMEM was not offered")
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        self.refuse("LOG_SHMFD was not offered")
    }
}

/// Whether an error of the `vhost` crate is more than the end of a connection.
pub(crate) fn is_violation(error: &Error) -> bool {
    !matches!(error, Error::Disconnected | Error::PartialMessage | Error::SocketBroken(_))
}

/// How the log tells an error of the `vhost` crate.
pub(crate) fn explain(error: &Error) -> String {
    match error {
        Error::Disconnected => "the frontend has disconnected".into(),
        Error::PartialMessage => "the frontend has disconnected in the middle of a message".into(),
        Error::InvalidMessage => "a message that is malformed, or of a kind that was not offered".into(),
        Error::IncorrectFds => "a message with the wrong number of file descriptors".into(),
        Error::SocketBroken(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            "the frontend has disconnected".into()
        }
        other => other.to_string(),
    }
}
