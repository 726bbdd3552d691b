//! Resuming by the inflight region that the frontend keeps: after a disconnect without warning, and after another back end.

use crate::{
    LAYOUTS,
    common::{request::*, *},
};
use ringroad_mem::Region;
use ringroad_wire::ethernet::MacAddr;
use std::{
    fs::File,
    net::Shutdown,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt, symlink},
    },
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Entries of each ring.
const SIZE: u32 = 64;

/// Two ports; the first one cannot record its ring positions. The ports are dropped before their worker.
struct Ports {
    _servers: [Server; 2],
    folder: Folder,
    name: String,
    _worker: Worker,
}

impl Ports {
    fn new(name: &str) -> Ports {
        // On a tmpfs, so that the notes are beside the socket.
        let folder = Folder(format!("/dev/shm/ringroad-{name}-{}", std::process::id()).into());
        std::fs::create_dir_all(&folder.0).unwrap();
        symlink("/nowhere", folder.file("0.sock.rings")).unwrap();
        let worker = worker();
        let start = |index| {
            let socket = folder.file(&format!("{index}.sock"));
            start_server(config(&format!("{name}-{index}"), &socket), &worker).unwrap()
        };
        let ports = Ports { _servers: [0, 1].map(start), name: format!("{name}-0"), folder, _worker: worker };
        logged(&ports.name, &["cannot record ring positions"]);
        ports
    }

    fn connect(&self, port: usize, acked: u64) -> Peer {
        let mut peer = Peer::connect(&self.folder.file(&format!("{port}.sock")));
        peer.negotiate(acked);
        peer
    }

    fn other(&self) -> Guest {
        let mut guest = Guest::on(self.connect(1, SPLIT), SPLIT, SIZE);
        guest.mac = MacAddr::local(2);
        guest.start_all();
        guest
    }
}

/// mmap_size, mmap_offset, num_queues and queue_size, padding.
fn inflight(size: u64, queues: u16, entries: u16) -> Vec<u8> {
    [longs(&[size, 0]), [queues, entries, 0, 0].iter().flat_map(|field| field.to_ne_bytes()).collect()].concat()
}

/// Returns the region from the reply to GET_INFLIGHT_FD, and its size.
#[track_caller]
fn get_inflight(peer: &mut Peer, queues: u16) -> (File, u64) {
    get_inflight_for(peer, queues, SIZE as u16)
}

#[track_caller]
fn get_inflight_for(peer: &mut Peer, queues: u16, entries: u16) -> (File, u64) {
    peer.send(&message(GET_INFLIGHT_FD, VERSION, 24, &inflight(0, queues, entries)), &[]);
    let mut answer = [0; 36];
    let (count, file) = peer.0.recv_with_fd(&mut answer).unwrap();
    assert_eq!((count, &answer[..12]), (36, &words(&[GET_INFLIGHT_FD, VERSION | 4, 24])[..]));
    assert_eq!(answer[20..32], inflight(0, queues, entries)[8..20], "offset, queues, size");
    (file.expect("a region"), u64::from_ne_bytes(answer[12..20].try_into().unwrap()))
}

#[track_caller]
fn set_inflight(peer: &mut Peer, (file, size): &(File, u64)) {
    set_inflight_for(peer, (file, *size), SIZE as u16);
}

#[track_caller]
fn set_inflight_for(peer: &mut Peer, (file, size): (&File, u64), entries: u16) {
    peer.ok(SET_INFLIGHT_FD, &inflight(size, 2, entries), &[file.as_raw_fd()]);
}

/// Starts both queues at a base chosen by the test.
fn start(guest: &mut Guest, base: u32) {
    guest.set_memory();
    for index in 0..2 {
        guest.prepare(index, base);
        guest.peer.ok(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
    }
}

#[test]
fn a_reconnected_frontend_resumes_by_its_region() {
    for (index, acked) in LAYOUTS.into_iter().enumerate() {
        let ports = Ports::new(&format!("inflight{index}"));
        let mut other = ports.other();
        let mut guest = Guest::on(ports.connect(0, acked), acked, SIZE);
        let region = get_inflight(&mut guest.peer, 2);
        assert_eq!(region.0.metadata().unwrap().len(), region.1);
        assert!(region.0.set_len(4096).is_err() && region.0.set_len(1 << 20).is_err(), "its length must be sealed");
        set_inflight(&mut guest.peer, &region);
        guest.driver.rx[0].refill();
        let fresh = guest.fresh();
        start(&mut guest, fresh);
        for _ in 0..50 {
            exchange(&mut guest, &mut other);
        }
        // Without GET_VRING_BASE, repeatedly, with the base of an unused ring.
        for _ in 0..3 {
            guest.peer.0.shutdown(Shutdown::Both).unwrap();
            guest.peer = ports.connect(0, acked);
            set_inflight(&mut guest.peer, &region);
            start(&mut guest, fresh);
            exchange(&mut guest, &mut other);
        }
        // GET_VRING_BASE clears the region, so that a driver can start over.
        let bases = [0, 1].map(|index| guest.peer.get_base(index));
        let mut version = [0; 2];
        region.0.read_exact_at(&mut version, 8).unwrap();
        assert_eq!(version, [0; 2]);
        for index in 0..2 {
            guest.prepare(index, bases[index as usize]);
        }
        exchange(&mut guest, &mut other);
        for index in 0..2 {
            guest.peer.get_base(index);
        }
        let mut guest = guest.again();
        exchange(&mut guest, &mut other);
    }
}

/// A frontend that asks for regions for the largest queues and keeps the descriptors of all: their memory is the daemon's.
#[test]
fn regions_that_a_frontend_keeps_hold_no_memory() {
    const ENTRIES: u16 = 32768;
    for (index, acked) in LAYOUTS.into_iter().enumerate() {
        let ports = Ports::new(&format!("kept{index}"));
        let mut other = ports.other();
        let mut guest = Guest::on(ports.connect(0, acked), acked, SIZE);
        let mut kept = vec![get_inflight_for(&mut guest.peer, 2, ENTRIES)];
        guest.driver.rx[0].refill();
        let fresh = guest.fresh();
        start(&mut guest, fresh);
        // The second queue's part begins and ends within a page.
        let check = |kept: &[(File, u64)]| {
            let pages: Vec<u64> = kept.iter().map(|(file, _)| file.metadata().unwrap().blocks() / 8).collect();
            let (last, before) = pages.split_last().unwrap();
            assert!((1..=6).contains(last) && before.iter().all(|&pages| pages == 0), "pages of each: {pages:?}");
        };
        for _ in 0..4 {
            exchange(&mut guest, &mut other);
            check(&kept);
            // Queues that run move to the new region.
            kept.push(get_inflight_for(&mut guest.peer, 2, ENTRIES));
        }
        exchange(&mut guest, &mut other);
        check(&kept);
        // A reconnected frontend resumes by the last one, which has its contents until another is made.
        guest.peer.0.shutdown(Shutdown::Both).unwrap();
        guest.peer = ports.connect(0, acked);
        let &(ref file, size) = kept.last().unwrap();
        set_inflight_for(&mut guest.peer, (file, size), ENTRIES);
        start(&mut guest, fresh);
        exchange(&mut guest, &mut other);
        check(&kept);
        guest.peer.0.shutdown(Shutdown::Both).unwrap();
        guest.peer = ports.connect(0, acked);
        kept.push(get_inflight_for(&mut guest.peer, 2, ENTRIES));
        guest = guest.again();
        exchange(&mut guest, &mut other);
        check(&kept);
        // Nor do those that it makes itself, one after the other.
        for _ in 0..3 {
            let region = (memory(size as usize), size);
            guest.peer.refused(SET_INFLIGHT_FD, &inflight(region.1, 2, ENTRIES), &[region.0.as_raw_fd()]);
            logged(&ports.name, &["another inflight region while queue 0 runs"]);
            for index in 0..2 {
                guest.peer.get_base(index);
            }
            set_inflight_for(&mut guest.peer, (&region.0, region.1), ENTRIES);
            guest = guest.again();
            kept.push(region);
            exchange(&mut guest, &mut other);
            check(&kept);
        }
    }
}

/// Writes to a file, as a back end would through its own mapping.
fn put(file: &File, at: u64, bytes: &[u8]) {
    file.write_all_at(bytes, at).unwrap();
}

#[test]
fn out_of_order_buffers_left_in_flight_by_another_back_end() {
    let ports = Ports::new("foreign");
    let mut other = ports.other();
    let mut guest = Guest::on(ports.connect(0, SPLIT), SPLIT, SIZE);
    let size = 2 * 16 * (1 + u64::from(SIZE)).next_multiple_of(4);
    let region = (Region::create(size as usize, 0, false).unwrap().1, size);
    let sent: Vec<u64> = (0..4).map(|_| guest.add(other.mac).unwrap()).collect();
    // It has taken three buffers of the transmit queue, and returned the second one.
    let user = guest.driver.region.user();
    let [_, _, used, available, _] = guest.addresses(1);
    let mut heads = [[0; 2]; 3];
    guest.driver.region.span((available - user) as usize + 4, 6).unwrap().read(heads.as_flattened_mut());
    let heads = heads.map(u16::from_le_bytes);
    guest.poke(used + 4, &u32::from(heads[1]).to_le_bytes());
    guest.poke(used + 2, &1_u16.to_le_bytes());
    let queue = size / 2;
    let fields = [1, SIZE as u16, heads[1], 1];
    put(&region.0, queue + 8, fields.map(u16::to_le_bytes).as_flattened());
    for (counter, index) in [(7_u64, 0), (9, 2)] {
        let desc = queue + 16 + 16 * u64::from(heads[index]);
        put(&region.0, desc, &[1]);
        put(&region.0, desc + 8, &counter.to_le_bytes());
    }
    set_inflight(&mut guest.peer, &region);
    guest.driver.rx[0].refill();
    // The receive queue is unused, and the frontend's base is that of an unused ring.
    start(&mut guest, 0);
    logged(&ports.name, &["queue 1", "inflight region", "2 buffers in flight are processed again"]);
    let mut came = Vec::new();
    within(PATIENCE, || {
        came.extend(other.received(guest.mac));
        came.len() == 3
    });
    assert_eq!(came, [sent[0], sent[2], sent[3]], "each once, in the order in which they were sent");
    exchange(&mut guest, &mut other);
}

#[test]
fn invalid_regions() {
    let ports = Ports::new("noregion");
    let mut other = ports.other();
    let mut guest = Guest::on(ports.connect(0, SPLIT), SPLIT, SIZE);
    // A file that could block, one that is too short, one that ends before the second queue.
    let file = File::create(ports.folder.file("file")).unwrap();
    let proc = File::open("/proc/self/status").unwrap();
    let short = memory(4096);
    guest.peer.refused(SET_INFLIGHT_FD, &inflight(4096, 2, SIZE as u16), &[proc.as_raw_fd()]);
    logged(&ports.name, &["the inflight descriptor is", "expected a memfd"]);
    guest.peer.refused(SET_INFLIGHT_FD, &inflight(4096, 2, SIZE as u16), &[file.as_raw_fd()]);
    guest.peer.refused(SET_INFLIGHT_FD, &inflight(u64::MAX, 2, 4096), &[short.as_raw_fd()]);
    guest.peer.refused(SET_INFLIGHT_FD, &inflight(4096, 257, SIZE as u16), &[short.as_raw_fd()]);
    guest.peer.refused(SET_INFLIGHT_FD, &inflight(4096, 2, 32769), &[short.as_raw_fd()]);
    logged(&ports.name, &["inflight region for 2 queues of 32769"]);
    guest.peer.ok(SET_INFLIGHT_FD, &inflight(1100, 2, SIZE as u16), &[short.as_raw_fd()]);
    guest.set_memory();
    guest.driver.rx[0].refill();
    guest.prepare(0, 0);
    guest.peer.ok(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
    guest.prepare(1, 0);
    guest.peer.refused(SET_VRING_ENABLE, &words(&[1, 1]), &[]);
    logged(&ports.name, &["queue 1", "inflight region of 1100 bytes has no room"]);
    // An unknown version.
    put(&short, 8, &[2, 0]);
    guest.peer.ok(SET_INFLIGHT_FD, &inflight(4096, 2, SIZE as u16), &[short.as_raw_fd()]);
    guest.peer.refused(SET_VRING_BASE, &words(&[0, 0]), &[]);
    logged(&ports.name, &["queue 0", "invalid inflight region: version: expected at most 1, found 2"]);
    // A valid region.
    put(&short, 0, &[0; 4096]);
    guest.peer.ok(SET_INFLIGHT_FD, &inflight(4096, 2, SIZE as u16), &[short.as_raw_fd()]);
    start(&mut guest, 0);
    exchange(&mut guest, &mut other);
    // The frontend truncates it while it is in use: only its own recovery suffers.
    short.set_len(0).unwrap();
    exchange(&mut guest, &mut other);
    // More vrings than the device has are accepted; more than a message can address are not.
    get_inflight(&mut guest.peer, 3);
    guest.peer.send(&message(GET_INFLIGHT_FD, VERSION, 24, &inflight(0, 257, SIZE as u16)), &[]);
    assert!(guest.peer.ends());
}
