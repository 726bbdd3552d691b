//! The client of this crate: against its server, and against servers that do not keep to the protocol.

use crate::rig::*;
use ringroad_host::vfio_user::{Accesses, CONFIG_REGION, Client, ClientError, DeviceInfo, InterruptKind, PciRegion};
use ringroad_mem::Region;
use std::{
    io::{Read, Write},
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::net::UnixListener,
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::EventFd;

fn connect(path: &Path) -> Client {
    Client::connect(path, PATIENCE).unwrap()
}

fn get(client: &mut Client, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    client.read(0, offset, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

/// Borrows a descriptor. The standard library does so from a file.
fn with_fd<T>(eventfd: &EventFd, then: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
    use std::os::fd::AsFd;
    let file = crate::common::file_of(eventfd);
    assert!(file.as_raw_fd() >= 0);
    then(file.as_fd())
}

#[test]
fn drives_a_device() {
    let rig = Rig::new("driven");
    let mut client = connect(&rig.socket(0));
    assert_eq!(client.info().unwrap(), DeviceInfo { regions: 9, interrupts: 3, reset: true });
    assert_eq!(client.region(CONFIG_REGION).unwrap(), PciRegion::new(256));
    assert_eq!(client.region(1).unwrap(), PciRegion { size: 64, read: true, write: false });
    assert_eq!([InterruptKind::Intx, InterruptKind::Msi].map(|kind| client.interrupts(kind).unwrap()), [1, 4]);
    let mut config = [0; 256];
    client.read(CONFIG_REGION, 0, &mut config).unwrap();
    assert!(config.iter().zip(0..=255).all(|(&byte, at)| byte == at));
    client.write(0, 0x100, &7u64.to_ne_bytes()).unwrap();
    client.post(0, 0x108, &8u64.to_ne_bytes()).unwrap();
    client.post_all(&[(0, 0x110, &[9; 4]), (0, 0x114, &[1])]).unwrap();
    client.post_all(&[(0, 0x118, &[5; 16])]).unwrap();
    let read = [0x100, 0x108, 0x110, 0x118, 0x120].map(|offset| get(&mut client, offset));
    assert_eq!(read, [7, 8, 0x1_0909_0909, 0x0505_0505_0505_0505, 0x0505_0505_0505_0505]);
    assert_eq!(client.accesses(), Accesses { reads: 6, writes: 1, posted: 4 });
    client.reset().unwrap();
    assert_eq!(get(&mut client, 0x100), 0);
    // What the device refuses leaves the connection as it is.
    assert!(matches!(client.region(9), Err(ClientError::Refused { command: "DEVICE_GET_REGION_INFO", .. })));
    assert!(client.read(0, 4096, &mut [0]).is_err() && client.read(0, 0, &mut [0; 70_000]).is_err());
    assert_eq!(get(&mut client, 0x100), 0);
}

#[test]
fn shares_memory_and_is_interrupted() {
    let rig = Rig::new("shared");
    let mut client = connect(&rig.socket(0));
    let (region, file) = Region::create(0x2000, 0x10_0000, false).unwrap();
    let (constant, constant_file) = Region::create(0x1000, 0x20_0000, false).unwrap();
    client.map(&region, &file, true).unwrap();
    client.map(&constant, &constant_file, false).unwrap();
    assert!(client.map(&region, &file, true).is_err());
    region.span(0x1000, 8).unwrap().write(&4u64.to_ne_bytes());
    let dma = |client: &mut Client, address: u64| {
        client.post(0, DMA, &address.to_ne_bytes()).unwrap();
        get(client, STATUS)
    };
    assert_eq!(dma(&mut client, 0x10_1000), DONE);
    assert_eq!(region.span(0x1008, 8).unwrap().array(0), Some(5u64.to_ne_bytes()));
    assert_eq!(dma(&mut client, 0x20_0000), WRITE_FAULT);
    client.unmap(&region).unwrap();
    assert_eq!(dma(&mut client, 0x10_1000), READ_FAULT);
    client.unmap_all().unwrap();
    assert_eq!(dma(&mut client, 0x20_0000), READ_FAULT);

    let (pin, messages) = (eventfd(), eventfd());
    with_fd(&pin, |fd| client.set_interrupts(InterruptKind::Intx, 0, &[fd])).unwrap();
    with_fd(&messages, |fd| client.set_interrupts(InterruptKind::Msi, 1, &[fd; 3])).unwrap();
    assert!(with_fd(&messages, |fd| client.set_interrupts(InterruptKind::Msi, 0, &[fd; 9])).is_err());
    client.write(0, LINE, &1u64.to_ne_bytes()).unwrap();
    client.unmask().unwrap();
    (0..4u64).for_each(|vector| client.write(0, MSI, &vector.to_ne_bytes()).unwrap());
    assert_eq!([pin.read().unwrap(), messages.read().unwrap()], [2, 3]);
    client.disable_interrupts(InterruptKind::Msi).unwrap();
    client.write(0, MSI, &1u64.to_ne_bytes()).unwrap();
    assert!(messages.read().is_err());
}

#[test]
fn nobody_there() {
    let folder = Folder::new("nobody");
    let (path, start) = (folder.file("none.sock"), Instant::now());
    assert!(matches!(Client::connect(&path, Duration::from_millis(50)), Err(ClientError::Connect { .. })));
    assert!(start.elapsed() < Duration::from_secs(2));
    // A server that appears later is found; one that says nothing is not waited for.
    let later = path.clone();
    let server = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        UnixListener::bind(later).unwrap().accept().unwrap().0
    });
    let start = Instant::now();
    let result = Client::connect(&path, Duration::from_millis(300));
    assert!(matches!(&result, Err(ClientError::Over(why)) if why.contains("in time")), "{result:?}");
    assert!(start.elapsed() < Duration::from_secs(2));
    drop(server.join().unwrap());
}

#[test]
fn an_answer_that_never_comes_to_its_end() {
    let folder = Folder::new("slow");
    let path = folder.file("slow.sock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = listener.accept().unwrap().0;
            let _ = stream.read(&mut [0; 4096]);
            for byte in message(1, VERSION, 1, &[0; 200]) {
                thread::sleep(Duration::from_millis(50));
                if stream.write_all(&[byte]).is_err() {
                    break;
                }
            }
        });
        let start = Instant::now();
        let result = Client::connect(&path, Duration::from_millis(300));
        assert!(matches!(&result, Err(ClientError::Over(why)) if why.contains("in time")), "{result:?}");
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    });
}

#[test]
fn servers_that_lie() {
    let folder = Folder::new("lies");
    let good = b"\0\0\x01\0{\"capabilities\":{}}\0";
    let reply = |id, command, flags, payload: &[u8]| message(id, command, flags, payload);
    let sized = |size: u32| {
        let mut bytes = reply(1, VERSION, 1, good);
        bytes[4..8].copy_from_slice(&size.to_ne_bytes());
        bytes
    };
    let lies = [
        reply(2, VERSION, 1, good),
        reply(1, DMA_MAP, 1, good),
        reply(1, VERSION, 0, good),
        reply(1, VERSION, 0x21, &[0; 100]),
        reply(1, VERSION, 1, b"\x01\0\0\0"),
        reply(1, VERSION, 1, b"\0\0\0\0{"),
        reply(1, VERSION, 1, b"\0\0"),
        reply(1, VERSION, 1, &[0; 5000]),
        [reply(1, VERSION, 1, good), vec![0]].concat(),
        sized(0),
        sized(15),
        sized(u32::MAX),
        reply(1, VERSION, 1, good)[..20].to_vec(),
        vec![],
    ];
    for (round, lie) in lies.iter().enumerate() {
        let path = folder.file(&format!("{round}.sock"));
        let listener = UnixListener::bind(&path).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut stream = listener.accept().unwrap().0;
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(lie);
            });
            let result = Client::connect(&path, PATIENCE);
            assert!(matches!(result, Err(ClientError::Over(_) | ClientError::Refused { .. })), "{round}: {result:?}");
        });
    }
    // One that is gone later.
    let rig = Rig::new("gone");
    let mut client = connect(&rig.socket(0));
    drop(rig);
    for _ in 0..3 {
        assert!(matches!(client.read(0, 0, &mut [0; 4]), Err(ClientError::Over(_))));
        assert!(matches!(client.post(0, 0, &[0; 4]), Err(ClientError::Over(_))));
    }
}
