//! The card behind a vfio-user socket: what an operating system's bus does with a PCI device, and access to its registers.

use crate::options::AccessKind;
use ringroad_e1000::{
    DEVICE, VENDOR,
    driver::{Bus, DriverError, ProbeError},
};
use ringroad_host::vfio_user::{Accesses, CONFIG_REGION, Client, ClientError, InterruptFd, InterruptKind};
use ringroad_mem::Region;
use std::{fs::File, io, mem, path::Path, time::Duration};

/// How long the device may take to appear, and to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Region of the registers.
const BAR: u32 = 0;
/// Positions in configuration space (PCI 2.3, 6.1): command register, first capability.
const COMMAND: u64 = 0x04;
const CAPABILITIES: u64 = 0x34;
/// I/O, memory, master.
const ENABLE: u16 = 7;
/// Most capabilities that there is room for.
const MOST: usize = 48;
/// Of the capability for message-signalled interrupts (6.8.1): its number, the positions of control and 64-bit address.
const MSI: u8 = 5;
const MSI_CONTROL: u64 = 2;
const MSI_ADDRESS: u64 = 4;
/// Any address: the message is an eventfd here.
const ADDRESS: u64 = 0xfee0_0000;

/// Why the driver cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum LemError {
    /// The device does not answer as it should.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// It is another device.
    #[error("expected an 82540EM, 8086:100e, found {vendor:04x}:{device:04x}")]
    Device {
        /// Its vendor.
        vendor: u16,
        /// Its number there.
        device: u16,
    },
    /// It has no message-signalled interrupt.
    #[error("the device has no capability for message-signalled interrupts, which this driver needs")]
    NoMsi,
    /// The driver found it unusable.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// The driver's memory.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The descriptor of the interrupt.
    #[error("the interrupt's descriptor: {0}")]
    Interrupt(io::Error),
}

/// A connection to the card.
#[derive(Debug)]
pub struct Card {
    client: Client,
    accesses: AccessKind,
    /// Signalled by the card.
    pub interrupt: InterruptFd,
    /// A register was accessed since the last look.
    accessed: bool,
    /// Why registers are gone.
    failure: Option<LemError>,
}

impl Card {
    /// Connects to the card, lets it access this memory, and enables its interrupt.
    pub fn connect(path: &Path, accesses: AccessKind, region: &Region, file: &File) -> Result<Card, LemError> {
        let mut client = Client::connect(path, PATIENCE)?;
        client.info()?;
        let [vendor, device] = [read(&mut client, 0)?, read(&mut client, 2)?].map(u16::from_le_bytes);
        if (vendor, device) != (VENDOR, DEVICE) {
            return Err(LemError::Device { vendor, device });
        }
        client.map(region, file, true)?;
        client.write(CONFIG_REGION, COMMAND, &ENABLE.to_le_bytes())?;
        let interrupt = InterruptFd::new().map_err(LemError::Interrupt)?;
        let msi = find_msi(&mut client)?;
        client.set_interrupts(InterruptKind::Msi, 0, &[std::os::fd::AsFd::as_fd(&interrupt)])?;
        client.write(CONFIG_REGION, msi + MSI_ADDRESS, &ADDRESS.to_le_bytes())?;
        client.write(CONFIG_REGION, msi + MSI_CONTROL, &1u16.to_le_bytes())?;
        Ok(Card { client, accesses, interrupt, accessed: false, failure: None })
    }

    /// Returns whether a register was accessed since the last call.
    #[inline]
    pub fn was_accessed(&mut self) -> bool {
        mem::take(&mut self.accessed)
    }

    /// Returns how often registers were accessed.
    pub fn accesses(&self) -> Accesses {
        self.client.accesses()
    }

    /// Fails if an access has failed since the last call.
    pub fn check(&mut self) -> Result<(), LemError> {
        self.failure.take().map_or(Ok(()), Err)
    }
}

impl Bus for Card {
    /// Of a card that is gone, all ones are read.
    fn read(&mut self, register: u32) -> u32 {
        let mut bytes = [0xff; 4];
        self.accessed = true;
        if let Err(error) = self.client.read(BAR, register.into(), &mut bytes) {
            self.failure.get_or_insert(error.into());
        }
        u32::from_le_bytes(bytes)
    }

    #[inline]
    fn write(&mut self, register: u32, value: u32) {
        let (offset, data) = (register.into(), value.to_le_bytes());
        self.accessed = true;
        let written = match self.accesses {
            AccessKind::Posted => self.client.post(BAR, offset, &data),
            AccessKind::Synchronous => self.client.write(BAR, offset, &data),
        };
        if let Err(error) = written {
            self.failure.get_or_insert(error.into());
        }
    }
}

fn read<const N: usize>(client: &mut Client, at: u64) -> Result<[u8; N], LemError> {
    let mut bytes = [0; N];
    client.read(CONFIG_REGION, at, &mut bytes)?;
    Ok(bytes)
}

/// Returns where the capability for message-signalled interrupts is.
fn find_msi(client: &mut Client) -> Result<u64, LemError> {
    let [mut at] = read(client, CAPABILITIES)?;
    for _ in 0..MOST {
        if at == 0 {
            break;
        }
        let [id, next] = read(client, at.into())?;
        if id == MSI {
            return Ok(at.into());
        }
        at = next;
    }
    Err(LemError::NoMsi)
}
