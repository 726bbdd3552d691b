//! One connection of a frontend: what it has told us so far, and the queues that run by it. Called by `server.rs` through
//! the `vhost` crate, message by message. Everything in here may be wrong; what is, is refused with a log line.

use super::{Call, Device, Ring};
use crate::sys;
use ringroad_mem::{Region, Table};
use ringroad_ring::{Addresses, SetupError, bits};
use std::{fs::File, io, os::fd::AsFd, sync::Arc};
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
    kick: Option<Option<File>>,
    /// `None`: it has not said; then PROTOCOL_FEATURES decide.
    enabled: Option<bool>,
    running: bool,
}

/// One connection.
pub(crate) struct Session<D: Device> {
    device: D,
    acked: u64,
    protocol: Protocol,
    memory: Arc<Table>,
    vrings: Vec<Vring>,
    /// The channel for requests of ours. There are none yet, but a frontend takes its end for the end of the device
    /// (User-Mode Linux removes it), so that it has to stay open.
    backend: Option<Backend>,
    /// The last message was refused, as the log says, but the connection can go on.
    pub(crate) refused: bool,
}

impl<D: Device> Session<D> {
    pub(crate) fn new(device: D) -> Session<D> {
        let vrings = (0..device.vrings()).map(|_| Vring::default()).collect();
        let protocol = Protocol::empty();
        Session { device, acked: 0, protocol, memory: Arc::default(), vrings, backend: None, refused: false }
    }

    fn protocol_features(&self) -> Protocol {
        let always = Protocol::REPLY_ACK
            | Protocol::CONFIG
            | Protocol::CONFIGURE_MEM_SLOTS
            | Protocol::BACKEND_REQ
            | Protocol::RESET_DEVICE;
        // With a single pair nobody need ask.
        if self.device.queue_num() > 1 { always | Protocol::MQ } else { always }
    }

    /// Whether a message that could not be obeyed was answered with an error, so that the frontend knows.
    pub(crate) fn can_refuse(&self) -> bool {
        self.protocol.contains(Protocol::REPLY_ACK)
    }

    /// Protocol features are negotiated, features are not.
    pub(crate) fn is_early(&self) -> bool {
        !self.protocol.is_empty() && self.acked & bits::PROTOCOL_FEATURES == 0
    }

    fn refuse<T>(&mut self, why: impl std::fmt::Display) -> Result<T> {
        log::error!("{}: {why}; refused", self.device.name());
        self.device.count_fault(None);
        self.refused = true;
        Err(Error::InvalidParam)
    }

    /// The same for what concerns one vring, whose err descriptor tells it too.
    fn refuse_vring<T>(&mut self, index: usize, why: impl std::fmt::Display) -> Result<T> {
        log::error!("{} queue {index}: {why}; refused", self.device.name());
        self.device.count_fault(Some(index));
        self.refused = true;
        Err(Error::InvalidParam)
    }

    /// The frontend does not keep to the protocol: the connection cannot go on.
    pub(crate) fn violated(&mut self, why: impl std::fmt::Display) {
        log::error!("{}: {why}; disconnected", self.device.name());
        self.device.count_fault(None);
        (0..self.vrings.len()).for_each(|index| self.device.signal_err(index));
    }

    /// The vring with this index, or the error for a message about one that there is not.
    fn vring(&mut self, index: u32) -> Result<usize> {
        if (index as usize) < self.vrings.len() {
            return Ok(index as usize);
        }
        let count = self.vrings.len();
        self.refuse(format_args!("a message about vring {index}, expected 0 to {}", count - 1))
    }

    /// Starts a vring if all is there that it needs. If that fails it stays stopped until there is a new kick, so that
    /// the frontend can put it right message by message.
    fn start(&mut self, index: usize) -> Result<()> {
        let result = self.try_start(index);
        if result.is_err() {
            self.vrings[index].kick = None;
        }
        result
    }

    fn try_start(&mut self, index: usize) -> Result<()> {
        let vring = &self.vrings[index];
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
        match self.device.start(index, Ring { memory, acked, size, addresses, base }, kick) {
            Ok(base) => log::debug!("{}: queue {index} runs, {size} entries, base {base:#x}", self.device.name()),
            Err(why) => return self.refuse_vring(index, why),
        }
        self.vrings[index].running = true;
        Ok(())
    }

    /// Stops a vring; it can go on where it was.
    fn stop(&mut self, index: usize) {
        let vring = &mut self.vrings[index];
        if !std::mem::take(&mut vring.running) {
            return;
        }
        vring.base = self.device.stop(index, vring.kick.as_ref().and_then(Option::as_ref));
        log::debug!("{}: queue {index} stopped, base {:#x}", self.device.name(), self.vrings[index].base);
    }

    /// Puts new memory in the place of the old one. Running queues go on in it where they were; the old one is unmapped
    /// before this returns.
    fn replace_memory(&mut self, memory: Table) -> Result<()> {
        let mut running: Vec<usize> = (0..self.vrings.len()).filter(|&index| self.vrings[index].running).collect();
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
        let index = self.vring(index.into())?;
        if let Some(file) = &file
            && let Err(error) = sys::set_nonblocking(file.as_fd())
        {
            return self.refuse_vring(index, error);
        }
        self.device.set_fd(index, file.map(Call::new), err);
        Ok(())
    }

    /// Back to how a connection begins, but for what is not the driver's: memory and the descriptors for notifications. QEMU
    /// resets the device when the guest does, and counts on those.
    fn reset(&mut self) {
        for index in 0..self.vrings.len() {
            self.stop(index);
            self.vrings[index] = Vring::default();
        }
        self.acked = 0;
        self.device.reset();
    }
}

impl<D: Device> Session<D> {
    /// The driver begins anew: where its rings were means nothing any more.
    fn end_notes(&self) {
        (0..self.vrings.len()).for_each(|index| self.device.end_notes(index));
    }
}

impl<D: Device> Drop for Session<D> {
    fn drop(&mut self) {
        self.reset();
        for index in 0..self.vrings.len() {
            let _ = self.set_fd(index as u8, None, false);
            let _ = self.set_fd(index as u8, None, true);
        }
    }
}

impl<D: Device> VhostUserBackendReqHandlerMut for Session<D> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        self.end_notes();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        self.end_notes();
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
        self.acked = features;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<UserAddress>>> {
        let mut table = Table::default();
        for (region, file) in regions.iter().zip(&files) {
            // The structure is packed: fields are copied out.
            let (offset, len, guest, user) =
                (region.mmap_offset, region.memory_size, region.guest_phys_addr, region.user_addr);
            match Region::map(file, offset, len, guest, user).and_then(|region| table.with(region)) {
                Ok(more) => table = more,
                Err(error) => return self.refuse(error),
            }
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
        self.vrings[index].size = size;
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
        self.stop(index);
        self.vrings[index].addresses = Some(Addresses { descriptor, driver: available, device: used });
        self.start(index)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let index = self.vring(index)?;
        self.stop(index);
        self.vrings[index].base = base;
        self.start(index)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let vring = self.vring(index).inspect_err(|_| {
            // Its only answer is a base; without one the frontend would wait for ever.
            self.refused = false;
        })?;
        self.stop(vring);
        self.device.end_notes(vring);
        // The ring stays stopped until there is a new kick.
        self.vrings[vring].kick = None;
        Ok(VhostUserVringState::new(index, self.vrings[vring].base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = self.vring(index.into())?;
        self.stop(index);
        self.vrings[index].kick = Some(fd);
        self.start(index)
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
        self.vrings[index].enabled = Some(enable);
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

    fn get_inflight_fd(&mut self, _inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        self.refuse("INFLIGHT_SHMFD was not offered")
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        self.refuse("INFLIGHT_SHMFD was not offered")
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(ringroad_mem::SLOTS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<UserAddress>> {
        let (offset, len, guest, user) =
            (region.mmap_offset, region.memory_size, region.guest_phys_addr, region.user_addr);
        match Region::map(&file, offset, len, guest, user).and_then(|region| self.memory.with(region)) {
            Ok(table) => self.replace_memory(table).map(|()| None),
            Err(error) => self.refuse(error),
        }
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
