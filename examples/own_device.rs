//! A vhost-user device of one's own on ringroad's rings: virtio-rng (virtio 1.3, 5.4), whose one queue takes buffers and
//! returns them filled with random bytes.
//!
//!     cargo run --example own_device -- /tmp/rng.sock
//! QEMU: -chardev socket,id=rng,path=/tmp/rng.sock -device vhost-user-rng-pci,chardev=rng. Or: --example driver.

use ringroad::{
    ring::{Chains, bits},
    vhost_user::{QueueThread, Ring, Socket, SocketConfig, VhostDevice, Vring},
};
use std::{error::Error, fs::File, io::Read, sync::Arc, sync::Mutex, thread};

#[derive(Clone, Default)]
struct Rng {
    vrings: [Vring; 1],
    queue: Arc<Mutex<Option<QueueThread>>>,
}

impl VhostDevice for Rng {
    fn name(&self) -> &str {
        "rng"
    }

    fn offer(&self) -> u64 {
        bits::VERSION_1 | bits::RING_PACKED | bits::EVENT_IDX | bits::INDIRECT_DESC
    }

    fn vrings(&self) -> &[Vring] {
        &self.vrings
    }

    fn start(&self, index: usize, ring: Ring) -> Result<u32, String> {
        let mut random = File::open("/dev/urandom").map_err(|error| error.to_string())?;
        let fill = move |chains: &mut Chains| {
            for index in 0..chains.list().len() {
                let (chain, mut bytes) = (chains.list()[index], [0; 256]);
                let filled = random.read(&mut bytes).unwrap_or(0);
                // A driver may ask for less.
                let first = chains.writable(&chain).first().map_or(0, |span| span.write(&bytes[..filled]));
                chains.list_mut()[index].written = first as u32;
            }
        };
        let (queue, base) = QueueThread::start("rng", index, ring, &self.vrings[index], fill)?;
        *self.queue.lock().unwrap() = Some(queue);
        Ok(base)
    }

    fn stop(&self, _: usize) -> u32 {
        self.queue.lock().unwrap().take().map_or(0, QueueThread::stop)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("expected a socket, such as: /tmp/rng.sock")?;
    let _socket = Socket::serve(SocketConfig::new("rng", path.as_ref()), Rng::default())?;
    println!("ready");
    loop {
        thread::park();
    }
}
