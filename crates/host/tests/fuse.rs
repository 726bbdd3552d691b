//! Files on a FUSE mount of the frontend that does not answer. A separate test program, as other tests inspect all
//! descriptors of their process.

#[expect(dead_code, reason = "parts for other tests")]
mod common;

use common::{request::*, *};
use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read, Write},
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// A FUSE file system that answers until it is silenced. Dropped, it is unmounted, and pending requests fail.
struct Fuse {
    folder: PathBuf,
    silent: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
    /// Requests received since it was silenced.
    asked: Arc<AtomicU32>,
    thread: Option<JoinHandle<()>>,
    /// A file on it. Closing it needs an answer too, so it is closed last.
    file: Option<File>,
}

impl Fuse {
    fn mount(folder: &Path) -> Fuse {
        fs::create_dir_all(folder).unwrap();
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let (silent, ended, asked) = <(Arc<AtomicBool>, Arc<AtomicBool>, Arc<AtomicU32>)>::default();
        let status = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o", "fd=0,rootmode=40000,user_id=0,group_id=0", "ringroad-test"])
            .arg(folder)
            .stdin(Stdio::from(device.try_clone().unwrap()))
            .status()
            .unwrap();
        assert!(status.success());
        let thread = {
            let (silent, ended, asked) = (silent.clone(), ended.clone(), asked.clone());
            thread::spawn(move || Fuse::answer(&device, &silent, &ended, &asked))
        };
        Fuse { folder: folder.to_owned(), silent, ended, asked, thread: Some(thread), file: None }
    }

    fn answer(mut device: &File, silent: &AtomicBool, ended: &AtomicBool, asked: &AtomicU32) {
        const NOT_IMPLEMENTED: i32 = -38;
        let attributes = |file: bool| {
            let (ino, mode) = if file { (2u64, 0o100666u32) } else { (1, 0o40777) };
            let size = 1u64 << 20;
            [longs(&[ino, size, 8, 0, 0, 0]), words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0])].concat()
        };
        let mut request = vec![0; 1 << 18];
        // Ends on unmount.
        while let Ok(len) = device.read(&mut request) {
            if ended.load(Ordering::Relaxed) {
                return;
            }
            let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
            let (opcode, unique, node) = (word(4), &request[8..16], word(16));
            if silent.load(Ordering::Relaxed) {
                asked.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            assert!(len >= 40);
            let (error, payload) = match opcode {
                // LOOKUP, GETATTR, OPEN, FLUSH, INIT, RELEASE.
                1 => (0, [longs(&[2, 0, 0, 0]), words(&[0, 0]), attributes(true)].concat()),
                3 => (0, [longs(&[0, 0]), attributes(node == 2)].concat()),
                14 => (0, longs(&[1, 0])),
                25 => (0, vec![]),
                26 => (0, [words(&[7, 31, 0, 0, 0, 4096, 1, 0]), vec![0; 32]].concat()),
                18 => (0, vec![]),
                _ => (NOT_IMPLEMENTED, vec![]),
            };
            let len = 16 + payload.len() as u32;
            let reply = [&words(&[len, error as u32])[..], unique, &payload].concat();
            let _ = device.write(&reply);
        }
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        // With /dev/fuse closed, the kernel fails pending requests. One more request wakes the thread that reads them.
        self.ended.store(true, Ordering::Relaxed);
        let folder = self.folder.clone();
        let wakes = thread::spawn(move || fs::metadata(folder).is_ok());
        let _ = self.thread.take().map(JoinHandle::join);
        let _ = wakes.join();
        let _ = Command::new("umount").arg("-l").arg(&self.folder).stderr(Stdio::null()).status();
        let _ = fs::remove_dir(&self.folder);
    }
}

#[test]
fn files_on_a_fuse_mount_that_does_not_answer() {
    // Mounting without a helper program takes root.
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        return eprintln!("SKIPPED: mounting FUSE needs root");
    }
    for way in 0..4 {
        let rig = Rig::new(&format!("fuse{way}"));
        let mut others = rig.others();
        let mut fuse = Fuse::mount(&std::env::temp_dir().join(format!("ringroad-mnt-{}", std::process::id())));
        let path = fuse.folder.join("file");
        let mut guest = rig.guest(0, SPLIT);
        exchange(&mut guest, &mut others.0);
        // The message carries the last reference to the file: the test's own close must not block.
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let fd = [file.as_raw_fd()];
        fuse.file = Some(file);
        fuse.silent.store(true, Ordering::Relaxed);
        let region = [1 << 40, 4096, 1 << 40, 0];
        match way {
            0 => guest.peer.refused(SET_VRING_KICK, &longs(&[1]), &fd),
            1 => guest.peer.refused(SET_VRING_CALL, &longs(&[1]), &fd),
            2 => guest.peer.refused(ADD_MEM_REG, &mem_reg(region), &fd),
            // A message without descriptors: the `vhost` crate closes it, in the port's thread.
            _ => guest.peer.send(&message(SET_VRING_NUM, VERSION, 8, &words(&[1, 64])), &fd),
        }
        // A request has arrived: to close the file.
        assert!(within(PATIENCE, || fuse.asked.load(Ordering::Relaxed) > 0), "way {way}");
        others.work();
        if way < 3 {
            logged(&rig.victim(), &["ERROR", " descriptor is ", "/file, expected ", "refused"]);
            // Until it is closed, the frontend's messages wait, but the port can be stopped.
            let asked = message(GET_FEATURES, VERSION, 0, &[]);
            guest.peer.0.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            guest.peer.send(&asked, &[]);
            let silence = guest.peer.answer(GET_FEATURES).unwrap_err().kind();
            assert!(matches!(silence, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{silence:?}");
        }
        let begin = Instant::now();
        ends_soon(rig);
        assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
        drop(fuse);
    }
}
