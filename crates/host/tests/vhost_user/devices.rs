//! Devices that are hostile to our driver: it loses the device, and never waits for it without end.

use crate::common::{request::*, *};
use ringroad_host::vhost_user::{Attach, AttachedPort};
use ringroad_net::Features;
use std::{
    fs::File,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// CONFIG and BACKEND_REQ.
const PROTOCOL: u64 = 1 << 9 | 1 << 5;

/// How a device differs from an honest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    None,
    /// Kicks block: the counter is full, and O_NONBLOCK is cleared.
    Kick,
    /// It reports a change of its configuration space, and answers no request any more.
    Silence,
    /// It reports a change of its configuration space, and answers with half of that.
    Half,
}

/// A device that takes every message and never looks at its rings.
struct Device {
    folder: Folder,
    attack: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Device {
    /// It is honest until [`Device::begin`], but kicks block from the start.
    fn new(name: &str, attack: Attack) -> Device {
        let folder = Folder(std::env::temp_dir().join(format!("ringroad-{name}-{}", std::process::id())));
        std::fs::create_dir_all(&folder.0).unwrap();
        let listener = UnixListener::bind(folder.file("device.sock")).unwrap();
        let begun = Arc::new(AtomicBool::new(attack == Attack::Kick));
        let thread = {
            let begun = begun.clone();
            thread::spawn(move || serve(listener.accept().unwrap().0, attack, &begun))
        };
        Device { folder, attack: begun, thread: Some(thread) }
    }

    fn socket(&self) -> PathBuf {
        self.folder.file("device.sock")
    }

    fn begin(&self) {
        self.attack.store(true, Ordering::Release);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || thread::panicking(), "the device");
    }
}

fn serve(mut socket: UnixStream, attack: Attack, begun: &Arc<AtomicBool>) {
    let mut kept = Vec::new();
    loop {
        let mut header = [[0; 4]; 3];
        let Ok((12, file)) = socket.recv_with_fd(header.as_flattened_mut()) else { return };
        let [request, _, size] = header.map(u32::from_ne_bytes);
        let mut payload = vec![0; size as usize];
        socket.read_exact(&mut payload).unwrap();
        if request == SET_VRING_KICK && attack == Attack::Kick {
            let mut kick = file.as_ref().unwrap();
            kick.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
            set_blocking(kick);
        }
        if request == SET_BACKEND_REQ_FD {
            let (channel, begun) = (file.as_ref().unwrap().try_clone().unwrap(), begun.clone());
            thread::spawn(move || report(channel, &begun));
        }
        // All descriptors stay open.
        kept.extend(file);
        let answer = match request {
            GET_FEATURES => longs(&[SPLIT | Features::STATUS.bits()]),
            GET_PROTOCOL_FEATURES => longs(&[PROTOCOL]),
            GET_CONFIG if attack == Attack::Half && begun.load(Ordering::Acquire) => {
                payload[..payload.len() / 2].to_vec()
            }
            GET_CONFIG | GET_VRING_BASE => payload,
            _ => continue,
        };
        if attack == Attack::Silence && begun.load(Ordering::Acquire) {
            continue;
        }
        let answer = message(request, VERSION | 4, answer.len() as u32, &answer);
        if socket.write_all(&answer).is_err() {
            return;
        }
    }
}

/// Sends BACKEND_CONFIG_CHANGE_MSG when the attack begins.
fn report(mut channel: File, begun: &AtomicBool) {
    if within(10 * PATIENCE, || begun.load(Ordering::Acquire)) {
        let _ = channel.write_all(&words(&[2, VERSION, 0]));
    }
}

/// Runs `test` on a thread of its own, and fails if it does not end.
#[track_caller]
fn ends<T: Send + 'static>(what: &str, test: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, result) = mpsc::channel();
    thread::spawn(move || sender.send(test()));
    result.recv_timeout(4 * PATIENCE).unwrap_or_else(|_| panic!("{what} does not end"))
}

fn connect(device: &Device) -> AttachedPort {
    let attach = Attach { socket: device.socket(), ..Attach::default() };
    ends("connecting", move || AttachedPort::connect(&attach).unwrap())
}

#[test]
fn an_honest_device_is_kept() {
    let device = Device::new("device-honest", Attack::None);
    let port = connect(&device);
    device.begin();
    let is_up = || (0..50).map(|_| port.link()).next_back();
    assert_eq!((is_up(), port.is_closed()), (Some(false), false));
}

#[test]
fn a_device_that_blocks_kicks_is_given_up() {
    let device = Device::new("device-kick", Attack::Kick);
    let port = connect(&device);
    assert!(port.is_closed(), "it must not be kicked any more");
    ends("stopping", move || drop(port));
}

#[test]
fn a_device_that_answers_half_is_given_up() {
    let device = Device::new("device-half", Attack::Half);
    let port = connect(&device);
    device.begin();
    assert!(within(PATIENCE, || {
        port.link();
        port.is_closed()
    }));
    ends("stopping", move || drop(port));
}

#[test]
fn a_device_that_does_not_answer_is_disconnected() {
    let device = Device::new("device-silent", Attack::Silence);
    let port = connect(&device);
    device.begin();
    let port = ends("asking for the link", move || {
        while !port.is_closed() {
            port.link();
        }
        port
    });
    ends("stopping", move || drop(port));
    // Nor one that falls silent before it is asked to stop its queues.
    let device = Device::new("device-silent-end", Attack::Silence);
    let port = connect(&device);
    device.begin();
    ends("stopping", move || drop(port));
}
