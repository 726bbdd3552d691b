//! Drives any vhost-user device: offers one buffer in its first queue and prints what the device writes there. A network device
//! writes the first frame that it receives, `--example own_device` random bytes.
//!
//!     cargo run --example driver -- /tmp/rng.sock

use ringroad::{
    mem::Region,
    ring::{Buffer, DriverRing, Features, Used, bits},
    vhost_user::RawConnection,
};
use std::{error::Error, path::Path, time::Duration};

/// Where the device sees the driver's memory.
const GUEST: u64 = 0x1_0000_0000;
/// Entries of the queue.
const SIZE: u32 = 16;
/// Offset and bytes of the buffer.
const BUFFER: (usize, u32) = (4096, 2048);
const PATIENCE: Duration = Duration::from_secs(5);

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("expected the socket of a device, such as: /tmp/rng.sock")?;
    let wanted = bits::VERSION_1 | bits::RING_PACKED | bits::EVENT_IDX;
    let mut device = RawConnection::connect(Path::new(&path), PATIENCE, wanted, 1)?;
    let (region, file) = Region::create(8192, GUEST, false)?;
    device.share(&region, &file)?;
    let (mut ring, addresses) = DriverRing::start(&region, 0, Features::negotiated(device.acked), SIZE)?;
    let notifier = device.ring(0, SIZE, addresses)?;
    device.enable(1)?;

    ring.add(&[], &[Buffer { address: GUEST + BUFFER.0 as u64, len: BUFFER.1 }])?;
    ring.publish();
    notifier.kick();
    let mut used = [Used::default()];
    while ring.take_used(&mut used)? == 0 {
        if !ring.enable_notification() {
            notifier.wait(PATIENCE)?;
        }
    }
    let mut bytes = vec![0; used[0].len as usize];
    region.span(BUFFER.0, bytes.len()).ok_or("the device has used more than the buffer")?.read(&mut bytes);
    println!("{} bytes: {bytes:02x?}", bytes.len());
    device.stop(1).for_each(drop);
    Ok(())
}
