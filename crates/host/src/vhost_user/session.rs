//! One connection of a frontend: the state that its messages set up, and the vrings that run by it. `server.rs` calls it
//! through the `vhost` crate, message by message. Every message is validated; an invalid one is refused with a log line.

use super::{Ring, VhostDevice, Vring, inflight::InflightRegion, quirks::Early};
use crate::{
    Quota,
    notes::Notes,
    socket::{Alarm, Call, CallFd, ChannelFd, Disposal, Kick, Limits, Lines, MemoryFile, Refused, say},
};
use parking_lot::Mutex;
use ringroad_mem::Table;
use ringroad_ring::{Addresses, SetupError, bits};
use std::{fs::File, sync::Arc};
use vhost::vhost_user::{
    Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures as Protocol,
    message::{
        VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
        VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion,
        VhostUserVringAddrFlags, VhostUserVringState,
    },
};

/// An address in the frontend's address space, used in replies for postcopy migration only.
type UserAddress = u64;

/// The state of a vring, as the frontend has set it up.
#[derive(Default)]
struct Setup {
    size: u32,
    addresses: Option<Addresses>,
    base: u32,
    /// `Some(None)`: the frontend does not kick, the vring is polled.
    kick: Option<Option<Kick>>,
    /// `None`: not set; then it is enabled unless PROTOCOL_FEATURES was negotiated.
    enabled: Option<bool>,
    running: bool,
    /// It has run on this connection, so its position is known and any recorded position is obsolete.
    ran: bool,
}

/// What a session shares with the thread that it runs in.
#[derive(Clone)]
pub(crate) struct SessionContext {
    /// May change while the session runs.
    pub limits: Arc<Mutex<Limits>>,
    pub lines: Lines,
    /// Raised when a notification to the frontend blocks.
    pub alarm: Arc<Alarm>,
    /// Closes refused descriptors.
    pub disposal: Disposal,
    /// Where the positions of the device's rings are recorded.
    pub notes: Notes,
}

/// One connection.
pub(crate) struct Session<D: VhostDevice> {
    device: D,
    context: SessionContext,
    /// How many more messages may be refused.
    refusals: Quota,
    acked: u64,
    protocol: Protocol,
    memory: Arc<Table>,
    vrings: Vec<Setup>,
    inflight: Option<InflightRegion>,
    /// The channel for requests from the back end. It stays open even if none are sent, as User-Mode Linux takes its end for the
    /// removal of the device.
    backend: Option<Arc<ChannelFd>>,
    /// The last message was refused and logged, and the connection can go on.
    pub(crate) refused: bool,
    /// More messages were refused than the limit allows.
    pub(crate) exhausted: bool,
}

impl<D: VhostDevice> Session<D> {
    pub(crate) fn new(device: D, context: SessionContext) -> Session<D> {
        let vrings = device.vrings().iter().map(|_| Setup::default()).collect();
        let refusals = context.limits.lock().refusals.quota();
        Session {
            device,
            context,
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
        // A frontend need not ask for a single pair.
        if self.device.queue_num() > 1 { always | Protocol::MQ } else { always }
    }

    fn refuse<T>(&mut self, why: impl std::fmt::Display) -> Result<T> {
        say!(self.context.lines, Error, "{}: {why}; refused", self.device.name());
        self.device.count_fault(None);
        self.count_refusal()
    }

    /// Like `refuse`, for one vring, whose err descriptor is signalled.
    fn refuse_vring<T>(&mut self, index: usize, why: impl std::fmt::Display) -> Result<T> {
        say!(self.context.lines, Error, "{} queue {index}: {why}; refused", self.device.name());
        self.device.count_fault(Some(index));
        self.device.vrings().get(index).inspect(|vring| vring.signal_err());
        self.count_refusal()
    }

    fn count_refusal<T>(&mut self) -> Result<T> {
        self.refused = true;
        self.exhausted |= self.refusals.take().is_none();
        Err(Error::InvalidParam)
    }

    /// Like `refuse`, for a descriptor, which is handed to the [`Disposal`].
    fn refuse_file<T>(&mut self, index: Option<usize>, what: &str, refused: Refused) -> Result<T> {
        let why = format!("the {what} descriptor {refused}");
        self.context.disposal.close([refused.file]);
        match index {
            Some(index) => self.refuse_vring(index, why),
            None => self.refuse(why),
        }
    }

    /// Logs a protocol violation, after which the connection cannot go on.
    pub(crate) fn violated(&mut self, why: impl std::fmt::Display) {
        say!(self.context.lines, Error, "{}: {why}; disconnected", self.device.name());
        self.device.count_fault(None);
        self.device.vrings().iter().for_each(Vring::signal_err);
    }

    /// Returns the index, or refuses the message if there is no such vring.
    fn vring(&mut self, index: u32) -> Result<usize> {
        if (index as usize) < self.vrings.len() {
            return Ok(index as usize);
        }
        let last = self.vrings.len().saturating_sub(1);
        self.refuse(format_args!("a message for vring {index}, expected 0 to {last}"))
    }

    /// Starts a vring once everything that it needs is set. If that fails, it stays stopped until the next kick descriptor,
    /// so that the frontend can correct its setup message by message.
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
        let kick = kick.clone();
        if self.acked & bits::VERSION_1 == 0 {
            let why = "expected a driver that acknowledges VIRTIO_F_VERSION_1 (virtio 1.0), found a legacy one";
            return self.refuse_vring(index, why);
        }
        let (memory, acked, size, base) = (self.memory.clone(), self.acked, vring.size, vring.base);
        let region = self.inflight.as_mut().map(|region| region.start(index, acked & bits::RING_PACKED != 0));
        let inflight = match region.transpose() {
            Ok(part) => part.unwrap_or_default(),
            Err(why) => return self.refuse_vring(index, why),
        };
        let Some(shared) = self.device.vrings().get(index).cloned() else { return Ok(()) };
        shared.begin(base);
        let journal = self.context.notes.journal(index);
        match self.device.start(index, Ring { memory, acked, size, addresses, base, journal, inflight, kick }) {
            Ok(base) => log::debug!("{} queue {index}: started, {size} entries, base {base:#x}", self.device.name()),
            Err(why) => return self.refuse_vring(index, why),
        }
        if let Some(vring) = self.vrings.get_mut(index) {
            (vring.running, vring.ran) = (true, true);
        }
        // A device that died between returning buffers and notifying may owe the driver a notification.
        shared.notify();
        Ok(())
    }

    /// Stops a vring and keeps the base at which it can resume.
    fn stop(&mut self, index: usize) {
        let Some(vring) = self.vrings.get_mut(index) else { return };
        if !std::mem::take(&mut vring.running) {
            return;
        }
        vring.base = self.device.stop(index);
        log::debug!("{} queue {index}: stopped, base {:#x}", self.device.name(), vring.base);
    }

    /// Stops a vring, changes its setup, and starts it again if that is complete.
    fn change(&mut self, index: usize, change: impl FnOnce(&mut Setup)) -> Result<()> {
        self.stop(index);
        self.vrings.get_mut(index).map(change);
        self.start(index)
    }

    /// Returns whether a vring is in use, so that its setup cannot change.
    fn is_running(&self, index: usize) -> bool {
        self.vrings.get(index).is_some_and(|vring| vring.running) && !self.has_fault(index)
    }

    /// Returns whether a fault of its driver has stopped a vring.
    fn has_fault(&self, index: usize) -> bool {
        self.device.vrings().get(index).is_some_and(Vring::has_fault)
    }

    /// Returns a table with one more region, within the limits.
    fn add(&mut self, table: &Table, file: &MemoryFile, [guest, len, user, offset]: [u64; 4]) -> Result<Table> {
        let Limits { mapped, regions, .. } = *self.context.limits.lock();
        if table.regions().len() >= regions {
            return self.refuse(format_args!("more than {regions} memory regions, the limit (`limits.regions`)"));
        }
        let there: u64 = table.regions().iter().map(|region| region.mapped() as u64).sum();
        let too_much = |len: u64| {
            let more = there.saturating_add(len) > mapped;
            more.then(|| {
                format!(
                    "a memory region of {len:#x} bytes in addition to {there:#x}, expected {mapped:#x} at most in all \
                     (`limits.mapped`)"
                )
            })
        };
        // Checked before mapping, and again with the mapped size, which is rounded up to pages of up to a gigabyte.
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

    /// Replaces the guest memory. Running queues resume in it where they were; the old memory is unmapped before this
    /// returns.
    fn replace_memory(&mut self, memory: Table) -> Result<()> {
        let vrings = self.vrings.iter().enumerate();
        let mut running: Vec<usize> = vrings.filter(|(_, vring)| vring.running).map(|(index, _)| index).collect();
        running.iter().for_each(|&index| self.stop(index));
        // A vring that a driver's fault has stopped stays stopped.
        running.retain(|&index| !self.has_fault(index));
        self.memory = Arc::new(memory);
        // A vring that cannot resume is refused; the others resume.
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
                self.context.disposal.close(file);
                return Err(error);
            }
        };
        let call = match file.map(CallFd::new).transpose() {
            Ok(fd) => fd.map(|fd| Call::new(fd, self.context.alarm.clone())),
            Err(refused) => return self.refuse_file(Some(index), if err { "err" } else { "call" }, refused),
        };
        if let Some(vring) = self.device.vrings().get(index) {
            vring.set_fd(call, err);
            // A notification to the previous descriptor may have been missed.
            if !err && self.vrings.get(index).is_some_and(|setup| setup.running) {
                vring.notify();
            }
        }
        Ok(())
    }

    /// Returns to the state of a new connection, but keeps memory and notification descriptors, which belong to the frontend.
    /// QEMU resets the device when the guest does, and relies on that.
    fn reset(&mut self) {
        for index in 0..self.vrings.len() {
            self.stop(index);
            if let Some(vring) = self.vrings.get_mut(index) {
                *vring = Setup::default();
            }
        }
        self.acked = 0;
        self.device.reset();
    }
}

impl<D: VhostDevice> Session<D> {
    /// Clears all recorded ring positions: the driver starts over.
    fn end_all_notes(&self) {
        (0..self.vrings.len()).for_each(|index| self.end_notes(index));
    }

    /// Clears the recorded position of a vring: the driver starts over, or the frontend knows the position.
    fn end_notes(&self, index: usize) {
        self.context.notes.journal(index).end();
        self.inflight.iter().for_each(|region| region.end(index));
    }
}

impl<D: VhostDevice> Early for Session<D> {
    /// Once protocol features are negotiated, or, before SET_FEATURES, to disable a vring that does not run yet.
    fn is_early(&self, enable: bool) -> bool {
        self.acked & bits::PROTOCOL_FEATURES == 0 && (!self.protocol.is_empty() || self.acked == 0 && !enable)
    }

    fn enable_early(&mut self, vring: u32, enable: bool) -> bool {
        let refused = self.set_vring_enable(vring, enable).is_err();
        self.refused = false;
        refused
    }

    fn takes_channel(&self) -> bool {
        self.protocol.contains(Protocol::BACKEND_REQ)
    }

    fn set_channel(&mut self, file: Option<File>) -> bool {
        let result = match file.map(ChannelFd::new) {
            Some(Ok(channel)) => {
                self.backend = Some(Arc::new(channel));
                if let Some(channel) = self.device.backend_channel()
                    && self.protocol.contains(Protocol::CONFIG)
                {
                    channel.set(self.backend.clone());
                }
                Ok(())
            }
            Some(Err(refused)) => self.refuse_file(None, "back-end request", refused),
            None => self.refuse("SET_BACKEND_REQ_FD without a descriptor, expected a Unix stream socket"),
        };
        self.refused = false;
        result.is_err()
    }

    fn can_refuse(&self) -> bool {
        self.protocol.contains(Protocol::REPLY_ACK)
    }
}

impl<D: VhostDevice> Drop for Session<D> {
    fn drop(&mut self) {
        self.reset();
        self.device.backend_channel().inspect(|channel| channel.set(None));
        for vring in self.device.vrings() {
            vring.set_fd(None, false);
            vring.set_fd(None, true);
        }
    }
}

impl<D: VhostDevice> VhostUserBackendReqHandlerMut for Session<D> {
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
            return self.refuse(format_args!("features {unknown:#x} acknowledged but not offered"));
        }
        // Rings keep the features that were acknowledged when they started. QEMU repeats the same ones when a migration
        // begins and ends; other ones require stopped rings.
        if features != self.acked
            && let Some(index) = (0..self.vrings.len()).find(|&index| self.is_running(index))
        {
            let before = self.acked;
            return self.refuse(format_args!(
                "features {features:#x} while queue {index} runs with {before:#x}, expected GET_VRING_BASE first"
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
            self.context.disposal.close(files);
            return self
                .refuse(format_args!("{regions} memory regions with {count} descriptors, expected one for each"));
        }
        // All descriptors are checked first: if one is refused, the others are only closed.
        let mut memory = Vec::new();
        let mut files = files.into_iter();
        for file in files.by_ref() {
            match MemoryFile::new(file) {
                Ok(file) => memory.push(file),
                Err(refused) => {
                    self.context.disposal.close(files);
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
            let why = format!("size {size} while it runs with {before}, expected GET_VRING_BASE first");
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
            // The only reply is a base; without one the frontend would wait forever, so the connection ends.
            self.refused = false;
        })?;
        self.stop(vring);
        let (base, ran) = self.vrings.get_mut(vring).map_or((0, false), |vring| {
            // The ring stays stopped until the next kick descriptor.
            vring.kick = None;
            (vring.base, vring.ran)
        });
        // DPDK's driver asks a device that has reconnected right away, when the only known position is the recorded one: keep
        // that.
        if ran {
            self.end_notes(vring);
        }
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = match self.vring(index.into()) {
            Ok(index) => index,
            Err(error) => {
                self.context.disposal.close(fd);
                return Err(error);
            }
        };
        match fd.map(Kick::new).transpose() {
            Ok(kick) => self.change(index, |vring| vring.kick = Some(kick)),
            Err(refused) => {
                // As without one: the frontend no longer uses the old descriptor.
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
            return self.refuse(format_args!("protocol features {unknown:#x} acknowledged but not offered"));
        }
        self.protocol = Protocol::from_bits_truncate(features);
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        // Who reads the configuration space and the control queue itself (User-Mode Linux) takes the reply as the number of vrings
        // that there may be; QEMU and DPDK, whose drivers see neither, as pairs of them.
        let counts_vrings = self.protocol.contains(Protocol::CONFIG);
        Ok(if counts_vrings { self.device.vrings().len() as u64 } else { self.device.queue_num() })
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
        // Frontends read the whole structure that they know; fields beyond the device's read as zeros.
        let bytes = self.device.config();
        let at = |index: u32| bytes.get(index as usize).copied().unwrap_or(0);
        Ok((0..size).map(|index| at(offset.saturating_add(index))).collect())
    }

    fn set_config(&mut self, _offset: u32, _buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        self.refuse("SET_CONFIG: the configuration space is read-only")
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        self.refuse("GPU_SET_SOCKET: expected only at a GPU device")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        self.refuse("GET_SHARED_OBJECT: the device has no shared objects")
    }

    fn get_inflight_fd(&mut self, inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        match InflightRegion::make(inflight, self.vrings.len()) {
            Ok((region, message, file)) => {
                self.inflight = Some(region);
                Ok((message, file))
            }
            Err(why) => {
                // The only reply is a region: without one the frontend would wait forever, so the connection ends.
                say!(self.context.lines, Error, "{}: GET_INFLIGHT_FD: {why}", self.device.name());
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
        Ok(self.context.limits.lock().regions.min(ringroad_mem::SLOTS) as u64)
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
        self.refuse("SET_DEVICE_STATE_FD: DEVICE_STATE was not offered")
    }

    fn check_device_state(&mut self) -> Result<()> {
        self.refuse("CHECK_DEVICE_STATE: DEVICE_STATE was not offered")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        self.refuse("GET_SHMEM_CONFIG: SHMEM was not offered")
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        self.refuse("SET_LOG_BASE: LOG_SHMFD was not offered")
    }
}
