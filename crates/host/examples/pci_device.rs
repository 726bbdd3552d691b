//! A PCI device of one's own over vfio-user: one BAR with a register that counts its reads, and one that raises the interrupt pin.
//!
//!     cargo run -p ringroad-host --example pci_device -- /tmp/pci.sock
//! QEMU: -device '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"/tmp/pci.sock"}}', with memory from memory-backend-memfd.

use ringroad_host::vfio_user::{CONFIG_REGION, Interrupts, PciRegion, Server, ServerConfig, VfioDevice};
use ringroad_mem::Table;
use std::{
    error::Error,
    sync::{Arc, Mutex},
    thread,
};

/// Registers of BAR 0: reads so far; level of the interrupt pin.
const READS: u64 = 0;
const PIN: u64 = 4;

#[derive(Clone)]
struct Counter {
    interrupts: Interrupts,
    state: Arc<Mutex<State>>,
}

struct State {
    config: [u8; 256],
    reads: u32,
}

impl VfioDevice for Counter {
    fn name(&self) -> &str {
        "counter"
    }

    fn region(&self, index: u32) -> PciRegion {
        match index {
            0 => PciRegion::new(4096),
            CONFIG_REGION => PciRegion::new(256),
            _ => PciRegion::default(),
        }
    }

    fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        let mut state = self.state.lock().unwrap();
        let at = offset as usize;
        if region == CONFIG_REGION {
            data.copy_from_slice(&state.config[at..at + data.len()]);
        } else if offset == READS && data.len() == 4 {
            state.reads += 1;
            data.copy_from_slice(&state.reads.to_le_bytes());
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        let mut state = self.state.lock().unwrap();
        if region == CONFIG_REGION {
            // The command register and the interrupt line. The VMM has the BARs; an address for a ROM would be one for a ROM.
            let at = offset as usize;
            if matches!(at, 4 | 0x3c) {
                state.config[at..at + data.len()].copy_from_slice(data);
            }
        } else if offset == PIN {
            self.interrupts.set_line(data.first().is_some_and(|&level| level != 0));
        }
    }

    fn set_memory(&self, memory: Arc<Table>) {
        println!("{} regions of memory to write, {} to read", memory.regions().len(), memory.all().count());
    }

    fn count_fault(&self) {
        println!("a fault of the client");
    }

    fn reset(&self) {
        self.state.lock().unwrap().reads = 0;
        self.interrupts.set_line(false);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("expected a socket, such as: /tmp/pci.sock")?;
    let mut config = [0; 256];
    // Vendor, device, class (none of those defined), interrupt pin A.
    config[..4].copy_from_slice(&[0x34, 0x12, 0xc0, 0x10]);
    config[0xb] = 0xff;
    config[0x3d] = 1;
    let state = Arc::new(Mutex::new(State { config, reads: 0 }));
    let counter = Counter { interrupts: Interrupts::new(true, 0, 0), state };
    let _server = Server::start(ServerConfig::new("counter", path.as_ref()), counter)?;
    println!("ready");
    loop {
        thread::park();
    }
}
