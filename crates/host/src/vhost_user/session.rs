//! One connection of a frontend: the state that its messages set up, and the vrings that it starts and stops. `messages` has what
//! each message does; `server.rs` reads them.

mod messages;

use super::{
    Ring, VhostDevice, Vring,
    inflight::{InflightRegion, LastUsed},
};
use crate::{
    Quota,
    notes::Notes,
    socket::{ChannelFd, Disposal, Kick, Limits, Lines, MemoryFile, Peer, Refused, say},
};
use parking_lot::Mutex;
use ringroad_mem::Table;
use ringroad_ring::{Addresses, bits};
use std::sync::Arc;
use vhost::vhost_user::{Error, Result, VhostUserProtocolFeatures as Protocol};

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
    pub peer: Arc<Peer>,
    /// Closes refused descriptors.
    pub disposal: Disposal,
    /// Where the positions of the device's rings are recorded.
    pub notes: Notes,
    /// The inflight region that was used last.
    pub inflight: LastUsed,
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
        self.while_stopped(|session| session.memory = Arc::new(memory)).1
    }

    /// Changes what queues use. Those that run resume where they were; also returns whether all could.
    fn while_stopped<T>(&mut self, change: impl FnOnce(&mut Self) -> T) -> (T, Result<()>) {
        let vrings = self.vrings.iter().enumerate();
        let mut running: Vec<usize> = vrings.filter(|(_, vring)| vring.running).map(|(index, _)| index).collect();
        running.iter().for_each(|&index| self.stop(index));
        // A vring that a driver's fault has stopped stays stopped.
        running.retain(|&index| !self.has_fault(index));
        let changed = change(self);
        // A vring that cannot resume is refused; the others resume.
        let mut result = Ok(());
        for index in running {
            result = result.and(self.start(index));
        }
        (changed, result)
    }

    /// Tracks queues in this region from their next start on.
    fn use_inflight(&mut self, region: InflightRegion) {
        self.context.inflight.replace(&region);
        self.inflight = Some(region);
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
