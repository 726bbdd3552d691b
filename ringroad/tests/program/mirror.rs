//! Frames of a port that are captured in a file, and copied to another port.

use crate::testing::*;
use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

/// Of each packet of a capture: inbound (1) or outbound (2), and its length.
fn packets(file: &Path) -> Vec<(u32, u32)> {
    let bytes = fs::read(file).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let (mut at, mut packets) = (0, Vec::new());
    while at < bytes.len() {
        let len = word(at + 4) as usize;
        if word(at) == 6 {
            let (kept, sent) = (word(at + 20), word(at + 24));
            assert_eq!(kept, sent);
            packets.push((word(at + 28 + kept.next_multiple_of(4) as usize + 4), sent));
        }
        at += len;
    }
    packets
}

/// What tcpdump reads, where it is installed: an independent reader.
fn tcpdump(file: &Path) -> Option<usize> {
    let read = Command::new("tcpdump").args(["-nr", text(file)]).output().ok()?;
    assert!(read.status.success(), "{read:?}");
    Some(String::from_utf8_lossy(&read.stdout).lines().count())
}

#[test]
fn frames_are_mirrored_to_a_file() {
    let folder = Folder::new("mirror");
    let file = folder.file("left.pcapng");
    let key = format!("mirror = {{ file = {file:?} }}");
    let config = folder.config(&[("left", &key), ("right", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let (mut left, mut right) = (Guest::plain(&folder.file("left.sock")), Guest::plain(&folder.file("right.sock")));
    exchange(&mut left, &mut right);
    // Another setting changes: the capture goes on.
    folder.config(&[("left", &key), ("right", "isolated = true")]);
    serve.reload();
    exchange(&mut left, &mut right);
    folder.config(&[("left", ""), ("right", "")]);
    let said = serve.reload();
    assert!(said.contains("port left: key `port.mirror`: in place"), "{said}");
    let (from, to): (Vec<_>, Vec<_>) = packets(&file).into_iter().partition(|(way, _)| *way == 1);
    assert_eq!((from.len(), to.len()), (8, 8));
    assert_eq!(from.iter().map(|(_, len)| len).sum::<u32>(), 500, "four frames of 61 to 64 bytes, twice");
    assert!(to.iter().all(|&frame| frame == (2, 1514)));
    assert_eq!(tcpdump(&file).unwrap_or(16), 16);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    // It is complete: nothing is added any more.
    exchange(&mut left, &mut right);
    assert_eq!(packets(&file).len(), 16);
    // A confined process begins anew in the same file, but not in another one.
    folder.config(&[("left", &key), ("right", "")]);
    serve.reload();
    exchange(&mut left, &mut right);
    let other = folder.file("other.pcapng");
    folder.config(&[("left", &key.replace("left", "other")), ("right", "")]);
    let said = serve.reload();
    let confined = serve.err().contains("Landlock ") && !serve.err().contains("Landlock: ");
    assert_eq!(
        confined,
        said.contains("does not allow writing") && said.contains("port left is left unchanged"),
        "{said}"
    );
    assert_eq!(confined, !other.exists());
    serve.stop("TERM");
    assert_eq!(packets(&file).len(), 8);
}

#[test]
fn frames_are_mirrored_to_a_port() {
    let folder = Folder::new("mirror-port");
    let config = folder.config(&[("left", "mirror = \"watch\""), ("right", ""), ("watch", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let [mut left, mut right, mut watch] =
        ["left", "right", "watch"].map(|name| Guest::plain(&folder.file(&format!("{name}.sock"))));
    left.send(1, 64);
    right.receives(1, 64);
    watch.receives(1, 64);
    right.send(2, 64);
    left.receives(2, 64);
    watch.receives(2, 64);
    // It cannot take part.
    watch.send(3, 64);
    left.send(4, 64);
    right.receives(4, 64);
    folder.config(&[("left", ""), ("right", ""), ("watch", "")]);
    serve.reload();
    watch.send(5, 64);
    right.receives(5, 64);
    serve.stop("TERM");
}
