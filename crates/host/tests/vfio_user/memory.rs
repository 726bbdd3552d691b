//! DMA_MAP and DMA_UNMAP: what the device can access, and what is refused.

use crate::rig::*;
use ringroad_host::vfio_user::Limits;
use ringroad_mem::{Region, SLOTS};
use std::{
    fs::File,
    os::{fd::AsRawFd, unix::net::UnixStream},
};
use vmm_sys_util::tempfile::TempFile;

const READ: u32 = 1;
const WRITE: u32 = 2;
const BOTH: u32 = READ | WRITE;

fn number(region: &Region, at: usize) -> u64 {
    u64::from_ne_bytes(region.span(at, 8).unwrap().array(0).unwrap())
}

#[test]
fn the_device_accesses_what_is_mapped() {
    let rig = Rig::new("maps");
    let mut peer = rig.client(0);
    let (region, file) = Region::create(0x4000, 0, false).unwrap();
    let id = identity(&file);
    let own = held(id);
    region.span(0x2010, 8).unwrap().write(&41u64.to_ne_bytes());
    assert_eq!(peer.dma(0x10_0010), READ_FAULT);
    assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0x2000, 0x10_0000, 0x1000), &[file.as_raw_fd()]), Ok(vec![]));
    assert_eq!(held(id), (own.0 + 1, own.1), "one mapping more; the descriptor is closed");
    assert_eq!((peer.dma(0x10_0010), number(&region, 0x2018)), (DONE, 42));
    assert_eq!(peer.dma(0x10_0ff8), WRITE_FAULT);
    assert_eq!(peer.dma(0x10_1000), READ_FAULT);
    // The memory is unmapped when the reply arrives.
    let unmap = dma_unmap(0, 0x10_0000, 0x1000);
    assert_eq!(peer.ask(DMA_UNMAP, &unmap, &[]), Ok(unmap.clone()));
    assert_eq!(held(id), own);
    assert_eq!(peer.dma(0x10_0010), READ_FAULT);
    assert_eq!(peer.ask(DMA_UNMAP, &unmap, &[]), Err(ENOENT));
    // As it is when the client is gone.
    assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0, 0x4000), &[file.as_raw_fd()]), Ok(vec![]));
    drop(peer);
    rig.disconnected(1);
    assert_eq!(held(id), own);
}

#[test]
fn read_only_memory_is_not_written() {
    let rig = Rig::new("readonly");
    let mut peer = rig.client(0);
    let (region, file) = Region::create(0x2000, 0, false).unwrap();
    region.span(0, 8).unwrap().write(&41u64.to_ne_bytes());
    region.span(0xff8, 8).unwrap().write(&9u64.to_ne_bytes());
    // Open for reading only, as it may be.
    let reader = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    assert_eq!(peer.ask(DMA_MAP, &dma_map(READ, 0, 0, 0x1000), &[reader.as_raw_fd()]), Ok(vec![]));
    assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0x1000, 0x1000, 0x1000), &[file.as_raw_fd()]), Ok(vec![]));
    assert_eq!((peer.dma(0), number(&region, 8)), (WRITE_FAULT, 0));
    assert_eq!((peer.dma(0xff8), number(&region, 0x1000)), (DONE, 10), "from one map to the next");
    region.span(0xff8, 8).unwrap().write(&77u64.to_ne_bytes());
    assert_eq!((peer.dma(0xff8), number(&region, 0x1000)), (DONE, 78), "what the client has written since");
    assert!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0x2000, 0x1000), &[reader.as_raw_fd()]).is_err());
    assert!(peer.ask(DMA_UNMAP, &dma_unmap(0, 0, 0x1000), &[]).is_ok());
    assert_eq!(peer.dma(0xff8), READ_FAULT);
}

#[test]
fn memory_without_a_file_is_known_but_not_accessible() {
    let rig = Rig::new("unbacked");
    let mut peer = rig.client(0);
    assert_eq!(peer.ask(DMA_MAP, &dma_map(READ, 0, 0x1000, 0x1000), &[]), Ok(vec![]));
    assert_eq!(peer.dma(0x1000), READ_FAULT);
    let file = memory(0x1000);
    let fd = [file.as_raw_fd()];
    assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0x1000, 0x1000), &fd), Err(EEXIST));
    assert_eq!(peer.ask(DMA_UNMAP, &dma_unmap(0, 0x1000, 0x2000), &[]), Err(ENOENT));
    assert!(peer.ask(DMA_UNMAP, &dma_unmap(0, 0x1000, 0x1000), &[]).is_ok());
    assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0x1000, 0x1000), &fd), Ok(vec![]));
    assert_eq!(peer.dma(0x1000), DONE);
}

#[test]
fn all_at_once() {
    let rig = Rig::new("all");
    let mut peer = rig.client(0);
    let file = memory(0x3000);
    let id = identity(&file);
    let own = held(id);
    let fd = [file.as_raw_fd()];
    for round in 0..3 {
        peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0x10_0000, 0x1000), &fd).unwrap();
        peer.ask(DMA_MAP, &dma_map(READ, 0x1000, 0x20_0000, 0x1000), &fd).unwrap();
        peer.ask(DMA_MAP, &dma_map(READ, 0, 0x30_0000, 0x1000), &[]).unwrap();
        assert_eq!(held(id).0, own.0 + 2, "{round}");
        assert_eq!(peer.ask(DMA_UNMAP, &dma_unmap(2, 0x10_0000, 0x1000), &[]), Err(EINVAL));
        assert_eq!(peer.ask(DMA_UNMAP, &dma_unmap(1, 0x10_0000, 0x1000), &[]), Err(ENOTSUP), "no dirty bitmap");
        assert!(peer.ask(DMA_UNMAP, &dma_unmap(2, 0, 0), &[]).is_ok());
        assert_eq!(held(id), own);
    }
    assert!(peer.ask(DMA_UNMAP, &dma_unmap(2, 0, 0), &[]).is_ok(), "of none");
}

#[test]
fn maps_that_cannot_be() {
    let rig = Rig::new("badmaps");
    let mut peer = rig.client(0);
    let file = memory(0x4000);
    let fd = [file.as_raw_fd()];
    assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0x10_0000, 0x2000), &fd), Ok(vec![]));
    let cases = [
        // Flags, offset, address, size.
        (0, 0, 0, 0x1000, EINVAL),
        (4, 0, 0, 0x1000, EINVAL),
        (u32::MAX, 0, 0, 0x1000, EINVAL),
        (BOTH, 0, 0, 0, EINVAL),
        (BOTH, 0, 0x800, 0x1000, EINVAL),
        (BOTH, 0, 0, 0x1800, EINVAL),
        (BOTH, 0x200, 0, 0x1000, EINVAL),
        (BOTH, 0x4000, 0, 0x1000, EINVAL),
        (BOTH, 0x3000, 0, 0x2000, EINVAL),
        (BOTH, 0, u64::MAX - 0xfff, 0x1000, EINVAL),
        (BOTH, 0, 0x1000, u64::MAX - 0xfff, EINVAL),
        (BOTH, u64::MAX - 0xfff, 0, 0x1000, EINVAL),
        (BOTH, 1 << 63, 0, 0x1000, EINVAL),
        (BOTH, 0, 0x10_0000, 0x2000, EEXIST),
        (BOTH, 0, 0x10_1000, 0x1000, EEXIST),
        (READ, 0, 0xf_f000, 0x2000, EEXIST),
        (BOTH, 0, 1 << 41, 1 << 40, ENOMEM),
    ];
    for (flags, offset, address, size, errno) in cases {
        let map = dma_map(flags, offset, address, size);
        assert_eq!(peer.ask(DMA_MAP, &map, &fd), Err(errno), "{flags:#x} {offset:#x} {address:#x} {size:#x}");
    }
    for (flags, address, size) in [(BOTH, 0x10_0000, 0x2000), (READ, 0xf_f000, 0x1000), (BOTH, 0, u64::MAX - 0xfff)] {
        let result = peer.ask(DMA_MAP, &dma_map(flags, 0, address, size), &[]);
        assert_eq!(result, if address == 0xf_f000 { Ok(vec![]) } else { Err(EEXIST) });
    }
    for len in 0..32 {
        assert_eq!(peer.ask(DMA_MAP, &vec![0; len], &fd), Err(EINVAL));
    }
    for (address, size) in [(0, 0), (0x10_0000, 0x1000), (0x10_1000, 0x1000), (u64::MAX, u64::MAX)] {
        assert_eq!(peer.ask(DMA_UNMAP, &dma_unmap(0, address, size), &[]), Err(ENOENT));
    }
    assert_eq!(peer.ask(DMA_UNMAP, &[0; 23], &[]), Err(EINVAL));
    assert_eq!(peer.dma(0x10_0000), DONE, "the first one");
    logged(&rig.victim(), &["ERROR", "DMA_MAP (2)", "whole pages of 4096 bytes"]);
}

#[test]
fn descriptors_that_are_no_memory() {
    let rig = Rig::new("nomemory");
    let mut peer = rig.client(0);
    let (pipe, _end) = std::io::pipe().unwrap();
    let (socket, _end) = UnixStream::pair().unwrap();
    let on_disk = TempFile::new_with_prefix("/var/tmp/ringroad").unwrap();
    on_disk.as_file().set_len(0x1000).unwrap();
    let event = eventfd();
    let zero = File::open("/dev/zero").unwrap();
    for fd in [pipe.as_raw_fd(), socket.as_raw_fd(), event.as_raw_fd(), zero.as_raw_fd()] {
        assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0, 0x1000), &[fd]), Err(EINVAL));
    }
    if fs_type(on_disk.as_file()) != libc::TMPFS_MAGIC {
        assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0, 0x1000), &[on_disk.as_file().as_raw_fd()]), Err(EINVAL));
    }
    logged(&rig.victim(), &["ERROR", "the memory descriptor is pipe:[", "expected a memfd, or a file on tmpfs"]);
    let file = memory(0x1000);
    let both = [file.as_raw_fd(), file.as_raw_fd()];
    assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0, 0x1000), &both), Err(EINVAL));
    assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0, 0x1000), &both[..1]), Ok(vec![]));
}

fn fs_type(file: &File) -> libc::c_long {
    rustix::fs::fstatfs(file).unwrap().f_type
}

#[test]
fn limits() {
    let rig = Rig::with("limits", Limits { mapped: 0x3000, ..GENEROUS });
    let mut peer = rig.client(0);
    let file = memory(0x4000);
    let fd = [file.as_raw_fd()];
    assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0, 0x4000), &fd), Err(ENOMEM));
    assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 0, 0x2000), &fd), Ok(vec![]));
    assert_eq!(peer.ask(DMA_MAP, &dma_map(READ, 0, 0x1_0000, 0x2000), &fd), Err(ENOMEM));
    assert_eq!(peer.ask(DMA_MAP, &dma_map(READ, 0, 0x1_0000, 0x1000), &fd), Ok(vec![]));
    // Not of address space of this process.
    assert_eq!(peer.ask(DMA_MAP, &dma_map(READ, 0, 0x10_0000, 1 << 50), &[]), Ok(vec![]));
    logged(&rig.victim(), &["ERROR", "`limits.mapped`"]);
    assert!(peer.ask(DMA_UNMAP, &dma_unmap(2, 0, 0), &[]).is_ok());
    for slot in 0..SLOTS as u64 {
        let fds = if slot.is_multiple_of(200) { &fd[..] } else { &[] };
        assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, slot << 20, 0x1000), fds), Ok(vec![]));
    }
    for fds in [&fd[..], &[]] {
        assert_eq!(peer.ask(DMA_MAP, &dma_map(BOTH, 0, 1 << 40, 0x1000), fds), Err(ENOSPC));
    }
    peer.works();
}

#[test]
fn a_file_that_shrinks() {
    let rig = Rig::new("shrinks");
    let mut peer = rig.client(0);
    let file = memory(0x2000);
    for flags in [BOTH, READ] {
        assert_eq!(peer.ask(DMA_MAP, &dma_map(flags, 0, 0x1000, 0x2000), &[file.as_raw_fd()]), Ok(vec![]));
        file.set_len(0).unwrap();
        assert_eq!(peer.dma(0x1000), if flags == BOTH { DONE } else { WRITE_FAULT });
        assert!(rig.seen().memory.lock().unwrap().is_lost());
        assert!(peer.ask(DMA_UNMAP, &dma_unmap(0, 0x1000, 0x2000), &[]).is_ok());
        file.set_len(0x2000).unwrap();
    }
    rig.client(1).works();
}
