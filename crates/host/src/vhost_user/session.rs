//! One connection of a frontend: what it has told us so far, and the queues that run by it. Called by `server.rs` through
//! the `vhost` crate, message by message. Everything in here may be wrong; what is, is refused with a log line.

use super::port::{Slot, VhostPort};
use crate::{gate::Gate, port::Kind, sys, worker::PortHandle};
use ringroad_mem::{Region, Table};
use ringroad_net::{Config, Counters, Features, RxQueue, TxQueue, bits};
use ringroad_ring::{Addresses, SetupError, Tuning};
use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd},
    sync::{Arc, atomic::Ordering},
};
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
pub(crate) struct Session {
    handle: Arc<PortHandle>,
    offer: Features,
    config: Config,
    tuning: Tuning,
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

/// What a port of so many queue pairs offers.
fn protocol_features(queue_pairs: u16) -> Protocol {
    let always = Protocol::REPLY_ACK
        | Protocol::CONFIG
        | Protocol::CONFIGURE_MEM_SLOTS
        | Protocol::BACKEND_REQ
        | Protocol::RESET_DEVICE;
    // GET_QUEUE_NUM counts pairs for QEMU and DPDK but vrings for User-Mode Linux, which gives up when it is told 1. With
    // a single pair nobody need ask.
    if queue_pairs > 1 { always | Protocol::MQ } else { always }
}

impl Session {
    pub(crate) fn new(handle: Arc<PortHandle>, offer: Features, config: Config, tuning: Tuning) -> Session {
        let vrings = (0..2 * config.queue_pairs).map(|_| Vring::default()).collect();
        let protocol = Protocol::empty();
        Session {
            handle,
            offer,
            config,
            tuning,
            acked: 0,
            protocol,
            memory: Arc::default(),
            vrings,
            backend: None,
            refused: false,
        }
    }

    fn port(&self) -> &VhostPort {
        match &self.handle.port().kind {
            Kind::Vhost(port) => port,
            Kind::Tap(_) => unreachable!("a session is made for a vhost-user port"),
        }
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
        log::error!("port {}: {why}; refused", self.port().name());
        self.port().count_fault(None);
        self.refused = true;
        Err(Error::InvalidParam)
    }

    /// The same for what concerns one vring, whose err descriptor tells it too.
    fn refuse_vring<T>(&mut self, index: usize, why: impl std::fmt::Display) -> Result<T> {
        log::error!("port {} queue {index}: {why}; refused", self.port().name());
        self.port().count_fault(Some(index));
        self.refused = true;
        Err(Error::InvalidParam)
    }

    /// The frontend does not keep to the protocol: the connection cannot go on.
    pub(crate) fn violated(&mut self, why: impl std::fmt::Display) {
        log::error!("port {}: {why}; disconnected", self.port().name());
        self.port().count_fault(None);
        (0..self.vrings.len()).for_each(|index| self.port().signal_err(index));
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
        let tuning = self.tuning;
        let port = self.port();
        let pair = index / 2;
        let (started, base) = if index.is_multiple_of(2) {
            let counters = port.rx_counters[pair].clone();
            start_slot(
                &port.rx[pair],
                base,
                |base| {
                    let mut queue = RxQueue::start(memory, acked, size, addresses, base, counters)?;
                    queue.tune(tuning);
                    Ok(queue)
                },
                RxQueue::base,
            )
        } else {
            let counters: Arc<Counters> = port.tx_counters[pair].clone();
            port.tx[pair].enter().no_kick = kick.is_none();
            start_slot(
                &port.tx[pair],
                base,
                |base| {
                    let mut queue = TxQueue::start(memory, acked, size, addresses, base, counters)?;
                    queue.tune(tuning);
                    Ok(queue)
                },
                |queue| queue.base(),
            )
        };
        if let Err(error) = started {
            return self.refuse_vring(index, error);
        }
        if !index.is_multiple_of(2) {
            if let Some(kick) = kick
                && let Err(error) = self.handle.watch(pair as u16, kick.as_raw_fd())
            {
                stop_slot(&self.port().tx[pair], |queue| queue.base());
                let why = format!("cannot wait for its kick: {error}; expected an eventfd");
                return self.refuse_vring(index, why);
            }
            self.handle.wake(pair as u16);
        }
        log::debug!("port {}: queue {index} runs, {size} entries, base {base:#x}", self.port().name());
        self.vrings[index].running = true;
        self.count_pairs();
        Ok(())
    }

    /// Stops a vring; it can go on where it was.
    fn stop(&mut self, index: usize) {
        let vring = &mut self.vrings[index];
        if !std::mem::take(&mut vring.running) {
            return;
        }
        let pair = index / 2;
        if !index.is_multiple_of(2) {
            if let Some(Some(kick)) = &vring.kick {
                self.handle.unwatch(kick);
            }
            self.handle.rest(pair as u16);
        }
        let port = self.port();
        let base = if index.is_multiple_of(2) {
            stop_slot(&port.rx[pair], RxQueue::base)
        } else {
            stop_slot(&port.tx[pair], |queue| queue.base())
        };
        log::debug!("port {}: queue {index} stopped, base {base:#x}", self.port().name());
        self.vrings[index].base = base;
        self.count_pairs();
    }

    fn count_pairs(&self) {
        let pairs = self.vrings.chunks(2).take_while(|pair| pair[0].running).count();
        self.port().pairs_running.store(pairs, Ordering::Relaxed);
    }

    /// Puts new memory in the place of the old one. Running queues go on in it where they were; the old one is unmapped
    /// before this returns.
    fn replace_memory(&mut self, memory: Table) -> Result<()> {
        let mut running: Vec<usize> = (0..self.vrings.len()).filter(|&index| self.vrings[index].running).collect();
        running.iter().for_each(|&index| self.stop(index));
        // New memory does not mend what the driver has broken.
        running.retain(|&index| !self.port().has_fault(index));
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
        let port = self.port();
        if index.is_multiple_of(2) {
            set_slot_fd(&port.rx[index / 2], file, err);
        } else {
            set_slot_fd(&port.tx[index / 2], file, err);
        }
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
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.reset();
        for index in 0..self.vrings.len() {
            let _ = self.set_fd(index as u8, None, false);
            let _ = self.set_fd(index as u8, None, true);
        }
    }
}

fn start_slot<Q>(
    gate: &Gate<Slot<Q>>,
    base: u32,
    start: impl FnOnce(u32) -> std::result::Result<Q, SetupError>,
    started_at: impl Fn(&mut Q) -> u32,
) -> (std::result::Result<(), SetupError>, u32) {
    let mut slot = gate.enter();
    slot.base = base;
    match start(base) {
        Ok(mut queue) => {
            slot.base = started_at(&mut queue);
            slot.queue = Some(queue);
            slot.fault = None;
            slot.notify();
            (Ok(()), slot.base)
        }
        Err(error) => (Err(error), base),
    }
}

fn stop_slot<Q>(gate: &Gate<Slot<Q>>, base: impl Fn(&mut Q) -> u32) -> u32 {
    let mut slot = gate.enter();
    if let Some(mut queue) = slot.queue.take() {
        slot.base = base(&mut queue);
    }
    slot.base
}

fn set_slot_fd<Q>(gate: &Gate<Slot<Q>>, file: Option<File>, err: bool) {
    let mut slot = gate.enter();
    if err {
        slot.err = file;
        return;
    }
    slot.call = file;
    if slot.queue.is_some() {
        slot.notify();
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offer.bits() | bits::PROTOCOL_FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !(self.offer.bits() | bits::PROTOCOL_FEATURES);
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
        Ok(protocol_features(self.config.queue_pairs))
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !protocol_features(self.config.queue_pairs).bits();
        if unknown != 0 {
            return self.refuse(format_args!("protocol features {unknown:#x} acknowledged that were not offered"));
        }
        self.protocol = Protocol::from_bits_truncate(features);
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.config.queue_pairs.into())
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
        let bytes = self.config.bytes();
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
