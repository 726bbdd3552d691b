//! What each message of a frontend does. Called by the `vhost` crate, which parses them. Every message is validated here; an
//! invalid one is refused with a log line.

use super::Session;
use crate::{
    socket::{Call, CallFd, ChannelFd, Kick, MemoryFile, say},
    vhost_user::{VhostDevice, inflight::InflightRegion, quirks::Early},
};
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

impl<D: VhostDevice> Session<D> {
    /// Like `vring`, for a message with a descriptor, which is closed by the session's disposal if the message is refused.
    fn vring_with_file(&mut self, index: u8, file: Option<File>) -> Result<(usize, Option<File>)> {
        match self.vring(index.into()) {
            Ok(index) => Ok((index, file)),
            Err(error) => {
                self.context.disposal.close(file);
                Err(error)
            }
        }
    }

    /// Sets the call descriptor of a vring, or its err descriptor.
    fn set_fd(&mut self, index: u8, file: Option<File>, err: bool) -> Result<()> {
        let (index, file) = self.vring_with_file(index, file)?;
        let call = match file.map(CallFd::new).transpose() {
            Ok(fd) => fd.map(|fd| Call::new(fd, &self.context.peer)),
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
        let (index, fd) = self.vring_with_file(index, fd)?;
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
        // A frontend whose driver reads the configuration space and uses the control queue (User-Mode Linux) takes the reply as the
        // number of vrings; QEMU and DPDK, which serve both themselves, as the number of pairs.
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
                // Queues that run move to the new region. One that cannot is refused; the frontend waits for a region all the same.
                let (_, moved) = self.while_stopped(|session| session.use_inflight(region));
                if moved.is_err() {
                    self.refused = false;
                }
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
                if self.inflight.as_ref().is_some_and(|before| !before.is_same(&region)) {
                    if let Some(index) = (0..self.vrings.len()).find(|&index| self.is_running(index)) {
                        return self.refuse(format_args!(
                            "another inflight region while queue {index} runs, expected GET_VRING_BASE first"
                        ));
                    }
                    // Those that a driver's fault has stopped still have the previous one.
                    (0..self.vrings.len()).for_each(|index| self.stop(index));
                }
                self.use_inflight(region);
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
