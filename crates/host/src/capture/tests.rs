use super::*;
use ringroad_frame::{BURST, HEADROOM, Offload};
use ringroad_mem::{Region, Table};
use std::fs;

/// A frame as a reader of the file sees it: direction, length on the wire, bytes.
type Packet = (u32, u32, Vec<u8>);

/// Reads a file by the draft alone. Returns the interface's name, its snap length, and its frames.
fn read(bytes: &[u8]) -> (String, u32, Vec<Packet>) {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let half = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap());
    let (mut at, mut name, mut snap, mut packets, mut last) = (0, String::new(), 0, Vec::new(), 0);
    let options = |mut at: usize| {
        let mut all = Vec::new();
        loop {
            let (code, len) = (half(at), usize::from(half(at + 2)));
            if code == 0 {
                assert_eq!(len, 0);
                return (all, at + 4);
            }
            all.push((code, bytes[at + 4..at + 4 + len].to_vec()));
            at += 4 + len.next_multiple_of(4);
        }
    };
    while at < bytes.len() {
        let len = word(at + 4) as usize;
        assert!(len.is_multiple_of(4) && word(at + len - 4) as usize == len);
        match word(at) {
            0x0a0d_0d0a => {
                assert_eq!((at, len, word(8), half(12), half(14)), (0, 28, 0x1a2b_3c4d, 1, 0));
                assert_eq!(bytes[16..24], [0xff; 8], "a section of unknown length");
            }
            1 => {
                assert_eq!((half(at + 8), half(at + 10)), (1, 0), "Ethernet");
                snap = word(at + 12);
                let (options, end) = options(at + 16);
                assert_eq!(end, at + len - 4);
                name = String::from_utf8(options[0].1.clone()).unwrap();
                assert_eq!((options[0].0, &options[1..]), (2, &[(9, vec![9])][..]), "if_name, if_tsresol");
            }
            6 => {
                assert_eq!(word(at + 8), 0, "the only interface");
                let time = u64::from(word(at + 12)) << 32 | u64::from(word(at + 16));
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
                assert!(time >= last && time <= now && now - time < 60_000_000_000);
                last = time;
                let kept = word(at + 20) as usize;
                let data = at + 28;
                let (options, end) = options(data + kept.next_multiple_of(4));
                assert_eq!((end, options.len(), options[0].0), (at + len - 4, 1, 2), "epb_flags");
                let flags = u32::from_le_bytes(options[0].1.clone().try_into().unwrap());
                packets.push((flags, word(at + 24), bytes[data..data + kept].to_vec()));
            }
            other => panic!("block {other:x}"),
        }
        at += len;
    }
    assert_eq!(at, bytes.len());
    (name, snap, packets)
}

fn burst(lens: &[usize]) -> (Burst, Vec<Vec<u8>>) {
    let region = Region::private(BURST << 16, 0).unwrap();
    let frames: Vec<Vec<u8>> = lens.iter().map(|&len| (0..len).map(|at| (at * 7 + len) as u8).collect()).collect();
    for (index, frame) in frames.iter().enumerate() {
        region.span((index << 16) + HEADROOM, frame.len()).unwrap().write(frame);
    }
    let memory = Arc::new(Table::default().with(region).unwrap());
    let mut burst = Burst::default();
    burst.start_in(&memory);
    for (index, frame) in frames.iter().enumerate() {
        burst.push_at((index << 16) as u64, HEADROOM + frame.len(), Offload::NONE).unwrap();
    }
    (burst, frames)
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("ringroad-capture-{name}-{}", std::process::id()))
}

#[test]
fn what_was_added_can_be_read() {
    let file = path("read");
    let (burst, frames) = burst(&[14, 15, 60, 61, 1514, 65000]);
    for (snap, name) in [(1 << 18, "vm1"), (60, "a"), (14, "port-of-8")] {
        let config = CaptureConfig { file: file.clone(), snap, ..CaptureConfig::default() };
        let capture = Capture::start(name, &config).unwrap();
        assert_eq!(capture.add(Direction::From, &burst, &[0, 1, 2, 3, 4, 5]), 0);
        // Written by now, so that it is no matter of one queue.
        thread::sleep(GATHER);
        assert_eq!(capture.add(Direction::To, &burst, &[1, 5]), 0);
        drop(capture);
        let kept = |(flags, index): (u32, usize)| {
            let frame: &Vec<u8> = &frames[index];
            (flags, frame.len() as u32, frame[..frame.len().min(snap as usize)].to_vec())
        };
        let expected = (0..6).map(|index| (1, index)).chain([(2, 1), (2, 5)]).map(kept);
        assert_eq!(read(&fs::read(&file).unwrap()), (name.to_owned(), snap, expected.collect()));
    }
    fs::remove_file(file).unwrap();
}

#[test]
fn the_file_is_no_larger_than_its_limit() {
    let file = path("size");
    let (burst, _) = burst(&[1000; 64]);
    let all: Vec<u8> = (0..64).collect();
    let config = CaptureConfig { file: file.clone(), size: 20_000, ..CaptureConfig::default() };
    let capture = Capture::start("vm1", &config).unwrap();
    let missed = capture.add(Direction::From, &burst, &all);
    assert_eq!(capture.add(Direction::From, &burst, &all), 64, "it does not go on");
    drop(capture);
    let bytes = fs::read(&file).unwrap();
    assert!((18_000..=20_000).contains(&bytes.len()), "{}", bytes.len());
    assert_eq!(read(&bytes).2.len() + missed, 64);
    fs::remove_file(file).unwrap();
}

#[test]
fn a_full_queue_does_not_wait() {
    let file = path("queue");
    let (burst, _) = burst(&[65_000; 64]);
    let all: Vec<u8> = (0..64).collect();
    let capture = Capture::start("vm1", &CaptureConfig { file: file.clone(), ..CaptureConfig::default() }).unwrap();
    let held = capture.shared.queue.lock();
    assert_eq!(capture.add(Direction::From, &burst, &all), 64, "its lock is taken");
    drop(held);
    let missed: usize = (0..4).map(|_| capture.add(Direction::From, &burst, &all)).sum();
    assert!(missed > 0, "16 MiB at once");
    drop(capture);
    assert_eq!(read(&fs::read(&file).unwrap()).2.len() + missed, 256);
    fs::remove_file(file).unwrap();
}

#[test]
fn files_that_are_none() {
    for file in ["/dev/null", "/tmp", "/nonexistent/x"] {
        let config = CaptureConfig { file: file.into(), ..CaptureConfig::default() };
        assert!(Capture::start("vm1", &config).is_err() && make_capture(Path::new(file)).is_err(), "{file}");
    }
    let config = CaptureConfig { file: "/dev/full".into(), ..CaptureConfig::default() };
    assert!(Capture::start("vm1", &config).is_err());
}
